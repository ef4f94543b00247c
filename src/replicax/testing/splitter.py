"""Splits unencrypted streams into messages, and joins messages to streams."""

from __future__ import annotations

from collections.abc import Sequence

from replicax.protocol.codec import Part
from replicax.transport.streams import frames


class Splitter:
    """Splits a stream into messages: lists of a header, and of a body if there is one.

    Example:
      >>> splitter = Splitter()
      >>> raw = joined([b"head", b"data"])
      >>> [splitter.feed(raw[:9]), splitter.feed(raw[9:])]
      [[], [[b'head', b'data']]]
    """

    def __init__(self) -> None:
        self._reader = frames.FrameReader()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Feeds bytes; returns the complete messages."""
        self._reader.feed(memoryview(data))
        found = [[bytes(part) for part in message] for message in self._reader.messages]
        self._reader.messages.clear()
        return found


def joined(parts: Sequence[Part]) -> bytes:
    """Returns the bytes of a message."""
    return b"".join(part for piece in frames.pack(parts) for part in piece)
