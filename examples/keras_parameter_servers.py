"""Keras on parameter servers: `fit` on the coordinator, steps on workers, tables on servers.

It starts two parameter servers and three workers on this machine, trains a small recommender
with a plain Keras model, and kills a worker in the middle of it:

    python examples/keras_parameter_servers.py

The model, `compile` and `fit` are those of a program on one device; the scope is the difference.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

import replicax as rx

NUM_USERS, NUM_ITEMS, BATCH, EPOCHS = 20_000, 5_000, 256, 4


def ratings(count: int = 60_000) -> tuple[list[np.ndarray], np.ndarray]:
    """Users like items of their own kind, with few exceptions; 400 of each are active."""
    random = np.random.default_rng(0)
    users = 50 * random.integers(0, 400, count).astype(np.int32)
    items = 12 * random.integers(0, 400, count).astype(np.int32)
    likes = (users // 50 % 4 == items // 12 % 4) ^ (random.random(count) < 0.02)
    return [users, items], likes.astype(np.float32)


def make_model() -> keras.Model:
    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    # With parameter servers, only the rows that a batch looks up travel.
    of_user = keras.layers.Embedding(NUM_USERS, 16)(user)
    of_item = keras.layers.Embedding(NUM_ITEMS, 16)(item)
    hidden = keras.layers.Concatenate()([of_user, of_item])
    hidden = keras.layers.Dense(64, activation="relu")(hidden)
    outputs = keras.layers.Dense(1)(hidden)
    model = keras.Model([user, item], outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
    )
    return model


def main() -> None:
    inputs, likes = ratings()
    train, test = slice(0, 50_000), slice(50_000, None)
    with rx.testing.LocalCluster(workers=3, ps=2) as cluster:
        # Tables of more than 256 KiB are cut in two, one part on each server.
        partitioner = rx.experimental.partitioners.MinSizePartitioner(max_shards=2)
        strategy = rx.ParameterServerStrategy(cluster.resolver, partitioner)
        with strategy.scope():
            model = make_model()

        class LoseWorker(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
                if epoch == 1:
                    print("Killing worker 2", flush=True)
                    cluster.kill("worker", 2)

        model.fit(
            [column[train] for column in inputs],
            likes[train],
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_data=([column[test] for column in inputs], likes[test]),
            callbacks=[LoseWorker()],
            verbose=2,
        )
        steps = EPOCHS * -(-50_000 // BATCH)
        found = int(model.optimizer.iterations.numpy())
        accuracy = model.evaluate([c[test] for c in inputs], likes[test], verbose=0)[1]
        print(f"{found} of {steps} steps are in the model, accuracy {accuracy:.3f}", flush=True)
        assert found == steps
        assert accuracy > 0.9, accuracy


if __name__ == "__main__":
    main()
