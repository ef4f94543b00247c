"""A flax.linen model, unchanged, under a strategy.

`rx.models.from_linen` makes its collections variables: parameters, and the statistics of BatchNorm
if it has some. nnx_cnn.py shows the same for flax.nnx. For a library that is not known here,
`rx.make_variables` and `rx.read_variables` turn any tree of arrays into variables and back.
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


module = Convolutional()
initial = module.init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32))
with strategy.scope():
    model = rx.models.from_linen(module, initial)
    optimizer = rx.optimizers.Optimizer(optax.adam(3e-3), model.trainable_variables)
    accuracy = rx.metrics.SparseCategoricalAccuracy()


def replica_step(images: Any, digits: Any) -> Any:
    def loss_fn() -> Any:
        logits = model(images)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
        return losses.sum() / GLOBAL_BATCH, logits

    (loss, logits), gradients = rx.value_and_grad(
        loss_fn, model.trainable_variables, has_aux=True
    )()
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
