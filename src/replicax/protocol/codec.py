"""Encodes messages as the parts of a ZeroMQ multipart message, and decodes them.

The first part is the envelope. Buffers may be in shared memory (`transport/shared_memory.py`); of
the others, all below 32 KiB are joined in one part, each at a multiple of 64 bytes; each larger
buffer has parts of its own, of 1 MiB but for the last. `Envelope.sizes` defines the layout.
Counts and sizes are validated against the received parts before any buffer is used.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits, messages

# Anything with the buffer protocol and contiguous memory, and NumPy arrays of any dtype. Typeshed
# has no type for the buffer protocol in Python 3.11.
Buffer: TypeAlias = Any
# One part of an encoded message.
Part: TypeAlias = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.Envelope)
_EMPTY = memoryview(b"")


class SharedMemoryWriter(Protocol):
    """Memory that the receiver of a message can read; see `transport/shared_memory.py`."""

    def put(self, buffers: Sequence[memoryview | bytes], request: int = 0) -> list[int]:
        """Copies buffers; returns their offsets, or an empty list if there is no room."""
        ...


class SharedMemoryReader(Protocol):
    """Memory into which the sender of a message writes."""

    def views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of one message."""
        ...


class _HelloEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """The only envelope that is decoded before a handshake."""

    job: str
    epoch: int
    incarnation: int
    request: int
    sizes: list[int]
    body: messages.Hello
    offsets: list[int] = []


_hello_decoder = msgspec.msgpack.Decoder(_HelloEnvelope)


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
                "Arrays in messages must be contiguous",
                f"one of shape {buffer.shape} is not contiguous",
                "Pass `np.ascontiguousarray(array)`.",
            )
        if buffer.size == 0:
            return b""
        # The dtypes of ml_dtypes do not support the buffer protocol; their bytes do.
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
) -> list[Part]:
    """Encodes a message as parts.

    Args:
      job: See `Envelope`.
      epoch: See `Envelope`.
      incarnation: See `Envelope`.
      request: See `Envelope`.
      body: The contents.
      buffers: The buffers of the body.
      shared: Shared memory for large buffers.
      is_kept: Whether buffers must stay in shared memory until `shared.release(request)`.

    Raises:
      ResourceExhaustedError: The header or the buffers are larger than the limit.

    Example:
      >>> parts = encode("job", 1, 7, 3, messages.Done(), [b"abc"])
      >>> envelope, buffers = decode(parts)
      >>> envelope.request, envelope.body, bytes(buffers[0])
      (3, Done(), b'abc')
    """
    if not buffers:
        envelope = messages.Envelope(job, epoch, incarnation, request, [], body)  # type: ignore[arg-type]
        header = _encoder.encode(envelope)
        _check_lengths(len(header), 0, body)
        return [header]
    memory = [as_bytes(b) for b in buffers]
    sizes = [len(m) for m in memory]
    offsets: list[int] = []
    if shared is not None and max(sizes) >= limits.SHARED_BUFFER:
        large = [m for m in memory if len(m) >= limits.SHARED_BUFFER]
        found = shared.put(large, request if is_kept else 0)
        if found:
            places = iter(found)
            offsets = [next(places) if len(m) >= limits.SHARED_BUFFER else -1 for m in memory]
            memory = [m for m in memory if len(m) < limits.SHARED_BUFFER]
    envelope = messages.Envelope(job, epoch, incarnation, request, sizes, body, offsets)  # type: ignore[arg-type]
    header = _encoder.encode(envelope)
    _check_lengths(len(header), sum(sizes), body)
    parts: list[Part] = [header]
    joined = _join(memory)
    if joined is not None:
        parts.append(joined)
    for m in memory:
        if len(m) > limits.PART:
            view = memoryview(m)
            parts.extend(view[i : i + limits.PART] for i in range(0, len(m), limits.PART))
        elif len(m) >= limits.JOINED:
            parts.append(m)
    return parts


def num_bytes(parts: Sequence[Part]) -> int:
    """Returns the size of the buffers of an encoded message, also of those in shared memory.

    Example:
      >>> num_bytes(encode("job", 1, 7, 3, messages.Done(), [b"abc", b"d"]))
      4
    """
    return sum(_decoder.decode(parts[0]).sizes)


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
    """Joins all small buffers into one part; None if they are empty."""
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
    parts: Sequence[Any], shared: SharedMemoryReader | None = None
) -> tuple[messages.Envelope, list[memoryview]]:
    """Decodes a message; the buffers are views of the parts, or of shared memory.

    Raises:
      ProtocolError: The parts are not a valid message.
    """
    if not parts or len(header := memoryview(parts[0])) > limits.HEADER:
        raise _broken("the header is missing or too long")
    try:
        envelope = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _broken(str(error)) from error
    if not envelope.sizes:
        if len(parts) != 1:
            raise _broken("there are parts that the header does not list")
        return envelope, []
    if not envelope.offsets:
        return envelope, _split(envelope.sizes, parts)
    return envelope, _split_with_shared_memory(envelope, parts, shared)


def _split_with_shared_memory(
    envelope: messages.Envelope, parts: Sequence[Any], shared: SharedMemoryReader | None
) -> list[memoryview]:
    sizes, offsets = envelope.sizes, envelope.offsets
    if shared is None or len(offsets) != len(sizes) or sum(map(abs, sizes)) > limits.MESSAGE:
        raise _broken("its buffers are outside of the shared memory")
    rest = [size for size, offset in zip(sizes, offsets, strict=True) if offset < 0]
    if not rest and len(parts) != 1:
        raise _broken("there are parts that the header does not list")
    others = iter(_split(rest, parts) if rest else [])
    blocks = [(offset, size) for size, offset in zip(sizes, offsets, strict=True) if offset >= 0]
    found = iter(shared.views(*zip(*blocks, strict=True)) if blocks else [])
    return [next(others) if offset < 0 else next(found) for offset in offsets]


def _split(sizes: list[int], parts: Sequence[Any]) -> list[memoryview]:
    """Returns the buffers in the parts, which must match the header."""
    joined, large = _check_parts(sizes, parts)
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


def _whole(large: Iterator[memoryview], size: int) -> memoryview:
    """Returns the next large buffer: a view of its part, or a copy of several parts."""
    if size <= limits.PART:
        view = next(large)
        if len(view) != size:
            raise _broken("the size of a buffer differs from that in the header")
        return view
    parts = list(itertools.islice(large, -(-size // limits.PART)))
    last = size - (len(parts) - 1) * limits.PART
    if [len(part) for part in parts] != [limits.PART] * (len(parts) - 1) + [last]:
        raise _broken("the parts of a buffer differ from its size in the header")
    whole = np.empty(size, np.uint8)
    for i, part in enumerate(parts):
        whole[i * limits.PART :][: len(part)] = part
    return whole.data


def _check_parts(sizes: list[int], parts: Sequence[Any]) -> tuple[memoryview, Iterator[memoryview]]:
    """Returns the part of the small buffers, and those of the large ones."""
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
    if len(parts) != 1 + num_joined + num_large:
        raise _broken("the number of parts differs from that in the header")
    joined = memoryview(parts[1]) if end else _EMPTY
    if len(joined) != end:
        raise _broken("the size of the small buffers differs from that in the header")
    return joined, map(memoryview, parts[1 + num_joined :])


def decode_hello(parts: Sequence[Any]) -> tuple[int, messages.Hello] | None:
    """Decodes the handshake of a peer: the number of the request and the `Hello`.

    Returns:
      None for another message of this protocol.

    Raises:
      ProtocolError: The parts are not a valid message.
    """
    header = memoryview(parts[0]) if parts else _EMPTY
    # An envelope is an array of seven fields; the rest is decoded after the handshake only.
    if not len(header) or header[0] != 0x90 + len(messages.Envelope.__struct_fields__):
        raise _broken("it does not start with an envelope")
    if len(parts) != 1 or len(header) > limits.HELLO:
        return None
    try:
        found = _hello_decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return found.request, found.body


def _broken(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        f"Peers must send valid messages of protocol version {messages.VERSION}",
        found,
        "Check that all tasks have the same version of replicax.",
    )
