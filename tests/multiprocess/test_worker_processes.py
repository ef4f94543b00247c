"""Closures that start processes, or close what is not theirs: what becomes of their worker."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from parameter_servers import Desk, becomes, kept_cluster, mend, own_cluster, until_all_idle

import replicax as rx


@pytest.fixture(scope="module")
def own_workers() -> Iterator[rx.testing.LocalCluster]:
    """Workers that no other module needs."""
    with kept_cluster(workers=2, ps=1) as cluster:
        yield cluster


@pytest.fixture
def desk(own_workers: rx.testing.LocalCluster) -> Iterator[Desk]:
    desk = Desk(own_workers)
    yield desk
    desk.leave()
    mend(own_workers)


def map_in_a_pool() -> list[float]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(math.sqrt, [1.0, 4.0, 9.0])


def terminate_a_process() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(30)
    return process.exitcode


def interrupt_a_process() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            os._exit(3)
        os._exit(4)
    time.sleep(0.1)
    os.kill(pid, signal.SIGINT)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def return_in_a_forked_process() -> int:
    pid = os.fork()
    if pid == 0:
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raise_in_a_forked_process() -> int:
    pid = os.fork()
    if pid == 0:
        raise ValueError("only the child's own affair")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def terminate_a_program() -> int:
    program = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=lambda: None
    )
    program.terminate()
    return program.wait(30)


def read_in_a_forked_process(variable: Any) -> bytes:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            float(variable)
        except rx.errors.ContextError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize(
    ("closure", "expected"),
    [
        (map_in_a_pool, [1.0, 2.0, 3.0]),
        (terminate_a_process, -signal.SIGTERM),
        (interrupt_a_process, 3),
        (return_in_a_forked_process, 0),
        (raise_in_a_forked_process, 1),
        (terminate_a_program, -signal.SIGTERM),
    ],
)
def test_a_closure_may_start_and_end_processes(desk: Desk, closure: Any, expected: Any) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        count = rx.Variable(0.0, name="count")
    before = [desk.cluster.pid("worker", i) for i in range(2)]

    def both() -> Any:
        # Before the fork: a forked process cannot compile, XLA's threads are not there.
        count.assign_add(1.0)
        return closure()

    values = [coordinator.schedule(both) for _ in range(4)]
    coordinator.join(timeout=120)
    assert [v.fetch() for v in values] == [expected] * 4
    assert float(count) == 4.0
    assert [w.num_restarts for w in coordinator.status().workers] == [0, 0]
    assert [desk.cluster.pid("worker", i) for i in range(2)] == before


def test_a_forked_process_is_told_that_it_cannot_use_variables(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        variable = rx.Variable(3.0, name="variable")
    value = coordinator.schedule(lambda: read_in_a_forked_process(variable))
    coordinator.join(timeout=60)
    assert b"Read variables before the fork" in value.fetch()
    assert float(variable) == 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of JAX, about forks
        assert b"Read variables before the fork" in read_in_a_forked_process(variable)
    assert float(variable) == 3.0


@pytest.mark.parametrize("protocol", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_forked_process_that_stays_holds_no_address_and_no_connection(protocol: Any) -> None:
    with own_cluster(workers=1, ps=1, protocol=protocol) as desk:
        keys = desk.cluster.keys_directory
        coordinator = desk.coordinator(desk.strategy(keys=keys))

        def leave_a_process_behind() -> int:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
            return pid

        pid = int(coordinator.schedule(leave_a_process_behind).fetch())
        try:
            os.kill(desk.cluster.pid("worker", 0), signal.SIGKILL)
            # Far sooner than a worker is given up that only does not answer.
            becomes(lambda: coordinator.status().workers[0].num_restarts == 1, "it is missed", 10)
            # What is alive is killed with all that it has started.
            becomes(lambda: not desk.cluster.alive("worker", 0), "it has ended")
            desk.cluster.restart("worker", 0)
            assert coordinator.schedule(lambda: 7).fetch(timeout=60) == 7
            os.kill(pid, 0)
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "then", ["return", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sleep", "read"))]
)
def test_a_worker_whose_descriptors_a_closure_closes_ends_at_once(desk: Desk, then: str) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        variable = rx.Variable(3.0, name="variable")
    until_all_idle(coordinator)

    def close_everything() -> Any:
        os.closerange(3, 1024)
        if then == "sleep":
            time.sleep(1_000)
        return float(variable) if then == "read" else 0

    value = coordinator.schedule(close_everything)
    # Each time the worker is missed at once and started again, so that the third death comes
    # long before one that is only silent would count as dead.
    with pytest.raises(rx.errors.PoisonClosureError):
        value.fetch(timeout=60)
    with pytest.raises(rx.errors.PoisonClosureError):
        coordinator.join(timeout=60)
    values = [coordinator.schedule(lambda: float(variable)) for _ in range(4)]
    coordinator.join(timeout=60)
    assert [v.fetch() for v in values] == [3.0] * 4
