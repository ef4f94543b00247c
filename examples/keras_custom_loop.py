"""A training loop of your own over a Keras model: layers, optimizer and metrics in replica code."""

from __future__ import annotations

from typing import Any

import replicax as rx

rx.set_virtual_cpu_devices(2)

import keras
import numpy as np
from sklearn.datasets import load_digits

GLOBAL_BATCH, EPOCHS = 64, 6
strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
keras.utils.set_random_seed(0)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(
                64, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-4)
            ),
            # Statistics of the global batch; without the argument each replica uses its own.
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dropout(0.2),  # each replica drops other units
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(3e-3)
    # Losses per example, to be averaged over the global batch.
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()


def replica_train(pixels: Any, digits: Any) -> None:
    def loss_fn() -> Any:
        logits = model(pixels, training=True)
        losses = loss_object(digits, logits)
        loss = rx.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        loss += rx.nn.scale_regularization_loss(sum(model.losses))
        return loss, (losses, logits)

    weights = model.trainable_variables
    (_, (losses, logits)), gradients = rx.value_and_grad(loss_fn, weights, has_aux=True)()
    optimizer.apply_gradients(zip(gradients, weights, strict=True))  # summed over the replicas
    mean_loss.update_state(losses)
    accuracy.update_state(digits, logits)


def replica_test(pixels: Any, digits: Any) -> None:
    accuracy.update_state(digits, model(pixels, training=False))


@rx.function
def train_step(batch: Any) -> None:
    strategy.run(replica_train, args=batch)


@rx.function
def test_step(batch: Any) -> None:
    strategy.run(replica_test, args=batch)


data = load_digits()
pixels, digits = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(digits))
train, test = order[:1437], order[1437:]
training = rx.data.Dataset.from_tensor_slices((pixels[train], digits[train]))
training = training.shuffle(len(train), seed=0).batch(GLOBAL_BATCH, drop_remainder=True)
testing = rx.data.Dataset.from_tensor_slices((pixels[test], digits[test])).batch(GLOBAL_BATCH)

for epoch in range(EPOCHS):
    for batch in strategy.experimental_distribute_dataset(training):
        train_step(batch)
    print(f"epoch {epoch + 1}: loss {mean_loss.result():.4f}, accuracy {accuracy.result():.3f}")
    mean_loss.reset_state()
    accuracy.reset_state()

for batch in strategy.experimental_distribute_dataset(testing):
    test_step(batch)
print(f"test accuracy {accuracy.result():.3f} on {len(test)} digits")
