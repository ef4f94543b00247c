"""What it costs training that a parameter server saves 1 GB meanwhile.

One server, two workers. Cases: `embedding` looks 4,096 rows of 64 numbers up in a table of 1 GiB
and changes them; `mlp` trains 4 layers of 512x512 by plain SGD beside that table. Training never
stops. A machine may drift by more than a snapshot costs: what training does while one is written is
held against what it does right before and right after, and the middle of several counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import parameter_server
from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

CASES = ("embedding", "mlp")
ROWS, WIDTH, NUM_IDS = 4 << 20, 64, 4096
LAYERS, HIDDEN, BATCH = 4, 512, 64
BURST = 40
# How often a snapshot begins, by default.
EVERY_S = 30.0
MOST_SLOWDOWN = 0.10


def ours(case: str, seconds: float) -> dict[str, float]:
    import jax.numpy as jnp

    import replicax as rx

    num_snapshots = max(1, round(3 * seconds))
    with rx.testing.LocalCluster(
        workers=2, ps=1, snapshots=True, snapshot_every=EVERY_S
    ) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            with strategy.scope():
                table = rx.Variable(lambda: jnp.ones((ROWS, WIDTH)), name="table")
            step, arguments = our_step(case, strategy, coordinator, table)

            def burst() -> None:
                for _ in range(BURST):
                    coordinator.schedule(step, args=arguments())
                coordinator.join()

            burst()
            assert cluster.snapshots_directory is not None
            found = compare(burst, cluster.snapshots_directory / "ps-0", num_snapshots)
        strategy.close()
    return found


def compare(burst: Callable[[], Any], directory: Path, num_snapshots: int) -> dict[str, float]:
    """Returns how bursts during snapshots compare with those right before and after each."""
    # Times between snapshots and during them, in turns, from the end of one on.
    phases: list[list[float]] = []
    is_saving, size = False, 0
    while len(phases) < 2 * num_snapshots + 2:
        was_saving = is_saving
        start = time.perf_counter()
        burst()
        elapsed = time.perf_counter() - start
        is_saving = any(directory.glob("*.tmp-*"))
        if was_saving != is_saving:
            # Some of it was this, and some that.
            if phases or not is_saving:
                phases.append([])
        elif phases:
            phases[-1].append(elapsed)
        size = max(
            (file.stat().st_size for file in directory.glob("snapshot-*/data.safetensors")),
            default=size,
        )
    assert size > ROWS * WIDTH * 4, f"snapshots of {size} bytes only"
    between, saving = phases[:-1:2], phases[1:-1:2]
    ratios = [
        statistics.mean(during) / statistics.mean(before + after)
        for during, before, after in zip(saving, between, between[1:], strict=False)
    ]
    return {
        "slower": statistics.median(ratios) - 1,
        "least": min(ratios) - 1,
        "most": max(ratios) - 1,
        "saving_ms": 1e3 * statistics.mean(itertools.chain(*saving)),
        "between_ms": 1e3 * statistics.mean(itertools.chain(*between)),
        "snapshot_s": statistics.mean(sum(during) for during in saving),
    }


def our_step(
    case: str, strategy: Any, coordinator: Any, table: Any
) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
    """Returns what to schedule, and what gives the arguments of each closure."""
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    if case == "mlp":
        mlp, args = parameter_server.our_mlp(strategy, coordinator, HIDDEN, LAYERS, BATCH)
        return mlp, lambda: args
    random = np.random.default_rng(0)

    @rx.function
    def embedding(ids: Any) -> None:
        def loss() -> Any:
            return jnp.mean((rx.nn.embedding_lookup(table, ids) - 1.0) ** 2)

        rows = rx.grad(loss, table)()
        table.scatter_sub(rows.map_values(lambda values: 0.1 * values))

    # Other rows every time: whatever a snapshot costs per row is to be paid.
    return embedding, lambda: (random.integers(0, ROWS, NUM_IDS),)


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    # Snapshots come and go within one round: the best of several would be no comparison.
    once = dataclasses.replace(settings, rounds=1)
    measured = compete(__name__, CONTESTANTS, CASES, once, report)
    rows = []
    for case in CASES:
        found = measured["ours", case]
        rates = [BURST * 1e3 / found[f"{when}_ms"] for when in ("saving", "between")]
        outcome = at_most(MOST_SLOWDOWN, found["slower"])
        texts = f"{rates[0]:,.0f}/s", f"{rates[1]:,.0f}/s"
        name = f"{case}, {found['snapshot_s']:.0f} s"
        rows.append(
            Row("slower during a snapshot of 1 GB", name, *texts, found["slower"], *outcome)
        )
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
