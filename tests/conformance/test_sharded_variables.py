"""`ShardedVariable`: in parts, it does what the whole would do."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.variables.partitioners import split_rows

WHOLE = np.arange(64, dtype=np.float32).reshape(32, 2) + 1
SCATTERS = ["add", "sub", "mul", "div", "min", "max", "update"]


def sharded(value: Any, num_parts: int, name: str = "table") -> rx.ShardedVariable:
    value = np.asarray(value)
    rows = split_rows(value.shape[0], num_parts)
    parts = [rx.Variable(value[a:b], name=f"{name}/part_{i}") for i, (a, b) in enumerate(rows)]
    return rx.ShardedVariable(parts, name=name)


# Making.


@pytest.mark.parametrize(
    ("num_rows", "num_parts", "expected"),
    [(10, 4, [3, 3, 2, 2]), (5, 2, [3, 2]), (32, 3, [11, 11, 10]), (3, 3, [1, 1, 1])],
)
def test_T82_rows_of_parts(num_rows: int, num_parts: int, expected: list[int]) -> None:
    table = sharded(np.arange(2.0 * num_rows).reshape(num_rows, 2), num_parts)
    assert [part.shape[0] for part in table.variables] == expected
    assert table.shape == (num_rows, 2) and len(table.starts) == num_parts
    np.testing.assert_array_equal(table.numpy(), np.arange(2.0 * num_rows).reshape(num_rows, 2))
    for row in range(num_rows):
        part = table.part_of(row)
        start = table.starts[part]
        assert start <= row < start + expected[part]


@pytest.mark.parametrize("given", [[], (), None, 3, {"a": 1}, "parts", [1.0], [np.ones((2, 2))]])
def test_T92_parts_must_be_a_list_of_variables(given: Any) -> None:
    with refused(errors.ArgumentTypeError, "ShardedVariable"):
        rx.ShardedVariable(given)


def test_T92_one_variable_or_a_container_is_no_list_of_parts() -> None:
    with refused(errors.ArgumentTypeError, "list of variables"):
        rx.ShardedVariable(rx.Variable([1.0]))  # type: ignore[arg-type]
    with refused(errors.ArgumentTypeError, "must be variables"):
        rx.ShardedVariable([sharded(WHOLE, 2)])


@pytest.mark.parametrize(
    "second",
    [np.ones((2, 2), np.int32), np.ones((2, 3), np.float32), np.ones(2, np.float32), np.float32(1)],
)
def test_T92_parts_must_fit_together(second: Any) -> None:
    first = rx.Variable(np.ones((2, 2), np.float32), name="a")
    with refused(errors.InvalidArgumentError, "one type and shapes.*'a'.*'b'"):
        rx.ShardedVariable([first, rx.Variable(second, name="b")])


def test_X1_the_container_has_the_name_and_its_parts_have_numbers() -> None:
    table = sharded(WHOLE, 3, "emb")
    assert table.name == "emb"
    assert [part.name for part in table.variables] == ["emb/part_0", "emb/part_1", "emb/part_2"]
    assert repr(table).startswith("ShardedVariable 'emb:0' shape=(32, 2)")
    assert list(table) == table.variables and table.components == tuple(table.variables)


# Writing.


@pytest.mark.parametrize("kind", SCATTERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_T87_scatter_equals_the_same_on_one_variable(kind: str, compiled: bool) -> None:
    """Parts of 11, 11 and 10 rows; rows of every part, in no order, the edges among them."""
    whole, table = rx.Variable(WHOLE), sharded(WHOLE, 3)
    rows = [31, 0, 10, 11, 21, 22, 5]
    values = np.linspace(0.5, 40, 14, dtype=np.float32).reshape(7, 2)

    def change(target: Any) -> None:
        getattr(target, f"scatter_{kind}")(rx.IndexedSlices(values, rows))

    for target in (whole, table):
        run = functools.partial(change, target)
        (rx.function(run) if compiled else run)()
    np.testing.assert_array_equal(table.numpy(), whole.numpy())
    assert not np.array_equal(whole.numpy(), WHOLE)


@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "min", "max"])
def test_T87_rows_that_occur_twice_count_twice(kind: str) -> None:
    whole, table = rx.Variable(WHOLE), sharded(WHOLE, 3)
    slices = rx.IndexedSlices(np.full((5, 2), 4.0, np.float32), [3, 3, 30, 11, 30])
    for target in (whole, table):
        getattr(target, f"scatter_{kind}")(slices)
    np.testing.assert_allclose(table.numpy(), whole.numpy(), rtol=1e-6)


def test_T87_other_cuts_and_other_ranks_are_refused() -> None:
    uneven = rx.ShardedVariable([rx.Variable(WHOLE[:4]), rx.Variable(WHOLE[4:])], name="uneven")
    slices = rx.IndexedSlices(np.ones((1, 2), np.float32), [0])
    for kind in SCATTERS:
        with refused(errors.UnsupportedError, "parts of equal size.*4, 28"):
            getattr(uneven, f"scatter_{kind}")(slices)
    np.testing.assert_array_equal(uneven.numpy(), WHOLE)
    # All else does not depend on the cut.
    assert uneven.assign_add(np.ones_like(WHOLE))[30].tolist() == [62.0, 63.0]
    table = sharded(WHOLE, 3)
    with refused(errors.InvalidArgumentError, "list of row numbers.*2 dimensions"):
        table.scatter_add(rx.IndexedSlices(np.ones((1, 2), np.float32), [[0, 1]]))
    with refused(errors.InvalidArgumentError, r"indices in \[0, 32\)"):
        table.scatter_add(rx.IndexedSlices(np.ones((1, 2), np.float32), [32]))
    with refused(errors.ArgumentTypeError, "IndexedSlices"):
        table.scatter_add(np.ones((1, 2)))
    np.testing.assert_array_equal(table.numpy(), WHOLE)


def test_T88_changes_return_the_container_itself() -> None:
    table = sharded(WHOLE, 3)
    assert table.assign(WHOLE + 1) is table
    np.testing.assert_array_equal(table.numpy(), WHOLE + 1)
    assert table.assign_add(WHOLE) is table
    assert table.assign_sub(np.ones_like(WHOLE)) is table
    np.testing.assert_array_equal(table.numpy(), 2 * WHOLE)
    slices = rx.IndexedSlices(np.ones((2, 2), np.float32), [4, 31])
    for kind in SCATTERS:
        assert getattr(table, f"scatter_{kind}")(slices) is table
    with refused(errors.InvalidArgumentError, r"'table' needs a value of shape \(32, 2\)"):
        table.assign(np.zeros((31, 2), np.float32))


def test_changes_in_a_compiled_function_reach_the_parts() -> None:
    table = sharded(WHOLE, 3)

    @rx.function
    def change(x: Any) -> Any:
        table.assign_add(x)
        table.variables[1].assign(jnp.zeros((11, 2)))
        table.scatter_update(rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([12])))
        return table[10:14], table.read_value().sum()

    rows, total = change(jnp.ones((32, 2)))
    expected = WHOLE + 1
    expected[11:22] = 0
    expected[12] = 1
    np.testing.assert_array_equal(rows, expected[10:14])
    np.testing.assert_array_equal(table.numpy(), expected)
    assert float(total) == expected.sum()


# Reading.

KEYS: list[Any] = [
    0,
    31,
    -1,
    -32,
    np.int64(11),
    slice(None),
    slice(3, 17),
    slice(3, 30, 4),
    slice(-5, None),
    slice(None, -30),
    slice(None, None, -1),
    slice(28, 2, -5),
    slice(20, 10),
    slice(5, 5),
    slice(100, 200),
    slice(-100, 2),
    Ellipsis,
    None,
    (),
    (3, 1),
    (slice(8, 25), 1),
    (slice(8, 25), slice(None, None, -1)),
    (Ellipsis, 0),
    (5, Ellipsis),
    (slice(9, 13), Ellipsis, None),
    (slice(9, 13), None, 1),
    (-1, -1),
    (slice(None), [1, 0, 1]),
    (4, [1, 0]),
    (slice(20, 24), [0, 1]),
    np.array([6, 0, 31, 6]),
    (np.array([1, 30]), np.array([0, 1])),
    np.array([[1, 2], [30, 31]]),
    np.arange(32) % 7 == 0,
    (None, slice(2, 4)),
    True,
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slicing_equals_slicing_the_whole(key: Any) -> None:
    table = sharded(WHOLE, 3)
    expected = WHOLE[key]
    found = table[key]
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


def test_slicing_is_the_same_in_a_compiled_function() -> None:
    table = sharded(WHOLE, 3)
    keys = [3, slice(30, 2, -7), (slice(9, 13), 1), Ellipsis]
    found = rx.function(lambda: [table[key] for key in keys])()
    for key, value in zip(keys, found, strict=True):
        np.testing.assert_array_equal(value, WHOLE[key])
    row = rx.function(lambda i: table[i])(jnp.array(12))
    np.testing.assert_array_equal(row, WHOLE[12])


@pytest.mark.parametrize("row", [32, -33, (40, 0)])
def test_rows_out_of_range_are_refused(row: Any) -> None:
    with refused(errors.OutOfRangeError, r"'table' must be in \[-32, 32\)"):
        sharded(WHOLE, 3)[row]


def test_slicing_leaves_other_parts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = sharded(WHOLE, 3)
    read: list[Any] = []
    own = type(table.variables[0]).read_value
    monkeypatch.setattr(
        type(table.variables[0]), "read_value", lambda v: (read.append(v.name), own(v))[1]
    )
    np.testing.assert_array_equal(table[12:20], WHOLE[12:20])
    assert read == ["table/part_1"]


def test_T90_sparse_read_groups_rows_by_part() -> None:
    table = sharded(np.arange(8.0).reshape(8, 1), 2)
    assert table.sparse_read([6, 0, 5, 1]).reshape(-1).tolist() == [0.0, 1.0, 6.0, 5.0]
    with refused(errors.InvalidArgumentError, "integers"):
        table.sparse_read([0.5])


@pytest.mark.parametrize("ids", [[6, 0, 31, 5, 6], [[1, 2], [30, 0]], [], 4])
def test_S169_lookups_keep_the_order_of_the_ids(ids: Any) -> None:
    table = sharded(WHOLE, 3)
    ids = np.asarray(ids, np.int32)
    for params in (table, table.variables):
        np.testing.assert_array_equal(rx.nn.embedding_lookup(params, ids), WHOLE[ids])
        found = rx.function(lambda i, p=params: rx.nn.embedding_lookup(p, i))(ids)
        np.testing.assert_array_equal(found, WHOLE[ids])


def test_S168_it_computes_and_converts_like_an_array() -> None:
    table = sharded(WHOLE, 3)
    x = np.full((32, 2), 3.0, np.float32)
    np.testing.assert_array_equal(x * table, x * WHOLE)
    np.testing.assert_array_equal(table + 1, WHOLE + 1)
    np.testing.assert_array_equal(table @ np.eye(2, dtype=np.float32), WHOLE)
    np.testing.assert_array_equal(jnp.asarray(table), WHOLE)
    np.testing.assert_array_equal(np.asarray(table), WHOLE)
    np.testing.assert_array_equal(rx.function(lambda: table * 2.0)(), WHOLE * 2)
    assert float(jnp.sum(table.read_value())) == WHOLE.sum()


def test_S166_S167_modules_list_the_parts() -> None:
    class Dense(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sharded(np.ones((100, 10), np.float32), 2, "w")
            self.b = rx.Variable(np.zeros(10), name="b")

    dense = Dense()
    assert len(dense.variables) == 3
    assert all(isinstance(v, rx.Variable) for v in dense.variables)
    assert sorted(v.name for v in dense.variables) == ["b", "w/part_0", "w/part_1"]
    assert sorted(v.name for v in dense.trainable_variables) == ["b", "w/part_0", "w/part_1"]


# Gradients.


def test_limit_gradients_on_the_container() -> None:
    table, whole = sharded(WHOLE, 3), rx.Variable(WHOLE)

    def loss(target: Any) -> Any:
        return jnp.sum(target * target) + jnp.sum(target[3:15] ** 3)

    for compiled in (False, True):
        for target in (table, table.variables):
            run: Any = rx.value_and_grad(lambda: loss(table), target)
            value, found = (rx.function(run) if compiled else run)()
            expected_value, expected = rx.value_and_grad(lambda: loss(whole), whole)()
            joined = np.concatenate(found) if isinstance(found, list) else found
            np.testing.assert_allclose(joined, expected, rtol=1e-6)
            np.testing.assert_allclose(value, expected_value, rtol=1e-6)


def test_limit_gradients_by_rows_on_the_container() -> None:
    table = sharded(WHOLE, 3)
    ids = np.array([31, 0, 12, 31])

    def loss() -> Any:
        return jnp.sum(rx.nn.embedding_lookup(table, ids) ** 2)

    dense = np.zeros_like(WHOLE)
    np.add.at(dense, ids, 2 * WHOLE[ids])
    for run in (rx.grad(loss, table), rx.function(rx.grad(loss, table))):
        found = run()
        found = found.to_dense() if isinstance(found, rx.IndexedSlices) else found
        np.testing.assert_array_equal(found, dense)
    pieces = rx.grad(loss, table.variables)()
    for (a, b), piece in zip(split_rows(32, 3), pieces, strict=True):
        piece = piece.to_dense() if isinstance(piece, rx.IndexedSlices) else piece
        np.testing.assert_array_equal(piece, dense[a:b])


def test_optimizers_take_the_parts() -> None:
    table, whole = sharded(WHOLE, 3), rx.Variable(WHOLE)
    targets = list(table.variables)
    optimizer = rx.optimizers.Optimizer(optax.adam(0.1), targets)
    alone = rx.optimizers.Optimizer(optax.adam(0.1), [whole])

    @rx.function
    def step() -> None:
        gradients = rx.grad(lambda: jnp.sum(table * table), targets)()
        optimizer.apply_gradients(zip(gradients, targets, strict=True))

    for _ in range(3):
        step()
        alone.apply_gradients([(rx.grad(lambda: jnp.sum(whole * whole), whole)(), whole)])
    np.testing.assert_allclose(table.numpy(), whole.numpy(), rtol=1e-6)
    assert int(optimizer.iterations) == 3
