"""Thousands of un-awaited collective programs, from several threads: no abort, no lost step.

Each case runs in a process of its own, so that an abort of the process is seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

COMMON = """
import sys, threading
import replicax as rx
rx.set_virtual_cpu_devices(8)
import jax, jax.numpy as jnp

def in_threads(count, work):
    errors = []
    def body(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for t in threads: t.start()
    for t in threads: t.join()
    if errors: raise errors[0]

def make(devices):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in devices])
    with strategy.scope():
        v = rx.Variable(jnp.zeros(64), aggregation=rx.VariableAggregation.MEAN)
    def fn(x):
        total = rx.get_replica_context().all_reduce("SUM", x)
        v.assign_add(total)
        return total
    @rx.function
    def step(x):
        return strategy.run(fn, args=(x,))
    # Without state: nothing but the library keeps two of these programs apart.
    @rx.function
    def free_step(x):
        context = rx.get_replica_context
        return strategy.run(lambda x: context().all_reduce("SUM", jnp.tanh(x)), args=(x,))
    return strategy, v, step, free_step
"""

STEPS = """
devices, threads, steps = map(int, sys.argv[1:4])
strategy, v, step, free_step = make(range(devices))
x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(64))
large = strategy.experimental_distribute_values_from_function(lambda _: jnp.zeros(50_000))
def work(i):
    for _ in range(steps // threads):
        free_step(large)
        step(x)
        free_step(x)
if threads == 1:
    work(0)
else:
    in_threads(threads, work)
assert float(v[0]) == steps * devices, float(v[0])
assert float(v[63]) == steps * devices
"""

TWO_STRATEGIES = """
steps = int(sys.argv[1])
pairs = [make([0, 1]), make([1, 0, 2, 3])]
xs = [p[0].experimental_distribute_values_from_function(lambda _: jnp.ones(64)) for p in pairs]
def work(i):
    for j in range(steps):
        k = (i + j) % 2
        pairs[k][3](xs[k])
        pairs[k][2](xs[k])
in_threads(2, work)
assert float(pairs[0][1][0]) == steps * 2, float(pairs[0][1][0])
assert float(pairs[1][1][0]) == steps * 4, float(pairs[1][1][0])
"""

MIXED = """
steps = int(sys.argv[1])
strategy, v, step, _ = make(range(4))
x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(64))
def work(i):
    for j in range(steps):
        if i == 0:
            step(x)
        elif i == 1:
            strategy.run(lambda y: rx.get_replica_context().all_reduce("SUM", y), args=(x,))
        elif i == 2:
            strategy.reduce("SUM", x, axis=None)
            strategy.gather(x, axis=0)
        else:
            value = v.numpy()
            assert value.min() == value.max()
in_threads(4, work)
assert float(v[0]) == steps * 4
"""


# The smallest thread pool: XLA then forgives no overlap of two programs.
NARROW = "2"
# Threads for two programs over eight devices: the next one is dispatched ahead.
WIDE = "16"


def run_alone(code: str, *args: object, timeout: float = 250, pool: str = NARROW) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "NPROC": pool},
    )
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        pytest.fail(f"the process was ended by {name}:\n{done.stderr[-3000:]}")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("pool", [NARROW, WIDE])
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_thousand_unawaited_steps(devices: int, threads: int, pool: str) -> None:
    run_alone(STEPS, devices, threads, 1000, pool=pool)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pool", [NARROW, WIDE])
@pytest.mark.parametrize("devices", [2, 8])
def test_twenty_thousand_unawaited_steps(devices: int, pool: str) -> None:
    run_alone(STEPS, devices, 4, 20_000, timeout=380, pool=pool)


@pytest.mark.parametrize("pool", [NARROW, pytest.param(WIDE, marks=pytest.mark.slow)])
def test_two_strategies_from_two_threads(pool: str) -> None:
    run_alone(TWO_STRATEGIES, 500, pool=pool)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("pool", [NARROW, WIDE])
def test_two_strategies_from_two_threads_for_long(pool: str) -> None:
    run_alone(TWO_STRATEGIES, 10_000, timeout=380, pool=pool)


def test_eager_and_compiled_collectives_at_once() -> None:
    run_alone(MIXED, 100)
