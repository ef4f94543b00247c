"""What the coordinator decides about servers that come back, deadlines and slow closures.

Pure: no threads, no sockets, no clocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_coordinator_policy import FAST, Desk, Shipped, of

from replicax.coordinator.scheduling import actions as act
from replicax.coordinator.scheduling.closures import Closure, State
from replicax.coordinator.scheduling.pool import WorkerState
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from replicax.ps.process import mirror_log


def saved_desk(num_workers: int = 2) -> Desk:
    """A desk whose servers keep snapshots, with workers of incarnations 11, 12, ..."""
    desk = Desk(num_workers)
    for server in desk.policy.servers:
        server.is_saved = True
    for worker in range(num_workers):
        desk.ready(worker, 11 + worker)
    return desk


def lose(desk: Desk, server: int = 1) -> list[Any]:
    return desk.do(desk.servers.lost(server, "the connection was closed", desk.now))


def test_bar21_a_server_that_keeps_snapshots_is_waited_for() -> None:
    desk = saved_desk()
    closures = desk.put(2)
    desk.dispatch()
    actions = lose(desk)
    # Nothing is raised; both incarnations are fenced, at the remaining server.
    assert not of(act.Raise, actions)
    assert of(act.FenceAt, actions) == [act.FenceAt([0], 11), act.FenceAt([0], 12)]
    assert of(act.Release, actions) == [act.Release(0), act.Release(1)], "no process has to end"
    for incarnation in (11, 12):
        desk.do(desk.servers.fence_confirmed(0, incarnation, desk.now))
    assert [c.state for c in closures] == [State.QUEUED, State.QUEUED]
    assert [c.num_deaths for c in closures] == [0, 0], "closures are not blamed"
    # Workers may join again, and get nothing until the server is there.
    desk.ready(0, 21)
    assert desk.dispatch() == {}
    assert lose(desk) == [], "once is enough"


def test_bar21_a_server_is_used_when_it_holds_its_parts_and_knows_who_was_given_up() -> None:
    desk = saved_desk()
    desk.put(1)
    desk.dispatch()
    lose(desk)
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    desk.do(desk.servers.fence_confirmed(0, 12, desk.now))
    desk.ready(0, 21)
    assert desk.do(desk.servers.connected(1, 2001, desk.now)) == [act.Rejoin(1)]
    assert desk.dispatch() == {}
    fences = desk.do(desk.servers.rejoined(1, 2001, desk.now))
    assert fences == [act.FenceAt([1], 11), act.FenceAt([1], 12)]
    assert desk.dispatch() == {}
    desk.do(desk.servers.fence_confirmed(1, 11, desk.now))
    assert desk.dispatch() == {}
    desk.do(desk.servers.fence_confirmed(1, 12, desk.now))
    assert desk.dispatch() == {0: [0]}
    assert desk.policy.servers[1].num_returns == 1


def test_bar20_a_frozen_server_that_wakes_is_asked_before_it_is_used() -> None:
    desk = saved_desk(1)
    desk.put(1)
    lose(desk)
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    desk.now += FAST.beat_s
    assert desk.do(desk.servers.heartbeat(1, desk.now)) == [act.Rejoin(1)]
    assert desk.do(desk.servers.heartbeat(1, desk.now)) == [], "not with every message"
    assert desk.do(desk.servers.rejoined(1, 1001, desk.now)) == [act.FenceAt([1], 11)]


def test_bar23_a_server_that_comes_back_empty_ends_the_job() -> None:
    desk = saved_desk()
    closures = desk.put(1)
    desk.dispatch()
    lose(desk)
    desk.do(desk.servers.connected(1, 2001, desk.now))
    actions = desk.do(desk.servers.lost_variables(1, "part 3 is missing"))
    (raised,) = of(act.Raise, actions)
    assert isinstance(raised.error, errors.PSIncarnationError)
    assert "/job:ps/task:1" in str(raised.error)
    assert "part 3" in str(raised.error)
    assert closures[0].is_settled


def test_a_server_that_does_not_come_back_in_time_is_given_up() -> None:
    desk = saved_desk()
    desk.put(1)
    lose(desk)
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    desk.do(desk.servers.fence_confirmed(0, 12, desk.now))
    assert not of(act.Raise, desk.tick(FAST.return_s - 0.5))
    (raised,) = of(act.Raise, desk.tick(1.0))
    assert isinstance(raised.error, errors.PSUnavailableError)
    assert "/job:ps/task:1" in str(raised.error)
    assert "did not recover in 20 s" in str(raised.error)


def test_waiting_for_a_server_is_not_waiting_for_workers() -> None:
    desk = saved_desk()
    desk.put(1)
    lose(desk)
    assert not of(act.Raise, desk.tick(FAST.no_workers_s + 1.0))


def test_a_fence_that_a_lost_server_owes_does_not_hold_up_others() -> None:
    desk = saved_desk()
    desk.put(2)
    desk.dispatch()
    desk.do(desk.workers.lost(0, "killed", desk.now))
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    assert len(desk.queue) == 0, "server 1 has not confirmed"
    lose(desk)
    assert len(desk.queue) == 1
    assert desk.policy.servers[1].pending_fences == {11, 12}


def test_a_worker_that_reports_a_restarted_server_does_not_end_the_job() -> None:
    desk = saved_desk()
    actions = desk.do(desk.servers.reported_unreachable(0, 1, True, desk.now))
    assert not of(act.Raise, actions)
    assert desk.policy.servers[1].is_away
    assert not desk.policy.servers[1].has_lost_variables


def test_bar30_a_coordinator_that_was_replaced_says_so_at_once() -> None:
    desk = saved_desk()
    closures = desk.put(3)
    desk.dispatch()
    desk.do(desk.workers.lost(0, "killed", desk.now))
    error = errors.FencedError("another one has the job")
    desk.do(desk.policy.job_lost(error))
    assert all(c.is_settled for c in closures)
    assert desk.queue.take_error() is error


@pytest.mark.parametrize("is_saved", [True, False])
def test_bar23_a_server_that_was_restarted_before_it_was_met_is_noticed(is_saved: bool) -> None:
    """The strategy attached another process than the one that the coordinator meets first."""
    desk = saved_desk(1)
    for server in desk.policy.servers:
        server.is_saved = is_saved
    desk.put(1)
    desk.dispatch()
    done = desk.do(desk.servers.restarted(1, desk.now))
    if is_saved:
        assert of(act.Rejoin, done) == [act.Rejoin(1)] and desk.policy.servers[1].is_away
        assert desk.servers.restarted(1, desk.now) == [act.Rejoin(1)], "asked again"
        come_back(desk, 1, (21,))
    else:
        (raised,) = of(act.Raise, done)
        assert isinstance(raised.error, errors.PSIncarnationError)
        assert "/job:ps/task:1" in str(raised.error)
        assert desk.servers.restarted(1, desk.now) == [], "said once"


# Closures that may still be made somewhere.


def give_back(desk: Desk, worker: int, server: int, number: int) -> Closure:
    """A worker gets no answer from a server; what it has sent may be there."""
    incarnation = desk.policy.pool.workers[worker].incarnation
    closure = desk.workers.take_ended(worker, incarnation, number)
    assert closure is not None
    closure.unconfirmed += (incarnation,)
    blamed = desk.servers.reported_unreachable(worker, server, False, desk.now)
    desk.do([*blamed, act.Requeue([closure])])
    return closure


def test_bar9_a_cancelled_closure_is_settled_when_no_server_can_make_it_any_more() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    desk.ready(1, 12)
    desk.put(2)
    assert desk.dispatch() == {0: [0], 1: [1]}
    doubted = give_back(desk, 0, 1, 0)
    failed = desk.workers.take_ended(1, 12, 1)
    assert failed is not None and doubted.state is State.QUEUED
    desk.do([act.Fail(failed, ValueError("bad"), cancels=True)])
    assert not doubted.is_settled and desk.queue.take_error() is None
    assert of(act.FenceAt, desk.tick(0.1, heard=(0, 1))) == [act.FenceAt([0, 1], 11)]
    assert desk.policy.pool.workers[0].state is WorkerState.FENCED, "it begins a new incarnation"
    assert desk.policy.pool.workers[1].state is WorkerState.READY, "it has no unconfirmed updates"
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    assert not of(act.Requeue, desk.tick(0.3, heard=(0, 1))) and not doubted.is_settled
    desk.do(desk.servers.fence_confirmed(1, 11, desk.now))
    desk.tick(0.1, heard=(0, 1))
    assert doubted.state is State.CANCELLED
    assert isinstance(desk.queue.take_error(), ValueError)


def test_bar9_a_fenced_incarnation_leaves_nothing_unconfirmed() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(1)
    desk.dispatch()
    doubted = give_back(desk, 0, 1, 0)
    desk.do(desk.workers.lost(0, "the connection was closed", desk.now))
    desk.acknowledge(11)
    desk.do([act.Raise(ValueError("bad"))])
    desk.tick(0.1)
    assert doubted.state is State.CANCELLED and desk.queue.is_error_ready


def test_bar9_unconfirmed_closures_of_a_silent_server_are_settled() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(1)
    desk.dispatch()
    doubted = give_back(desk, 0, 1, 0)
    desk.do([act.Raise(ValueError("bad"))])
    desk.tick(0.1, heard=(0,))
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    desk.tick(FAST.dead_s + 0.5, heard=(0,))
    assert doubted.is_settled and desk.queue.is_error_ready
    assert desk.servers.lost_server is not None


# Servers that recover without effect.


def come_back(desk: Desk, server: int, incarnations: tuple[int, ...]) -> None:
    """A server answers its next heartbeat; workers attach again with new incarnations."""
    desk.now += FAST.beat_s
    desk.do(desk.servers.heartbeat(server, desk.now))
    incarnation = desk.policy.servers[server].incarnation
    desk.do(desk.servers.rejoined(server, incarnation, desk.now))
    for known in sorted(desk.policy.fencing.fenced):
        desk.acknowledge(known)
    assert desk.policy.servers[server].is_available
    for worker, incarnation in enumerate(incarnations):
        desk.ready(worker, incarnation)
    desk.dispatch()


def blame(desk: Desk, server: int = 1) -> list[Any]:
    """Each worker waits until its timeout, and returns its closure."""
    desk.tick(FAST.data_s, heard=tuple(range(len(desk.policy.pool.workers))))
    done: list[Any] = []
    for worker in desk.policy.pool.workers:
        ids = list(worker.assigned)
        if ids and worker.state is WorkerState.READY:
            closure = desk.workers.take_ended(worker.index, worker.incarnation, ids[0])
            done += desk.servers.reported_unreachable(worker.index, server, False, desk.now)
            done += [act.Requeue([closure])]
            desk.workers.record_finished(worker.index, 0, desk.now)
    desk.do(done)
    desk.dispatch()
    return done


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bar20_a_server_that_is_blamed_again_and_again_while_nothing_ends_is_given_up(
    num_workers: int,
) -> None:
    desk = saved_desk(num_workers)
    desk.put(2)
    desk.dispatch()
    began_s, num_returns, raised = desk.now, 0, []
    while not raised:
        assert desk.now - began_s < 10 * FAST.return_s, "it goes on for ever"
        raised = of(act.Raise, blame(desk))
        if not raised and desk.policy.servers[1].is_away:
            num_returns += 1
            incarnations = tuple(20 * num_returns + w for w in range(num_workers))
            come_back(desk, 1, incarnations)
    assert desk.now - began_s > FAST.return_s
    assert num_returns >= 3
    assert isinstance(raised[0].error, errors.PSUnavailableError)
    assert "/job:ps/task:1" in str(raised[0].error)
    assert f"came back {num_returns} times" in str(raised[0].error)


def test_bar20_a_closure_that_ends_is_progress() -> None:
    desk = saved_desk(2)
    desk.put(100)
    desk.dispatch()
    for incarnation in range(20, 20 + 4 * 10, 2):
        busy = [w for w in desk.policy.pool.workers if w.assigned]
        if busy:
            desk.finish(busy[0].index, next(iter(busy[0].assigned)))
            desk.dispatch()
        assert not of(act.Raise, blame(desk))
        if desk.policy.servers[1].is_away:
            come_back(desk, 1, (incarnation, incarnation + 1))
    assert desk.policy.servers[1].num_returns > 3
    assert desk.now - 100.0 > 2 * FAST.return_s


def test_bar22_a_server_that_gives_its_mirror_everything_may_take_its_time() -> None:
    desk = saved_desk(1)
    desk.put(2)
    desk.dispatch()
    for incarnation in range(20, 40):
        desk.policy.servers[1].counters = {"mirror_state": mirror_log.State.SEEDING}
        assert not of(act.Raise, blame(desk))
        if desk.policy.servers[1].is_away:
            come_back(desk, 1, (incarnation,))
    assert desk.policy.servers[1].num_returns > 3
    assert desk.now - 100.0 > 2 * FAST.return_s


def test_bar20_a_server_that_ends_each_time_it_is_used_is_given_up() -> None:
    desk = saved_desk(1)
    desk.put(1)
    desk.dispatch()
    began_s, incarnation, raised = desk.now, 20, []
    while not raised:
        assert desk.now - began_s < 10 * FAST.return_s, "it goes on for ever"
        raised = of(act.Raise, lose(desk))
        if not raised:
            desk.tick(1.0)
            incarnation += 1
            come_back(desk, 1, (incarnation,))
    assert desk.now - began_s > FAST.return_s
    assert "the connection was closed" in str(raised[0].error)


def test_a_server_may_be_restarted_any_number_of_times_while_nothing_waits() -> None:
    desk = saved_desk(1)
    for incarnation in range(20, 40):
        assert not of(act.Raise, lose(desk))
        come_back(desk, 1, (incarnation,))
        assert not of(act.Raise, desk.tick(FAST.return_s / 4, heard=(0,)))


def alone(desk: Desk, seconds: float, *alone: int, heard: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Lets time pass; some servers say with each beat that their mirror confirms nothing."""
    done: list[Any] = []
    end_s = desk.now + seconds
    while desk.now < end_s:
        desk.now += FAST.beat_s
        for index in heard:
            # Its clock has counted since 40.0.
            figures = {"mirror_unconfirmed_s": desk.now - 40.0 if index in alone else 0.0}
            desk.policy.servers[index].counters = {**figures}
            done += desk.do(desk.servers.heartbeat(index, desk.now))
        desk.policy.pool.workers[0].last_seen_s = desk.now
        done += desk.do(desk.policy.tick(desk.queue, desk.now))
    return done


def test_bar22_a_server_that_is_alone_for_too_long_is_given_up_and_its_mirror_named() -> None:
    desk = saved_desk(1)
    desk.put(1)
    desk.dispatch()
    assert not of(act.Raise, alone(desk, FAST.return_s - 1.0, 0))
    raised, *_ = of(act.Raise, alone(desk, 2.0, 0))
    assert isinstance(raised.error, errors.PSUnavailableError)
    assert "/job:ps/task:0 is lost" in str(raised.error)
    assert "its mirror /job:ps/task:1" in str(raised.error)
    assert len(of(act.Raise, desk.done)) == 1


def test_bar22_a_server_is_not_alone_when_its_mirror_confirms_or_is_waited_for() -> None:
    desk = saved_desk(1)
    for _ in range(3):
        assert not of(act.Raise, alone(desk, FAST.return_s - 1.0, 0))
        alone(desk, FAST.beat_s)
    alone(desk, FAST.return_s - 1.0, 0)
    # The job waits for the mirror itself: that has its own end.
    lose(desk, 1)
    assert not of(act.Raise, alone(desk, FAST.return_s / 2, 0, heard=(0,)))
    come_back(desk, 1, (21,))
    assert not of(act.Raise, alone(desk, FAST.return_s - 1.0, 0)), "it is seeded again"
    assert of(act.Raise, alone(desk, 2.0, 0))


def test_bar22_two_mirrors_that_are_blamed_in_turn_are_still_alone() -> None:
    """Blamed, they are away for a beat; both answer all the time."""
    desk = saved_desk(1)
    raised: list[Any] = []
    began_s, incarnation = desk.now, 20
    while not raised:
        assert desk.now - began_s < 2 * FAST.return_s, "it goes on for ever"
        raised = of(act.Raise, alone(desk, 4.0, 0, 1))
        server = incarnation % 2
        if not raised:
            desk.do(desk.servers._wait_for(desk.policy.servers[server], "blamed", desk.now))
            incarnation += 1
            come_back(desk, server, (incarnation,))
    assert "its mirror" in str(raised[0].error)


# Deadlines.


def test_a_closure_that_runs_past_its_deadline_costs_its_worker() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    closure = Closure(0, Shipped(), deadline_s=1.0)
    desk.queue.put(closure)
    desk.dispatch()
    assert desk.tick(0.9, heard=(0,)) == []
    done = desk.tick(0.3, heard=(0,))
    assert done == [act.FenceAt([0, 1], 11), act.Release(0, is_dead=True)]
    assert closure.num_deaths == 1


def test_bar8_a_closure_that_is_always_late_is_given_up_by_name() -> None:
    desk = Desk(1)
    closure = Closure(0, Shipped(), deadline_s=0.5)
    desk.queue.put(closure)
    for incarnation in (11, 12, 13):
        desk.ready(0, incarnation)
        desk.dispatch()
        desk.tick(0.7, heard=(0,))
        desk.acknowledge(incarnation)
    assert isinstance(closure.error, errors.PoisonClosureError)
    assert "deadline being 0.5 s" in str(closure.error)


# Speculation.


def slow_desk(timing: Timing = FAST) -> tuple[Desk, list[Closure]]:
    """Worker 0 is at a closure for long; worker 1 has ended its own."""
    desk = Desk(2, timing=timing)
    desk.ready(0, 11)
    desk.ready(1, 12)
    closures = desk.put(2)
    assert desk.dispatch() == {0: [0], 1: [1]}
    desk.now += 0.1
    desk.finish(1, 1)
    return desk, closures


def test_bar10_an_idle_worker_runs_what_another_takes_long_for() -> None:
    desk, closures = slow_desk()
    assert desk.policy.pool.speculate(desk.queue, desk.now) == []
    desk.now += 0.1
    assert desk.policy.pool.speculate(desk.queue, desk.now) == [act.Dispatch(1, [closures[0]])]
    assert closures[0].attempt == 1
    desk.now += 1.0
    assert desk.policy.pool.speculate(desk.queue, desk.now) == [], "not a third time"


def test_bar10_nothing_is_copied_while_closures_wait() -> None:
    desk, _ = slow_desk()
    desk.put(1)
    desk.now += 1.0
    assert desk.policy.pool.speculate(desk.queue, desk.now) == []


@pytest.mark.parametrize("first", [0, 1])
def test_bar10_the_first_result_settles_and_the_second_changes_nothing(first: int) -> None:
    desk, closures = slow_desk()
    desk.now += 0.1
    desk.policy.pool.speculate(desk.queue, desk.now)
    incarnations = {0: 11, 1: 12}
    closure = desk.workers.take_ended(first, incarnations[first], 0)
    assert closure is closures[0]
    desk.queue.finish(closure, None)
    assert desk.queue.is_idle
    again = desk.workers.take_ended(1 - first, incarnations[1 - first], 0)
    assert again is closures[0], "the slower worker is busy until it says so"
    assert again.is_settled


def test_bar10_a_closure_with_a_copy_outlives_one_of_its_workers() -> None:
    desk, closures = slow_desk()
    desk.now += 0.1
    desk.policy.pool.speculate(desk.queue, desk.now)
    desk.do(desk.workers.lost(0, "killed", desk.now))
    assert desk.policy.pool.has_other_attempt(closures[0])
    closure = desk.workers.take_ended(1, 12, 0)
    assert closure is not None
    desk.queue.finish(closure, None)
    desk.acknowledge(11)
    assert desk.queue.is_idle
    assert closures[0].state is State.FINISHED
    assert desk.policy.pool.workers[0].state is WorkerState.CONNECTING


@pytest.mark.parametrize("limit", [2, 3], ids=["poison", "runs again"])
def test_bar10_a_closure_whose_workers_are_both_lost_is_free_when_both_are_fenced(
    limit: int,
) -> None:
    desk, closures = slow_desk(dataclasses.replace(FAST, poison_limit=limit))
    desk.now += 0.1
    desk.policy.pool.speculate(desk.queue, desk.now)
    desk.do(desk.workers.lost(0, "killed", desk.now))
    desk.do(desk.workers.lost(1, "killed", desk.now))
    desk.acknowledge(11)
    assert closures[0].state is State.IN_FLIGHT, "servers may still accept updates of worker 1"
    desk.acknowledge(12)
    assert closures[0].state is (State.FAILED if limit == 2 else State.QUEUED)
