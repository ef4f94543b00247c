"""Writes a trace in the format of Perfetto, and reads it again.

The file is a protocol buffer of the message `Trace`. Each task is a process of it, and each thread
or device of a task a track of that process. The few messages that this needs are written field by
field, as is done for other files in `tensorflow_files`: users need no package for it.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicax.foundation import errors
from replicax.tensorflow_files import wire
from replicax.timeline.parts import Part, Span

SUFFIX = ".pftrace"

# Numbers of fields, by message.
_PACKET = 1
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _CLOCKS, _TRACK = 8, 10, 11, 6, 60
_EVENT_ANNOTATION, _EVENT_TYPE, _EVENT_TRACK = 4, 9, 11
_EVENT_CATEGORY, _EVENT_NAME, _EVENT_FLOW = 22, 23, 47
_TRACK_ID, _TRACK_NAME, _TRACK_PROCESS, _TRACK_THREAD, _TRACK_PARENT = 1, 2, 3, 4, 5
_PROCESS_ID, _PROCESS_NAME, _PROCESS_LABEL = 1, 6, 8
_THREAD_PROCESS, _THREAD_ID, _THREAD_NAME = 1, 2, 5
_NOTE_INTEGER, _NOTE_TEXT, _NOTE_NAME = 4, 6, 10
# Values of enums.
_BEGIN, _END = 1, 2
_REALTIME, _MONOTONIC, _BOOTTIME = 1, 3, 6

# Processes of several machines may have equal ids; ids of Linux are smaller than this.
_MOST_PROCESSES = 1 << 22


def write(path: str | os.PathLike[str], parts: Sequence[Part]) -> None:
    """Writes a trace with one process for each part, whose clocks must be aligned.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> part = Part("t", "worker 0", "host", 7, "", 0, {"main": 7}, [Span("pull", "main", 5, 3)])
    >>> write(f"{folder.name}/trace{SUFFIX}", [part])
    >>> read(f"{folder.name}/trace{SUFFIX}")[0].spans
    [Span(kind='pull', track='main', start=5, duration=3, closure=-1, amount=0, label='')]
    >>> folder.cleanup()
    """
    packets: list[bytes] = []
    ids = _process_ids(parts)
    if parts:
        packets.append(_clocks(parts[0]))
    for number, (part, process) in enumerate(zip(parts, ids, strict=True)):
        packets += _packets(part, process, (number + 1) << 32, number + 1)
    whole, unfinished = Path(path), Path(f"{os.fspath(path)}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(b"".join(wire.octets(_PACKET, packet) for packet in packets))
        unfinished.replace(whole)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> list[Part]:
    """Reads a trace that `write` has written.

    Raises:
      DataLossError: The file is not such a trace.
    """
    try:
        return _decode(Path(path).read_bytes())
    except (wire.WireError, KeyError, IndexError) as error:
        raise errors.DataLossError(
            f"{os.fspath(path)} must be a trace of replicax", str(error), "Check the path."
        ) from error


def _process_ids(parts: Sequence[Part]) -> list[int]:
    """Returns an id for each part: that of its process, unless another part has it too."""
    found: dict[int, None] = {}
    for part in parts:
        number = part.pid
        while number in found:
            number += _MOST_PROCESSES
        found[number] = None
    return list(found)


def _clocks(part: Part) -> bytes:
    """Relates the clock of the trace, the monotonic one, to the time of day."""
    at = part.spans[0].start if part.spans else 0
    values = {_BOOTTIME: at, _MONOTONIC: at, _REALTIME: at + part.offset_ns}
    clocks = [wire.number(1, clock) + wire.number(2, value) for clock, value in values.items()]
    return wire.octets(_CLOCKS, b"".join(wire.octets(1, clock) for clock in clocks))


def _packets(part: Part, process: int, first_id: int, sequence: int) -> Iterator[bytes]:
    yield _descriptor(
        first_id,
        wire.octets(
            _TRACK_PROCESS,
            wire.number(_PROCESS_ID, process)
            + wire.text(_PROCESS_NAME, part.task)
            + wire.text(_PROCESS_LABEL, f"{part.host}, process {part.pid}"),
        ),
    )
    by_track: dict[str, list[Span]] = collections.defaultdict(list)
    for span in part.spans:
        by_track[span.track].append(span)
    following = first_id
    for track, own in by_track.items():
        thread = part.threads.get(track, 0)
        for number, row in enumerate(_rows(own)):
            following += 1
            fields = wire.number(_TRACK_PARENT, first_id)
            # Perfetto knows a thread by its id, so it has one track.
            if thread and number == 0:
                fields = wire.octets(
                    _TRACK_THREAD,
                    wire.number(_THREAD_PROCESS, process)
                    + wire.number(_THREAD_ID, thread)
                    + wire.text(_THREAD_NAME, track),
                )
            else:
                fields += wire.text(_TRACK_NAME, track)
            yield _descriptor(following, fields)
            yield from _events(row, following, sequence)


def _descriptor(track: int, fields: bytes) -> bytes:
    return wire.octets(_TRACK, wire.number(_TRACK_ID, track) + fields)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans such that those of one row follow or contain each other."""
    rows: list[list[Span]] = []
    # For each row, the ends of the spans that contain what comes next.
    open_ends: list[list[int]] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.duration)):
        number = next((i for i, ends in enumerate(open_ends) if _fits(span, ends)), len(rows))
        if number == len(rows):
            rows.append([])
            open_ends.append([])
        rows[number].append(span)
        open_ends[number].append(span.end)
    return rows


def _fits(span: Span, ends: list[int]) -> bool:
    while ends and ends[-1] <= span.start:
        ends.pop()
    return not ends or span.end <= ends[-1]


def _events(row: Sequence[Span], track: int, sequence: int) -> Iterator[bytes]:
    """Yields the begin and the end of each span, ordered by time."""
    where = wire.number(_EVENT_TRACK, track)
    end_event = wire.number(_EVENT_TYPE, _END) + where
    open_ends: list[int] = []
    for span in row:
        while open_ends and open_ends[-1] <= span.start:
            yield _event(open_ends.pop(), sequence, end_event)
        name = f"{span.kind} {span.label}" if span.label else span.kind
        event = wire.number(_EVENT_TYPE, _BEGIN) + where
        event += wire.text(_EVENT_CATEGORY, span.kind) + wire.text(_EVENT_NAME, name)
        if span.closure >= 0:
            # Arrows connect the spans of one closure, across the tasks.
            event += _note("closure", span.closure) + _flow(span.closure)
        if span.amount:
            event += _note("amount", span.amount)
        if span.label:
            event += _note("label", span.label)
        yield _event(span.start, sequence, event)
        open_ends.append(span.end)
    while open_ends:
        yield _event(open_ends.pop(), sequence, end_event)


def _event(timestamp: int, sequence: int, event: bytes) -> bytes:
    return (
        wire.number(_TIMESTAMP, timestamp)
        + wire.number(_SEQUENCE, sequence)
        + wire.octets(_TRACK_EVENT, event)
    )


def _note(name: str, value: int | str) -> bytes:
    shown = (
        wire.number(_NOTE_INTEGER, value)
        if isinstance(value, int)
        else wire.text(_NOTE_TEXT, value)
    )
    return wire.octets(_EVENT_ANNOTATION, wire.text(_NOTE_NAME, name) + shown)


def _flow(closure: int) -> bytes:
    # The id of a flow is not 0.
    return wire.fixed64(_EVENT_FLOW, closure + 1)


# Reading.


class _Process:
    def __init__(self, fields: dict[int, list[wire.Value]]) -> None:
        self.pid = wire.as_unsigned(fields[_PROCESS_ID][0])
        self.task = wire.as_text(fields[_PROCESS_NAME][0])
        label = wire.as_text(fields[_PROCESS_LABEL][0])
        self.host = label.rpartition(", process ")[0]
        self.threads: dict[str, int] = {}
        self.spans: list[Span] = []


def _decode(content: bytes) -> list[Part]:
    processes: dict[int, _Process] = {}
    tracks: dict[int, tuple[_Process, str]] = {}
    open_spans: dict[int, list[Span]] = collections.defaultdict(list)
    offset = 0
    for _, _, packet in wire.fields(content):
        fields = _fields(packet)
        if _CLOCKS in fields:
            offset = _decode_clocks(fields[_CLOCKS][0])
        elif _TRACK in fields:
            _add_track(_fields(fields[_TRACK][0]), processes, tracks)
        elif _TRACK_EVENT in fields:
            at = wire.as_unsigned(fields[_TIMESTAMP][0])
            event = _fields(fields[_TRACK_EVENT][0])
            track = wire.as_unsigned(event[_EVENT_TRACK][0])
            if event[_EVENT_TYPE][0] == _BEGIN:
                open_spans[track].append(_decode_span(event, tracks[track][1], at))
            else:
                begun = open_spans[track].pop()
                process, name = tracks[track]
                process.spans.append(
                    Span(
                        *(begun.kind, name, begun.start, at - begun.start),
                        *(begun.closure, begun.amount, begun.label),
                    )
                )
    return [
        Part(
            *("", p.task, p.host, p.pid % _MOST_PROCESSES, "", offset, p.threads),
            sorted(p.spans, key=lambda s: (s.start, -s.duration)),
        )
        for p in processes.values()
    ]


def _fields(message: wire.Value) -> dict[int, list[wire.Value]]:
    found: dict[int, list[wire.Value]] = collections.defaultdict(list)
    for number, _, value in wire.fields(wire.as_bytes(message)):
        found[number].append(value)
    return dict(found)


def _decode_clocks(message: wire.Value) -> int:
    clocks = [_fields(clock) for clock in _fields(message)[1]]
    values = {clock[1][0]: wire.as_unsigned(clock[2][0]) for clock in clocks}
    return values[_REALTIME] - values[_MONOTONIC]


def _add_track(
    fields: dict[int, list[wire.Value]],
    processes: dict[int, _Process],
    tracks: dict[int, tuple[_Process, str]],
) -> None:
    track = wire.as_unsigned(fields[_TRACK_ID][0])
    if _TRACK_PROCESS in fields:
        processes[track] = _Process(_fields(fields[_TRACK_PROCESS][0]))
    elif _TRACK_THREAD in fields:
        thread = _fields(fields[_TRACK_THREAD][0])
        pid = wire.as_unsigned(thread[_THREAD_PROCESS][0])
        process = next(p for p in processes.values() if p.pid == pid)
        name = wire.as_text(thread[_THREAD_NAME][0])
        process.threads[name] = wire.as_unsigned(thread[_THREAD_ID][0])
        tracks[track] = process, name
    else:
        process = processes[wire.as_unsigned(fields[_TRACK_PARENT][0])]
        name = wire.as_text(fields[_TRACK_NAME][0])
        process.threads.setdefault(name, 0)
        tracks[track] = process, name


def _decode_span(event: dict[int, list[wire.Value]], track: str, start: int) -> Span:
    notes: dict[str, wire.Value] = {}
    for encoded in event.get(_EVENT_ANNOTATION, ()):
        note = _fields(encoded)
        value = note[_NOTE_INTEGER][0] if _NOTE_INTEGER in note else note[_NOTE_TEXT][0]
        notes[wire.as_text(note[_NOTE_NAME][0])] = value
    return Span(
        wire.as_text(event[_EVENT_CATEGORY][0]),
        track,
        start,
        0,
        wire.as_signed(notes.get("closure", (1 << 64) - 1)),
        wire.as_signed(notes.get("amount", 0)),
        wire.as_text(notes.get("label", b"")),
    )
