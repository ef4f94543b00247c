"""The caller's side of one connection: questions and answers."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.transport import codec, failures, limits, messages, refusals
from replicax.transport.addresses import Location
from replicax.transport.connection import Connection
from replicax.transport.keys import Keys
from replicax.transport.tasks import Task, new_incarnation

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

Answer = tuple[int, messages.Body, list[memoryview]]


class Channel:
    """Asks one task. Any thread may use it; one at a time does.

    Questions are either asked and waited for (`request`), or posted, so that several are under
    way, and collected. A question whose connection broke is asked again when the same life of
    the peer is back within half a second, so it may arrive twice; the memory of its buffers must
    stay as it is until the answer is there.

    Args:
      location: Where the peer listens.
      me: Who asks.
      keys: What to prove with who asks; TCP needs them.
      incarnation: Which life of the asking task this is.
      peer: Who is asked.

    Attributes:
      job: The job that questions belong to; may be set.
      epoch: Its epoch; may be set.
      incarnation: May be set, when the asking task begins a new life.

    Example:
      >>> from replicax.transport import addresses
      >>> from replicax.transport.service import Service
      >>> place = addresses.resolve("inproc://channel-example")
      >>> answer = lambda caller, envelope, buffers: (messages.Pong(1, {}), buffers)
      >>> ps = Task("ps", 0)
      >>> with Service(place, ps, answer) as service:
      ...     service.start()
      ...     with Channel(place, Task("coordinator", 0), peer=ps) as channel:
      ...         channel.request(messages.Ping(0))[0]
      Pong(progress=1, figures={})
    """

    def __init__(
        self,
        location: Location,
        me: Task,
        keys: Keys | None = None,
        incarnation: int | None = None,
        *,
        peer: Task,
    ) -> None:
        self.location = location
        self.me = me
        self.peer = peer
        self.job = ""
        self.epoch = 0
        self.incarnation = incarnation or new_incarnation()
        self._keys = keys
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        # What was asked and not answered, in order: it is sent again on a new connection.
        self._unanswered: dict[int, list[Any]] = {}
        # Answers that came while another one was waited for.
        self._ready: collections.deque[Answer] = collections.deque()
        # The life of the peer that was met first; later ones are errors until `reset`.
        self._peer_life: int | None = None
        self._new_life: int | None = None

    # Questions.

    def request(
        self,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        timeout: float = limits.DEADLINE,
    ) -> tuple[messages.Body, list[memoryview]]:
        """Asks, and waits for the answer.

        Raises:
          DeadlineExceededError: There was no answer in time.
          PSUnavailableError: The peer, a parameter server, is gone.
          PSIncarnationError: It came back, without what it held.
          UnavailableError: The peer, another task, is gone or came back.
          DistributeError: What the peer said: one of the classes of `replicax.errors`.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise failures.deadline(self.peer, body, timeout)
        number = 0
        try:
            number = self._post(body, buffers)
            while True:
                answer = self._take(deadline)
                if answer is None:
                    raise failures.deadline(self.peer, body, timeout)
                if answer[0] == number:
                    break
                self._ready.append(answer)
        finally:
            self._unanswered.pop(number, None)
            self._lock.release()
        if type(answer[1]) is messages.Refused:
            raise refusals.to_error(answer[1])
        return answer[1], answer[2]

    def post(self, body: messages.Body, buffers: Sequence[codec.Buffer] = ()) -> int:
        """Asks without waiting.

        Returns:
          The number by which `collect` names the answer.
        """
        with self._lock:
            return self._post(body, buffers)

    def collect(self, timeout: float = limits.DEADLINE) -> Answer | None:
        """Waits for the next answer to a posted question.

        Answers come in the order in which the peer gives them. One that says `Refused` is
        returned like all others; `refusals.to_error` makes the error of it.

        Returns:
          The number of the question, the answer and its buffers; None if there was none in
          time, or if nothing was asked.

        Raises:
          UnavailableError: As for `request`; all questions under way are given up.
        """
        deadline = time.monotonic() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            return None
        try:
            if self._ready:
                return self._ready.popleft()
            return self._take(deadline) if self._unanswered else None
        finally:
            self._lock.release()

    def num_unanswered(self) -> int:
        """Returns how many questions are under way."""
        return len(self._unanswered)

    @property
    def peer_incarnation(self) -> int | None:
        """The life of the peer that this channel talks to; None before it was reached."""
        return self._peer_life

    def reset(self) -> None:
        """Forgets what is under way, and accepts whoever answers next as the peer."""
        with self._lock:
            self._give_up()
            self._ready.clear()
            self._peer_life = self._new_life = None

    def close(self) -> None:
        """Ends the connection. The channel opens a new one if it is used again."""
        with self._lock:
            self._give_up(limits.LINGER)
            self._ready.clear()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Under the lock.

    def _post(self, body: messages.Body, buffers: Sequence[codec.Buffer]) -> int:
        if self._new_life is not None:
            raise failures.new_life(self.peer, self.location)
        if len(self._unanswered) >= limits.UNANSWERED:
            raise errors.ResourceExhaustedError(
                errors.message(
                    f"At most {limits.UNANSWERED} questions to {self.peer} may be under way",
                    "as many have no answer yet",
                    "Collect some answers first.",
                )
            )
        number = next(self._numbers)
        life = self.incarnation
        connection = self._connection
        if connection is None:
            connection = self._open()
        lane = connection.lane
        writer = lane.writer if lane is not None and lane.is_open else None
        message = codec.encode(
            self.job, self.epoch, life, number, body, buffers, writer, is_kept=True
        )
        self._unanswered[number] = message
        if connection.is_ready:
            connection.send(message)
        return number

    def _open(self) -> Connection:
        connection = Connection(
            self.location, self.me, self.peer, self._keys, self.incarnation, uses_lane=True
        )
        self._connection = connection
        try:
            connection.open(time.monotonic())
        except BaseException:
            self._give_up()
            raise
        return connection

    def _give_up(self, linger: float = 0.0) -> None:
        self._unanswered.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(linger)

    def _take(self, deadline: float) -> Answer | None:
        """Waits for the next answer; None at the deadline."""
        connection = self._connection
        if connection is None:
            raise failures.unavailable(self.peer, self.location, "the channel was closed")
        connection.my_incarnation = self.incarnation
        while True:
            now = time.monotonic()
            wait = min(deadline - now, connection.next_check(now))
            # Rounded up: a wait of less than a millisecond would not wait.
            ready = zmq.zmq_poll(connection.pollables, int(wait * 1e3) + 1 if wait > 0 else 0)
            for received in iter(connection.receive, None):
                envelope, buffers = received
                if type(envelope.body) is messages.Welcome:
                    self._welcomed(connection)
                elif self._unanswered.pop(envelope.request, None) is not None:
                    if connection.lane is not None:
                        connection.lane.writer.release(envelope.request)
                    return envelope.request, envelope.body, buffers
            now = time.monotonic()
            connection.observe(now)
            self._check(connection, now)
            if now >= deadline and not ready:
                return None

    def _welcomed(self, connection: Connection) -> None:
        if connection.refusal is not None:
            return
        if self._peer_life is None:
            self._peer_life = connection.incarnation
        elif self._peer_life != connection.incarnation:
            self._new_life = connection.incarnation
            self._give_up()
            raise failures.new_life(self.peer, self.location)
        for message in self._unanswered.values():
            connection.send(message)

    def _check(self, connection: Connection, now: float) -> None:
        if connection.refusal is not None:
            refusal = connection.refusal
            self._give_up()
            raise refusal
        if connection.is_lost(now):
            self._give_up()
            raise failures.unavailable(self.peer, self.location, connection.reason)
