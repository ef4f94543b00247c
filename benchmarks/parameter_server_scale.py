"""How parameter-server training grows: more workers, and a table larger than the coordinator.

Cases: `sleep N` runs closures that sleep 20 ms on N workers, against N times what one worker could
do alone; `table 10GB` creates a table of 10 GB over 2 servers, trains some of its rows, and reports
how much memory the coordinator has needed at most.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, compete, main

WORKERS = (1, 2, 4, 8)
CASES = (*(f"sleep {n}" for n in WORKERS), "table 10GB")
NAP_S = 0.02
NUM_ROWS, WIDTH = 20_000_000, 128
MOST_MB = 500


def ours(case: str, seconds: float) -> dict[str, float]:
    del seconds
    what, number = case.split()
    return table() if what == "table" else sleepers(int(number))


def sleepers(num_workers: int) -> dict[str, float]:
    import replicax as rx

    num_closures = 60 * num_workers

    def nap() -> None:
        time.sleep(NAP_S)

    with rx.testing.LocalCluster(workers=num_workers, ps=1) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            best = float("inf")
            for _ in range(4):
                start = time.perf_counter()
                for _ in range(num_closures):
                    coordinator.schedule(nap)
                coordinator.join()
                best = min(best, time.perf_counter() - start)
        strategy.close()
    # How much longer it took than if all workers had slept all the time.
    return {"stretch": best / (num_closures * NAP_S / num_workers)}


def table() -> dict[str, float]:
    import jax.numpy as jnp
    import numpy as np
    import optax

    import replicax as rx

    with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
        partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
        strategy = rx.ParameterServerStrategy(cluster.resolver, partitioner)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                rows = rx.Variable(lambda: jnp.zeros((NUM_ROWS, WIDTH)), name="table")
                optimizer = rx.optimizers.Optimizer(optax.adagrad(0.1), [rows])

            @rx.function
            def step(ids: Any) -> Any:
                def loss() -> Any:
                    return jnp.mean((rx.nn.embedding_lookup(rows, ids) - 1.0) ** 2)

                value, gradients = rx.value_and_grad(loss, [rows])()
                optimizer.apply_gradients(gradients)
                return value

            random = np.random.default_rng(0)
            for _ in range(50):
                coordinator.schedule(step, args=(random.integers(0, NUM_ROWS, 4096),))
            coordinator.join()
            assert int(optimizer.iterations) == 50
        strategy.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mb": peak}


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows = []
    for count in WORKERS:
        share = 1 / measured["ours", f"sleep {count}"]["stretch"]
        text = f"{count * share / NAP_S:,.0f}/s", f"{count / NAP_S:,.0f}/s"
        outcome = at_least(0.9, share)
        rows.append(Row("closures/s / linear", f"{count} workers", *text, share, *outcome))
    peak = measured["ours", "table 10GB"]["peak_mb"]
    text = f"{peak:,.0f} MB", f"{MOST_MB} MB"
    outcome = at_most(1.0, peak / MOST_MB)
    rows.append(Row("coordinator's memory", "table of 10 GB", *text, peak / MOST_MB, *outcome))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
