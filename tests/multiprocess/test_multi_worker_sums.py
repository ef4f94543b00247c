"""Sums over the replicas of several processes have the same bits everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replicax.testing import LocalCluster

# Of each kind of sum: one by few steps, one by few bytes, and many small arrays of two types.
SIZES = (5, 700_000)
NUM_SMALL = 40


def sums() -> tuple[list[bytes], list[bytes], int]:
    """Sums random values in a compiled program, twice; returns their bytes."""
    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()

    def value_of(context: Any) -> Any:
        rng = np.random.default_rng(context.replica_id_in_sync_group)
        arrays = [rng.standard_normal(size).astype("f4") for size in SIZES]
        small = [rng.standard_normal((3, 4)).astype("f4") for _ in range(NUM_SMALL)]
        halves = [rng.standard_normal(7).astype("f2") for _ in range(3)]
        return [*arrays, *small, *halves]

    values = strategy.experimental_distribute_values_from_function(value_of)

    def replica_code(values: Any) -> Any:
        return rx.get_replica_context().all_reduce("SUM", values)

    @rx.function
    def program(values: Any) -> Any:
        return strategy.run(replica_code, args=(values,))

    def bytes_of(results: Any) -> list[bytes]:
        return [
            np.asarray(copy).tobytes()
            for result in results
            for copy in strategy.experimental_local_results(result)[:1]
        ]

    first, second = bytes_of(program(values)), bytes_of(program(values))
    return first, second, strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    "workers",
    [
        2,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(4, marks=pytest.mark.slow),
    ],
)
def test_all_workers_have_the_same_bits_in_every_run(workers: int) -> None:
    with LocalCluster(workers=workers, ps=0) as cluster:
        found = cluster.run(sums)
    first, again, count = found[0]
    assert count == workers
    assert first == again
    for other, other_again, _ in found[1:]:
        assert other == first
        assert other_again == first
    rngs = [np.random.default_rng(i) for i in range(workers)]
    for i, size in enumerate(SIZES):
        exact = sum(rng.standard_normal(size).astype("f4").astype("f8") for rng in rngs)
        np.testing.assert_allclose(np.frombuffer(first[i], "f4"), exact, rtol=1e-4, atol=1e-5)
    for i in range(NUM_SMALL):
        exact = sum(rng.standard_normal((3, 4)).astype("f4").astype("f8") for rng in rngs)
        got = np.frombuffer(first[len(SIZES) + i], "f4").reshape(3, 4)
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)
