"""Large batches on small devices: gradients of several steps make one update.

Four micro-batches of 32 examples with `gradient_accumulation_steps=4` end in the same
parameters as batches of 128, which this program checks.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax.numpy as jnp
import numpy as np
import optax

TRUTH = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
rng = np.random.default_rng(0)
inputs = rng.normal(size=(1024, 4)).astype(np.float32)
outputs = inputs @ TRUTH


def train(batch_size: int, accumulated: int | None) -> tuple[np.ndarray, int]:
    """Returns the parameters after one epoch, and how often they were changed."""
    strategy = rx.MirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(4), name="weights")
        # Clipping sees the accumulated gradient of all replicas, as with a large batch.
        transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        optimizer = rx.optimizers.Optimizer(
            transformation, [weights], gradient_accumulation_steps=accumulated
        )

    def replica_step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            return jnp.sum((x @ weights.value() - y) ** 2) / batch_size

        loss, gradients = rx.value_and_grad(loss_fn, [weights])()
        optimizer.apply_gradients(gradients)
        return loss

    @rx.function
    def step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = rx.data.Dataset.from_tensor_slices((inputs, outputs)).batch(batch_size)
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    return weights.numpy(), int(optimizer.iterations)


small, small_updates = train(batch_size=32, accumulated=4)
large, large_updates = train(batch_size=128, accumulated=None)
print(f"{small_updates} updates from batches of 4 x 32: {small.round(4)}")
print(f"{large_updates} updates from batches of 128:    {large.round(4)}")
print(f"largest difference {np.abs(small - large).max():.1e}")
