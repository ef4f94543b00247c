"""Concatenating per-replica values in cross-replica code (S69-S79, T42)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import in_compiled_merge, in_eager, in_function, in_merge, refused, values
from worker_groups import local_ids

import replicax as rx

everywhere = pytest.mark.parametrize("cross", [in_eager, in_function, in_merge, in_compiled_merge])
outside = pytest.mark.parametrize("cross", [in_eager, in_function])


@pytest.mark.every_strategy
def test_s69_sample(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    result = run(strategy, lambda: jnp.array([[1], [2]]))
    gathered = strategy.gather(result, axis=0)
    if n > 1 and not isinstance(result, rx.PerReplica):
        pytest.fail(f"replicas made arrays of their own, run returned {result!r}")
    assert isinstance(gathered, jax.Array)
    assert gathered.shape == (2 * n, 1) and gathered.dtype == jnp.int32
    np.testing.assert_array_equal(gathered, [[1], [2]] * n)


@everywhere
@pytest.mark.strategies("one_device", "mirrored_4", "virtual_2")
def test_s70_s71_s72_every_axis(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    parts = [np.arange(6).reshape(1, 2, 3) + 10 * i for i in range(n)]
    x = values(strategy, lambda i: jnp.asarray(parts[i], jnp.int32))
    axes = [0, 1, 2, -1, -3]

    def fn(strategy: Any, x: Any) -> Any:
        return [strategy.gather(x, axis=axis) for axis in axes]

    for axis, gathered in zip(axes, cross(strategy, fn, x), strict=True):
        np.testing.assert_array_equal(gathered, np.concatenate(parts, axis), err_msg=f"{axis}")
        assert gathered.dtype == jnp.int32


@pytest.mark.strategies("mirrored_4")
def test_s70_sample_of_four_replicas(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda: jnp.arange(6).reshape(1, 2, 3))
    shapes = [strategy.gather(result, axis=axis).shape for axis in range(3)]
    assert shapes == [(4, 2, 3), (1, 8, 3), (1, 2, 12)]
    np.testing.assert_array_equal(
        strategy.gather(result, axis=2)[0], [[0, 1, 2] * 4, [3, 4, 5] * 4]
    )


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_s73_components_of_different_shape(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((1, 2 + i, 3)) * i)
    for cross in (in_eager, in_function, in_merge):
        gathered = cross(strategy, lambda s, x: s.gather(x, axis=1), x)
        assert gathered.shape == (1, 5, 3)
        np.testing.assert_array_equal(gathered[0, :, 0], [0, 0, 1, 1, 1])
        for axis in (0, 2, -1):
            with refused(ValueError, r"\(1, 2, 3\).*\(1, 3, 3\)"):
                cross(strategy, lambda s, x, a=axis: s.gather(x, axis=a), x)


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
@outside
def test_s73_an_empty_component(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.arange(3.0) if i == 0 else jnp.zeros((0,)))
    np.testing.assert_array_equal(cross(strategy, lambda s, x: s.gather(x, 0), x), [0, 1, 2])
    empty = values(strategy, lambda i: jnp.zeros((0, 2)))
    assert cross(strategy, lambda s, x: s.gather(x, 0), empty).shape == (0, 2)


@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
@everywhere
def test_s74_scalars_are_refused(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i))
    with refused(ValueError, "scalar.*expand_dims"):
        cross(strategy, lambda s, x: s.gather(x, axis=0), x)


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
def test_s75_replica_context_is_refused(strategy: Any, run: Any) -> None:
    with refused(RuntimeError, "all_gather"):
        run(strategy, lambda: strategy.gather(jnp.ones(2), axis=0))


def test_s75_another_strategy_is_refused() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    with one.scope(), refused(RuntimeError, "Mixing different"):
        other.gather(jnp.ones(2), axis=0)


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
@everywhere
def test_s76_t42_indexed_slices_are_refused(strategy: Any, cross: Any) -> None:
    def slices(x: Any) -> Any:
        return rx.IndexedSlices(x, jnp.array([0]), dense_shape=(2, 2))

    with refused(NotImplementedError, "IndexedSlices.*to_dense"):
        cross(strategy, lambda s: s.gather(slices(jnp.ones((1, 2))), axis=0))
    per_replica = strategy.run(slices, args=(values(strategy, lambda i: jnp.ones((1, 2)) + i),))
    with refused(NotImplementedError, "IndexedSlices.*to_dense"):
        cross(strategy, lambda s, x: s.gather(x, axis=0), per_replica)


@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
@everywhere
def test_s77_axis_out_of_range(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((1, 2)))
    for axis in (2, -3, 100):
        with refused(ValueError, rf"axis.*{axis}"):
            cross(strategy, lambda s, x, a=axis: s.gather(x, axis=a), x)


@pytest.mark.strategies("mirrored_2", "virtual_2")
@outside
def test_s77_axis_of_wrong_type(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((1, 2)))
    for axis in (None, "0", 0.0, True, (0,), [0, 1]):
        with refused(TypeError, "axis"):
            cross(strategy, lambda s, x, a=axis: s.gather(x, axis=a), x)


def test_s77_axis_is_required(strategy: Any) -> None:
    with pytest.raises(TypeError, match="axis"):
        strategy.gather(jnp.ones(2))


@outside
def test_s78_plain_array_comes_back(strategy: Any, cross: Any) -> None:
    x = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(cross(strategy, lambda s, x: s.gather(x, axis=0), x), [1, 2])
    assert strategy.gather(x, axis=0) is x


@pytest.mark.every_strategy
def test_s79_result_is_on_the_current_device(strategy: Any, devices: Any) -> None:
    if strategy is rx.get_strategy():
        x: Any = jnp.ones(2)
        assert strategy.gather(x, axis=0) is x
        return
    x = strategy.run(lambda: jnp.ones(2))
    if strategy.num_replicas_in_sync == 1:
        return
    assert strategy.gather(x, axis=0).devices() == {devices[0]}
    last = len(devices) - 1
    with rx.device(f"CPU:{last}"):
        assert strategy.gather(x, axis=0).devices() == {devices[last]}


@pytest.mark.strategies(*TWO_REPLICAS)
@outside
def test_t42_components_of_different_rank(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((2,) * (i + 1)))
    with refused(ValueError, r"\(2,\).*\(2, 2\)"):
        cross(strategy, lambda s, x: s.gather(x, axis=0), x)


@pytest.mark.strategies("mirrored_2", "virtual_2")
@everywhere
def test_dtypes_and_nests(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    dtypes = ["float16", "bfloat16", "float32", "int32", "uint8", "complex64", "bool"]
    xs = {d: values(strategy, lambda i, d=d: jnp.array([i, 1]).astype(d)) for d in dtypes}
    result = cross(strategy, lambda s, xs: s.gather((xs, [xs["int32"]]), axis=0), xs)
    assert type(result) is tuple and list(result[0]) == dtypes and type(result[1]) is list
    for dtype in dtypes:
        expected = [jnp.array([i, 1]).astype(dtype) for i in range(n)]
        assert result[0][dtype].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(result[0][dtype], jnp.concatenate(expected))
    assert result[1][0].shape == (2 * n,)


@pytest.mark.strategies("mirrored_4", "virtual_2", "tpu_2")
@outside
def test_gather_of_a_mirrored_value_has_a_part_per_replica(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.array([float(i), 1.0]))
    mirrored = strategy.extended.reduce_to("SUM", x, x)
    gathered = cross(strategy, lambda s, m: s.gather(m, axis=0), mirrored)
    # The copy of a process with one replica is an array, and comes back.
    is_array = len(local_ids(strategy)) == 1
    assert isinstance(mirrored, jax.Array if is_array else rx.Mirrored)
    np.testing.assert_array_equal(gathered, [n * (n - 1) / 2, n] * (1 if is_array else n))


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
@outside
def test_gather_of_a_sync_on_read_variable(strategy: Any, cross: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(
            [0.0],
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    strategy.run(v.assign, args=(values(strategy, lambda i: jnp.array([float(i)])),))
    gathered = cross(strategy, lambda s: s.gather(v, axis=0))
    np.testing.assert_array_equal(gathered, np.arange(n))


@pytest.mark.strategies("mirrored_2", "virtual_2")
@outside
def test_gather_of_what_is_no_array(strategy: Any, cross: Any) -> None:
    for make in (lambda i: f"replica {i}", lambda i: None, lambda i: object()):
        x = values(strategy, make)
        with pytest.raises((TypeError, ValueError)) as info:
            cross(strategy, lambda s, x: s.gather(x, axis=0), x)
        assert isinstance(info.value, rx.errors.DistributeError), repr(info.value)


@pytest.mark.strategies("mirrored_2", "virtual_2", "mirrored_4")
@outside
def test_gather_of_wrong_number_of_components(strategy: Any, cross: Any) -> None:
    count = strategy.num_replicas_in_sync + 1
    x = rx.PerReplica([jnp.ones(2)] * count)
    with refused(ValueError, str(count)):
        cross(strategy, lambda s, x: s.gather(x, axis=0), x)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_gather_of_what_run_returned_in_one_function(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.array([[1.0, 2.0]]) + i)

    @rx.function
    def step(x: Any) -> Any:
        y = strategy.run(lambda v: v * 10, args=(x,))
        return strategy.gather(y, axis=0), strategy.gather(y, axis=1), strategy.gather(x, axis=0)

    rows, row, given = step(x)
    np.testing.assert_array_equal(rows, [[10, 20], [20, 30]])
    np.testing.assert_array_equal(row, [[10, 20, 20, 30]])
    np.testing.assert_array_equal(given, [[1, 2], [2, 3]])


@pytest.mark.strategies("mirrored_2", "virtual_2")
@outside
def test_gather_of_a_captured_value(strategy: Any, cross: Any) -> None:
    x = values(strategy, lambda i: jnp.array([1.0]) + i)
    np.testing.assert_array_equal(cross(strategy, lambda s: s.gather(x, axis=0)), [1, 2])
    np.testing.assert_array_equal(strategy.gather(x, axis=0), [1, 2])
