"""A whole training loop: real data, an optimizer, metrics, evaluation, partial batches.

The last batch of an epoch is smaller than the others. Nothing has to be done about that:
losses are sums over examples, and metrics count examples.
"""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(4)

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

GLOBAL_BATCH, EPOCHS = 64, 8
strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])


class Classifier(rx.Module):
    """One hidden layer between 64 pixels and 10 digits."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.hidden = rx.Variable((rng.normal(size=(64, 64)) * 0.1).astype(np.float32))
        self.bias = rx.Variable(np.zeros(64, np.float32))
        self.out = rx.Variable((rng.normal(size=(64, 10)) * 0.1).astype(np.float32))

    def __call__(self, pixels: Any) -> Any:
        return jax.nn.relu(pixels @ self.hidden.value() + self.bias.value()) @ self.out.value()


with strategy.scope():
    model = Classifier()
    optimizer = rx.optimizers.Optimizer(optax.adam(5e-3), list(model.trainable_variables))
    loss_metric = rx.metrics.Mean(name="loss")
    accuracy = rx.metrics.SparseCategoricalAccuracy(name="accuracy")


def replica_train(batch: Any) -> None:
    pixels, digits = batch

    def loss_fn() -> Any:
        logits = model(pixels)
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, digits)
        return losses.sum() / GLOBAL_BATCH, (losses, logits)

    (_, (losses, logits)), gradients = rx.value_and_grad(
        loss_fn, list(model.trainable_variables), has_aux=True
    )()
    optimizer.apply_gradients(gradients)
    loss_metric.update_state(losses)
    accuracy.update_state(digits, logits)


def replica_evaluate(batch: Any) -> None:
    pixels, digits = batch
    accuracy.update_state(digits, model(pixels))


@rx.function
def train_step(batch: Any) -> None:
    strategy.run(replica_train, args=(batch,))


@rx.function
def evaluate_step(batch: Any) -> None:
    strategy.run(replica_evaluate, args=(batch,))


data = load_digits()
pixels, digits = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(digits))
train, test = order[:1437], order[1437:]

training = rx.data.Dataset.from_tensor_slices((pixels[train], digits[train]))
training = training.shuffle(len(train), seed=0).batch(GLOBAL_BATCH)
testing = rx.data.Dataset.from_tensor_slices((pixels[test], digits[test])).batch(GLOBAL_BATCH)
training = strategy.experimental_distribute_dataset(training)
testing = strategy.experimental_distribute_dataset(testing)

for epoch in range(EPOCHS):
    for batch in training:
        train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss_metric.result():.4f}, accuracy {accuracy.result():.3f}")
    loss_metric.reset_state()
    accuracy.reset_state()

for batch in testing:
    evaluate_step(batch)
print(f"test accuracy {accuracy.result():.3f} on {len(test)} digits")
