"""The caller's side of one connection: questions and answers."""

from __future__ import annotations

import collections
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport import failures
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.zmq.connection import Connection

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

Reply = tuple[int, messages.Body, list[memoryview]]

# How often who waits asks whether the peer was given up.
_LOOK_S = 0.25


class Channel:
    """Asks one task. Any thread may use it; one at a time does.

    Questions are either asked and waited for (`request`), or posted, so that several are under
    way, and collected. A question whose connection broke is asked again when the same life of
    the peer is back within half a second, and one without an answer is repeated now and then: the
    question or its answer may be lost. So it may arrive twice; the memory of its buffers must
    stay as it is until the answer is there.

    Questions have consecutive numbers, and the peer takes none before it has taken the ones before;
    answers are taken in the same order. What overtakes something that was lost is repeated with it.

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
      check_failure: May be set: asked now and then by who waits, returns the error to raise if no
        answer will come, and None if one may.

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
        self.check_failure: Callable[[], Exception | None] | None = None
        self._keys = keys
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._next = 1
        # What was asked and not answered, in order: it is sent again on a new connection.
        self._unanswered: dict[int, list[Any]] = {}
        # When the oldest of them was asked, how often it was repeated since, the time that their
        # bytes may take, and which was the last one to be repeated because an answer to a later
        # one came.
        self._asked_s = 0.0
        self._num_repeats = 0
        self._grace_s = 0.0
        self._overtaken = 0
        # Answers that came while another one was waited for.
        self._ready: collections.deque[Reply] = collections.deque()
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
          DeadlineExceededError: There was no answer in time; all questions under way are given up.
          PSUnavailableError: The peer, a parameter server, is gone.
          PSIncarnationError: It came back, without what it held.
          UnavailableError: The peer, another task, is gone or came back.
          DistributeError: What the peer said: one of the classes of `replicax.errors`.
        """
        deadline = time.monotonic() + timeout
        self._require_own_process()
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise failures.deadline_exceeded(self.peer, body, timeout)
        number = 0
        try:
            number = self._send(body, buffers)
            while True:
                answer = self._take(deadline, timeout)
                if answer is None:
                    raise failures.deadline_exceeded(self.peer, body, timeout, self._reason())
                if answer[0] == number:
                    break
                self._ready.append(answer)
        finally:
            if number in self._unanswered:
                # The questions after this one would wait for it.
                self._give_up()
            self._lock.release()
        if type(answer[1]) is messages.ErrorReply:
            raise error_replies.to_error(answer[1])
        return answer[1], answer[2]

    def send(self, body: messages.Body, buffers: Sequence[codec.Buffer] = ()) -> int:
        """Asks without waiting.

        Returns:
          The number by which `receive` names the answer.
        """
        self._require_own_process()
        with self._lock:
            return self._send(body, buffers)

    def receive(self, timeout: float = limits.DEADLINE, wakeup: int | None = None) -> Reply | None:
        """Waits for the next answer to a posted question.

        Answers come in the order in which the peer gives them. One that says `ErrorReply` is
        returned like all others; `refusals.to_error` makes the error of it.

        Args:
          timeout: How long to wait.
          wakeup: A file that ends the wait when there is something to read in it.

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
            return self._take(deadline, timeout, wakeup) if self._unanswered else None
        finally:
            self._lock.release()

    def num_in_flight(self) -> int:
        """Returns how many questions are under way."""
        return len(self._unanswered)

    @property
    def peer_incarnation(self) -> int | None:
        """The life of the peer that this channel talks to; None before it was reached."""
        return self._peer_life

    @property
    def peer_restarted(self) -> bool:
        """Whether another life of the peer has answered; every question fails until `reset`."""
        return self._new_life is not None

    def cancel(self) -> None:
        """Gives up what is under way; later questions go to the same life of the peer."""
        with self._lock:
            self._give_up()
            self._ready.clear()

    def reset(self) -> None:
        """Forgets what is under way, and accepts whoever answers next as the peer."""
        with self._lock:
            self._give_up()
            self._ready.clear()
            self._peer_life = self._new_life = None

    def _require_own_process(self) -> None:
        # The thread that moves the bytes of a socket does not exist in a forked child.
        if os.getpid() != self._process:
            raise failures.forked(self.peer, self._process)

    def close(self) -> None:
        """Ends the connection. The channel opens a new one if it is used again."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._give_up(limits.LINGER)
            self._ready.clear()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Under the lock.

    def _send(self, body: messages.Body, buffers: Sequence[codec.Buffer]) -> int:
        if self._new_life is not None:
            raise failures.restarted(self.peer, self.location)
        if len(self._unanswered) >= limits.IN_FLIGHT:
            raise errors.ResourceExhaustedError(
                f"At most {limits.IN_FLIGHT} questions to {self.peer} may be under way",
                "as many have no answer yet",
                "Collect some answers first.",
            )
        number, life = self._next, self.incarnation
        connection = self._connection
        if connection is None:
            connection = self._open()
        lane = connection.lane
        writer = lane.writer if lane is not None and lane.is_open else None
        message = codec.encode(
            self.job, self.epoch, life, number, body, buffers, writer, is_kept=True
        )
        if not self._unanswered:
            self._wait_anew(time.monotonic())
        self._unanswered[number] = message
        self._next += 1
        if connection.is_ready:
            connection.send(message)
        return number

    def _open(self) -> Connection:
        connection = Connection(
            self.location, self.me, self.peer, self._keys, self.incarnation, uses_lane=True
        )
        connection.first = self._next
        self._connection = connection
        try:
            connection.open(time.monotonic())
        except BaseException:
            self._give_up()
            raise
        return connection

    def _reason(self) -> str | None:
        connection = self._connection
        return None if connection is None or connection.is_ready else connection.reason

    def _give_up(self, linger: float = 0.0) -> None:
        self._unanswered.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(linger)

    def _take(self, deadline: float, timeout: float, wakeup: int | None = None) -> Reply | None:
        """Waits for the answer to the oldest question; None at the deadline, or if woken."""
        connection = self._connection
        if connection is None:
            raise failures.unavailable(self.peer, self.location, "the channel was closed")
        connection.my_incarnation = self.incarnation
        while True:
            now = time.monotonic()
            wait = min(deadline - now, connection.next_check(now), self._repeat_s(timeout) - now)
            if self.check_failure is not None:
                wait = min(wait, _LOOK_S)
            polled = connection.pollables
            if wakeup is not None:
                polled = [*polled, (wakeup, 1)]
            # Rounded up: a wait of less than a millisecond would not wait.
            ready = zmq.zmq_poll(polled, int(wait * 1e3) + 1 if wait > 0 else 0)
            for received in iter(connection.receive, None):
                envelope, buffers = received
                if type(envelope.body) is messages.Welcome:
                    self._welcomed(connection)
                elif self._is_next(connection, envelope.request):
                    return envelope.request, envelope.body, buffers
            now = time.monotonic()
            if now >= self._repeat_s(timeout):
                self._repeat(connection, now)
            connection.observe(now)
            self._check(connection, now)
            is_woken = any(source == wakeup for source, _ in ready)
            if is_woken or (now >= deadline and not ready):
                return None

    def _is_next(self, connection: Connection, number: int) -> bool:
        """Takes note of an answer; tells whether it is the one that is due."""
        if number not in self._unanswered:
            return False
        oldest = connection.first = next(iter(self._unanswered))
        if number != oldest:
            if self._overtaken != oldest:
                self._overtaken = oldest
                self._send_all(connection)
            return False
        del self._unanswered[number]
        connection.first = number + 1
        if connection.lane is not None:
            connection.lane.writer.release(number)
        self._wait_anew(time.monotonic())
        return True

    # What may be lost.

    def _wait_anew(self, now: float) -> None:
        self._asked_s = now
        self._num_repeats = 0
        self._grace_s = 0.0

    def _repeat_s(self, timeout: float) -> float:
        """Returns when to ask again; whoever does not wait does not repeat."""
        if timeout <= 0:
            return math.inf
        pause = max(limits.MIN_RETRY, timeout * limits.RETRY) * 2 ** min(self._num_repeats, 8)
        longest = max(limits.MIN_RETRY, timeout * limits.MAX_RETRY)
        return self._asked_s + min(pause, longest) + self._grace_s

    def _repeat(self, connection: Connection, now: float) -> None:
        grace_s = sum(map(codec.num_bytes, self._unanswered.values())) / limits.MIN_BANDWIDTH
        if grace_s > self._grace_s:
            # Looked at only now: most questions are answered long before.
            self._grace_s = grace_s
            return
        self._asked_s = now
        self._num_repeats += 1
        if connection.is_ready and self._num_repeats < 3:
            self._send_all(connection)
        elif connection.down_since is None:
            # Nothing passes any more, in whatever state it is.
            connection.distrust()

    def _send_all(self, connection: Connection) -> None:
        for message in self._unanswered.values():
            connection.send(message)

    def _welcomed(self, connection: Connection) -> None:
        if connection.refusal is not None:
            return
        if self._peer_life is None:
            self._peer_life = connection.incarnation
        elif self._peer_life != connection.incarnation:
            self._new_life = connection.incarnation
            self._give_up()
            raise failures.restarted(self.peer, self.location)
        self._send_all(connection)

    def _check(self, connection: Connection, now: float) -> None:
        if self.check_failure is not None and (error := self.check_failure()) is not None:
            self._give_up()
            raise error
        if connection.refusal is not None:
            refusal = connection.refusal
            self._give_up()
            raise refusal
        if connection.is_lost(now):
            self._give_up()
            raise failures.unavailable(self.peer, self.location, connection.reason)
