"""A table of a million rows: only the rows that a batch looks up get a gradient.

Users and items of a made-up shop are vectors; the program learns their preferences. The table
is read through `rx.nn.embedding_lookup`, so its gradient is an `rx.IndexedSlices` and a step
costs as much as the batch is large, however large the table is.
"""

from __future__ import annotations

import time
from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax
import jax.numpy as jnp
import numpy as np
import optax

ROWS, WIDTH, GLOBAL_BATCH, STEPS = 1_000_000, 16, 1024, 300
strategy = rx.MirroredStrategy()

with strategy.scope():
    rng = np.random.default_rng(0)
    table = rx.Variable((rng.normal(size=(ROWS, WIDTH)) * 0.1).astype(np.float32), name="table")
    # Adagrad changes nothing where the gradient is zero, so touching rows only is exact.
    transformation = optax.adagrad(0.1, initial_accumulator_value=1e-8)
    optimizer = rx.optimizers.Optimizer(transformation, [table])


def replica_step(batch: Any) -> Any:
    def loss_fn() -> Any:
        users = rx.nn.embedding_lookup(table, batch["user"])
        items = rx.nn.embedding_lookup(table, batch["item"])
        scores = jnp.sum(users * items, axis=1)
        return jnp.sum(optax.losses.sigmoid_binary_cross_entropy(scores, batch["likes"]))

    loss, gradients = rx.value_and_grad(lambda: loss_fn() / GLOBAL_BATCH, [table])()
    optimizer.apply_gradients(gradients)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)


# Even users like even items: which of a thousand active ones is which has to be learnt.
users = rng.integers(0, 1000, GLOBAL_BATCH * STEPS)
items = rng.integers(0, 1000, GLOBAL_BATCH * STEPS)
likes = (users % 2 == items % 2).astype(np.float32)
clicks = {
    "user": (users * 997).astype(np.int32),
    "item": (items * 997 + 1).astype(np.int32),
    "likes": likes,
}
dataset = rx.data.Dataset.from_tensor_slices(clicks).batch(GLOBAL_BATCH)

untouched = table.value()[5]
start = 0.0
for step, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
    loss = train_step(batch)
    start = start or time.perf_counter()  # after the first step, which compiles
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss:.4f}")
jax.block_until_ready(table.value())
per_step = 1e3 * (time.perf_counter() - start) / (STEPS - 1)
print(f"{per_step:.2f} ms per step; the table has {ROWS * WIDTH * 4 / 1e6:.0f} MB on each device")
assert (table.value()[5] == untouched).all()
