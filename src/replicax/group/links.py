"""The two sides of the control channel: the host, in the chief's process, and the members."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from replicax.foundation import errors, thread_stacks
from replicax.group.hub import END, Hub
from replicax.group.members import Members
from replicax.group.monitor import Monitor
from replicax.group.timing import GroupTiming
from replicax.protocol import admission, error_replies, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport import addresses
from replicax.transport.client_pool import ClientPool
from replicax.transport.keys import Keys
from replicax.transport.service import Reply, Service, Session

_log = logging.getLogger(__name__)

# Added to deadlines that the chief keeps, so that its error arrives first.
_SLACK_S = 5.0
# Seconds between two attempts to join while the chief is not ready.
_RETRY_S = 0.2

# Returns the heartbeat of this process: what it does, and the programs that it has dispatched.
MakeBeat = Callable[[], messages.GroupBeat]
# Handles bytes for the coordination service of JAX: the index of the member, and the message.
OnBytes = Callable[[int, messages.CoordinationBytes, bytes], None]


class Link(Protocol):
    """The connection of a process to its group."""

    make_beat: MakeBeat | None
    on_bytes: OnBytes | None

    def join(self, report: messages.JoinGroup, seconds: float) -> None:
        """Takes part in the roll call; returns when the group is complete."""
        ...

    def contribute(self, body: messages.Contribute, value: bytes) -> tuple[int, list[bytes]]:
        """Makes a call that all members make; returns its number and all values."""
        ...

    def name_program(self, program: int, name: str) -> None:
        """Records the name of a program, for messages."""
        ...

    def send_bytes(self, index: int, body: messages.CoordinationBytes, data: bytes) -> None:
        """Sends bytes for the coordination service of JAX, or from it."""
        ...

    def beat_now(self) -> None:
        """Sends a heartbeat at once."""
        ...

    def describe_members(self) -> list[dict[str, object]]:
        """Returns what is known about the other members: all on the chief, else nothing."""
        ...

    def leave(self, error: messages.ErrorReply) -> None:
        """Tells the group that this process ends; without a code, it ends as planned."""
        ...

    def close(self, seconds: float) -> None:
        """Closes the connection. The host waits until the others have left."""
        ...


class _LocalReply:
    """The reply to a call that the chief makes in its own process."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._reply: tuple[messages.Body, Sequence[bytes]] = messages.Done(), ()

    def __call__(self, body: messages.Body, values: Sequence[bytes]) -> None:
        self._reply = body, values
        self._event.set()

    def wait(self, seconds: float) -> tuple[messages.Body, list[bytes]]:
        if not self._event.wait(seconds):
            raise errors.DeadlineExceededError(
                f"The group did not decide about a call within {seconds:g} s. Restart its tasks."
            )
        body, values = self._reply
        _raise_error_of(body)
        return body, list(values)


class HostLink:
    """The side of the chief: it listens at its address, and holds the hub.

    Args:
      members: The members of the group.
      timing: The timeouts.
      arrive_s: The time within which all members must arrive at a call.
      monitor: Learns about failures.
      keys: The keys of this task; required for TCP.
    """

    def __init__(
        self,
        members: Members,
        timing: GroupTiming,
        arrive_s: float,
        monitor: Monitor,
        keys: Keys | None,
    ) -> None:
        self._members = members
        self._timing = timing
        self._arrive_s = arrive_s
        self._monitor = monitor
        self._incarnation = new_incarnation()
        self._sessions: dict[int, Session] = {}
        self._beat_at = 0.0
        self.make_beat: MakeBeat | None = None
        self.on_bytes: OnBytes | None = None
        self._hub = Hub(
            members,
            timing,
            arrive_s,
            is_connected=self._is_connected,
            tell=self._tell,
            request_stacks=self._request_stacks,
        )
        try:
            self._service = Service(
                addresses.resolve(members.addresses[0], None, keys),
                Task("worker", 0),
                self._handle,
                keys,
                self._incarnation,
                on_idle=self._check,
                on_failed=self._on_failed,
                accepted=admission.ALLOWED_IN_GROUP,
                on_rejected=self._hub.reject,
            )
        except errors.AddressInUseError as error:
            raise errors.AddressInUseError(f"{members.name(0)}: {error}") from error
        self._service.start()

    def join(self, report: messages.JoinGroup, seconds: float) -> None:
        reply = _LocalReply()
        now = time.monotonic()
        self._hub.open(seconds, now)
        self._hub.join(report, self._incarnation, reply, now)
        try:
            reply.wait(seconds + _SLACK_S)
        except errors.DistributeError:
            self._linger()
            raise

    def _linger(self) -> None:
        """Keeps listening for a moment, so that all members get the error of the roll call.

        A member that has it ends, and with it its connection; late ones report first.
        """
        end = time.monotonic() + self._timing.linger_s
        while time.monotonic() < end and not (self._hub.has_all_reports and self._is_alone()):
            time.sleep(0.05)

    def _is_alone(self) -> bool:
        sessions = list(self._sessions.values())
        return not any(self._is_connected(session.incarnation) for session in sessions)

    def contribute(self, body: messages.Contribute, value: bytes) -> tuple[int, list[bytes]]:
        reply = _LocalReply()
        self._hub.contribute(0, body, value, reply, time.monotonic())
        limit = self._timing.leave_s if body.name == END else self._arrive_s + _SLACK_S
        found, values = reply.wait(limit)
        assert isinstance(found, messages.Contributions)
        return found.number, values

    def name_program(self, program: int, name: str) -> None:
        self._hub.name_program(program, name)

    def send_bytes(self, index: int, body: messages.CoordinationBytes, data: bytes) -> None:
        session = self._sessions.get(index)
        if session is not None:
            self._service.send(session, body, [data] if data else [])

    def beat_now(self) -> None:
        self._beat_at = 0.0
        self._service.wake()

    def describe_members(self) -> list[dict[str, object]]:
        return self._hub.describe(time.monotonic())

    def leave(self, error: messages.ErrorReply) -> None:
        self._hub.leave(0, error)

    def close(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._hub.everybody_has_left:
            time.sleep(0.02)
        self._service.close()

    # The service thread.

    def _handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Reply | None:
        body, now = envelope.body, time.monotonic()
        if isinstance(body, messages.JoinGroup):
            respond = functools.partial(self._service.reply, session, envelope)
            self._hub.join(body, session.incarnation, respond, now)
            self._sessions[session.task] = session
            return None
        index = session.task
        if self._sessions.get(index) is None:
            return messages.Done(), ()
        if self._sessions[index].incarnation == session.incarnation:
            self._sessions[index] = session  # It may have connected again.
        if isinstance(body, messages.Contribute):
            respond = functools.partial(self._service.reply, session, envelope)
            value = bytes(buffers[0]) if buffers else b""
            self._hub.contribute(index, body, value, respond, now)
        elif isinstance(body, messages.GroupBeat):
            self._hub.beat(index, body, now)
            return messages.Done(), ()
        elif isinstance(body, messages.GroupNotice):
            self._hub.leave(index, body.error)
        elif isinstance(body, messages.Stacks):
            _log.warning(
                "The stacks of %s:\n%s",
                self._members.place(index),
                thread_stacks.cleaned(body.text),
            )
        elif isinstance(body, messages.CoordinationBytes) and self.on_bytes is not None:
            self.on_bytes(index, body, bytes(buffers[0]) if buffers else b"")
        return None

    def _check(self, now: float) -> None:
        if self.make_beat is not None and now - self._beat_at >= self._timing.beat_s:
            self._beat_at = now
            self._hub.beat(0, self.make_beat(), now)
        self._hub.check(now)

    def _is_connected(self, incarnation: int) -> bool:
        return incarnation == self._incarnation or self._service.has_session("worker", incarnation)

    def _tell(self, notice: messages.GroupNotice) -> None:
        for session in list(self._sessions.values()):
            self._service.send(session, notice)
        self._monitor.handle(notice)

    def _request_stacks(self, index: int) -> None:
        session = self._sessions.get(index)
        if session is not None:
            self._service.send(session, messages.GetStacks())
        else:
            stacks = thread_stacks.text()
            _log.warning("The stacks of %s:\n%s", self._members.place(index), stacks)

    def _on_failed(self, reason: str) -> None:
        self._monitor.lose(0, reason)


class MemberLink:
    """The side of a member other than the chief: one connection, in a thread of its own.

    The arguments are those of `HostLink`, and the index of this member.
    """

    def __init__(
        self,
        members: Members,
        index: int,
        timing: GroupTiming,
        arrive_s: float,
        monitor: Monitor,
        keys: Keys | None,
    ) -> None:
        self._members = members
        self._index = index
        self._timing = timing
        self._arrive_s = arrive_s
        self._monitor = monitor
        self._chief = Task("worker", 0)
        self._is_formed = self._is_leaving = self._has_chief = False
        self._beat_at = self._answered_at = self._idle_at = 0.0
        self._reason = "nothing listens there"
        self.make_beat: MakeBeat | None = None
        self.on_bytes: OnBytes | None = None
        location = addresses.resolve(members.addresses[0], None, keys)
        self._pool = ClientPool(
            Task("worker", index),
            keys,
            self._on_message,
            self._on_connected,
            self._on_lost,
            self._on_idle,
        )
        self._pool.connect(self._chief, location)

    def join(self, report: messages.JoinGroup, seconds: float) -> None:
        start = reminded = time.monotonic()
        while True:
            left = start + seconds - time.monotonic()
            # Short attempts: the user can interrupt the wait between them.
            attempt = min(self._timing.remind_s, max(left, 0.1))
            try:
                reply, _ = self._pool.request(self._chief, report, timeout=attempt)
                assert isinstance(reply, messages.GroupFormed)
                if not reply.may_retry:
                    break
                assert reply.error is not None
                error = error_replies.to_error(reply.error)
                self._reason = error.found
            except errors.UnavailableError as caught:
                error = caught
                self._reason = caught.found
            except errors.DeadlineExceededError as caught:
                error = caught
            # The chief's own deadline may be a little later than ours.
            if left < -self._timing.linger_s or (left <= 0 and not self._has_chief):
                raise self._no_chief(seconds) from error
            if time.monotonic() - reminded >= self._timing.remind_s and not self._has_chief:
                reminded = time.monotonic()
                where = self._members.place(0)
                text = "The group is not complete: waiting for %s (%s); %.0f s are left"
                _log.warning(text, where, self._reason, left)
            if isinstance(error, errors.UnavailableError):
                time.sleep(_RETRY_S)
        _raise_error_of(reply)
        self._answered_at = time.monotonic()
        self._is_formed = True

    def _no_chief(self, seconds: float) -> errors.DeadlineExceededError:
        chief = self._members.place(0)
        found = f"these have not: {chief} ({self._reason})"
        if self._has_chief:
            found = f"{chief} has not completed the roll call ({self._reason})"
        return errors.DeadlineExceededError(
            f"All {self._members.count} tasks of the group must report within {seconds:g} s",
            found,
            "Start them, look at their logs, and compare their cluster specifications and keys.",
        )

    def contribute(self, body: messages.Contribute, value: bytes) -> tuple[int, list[bytes]]:
        if (error := self._monitor.error()) is not None:
            raise error
        try:
            limit = self._timing.leave_s if body.name == END else self._arrive_s + _SLACK_S
            found, values = self._pool.request(self._chief, body, [value], timeout=limit)
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            if body.name == END:
                raise
            # A broken connection, or no reply: the monitor knows why in a moment.
            raise self._monitor.wait(self._timing.explain_s) or error from None
        _raise_error_of(found)
        assert isinstance(found, messages.Contributions)
        return found.number, [bytes(value) for value in values]

    def name_program(self, program: int, name: str) -> None:
        del program, name  # The chief knows it.

    def send_bytes(self, index: int, body: messages.CoordinationBytes, data: bytes) -> None:
        del index
        self._pool.send(self._chief, body, [data] if data else [])

    def beat_now(self) -> None:
        self._beat_at = 0.0
        self._pool.wake()

    def describe_members(self) -> list[dict[str, object]]:
        return []

    def leave(self, error: messages.ErrorReply) -> None:
        self._is_leaving = True
        self._pool.send(self._chief, messages.GroupNotice("leaving", self._index, error))

    def close(self, seconds: float) -> None:
        self._is_leaving = True
        self._pool.close(min(seconds, 0.5))

    # The thread of the pool.

    def _on_message(
        self, task: Task, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> None:
        del task
        body = envelope.body
        self._answered_at = time.monotonic()
        if isinstance(body, messages.GroupNotice):
            self._monitor.handle(body)
        elif isinstance(body, messages.GetStacks):
            self._pool.send(self._chief, messages.Stacks(thread_stacks.text()))
        elif isinstance(body, messages.CoordinationBytes) and self.on_bytes is not None:
            self.on_bytes(0, body, bytes(buffers[0]) if buffers else b"")

    def _on_connected(self, task: Task, welcome: messages.Welcome) -> None:
        del task, welcome
        self._has_chief = True
        self._answered_at = time.monotonic()

    def _on_lost(self, task: Task, reason: str) -> None:
        del task
        self._has_chief = False
        self._reason = reason
        if self._is_formed and not self._is_leaving and not self._monitor.has_left(0):
            self._monitor.lose(0, reason)

    def _on_idle(self, now: float) -> None:
        gap, self._idle_at = now - self._idle_at, now
        if not self._is_formed or self._is_leaving or self._monitor.has_failed:
            return
        if self._monitor.has_left(0):
            return
        if gap > self._timing.dead_s / 2:
            self._answered_at += gap  # This process was stopped.
        if now - self._answered_at > self._timing.dead_s:
            self._monitor.lose(
                0,
                f"it has not answered for {self._timing.dead_s:g} s: the process is stopped, or "
                "its host cannot be reached",
            )
        elif now - self._beat_at >= self._timing.beat_s and self.make_beat is not None:
            self._beat_at = now
            self._pool.send(self._chief, self.make_beat())


def _raise_error_of(reply: messages.Body) -> None:
    """Raises the error that the chief has decided on."""
    if isinstance(reply, messages.GroupFormed | messages.Contributions) and reply.error:
        raise error_replies.to_error(reply.error)
