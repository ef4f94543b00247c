"""Programs of several processes that are dispatched before the one before them has finished."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from replicax.testing import LocalCluster

STEPS = 150


def work(num_threads: int) -> tuple[int, list[float], list[float]]:
    """Calls programs of two sizes that do not depend on each other, from threads in turn."""
    import threading

    import jax
    import jax.numpy as jnp

    import replicax as rx
    from replicax.foundation import gate

    strategy = rx.MultiWorkerMirroredStrategy()
    sizes = (4, 300_000)

    def summed(values: Any) -> Any:
        return rx.get_replica_context().all_reduce("SUM", values)

    programs = [rx.function(lambda x: strategy.run(summed, args=(x,))) for _ in sizes]
    inputs = [
        strategy.experimental_distribute_values_from_function(
            lambda context, size=size: jnp.full(size, 1.0 + context.replica_id_in_sync_group)
        )
        for size in sizes
    ]
    results: list[Any] = []
    most_running = 0
    turns = [threading.Semaphore(i == 0) for i in range(num_threads)]
    failures: list[BaseException] = []

    def run(thread: int) -> None:
        nonlocal most_running
        try:
            for i in range(thread, STEPS, num_threads):
                assert turns[thread].acquire(timeout=60)
                results.append(programs[i % 2](inputs[i % 2]))
                most_running = max(most_running, len(gate._Dispatch.running))
                turns[(thread + 1) % num_threads].release()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not failures
    found = [strategy.experimental_local_results(r)[0] for r in results]
    jax.block_until_ready(found)
    return most_running, [float(f[0]) for f in found], [float(f[-1]) for f in found]


def test_unawaited_programs_of_one_thread_overlap_and_keep_their_order() -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        for most_running, first, last in cluster.run(work, args=(1,)):
            assert 2 <= most_running <= 32
            np.testing.assert_array_equal(first, [3.0] * STEPS)
            np.testing.assert_array_equal(last, [3.0] * STEPS)


@pytest.mark.slow
def test_programs_of_several_threads_do_not_overlap() -> None:
    with LocalCluster(workers=2, ps=0) as cluster:
        for most_running, first, last in cluster.run(work, args=(3,)):
            assert most_running == 1
            np.testing.assert_array_equal(first, [3.0] * STEPS)
            np.testing.assert_array_equal(last, [3.0] * STEPS)
