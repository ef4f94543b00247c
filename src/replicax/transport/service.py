"""A listener: takes messages of known sessions, and answers them.

One thread does everything: it receives, calls the handler, sends, and looks at the clock. A
message that is none, comes from a stranger or asks for something that its sender may not ask for
never reaches the handler.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from replicax.foundation import errors, lazy, thread_stacks
from replicax.protocol import admission, codec, error_replies, limits, messages
from replicax.protocol.tasks import Role, Task, library_version, new_incarnation
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.sessions import Session
from replicax.transport.shared_memory import OutdatedError
from replicax.transport.shared_memory import join as join_lane
from replicax.transport.wakeup import Wakeup
from replicax.transport.zmq import listener, zmq_io

if TYPE_CHECKING:
    import zmq
else:
    zmq = lazy.module("zmq")

_log = logging.getLogger(__name__)


Reply = tuple[messages.Body, Sequence[codec.Buffer]]
Handler = Callable[[Session, messages.Envelope, list[memoryview]], Reply | None]


class Service:
    """Listens at a place and gives messages to a handler.

    Args:
      location: Where to listen; the place is taken at once.
      task: Who listens.
      handler: Called in the thread of the service with (session, envelope, buffers); what it
        returns is the reply, None means that there is none now. The buffers are views of what
        came and may be kept. An error that it raises is the reply `ErrorReply`.
      keys: What to prove with who listens, and to check sessions by; TCP needs them.
      incarnation: Which life of the task this is.
      on_idle: Called in the thread of the service at least every 0.1 s with the monotonic time.
      on_failed: Called in the thread of the service, with the reason, when it cannot listen any
        more, for example because its sockets were closed under it.

    A message may come twice, when a connection broke before its reply had arrived; handlers
    must give the same reply again.

    Attributes:
      incarnation: May be set to begin a new life; sessions then notice and say hello again.
      url: Where it listens, for sockets.
      address: Where it listens, for clusters.

    Example:
      >>> from replicax.transport import addresses
      >>> place = addresses.resolve("inproc://example")
      >>> def handler(session, envelope, buffers):
      ...     return messages.Done(), buffers
      >>> with Service(place, Task("ps", 0), handler) as service:
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
    ) -> None:
        self.task = task
        self.incarnation = incarnation or new_incarnation()
        self._handler = handler
        self._on_idle = on_idle
        self._on_failed = on_failed
        self._can_lend = location.scheme != "inproc"
        # Of known sessions: headers and buffers, whatever way they took.
        self.num_bytes_received = self.num_bytes_sent = 0
        self._can_share = location.scheme == "ipc"
        self._listener = listener.Listener(location, task, keys)
        self.url = self._listener.url
        self.address = self._listener.address
        self._accepted = admission.requests_to(task)
        # The sessions that are known, the longest silent first.
        self._sessions: collections.OrderedDict[bytes, Session] = collections.OrderedDict()
        # What other threads want to be said, in order.
        self._outbox: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        self._num_dropped = 0
        self._logged_at = -1.0
        self._idle_at = 0.0

    # What others call.

    def start(self) -> None:
        """Starts to reply."""
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
        """Sends a late reply, or a notice, from any thread.

        The memory of the buffers must stay as it is until it was sent.
        """
        message = codec.encode(session.job, session.epoch, self.incarnation, request, body, buffers)
        if self._thread is threading.current_thread():
            self._send(session, message)
            return
        self._say(functools.partial(self._send, session, message))

    def reply(
        self,
        session: Session,
        envelope: messages.Envelope,
        body: messages.Body,
        buffers: Sequence[codec.Buffer] = (),
    ) -> None:
        """Answers a question late, from any thread, as the handler would have.

        Answers leave in the order of the calls, before those of requests that come later. Who
        has said hello again meanwhile gets none: it has asked again, too.
        """
        self._say(functools.partial(self._reply_late, session, envelope, body, buffers))

    def _say(self, saying: Callable[[], None]) -> None:
        if not self._is_closing:
            self._outbox.append(saying)
            self._wakeup.set()

    def has_session(self, role: Role, incarnation: int) -> bool:
        """Tells whether a process has an open connection to this service.

        The kernel closes those of a process that ends, however it ends. Those of one that is
        stopped stay open. Sessions inside this process count as connected.
        """
        doorway = self._listener.doorway
        return any(
            session.connection is None or doorway is None or doorway.is_open(session.connection)
            for session in list(self._sessions.values())
            if session.role == role and session.incarnation == incarnation
        )

    def wake(self) -> None:
        """Makes the thread of the service call `on_idle` now."""
        self._idle_at = 0.0
        self._wakeup.set()

    def close(self) -> None:
        """Sends what waits, stops to listen, and ends the thread."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        self._wakeup.set()
        if thread is threading.current_thread():
            return  # the thread ends when the handler is done
        if thread is not None:
            thread.join()
        self._release()

    def _release(self) -> None:
        self._sessions.clear()  # They may share memory.
        self._wakeup.close()
        self._listener.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread of the service.

    def _run(self) -> None:
        poll = [(self._listener.socket, 1), (self._wakeup.fd, 1)]
        authenticator = self._listener.authenticator
        if authenticator is not None:
            poll.append((authenticator.socket, 1))
        doorway = self._listener.doorway
        if doorway is not None:
            poll.append((doorway.monitor, 1))
        timeout = int(limits.IDLE * 1e3)
        try:
            while not self._is_closing:
                ready = zmq.zmq_poll(poll, timeout)
                if len(ready) > 1 or (ready and ready[0][0] is not self._listener.socket):
                    if authenticator is not None:
                        authenticator.reply()
                    if doorway is not None and zmq_io.has_message(doorway.monitor):
                        doorway.observe(time.monotonic())
                    self._wakeup.clear()
                self._receive()
                self._send_outbox()
                now = time.monotonic()
                if now - self._idle_at >= limits.IDLE / 2:
                    self._idle_at = now
                    self._look_around(now)
        except Exception as error:
            _log.exception("%s cannot listen any more", self.task)
            if self._on_failed is not None:
                self._on_failed(f"it cannot listen any more ({error})")
        finally:
            self._send_outbox()
            self._release()

    def _look_around(self, now: float) -> None:
        if self._listener.doorway is not None:
            self._listener.doorway.observe(now)
        if self._on_idle is None:
            return
        try:
            self._on_idle(now)
        except Exception:
            # The listener must outlive whatever its owner does now and then.
            _log.exception("%s: the regular work failed", self.task)

    def _receive(self) -> None:
        end = time.monotonic() + limits.IDLE / 2
        socket = self._listener.socket
        while zmq_io.has_message(socket) and time.monotonic() < end:
            message: list[zmq.Frame] = []
            try:
                message = zmq_io.receive(socket)
                self._handle(message[0], message[1:])
            except OutdatedError as error:
                _log.debug("%s: %s", self.task, error)
            except errors.ProtocolError as error:
                self._drop(error)
                if message:
                    self._dismiss(message[0])
            except Exception:
                # No message, whatever it holds, may end the listener.
                _log.exception("%s: a message could not be handled", self.task)

    def _handle(self, identity: zmq.Frame, message: list[zmq.Frame]) -> None:
        session = self._sessions.get(identity.bytes)
        if session is None:
            self._greet(identity.bytes, message)
            return
        self._sessions.move_to_end(identity.bytes)
        envelope, buffers = codec.decode(message, session.reader)
        self.num_bytes_received += len(message[0]) + sum(envelope.sizes)
        body = envelope.body
        if type(body) is messages.Hello:
            self._greet(identity.bytes, message)
            return
        if envelope.incarnation != session.incarnation or session.has_gap_before(envelope.request):
            # Nothing may overtake what was lost: the session begins anew, with the oldest.
            self._reply(session, envelope, error_replies.hello_first())
            return
        session.job, session.epoch = envelope.job, envelope.epoch
        try:
            if type(body) not in self._accepted.get(session.role, ()):
                self._dismiss(identity, limits.REJECTION)
                raise self._forbidden(session, body)
            if type(body) is messages.GetStacks:
                # Here, where it is answered whatever the rest of the process waits for.
                reply = messages.Stacks(thread_stacks.text()), ()
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
            f"{self.task} takes from a {session.role} only what a {session.role} may ask",
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
        life, number = self.incarnation, envelope.request
        try:
            message = codec.encode(
                envelope.job, envelope.epoch, life, number, body, buffers, session.writer
            )
        except errors.DistributeError as error:
            refused = error_replies.from_error(error)
            message = codec.encode(envelope.job, envelope.epoch, life, number, refused)
        self.num_bytes_sent += len(message[0]) + sum(memoryview(b).nbytes for b in buffers)
        self._send(session, message)

    def _send_outbox(self) -> None:
        while self._outbox:
            self._outbox.popleft()()

    def _reply_late(self, session: Session, *reply: Any) -> None:
        if self._sessions.get(session.identity) is session:
            self._reply(session, *reply)

    def _send(self, session: Session, message: list[Any]) -> None:
        try:
            zmq_io.send(self._listener.socket, [session.identity, *message], self._can_lend)
        except zmq.Again:
            # It has not read for a thousand messages. It will be asked to begin again.
            _log.warning("%s: %s does not read what it is sent", self.task, session)
            self._sessions.pop(session.identity, None)
        except zmq.ZMQError as error:
            # Gone: whoever waits for the reply has noticed the same.
            _log.debug("%s: %s is gone: %s", self.task, session, error)
            self._sessions.pop(session.identity, None)

    # Strangers.

    def _greet(self, identity: bytes, message: list[zmq.Frame]) -> None:
        greeting = codec.decode_hello(message)
        # Who says something else first may be known from an earlier life of this task.
        reply: messages.Body = error_replies.hello_first()
        role: Role = "worker"
        if greeting is not None:
            hello = greeting[1]
            role = self._proven_role(message[0]) or hello.role
            reply = self._judge(hello, role)
            if type(reply) is not messages.Welcome:
                self._dismiss(message[0], limits.REJECTION)
        session = Session(identity, role, 0, 0)
        if greeting is not None and type(reply) is messages.Welcome:
            hello = greeting[1]
            session = Session(identity, role, hello.task, hello.incarnation)
            session.expected = hello.first
            lane = join_lane(hello.lane) if hello.lane and self._can_share else None
            if lane is not None:
                session.reader, session.writer = lane
                reply = msgspec.structs.replace(reply, has_shared_memory=True)
            if self._listener.doorway is not None:
                session.connection = self._listener.doorway.admit(message[0])
            self._sessions[identity] = session
            self._sessions.move_to_end(identity)
            while len(self._sessions) > limits.SESSIONS:
                self._sessions.popitem(last=False)
        self._send(session, codec.encode("", 0, self.incarnation, 0, reply))

    def _proven_role(self, frame: zmq.Frame) -> Role | None:
        """Returns the role that the key of a connection stands for; None without keys."""
        if self._listener.authenticator is None:
            return None
        try:
            return frame.get("User-Id")  # type: ignore[return-value]
        except zmq.ZMQError as error:
            raise errors.ProtocolError("A connection has no key.") from error

    def _judge(self, hello: messages.Hello, role: Role) -> messages.Body:
        """Decides whether a session is let in."""
        try:
            admission.check(hello, role, self.task, library_version())
        except errors.DistributeError as error:
            return error_replies.from_error(error)
        return messages.Welcome(
            library_version(), self.task.role, self.task.index, self.incarnation
        )

    def _dismiss(self, frame: zmq.Frame, delay: float = 0.0) -> None:
        """Closes the connection that a frame came from."""
        if self._listener.doorway is not None:
            self._listener.doorway.dismiss(frame, time.monotonic() + delay)

    def _drop(self, error: errors.ProtocolError) -> None:
        """Counts a message that is none; says so at most once a second."""
        self._num_dropped += 1
        now = time.monotonic()
        if now - self._logged_at >= 1.0:
            self._logged_at = now
            _log.warning("%s dropped %d messages: %s", self.task, self._num_dropped, error)
            self._num_dropped = 0
