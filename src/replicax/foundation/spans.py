"""Spans: what the threads of this process did, and when, while a trace is recorded.

A recording point is three lines:

    began = spans.now()
    ...
    if began:
        spans.record("pull", began, closure)

Note [What a recording point costs]
    While nothing is recorded, `now` is the builtin `int`, which returns 0: a point costs the call
    of a builtin and a test, some 50 ns, and enters no other file. While a trace is recorded, `now`
    is `time.monotonic_ns`, and `record` appends a tuple, in some 300 ns, or writes 48 bytes into a
    mapped file, in less than a microsecond.

Note [Where spans are kept]
    All threads share one ring of fixed size, so that the spans of all threads reach back equally
    far. The number of a record comes from `itertools.count`, whose `next` is atomic, so no thread
    waits for another. The ring is a `deque`, or a mapped file: the kernel keeps what a process
    wrote before it was killed. `replicax.timeline.parts` reads the format of the file.

    Text area (64 KiB): lines of JSON, then zeros. The first line describes the process; others
    name a kind, a label or a track when it occurs first. Then the records; the last field of a
    record is its number, so that one that was not written completely is recognized.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from replicax.foundation import errors, settings

FORMAT = 1
# The end of the names of files with spans.
SUFFIX = ".spans"
TEXT_BYTES = 1 << 16
# Start and duration in nanoseconds, closure or -1, a count or size, kind, label, track, number.
RECORD = struct.Struct("<qqqqHHIq")
# The number of spans of one process that are kept.
CAPACITY = 1 << 16
# Kinds and labels are counted in 16 bits; those that do not fit have no name.
_MOST_NAMES = (1 << 16) - 1
_NO_CLOSURE = -1
# As a record, with the names of kind and label, and with a number from 0.
_Span = tuple[int, int, int, int, str, str, int, int]


class Record(Protocol):
    """Records a span that ends now."""

    def __call__(
        self, kind: str, began: int, closure: int = ..., amount: int = ..., label: str = ...
    ) -> None:
        """Records a span.

        Args:
          kind: What was done, one of a few words.
          began: The result of `now` at its start.
          closure: The closure that it belongs to; -1 for none.
          amount: A number of bytes, closures or arrays; 0 for none.
          label: What it was done to, such as the name of a function.
        """


def _drop(
    kind: str, began: int, closure: int = _NO_CLOSURE, amount: int = 0, label: str = ""
) -> None:
    """Records nothing: the trace has ended since the span began."""


# The time in nanoseconds while a trace is recorded, else 0.
now: Callable[[], int] = int
# Records a span; to be called only if `now` was not 0.
record: Record = _drop


class _Names(dict[str, int]):
    """The number of each name; a new name gets one when it is looked up."""

    def __init__(self, add: Callable[[str], int]) -> None:
        super().__init__({"": 0})
        self._add = add

    def __missing__(self, name: str) -> int:
        return self._add(name)


class Recorder:
    """Keeps the last spans of this process; see Note [Where spans are kept].

    Args:
      trace: The trace that the spans belong to; see `start`.
      task: The name of this process in the trace.
      path: A file for the spans, which must not exist; None to keep them in memory.
      capacity: The number of spans that are kept.

    >>> recorder = Recorder("t", "program")
    >>> recorder.add("pull", time.monotonic_ns(), closure=3)
    >>> recorder.content()[:10]
    b'{"format":'
    """

    def __init__(
        self, trace: str, task: str, path: Path | None = None, capacity: int = CAPACITY
    ) -> None:
        self.trace = trace
        size = TEXT_BYTES + capacity * RECORD.size
        self._buffer = _mapped(path, size)
        self._capacity = capacity
        self._numbers = itertools.count()
        # In memory, spans are packed when they are asked for: that costs less than half.
        self._kept: collections.deque[_Span] = collections.deque(maxlen=capacity)
        self._put: Callable[[_Span], None] = self._kept.append if path is None else self._pack
        self._names = _Names(self._add_name)
        # The number of each thread: of its own, as the id of an ended thread is used again.
        self._own = threading.local()
        self._tracks: dict[str, int] = {}
        self._num_tracks = 0
        self._lock = threading.Lock()
        self._text_size = 0
        self._write_line(
            {
                "format": FORMAT,
                "trace": trace,
                "task": task,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "boot": _boot_id(),
                "capacity": capacity,
                **clocks(),
            }
        )
        # Records a span that ends now.
        self.add = self._make_add()

    def _make_add(self) -> Record:
        """Returns the function that records a span; it looks up as little as possible."""
        clock, next_number, put = time.monotonic_ns, self._numbers.__next__, self._put
        own, add_thread = self._own, self._add_thread

        def add(
            kind: str,
            began: int,
            closure: int = _NO_CLOSURE,
            amount: int = 0,
            label: str = "",
        ) -> None:
            ended = clock()
            try:
                track = own.track
            except AttributeError:
                track = add_thread()
            put((began, ended - began, closure, amount, kind, label, track, next_number()))

        return add

    def _pack(self, span: _Span) -> None:
        """Writes a span into the buffer."""
        names, number = self._names, span[7]
        RECORD.pack_into(
            self._buffer,
            TEXT_BYTES + number % self._capacity * RECORD.size,
            *span[:4],
            names[span[4]],
            names[span[5]],
            span[6],
            number + 1,
        )

    def add_on_track(self, track: str, kind: str, began: int, ended: int, label: str = "") -> None:
        """Records a span of something that is not a thread, such as a device."""
        if track not in self._tracks:
            self._tracks[track] = self._add_track(0, track)
        at = began, ended - began, _NO_CLOSURE, 0
        self._put((*at, kind, label, self._tracks[track], next(self._numbers)))

    def set_task(self, task: str) -> None:
        """Names this process, which may learn only later which task it is."""
        self._write_line({"task": task})

    def content(self) -> bytes:
        """Returns everything recorded so far, in the format of the file."""
        for span in list(self._kept):
            self._pack(span)
        self._kept.clear()
        count = min(next(self._numbers), self._capacity)
        return self._buffer[: TEXT_BYTES + count * RECORD.size]

    def _add_name(self, name: str) -> int:
        with self._lock:
            known = self._names.get(name)
            if known is not None:
                return known
            number = len(self._names)
            is_stored = number < _MOST_NAMES and self._append({"name": [number, name[:200]]})
            self._names[name] = number if is_stored else 0
            return self._names[name]

    def _add_thread(self) -> int:
        name = threading.current_thread().name
        self._own.track = self._add_track(threading.get_native_id(), name)
        return self._own.track

    def _add_track(self, thread: int, name: str) -> int:
        """Returns the number of a new track; `thread` is 0 for what is not a thread."""
        with self._lock:
            number, self._num_tracks = self._num_tracks, self._num_tracks + 1
            self._append({"track": [number, thread, name[:200]]})
            return number

    def _write_line(self, line: dict[str, object]) -> None:
        with self._lock:
            self._append(line)

    def _append(self, line: dict[str, object]) -> bool:
        """Appends to the text area, unless it is full; the lock is held."""
        text = json.dumps(line).encode() + b"\n"
        start, end = self._text_size, self._text_size + len(text)
        if end > TEXT_BYTES:
            return False
        self._buffer[start:end] = text
        self._text_size = end
        return True


class _Process:
    recorder: Recorder | None = None
    task = "program"
    # A program may trace from several threads.
    lock = threading.Lock()


def recorder() -> Recorder | None:
    """Returns what records spans now; None while nothing is recorded."""
    return _Process.recorder


def set_task(task: str) -> None:
    """Sets the name that this process has in traces; starts to record if REPLICAX_TRACE is set."""
    _Process.task = task
    running = _Process.recorder
    directory = settings.REPLICAX_TRACE.read()
    if running is not None:
        running.set_task(task)
    elif directory:
        start(directory, path_in(Path(directory)))


def task() -> str:
    """Returns the name that this process has in traces."""
    return _Process.task


def start(trace: str, path: Path | None = None, capacity: int = CAPACITY) -> bool:
    """Starts to record; returns False if this trace is recorded already.

    Tasks that share a process are each told to record; the first one starts.

    Args:
      trace: An id of the trace.
      path: A file for the spans; None to keep them in memory.
      capacity: The number of spans that are kept.

    Raises:
      ContextError: Another trace is being recorded.

    >>> from replicax.foundation import spans
    >>> spans.start("demo"), spans.start("demo")
    (True, False)
    >>> spans.record("wait", spans.now())
    >>> len(spans.stop("demo")) == TEXT_BYTES + RECORD.size
    True
    >>> spans.now(), spans.stop("demo")
    (0, b'')
    """
    global now, record
    with _Process.lock:
        running = _Process.recorder
        if running is not None and running.trace == trace:
            return False
        if running is not None:
            raise errors.ContextError(
                f"{_Process.task} can record one trace at a time",
                f"it records {running.trace!r}",
                "Wait until that trace has ended.",
            )
        made = Recorder(trace, _Process.task, path, capacity)
        _Process.recorder = made
        record = made.add
        now = time.monotonic_ns
        return True


def stop(trace: str) -> bytes:
    """Stops to record, and returns the spans; nothing if this trace is not recorded.

    Args:
      trace: The id that was given to `start`.
    """
    global now, record
    with _Process.lock:
        running = _Process.recorder
        if running is None or running.trace != trace:
            return b""
        now = int
        record = _drop
        _Process.recorder = None
        return running.content()


def path_in(directory: Path) -> Path:
    """Returns a path for the spans of this process, different for each process and call."""
    name = "".join(c if c.isalnum() else "-" for c in _Process.task).strip("-")
    return directory / f"{name}-{os.getpid()}-{time.monotonic_ns():x}{SUFFIX}"


def switch(trace: str, is_on: bool) -> Sequence[bytes]:
    """Starts to record in memory, or stops; returns what was recorded, if anything."""
    if is_on:
        start(trace)
        return ()
    return (stop(trace),)


@contextlib.contextmanager
def block(kind: str, label: str = "") -> Iterator[None]:
    """Records a span of a block, for those that are rare.

    >>> with block("checkpoint", "write"):
    ...     pass
    """
    began = now()
    try:
        yield
    finally:
        if began:
            record(kind, began, label=label)


def clocks() -> dict[str, int]:
    """Returns the monotonic clock and the time of day, read at the same moment."""
    # The closest of a few pairs: the thread may be interrupted between two reads.
    pairs = []
    for _ in range(5):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        pairs.append((after - before, (before + after) // 2, real))
    _, monotonic, real = min(pairs)
    return {"monotonic_ns": monotonic, "realtime_ns": real}


def _boot_id() -> str:
    """Identifies the machine since its start: processes with the same one share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _mapped(path: Path | None, size: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserved: writing into a hole of a full disk would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
