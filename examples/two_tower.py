"""A two-tower recommender on parameter servers: which films does a member watch next?

One tower turns a member into a vector, the other a film; the product of both scores a pair. The
tables of vectors are cut over the servers, and only the rows of a batch travel. Each member is
told apart from the other members of the batch: a softmax over the films of the batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

MEMBERS, FILMS, GENRES, VIEWINGS = 3_000, 600, 12, 120_000
WIDTH, BATCH, EPOCHS, STEPS_PER_EPOCH = 16, 512, 4, 80


def viewings() -> tuple[np.ndarray, np.ndarray]:
    """Members who mostly watch films of two genres, which the model is not told."""
    rng = np.random.default_rng(0)
    likes = rng.integers(0, GENRES, (MEMBERS, 2))
    member = rng.integers(0, MEMBERS, VIEWINGS)
    genre = likes[member, rng.integers(0, 2, VIEWINGS)]
    genre = np.where(rng.random(VIEWINGS) < 0.1, rng.integers(0, GENRES, VIEWINGS), genre)
    film = genre + GENRES * rng.integers(0, FILMS // GENRES, VIEWINGS)
    return member.astype(np.int32), film.astype(np.int32)


def dataset_fn() -> rx.data.Dataset:
    """Called on each worker. The last 5,000 viewings are kept for the test."""
    member, film = viewings()
    dataset = rx.data.Dataset.from_tensor_slices((member[:-5_000], film[:-5_000]))
    return dataset.shuffle(VIEWINGS).repeat().batch(BATCH)


class Tower(rx.Module):
    """A table of vectors, and a dense layer."""

    def __init__(self, rows: int, name: str, seed: int) -> None:
        super().__init__(name)
        table, dense = jax.random.split(jax.random.key(seed))
        # Functions, so that the values are made on the servers that keep them.
        self.table = rx.Variable(
            lambda: 0.3 * jax.random.normal(table, (rows, WIDTH)), name=f"{name}/table"
        )
        self.dense = rx.Variable(
            lambda: jax.nn.initializers.orthogonal()(dense, (WIDTH, WIDTH)), name=f"{name}/dense"
        )

    def __call__(self, numbers: Any) -> Any:
        return jnp.tanh(rx.nn.embedding_lookup(self.table, numbers) @ self.dense.value())


def train(resolver: Any) -> None:
    partitioner = rx.experimental.partitioners.MinSizePartitioner(16 << 10, max_shards=2)
    strategy = rx.ParameterServerStrategy(resolver, variable_partitioner=partitioner)
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        members, films = Tower(MEMBERS, "members", 1), Tower(FILMS, "films", 2)
        weights = [members.table, members.dense, films.table, films.dense]
        optimizer = rx.optimizers.Optimizer(
            optax.adagrad(0.1, initial_accumulator_value=1e-8), weights
        )
        mean_loss = rx.metrics.Mean()

    @rx.function
    def train_step(iterator: Any) -> None:
        member, film = next(iterator)

        def loss_fn() -> Any:
            scores = 4.0 * members(member) @ films(film).T
            # The same film in another row of the batch is not a wrong answer.
            scores += jnp.where(film[:, None] == film, -1e9, 0.0) * (1 - jnp.eye(len(film)))
            return optax.losses.softmax_cross_entropy_with_integer_labels(
                scores, jnp.arange(len(film))
            ).mean()

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        mean_loss.update_state(loss)

    @rx.function
    def best_films(member: Any) -> Any:
        return jax.lax.top_k(members(member) @ films(jnp.arange(FILMS)).T, FILMS // 5)[1]

    member, film = (column[-5_000:] for column in viewings())
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for epoch in range(EPOCHS):
        for _ in range(STEPS_PER_EPOCH):
            coordinator.schedule(train_step, args=(iterator,))
        coordinator.join()
        best = coordinator.schedule(best_films, args=(member,)).fetch()
        recall = np.mean(np.any(best == film[:, None], axis=1))
        print(f"epoch {epoch + 1}: loss {mean_loss.result():.3f}, recall {recall:.3f}", flush=True)
        mean_loss.reset_state()
    print(f"{int(optimizer.iterations)} steps are in the model; chance is a recall of 0.200")
    coordinator.close()
    strategy.close()


if __name__ == "__main__":
    with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
        train(cluster.resolver)
