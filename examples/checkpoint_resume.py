"""Training that can be stopped at any time: model, optimizer and position in the data are saved.

Run it with a directory; run it again with the same one, and it goes on where it stopped:

    python examples/checkpoint_resume.py out/run --stop-after 30
    python examples/checkpoint_resume.py out/run
    replicax checkpoint show out/run
"""

from __future__ import annotations

import argparse
from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np
import optax

parser = argparse.ArgumentParser(description="Fits a line, with checkpoints.")
parser.add_argument("directory")
parser.add_argument("--stop-after", type=int, help="stop after this number of steps of this run")
options = parser.parse_args()

GLOBAL_BATCH, STEPS = 16, 96
strategy = rx.MirroredStrategy()

with strategy.scope():
    model = rx.Module()
    model.slope, model.offset = rx.Variable(0.0), rx.Variable(0.0)
    optimizer = rx.optimizers.Optimizer(optax.adam(0.1), list(model.trainable_variables))


def replica_step(batch: Any) -> Any:
    def loss_fn() -> Any:
        error = model.slope * batch["x"] + model.offset - batch["y"]
        return jnp.sum(error**2) / GLOBAL_BATCH

    loss, gradients = rx.value_and_grad(loss_fn, list(model.trainable_variables))()
    optimizer.apply_gradients(gradients)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)


x = np.random.default_rng(0).uniform(-1, 1, 512).astype(np.float32)
dataset = rx.data.Dataset.from_tensor_slices({"x": x, "y": 3 * x + 2})
dataset = dataset.shuffle(len(x), seed=0).batch(GLOBAL_BATCH).repeat()
iterator = iter(strategy.experimental_distribute_dataset(dataset))

# Everything that decides how training goes on. Names here are names in the checkpoint.
checkpoint = rx.train.Checkpoint(model=model, optimizer=optimizer, iterator=iterator)
with rx.train.CheckpointManager(checkpoint, options.directory, max_to_keep=3) as manager:
    path = manager.restore_or_initialize()
    first = int(optimizer.iterations)
    print(f"resumed at step {first}" if path else "started from the beginning")
    for step in range(first, STEPS):
        loss = train_step(next(iterator))
        if (step + 1) % 10 == 0:
            # Returns once the values are copied; the files are written meanwhile.
            manager.save(checkpoint_number=step + 1, asynchronous=True)
            print(f"step {step + 1}: loss {loss:.5f}, saved")
        if options.stop_after == step + 1 - first:
            break
    iterator.close()
print(f"y = {model.slope.numpy():.3f} x + {model.offset.numpy():.3f}")
