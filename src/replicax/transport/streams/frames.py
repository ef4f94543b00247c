"""The format of a stream: messages in pieces, each with its length in front.

A piece starts with its length, its priority and whether it is the last of its message. Pieces of
the two priorities may alternate, so that a heartbeat does not wait for a large message. The first
piece of a message starts with the sizes of its header and of the whole. The body is at a multiple
of 64 bytes, so that its arrays are aligned in the memory of the receiver.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Sequence

import numpy as np

from replicax.foundation import errors
from replicax.protocol import limits
from replicax.protocol.codec import Part

NORMAL, URGENT = 0, 1

_MAGIC = 0x7278
# Length, priority, whether it is the last piece of its message, and the mark of the protocol.
_PIECE = struct.Struct("<IBBH")
# The same, and the start of a message: the sizes of its header and of all of it.
_FIRST = struct.Struct("<IBBHIQ4x")
_START = struct.Struct("<IQ4x")
PREFIX = _PIECE.size
_MASK = limits.ALIGNMENT - 1
# Messages up to this size are copied into one buffer, which leaves with one plain call.
_JOINED = 16 * limits.KIB
# Messages from this size on get aligned memory.
_ALIGNED = 4 * limits.KIB
# The space that headers need besides the buffers of a message.
LARGEST = limits.HEADER + limits.MESSAGE + limits.MIB


def pack(parts: Sequence[Part], priority: int = NORMAL) -> list[list[Part]]:
    """Returns the pieces of a message, each as buffers to send one after the other.

    Example:
      >>> (piece,) = pack([b"header", b"body"])
      >>> reader = FrameReader()
      >>> reader.feed(memoryview(b"".join(piece)))
      >>> [bytes(part) for part in reader.messages.popleft()]
      [b'header', b'body']
    """
    header = parts[0]
    size = len(header)
    total = start = _START.size + size
    if len(parts) == 1:
        return [[_FIRST.pack(total, priority, 1, _MAGIC, size, total) + header]]
    start = (start + _MASK) & ~_MASK
    total = start + sum(map(len, parts[1:]))
    padding = bytes(start - size - _START.size)
    if total <= limits.PIECE:
        first = _FIRST.pack(total, priority, 1, _MAGIC, size, total)
        if total <= _JOINED:
            return [[b"".join((first, header, padding, *parts[1:]))]]
        return [[b"".join((first, header, padding)), *parts[1:]]]
    return _split(
        [b"".join((_START.pack(size, total), header, padding)), *parts[1:]], total, priority
    )


def _split(parts: Sequence[Part], total: int, priority: int) -> list[list[Part]]:
    pieces: list[list[Part]] = []
    sources = iter(parts)
    source = memoryview(b"")
    for position in range(0, total, limits.PIECE):
        left = min(limits.PIECE, total - position)
        piece: list[Part] = [_PIECE.pack(left, priority, position + left == total, _MAGIC)]
        while left:
            if not len(source):
                source = memoryview(next(sources))
            piece.append(source[:left])
            left -= len(piece[-1])
            source = source[len(piece[-1]) :]
        pieces.append(piece)
    return pieces


class _Message:
    """A message of which some pieces have arrived."""

    def __init__(self, header: int, total: int) -> None:
        self.header = header
        self.room = _aligned(total)
        self.num_received = 0


class FrameReader:
    """Turns bytes into messages.

    Attributes:
      messages: The complete messages, each a header, and a body if it has one.
      most: The largest message that is accepted, in bytes.
      target: The memory into which the next bytes can be read without a copy; empty if the length
        of what comes next is not known.
    """

    def __init__(self) -> None:
        self.messages: collections.deque[list[memoryview]] = collections.deque()
        self.most = LARGEST
        self.target = memoryview(b"")
        self._rest = b""
        # The message being received, by priority; the priority of the current piece, and its end.
        self._messages: list[_Message | None] = [None, None]
        self._priority = NORMAL
        self._is_last = False

    def feed(self, data: memoryview) -> None:
        """Takes bytes, which may change afterwards.

        Raises:
          ProtocolError: They do not continue a stream of this protocol.
        """
        if len(self.target):
            num = min(len(self.target), len(data))
            self.target[:num] = data[:num]
            self.advance(num)
            data = data[num:]
        if self._rest:
            data = memoryview(self._rest + bytes(data))
            self._rest = b""
        position = 0
        size = len(data)
        while size - position >= PREFIX:
            used = self._piece(data, position, size - position)
            if not used:
                break
            position += used
        if position < size:
            self._rest = bytes(data[position:])

    def advance(self, num: int) -> None:
        """Records that bytes were read into `target`."""
        self.target = self.target[num:]
        message = self._messages[self._priority]
        assert message is not None
        message.num_received += num
        if not len(self.target):
            self._finish(message)

    def _piece(self, data: memoryview, at: int, size: int) -> int:
        """Takes the piece at a position; returns the bytes that it used, 0 if it needs more."""
        length, priority, is_last, magic = _PIECE.unpack_from(data, at)
        if magic != _MAGIC or priority > URGENT or is_last > 1 or not 0 < length <= limits.PIECE:
            raise _malformed("a piece does not start as it must")
        message = self._messages[priority]
        if message is None:
            if size < _FIRST.size:
                return 0
            header, total = _START.unpack_from(data, at + PREFIX)
            self._check(header, total, length, is_last)
            end = PREFIX + length
            if is_last and size >= end and total < _ALIGNED:
                # Most messages are like this.
                self._complete(memoryview(bytes(data[at + PREFIX : at + end])), header)
                return end
            message = self._messages[priority] = _Message(header, total)
        elif message.num_received + length > len(message.room):
            raise _malformed("the pieces of a message are longer than the message")
        self._priority, self._is_last = priority, bool(is_last)
        start = message.num_received
        self.target = message.room[start : start + length]
        num = min(length, size - PREFIX)
        self.target[:num] = data[at + PREFIX : at + PREFIX + num]
        self.advance(num)
        return PREFIX + num

    def _check(self, header: int, total: int, length: int, is_last: int) -> None:
        if total > self.most or header > limits.HEADER:
            raise _malformed(
                f"a message of {total} bytes with a header of {header} bytes is oversized: "
                f"{min(self.most, LARGEST)} bytes are accepted here"
            )
        start = (_START.size + header + _MASK) & ~_MASK
        is_right = total == _START.size + header or total > start
        if not is_right or length > total or is_last != (length == total):
            raise _malformed("the sizes of a message do not fit")

    def _finish(self, message: _Message) -> None:
        """Ends a piece."""
        is_whole = message.num_received == len(message.room)
        if is_whole != self._is_last:
            raise _malformed("a message ends before its last piece, or after it")
        if is_whole:
            self._messages[self._priority] = None
            self._complete(message.room, message.header)

    def _complete(self, data: memoryview, header: int) -> None:
        data = data.toreadonly()
        end = _START.size + header
        found = [data[_START.size : end]]
        if len(data) > end:
            found.append(data[(end + _MASK) & ~_MASK :])
        self.messages.append(found)


def _aligned(size: int) -> memoryview:
    room = np.empty(size + limits.ALIGNMENT, np.uint8)
    start = -room.__array_interface__["data"][0] & _MASK
    return room[start : start + size].data


def _malformed(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        "Peers must send streams of this protocol",
        found,
        "Check that all tasks have the same version of replicax.",
    )
