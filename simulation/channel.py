"""A model of `transport/channel.py`: requests to one server, repeated after a break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from replicax.protocol import codec, limits, messages
from replicax.transport import failures
from replicax.transport.addresses import Location
from simulation.connection import Connection
from simulation.labels import label_of
from simulation.network import Network
from simulation.process import Process
from simulation.service import ListeningProcess

OnReply = Callable[[int, messages.Body, list[memoryview]], None]
OnLost = Callable[[Exception], None]


class Channel:
    """Sends requests of one incarnation to one task.

    Attributes:
      on_reply: Called with the number of a request, the reply and its buffers.
      on_lost: Called with the error when the peer is lost; all requests are dropped.
    """

    def __init__(
        self,
        network: Network,
        owner: Process,
        peer: ListeningProcess,
        incarnation: int,
        job: tuple[str, int],
        deadline_s: float,
    ) -> None:
        self._network, self._owner, self._peer = network, owner, peer
        self._incarnation = incarnation
        self._job = job
        self._repeat_s = max(limits.MIN_RETRY, deadline_s * limits.RETRY)
        self.on_reply: OnReply = lambda number, body, buffers: None
        self.on_lost: OnLost = lambda error: None
        self._next = 1
        self._unanswered: dict[int, tuple[list[Any], str]] = {}
        self._connection: Connection | None = None
        # Counts replies: a repetition that was planned before a reply is dropped.
        self._num_replies = 0
        self._overtaken = 0
        # The first incarnation of the peer; later ones are errors.
        self._peer_incarnation: int | None = None
        self._is_restarted = False

    def send(self, body: messages.Body, buffers: Sequence[Any] = ()) -> int:
        """Sends a request; `on_reply` receives the reply.

        Raises:
          UnavailableError: The peer was restarted.
        """
        if self._is_restarted:
            raise failures.restarted(self._peer.task, location_of(self._peer))
        number = self._next
        self._next += 1
        is_first = not self._unanswered
        frames = codec.encode(*self._job, self._incarnation, number, body, buffers)
        self._unanswered[number] = frames, label_of(body, number)
        if self._connection is None:
            self._connection = Connection(
                self._network, self._owner, self._peer, lambda: self._incarnation, self, self._first
            )
            self._connection.open()
        elif self._connection.is_ready:
            self._connection.send(*self._unanswered[number])
        if is_first:
            self._repeat_later(0)
        return number

    def close(self) -> None:
        """Drops all requests, and closes the connection."""
        self._num_replies += 1
        self._unanswered.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # Events of the connection.

    def welcomed(self, welcome: messages.Welcome) -> None:
        """Handles a complete handshake: repeats unanswered requests."""
        if self._peer_incarnation is None:
            self._peer_incarnation = welcome.incarnation
        if self._peer_incarnation != welcome.incarnation:
            self._is_restarted = True
            self.close()
            self.on_lost(failures.restarted(self._peer.task, location_of(self._peer)))
            return
        self._send_all()

    def answered(self, envelope: messages.Envelope, buffers: list[memoryview]) -> None:
        """Handles a reply, which may be a duplicate or out of order."""
        number = envelope.request
        if number not in self._unanswered:
            return
        oldest = self._first()
        if number != oldest:
            if self._overtaken != oldest:
                self._overtaken = oldest
                self._send_all()
            return
        del self._unanswered[number]
        self._num_replies += 1
        if self._unanswered:
            self._repeat_later(0)
        self.on_reply(number, envelope.body, buffers)

    def lost(self, reason: str) -> None:
        """Handles that the peer could not be reached for too long."""
        self.close()
        self.on_lost(failures.unavailable(self._peer.task, location_of(self._peer), reason))

    # Repetition.

    def _first(self) -> int:
        return next(iter(self._unanswered), self._next)

    def _send_all(self) -> None:
        if self._connection is not None:
            for frames, label in list(self._unanswered.values()):
                self._connection.send(frames, label)

    def _repeat_later(self, num_repeats: int) -> None:
        num_replies = self._num_replies

        def repeat() -> None:
            connection = self._connection
            if self._num_replies != num_replies or connection is None:
                return
            if connection.is_ready and num_repeats < 2:
                self._send_all()
            else:
                connection.mark_broken()
            self._repeat_later(num_repeats + 1)

        self._owner.later(self._repeat_s * 2**num_repeats, repeat, "compute")


def location_of(process: Process) -> Location:
    """Returns the address of a simulated task."""
    name = f"inproc://{process.task.role}-{process.task.index}"
    return Location("inproc", name, name)
