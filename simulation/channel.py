"""A model of `transport/channel.py`: questions to one server, asked again after a break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from replicax.protocol import codec, limits, messages
from replicax.transport import failures
from replicax.transport.addresses import Location
from simulation.labels import label_of
from simulation.line import Line
from simulation.network import Network
from simulation.process import Process
from simulation.service import ListeningProcess

OnAnswer = Callable[[int, messages.Body, list[memoryview]], None]
OnLost = Callable[[Exception], None]


class Channel:
    """Asks one task in the name of one life.

    Attributes:
      on_answer: Called with the number of a question, the answer and its buffers.
      on_lost: Called with the error when the peer is gone; all questions are given up.
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
        self._patience_s = max(limits.MIN_RETRY, deadline_s * limits.RETRY)
        self.on_answer: OnAnswer = lambda number, body, buffers: None
        self.on_lost: OnLost = lambda error: None
        self._next = 1
        self._unanswered: dict[int, tuple[list[Any], str]] = {}
        self._line: Line | None = None
        # Grows with each answer: a repetition that was planned before is not needed.
        self._num_answers = 0
        self._overtaken = 0
        # The life of the peer that was met first; later ones are errors.
        self._peer_life: int | None = None
        self._has_new_life = False

    def send(self, body: messages.Body, buffers: Sequence[Any] = ()) -> int:
        """Asks; the answer comes to `on_answer`.

        Raises:
          UnavailableError: The peer has begun a new life.
        """
        if self._has_new_life:
            raise failures.restarted(self._peer.task, location_of(self._peer))
        number = self._next
        self._next += 1
        is_first = not self._unanswered
        frames = codec.encode(*self._job, self._incarnation, number, body, buffers)
        self._unanswered[number] = frames, label_of(body, number)
        if self._line is None:
            self._line = Line(
                self._network, self._owner, self._peer, lambda: self._incarnation, self, self._first
            )
            self._line.open()
        elif self._line.is_ready:
            self._line.send(*self._unanswered[number])
        if is_first:
            self._repeat_later(0)
        return number

    def close(self) -> None:
        """Forgets what was asked, and hangs up."""
        self._num_answers += 1
        self._unanswered.clear()
        line, self._line = self._line, None
        if line is not None:
            line.close()

    # What the line says.

    def welcomed(self, welcome: messages.Welcome) -> None:
        """The peer is there: what was not answered is asked again."""
        if self._peer_life is None:
            self._peer_life = welcome.incarnation
        if self._peer_life != welcome.incarnation:
            self._has_new_life = True
            self.close()
            self.on_lost(failures.restarted(self._peer.task, location_of(self._peer)))
            return
        self._send_all()

    def answered(self, envelope: messages.Envelope, buffers: list[memoryview]) -> None:
        """An answer came, or came again, or before its turn."""
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
        self._num_answers += 1
        if self._unanswered:
            self._repeat_later(0)
        self.on_answer(number, envelope.body, buffers)

    def lost(self, reason: str) -> None:
        """The peer could not be reached for too long."""
        self.close()
        self.on_lost(failures.unavailable(self._peer.task, location_of(self._peer), reason))

    # What may be lost.

    def _first(self) -> int:
        return next(iter(self._unanswered), self._next)

    def _send_all(self) -> None:
        if self._line is not None:
            for frames, label in list(self._unanswered.values()):
                self._line.send(frames, label)

    def _repeat_later(self, num_repeats: int) -> None:
        num_answers = self._num_answers

        def repeat() -> None:
            line = self._line
            if self._num_answers != num_answers or line is None:
                return
            if line.is_ready and num_repeats < 2:
                self._send_all()
            else:
                line.distrust()
            self._repeat_later(num_repeats + 1)

        self._owner.later(self._patience_s * 2**num_repeats, repeat, "compute")


def location_of(process: Process) -> Location:
    """Returns where a simulated task would listen."""
    name = f"inproc://{process.task.role}-{process.task.index}"
    return Location("inproc", name, name)
