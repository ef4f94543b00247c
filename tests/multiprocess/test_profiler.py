"""Traces of clusters: one file with all tasks, read back with Perfetto's own classes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from parameter_servers import Desk, until_all_idle
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

import replicax as rx
import replicax.profiler
from replicax.coordinator import engine
from replicax.foundation import spans
from replicax.observe import client, job_directory
from replicax.timeline import clocks, parts, perfetto
from replicax.timeline.parts import Part

NUM_CLOSURES = 60
ALL_TASKS = {
    "/job:coordinator/task:0",
    *(f"/job:{job}/task:{index}" for job in ("ps", "worker") for index in (0, 1)),
}


@dataclasses.dataclass
class Slice:
    """A span as Perfetto has it."""

    kind: str
    task: str
    track: str
    start: int
    end: int
    closure: int | None
    depth: int


def slices_of(path: Path) -> list[Slice]:
    """Reads a trace with the classes of the package `perfetto`."""
    trace = pb.Trace()
    trace.ParseFromString(path.read_bytes())
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    found: list[Slice] = []
    stacks: dict[int, list[Slice]] = collections.defaultdict(list)
    last: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.HasField("process"):
                processes[track.process.pid] = track.process.process_name
                tracks[track.uuid] = track.process.process_name, ""
            elif track.HasField("thread"):
                tracks[track.uuid] = processes[track.thread.pid], track.thread.thread_name
            else:
                tracks[track.uuid] = tracks[track.parent_uuid][0], track.name
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        task, name = tracks[event.track_uuid]
        # Events of a track are in the order of time, and each end has its begin.
        assert packet.timestamp >= last.get(event.track_uuid, 0)
        last[event.track_uuid] = packet.timestamp
        stack = stacks[event.track_uuid]
        if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
            notes = {n.name: n.int_value for n in event.debug_annotations}
            one = Slice(
                event.categories[0], task, name, packet.timestamp, 0, notes.get("closure"),
                len(stack),
            )  # fmt: skip
            stack.append(one)
            found.append(one)
        else:
            assert event.type == pb.TrackEvent.TYPE_SLICE_END
            stack.pop().end = packet.timestamp
    assert not any(stacks.values())
    return found


def training(desk: Desk) -> tuple[Any, Any]:
    strategy = desk.strategy(parts=2)
    with strategy.scope():
        weights = rx.Variable(jnp.full((8, 4), 0.5))
        count = rx.Variable(0.0)
    coordinator = desk.coordinator(strategy)

    @rx.function
    def step() -> None:
        gradient = rx.grad(lambda: jnp.mean((jnp.ones((4, 8)) @ weights) ** 2), weights)()
        weights.assign_sub(0.01 * gradient)
        count.assign_add(1.0)

    until_all_idle(coordinator)
    for _ in range(8):
        coordinator.schedule(step)
    coordinator.join(60)
    return coordinator, step


@pytest.fixture
def traced(desk: Desk, tmp_path: Path) -> tuple[list[Slice], Path]:
    coordinator, step = training(desk)
    with rx.profiler.trace(tmp_path) as trace:
        for _ in range(NUM_CLOSURES):
            coordinator.schedule(step)
        coordinator.join(60)
    assert trace.path is not None
    assert list(tmp_path.iterdir()) == [trace.path]
    return slices_of(trace.path), trace.path


def by_closure(found: list[Slice], kind: str) -> dict[int, list[Slice]]:
    own: dict[int, list[Slice]] = collections.defaultdict(list)
    for one in found:
        if one.kind == kind and one.closure is not None:
            own[one.closure].append(one)
    return own


def test_every_closure_has_its_spans_on_all_tasks_in_the_order_of_events(
    traced: tuple[list[Slice], Path],
) -> None:
    found, path = traced
    assert {one.task for one in found} == ALL_TASKS
    scheduled, ran = by_closure(found, "schedule"), by_closure(found, "closure")
    applied = by_closure(found, "apply")
    assert len(scheduled) == NUM_CLOSURES
    assert scheduled.keys() == ran.keys() == applied.keys()
    # A machine's processes share its clock; 1 ms is the error that a reader may assume.
    margin = 1_000_000
    finished = [one for one in found if one.kind == "finish"]
    for closure, (run,) in ran.items():
        (schedule,) = scheduled[closure]
        assert schedule.start <= run.start + margin
        assert any(run.end <= one.end + margin for one in finished)
        assert {one.task for one in applied[closure]} == {"/job:ps/task:0", "/job:ps/task:1"}
        assert all(run.start - margin <= one.start for one in applied[closure])
        # What a closure consists of is inside of it, one after the other.
        inner = [
            one
            for one in found
            if one.task == run.task
            and one.track == run.track
            and run.start <= one.start < run.end
            and one is not run
        ]
        assert [one.kind for one in inner] == ["pull", "compute", "push"], inner
        assert all(one.end <= run.end and one.depth == 1 for one in inner)
        for first, second in itertools.pairwise(inner):
            assert first.end <= second.start
    for task in ("/job:worker/task:0", "/job:worker/task:1"):
        runs = sorted((one.start, one.end) for (one,) in ran.values() if one.task == task)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs))
    assert any(one.kind == "assign" for one in found)
    assert any(one.kind == "wait" and one.task == "/job:coordinator/task:0" for one in found)
    # Nothing records any more.
    assert spans.recorder() is None
    assert perfetto.read(path)[0].task == "/job:coordinator/task:0"


def test_clocks_of_other_machines_are_set_by_the_order_of_events(desk: Desk) -> None:
    coordinator, step = training(desk)
    name = "by hand"
    spans.start(name)
    tasks = coordinator.engine
    assert tasks in engine.open_engines
    assert tasks.record_spans(name, True, 10.0) == []
    for _ in range(5 * NUM_CLOSURES):
        coordinator.schedule(step)
    coordinator.join(60)
    own = parts.decode(spans.stop(name))
    others = [parts.decode(one) for one in tasks.record_spans(name, False, 10.0)]
    assert {part.task for part in [own, *others]} == ALL_TASKS

    def moved(part: Part) -> Part:
        """The part of another machine, whose monotonic clock and time of day are different."""
        other = dataclasses.replace(part.shifted(3_600 * 10**9), boot=f"machine of {part.task}")
        return dataclasses.replace(other, offset_ns=other.offset_ns + 40_000_000)

    found = clocks.aligned([own, *(moved(part) for part in others)])
    assert found[0] == own
    for before, after in zip(others, found[1:], strict=True):
        assert before.task == after.task
        error = after.spans[0].start - before.spans[0].start
        # Bound by the fastest messages, which take long on a machine with much else to do; the
        # clock of a server is bound by whole closures only.
        assert abs(error) < (5_000_000 if "worker" in before.task else 20_000_000), before.task


def test_the_command_line_records_a_running_job(desk: Desk, tmp_path: Path) -> None:
    coordinator, step = training(desk)
    addresses = [
        desk.cluster.cluster_spec.task_address(j, i) for j in ("worker", "ps") for i in (0, 1)
    ]
    job = job_directory.of_cluster(addresses)
    assert {answer.reply["task"] for answer in client.ask_all(job, "ping")} == ALL_TASKS
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            coordinator.schedule(step)
            time.sleep(0.002)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        out = tmp_path / "job.pftrace"
        command = [sys.executable, "-m", "replicax", "trace", str(job), "--steps", "20", "-o", out]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        is_over.set()
        thread.join()
    coordinator.join(60)
    assert done.returncode == 0, done.stderr
    assert "5 tasks" in done.stdout
    found = slices_of(out)
    assert {one.task for one in found} == ALL_TASKS
    assert len(by_closure(found, "closure")) >= 20
    assert spans.recorder() is None


def train_together(directory: str, steps: int, kills: bool) -> str | None:
    import os
    import signal

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.ones((64, 64)), aggregation=rx.VariableAggregation.MEAN)
    data = rx.data.Dataset.from_tensors(np.ones(64, np.float32)).repeat(100_000).batch(32)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @rx.function
    def step(iterator: Any) -> None:
        def replica_step(x: Any) -> None:
            weights.assign_sub(0.01 * rx.grad(lambda: jnp.mean((x @ weights) ** 2), weights)())

        strategy.run(replica_step, args=(next(iterator),))

    step(iterator)
    marker = Path(directory) / "killed"
    if kills:
        for number in range(steps):
            step(iterator)
            if number == steps // 2 and strategy.cluster_resolver.task_id == 1:
                weights.numpy()
                if not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        weights.numpy()
        return None
    with rx.profiler.trace(directory) as trace:
        for _ in range(steps):
            step(iterator)
        weights.numpy()
    return None if trace.path is None else str(trace.path)


@pytest.mark.slow
def test_a_sync_group_writes_one_file_with_its_sums(cold_starts: None, tmp_path: Path) -> None:
    with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
        path, other = cluster.run(train_together, args=(str(tmp_path), 20, False))
    assert other is None
    assert [str(p) for p in tmp_path.iterdir()] == [path]
    found = slices_of(Path(path))
    for task in ("/job:worker/task:0", "/job:worker/task:1"):
        kinds = collections.Counter(one.kind for one in found if one.task == task)
        assert kinds["call"] == kinds["compute"] == 20
        assert kinds["all-reduce"] >= 20
        assert kinds["wait"] >= 20
    # A sum begins and ends on both workers in each step, so they overlap in time.
    sums = {
        task: sorted((o.start, o.end) for o in found if o.task == task and o.kind == "all-reduce")
        for task in ("/job:worker/task:0", "/job:worker/task:1")
    }
    pairs = list(zip(*(own[-15:] for own in sums.values()), strict=True))
    assert sum(a[0] < b[1] + 10**6 and b[0] < a[1] + 10**6 for a, b in pairs) >= 12


@pytest.mark.slow
def test_a_trace_of_a_group_has_the_worker_that_was_killed(
    cold_starts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAX_TRACE", str(tmp_path / "spans"))
    with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
        cluster.run(train_together, args=(str(tmp_path), 20, True), max_restarts=2)
    monkeypatch.delenv("REPLICAX_TRACE")
    path = rx.profiler.merge(tmp_path / "spans")
    found = perfetto.read(path)
    assert sorted(part.task[-1] for part in found) == ["0", "0", "1", "1"]
    first, second = (part for part in found if part.task.endswith("1"))
    killed, again = sorted((first, second), key=lambda part: part.spans[0].start)
    assert sum(span.kind == "call" for span in killed.spans) == 12
    assert sum(span.kind == "call" for span in again.spans) == 21
    assert max(span.end for span in killed.spans) < min(span.start for span in again.spans)
    rx.profiler.draw(path, tmp_path / "group.png", title="a worker is killed")
    assert (tmp_path / "group.png").stat().st_size > 10_000
