"""Spans, their files, the clocks of several machines, and traces in the format of Perfetto."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from vocabulary import refused

import replicax as rx
import replicax.profiler
from replicax.cli.main import app
from replicax.foundation import errors, spans
from replicax.timeline import clocks, merging, parts, perfetto
from replicax.timeline.parts import Part, Span


@pytest.fixture
def trace() -> Iterator[str]:
    name = "test"
    spans.start(name)
    yield name
    spans.stop(name)


def part(task: str, *found: Span, boot: str = "a", pid: int = 1, offset_ns: int = 0) -> Part:
    return Part("t", task, f"host-{boot}", pid, boot, offset_ns, {"main": pid}, list(found))


# Recording.


def test_while_nothing_is_recorded_a_point_is_one_call_of_a_builtin() -> None:
    assert spans.now is int and spans.now() == 0
    assert spans.recorder() is None
    spans.record("pull", 1)  # of a span that began before the trace ended


def test_spans_have_their_times_threads_and_labels(trace: str) -> None:
    began = spans.now()
    spans.record("pull", began, 7, 3, "table")
    thread = threading.Thread(target=lambda: spans.record("push", spans.now(), 8), name="other")
    thread.start()
    thread.join()
    ended = time.monotonic_ns()
    found = parts.decode(spans.stop(trace))
    pull, push = found.spans
    assert (pull.kind, pull.closure, pull.amount, pull.label) == ("pull", 7, 3, "table")
    assert (push.kind, push.closure, push.amount, push.label) == ("push", 8, 0, "")
    assert pull.track == threading.current_thread().name
    assert push.track == "other"
    assert pull.start == began
    assert began <= pull.end <= push.start <= push.end <= ended
    assert found.pid == os.getpid()


def test_a_recorder_keeps_the_last_spans() -> None:
    recorder = spans.Recorder("t", "program", capacity=100)
    for number in range(1000):
        recorder.add("pull", number + 1, number)
    found = parts.decode(recorder.content())
    assert [span.closure for span in found.spans] == list(range(900, 1000))
    assert found.num_lost == 900


def test_spans_of_several_threads_are_complete() -> None:
    recorder = spans.Recorder("t", "program", capacity=10_000)

    def add(first: int) -> None:
        for number in range(first, first + 1000):
            recorder.add(f"kind {number % 7}", 1, number)

    threads = [threading.Thread(target=add, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = parts.decode(recorder.content())
    assert sorted(span.closure for span in found.spans) == list(range(8000))
    assert all(span.kind == f"kind {span.closure % 7}" for span in found.spans)
    assert len({span.track for span in found.spans}) == 8


def test_names_that_do_not_fit_are_dropped_and_spans_are_kept() -> None:
    recorder = spans.Recorder("t", "program")
    for number in range(5000):
        recorder.add("call", 1, number, label=f"function {number} {'x' * 50}")
    found = parts.decode(recorder.content())
    assert len(found.spans) == 5000
    assert found.spans[0].label.startswith("function 0 ")
    assert found.spans[-1].label == ""


def test_one_trace_at_a_time(trace: str) -> None:
    assert not spans.start(trace)
    with refused(errors.ContextError, "one trace at a time"):
        spans.start("another")
    assert spans.stop("another") == b""
    assert spans.recorder() is not None


def test_the_spans_of_a_killed_process_are_in_its_file(tmp_path: Path) -> None:
    program = """
        import sys, time, os, signal
        from pathlib import Path
        from replicax.foundation import spans
        spans.start("t", Path(sys.argv[1]))
        spans.set_task("/job:worker/task:1")
        for number in range(50):
            spans.record("compute", spans.now(), number)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = tmp_path / "killed.spans"
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    found = parts.decode(path.read_bytes())
    assert found.task == "/job:worker/task:1"
    assert [span.closure for span in found.spans] == list(range(50))
    assert path.stat().st_mode & 0o077 == 0


def test_a_record_that_is_not_complete_is_left_out() -> None:
    recorder = spans.Recorder("t", "program", capacity=10)
    for number in range(5):
        recorder.add("pull", 1, number)
    content = bytearray(recorder.content())
    # The number of a record is written last.
    end = spans.TEXT_BYTES + 3 * spans.RECORD.size
    content[end - 8 : end] = bytes(8)
    assert [span.closure for span in parts.decode(bytes(content)).spans] == [0, 1, 3, 4]


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, b'{"format": 9, "capacity": 1}' + bytes(70_000)]
)
def test_other_files_are_not_parts_of_a_trace(content: bytes) -> None:
    with refused(errors.DataLossError, "A part of a trace"):
        parts.decode(content)


# The format of Perfetto.


def read_back(path: Path) -> tuple[pb.Trace, dict[int, Any]]:
    """Reads a trace with Perfetto's own classes; returns it and its tracks, by id."""
    found = pb.Trace()
    found.ParseFromString(path.read_bytes())
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in found.packet
        if p.HasField("track_descriptor")
    }
    return found, tracks


def test_perfetto_reads_processes_threads_and_slices(tmp_path: Path) -> None:
    found = [
        Span("closure", "main", 100, 50, closure=0),
        Span("pull", "main", 100, 20, closure=0, amount=2),
        Span("compute", "main", 120, 30, label="step"),
        Span("compute", "devices", 125, 10, label="step"),
    ]
    perfetto.write(tmp_path / "t.pftrace", [part("/job:worker/task:0", *found, pid=42)])
    trace, tracks = read_back(tmp_path / "t.pftrace")
    process = next(t for t in tracks.values() if t.HasField("process"))
    assert (process.process.pid, process.process.process_name) == (42, "/job:worker/task:0")
    thread = next(t for t in tracks.values() if t.HasField("thread"))
    assert (thread.thread.pid, thread.thread.tid, thread.thread.thread_name) == (42, 42, "main")
    devices = next(t for t in tracks.values() if t.name == "devices")
    assert devices.parent_uuid == process.uuid
    events = [p for p in trace.packet if p.HasField("track_event")]
    main = [p for p in events if p.track_event.track_uuid == thread.uuid]
    types = [(p.timestamp, p.track_event.type, p.track_event.name) for p in main]
    begin, end = pb.TrackEvent.TYPE_SLICE_BEGIN, pb.TrackEvent.TYPE_SLICE_END
    assert types == [
        (100, begin, "closure"),
        (100, begin, "pull"),
        (120, end, ""),
        (120, begin, "compute step"),
        (150, end, ""),
        (150, end, ""),
    ]
    assert list(main[0].track_event.categories) == ["closure"]
    # Flows have ids other than 0, those of spans without a closure none.
    assert list(main[1].track_event.flow_ids) == [1]
    assert not main[3].track_event.flow_ids
    notes = {n.name: n.int_value for n in main[1].track_event.debug_annotations}
    assert notes == {"closure": 0, "amount": 2}
    assert perfetto.read(tmp_path / "t.pftrace")[0].spans == sorted(
        found, key=lambda s: (s.start, -s.duration)
    )


def test_spans_that_overlap_without_nesting_get_tracks_of_their_own(tmp_path: Path) -> None:
    found = [Span("a", "devices", 0, 10), Span("b", "devices", 5, 10), Span("c", "devices", 10, 2)]
    perfetto.write(tmp_path / "t.pftrace", [part("x", *found)])
    trace, _ = read_back(tmp_path / "t.pftrace")
    depth: dict[int, list[str]] = {}
    last: dict[int, int] = {}
    for packet in trace.packet:
        if packet.HasField("track_event"):
            event = packet.track_event
            assert packet.timestamp >= last.get(event.track_uuid, 0)
            last[event.track_uuid] = packet.timestamp
            stack = depth.setdefault(event.track_uuid, [])
            if event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
                stack.append(event.name)
            else:
                stack.pop()
    assert len(depth) == 2
    assert not any(depth.values())
    assert sorted(s.kind for s in perfetto.read(tmp_path / "t.pftrace")[0].spans) == ["a", "b", "c"]


def test_processes_of_two_machines_with_equal_ids_are_two_processes(tmp_path: Path) -> None:
    both = [part(f"task {boot}", Span("a", "main", 1, 1), boot=boot, pid=7) for boot in "ab"]
    perfetto.write(tmp_path / "t.pftrace", both)
    _, tracks = read_back(tmp_path / "t.pftrace")
    ids = {t.process.pid for t in tracks.values() if t.HasField("process")}
    assert len(ids) == 2
    assert {t.thread.pid for t in tracks.values() if t.HasField("thread")} == ids
    assert [(p.task, p.host, p.pid) for p in perfetto.read(tmp_path / "t.pftrace")] == [
        ("task a", "host-a", 7),
        ("task b", "host-b", 7),
    ]


def test_the_trace_relates_its_clock_to_the_time_of_day(tmp_path: Path) -> None:
    now = part("x", Span("a", "main", 1000, 1), offset_ns=10**18)
    perfetto.write(tmp_path / "t.pftrace", [now])
    trace, _ = read_back(tmp_path / "t.pftrace")
    clocks_of = next(p.clock_snapshot for p in trace.packet if p.HasField("clock_snapshot"))
    values = {clock.clock_id: clock.timestamp for clock in clocks_of.clocks}
    assert values[pb.BUILTIN_CLOCK_REALTIME] - values[pb.BUILTIN_CLOCK_BOOTTIME] == 10**18


def test_other_files_are_not_traces(tmp_path: Path) -> None:
    (tmp_path / "t.pftrace").write_bytes(b"\x0a\xff\xff\xff\xff\x0f")
    with refused(errors.DataLossError, "must be a trace of replicax"):
        perfetto.read(tmp_path / "t.pftrace")


# Clocks.


def test_processes_of_one_machine_are_not_moved() -> None:
    both = [part("a", Span("x", "main", 5, 1)), part("b", Span("x", "main", 3, 1), offset_ns=99)]
    assert clocks.aligned(both) == both


def test_the_time_of_day_relates_machines_without_common_events() -> None:
    here = part("a", Span("x", "main", 1_000, 1), offset_ns=500)
    there = part("b", Span("x", "main", 90_000, 1), boot="b", offset_ns=-88_000)
    assert clocks.aligned([here, there])[1].spans[0].start == 1_500


@pytest.mark.parametrize("error_ms", [-400, -3, 0, 2, 50_000])
def test_closures_bound_the_error_of_the_time_of_day(error_ms: int) -> None:
    rng = np.random.default_rng(0)
    error = error_ms * 1_000_000
    sent, ran, got, moment = [], [], [], 10**9
    for closure in range(200):
        there, back = (int(rng.integers(50_000, 2_000_000)) for _ in range(2))
        sent.append(Span("assign", "main", moment, 1_000, closure))
        ran.append(Span("closure", "main", moment + there + error, 3_000_000, closure))
        got.append(Span("finish", "main", moment + there + 3_000_000 + back, 1_000, closure))
        moment += 10_000_000
    found = clocks.aligned([part("c", *sent, *got), part("w", *ran, boot="b")])
    moved = [new.start - old.start for new, old in zip(found[1].spans, ran, strict=True)]
    assert len(set(moved)) == 1
    assert abs(moved[0] + error) < 1_000_000


def test_calls_of_a_group_bound_the_error_too() -> None:
    def member(boot: str, late: int, error: int) -> Part:
        found = [
            Span("agree", "main", error + 10_000_000 * i + late * (i % 3), 3 * 10**5, -1, i, "step")
            for i in range(20)
        ]
        return part(boot, *found, boot=boot)

    here, there = member("a", 0, 0), member("b", 100_000, 7_000_000)
    moved = clocks.aligned([here, there])[1].spans[0].start - there.spans[0].start
    assert abs(moved + 7_000_000) < 1_000_000


# rx.profiler in one process.


def test_a_trace_of_one_process_has_calls_input_waits_and_checkpoints(tmp_path: Path) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        total = rx.Variable(jnp.zeros(3), aggregation=rx.VariableAggregation.SUM)
    data = rx.data.Dataset.from_tensor_slices(np.ones((40, 3), np.float32)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @rx.function
    def step(batch: Any) -> None:
        strategy.run(lambda x: total.assign_add(jnp.sum(x, 0)), args=(batch,))

    step(next(iterator))
    manager = rx.train.CheckpointManager(rx.train.Checkpoint(total=total), tmp_path / "saved", 1)
    with rx.profiler.trace(tmp_path / "traces") as trace, manager:
        for _ in range(5):
            step(next(iterator))
        manager.save()
        manager.wait()
    assert trace.path is not None
    (found,) = perfetto.read(trace.path)
    kinds = [(span.kind, span.label) for span in found.spans]
    assert kinds.count(("call", "step")) == 5
    assert kinds.count(("wait", "input")) == 5
    assert {("checkpoint", "copy"), ("checkpoint", "write")} <= set(kinds)
    computed = [s for s in found.spans if (s.kind, s.label) == ("compute", "step")]
    called = [s for s in found.spans if (s.kind, s.label) == ("call", "step")]
    assert len(computed) == 5
    for one, other in zip(called, computed, strict=True):
        assert other.track == "devices"
        assert one.start <= other.start
    for one, other in itertools.pairwise(computed):
        assert one.end <= other.start
    # The sums over both devices, inside of the programs.
    sums = [s for s in found.spans if s.kind == "all-reduce" and s.track.startswith("collectives")]
    assert sums
    assert all(
        any(c.start - 10**6 <= s.start and s.end <= c.end + 10**6 for c in computed) for s in sums
    )
    assert list(tmp_path.glob("traces/*")) == [trace.path]
    assert spans.recorder() is None


@pytest.mark.parametrize("has_result", [True, False])
def test_programs_on_one_device_are_timed_without_a_copy_of_their_state(
    tmp_path: Path, has_result: bool
) -> None:
    state = rx.Variable(jnp.zeros(1000))

    @rx.function
    def step() -> Any:
        state.assign_add(jnp.ones(1000))
        return jnp.sum(state) if has_result else None

    step()
    with rx.profiler.trace(tmp_path) as trace:
        pointers = set()
        for _ in range(6):
            step()
            pointers.add(state.stored.unsafe_buffer_pointer())  # type: ignore[union-attr]
    assert state.numpy()[0] == 7.0
    # The buffer of the old value is taken over for the new one.
    assert len(pointers) == 1
    assert trace.path is not None
    (found,) = perfetto.read(trace.path)
    assert sum((s.kind, s.track) == ("compute", "devices") for s in found.spans) == 6


def test_a_block_that_raises_leaves_a_trace_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), rx.profiler.trace(tmp_path):
        _ = 1 / 0
    assert len(list(tmp_path.glob("*.pftrace"))) == 1
    assert spans.recorder() is None


def test_the_files_of_tasks_become_one_trace_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("/job:worker/task:1", "/job:worker/task:0", "/job:worker/task:1"):
        recorder = spans.Recorder("t", task, tmp_path / f"{len(list(tmp_path.iterdir()))}.spans")
        for number in range(10):
            recorder.add("compute", time.monotonic_ns() - 1_000_000, number)
    out, drawn = tmp_path / "all.pftrace", tmp_path / "all.png"
    arguments = ["trace", str(tmp_path), "--out", str(out), "--picture", str(drawn)]
    app(arguments, standalone_mode=False)
    assert "3 tasks, 30 spans" in capsys.readouterr().out
    assert [p.task[-1] for p in perfetto.read(out)] == ["0", "1", "1"]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.spans"))
    with refused(errors.NotFoundError, "must have the files of a trace"):
        merging.merge(tmp_path)


def test_a_trace_without_spans_is_not_drawn(tmp_path: Path) -> None:
    perfetto.write(tmp_path / "t.pftrace", [dataclasses.replace(part("x"))])
    with refused(errors.InvalidArgumentError, "needs spans"):
        rx.profiler.draw(tmp_path / "t.pftrace", tmp_path / "t.png")
