"""What it costs training that a parameter server saves 1 GB meanwhile.

One server, two workers. Cases: `embedding` looks 4,096 rows of 64 numbers up in a table of 1 GiB
and changes them; `mlp` trains 4 layers of 512x512 by plain SGD beside that table. Training never
stops; what it does while a snapshot is written is held against what it does between two.
"""

from __future__ import annotations

import dataclasses
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
# How often a snapshot begins, by default; it takes up to four fifths of that.
EVERY_S = 30.0
MOST_SLOWDOWN = 0.10


def ours(case: str, seconds: float) -> dict[str, float]:
    import jax.numpy as jnp

    import replicax as rx

    num_snapshots = max(1, round(2 * seconds))
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
    """Returns milliseconds per burst with and without a snapshot, and how long one takes."""
    spent = {True: [0.0, 0], False: [0.0, 0]}
    # Bursts count from the end of one snapshot to the end of another.
    num_ended = size = 0
    while num_ended <= num_snapshots:
        was_saving = any(directory.glob("*.tmp"))
        start = time.perf_counter()
        burst()
        elapsed = time.perf_counter() - start
        is_saving = any(directory.glob("*.tmp"))
        num_ended += was_saving and not is_saving
        if num_ended and was_saving == is_saving:
            spent[is_saving][0] += elapsed
            spent[is_saving][1] += 1
        size = max((file.stat().st_size for file in directory.glob("*.rxs")), default=size)
    assert size > ROWS * WIDTH * 4, f"snapshots of {size} bytes only"
    return {
        "saving_ms": 1e3 * spent[True][0] / spent[True][1],
        "between_ms": 1e3 * spent[False][0] / spent[False][1],
        "snapshot_s": spent[True][0] / num_snapshots,
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
        slowdown = 1 - rates[0] / rates[1]
        verdict = at_most(MOST_SLOWDOWN, slowdown)
        texts = f"{rates[0]:,.0f}/s", f"{rates[1]:,.0f}/s"
        name = f"{case}, {found['snapshot_s']:.0f} s"
        rows.append(Row("slower during a snapshot of 1 GB", name, *texts, slowdown, *verdict))
    return measured, rows


if __name__ == "__main__":
    main(CONTESTANTS)
