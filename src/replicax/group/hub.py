"""The state that the chief keeps about its group: roll call, calls, heartbeats and losses.

No sockets and no threads: `host.py` connects it to those. Every method may be called by any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

from replicax.foundation import errors
from replicax.group.calls import Call, Calls, Respond
from replicax.group.members import Members
from replicax.group.program_order import ProgramOrder
from replicax.group.roll_call import RollCall
from replicax.group.timing import GroupTiming
from replicax.protocol import error_replies, messages

_log = logging.getLogger(__name__)

# The call that every member makes last.
END = "the end of the program"
# The seconds that `describe` waits for the lock, and after which a call counts as waiting.
_DESCRIBE_S = 0.3


class Hub:
    """Decides what happens in a group; the chief's process holds the only one.

    Args:
      members: The tasks of the group.
      timing: The timeouts.
      arrive_s: The time within which all members must arrive at a call.
      is_connected: Returns whether a process, by its incarnation, has an open connection.
      tell: Sends a notice to the members; also to the chief itself.
      request_stacks: Requests the stacks of a member, which are logged when they arrive.
    """

    def __init__(
        self,
        members: Members,
        timing: GroupTiming,
        arrive_s: float,
        *,
        is_connected: Callable[[int], bool],
        tell: Callable[[messages.GroupNotice], None],
        request_stacks: Callable[[int], None],
    ) -> None:
        self._members = members
        self._timing = timing
        self._arrive_s = arrive_s
        self._is_connected = is_connected
        self._tell = tell
        self._request_stacks = request_stacks
        self._lock = threading.RLock()
        self._roll_call = RollCall(members, is_connected)
        self._waiting: dict[int, Respond] = {}
        self._deadline: float | None = None
        self._join_s = timing.join_s
        self._reminded = 0.0
        self._is_formed = False
        self._calls = Calls(members.count)
        self._order = ProgramOrder(members.count)
        self._programs: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._activities: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._failure: messages.ErrorReply | None = None
        # Members without a connection, and since when: a broken one is opened again at once.
        self._disconnected: dict[int, float] = {}
        # The smallest number of programs that a member has dispatched, if others have more.
        self._behind_at, self._behind_since, self._behind_reported = -1, 0.0, 0.0
        self._checked = 0.0
        self._differing_since: float | None = None

    # The roll call.

    def open(self, seconds: float, now: float) -> None:
        """Starts the roll call."""
        with self._lock:
            self._deadline = now + seconds
            self._join_s = seconds
            self._reminded = self._checked = now

    def join(
        self, report: messages.JoinGroup, incarnation: int, respond: Respond, now: float
    ) -> None:
        """Handles the report of a member; replies when all have reported, or cannot."""
        with self._lock:
            if self._is_formed:
                if self._roll_call.incarnations.get(report.index) == incarnation:
                    respond(messages.GroupFormed(), ())  # A repeated request.
                else:
                    late = error_replies.from_error(self._late(report))
                    respond(messages.GroupFormed(late, may_retry=True), ())
                return
            self._roll_call.add(report, incarnation)
            self._waiting[incarnation] = respond
            self._settle_roll_call(now)

    def reject(self, hello: messages.Hello, error: errors.DistributeError) -> None:
        """Handles a member whose versions do not permit a connection."""
        with self._lock:
            if not self._is_formed and self._roll_call.error is None:
                self._roll_call.error = error
                _log.debug("/job:worker index %d was rejected: %s", hello.task, error)

    def _settle_roll_call(self, now: float) -> None:
        error = self._roll_call.error
        if error is None and self._roll_call.is_complete:
            self._roll_call.drop_disconnected()
        is_late = self._deadline is not None and now >= self._deadline
        if error is None and is_late and not self._roll_call.is_complete:
            self._roll_call.error = error = self._roll_call.expired(self._join_s)
        if error is not None:
            self._answer_waiting(messages.GroupFormed(error_replies.from_error(error)))
        elif self._roll_call.is_complete:
            self._is_formed = True
            self._heard = dict.fromkeys(range(self._members.count), now)
            self._answer_waiting(messages.GroupFormed())

    def _answer_waiting(self, body: messages.Body) -> None:
        waiting, self._waiting = self._waiting, {}
        for respond in waiting.values():
            respond(body, ())

    def _late(self, report: messages.JoinGroup) -> errors.DistributeError:
        found = self._roll_call.process_of(report.index)
        return errors.UnavailableError(
            f"{self._members.place(report.index)} must join before the group has started",
            f"the group runs, with {found} as this task",
            "Give each process a task id of its own; after a loss, restart all tasks.",
        )

    def _remind(self, now: float) -> None:
        if now - self._reminded < self._timing.remind_s:
            return
        self._reminded = now
        if missing := self._roll_call.missing:
            left = 0.0 if self._deadline is None else max(self._deadline - now, 0.0)
            text = f"waiting for {self._members.names(missing)}; {left:.0f} s are left"
            error = error_replies.from_error(errors.DeadlineExceededError(text))
            self._tell(messages.GroupNotice("waiting", missing[0], error))

    @property
    def has_all_reports(self) -> bool:
        """Whether each member has reported, fitting or not."""
        return not self._roll_call.missing

    # Calls and programs.

    def contribute(
        self, index: int, body: messages.Contribute, value: bytes, respond: Respond, now: float
    ) -> None:
        """Handles a call of a member."""
        with self._lock:
            failure = self._failure or self._failure_of_left(body.name)
            if failure is not None:
                respond(messages.Contributions(0, failure), ())
                return
            self._calls.add(index, body, value, respond, now)
            self._settle_end()

    def name_program(self, program: int, name: str) -> None:
        """Records the name of a program, for messages."""
        with self._lock:
            self._programs[program] = name

    def beat(self, index: int, body: messages.GroupBeat, now: float) -> None:
        """Handles a heartbeat of a member."""
        with self._lock:
            self._heard[index] = now
            self._activities[index] = body.activity
            difference = self._order.add(index, body.position, body.programs)
            if difference is not None and self._failure is None:
                position, one, its, other, others = difference
                error = errors.InvalidArgumentError(
                    "All tasks of a group must run the same programs in the same order",
                    f"as program number {position + 1}, {self._members.name(one)} ran "
                    f"{self._program(its)} and {self._members.name(other)} ran "
                    f"{self._program(others)}",
                    "Remove what makes the tasks differ: a condition on the task, data that ends "
                    "earlier, an iteration over a set.",
                )
                self._fail("differs", other, error)

    def _program(self, number: int) -> str:
        return repr(self._programs.get(number, f"program {number}"))

    def describe(self, now: float) -> list[dict[str, object]]:
        """Returns what is known of each member, for those who observe the group.

        Empty while another thread holds the lock for long.
        """
        if not self._lock.acquire(timeout=_DESCRIBE_S):
            return []
        try:
            late: dict[int, list[str]] = {}
            for call in self._calls:
                if now - call.since < _DESCRIBE_S:
                    continue
                for index in self._calls.missing(call):
                    others = ", ".join(self._members.name(i) for i in sorted(call.values)[:5])
                    text = f"{others} at {call.name!r} for {now - call.since:.1f} s"
                    late.setdefault(index, []).append(text)
            return [
                {
                    "task": self._members.name(index),
                    "role": "member",
                    "address": self._members.addresses[index],
                    "state": self._state_of(index),
                    "programs": self._order.position(index),
                    "silent_s": max(now - self._heard.get(index, now), 0.0),
                    "awaited_by": late.get(index, []),
                }
                for index in range(self._members.count)
            ]
        finally:
            self._lock.release()

    def _state_of(self, index: int) -> str:
        if index in self._left:
            return f"left ({self._left[index]})"
        return self._activities.get(index) or "starting"

    # Losses.

    def leave(self, index: int, error: messages.ErrorReply) -> None:
        """Handles a member that ends, by itself."""
        with self._lock:
            self._left.setdefault(index, error.text)
            if not self._is_formed or self._failure is not None:
                return
            self._settle_end()
            for call in self._calls:
                if index not in call.values and call.name != END:
                    self._calls.fail(call, error_replies.from_error(self._ended(index)))
            if error.code:
                self._lose(index, f"it has ended with {error.text}")
            else:
                self._tell(messages.GroupNotice("leaving", index, error))

    def _settle_end(self) -> None:
        """Ends the wait at the end of the program if only members that have left are missing."""
        for call in self._calls:
            if call.name == END and set(self._calls.missing(call)) <= set(self._left):
                self._calls.fail(call, error_replies.from_error(self._ended(min(self._left))))

    def _failure_of_left(self, name: str) -> messages.ErrorReply | None:
        if not self._left or name == END:
            return None
        return error_replies.from_error(self._ended(next(iter(self._left))))

    def _ended(self, index: int) -> errors.UnavailableError:
        text = self._left.get(index, "as planned")
        return errors.UnavailableError(
            "All tasks of the group must run the same number of steps",
            f"the program of {self._members.place(index)} has ended ({text})",
            "Remove what makes the tasks differ, such as data that ends earlier.",
        )

    @property
    def everybody_has_left(self) -> bool:
        """Whether all members but the chief have left or are lost."""
        with self._lock:
            gone = set(self._left) | {0}
            return len(gone) == self._members.count or self._failure is not None

    def _lose(self, index: int, reason: str) -> None:
        self._fail(
            "lost",
            index,
            errors.UnavailableError(
                f"All tasks of the group must run: {self._members.place(index)} is one of them",
                f"{reason}; {self._last_activity(index)}",
                "Restart all tasks of the group; they continue from their last checkpoint.",
            ),
        )

    def _last_activity(self, index: int) -> str:
        return f"it was last {self._activities.get(index) or 'starting'}"

    def _fail(
        self, kind: Literal["lost", "differs"], index: int, error: errors.DistributeError
    ) -> None:
        if self._failure is None:
            self._failure = error_replies.from_error(error)
            # First: a thread whose call ends must find the failure in its monitor.
            self._tell(messages.GroupNotice(kind, index, self._failure))
            self._calls.fail_all(self._failure)

    # Periodic work.

    def check(self, now: float) -> None:
        """Checks deadlines and heartbeats; called about ten times per second."""
        with self._lock:
            gap, self._checked = now - self._checked, now
            if gap > self._timing.dead_s / 2:
                # This process was stopped, and could not receive heartbeats meanwhile.
                self._heard = {i: at + gap for i, at in self._heard.items()}
            if not self._is_formed:
                if self._deadline is not None:
                    self._settle_roll_call(now)
                    self._remind(now)
                return
            if self._failure is None:
                self._check_members(now)
            if self._failure is None:
                self._check_calls(now)

    def _check_members(self, now: float) -> None:
        for index in range(1, self._members.count):
            if index in self._left:
                continue
            if not self._is_connected(self._roll_call.incarnations[index]):
                if self._is_gone(index, now):
                    self._lose(index, "its connection is closed: the process has ended")
                    return
                continue
            if now - self._heard[index] > self._timing.dead_s:
                self._lose(
                    index,
                    f"it has not answered for {self._timing.dead_s:g} s: the process is stopped, "
                    "or its host cannot be reached",
                )
                return
            self._disconnected.pop(index, None)

    def _is_gone(self, index: int, now: float) -> bool:
        since = self._disconnected.setdefault(index, now)
        return now - since >= 0.2

    def _check_calls(self, now: float) -> None:
        for call in self._calls:
            if now - call.since > self._arrive_s and call.name != END:
                self._calls.fail(call, error_replies.from_error(self._not_arrived(call)))
            elif now - call.reported > self._timing.report_s and call.name != END:
                call.reported = now
                self._report(call, now)
        self._check_main_threads(now)
        self._check_programs(now)

    def _check_programs(self, now: float) -> None:
        """Reports members that have dispatched fewer programs than others, for some time."""
        behind = self._order.behind()
        position = self._order.position(behind[0]) if behind else -1
        if position != self._behind_at:
            self._behind_at, self._behind_since, self._behind_reported = position, now, now
        if not behind:
            return
        waited, index = now - self._behind_since, behind[0]
        call = self._calls.in_main_threads().get(index)
        if call is not None and call.name == END and waited > 3 * self._timing.beat_s:
            # It will not start them any more.
            self._fail("lost", index, self._ended(index))
            return
        programs = ", ".join(self._program(n) for n in self._order.waiting(index)[:3])
        if waited > self._arrive_s:
            error = errors.DeadlineExceededError(
                f"All tasks of the group must run {programs} within {self._arrive_s:g} s of each "
                "other",
                f"{self._members.names(behind)} did not; {self._last_activity(index)}",
                "Look at its log; a longer time is set by `timeout_seconds` of the communication "
                "options.",
            )
            self._fail("lost", index, error)
        elif now - self._behind_reported > self._timing.report_s:
            self._behind_reported = now
            _log.warning(
                "%s has not started %s for %.0f s, and others wait; %s",
                self._members.place(index),
                programs,
                waited,
                self._last_activity(index),
            )
            self._request_stacks(index)

    def _not_arrived(self, call: Call) -> errors.DeadlineExceededError:
        missing = self._calls.missing(call)
        return errors.DeadlineExceededError(
            f"All tasks of the group must arrive at {call.name!r} within {self._arrive_s:g} s",
            f"{self._members.names(missing)} did not; {self._last_activity(missing[0])}",
            "Look at its log; a longer time is set by `timeout_seconds` of the communication "
            "options.",
        )

    def _report(self, call: Call, now: float) -> None:
        for index in self._calls.missing(call)[:3]:
            _log.warning(
                "%s have waited %.0f s at %r for %s; %s",
                ", ".join(self._members.name(i) for i in sorted(call.values)[:10]),
                now - call.since,
                call.name,
                self._members.place(index),
                self._last_activity(index),
            )
            self._request_stacks(index)

    def _check_main_threads(self, now: float) -> None:
        """Fails if members are in different places, in which they would wait for each other."""
        error = self._differing_calls() or self._overtaken_call()
        if error is None:
            self._differing_since = None
        elif self._differing_since is None:
            self._differing_since = now
        elif now - self._differing_since >= self._timing.differ_s:
            self._fail("differs", -1, error)

    def _differing_calls(self) -> errors.InvalidArgumentError | None:
        calls = self._calls.in_main_threads()
        if len(calls) < self._members.count or len({id(call) for call in calls.values()}) < 2:
            return None
        (one, first), *others = sorted(calls.items(), key=lambda item: item[0])
        other, second = next((i, call) for i, call in others if call is not first)
        return errors.InvalidArgumentError(
            "All tasks of a group must make the same calls in the same order",
            f"{self._members.name(one)} waits at {first.about(one)}, and "
            f"{self._members.name(other)} at {second.about(other)}",
            "Remove what makes the tasks differ, such as a condition on the task.",
        )

    def _overtaken_call(self) -> errors.InvalidArgumentError | None:
        """Returns the error if a member has dispatched a program before a call, others after it."""
        for call in self._calls:
            if call.name == END:
                continue
            for one, (position, _) in call.in_main.items():
                for other in self._calls.missing(call):
                    program = self._order.at(other, position)
                    if program is not None:
                        return errors.InvalidArgumentError(
                            "All tasks of a group must run the same programs in the same order",
                            f"after {position} programs, {self._members.name(one)} waits at "
                            f"{call.about(one)}, and {self._members.name(other)} has run "
                            f"{self._program(program)}",
                            "Remove what makes the tasks differ: a condition on the task, data of "
                            "another shape, an iteration over a set.",
                        )
        return None
