"""Loops and branches that carry variables: rx.scan, fori_loop, while_loop, cond and switch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

SUM = rx.VariableAggregation.SUM
MEAN = rx.VariableAggregation.MEAN
FIRST = rx.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = rx.VariableSynchronization.ON_READ
MOST = ("one_device", "mirrored_2", "virtual_2", "central_2", "default")


def _sums(strategy: Any, value: Any) -> float:
    return float(strategy.reduce("SUM", value, axis=None))


@pytest.mark.every_strategy
@pytest.mark.strategies(*MOST)
def test_a_loop_writes_variables_of_every_kind(strategy: Any, run: Any) -> None:
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=SUM)
        own = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        rows = rx.Variable(jnp.zeros((3, 2)), aggregation=MEAN)
        factor = rx.Variable(2.0, trainable=False)

    def fn(x: Any) -> Any:
        def body(i: Any, seen: Any) -> Any:
            total.assign_add(x * factor)
            own.assign_add(x)
            rows.scatter_add(rx.IndexedSlices(jnp.ones((1, 2)), jnp.reshape(i % 3, (1,))))
            return seen + total.read_value()

        return rx.fori_loop(0, 4, body, 0.0)

    n = strategy.num_replicas_in_sync
    value = run(strategy, fn, (jnp.asarray(1.5),))
    assert _sums(strategy, value) == n * sum(3.0 * n * (i + 1) for i in range(4))
    assert float(total) == 12.0 * n
    assert float(own.read_value()) == 6.0 * n
    np.testing.assert_array_equal(rows.numpy(), [[2, 2], [1, 1], [1, 1]])


@pytest.mark.strategies(*MOST)
def test_scan_carries_variables_and_stacks_results(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1, aggregation=FIRST)

    def fn(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            v.assign(v * 2 + x["a"])
            return {"n": carry["n"] + 1}, (v.read_value(), x["a"], None)

        return rx.scan(body, {"n": 0}, {"a": xs})

    carry, (seen, same, none) = run(strategy, fn, (jnp.arange(3),))
    for c, s, a in zip(
        *map(strategy.experimental_local_results, (carry["n"], seen, same)), strict=True
    ):
        assert int(c) == 3
        np.testing.assert_array_equal(s, [2, 5, 12])
        np.testing.assert_array_equal(a, [0, 1, 2])
    assert int(v) == 12 and none is None
    run(
        strategy,
        lambda xs: rx.scan(lambda c, x: (c, v.assign_add(x)), None, xs, reverse=True)[1],
        (jnp.arange(3),),
    )
    assert int(v) == 15


@pytest.mark.strategies(*MOST)
def test_while_reads_and_writes_variables(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(100.0, aggregation=MEAN)

    def fn(limit: Any) -> Any:
        def body(n: Any) -> Any:
            v.assign(v / 2)
            return n + 1

        return rx.while_loop(lambda n: v > limit, body, 0)

    value = run(strategy, fn, (jnp.asarray(10.0),))
    assert {int(c) for c in strategy.experimental_local_results(value)} == {4}
    assert float(v) == 6.25
    # No round at all.
    run(strategy, fn, (jnp.asarray(10.0),))
    assert float(v) == 6.25


@pytest.mark.strategies(*MOST)
def test_branches_write_variables(strategy: Any, run: Any) -> None:
    with strategy.scope():
        a = rx.Variable(0.0, aggregation=SUM)
        b = rx.Variable(10.0, aggregation=MEAN)

    def fn(x: Any) -> Any:
        def up(y: Any) -> Any:
            a.assign_add(y)
            return y

        def down(y: Any) -> Any:
            b.assign_sub(1.0)
            return 0.0

        first = rx.cond(x > 0, up, down, x)
        second = rx.switch(jnp.asarray(7), [lambda: b.read_value(), lambda: b.assign_add(5.0)])
        return first, second

    n = strategy.num_replicas_in_sync
    first, second = run(strategy, fn, (jnp.asarray(2.0),))
    assert _sums(strategy, first) == 2.0 * n and _sums(strategy, second) == 15.0 * n
    assert (float(a), float(b)) == (2.0 * n, 15.0)
    run(strategy, fn, (jnp.asarray(-1.0),))
    assert (float(a), float(b)) == (2.0 * n, 19.0)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_replicas_may_take_different_branches_and_numbers_of_rounds(
    strategy: Any, run: Any
) -> None:
    with strategy.scope():
        own = rx.Variable(0, synchronization=ON_READ, aggregation=SUM)

    def fn() -> Any:
        number = rx.get_replica_context().replica_id_in_sync_group
        rx.cond(number == 1, lambda: own.assign_add(10), lambda: own.assign_add(1))
        return rx.while_loop(lambda n: n < number + 1, lambda n: (own.assign_add(100), n + 1)[1], 0)

    value = run(strategy, fn)
    assert [int(c) for c in strategy.experimental_local_results(value)] == [1, 2]
    assert [int(c) for c in strategy.experimental_local_results(own)] == [101, 210]


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_replicas_meet_inside_loops(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=SUM)

    def fn() -> Any:
        context = rx.get_replica_context()
        number = jnp.asarray(context.replica_id_in_sync_group, jnp.float32)

        def body(i: Any, carry: Any) -> Any:
            summed = context.all_reduce("SUM", number + 1.0)
            context.merge_call(lambda s, x: v.assign_add(s.reduce("MEAN", x, axis=None)), (number,))
            rx.cond(summed > 0.0, lambda: v.assign_add(1.0), lambda: v)
            return carry + summed

        return rx.fori_loop(0, 2, body, number * 0.0)

    value = run(strategy, fn)
    assert [float(c) for c in strategy.experimental_local_results(value)] == [6.0, 6.0]
    assert float(v) == 1.0 + 2 * (0.5 + 2.0)


@pytest.mark.one_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2", "central_2")
def test_a_loop_of_training_steps(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(jnp.ones(2))
        optimizer = rx.optimizers.Optimizer(optax.adam(0.1), [w])
        mean = rx.metrics.Mean()

    def fn(x: Any) -> Any:
        def body(_: Any, batch: Any) -> Any:
            loss, grads = rx.value_and_grad(lambda: jnp.sum((w * batch) ** 2), w)()
            optimizer.apply_gradients([(grads, w)])
            mean.update_state(loss)
            return None, loss

        return rx.scan(body, None, x)[1]

    x = jnp.asarray([[1.0, 2.0], [0.5, 1.0], [2.0, 0.0]])
    run(strategy, fn, (x,))
    expected, state, losses = jnp.ones(2), None, []
    rule = optax.adam(0.1)
    state = rule.init(expected)
    count = strategy.num_replicas_in_sync
    for row in x:
        loss, grad = jax.value_and_grad(lambda w, row=row: jnp.sum((w * row) ** 2))(expected)
        losses.append(loss)
        updates, state = rule.update(count * grad, state)
        expected = optax.apply_updates(expected, updates)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5)
    assert int(optimizer.iterations) == 3
    np.testing.assert_allclose(float(mean.result()), np.mean(losses), rtol=1e-5)


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_gradients_through_loops_that_read_and_write(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable(2.0)
        calls = rx.Variable(0, aggregation=FIRST)

    def fn(x: Any) -> Any:
        def loss() -> Any:
            def body(carry: Any, _: Any) -> Any:
                calls.assign_add(1)
                return rx.cond(carry > 0, lambda c: c * w, lambda c: c, carry), None

            return rx.scan(body, x, None, length=3)[0]

        return rx.value_and_grad(loss, w)()

    value, grad = run(strategy, fn, (jnp.asarray(1.5),))
    n = strategy.num_replicas_in_sync
    assert _sums(strategy, value) == n * 12.0 and _sums(strategy, grad) == n * 1.5 * 3 * 4
    assert int(calls) == 3


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.strategies(*MOST)
def test_run_inside_a_loop_of_cross_replica_code(strategy: Any, is_compiled: bool) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=SUM)
        own = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def fn(x: Any) -> Any:
        v.assign_add(x)
        own.assign_add(1.0)
        return v.read_value() * jnp.ones(2)

    def train(xs: Any) -> Any:
        def body(total: Any, x: Any) -> Any:
            results = strategy.run(fn, args=(x,))
            return total + strategy.reduce("SUM", results, axis=None), results

        return rx.scan(body, jnp.zeros(2), xs)

    n = strategy.num_replicas_in_sync
    train = rx.function(train) if is_compiled else train
    total, results = train(jnp.asarray([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(total, [n * n * (1 + 3 + 6.0)] * 2)
    for stack in strategy.experimental_local_results(results):
        np.testing.assert_array_equal(stack, [[n * 1.0] * 2, [n * 3.0] * 2, [n * 6.0] * 2])
    assert float(v) == 6.0 * n and float(own.read_value()) == 3.0 * n


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_distributed_values_in_the_carry(strategy: Any) -> None:
    start = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.full(3, 1.0 * c.replica_id_in_sync_group)
    )

    @rx.function
    def double(value: Any) -> Any:
        def body(i: Any, value: Any) -> Any:
            return strategy.run(lambda x: x * 2 + 1, args=(value,))

        return rx.fori_loop(0, 3, body, value)

    first, second = strategy.experimental_local_results(double(start))
    np.testing.assert_array_equal(first, [7.0] * 3)
    np.testing.assert_array_equal(second, [15.0] * 3)


def test_loops_inside_loops_see_each_others_writes() -> None:
    v = rx.Variable(0)
    log = rx.Variable(jnp.zeros(6, jnp.int32))

    @rx.function
    def fn(n: Any) -> Any:
        def outer(i: Any, _: Any) -> Any:
            def inner(j: Any, _: Any) -> Any:
                v.assign_add(1)
                log.scatter_update(
                    rx.IndexedSlices(jnp.reshape(v + 10 * i, (1,)), jnp.reshape(i * 3 + j, (1,)))
                )
                return None

            rx.fori_loop(0, 3, inner, None)
            rx.cond(v % 2 == 0, lambda: v.assign_add(100), lambda: v)
            return None

        # A bound that the compiler does not know.
        rx.fori_loop(0, n, outer, None)
        return v.read_value()

    assert int(fn(jnp.asarray(2))) == 106 and int(v) == 106
    np.testing.assert_array_equal(log.numpy(), [1, 2, 3, 14, 15, 16])
    assert fn.experimental_get_tracing_count() == 1
    assert int(fn(jnp.asarray(0))) == 106


def test_the_body_is_traced_once_and_values_are_never_stale() -> None:
    v = rx.Variable(1.0)
    traces = []

    def body(i: Any, carry: Any) -> Any:
        traces.append(i)
        return carry + v

    fn = rx.function(lambda: (rx.fori_loop(0, 3, body, jnp.zeros(())), v.assign_add(1.0))[0])
    assert [float(fn()) for _ in range(3)] == [3.0, 6.0, 9.0]
    assert len(traces) == 1


def test_python_numbers_in_a_carry_take_the_type_of_the_body() -> None:
    def loop(x: Any) -> Any:
        return rx.fori_loop(0, 2, lambda i, c: c + x, 0)

    for fn in (loop, rx.function(loop)):
        result = fn(jnp.asarray(0.5, jnp.float16))
        assert result.dtype == jnp.float16 and float(result) == 1.0


@pytest.mark.parametrize("wrap", [rx.function, lambda fn: fn])
def test_a_body_must_keep_what_it_carries(wrap: Any) -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"float32\[2\] became float32\[3\]"):
        wrap(lambda: rx.fori_loop(0, 2, lambda i, c: jnp.ones(3), jnp.ones(2)))()
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"int32\[\] became float32"):
        wrap(lambda x: rx.while_loop(lambda c: c < 3, lambda c: c + 0.5, x))(
            jnp.zeros((), jnp.int32)
        )
    with pytest.raises(rx.errors.StructureError, match="same structure"):
        wrap(lambda: rx.scan(lambda c, x: ((c, c), None), 1.0, jnp.ones(2)))()
    with pytest.raises(rx.errors.ArgumentTypeError, match="must return a pair"):
        wrap(lambda: rx.scan(lambda c, x: c, 1.0, jnp.ones(2)))()
    with pytest.raises(rx.errors.InvalidArgumentError, match="one number of rounds"):
        wrap(lambda: rx.scan(lambda c, x: (c, x), 1.0, (jnp.ones(2), jnp.ones(3))))()


def test_branches_must_return_the_same() -> None:
    with pytest.raises(rx.errors.InvalidArgumentError, match="one shape and type"):
        rx.function(lambda x: rx.cond(x > 0, lambda: jnp.ones(2), lambda: jnp.ones(3)))(
            1 * jnp.ones(())
        )
    with pytest.raises(rx.errors.StructureError, match="same structure"):
        rx.function(lambda x: rx.cond(x > 0, lambda: 1.0, lambda: None))(jnp.ones(()))
    mixed = rx.function(lambda x: rx.cond(x > 0, lambda: 1, lambda: jnp.asarray(0.5)))
    assert mixed(jnp.ones(())).dtype == jnp.float32 and float(mixed(jnp.ones(()))) == 1.0
    with pytest.raises(rx.errors.InvalidArgumentError, match="scalar"):
        rx.cond(jnp.ones(2) > 0, lambda: 1, lambda: 2)


def test_variables_cannot_be_created_inside_a_body() -> None:
    def create(i: Any, _: Any) -> Any:
        rx.Variable(1.0, name="late")
        return _

    def create_from_tracer(i: Any, _: Any) -> Any:
        rx.Variable(i * 1.0, name="late")
        return _

    for body in (create, create_from_tracer):
        with pytest.raises(rx.errors.TracingError, match="'late', which would be a new one"):
            rx.function(lambda body=body: rx.fori_loop(0, 2, body, None))()


def test_the_condition_of_a_loop_cannot_write() -> None:
    v = rx.Variable(0)
    with pytest.raises(rx.errors.TracingError, match="it writes"):
        rx.function(lambda: rx.while_loop(lambda c: v.assign_add(1) < 3, lambda c: c, 0))()
    assert int(v) == 0


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_error_of_jax_lax_names_the_loops_that_carry_variables(is_compiled: bool) -> None:
    v = rx.Variable(0.0)

    def fn() -> Any:
        return jax.lax.fori_loop(0, 2, lambda i, c: (v.assign_add(1.0), c)[1], 0)

    with pytest.raises(rx.errors.TracingError, match=r"rx\.scan, rx\.fori_loop, rx\.while_loop"):
        (rx.function(fn) if is_compiled else fn)()


def test_without_variables_they_work_under_plain_jax() -> None:
    @jax.jit
    def fn(x: Any) -> Any:
        y = rx.fori_loop(0, 3, lambda i, c: c + i, x)
        z = rx.cond(y > 3, lambda a: a * 2, lambda a: a, y)
        w = rx.while_loop(lambda c: c < 20, lambda c: c + 7, z)
        return rx.scan(lambda c, v: (c + v, c), w, jnp.arange(2))[0] + rx.switch(
            0, [lambda: 1, lambda: 2]
        )

    assert int(fn(1)) == 24


@pytest.mark.strategies("mirrored_2")
def test_uneven_parts_with_a_loop_inside(strategy: Any) -> None:
    with strategy.scope():
        own = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        v = rx.Variable(0.0, aggregation=SUM)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(2 + c.replica_id_in_sync_group)
    )

    def fn(x: Any, meets: bool) -> Any:
        def body(i: Any, c: Any) -> Any:
            own.assign_add(x.sum())
            if meets:
                v.assign_add(x.sum())
            return c + x.sum()

        return rx.fori_loop(0, 2, body, 0.0)

    for meets in (False, True):
        value = strategy.run(rx.function(fn), args=(x, meets))
        assert [float(c) for c in strategy.experimental_local_results(value)] == [4.0, 6.0]
    assert float(own.read_value()) == 20.0 and float(v) == 10.0


def test_remote_variables_are_read_in_loops_and_their_writes_refused(desk: Any) -> None:
    strategy = desk.strategy()
    with strategy.scope():
        v = rx.Variable(2.0, name="v")
        table = rx.Variable(jnp.arange(6.0).reshape(3, 2), name="table")
    coordinator = desk.coordinator(strategy)

    @rx.function
    def power(n: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            known = rx.nn.embedding_lookup(table, [1]).sum()
            computed = rx.nn.embedding_lookup(table, jnp.reshape(i % 3, (1,))).sum()
            return rx.cond(i % 2 == 0, lambda c: c * v, lambda c: c + known + computed, c)

        result = rx.fori_loop(0, n, body, 1.0)
        v.assign_add(1.0)
        return result

    # ((1 * 2) + 5 + 5) * 2
    assert float(coordinator.schedule(power, args=(np.int32(3),)).fetch()) == 24.0

    @rx.function
    def write() -> Any:
        rx.fori_loop(0, 2, lambda i, c: (v.assign_add(1.0), c)[1], None)

    coordinator.schedule(write)
    with pytest.raises(rx.errors.UnsupportedError, match="kept by parameter servers"):
        coordinator.join()
    assert float(v) == 3.0


def test_random_keys_are_carried() -> None:
    def draw(key: Any) -> Any:
        def body(i: Any, carry: Any) -> Any:
            key, total = carry
            key, own = jax.random.split(key)
            return key, total + jax.random.uniform(own)

        return rx.fori_loop(0, 3, body, (key, 0.0))[1]

    key = jax.random.key(0)
    assert float(draw(key)) == float(rx.function(draw)(key))
