"""The coordinator's connections to many tasks, in one thread."""

from __future__ import annotations

import collections
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors, runtime
from replicax.protocol import codec, error_replies, limits, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport import base, failures
from replicax.transport.addresses import Location
from replicax.transport.connection import Connection
from replicax.transport.keys import Keys
from replicax.transport.streams import network as streams

_log = logging.getLogger(__name__)

OnMessage = Callable[[Task, messages.Envelope, list[memoryview]], None]
OnConnected = Callable[[Task, messages.Welcome], None]
OnLost = Callable[[Task, str], None]
OnIdle = Callable[[float], None]

# Seconds between two runs of periodic work, and until a reconnect to a task that rejected one.
_IDLE = 0.04
_RETRY = 1.0
# The bytes that may wait for one task beyond its largest message.
_MOST_BACKLOG = limits.MESSAGE + limits.QUEUE_BYTES
# The first number of the requests of `request`; those of `send` are smaller.
_FIRST_NUMBER = 1 << 48


class _PendingReply:
    """A request of a waiting thread.

    Attributes:
      message: Its parts, to be sent again after a reconnect.
      event: Set when there is a reply or an error.
      reply: The reply and its buffers.
      error: The error that ended the wait.
    """

    def __init__(self, message: list[codec.Part]) -> None:
        self.message = message
        self.event = runtime.Event()
        self.reply: tuple[messages.Body, list[memoryview]] | None = None
        self.error: errors.DistributeError | None = None


class _Peer:
    """The state of the connection to one task; used by the pool's thread only.

    Attributes:
      task: The task.
      connection: The connection to it.
      incarnation: The incarnation that was reported as connected, until it is reported as lost.
      loss: Makes the error that it was reported as lost with; None once it is connected again.
      retry_at: When to reconnect to a task that has rejected the connection.
      queued: The messages to send once it is connected, in order.
      pending: The requests of waiting threads, by number.
    """

    def __init__(self, task: Task, connection: Connection) -> None:
        self.task = task
        self.connection = connection
        self.incarnation: int | None = None
        self.loss: Callable[[], errors.DistributeError] | None = None
        self.retry_at: float | None = None
        self.queued: collections.deque[list[codec.Part]] = collections.deque(maxlen=limits.QUEUE)
        self.pending: dict[int, _PendingReply] = {}


class ClientPool:
    """Exchanges messages with many tasks. Callbacks run in the pool's thread, without a lock.

    Args:
      me: This task.
      keys: The certificates of this task; required for TCP.
      on_message: Called with (task, envelope, buffers) for each received message.
      on_connected: Called with (task, welcome) after a handshake. It is called again, with the
        same incarnation and without `on_lost` before, if the connection broke for less than half
        a second: messages in flight may have been lost.
      on_lost: Called with (task, reason) when a connected task is unreachable for half a second,
        was restarted as another process, or rejects the connection.
      on_idle: Called with the monotonic time at least every 0.05 s.
      incarnation: The incarnation of this task; random by default.
      network: Opens the connections.

    Attributes:
      job: The job of the messages; may be set.
      epoch: Its epoch; may be set.

    Example:
      >>> from replicax.transport import addresses
      >>> from replicax.transport.service import Service
      >>> location, ps = addresses.resolve("inproc://pool-example"), Task("ps", 0)
      >>> handler = lambda session, envelope, buffers: (messages.Pong(1, {}), buffers)
      >>> ignore = lambda *_: None
      >>> with Service(location, ps, handler) as service:
      ...     service.start()
      ...     with ClientPool(Task("coordinator", 0), None, ignore, ignore, ignore) as pool:
      ...         pool.connect(ps, location)
      ...         pool.request(ps, messages.Ping(0))[0]
      Pong(progress=1, counters={})
    """

    def __init__(
        self,
        me: Task,
        keys: Keys | None,
        on_message: OnMessage,
        on_connected: OnConnected,
        on_lost: OnLost,
        on_idle: OnIdle | None = None,
        *,
        incarnation: int | None = None,
        network: base.Network | None = None,
    ) -> None:
        self.me = me
        self._network = network or streams.NETWORK
        self.job = ""
        self.epoch = 0
        self.incarnation = incarnation or new_incarnation()
        self._keys = keys
        self._on_message = on_message
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_idle = on_idle
        self._numbers = itertools.count(_FIRST_NUMBER)
        self._commands: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]]
        self._commands = collections.deque()
        self._wakeup = self._network.wakeup()
        self._peers: dict[Task, _Peer] = {}
        self._poller = self._network.poller()
        self._poller.set(self._wakeup.fd, base.READ)
        # The peers by the descriptors that are polled.
        self._owners: dict[int, _Peer] = {}
        self._idle_at = 0.0
        self._linger = limits.LINGER
        self._is_closing = False
        self._thread = runtime.Thread(target=self._run, name="replicax-pool", daemon=True)
        self._thread.start()

    # Called by any thread.

    def connect(self, task: Task, location: Location) -> None:
        """Starts to connect to a task, and retries until it is connected."""
        self._command(self._connect, task, location)

    def disconnect(self, task: Task) -> None:
        """Disconnects from a task, without `on_lost`; sent messages still leave."""
        self._command(self._disconnect, task)

    def send(
        self,
        task: Task,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        request: int = 0,
    ) -> None:
        """Sends a message. Messages to one task arrive in order.

        The message is queued until the task is connected, and dropped after `on_lost`. The buffers
        must not change until they are sent. Request numbers, chosen by the caller, are below 2**48.
        """
        message = codec.encode(self.job, self.epoch, self.incarnation, request, body, buffers)
        self._command(self._send, task, message, type(body) is messages.Ping)

    def request(
        self,
        task: Task,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        timeout: float = limits.DEADLINE,
    ) -> tuple[messages.Body, list[memoryview]]:
        """Sends a request and waits for the reply, in another thread than the pool's.

        Raises:
          DeadlineExceededError: The request timed out.
          UnavailableError: The task is unreachable.
          DistributeError: The error in the reply: one of the classes of `replicax.errors`.
        """
        if runtime.current_thread() is self._thread:
            raise errors.ContextError(
                "The thread of a ClientPool cannot wait for replies",
                f"a callback sent a request to {task} and would wait",
                "Use `send`, and handle the reply in `on_message`.",
            )
        number = next(self._numbers)
        header = self.job, self.epoch, self.incarnation, number
        pending = _PendingReply(codec.encode(*header, body, buffers))
        self._command(self._request, task, number, pending)
        if not pending.event.wait(timeout):
            self._command(self._cancel, task, number)
            raise failures.deadline_exceeded(task, body, timeout)
        if pending.error is not None:
            raise pending.error
        assert pending.reply is not None
        if type(pending.reply[0]) is messages.ErrorReply:
            raise error_replies.to_error(pending.reply[0])
        return pending.reply

    def wake(self) -> None:
        """Makes the pool call `on_idle` now."""
        self._command(self._run_idle_now)

    def close(self, timeout: float = limits.LINGER) -> None:
        """Sends the queued messages, ends the thread and closes all connections.

        Args:
          timeout: The seconds that messages get to leave.
        """
        self._linger = timeout
        self._is_closing = True
        self._wakeup.set()
        if runtime.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _command(self, function: Callable[..., None], *args: Any) -> None:
        self._commands.append((function, args))
        self._wakeup.set()
        if not self._thread.is_alive():
            self._fail_commands()

    # The pool's thread: the loop.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                now = self._network.now()
                wait = max(self._idle_at + _IDLE - now, 0.0)
                ready = self._poller.wait(wait)
                self._wakeup.clear()
                self._run_commands()
                for fd in ready:
                    if (peer := self._owners.get(fd)) is not None:
                        self._serve(peer)
                now = self._network.now()
                if now - self._idle_at >= _IDLE:
                    self._idle_at = now
                    for peer in list(self._peers.values()):
                        self._observe(peer, now)
                    if self._on_idle is not None:
                        self._call(self._on_idle, now)
                self._run_commands()
        finally:
            self._run_commands()
            for task in list(self._peers):
                self._disconnect(task)
            self._fail_commands()
            self._poller.close()
            self._wakeup.close()

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            function, args = self._commands.popleft()
            self._call(function, *args)

    def _fail_commands(self) -> None:
        """Fails the requests to a closed pool."""
        while self._commands:
            function, args = self._commands.popleft()
            if function == self._request:
                task, _, pending = args
                pending.error = self._closed(task)
                pending.event.set()

    @staticmethod
    def _closed(task: Task) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"{task} must be connected", "this side has closed the connection", "Connect again."
        )

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            # An error of one peer must not affect the others.
            _log.exception("%s: %s failed in the client pool", self.me, callback)

    def _poll(self, peer: _Peer) -> None:
        """Polls the wire of a connection, which may be a new one."""
        wire = peer.connection.wire
        if wire is None or wire.failure is not None or wire.on_change is not None:
            return

        def on_change() -> None:
            fd = wire.fileno()
            if wire.failure is None:
                self._poller.set(fd, wire.events)
            else:
                self._poller.remove(fd)
                if self._owners.get(fd) is peer:
                    del self._owners[fd]

        self._owners[wire.fileno()] = peer
        wire.on_change = on_change
        on_change()

    # The pool's thread: commands of other threads.

    def _connect(self, task: Task, location: Location) -> None:
        self._disconnect(task)
        connection = Connection(
            location, self.me, task, self._keys, self.incarnation, network=self._network
        )
        peer = _Peer(task, connection)
        self._peers[task] = peer
        try:
            connection.open(self._network.now())
        except (errors.DistributeError, OSError) as error:
            self._peers.pop(task)
            connection.close()
            self._call(self._on_lost, task, str(error))
        self._poll(peer)

    def _disconnect(self, task: Task) -> None:
        peer = self._peers.pop(task, None)
        if peer is not None:
            self._fail_pending(peer, self._closed(task))
            peer.connection.close(self._linger)

    def _send(self, task: Task, message: list[codec.Part], is_urgent: bool) -> None:
        peer = self._peers.get(task)
        if peer is None or peer.loss is not None:
            _log.debug("%s dropped a message to %s, which is lost", self.me, task)
        elif peer.connection.is_ready:
            peer.connection.send(message, is_urgent)
            wire = peer.connection.wire
            if wire is not None and wire.backlog > _MOST_BACKLOG:
                # A task that does not read: it gets what it needs after the next handshake.
                peer.connection.mark_broken()
        else:
            peer.queued.append(message)

    def _request(self, task: Task, number: int, pending: _PendingReply) -> None:
        peer = self._peers.get(task)
        if peer is None or peer.loss is not None:
            # A task that rejects the connection did so before this request: say why.
            pending.error = self._closed(task) if peer is None or peer.loss is None else peer.loss()
            pending.event.set()
            return
        peer.pending[number] = pending
        if peer.connection.is_ready:
            peer.connection.send(pending.message)

    def _cancel(self, task: Task, number: int) -> None:
        if (peer := self._peers.get(task)) is not None:
            peer.pending.pop(number, None)

    def _run_idle_now(self) -> None:
        self._idle_at = 0.0

    # The pool's thread: events.

    def _serve(self, peer: _Peer) -> None:
        connection = peer.connection
        connection.handle()
        for received in iter(connection.receive, None):
            envelope, buffers = received
            if type(envelope.body) is messages.Welcome:
                if connection.error is None:
                    self._welcomed(peer, envelope.body)
            elif (pending := peer.pending.pop(envelope.request, None)) is not None:
                pending.reply = envelope.body, buffers
                pending.event.set()
            else:
                self._call(self._on_message, peer.task, envelope, buffers)
        if not connection.is_ready or connection.wire is None or not connection.wire.is_open:
            self._observe(peer, self._network.now())

    def _welcomed(self, peer: _Peer, welcome: messages.Welcome) -> None:
        if peer.incarnation is not None and peer.incarnation != welcome.incarnation:
            self._lose(peer, "it was restarted")
        peer.incarnation = welcome.incarnation
        peer.loss = None
        while peer.queued:
            peer.connection.send(peer.queued.popleft())
        for pending in peer.pending.values():
            peer.connection.send(pending.message)
        self._call(self._on_connected, peer.task, welcome)

    def _observe(self, peer: _Peer, now: float) -> None:
        connection = peer.connection
        connection.observe(now)
        if connection.error is not None and peer.retry_at is None:
            peer.retry_at = now + _RETRY
            self._lose(peer, str(connection.error), connection.error)
        elif peer.retry_at is not None and now >= peer.retry_at:
            peer.retry_at = connection.error = None
            connection.close()
            connection.open(now)
        elif peer.incarnation is not None and connection.is_lost(now):
            self._lose(peer, connection.reason)
        self._poll(peer)

    def _lose(self, peer: _Peer, reason: str, error: errors.DistributeError | None = None) -> None:
        peer.incarnation = None
        location = peer.connection.location
        peer.loss = lambda: error or failures.unavailable(peer.task, location, reason)
        peer.queued.clear()
        self._fail_pending(peer, peer.loss())
        self._call(self._on_lost, peer.task, reason)

    @staticmethod
    def _fail_pending(peer: _Peer, error: errors.DistributeError) -> None:
        for pending in peer.pending.values():
            pending.error = error
            pending.event.set()
        peer.pending.clear()
