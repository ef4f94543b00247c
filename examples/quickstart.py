"""A first program: fit a line with two replicas that train in sync."""

from __future__ import annotations

from typing import Any

import replicax as rx

# Lets one CPU act as two devices. On a machine with several GPUs, leave this out.
rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np
import optax

GLOBAL_BATCH = 64

# 1. A strategy: one replica on each device.
strategy = rx.MirroredStrategy()

# 2. Variables that are made in its scope have a copy on each device.
with strategy.scope():
    slope = rx.Variable(0.0, name="slope")
    offset = rx.Variable(0.0, name="offset")
    optimizer = rx.optimizers.Optimizer(optax.sgd(0.1), [slope, offset])


# 3. What one replica does with its part of the batch. Gradients are summed over replicas.
def replica_step(batch: Any) -> Any:
    def loss_fn() -> Any:
        error = slope * batch["x"] + offset - batch["y"]
        return jnp.sum(error**2) / GLOBAL_BATCH

    loss, gradients = rx.value_and_grad(loss_fn, [slope, offset])()
    optimizer.apply_gradients(gradients)
    return loss


# 4. All replicas, compiled into one program.
@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)


# 5. Each replica gets its share of every batch.
x = np.random.default_rng(0).uniform(-1, 1, 2048).astype(np.float32)
dataset = rx.data.Dataset.from_tensor_slices({"x": x, "y": 3 * x + 2})
dataset = dataset.shuffle(len(x), seed=0).batch(GLOBAL_BATCH)
distributed = strategy.experimental_distribute_dataset(dataset)

for epoch in range(4):
    for batch in distributed:
        loss = train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.5f}")
print(f"y = {slope.numpy():.2f} x + {offset.numpy():.2f}, expected y = 3 x + 2")
