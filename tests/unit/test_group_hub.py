"""What the chief of a group decides: roll call, calls, order of programs and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.group.hub import END, Hub
from replicax.group.members import Members
from replicax.group.program_order import ProgramOrder
from replicax.group.timing import GroupTiming
from replicax.protocol import messages

TIMING = GroupTiming.fast()
MEMBERS = Members.of(ClusterSpec({"worker": [f"10.0.0.{i}:2222" for i in range(3)]}))


class Desk:
    """A hub with its surroundings: a clock, connections, replies and notices."""

    def __init__(self) -> None:
        self.now = 100.0
        self.connected = {10, 11, 12}
        self.notices: list[messages.GroupNotice] = []
        self.replies: dict[int, list[tuple[messages.Body, Sequence[bytes]]]] = {0: [], 1: [], 2: []}
        self.stacks: list[int] = []
        self.hub = Hub(
            MEMBERS,
            TIMING,
            10.0,
            is_connected=lambda incarnation: incarnation in self.connected,
            tell=self.notices.append,
            request_stacks=self.stacks.append,
        )
        self.hub.open(TIMING.join_s, self.now)

    def report(self, index: int, incarnation: int | None = None, **changes: object) -> None:
        found = messages.JoinGroup(index, MEMBERS.digest, {"jax": "1"}, f"process {index}")
        found = with_changes(found, changes)
        respond = lambda body, values: self.replies[index].append((body, values))  # noqa: E731
        self.hub.join(found, 10 + index if incarnation is None else incarnation, respond, self.now)

    def form(self) -> None:
        for index in range(3):
            self.report(index)
        assert all(self.replies[i].pop() == (messages.GroupFormed(), ()) for i in range(3))

    def call(
        self, index: int, name: str, number: int = 0, position: int = 0, is_main: bool = True
    ) -> None:
        body = messages.Contribute(name, number, is_main, position)
        respond = lambda body, values: self.replies[index].append((body, values))  # noqa: E731
        self.hub.contribute(index, body, b"%d" % index, respond, self.now)

    def beat(self, index: int, position: int = 0, programs: Sequence[int] = ()) -> None:
        self.hub.beat(index, messages.GroupBeat("busy", position, list(programs)), self.now)

    def pass_time(self, seconds: float, silent: Sequence[int] = ()) -> None:
        """Lets time pass in small steps; all members send heartbeats but for the silent ones."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for index in {0, 1, 2} - set(silent):
                self.hub.beat(index, self.last_beat(index), self.now)
            self.hub.check(self.now)

    def last_beat(self, index: int) -> messages.GroupBeat:
        del index
        return messages.GroupBeat("busy", 0, [])

    def error(self, index: int) -> messages.ErrorReply:
        body = self.replies[index][-1][0]
        assert isinstance(body, messages.GroupFormed | messages.Contributions)
        assert body.error is not None
        return body.error


def with_changes(report: messages.JoinGroup, changes: dict[str, object]) -> messages.JoinGroup:
    fields = {name: getattr(report, name) for name in report.__struct_fields__}
    return messages.JoinGroup(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_roll_call_names_the_missing_at_the_deadline(desk: Desk) -> None:
    desk.report(0)
    desk.report(2)
    desk.pass_time(TIMING.join_s - 1, silent=(0, 1, 2))
    assert not desk.replies[0]
    assert {notice.kind for notice in desk.notices} == {"waiting"}
    assert "/job:worker/task:1 at 10.0.0.1:2222" in desk.notices[-1].error.text
    desk.pass_time(1.5, silent=(0, 1, 2))
    for index in (0, 2):
        assert desk.error(index).code == "DeadlineExceededError"
        assert "/job:worker/task:1" in desk.error(index).text
        assert "task:2" not in desk.error(index).text
    desk.report(1)
    assert desk.error(1).code == "DeadlineExceededError", "a late task gets the same error"


def test_a_restarted_process_replaces_itself_in_the_roll_call(desk: Desk) -> None:
    desk.report(0)
    desk.report(1)
    desk.connected = {10, 12, 21}
    desk.report(1, incarnation=21)
    desk.report(2)
    assert desk.replies[2] == [(messages.GroupFormed(), ())]


def test_two_processes_of_one_task_are_rejected(desk: Desk) -> None:
    desk.connected |= {21}
    desk.report(0)
    desk.report(1)
    desk.report(1, incarnation=21)
    assert all("is two: process 1 and process 1" in desk.error(i).text for i in (0, 1))


def test_a_process_that_has_ended_does_not_count(desk: Desk) -> None:
    desk.report(0)
    desk.report(1)
    desk.connected -= {11}
    desk.report(2)
    assert not desk.replies[2]
    desk.connected |= {31}
    desk.report(1, incarnation=31)
    assert desk.replies[2] == [(messages.GroupFormed(), ())]


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"cluster": "x"}, "InvalidArgumentError"), ({"versions": {"jax": "2"}}, "ProtocolError")],
)
def test_a_task_that_does_not_fit(desk: Desk, changes: dict[str, object], code: str) -> None:
    desk.report(0)
    desk.report(1, **changes)
    assert {desk.error(0).code, desk.error(1).code} == {code}
    assert "/job:worker/task:1" in desk.error(0).text


def test_a_newcomer_may_retry_while_the_group_runs(desk: Desk) -> None:
    desk.form()
    desk.report(1, incarnation=99)
    body = desk.replies[1][-1][0]
    assert isinstance(body, messages.GroupFormed)
    assert body.may_retry
    desk.report(1)
    assert desk.replies[1][-1] == (messages.GroupFormed(), ()), "a repeated request"


def test_calls_are_answered_when_all_have_made_them(desk: Desk) -> None:
    desk.form()
    for index in (0, 2):
        desk.call(index, "a")
    assert not desk.replies[0]
    desk.call(1, "a")
    for index in range(3):
        assert desk.replies[index] == [(messages.Contributions(1), [b"0", b"1", b"2"])]
    desk.call(1, "a")
    assert len(desk.replies[1]) == 2, "a repeated request gets the same reply"
    assert desk.replies[1][0] == desk.replies[1][1]


def test_a_member_that_does_not_arrive_is_reported_and_named(desk: Desk) -> None:
    desk.form()
    for index in (0, 1):
        desk.call(index, "a")
    desk.pass_time(TIMING.report_s + 0.5)
    assert desk.stacks == [2]
    desk.pass_time(10.0)
    assert desk.error(0).code == "DeadlineExceededError"
    assert "/job:worker/task:2 at 10.0.0.2:2222 did not; it was last busy" in desk.error(0).text


def test_main_threads_in_different_calls(desk: Desk) -> None:
    desk.form()
    desk.call(0, "a")
    desk.call(1, "a")
    desk.call(2, "b")
    desk.pass_time(TIMING.differ_s + 0.5)
    for index in range(3):
        assert desk.error(index).code == "InvalidArgumentError"
        assert "task:0 waits at 'a', and /job:worker/task:2 at 'b'" in desk.error(index).text


def test_other_threads_may_wait_in_different_calls(desk: Desk) -> None:
    desk.form()
    for index, name in enumerate("aab"):
        desk.call(index, name, is_main=False)
    desk.pass_time(TIMING.differ_s + 1.0)
    assert not any(desk.replies.values())


def test_a_program_before_a_call_and_after_it(desk: Desk) -> None:
    desk.form()
    desk.hub.name_program(7, "step")
    desk.call(1, "a", position=0)
    desk.beat(0, 0, [7])
    desk.last_beat = lambda index: messages.GroupBeat("busy", 0, [7] if index == 0 else [])  # type: ignore[method-assign]
    desk.pass_time(TIMING.differ_s + 0.5)
    assert desk.error(1).code == "InvalidArgumentError"
    assert "/job:worker/task:1 waits at 'a'" in desk.error(1).text
    assert "/job:worker/task:0 has run 'step'" in desk.error(1).text


def test_a_call_that_others_make_in_time_is_no_difference(desk: Desk) -> None:
    desk.form()
    desk.call(1, "a", position=0)
    desk.pass_time(TIMING.differ_s - 0.5)
    desk.call(0, "a")
    desk.call(2, "a")
    assert isinstance(desk.replies[1][-1][0], messages.Contributions)


def test_programs_in_another_order_are_named(desk: Desk) -> None:
    desk.form()
    desk.hub.name_program(7, "train")
    desk.hub.name_program(8, "evaluate")
    desk.beat(0, 0, [7, 7, 8])
    desk.beat(1, 0, [7, 7])
    assert not desk.notices
    desk.beat(2, 0, [7, 8])
    (notice,) = desk.notices
    assert notice.kind == "differs"
    assert "as program number 2" in notice.error.text
    assert "task:0 ran 'train' and /job:worker/task:2 ran 'evaluate'" in notice.error.text


def test_repeated_and_lost_heartbeats_make_no_difference() -> None:
    order = ProgramOrder(2)
    assert order.add(0, 0, [1, 2]) is None
    assert order.add(0, 0, [1, 2, 3]) is None
    assert order.add(1, 0, [1, 2]) is None
    assert order.position(0) == 3
    assert order.behind() == [1]
    assert order.waiting(1) == [3]
    assert order.add(1, 5, [9]) is None, "what is in between is unknown"
    assert order.add(0, 3, [4]) is None


@pytest.mark.parametrize("index", [1, 2])
def test_a_closed_connection_is_a_lost_member(desk: Desk, index: int) -> None:
    desk.form()
    desk.call(3 - index, "a")
    desk.connected -= {10 + index}
    desk.pass_time(0.5)
    (notice,) = desk.notices
    assert (notice.kind, notice.index) == ("lost", index)
    assert f"/job:worker/task:{index}" in desk.error(3 - index).text


def test_a_connection_that_is_opened_again_is_no_loss(desk: Desk) -> None:
    desk.form()
    desk.connected -= {11}
    desk.pass_time(0.1)
    desk.connected |= {11}
    desk.pass_time(1.0)
    assert not desk.notices


def test_a_silent_member_is_lost_after_some_time(desk: Desk) -> None:
    desk.form()
    desk.pass_time(TIMING.dead_s - 0.3, silent=(2,))
    assert not desk.notices
    desk.pass_time(0.6, silent=(2,))
    assert [notice.index for notice in desk.notices] == [2]
    desk.call(0, "a")
    assert desk.error(0).code == "UnavailableError", "later calls fail at once"


def test_a_chief_that_was_stopped_itself_reports_no_loss(desk: Desk) -> None:
    desk.form()
    desk.hub.check(desk.now)
    desk.now += 60.0
    desk.hub.check(desk.now)
    assert not desk.notices


def test_a_member_that_leaves(desk: Desk) -> None:
    desk.form()
    desk.call(0, "a")
    desk.hub.leave(1, messages.ErrorReply("", "as planned"))
    assert "the program of /job:worker/task:1" in desk.error(0).text
    assert [notice.kind for notice in desk.notices] == ["leaving"]
    desk.call(2, END)
    assert not desk.replies[2], "the end is not an error"
    desk.hub.leave(0, messages.ErrorReply("", "as planned"))
    assert desk.replies[2], "nothing is left to wait for"


def test_a_member_that_ends_with_an_error(desk: Desk) -> None:
    desk.form()
    desk.hub.leave(2, messages.ErrorReply("Error", "ValueError: no"))
    (notice,) = desk.notices
    assert (notice.kind, notice.index) == ("lost", 2)
    assert "it has ended with ValueError: no" in notice.error.text


def test_members_of_a_cluster() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="an evaluator uses a strategy"):
        MEMBERS.index_of("evaluator", 0)
    with pytest.raises(errors.InvalidArgumentError, match="must have the job 'worker'"):
        Members.of(ClusterSpec({"ps": ["a:1"]}))
    other = Members.of(ClusterSpec({"worker": ["10.0.0.0:2222"]}))
    assert other.digest != MEMBERS.digest
    assert dataclasses.replace(MEMBERS).digest == MEMBERS.digest


def test_bar31_members_know_of_a_failure_before_their_calls_end(desk: Desk) -> None:
    """Otherwise the thread that gets the error is not known to have got that of the group."""
    desk.form()
    known: list[int] = []
    respond = lambda body, values: known.append(len(desk.notices))  # noqa: E731
    desk.hub.contribute(0, messages.Contribute("step", 0, True, 0), b"", respond, desk.now)
    desk.connected -= {11}
    desk.pass_time(TIMING.dead_s + 1, silent=(1,))
    assert known == [1]
    assert desk.notices[0].kind == "lost"
