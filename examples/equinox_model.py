"""An equinox model, unchanged, under a strategy.

An equinox module is a tree with arrays and functions in it. Its arrays become variables;
`model.apply` calls a function with a module that computes with their present values.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

GLOBAL_BATCH = 64
strategy = rx.MirroredStrategy()

with strategy.scope():
    model = rx.models.from_equinox(eqx.nn.MLP(64, 10, 64, depth=2, key=jax.random.key(0)))
    variables = model.trainable_variables
    # A schedule is part of the transformation, and its count part of the optimizer's state.
    schedule = optax.cosine_decay_schedule(5e-3, decay_steps=140)
    optimizer = rx.optimizers.Optimizer(optax.adamw(schedule, weight_decay=1e-4), variables)
    accuracy = rx.metrics.SparseCategoricalAccuracy()


def replica_step(pixels: Any, digits: Any) -> Any:
    def loss_fn() -> Any:
        logits = model.apply(lambda module: jax.vmap(module)(pixels))
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
        return losses.sum() / GLOBAL_BATCH, logits

    (loss, logits), gradients = rx.value_and_grad(loss_fn, variables, has_aux=True)()
    optimizer.apply_gradients(gradients)
    accuracy.update_state(digits, logits)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


data = load_digits()
pixels, digits = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((pixels, digits)).shuffle(len(digits), seed=0)
dataset = dataset.batch(GLOBAL_BATCH, drop_remainder=True)
distributed = strategy.experimental_distribute_dataset(dataset)
for epoch in range(5):
    accuracy.reset_state()
    for batch in distributed:
        loss = train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy.result():.3f}")
