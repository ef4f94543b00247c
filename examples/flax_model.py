"""A flax model, unchanged, under a strategy.

Its parameters become variables with `rx.make_variables`; inside the step they are handed to
the model with `rx.read_variables`. Works alike for any library whose models are functions of
a tree of parameters.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import jax
import numpy as np
import optax
from flax import linen
from sklearn.datasets import load_digits

GLOBAL_BATCH = 64
strategy = rx.MirroredStrategy()


class Convolutional(linen.Module):
    """Two convolutions and a dense layer, for images of 8 by 8 pixels."""

    @linen.compact
    def __call__(self, images: Any) -> Any:
        x = linen.relu(linen.Conv(16, (3, 3))(images))
        x = linen.avg_pool(x, (2, 2), strides=(2, 2))
        x = linen.relu(linen.Conv(32, (3, 3))(x))
        return linen.Dense(10)(x.reshape((x.shape[0], -1)))


model = Convolutional()
initial = model.init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))
with strategy.scope():
    parameters = rx.make_variables(initial)
    # Any structure of variables will do, a dict of dicts too.
    optimizer = rx.optimizers.Optimizer(optax.adam(3e-3), parameters)
    accuracy = rx.metrics.SparseCategoricalAccuracy()


def replica_step(images: Any, digits: Any) -> Any:
    def loss_fn() -> Any:
        logits = model.apply(rx.read_variables(parameters), images)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
        return losses.sum() / GLOBAL_BATCH, logits

    (loss, logits), gradients = rx.value_and_grad(loss_fn, parameters, has_aux=True)()
    optimizer.apply_gradients(gradients)
    accuracy.update_state(digits, logits)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


data = load_digits()
images, digits = (data.images / 16).astype(np.float32)[..., None], data.target.astype(np.int32)
dataset = rx.data.Dataset.from_tensor_slices((images, digits)).shuffle(len(digits), seed=0)
dataset = dataset.batch(GLOBAL_BATCH, drop_remainder=True)
distributed = strategy.experimental_distribute_dataset(dataset)
for epoch in range(4):
    accuracy.reset_state()
    for batch in distributed:
        loss = train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy.result():.3f}")
