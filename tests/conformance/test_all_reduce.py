"""Reductions and gathers of replica code, and gradients through them (S33, S58, S65, T40, T41)."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import refused, values
from worker_groups import replica_results

import replicax as rx

Pair = collections.namedtuple("Pair", ["left", "right"])


def all_reduce(op: Any, value: Any, *args: Any) -> Any:
    return rx.get_replica_context().all_reduce(op, value, *args)


def all_gather(value: Any, axis: Any, *args: Any) -> Any:
    return rx.get_replica_context().all_gather(value, axis, *args)


def each(strategy: Any, result: Any) -> Any:
    """One result per replica, also where all replicas returned one object."""
    local = replica_results(strategy, result)
    n = strategy.num_replicas_in_sync
    return local * n if len(local) == 1 else local


# all_reduce.


@pytest.mark.every_strategy
def test_s33_s34_sum_of_replica_ids(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    result = run(
        strategy, lambda: all_reduce("sum", rx.get_replica_context().replica_id_in_sync_group)
    )
    for part in each(strategy, result):
        assert part.dtype == jnp.int32 and part.shape == ()
        assert int(part) == n * (n - 1) // 2


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "tpu_2")
def test_s58_s65_results_are_equal_and_on_the_replicas(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.arange(3.0) * (i + 1))
    result = run(strategy, lambda v: (all_reduce("SUM", v), all_reduce("MEAN", v)), (x,))
    n = strategy.num_replicas_in_sync
    weight = n * (n + 1) / 2
    for total, mean in each(strategy, result):
        np.testing.assert_allclose(total, np.arange(3.0) * weight)
        np.testing.assert_allclose(mean, np.arange(3.0) * weight / n)
    own = strategy.experimental_local_results(result)
    for (total, mean), device in zip(own, strategy.extended.layout.local_devices, strict=True):
        assert total.devices() == mean.devices() == {device}


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_all_reduce_of_nests_dtypes_and_shapes(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    dtypes = ["float16", "bfloat16", "int32", "bool"]
    shapes = [(), (1,), (0, 3), (2, 3)]

    def make(i: int) -> Any:
        return {
            "types": {d: jnp.array([1, i % 2]).astype(d) for d in dtypes},
            "shapes": [jnp.full(s, i, jnp.float32) for s in shapes],
            "pair": Pair(jnp.int32(i), ()),
        }

    def fn(v: Any) -> Any:
        return all_reduce("SUM", v), all_reduce("MEAN", v)

    result = run(strategy, fn, (values(strategy, make),))
    for total, mean in each(strategy, result):
        for d in dtypes:
            assert total["types"][d].dtype == (jnp.int32 if d == "bool" else jnp.dtype(d))
            inexact = jnp.issubdtype(jnp.dtype(d), jnp.inexact)
            assert mean["types"][d].dtype == (jnp.dtype(d) if inexact else jnp.float32), d
            got = np.asarray(total["types"][d], np.complex64)
            np.testing.assert_array_equal(got, [n, n // 2])
            got = np.asarray(mean["types"][d], np.complex64)
            np.testing.assert_array_equal(got, [1, n // 2 / n])
        for s, part in zip(shapes, total["shapes"], strict=True):
            np.testing.assert_array_equal(part, np.full(s, n * (n - 1) / 2))
        assert isinstance(total["pair"], Pair) and total["pair"].right == ()
        assert int(total["pair"].left) == n * (n - 1) // 2


@pytest.mark.strategies("default", "one_device", "mirrored_4", "virtual_2", "central_2")
def test_all_reduce_of_one_shared_value_is_n_times_it(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    shared = jnp.array([1.0, 2.0])

    def fn() -> Any:
        return [
            all_reduce("SUM", shared),
            all_reduce("MEAN", shared),
            all_reduce("SUM", 2.0),
            all_reduce("MEAN", 2.0),
            all_reduce("SUM", np.float32(3)),
        ]

    for parts in each(strategy, run(strategy, fn)):
        np.testing.assert_array_equal(parts[0], n * shared)
        np.testing.assert_array_equal(parts[1], shared)
        assert [float(p) for p in parts[2:]] == [2.0 * n, 2.0, 3.0 * n]


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_all_reduce_of_one_shared_integer(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    number, flag = jnp.array([1, 4]), jnp.array([True, False])

    def fn() -> Any:
        return [all_reduce(op, v) for op in ("SUM", "MEAN") for v in (number, flag)]

    for parts in each(strategy, run(strategy, fn)):
        assert [p.dtype for p in parts] == [jnp.int32, jnp.int32, jnp.float32, jnp.float32]
        np.testing.assert_array_equal(parts[0], [n, 4 * n])
        np.testing.assert_array_equal(parts[1], [n, 0])
        np.testing.assert_array_equal(parts[2], [1, 4])
        np.testing.assert_array_equal(parts[3], [1, 0])


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "mirrored_4", "tpu_2")
def test_s58_shared_value_of_one_device_is_reduced_onto_each_replica(
    strategy: Any, run: Any
) -> None:
    """The result can be combined with what the replica computes."""
    shared = jax.device_put(jnp.float32(2), jax.local_devices()[0])
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.float32(i))
    x = strategy.run(lambda v: v * 1, args=(x,))
    result = run(strategy, lambda v: all_reduce("SUM", shared) + v, (x,))
    assert [float(p) for p in each(strategy, result)] == [2.0 * n + i for i in range(n)]


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "mirrored_1", "mirrored_4", "virtual_2", "central_2")
def test_t40_all_reduce_of_a_variable(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(2.0)
    result = run(strategy, lambda: (all_reduce("SUM", v), all_reduce("MEAN", {"v": v})["v"]))
    for total, mean in each(strategy, result):
        assert float(total) == 2.0 * n
        assert float(mean) == 2.0


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_t40_all_reduce_of_a_sync_on_read_variable(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def fn(x: Any) -> Any:
        v.assign(x)
        return all_reduce("MEAN", v)

    result = run(strategy, fn, (values(strategy, lambda i: jnp.float32(i + 1)),))
    assert [float(p) for p in each(strategy, result)] == [1.5, 1.5]


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce_of_indexed_slices(strategy: Any, run: Any, op: str) -> None:
    n = strategy.num_replicas_in_sync

    def fn(i: Any) -> Any:
        rows = jnp.ones((2, 2)) * (i + 1)
        slices = rx.IndexedSlices(rows, jnp.stack([0, i]), dense_shape=(5, 2))
        return all_reduce(op, {"dense": rows, "rows": slices})

    dense = np.zeros((5, 2))
    for i in range(n):
        dense[0] += i + 1
        dense[i] += i + 1
    result = run(strategy, fn, (values(strategy, lambda i: jnp.int32(i)),))
    for part in each(strategy, result):
        assert isinstance(part["rows"], rx.IndexedSlices)
        got = part["rows"].to_dense()
        np.testing.assert_allclose(got, dense / (n if op == "MEAN" else 1), rtol=1e-6)
        divisor = n if op == "MEAN" else 1
        np.testing.assert_allclose(part["dense"], np.full((2, 2), n * (n + 1) / 2 / divisor))


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_x7_spellings_of_the_op(strategy: Any, run: Any) -> None:
    ops = ["sum", "Sum", rx.ReduceOp.SUM, rx.VariableAggregation.SUM, "mean", rx.ReduceOp.MEAN]
    x = values(strategy, lambda i: jnp.float32(i + 1))
    result = run(strategy, lambda v: [all_reduce(op, v) for op in ops], (x,))
    for parts in each(strategy, result):
        assert [float(p) for p in parts] == [3.0] * 4 + [1.5] * 2


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
def test_all_reduce_refuses(strategy: Any, run: Any) -> None:
    for op in ("MAX", None, 3, rx.VariableAggregation.ONLY_FIRST_REPLICA):
        with refused(ValueError):
            run(strategy, lambda op=op: all_reduce(op, jnp.ones(2)))
    for value in ("text", None, object(), {"a": b"x"}):
        with refused(TypeError, "all_reduce"):
            run(strategy, lambda value=value: all_reduce("SUM", value))
    assert float(each(strategy, run(strategy, lambda: all_reduce("MEAN", 1.0)))[0]) == 1.0


@pytest.mark.one_process("values of different shape on two workers are an error of their group")
@pytest.mark.strategies(*TWO_REPLICAS)
def test_all_reduce_of_different_shapes_is_refused(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.ones(i + 1))
    with refused(ValueError, r"\(1,\), \(2,\)"):
        run(strategy, lambda v: all_reduce("SUM", v), (x,))


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_all_reduce_of_different_structures_is_refused(strategy: Any) -> None:
    def fn(i: Any) -> Any:
        return all_reduce("SUM", [jnp.float32(1)] * (int(i) + 1))

    with pytest.raises((ValueError, RuntimeError)) as info:
        strategy.run(fn, args=(values(strategy, lambda i: jnp.int32(i)),))
    assert isinstance(info.value, rx.errors.DistributeError)


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2", "mirrored_4")
def test_all_reduce_on_some_replicas_only_is_refused(strategy: Any) -> None:
    def fn(i: Any) -> Any:
        return all_reduce("SUM", 1.0) if int(i) == 0 else 1.0

    with refused(RuntimeError, "equally often"):
        strategy.run(fn, args=(values(strategy, lambda i: jnp.int32(i)),))


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_replica_api_needs_its_own_replica_context(strategy: Any, run: Any) -> None:
    kept: list[Any] = []
    run(strategy, lambda: kept.append(rx.get_replica_context()))
    with strategy.scope():
        for call in (lambda c: c.all_reduce("SUM", 1.0), lambda c: c.all_gather(jnp.ones(1), 0)):
            with refused(RuntimeError, "replica context"):
                call(kept[0])

    def inside() -> Any:
        return kept[0].all_reduce("SUM", 1.0)

    with refused(RuntimeError, "(?i)mismatching"):
        run(strategy, inside)

    def captures() -> Any:
        context = rx.get_replica_context()
        return context.merge_call(lambda s: context.all_reduce("SUM", 1.0))

    with refused(RuntimeError, "call_for_each_replica"):
        run(strategy, captures)


def test_s9_default_context_outside_of_run() -> None:
    context = rx.get_replica_context()
    assert context is not None
    assert float(context.all_reduce("SUM", jnp.float32(2))) == 2.0
    np.testing.assert_array_equal(context.all_gather(jnp.ones(2), axis=0), [1, 1])
    nest = context.all_reduce("MEAN", {"a": [jnp.float32(1)]})
    assert float(nest["a"][0]) == 1.0


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_options_are_accepted(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: [jnp.arange(float(k)) + i for k in range(1, 6)])

    def fn(v: Any) -> Any:
        return [
            all_reduce("SUM", v, rx.experimental.CommunicationOptions(bytes_per_pack=size))
            for size in (1, 12)
        ]

    for parts in each(strategy, run(strategy, fn, (x,))):
        for reduced in parts:
            for k, part in enumerate(reduced, 1):
                np.testing.assert_array_equal(part, 2 * np.arange(k) + 1)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_several_collectives_in_a_row(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync

    def fn(x: Any) -> Any:
        for _ in range(3):
            x = x + all_reduce("MEAN", x)
        return all_gather(x[None], 0)

    state = np.arange(n, dtype=np.float32)
    for _ in range(3):
        state = state + state.mean()
    for part in each(strategy, run(strategy, fn, (values(strategy, jnp.float32),))):
        np.testing.assert_allclose(part, state, rtol=1e-6)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_all_reduce_inside_scan_and_jit_of_compiled_code(strategy: Any) -> None:
    def fn(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return carry + all_reduce("MEAN", carry), carry

        return jax.lax.scan(body, x, None, length=3)[0], jax.jit(lambda v: all_reduce("SUM", v))(x)

    result = strategy.run(rx.function(fn), args=(values(strategy, lambda i: jnp.float32(i)),))
    mean, state = 0.5, np.array([0.0, 1.0])
    for _ in range(3):
        state, mean = state + mean, mean * 2
    for i, (scanned, jitted) in enumerate(each(strategy, result)):
        assert float(scanned) == state[i]
        assert float(jitted) == 1.0


# all_gather.


@pytest.mark.strategies("one_device", "mirrored_4", "virtual_2")
def test_t41_all_gather_of_a_nest(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: {"a": jnp.full((1, 2), i), "b": [jnp.ones(3, bool)]})
    result = run(strategy, lambda v: (all_gather(v, 0), all_gather(v["a"], -1)), (x,))
    for nest, wide in each(strategy, result):
        np.testing.assert_array_equal(nest["a"], [[i, i] for i in range(n)])
        assert nest["b"][0].dtype == jnp.bool_ and nest["b"][0].shape == (3 * n,)
        np.testing.assert_array_equal(wide, [np.repeat(np.arange(n), 2)])


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t41_all_gather_of_different_sizes(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.full((i + 1, 1), i, jnp.float32))
    result = run(strategy, lambda v: all_gather(v, 0), (x,))
    for part in each(strategy, result):
        np.testing.assert_array_equal(part, [[0], [1], [1]])
    with refused(ValueError, r"\(1, 1\).*\(2, 1\)"):
        run(strategy, lambda v: all_gather(v, 1), (x,))


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
def test_t41_results_are_on_the_replicas(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((2,)) * i)
    result = run(strategy, lambda v: all_gather(v, 0), (x,))
    own = strategy.experimental_local_results(result)
    for part, device in zip(own, strategy.extended.layout.local_devices, strict=True):
        assert part.devices() == {device}


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_all_gather_of_a_shared_value_and_a_variable(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    shared = jnp.array([1, 2])
    with strategy.scope():
        v = rx.Variable([3.0])
    result = run(strategy, lambda: (all_gather(shared, 0), all_gather(v, 0)))
    for part, variable in each(strategy, result):
        np.testing.assert_array_equal(part, [1, 2] * n)
        np.testing.assert_array_equal(variable, [3] * n)


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
def test_all_gather_refuses(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.ones((1, 2)))
    for axis in (2, -3):
        with refused(ValueError, "axis"):
            run(strategy, lambda v, a=axis: all_gather(v, a), (x,))
    for axis in (None, "0", (0,), 0.0, True):
        with refused(TypeError, "axis"):
            run(strategy, lambda v, a=axis: all_gather(v, a), (x,))
    with refused(ValueError, "scalar"):
        run(strategy, lambda v: all_gather(v.sum(), 0), (x,))
    with refused(TypeError, "all_gather"):
        run(strategy, lambda: all_gather("text", 0))
    with refused(NotImplementedError, "IndexedSlices"):
        run(strategy, lambda v: all_gather(rx.IndexedSlices(v, jnp.array([0])), 0), (x,))


# Gradients. Replica i has the factor i + 1.


@pytest.mark.strategies("one_device", "mirrored_4", "virtual_2")
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_gradient_of_an_all_reduce_is_an_all_reduce(strategy: Any, run: Any, op: str) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w = rx.Variable([1.0, 2.0])

    def fn(factor: Any) -> Any:
        def loss() -> Any:
            total = all_reduce(op, w * factor)
            return (total * total).sum() * factor

        return rx.value_and_grad(loss, w)()

    factors = np.arange(1.0, n + 1)
    scale = factors.sum() / (n if op == "MEAN" else 1)
    total = np.array([1.0, 2.0]) * scale
    for factor, (value, gradient) in zip(
        factors, each(strategy, run(strategy, fn, (values(strategy, _factor),))), strict=True
    ):
        np.testing.assert_allclose(value, (total**2).sum() * factor, rtol=1e-5)
        # All-reduce of the cotangents 2 * total * factor_j, times this replica's factor.
        np.testing.assert_allclose(gradient, 2 * total * scale * factor, rtol=1e-5)


def _factor(i: int) -> Any:
    return jnp.float32(i + 1)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_gradient_with_jax_grad(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync

    def fn(factor: Any) -> Any:
        return jax.value_and_grad(lambda x: factor * all_reduce("SUM", x) ** 2)(factor)

    total = n * (n + 1) / 2
    for i, (value, gradient) in enumerate(
        each(strategy, run(strategy, fn, (values(strategy, _factor),)))
    ):
        np.testing.assert_allclose(value, (i + 1) * total**2)
        np.testing.assert_allclose(gradient, 2 * total * total)


@pytest.mark.strategies("mirrored_4", "virtual_2")
def test_t41_gradient_of_an_all_gather_is_that_of_the_own_part(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w = rx.Variable([[2.0]])

    def fn(factor: Any) -> Any:
        return rx.grad(lambda: (all_gather(w.value(), 0) * factor).sum(), w)()

    for gradient in each(strategy, run(strategy, fn, (values(strategy, _factor),))):
        np.testing.assert_allclose(gradient, [[n * (n + 1) / 2]])


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t41_gradient_of_an_all_gather_with_a_weight_per_part(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    weights = jnp.arange(1.0, 2 * n + 1)

    def fn(x: Any) -> Any:
        return jax.grad(lambda v: (all_gather(v, 1) * weights).sum())(x)

    x = values(strategy, lambda i: jnp.ones((1, 2)) * i)
    for i, gradient in enumerate(each(strategy, run(strategy, fn, (x,)))):
        np.testing.assert_allclose(gradient, [n * np.array([2 * i + 1, 2 * i + 2])])


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_t41_gradient_of_an_all_gather_of_different_sizes(strategy: Any, run: Any) -> None:
    weights = jnp.array([1.0, 2.0, 4.0])

    def fn(x: Any) -> Any:
        return jax.grad(lambda v: (all_gather(v, 0) * weights).sum())(x)

    x = values(strategy, lambda i: jnp.ones((i + 1,)))
    first, second = each(strategy, run(strategy, fn, (x,)))
    np.testing.assert_allclose(first, [2.0])
    np.testing.assert_allclose(second, [4.0, 8.0])


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_gradient_through_a_loss_and_a_count(strategy: Any, run: Any) -> None:
    """The usual recipe of a global mean: sum of losses over sum of integer counts."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        w = rx.Variable(2.0)

    def fn(x: Any) -> Any:
        def loss() -> Any:
            own = (w * x).sum()
            total, count = all_reduce("SUM", (own, jnp.asarray(x.shape[0])))
            return total / count

        return rx.value_and_grad(loss, w)()

    x = values(strategy, lambda i: jnp.arange(3.0) + i)
    whole = np.concatenate([np.arange(3.0) + i for i in range(n)])
    result = each(strategy, run(strategy, fn, (x,)))
    for i, (value, gradient) in enumerate(result):
        np.testing.assert_allclose(value, 2 * whole.mean(), rtol=1e-6)
        np.testing.assert_allclose(gradient, (np.arange(3.0) + i).sum() * n / (3 * n), rtol=1e-6)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_gradient_through_a_nest_with_constants(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(3.0)

    def fn(factor: Any) -> Any:
        def loss() -> Any:
            nest = {"w": w * factor, "constant": factor, "shared": jnp.float32(1)}
            out = all_reduce("SUM", nest)
            return out["w"] * out["constant"] * out["shared"]

        return rx.grad(loss, w)()

    first, second = each(strategy, run(strategy, fn, (values(strategy, _factor),)))
    # Sum over replicas of the cotangents 3 * 2, times the own factor.
    assert float(first) == 12.0
    assert float(second) == 24.0


@pytest.mark.strategies("virtual_2")
def test_gradient_through_two_collectives_and_unused_results(strategy: Any, run: Any) -> None:
    """Synchronized batch normalization: mean and variance of the global batch."""
    with strategy.scope():
        w = rx.Variable([1.0, -2.0])

    def fn(x: Any) -> Any:
        def loss() -> Any:
            y = x * w
            mean = all_reduce("MEAN", y.mean(0))
            variance = all_reduce("MEAN", ((y - mean) ** 2).mean(0))
            all_reduce("SUM", y)
            return ((y - mean) / jnp.sqrt(variance + 1e-3)).sum() + (variance * variance).sum()

        return rx.value_and_grad(loss, w)()

    batch = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    x = values(strategy, lambda i: jnp.asarray(batch[4 * i : 4 * i + 4]))

    def total(w: Any) -> Any:
        y = batch * w
        mean, variance = y.mean(0), y.var(0)
        return ((y - mean) / jnp.sqrt(variance + 1e-3)).sum() + 2 * (variance * variance).sum()

    expected = jax.grad(total)(jnp.array([1.0, -2.0]))
    result = each(strategy, run(strategy, fn, (x,)))
    np.testing.assert_allclose(sum(g for _, g in _numpy(result)), expected, rtol=1e-3, atol=1e-3)


def _numpy(result: Any) -> Any:
    return [(np.asarray(v), np.asarray(g)) for v, g in result]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_all_reduce_of_gradients_trains_like_one_device(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    batch = np.linspace(-1, 1, 8).astype(np.float32)
    with strategy.scope():
        w = rx.Variable(0.5, aggregation=rx.VariableAggregation.MEAN)

    def step(x: Any) -> Any:
        loss, gradient = rx.value_and_grad(lambda: ((w * x - x**2) ** 2).sum() / 8, w)()
        gradient = all_reduce("SUM", gradient)
        w.assign_sub(0.5 * gradient)
        return loss

    x = values(strategy, lambda i: jnp.asarray(np.split(batch, n)[i]))
    expected = 0.5
    for _ in range(3):
        loss = strategy.reduce("SUM", run(strategy, step, (x,)), axis=None)
        error = expected * batch - batch**2
        np.testing.assert_allclose(loss, (error**2).sum() / 8, rtol=1e-5)
        expected -= 0.5 * (2 * error * batch).sum() / 8
        np.testing.assert_allclose(w, expected, rtol=1e-5)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_gradient_through_all_reduce_of_indexed_slices(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable([[1.0], [2.0]])

    def fn(factor: Any) -> Any:
        def loss() -> Any:
            slices = rx.IndexedSlices(w.value() * factor, jnp.array([0, 1]), dense_shape=(2, 1))
            dense = all_reduce("SUM", slices).to_dense()
            return (dense * jnp.array([[1.0], [10.0]])).sum()

        return rx.grad(loss, w)()

    result = each(strategy, run(strategy, fn, (values(strategy, _factor),)))
    for i, gradient in enumerate(result):
        np.testing.assert_allclose(gradient, np.array([[2.0], [20.0]]) * (i + 1))


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_value_and_grad_has_aux_from_collectives(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(2.0)

    def fn(factor: Any) -> Any:
        def loss() -> Any:
            y = w * factor
            return y, {"sum": all_reduce("SUM", y), "all": all_gather(y[None], 0)}

        return rx.value_and_grad(loss, w, has_aux=True)()

    result = each(strategy, run(strategy, fn, (values(strategy, _factor),)))
    for i, ((value, aux), gradient) in enumerate(result):
        assert float(value) == 2.0 * (i + 1) and float(gradient) == i + 1
        assert float(aux["sum"]) == 6.0
        np.testing.assert_array_equal(aux["all"], [2, 4])
