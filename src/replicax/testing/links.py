"""One connection through a proxy: two streams, and the faults of their messages."""

from __future__ import annotations

import collections
import contextlib
import socket
import struct

import msgspec

from replicax.foundation import errors
from replicax.protocol import codec, messages
from replicax.testing.faults import Dice, Direction
from replicax.testing.splitter import Splitter, joined

_PIECE = 1 << 18
# Reading pauses while this much waits to be written.
_MOST_WAITING = 8 << 20
# The longest delay of a message that is reordered after the next one.
_LONGEST_WAIT_S = 0.05
# TLS handshakes are shorter than this; bits are flipped after them.
_HANDSHAKE = 4096
_MOST_NAMES = 4096
# Discards unsent data on close: the peer gets a reset.
_RESET = struct.pack("ii", 1, 0)


class Stream:
    """One direction: data that was read at one end and is not written at the other yet."""

    def __init__(self, source: socket.socket, sink: socket.socket, sees_messages: bool) -> None:
        self.source = source
        self.sink = sink
        self.splitter = Splitter() if sees_messages else None
        self.num_bytes = 0
        self.is_ended = False
        # Whole pieces and when each may be written; the piece being written.
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self._num_waiting = 0
        self._current = memoryview(b"")
        # A message to be sent after the next one, and its deadline.
        self.held: tuple[float, bytes] | None = None
        self._allowance = 0.0
        self._allowed_s = 0.0

    @property
    def can_read(self) -> bool:
        """Whether there is room for more."""
        return not self.is_ended and self._num_waiting < _MOST_WAITING

    def put(self, raw: bytes, due_s: float) -> None:
        """Queues a piece, to be written not before a given time."""
        if self._waiting:
            due_s = max(due_s, self._waiting[-1][0])
        self._waiting.append((due_s, raw))
        self._num_waiting += len(raw)

    def release(self, now: float, is_due: bool = False) -> None:
        """Queues the message that was held back for reordering."""
        if self.held is not None and (is_due or now >= self.held[0]):
            raw, self.held = self.held[1], None
            self.put(raw, now)

    def next_s(self, now: float) -> float:
        """Returns when the next piece may be written; infinity if there is none."""
        if self._current:
            return now if self._allowance >= 0 else now + 0.005
        times = [self._waiting[0][0]] if self._waiting else []
        if self.held is not None:
            times.append(self.held[0])
        return min(times, default=float("inf"))

    def write(self, now: float, bytes_per_s: float | None) -> None:
        """Writes the pieces that are due.

        Raises:
          OSError: The other end is gone.
        """
        self.release(now)
        if bytes_per_s is not None:
            grown = self._allowance + (now - self._allowed_s) * bytes_per_s
            self._allowance = min(grown, max(1.0, bytes_per_s / 20))
        self._allowed_s = now
        while self._current or (self._waiting and self._waiting[0][0] <= now):
            if not self._current:
                self._current = memoryview(self._waiting.popleft()[1])
            piece = self._current
            if bytes_per_s is not None:
                if self._allowance < 1:
                    return
                piece = piece[: int(self._allowance)]
            try:
                sent = self.sink.send(piece)
            except BlockingIOError:
                return
            self._current = self._current[sent:]
            self._num_waiting -= sent
            if bytes_per_s is not None:
                self._allowance -= sent

    @property
    def is_blocked(self) -> bool:
        """Whether a piece is due."""
        return bool(self._current)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was read was written."""
        return not self._current and not self._waiting and self.held is None


class Link:
    """A peer, the task that it is connected to, and the two streams between them.

    Attributes:
      caller: The peer, if its handshake could be read.
      requests: From the peer to the task.
      replies: From the task to the peer.
      is_broken: Whether it is to be closed now.
    """

    def __init__(self, near: socket.socket, far: socket.socket, sees_messages: bool) -> None:
        near.setblocking(False)
        far.setblocking(False)
        self.near, self.far = near, far
        self.requests = Stream(near, far, sees_messages)
        self.replies = Stream(far, near, sees_messages)
        self.caller: tuple[str, int] | None = None
        self.is_broken = False
        # The request whose reply breaks the connection; 0, of a notice, stands for any reply.
        self._breaks_on: int | None = None
        # The receive buffer, reused: a new one for each piece would fragment the memory of a
        # process that runs for long.
        self._room = memoryview(bytearray(_PIECE))
        # The names of the requests that have no reply yet, by number.
        self._names: collections.OrderedDict[int, str] = collections.OrderedDict()

    def read(self, stream: Stream, dice: Dice, now: float) -> None:
        """Reads data, and decides the faults of its messages."""
        try:
            data = bytes(self._room[: stream.source.recv_into(self._room)])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            stream.is_ended = True
            return
        begun = stream.num_bytes >= _HANDSHAKE
        stream.num_bytes += len(data)
        if stream.splitter is None:
            stream.put(dice.flip(data) if begun else data, now)
            return
        direction: Direction = "request" if stream is self.requests else "reply"
        for message in stream.splitter.feed(data):
            self._pass(stream, direction, message, dice, now)
            if self.is_broken:
                return

    def _pass(
        self, stream: Stream, direction: Direction, message: list[bytes], dice: Dice, now: float
    ) -> None:
        number, name = self._look(direction, message)
        if name == "Hello":
            stream.put(joined([_without_shared_memory(message[0], self)]), now)
            return
        raw = joined(message)
        if name in ("Welcome", ""):
            stream.put(raw, now)
            return
        if direction == "reply" and self._breaks_on in (0, number):
            dice.landed["break_before_reply"] += 1
            self.is_broken = True
            return
        self._let(stream, dice.throw(direction, name), number, raw, dice, now)

    def _let(
        self, stream: Stream, fault: str, number: int, raw: bytes, dice: Dice, now: float
    ) -> None:
        if fault.startswith("reorder") and stream.held is None:
            stream.held = now + _LONGEST_WAIT_S, raw
            dice.landed[fault] += 1
            return
        if fault == "break_before_reply":
            self._breaks_on = number
        elif fault and not fault.startswith("reorder"):
            dice.landed[fault] += 1
        if not fault.startswith("drop"):
            stream.put(raw, now + (dice.faults.delay_s if fault == "delay" else 0.0))
        if fault.startswith("duplicate"):
            stream.put(raw, now)
        stream.release(now, is_due=True)

    def _look(self, direction: Direction, message: list[bytes]) -> tuple[int, str]:
        """Returns the number of a message, and the name of the request that it is or answers."""
        try:
            envelope = codec.decode(message)[0]
        except errors.ProtocolError:
            return 0, ""
        number, name = envelope.request, type(envelope.body).__name__
        if name in ("Hello", "Welcome"):
            return number, name
        if not number:
            return number, name
        if direction == "request":
            self._names[number] = name
            if len(self._names) > _MOST_NAMES:
                self._names.popitem(last=False)
            return number, name
        return number, self._names.get(number, name)

    def close(self, is_reset: bool = False) -> None:
        """Closes both ends; with a reset, if the kind of socket supports it."""
        for end in (self.near, self.far):
            if is_reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            end.close()


def _without_shared_memory(frame: bytes, link: Link) -> bytes:
    """Returns a handshake without shared memory, which would bypass the proxy."""
    found = codec.decode_hello([frame])
    if found is None:
        return frame
    number, hello = found
    link.caller = (hello.role, hello.task)
    plain: messages.Body = msgspec.structs.replace(hello, shares_memory=False)
    return bytes(codec.encode("", 0, hello.incarnation, number, plain)[0])
