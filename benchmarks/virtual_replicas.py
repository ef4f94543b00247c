"""One compiled step with 1 to 1,024 virtual replicas on one device; a case is their number.

Each replica has a batch of its own, always of the same size, so the work is proportional to
the number of replicas, and the time of a step should not grow faster than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import OUT, Measured, Row, Settings, at_most, best_time, compete, main

CASES = tuple(str(2**i) for i in range(11))
# Steps of a handful of replicas are all overhead; growth is judged from here on.
FIRST_JUDGED = 16
# The exponent of the growth: 1 is linear. Leaves room for noise.
LIMIT = 1.15
FEATURES, HIDDEN, BATCH, RATE = 16, 32, 8, 0.01


def ours(case: str, seconds: float) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    num_replicas = int(case)
    strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=num_replicas)
    rng = np.random.default_rng(0)
    with strategy.scope():
        w1 = rx.Variable(rng.normal(0, 0.2, (FEATURES, HIDDEN)).astype(np.float32))
        b1 = rx.Variable(jnp.zeros(HIDDEN))
        w2 = rx.Variable(rng.normal(0, 0.2, (HIDDEN, 1)).astype(np.float32))
    variables = [w1, b1, w2]

    def replica_step(inputs: Any) -> Any:
        def loss_of_replica() -> Any:
            outputs = jax.nn.relu(inputs @ w1.value() + b1.value()) @ w2.value()
            return jnp.mean((outputs - 1.0) ** 2)

        loss, gradients = rx.value_and_grad(loss_of_replica, variables)()
        context = rx.get_replica_context()
        gradients = context.all_reduce("MEAN", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            context.update(variable, lambda v, g: v.assign_sub(RATE * g), args=(gradient,))
        return loss

    @rx.function
    def step(inputs: Any) -> Any:
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(inputs,)), axis=None)

    inputs = strategy.experimental_distribute_values_from_function(
        lambda context: rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    )
    start = time.perf_counter()
    jax.block_until_ready(step(inputs))
    first = time.perf_counter() - start
    best = best_time(lambda: step(inputs), jax.block_until_ready, seconds)
    return {"us": 1e6 * best, "us_per_replica": 1e6 * best / num_replicas, "first_call_s": first}


CONTESTANTS = {"ours": ours}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything, draws it; returns the numbers and the lines of the table."""
    measured = compete(__name__, CONTESTANTS, CASES, settings, report)
    rows: list[Row] = []
    for case in CASES:
        found = measured["ours", case]
        texts = f"{found['us']:.0f} µs", f"{found['us_per_replica']:.2f} µs per replica"
        rows.append(Row("virtual replicas, one step", case, *texts, None, "", None))
    exponent = growth(measured)
    what = "virtual replicas, exponent of the growth"
    case = f"{FIRST_JUDGED} to {CASES[-1]}"
    rows.append(Row(what, case, f"{exponent:.2f}", "", exponent, *at_most(LIMIT, exponent)))
    draw(measured)
    return measured, rows


def growth(measured: Measured) -> float:
    """Returns the slope of log(time) over log(replicas), by least squares."""
    points = [
        (math.log(int(case)), math.log(measured["ours", case]["us"]))
        for case in CASES
        if int(case) >= FIRST_JUDGED
    ]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def draw(measured: Measured) -> None:
    """Draws the time of a step and the time per replica."""
    from matplotlib.figure import Figure

    counts = [int(case) for case in CASES]
    steps = [measured["ours", case]["us"] for case in CASES]
    last = counts[-1], steps[-1]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    axes.loglog(counts, steps, "o-", color="tab:blue", label="time of a step")
    each = [t / n for t, n in zip(steps, counts, strict=True)]
    axes.loglog(counts, each, "s-", color="tab:orange", label="time per replica")
    line = [last[1] * n / last[0] for n in counts]
    axes.loglog(counts, line, ":", color="gray", label="proportional to the replicas")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.minorticks_off()
    axes.set_xlabel("virtual replicas on one CPU device")
    axes.set_ylabel("microseconds")
    axes.set_title(f"One compiled training step, {BATCH} examples per replica")
    axes.grid(alpha=0.3)
    axes.legend()
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / "virtual_replicas.png", dpi=130)


if __name__ == "__main__":
    main(CONTESTANTS)
