"""Optimizers on a parameter server: equal to optax on one machine, for all rows or some."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_store_client import Caller, exported, octets, open_rows

import replicax as rx
from replicax.protocol import messages

SCALAR = jax.ShapeDtypeStruct((), np.int32)


@pytest.fixture
def caller() -> Caller:
    return Caller().attach()


class Remote:
    """An optax transformation whose parts and state lie on a store."""

    def __init__(
        self, caller: Caller, transformation: Any, values: list[np.ndarray], *, is_row_wise: bool
    ) -> None:
        self.caller = caller
        self.values = values
        programs, trained = [], []
        number = 100
        for part, value in enumerate(values):
            caller.create(part, value)
            leaves, tree = jax.tree.flatten(transformation.init(jnp.asarray(value)))
            # Slots are what has the shape of the parameter, whatever that is.
            probe = jax.tree.leaves(transformation.init(jnp.zeros((3, 5))))
            slots = [i for i, leaf in enumerate(probe) if leaf.shape == (3, 5)]
            shared = [i for i in range(len(leaves)) if i not in slots]
            numbers = []
            for i in slots:
                caller.create(number, np.asarray(leaves[i]))
                numbers.append(number)
                number += 1
            if part == 0:
                self.shared = [1000 + i for i in range(len(shared))]
                for name, i in zip(self.shared, shared, strict=True):
                    caller.create(name, np.asarray(leaves[i]))

            def program(
                gradient: Any, value: Any, *state: Any, slots=slots, shared=shared, tree=tree
            ) -> Any:
                leaves = dict(zip([*slots, *shared], state, strict=True))
                old = jax.tree.unflatten(tree, [leaves[i] for i in range(len(leaves))])
                updates, new = transformation.update(gradient, old, value)
                found = jax.tree.leaves(new)
                rest = [found[i] for i in [*slots, *shared]]
                return (optax.apply_updates(value, updates), *rest)

            one = (
                open_rows(*value.shape[1:])
                if value.shape
                else jax.ShapeDtypeStruct((), value.dtype)
            )
            others = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in shared]
            programs.append(exported(program, one, one, *[one] * len(slots), *others))
            trained.append(messages.TrainedPart(part, numbers, part, is_row_wise))
        self.spec = messages.RegisterOptimizer(7, self.shared, trained, len(programs))
        self.programs = programs
        caller.ask(self.spec, programs)

    def apply(self, gradients: list[Any]) -> None:
        told, buffers = [], []
        for part, gradient in enumerate(gradients):
            if gradient is None:
                continue
            is_rows = isinstance(gradient, tuple)
            told.append(messages.Gradient(part, is_rows))
            buffers += list(gradient) if is_rows else [gradient]
        assert self.caller.push(messages.Apply(0, 7, told), buffers=buffers) == []


@pytest.mark.parametrize(
    "transformation",
    [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.01)],
    ids=["sgd", "momentum", "adam"],
)
def test_dense_steps_equal_optax(caller: Caller, transformation: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = [(5, 3), (20_000,), ()]
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    remote = Remote(caller, transformation, values, is_row_wise=False)
    params = [jnp.asarray(v) for v in values]
    states = [transformation.init(p) for p in params]
    step = jax.jit(transformation.update)
    for _ in range(4):
        gradients = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        remote.apply(gradients)
        for i, gradient in enumerate(gradients):
            updates, states[i] = step(gradient, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    for i, value in enumerate(params):
        np.testing.assert_allclose(caller.read(i), value, rtol=2e-6, atol=1e-7)
    for number in remote.shared:
        assert caller.read(number) == 4, "a count grows by one per step, not per part"


@pytest.mark.parametrize("is_row_wise", [True, False])
def test_S182_steps_on_rows_equal_steps_on_dense_gradients(
    caller: Caller, is_row_wise: bool
) -> None:
    rng = np.random.default_rng(1)
    table = rng.standard_normal((50, 3)).astype(np.float32)
    transformation = optax.adagrad(0.1)
    remote = Remote(caller, transformation, [table], is_row_wise=is_row_wise)
    param = jnp.asarray(table)
    accumulator = transformation.init(param)
    step = jax.jit(transformation.update)
    # None, one, fewer and more than the smallest program, exactly a power of two, all.
    for count in (1, 5, 0, 8, 9, 16, 50):
        ids = np.sort(rng.choice(50, count, replace=False)).astype(np.int32)
        rows = rng.standard_normal((count, 3)).astype(np.float32)
        remote.apply([(ids, rows)])
        updates, accumulator = step(jnp.zeros((50, 3)).at[ids].set(rows), accumulator, param)
        param = optax.apply_updates(param, updates)
        # Values are about 1: a sum that nearly cancels keeps the rounding of its terms.
        np.testing.assert_allclose(caller.read(0), param, rtol=1e-6, atol=1e-7)


def test_rows_without_a_gradient_stay_as_they_are(caller: Caller) -> None:
    table = np.arange(40, dtype=np.float32).reshape(20, 2)
    # A program that changes every row it sees shows which rows it was given.
    program = exported(lambda g, v: (v + 100 + g,), open_rows(2), open_rows(2))
    caller.create(0, table)
    trained = [messages.TrainedPart(0, [], 0, True)]
    caller.ask(messages.RegisterOptimizer(0, [], trained, 1), [program])
    step = messages.Apply(0, 0, [messages.Gradient(0, True)])
    ids = np.array([3, 19], np.int32)
    assert caller.push(step, buffers=[ids, np.ones((2, 2), np.float32)]) == []
    expected = table.copy()
    expected[ids] += 101
    np.testing.assert_array_equal(caller.read(0), expected)
    empty = [np.empty(0, np.int32), np.empty((0, 2), np.float32)]
    assert caller.push(step, buffers=empty) == []
    np.testing.assert_array_equal(caller.read(0), expected)


def counting(caller: Caller, *, is_row_wise: bool = True) -> messages.RegisterOptimizer:
    """Two tables with a shared count of steps."""
    caller.create(0, np.zeros((20, 2), np.float32))
    caller.create(1, np.zeros((4, 2), np.float32))
    caller.create(2, np.int32(0))
    program = exported(lambda g, v, c: (v + g, c + 1), open_rows(2), open_rows(2), SCALAR)
    trained = [messages.TrainedPart(part, [], 0, is_row_wise) for part in (0, 1)]
    spec = messages.RegisterOptimizer(0, [2], trained, 1)
    caller.ask(spec, [program])
    return spec


def test_shared_state_grows_once_per_step_even_without_rows(caller: Caller) -> None:
    counting(caller)
    both = messages.Apply(0, 0, [messages.Gradient(0, True), messages.Gradient(1, False)])
    none = [np.empty(0, np.int32), np.empty((0, 2), np.float32)]
    assert caller.push(both, buffers=[*none, np.ones((4, 2), np.float32)]) == []
    assert caller.read(2) == 1
    alone = messages.Apply(0, 0, [messages.Gradient(0, True)])
    assert caller.push(alone, buffers=none) == []
    assert caller.read(2) == 2 and (caller.read(0) == 0).all() and (caller.read(1) == 1).all()


def test_bar16_a_step_is_made_once(caller: Caller) -> None:
    counting(caller)
    step = messages.Apply(0, 0, [messages.Gradient(1, False)])
    for incarnation in (2, 3, 2):
        ones = np.ones((4, 2), np.float32)
        assert caller.push(step, buffers=[ones], closure=9, incarnation=incarnation) == []
    assert caller.read(2) == 1 and (caller.read(1) == 1).all()
    # An update of the part with the number of the optimizer is another change.
    update = messages.Update(0, "assign_add", 0)
    caller.push(update, buffers=[np.ones((20, 2), np.float32)], closure=9)
    assert (caller.read(0) == 1).all()


@pytest.mark.parametrize(
    ("gradients", "buffers", "code"),
    [
        ([messages.Gradient(5, False)], [np.ones(8, np.float32)], "NotFoundError"),
        ([messages.Gradient(1, False)] * 2, [np.ones(8, np.float32)] * 2, "InvalidArgumentError"),
        ([messages.Gradient(1, False)], [np.ones(7, np.float32)], "ProtocolError"),
        ([messages.Gradient(1, True)], [[4], np.ones(2, np.float32)], "InvalidArgumentError"),
        ([messages.Gradient(1, True)], [[1, 0], np.ones(4, np.float32)], "InvalidArgumentError"),
        ([messages.Gradient(1, True)], [[1], np.ones(4, np.float32)], "ProtocolError"),
    ],
)
def test_a_bad_step_changes_nothing(
    caller: Caller, gradients: list[Any], buffers: list[Any], code: str
) -> None:
    counting(caller)
    bad = [np.asarray(b, np.int32) if isinstance(b, list) else b for b in buffers]
    good = messages.Update(0, "assign_add", 1)
    ones = np.ones((4, 2), np.float32)
    step = messages.Apply(1, 0, [messages.Gradient(0, False), *gradients])
    (failure,) = caller.push(good, step, buffers=[ones, np.ones((20, 2), np.float32), *bad])
    assert failure.error.code == code and "task:3" in failure.error.text
    assert all((caller.read(part) == 0).all() for part in (0, 1, 2))


def test_bad_registrations_are_refused(caller: Caller) -> None:
    spec = counting(caller)
    good = exported(lambda g, v, c: (v + g, c + 1), open_rows(2), open_rows(2), SCALAR)
    narrow = exported(lambda g, v, c: (v + g, c + 1), open_rows(3), open_rows(3), SCALAR)
    fewer = exported(lambda g, v: (v + g,), open_rows(2), open_rows(2))
    untyped = exported(lambda g, v, c: (v + g, c + 1.0), open_rows(2), open_rows(2), SCALAR)
    first, second = spec.trained
    swap = messages.TrainedPart
    caller.create(3, np.zeros((7, 2), np.float32))
    with_slot = exported(lambda g, v, m, c: (v, m, c), *[open_rows(2)] * 3, SCALAR)
    cases: list[tuple[list[Any], list[int], list[Any], type[Exception]]] = [
        ([first], [2], [], rx.errors.ProtocolError),
        ([first], [2], [b"nothing"], rx.errors.InvalidArgumentError),
        ([first], [2], [narrow], rx.errors.InvalidArgumentError),
        ([first], [2], [fewer], rx.errors.InvalidArgumentError),
        ([first], [2], [untyped], rx.errors.InvalidArgumentError),
        ([first, first], [2], [good], rx.errors.InvalidArgumentError),
        ([swap(0, [], 1, True)], [2], [good], rx.errors.InvalidArgumentError),
        ([swap(0, [0], 0, True)], [2], [with_slot], rx.errors.InvalidArgumentError),
        ([swap(0, [3], 0, True)], [2], [with_slot], rx.errors.InvalidArgumentError),
        ([swap(9, [], 0, True)], [2], [good], rx.errors.NotFoundError),
        ([second], [9], [good], rx.errors.NotFoundError),
    ]
    for trained, shared, programs, error in cases:
        count = len(programs) or 1
        with pytest.raises(error, match="task:3"):
            caller.ask(messages.RegisterOptimizer(0, shared, trained, count), programs)
    # The one that was there before still works.
    step = messages.Apply(0, 0, [messages.Gradient(1, False)])
    assert caller.push(step, buffers=[np.ones((4, 2), np.float32)]) == []
    assert caller.read(2) == 1


def test_an_optimizer_without_parts_here_is_accepted(caller: Caller) -> None:
    caller.ask(messages.RegisterOptimizer(4, [], [], 0))
    assert caller.push(messages.Apply(0, 4, [])) == []


def test_steps_on_different_sets_of_parts(caller: Caller) -> None:
    counting(caller)
    first = messages.Gradient(0, False), np.ones((20, 2), np.float32)
    second = messages.Gradient(1, False), np.ones((4, 2), np.float32)
    for chosen in ([first], [second], [first, second], [second, first]):
        step = messages.Apply(0, 0, [gradient for gradient, _ in chosen])
        assert caller.push(step, buffers=[value for _, value in chosen]) == []
    assert (caller.read(0) == 3).all() and (caller.read(1) == 3).all() and caller.read(2) == 4


def test_a_program_that_changes_shapes_is_refused(caller: Caller) -> None:
    caller.create(0, np.zeros((4, 2), np.float32))
    double = exported(lambda g, v: (jnp.concatenate([v, g]),), open_rows(2), open_rows(2))
    spec = messages.RegisterOptimizer(0, [], [messages.TrainedPart(0, [], 0, True)], 1)
    with pytest.raises(rx.errors.InvalidArgumentError, match="return shapes"):
        caller.ask(spec, [double])
    assert (caller.read(0) == 0).all()


def test_an_optimizer_may_be_registered_again_with_more_parts(caller: Caller) -> None:
    spec = counting(caller)
    caller.create(3, np.zeros((6, 2), np.float32))
    program = exported(lambda g, v, c: (v - g, c + 1), open_rows(2), open_rows(2), SCALAR)
    more = [*spec.trained, messages.TrainedPart(3, [], 0, False)]
    caller.ask(messages.RegisterOptimizer(0, [2], more, 1), [program])
    step = messages.Apply(0, 0, [messages.Gradient(3, False)])
    assert caller.push(step, buffers=[np.ones((6, 2), np.float32)]) == []
    assert (caller.read(3) == -1).all()


def test_dropping_a_part_leaves_the_others_trained(caller: Caller) -> None:
    counting(caller)
    caller.ask(messages.DropParts([0]))
    ones = np.ones((4, 2), np.float32)
    assert caller.push(messages.Apply(0, 0, [messages.Gradient(1, False)]), buffers=[ones]) == []
    gone = messages.Apply(0, 0, [messages.Gradient(0, False)])
    (failure,) = caller.push(gone, buffers=[np.ones((20, 2), np.float32)])
    assert failure.error.code == "NotFoundError"
    caller.ask(messages.DropParts([1]))
    assert caller.counters()["optimizers"] == 0


def test_values_change_by_steps_and_by_updates_while_they_are_read(caller: Caller) -> None:
    size = 50_000
    caller.create(0, np.zeros(size, np.float32))
    program = exported(lambda g, v: (v + g,), open_rows(), open_rows())
    caller.ask(
        messages.RegisterOptimizer(0, [], [messages.TrainedPart(0, [], 0, True)], 1), [program]
    )
    ones, held = np.ones(size, np.float32), []
    step = messages.Apply(0, 0, [messages.Gradient(0, False)])
    rows = messages.Apply(0, 0, [messages.Gradient(0, True)])
    update = messages.Update(0, "assign_add", 0)
    everything = np.arange(size, dtype=np.int32)
    for _ in range(3):
        for change, buffers in ((step, [ones]), (update, [ones]), (rows, [everything, ones])):
            held.append(caller.read(0))
            assert caller.push(change, buffers=buffers) == []
    assert [(value.min(), value.max()) for value in held] == [(i, i) for i in range(9)]
    assert (caller.read(0) == 9).all()


@pytest.mark.parametrize("size", [3, 50_000])
def test_programs_that_hand_their_arguments_through(caller: Caller, size: int) -> None:
    for part in range(2):
        caller.create(part, np.full(size, part, np.float32))
    program = exported(lambda g, v, m: (m, v), *[open_rows()] * 3)
    trained = [messages.TrainedPart(0, [1], 0, True)]
    caller.ask(messages.RegisterOptimizer(0, [], trained, 1), [program])
    ones = np.ones(size, np.float32)
    step = messages.Apply(0, 0, [messages.Gradient(0, False)])
    update = messages.Update(1, "assign_add", 0)
    # The values change places; then one of them is changed in place.
    expected = [0, 1]
    for _ in range(4):
        assert caller.push(step, update, buffers=[ones, ones]) == []
        expected = [expected[1] + 1, expected[0]]
        assert [caller.read(part).min() for part in range(2)] == expected
        assert [caller.read(part).max() for part in range(2)] == expected


def test_other_types_and_gradients_of_their_own_type(caller: Caller) -> None:
    caller.create(0, np.zeros((3, 2), jnp.bfloat16))
    caller.create(1, np.zeros((3,), np.float64))
    mixed = exported(
        lambda g, v: (v - g.astype(v.dtype),), open_rows(2), open_rows(2, dtype=jnp.bfloat16)
    )
    with jax.enable_x64(True):
        wide = exported(lambda g, v: (v - g,), *[open_rows(dtype=np.float64)] * 2)
    trained = [messages.TrainedPart(0, [], 0, True), messages.TrainedPart(1, [], 1, True)]
    caller.ask(messages.RegisterOptimizer(0, [], trained, 2), [mixed, wide])
    step = messages.Apply(0, 0, [messages.Gradient(0, False), messages.Gradient(1, False)])
    third = np.full(3, 1 / 3)
    assert caller.push(step, buffers=[np.full((3, 2), 1.5, np.float32), third]) == []
    assert (caller.read(0) == -1.5).all()
    np.testing.assert_array_equal(caller.read(1), -third, strict=True)


def test_slots_count_as_slot_bytes_and_parts_without_rows_are_passed_over(caller: Caller) -> None:
    caller.create(0, np.zeros((0, 2), np.float32))
    caller.create(1, np.zeros((0, 2), np.float32))
    caller.create(2, np.zeros((4, 2), np.float32))
    caller.create(3, np.zeros((4, 2), np.float32))
    program = exported(lambda g, v, m: (v + g, m + g), *[open_rows(2)] * 3)
    trained = [messages.TrainedPart(0, [1], 0, True), messages.TrainedPart(2, [3], 0, True)]
    caller.ask(messages.RegisterOptimizer(0, [], trained, 1), [program])
    found = caller.counters()
    assert (found["bytes"], found["slot_bytes"], found["optimizers"]) == (64, 32, 1)
    step = messages.Apply(0, 0, [messages.Gradient(0, False), messages.Gradient(2, False)])
    empty, ones = np.empty((0, 2), np.float32), np.ones((4, 2), np.float32)
    assert caller.push(step, buffers=[empty, ones]) == []
    assert (caller.read(2) == 1).all() and (caller.read(3) == 1).all()


def test_unaligned_buffers_are_taken_as_they_come(caller: Caller) -> None:
    counting(caller)
    raw = b"x" + np.ones((4, 2), np.float32).tobytes()
    step = messages.Apply(0, 0, [messages.Gradient(1, False)])
    update = messages.Update(1, "assign_add", 1)
    question = messages.Exchange([messages.Push(1, [step, update])], [])
    answer, _ = caller.ask(question, [memoryview(raw)[1:], memoryview(raw)[1:]])
    assert answer.failures == []
    assert (caller.read(1) == 2).all()
    ids = memoryview(b"y" + octets(np.array([1, 3])).tobytes())[1:]
    read = messages.Exchange([], [messages.Read(1, -1, True)])
    _, values = caller.ask(read, [ids])
    assert (np.frombuffer(values[0], np.float32) == 2).all()
