"""The watchdog: what it says when no closure ends, when it says it, and when it is silent."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parameter_servers import Desk, becomes

import replicax as rx
from replicax.coordinator import wait_report
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue
from replicax.coordinator.scheduling.pool import Worker, WorkerState
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.wait_report import WaitingThread
from replicax.coordinator.watchdog import Change, StallDetector
from replicax.foundation import errors, thread_stacks
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport import addresses
from replicax.transport.channel import Channel
from replicax.transport.service import Service

# Tasks that are silent for long are not given up, so that they can be told of.
PATIENT = Timing(beat_s=0.1, dead_s=60.0, cancel_s=5.0)


# When it speaks.


def polls(detector: StallDetector, *rows: tuple[int, bool, float]) -> list[str]:
    return [detector.poll(*row).value for row in rows]


def test_T122_a_stall_is_told_at_the_timeout_and_again_each_timeout() -> None:
    detector = StallDetector(10.0, 0.0)
    rows = [(0, True, float(now)) for now in range(1, 31)]
    found = polls(detector, *rows)
    told = [row[2] for row, news in zip(rows, found, strict=True) if news == "stalled"]
    assert told == [10.0, 20.0, 30.0]
    assert detector.stalled_s == 30.0


def test_T122_closures_that_end_in_time_are_no_stall() -> None:
    detector = StallDetector(10.0, 0.0)
    rows = [(int(now // 9), True, float(now)) for now in range(1, 100)]
    assert set(polls(detector, *rows)) == {"none"}


def test_T122_nothing_to_do_is_no_stall_and_counts_for_nothing() -> None:
    detector = StallDetector(10.0, 0.0)
    assert polls(detector, (0, False, 100.0), (0, True, 109.0)) == ["none", "none"]
    assert detector.poll(0, True, 110.0) is Change.STALLED


@pytest.mark.parametrize("end", [(1, True), (0, False)])
def test_T122_the_end_of_a_stall_is_told_once(end: tuple[int, bool]) -> None:
    detector = StallDetector(10.0, 0.0)
    assert polls(detector, (0, True, 12.0), (*end, 13.0)) == ["stalled", "resumed"]
    assert detector.stalled_s == 13.0
    assert detector.poll(*end, 14.0) is Change.NONE


def test_T122_time_in_which_the_process_was_stopped_does_not_count() -> None:
    detector = StallDetector(10.0, 0.0)
    detector.extend(100.0)
    assert polls(detector, (0, True, 109.0), (0, True, 110.0)) == ["none", "stalled"]


# What it says.


def train_step() -> None:
    """Stands for a function of the user."""


def closure(number: int, **options: Any) -> Closure:
    options.setdefault("keep_alive", (train_step, ("secret argument",), {}))
    return Closure(number, None, **options)  # type: ignore[arg-type]


def ready_worker(index: int, now: float, *closures: Closure, **counters: float) -> Worker:
    worker = Worker(index, now)
    worker.state = WorkerState.READY
    worker.counters = counters
    worker.assign(list(closures), now)
    return worker


def described(
    workers: list[Worker],
    servers: list[Server] | None = None,
    queue: ClosureQueue | None = None,
    threads: tuple[WaitingThread, ...] = (),
    now: float = 112.3,
) -> wait_report.WaitReport:
    queue = ClosureQueue() if queue is None else queue
    return wait_report.describe(workers, servers or [], queue, threads, 1.0, now)


def test_T122_who_runs_what_and_waits_for_which_server() -> None:
    queue = ClosureQueue()
    for number in range(17, 30):
        queue.put(closure(number))
    given = queue.take(3, 1)
    worker = ready_worker(1, 100.0, *given, waiting_ps=0, waiting_s=11.9, running_s=12.0)
    worker.last_seen_s = 112.1
    server = Server(0, 112.0)
    server.counters = {"requests": 41}
    found = described(
        [ready_worker(0, 112.0), worker],
        [server],
        queue,
        (WaitingThread("MainThread", "join", 102.3),),
    )
    assert found.lines == (
        "thread MainThread has waited in `join` for 10.0 s: "
        "10 closures are queued and 3 assigned to workers",
        "10 closures wait for a worker with capacity",
        "/job:worker/task:0 is idle",
        "closure 17 (train_step) has run on /job:worker/task:1 for 12.3 s; "
        "behind it closures 18, 19",
        "/job:worker/task:1 has waited for a reply of /job:ps/task:0 for 12.1 s",
        "/job:ps/task:0 replied 0.3 s ago, 41 requests answered",
    )
    assert found.tasks == (Task("worker", 1), Task("ps", 0))
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("counters", "seen_s", "words"),
    [
        ({"running_s": 12.0, "open": 1}, 112.2, "has computed for 12.1 s"),
        ({"running_s": 0.0, "open": 1}, 112.2, "has not started it"),
        ({"running_s": 0.0, "open": 0}, 112.2, "reports that it has no closures"),
        ({"running_s": 8.0, "open": 1}, 109.0, "has not answered heartbeats for 3.3 s"),
        ({"waiting_ps": float("nan")}, 112.2, "has waited for a reply of /job:ps/task:nan"),
    ],
)
def test_T122_what_a_worker_does(counters: dict[str, float], seen_s: float, words: str) -> None:
    worker = ready_worker(0, 100.0, closure(1), **counters)
    worker.last_seen_s = seen_s
    found = described([worker], [Server(0, 112.0)])
    assert f"/job:worker/task:0 {words}" in found.lines[1]
    assert found.tasks == (Task("worker", 0),)


def test_T122_workers_that_are_not_there_or_get_nothing() -> None:
    away, excluded = Worker(0, 100.0), ready_worker(1, 112.0)
    excluded.excluded_until_s = 114.0
    away.pinned_closures.append(closure(5, pin=0))
    lines = described([away, excluded]).lines
    assert lines == (
        "closure 5 can run on /job:worker/task:0 alone",
        "/job:worker/task:0 is connecting: it was never reached",
        "/job:worker/task:1 gets no closures for 1.7 s: it could not reach a server",
    )


def test_T122_servers_that_are_lost_away_or_silent() -> None:
    lost, away, silent = Server(0, 112.0), Server(1, 112.0), Server(2, 102.3)
    lost.loss = "its process is gone"
    away.away_since_s, away.reason = 110.3, "it was restarted"
    lines = described([], [lost, away, silent]).lines
    assert lines == (
        "/job:ps/task:0 is lost: its process is gone",
        "/job:ps/task:1 has been away for 2.0 s: it was restarted",
        "/job:ps/task:2 has not answered heartbeats for 10.0 s",
    )


def test_T122_closures_whose_worker_is_being_fenced_and_an_error_that_waits() -> None:
    queue = ClosureQueue()
    for number in range(8):
        queue.put(closure(number))
    queue.take(7, 1)
    queue.report(ValueError("bad"))
    assert described([], queue=queue).lines == (
        "ValueError has cancelled queued closures, and waits for running ones",
        "closures 0, 1, 2, 3, 4 and 2 more had been assigned to /job:worker/task:1: each server "
        "must confirm that it rejects further updates from there",
    )


def test_T122_a_second_attempt_a_full_queue_and_functions_without_a_name() -> None:
    queue = ClosureQueue(limit=1)
    given = closure(3, keep_alive=(train_step.__get__(3),))
    given.assign_to(0)
    given.assign_to(0)
    unnamed, pinned = closure(4, keep_alive=None), closure(5, pin=2)
    workers = [ready_worker(i, 112.0, c) for i, c in enumerate([given, unnamed, pinned])]
    lines = described(
        workers, queue=queue, threads=(WaitingThread("feeder", "schedule", 112.0),)
    ).lines
    assert lines[0].endswith("the queue holds 0 of at most 1 closures")
    assert lines[1].startswith(
        "closure 3 (train_step) has run on /job:worker/task:0 for 0.3 s, att"
    )
    assert lines[1].endswith("attempt 2")
    assert lines[3].startswith("closure 4 has run on")
    assert lines[5].startswith("closure 5 (fetches a value of this worker) has run on")


# Stacks.


@pytest.fixture
def parked() -> Iterator[threading.Event]:
    """Three threads that wait in the same place."""
    gate = threading.Event()

    def wait_in_the_park(secret: str) -> None:
        gate.wait(60)

    threads = [
        threading.Thread(target=wait_in_the_park, args=("hunter2",), name=f"parked-{i}")
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    yield gate
    gate.set()
    for thread in threads:
        thread.join(60)


def test_T122_stacks_name_threads_and_functions_and_no_values(parked: threading.Event) -> None:
    becomes(
        lambda: "3 threads (parked-0, parked-1, parked-2):" in thread_stacks.text(),
        "they are alike",
    )
    text = thread_stacks.text()
    assert "wait_in_the_park" in text
    assert "hunter2" not in text
    assert "test_watchdog.py:" in text


def test_T122_stacks_are_short_whatever_the_threads_do() -> None:
    def deep(count: int) -> str:
        return deep(count - 1) if count else thread_stacks.text()

    text = deep(200)
    assert "… older calls" in text
    assert len(text.encode()) <= thread_stacks.MOST_CHARACTERS
    short = thread_stacks.text(limit=100)
    assert len(short.encode()) <= 100
    assert short.endswith("stacks more")


def test_T122_what_others_said_cannot_steer_a_terminal() -> None:
    assert thread_stacks.cleaned("a\x1b]0;b\x07\r\nc") == "a?]0;b??\nc"
    assert len(thread_stacks.cleaned("x" * 10**6)) == thread_stacks.MOST_CHARACTERS


def test_T122_every_service_says_its_stacks_to_coordinators_alone() -> None:
    place, ps = addresses.resolve("inproc://watchdog-stacks"), Task("ps", 0)

    def handler(*_: Any) -> Any:
        raise AssertionError("this is answered before")

    with Service(place, ps, handler) as service:
        service.start()
        with Channel(place, Task("coordinator", 0), peer=ps) as channel:
            answer, _ = channel.request(messages.GetStacks(), timeout=60)
            assert isinstance(answer, messages.Stacks)
            assert "replicax-service-ps-0" in answer.text
        with (
            Channel(place, Task("worker", 0), peer=ps) as channel,
            pytest.raises(errors.PermissionDeniedError, match="GetStacks"),
        ):
            channel.request(messages.GetStacks(), timeout=60)


# With real tasks.


class Watched:
    """A coordinator on real processes, with a watchdog, and a closure that waits for a file."""

    def __init__(self, desk: Desk, tmp_path: Path, timeout: float = 0.4) -> None:
        self.coordinator = desk.coordinator(timing=PATIENT)
        self.file = io.StringIO()
        self.texts: list[str] = []
        self.gate, self.begun = tmp_path / "gate", tmp_path / "begun"
        self.watchdog = rx.coordinator.Watchdog(
            self.coordinator, timeout, self.file, self.texts.append
        )

    def schedule(self) -> Any:
        gate, begun = self.gate, self.begun

        def wait_for_the_gate() -> str:
            begun.touch()
            deadline = time.monotonic() + 60
            while not gate.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            return "through"

        value = self.coordinator.schedule(wait_for_the_gate)
        becomes(self.begun.exists, "it runs")
        return value

    def busy(self) -> int:
        workers = self.coordinator.status().workers
        return next(i for i, worker in enumerate(workers) if worker.num_closures)

    def next_text(self) -> str:
        """Returns what is told next, from here on."""
        count = len(self.texts)
        becomes(lambda: len(self.texts) > count, "it is told")
        return self.texts[-1]


def test_T122_a_stall_is_told_with_all_stacks_until_it_is_over(desk: Desk, tmp_path: Path) -> None:
    watched = Watched(desk, tmp_path)
    with watched.watchdog:
        value = watched.schedule()
        worker = watched.busy()
        joining = threading.Thread(target=watched.coordinator.join, name="joining")
        joining.start()
        words_here = (
            "thread joining has waited in `join`",
            "Engine.join",
            "wait_for_the_gate) has run on ",
            f"/job:worker/task:{worker} has computed for",
            "/job:ps/task:1 replied",
        )
        # The function of the user, where it is now.
        words_there = ("Thread MainThread:", "wait_for_the_gate")

        def tells_all(text: str) -> bool:
            here, _, there = text.partition(f"Stacks of /job:worker/task:{worker}:")
            return all(w in here for w in words_here) and all(w in there for w in words_there)

        # A task that waits for its turn on this machine is called silent, as it is.
        becomes(lambda: any(map(tells_all, watched.texts)), "all is told in one text")
        becomes(lambda: len(watched.texts) >= 2, "it is told again")
        watched.gate.touch()
        joining.join(60)
        assert not joining.is_alive()
        assert value.fetch(60) == "through"
        becomes(lambda: "resumed after" in watched.file.getvalue(), "the end is told")
        told = watched.file.getvalue()
        assert told.count("no closure has ended for") == len(watched.texts) >= 2
        assert watched.coordinator.schedule(lambda: 1).fetch(60) == 1
    assert watched.file.getvalue() == told, "then there is nothing to tell"


def test_T122_a_frozen_worker_is_called_silent_and_not_waited_for(
    desk: Desk, tmp_path: Path
) -> None:
    watched = Watched(desk, tmp_path)
    with watched.watchdog:
        watched.schedule()
        worker = watched.busy()
        desk.cluster.stop("worker", worker)
        try:
            task = f"/job:worker/task:{worker}"
            becomes(
                lambda: f"{task} has not answered heartbeats for" in watched.next_text(), "silent"
            )
            text = watched.next_text()
        finally:
            desk.cluster.cont("worker", worker)
        assert f"Stacks of {task}: no reply (DeadlineExceededError)" in text
        watched.gate.touch()
        watched.coordinator.join(timeout=60)


def test_T122_the_server_that_a_worker_waits_for_is_named(desk: Desk, tmp_path: Path) -> None:
    strategy = desk.strategy()
    with strategy.scope():
        variable = rx.Variable(1.0, name="v")
    coordinator = desk.coordinator(strategy, timing=PATIENT)
    index = variable.server

    def read() -> float:
        return float(variable.numpy())

    assert coordinator.schedule(read).fetch(60) == 1.0
    texts: list[str] = []
    with rx.coordinator.Watchdog(coordinator, 0.4, io.StringIO(), texts.append):
        desk.cluster.stop("ps", index)
        try:
            value = coordinator.schedule(read)
            words = (
                f"has waited for a reply of /job:ps/task:{index} for",
                # How long a beat may take counts from the last one that was answered, so that
                # the first text may come too early.
                f"/job:ps/task:{index} has not answered heartbeats for",
                f"Stacks of /job:ps/task:{index}: no reply",
            )
            becomes(
                lambda: any(all(part in text for part in words) for text in texts),
                "the server is named",
            )
        finally:
            desk.cluster.cont("ps", index)
        assert value.fetch(60) == 1.0


def test_T122_nothing_that_goes_wrong_in_it_reaches_the_program(
    desk: Desk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def fail(text: str) -> None:
        calls.append(text)
        raise RuntimeError("of the user")

    watched = Watched(desk, tmp_path)
    watched.watchdog.stop()
    closed = io.StringIO()
    closed.close()
    with (
        caplog.at_level(logging.ERROR),
        rx.coordinator.Watchdog(watched.coordinator, 0.1, io.StringIO(), fail),
        rx.coordinator.Watchdog(watched.coordinator, 0.1, closed),
    ):
        value = watched.schedule()
        becomes(lambda: len(calls) > 1 and "closed file" in caplog.text, "both fail, and go on")
        watched.gate.touch()
        assert value.fetch(60) == "through"
    assert "of the user" in caplog.text


def test_T122_it_ends_with_its_coordinator_and_keeps_none_alive(desk: Desk) -> None:
    def is_there() -> bool:
        return any(t.name == "replicax-watchdog" for t in threading.enumerate())

    coordinator = desk.coordinator()
    dog = rx.coordinator.Watchdog(coordinator)
    assert is_there()
    coordinator.close()
    becomes(lambda: not is_there(), "the end")
    dog.stop()
    with pytest.raises(errors.ContextError, match="closed"):
        rx.coordinator.Watchdog(coordinator)
    desk.leave()
    strategy = rx.ParameterServerStrategy(desk.cluster.resolver)
    rx.coordinator.Watchdog(rx.coordinator.ClusterCoordinator(strategy))
    # The coordinator is unreferenced: it has ended, and its watchdog with it.
    becomes(lambda: not is_there(), "the end of what was dropped")
    strategy.close()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_T122_the_timeout_is_checked(timeout: float) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="timeout"):
        rx.coordinator.Watchdog(None, timeout)  # type: ignore[arg-type]
