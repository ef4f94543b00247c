"""The server side of connections: receives requests and sends replies.

One thread receives, calls the handler, sends, and runs periodic work. Malformed messages, messages
of unauthenticated peers and requests that the role of the peer does not permit never reach the
handler.
"""

from __future__ import annotations

import collections
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from replicax.foundation import errors, runtime, spans, thread_stacks
from replicax.protocol import admission, codec, error_replies, limits, messages
from replicax.protocol.tasks import Role, Task, library_version, new_incarnation
from replicax.transport import base, shared_memory
from replicax.transport.addresses import Location
from replicax.transport.connection_guard import LimitedLog, PendingConnections
from replicax.transport.keys import Keys
from replicax.transport.streams import network as streams
from replicax.transport.streams.frames import LARGEST

_log = logging.getLogger(__name__)

_numbers = itertools.count(1)


# The bytes of replies that may wait for one peer beyond the largest.
_MOST_BACKLOG = limits.MESSAGE + limits.QUEUE_BYTES

Reply = tuple[messages.Body, Sequence[codec.Buffer]]


class Session:
    """One connection of a peer that has completed the handshake.

    Attributes:
      identity: A name that no other session of this process has.
      role: The role of the peer; proven with certificates, claimed without.
      task: The index of the peer.
      incarnation: The incarnation of the peer.
      job: The job of its last message.
      epoch: The epoch of its last message.
      next_request: The number of its next request; 0 if it does not number them consecutively.
      reader: The shared memory that the peer writes.
      writer: The shared memory that the peer reads.
      wire: The connection.
      lock: Taken to send: replies come from any thread.
    """

    __slots__ = (
        "epoch",
        "identity",
        "incarnation",
        "job",
        "lock",
        "next_request",
        "reader",
        "role",
        "task",
        "wire",
        "writer",
    )

    def __init__(
        self,
        identity: bytes,
        role: Role,
        task: int,
        incarnation: int,
        wire: base.Wire | None = None,
    ) -> None:
        self.identity = identity
        self.wire = wire
        self.role: Role = role
        self.task = task
        self.incarnation = incarnation
        self.job = ""
        self.epoch = 0
        self.next_request = 0
        self.reader: shared_memory.SharedMemoryReader | None = None
        self.writer: shared_memory.SharedMemoryWriter | None = None
        self.lock = runtime.Lock()

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
      keys: The certificates of this task; required for TCP.
      incarnation: The incarnation of the task; random by default.
      on_idle: Called in the service thread at least every 0.1 s with the monotonic time.
      on_failed: Called in the service thread, with the reason, when it cannot listen any more, for
        example because its sockets were closed.
      accepted: The requests to accept, by the role of the peer; those of the task's role by
        default.
      on_rejected: Called in the service thread with the handshake of an authenticated peer that
        was not accepted, and the error that it gets.
      network: Accepts the connections.

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
        network: base.Network | None = None,
    ) -> None:
        if location.scheme == "tcp":
            _check_keys(task, keys)
        self.task = task
        self.incarnation = incarnation or new_incarnation()
        self._network = network or streams.NETWORK
        self._handler = handler
        self._on_idle = on_idle
        self._on_failed = on_failed
        # Headers and buffers of all sessions, also those through shared memory.
        self.num_bytes_received = self.num_bytes_sent = 0
        self._listener = self._network.listen(location, keys)
        self.url = self._listener.url
        self.address = self._listener.address
        self._accepted = admission.requests_to(task) if accepted is None else accepted
        self._on_rejected = on_rejected
        self._wires: dict[int, base.Wire] = {}
        # By descriptor; the least recently used first.
        self._sessions: collections.OrderedDict[int, Session] = collections.OrderedDict()
        self._pending = PendingConnections()
        self._poller = self._network.poller()
        self._wakeup = self._network.wakeup()
        self._poller.set(self._wakeup.fd, base.READ)
        self._poller.set(self._listener.fileno(), base.READ)
        # When to accept connections again; None while it does.
        self._resume_at: float | None = None
        self._thread: runtime.Thread | None = None
        self._lock = runtime.Lock()
        self._is_closing = False
        self._log = LimitedLog(task)
        self._idle_at = 0.0

    # Called by any thread.

    def start(self) -> None:
        """Starts the service thread."""
        with self._lock:
            if self._thread is None and not self._is_closing:
                name = f"replicax-service-{self.task.role}-{self.task.index}"
                self._thread = runtime.Thread(target=self._run, name=name, daemon=True)
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
        self._send(session, message)

    def reply(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
    ) -> None:
        """Sends the reply to a request that the handler has left open, from any thread.

        Replies are sent in the order of the calls. A peer that has connected again gets none: it
        has repeated the request, too.
        """
        header = envelope.job, envelope.epoch, self.incarnation, envelope.request
        with session.lock:
            try:
                message = codec.encode(*header, body, buffers, session.writer)
            except errors.DistributeError as error:
                message = codec.encode(*header, error_replies.from_error(error))
            self.num_bytes_sent += len(message[0])
            if buffers:
                self.num_bytes_sent += sum(map(_num_bytes, buffers))
            self._send(session, message, type(body) is messages.Pong)

    def has_session(self, role: Role, incarnation: int) -> bool:
        """Returns whether a process has an open connection to this service.

        The kernel closes those of a process that ends, however it ends. Those of a stopped process
        stay open.
        """
        return any(
            session.wire is not None and session.wire.is_connected()
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
        if thread is runtime.current_thread():
            return  # The thread ends when the handler returns.
        if thread is not None:
            thread.join()
        self._release()

    def _release(self) -> None:
        self._sessions.clear()  # They hold shared memory.
        self._listener.close()
        end = self._network.now() + limits.LINGER
        for wire in list(self._wires.values()):
            while wire.backlog and wire.is_open and (left := end - self._network.now()) > 0:
                self._network.wait(wire, None, left)
                try:
                    wire.handle()
                except errors.ProtocolError:
                    break
            wire.close()
        self._wires.clear()
        self._poller.close()
        self._wakeup.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The service thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self.run_once(limits.IDLE)
        except Exception as error:
            _log.exception("%s stopped listening", self.task)
            if self._on_failed is not None:
                self._on_failed(f"it stopped listening ({error})")
        finally:
            self._release()

    def run_once(self, timeout: float) -> None:
        """Handles the events of at most some seconds, and runs the periodic work if it is due."""
        for fd in self._poller.wait(timeout):
            wire = self._wires.get(fd)
            if wire is not None:
                self._serve(fd, wire)
            elif fd == self._wakeup.fd:
                self._wakeup.clear()
            elif fd == self._listener.fileno():
                self._accept_connections()
        now = self._network.now()
        if now - self._idle_at >= limits.IDLE / 2:
            self._idle_at = now
            self._run_periodic(now)

    def _run_periodic(self, now: float) -> None:
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._poller.set(self._listener.fileno(), base.READ)
        self._close_expired(now, limits.PENDING_CONNECTIONS)
        self._log.flush(now)
        if self._on_idle is None:
            return
        try:
            self._on_idle(now)
        except Exception:
            # The listener survives errors of its owner.
            _log.exception("%s: the periodic work failed", self.task)

    # Connections.

    def _accept_connections(self) -> None:
        """Accepts connections, a bounded number at once."""
        now = self._network.now()
        for _ in range(limits.PENDING_CONNECTIONS // 4):
            try:
                wire = self._listener.accept()
            except errors.ResourceExhaustedError as error:
                self._log.warning("descriptors", str(error), now)
                self._poller.remove(self._listener.fileno())
                self._resume_at = now + limits.PAUSE
                self._close_expired(now, 0)
                return
            if wire is None:
                break
            self._add(wire, now)
        self._close_expired(now, limits.PENDING_CONNECTIONS)

    def _add(self, wire: base.Wire, now: float) -> None:
        fd = wire.fileno()
        wire.limit(limits.HELLO)

        def on_change() -> None:
            if wire.failure is None:
                self._poller.set(fd, wire.events)
            else:
                self._poller.remove(fd)
                # Also from another thread, before the kernel reuses the descriptor.
                if self._wires.pop(fd, None) is not None:
                    self._pending.discard(fd)
                    self._sessions.pop(fd, None)

        wire.on_change = on_change
        self._wires[fd] = wire
        self._pending.add(fd, now)
        on_change()

    def _close_expired(self, now: float, limit: int) -> None:
        for fd in self._pending.take_expired(now, limit):
            wire = self._wires.get(fd)
            if wire is not None:
                if not self._pending.is_rejected(fd):
                    text = f"closed a connection from {wire.name}: it was silent or slow before "
                    text += "its handshake, or too many waited for theirs"
                    self._log.warning("silent", text, now)
                wire.close()

    def _serve(self, fd: int, wire: base.Wire) -> None:
        """Handles the events of one connection, and the messages that it brings."""
        session = self._sessions.get(fd)
        try:
            wire.handle()
            if wire.failure is not None and wire.failure != base.CLOSED:
                done = "refused a connection" if session is None else f"has lost {session}"
                text = f"{done} from {wire.name}: {wire.failure}"
                self._log.warning(wire.failure, text, self._network.now())
            while (message := wire.receive()) is not None:
                # A peer may close its connection right after a message, also after its first.
                session = self._sessions.get(fd, session)
                if session is not None:
                    self._handle(fd, session, message)
                elif wire.failure is None:
                    self._handshake(fd, wire, message)
        except shared_memory.OutdatedError as error:
            _log.debug("%s: %s", self.task, error)
        except errors.ProtocolError as error:
            text = f"dropped a malformed message from {wire.name}: {error}"
            kind = "stream" if wire.failure is not None else "message"
            self._log.warning(kind, text, self._network.now())
            wire.close("it sent a malformed message")
        except Exception:
            # No message may end the listener.
            _log.exception("%s failed to handle a message", self.task)

    def _handle(self, fd: int, session: Session, message: list[memoryview]) -> None:
        if fd in self._sessions:
            self._sessions.move_to_end(fd)
        envelope, buffers = codec.decode(message, session.reader)
        self.num_bytes_received += len(message[0]) + (sum(envelope.sizes) if buffers else 0)
        body = envelope.body
        if type(body) is messages.Hello:
            raise errors.ProtocolError("A connection has a second handshake.")
        if envelope.incarnation != session.incarnation or session.has_gap_before(envelope.request):
            # Nothing may overtake a lost request: the peer starts again with the oldest.
            self.reply(session, envelope, error_replies.hello_first())
            return
        session.job, session.epoch = envelope.job, envelope.epoch
        try:
            if type(body) not in self._accepted.get(session.role, ()):
                self._pending.reject(fd, self._network.now())
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
            self.reply(session, envelope, *reply)

    def _forbidden(self, session: Session, body: messages.Body) -> errors.PermissionDeniedError:
        return errors.PermissionDeniedError(
            f"{self.task} accepts from a {session.role} only the requests of that role",
            f"{session} sent {type(body).__name__}",
            "Check the role of that task and its certificate.",
        )

    def _send(self, session: Session, message: list[codec.Part], is_urgent: bool = False) -> None:
        wire = session.wire
        if wire is None:
            return
        wire.send(message, is_urgent)
        if wire.backlog > _MOST_BACKLOG:
            _log.warning("%s: %s does not read its replies", self.task, session)
            wire.close("it does not read its replies")

    # Handshakes.

    def _handshake(self, fd: int, wire: base.Wire, message: list[memoryview]) -> None:
        found = codec.decode_hello(message)
        descriptors = wire.take_descriptors()
        try:
            # Another message may come from a peer of an earlier incarnation of this task.
            hello = None if found is None else found[1]
            reply = error_replies.hello_first() if hello is None else self._admit(hello, wire)
            if hello is None or type(reply) is not messages.Welcome:
                wire.send(codec.encode("", 0, self.incarnation, 0, reply))
                self._pending.reject(fd, self._network.now())
                return
            identity = b"%d" % next(_numbers)
            session = Session(identity, hello.role, hello.task, hello.incarnation, wire)
            session.next_request = hello.first
            memory = shared_memory.attach(descriptors) if hello.shares_memory else None
            if memory is not None:
                session.reader, session.writer = memory
                reply = msgspec.structs.replace(reply, has_shared_memory=True)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._pending.discard(fd)
        wire.limit(LARGEST)
        self._sessions[fd] = session
        while len(self._sessions) > limits.SESSIONS:
            oldest = next(iter(self._sessions.values()))
            if oldest.wire is not None:
                oldest.wire.close()
        self._send(session, codec.encode("", 0, self.incarnation, 0, reply))

    def _admit(self, hello: messages.Hello, wire: base.Wire) -> messages.Body:
        """Returns the reply to a handshake."""
        identity = wire.identity
        try:
            role = hello.role if identity is None else identity.role
            admission.check(hello, role, self.task, library_version(), self._accepted)
            if identity is not None and not identity.is_of(hello.role, hello.task):
                raise errors.PermissionDeniedError(
                    f"/job:{hello.role}/task:{hello.task} must have its own certificate",
                    f"it has the certificate of {identity}",
                    "Start it with the certificate of its index.",
                )
        except errors.DistributeError as error:
            text = f"refused /job:{hello.role}/task:{hello.task}: {error.found}"
            self._log.warning("rejected", text, self._network.now())
            if self._on_rejected is not None:
                self._on_rejected(hello, error)
            return error_replies.from_error(error)
        return messages.Welcome(
            library_version(), self.task.role, self.task.index, self.incarnation
        )


def _check_keys(task: Task, keys: Keys | None) -> None:
    if keys is None or not keys.identity.is_of(task.role, task.index):
        raise errors.PermissionDeniedError(
            f"{task} must have the certificate of a {task.role} to listen on TCP",
            "it has none" if keys is None else f"it has the certificate of {keys.identity}",
            "Make certificates with `replicax keys make DIR` and set REPLICAX_KEYS=DIR.",
        )


def _num_bytes(buffer: codec.Buffer) -> int:
    return memoryview(buffer).nbytes
