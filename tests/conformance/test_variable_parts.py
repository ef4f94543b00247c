"""Sliced assignment: `v[index].assign(value)`, and `v[index]` as an array like any other."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameter_servers import Desk
from strategies_under_test import STRATEGIES
from test_sharded_variables import sharded
from vocabulary import refused

import replicax as rx
from replicax.foundation import jax_compat

SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN
FIRST = rx.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = rx.VariableSynchronization.ON_READ
WHOLE = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2)
FEW = pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "one_device")

# Indices that NumPy understands as we do.
BASIC: list[Any] = [
    0,
    -1,
    slice(1, 3),
    slice(None),
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(2, 2),
    (slice(None), 0),
    (..., 1),
    ...,
    (),
    (0, 1, 1),
    (None, 1),
    (1, None, slice(0, 2)),
    (slice(0, 2), slice(1, None), -1),
    (slice(None), slice(None, None, -1)),
]
ARRAYS: list[Any] = [
    np.array([2, 0]),
    np.array([True, False, False, True]),
    (slice(None), np.array([True, False, True])),
    (np.array([0, 3]), slice(None), np.array([1, 0])),
]


def changed(op: str, index: Any, value: Any, array: Any = WHOLE) -> np.ndarray:
    after = np.array(array)
    if op == "assign":
        after[index] = value
    elif op == "assign_add":
        after[index] += value
    else:
        after[index] -= value
    return after


def for_part(index: Any, array: Any = WHOLE) -> np.ndarray:
    shape = np.asarray(array)[index].shape
    return np.arange(1.0, 1.0 + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["default", "mirrored_2", "virtual_2", "central_2"])
def test_parts_are_assigned_from_cross_replica_code(name: str, how: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        v = rx.Variable(WHOLE)
        # Compiling each would take most of a minute.
        for i, index in enumerate(BASIC + ARRAYS):
            op = ("assign", "assign_add", "assign_sub")[i % 3]
            value = for_part(index)

            def change(index: Any = index, op: str = op, value: Any = value) -> Any:
                return getattr(v[index], op)(value)

            v.assign(WHOLE)
            assert (rx.function(change) if how == "compiled" else change)() is v
            np.testing.assert_array_equal(v.numpy(), changed(op, index, value), str(index))
            for copy in v.components:
                np.testing.assert_array_equal(copy.numpy(), v.numpy())


@FEW
def test_parts_are_aggregated_in_replica_code(strategy: Any, run: Any) -> None:
    count = strategy.num_replicas_in_sync
    index = (slice(1, 3), ..., 0)
    numbers = [i + 1.0 for i in range(count)]
    for aggregation, combined in ((SUM, sum(numbers)), (MEAN, np.mean(numbers)), (FIRST, 1.0)):
        with strategy.scope():
            v = rx.Variable(WHOLE, aggregation=aggregation)

        def change(v: Any = v) -> Any:
            own = 1.0 + rx.get_replica_context().replica_id_in_sync_group
            v[index].assign(own * jnp.ones((2, 3)))
            v[3].assign_add(own * jnp.ones((3, 2)))
            return v[index].sum()

        if aggregation is not MEAN or run.executor == "compiled":
            result = run(strategy, change)
            want = changed("assign", index, combined if count > 1 else 1.0)
            want = changed("assign_add", 3, combined if count > 1 else 1.0, want)
            for copy in v.components:
                np.testing.assert_array_equal(copy.numpy(), want)
            for own in strategy.experimental_local_results(result):
                assert float(own) == want[index].sum()


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_parts_of_on_read_variables(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable([0.0, 0.0, 8.0], synchronization=ON_READ, aggregation=SUM)

    def change() -> None:
        v[1].assign_add(1.0 + rx.get_replica_context().replica_id_in_sync_group)

    run(strategy, change)
    assert v.numpy().tolist() == [0.0, 3.0, 16.0]
    with strategy.scope():
        v[1:].assign([4.0, 6.0])
        assert v.numpy().tolist() == [0.0, 4.0, 6.0]
        with refused(ValueError, "`assign_add` on the ON_READ"):
            v[0].assign_add(1.0)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_an_index_must_be_the_same_on_all_replicas(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0, 3.0], aggregation=SUM)
        first = rx.Variable([1.0, 2.0, 3.0], aggregation=FIRST)

    def change(v: Any) -> None:
        own = rx.get_replica_context().replica_id_in_sync_group
        v[own].assign(7.0)

    with pytest.raises((ValueError, NotImplementedError), match="same"):
        run(strategy, lambda: change(v))
    assert v.numpy().tolist() == [1.0, 2.0, 3.0]
    if run.executor != "threaded":
        run(strategy, lambda: change(first))
        assert first.numpy().tolist() == [7.0, 2.0, 3.0]
    run(strategy, lambda: v[np.array([0, 2])].assign_add(1.0))
    assert v.numpy().tolist() == [3.0, 2.0, 5.0]


@pytest.mark.strategies("mirrored_2", "central_2")
def test_parts_in_update_and_in_gradients(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0, 3.0], aggregation=MEAN)
        strategy.extended.update(v, lambda copy: copy[0].assign_sub(1.0))
        assert v.numpy().tolist() == [0.0, 2.0, 3.0]

    def loss() -> Any:
        v[2].assign(5.0)
        return v[0] * 3.0 + v[2]

    for fn in (rx.value_and_grad(loss, v), rx.function(rx.value_and_grad(loss, v))):
        value, gradient = fn()
        assert float(value) == 5.0
        assert np.asarray(gradient).tolist() == [3.0, 0.0, 0.0]
        assert v.numpy().tolist() == [0.0, 2.0, 5.0]


def test_an_index_that_the_program_computes() -> None:
    v = rx.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    @rx.function
    def change(i: Any) -> None:
        v[i].assign([0.0, 0.0])
        v[i, 1].assign_add(7.0)

    change(jnp.asarray(1))
    change(jnp.asarray(-1))
    assert v.numpy().tolist() == [[1.0, 2.0], [0.0, 7.0], [0.0, 7.0]]
    change(jnp.asarray(9))
    assert v.numpy().tolist() == [[1.0, 2.0], [0.0, 7.0], [0.0, 7.0]]
    v[jnp.asarray(0)].assign([8.0, 9.0])
    assert v[0].tolist() == [8.0, 9.0]


def test_the_value_is_checked_and_cast() -> None:
    v = rx.Variable(np.zeros((3, 2), np.float32), name="v")
    v[1].assign(2)
    v[2:].assign(np.ones((1, 2), np.int32))
    v[0].assign(rx.Variable([5.0, 6.0]))
    assert v.numpy().tolist() == [[5.0, 6.0], [2.0, 2.0], [1.0, 1.0]]
    whole = rx.Variable([1, 2])
    for index, value, text in (
        (slice(0, 2), [1.0, 2.0], r"shape \(2, 2\)"),
        (0, [[1.0, 2.0]], r"shape \(2,\)"),
        (0, "x", "numbers"),
        ((0, 0, 0), 1.0, "indices"),
    ):
        with pytest.raises((ValueError, IndexError), match=text):
            v[index].assign(value)
    for index in (3, -4, (0, 2), np.array([0, 5])):
        part = v[0]
        with refused(rx.errors.InvalidArgumentError, "index into shape"):
            v._update("slice_assign", (index, part))
    with refused(rx.errors.InvalidArgumentError, "type int32"):
        whole[0].assign(1.5)
    assert v.numpy().tolist() == [[5.0, 6.0], [2.0, 2.0], [1.0, 1.0]]
    scalar = rx.Variable(1.0)
    scalar[...].assign(4.0)
    assert float(scalar) == 4.0


# A part is an array like any other.


def uses_of(part: Any) -> list[Any]:
    """What code does with an array of shape (2,) that must not notice where it comes from."""
    assert isinstance(part, jax.Array)
    carried, _ = jax.lax.scan(lambda c, x: (c + x, x), part, jnp.ones((3, 2)))
    return [
        part + 1.0,
        jnp.dot(part, part),
        jax.lax.add(part, part),
        jax.jit(lambda x: x * 2.0)(part),
        jax.lax.while_loop(lambda c: c.sum() < 50.0, lambda c: c + 10.0, part),
        jax.lax.cond(part.sum() > 0, lambda x: x, lambda x: -x, part),
        jax.grad(lambda x: (x**2).sum())(part),
        jax.vmap(lambda x: x * 3.0)(part),
        jnp.stack([part, part]),
        jax.tree.map(lambda x: x + 1.0, {"a": part})["a"],
        part.at[0].set(9.0),
        carried,
        part[0],
    ]


def test_a_part_is_used_like_any_array() -> None:
    v = rx.Variable([[1.0, 2.0], [3.0, 4.0]])
    want = [np.asarray(x) for x in uses_of(jnp.asarray([3.0, 4.0]))]
    for found in (uses_of(v[1]), rx.function(lambda: uses_of(v[1]))()):
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b)
    part = v[1]
    assert repr(part) == repr(jnp.asarray([3.0, 4.0]))
    assert np.asarray(part).tolist() == [3.0, 4.0]
    assert pickle.loads(pickle.dumps(part)).tolist() == [3.0, 4.0]
    assert f"{v[0, 0]:.2f}" == "1.00"
    assert {2: "x"}[int(v[0, 1])] == "x"
    v[1].assign([0.0, 0.0])
    assert part.tolist() == [3.0, 4.0], "what was read before does not change"
    with pytest.raises(AttributeError):
        v.read_value().assign  # noqa: B018


@pytest.mark.parametrize("index", [slice(None), ..., ()])
def test_parts_of_two_variables_that_share_an_array_are_apart(index: Any) -> None:
    import copy

    v = rx.Variable([1.0, 2.0])
    w = copy.copy(v)
    of_v, of_w = v[index], w[index]
    of_v.assign([3.0, 4.0])
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([3.0, 4.0], [1.0, 2.0])
    of_w.assign_add([1.0, 1.0])
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([3.0, 4.0], [2.0, 3.0])


def test_methods_of_tracers_go_with_the_tracers() -> None:
    v = rx.Variable([1.0, 2.0])
    before = len(jax_compat._methods_of_tracers)
    rx.function(lambda: v[0] + v[1])()
    rx.value_and_grad(lambda: v[0] * v[1], v)()
    assert len(jax_compat._methods_of_tracers) == before


# Variables that are kept in rows.


def test_parts_of_sharded_variables() -> None:
    for i, index in enumerate(BASIC):
        for how in ("eager", "compiled") if i % 4 == 0 else ("eager",):
            table = sharded(WHOLE, 3)
            op = ("assign", "assign_add", "assign_sub")[i % 3]
            value = for_part(index)

            def change(table: Any = table, index: Any = index, op: str = op, x: Any = value) -> Any:
                getattr(table[index], op)(x)

            (rx.function(change) if how == "compiled" else change)()
            want = changed(op, index, value)
            np.testing.assert_array_equal(table.numpy(), want, f"{index} {op}")
    table = sharded(WHOLE, 3)
    table[np.array([3, 0])].assign(np.zeros((2, 3, 2)))
    np.testing.assert_array_equal(table.numpy(), changed("assign", [3, 0], 0.0))
    with refused(NotImplementedError, "kept in rows"):
        table[np.array([3, 0]), 1].assign(np.zeros((2, 2)))


@pytest.mark.parametrize("parts", [None, 2])
def test_parts_of_variables_on_servers(desk: Desk, parts: int | None) -> None:
    partitioners = rx.experimental.partitioners
    partitioner = None if parts is None else partitioners.FixedShardsPartitioner(parts)
    with desk.strategy(variable_partitioner=partitioner).scope():
        v = rx.Variable(WHOLE, name="v")
        number = rx.Variable(1.0)
    number[...].assign_add(2.0)
    assert float(number) == 3.0
    want = WHOLE
    for i, index in enumerate(BASIC):
        op = ("assign", "assign_add", "assign_sub")[i % 3]
        value = for_part(index)
        getattr(v[index], op)(value)
        want = changed(op, index, value, want)
        np.testing.assert_array_equal(v.numpy(), want, f"{index} {op}")
