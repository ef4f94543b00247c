"""What calling a compiled function costs on top of a bare jitted call.

A case `VxD` is V scalar variables on D CPU devices; one call adds a number to each of them.
The peer is `jax.jit` of the same update with donated state. Every call is waited for, so
that nothing hides behind the computation. The two take turns within one process, because
a difference of two processes would mostly show how the processes differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_most, compete, main

COUNTS = (20, 200, 1000, 2000)
DEVICES = (1, 2)
CASES = tuple(f"{count}x{devices}" for devices in DEVICES for count in COUNTS)
# At 200 variables, in µs.
LIMIT = 150.0
# How much more a variable may cost among 2000 than among 200. The difference of two long
# times is noisy, which is what the quarter is for.
LINEAR_LIMIT = 1.25
CALLS_IN_A_BLOCK = 5


def both(case: str, seconds: float) -> dict[str, float]:
    # XLA's CPU client starves on collectives in flight if its pool has few threads.
    os.environ.setdefault("NPROC", "8")
    import replicax as rx

    num_variables, num_devices = map(int, case.split("x"))
    rx.set_virtual_cpu_devices(num_devices)
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names = [f"CPU:{i}" for i in range(num_devices)]
    strategy = rx.OneDeviceStrategy(*names) if num_devices == 1 else rx.MirroredStrategy(names)
    with strategy.scope():
        variables = [rx.Variable(0.0) for _ in range(num_variables)]

    @rx.function
    def ours() -> Any:
        for variable in variables:
            variable.assign_add(1.0)
        return variables[0].value() + 1.0

    placed = NamedSharding(Mesh(np.array(jax.devices()), ("replica",)), PartitionSpec())
    state = [jax.device_put(np.float32(0.0), placed) for _ in range(num_variables)]

    def add(state: list[Any]) -> Any:
        state = [value + 1.0 for value in state]
        return state, state[0] + 1.0

    jitted = jax.jit(add, donate_argnums=0)

    def bare() -> Any:
        nonlocal state
        state, result = jitted(state)
        return result

    with strategy.scope():
        best = in_turns((ours, bare), jax.block_until_ready, seconds)
    own, peer = (1e6 * t for t in best)
    return {"ours_us": own, "bare_us": peer}


def in_turns(
    calls: tuple[Callable[[], Any], ...], wait: Callable[[Any], Any], seconds: float
) -> list[float]:
    """Returns the time of one call of each, in seconds: the best of many short blocks."""
    best = [float("inf")] * len(calls)
    for call in calls:
        for _ in range(3):
            wait(call())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(CALLS_IN_A_BLOCK):
                wait(call())
            best[i] = min(best[i], (time.perf_counter() - start) / CALLS_IN_A_BLOCK)
    return best


CONTESTANTS = {"both": both}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows: list[Row] = []
    added: dict[tuple[int, int], float] = {}
    for devices in DEVICES:
        for count in COUNTS:
            found = measured["both", f"{count}x{devices}"]
            own, peer = found["ours_us"], found["bare_us"]
            added[count, devices] = own - peer
            target, passed = at_most(LIMIT, own - peer) if count == 200 else ("", None)
            case = f"{count} variables, {_devices(devices)}"
            texts = f"{own:.0f} µs", f"{peer:.0f} µs"
            target = target and f"{target} µs"
            rows.append(Row("added cost of a call, µs", case, *texts, own - peer, target, passed))
    for devices in DEVICES:
        few, many = (added[count, devices] / count for count in (COUNTS[1], COUNTS[3]))
        case = f"{COUNTS[3]} to {COUNTS[1]} variables, {_devices(devices)}"
        texts = f"{many:.2f} µs", f"{few:.2f} µs"
        outcome = at_most(LINEAR_LIMIT, many / few)
        rows.append(Row("added cost per variable", case, *texts, many / few, *outcome))
    return measured, rows


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"


if __name__ == "__main__":
    main(CONTESTANTS)
