"""`tf.summary`: `rx.summary` with the arguments and results of TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.summary import writing
from replicax.summary.trackers import Tracker
from replicax.summary.writing import SummaryWriter as SummaryWriter
from replicax.summary.writing import create_noop_writer as create_noop_writer
from replicax.summary.writing import get_step as get_step
from replicax.summary.writing import record_if as record_if
from replicax.summary.writing import set_step as set_step
from replicax.summary.writing import should_record_summaries as should_record_summaries
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
    return writing.create_file_writer(
        gfile.path_text(logdir),
        max_queue=10 if max_queue is None else int(max_queue),
        flush_seconds=120.0 if flush_millis is None else float(flush_millis) / 1000,
        filename_suffix=filename_suffix or ".v2",
        # As in TensorFlow: a program that wants one task to write creates one writer.
        every_task=True,
    )


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """Flushes a writer; the current one if None."""
    del name
    writing.flush(writer)


def scalar(name: str, data: Value, step: Number = None, description: str | None = None) -> Any:
    """Writes a number; returns whether it was written.

    Args:
      name: The tag.
      data: A scalar.
      step: The step; by default that of `tf.summary.experimental.set_step`.
      description: A text about it.
    """
    return _told(writing.scalar(name, raw(data), raw(step), description or ""))


def histogram(
    name: str,
    data: Value,
    step: Number = None,
    buckets: int | None = None,
    description: str | None = None,
) -> Any:
    """Writes the distribution of values; returns whether it was written."""
    count = 30 if buckets is None else int(buckets)
    return _told(writing.histogram(name, raw(data), raw(step), count, description or ""))


def image(
    name: str,
    data: Value,
    step: Number = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> Any:
    """Writes images: (number, height, width, channels), floats from 0 to 1 or uint8."""
    found = writing.image(name, raw(data), raw(step), int(max_outputs), description or "")
    return _told(found)


def text(name: str, data: Value, step: Number = None, description: str | None = None) -> Any:
    """Writes text, which TensorBoard shows as Markdown; returns whether it was written."""
    value = data.numpy() if hasattr(data, "numpy") else data
    array = np.asarray(value, dtype=object)
    shown = np.vectorize(
        lambda x: x.decode("utf-8") if isinstance(x, bytes) else str(x), otypes=[object]
    )(array)
    content = shown.item() if shown.ndim == 0 else shown.tolist()
    return _told(writing.text(name, content, raw(step), description or ""))


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
    return _write_event(
        tag, tensor, step, lambda events, array, at: events.tensor(tag, array, at, "")
    )


def _write_raw_pb(tensor: Value, step: Number = None, name: str | None = None) -> Any:
    """Writes a serialized Summary message."""
    del name
    value = tensor.numpy() if hasattr(tensor, "numpy") else tensor
    data = value.item() if isinstance(value, np.ndarray) else value
    return _write_event("", np.zeros(()), step, lambda events, _, at: events.summary(data, at))


def _write_event(
    tag: str, data: Value, step: Number, put: Callable[[EventWriter, np.ndarray, int], None]
) -> Any:
    """Writes what only event files have."""

    def put_to(tracker: Tracker, array: np.ndarray, at: int) -> None:
        if isinstance(tracker, EventWriter):
            put(tracker, array, at)

    return _told(writing.write(tag, raw(data), raw(step), put_to))


def _told(is_written: bool) -> Any:
    return wrap(np.array(is_written))


class _Experimental:
    """`tf.summary.experimental`."""

    set_step = staticmethod(set_step)
    get_step = staticmethod(get_step)
    write_raw_pb = staticmethod(_write_raw_pb)
    summary_scope = staticmethod(lambda name, *_, **__: contextlib.nullcontext((name, name)))


experimental = _Experimental()

__getattr__ = namespaces.refusing(__name__)
