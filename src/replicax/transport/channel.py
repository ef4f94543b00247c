"""The client side of one connection: sends requests and receives replies."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Sequence

from replicax.foundation import errors, runtime
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport import base, failures
from replicax.transport.addresses import Location
from replicax.transport.connection import Connection
from replicax.transport.keys import Keys
from replicax.transport.streams import network as streams

Reply = tuple[int, messages.Body, list[memoryview]]

# Seconds between two calls of `check_failure` during a wait.
_CHECK_S = 0.25


class Channel:
    """Sends requests to one task. Thread-safe; one thread at a time waits for replies.

    `request` sends a request and waits for its reply; `send` and `receive` keep several requests in
    flight. A request is sent again if the connection broke and the same incarnation of the peer
    reconnects within half a second, and periodically while its reply is missing, since the request
    or its reply may be lost. So it may arrive twice; its buffers must not change until the reply
    has arrived.

    Requests have consecutive numbers, and the peer handles them in this order; replies are received
    in the same order. Requests that overtook a lost one are repeated with it.

    Args:
      location: The address of the peer.
      me: This task.
      keys: The certificates of this task; required for TCP.
      incarnation: The incarnation of this task; random by default.
      peer: The task to connect to.
      network: Opens the connection.

    Attributes:
      job: The job of the requests; may be set.
      epoch: Its epoch; may be set.
      incarnation: May be set when this task starts a new incarnation.
      check_failure: May be set to a function that is called periodically during a wait. Returns the
        error to raise if no reply will arrive, and None if one may.

    Example:
      >>> from replicax.transport import addresses
      >>> from replicax.transport.service import Service
      >>> location = addresses.resolve("inproc://channel-example")
      >>> handler = lambda session, envelope, buffers: (messages.Pong(1, {}), buffers)
      >>> ps = Task("ps", 0)
      >>> with Service(location, ps, handler) as service:
      ...     service.start()
      ...     with Channel(location, Task("coordinator", 0), peer=ps) as channel:
      ...         channel.request(messages.Ping(0))[0]
      Pong(progress=1, counters={})
    """

    def __init__(
        self,
        location: Location,
        me: Task,
        keys: Keys | None = None,
        incarnation: int | None = None,
        *,
        peer: Task,
        network: base.Network | None = None,
    ) -> None:
        self._network = network or streams.NETWORK
        self.location = location
        self.me = me
        self.peer = peer
        self.job = ""
        self.epoch = 0
        self.incarnation = incarnation or new_incarnation()
        self.check_failure: Callable[[], Exception | None] | None = None
        self._keys = keys
        self._process = os.getpid()
        self._lock = runtime.Lock()
        self._connection: Connection | None = None
        self._next = 1
        # The encoded requests in flight, in order: they are sent again on a new connection.
        self._in_flight: dict[int, list[codec.Part]] = {}
        # When the oldest of them was sent, the number of retries since, the time that the transfer
        # of their bytes may take, and the last one that was retried because the reply to a later
        # one arrived.
        self._sent_s = 0.0
        self._num_retries = 0
        self._grace_s = 0.0
        self._overtaken = 0
        # Replies that arrived during the wait for another one.
        self._ready: collections.deque[Reply] = collections.deque()
        # The incarnation of the peer at the first handshake; a later one is an error until `reset`.
        self._peer_incarnation: int | None = None
        self._new_incarnation: int | None = None

    # Requests and replies.

    def request(
        self,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        timeout: float = limits.DEADLINE,
    ) -> tuple[messages.Body, list[memoryview]]:
        """Sends a request and waits for the reply.

        Raises:
          DeadlineExceededError: The request timed out; all requests in flight are cancelled.
          PSUnavailableError: The peer, a parameter server, is unreachable.
          PSIncarnationError: It was restarted without its state.
          UnavailableError: The peer, another task, is unreachable or was restarted.
          DistributeError: The error in the reply: one of the classes of `replicax.errors`.
        """
        deadline = self._network.now() + timeout
        self._require_own_process()
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            raise failures.deadline_exceeded(self.peer, body, timeout)
        number = 0
        try:
            number = self._send(body, buffers)
            while True:
                reply = self._wait(deadline, timeout)
                if reply is None:
                    raise failures.deadline_exceeded(self.peer, body, timeout, self._reason())
                if reply[0] == number:
                    break
                self._ready.append(reply)
        finally:
            if number in self._in_flight:
                # Later requests would wait for this one.
                self._disconnect()
            self._lock.release()
        if type(reply[1]) is messages.ErrorReply:
            raise error_replies.to_error(reply[1])
        return reply[1], reply[2]

    def send(self, body: messages.Body, buffers: Sequence[codec.Buffer] = ()) -> int:
        """Sends a request without waiting.

        Returns:
          The number of the request, which `receive` returns with its reply.
        """
        self._require_own_process()
        with self._lock:
            return self._send(body, buffers)

    def receive(self, timeout: float = limits.DEADLINE, wakeup: int | None = None) -> Reply | None:
        """Waits for the next reply to a request that was sent by `send`.

        An `ErrorReply` is returned like all others; `error_replies.to_error` returns its error.

        Args:
          timeout: The time to wait, in seconds.
          wakeup: A file descriptor that ends the wait when it is readable.

        Returns:
          The number of the request, the reply and its buffers; None if none arrived in time, or if
          no request is in flight.

        Raises:
          UnavailableError: As for `request`; all requests in flight are cancelled.
        """
        deadline = self._network.now() + timeout
        if not self._lock.acquire(timeout=max(timeout, 0.0)):
            return None
        try:
            if self._ready:
                return self._ready.popleft()
            return self._wait(deadline, timeout, wakeup) if self._in_flight else None
        finally:
            self._lock.release()

    def num_in_flight(self) -> int:
        """Returns the number of requests in flight."""
        return len(self._in_flight)

    @property
    def peer_incarnation(self) -> int | None:
        """The incarnation of the peer; None before the first handshake."""
        return self._peer_incarnation

    @property
    def peer_restarted(self) -> bool:
        """Whether the peer was restarted; every request fails until `reset`."""
        return self._new_incarnation is not None

    def cancel(self) -> None:
        """Cancels the requests in flight; later ones require the same incarnation of the peer."""
        with self._lock:
            self._disconnect()
            self._ready.clear()

    def reset(self) -> None:
        """Cancels the requests in flight, and accepts any incarnation of the peer."""
        with self._lock:
            self._disconnect()
            self._ready.clear()
            self._peer_incarnation = self._new_incarnation = None

    def _require_own_process(self) -> None:
        # The child has closed the connection, which belongs to its parent.
        if os.getpid() != self._process:
            raise failures.forked(self.peer, self._process)

    def close(self) -> None:
        """Closes the connection. The channel opens a new one if it is used again."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._disconnect(limits.LINGER)
            self._ready.clear()

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called under the lock.

    def _send(self, body: messages.Body, buffers: Sequence[codec.Buffer]) -> int:
        if self._new_incarnation is not None:
            raise failures.restarted(self.peer, self.location)
        if len(self._in_flight) >= limits.IN_FLIGHT:
            raise errors.ResourceExhaustedError(
                f"At most {limits.IN_FLIGHT} requests to {self.peer} may be in flight",
                "as many have no reply yet",
                "Receive some replies first.",
            )
        number = self._next
        connection = self._connection
        if connection is None:
            connection = self._open()
        memory = connection.shared_memory
        writer = memory.writer if memory is not None and memory.is_open else None
        message = codec.encode(
            self.job, self.epoch, self.incarnation, number, body, buffers, writer, is_kept=True
        )
        if not self._in_flight:
            self._restart_timer(self._network.now())
        self._in_flight[number] = message
        self._next += 1
        if connection.is_ready:
            connection.send(message)
            if connection.wire is not None and connection.wire.backlog > limits.QUEUE_BYTES:
                self._drain(connection)
        return number

    def _drain(self, connection: Connection) -> None:
        """Waits until the peer has taken most of the queued bytes; replies are kept."""
        deadline = self._network.now() + limits.DEADLINE
        while (wire := connection.wire) is not None and wire.backlog > limits.QUEUE_BYTES:
            now = self._network.now()
            if now >= deadline:
                connection.mark_broken()
                return
            self._network.wait(wire, None, deadline - now)
            connection.handle()

    def _open(self) -> Connection:
        connection = Connection(
            self.location,
            self.me,
            self.peer,
            self._keys,
            self.incarnation,
            shares_memory=True,
            network=self._network,
        )
        connection.first = self._next
        self._connection = connection
        try:
            connection.open(self._network.now())
        except BaseException:
            self._disconnect()
            raise
        return connection

    def _reason(self) -> str | None:
        connection = self._connection
        return None if connection is None or connection.is_ready else connection.reason

    def _disconnect(self, linger: float = 0.0) -> None:
        self._in_flight.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(linger)

    def _wait(self, deadline: float, timeout: float, wakeup: int | None = None) -> Reply | None:
        """Waits for the reply to the oldest request; None at the deadline, or if woken."""
        connection = self._connection
        if connection is None:
            raise failures.unavailable(self.peer, self.location, "the channel is closed")
        connection.my_incarnation = self.incarnation
        network = self._network
        is_woken = has_polled = False
        while True:
            for received in iter(connection.receive, None):
                envelope, buffers = received
                if type(envelope.body) is messages.Welcome:
                    self._welcomed(connection)
                elif self._is_next(connection, envelope.request):
                    return envelope.request, envelope.body, buffers
            now = network.now()
            retry_s = self._retry_s(timeout)
            if now >= retry_s:
                self._retry(connection, now)
            connection.observe(now)
            self._check(connection, now)
            if is_woken or (now >= deadline and has_polled):
                return None
            has_polled = True
            wait = min(deadline - now, connection.next_check(now), retry_s - now)
            if self.check_failure is not None:
                wait = min(wait, _CHECK_S)
            assert connection.wire is not None
            is_woken = network.wait(connection.wire, wakeup, wait)
            connection.handle()

    def _is_next(self, connection: Connection, number: int) -> bool:
        """Records a reply; returns whether it is that to the oldest request."""
        if number not in self._in_flight:
            return False
        oldest = connection.first = next(iter(self._in_flight))
        if number != oldest:
            if self._overtaken != oldest:
                self._overtaken = oldest
                self._send_all(connection)
            return False
        del self._in_flight[number]
        connection.first = number + 1
        if connection.shared_memory is not None:
            connection.shared_memory.writer.release(number)
        self._restart_timer(self._network.now())
        return True

    # Retries of lost requests and replies.

    def _restart_timer(self, now: float) -> None:
        self._sent_s = now
        self._num_retries = 0
        self._grace_s = 0.0

    def _retry_s(self, timeout: float) -> float:
        """Returns the time of the next retry; never without a wait."""
        if timeout <= 0:
            return math.inf
        pause = max(limits.MIN_RETRY, timeout * limits.RETRY) * 2 ** min(self._num_retries, 8)
        longest = max(limits.MIN_RETRY, timeout * limits.MAX_RETRY)
        return self._sent_s + min(pause, longest) + self._grace_s

    def _retry(self, connection: Connection, now: float) -> None:
        grace_s = sum(map(codec.num_bytes, self._in_flight.values())) / limits.MIN_BANDWIDTH
        if grace_s > self._grace_s:
            # Computed only now: most replies arrive long before.
            self._grace_s = grace_s
            return
        self._sent_s = now
        self._num_retries += 1
        if connection.is_ready and self._num_retries < 3:
            if connection.wire is not None and not connection.wire.backlog:
                self._send_all(connection)
        elif connection.down_since is None:
            # The connection looks open and transfers nothing.
            connection.mark_broken()

    def _send_all(self, connection: Connection) -> None:
        for message in self._in_flight.values():
            connection.send(message)

    def _welcomed(self, connection: Connection) -> None:
        if connection.error is not None:
            return
        if self._peer_incarnation is None:
            self._peer_incarnation = connection.incarnation
        elif self._peer_incarnation != connection.incarnation:
            self._new_incarnation = connection.incarnation
            self._disconnect()
            raise failures.restarted(self.peer, self.location)
        self._send_all(connection)

    def _check(self, connection: Connection, now: float) -> None:
        if self.check_failure is not None and (error := self.check_failure()) is not None:
            self._disconnect()
            raise error
        if connection.error is not None:
            error = connection.error
            self._disconnect()
            raise error
        if connection.is_lost(now):
            self._disconnect()
            raise failures.unavailable(self.peer, self.location, connection.reason)
