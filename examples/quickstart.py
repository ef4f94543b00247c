"""A first program: fit a line with two replicas that train in sync."""

from __future__ import annotations

from typing import Any

import replicax as rx

# Lets one CPU act as two devices. On a machine with several GPUs, leave this out.
rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np

GLOBAL_BATCH = 64

# 1. A strategy: one replica on each device.
strategy = rx.MirroredStrategy()

# 2. Variables that are made in its scope have a copy on each device.
with strategy.scope():
    slope = rx.Variable(0.0, name="slope")
    offset = rx.Variable(0.0, name="offset")


# 3. What one replica does with its part of the batch.
def replica_step(x: Any, y: Any) -> Any:
    def loss_fn() -> Any:
        return jnp.sum((slope * x + offset - y) ** 2) / GLOBAL_BATCH

    loss, gradients = rx.value_and_grad(loss_fn, [slope, offset])()
    context = rx.get_replica_context()
    gradients = context.all_reduce("SUM", gradients)
    for variable, gradient in zip([slope, offset], gradients, strict=True):
        context.update(variable, lambda v, g: v.assign_sub(0.1 * g), args=(gradient,))
    return loss


# 4. All replicas, compiled into one program.
@rx.function
def train_step(x: Any, y: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)


# 5. Each replica gets its share of every batch.
rng = np.random.default_rng(0)


def share(context: Any) -> Any:
    x = rng.uniform(-1, 1, GLOBAL_BATCH // context.num_replicas_in_sync).astype(np.float32)
    return x, 3 * x + 2


for step in range(100):
    x, y = strategy.experimental_distribute_values_from_function(share)
    loss = train_step(x, y)
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss:.5f}")
print(f"y = {slope.numpy():.2f} x + {offset.numpy():.2f}, expected y = 3 x + 2")
