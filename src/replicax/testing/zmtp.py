"""Parser of unencrypted ZeroMQ streams (ZMTP 3)."""

from __future__ import annotations

import dataclasses

# The fixed-size start of the handshake of both sides.
_HANDSHAKE = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of a stream that is forwarded as a whole.

    Attributes:
      raw: Its bytes.
      frames: The frames of a message; None for ZeroMQ's own commands.
    """

    raw: bytes
    frames: list[bytes] | None = None


class Splitter:
    """Splits a stream into messages.

    Example:
      >>> splitter = Splitter()
      >>> [unit.frames for unit in splitter.feed(bytes(64) + joined([b"head", b"data"]))]
      [None, [b'head', b'data']]
    """

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._handshake_left = _HANDSHAKE
        # The offset of the incomplete message, and its frames so far.
        self._position = 0
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[Unit]:
        """Feeds bytes; returns the complete pieces."""
        units: list[Unit] = []
        if self._handshake_left:
            start, data = data[: self._handshake_left], data[self._handshake_left :]
            self._handshake_left -= len(start)
            units.append(Unit(start))
        self._bytes += data
        while (unit := self._next()) is not None:
            units.append(unit)
        return units

    def _next(self) -> Unit | None:
        held = self._bytes
        while True:
            start = self._position
            if len(held) < start + 2:
                return None
            flags = held[start]
            head = 9 if flags & _LONG else 2
            if len(held) < start + head:
                return None
            end = start + head + int.from_bytes(held[start + 1 : start + head], "big")
            if len(held) < end:
                return None
            if not flags & _COMMAND:
                self._frames.append(bytes(held[start + head : end]))
            self._position = end
            if not flags & _MORE:
                break
        frames, self._frames = self._frames, []
        raw = bytes(held[: self._position])
        del held[: self._position]
        self._position = 0
        return Unit(raw, frames or None)


def joined(frames: list[bytes]) -> bytes:
    r"""Returns the bytes of a message.

    Example:
      >>> joined([b"a", b"bc"])
      b'\x01\x01a\x00\x02bc'
    """
    raw = bytearray()
    for i, frame in enumerate(frames):
        flags = 0 if i == len(frames) - 1 else _MORE
        if len(frame) > 255:
            raw += bytes([flags | _LONG]) + len(frame).to_bytes(8, "big")
        else:
            raw += bytes([flags, len(frame)])
        raw += frame
    return bytes(raw)
