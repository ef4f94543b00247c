"""Messages as frames, and frames as messages.

The first frame is the envelope. Buffers may be in shared memory (`transport/shared_memory.py`); of
the others, all below 32 KiB follow joined in one frame, each at a multiple of 64 bytes; each larger
buffer has frames of its own, of 1 MiB but for the last. `Envelope.sizes` says which is which.
Nothing is believed: counts and sizes are compared with what came before anything is used.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits, messages

# Anything with the buffer protocol and contiguous memory, and NumPy arrays of any type.
Buffer = Any

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.Envelope)
_EMPTY = memoryview(b"")


class SharedMemoryWriter(Protocol):
    """Memory that the receiver of a message can read; see `transport/shared_memory.py`."""

    def put(self, buffers: Sequence[Any], request: int = 0) -> list[int]:
        """Copies buffers; returns where they are, or an empty list if there is no room."""
        ...


class SharedMemoryReader(Protocol):
    """Memory into which the sender of a message writes."""

    def views(self, places: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of one message."""
        ...


class _Greeting(msgspec.Struct, array_like=True, frozen=True):
    """The only envelope that is read of a caller who is not known."""

    job: str
    epoch: int
    incarnation: int
    request: int
    sizes: list[int]
    body: messages.Hello
    places: list[int] = []


_greeting_decoder = msgspec.msgpack.Decoder(_Greeting)


def as_bytes(buffer: Buffer) -> memoryview | bytes:
    """Returns the memory of a buffer, byte by byte, without a copy.

    Example:
      >>> len(as_bytes(np.zeros((2, 3), np.float32)))
      24
    """
    if type(buffer) is bytes:
        return buffer
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise errors.ArgumentTypeError(
                "Arrays travel as they lie in memory",
                f"one of shape {buffer.shape} is not contiguous",
                "Pass `np.ascontiguousarray(array)`.",
            )
        if buffer.size == 0:
            return b""
        # Types of ml_dtypes have no buffer protocol; their bytes have.
        return buffer.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else b""
    except TypeError as error:
        raise errors.ArgumentTypeError(
            "A message carries bytes and contiguous arrays",
            f"found {type(buffer).__name__}: {error}",
            "Pass NumPy arrays or bytes.",
        ) from error


def encode(
    job: str,
    epoch: int,
    incarnation: int,
    request: int,
    body: messages.Body,
    buffers: Sequence[Buffer] = (),
    shared: SharedMemoryWriter | None = None,
    is_kept: bool = False,
) -> list[Any]:
    """Turns a message into frames.

    Args:
      job: See `Envelope`.
      epoch: See `Envelope`.
      incarnation: See `Envelope`.
      request: See `Envelope`.
      body: What is said.
      buffers: What goes with it.
      shared: Shared memory for large buffers.
      is_kept: Whether they must stay there until `shared.release(request)`.

    Raises:
      ResourceExhaustedError: The header or the buffers are larger than a message may be.

    Example:
      >>> frames = encode("job", 1, 7, 3, messages.Done(), [b"abc"])
      >>> envelope, buffers = decode(frames)
      >>> envelope.request, envelope.body, bytes(buffers[0])
      (3, Done(), b'abc')
    """
    if not buffers:
        envelope = messages.Envelope(job, epoch, incarnation, request, [], body)  # type: ignore[arg-type]
        frames = [_encoder.encode(envelope)]
        _check_lengths(len(frames[0]), 0, body)
        return frames
    memory = [as_bytes(b) for b in buffers]
    sizes = [len(m) for m in memory]
    places: list[int] = []
    if shared is not None and max(sizes) >= limits.SHARED_BUFFER:
        large = [m for m in memory if len(m) >= limits.SHARED_BUFFER]
        found = shared.put(large, request if is_kept else 0)
        if found:
            where = iter(found)
            places = [next(where) if len(m) >= limits.SHARED_BUFFER else -1 for m in memory]
            memory = [m for m in memory if len(m) < limits.SHARED_BUFFER]
    envelope = messages.Envelope(job, epoch, incarnation, request, sizes, body, places)  # type: ignore[arg-type]
    header = _encoder.encode(envelope)
    _check_lengths(len(header), sum(sizes), body)
    frames: list[Any] = [header]
    joined = _join(memory)
    if joined is not None:
        frames.append(joined)
    for m in memory:
        if len(m) > limits.PART:
            view = memoryview(m)
            frames.extend(view[i : i + limits.PART] for i in range(0, len(m), limits.PART))
        elif len(m) >= limits.JOINED:
            frames.append(m)
    return frames


def num_bytes(frames: Sequence[Any]) -> int:
    """Returns how large the buffers of a message are, wherever they lie.

    Example:
      >>> num_bytes(encode("job", 1, 7, 3, messages.Done(), [b"abc", b"d"]))
      4
    """
    return sum(_decoder.decode(frames[0]).sizes)


def fingerprint(buffers: Iterable[Buffer]) -> str:
    """Returns the SHA-256 of some buffers, in hexadecimal, by which functions are named.

    The size of each buffer is hashed before its bytes, so that no two lists share a name.

    >>> fingerprint([b"ab", b"c"]) == fingerprint([b"a", b"bc"])
    False
    """
    digest = hashlib.sha256()
    for buffer in buffers:
        view = memoryview(buffer)
        digest.update(view.nbytes.to_bytes(8, "little"))
        digest.update(view)
    return digest.hexdigest()


def _check_lengths(header: int, total: int, body: messages.Body) -> None:
    for what, found, limit in (
        ("header", header, limits.HEADER),
        ("buffers", total, limits.MESSAGE),
    ):
        if found > limit:
            raise errors.ResourceExhaustedError(
                f"The {what} of a message may have {limit} bytes",
                f"a {type(body).__name__} has {found}",
                "Send it in parts.",
            )


def _join(memory: list[memoryview | bytes]) -> bytearray | memoryview | bytes | None:
    """Puts all small buffers into one frame; None if there is nothing in them."""
    small = [m for m in memory if 0 < len(m) < limits.JOINED]
    if not small:
        return None
    if len(small) == 1:
        return small[0]
    mask = limits.ALIGNMENT - 1
    end = 0
    for m in small:
        end = (end + mask & ~mask) + len(m)
    joined = bytearray(end)
    end = 0
    for m in small:
        start = end + mask & ~mask
        end = start + len(m)
        joined[start:end] = m
    return joined


def decode(
    frames: Sequence[Any], shared: SharedMemoryReader | None = None
) -> tuple[messages.Envelope, list[memoryview]]:
    """Turns frames into a message; the buffers are views of the frames, or of shared memory.

    Raises:
      ProtocolError: The frames are no message of this protocol.
    """
    if not frames or len(header := memoryview(frames[0])) > limits.HEADER:
        raise _broken("the header is missing or too long")
    try:
        envelope = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _broken(str(error)) from error
    if not envelope.sizes:
        if len(frames) != 1:
            raise _broken("there are frames that the header does not name")
        return envelope, []
    if not envelope.places:
        return envelope, _split(envelope.sizes, frames)
    return envelope, _split_with_shared_memory(envelope, frames, shared)


def _split_with_shared_memory(
    envelope: messages.Envelope, frames: Sequence[Any], shared: SharedMemoryReader | None
) -> list[memoryview]:
    sizes, places = envelope.sizes, envelope.places
    if shared is None or len(places) != len(sizes) or sum(map(abs, sizes)) > limits.MESSAGE:
        raise _broken("its buffers would lie in memory that is not shared")
    rest = [size for size, place in zip(sizes, places, strict=True) if place < 0]
    if not rest and len(frames) != 1:
        raise _broken("there are frames that the header does not name")
    others = iter(_split(rest, frames) if rest else [])
    blocks = [(place, size) for size, place in zip(sizes, places, strict=True) if place >= 0]
    found = iter(shared.views(*zip(*blocks, strict=True)) if blocks else [])
    return [next(others) if place < 0 else next(found) for place in places]


def _split(sizes: list[int], frames: Sequence[Any]) -> list[memoryview]:
    """Finds the buffers in the frames, once everything is as the header says."""
    joined, large = _place(sizes, frames)
    mask = limits.ALIGNMENT - 1
    buffers: list[memoryview] = []
    end = 0
    for size in sizes:
        if size >= limits.JOINED:
            buffers.append(_whole(large, size))
        elif size:
            start = end + mask & ~mask
            end = start + size
            buffers.append(joined[start:end])
        else:
            buffers.append(_EMPTY)
    return buffers


def _whole(frames: Iterator[memoryview], size: int) -> memoryview:
    """Takes the next large buffer from its frames: as it lies there, or put together."""
    if size <= limits.PART:
        view = next(frames)
        if len(view) != size:
            raise _broken("a buffer does not have the size that the header says")
        return view
    parts = list(itertools.islice(frames, -(-size // limits.PART)))
    last = size - (len(parts) - 1) * limits.PART
    if [len(part) for part in parts] != [limits.PART] * (len(parts) - 1) + [last]:
        raise _broken("the frames of a buffer do not have the size that the header says")
    whole = np.empty(size, np.uint8)
    for i, part in enumerate(parts):
        whole[i * limits.PART :][: len(part)] = part
    return whole.data


def _place(sizes: list[int], frames: Sequence[Any]) -> tuple[memoryview, Iterator[memoryview]]:
    """Returns the frame of the small buffers, and those of the large ones."""
    mask = limits.ALIGNMENT - 1
    end = num_large = 0
    for size in sizes:
        if size >= limits.JOINED:
            num_large += -(-size // limits.PART)
        elif size:
            end = (end + mask & ~mask) + size
    if min(sizes) < 0 or sum(sizes) > limits.MESSAGE:
        raise _broken(f"its buffers would have between {min(sizes)} and {sum(sizes)} bytes")
    num_joined = 1 if end else 0
    if len(frames) != 1 + num_joined + num_large:
        raise _broken("the number of frames is not what the header says")
    joined = memoryview(frames[1]) if end else _EMPTY
    if len(joined) != end:
        raise _broken("the small buffers do not have the size that the header says")
    return joined, map(memoryview, frames[1 + num_joined :])


def decode_hello(frames: Sequence[Any]) -> tuple[int, messages.Hello] | None:
    """Reads the first message of a caller: its number and the hello.

    Returns:
      None for a message of ours that is no hello.

    Raises:
      ProtocolError: The frames are no message of this protocol.
    """
    header = memoryview(frames[0]) if frames else _EMPTY
    # An envelope is an array of seven; nothing else is looked at before the caller is known.
    if not len(header) or header[0] != 0x90 + len(messages.Envelope.__struct_fields__):
        raise _broken("it does not begin as one")
    if len(frames) != 1 or len(header) > limits.HELLO:
        return None
    try:
        greeting = _greeting_decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return greeting.request, greeting.body


def _broken(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        f"A message of version {messages.VERSION} of the protocol was expected",
        found,
        "Check that all tasks have the same version of replicax.",
    )
