"""Records a trace of the job of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import jax

from replicax.coordinator import engine
from replicax.foundation import device_spans, peers, spans
from replicax.timeline import merging, parts, xla

# The seconds that the tasks of a cluster have to start or to stop, all together.
_SWITCH_S = 10.0


@dataclasses.dataclass
class Trace:
    """A trace that is, or was, recorded.

    Attributes:
      directory: The directory of its file.
      path: The file, once it is written; None before, and on workers that do not write it.

    >>> import tempfile
    >>> import replicax as rx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rx.profiler.trace(folder) as trace:
    ...         is_written = trace.path is not None
    ...     (is_written, trace.path.exists())
    (False, True)
    """

    directory: Path
    path: Path | None = None


@contextlib.contextmanager
def trace(
    directory: str | os.PathLike[str],
    *,
    capacity: int = spans.CAPACITY,
    collectives: bool = True,
) -> Iterator[Trace]:
    """Records what all tasks of this job do in a block, and writes one file for Perfetto.

    The program of a parameter-server cluster calls this in the coordinator, which makes workers
    and servers record too. In a sync group all workers call it, with a directory that all of them
    see, and the chief writes the file. Otherwise this process alone is recorded.

    A task keeps its last spans, a bounded number: of a long block, the end is recorded.

    Args:
      directory: The directory of the file, which is created.
      capacity: The number of spans that this process keeps.
      collectives: Whether to record the collectives of compiled programs on the devices of this
        process, which XLA reports.

    Raises:
      ContextError: A trace is being recorded already.

    Example:
      >>> import tempfile
      >>> import replicax as rx
      >>> folder = tempfile.TemporaryDirectory()
      >>> @rx.function
      ... def double(x):
      ...     return 2.0 * x
      >>> with rx.profiler.trace(folder.name) as trace:
      ...     _ = double(1.0)
      >>> trace.path.suffix
      '.pftrace'
      >>> folder.cleanup()
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    group = peers.of_process()
    recording = Trace(folder)
    name = secrets.token_hex(8)
    # The spans of a worker that is killed stay in its file.
    path = None if group is None else spans.path_in(folder)
    if not spans.start(name, path, capacity):
        raise AssertionError("ids of traces are unique")
    others = list(engine.open_engines)
    is_complete = False
    try:
        with xla.recorded_collectives(is_on=collectives and _has_collectives(group)):
            for each in others:
                each.record_spans(name, True, _SWITCH_S)
            yield recording
            device_spans.wait(_SWITCH_S)
        is_complete = True
    finally:
        found = [part for each in others for part in each.record_spans(name, False, _SWITCH_S)]
        # Of a task in this process, which was stopped first.
        own = [part for part in (spans.stop(name),) if part]
        if group is None:
            recording.path = merging.write(
                merging.new_path(folder), [parts.decode(part) for part in [*own, *found]]
            )
        elif is_complete:
            recording.path = _write_together(folder, group)
        # Else the others may not come to the end of the block; `merge` makes a trace of the files.


def _has_collectives(group: peers.Peers | None) -> bool:
    """Returns whether compiled programs of this process communicate with other devices."""
    return group is not None or (not engine.open_engines and jax.local_device_count() > 1)


def _write_together(folder: Path, group: peers.Peers) -> Path | None:
    # A peer that is lost ends the program of this one, whose file is complete.
    group.barrier("rx.profiler.trace")
    path = merging.merge(folder) if group.index == 0 else None
    # The others may delete the directory now.
    group.barrier("rx.profiler.trace")
    return path
