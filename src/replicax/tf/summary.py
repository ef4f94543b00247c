"""`tf.summary`: event files that TensorBoard shows.

Inside a compiled function the values are sent to the host when the program runs, with the step and
the writer of that time. Under several replicas, write summaries outside of `strategy.run`, or in
one replica only.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tensorflow_files.events import EventWriter
from replicax.tf import namespaces
from replicax.tf.arguments import Number, PathValue, Value
from replicax.tf.io import gfile
from replicax.tf.tensor import raw, wrap

__all__ = [
    "SummaryWriter",
    "audio",
    "create_file_writer",
    "create_noop_writer",
    "experimental",
    "flush",
    "get_step",
    "graph",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "set_step",
    "should_record_summaries",
    "text",
    "write",
]

_writer: contextvars.ContextVar[SummaryWriter | None] = contextvars.ContextVar(
    "replicax_tf_summary_writer", default=None
)
_condition: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "replicax_tf_summary_condition", default=True
)


class _Steps:
    """The step of summaries that are written without one."""

    current: Any = None


class SummaryWriter:
    """Writes summaries into a directory; made by `create_file_writer`.

    The file is made when something is written.
    """

    def __init__(
        self, logdir: str | None, max_queue: int, flush_seconds: float, suffix: str
    ) -> None:
        self._logdir = logdir
        self._max_queue, self._flush_seconds, self._suffix = max_queue, flush_seconds, suffix
        self._events: EventWriter | None = None
        self._is_closed = False

    @property
    def events(self) -> EventWriter | None:
        """The event file; None for a writer that drops everything."""
        if self._logdir is None:
            return None
        if self._is_closed:
            raise errors.ContextError(
                f"Summaries are written to an open file in {self._logdir!r}",
                "this writer is closed",
                "Write before `close()`.",
            )
        if self._events is None:
            self._events = EventWriter(
                self._logdir,
                max_queue=self._max_queue,
                flush_seconds=self._flush_seconds,
                filename_suffix=self._suffix,
            )
        return self._events

    @contextlib.contextmanager
    def as_default(self, step: Number = None) -> Iterator[SummaryWriter]:
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

    def set_as_default(self, step: Number = None) -> None:
        """Makes this the writer of the code that follows."""
        _writer.set(self)
        if step is not None:
            _Steps.current = step

    def init(self) -> None:
        """Makes the file."""
        _ = self.events

    def flush(self) -> None:
        """Makes everything that was written visible to TensorBoard."""
        if self._events is not None:
            # Compiled functions that still run write first.
            jax.effects_barrier()
            self._events.flush()

    def close(self) -> None:
        """Flushes and closes the file; idempotent."""
        if self._events is not None:
            jax.effects_barrier()
            self._events.close()
        self._is_closed = True

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_file_writer(
    logdir: PathValue,
    max_queue: int | None = None,
    flush_millis: float | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
    experimental_trackable: bool = False,
    experimental_mesh: object = None,
) -> SummaryWriter:
    """Returns a writer of event files in a directory.

    Args:
      logdir: The directory.
      max_queue: The most summaries that are not flushed; 10 if None.
      flush_millis: The longest time that they are not flushed; two minutes if None.
      filename_suffix: The end of the file's name.
      name: Accepted for portability.
      experimental_trackable: Accepted for portability.
      experimental_mesh: Accepted for portability.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> writer = create_file_writer(folder.name)
    >>> with writer.as_default():
    ...     bool(scalar("loss", 0.5, step=1))
    True
    >>> writer.close()
    >>> folder.cleanup()
    """
    del name, experimental_trackable, experimental_mesh
    path = gfile.path_text(logdir)
    if "://" in path:
        raise errors.UnsupportedError(
            "Event files are written on this machine",
            f"{path!r} is remote",
            "Write to a local directory, and copy it.",
        )
    return SummaryWriter(
        path,
        10 if max_queue is None else int(max_queue),
        120.0 if flush_millis is None else float(flush_millis) / 1000,
        filename_suffix or ".v2",
    )


def create_noop_writer() -> SummaryWriter:
    """Returns a writer that drops everything.

    >>> with create_noop_writer().as_default():
    ...     bool(scalar("loss", 0.5, step=1))
    False
    """
    return SummaryWriter(None, 10, 120.0, "")


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """Flushes a writer; the current one if None."""
    del name
    chosen = writer or _writer.get()
    if chosen is not None:
        chosen.flush()


@contextlib.contextmanager
def record_if(condition: Value) -> Iterator[None]:
    """Writes summaries of the block only if a condition is true.

    Args:
      condition: A bool, a boolean tensor, or a function that returns one.
    """
    token = _condition.set(condition)
    try:
        yield
    finally:
        _condition.reset(token)


def should_record_summaries() -> Any:
    """Tells whether summaries are written here.

    >>> bool(should_record_summaries())
    False
    """
    writer = _writer.get()
    if writer is None or writer._logdir is None:
        return False
    condition = _condition.get()
    return condition() if callable(condition) else condition


def set_step(step: Number) -> None:
    """Sets the step of summaries that are written without one.

    >>> set_step(3)
    >>> get_step()
    3
    >>> set_step(None)
    """
    _Steps.current = step


def get_step() -> Any:
    """Returns the step that `set_step` has set."""
    return _Steps.current


def scalar(name: str, data: Value, step: Number = None, description: str | None = None) -> Any:
    """Writes a number; returns whether it was written.

    Args:
      name: The tag.
      data: A scalar.
      step: The step; by default that of `tf.summary.experimental.set_step`.
      description: A text about it.
    """
    return _write(
        name,
        data,
        step,
        lambda events, array, at: events.scalar(name, array.reshape(()), at, description or ""),
    )


def histogram(
    name: str,
    data: Value,
    step: Number = None,
    buckets: int | None = None,
    description: str | None = None,
) -> Any:
    """Writes the distribution of values; returns whether it was written."""
    count = 30 if buckets is None else int(buckets)
    return _write(
        name,
        data,
        step,
        lambda events, array, at: events.histogram(name, array, at, count, description or ""),
    )


def image(
    name: str,
    data: Value,
    step: Number = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> Any:
    """Writes images: (number, height, width, channels), floats from 0 to 1 or uint8."""
    return _write(
        name,
        data,
        step,
        lambda events, array, at: events.image(
            name, array, at, int(max_outputs), description or ""
        ),
    )


def text(name: str, data: Value, step: Number = None, description: str | None = None) -> Any:
    """Writes text, which TensorBoard shows as Markdown; returns whether it was written."""
    value = data.numpy() if hasattr(data, "numpy") else data
    array = np.asarray(value, dtype=object)
    shown = np.vectorize(
        lambda x: x.decode("utf-8") if isinstance(x, bytes) else str(x), otypes=[object]
    )(array)
    content = shown.item() if shown.ndim == 0 else shown.tolist()
    return _write(
        name,
        np.zeros(()),
        step,
        lambda events, _, at: events.text(name, content, at, description or ""),
    )


def audio(
    name: str,
    data: Value,
    sample_rate: int,
    step: Number = None,
    max_outputs: int = 3,
    encoding: str | None = None,
    description: str | None = None,
) -> Any:
    """Not offered."""
    raise errors.UnsupportedError(
        "Summaries are scalars, images, histograms and texts",
        f"the audio summary {name!r} was asked for",
        "Write sound files with the package `soundfile`, or a spectrogram by tf.summary.image.",
    )


def graph(graph_data: object = None) -> Any:
    """Not offered."""
    raise errors.UnsupportedError(
        "Programs here are compiled by XLA, and have no TensorFlow graph",
        "a graph summary was asked for",
        "Use tf.profiler.experimental.start(directory), whose trace TensorBoard shows.",
    )


def write(
    tag: str, tensor: Value, step: Number = None, metadata: object = None, name: str | None = None
) -> Any:
    """Writes a tensor without a plugin; returns whether it was written."""
    del metadata, name
    return _write(tag, tensor, step, lambda events, array, at: events.tensor(tag, array, at, ""))


def _write_raw_pb(tensor: Value, step: Number = None, name: str | None = None) -> Any:
    """Writes a serialized Summary message."""
    del name
    value = tensor.numpy() if hasattr(tensor, "numpy") else tensor
    data = value.item() if isinstance(value, np.ndarray) else value
    return _write("", np.zeros(()), step, lambda events, _, at: events.summary(data, at))


def _write(
    tag: str, data: Value, step: Number, put: Callable[[EventWriter, np.ndarray, int], None]
) -> Any:
    """Writes now, or when the compiled program runs."""
    writer = _writer.get()
    if writer is None or writer._logdir is None:
        return wrap(np.array(False))
    condition = should_record_summaries()
    given = _Steps.current if step is None else step
    if given is None:
        raise errors.InvalidArgumentError(
            f"The summary {tag!r} needs a step",
            "none is set",
            "Pass step=, or call tf.summary.experimental.set_step(step).",
        )
    values = [raw(value) for value in (data, given, condition)]

    def put_values(array: Value, at: Value, is_on: Value) -> None:
        events = writer.events
        if bool(np.asarray(is_on)) and events is not None:
            put(events, np.asarray(array), int(np.asarray(at)))

    if any(jax_compat.is_traced(value) for value in values):
        jax.debug.callback(put_values, *values)
        return wrap(np.array(True))
    put_values(*values)
    return wrap(np.array(bool(np.asarray(values[2]))))


class _Experimental:
    """`tf.summary.experimental`."""

    set_step = staticmethod(set_step)
    get_step = staticmethod(get_step)
    write_raw_pb = staticmethod(_write_raw_pb)
    summary_scope = staticmethod(lambda name, *_, **__: contextlib.nullcontext((name, name)))


experimental = _Experimental()

__getattr__ = namespaces.refusing(__name__)
