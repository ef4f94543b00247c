"""Exactly once, for any sender and order: dedup, watermark, fences, jobs, repetition."""

from __future__ import annotations

import random
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from parameter_store_client import COORDINATOR, WORKER, Caller, exported, octets, open_rows

import replicax as rx
from replicax.protocol import admission, messages
from replicax.ps.store.applied_updates import AppliedUpdates
from replicax.ps.store.service import ParameterStore

ADD = messages.Update(0, "assign_add", 0)
ONE = np.ones((), np.float32)


@pytest.fixture
def caller() -> Caller:
    caller = Caller().attach()
    caller.create(0, np.float32(0))
    return caller


def test_bar16_an_update_is_applied_once_whichever_process_repeats_it(caller: Caller) -> None:
    for incarnation in (WORKER, WORKER, 77):
        assert caller.push(ADD, buffers=[ONE], closure=5, incarnation=incarnation) == []
    assert caller.read(0) == 1
    # Another call of the same closure, and the same call on another part, are other changes.
    caller.create(1, np.float32(0))
    caller.push(messages.Update(1, "assign_add", 0), buffers=[ONE], closure=5)
    caller.push(messages.Update(0, "assign_add", 1), buffers=[ONE], closure=5)
    assert (caller.read(0), caller.read(1)) == (2, 1)


def test_bar16_what_an_attempt_left_undone_is_made_by_the_next(caller: Caller) -> None:
    second = messages.Update(1, "assign_add", 0)
    assert caller.push(ADD, buffers=[ONE], closure=5) == []
    assert caller.push(ADD, second, buffers=[ONE, ONE], closure=5, incarnation=9) == []
    assert caller.push(second, ADD, second, buffers=[ONE] * 3, closure=5) == []
    assert caller.read(0) == 2


def test_bar16_one_push_that_names_a_change_twice_makes_it_once(caller: Caller) -> None:
    assert caller.push(ADD, ADD, buffers=[ONE, ONE]) == []
    assert caller.read(0) == 1


@pytest.mark.parametrize("seed", range(10))
def test_bar16_random_histories_equal_a_model(seed: int) -> None:
    rng = random.Random(seed)
    caller = Caller().attach()
    values = {part: 0 for part in range(3)}
    for part in values:
        caller.create(part, np.int64(0))
    # What each call of each closure does is fixed; how often and when it arrives is not.
    plan = {
        (closure, call): (rng.randrange(3), rng.randrange(1, 100))
        for closure in range(40)
        for call in range(rng.randrange(1, 4))
    }
    made: set[tuple[int, int]] = set()
    settled = 0
    num_duplicates = num_stale = 0
    for _ in range(300):
        if rng.random() < 0.1:
            settled = max(settled, rng.randrange(settled, min(settled + 5, 40)))
            caller.ask(messages.Ping(rng.choice([settled, settled, 0])))
            caller.ask(messages.Ping(settled))
        low, high = max(0, settled - 3), min(40, settled + 12)
        closures = [rng.randrange(low, high) for _ in range(rng.randrange(1, 4))]
        pushes, buffers, refused = [], [], []
        for closure in closures:
            calls = [key for key in plan if key[0] == closure and rng.random() < 0.8]
            rng.shuffle(calls)
            changes = [messages.Update(k[1], "assign_add", plan[k][0]) for k in calls]
            pushes.append(messages.Push(closure, changes))
            buffers += [octets(np.int64(plan[key][1])) for key in calls]
            if closure < settled:
                refused.append(closure)
                num_stale += 1
                continue
            for key in calls:
                num_duplicates += key in made
                if key not in made:
                    made.add(key)
                    values[plan[key][0]] += plan[key][1]
        incarnation = rng.randrange(10, 14)
        question = messages.Exchange(pushes, [messages.Read(part) for part in values])
        answer, found = caller.ask(question, buffers, role="worker", incarnation=incarnation)
        assert [failure.closure for failure in answer.failures] == refused
        assert {failure.error.code for failure in answer.failures} <= {"CancelledError"}
        assert [int(np.frombuffer(f, np.int64)[0]) for f in found] == list(values.values())
        alive = sum(closure >= settled for closure, _ in made)
        assert caller.counters()["applied_entries"] == alive
    assert num_duplicates > 20 and num_stale > 20


def test_watermark_bounds_the_table() -> None:
    table = AppliedUpdates()
    for closure in range(10_000):
        table.record(closure, (0, 1))
        table.record(closure, (1, 1))
        table.record(closure, (1, 1))
        table.settle(closure - 100)
        assert len(table) <= 2 * 101
    table.settle(5)
    assert table.settled == 9_899, "the watermark never falls"
    assert table.is_settled(9_898) and not table.is_settled(9_899)
    assert table.newest == 9_999


def test_a_stale_push_is_refused_and_others_are_not(caller: Caller) -> None:
    caller.push(ADD, buffers=[ONE], closure=4)
    caller.ask(messages.Ping(5))
    (failure,) = caller.push(ADD, buffers=[ONE], closure=4)
    assert (failure.closure, failure.error.code) == (4, "CancelledError")
    assert "settled" in failure.error.text and "Closure 4" in failure.error.text
    assert caller.push(ADD, buffers=[ONE], closure=5) == []
    assert caller.read(0) == 2


def test_bar5_a_fenced_process_neither_changes_nor_reads(caller: Caller) -> None:
    caller.ask(messages.Fence([WORKER, 99]))
    with pytest.raises(rx.errors.FencedError, match="declared dead"):
        caller.push(ADD, buffers=[ONE])
    with pytest.raises(rx.errors.FencedError, match="task:3"):
        caller.ask(messages.Exchange([], [messages.Read(0)]), role="worker", incarnation=WORKER)
    assert caller.push(ADD, buffers=[ONE], incarnation=3) == []
    assert caller.read(0) == 1


def test_bar5_a_fence_is_final_when_it_is_answered() -> None:
    store = ParameterStore(task=0)
    Caller(store).attach()
    Caller(store).create(0, np.zeros(100_000, np.float32))
    ones = np.ones(100_000, np.float32)
    has_begun = threading.Event()
    made: list[int] = []

    def zombie() -> None:
        caller = Caller(store)
        try:
            for closure in range(100_000):
                caller.push(ADD, buffers=[ones], closure=closure)
                made.append(closure)
                if closure == 20:
                    has_begun.set()
        except rx.errors.FencedError:
            return

    thread = threading.Thread(target=zombie)
    thread.start()
    assert has_begun.wait(30)
    caller = Caller(store)
    caller.ask(messages.Fence([WORKER]))
    after = caller.counters()["applied"]
    thread.join(30)
    assert not thread.is_alive()
    assert caller.counters()["applied"] == after == len(made)


def test_bar30_a_higher_epoch_takes_over_and_keeps_the_variables(caller: Caller) -> None:
    caller.push(ADD, buffers=[ONE], closure=50)
    caller.ask(messages.Ping(40))
    next_life = Caller(caller.store)
    next_life.epoch, next_life.specs = 2, caller.specs
    next_life.ask(messages.Attach([], {}), incarnation=1234)
    assert next_life.read(0) == 1
    # The old one is told, and what it sends has no effect.
    for body in (messages.Ping(0), messages.Detach(), messages.DropParts([0]), messages.Fence([5])):
        with pytest.raises(rx.errors.FencedError, match="resumed the job"):
            caller.ask(body)
    with pytest.raises(rx.errors.FencedError, match="epoch 2"):
        caller.push(ADD, buffers=[ONE])
    with pytest.raises(rx.errors.FencedError, match="epoch 2"):
        caller.attach()
    # Its closures are new ones, whatever their numbers; the same spec finds the old value.
    assert next_life.push(ADD, buffers=[ONE], closure=3) == []
    next_life.create(0, np.float32(0))
    assert next_life.read(0) == 2


def test_bar30_two_coordinators_cannot_share_an_epoch(caller: Caller) -> None:
    with pytest.raises(rx.errors.PermissionDeniedError, match="higher epoch"):
        caller.ask(messages.Attach([], {}), incarnation=COORDINATOR + 100)
    assert caller.read(0) == 0


def test_an_epoch_that_was_not_attached_is_refused(caller: Caller) -> None:
    caller.epoch = 2
    with pytest.raises(rx.errors.PermissionDeniedError, match="epoch 2"):
        caller.push(ADD, buffers=[ONE])


def test_another_job_waits_for_the_lease(caller: Caller) -> None:
    caller.attach(lease=10.0)
    other = Caller(caller.store, job="other")
    other.now = 9.0
    with pytest.raises(rx.errors.PermissionDeniedError, match="'job' holds it"):
        other.attach()
    with pytest.raises(rx.errors.FencedError, match="'job' only"):
        other.push(ADD, buffers=[ONE])
    caller.now = 9.0
    caller.ask(messages.Ping(0))
    other.now = 18.9
    with pytest.raises(rx.errors.PermissionDeniedError, match="'job' holds it"):
        other.attach()
    other.now = 19.0
    other.attach()
    assert other.counters()["parts"] == 0
    caller.now = 19.5
    with pytest.raises(rx.errors.FencedError, match="'other' only"):
        caller.ask(messages.Ping(0))


def test_an_expired_job_is_dropped_and_workers_do_not_keep_it_alive(caller: Caller) -> None:
    caller.attach(lease=10)
    store = caller.store
    caller.now = 9.5
    caller.push(ADD, buffers=[ONE])
    assert not store.expire(9.9) and store.job == "job"
    assert store.expire(10.0) and store.job is None
    assert not store.expire(11.0)
    assert store.counters()["bytes"] == 0
    caller.now = 11.0
    for body in (messages.Ping(0), messages.Exchange([], [])):
        with pytest.raises(rx.errors.PSIncarnationError, match="attached to a job first"):
            caller.ask(body)


@pytest.mark.parametrize("lease", [0, -1, True, "10", None, float("nan"), float("inf")])
def test_a_bad_lease_is_refused(lease: Any) -> None:
    caller = Caller()
    with pytest.raises(rx.errors.InvalidArgumentError, match="lease"):
        caller.attach(lease=lease)
    assert caller.store.job is None


def test_detach_drops_everything_and_frees_the_server(caller: Caller) -> None:
    caller.ask(messages.Detach())
    assert caller.store.job is None and caller.store.counters()["parts"] == 0
    caller.ask(messages.Detach())
    other = Caller(caller.store, job="other").attach()
    other.create(0, np.float32(7))
    # The first job's late repetition must not detach the second.
    assert caller.ask(messages.Detach()) == (messages.Done(), ())
    assert other.read(0) == 7


@pytest.mark.parametrize(
    "body",
    [
        messages.Attach([], {}),
        messages.Detach(),
        messages.Ping(0),
        messages.CreatePart(1, "v", (), "float32", messages.Fill(bytes(4))),
        messages.DropParts([0]),
        messages.RegisterOptimizer(0, [], [], 0),
        messages.Fence([1]),
        messages.QueryJob(),
    ],
    ids=lambda body: type(body).__name__,
)
def test_bar42_workers_may_only_exchange(caller: Caller, body: messages.Body) -> None:
    with pytest.raises(rx.errors.PermissionDeniedError, match="worker"):
        caller.ask(body, role="worker", incarnation=WORKER)
    assert caller.read(0) == 0


def test_numbers_are_not_negative(caller: Caller) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="numbers from 0"):
        caller.create(-1, np.float32(0))
    with pytest.raises(rx.errors.InvalidArgumentError, match="numbers from 0"):
        caller.ask(messages.RegisterOptimizer(-1, [], [], 0))
    (failure,) = caller.push(ADD, buffers=[ONE], closure=-1)
    assert failure.error.code == "CancelledError"


def test_what_is_not_for_parameter_servers_is_refused(caller: Caller) -> None:
    with pytest.raises(rx.errors.ProtocolError, match="Cancel"):
        caller.ask(messages.Cancel([1]))


def make_everything() -> dict[str, tuple[messages.Body, list[Any]]]:
    program = exported(
        lambda g, v, m, c: (v - g, m + g, c + 1),
        *[open_rows(2)] * 3,
        jnp.zeros((), np.int32),
    )
    initial = exported(lambda: jnp.full((3, 2), 4.0))
    zero, one = messages.Fill(bytes(4)), octets(np.ones((3, 2), np.float32))
    push = messages.Push(
        8,
        [
            messages.Update(0, "assign_add", 0),
            messages.Apply(1, 0, [messages.Gradient(0, False)]),
        ],
    )
    return {
        "look": (messages.QueryJob(), []),
        "attach": (messages.Attach([], {"lease": 5.0}), []),
        "fill": (messages.CreatePart(0, "v", (3, 2), "float32", zero), []),
        "given": (messages.CreatePart(1, "m", (3, 2), "float32", messages.FromBuffer()), [one]),
        "counter": (messages.CreatePart(2, "c", (), "int32", zero), []),
        "computed": (
            messages.CreatePart(3, "w", (3, 2), "float32", messages.FromProgram([], 0)),
            [initial],
        ),
        "register": (
            messages.RegisterOptimizer(0, [2], [messages.TrainedPart(0, [1], 0, True)], 1),
            [program],
        ),
        "exchange": (messages.Exchange([push], [messages.Read(n) for n in range(4)]), [one, one]),
        "rest": (messages.FlushGradients(), []),
        "fence": (messages.Fence([55]), []),
        "ping": (messages.Ping(8), []),
        "drop": (messages.DropParts([3]), []),
        "detach": (messages.Detach(), []),
    }


def state(store: ParameterStore) -> dict[str, Any]:
    sizes = store.counters()
    return {
        n: sizes[n]
        for n in ("bytes", "parts", "optimizers", "applied_entries", "settled", "applied")
    }


def strip(answer: tuple[Any, Any]) -> Any:
    """An answer without what is meant to grow with each request."""
    body, values = answer
    if isinstance(body, messages.Pong):
        return "pong"
    return body, [bytes(v) for v in values]


@pytest.mark.parametrize("is_overlapping", [False, True])
def test_bar17_every_request_may_be_repeated(is_overlapping: bool) -> None:
    caller = Caller()
    told = {type(body) for body, _ in make_everything().values()}
    # The transport handles the first three; the others only write files, or read what files hold.
    others = {messages.Hello, messages.GetStacks, messages.RecordSpans}
    others |= {messages.SaveParts, messages.LoadParts}
    assert told == set(admission.ALLOWED["coordinator", "ps"]) - others
    for body, buffers in make_everything().values():
        if is_overlapping:
            answers: list[Any] = []

            def ask(body: Any = body, buffers: Any = buffers, answers: Any = answers) -> None:
                answers.append(strip(caller.ask(body, buffers)))

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            first, second = answers
        else:
            first = strip(caller.ask(body, buffers))
            after = state(caller.store)
            second = strip(caller.ask(body, buffers))
            assert state(caller.store) == after
        assert first == second
    assert caller.store.counters()["applied"] == 2
    assert caller.store.job is None


def test_bar17_a_repeated_creation_does_not_reset_the_value(caller: Caller) -> None:
    caller.push(ADD, buffers=[ONE])
    caller.create(0, np.float32(0))
    assert caller.read(0) == 1
    other = messages.CreatePart(0, "v", (2,), "float32", messages.Fill(bytes(4)))
    with pytest.raises(rx.errors.InvalidArgumentError, match="must be new"):
        caller.ask(other)


def test_a_part_made_for_a_job_that_ended_meanwhile_is_not_kept(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = caller.store._storage
    create = storage.create

    def interrupted(*args: Any) -> None:
        create(*args)
        caller.ask(messages.Detach())
        Caller(caller.store, job="other").attach()

    monkeypatch.setattr(storage, "create", interrupted)
    with pytest.raises(rx.errors.FencedError, match="ended while a request"):
        caller.create(5, np.zeros(3))
    assert caller.store.counters()["parts"] == 0 and caller.store.job == "other"
