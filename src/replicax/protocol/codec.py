"""Encodes messages as a header and a body, and decodes them.

The header is the envelope. The body holds the buffers, each at a multiple of 64 bytes, except those
in shared memory (`transport/shared_memory.py`). `Envelope.sizes` defines the layout: counts and
sizes are validated against the received body before any buffer is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits, messages

# Anything with the buffer protocol and contiguous memory, and NumPy arrays of any dtype. Typeshed
# has no type for the buffer protocol in Python 3.11.
Buffer: TypeAlias = Any
# One part of an encoded message: the header, or a piece of the body.
Part: TypeAlias = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(messages.Envelope)
_EMPTY = memoryview(b"")
_MASK = limits.ALIGNMENT - 1


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
    """Encodes a message: its header, then the pieces of its body.

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
      >>> header, body = encode("job", 1, 7, 3, messages.Done(), [b"abc"])
      >>> envelope, buffers = decode([header, body])
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
    if shared is not None:
        large = [m for m in memory if len(m) >= limits.SHARED_BUFFER]
        is_worthwhile = sum(map(len, large)) >= limits.SHARED_MESSAGE
        found = shared.put(large, request if is_kept else 0) if is_worthwhile else []
        if found:
            places = iter(found)
            offsets = [next(places) if len(m) >= limits.SHARED_BUFFER else -1 for m in memory]
            memory = [m for m in memory if len(m) < limits.SHARED_BUFFER]
    envelope = messages.Envelope(job, epoch, incarnation, request, sizes, body, offsets)  # type: ignore[arg-type]
    header = _encoder.encode(envelope)
    _check_lengths(len(header), sum(sizes), body)
    return [header, *_body(memory)]


def _body(memory: list[memoryview | bytes]) -> list[Part]:
    """Returns the pieces of a body: large buffers without a copy, small ones joined."""
    if len(memory) == 1:
        return [memory[0]] if len(memory[0]) else []
    pieces: list[Part] = []
    small = bytearray()
    end = 0
    for m in memory:
        size = len(m)
        if not size:
            continue
        if padding := -end & _MASK:
            small += bytes(padding)
        if size < limits.JOINED:
            small += m
        else:
            if small:
                pieces.append(small)
                small = bytearray()
            pieces.append(m)
        end += padding + size
    if small:
        pieces.append(small)
    return pieces


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


def decode(
    parts: Sequence[Any], shared: SharedMemoryReader | None = None
) -> tuple[messages.Envelope, list[memoryview]]:
    """Decodes a message; the buffers are views of its body, or of shared memory.

    Args:
      parts: The header, and the body in one piece if there is one.
      shared: The shared memory that the sender writes.

    Raises:
      ProtocolError: The parts are not a valid message.
    """
    if not parts or len(header := memoryview(parts[0])) > limits.HEADER:
        raise _broken("the header is missing or too long")
    try:
        envelope = _decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _broken(str(error)) from error
    body = memoryview(parts[1]) if len(parts) > 1 else _EMPTY
    if not envelope.sizes:
        if len(body):
            raise _broken("there is a body that the header does not list")
        return envelope, []
    if not envelope.offsets:
        return envelope, _split(envelope.sizes, body)
    return envelope, _split_with_shared_memory(envelope, body, shared)


def _split_with_shared_memory(
    envelope: messages.Envelope, body: memoryview, shared: SharedMemoryReader | None
) -> list[memoryview]:
    sizes, offsets = envelope.sizes, envelope.offsets
    if shared is None or len(offsets) != len(sizes) or sum(map(abs, sizes)) > limits.MESSAGE:
        raise _broken("its buffers are outside of the shared memory")
    rest = [size for size, offset in zip(sizes, offsets, strict=True) if offset < 0]
    others = iter(_split(rest, body))
    blocks = [(offset, size) for size, offset in zip(sizes, offsets, strict=True) if offset >= 0]
    found = iter(shared.views(*zip(*blocks, strict=True)) if blocks else [])
    return [next(others) if offset < 0 else next(found) for offset in offsets]


def _split(sizes: list[int], body: memoryview) -> list[memoryview]:
    """Returns the buffers in a body, which must match the header."""
    buffers: list[memoryview] = []
    end = 0
    for size in sizes:
        if size < 0:
            raise _broken(f"a buffer would have {size} bytes")
        if size:
            start = end + _MASK & ~_MASK
            end = start + size
            buffers.append(body[start:end])
        else:
            buffers.append(_EMPTY)
    if end != len(body):
        raise _broken(f"its body has {len(body)} bytes, and {end} according to the header")
    return buffers


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
