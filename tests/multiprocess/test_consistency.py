"""How workers train together: what may run at a time, gradients that wait, measured staleness."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, becomes, own_cluster
from parameter_store_client import Caller, exported, open_rows

import replicax as rx
from replicax.contexts.overlay import Change
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue
from replicax.coordinator.scheduling.pacing import BoundedStaleness, Rounds
from replicax.coordinator.scheduling.pool import WorkerPool, WorkerState
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.client.variable_client import ParameterClient
from replicax.ps.store.accumulation import Accumulation, StepClock
from replicax.variables.remote import Read

APPLY = messages.Apply
GRADIENT = messages.Gradient


# The strategy's arguments.


def resolver(workers: int = 2) -> Any:
    spec = rx.train.ClusterSpec(
        {"ps": ["localhost:1"], "worker": [f"localhost:{2 + i}" for i in range(workers)]}
    )
    return rx.cluster_resolver.SimpleClusterResolver(spec)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"consistency": "eventual"}, "'eventual'"),
        ({"consistency": None}, "it is None"),
        ({"consistency": 3}, "it is 3"),
        ({"backup_workers": 1}, "consistency='async'"),
        ({"backup_workers": 1, "consistency": rx.Staleness(2)}, "Staleness"),
        ({"backup_workers": 2, "consistency": "sync"}, "it is 2 of 2"),
        ({"backup_workers": -1, "consistency": "sync"}, "it is -1"),
        ({"backup_workers": True, "consistency": "sync"}, "it is True"),
        ({"pull_ahead": True, "consistency": "sync"}, "pull_ahead=True"),
        ({"pull_ahead": True, "consistency": rx.Staleness(9)}, "pull_ahead=True"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_early(options: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        rx.ParameterServerStrategy(resolver(), **options)


@pytest.mark.parametrize("bound", [-1, 1.5, True, "3", None])
def test_a_bound_is_a_number_of_steps(bound: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="bound"):
        rx.Staleness(bound)


# Who may run when, without threads, sockets or clocks.


@dataclasses.dataclass
class Result:
    has_stepped: bool = True


class Table:
    """Workers, servers with clocks, and a queue: a job whose order of events a test chooses."""

    def __init__(self, num_workers: int, pacing: Any, num_servers: int = 2) -> None:
        self.queue = ClosureQueue()
        self.pool = WorkerPool(num_workers, 0.0)
        self.pool.set_pacing(pacing)
        for worker in self.pool.workers:
            worker.state = WorkerState.READY
            self.pool.update(worker)
        self.clocks = [0] * num_servers
        # By closure and server: the clock when it read. By server: the closures it knows.
        self.reads: dict[tuple[int, int], int] = {}
        self.applied: list[set[int]] = [set() for _ in range(num_servers)]
        self.staleness: list[int] = []
        self.next_id = 1

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            self.queue.put(Closure(self.next_id, None))  # type: ignore[arg-type]
            self.next_id += 1

    def dispatch(self) -> dict[int, int]:
        """Hands closures out; returns which worker got which."""
        given: dict[int, int] = {}
        for action in self.pool.dispatch(self.queue, 0.0):
            assert len(action.closures) == 1 and action.worker not in given  # type: ignore[union-attr]
            given[action.worker] = action.closures[0].id  # type: ignore[union-attr]
        return given

    def running(self) -> list[tuple[int, Closure]]:
        return [(w.index, c) for w in self.pool.workers for c in w.assigned.values()]

    def read(self, closure: Closure, server: int) -> None:
        self.reads.setdefault((closure.id, server), self.clocks[server])

    def apply(self, closure: Closure, server: int) -> None:
        """As a server does it: each closure once."""
        self.read(closure, server)
        if closure.id not in self.applied[server]:
            self.applied[server].add(closure.id)
            self.staleness.append(self.clocks[server] - self.reads[closure.id, server])
            self.clocks[server] += 1

    def finish(self, worker: int, *, has_stepped: bool = True) -> None:
        """The worker's closure reaches its end, as far as it has not, and is settled."""
        (closure,) = self.pool.workers[worker].assigned.values()
        for server in range(len(self.clocks) if has_stepped else 0):
            self.apply(closure, server)
        self.leave(worker)
        self.queue.finish(closure, (Result(has_stepped), ()))

    def lose(self, worker: int) -> None:
        """The worker goes, and a new incarnation of it comes; its closure is put back."""
        (closure,) = self.pool.workers[worker].assigned.values()
        self.leave(worker)
        for server in range(len(self.clocks)):
            self.reads.pop((closure.id, server), None)
        self.queue.requeue([closure])

    def leave(self, index: int) -> None:
        worker = self.pool.workers[index]
        worker.assigned.clear()
        self.pool.update(worker)


def random_history(bound: int, num_workers: int, seed: int) -> Table:
    """Reads, applies, deaths and ends in any order, until every closure has ended."""
    chance = random.Random(seed)
    table = Table(num_workers, BoundedStaleness(bound))
    table.put(60)
    for _ in range(100_000):
        table.dispatch()
        running = table.running()
        if not running:
            break
        worker, closure = chance.choice(running)
        server = chance.randrange(2)
        kind = chance.random()
        if kind < 0.35:
            table.read(closure, server)
        elif kind < 0.6:
            table.apply(closure, server)
        elif kind < 0.65:
            table.lose(worker)
        else:
            table.finish(worker)
    assert table.queue.is_idle and table.clocks == [60, 60]
    return table


@pytest.mark.parametrize("bound", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_no_gradient_lacks_more_steps_than_the_bound_in_any_order(
    bound: int, num_workers: int
) -> None:
    worst = 0
    for seed in range(40):
        table = random_history(bound, num_workers, seed)
        worst = max(worst, *table.staleness)
    assert worst <= bound
    if num_workers > 1 and bound:
        assert worst > 0, "nothing ran at the same time"


def test_the_same_histories_with_a_larger_bound_exceed_the_smaller() -> None:
    worst = max(max(random_history(16, 4, seed).staleness) for seed in range(40))
    assert worst > 5, "the histories are too tame to show anything"


def test_a_bound_of_0_is_serial_and_twice_the_others_keeps_all_busy() -> None:
    table = Table(3, BoundedStaleness(0))
    table.put(5)
    for closure, worker in ((1, 0), (2, 1), (3, 2), (4, 0)):
        assert table.dispatch() == {worker: closure}, "workers take turns"
        table.finish(worker)

    table = Table(3, BoundedStaleness(4))
    table.put(12)
    assert table.dispatch() == {0: 1, 1: 2, 2: 3}
    for worker in (0, 1, 2, 0, 1, 2):
        table.finish(worker)
        assert list(table.dispatch()) == [worker]


def test_a_worker_that_runs_ahead_waits_for_the_slow_one() -> None:
    table = Table(2, BoundedStaleness(3))
    table.put(10)
    assert table.dispatch() == {0: 1, 1: 2}
    table.finish(0)
    assert table.dispatch() == {0: 3}
    table.finish(0)
    assert table.dispatch() == {0: 4}, "closure 2 may lack three: 1, 3 and 4"
    table.finish(0)
    assert table.dispatch() == {}
    table.finish(1)
    assert table.dispatch() == {1: 5, 0: 6}


def test_a_closure_that_is_requeued_counts_again_and_what_it_did_counts_too() -> None:
    table = Table(2, BoundedStaleness(1))
    table.put(3)
    assert table.dispatch() == {0: 1, 1: 2}
    table.apply(table.running()[0][1], 0)
    table.lose(0)
    assert table.dispatch() == {}, "closure 2 may lack one step, and that was made"
    table.finish(1)
    assert sorted(table.dispatch().values()) == [1, 3]


def test_pinned_closures_do_not_count() -> None:
    table = Table(2, BoundedStaleness(0))
    table.put(1)
    pinned = Closure(0, None, pin=1)  # type: ignore[arg-type]
    table.pool.workers[1].pinned_closures.append(pinned)
    assert table.dispatch() == {0: 1, 1: 0}


def test_rounds_give_each_worker_one_closure_and_wait_for_all() -> None:
    table = Table(3, Rounds(3, 3))
    table.put(7)
    assert table.dispatch() == {0: 1, 1: 2, 2: 3}
    table.finish(1)
    table.finish(0)
    assert table.dispatch() == {}
    table.finish(2)
    assert table.dispatch() == {0: 4, 1: 5, 2: 6}


def test_a_round_goes_on_when_closures_come_one_by_one() -> None:
    table = Table(2, Rounds(2, 2))
    for closure, worker in ((1, 0), (2, 1)):
        table.put(1)
        assert table.dispatch() == {worker: closure}
        table.finish(worker)
    table.put(2)
    assert table.dispatch() == {0: 3, 1: 4}


def test_backup_workers_are_not_waited_for_and_join_a_later_round() -> None:
    table = Table(3, Rounds(3, 2))
    table.put(20)
    assert table.dispatch() == {0: 1, 1: 2, 2: 3}
    table.finish(0)
    assert table.dispatch() == {}, "two are needed, and two run"
    table.finish(1)
    assert table.dispatch() == {0: 4, 1: 5}
    table.finish(0)
    assert table.dispatch() == {}, "worker 0 has had its closure of this round"
    table.finish(2)
    assert table.dispatch() == {2: 6}, "the slow one joins"
    table.finish(2)
    assert table.dispatch() == {0: 7, 2: 8}


def test_a_closure_of_a_lost_worker_runs_again_in_its_round() -> None:
    table = Table(2, Rounds(2, 2))
    table.put(4)
    assert table.dispatch() == {0: 1, 1: 2}
    table.finish(0)
    table.lose(1)
    table.pool.workers[1].state = WorkerState.CONNECTING
    table.pool.update(table.pool.workers[1])
    assert table.dispatch() == {0: 2}, "there is no other worker"
    table.finish(0)
    assert table.dispatch() == {0: 3}
    table.finish(0)
    assert table.dispatch() == {0: 4}, "a round of one worker"


def test_closures_without_a_step_are_no_part_of_a_round() -> None:
    table = Table(2, Rounds(2, 2))
    table.put(1)
    table.dispatch()
    table.finish(0, has_stepped=False)
    table.put(4)
    assert table.dispatch() == {0: 2, 1: 3}
    table.finish(0)
    assert table.dispatch() == {}


def test_rounds_are_held_while_servers_apply_the_rest() -> None:
    rounds = Rounds(2, 2)
    table = Table(2, rounds)
    table.put(1)
    assert not rounds.is_begun and table.dispatch() == {0: 1} and rounds.is_begun
    table.finish(0)
    rounds.hold()
    table.put(3)
    assert table.dispatch() == {}
    rounds.restart()
    assert table.dispatch() == {0: 2, 1: 3}


@pytest.mark.parametrize(("num_workers", "num_needed"), [(1, 1), (2, 2), (4, 4), (4, 3), (3, 1)])
def test_rounds_never_hang_in_any_order(num_workers: int, num_needed: int) -> None:
    for seed in range(40):
        chance = random.Random(seed)
        table = Table(num_workers, Rounds(num_workers, num_needed))
        table.put(50)
        for _ in range(10_000):
            table.dispatch()
            running = table.running()
            if not running:
                break
            worker, closure = chance.choice(running)
            kind = chance.random()
            if kind < 0.1:
                table.lose(worker)
            elif kind < 0.15:
                table.leave(worker)
                table.queue.fail(closure, ValueError("no"), cancels=False)
            else:
                table.finish(worker, has_stepped=kind < 0.9)
        assert table.queue.is_idle and not table.running()


# Gradients that wait, on a real store.

RATE = 0.5


def descend(gradient: Any, value: Any, count: Any) -> Any:
    return value - RATE * gradient, count + 1


def store(aggregate: int | None, *, drops_stale: bool = False, value: Any = None) -> Caller:
    """A store with part 0, trained by optimizer 9, whose steps part 1 counts."""
    settings = {} if aggregate is None else {"aggregate": aggregate, "drops_stale": drops_stale}
    caller = Caller().attach(**settings)
    caller.create(0, np.zeros((4, 2), np.float32) if value is None else value)
    caller.create(1, np.zeros((), np.int32))
    caller.create(2, np.zeros(2, np.float32))
    register(caller)
    return caller


def register(caller: Caller) -> None:
    count = jax.ShapeDtypeStruct((), np.int32)
    rows = exported(descend, open_rows(2), open_rows(2), count)
    flat = exported(descend, open_rows(), open_rows(), count)
    trained = [messages.TrainedPart(0, [], 0, True), messages.TrainedPart(2, [], 1, True)]
    spec = messages.RegisterOptimizer(9, [1], trained, 2)
    assert caller.ask(spec, [rows, flat])[0] == messages.Done()


def contribute(
    caller: Caller, closure: int, *gradients: Any, clock: int = -1, call: int = 0, **options: Any
) -> list[messages.PushFailure]:
    """Pushes gradients of part 0: an array, or row numbers and rows."""
    specs, buffers = [], []
    for gradient in gradients:
        is_rows = isinstance(gradient, tuple)
        specs.append(GRADIENT(0, is_rows))
        if is_rows:
            buffers.append(np.asarray(gradient[0], np.int32))
        buffers.append(np.asarray(gradient[1] if is_rows else gradient, np.float32))
    push = messages.Push(closure, [APPLY(call, 9, specs)], clock)
    arrays = [np.ascontiguousarray(b).reshape(-1).view(np.uint8) for b in buffers]
    options = {"role": "worker", "incarnation": 2} | options
    return caller.ask(messages.Exchange([push], []), arrays, **options)[0].failures


def clock_of(caller: Caller) -> int:
    return caller.ask(messages.Exchange([], []))[0].clock


def full(number: float) -> np.ndarray:
    return np.full((4, 2), number, np.float32)


def test_sync_gradients_wait_and_their_mean_is_one_step() -> None:
    caller = store(3)
    for closure, number in enumerate((1.0, 2.0)):
        assert contribute(caller, closure, full(number)) == []
        assert not caller.read(0).any() and caller.read(1) == 0 and clock_of(caller) == 0
        assert caller.counters()["waiting_gradients"] == closure + 1
    assert contribute(caller, 2, full(6.0)) == []
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 3))
    assert caller.read(1) == 1 and clock_of(caller) == 1
    contribute(caller, 3, full(30.0))
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 3))


def test_sync_rows_are_merged_and_other_rows_stay() -> None:
    caller = store(2)
    contribute(caller, 0, ([0, 2], [[1, 1], [2, 2]]))
    contribute(caller, 1, ([2, 3], [[4, 4], [6, 6]]))
    expected = np.array([[0.5, 0.5], [0, 0], [3, 3], [3, 3]], np.float32)
    np.testing.assert_array_equal(caller.read(0), -RATE * expected)
    contribute(caller, 2, (np.zeros(0), np.zeros((0, 2))))
    contribute(caller, 3, ([1], [[2, 4]]))
    np.testing.assert_array_equal(caller.read(0, [1]), [[-RATE, -RATE * 2]])


def test_sync_rows_and_whole_gradients_add_up() -> None:
    for gradients in ((full(2.0), ([1], [[4, 4]])), (([1], [[4, 4]]), full(2.0))):
        caller = store(2)
        for closure, gradient in enumerate(gradients):
            contribute(caller, closure, gradient)
        expected = full(1.0)
        expected[1] = 3.0
        np.testing.assert_array_equal(caller.read(0), -RATE * expected)


def test_sync_a_step_without_a_gradient_counts_as_zero() -> None:
    caller = store(2)
    contribute(caller, 0, full(4.0))
    contribute(caller, 1)
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))
    contribute(caller, 2)
    contribute(caller, 3)
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))
    assert caller.read(1) == 2


def test_sync_a_closure_contributes_once_however_often_it_runs() -> None:
    caller = store(2)
    for _ in range(3):
        assert contribute(caller, 5, full(1.0)) == []
    assert contribute(caller, 5, full(8.0), incarnation=3) == [], "it ran again on another worker"
    assert not caller.read(0).any() and caller.counters()["duplicates"] == 3
    contribute(caller, 6, full(3.0))
    for closure in (5, 6):
        contribute(caller, closure, full(1.0))
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))
    assert caller.counters()["waiting_gradients"] == 0


def test_sync_a_second_step_of_a_closure_is_refused_with_advice() -> None:
    caller = store(2)
    contribute(caller, 0, full(1.0))
    (failure,) = contribute(caller, 0, full(1.0), call=1)
    assert failure.error.code == "UnsupportedError" and "separate closure" in failure.error.text
    push = messages.Push(1, [APPLY(0, 9, []), APPLY(1, 9, [])])
    answer, _ = caller.ask(messages.Exchange([push], []), role="worker", incarnation=2)
    assert [f.error.code for f in answer.failures] == ["UnsupportedError"]
    assert caller.counters()["waiting_gradients"] == 1


def test_sync_bad_gradients_leave_no_trace() -> None:
    caller = store(2)
    for wrong in (np.zeros(3), ([7], [[1, 1]]), ([0, 0], [[1, 1], [1, 1]])):
        assert len(contribute(caller, 0, wrong)) == 1
    assert caller.counters()["waiting_gradients"] == 0
    for closure in (0, 1):
        assert contribute(caller, closure, full(2.0)) == []
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))


def test_sync_updates_are_made_at_once_and_so_are_steps_of_the_coordinator() -> None:
    caller = store(2)
    caller.update("assign_add", 0, full(1.0))
    np.testing.assert_array_equal(caller.read(0), full(1.0))
    contribute(caller, 100, full(2.0), role="coordinator", incarnation=1)
    np.testing.assert_array_equal(caller.read(0), full(0.0))
    # A closure that updates and completes a step at the same time.
    contribute(caller, 101, full(2.0))
    changes = [messages.Update(0, "assign_add", 0), APPLY(1, 9, [GRADIENT(0, False)])]
    assert caller.push(*changes, buffers=[full(5.0), full(4.0)], closure=102) == []
    np.testing.assert_array_equal(caller.read(0), full(5.0 - RATE * 3))


def test_apply_rest_applies_what_is_there_once() -> None:
    caller = store(4)
    contribute(caller, 0, full(1.0))
    contribute(caller, 1, full(3.0))
    for _ in range(3):
        assert caller.ask(messages.FlushGradients()) == (messages.Done(), ())
        np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))
        assert caller.read(1) == 1 and clock_of(caller) == 1


def test_a_coordinator_that_takes_over_begins_with_whole_rounds() -> None:
    caller = store(2)
    contribute(caller, 0, full(2.0))
    caller.epoch += 1
    caller.attach(aggregate=2)
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 2))
    assert caller.counters()["waiting_gradients"] == 0 and clock_of(caller) == 1


def test_apply_rest_is_for_the_coordinator_and_has_no_effect_without_sync() -> None:
    caller = store(None)
    assert caller.ask(messages.FlushGradients()) == (messages.Done(), ())
    with pytest.raises(errors.PermissionDeniedError):
        caller.ask(messages.FlushGradients(), role="worker", incarnation=2)
    assert clock_of(caller) == 0


def test_backup_workers_late_gradients_are_dropped_counted_and_acknowledged() -> None:
    caller = store(2, drops_stale=True)
    contribute(caller, 0, full(1.0), clock=0)
    contribute(caller, 1, full(3.0), clock=0)
    assert clock_of(caller) == 1
    assert contribute(caller, 2, full(99.0), clock=0) == []
    counters = caller.counters()
    assert counters["stale_dropped"] == 1 and counters["waiting_gradients"] == 0
    assert counters["staleness_max"] == 0, "what was dropped changed nothing"
    contribute(caller, 3, full(1.0), clock=1)
    contribute(caller, 4, full(1.0))
    np.testing.assert_array_equal(caller.read(0), full(-RATE * 3))


def test_backup_workers_two_optimizers_of_a_step_are_judged_alike() -> None:
    caller = store(2, drops_stale=True)
    caller.create(5, np.zeros(2, np.float32))
    spec = messages.RegisterOptimizer(8, [], [messages.TrainedPart(5, [], 0, True)], 1)
    program = exported(lambda g, v: v - g, open_rows(), open_rows())
    caller.ask(spec, [program])
    changes = [APPLY(0, 9, [GRADIENT(0, False)]), APPLY(1, 8, [GRADIENT(5, False)])]
    for closure in (0, 1):
        push = messages.Push(closure, changes, 0)
        arrays = [full(1.0).reshape(-1).view(np.uint8), np.ones(2, np.float32).view(np.uint8)]
        caller.ask(messages.Exchange([push], []), arrays, role="worker", incarnation=2)
    assert caller.counters()["stale_dropped"] == 0 and clock_of(caller) == 1
    np.testing.assert_array_equal(caller.read(5), [-1.0, -1.0])


def test_dropped_variables_take_their_gradients_along() -> None:
    caller = store(2)
    contribute(caller, 0, full(1.0))
    caller.ask(messages.DropParts([0]))
    push = messages.Push(1, [APPLY(0, 9, [GRADIENT(2, False)])])
    array = np.ones(2, np.float32).view(np.uint8)
    answer, _ = caller.ask(messages.Exchange([push], []), [array], role="worker", incarnation=2)
    assert answer.failures == []
    np.testing.assert_array_equal(caller.read(2), [-RATE / 2, -RATE / 2])
    contribute(caller, 2)
    caller.ask(messages.DropParts([1]))
    caller.ask(messages.FlushGradients())
    assert caller.counters()["waiting_gradients"] == 0


def test_what_waits_is_exported_as_plain_data_and_restored() -> None:
    caller = store(3)
    contribute(caller, 0, ([0, 2], [[1, 1], [2, 2]]))
    contribute(caller, 1, ([2], [[4, 4]]))
    waiting = caller.store._storage.accumulation.export()
    other = store(3)
    clock = StepClock()
    accumulation = Accumulation(clock)
    accumulation.restore(waiting)
    assert accumulation.export() == waiting and len(accumulation) == 2
    other.store._storage.accumulation.restore(waiting)
    contribute(other, 2, full(3.0))
    expected = full(1.0)
    expected[0] += 1 / 3
    expected[2] += 2.0
    np.testing.assert_allclose(other.read(0), -RATE * expected, rtol=1e-6)


@pytest.mark.parametrize("aggregate", [0, -1, True, 1.5, "2"])
def test_a_server_refuses_settings_without_a_meaning(aggregate: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="aggregate"):
        Caller().attach(aggregate=aggregate)


# The clock.


def test_async_a_clock_counts_closures_with_steps_and_measures_staleness() -> None:
    caller = store(None)
    caller.update("assign_add", 0, full(1.0))
    assert clock_of(caller) == 0
    contribute(caller, 10, full(0.0), clock=0)
    contribute(caller, 10, full(0.0), clock=0)  # again
    contribute(caller, 10, full(0.0), clock=0, call=1)  # a second step, of the same closure
    assert clock_of(caller) == 1
    contribute(caller, 11, full(0.0), clock=0)
    contribute(caller, 12, full(0.0), clock=0)
    contribute(caller, 13, full(0.0))  # has read nothing
    assert clock_of(caller) == 4
    counters = caller.counters()
    names = ("staleness_sum", "staleness_count", "staleness_max", "stale_dropped")
    assert [counters[name] for name in names] == [3, 4, 2, 0]


def test_counters_of_staleness_begin_with_the_job() -> None:
    caller = store(None)
    contribute(caller, 1, full(0.0), clock=0)
    contribute(caller, 2, full(0.0), clock=0)
    assert caller.counters()["staleness_max"] == 1
    caller.ask(messages.Detach())
    assert caller.attach().counters()["staleness_max"] == 0 and clock_of(caller) == 0


class Far:
    """A variable on server 0, as a client sees it."""

    number, server, shape, dtype, num_bytes = 5, 0, (2,), np.dtype(np.float32), 8

    @property
    def components(self) -> tuple[Far]:
        return (self,)


class Answering:
    """A channel to a server whose clock the test sets; keeps the pushes."""

    peer = Task("ps", 0)

    def __init__(self) -> None:
        self.clock = 0
        self.pushes: list[messages.Push] = []
        self._answers: list[Any] = []

    def send(self, body: messages.Exchange, buffers: Any) -> int:
        self.pushes += body.pushes
        reads = [messages.ReadResult(self.clock, False) for _ in body.reads]
        values = [memoryview(bytes(8))] * len(reads)
        number = len(self._answers) + 1
        self._answers.append((number, messages.Exchanged(reads, [], self.clock), values))
        return number

    def receive(self, timeout: float) -> Any:
        found = [answer for answer in self._answers if answer is not None]
        if found:
            self._answers[found[0][0] - 1] = None
        return found[0] if found else None


@pytest.mark.parametrize("pulls_ahead", [False, True])
def test_a_push_tells_the_clock_of_the_first_read_of_its_closure(pulls_ahead: bool) -> None:
    channel, variable = Answering(), Far()
    client = ParameterClient([channel], pulls_ahead=pulls_ahead)  # type: ignore[list-item]
    for closure, clock in enumerate((3, 7)):
        channel.clock = clock
        client.begin(closure)
        for _ in range(2):
            client.pull([Read(variable)])  # type: ignore[arg-type]
            channel.clock += 1
        client.push([Change(variable, "assign_add", np.ones(2, np.float32))])
        assert client.end(closure) is False
    client.begin(2)
    client.push([Change(variable, "assign_add", np.ones(2, np.float32))])
    client.end(2)
    client.drain()
    # What was asked for ahead was asked with the second read of the closure before.
    second = 4 if pulls_ahead else 7
    assert [push.clock for push in channel.pushes] == [3, second, -1]


# All of it, with processes.


class Training:
    """A small regression with one dense and one embedded variable, on some strategy."""

    def __init__(self, strategy: Any, transformation: Any) -> None:
        with strategy.scope():
            weight = rx.Variable(np.full((3, 2), 0.1, np.float32), name="weight")
            table = rx.Variable(np.full((6, 2), 0.2, np.float32), name="table")
            optimizer = rx.optimizers.Optimizer(transformation, [weight, table])
        self.variables = [weight, table]
        self.optimizer = optimizer

        @rx.function
        def step(x: Any, ids: Any, y: Any) -> Any:
            def loss_fn() -> Any:
                found = x @ weight.value() + rx.nn.embedding_lookup(table, ids)
                return jnp.mean((found - y) ** 2)

            loss, gradients = rx.value_and_grad(loss_fn, [weight, table])()
            optimizer.apply_gradients(gradients)
            return loss

        def slow_step(seconds: float, *arguments: Any) -> Any:
            """Takes longer on worker 0."""
            if rx.coordinator.experimental_get_current_worker_index() == 0:
                time.sleep(seconds)
            return step(*arguments)

        self.step, self.slow_step = step, slow_step

    def values(self) -> list[np.ndarray]:
        return [np.asarray(v.numpy()) for v in self.variables]


def batch(seed: int, size: int = 4) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(size, width)).astype(np.float32) for width in (3, 2))
    return x, rng.integers(0, 6, size).astype(np.int32), y


def alone(transformation: Any, rounds: int, width: int, first: int = 0) -> list[np.ndarray]:
    """What one process learns from the batches of all workers, put together."""
    training = Training(rx.get_strategy(), transformation)
    for number in range(rounds):
        own = [batch(first + number * width + i) for i in range(width)]
        training.step(*(np.concatenate(arrays) for arrays in zip(*own, strict=True)))
    return training.values()


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "transformation",
    [
        pytest.param(optax.sgd(0.3), id="sgd", marks=pytest.mark.slow),
        pytest.param(optax.adam(0.05), id="adam"),
    ],
)
def test_sync_training_is_that_of_one_process_on_all_batches(
    desk: Desk, transformation: Any
) -> None:
    strategy = desk.strategy(consistency="sync")
    coordinator = desk.coordinator(strategy)
    training = Training(strategy, transformation)
    for number in range(12):
        coordinator.schedule(training.step, args=batch(number))
    coordinator.join(60)
    assert_close(training.values(), alone(transformation, 6, 2))
    assert int(training.optimizer.iterations) == 6
    # Closures without a step, one by one, leave the rounds as they were.
    assert coordinator.schedule(lambda: 7).fetch() == 7
    for number in range(12, 20):
        coordinator.schedule(training.step, args=batch(number))
    coordinator.join(60)
    assert_close(training.values(), alone(transformation, 10, 2))
    becomes(lambda: total(coordinator, "clock") == 20, "heartbeats report it")
    assert coordinator.status().max_staleness == 0


def total(coordinator: Any, name: str) -> float:
    return sum(s.counters.get(name, 0) for s in coordinator.status().servers)


def test_sync_join_applies_what_is_left_and_the_next_rounds_are_whole(desk: Desk) -> None:
    strategy = desk.strategy(consistency="sync")
    coordinator = desk.coordinator(strategy)
    training = Training(strategy, optax.sgd(0.3))
    expected = Training(rx.get_strategy(), optax.sgd(0.3))
    coordinator.schedule(training.step, args=batch(0))
    coordinator.join(60)
    expected.step(*batch(0))
    assert_close(training.values(), expected.values())
    for number in (1, 2):
        coordinator.schedule(training.step, args=batch(number))
    coordinator.join(60)
    both = zip(batch(1), batch(2), strict=True)
    expected.step(*(np.concatenate(arrays) for arrays in both))
    assert_close(training.values(), expected.values())


def test_sync_an_error_leaves_whole_rounds_and_is_raised(desk: Desk) -> None:
    strategy = desk.strategy(consistency="sync")
    coordinator = desk.coordinator(strategy)
    training = Training(strategy, optax.sgd(0.3))

    def fail() -> None:
        raise ValueError("no such luck")

    coordinator.schedule(training.step, args=batch(0)).fetch()
    coordinator.schedule(fail)
    with pytest.raises(ValueError, match="no such luck"):
        coordinator.join(60)
    assert_close(training.values(), alone(optax.sgd(0.3), 1, 1))


@pytest.mark.parametrize("bound", [0, 1])
def test_measured_staleness_is_within_the_bound(desk: Desk, bound: int) -> None:
    strategy = desk.strategy(consistency=rx.Staleness(bound))
    coordinator = desk.coordinator(strategy)
    training = Training(strategy, optax.sgd(0.01))
    for number in range(60):
        coordinator.schedule(training.step, args=batch(number))
    coordinator.join(60)
    becomes(lambda: total(coordinator, "staleness_count") == 120, "all steps are counted")
    status = coordinator.status()
    assert status.max_staleness <= bound and 0.0 <= status.mean_staleness <= bound
    assert total(coordinator, "clock") == 120
    assert ("staleness: " in str(status)) == bool(status.max_staleness)


def test_async_staleness_is_measured_as_it_is(desk: Desk, tmp_path: Path) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    training = Training(strategy, optax.sgd(0.01))
    has_read, may_end = tmp_path / "read", tmp_path / "end"

    def long_step(*arguments: Any) -> None:
        training.step(*arguments)  # reads; what it changes leaves when the closure ends
        has_read.touch()
        deadline = time.monotonic() + 60
        while not may_end.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    coordinator.schedule(long_step, args=batch(0))
    becomes(has_read.exists, "the long step has read", 60)
    for number in range(1, 4):
        coordinator.schedule(training.step, args=batch(number)).fetch()
    may_end.touch()
    coordinator.join(60)
    becomes(lambda: total(coordinator, "clock") == 8, "all steps are counted")
    status = coordinator.status()
    assert (status.max_staleness, status.mean_staleness) == (3, 0.75)
    assert [s.max_staleness for s in status.servers] == [3, 3]
    assert "staleness: 0.8 steps on average, 3 at most" in str(status)


@pytest.mark.slow
def test_sync_with_a_backup_worker_does_not_wait_for_a_slow_one() -> None:
    with own_cluster(workers=3, ps=2) as desk:
        strategy = desk.strategy(consistency="sync", backup_workers=1)
        coordinator = desk.coordinator(strategy)
        training = Training(strategy, optax.sgd(0.05))
        for number in range(90):
            coordinator.schedule(training.slow_step, args=(0.2, *batch(number)))
        coordinator.join(90)

        def fits() -> bool:
            """Each server has made a step of every two gradients that were not late, and a last."""
            dropped = total(coordinator, "stale_dropped")
            return dropped > 0 and abs(total(coordinator, "clock") - (180 - dropped) / 2) <= 2

        # Counters arrive with heartbeats.
        becomes(fits, "late ones are dropped, and all others make steps")
        done = [w.num_done for w in coordinator.status().workers]
        assert sum(done) == 90 and done[0] < min(done[1:])
        assert coordinator.status().max_staleness == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", rx.Staleness(2)], ids=["sync", "staleness"])
def test_a_worker_lost_on_the_way_changes_nothing(mode: Any) -> None:
    with own_cluster(workers=3, ps=2) as desk:
        strategy = desk.strategy(consistency=mode)
        coordinator = desk.coordinator(strategy)
        training = Training(strategy, optax.sgd(0.05))
        for number in range(60):
            coordinator.schedule(training.slow_step, args=(0.05, *batch(number)))

        def is_amid() -> bool:
            status = coordinator.status()
            return status.num_finished >= 9 and status.workers[0].num_closures == 1

        becomes(is_amid, "the worker has a closure", 60)
        desk.cluster.kill("worker", 0)
        assert coordinator.status().num_finished < 57
        coordinator.join(90)
        if mode == "sync":
            assert_close(training.values(), alone(optax.sgd(0.05), 20, 3))
            assert int(training.optimizer.iterations) == 20
        else:
            assert int(training.optimizer.iterations) == 60
            becomes(lambda: total(coordinator, "clock") == 120, "all steps are counted")
            assert coordinator.status().max_staleness <= mode.bound
