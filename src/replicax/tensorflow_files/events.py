"""Event files: the summaries that TensorBoard shows."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import socket
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import ArrayLike

from replicax.foundation import errors
from replicax.tensorflow_files import records, wire
from replicax.tensorflow_files.tensor_messages import decode_tensor, encode_tensor

_log = logging.getLogger(__name__)
_VERSION = "brain.Event:2"
_WRITER = "replicax.tensorflow_files.events"
# Distinguishes the files that one process writes in one second.
_file_numbers = itertools.count()


class EventWriter:
    """Writes an event file into a directory; a new file each time.

    Several threads may write. What was written is visible to TensorBoard after a flush, which
    happens by itself after `max_queue` summaries, after `flush_seconds`, and at the end of the
    program.

    Args:
      directory: The directory, which is created; TensorBoard calls it a run.
      max_queue: The most summaries that are not flushed yet.
      flush_seconds: The longest time that summaries are not flushed; checked at each write.
      filename_suffix: The end of the name of the file.

    Attributes:
      path: The file.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with EventWriter(folder.name) as writer:
    ...     writer.scalar("loss", 0.5, step=3)
    >>> [(event.step, value.tag, float(value.tensor))
    ...  for event in read_events(writer.path) for value in event.values]
    [(3, 'loss', 0.5)]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_queue: int = 10,
        flush_seconds: float = 120.0,
        filename_suffix: str = ".v2",
    ) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / f"{name}.{next(_file_numbers)}{filename_suffix}"
        self._max_queue, self._flush_seconds = max_queue, flush_seconds
        self._lock = threading.Lock()
        self._waiting = 0
        self._flushed_at = time.monotonic()
        file: IO[bytes] = open(self.path, "xb")  # noqa: SIM115
        self._file = file
        self._closer = weakref.finalize(self, file.close)
        source = wire.octets(10, wire.text(1, _WRITER))
        self._append(wire.double(1, now) + wire.text(3, _VERSION) + source)
        self.flush()

    def __repr__(self) -> str:
        return f"<EventWriter of {str(self.path)!r}>"

    # Summaries.

    def scalar(self, tag: str, value: ArrayLike, step: int, description: str = "") -> None:
        """Writes a number."""
        array = np.asarray(value)
        if array.shape or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
            raise errors.InvalidArgumentError(
                f"The scalar summary {tag!r} needs one real number",
                f"its value has the shape {array.shape} and the type {array.dtype}",
                "Reduce it to one number, or write a histogram.",
            )
        self.tensor(tag, array.astype(np.float32), step, "scalars", description=description)

    def histogram(
        self, tag: str, data: ArrayLike, step: int, buckets: int = 30, description: str = ""
    ) -> None:
        """Writes how many values are in each of `buckets` ranges of equal width.

        Infinite values and NaN are in none of them; a warning is logged.
        """
        values = np.asarray(data).astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        if len(finite) < len(values):
            left_out = len(values) - len(finite)
            _log.warning("The histogram %r leaves out %d values that are not finite", tag, left_out)
        counted = bucket_counts(finite, buckets)
        self.tensor(tag, counted, step, "histograms", description=description)

    def image(
        self, tag: str, data: ArrayLike, step: int, max_outputs: int = 3, description: str = ""
    ) -> None:
        """Writes images, as PNG.

        Args:
          tag: The name of the summary.
          data: Shape (images, height, width, channels) with 1 to 4 channels: numbers from 0 to 1,
            which are clipped, or uint8.
          step: The step.
          max_outputs: The most images to write; the others are left out.
          description: A text about the summary.
        """
        images = np.asarray(data)
        if images.ndim != 4 or not 1 <= images.shape[3] <= 4:
            raise errors.InvalidArgumentError(
                f"The image summary {tag!r} needs the shape (images, height, width, channels), "
                "with 1 to 4 channels",
                f"the shape is {images.shape}",
                "Reshape it; for one image, write `image[None]`.",
            )
        shown = _pixels(tag, images[: max(max_outputs, 0)])
        size = [str(images.shape[2]).encode(), str(images.shape[1]).encode()]
        parts = np.empty(len(size) + len(shown), object)
        parts[:] = [*size, *map(encode_png, shown)]
        self.tensor(tag, parts, step, "images", description=description)

    def text(self, tag: str, data: str | Sequence[str], step: int, description: str = "") -> None:
        """Writes text, which TensorBoard shows as Markdown; a nest of lists as a table."""
        self.tensor(tag, np.array(data, object), step, "text", description=description)

    def tensor(
        self,
        tag: str,
        array: np.ndarray,
        step: int,
        plugin: str,
        content: bytes = b"",
        description: str = "",
    ) -> None:
        """Writes an array for a plugin of TensorBoard.

        Args:
          tag: The name of the summary.
          array: The array.
          step: The step.
          plugin: The name of the plugin.
          content: What the plugin stores beside the array.
          description: A text about the summary.
        """
        data = wire.text(1, plugin) + (wire.octets(2, content) if content else b"")
        metadata = wire.octets(1, data) + (wire.text(3, description) if description else b"")
        value = wire.text(1, tag) + wire.octets(8, encode_tensor(array)) + wire.octets(9, metadata)
        self.summary(wire.octets(1, value), step)

    def summary(self, serialized: bytes, step: int) -> None:
        """Writes a serialized Summary message."""
        number = wire.number(2, _whole_step(step))
        self._append(wire.double(1, time.time()) + number + wire.octets(5, serialized))

    # The file.

    def _append(self, event: bytes) -> None:
        with self._lock:
            if self._file.closed:
                raise errors.ContextError(
                    f"Summaries are written to an open file, such as {self.path}",
                    "this writer is closed",
                    "Write before `close()`, and inside of the `with` block.",
                )
            self._file.write(records.framed(event))
            self._waiting += 1
            is_late = time.monotonic() - self._flushed_at >= self._flush_seconds
            if self._waiting >= self._max_queue or is_late:
                self._flush()

    def flush(self) -> None:
        """Makes everything that was written visible to readers."""
        with self._lock:
            if not self._file.closed:
                self._flush()

    def _flush(self) -> None:
        self._file.flush()
        self._waiting = 0
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file. Idempotent."""
        with self._lock:
            self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def bucket_counts(data: np.ndarray, buckets: int) -> np.ndarray:
    """Returns the left edge, the right edge and the number of values of each bucket.

    All buckets have the same width, and the last one contains its right edge. If all values are
    equal, they are in the last bucket; without values, everything is zero.

    >>> bucket_counts(np.array([0.0, 1.0, 2.0, 4.0]), 2).tolist()
    [[0.0, 2.0, 2.0], [2.0, 4.0, 2.0]]
    """
    if buckets <= 0:
        return np.zeros((0, 3))
    counted = np.zeros((buckets, 3))
    if not data.size:
        return counted
    lowest, highest = data.min(), data.max()
    if lowest == highest:
        counted[:, :2] = highest
        counted[-1, 2] = data.size
        return counted
    edges = np.linspace(lowest, highest, buckets + 1)
    counted[:, 0], counted[:, 1] = edges[:-1], edges[1:]
    places = np.floor((data - lowest) / ((highest - lowest) / buckets)).astype(np.int64)
    counted[:, 2] = np.bincount(np.minimum(places, buckets - 1), minlength=buckets)
    return counted


def _pixels(tag: str, images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f" and images.dtype.name != "bfloat16":
        raise errors.ArgumentTypeError(
            f"The image summary {tag!r} needs numbers from 0 to 1, or uint8",
            f"the type is {images.dtype}",
            "Cast it to uint8, or divide by the largest value.",
        )
    # As TensorFlow converts images: each of the 256 steps has the same width, up to rounding.
    scaled = np.nan_to_num(images.astype(np.float32)) * np.float32(255.5)
    return np.clip(scaled, 0, 255).astype(np.uint8)


def encode_png(pixels: np.ndarray) -> bytes:
    r"""Returns an image file: shape (height, width, channels), with 1 to 4 channels of uint8.

    >>> encode_png(np.zeros((2, 3, 1), np.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = pixels.shape
    # Grey, grey with alpha, RGB, RGB with alpha.
    kind = (0, 4, 2, 6)[channels - 1]
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    # The first byte of a row is its filter: none.
    rows[:, 1:] = pixels.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _whole_step(step: object) -> int:
    array = np.asarray(step)
    if array.size == 1 and array.dtype.kind in "iu":
        return int(array.item())
    raise errors.InvalidArgumentError(
        "A summary needs a step, which is a whole number",
        f"it is {step!r}",
        "Pass step=, or set a default step.",
    )


# Reading.


@dataclasses.dataclass(frozen=True)
class SummaryValue:
    """One summary.

    Attributes:
      tag: Its name.
      plugin: The plugin of TensorBoard that shows it; "" for the summaries of TensorFlow 1.
      tensor: Its value.
      description: A text about it.
    """

    tag: str
    plugin: str
    tensor: np.ndarray
    description: str = ""


@dataclasses.dataclass(frozen=True)
class Event:
    """A record of an event file.

    Attributes:
      wall_time: When it was written, in seconds since 1970.
      step: The step.
      file_version: The version of the file, in its first event.
      values: The summaries.
    """

    wall_time: float
    step: int
    file_version: str
    values: tuple[SummaryValue, ...]


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yields the events of a file, after comparing checksums.

    Raises:
      DataLossError: The file is damaged; the events before were yielded.
    """
    for record in records.read_records(path):
        try:
            yield _decode_event(record)
        except wire.WireError as error:
            raise errors.DataLossError(
                f"{os.fspath(path)} must be an event file",
                f"a record is not an event: {error}",
                "Check the path.",
            ) from error


def _decode_event(record: bytes) -> Event:
    wall_time, step, version = 0.0, 0, ""
    values: list[SummaryValue] = []
    for number, _, value in wire.fields(record):
        if number == 1:
            wall_time = _double(value)
        elif number == 2:
            step = wire.as_signed(value)
        elif number == 3:
            version = wire.as_text(value)
        elif number == 5:
            values += [
                _decode_value(wire.as_bytes(inner))
                for part, _, inner in wire.fields(wire.as_bytes(value))
                if part == 1
            ]
    return Event(wall_time, step, version, tuple(values))


def _decode_value(data: bytes) -> SummaryValue:
    tag, plugin, description = "", "", ""
    tensor = np.zeros(())
    for number, _, value in wire.fields(data):
        if number == 1:
            tag = wire.as_text(value)
        elif number == 2:
            octets = wire.as_unsigned(value).to_bytes(4, "little")
            tensor = np.frombuffer(octets, "<f4").reshape(())
        elif number == 8:
            tensor = decode_tensor(wire.as_bytes(value))
        elif number == 9:
            for part, _, inner in wire.fields(wire.as_bytes(value)):
                if part == 1:
                    plugin = _first_text(wire.as_bytes(inner))
                elif part == 3:
                    description = wire.as_text(inner)
    return SummaryValue(tag, plugin, tensor, description)


def _first_text(data: bytes) -> str:
    return next((wire.as_text(value) for number, _, value in wire.fields(data) if number == 1), "")


def _double(value: wire.Value) -> float:
    return struct.unpack("<d", wire.as_unsigned(value).to_bytes(8, "little"))[0]
