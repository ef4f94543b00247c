"""The coordinator's side of many connections, in one thread."""

from __future__ import annotations

import collections
import itertools
import logging
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
from replicax.transport.peers import Peer, Waiter
from replicax.transport.wakeup import Wakeup
from replicax.transport.zmq.connection import Connection

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)

OnMessage = Callable[[Task, messages.Envelope, list[memoryview]], None]
OnConnected = Callable[[Task, messages.Welcome], None]
OnLost = Callable[[Task, str], None]
OnIdle = Callable[[float], None]

# Seconds between two looks at the clock, and until a task that refused is asked again.
_IDLE = 0.04
_RETRY = 1.0
# Messages of one task before the others get their turn.
_TURN = 64
# The numbers of questions that `request` asks; users count from 1.
_FIRST_NUMBER = 1 << 48


class ClientPool:
    """Talks to many tasks. Its callbacks run in its one thread, and no lock is held then.

    Args:
      me: Who talks.
      keys: What to prove with who talks; TCP needs them.
      on_message: Called with (task, envelope, buffers) for each message that came.
      on_connected: Called with (task, welcome) when a task was reached. It is called again, with
        the same incarnation and without `on_lost` before, after a break of less than half a
        second: answers and notices that were under way then may be lost.
      on_lost: Called with (task, reason) when a task that was reached is gone for half a second,
        came back as another process, or refuses to talk.
      on_idle: Called with the monotonic time at least every 0.05 s.
      incarnation: Which life of the talking task this is.

    Attributes:
      job: The job that messages belong to; may be set.
      epoch: Its epoch; may be set.

    Example:
      >>> from replicax.transport import addresses
      >>> from replicax.transport.service import Service
      >>> place, ps = addresses.resolve("inproc://pool-example"), Task("ps", 0)
      >>> answer = lambda caller, envelope, buffers: (messages.Pong(1, {}), buffers)
      >>> ignore = lambda *_: None
      >>> with Service(place, ps, answer) as service:
      ...     service.start()
      ...     with ClientPool(Task("coordinator", 0), None, ignore, ignore, ignore) as pool:
      ...         pool.connect(ps, place)
      ...         pool.request(ps, messages.Ping(0))[0]
      Pong(progress=1, figures={})
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
    ) -> None:
        self.me = me
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
        self._wakeup = Wakeup()
        self._peers: dict[Task, Peer] = {}
        # What is polled, and whose socket it is; made anew after a socket was replaced.
        self._polled: list[tuple[Any, int]] = []
        self._owners: dict[int, Peer] = {}
        self._idle_at = 0.0
        self._linger = limits.LINGER
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="replicax-pool", daemon=True)
        self._thread.start()

    # What any thread calls.

    def connect(self, task: Task, location: Location) -> None:
        """Starts to reach for a task, and goes on until it is there."""
        self._command(self._connect, task, location)

    def disconnect(self, task: Task) -> None:
        """Lets a task go, without `on_lost`; what was sent before still leaves."""
        self._command(self._disconnect, task)

    def send(
        self,
        task: Task,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        request: int = 0,
    ) -> None:
        """Sends a message. What is sent to one task arrives in this order.

        Before the task was reached the message waits; after `on_lost` it is dropped. The memory
        of the buffers must stay as it is until it was sent. Numbers of questions are the
        caller's own, below 2**48.
        """
        life = self.incarnation
        message = codec.encode(self.job, self.epoch, life, request, body, buffers)
        self._command(self._send, task, message)

    def request(
        self,
        task: Task,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        timeout: float = limits.DEADLINE,
    ) -> tuple[messages.Body, list[memoryview]]:
        """Asks a task and waits for the answer, in another thread than the pool's.

        Raises:
          DeadlineExceededError: There was no answer in time.
          UnavailableError: The task is gone.
          DistributeError: What the task said: one of the classes of `replicax.errors`.
        """
        if threading.current_thread() is self._thread:
            raise errors.ContextError(
                "The pool's thread cannot wait for answers",
                f"a callback asked {task} and would wait",
                "Use `send`, and take the answer in `on_message`.",
            )
        number, life = next(self._numbers), self.incarnation
        waiter = Waiter(codec.encode(self.job, self.epoch, life, number, body, buffers))
        self._command(self._ask, task, number, waiter)
        if not waiter.event.wait(timeout):
            self._command(self._forget, task, number)
            raise failures.deadline_exceeded(task, body, timeout)
        if waiter.error is not None:
            raise waiter.error
        assert waiter.answer is not None
        if type(waiter.answer[0]) is messages.ErrorReply:
            raise error_replies.to_error(waiter.answer[0])
        return waiter.answer

    def wake(self) -> None:
        """Makes the pool call `on_idle` now."""
        self._command(self._hurry)

    def close(self, timeout: float = limits.LINGER) -> None:
        """Sends what waits, and ends the thread and all connections.

        Args:
          timeout: How many seconds messages get to leave.
        """
        self._linger = timeout
        self._is_closing = True
        self._wakeup.set()
        if threading.current_thread() is not self._thread:
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
                now = time.monotonic()
                wait = max(self._idle_at + _IDLE - now, 0.0)
                ready = zmq.zmq_poll([*self._polled, (self._wakeup.fd, 1)], int(wait * 1e3) + 1)
                self._wakeup.clear()
                self._run_commands()
                for socket, _ in ready:
                    if (peer := self._owners.get(id(socket))) is not None:
                        self._serve(peer, socket)
                now = time.monotonic()
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
            self._wakeup.close()

    def _run_commands(self) -> None:
        for _ in range(len(self._commands)):
            function, args = self._commands.popleft()
            self._call(function, *args)

    def _fail_commands(self) -> None:
        """Tells threads that asked a closed pool."""
        while self._commands:
            function, args = self._commands.popleft()
            if function == self._ask:
                task, _, waiter = args
                waiter.error = self._closed(task)
                waiter.event.set()

    @staticmethod
    def _closed(task: Task) -> errors.UnavailableError:
        return errors.UnavailableError(
            f"{task} must be connected", "this side has closed the connection", "Connect again."
        )

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            callback(*args)
        except Exception:
            # The pool serves all peers: what fails for one must not end it for the others.
            _log.exception("%s: %s failed in the pool", self.me, callback)

    def _arrange(self) -> None:
        """Notes which sockets there are now."""
        self._polled = [p for peer in self._peers.values() for p in peer.connection.pollables]
        self._owners = {
            id(socket): peer
            for peer in self._peers.values()
            for socket, _ in peer.connection.pollables
        }

    # The pool's thread: what was asked for.

    def _connect(self, task: Task, location: Location) -> None:
        self._disconnect(task)
        connection = Connection(location, self.me, task, self._keys, self.incarnation)
        peer = Peer(task, connection)
        self._peers[task] = peer
        try:
            connection.open(time.monotonic())
        except (errors.DistributeError, zmq.ZMQError) as error:
            self._peers.pop(task)
            connection.close()
            self._call(self._on_lost, task, str(error))
        self._arrange()

    def _disconnect(self, task: Task) -> None:
        peer = self._peers.pop(task, None)
        if peer is not None:
            self._fail_waiters(peer, self._closed(task))
            peer.connection.close(self._linger)
            self._arrange()

    def _send(self, task: Task, message: list[Any]) -> None:
        peer = self._peers.get(task)
        if peer is None or peer.is_lost:
            _log.debug("%s: a message for %s, which is gone, was dropped", self.me, task)
        elif peer.connection.is_ready:
            peer.connection.send(message)
        else:
            peer.held.append(message)

    def _ask(self, task: Task, number: int, waiter: Waiter) -> None:
        peer = self._peers.get(task)
        if peer is None or peer.is_lost:
            waiter.error = (
                self._closed(task)
                if peer is None
                else failures.unavailable(task, peer.connection.location, "it is gone")
            )
            waiter.event.set()
            return
        peer.waiters[number] = waiter
        if peer.connection.is_ready:
            peer.connection.send(waiter.message)

    def _forget(self, task: Task, number: int) -> None:
        if (peer := self._peers.get(task)) is not None:
            peer.waiters.pop(number, None)

    def _hurry(self) -> None:
        self._idle_at = 0.0

    # The pool's thread: what happens.

    def _serve(self, peer: Peer, socket: Any) -> None:
        connection = peer.connection
        if socket is not connection.socket:
            self._observe(peer, time.monotonic())
            return
        for _ in range(_TURN):
            received = connection.receive()
            if received is None:
                break
            envelope, buffers = received
            if type(envelope.body) is messages.Welcome:
                if connection.refusal is None:
                    self._welcomed(peer, envelope.body)
            elif (waiter := peer.waiters.pop(envelope.request, None)) is not None:
                waiter.answer = envelope.body, buffers
                waiter.event.set()
            else:
                self._call(self._on_message, peer.task, envelope, buffers)
        if not connection.is_ready:
            self._observe(peer, time.monotonic())

    def _welcomed(self, peer: Peer, welcome: messages.Welcome) -> None:
        if peer.life is not None and peer.life != welcome.incarnation:
            self._lose(peer, "it was restarted")
        peer.life = welcome.incarnation
        peer.is_lost = False
        while peer.held:
            peer.connection.send(peer.held.popleft())
        for waiter in peer.waiters.values():
            peer.connection.send(waiter.message)
        self._call(self._on_connected, peer.task, welcome)

    def _observe(self, peer: Peer, now: float) -> None:
        connection = peer.connection
        before = connection.socket
        connection.observe(now)
        if connection.refusal is not None and peer.retry_at is None:
            peer.retry_at = now + _RETRY
            self._lose(peer, str(connection.refusal), connection.refusal)
        elif peer.retry_at is not None and now >= peer.retry_at:
            peer.retry_at = connection.refusal = None
            connection.close()
            connection.open(now)
        elif peer.life is not None and connection.is_lost(now):
            self._lose(peer, connection.reason)
        if connection.socket is not before:
            self._arrange()

    def _lose(self, peer: Peer, reason: str, error: errors.DistributeError | None = None) -> None:
        peer.life = None
        peer.is_lost = True
        peer.held.clear()
        unavailable = failures.unavailable(peer.task, peer.connection.location, reason)
        self._fail_waiters(peer, error or unavailable)
        self._call(self._on_lost, peer.task, reason)

    @staticmethod
    def _fail_waiters(peer: Peer, error: errors.DistributeError) -> None:
        for waiter in peer.waiters.values():
            waiter.error = error
            waiter.event.set()
        peer.waiters.clear()
