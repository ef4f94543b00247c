"""Combining per-replica values in cross-replica code (S49-S62, X7, X8, X17, T32-T37, T43)."""

from __future__ import annotations

import collections
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import in_compiled_merge, in_eager, in_function, in_merge, refused, values
from worker_groups import local_ids, replica_results, spans_workers

import replicax as rx

MESH = ("mirrored_2", "central_2", "tpu_2", "minimal_2")
FEW = ("default", "one_device", "mirrored_2", "mirrored_4", "virtual_2")
MANY_REPLICAS = ("mirrored_4", *TWO_REPLICAS)
Pair = collections.namedtuple("Pair", ["left", "right"])


def ids(strategy: Any) -> Any:
    """A PerReplica of the replica ids as float scalars."""
    return values(strategy, lambda i: jnp.float32(i))


PLACES = [in_eager, in_function, in_merge, in_compiled_merge]
everywhere = pytest.mark.parametrize("cross", PLACES)


# What a reduction computes.


@pytest.mark.every_strategy
def test_s49_sum_of_replica_ids(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda: rx.get_replica_context().replica_id_in_sync_group)
    n = strategy.num_replicas_in_sync
    total = strategy.reduce("SUM", result, axis=None)
    assert isinstance(total, jax.Array)
    assert total.shape == () and total.dtype == jnp.int32
    assert int(total) == n * (n - 1) // 2


@pytest.mark.strategies(
    "default", "one_device", "mirrored_1", "mirrored_4", "virtual_2", "central_2"
)
@everywhere
def test_s51_s52_sum_with_and_without_axis(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    batch = values(strategy, lambda i: jnp.arange(4.0) + 4 * i)
    whole = np.arange(4 * n, dtype=np.float32).reshape(n, 4)

    def fn(strategy: Any, x: Any) -> Any:
        return (
            strategy.reduce("SUM", x, axis=None),
            strategy.reduce("SUM", x, axis=0),
            strategy.reduce(rx.ReduceOp.MEAN, x, axis=None),
            strategy.reduce(rx.ReduceOp.MEAN, x, axis=0),
        )

    rows, total, mean_rows, mean = cross(strategy, fn, batch)
    np.testing.assert_allclose(rows, whole.sum(0))
    np.testing.assert_allclose(total, whole.sum())
    np.testing.assert_allclose(mean_rows, whole.mean(0))
    np.testing.assert_allclose(mean, whole.mean())
    assert total.shape == mean.shape == ()


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
def test_s52_axis_forms(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    forms = [-1, [0, 2], (1, -1), (), np.int64(1)]
    whole = np.arange(n * 12, dtype=np.float32).reshape(n, 2, 3, 2)
    x = values(strategy, lambda i: jnp.asarray(whole[i]))

    def fn(strategy: Any, x: Any) -> Any:
        return [[strategy.reduce(op, x, axis=axis) for axis in forms] for op in ("SUM", "MEAN")]

    totals, means = cross(strategy, fn, x)
    for axis, total, mean in zip(forms, totals, means, strict=True):
        axes = tuple(axis) if isinstance(axis, list | tuple) else (int(axis),)
        expected = tuple(a % 3 + 1 for a in axes) + (0,)
        np.testing.assert_allclose(total, whole.sum(expected), err_msg=str(axis))
        np.testing.assert_allclose(mean, whole.mean(expected), rtol=1e-6, err_msg=str(axis))


@pytest.mark.strategies(*MESH, "virtual_2")
def test_s53_s54_s55_partial_batch(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.arange(4.0) if i == 0 else jnp.array([4.0, 5.0]))
    assert float(strategy.reduce("MEAN", x, axis=0)) == 2.5
    assert float(strategy.reduce("SUM", x, axis=0)) == 15.0
    means = strategy.run(jnp.mean, args=(x,))
    assert float(strategy.reduce("MEAN", means, axis=None)) == 3.0


@pytest.mark.one_process("values of different shape on two workers are an error of their group")
@pytest.mark.strategies(*MESH, "virtual_2")
def test_s53_a_partial_batch_needs_an_axis(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.arange(4.0) if i == 0 else jnp.array([4.0, 5.0]))
    for op in ("SUM", "MEAN"):
        with refused(ValueError, r"\(4,\), \(2,\).*axis"):
            strategy.reduce(op, x, axis=None)


@pytest.mark.strategies(*MESH, "virtual_2")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_t32_components_of_one_and_two_elements(strategy: Any, dtype: Any) -> None:
    x = values(strategy, lambda i: jnp.full((i + 1,), i, dtype))
    total = strategy.reduce("SUM", x, axis=0)
    mean = strategy.reduce("MEAN", x, axis=0)
    assert total.dtype == dtype and float(total) == 2
    assert jnp.issubdtype(mean.dtype, jnp.floating)
    np.testing.assert_allclose(mean, 2 / 3, rtol=1e-6)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t32_ragged_argument_of_a_function_takes_a_trace_of_its_own(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    traces = []

    @rx.function
    def mean(x: Any) -> Any:
        traces.append(rx.in_cross_replica_context())
        squares = strategy.run(lambda y: y * y, args=(x,))
        return strategy.reduce("MEAN", squares, axis=0)

    ragged = values(strategy, lambda i: jnp.arange(1.0, 3.0 + i))
    with caplog.at_level(logging.WARNING, logger="replicax"):
        for _ in range(3):
            np.testing.assert_allclose(mean(ragged), (1 + 4 + 1 + 4 + 9) / 5)
    assert not caplog.records
    assert mean.experimental_get_tracing_count() == 1
    even = values(strategy, lambda i: jnp.arange(2.0) + i)
    np.testing.assert_allclose(mean(even), (0 + 1 + 1 + 4) / 4)
    assert mean.experimental_get_tracing_count() == 2


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t32_ragged_argument_of_a_replica_function(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ragged = values(strategy, lambda i: jnp.ones((4 - 2 * i, 2)))
    fn = rx.function(lambda x: x.sum(-1))
    with caplog.at_level(logging.WARNING, logger="replicax"):
        result = strategy.run(fn, args=(ragged,))
        strategy.run(fn, args=(ragged,))
    assert [v.shape for v in replica_results(strategy, result)] == [(4,), (2,)]
    assert float(strategy.reduce("MEAN", result, axis=0)) == 2.0
    assert not caplog.records


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t32_empty_part_of_a_batch(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.array([[5.0, 1.0]]) if i == 0 else jnp.zeros((0, 2)))
    squares = run(strategy, lambda y: y * y, (x,))
    np.testing.assert_allclose(strategy.reduce("SUM", squares, axis=0), [25.0, 1.0])
    np.testing.assert_allclose(strategy.reduce("MEAN", squares, axis=0), [25.0, 1.0])


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
@everywhere
def test_mean_of_integers_is_float(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.array([i, i + 1], jnp.int32))

    def fn(strategy: Any, x: Any) -> Any:
        return strategy.reduce("MEAN", x, axis=None), strategy.reduce("MEAN", x, axis=0)

    rows, mean = cross(strategy, fn, x)
    assert rows.dtype == mean.dtype == jnp.float32
    np.testing.assert_allclose(rows, [(n - 1) / 2, (n + 1) / 2])
    np.testing.assert_allclose(mean, n / 2)


DTYPES = ["float16", "bfloat16", "int32", "uint8", "complex64", "bool"]


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
def test_dtypes(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    xs = {d: values(strategy, lambda i, d=d: jnp.array([1, 0, i % 2]).astype(d)) for d in DTYPES}

    def fn(strategy: Any, xs: Any) -> Any:
        return strategy.reduce("SUM", xs, axis=None), strategy.reduce("MEAN", xs, axis=None)

    totals, means = cross(strategy, fn, xs)
    for dtype in DTYPES:
        total, mean = totals[dtype], means[dtype]
        assert total.dtype == (jnp.int32 if dtype == "bool" else jnp.dtype(dtype))
        is_inexact = jnp.issubdtype(jnp.dtype(dtype), jnp.inexact)
        assert mean.dtype == (jnp.dtype(dtype) if is_inexact else jnp.float32)
        np.testing.assert_array_equal(np.asarray(total, np.complex64), [n, 0, n // 2])
        np.testing.assert_array_equal(np.asarray(mean, np.complex64), [1, 0, n // 2 / n])


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
def test_shapes(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    shapes = [(), (1,), (0,), (0, 3), (3, 0), (1, 1, 1), (7, 5)]
    xs = [values(strategy, lambda i, s=s: jnp.full(s, i, jnp.float32)) for s in shapes]
    totals = cross(strategy, lambda s, xs: s.reduce("SUM", xs, axis=None), xs)
    for shape, total in zip(shapes, totals, strict=True):
        assert total.shape == shape
        np.testing.assert_array_equal(total, np.full(shape, n * (n - 1) // 2))


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
@everywhere
def test_nests_keep_their_structure(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    nest = {
        "a": [ids(strategy), values(strategy, lambda i: jnp.ones((2,)))],
        "b": Pair(values(strategy, lambda i: jnp.int32(i)), ()),
    }
    result = cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), nest)
    assert set(result) == {"a", "b"}
    assert type(result["a"]) is list and isinstance(result["b"], Pair)
    assert float(result["a"][0]) == n * (n - 1) / 2
    np.testing.assert_array_equal(result["a"][1], [n, n])
    assert result["b"].left.dtype == jnp.int32
    assert result["b"].right == ()


@pytest.mark.strategies("default", "one_device", "mirrored_4", "virtual_2")
def test_results_of_run_are_reduced_like_the_batch(strategy: Any, run: Any) -> None:
    """The global mean loss is that of one big batch, whatever the number of replicas."""
    n = strategy.num_replicas_in_sync
    batch = np.linspace(-1.0, 2.0, 8, dtype=np.float32)
    x = values(strategy, lambda i: jnp.asarray(np.split(batch, n)[i]))
    losses = run(strategy, lambda y: {"loss": y**2, "n": jnp.float32(y.shape[0])}, (x,))
    result = strategy.reduce("MEAN", losses["loss"], axis=0)
    np.testing.assert_allclose(result, (batch**2).mean(), rtol=1e-6)
    assert float(strategy.reduce("SUM", losses["n"], axis=None)) == 8.0


# Values that are equal on all replicas.


@pytest.mark.strategies("default", "one_device", "mirrored_4", "virtual_2")
@everywhere
def test_t34_plain_value_sum_is_n_times_and_mean_is_the_value(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    plain = [3.0, 2, np.float32(1.5), np.array([1.0, 2.0], np.float32), jnp.array([1.0, 2.0, 6.0])]

    def fn(strategy: Any) -> Any:
        return (
            strategy.reduce("SUM", plain, axis=None),
            strategy.reduce("MEAN", plain, axis=None),
            strategy.reduce("SUM", plain[-1], axis=0),
            strategy.reduce("MEAN", plain[-1], axis=0),
        )

    totals, means, total, mean = cross(strategy, fn)
    for value, one, other in zip(plain, totals, means, strict=True):
        np.testing.assert_array_equal(one, n * np.asarray(value))
        np.testing.assert_array_equal(other, value)
    assert float(total) == 9.0 * n
    assert float(mean) == 3.0


def test_s57_plain_array_of_the_default_strategy() -> None:
    strategy = rx.get_strategy()
    assert float(strategy.reduce("MEAN", jnp.array([1.0, 2.0]), axis=0)) == 1.5
    np.testing.assert_array_equal(strategy.reduce("SUM", jnp.arange(3), axis=None), [0, 1, 2])


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
def test_t34_shared_result_of_run(strategy: Any, cross: Any) -> None:
    """All replicas return one object: run returns it, and SUM counts it n times."""
    shared = jnp.array([1.0, 4.0])
    n = strategy.num_replicas_in_sync

    def fn(strategy: Any, x: Any) -> Any:
        return strategy.reduce("SUM", x, axis=None), strategy.reduce("MEAN", x, axis=None)

    returned = strategy.run(lambda x: x, args=(shared,))
    total, mean = in_eager(strategy, fn, returned)
    np.testing.assert_array_equal(total, n * shared)
    np.testing.assert_array_equal(mean, shared)
    total, mean = cross(strategy, fn, returned)
    np.testing.assert_array_equal(total, n * shared)
    np.testing.assert_array_equal(mean, shared)


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4", "virtual_2", "tpu_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
@pytest.mark.parametrize("axis", [None, 0])
def test_t35_mirrored_value(strategy: Any, cross: Any, axis: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.array([1.0, 3.0]))
    mirrored = strategy.extended.reduce_to("MEAN", x, strategy.extended.worker_devices)
    # The copy of a process with one replica is an array.
    assert isinstance(mirrored, rx.Mirrored if len(local_ids(strategy)) > 1 else jax.Array)

    def fn(strategy: Any, m: Any) -> Any:
        return strategy.reduce("SUM", m, axis=axis), strategy.reduce("MEAN", m, axis=axis)

    total, mean = cross(strategy, fn, mirrored)
    one = np.array([1.0, 3.0]) if axis is None else 4.0
    np.testing.assert_allclose(total, n * one)
    np.testing.assert_allclose(mean, one if axis is None else 2.0)


@pytest.mark.every_strategy
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_t35_variables(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        mirrored = rx.Variable([1.0, 2.0])

    def fn(strategy: Any) -> Any:
        return (
            strategy.reduce("SUM", mirrored, axis=None),
            strategy.reduce("MEAN", mirrored, axis=None),
            strategy.reduce("SUM", mirrored, axis=0),
        )

    total, mean, along = cross(strategy, fn)
    np.testing.assert_allclose(total, [n, 2 * n])
    np.testing.assert_allclose(mean, [1, 2])
    np.testing.assert_allclose(along, 3 * n)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_reduce_of_a_sync_on_read_variable_combines_its_copies(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(
            [0.0, 0.0],
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    strategy.run(lambda x: v.assign(x), args=(values(strategy, lambda i: jnp.array([i, 1.0])),))
    total = cross(strategy, lambda s: s.reduce("SUM", v, axis=None))
    np.testing.assert_allclose(total, [n * (n - 1) / 2, n])


# Where the result is, and where reduce may be called.


@pytest.mark.every_strategy
def test_s50_result_is_on_the_current_device(strategy: Any, run: Any, devices: Any) -> None:
    result = run(strategy, lambda x: x + 1, (ids(strategy),))
    for value, device in zip(
        strategy.experimental_local_results(result), _worker_devices(strategy), strict=True
    ):
        if strategy is not rx.get_strategy():
            assert value.devices() == {device}
    assert strategy.reduce("SUM", result, axis=None).devices() == {devices[0]}
    last = len(devices) - 1
    with rx.device(f"CPU:{last}"):
        assert strategy.reduce("SUM", result, axis=None).devices() == {devices[last]}


def _worker_devices(strategy: Any) -> Any:
    return (
        [jax.devices()[0]]
        if strategy.extended.layout is None
        else strategy.extended.layout.local_devices
    )


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_s13_reduce_needs_no_scope_and_leaves_none(strategy: Any) -> None:
    assert float(strategy.reduce("SUM", 1.0, axis=None)) == strategy.num_replicas_in_sync
    assert not rx.has_strategy()
    with strategy.scope():
        assert float(strategy.reduce("MEAN", 1.0, axis=None)) == 1.0
        assert rx.get_strategy() is strategy


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_s17_replica_context_is_refused(strategy: Any, run: Any) -> None:
    calls = [
        lambda: strategy.reduce("SUM", 1.0, axis=None),
        lambda: strategy.extended.reduce_to("SUM", 1.0, "CPU:0"),
        lambda: strategy.extended.batch_reduce_to("SUM", [(1.0, "CPU:0")]),
    ]
    for call in calls:
        with refused(RuntimeError, "cross-replica context.*all_reduce"):
            run(strategy, call)


def test_reduce_under_another_strategy_is_refused() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    with one.scope(), refused(RuntimeError, "Mixing different"):
        other.reduce("SUM", 1.0, axis=None)


# What is refused.


@pytest.mark.strategies("default", "one_device", "mirrored_2")
def test_x7_bad_reduce_op(strategy: Any) -> None:
    aggregation = rx.VariableAggregation
    bad = ["MAX", "", "sum ", None, 1, max, rx.ReduceOp]
    for op in [*bad, aggregation.NONE, aggregation.ONLY_FIRST_REPLICA]:
        with strategy.scope():
            with refused(ValueError, "ReduceOp|VariableAggregation"):
                strategy.reduce(op, 1.0, axis=None)
            with refused(ValueError, "ReduceOp|VariableAggregation"):
                strategy.extended.reduce_to(op, 1.0, "CPU:0")
            with refused(ValueError, "ReduceOp|VariableAggregation"):
                strategy.extended.batch_reduce_to(op, [(1.0, "CPU:0")])


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s56_x7_spellings_of_the_op(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i + 1))
    sums = ["sum", "SUM", "Sum", rx.ReduceOp.SUM, rx.VariableAggregation.SUM]
    means = ["mean", "Mean", rx.ReduceOp.MEAN, rx.VariableAggregation.MEAN]
    for op, expected in [(op, 3.0) for op in sums] + [(op, 1.5) for op in means]:
        assert float(strategy.reduce(op, x, axis=None)) == expected
        assert float(strategy.extended.reduce_to(op, x, "CPU:0")) == expected
        assert float(strategy.extended.batch_reduce_to(op, [(x, "CPU:0")])[0]) == expected


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_axis_of_wrong_type(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((2, 2)))
    for axis in ["0", 1.0, True, {0}, (0, "1"), np.float32(0), b"0"]:
        with refused(TypeError, "axis"):
            cross(strategy, lambda s, x, a=axis: s.reduce("SUM", x, axis=a), x)


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
def test_axis_out_of_range(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((2, 2)))
    for op, axis in [("SUM", 2), ("MEAN", -3), ("MEAN", (0, 2)), ("SUM", [5])]:
        with refused(ValueError, "axis"):
            cross(strategy, lambda s, x, op=op, a=axis: s.reduce(op, x, axis=a), x)


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_axis_of_scalars_and_repeated_axes(strategy: Any) -> None:
    with refused(ValueError, "axis"):
        strategy.reduce("MEAN", ids(strategy), axis=0)
    with pytest.raises(ValueError, match=r"(?i)duplicate|twice|axis"):
        strategy.reduce("MEAN", values(strategy, lambda i: jnp.ones((2, 2))), axis=(0, -2))


def test_x17_axis_is_required(strategy: Any) -> None:
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", 1.0)


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
@pytest.mark.parametrize("axis", [None, 0])
def test_values_that_are_no_numbers(strategy: Any, axis: Any) -> None:
    for value in ("text", None, object()):
        with refused(TypeError):
            strategy.reduce("SUM", value, axis=axis)
        with refused(TypeError):
            strategy.reduce("MEAN", values(strategy, lambda i, v=value: v), axis=axis)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_different_strings_of_replicas(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: f"replica {i}")
    with refused(TypeError):
        cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), x)


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2", "mirrored_4")
@pytest.mark.parametrize("cross", [in_eager, in_function])
@pytest.mark.parametrize("axis", [None, 0])
def test_wrong_number_of_components(strategy: Any, cross: Any, axis: Any) -> None:
    count = strategy.num_replicas_in_sync + 1
    x = rx.PerReplica([jnp.ones(2)] * count)
    with refused(ValueError, str(count)):
        cross(strategy, lambda s, x: s.reduce("SUM", x, axis=axis), x)


@pytest.mark.strategies("mirrored_2")
def test_components_made_by_hand_without_a_layout(strategy: Any) -> None:
    x = rx.PerReplica([jnp.ones(2) * (i + 1) for i in local_ids(strategy)])
    for cross in (in_eager, in_function):
        np.testing.assert_allclose(
            cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), x), [3, 3]
        )
    same = jax.tree.map(lambda v: v + 1, x)
    np.testing.assert_allclose(strategy.reduce("SUM", same, axis=None), [5, 5])


@pytest.mark.strategies("one_device", "mirrored_4", "virtual_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
@pytest.mark.parametrize("axis", [None, 0])
def test_per_replica_mapped_with_jax_tree(strategy: Any, cross: Any, axis: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.array([1.0, 2.0]) + i)

    def fn(strategy: Any, x: Any) -> Any:
        return strategy.reduce("SUM", jax.tree.map(lambda v: v * 2, x), axis=axis)

    expected = 2 * sum(np.array([1.0, 2.0]) + i for i in range(n))
    np.testing.assert_allclose(cross(strategy, fn, x), expected if axis is None else expected.sum())


@pytest.mark.one_process("values of different type on two workers are an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_components_of_different_type_are_promoted(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.int32(1) if i == 0 else jnp.float32(0.5))
    total = cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), x)
    assert float(total) == 1.5


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_captured_value_in_cross_replica_code(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.array([1.0, 2.0]) * (i + 1))
    total = cross(strategy, lambda s: s.reduce("SUM", x, axis=None))
    np.testing.assert_allclose(total, [3, 6])


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_python_numbers_as_components(strategy: Any) -> None:
    x = values(strategy, lambda i: i + 1)
    # A Python number of replica code stays one, and counts as equal on all workers.
    for cross in PLACES[:2] if spans_workers(strategy) else PLACES:
        total = cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), x)
        assert int(total) == 3, cross.__name__
        mean = cross(strategy, lambda s, x: s.reduce("MEAN", x, axis=None), x)
        assert float(mean) == 1.5, cross.__name__


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_numpy_components(strategy: Any) -> None:
    x = values(strategy, lambda i: np.array([i, 1.0], np.float32))
    for cross in PLACES:
        total = cross(strategy, lambda s, x: s.reduce("SUM", x, axis=None), x)
        np.testing.assert_allclose(total, [1, 2], err_msg=cross.__name__)


# IndexedSlices.


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@everywhere
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_indexed_slices_are_joined(strategy: Any, cross: Any, op: str) -> None:
    n = strategy.num_replicas_in_sync

    def make(i: int) -> Any:
        rows = jnp.array([[1.0, 2.0], [3.0, 4.0]]) * (i + 1)
        return rx.IndexedSlices(rows, jnp.array([0, i]), dense_shape=(5, 2))

    result = cross(
        strategy, lambda s, x: s.reduce(op, x, axis=None), strategy.run(_slices, (ids(strategy),))
    )
    expected = sum(np.asarray(make(i).to_dense()) for i in range(n))
    assert isinstance(result, rx.IndexedSlices)
    assert result.dense_shape == (5, 2)
    np.testing.assert_allclose(result.to_dense(), expected / (n if op == "MEAN" else 1), rtol=1e-6)


def _slices(i: Any) -> Any:
    rows = jnp.array([[1.0, 2.0], [3.0, 4.0]]) * (i + 1)
    return rx.IndexedSlices(rows, jnp.stack([0, i.astype(int)]), dense_shape=(5, 2))


@pytest.mark.strategies(*TWO_REPLICAS)
def test_indexed_slices_of_different_length(strategy: Any) -> None:
    def fn(x: Any) -> Any:
        return rx.IndexedSlices(x, jnp.zeros(x.shape[0], jnp.int32), dense_shape=(2, 1))

    slices = strategy.run(fn, args=(values(strategy, lambda i: jnp.ones((i + 1, 1))),))
    total = strategy.reduce("SUM", slices, axis=None)
    np.testing.assert_allclose(total.to_dense(), [[3], [0]])


@pytest.mark.one_process("values of different kind on two workers are an error of their group")
@pytest.mark.strategies(*TWO_REPLICAS)
def test_indexed_slices_mixed_with_arrays(strategy: Any) -> None:
    x = rx.PerReplica(
        (rx.IndexedSlices(jnp.ones((1, 1)), jnp.array([0]), (2, 1)), jnp.ones((2, 1))),
        strategy.extended.layout,
    )
    with refused(ValueError, "to_dense"):
        strategy.reduce("SUM", x, axis=None)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_plain_indexed_slices(strategy: Any) -> None:
    slices = rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([1]), dense_shape=(2, 2))
    total = strategy.reduce("SUM", slices, axis=None)
    np.testing.assert_allclose(total.to_dense(), [[0, 0], [2, 2]])
    np.testing.assert_allclose(
        strategy.reduce("MEAN", slices, axis=None).to_dense(), [[0, 0], [1, 1]]
    )


# reduce_to and batch_reduce_to.


@pytest.mark.one_process("names devices that a worker does not have")
@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_s60_destinations(strategy: Any, devices: Any) -> None:
    x = values(strategy, lambda i: jnp.array([1.0, 2.0]) + i)
    extended = strategy.extended
    layout = list(extended.layout.devices)
    with strategy.scope():
        variable = rx.Variable(0.0)
        places = [
            ("CPU:5", [devices[5]]),
            ("/job:localhost/replica:0/task:0/device:CPU:5", [devices[5]]),
            (devices[5], [devices[5]]),
            (["CPU:5", "CPU:3"], [devices[5], devices[3]]),
            (("CPU:5", devices[3]), [devices[5], devices[3]]),
            (["CPU:4"], [devices[4]]),
            (jax.device_put(jnp.ones(1), devices[4]), [devices[4]]),
            (ids(strategy), layout),
            (x, layout),
            (extended.worker_devices, layout),
            (variable, list(variable.placement)),
        ]
        for destinations, expected in places:
            result = extended.reduce_to("SUM", x, destinations)
            parts = strategy.unwrap(result)
            assert [p.devices() for p in parts] == [{d} for d in expected], destinations
            assert isinstance(result, jax.Array if len(expected) == 1 else rx.Mirrored)
            for part in parts:
                np.testing.assert_allclose(part, [3, 5])


@pytest.mark.every_strategy
@pytest.mark.strategies(*MANY_REPLICAS)
@pytest.mark.parametrize("cross", [in_eager, in_function])
def test_s61_value_as_destinations_is_an_all_reduce(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.array([1.0, i]))
    result = cross(strategy, lambda s, x: s.extended.reduce_to("SUM", x, x), x)
    # The copy of a process with one replica is an array.
    assert isinstance(result, rx.Mirrored if len(local_ids(strategy)) > 1 else jax.Array)
    parts = strategy.unwrap(result)
    for part, device in zip(parts, strategy.extended.layout.local_devices, strict=True):
        np.testing.assert_allclose(part, [n, n * (n - 1) / 2])
        assert part.devices() == {device}


@pytest.mark.one_process("names devices that a worker does not have")
@pytest.mark.strategies("mirrored_2", "virtual_2")
@pytest.mark.parametrize("cross", [in_eager, in_function])
@pytest.mark.parametrize("names", [["CPU:5"], ["CPU:5", "CPU:3"], ["CPU:5", "CPU:3", "CPU:0"]])
def test_x8_t37_number_of_copies_is_that_of_the_destinations(
    strategy: Any, cross: Any, names: Any
) -> None:
    x = values(strategy, lambda i: jnp.float32(i + 1))
    result = cross(strategy, lambda s, x: s.extended.reduce_to("SUM", x, names), x)
    parts = strategy.unwrap(result)
    assert isinstance(result, jax.Array if len(names) == 1 else rx.Mirrored)
    assert [float(p) for p in parts] == [3.0] * len(names)


@pytest.mark.strategies("mirrored_2", "virtual_2")
@everywhere
def test_s62_batch_reduce_to_equals_reduce_to(strategy: Any, cross: Any) -> None:
    xs = [
        values(strategy, lambda i: jnp.float32(i)),
        values(strategy, lambda i: jnp.ones((3, 2)) * i),
        values(strategy, lambda i: jnp.arange(5.0) + i),
        values(strategy, lambda i: jnp.zeros((0,))),
    ]

    def fn(strategy: Any, xs: Any) -> Any:
        extended = strategy.extended
        pairs = [(x, extended.worker_devices) for x in xs]
        batch = extended.batch_reduce_to("MEAN", pairs)
        assert type(batch) is list
        single = [extended.reduce_to("MEAN", x, d) for x, d in pairs]
        return batch, single

    batch, single = cross(strategy, fn, xs)
    n = strategy.num_replicas_in_sync
    assert float(batch[0]) == (n - 1) / 2
    for one, other in zip(batch, single, strict=True):
        np.testing.assert_allclose(one, other)
    assert len(batch) == 4


@pytest.mark.one_process("names devices that a worker does not have")
@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_t37_each_result_on_its_own_destination(strategy: Any, devices: Any) -> None:
    x, y, z = (values(strategy, lambda i, k=k: jnp.float32(k * (i + 1))) for k in (1, 2, 3))
    with strategy.scope():
        results = strategy.extended.batch_reduce_to(
            "SUM", [(x, "CPU:5"), (y, strategy.extended.worker_devices), (z, ["CPU:3", "CPU:7"])]
        )
    assert results[0].devices() == {devices[5]} and float(results[0]) == 3.0
    assert [v.devices() for v in results[1].values] == [
        {d} for d in strategy.extended.layout.devices
    ]
    assert [float(v) for v in results[1].values] == [6.0, 6.0]
    assert [v.devices() for v in results[2].values] == [{devices[3]}, {devices[7]}]
    assert [float(v) for v in results[2].values] == [9.0, 9.0]


@pytest.mark.strategies("mirrored_2", "virtual_2")
@everywhere
def test_t43_batch_mixing_int32_and_float_is_refused(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i))
    y = values(strategy, lambda i: jnp.int32(i))

    def fn(strategy: Any, x: Any, y: Any) -> Any:
        return strategy.extended.batch_reduce_to("SUM", [(x, "CPU:0"), (y, "CPU:0")])

    with refused(ValueError, "int32"):
        cross(strategy, fn, x, y)
    total = cross(strategy, lambda s, y: s.extended.batch_reduce_to("SUM", [(y, "CPU:0")])[0], y)
    n = strategy.num_replicas_in_sync
    assert int(total) == n * (n - 1) // 2


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_batch_reduce_to_pairs(strategy: Any) -> None:
    x = ids(strategy)
    with strategy.scope():
        assert strategy.extended.batch_reduce_to("SUM", []) == []
        for bad in ([x, "CPU:0"], (x,), (x, "CPU:0", None), x, "ab"):
            with refused(ValueError, "tuple"):
                strategy.extended.batch_reduce_to("SUM", [bad])


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_bad_destinations(strategy: Any) -> None:
    for bad in (None, [], (), "", "CPU:99", "nonsense:x", 3.0, {}):
        with strategy.scope():
            with refused(ValueError):
                strategy.extended.reduce_to("SUM", ids(strategy), bad)
            with refused(ValueError):
                strategy.extended.batch_reduce_to("SUM", [(ids(strategy), bad)])


@pytest.mark.strategies("one_device", "mirrored_2")
def test_bad_device_in_a_list_of_destinations(strategy: Any) -> None:
    with strategy.scope(), refused(TypeError, "device"):
        strategy.extended.reduce_to("SUM", ids(strategy), ["CPU:0", 3])


@everywhere
@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_t34_t35_reduce_to_of_equal_values(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync

    def fn(strategy: Any) -> Any:
        extended = strategy.extended
        return (
            extended.reduce_to("SUM", jnp.float32(2), extended.worker_devices),
            extended.reduce_to("MEAN", 2.0, "CPU:0"),
            extended.batch_reduce_to("SUM", [(jnp.float32(1), "CPU:0"), (3.0, "CPU:0")]),
        )

    total, mean, batch = cross(strategy, fn)
    assert float(total) == 2.0 * n
    assert float(mean) == 2.0
    assert [float(b) for b in batch] == [1.0 * n, 3.0 * n]


@pytest.mark.strategies("mirrored_2", "virtual_2")
@everywhere
def test_options_are_accepted(strategy: Any, cross: Any) -> None:
    options = rx.experimental.CommunicationOptions(bytes_per_pack=8, timeout_seconds=5.0)
    xs = [values(strategy, lambda i, k=k: jnp.arange(k + 1.0) + i) for k in range(4)]

    def fn(strategy: Any, xs: Any) -> Any:
        extended = strategy.extended
        one = extended.reduce_to("SUM", xs[0], "CPU:0", options)
        batch = extended.batch_reduce_to("SUM", [(x, "CPU:0") for x in xs], options=options)
        return one, batch

    one, batch = cross(strategy, fn, xs)
    np.testing.assert_allclose(one, [1])
    for k, part in enumerate(batch):
        np.testing.assert_allclose(part, 2 * np.arange(k + 1.0) + 1)


def test_repeated_reductions_do_not_trace_again() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    traces = []

    @rx.function
    def step(x: Any) -> Any:
        traces.append(1)
        return strategy.reduce("SUM", strategy.run(lambda y: y * 2, args=(x,)), axis=0)

    for k in range(4):
        x = values(strategy, lambda i, k=k: jnp.arange(3.0) + i + k)
        assert float(step(x)) == 2 * (6 + 3 + 6 * k)
    assert len(traces) == 1
