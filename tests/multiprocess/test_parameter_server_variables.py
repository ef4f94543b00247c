"""Variables on parameter servers: where they are, how they are cut, and what can be done."""

from __future__ import annotations

import functools
import gc
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, becomes
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors

partitioners = rx.experimental.partitioners
WHOLE = np.arange(64, dtype=np.float32).reshape(32, 2) + 1


def tasks(*variables: Any) -> list[int]:
    return [int(v.device.split("task:")[1].split("/")[0]) for v in variables]


# Where.


def test_S162_S164_variables_go_to_the_servers_in_turn(desk: Desk) -> None:
    with desk.strategy().scope():
        made = [rx.Variable(float(i), name=f"v{i}") for i in range(4)]
    assert [v.device for v in made[:2]] == [
        "/job:ps/replica:0/task:0/device:CPU:0",
        "/job:ps/replica:0/task:1/device:CPU:0",
    ]
    assert tasks(*made) == [0, 1, 0, 1]
    assert [float(v) for v in made] == [0.0, 1.0, 2.0, 3.0]


def test_S163_a_variable_made_outside_the_scope_stays_here(desk: Desk) -> None:
    desk.strategy()
    outside = rx.Variable(1.0)
    assert "ps" not in outside.device and float(outside) == 1.0


def test_S207_X10_the_strategy_knows_its_cluster(desk: Desk) -> None:
    resolver = desk.cluster.resolver
    strategy = desk.strategy()
    found = strategy.cluster_resolver
    assert found.cluster_spec() == resolver.cluster_spec()
    assert (found.task_type, found.task_id) == ("chief", 0)
    assert strategy.extended.parameter_devices == (
        "/job:ps/replica:0/task:0/device:CPU:0",
        "/job:ps/replica:0/task:1/device:CPU:0",
    )
    assert strategy.extended.worker_devices == (
        "/job:worker/replica:0/task:0/device:CPU:0",
        "/job:worker/replica:0/task:1/device:CPU:0",
    )
    desk.leave()
    with_this = rx.experimental.ParameterServerStrategy(cluster_resolver=resolver)
    assert with_this.cluster_resolver is resolver
    with_this.close()


def test_S165_S166_S174_S181_partitioned_variables(desk: Desk) -> None:
    class Dense(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = rx.Variable(lambda: jnp.ones((100, 10)), name="w")

        def __call__(self, x: Any) -> Any:
            return x * self.w

    strategy = desk.strategy(partitioners.FixedShardsPartitioner(num_shards=2))
    with strategy.scope():
        dense = Dense()
    assert isinstance(dense.w, rx.ShardedVariable) and dense.w.name == "w"
    assert len(dense.variables) == 2
    assert all(isinstance(v, rx.Variable) for v in dense.variables)
    assert [v.name for v in dense.variables] == ["w/part_0", "w/part_1"]
    assert [v.shape for v in dense.variables] == [(50, 10), (50, 10)]
    assert tasks(*dense.variables) == [0, 1]
    np.testing.assert_array_equal(dense(np.full((100, 10), 2.0, np.float32)), np.full((100, 10), 2))
    with desk.strategy().scope():
        whole = Dense()
    assert not isinstance(whole.w, rx.ShardedVariable) and len(whole.variables) == 1


def test_T82_S176_S181_rows_and_servers_of_parts(desk: Desk) -> None:
    with desk.strategy(4).scope():
        ten = rx.Variable(np.zeros((10, 1)), name="ten")
        three = rx.Variable(np.zeros((3, 1)), name="three")
        one = rx.Variable(np.zeros((1, 5)), name="one")
        scalar = rx.Variable(0.0, name="scalar")
    assert [v.shape[0] for v in ten.variables] == [3, 3, 2, 2]
    assert tasks(*ten.variables) == [0, 1, 0, 1]
    assert [v.shape[0] for v in three.variables] == [1, 1, 1]
    assert tasks(*three.variables) == [0, 1, 0]
    assert not isinstance(one, rx.ShardedVariable) and not isinstance(scalar, rx.ShardedVariable)
    # Round-robin goes on where it was.
    assert tasks(one, scalar) == [1, 0]


def test_S175_S177_S180_T84_what_partitioners_say(desk: Desk) -> None:
    asked: list[Any] = []
    answers: list[Any] = []

    def partitioner(shape: Any, dtype: Any, **_: Any) -> Any:
        asked.append((tuple(shape), np.dtype(dtype)))
        return answers.pop(0)

    strategy = desk.strategy(partitioner)
    with strategy.scope():
        rx.Variable(1.0)
        assert asked == []
        answers += [[1, 1], [2, 1]]
        assert not isinstance(rx.Variable(np.ones((4, 2), np.float32)), rx.ShardedVariable)
        assert isinstance(rx.Variable(np.ones((4, 2), np.int32)), rx.ShardedVariable)
        assert asked == [((4, 2), np.dtype("float32")), ((4, 2), np.dtype("int32"))]
        for bad in (None, [], [0, 1, 1], [2, 2, 1], [2, 1], [1, 2, 1]):
            answers.append(bad)
            with refused(errors.InvalidArgumentError, "first axis can be cut"):
                rx.Variable(np.ones((4, 2, 2)), name="v")
        # Nothing was made, and no turn was taken.
        answers.append([1])
        assert tasks(rx.Variable(np.ones(3))) == [0]
    minimal = partitioners.MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=2)
    with desk.strategy(minimal).scope():
        small, large = rx.Variable(np.ones((100, 10), np.float32)), rx.Variable(jnp.ones((131072,)))
    assert tasks(small) == [0] and not isinstance(small, rx.ShardedVariable)
    assert isinstance(large, rx.ShardedVariable) and tasks(*large.variables) == [1, 0]


def test_S179_variables_near_others_are_not_cut(desk: Desk) -> None:
    strategy = desk.strategy(2)
    with strategy.scope():
        first = rx.Variable(0.0)
        second = rx.Variable(0.0)
        table = rx.Variable(np.ones((4, 2)), name="table")
        for near, task in [(first, 0), (second, 1), (table.variables[1], 1), (table, 0)]:
            with strategy.extended.colocate_vars_with(near):
                found = rx.Variable(np.ones((8, 2)), name="slot")
            assert not isinstance(found, rx.ShardedVariable) and tasks(found) == [task]


def test_T83_initialisers_that_know_about_parts(desk: Desk) -> None:
    seen: list[Any] = []

    def by_part(shape: Any, dtype: Any, partition_shape: Any = None, partition_offset: Any = None):
        seen.append((partition_shape, partition_offset))
        rows = (partition_shape or shape)[0]
        start = (partition_offset or (0,))[0]
        return jnp.broadcast_to((start + jnp.arange(rows, dtype=dtype))[:, None], (rows, 2))

    def in_full(shape: Any, dtype: Any) -> Any:
        return jnp.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)

    with desk.strategy(3).scope():
        knowing = rx.Variable(by_part, shape=(8, 2), dtype=jnp.float32, name="knowing")
        full = rx.Variable(in_full, shape=(8, 2), dtype=jnp.int32, name="full")
        untold = rx.Variable(lambda: jnp.arange(7.0), name="untold")
        numpy_made = rx.Variable(lambda: np.random.default_rng(0).normal(size=(5, 2)), name="np")
        key = jax.random.key(3)
        random = rx.Variable(lambda: jax.random.normal(key, (9, 2)), name="random")
    assert knowing[:, 1].tolist() == list(map(float, range(8)))
    assert {s for s in seen if s[0] is not None} == {
        ((3, 2), (0, 0)),
        ((3, 2), (3, 0)),
        ((2, 2), (6, 0)),
    }
    np.testing.assert_array_equal(full.numpy(), np.arange(16).reshape(8, 2))
    assert [v.shape for v in untold.variables] == [(3,), (2,), (2,)]
    np.testing.assert_array_equal(untold.numpy(), np.arange(7.0))
    expected = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    np.testing.assert_array_equal(numpy_made.numpy(), expected)
    np.testing.assert_array_equal(random.numpy(), jax.random.normal(key, (9, 2)))


def test_T83_initial_values_that_are_wrong_are_told(desk: Desk) -> None:
    def fails() -> Any:
        raise KeyError("no such file")

    with desk.strategy(2).scope():
        with pytest.raises(KeyError, match="no such file"):
            rx.Variable(fails, name="v")
        with refused(errors.InvalidArgumentError, "shape"):
            rx.Variable(lambda: jnp.zeros(3), shape=(4,), name="v")
        with refused(errors.ArgumentTypeError, "initial value"):
            rx.Variable(lambda: object(), name="v")
        assert tasks(rx.Variable(0.0)) == [0]


def test_T85_outer_scopes_cannot_move_variables(desk: Desk) -> None:
    strategy = desk.strategy()

    def outside(next_creator: Any, **kwargs: Any) -> Any:
        kwargs["name"] = "renamed"
        return next_creator(**kwargs)

    with rx.device("CPU:3"), strategy.scope():
        first = rx.Variable(1.0)
        with rx.device("CPU:1"):
            second = rx.Variable(1.0)
        with rx.variable_creator_scope(outside):
            third = rx.Variable(1.0, name="third")
    assert tasks(first, second, third) == [0, 1, 0] and third.name == "renamed"

    def on_other_server(next_creator: Any, **kwargs: Any) -> Any:
        return "made by the outer creator"

    with rx.variable_creator_scope(on_other_server), strategy.scope():
        assert rx.Variable(1.0) == "made by the outer creator"


@pytest.mark.parametrize("parts", [None, 2])
def test_T85_creators_outside_the_scope_pass_variables_on_to_the_servers(
    desk: Desk, parts: Any
) -> None:
    calls: list[Any] = []

    def recording(tag: str, **changes: Any) -> Any:
        def creator(next_creator: Any, **kwargs: Any) -> Any:
            calls.append((tag, kwargs["name"]))
            return next_creator(**{**kwargs, **changes})

        return creator

    with (
        rx.variable_creator_scope(recording("outermost", trainable=False)),
        rx.variable_creator_scope(recording("outer")),
        desk.strategy(parts).scope(),
        rx.variable_creator_scope(recording("inner")),
    ):
        v = rx.Variable(lambda: jnp.arange(4.0), name="v")
        first = float(v[0])
    names = ["v"] if parts is None else ["v/part_0", "v/part_1"]
    below = [(tag, name) for name in names for tag in ("outer", "outermost")]
    assert calls == [("inner", "v"), *below]
    found = v.components
    assert [c.name for c in found] == names and tasks(*found) == list(range(len(found)))
    assert first == 0.0 and not v.trainable
    np.testing.assert_array_equal(v.assign_add(np.ones(4)).numpy(), np.arange(4.0) + 1)


@pytest.mark.parametrize("parts", [None, 2])
def test_T85_creators_outside_the_scope_change_values_types_and_servers(
    desk: Desk, parts: Any
) -> None:
    strategy = desk.strategy(parts)
    with strategy.scope():
        rx.Variable(0.0)

    def doubling(next_creator: Any, **kwargs: Any) -> Any:
        given = kwargs["initial_value"]
        kwargs["initial_value"] = lambda: 2 * (given() if callable(given) else given)
        return next_creator(**{**kwargs, "dtype": jnp.float16})

    def on_the_second(next_creator: Any, **kwargs: Any) -> Any:
        with rx.device("/job:ps/task:1"):
            return next_creator(**kwargs)

    def near(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "colocate_with": "/job:ps/replica:0/task:1/device:CPU:0"})

    with rx.variable_creator_scope(doubling), strategy.scope():
        doubled = rx.Variable(np.arange(4.0, dtype=np.float32), name="v")
    np.testing.assert_array_equal(doubled.numpy(), 2 * np.arange(4.0))
    assert doubled.dtype == jnp.float16 and "ps" in doubled.device
    for creator in (on_the_second, near):
        with rx.variable_creator_scope(creator), strategy.scope():
            moved = [rx.Variable(np.ones(4)) for _ in range(2)]
        assert {task for v in moved for task in tasks(*v.components)} == {1}


def test_T83_partitioned_initialisers_are_asked_for_parts_only(desk: Desk) -> None:
    class Eye:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def __call__(self, shape: Any, dtype: Any = jnp.float32, **kwargs: Any) -> Any:
            self.asked.append((kwargs["partition_shape"], kwargs["partition_offset"]))
            rows, start = kwargs["partition_shape"][0], kwargs["partition_offset"][0]
            return jnp.eye(*shape, dtype=dtype)[start : start + rows]

    class Refusing:
        def __init__(self, error: type[Exception]) -> None:
            self.error = error

        def __call__(self, **kwargs: Any) -> Any:
            if kwargs:
                raise self.error("no such argument")
            return jnp.arange(6.0).reshape(3, 2)

    told, untold, bound = Eye(), Eye(), Eye()
    expected = [((2, 3), (0, 0)), ((1, 3), (2, 0))]
    with desk.strategy(2).scope():
        v = rx.Variable(told, shape=(3, 3), dtype=jnp.float32, name="told")
        w = rx.Variable(untold, shape=(3, 3), name="untold")
        u = rx.Variable(functools.partial(bound, shape=(3, 3)), shape=(3, 3), dtype=jnp.int32)
        whole = [
            rx.Variable(Refusing(kind), shape=(3, 2), dtype=jnp.float32)
            for kind in (TypeError, ValueError)
        ]
    assert told.asked == bound.asked == expected
    assert untold.asked == [((3, 3), (0, 0)), *expected]
    for found in (v, w, u):
        np.testing.assert_array_equal(found.numpy(), np.eye(3))
    assert u.dtype == jnp.int32
    for found in whole:
        assert len(found.variables) == 2
        np.testing.assert_array_equal(found.numpy(), np.arange(6.0).reshape(3, 2))


# What can be done with them, here at the coordinator.


@pytest.mark.parametrize("parts", [None, 3])
def test_S168_T87_T88_reads_and_changes_equal_those_of_one_variable(desk: Desk, parts: Any) -> None:
    alone = rx.Variable(WHOLE)
    with desk.strategy(parts).scope():
        remote = rx.Variable(WHOLE, name="table")
    rows = rx.IndexedSlices(
        np.linspace(0.5, 9, 14, dtype=np.float32).reshape(7, 2),
        [
            31,
            0,
            10,
            11,
            21,
            22,
            5,
        ],
    )
    twice = rx.IndexedSlices(np.full((4, 2), 2.0, np.float32), [3, 30, 3, 3])
    for kind in ("add", "sub", "mul", "div", "min", "max", "update"):
        for payload in (rows, twice):
            for target in (alone, remote):
                assert getattr(target, f"scatter_{kind}")(payload) is target
        np.testing.assert_allclose(remote.numpy(), alone.numpy(), rtol=1e-6, err_msg=kind)
    for target in (alone, remote):
        assert target.assign_add(WHOLE) is target
        assert target.assign_sub(np.full_like(WHOLE, 0.5)) is target
    np.testing.assert_allclose(remote.numpy(), alone.numpy(), rtol=1e-6)
    remote.assign(WHOLE)
    x = np.full((32, 2), 3.0, np.float32)
    np.testing.assert_array_equal(x * remote, x * WHOLE)
    np.testing.assert_array_equal(jnp.asarray(remote), WHOLE)
    found = remote.numpy()
    found[0] = -1
    np.testing.assert_array_equal(remote.numpy(), WHOLE)


KEYS = [0, -1, slice(3, 17), slice(28, 2, -5), slice(9, 9), (slice(8, 25), 1), (5, Ellipsis),
        (Ellipsis, 0), np.array([6, 0, 31, 6]), np.arange(32) % 7 == 0]  # fmt: skip


def test_slices_of_partitioned_variables(desk: Desk) -> None:
    with desk.strategy(3).scope():
        table = rx.Variable(WHOLE, name="table")
    for key in KEYS:
        np.testing.assert_array_equal(table[key], WHOLE[key], err_msg=str(key))
    compiled = rx.function(lambda: [table[key] for key in KEYS])()
    for key, value in zip(KEYS, compiled, strict=True):
        np.testing.assert_array_equal(value, WHOLE[key], err_msg=str(key))
    with refused(errors.OutOfRangeError, r"\[-32, 32\)"):
        table[32]


@pytest.mark.parametrize("parts", [None, 3])
def test_S169_T90_lookups_move_the_rows_in_order(desk: Desk, parts: Any) -> None:
    with desk.strategy(parts).scope():
        table = rx.Variable(WHOLE, name="table")
    lookup = rx.nn.embedding_lookup
    compiled = rx.function(lambda i: lookup(table, i))
    for ids in ([6, 0, 31, 5, 6], [[1, 2], [30, 0]], [31], []):
        ids = np.asarray(ids, np.int32)
        for found in (lookup(table, ids), lookup(table, jnp.asarray(ids)), compiled(ids)):
            assert found.shape == (*ids.shape, 2)
            np.testing.assert_array_equal(found, WHOLE[ids])
    # The same array with other numbers in it is another list of rows.
    ids = np.array([3, 4])
    np.testing.assert_array_equal(lookup(table, ids), WHOLE[[3, 4]])
    ids[0] = 20
    np.testing.assert_array_equal(lookup(table, ids), WHOLE[[20, 4]])
    table.scatter_add(rx.IndexedSlices(np.ones((2, 2), np.float32), ids))
    ids[0] = 7
    table.scatter_add(rx.IndexedSlices(np.ones((2, 2), np.float32), ids))
    expected = WHOLE.copy()
    expected[[20, 7]] += 1
    expected[4] += 2
    np.testing.assert_array_equal(table.numpy(), expected)
    for bad in ([32], [-1], [0, 99, 1]):
        with refused(errors.InvalidArgumentError, r"'table' needs indices in \[0, 32\)"):
            lookup(table, bad)
        with refused(errors.InvalidArgumentError, r"'table' needs indices in \[0, 32\)"):
            compiled(np.asarray(bad))
    if parts:
        assert table.sparse_read([31, 0, 12, 1])[:, 0].tolist() == [1.0, 3.0, 25.0, 63.0]


def test_limit_lookups_in_some_parts_leave_the_others_as_they_are(desk: Desk) -> None:
    """A list with some parts is another table; the container of the parts stays what it is."""
    with desk.strategy(3).scope():
        table = rx.Variable(WHOLE, name="table")
    found = rx.nn.embedding_lookup(table.variables[1:], [0, 20])
    np.testing.assert_array_equal(found, WHOLE[[11, 31]])
    assert all(part.container is table for part in table.variables)
    gradients = rx.grad(lambda: jnp.sum(table * table), table.variables)()
    np.testing.assert_array_equal(np.concatenate(gradients), 2 * WHOLE)


@pytest.mark.parametrize("parts", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_limit_gradients_on_container_and_parts(desk: Desk, parts: Any) -> None:
    with desk.strategy(parts).scope():
        table = rx.Variable(WHOLE, name="table")
    alone = rx.Variable(WHOLE)
    ids = np.array([31, 0, 12, 31])

    def dense(target: Any) -> Any:
        return jnp.sum(target * target) + jnp.sum(target[3:15] ** 2)

    def rows(target: Any) -> Any:
        return jnp.sum(rx.nn.embedding_lookup(target, ids) ** 2)

    def both(target: Any) -> Any:
        return dense(target) + rows(target)

    for loss in (dense, rows, both):
        expected = as_dense(rx.grad(lambda loss=loss: loss(alone), alone)())
        run: Any = rx.grad(lambda loss=loss: loss(table), table)
        np.testing.assert_allclose(as_dense(run()), expected, rtol=1e-6)
        np.testing.assert_allclose(as_dense(rx.function(run)()), expected, rtol=1e-6)
        if parts:
            by_part = rx.grad(lambda loss=loss: loss(table), table.variables)()
            joined = np.concatenate([as_dense(g) for g in by_part])
            np.testing.assert_allclose(joined, expected, rtol=1e-6)


def as_dense(gradient: Any) -> Any:
    return gradient.to_dense() if isinstance(gradient, rx.IndexedSlices) else gradient


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int32", "bool", "complex64"])
def test_types_of_variables(desk: Desk, dtype: str) -> None:
    with desk.strategy(2).scope():
        variable = rx.Variable(np.ones((3, 2)), dtype=jnp.dtype(dtype), name="v")
        made = rx.Variable(lambda: jnp.ones((3, 2), dtype), name="made")
    assert variable.dtype == jnp.dtype(dtype) == variable.numpy().dtype
    np.testing.assert_array_equal(made.numpy(), variable.numpy())
    variable.assign(jnp.zeros((3, 2), dtype))
    assert not variable.numpy().any()


def test_compiled_functions_read_and_change_at_the_coordinator(desk: Desk) -> None:
    with desk.strategy(2).scope():
        table, counter = rx.Variable(WHOLE, name="table"), rx.Variable(0, name="counter")
        local_ids = rx.Variable(np.array([5, 6]), name="ids")

    @rx.function
    def change(x: Any) -> Any:
        before = counter.read_value()
        counter.assign_add(x)
        counter.assign_add(1)
        found = rx.nn.embedding_lookup(table, local_ids.read_value() + counter)
        table.scatter_add(rx.IndexedSlices(found, local_ids.read_value()))
        return before, counter.read_value(), table[4:7]

    before, after, rows = change(2)
    assert (int(before), int(after), int(counter)) == (0, 3, 3)
    expected = WHOLE.copy()
    expected[[5, 6]] += WHOLE[[8, 9]]
    np.testing.assert_array_equal(rows, expected[4:7])
    np.testing.assert_array_equal(table.numpy(), expected)


def test_threads_may_create_read_and_change_at_once(desk: Desk) -> None:
    strategy = desk.strategy()
    with strategy.scope():
        counter = rx.Variable(0.0, name="counter")
    failures: list[Exception] = []

    def work() -> None:
        try:
            with strategy.scope():
                for i in range(20):
                    made = rx.Variable(float(i))
                    counter.assign_add(1.0)
                    assert float(made) == i
                    counter.numpy()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert float(counter) == 80.0


def test_variables_that_are_dropped_free_the_servers(desk: Desk) -> None:
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)

    def held() -> int:
        return sum(server.num_bytes for server in coordinator.status().servers)

    with strategy.scope():
        table = rx.Variable(lambda: jnp.zeros((1000, 100)), name="table")
        becomes(lambda: held() >= 400_000, "the servers report the table")
        del table
        gc.collect()
        small = rx.Variable(0.0)
    becomes(lambda: held() < 1000, "the servers dropped the table")
    assert float(small) == 0.0


def test_T108_run_at_the_coordinator_warns(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    strategy = desk.strategy()
    with strategy.scope():
        counter = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    with caplog.at_level(logging.WARNING):
        result = strategy.run(lambda: (counter.assign_add(2.0), counter.read_value())[1])
        assert float(strategy.reduce("SUM", result, axis=None)) == 2.0
        strategy.run(lambda: None)
    assert sum("runs here, on the coordinator" in r.message for r in caplog.records) == 1
    dataset = rx.data.Dataset.range(4)
    for distributed in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda _: dataset),
    ):
        with refused(errors.InvalidArgumentError, "create_per_worker_dataset"):
            iter(distributed)


# Checkpoints and saved models.

SLOW = pytest.mark.slow
IMMEDIATE = pytest.param(False, id="immediate")
DEFERRED_SLOW = pytest.param(True, id="deferred", marks=SLOW)
LIMIT_CASES = [(4, None), (None, 4), (4, 2), (2, 4)]


class Trained(rx.Module):
    """A table and a bias, with an optimizer that has slots."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.table = rx.Variable(np.full((10, 3), fill, np.float32), name="table")
        self.bias = rx.Variable(np.full(3, fill, np.float32), name="bias")
        self.optimizer = rx.optimizers.Optimizer(optax.adam(0.1), [self.table, self.bias])

    def train(self) -> None:
        values = np.arange(30, dtype=np.float32).reshape(10, 3)
        self.optimizer.apply_gradients([(values, self.table), (values[0], self.bias)])

    def state(self) -> list[np.ndarray]:
        slots = [
            self.optimizer.get_slot(v, s) for v in (self.table, self.bias) for s in ("mu", "nu")
        ]
        return [v.numpy() for v in (self.table, self.bias, *slots, self.optimizer.iterations)]


def check_restored(saved: Any, path: str, deferred: bool) -> None:
    """Restores in the scope that is open, and trains on."""
    if deferred:
        checkpoint = rx.train.Checkpoint()
        status = checkpoint.restore(path)
        model = checkpoint.model = Trained(-1.0)
    else:
        model = Trained(-1.0)
        checkpoint = rx.train.Checkpoint(model=model)
        status = checkpoint.restore(path)
    status.assert_consumed()
    for found, expected in zip(model.state(), saved, strict=True):
        np.testing.assert_array_equal(found, expected)
    model.train()
    assert int(model.optimizer.iterations) == 3


@pytest.mark.parametrize("deferred", [IMMEDIATE, DEFERRED_SLOW])
def test_limit_T91_X2_checkpoints_restore_into_another_number_of_parts(
    desk: Desk, tmp_path: Path, deferred: bool
) -> None:
    for before, after in LIMIT_CASES:
        with desk.strategy(before).scope():
            model = Trained(1.0)
            model.train()
            model.train()
            saved = model.state()
            path = rx.train.Checkpoint(model=model).save(tmp_path / f"{before}-{after}")
        with desk.strategy(after).scope():
            check_restored(saved, path, deferred)


@pytest.mark.slow
@pytest.mark.parametrize("deferred", [IMMEDIATE, DEFERRED_SLOW])
def test_limit_T91_checkpoints_go_to_and_from_other_strategies(
    desk: Desk, tmp_path: Path, deferred: bool
) -> None:
    mirrored = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    def on_servers() -> Any:
        return desk.strategy(3).scope()

    def alone() -> Any:
        return rx.OneDeviceStrategy("CPU:0").scope()

    for before, after in [
        (on_servers, mirrored.scope), (mirrored.scope, on_servers),
        (on_servers, alone), (alone, on_servers),
    ]:  # fmt: skip
        with before():
            model = Trained(1.0)
            model.train()
            model.train()
            saved = model.state()
            path = rx.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
        with after():
            check_restored(saved, path, deferred)


class Lookup(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = rx.Variable(WHOLE, name="table")
        self.scale = rx.Variable(2.0, name="scale")

    @rx.function(input_signature=[rx.TensorSpec((None,), jnp.int32)])
    def __call__(self, ids: Any) -> Any:
        return rx.nn.embedding_lookup(self.table, ids) * self.scale

    @rx.function(input_signature=[])
    def grow(self) -> Any:
        self.scale.assign_add(1.0)
        self.table.assign_add(jnp.ones((32, 2)))
        self.table.scatter_add(rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([31])))
        return self.table[30:], self.scale.read_value()

    @rx.function(input_signature=[rx.TensorSpec((None, 32))])
    def project(self, x: Any) -> Any:
        return x @ self.table.read_value()


def test_limit_S170_X3_exported_models_hold_one_variable_and_load(
    desk: Desk, tmp_path: Path
) -> None:
    with desk.strategy(3).scope():
        model = Lookup()
        model.table.scatter_add(rx.IndexedSlices(np.ones((1, 2), np.float32), [20]))
        rx.saved_model.save(model, tmp_path / "model")
    expected = WHOLE.copy()
    expected[20] += 1
    ids, x = np.array([31, 20, 0]), np.eye(32, dtype=np.float32)[:5]
    desk.leave()
    loaded = rx.saved_model.load(tmp_path / "model")
    assert sorted(v.name for v in loaded.variables) == ["scale", "table"]
    assert loaded.table.shape == (32, 2)
    np.testing.assert_array_equal(loaded(ids), expected[ids] * 2)
    np.testing.assert_array_equal(loaded.project(x), expected[:5])
    # What a function changes, it changes in the model that was loaded.
    rows, scale = loaded.grow()
    assert float(scale) == 3.0 == float(loaded.scale)
    np.testing.assert_array_equal(rows, expected[30:] + [[1], [2]])
    np.testing.assert_array_equal(loaded.table[30:], rows)
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        again = rx.saved_model.load(tmp_path / "model")
        np.testing.assert_array_equal(again(ids), expected[ids] * 2)
    with desk.strategy(2).scope():
        there = rx.saved_model.load(tmp_path / "model")
    assert isinstance(there.table, rx.ShardedVariable)
    np.testing.assert_array_equal(there(ids), expected[ids] * 2)


def test_T109_reads_inside_a_cache_scope_keep_the_first_value(desk: Desk) -> None:
    with desk.strategy().scope():
        v = rx.Variable(1.0, name="v")
    with rx.experimental.cache_variable_reads():
        assert v.numpy() == 1.0
        v.assign(5.0)
        assert v.numpy() == 1.0
        with pytest.raises(ValueError, match="nested"), rx.experimental.cache_variable_reads():
            pass
    assert v.numpy() == 5.0


@pytest.mark.parametrize("parts", [None, 2])
def test_T109_compiled_functions_keep_the_first_value_in_a_cache_scope(
    desk: Desk, parts: Any
) -> None:
    strategy = desk.strategy(parts)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        v = rx.Variable(jnp.ones(2), name="v")
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [v])

    @rx.function
    def change() -> Any:
        before = v.read_value()
        v.assign_add(jnp.ones(2))
        optimizer.apply_gradients([(-jnp.ones(2), v)])
        return before, v.read_value()

    @rx.function
    def scope_inside() -> Any:
        with rx.experimental.cache_variable_reads():
            found = change()
            gradient = rx.grad(lambda: jnp.sum(v.read_value() ** 2), v)()
        return found, gradient, v.read_value()

    def on_worker() -> Any:
        client = v.components[0].client
        pulls: list[Any] = []
        pull, client.pull = client.pull, lambda reads: pulls.append(1) or pull(reads)
        try:
            with rx.experimental.cache_variable_reads():
                found = [change(), change()]
            return found, len(pulls), change()
        finally:
            client.pull = pull

    found, gradient, after = coordinator.schedule(scope_inside).fetch(60)
    np.testing.assert_array_equal(found, np.ones((2, 2)))
    np.testing.assert_array_equal(gradient, [2.0, 2.0])
    np.testing.assert_array_equal(after, [3.0, 3.0])
    # Around calls of it, on a worker and here: three changes by two have been made, then more.
    for run, start in ((lambda: coordinator.schedule(on_worker).fetch(60), 3.0), (on_worker, 9.0)):
        kept, num_pulls, left = run()
        np.testing.assert_array_equal(kept, np.full((2, 2, 2), start))
        assert num_pulls == 1
        np.testing.assert_array_equal(left, [[start + 4] * 2, [start + 6] * 2])


def test_functions_of_two_variables_of_one_shape_are_told_apart(desk: Desk) -> None:
    with desk.strategy().scope():
        a, b = rx.Variable([1.0, 2.0]), rx.Variable([3.0, 4.0])
    double = rx.function(lambda v: v.read_value() * 2)
    assert double(a).tolist() == [2.0, 4.0]
    assert double(b).tolist() == [6.0, 8.0]
    assert double.experimental_get_tracing_count() == 2


# Indices.

INDICES: list[Any] = [
    3,
    -1,
    np.int64(4),
    (2, 1),
    (slice(2, 9, 3), slice(None), 0),
    slice(None, None, -2),
    slice(5, 5),
    (slice(1, 3), ..., None),
    np.array([7, 0, 7, -2]),
    (np.array([[1, 2], [0, 9]]), 1),
    (np.array([3, 1]), slice(None), np.array([0, 2])),
    np.arange(10) % 3 == 0,
]


@pytest.mark.parametrize("parts", [None, 3])
def test_an_index_moves_no_other_rows(desk: Desk, parts: Any) -> None:
    strategy = desk.strategy(parts)
    coordinator = desk.coordinator(strategy)
    whole = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    with strategy.scope():
        v = rx.Variable(whole, name="v")

    def recorded(run: Any) -> Any:
        client = v.components[0].client
        asked: list[Any] = []
        pull = client.pull

        def recording(reads: Any) -> Any:
            asked.extend(None if r.ids is None else np.asarray(r.ids).tolist() for r in reads)
            return pull(reads)

        client.pull = recording
        try:
            return run(), asked
        finally:
            client.pull = pull

    def at_every_index() -> Any:
        return [np.asarray(v[key]) for key in INDICES]

    compiled = rx.function(lambda shift: [v[key] for key in INDICES] + [v[shift], v[shift, 1:]])
    rows = [np.arange(10)[k[0] if isinstance(k, tuple) else k].reshape(-1) for k in INDICES]
    expected = [whole[key] for key in INDICES]
    for shift in (-2, np.array([[1, 8]])):
        traced = jnp.asarray(shift)
        there = coordinator.schedule(
            lambda traced=traced: recorded(lambda: compiled(traced))
        ).fetch(60)
        # A program asks once for each index, for those that it computes as well.
        for found, asked in (recorded(lambda t=traced: compiled(t)), there):
            for one, other in zip(found, [*expected, whole[shift], whole[shift, 1:]], strict=True):
                np.testing.assert_array_equal(one, other)
            computed = (np.asarray(shift) % 10).reshape(-1).tolist()
            assert asked == [*(r.tolist() for r in rows), computed, computed]
    for found, asked in (
        recorded(at_every_index),
        coordinator.schedule(lambda: recorded(at_every_index)).fetch(60),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        assert [a for a in asked if a] == [r.tolist() for r in rows if r.size]
    with refused(errors.OutOfRangeError, "Row numbers"):
        v[10]
    np.testing.assert_array_equal(v.gather_nd([[1, 1], [9, 0]]), whole[[1, 9], [1, 0]])


def test_gradients_of_indexed_variables_are_arrays_as_on_one_device(desk: Desk) -> None:
    for parts in (None, 2):
        with desk.strategy(parts).scope():
            v = rx.Variable(np.ones((6, 2)), name="v")
        alone = rx.Variable(np.ones((6, 2)), name="v")

        def loss(v: Any) -> Any:
            return jnp.sum(3 * v[2] + v[1:3] ** 2)

        expected = np.asarray(rx.grad(lambda v=alone: loss(v), alone)())
        gradient = rx.grad(lambda v=v: loss(v), v)
        np.testing.assert_array_equal(gradient(), expected)
        np.testing.assert_array_equal(rx.function(lambda g=gradient: g())(), expected)
