"""Parts of a trace: the spans that one process has recorded. `foundation/spans.py` writes them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replicax.foundation import errors, spans

_RECORDS = np.dtype(
    [
        ("start", "<i8"),
        ("duration", "<i8"),
        ("closure", "<i8"),
        ("amount", "<i8"),
        ("kind", "<u2"),
        ("label", "<u2"),
        ("track", "<u4"),
        ("number", "<i8"),
    ]
)
assert _RECORDS.itemsize == spans.RECORD.size


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that a task did.

    Attributes:
      kind: What it did: "schedule", "pull", "compute", "push", "apply", "wait", ...
      track: The thread or the device that did it.
      start: When, in nanoseconds.
      duration: For how long.
      closure: The closure that it belongs to; -1 for none.
      amount: A number of bytes, closures or arrays; 0 for none.
      label: What it was done to, such as the name of a function.
    """

    kind: str
    track: str
    start: int
    duration: int
    closure: int = -1
    amount: int = 0
    label: str = ""

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.duration


@dataclasses.dataclass(frozen=True)
class Part:
    """The spans of one process.

    Attributes:
      trace: The id of the trace.
      task: The name of the task.
      host: The name of its machine.
      pid: Its process.
      boot: Equal for processes whose monotonic clocks are the same.
      offset_ns: The time of day minus the monotonic clock.
      threads: The native id of each track; 0 for those that are not threads.
      spans: The spans, by the monotonic clock of the machine, ordered by their start.
      num_lost: The number of spans that did not fit.
    """

    trace: str
    task: str
    host: str
    pid: int
    boot: str
    offset_ns: int
    threads: Mapping[str, int]
    spans: Sequence[Span]
    num_lost: int = 0

    def shifted(self, nanoseconds: int) -> Part:
        """Returns the part with another clock."""
        moved = [dataclasses.replace(s, start=s.start + nanoseconds) for s in self.spans]
        return dataclasses.replace(self, spans=moved, offset_ns=self.offset_ns - nanoseconds)


def decode(content: bytes) -> Part:
    """Reads the spans of one process.

    Raises:
      DataLossError: These are not the spans of a process.

    >>> recorder = spans.Recorder("t", "program")
    >>> recorder.add("pull", 1, closure=3, label="table")
    >>> part = decode(recorder.content())
    >>> [(span.kind, span.closure, span.label) for span in part.spans]
    [('pull', 3, 'table')]
    """
    text = content[: spans.TEXT_BYTES].rstrip(b"\0")
    try:
        header, *lines = _lines(text)
        capacity = int(header["capacity"])
        is_readable = header["format"] == spans.FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(f"its description is not readable ({error})") from None
    if not is_readable:
        raise _damaged(f"it has format {header['format']}, not {spans.FORMAT}")
    num_records, rest = divmod(len(content) - spans.TEXT_BYTES, spans.RECORD.size)
    if rest or not 0 <= num_records <= capacity:
        raise _damaged(f"it has {len(content):,} bytes")
    names, tracks, threads = {0: ""}, dict[int, str](), dict[str, int]()
    for line in lines:
        if "name" in line:
            names[line["name"][0]] = line["name"][1]
        elif "track" in line:
            number, thread, name = line["track"]
            # Threads may have equal names.
            shown = name if name not in threads else f"{name} {thread}"
            tracks[number], threads[shown] = shown, thread
        elif "task" in line:
            header["task"] = line["task"]
    records = np.frombuffer(content, _RECORDS, num_records, spans.TEXT_BYTES)
    index = np.arange(num_records)
    complete = records[(records["number"] > 0) & ((records["number"] - 1) % capacity == index)]
    complete = np.sort(complete, order=["start", "number"])
    found = [
        Span(
            names.get(kind, ""), tracks.get(track, ""), start, length, closure, amount,
            names.get(label, ""),
        )
        for start, length, closure, amount, kind, label, track, _ in complete.tolist()
    ]  # fmt: skip
    return Part(
        trace=header["trace"],
        task=header["task"],
        host=header["host"],
        pid=header["pid"],
        boot=header["boot"],
        offset_ns=header["realtime_ns"] - header["monotonic_ns"],
        threads=threads,
        spans=found,
        num_lost=max(0, int(complete["number"].max(initial=0)) - len(found)),
    )


def read(directory: Path, trace: str | None = None) -> list[Part]:
    """Reads the parts of a directory; those of killed processes end where they were killed.

    Args:
      directory: The directory.
      trace: Only parts of this trace; None for all.
    """
    found = [decode(path.read_bytes()) for path in sorted(directory.glob(f"*{spans.SUFFIX}"))]
    return [part for part in found if trace is None or part.trace == trace]


def _lines(text: bytes) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.split(b"\n")):
        try:
            yield json.loads(line)
        except ValueError:
            if number == 0:
                raise
            # The last line, if the process was killed while it wrote it.
            return


def _damaged(found: str) -> errors.DataLossError:
    return errors.DataLossError(
        "A part of a trace must be as a task has written it", found, "Record the trace again."
    )
