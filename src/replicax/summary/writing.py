"""Writes summaries to the trackers of a writer, now or when the compiled program runs.

Inside a compiled function the values are sent to the host when the program runs, with the step and
the writer of that time. Under several replicas, write summaries outside of `strategy.run`, or in
one replica only.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors, jax_compat, peers
from replicax.foundation.types import Tree
from replicax.observe import progress
from replicax.summary.trackers import METHODS, Tracker
from replicax.tensorflow_files.events import EventWriter

_writer: contextvars.ContextVar[SummaryWriter | None] = contextvars.ContextVar(
    "replicax_summary_writer", default=None
)
_condition: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "replicax_summary_condition", default=True
)


class _Steps:
    """The step of summaries that are written without one."""

    current: Any = None


class SummaryWriter:
    """Passes summaries to trackers; made by `create_file_writer` or `create_writer`.

    Args:
      open_trackers: Opens the trackers, when something is written; None drops everything.
      about: Where they write, for messages.

    Raises:
      ContextError: It is closed.

    >>> import tempfile
    >>> import replicax as rx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rx.summary.create_file_writer(folder) as writer, writer.as_default(step=1):
    ...         rx.summary.scalar("loss", 0.5)
    True
    """

    def __init__(
        self, open_trackers: Callable[[], Sequence[Tracker]] | None, about: str = ""
    ) -> None:
        self._open = open_trackers
        self._about = about
        self._trackers: Sequence[Tracker] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<SummaryWriter of {self._about or 'nothing'}>"

    @property
    def is_on(self) -> bool:
        """Whether it writes; False for one that drops everything."""
        return self._open is not None

    @property
    def trackers(self) -> Sequence[Tracker]:
        """The trackers; none for a writer that drops everything."""
        if self._open is None:
            return ()
        if self._is_closed:
            raise errors.ContextError(
                f"Summaries are written to an open writer of {self._about}",
                "this writer is closed",
                "Write before `close()`.",
            )
        if self._trackers is None:
            self._trackers = list(self._open())
        return self._trackers

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Makes this the writer of the block, with a step if one is given."""
        token = _writer.set(self)
        before = _Steps.current
        if step is not None:
            _Steps.current = step
        try:
            yield self
        finally:
            _writer.reset(token)
            if step is not None:
                _Steps.current = before
            self.flush()

    def set_as_default(self, step: Any = None) -> None:
        """Makes this the writer of the code that follows."""
        _writer.set(self)
        if step is not None:
            _Steps.current = step

    def init(self) -> None:
        """Opens the trackers."""
        _ = self.trackers

    def flush(self) -> None:
        """Makes visible everything that was written."""
        for tracker in self._settled():
            tracker.flush()

    def close(self) -> None:
        """Flushes and closes the trackers. Idempotent."""
        for tracker in self._settled():
            tracker.close()
        self._is_closed = True

    def _settled(self) -> Sequence[Tracker]:
        """Returns the open trackers, after compiled functions that still run have written."""
        if not self._trackers or self._is_closed:
            return ()
        jax.effects_barrier()
        return self._trackers

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_file_writer(
    logdir: str | os.PathLike[str],
    *,
    max_queue: int = 10,
    flush_seconds: float = 120.0,
    filename_suffix: str = ".v2",
    every_task: bool = False,
) -> SummaryWriter:
    """Returns a writer of event files, which TensorBoard shows.

    Args:
      logdir: The directory; TensorBoard calls it a run.
      max_queue: The most summaries that are not flushed.
      flush_seconds: The longest time that summaries are not flushed.
      filename_suffix: The end of the name of the file.
      every_task: Whether every task of a group writes, each to a directory of its own. By default
        the chief writes, and the others drop summaries.

    Raises:
      UnsupportedError: The directory is remote.

    Example:
      >>> import tempfile
      >>> import replicax as rx
      >>> folder = tempfile.TemporaryDirectory()
      >>> with rx.summary.create_file_writer(folder.name) as writer, writer.as_default():
      ...     rx.summary.scalar("loss", 0.5, step=1)
      True
      >>> folder.cleanup()
    """
    folder = os.fspath(logdir)
    if "://" in folder:
        raise errors.UnsupportedError(
            "Event files are written on this machine",
            f"{folder!r} is remote",
            "Write to a local directory, and copy it.",
        )
    if not every_task and not _is_chief():
        return create_noop_writer()
    return SummaryWriter(
        lambda: [
            EventWriter(
                folder,
                max_queue=max_queue,
                flush_seconds=flush_seconds,
                filename_suffix=filename_suffix,
            )
        ],
        repr(folder),
    )


def create_writer(*trackers: Tracker) -> SummaryWriter:
    """Returns a writer that passes summaries to trackers; on workers other than the chief, none.

    Raises:
      ArgumentTypeError: A tracker lacks a method.

    Example:
      >>> import tempfile
      >>> import replicax as rx
      >>> folder = tempfile.TemporaryDirectory()
      >>> tracker = rx.summary.CsvTracker(f"{folder.name}/log.csv")
      >>> with rx.summary.create_writer(tracker) as writer, writer.as_default(step=3):
      ...     rx.summary.scalar("loss", 0.5)
      True
      >>> folder.cleanup()
    """
    for tracker in trackers:
        missing = [name for name in METHODS if not callable(getattr(tracker, name, None))]
        if missing:
            raise errors.ArgumentTypeError(
                f"A tracker has the methods {', '.join(METHODS)}",
                f"{type(tracker).__name__} lacks {', '.join(missing)}",
                "Implement them, or use one of the trackers of rx.summary.",
            )
    if not _is_chief():
        return create_noop_writer()
    return SummaryWriter(lambda: trackers, ", ".join(type(t).__name__ for t in trackers))


def create_noop_writer() -> SummaryWriter:
    """Returns a writer that drops everything.

    >>> with create_noop_writer().as_default():
    ...     scalar("loss", 0.5, step=1)
    False
    """
    return SummaryWriter(None)


def _is_chief() -> bool:
    group = peers.of_process()
    return group is None or group.index == 0


def flush(writer: SummaryWriter | None = None) -> None:
    """Flushes a writer; the current one if None.

    >>> flush()
    """
    chosen = writer or _writer.get()
    if chosen is not None:
        chosen.flush()


@contextlib.contextmanager
def record_if(condition: Any) -> Iterator[None]:
    """Writes summaries of the block only if a condition is true.

    Args:
      condition: A bool, a boolean array, or a function that returns one.

    >>> with record_if(False):
    ...     scalar("loss", 0.5, step=1)
    False
    """
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def should_record_summaries() -> Any:
    """Returns whether summaries are written here.

    >>> bool(should_record_summaries())
    False
    """
    writer = _writer.get()
    if writer is None or not writer.is_on:
        return False
    condition = _condition.get()
    return condition() if callable(condition) else condition


def set_step(step: Any) -> None:
    """Sets the step of summaries that are written without one.

    >>> set_step(3)
    >>> get_step()
    3
    >>> set_step(None)
    """
    _Steps.current = step


def get_step() -> Any:
    """Returns the step that `set_step` has set.

    >>> get_step() is None
    True
    """
    return _Steps.current


def scalar(name: str, data: Tree, step: Any = None, description: str = "") -> bool:
    """Writes a number, and shows it in `replicax top`; returns whether it was written.

    Args:
      name: The tag.
      data: A scalar.
      step: The step; by default that of `set_step`, or of the writer.
      description: A text about it.

    >>> scalar("loss", 0.5, step=1)  # without a writer
    False
    """
    value, at = _array(data), _array(_Steps.current if step is None else step)
    if not jax_compat.is_traced(value) and not jax_compat.is_traced(at):
        progress.log(name, value, None if at is None else int(np.asarray(at)))
    return write(
        name,
        data,
        step,
        lambda tracker, array, at: tracker.scalar(name, array.reshape(()), at, description),
    )


def histogram(
    name: str, data: Tree, step: Any = None, buckets: int = 30, description: str = ""
) -> bool:
    """Writes the distribution of values; returns whether it was written.

    Args:
      name: The tag.
      data: The values, of any shape.
      step: The step; by default that of `set_step`, or of the writer.
      buckets: The number of ranges that they are counted in.
      description: A text about it.

    >>> histogram("weights", [0.5, 1.5], step=1)  # without a writer
    False
    """
    return write(
        name,
        data,
        step,
        lambda tracker, array, at: tracker.histogram(name, array, at, buckets, description),
    )


def image(
    name: str, data: Tree, step: Any = None, max_outputs: int = 3, description: str = ""
) -> bool:
    """Writes images; returns whether they were written.

    Args:
      name: The tag.
      data: Shape (number, height, width, channels), floats from 0 to 1, or uint8.
      step: The step; by default that of `set_step`, or of the writer.
      max_outputs: The most images to write.
      description: A text about them.

    >>> image("digits", [[[[0.0], [0.5]]]], step=1)  # without a writer
    False
    """
    return write(
        name,
        data,
        step,
        lambda tracker, array, at: tracker.image(name, array, at, max_outputs, description),
    )


def text(name: str, data: str | Sequence[str], step: Any = None, description: str = "") -> bool:
    """Writes a text, which TensorBoard shows as Markdown; returns whether it was written.

    Args:
      name: The tag.
      data: The text, or a nest of lists, a table.
      step: The step; by default that of `set_step`, or of the writer.
      description: A text about it.

    >>> text("note", "**begins**", step=1)  # without a writer
    False
    """
    return write(
        name,
        np.zeros(()),
        step,
        lambda tracker, _, at: tracker.text(name, data, at, description),
    )


def write(
    name: str, data: Tree, step: Any, put: Callable[[Tracker, np.ndarray, int], None]
) -> bool:
    """Writes now, or when the compiled program runs; returns whether something is written.

    Args:
      name: The tag, for messages.
      data: An array, or what NumPy makes one of.
      step: The step; None for the one that was set.
      put: Writes an array with a step to a tracker.
    """
    writer = _writer.get()
    if writer is None or not writer.is_on:
        return False
    given = _Steps.current if step is None else step
    if given is None:
        raise errors.InvalidArgumentError(
            f"The summary {name!r} needs a step", "none is set", "Pass step=, or call `set_step`."
        )
    values = [_array(value) for value in (data, given, should_record_summaries())]

    def put_values(array: Any, at: Any, is_on: Any) -> None:
        if bool(np.asarray(is_on)):
            for tracker in writer.trackers:
                put(tracker, np.asarray(array), int(np.asarray(at)))

    if any(jax_compat.is_traced(value) for value in values):
        jax.debug.callback(put_values, *values)
        return True
    put_values(*values)
    return bool(np.asarray(values[2]))


def _array(value: Any) -> Any:
    """Returns the array of a variable or a tensor, and everything else as it is."""
    convert = getattr(value, "__jax_array__", None)
    return convert() if callable(convert) else value
