"""A flax.nnx model with BatchNorm and dropout, under a strategy.

`rx.models.from_nnx` makes the state of the module variables. In the step, the model is called as
any nnx module is: statistics and random streams are kept on each replica. For the test, a view
of the model uses the statistics instead of updating them.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

GLOBAL_BATCH, EPOCHS = 64, 6
strategy = rx.MirroredStrategy()


class Convolutional(nnx.Module):
    """Two convolutions and a dense layer, for images of 8 by 8 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv_1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm_1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv_2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.norm_2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = nnx.relu(self.norm_1(self.conv_1(images)))
        x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm_2(self.conv_2(x)))
        return self.dense(self.dropout(x.reshape((x.shape[0], -1))))


with strategy.scope():
    model = rx.models.from_nnx(Convolutional(nnx.Rngs(0)))
    optimizer = rx.optimizers.Optimizer(optax.adam(2e-3), model.trainable_variables)
    accuracy = rx.metrics.SparseCategoricalAccuracy()
evaluated = model.view(deterministic=True, use_running_average=True)


def replica_step(images: Any, digits: Any) -> Any:
    def loss_fn() -> Any:
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(model(images), digits)
        return losses.sum() / GLOBAL_BATCH

    loss, gradients = rx.value_and_grad(loss_fn, model.trainable_variables)()
    optimizer.apply_gradients(gradients)
    return loss


@rx.function
def train_step(batch: Any) -> Any:
    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


@rx.function
def test_step(batch: Any) -> None:
    strategy.run(lambda x, y: accuracy.update_state(y, evaluated(x)), args=batch)


data = load_digits()
images, digits = (data.images / 16).astype(np.float32)[..., None], data.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(digits))
known, unseen = order[:-360], order[-360:]
training = rx.data.Dataset.from_tensor_slices((images[known], digits[known]))
training = training.shuffle(len(known), seed=0).batch(GLOBAL_BATCH, drop_remainder=True)
training = strategy.experimental_distribute_dataset(training)
testing = rx.data.Dataset.from_tensor_slices((images[unseen], digits[unseen])).batch(GLOBAL_BATCH)
testing = strategy.experimental_distribute_dataset(testing)
for epoch in range(EPOCHS):
    for batch in training:
        loss = train_step(batch)
    accuracy.reset_state()
    for batch in testing:
        test_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy.result():.3f}")
