"""The code samples of the reference texts, with rx for tf.distribute and CPUs for GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

CPU = "/job:localhost/replica:0/task:0/device:CPU:"


@pytest.fixture
def two() -> Any:
    return rx.MirroredStrategy(["CPU:0", "CPU:1"])


# StrategyExtended.


def test_c_colocate_vars_with_and_update(two: Any) -> None:
    def fn(v1: Any, v2: Any, v3: Any) -> Any:
        assert v1.device == v2.device == v3.device
        seen.append(v1.device)
        return v1.assign_add(v2 * v3)

    seen: list[str] = []
    with two.scope():
        var1 = rx.Variable(1.0)
        with two.extended.colocate_vars_with(var1):
            var2 = rx.Variable(2.0)
            var3 = rx.Variable(3.0)
        mirrored2 = rx.Mirrored(two.experimental_local_results(var2))
        mirrored3 = rx.Mirrored(two.experimental_local_results(var3))
        two.extended.update(var1, fn, args=(mirrored2, mirrored3))
    assert seen == [CPU + "0", CPU + "1"]
    assert [float(v) for v in two.experimental_local_results(var1)] == [7.0, 7.0]


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "central_2", "one_device", "tpu_2")
def test_c_update_takes_variables_as_arguments(strategy: Any) -> None:
    with strategy.scope():
        var1 = rx.Variable(1.0)
        with strategy.extended.colocate_vars_with(var1):
            var2 = rx.Variable(2.0)
            var3 = rx.Variable(3.0)
        strategy.extended.update(var1, lambda v1, v2, v3: v1.assign_add(v2 * v3), args=(var2, var3))
    assert [float(v) for v in strategy.experimental_local_results(var1)] == [7.0] * len(
        strategy.experimental_local_results(var1)
    )


def test_c_variable_created_in_scope(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0)
    assert two.extended.variable_created_in_scope(v) is True
    v = rx.Variable(1.0)
    assert two.extended.variable_created_in_scope(v) is False


def test_c_run_merges_x_a_and_v(two: Any, run: Any) -> None:
    x = jnp.asarray(5.0)
    with two.scope():
        v = rx.Variable(1.0)

    def fn(x: Any, w: Any) -> Any:
        return x, w * 2, v

    w = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(float(c.replica_id_in_sync_group))
    )
    same, different, variable = run(two, fn, args=[x, w])
    if run.executor == "threaded":
        assert same is x
    assert isinstance(same, jax.Array)
    assert float(same) == 5.0
    assert isinstance(different, rx.PerReplica)
    assert [float(a) for a in different.values] == [0.0, 2.0]
    assert variable is v


def test_c_the_update_recipe(two: Any, run: Any) -> None:
    with two.scope():
        v, w = rx.Variable(1.0), rx.Variable([1.0, 2.0])

    def merge_fn(strategy: Any, updates: Any) -> None:
        pairs = [(updates[0], v), (updates[1], w)]
        totals = strategy.extended.batch_reduce_to(rx.ReduceOp.SUM, pairs)
        strategy.extended.update(v, lambda var, t: var.assign_sub(t), args=(totals[0],))
        strategy.extended.update(w, lambda var, t: var.assign_sub(t), args=(totals[1],))

    def fn(x: Any) -> None:
        rx.get_replica_context().merge_call(merge_fn, args=([x, jnp.stack([x, 2 * x])],))

    x = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(1.0 + c.replica_id_in_sync_group)
    )
    run(two, fn, args=(x,))
    for copy in two.experimental_local_results(v):
        assert float(copy) == -2.0
    for copy in two.experimental_local_results(w):
        np.testing.assert_array_equal(copy, [-2.0, -4.0])


def test_c_reduce_to_value_itself_is_an_all_reduce(two: Any) -> None:
    value = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(c.replica_id_in_sync_group + 1.0)
    )
    with two.scope():
        total = two.extended.reduce_to(rx.VariableAggregation.SUM, value, value)
    assert isinstance(total, rx.Mirrored)
    assert [float(t) for t in total.values] == [3.0, 3.0]


def test_c_sync_on_read_moving_average(two: Any, run: Any) -> None:
    with two.scope():
        v = rx.Variable(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def fn(update: Any) -> None:
        v.assign(0.9 * v + 0.1 * update)

    update = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(10.0 * c.replica_id_in_sync_group)
    )
    run(two, fn, args=(update,))
    local = [float(c) for c in two.experimental_local_results(v)]
    np.testing.assert_allclose(local, [0.9, 1.9], rtol=1e-6)
    np.testing.assert_allclose(float(v), 2.8, rtol=1e-6)


def test_c_non_slot_variables(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0)
        devices = two.extended.non_slot_devices([v])
        with two.extended.colocate_vars_with(devices):
            beta = rx.Variable(0.5)
        results = two.extended.update_non_slot(devices, lambda: jnp.asarray(2.0), group=False)
    assert len(two.experimental_local_results(beta)) == 2
    assert [float(r) for r in results] == [2.0, 2.0]


# Values from a function.


def test_d_s85_constant_value_per_replica(two: Any) -> None:
    def value_fn(ctx: Any) -> Any:
        return jnp.asarray(1.0)

    distributed_values = two.experimental_distribute_values_from_function(value_fn)
    local_result = two.experimental_local_results(distributed_values)
    assert isinstance(local_result, tuple)
    assert [(x.shape, x.dtype, float(x)) for x in local_result] == [((), jnp.float32, 1.0)] * 2
    assert repr(distributed_values) == (
        "PerReplica:{\n"
        "  0: <jax.Array: shape=(), dtype=float32, numpy=1.0>,\n"
        "  1: <jax.Array: shape=(), dtype=float32, numpy=1.0>\n"
        "}"
    )


def test_d_s86_array_by_replica_id(two: Any) -> None:
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx: Any) -> Any:
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = two.experimental_distribute_values_from_function(value_fn)
    assert two.experimental_local_results(distributed_values) == (3.0, 2.0)


def test_d_s87_s89_num_replicas_in_sync(two: Any) -> None:
    def value_fn(ctx: Any) -> Any:
        return ctx.num_replicas_in_sync

    distributed_values = two.experimental_distribute_values_from_function(value_fn)
    assert isinstance(distributed_values, rx.PerReplica)
    local_result = two.experimental_local_results(distributed_values)
    assert local_result == (2, 2)
    assert repr(local_result) == "(2, 2)"


def test_d_s88_values_placed_on_devices() -> None:
    strategy = rx.TPUStrategy(experimental_device_assignment=["CPU:2", "CPU:5"])
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with rx.device(worker_devices[i]):
            multiple_values.append(jnp.asarray(1.0))

    def value_fn(ctx: Any) -> Any:
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local = strategy.experimental_local_results(distributed_values)
    assert [x.devices() for x in local] == [{jax.devices("cpu")[2]}, {jax.devices("cpu")[5]}]
    assert local[0] is multiple_values[0]


# Gather.


def test_d_s69_gather_in_a_function(two: Any) -> None:
    distributed_values = two.experimental_distribute_values_from_function(
        lambda _: jnp.copy(jnp.asarray([[1], [2]]))
    )

    @rx.function
    def run() -> Any:
        return two.gather(distributed_values, axis=0)

    result = run()
    assert (result.shape, result.dtype) == ((4, 1), jnp.int32)
    np.testing.assert_array_equal(result, [[1], [2], [1], [2]])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_d_s70_s71_s72_gather_along_each_axis(is_compiled: bool) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    single_tensor = jnp.reshape(jnp.arange(6), (1, 2, 3))
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: jnp.copy(single_tensor)
    )

    def run(axis: int) -> Any:
        return strategy.gather(distributed_values, axis=axis)

    if is_compiled:
        run = rx.function(run)
    expected = [np.concatenate([np.asarray(single_tensor)] * 4, axis) for axis in range(3)]
    assert [e.shape for e in expected] == [(4, 2, 3), (1, 8, 3), (1, 2, 12)]
    for axis in range(3):
        result = run(axis)
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, expected[axis])


def test_d_s73_gather_of_different_sizes(two: Any) -> None:
    value = two.experimental_distribute_values_from_function(
        lambda c: jnp.ones((1, 2 + c.replica_id_in_sync_group, 3))
    )
    assert two.gather(value, axis=1).shape == (1, 5, 3)
    for axis in (0, 2):
        with pytest.raises(ValueError, match="axis"):
            two.gather(value, axis=axis)


# Reduce.


def test_d_s49_s50_reduce_and_devices(two: Any) -> None:
    def step_fn() -> Any:
        i = rx.get_replica_context().replica_id_in_sync_group
        return jnp.copy(i)

    per_replica_result = two.run(step_fn)
    local = two.experimental_local_results(per_replica_result)
    assert [x.devices() for x in local] == [{d} for d in jax.devices("cpu")[:2]]
    total = two.reduce("SUM", per_replica_result, axis=None)
    assert (total.shape, total.dtype, int(total)) == ((), jnp.int32, 1)
    assert total.devices() == {jax.devices("cpu")[0]}


def test_d_s49_reduce_on_one_device() -> None:
    strategy = rx.MirroredStrategy(["CPU:0"])

    def step_fn() -> Any:
        return jnp.copy(rx.get_replica_context().replica_id_in_sync_group)

    assert int(strategy.reduce("SUM", strategy.run(step_fn), axis=None)) == 0


def test_d_s51_s52_reduce_a_global_batch(two: Any, run: Any) -> None:
    batch = two.experimental_distribute_values_from_function(
        lambda c: jnp.arange(4) + 4 * c.replica_id_in_sync_group
    )
    per_replica_result = run(two, lambda x: x * 1, args=(batch,))
    total = two.reduce("sum", per_replica_result, axis=None)
    np.testing.assert_array_equal(total, [4, 6, 8, 10])
    assert int(two.reduce("sum", per_replica_result, axis=0)) == 28


def test_d_s53_s54_s55_reduce_a_partial_batch(two: Any, run: Any) -> None:
    batch = two.experimental_distribute_values_from_function(
        lambda c: [jnp.arange(4.0), jnp.arange(4.0, 6.0)][c.replica_id_in_sync_group]
    )
    # A run inside a compiled function needs one shape: it has no partial batches.
    result = batch if run.executor == "inside" else run(two, lambda x: x * 1, args=(batch,))
    with pytest.raises(ValueError, match="shape"):
        two.reduce("SUM", result, axis=None)
    assert float(two.reduce(rx.ReduceOp.MEAN, result, axis=0)) == 2.5
    means = two.run(lambda x: jnp.mean(x), args=(result,))
    assert float(two.reduce("MEAN", means, axis=None)) == 3.0


# Run.


def test_d_s31_constant_tensor_input(two: Any) -> None:
    tensor_input = jnp.asarray(3.0)

    @rx.function
    def replica_fn(input: Any) -> Any:
        return input * 2.0

    result = two.run(replica_fn, args=(tensor_input,))
    assert repr(result) == (
        "PerReplica:{\n"
        "  0: <jax.Array: shape=(), dtype=float32, numpy=6.0>,\n"
        "  1: <jax.Array: shape=(), dtype=float32, numpy=6.0>\n"
        "}"
    )


def test_d_s32_distributed_values_input(two: Any) -> None:
    @rx.function
    def run() -> Any:
        def value_fn(value_context: Any) -> Any:
            return value_context.num_replicas_in_sync

        distributed_values = two.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input: Any) -> Any:
            return input * 2

        return two.run(replica_fn2, args=(distributed_values,))

    result = run()
    assert isinstance(result, jax.Array)
    assert (result.shape, result.dtype, int(result)) == ((), jnp.int32, 4)


def test_d_s33_s34_all_reduce_in_replica_context(two: Any) -> None:
    @rx.function
    def run() -> Any:
        def value_fn(value_context: Any) -> Any:
            return jnp.asarray(value_context.replica_id_in_sync_group)

        distributed_values = two.experimental_distribute_values_from_function(value_fn)

        def replica_fn(input: Any) -> Any:
            return rx.get_replica_context().all_reduce("sum", input)

        return two.run(replica_fn, args=(distributed_values,))

    result = run()
    assert repr(result) == (
        "PerReplica:{\n"
        "  0: <jax.Array: shape=(), dtype=int32, numpy=1>,\n"
        "  1: <jax.Array: shape=(), dtype=int32, numpy=1>\n"
        "}"
    )


def test_d_printed_form_of_arrays_in_a_list(two: Any) -> None:
    parts = iter([[0, 2], [4, 6]])

    @rx.function
    def replica_fn(input: Any) -> Any:
        return input * 2

    result = []
    for first, second in parts:
        x = two.experimental_distribute_values_from_function(
            lambda c, f=first, s=second: jnp.asarray([[f, s][c.replica_id_in_sync_group] // 2])
        )
        result.append(two.run(replica_fn, args=(x,)))
    assert str(result) == (
        "[PerReplica:{\n"
        "  0: <jax.Array: shape=(1,), dtype=int32, numpy=array([0], dtype=int32)>,\n"
        "  1: <jax.Array: shape=(1,), dtype=int32, numpy=array([2], dtype=int32)>\n"
        "}, PerReplica:{\n"
        "  0: <jax.Array: shape=(1,), dtype=int32, numpy=array([4], dtype=int32)>,\n"
        "  1: <jax.Array: shape=(1,), dtype=int32, numpy=array([6], dtype=int32)>\n"
        "}]"
    )


# Scope.


def test_d_scope_mirrors_variables(two: Any) -> None:
    with two.scope():
        mirrored_variable = rx.Variable(1.0)
    assert repr(mirrored_variable) == (
        "MirroredVariable:{\n"
        "  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,\n"
        "  1: <rx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>\n"
        "}"
    )
    regular_variable = rx.Variable(1.0)
    assert repr(regular_variable) == "<rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"


def test_d_variable_captures_its_strategy(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0)
    v.assign_add(2.0)
    assert [float(c) for c in two.experimental_local_results(v)] == [3.0, 3.0]
    assert float(v.read_value()) == 3.0


def test_d_module_collects_variables(two: Any) -> None:
    class Dense(rx.Module):
        def __init__(self, name: str | None = None) -> None:
            super().__init__(name=name)
            self.w = rx.Variable(jax.random.normal(jax.random.key(0), [100, 10]), name="w")

        def __call__(self, x: Any) -> Any:
            return x * self.w

    with two.scope():
        dense = Dense()
    assert len(dense.variables) == 1
    assert isinstance(dense.variables[0], rx.Variable)
    assert dense.variables[0] is dense.w
    assert dense(jnp.ones((100, 10))).shape == (100, 10)


def test_d_run_and_reduce_enter_the_scope(two: Any) -> None:
    made: list[Any] = []

    def step_fn() -> Any:
        if not made:
            made.append(rx.Variable(2.0, name="made"))
        return made[0] * 1.0

    result = two.run(step_fn)
    assert isinstance(made[0], rx.MirroredVariable)
    assert float(two.reduce("SUM", result, axis=None)) == 4.0


def test_d_a_traced_function_is_called_once_per_trace(two: Any) -> None:
    calls = []

    def replica_fn(x: Any) -> Any:
        calls.append(1)
        return x + 1

    compiled = rx.function(replica_fn)
    for _ in range(3):
        two.run(compiled, args=(jnp.asarray(1.0),))
    traces = len(calls)
    assert 1 <= traces <= 2
    for _ in range(3):
        two.run(replica_fn, args=(jnp.asarray(1.0),))
    assert len(calls) == traces + 6
