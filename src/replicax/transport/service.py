"""The server side of connections: receives requests and sends replies.

One thread receives, calls the handler, sends, and runs periodic work. Malformed messages, messages
of unauthenticated peers and requests that the role of the peer does not permit never reach the
handler.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from replicax.foundation import errors, lazy, spans, thread_stacks
from replicax.protocol import admission, codec, error_replies, limits, messages
from replicax.protocol.tasks import Role, Task, library_version, new_incarnation
from replicax.transport import shared_memory
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.wakeup import Wakeup
from replicax.transport.zmq import listener, zmq_io

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)


Reply = tuple[messages.Body, Sequence[codec.Buffer]]


class Session:
    """One connection of a peer that has completed the handshake.

    Attributes:
      identity: The ZeroMQ identity of the connection.
      role: The role of the peer; authenticated with keys, claimed without.
      task: The index of the peer.
      incarnation: The incarnation of the peer.
      job: The job of its last message.
      epoch: The epoch of its last message.
      next_request: The number of its next request; 0 if it does not number them consecutively.
      connection: The descriptor of the connection and its inode; None inside a process.
      reader: The shared memory that the peer writes.
      writer: The shared memory that the peer reads.
    """

    __slots__ = (
        "connection",
        "epoch",
        "identity",
        "incarnation",
        "job",
        "next_request",
        "reader",
        "role",
        "task",
        "writer",
    )

    def __init__(self, identity: bytes, role: Role, task: int, incarnation: int) -> None:
        self.identity = identity
        self.role: Role = role
        self.task = task
        self.incarnation = incarnation
        self.job = ""
        self.epoch = 0
        self.next_request = 0
        self.connection: tuple[int, int] | None = None
        self.reader: shared_memory.SharedMemoryReader | None = None
        self.writer: shared_memory.SharedMemoryWriter | None = None

    def has_gap_before(self, number: int) -> bool:
        """Returns whether a request before this one is missing; otherwise records this one.

        Example:
          >>> session = Session(b"", "worker", 0, 1)
          >>> session.next_request = 7
          >>> [session.has_gap_before(number) for number in (7, 8, 7, 10, 9)]
          [False, False, False, True, False]
        """
        if self.next_request and number == self.next_request:
            self.next_request += 1
        return 0 < self.next_request < number

    def __str__(self) -> str:
        return str(Task(self.role, self.task))

    def __repr__(self) -> str:
        return f"<Session {self} {self.incarnation:x}>"


Handler = Callable[[Session, messages.Envelope, list[memoryview]], Reply | None]


class Service:
    """Listens at an address and passes requests to a handler.

    Args:
      location: The address; it is bound at once.
      task: The task that listens.
      handler: Called in the service thread with (session, envelope, buffers). Returns the reply,
        or None if the reply is sent later, or never. The buffers are views of the received
        message and may be kept. An error that it raises is sent as an `ErrorReply`.
      keys: CURVE keys that authenticate this task and its peers; required for TCP.
      incarnation: The incarnation of the task; random by default.
      on_idle: Called in the service thread at least every 0.1 s with the monotonic time.
      on_failed: Called in the service thread, with the reason, when it cannot listen any more, for
        example because its sockets were closed.
      accepted: The requests to accept, by the role of the peer; those of the task's role by
        default.
      on_rejected: Called in the service thread with the handshake of an authenticated peer that
        was not accepted, and the error that it gets.

    A request may arrive twice, if the connection broke before the reply arrived; handlers must be
    idempotent.

    Attributes:
      incarnation: May be set to start a new incarnation; peers then repeat the handshake.
      url: The bound URL, for sockets.
      address: The bound address, for clusters.

    Example:
      >>> from replicax.transport import addresses
      >>> location = addresses.resolve("inproc://example")
      >>> def handler(session, envelope, buffers):
      ...     return messages.Done(), buffers
      >>> with Service(location, Task("ps", 0), handler) as service:
      ...     service.start()
      ...     service.address
      'inproc://example'
    """

    def __init__(
        self,
        location: Location,
        task: Task,
        handler: Handler,
        keys: Keys | None = None,
        incarnation: int | None = None,
        on_idle: Callable[[float], None] | None = None,
        on_failed: Callable[[str], None] | None = None,
        accepted: Mapping[Role, frozenset[type[messages.Body]]] | None = None,
        on_rejected: Callable[[messages.Hello, errors.DistributeError], None] | None = None,
    ) -> None:
        self.task = task
        self.incarnation = incarnation or new_incarnation()
        self._handler = handler
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._can_avoid_copy = location.scheme != "inproc"
        # Headers and buffers of all sessions, also those through shared memory.
        self.num_bytes_received = self.num_bytes_sent = 0
        self._can_share = location.scheme == "ipc"
        self._listener = listener.Listener(location, task, keys)
        self.url = self._listener.url
        self.address = self._listener.address
        self._accepted = admission.requests_to(task) if accepted is None else accepted
        self._on_rejected = on_rejected
        # The least recently used first.
        self._sessions: collections.OrderedDict[bytes, Session] = collections.OrderedDict()
        # What other threads send, in order.
        self._outbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        self._num_dropped = 0
        self._logged_at = -1.0
        self._idle_at = 0.0

    # Called by any thread.

    def start(self) -> None:
        """Starts the service thread."""
        with self._lock:
            if self._thread is None and not self._is_closing:
                name = f"replicax-service-{self.task.role}-{self.task.index}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def send(
        self,
        session: Session,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
        request: int = 0,
    ) -> None:
        """Sends a reply or a notification, from any thread.

        The buffers must not change until they are sent.
        """
        message = codec.encode(session.job, session.epoch, self.incarnation, request, body, buffers)
        if self._thread is threading.current_thread():
            self._send(session, message)
            return
        self._enqueue(functools.partial(self._send, session, message))

    def reply(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
    ) -> None:
        """Sends the reply to a request that the handler has left open, from any thread.

        Replies are sent in the order of the calls, before those to requests that arrive later. A
        peer that has repeated the handshake gets none: it has repeated the request, too.
        """
        self._enqueue(functools.partial(self._reply_late, session, envelope, body, buffers))

    def _enqueue(self, send: Callable[[], None]) -> None:
        if not self._is_closing:
            self._outbox.append(send)
            self._wakeup.set()

    def has_session(self, role: Role, incarnation: int) -> bool:
        """Returns whether a process has an open connection to this service.

        The kernel closes those of a process that ends, however it ends. Those of a stopped process
        stay open. Sessions inside this process count as connected.
        """
        guard = self._listener.guard
        return any(
            session.connection is None or guard is None or guard.is_open(session.connection)
            for session in list(self._sessions.values())
            if session.role == role and session.incarnation == incarnation
        )

    def wake(self) -> None:
        """Makes the service thread call `on_idle` now."""
        self._idle_at = 0.0
        self._wakeup.set()

    def close(self) -> None:
        """Sends the queued messages, stops listening, and ends the thread."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        self._wakeup.set()
        if thread is threading.current_thread():
            return  # The thread ends when the handler returns.
        if thread is not None:
            thread.join()
        self._release()

    def _release(self) -> None:
        self._sessions.clear()  # They hold shared memory.
        self._wakeup.close()
        self._listener.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The service thread.

    def _run(self) -> None:
        poll = [(self._listener.socket, 1), (self._wakeup.fd, 1)]
        authenticator = self._listener.authenticator
        if authenticator is not None:
            poll.append((authenticator.socket, 1))
        guard = self._listener.guard
        if guard is not None:
            poll.append((guard.monitor, 1))
        timeout = int(limits.IDLE * 1e3)
        try:
            while not self._is_closing:
                ready = zmq.zmq_poll(poll, timeout)
                if len(ready) > 1 or (ready and ready[0][0] is not self._listener.socket):
                    if authenticator is not None:
                        authenticator.reply()
                    if guard is not None and zmq_io.has_message(guard.monitor):
                        guard.observe(time.monotonic())
                    self._wakeup.clear()
                self._receive()
                self._send_outbox()
                now = time.monotonic()
                if now - self._idle_at >= limits.IDLE / 2:
                    self._idle_at = now
                    self._run_periodic(now)
        except Exception as error:
            _log.exception("%s stopped listening", self.task)
            if self._on_failed is not None:
                self._on_failed(f"it stopped listening ({error})")
        finally:
            self._send_outbox()
            self._release()

    def _run_periodic(self, now: float) -> None:
        if self._listener.guard is not None:
            self._listener.guard.observe(now)
        if self._on_idle is None:
            return
        try:
            self._on_idle(now)
        except Exception:
            # The listener survives errors of its owner.
            _log.exception("%s: the periodic work failed", self.task)

    def _receive(self) -> None:
        end = time.monotonic() + limits.IDLE / 2
        socket = self._listener.socket
        while zmq_io.has_message(socket) and time.monotonic() < end:
            message: list[zmq.Frame] = []
            try:
                message = zmq_io.receive(socket)
                self._handle(message[0], message[1:])
            except shared_memory.OutdatedError as error:
                _log.debug("%s: %s", self.task, error)
            except errors.ProtocolError as error:
                self._drop(error)
                if message:
                    self._close_connection(message[0])
            except Exception:
                # No message may end the listener.
                _log.exception("%s failed to handle a message", self.task)

    def _handle(self, identity: zmq.Frame, message: list[zmq.Frame]) -> None:
        session = self._sessions.get(identity.bytes)
        if session is None:
            self._handshake(identity.bytes, message)
            return
        self._sessions.move_to_end(identity.bytes)
        envelope, buffers = codec.decode(message, session.reader)
        self.num_bytes_received += len(message[0]) + sum(envelope.sizes)
        body = envelope.body
        if type(body) is messages.Hello:
            self._handshake(identity.bytes, message)
            return
        if envelope.incarnation != session.incarnation or session.has_gap_before(envelope.request):
            # Nothing may overtake a lost request: the peer starts again with the oldest.
            self._reply(session, envelope, error_replies.hello_first())
            return
        session.job, session.epoch = envelope.job, envelope.epoch
        try:
            if type(body) not in self._accepted.get(session.role, ()):
                self._close_connection(identity, limits.REJECTION)
                raise self._forbidden(session, body)
            if type(body) is messages.GetStacks:
                # Handled here, so that it works while all other threads are blocked.
                reply = messages.Stacks(thread_stacks.text()), ()
            elif type(body) is messages.RecordSpans:
                reply = messages.RecordedSpans(), spans.switch(body.trace, body.is_on)
            else:
                reply = self._handler(session, envelope, buffers)
        except errors.DistributeError as error:
            reply = error_replies.from_error(error), ()
        except Exception as error:
            _log.exception("%s: %s of %s failed", self.task, type(body).__name__, session)
            reply = error_replies.from_error(error), ()
        if reply is not None:
            self._send_outbox()
            self._reply(session, envelope, *reply)

    def _forbidden(self, session: Session, body: messages.Body) -> errors.PermissionDeniedError:
        return errors.PermissionDeniedError(
            f"{self.task} accepts from a {session.role} only the requests of that role",
            f"{session} sent {type(body).__name__}",
            "Check the role of that task and its keys.",
        )

    def _reply(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
    ) -> None:
        header = envelope.job, envelope.epoch, self.incarnation, envelope.request
        try:
            message = codec.encode(*header, body, buffers, session.writer)
        except errors.DistributeError as error:
            message = codec.encode(*header, error_replies.from_error(error))
        self.num_bytes_sent += len(message[0]) + sum(memoryview(b).nbytes for b in buffers)
        self._send(session, message)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._outbox.popleft()()

    def _reply_late(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[codec.Buffer],
    ) -> None:
        if self._sessions.get(session.identity) is session:
            self._reply(session, envelope, body, buffers)

    def _send(self, session: Session, message: list[codec.Part]) -> None:
        try:
            zmq_io.send(self._listener.socket, [session.identity, *message], self._can_avoid_copy)
        except zmq.Again:
            # A thousand messages are queued. The peer will have to repeat the handshake.
            _log.warning("%s: %s does not read its replies", self.task, session)
            self._sessions.pop(session.identity, None)
        except zmq.ZMQError as error:
            # The connection is closed, which the peer has noticed, too.
            _log.debug("%s: %s has disconnected: %s", self.task, session, error)
            self._sessions.pop(session.identity, None)

    # Handshakes.

    def _handshake(self, identity: bytes, message: list[zmq.Frame]) -> None:
        found = codec.decode_hello(message)
        # Another message may come from a peer of an earlier incarnation of this task.
        reply: messages.Body = error_replies.hello_first()
        role: Role = "worker"
        if found is not None:
            hello = found[1]
            role = self._authenticated_role(message[0]) or hello.role
            reply = self._admit(hello, role)
            if type(reply) is not messages.Welcome:
                self._close_connection(message[0], limits.REJECTION)
        session = Session(identity, role, 0, 0)
        if found is not None and type(reply) is messages.Welcome:
            hello = found[1]
            session = Session(identity, role, hello.task, hello.incarnation)
            session.next_request = hello.first
            memory = shared_memory.attach(hello.shared_memory) if self._can_share else None
            if memory is not None:
                session.reader, session.writer = memory
                reply = msgspec.structs.replace(reply, has_shared_memory=True)
            if self._listener.guard is not None:
                session.connection = self._listener.guard.accept(message[0])
            self._sessions[identity] = session
            self._sessions.move_to_end(identity)
            while len(self._sessions) > limits.SESSIONS:
                self._sessions.popitem(last=False)
        self._send(session, codec.encode("", 0, self.incarnation, 0, reply))

    def _authenticated_role(self, frame: zmq.Frame) -> Role | None:
        """Returns the role of the key of a connection; None without keys."""
        if self._listener.authenticator is None:
            return None
        try:
            return frame.get("User-Id")  # type: ignore[return-value]
        except zmq.ZMQError as error:
            raise errors.ProtocolError("A connection has no key.") from error

    def _admit(self, hello: messages.Hello, role: Role) -> messages.Body:
        """Returns the reply to a handshake."""
        try:
            admission.check(hello, role, self.task, library_version(), self._accepted)
        except errors.DistributeError as error:
            if self._on_rejected is not None:
                self._on_rejected(hello, error)
            return error_replies.from_error(error)
        return messages.Welcome(
            library_version(), self.task.role, self.task.index, self.incarnation
        )

    def _close_connection(self, part: zmq.Frame, delay: float = 0.0) -> None:
        """Closes the connection from which a part of a message arrived."""
        if self._listener.guard is not None:
            self._listener.guard.close_at(part, time.monotonic() + delay)

    def _drop(self, error: errors.ProtocolError) -> None:
        """Counts a malformed message; logs at most once a second."""
        self._num_dropped += 1
        now = time.monotonic()
        if now - self._logged_at >= 1.0:
            self._logged_at = now
            count = self._num_dropped
            _log.warning("%s dropped %d malformed messages: %s", self.task, count, error)
            self._num_dropped = 0
