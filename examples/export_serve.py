"""Train under a strategy, export, and serve in a process without the code of the model.

The exported directory holds a compiled program for batches of any size, and the variables.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np
import optax

SERVER = """
import sys
import numpy as np
import replicax as rx

model = rx.saved_model.load(sys.argv[1])
for rows in (1, 3):
    answer = model.predict(np.ones((rows, 4), np.float32))
    print(f"served {rows} rows:", np.asarray(answer["score"]).round(3))
"""
strategy = rx.MirroredStrategy()


class Scorer(rx.Module):
    """A linear model with a count of the examples that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = rx.Variable(jnp.zeros(4), name="weights")
        # Each replica counts its own; together they are one number, also in the export.
        self.seen = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
            name="seen",
        )

    @rx.function(input_signature=[rx.TensorSpec((None, 4), jnp.float32)])
    def predict(self, rows: Any) -> Any:
        return {"score": rows @ self.weights.value()}


with strategy.scope():
    model = Scorer()
    optimizer = rx.optimizers.Optimizer(optax.sgd(0.1), [model.weights])


def replica_step(batch: Any) -> None:
    def loss_fn() -> Any:
        return jnp.sum((batch["x"] @ model.weights.value() - batch["y"]) ** 2) / 64

    _, gradients = rx.value_and_grad(loss_fn, [model.weights])()
    optimizer.apply_gradients(gradients)
    model.seen.assign_add(jnp.float32(batch["x"].shape[0]))


@rx.function
def train_step(batch: Any) -> None:
    strategy.run(replica_step, args=(batch,))


x = np.random.default_rng(0).normal(size=(4096, 4)).astype(np.float32)
data = {"x": x, "y": x @ np.array([1, 2, 3, 4], np.float32)}
dataset = rx.data.Dataset.from_tensor_slices(data).batch(64)
for batch in strategy.experimental_distribute_dataset(dataset):
    train_step(batch)
print("trained on", int(model.seen), "examples:", model.weights.numpy().round(3))

with tempfile.TemporaryDirectory() as directory:
    path = Path(directory) / "model"
    rx.saved_model.save(model, path)
    again = rx.saved_model.load(path)
    print("loaded:", again.weights.numpy().round(3), "after", int(again.seen), "examples")
    subprocess.run([sys.executable, "-c", SERVER, str(path)], check=True, timeout=100)
