"""What the coordinator decides, without threads, sockets or clocks; and long random histories."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from replicax.coordinator.scheduling import actions as act
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue, State
from replicax.coordinator.scheduling.fencing import Fencing
from replicax.coordinator.scheduling.policy import Policy
from replicax.coordinator.scheduling.pool import DEFAULT_LIMIT, WorkerState
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors

FAST = Timing.fast()


@dataclasses.dataclass
class Shipped:
    sha: str = "f"
    buffers: tuple[Any, ...] = ()


class Desk:
    """A policy and a queue, with actions on the queue carried out and all of them kept."""

    def __init__(self, num_workers: int, num_servers: int = 2, timing: Timing = FAST) -> None:
        self.now = 100.0
        self.policy = Policy(num_workers, num_servers, timing, self.now)
        self.workers, self.servers = self.policy.worker_policy, self.policy.server_policy
        self.queue = ClosureQueue()
        self.done: list[Any] = []
        self.next_id = 0
        for server in range(num_servers):
            self.do(self.policy.server_policy.connected(server, 1000 + server, self.now))

    def do(self, actions: list[Any]) -> list[Any]:
        for action in actions:
            self.done.append(action)
            match action:
                case act.Requeue(closures):
                    self.queue.requeue(closures)
                case act.Fail(closure, error, cancels):
                    self.queue.fail(closure, error, cancels=cancels)
                case act.Abandon(closures, error):
                    for closure in closures:
                        self.queue.abandon(closure, error)
                case act.Raise(error):
                    self.queue.report(error)
        return actions

    def put(self, count: int) -> list[Closure]:
        closures = [Closure(self.next_id + i, Shipped()) for i in range(count)]
        self.next_id += count
        for closure in closures:
            self.queue.put(closure)
        return closures

    def ready(self, worker: int, incarnation: int) -> None:
        assert act.RequestAttach(worker) in self.do(
            self.policy.worker_policy.connected(worker, incarnation, self.now)
        )
        self.policy.worker_policy.attached(worker, self.now)

    def dispatch(self) -> dict[int, list[int]]:
        actions = self.do(self.policy.pool.dispatch(self.queue, self.now))
        return {a.worker: [c.id for c in a.closures] for a in actions}

    def finish(self, worker: int, *ids: int) -> None:
        incarnation = self.policy.pool.workers[worker].incarnation
        for number in ids:
            closure = self.policy.worker_policy.take_ended(worker, incarnation, number)
            assert closure is not None
            self.queue.finish(closure, None)
        self.policy.worker_policy.record_finished(worker, len(ids), self.now)

    def acknowledge(self, incarnation: int) -> None:
        for server in range(len(self.policy.servers)):
            self.do(self.policy.server_policy.fence_confirmed(server, incarnation, self.now))

    def tick(self, seconds: float, *, heard: tuple[int, ...] = ()) -> list[Any]:
        """Lets time pass in steps; the servers, and the workers `heard`, answer."""
        done = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.1, end)
            for server in self.policy.servers:
                server.last_seen_s = self.now
            for worker in heard:
                self.policy.pool.workers[worker].last_seen_s = self.now
            done += self.do(self.policy.tick(self.queue, self.now))
        return done


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [a for a in actions if isinstance(a, kind)]


# Who gets what.


def test_S184_short_queue_is_shared_fairly() -> None:
    desk = Desk(3)
    for worker in range(3):
        desk.ready(worker, worker + 1)
    desk.put(3)
    assert desk.dispatch() == {0: [0], 1: [1], 2: [2]}
    desk.put(1)
    assert desk.dispatch() == {0: [3]}


def test_quick_closures_fill_a_window_that_is_refilled_at_half() -> None:
    desk = Desk(1)
    desk.ready(0, 1)
    desk.put(40)
    assert len(desk.dispatch()[0]) == 2, "before the first result a worker may be compiling"
    desk.now += 0.001
    desk.finish(0, 0, 1)
    assert len(desk.dispatch()[0]) == DEFAULT_LIMIT
    desk.now += 0.001
    desk.finish(0, 2, 3, 4)
    assert desk.dispatch() == {}
    desk.finish(0, 5)
    assert len(desk.dispatch()[0]) == DEFAULT_LIMIT // 2


@pytest.mark.parametrize(("seconds", "limit"), [(1e-5, 64), (0.0005, 19), (0.01, DEFAULT_LIMIT)])
def test_a_worker_with_quick_closures_gets_as_many_as_take_a_while(
    seconds: float, limit: int
) -> None:
    desk = Desk(1)
    desk.ready(0, 1)
    desk.put(1000)
    desk.dispatch()
    for closure in range(100):
        desk.now += seconds
        desk.finish(0, closure)
        desk.dispatch()
    assert desk.policy.pool.workers[0].limit == pytest.approx(limit, abs=1)


@pytest.mark.parametrize(("seconds", "limit"), [(0.01, DEFAULT_LIMIT), (0.2, 2), (3.0, 1)])
def test_bar10_long_closures_are_not_hoarded(seconds: float, limit: int) -> None:
    desk = Desk(1)
    desk.ready(0, 1)
    desk.put(100)
    desk.dispatch()
    desk.now += seconds
    desk.finish(0, 0)
    desk.now += seconds
    desk.finish(0, 1)
    assert len(desk.dispatch()[0]) == limit


def test_bar10_idle_workers_get_what_a_slow_one_has_not_started() -> None:
    desk = Desk(2)
    desk.ready(0, 1)
    desk.put(2)
    assert desk.dispatch() == {0: [0, 1]}
    desk.ready(1, 2)
    assert desk.policy.pool.rebalance(desk.queue, desk.now) == [], "it has only just begun"
    desk.now += 0.1
    assert desk.policy.pool.rebalance(desk.queue, desk.now) == [act.Recall(0, [1])]
    assert desk.policy.pool.rebalance(desk.queue, desk.now) == [], "it was asked already"
    closure = desk.workers.take_ended(0, 1, 1)
    assert closure is not None
    desk.queue.requeue([closure])
    desk.workers.record_finished(0, 0, desk.now)
    assert desk.dispatch() == {1: [1]}


def test_T99_pinned_closures_go_to_their_worker_before_closures_and_do_not_count() -> None:
    desk = Desk(2)
    desk.put(1)
    pinned = Closure(7, Shipped(), pin=1)
    desk.policy.pool.workers[1].pinned_closures.append(pinned)
    desk.ready(0, 1)
    assert desk.dispatch() == {0: [0]}
    desk.ready(1, 2)
    assert desk.dispatch() == {1: [7]}
    assert list(desk.queue.in_flight) == [0]


# Lost workers.


def test_T111_closures_of_a_lost_worker_move_only_after_every_server_confirmed() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    closures = desk.put(2)
    desk.dispatch()
    desk.ready(1, 12)
    actions = desk.do(desk.workers.lost(0, "gone", desk.now))
    assert actions == [act.FenceAt([0, 1], 11)]
    assert desk.dispatch() == {}
    assert desk.do(desk.servers.fence_confirmed(0, 11, desk.now)) == []
    assert desk.dispatch() == {}
    assert desk.do(desk.servers.fence_confirmed(1, 11, desk.now)) == [act.Requeue(closures)]
    assert desk.dispatch() == {1: [0]}, "one that may have ended a worker runs alone"
    desk.finish(1, 0)
    assert desk.dispatch() == {1: [1]}
    assert closures[0].attempt == 1


def test_bar5_results_of_a_life_that_was_given_up_are_ignored() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(1)
    desk.dispatch()
    desk.do(desk.workers.lost(0, "gone", desk.now))
    assert desk.workers.take_ended(0, 11, 0) is None
    desk.acknowledge(11)
    desk.ready(0, 12)
    desk.dispatch()
    assert desk.workers.take_ended(0, 11, 0) is None
    assert desk.workers.take_ended(0, 12, 0) is not None


def test_bar4_a_silent_worker_is_fenced_and_released() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    desk.ready(1, 12)
    desk.put(2)
    desk.dispatch()
    done = desk.tick(FAST.dead_s - 0.2, heard=(1,))
    assert done == []
    done = desk.tick(0.5, heard=(1,))
    assert done == [act.FenceAt([0, 1], 11), act.Release(0, is_dead=True)]
    assert desk.policy.pool.workers[0].state is WorkerState.FENCED
    # The same incarnation comes back: it is of no use, and is told so again.
    assert desk.do(desk.workers.connected(0, 11, desk.now)) == [act.Release(0)]
    assert act.RequestAttach(0) in desk.do(desk.workers.connected(0, 13, desk.now))


def test_bar11_no_task_is_lost_because_the_coordinator_was_busy() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.now += 30.0
    assert desk.do(desk.policy.tick(desk.queue, desk.now)) == []
    assert desk.policy.pool.workers[0].state is WorkerState.READY
    assert of(act.FenceAt, desk.tick(FAST.dead_s + 0.3)), "but then silence counts again"


def test_T113_a_worker_whose_connection_broke_shortly_gets_everything_again() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(1)
    desk.dispatch()
    assert desk.do(desk.workers.connected(0, 11, desk.now)) == [act.Resend(0)]
    assert list(desk.policy.pool.workers[0].assigned) == [0]
    actions = desk.do(desk.workers.connected(0, 12, desk.now))
    assert actions == [act.FenceAt([0, 1], 11), act.RequestAttach(0)]


def test_bar16_what_was_lost_on_the_way_is_said_again() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(2)
    desk.dispatch()
    assert desk.workers.heartbeat(0, True) == [], "its results may be on the way"
    assert desk.workers.heartbeat(0, False) == []
    assert desk.workers.heartbeat(0, True) == []
    desk.finish(0, 0)
    assert desk.workers.heartbeat(0, True) == [], "something came"
    assert desk.workers.heartbeat(0, True) == [act.Resend(0)]
    desk.finish(0, 1)
    for _ in range(3):
        assert desk.workers.heartbeat(0, True) == []


def test_bar8_a_closure_that_ends_three_workers_is_not_tried_again() -> None:
    desk = Desk(1)
    closures = desk.put(2)
    for incarnation, given in ((11, [0, 1]), (12, [0]), (13, [0])):
        desk.ready(0, incarnation)
        assert desk.dispatch() == {0: given}
        # Its results would be here by now.
        desk.now += 1.0
        desk.do(desk.workers.lost(0, "gone", desk.now))
        desk.acknowledge(incarnation)
    assert isinstance(closures[0].error, errors.PoisonClosureError)
    assert "Closure 0" in str(closures[0].error)
    assert closures[1].num_deaths == 0, "only the first of the window can be to blame"
    desk.ready(0, 14)
    assert desk.dispatch() == {0: [1]}
    desk.finish(0, 1)
    assert isinstance(desk.queue.take_error(), errors.PoisonClosureError)


@pytest.mark.parametrize("poison", [0, 1])
def test_bar8_a_worker_that_has_not_reported_may_have_been_at_any_closure(poison: int) -> None:
    desk = Desk(1)
    closures = desk.put(3)
    lost = 0
    for incarnation in range(11, 20):
        desk.ready(0, incarnation)
        while given := desk.dispatch().get(0):
            assert len(given) == 1 or incarnation == 11, "suspects run alone"
            if poison in given:
                # What it has finished before is not reported.
                lost += 1
                desk.do(desk.workers.lost(0, "gone", desk.now))
                desk.acknowledge(incarnation)
                break
            desk.finish(0, *given)
    assert lost == 3, "the first loss counts for all that it may have come from"
    assert isinstance(closures[poison].error, errors.PoisonClosureError)
    assert [c.state for c in closures].count(State.FINISHED) == 2


def test_bar8_only_the_first_suspect_reaches_the_limit() -> None:
    desk = Desk(1, timing=dataclasses.replace(FAST, poison_limit=1))
    closures = desk.put(2)
    desk.ready(0, 11)
    assert desk.dispatch() == {0: [0, 1]}
    desk.do(desk.workers.lost(0, "gone", desk.now))
    desk.acknowledge(11)
    assert isinstance(closures[0].error, errors.PoisonClosureError)
    assert closures[1].state is State.QUEUED


def test_bar6_closures_that_wait_too_long_for_a_worker_end_in_an_error() -> None:
    desk = Desk(2)
    assert desk.tick(2 * FAST.no_workers_s) == [], "nothing waits"
    closures = desk.put(2)
    assert desk.tick(FAST.no_workers_s - 0.2) == []
    (raised,) = desk.tick(0.5)
    assert isinstance(raised.error, errors.NoWorkersError)
    assert "/job:worker/task:1" in str(raised.error)
    assert [c.state for c in closures] == [State.CANCELLED] * 2
    assert desk.queue.take_error() is raised.error


def test_bar9_what_runs_too_long_after_an_error_is_fenced_and_aborted() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    desk.ready(1, 12)
    closures = desk.put(2)
    desk.dispatch()
    closure = desk.workers.take_ended(0, 11, 0)
    assert closure is not None
    desk.do([act.Fail(closure, ValueError("bad"), cancels=True)])
    assert desk.tick(FAST.cancel_s - 0.2, heard=(0, 1)) == []
    done = desk.tick(0.5, heard=(0, 1))
    assert done == [act.FenceAt([0, 1], 12), act.Release(1, is_dead=True)]
    assert desk.queue.take_error() is None, "until the servers have confirmed"
    desk.acknowledge(12)
    assert isinstance(closures[1].error, errors.ClosureAbortedError)
    assert isinstance(desk.queue.take_error(), ValueError)


# Lost servers.


def test_T118_two_reports_about_a_server_are_transient_and_the_third_is_fatal() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    desk.ready(1, 12)
    assert desk.servers.reported_unreachable(0, 1, False, desk.now) == []
    assert desk.servers.reported_unreachable(0, 1, False, desk.now) == [], "the same blip, again"
    desk.now += 1
    assert desk.servers.reported_unreachable(0, 1, False, desk.now) == []
    desk.now += 1
    assert desk.servers.reported_unreachable(1, 0, False, desk.now) == [], "another server"
    (raised,) = desk.do(desk.servers.reported_unreachable(1, 1, False, desk.now))
    assert isinstance(raised.error, errors.PSUnavailableError)
    assert "/job:ps/task:1" in str(raised.error)
    assert desk.servers.lost_server is desk.policy.servers[1]


def test_T118_reports_grow_old() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    for _ in range(10):
        assert desk.servers.reported_unreachable(0, 1, False, desk.now) == []
        desk.now += FAST.blame_s / 2 + 0.1


def test_T118_one_worker_alone_is_not_believed_but_rested() -> None:
    desk = Desk(2)
    desk.ready(0, 11)
    desk.ready(1, 12)
    for _ in range(4):
        assert desk.servers.reported_unreachable(0, 1, False, desk.now) == []
        desk.now += 1
    desk.put(4)
    assert list(desk.dispatch()) == [1]


def test_T118_the_only_worker_is_believed() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    outcomes = []
    for _ in range(3):
        outcomes.append(desk.servers.reported_unreachable(0, 1, False, desk.now))
        desk.now += 1
    assert outcomes[:2] == [[], []]
    assert isinstance(of(act.Raise, outcomes[2])[0].error, errors.PSUnavailableError)


def test_T114_the_coordinators_own_loss_of_a_server_is_fatal_at_once() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    closures = desk.put(3)
    desk.dispatch()
    actions = desk.do(desk.servers.lost(1, "the connection was closed", desk.now))
    assert [type(a) for a in actions] == [act.Raise, act.Abandon]
    assert desk.queue.is_error_ready, "nothing is waited for"
    assert isinstance(closures[0].error, errors.ClosureAbortedError)
    assert isinstance(closures[2].error, errors.CancelledError)
    assert desk.servers.lost(1, "again", desk.now) == []


def test_T114_a_server_killed_while_a_worker_is_fenced_gives_an_error_and_no_hang() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.put(1)
    desk.dispatch()
    desk.do(desk.workers.lost(0, "gone", desk.now))
    desk.do(desk.servers.fence_confirmed(0, 11, desk.now))
    actions = desk.do(desk.servers.lost(1, "gone", desk.now))
    assert isinstance(actions[0].error, errors.PSUnavailableError)
    assert desk.queue.is_error_ready
    # It comes back with its variables: it learns first whom to refuse.
    assert desk.do(desk.servers.connected(1, 1001, desk.now)) == [act.FenceAt([1], 11)]
    assert desk.servers.lost_server is None


def test_bar20_a_silent_server_and_one_that_does_not_fence_are_lost() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.now += 0.1
    desk.do(desk.policy.tick(desk.queue, desk.now))
    desk.do(desk.workers.lost(0, "gone", desk.now))
    desk.do(desk.servers.fence_confirmed(1, 11, desk.now))
    raised = of(act.Raise, desk.tick(FAST.dead_s + 0.3))
    assert len(raised) == 1 and "/job:ps/task:0" in str(raised[0].error)
    assert "fence" in str(raised[0].error)


def test_bar22_a_server_without_its_variables_is_never_used() -> None:
    desk = Desk(1)
    desk.ready(0, 11)
    desk.do(desk.servers.lost(0, "gone", desk.now))
    actions = desk.do(desk.servers.connected(0, 2000, desk.now))
    assert isinstance(actions[0].error, errors.PSIncarnationError)
    desk.do(desk.servers.connected(0, 2000, desk.now))
    broken = desk.servers.lost_server
    assert broken is not None
    assert isinstance(broken.error(), errors.PSIncarnationError)
    (raised,) = of(act.Raise, Desk(1).policy.server_policy.reported_unreachable(0, 1, True, 0.0))
    assert isinstance(raised.error, errors.PSIncarnationError)


# The constants.


def test_timing_profiles_and_their_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Timing.from_environment() == Timing()
    monkeypatch.setenv("REPLICAX_TIMING", "fast")
    assert Timing.from_environment() == Timing.fast()
    monkeypatch.setenv("REPLICAX_TIMING", "slow")
    with pytest.raises(errors.InvalidArgumentError, match="REPLICAX_TIMING"):
        Timing.from_environment()
    with pytest.raises(errors.InvalidArgumentError, match="positive"):
        Timing(cancel_s=0)
    with pytest.raises(errors.InvalidArgumentError, match="miss a heartbeat"):
        Timing(beat_s=1, dead_s=1)


def test_T118_reports_of_a_worker_that_waits_each_time_count_together() -> None:
    for timing in (Timing(), FAST):
        desk = Desk(1, timing=timing)
        desk.ready(0, 11)
        raised: list[Any] = []
        for _ in range(3):
            # It waits for an answer, and takes a while to say so.
            desk.now += timing.data_s + timing.beat_s
            raised += of(act.Raise, desk.servers.reported_unreachable(0, 1, False, desk.now))
        assert len(raised) == 1
    with pytest.raises(errors.InvalidArgumentError, match="`blame_s` is at least twice `data_s`"):
        Timing(data_s=60.0, blame_s=119.0)
    assert Timing(data_s=60.0, blame_s=120.0).blame_s == 120.0


# Long random histories.


class Sim:
    """Workers and servers that crash, stall, lose and repeat messages, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        # With many deaths a good closure may look like a bad one.
        timing = dataclasses.replace(FAST, poison_limit=10_000)
        self.desk = Desk(num_workers=self.random.randint(1, 4), timing=timing)
        self.queue, self.policy = self.desk.queue, self.desk.policy
        self.pool = self.policy.pool
        self.incarnations = iter(range(1, 1_000_000))
        # The incarnation of each worker, None while it is down, and its closures.
        self.running: list[int | None] = [None] * len(self.pool.workers)
        self.todo: list[list[int]] = [[] for _ in self.pool.workers]
        self.wire: list[tuple[Any, ...]] = []
        self.fences: list[set[int]] = [set(), set()]
        # Which incarnation made a closure's update count, at each server.
        self.effects: dict[tuple[int, int], int] = {}
        self.results: dict[int, int] = {}
        self.released: set[int] = set()

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case act.Requeue(closures) | act.Abandon(closures, _):
                    for closure in closures:
                        incarnation = self.given[closure.id]
                        # See Note [Fence before requeue].
                        assert all(incarnation in fences for fences in self.fences)
                case act.Dispatch(worker, closures):
                    incarnation = self.pool.workers[worker].incarnation
                    for closure in closures:
                        self.given[closure.id] = incarnation
                    self.wire.append(("run", worker, incarnation, [c.id for c in closures]))
                case act.Resend(worker):
                    state = self.pool.workers[worker]
                    self.wire.append(("run", worker, state.incarnation, list(state.assigned)))
                case act.RequestAttach(worker):
                    self.wire.append(("attach", worker, self.pool.workers[worker].incarnation))
                case act.Release(worker):
                    self.released.add(self.pool.workers[worker].incarnation)
                case act.FenceAt(servers, incarnation):
                    self.wire += [("fence", server, incarnation) for server in servers]
                case act.Recall(worker, ids):
                    incarnation = self.pool.workers[worker].incarnation
                    self.wire.append(("cancel", worker, incarnation, ids))
        self.desk.do(actions)

    given: dict[int, int]

    def run(self, num_closures: int) -> None:
        self.given = {}
        closures = self.desk.put(num_closures)
        for step in range(20_000):
            if self.queue.is_idle:
                break
            # Faults end at some time, or nothing would.
            self.step(is_faulty=step < 2_000)
        assert self.queue.is_idle, "closures were lost"
        assert [c.state for c in closures] == [State.FINISHED] * num_closures
        assert self.results == dict.fromkeys(range(num_closures), 1)
        assert set(self.effects) == {(s, c) for s in range(2) for c in range(num_closures)}
        assert self.queue.take_error() is None

    def step(self, is_faulty: bool) -> None:
        rng, desk = self.random, self.desk
        desk.now += rng.choice([0.0, 0.001, 0.01, 0.05])
        for server in self.policy.servers:
            server.last_seen_s = desk.now
        for worker in self.pool.workers:
            worker.last_seen_s = desk.now
        worker = rng.randrange(len(self.running))
        choice = rng.random()
        if is_faulty and choice < 0.04:
            self.crash(worker)
        elif is_faulty and choice < 0.06 and self.running[worker] is not None:
            self.break_connection(worker)
        elif is_faulty and choice < 0.08:
            self.declare_dead(worker)
        elif choice < 0.2 and self.running[worker] is None:
            self.start(worker)
        elif choice < 0.3:
            self.carry_out(self.policy.tick(self.queue, desk.now))
            self.carry_out(self.pool.rebalance(self.queue, desk.now))
            self.carry_out(self.pool.dispatch(self.queue, desk.now))
        elif choice < 0.6 and self.wire:
            self.deliver(is_faulty)
        else:
            self.compute(worker)

    def start(self, worker: int) -> None:
        incarnation = self.running[worker] = next(self.incarnations)
        self.carry_out(self.policy.worker_policy.connected(worker, incarnation, self.desk.now))

    def crash(self, worker: int) -> None:
        if self.running[worker] is not None:
            self.running[worker], self.todo[worker] = None, []
            self.carry_out(self.policy.worker_policy.lost(worker, "crashed", self.desk.now))

    def break_connection(self, worker: int) -> None:
        incarnation = self.running[worker]
        assert incarnation is not None
        self.wire = [m for m in self.wire if m[0] == "fence" or m[1] != worker]
        self.carry_out(self.policy.worker_policy.connected(worker, incarnation, self.desk.now))

    def declare_dead(self, worker: int) -> None:
        """The worker runs, but sends nothing: a zombie that continues its closures."""
        state = self.pool.workers[worker]
        if state.state is WorkerState.READY:
            state.last_seen_s = self.desk.now - 100
            self.policy._last_tick_s = self.desk.now
            self.carry_out(self.policy.tick(self.queue, self.desk.now))

    def compute(self, worker: int) -> None:
        incarnation = self.running[worker]
        if incarnation is None:
            return
        if incarnation in self.released and self.random.random() < 0.2:
            # It is released at last, and begins a new incarnation.
            self.todo[worker] = []
            self.carry_out(self.policy.worker_policy.lost(worker, "restarted", self.desk.now))
            self.start(worker)
            return
        if not self.todo[worker]:
            return
        closure = self.todo[worker].pop(0)
        for server, fences in enumerate(self.fences):
            if incarnation in fences:
                return
            # The servers' own table of updates: the first arrival wins.
            self.effects.setdefault((server, closure), incarnation)
        self.wire.append(("finished", worker, incarnation, [closure]))

    def deliver(self, is_faulty: bool) -> None:
        # In order for each pair of tasks; pairs are independent.
        index = self.random.randrange(len(self.wire))
        kind, task = self.wire[index][:2]
        index = next(i for i, m in enumerate(self.wire) if m[:2] == (kind, task))
        message = self.wire[index]
        if not (is_faulty and self.random.random() < 0.1):
            # Else it is delivered again later.
            del self.wire[index]
        now = self.desk.now
        if kind == "fence":
            self.fences[task].add(message[2])
            self.carry_out(self.policy.server_policy.fence_confirmed(task, message[2], now))
        elif kind == "finished":
            self.take_results(message)
        elif self.running[task] != message[2]:
            return
        elif kind == "attach":
            self.policy.worker_policy.attached(task, now)
            self.carry_out(self.pool.dispatch(self.queue, now))
        elif kind == "run":
            known = self.todo[task]
            known += [c for c in message[3] if c not in known]
        elif kind == "cancel":
            dropped = [c for c in message[3] if c in self.todo[task]]
            for closure in dropped:
                self.todo[task].remove(closure)
                taken = self.policy.worker_policy.take_ended(task, message[2], closure)
                if taken is not None:
                    self.queue.requeue([taken])
            self.policy.worker_policy.record_finished(task, 0, now)

    def take_results(self, message: tuple[Any, ...]) -> None:
        _, worker, incarnation, ids = message
        for number in ids:
            closure = self.policy.worker_policy.take_ended(worker, incarnation, number)
            if closure is not None:
                self.queue.finish(closure, None)
                self.results[number] = self.results.get(number, 0) + 1
        self.policy.worker_policy.record_finished(worker, len(ids), self.desk.now)
        self.carry_out(self.pool.dispatch(self.queue, self.desk.now))


@pytest.mark.parametrize("seed", range(40))
def test_bar1_every_closure_finishes_once_in_any_history(seed: int) -> None:
    sim = Sim(seed)
    sim.run(num_closures=60)


def test_bar1_the_histories_contain_faults() -> None:
    attempts = restarts = 0
    for seed in range(10):
        sim = Sim(seed)
        sim.run(num_closures=60)
        restarts += sum(w.num_restarts for w in sim.pool.workers)
        attempts += len(set(sim.effects.values()))
    assert restarts > 50 and attempts > 100


def test_bar54_without_waiting_for_fences_the_histories_go_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Fencing.fence

    def hasty(self: Fencing, *args: Any, **kwargs: Any) -> list[Any]:
        actions = original(self, *args, **kwargs)
        for fence in list(self.pending.values()):
            actions += self._complete(fence)
        return actions

    monkeypatch.setattr(Fencing, "fence", hasty)
    failed = 0
    for seed in range(10):
        try:
            Sim(seed).run(num_closures=60)
        except AssertionError:
            failed += 1
    assert failed
