"""Which strategy and which context is in force (S1-S18, T1-T8)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import STRATEGIES, TWO_REPLICAS
from vocabulary import copies, num_copies
from worker_groups import local_ids, replica_results

import replicax as rx

pytestmark = pytest.mark.every_strategy


def test_s1_s2_no_scope_is_a_replica_context() -> None:
    assert not rx.in_cross_replica_context()
    assert isinstance(rx.get_replica_context(), rx.ReplicaContext)
    assert not rx.has_strategy()


@pytest.mark.strategies(*(name for name in STRATEGIES if name != "default"))
def test_s3_s5_s6_s7_scope_is_a_cross_replica_context(strategy: Any) -> None:
    with strategy.scope() as entered:
        assert entered is strategy
        assert rx.get_strategy() is strategy
        assert rx.has_strategy()
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None
    assert rx.get_strategy() is not strategy


def test_s4_run_is_a_replica_context(strategy: Any, run: Any) -> None:
    seen = []

    def fn() -> None:
        seen.append((rx.get_replica_context(), rx.in_cross_replica_context(), rx.get_strategy()))

    run(strategy, fn)
    assert seen
    for context, is_cross, current in seen:
        assert isinstance(context, rx.ReplicaContext)
        assert not is_cross
        assert current is strategy


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s12_scope_is_per_thread(strategy: Any) -> None:
    seen: list[Any] = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(rx.has_strategy()))
        thread.start()
        thread.join(60)
    assert seen == [False]


def test_t1_another_strategy_in_scope_is_refused() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    with one.scope():
        with pytest.raises(RuntimeError, match="Mixing different"), other.scope():
            pass
        assert rx.get_strategy() is one


# The default strategy.


def test_s9_default_strategy_runs_code_that_is_aware_of_distribution(run: Any) -> None:
    strategy = rx.get_strategy()
    v = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)

    def aware(x: Any) -> Any:
        context = rx.get_replica_context()
        assert context is not None
        total = context.all_reduce("sum", x)
        gathered = context.all_gather(x[None], axis=0)
        merged = context.merge_call(lambda s, y: s.reduce("mean", y, axis=None) + 1, args=(x,))
        v.assign_add(total)
        return total, gathered, merged

    total, gathered, merged = run(strategy, aware, args=(jnp.asarray(2.0),))
    assert (float(total), gathered.tolist(), float(merged)) == (2.0, [2.0], 3.0)
    assert float(v) == 3.0


def test_s9_default_strategy_has_one_replica_and_hands_values_back() -> None:
    strategy = rx.get_strategy()
    value = jnp.asarray([1.0, 2.0])
    assert strategy.num_replicas_in_sync == 1
    assert strategy.reduce("sum", value, axis=None).tolist() == [1.0, 2.0]
    assert strategy.gather(value, axis=0).tolist() == [1.0, 2.0]
    assert float(strategy.reduce("mean", value, axis=0)) == 1.5
    assert strategy.experimental_local_results(value) == (value,)
    made = strategy.experimental_distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    assert made == (0, 1)


def test_s9_default_context_knows_its_strategy() -> None:
    context = rx.get_replica_context()
    assert context is not None
    assert context.strategy is rx.get_strategy()
    assert context.num_replicas_in_sync == 1
    assert context.replica_id_in_sync_group == 0


def test_t6_default_context_merge_call() -> None:
    seen: list[Any] = []

    def merge_fn(strategy: Any, x: str) -> str:
        seen.append(strategy)
        seen.append((rx.in_cross_replica_context(), rx.get_replica_context(), rx.has_strategy()))
        return "foo_" + x

    context = rx.get_replica_context()
    assert context is not None
    assert context.merge_call(merge_fn, args=("bar",)) == "foo_bar"
    assert context.merge_call(merge_fn, kwargs={"x": "baz"}) == "foo_baz"
    assert seen == [rx.get_strategy(), (True, None, False)] * 2
    assert rx.get_replica_context() is context


def test_t4_default_scope_changes_nothing() -> None:
    default, context = rx.get_strategy(), rx.get_replica_context()
    with default.scope() as entered:
        assert entered is default
        assert rx.get_strategy() is default
        assert not rx.has_strategy()
        assert not rx.in_cross_replica_context()
        assert rx.get_replica_context() is context
        assert float(rx.Variable(1.0)) == 1.0


def test_t4_variable_of_another_strategy_inside_the_default_scope_is_refused() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with rx.get_strategy().scope():
        with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
            rx.Variable(1.0)
        assert float(rx.Variable(2.0)) == 2.0


@pytest.mark.strategies("one_device", *TWO_REPLICAS)
def test_default_scope_inside_another_scope_is_refused(strategy: Any) -> None:
    default = rx.get_strategy()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"), default.scope():
            pass
        with pytest.raises(RuntimeError, match="Mixing different"):
            default.run(lambda: None)
        assert rx.get_strategy() is strategy


# experimental_set_strategy.


@pytest.fixture
def reset_strategy() -> Iterator[None]:
    yield
    rx.experimental_set_strategy(None)


@pytest.mark.usefixtures("reset_strategy")
def test_s8_set_strategy_makes_it_current(strategy: Any) -> None:
    default = rx.get_strategy()
    rx.experimental_set_strategy(strategy)
    assert rx.get_strategy() is strategy
    assert rx.has_strategy() == (strategy is not default)
    if strategy is not default:
        assert rx.in_cross_replica_context()
        assert rx.get_replica_context() is None
    rx.experimental_set_strategy(None)
    assert rx.get_strategy() is default
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()


@pytest.mark.usefixtures("reset_strategy")
@pytest.mark.strategies("mirrored_2", "central_2")
def test_s8_set_strategy_distributes_variables_and_runs(strategy: Any, run: Any) -> None:
    rx.experimental_set_strategy(strategy)
    v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    assert strategy.extended.variable_created_in_scope(v)
    run(strategy, lambda x: v.assign_add(x), args=(jnp.asarray(2.0),))
    assert float(v) == 5.0
    with strategy.scope():
        assert rx.get_strategy() is strategy
        assert strategy.extended.variable_created_in_scope(rx.Variable(1.0))
    assert rx.get_strategy() is strategy
    rx.experimental_set_strategy(None)
    assert not strategy.extended.variable_created_in_scope(rx.Variable(1.0))


@pytest.mark.usefixtures("reset_strategy")
def test_s8_set_strategy_holds_in_other_threads() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    rx.experimental_set_strategy(strategy)
    assert _in_thread(rx.get_strategy) is strategy


@pytest.mark.usefixtures("reset_strategy")
def test_t3_a_second_set_strategy_replaces_the_first() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    rx.experimental_set_strategy(one)
    rx.experimental_set_strategy(other)
    assert rx.get_strategy() is other
    v = rx.Variable(1.0)
    assert other.extended.variable_created_in_scope(v)
    assert not one.extended.variable_created_in_scope(v)
    with pytest.raises(RuntimeError, match="Mixing different"), one.scope():
        pass
    with pytest.raises(RuntimeError, match="Mixing different"):
        one.run(lambda: None)


@pytest.mark.usefixtures("reset_strategy")
def test_t3_set_strategy_is_refused_in_a_scope(strategy: Any) -> None:
    with strategy.scope():
        for argument in (None, strategy, rx.OneDeviceStrategy("CPU:0")):
            with pytest.raises(RuntimeError, match="outside of every scope"):
                rx.experimental_set_strategy(argument)
    assert not rx.has_strategy()


@pytest.mark.usefixtures("reset_strategy")
@pytest.mark.strategies("default", "one_device", "mirrored_2")
def test_t3_set_strategy_is_refused_in_replica_code(strategy: Any, run: Any) -> None:
    def fn() -> None:
        rx.experimental_set_strategy(None)

    with pytest.raises(RuntimeError, match="outside of every scope"):
        run(strategy, fn)


@pytest.mark.usefixtures("reset_strategy")
def test_t3_set_strategy_after_a_scope_was_left() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        pass
    rx.experimental_set_strategy(strategy)
    assert rx.get_strategy() is strategy


@pytest.mark.parametrize("wrong", ["mirrored", 3, rx.MirroredStrategy, object()])
def test_set_strategy_of_something_else_is_a_type_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="strategy or None"):
        rx.experimental_set_strategy(wrong)
    assert not rx.has_strategy()


# Cross-replica and update contexts.


def test_s10_merge_call_is_a_cross_replica_context(strategy: Any, run: Any) -> None:
    seen: list[Any] = []

    def merge_fn(_: Any) -> None:
        seen.append((rx.in_cross_replica_context(), rx.get_replica_context(), rx.get_strategy()))

    def fn() -> None:
        context = rx.get_replica_context()
        assert context is not None
        context.merge_call(merge_fn)
        assert rx.get_replica_context() is context
        assert not rx.in_cross_replica_context()

    run(strategy, fn)
    assert seen == [(True, None, strategy)]


def test_s11_update_is_a_context_of_its_own(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
    seen: list[Any] = []

    def update_fn(copy: Any, x: float) -> None:
        seen.append((rx.in_cross_replica_context(), rx.get_replica_context(), rx.get_strategy()))
        copy.assign_add(x)

    with strategy.scope():
        strategy.extended.update(v, update_fn, args=(2.0,))
    assert seen
    assert all(entry == (True, None, strategy) for entry in seen)
    assert copies(strategy, v) == [3.0] * num_copies(strategy, v)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_s11_writes_in_update_are_raw_and_in_merge_call_are_not(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def raw(s: Any) -> None:
        s.extended.update(v, lambda copy: copy.assign(6.0))

    run(strategy, lambda: rx.get_replica_context().merge_call(raw))  # type: ignore[union-attr]
    assert copies(strategy, v) == [6.0, 6.0]

    def shared(_: Any) -> None:
        v.assign(6.0)

    run(strategy, lambda: rx.get_replica_context().merge_call(shared))  # type: ignore[union-attr]
    assert copies(strategy, v) == [3.0, 3.0]


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "minimal_2")
def test_s13_run_and_reduce_enter_the_scope_themselves(strategy: Any, run: Any) -> None:
    count = strategy.num_replicas_in_sync
    result = run(strategy, lambda x: x + 1, args=(jnp.asarray(1.0),))
    assert float(strategy.reduce("SUM", result, axis=None)) == 2.0 * count
    assert not rx.has_strategy()
    with strategy.scope():
        inside = run(strategy, lambda x: x + 1, args=(jnp.asarray(1.0),))
        assert float(strategy.reduce("SUM", inside, axis=None)) == 2.0 * count
    assert not rx.has_strategy()


def test_s14_a_plain_call_in_scope_runs_once(strategy: Any) -> None:
    calls: list[Any] = []
    with strategy.scope():

        def fn(x: Any) -> Any:
            calls.append(x)
            return x * 2

        assert fn(3) == 6
        compiled = rx.function(lambda x: fn(x))
        result = compiled(jnp.asarray(3.0))
    assert len(calls) == 2
    assert isinstance(result, jax.Array)
    assert float(result) == 6.0


@pytest.mark.strategies(
    "default", "one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2"
)
def test_s16_eager_and_compiled_code_mean_the_same(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)

    def fn(x: Any) -> Any:
        context = rx.get_replica_context()
        assert context is not None
        own = x + context.replica_id_in_sync_group.astype(jnp.float32)
        v.assign_add(own)
        total = context.all_reduce("sum", own)
        merged = context.merge_call(lambda s, y: s.reduce("mean", y, axis=None), args=(own,))
        return {"own": own, "read": v.read_value(), "rest": (total, merged)}

    @rx.function
    def outer(x: Any) -> Any:
        return strategy.run(fn, args=(x,))

    x = jnp.asarray(2.0)
    found = []
    for call in (
        lambda: strategy.run(fn, args=(x,)),
        lambda: strategy.run(rx.function(fn), args=(x,)),
        lambda: outer(x),
    ):
        with strategy.scope():
            v.assign(1.0)
        results = replica_results(strategy, call())
        found.append(jax.tree.map(float, [*results, v.read_value()]))
    assert found[0] == found[1] == found[2]
    n = strategy.num_replicas_in_sync
    total = 2.0 * n + n * (n - 1) / 2
    assert found[0][-1] == 1.0 + total
    assert [r["own"] for r in found[0][:-1]] == [2.0 + i for i in range(n)]
    assert [r["rest"] for r in found[0][:-1]] == [(total, total / n)] * n


CROSS_REPLICA_ONLY: dict[str, Callable[[Any, Any], Any]] = {
    "scope": lambda s, x: s.scope().__enter__(),
    "run": lambda s, x: s.run(lambda: None),
    "reduce": lambda s, x: s.reduce("sum", x, axis=None),
    "gather": lambda s, x: s.gather(x, axis=0),
    "reduce_to": lambda s, x: s.extended.reduce_to("sum", x, x),
    "batch_reduce_to": lambda s, x: s.extended.batch_reduce_to("sum", [(x, x)]),
    "broadcast_to": lambda s, x: s.extended.broadcast_to(x, None),
    "call_for_each_replica": lambda s, x: s.extended.call_for_each_replica(lambda: None),
    "values_from_function": lambda s, x: s.experimental_distribute_values_from_function(
        lambda _: x
    ),
}


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2", "central_2")
def test_s17_calls_across_replicas_are_refused_in_replica_code(strategy: Any, run: Any) -> None:
    x = jnp.ones(2)
    for api, call in CROSS_REPLICA_ONLY.items():

        def fn(x: Any, call: Any = call) -> None:
            call(strategy, x)

        with pytest.raises(RuntimeError) as caught:
            run(strategy, fn, args=(x,))
        message = str(caught.value)
        assert "cross-replica context, but this is the replica context" in message, api
        assert not rx.has_strategy()


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_s17_calls_across_replicas_work_in_merge_call(strategy: Any, run: Any) -> None:
    def merge_fn(s: Any, x: Any) -> Any:
        reduced = s.reduce("sum", x, axis=None)
        gathered = s.gather(x, axis=0)
        batch = s.extended.batch_reduce_to("mean", [(x, x), (x, x)])
        return reduced, gathered, s.extended.reduce_to("sum", x, x), batch

    def fn(x: Any) -> Any:
        return rx.get_replica_context().merge_call(merge_fn, args=(x + 1,))  # type: ignore[union-attr]

    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray([float(c.replica_id_in_sync_group)])
    )
    for part in replica_results(strategy, run(strategy, fn, args=(x,))):
        reduced, gathered, to, batch = jax.tree.map(lambda a: a.tolist(), part)
        assert (reduced, gathered, to, batch) == ([3.0], [1.0, 2.0], [3.0], [[1.5], [1.5]])


# Scopes.


def test_t2_scopes_of_one_strategy_nest(strategy: Any) -> None:
    default = rx.get_strategy()
    reused = strategy.scope()
    with reused, strategy.scope(), reused, strategy.scope():
        assert rx.get_strategy() is strategy
        if strategy is not default:
            assert rx.in_cross_replica_context()
        v = rx.Variable(1.0)
        assert strategy is default or strategy.extended.variable_created_in_scope(v)
    with reused:
        assert rx.get_strategy() is strategy
    assert rx.get_strategy() is default
    assert not rx.in_cross_replica_context()
    assert isinstance(rx.get_replica_context(), rx.ReplicaContext)
    assert rx.Variable(1.0).owner is None


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t2_each_exit_restores_the_outer_state(strategy: Any) -> None:
    with strategy.scope():
        with pytest.raises(KeyError), strategy.scope():
            raise KeyError
        assert rx.get_strategy() is strategy
        strategy.run(lambda: None)
        assert rx.get_strategy() is strategy
        assert rx.get_replica_context() is None
    assert not rx.has_strategy()


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
def test_t2_scope_in_merge_call(strategy: Any, run: Any) -> None:
    seen: list[Any] = []

    def merge_fn(s: Any) -> None:
        with s.scope():
            seen.append(rx.get_strategy())

    run(strategy, lambda: rx.get_replica_context().merge_call(merge_fn))  # type: ignore[union-attr]
    assert seen == [strategy]


@pytest.mark.strategies("default", "one_device", *TWO_REPLICAS)
def test_t5_scopes_left_in_the_wrong_order(strategy: Any) -> None:
    outer, inner = strategy.scope(), strategy.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="nesting error"):
        outer.__exit__(None, None, None)
    assert rx.get_strategy() is strategy
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["device", "creator"])
@pytest.mark.strategies("one_device", "mirrored_2", "central_2")
def test_t5_leaving_a_scope_under_an_open_inner_scope(strategy: Any, kind: str, depth: int) -> None:
    def creator(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**kwargs)

    def body() -> None:
        outer = [strategy.scope() for _ in range(depth)]
        for scope in outer:
            scope.__enter__()
        inner = rx.device("CPU:0") if kind == "device" else rx.variable_creator_scope(creator)
        inner.__enter__()
        try:
            with pytest.raises(RuntimeError, match=f"{kind} scope.* nesting error"):
                outer[-1].__exit__(None, None, None)
            assert rx.get_strategy() is strategy
        except BaseException:
            with contextlib.suppress(RuntimeError):
                inner.__exit__(None, None, None)
            raise
        inner.__exit__(None, None, None)
        for scope in reversed(outer):
            scope.__exit__(None, None, None)
        assert not rx.has_strategy()

    contextvars.copy_context().run(body)


def test_t5_leaving_a_scope_that_was_not_entered() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    scope = strategy.scope()
    with pytest.raises(RuntimeError):
        scope.__exit__(None, None, None)
    with scope:
        pass
    with pytest.raises(RuntimeError):
        scope.__exit__(None, None, None)


def test_s12_scopes_of_several_threads_do_not_meet() -> None:
    strategies = [rx.OneDeviceStrategy(f"CPU:{i}") for i in range(4)]
    barrier = threading.Barrier(len(strategies))

    def work(strategy: Any) -> Any:
        found = []
        for _ in range(5):
            with strategy.scope():
                barrier.wait(60)
                found.append(rx.get_strategy() is strategy)
                found.append(rx.Variable(1.0).owner is strategy.extended)
                barrier.wait(60)
            found.append(not rx.has_strategy())
        return found

    with concurrent.futures.ThreadPoolExecutor(len(strategies)) as pool:
        results = list(pool.map(work, strategies))
    assert results == [[True] * 15] * 4


def test_s12_one_scope_object_entered_by_several_threads() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    scope = strategy.scope()
    entered, leave = threading.Event(), threading.Event()

    def work() -> Any:
        with scope:
            entered.set()
            assert leave.wait(60)
            return rx.get_strategy() is strategy

    def body() -> None:
        # Enters second and leaves last: the two threads' visits cross.
        with scope:
            leave.set()
            assert other.result(60) is True
        assert not rx.has_strategy()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        assert entered.wait(60)
        try:
            contextvars.copy_context().run(body)
        finally:
            leave.set()


def test_s12_scopes_of_several_asyncio_tasks_do_not_meet() -> None:
    async def work(strategy: Any) -> bool:
        with strategy.scope():
            await asyncio.sleep(0)
            found = rx.get_strategy() is strategy
            await asyncio.sleep(0)
            return found

    async def main() -> list[bool]:
        return await asyncio.gather(*(work(rx.OneDeviceStrategy(f"CPU:{i}")) for i in range(3)))

    assert asyncio.run(main()) == [True] * 3


def test_t1_scope_and_run_of_another_strategy_in_replica_code(run: Any) -> None:
    strategy, other = rx.MirroredStrategy(["CPU:0", "CPU:1"]), rx.OneDeviceStrategy("CPU:0")
    with pytest.raises(RuntimeError, match="cross-replica context"):
        run(strategy, lambda: other.scope().__enter__())
    with pytest.raises(RuntimeError, match="cross-replica context"):
        run(strategy, lambda: other.run(lambda: None))


@pytest.mark.parametrize("api", ["run", "reduce", "gather"])
def test_t1_calls_of_another_strategy_in_scope(api: str) -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:1")
    with one.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        CROSS_REPLICA_ONLY[api](other, jnp.ones(2))


# Replica contexts that outlive their run.

REPLICA_ONLY: dict[str, Callable[[Any], Any]] = {
    "merge_call": lambda c: c.merge_call(lambda s: None),
    "all_reduce": lambda c: c.all_reduce("sum", jnp.ones(1)),
    "all_gather": lambda c: c.all_gather(jnp.ones(1), axis=0),
    "devices": lambda c: c.devices,
}


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_replica_context_outside_of_its_run(strategy: Any, run: Any) -> None:
    kept: list[Any] = []
    run(strategy, lambda: kept.append(rx.get_replica_context()))
    assert kept
    for api, call in REPLICA_ONLY.items():
        for context in kept:
            assert context.strategy is strategy
            assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
            with pytest.raises(RuntimeError, match=f"{api}` needs"):
                call(context)
            with pytest.raises(RuntimeError, match=f"{api}` needs"), _one.scope():
                call(context)


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_replica_context_of_an_earlier_run(strategy: Any, run: Any) -> None:
    kept: list[Any] = []
    run(strategy, lambda: kept.append(rx.get_replica_context()))
    for call in REPLICA_ONLY.values():

        def fn(call: Any = call) -> None:
            call(kept[0])

        with pytest.raises(RuntimeError, match="mismatching ReplicaContext"):
            run(strategy, fn)


def test_default_context_in_replica_code(run: Any) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    default = rx.get_replica_context()
    for call in REPLICA_ONLY.values():

        def fn(call: Any = call) -> None:
            call(default)

        with pytest.raises(RuntimeError, match="mismatching ReplicaContext"):
            run(strategy, fn)


@pytest.mark.one_process("a worker may run a single replica")
@pytest.mark.strategies(*TWO_REPLICAS)
def test_context_of_another_replica(strategy: Any) -> None:
    first: list[Any] = []

    def fn() -> None:
        first.append(rx.get_replica_context())
        first[0].all_reduce("sum", jnp.ones(1))

    with pytest.raises(RuntimeError, match="mismatching ReplicaContext"):
        strategy.run(fn)
    strategy.run(lambda: None)


@pytest.mark.parametrize("wrong", ["0", 1.5, [0], object(), True])
def test_replica_context_needs_a_replica_id(wrong: Any) -> None:
    with pytest.raises(ValueError, match="replica_id_in_sync_group"):
        rx.ReplicaContext(rx.get_strategy(), wrong)


@pytest.mark.parametrize("replica_id", [0, 1, np.int64(1), jnp.asarray(1), None])
def test_replica_context_takes_ints_scalars_and_none(replica_id: Any) -> None:
    context = rx.ReplicaContext(rx.get_strategy(), replica_id)
    assert context.replica_id_in_sync_group is replica_id


def test_replica_context_as_a_context_manager(strategy: Any) -> None:
    context = rx.ReplicaContext(strategy, local_ids(strategy)[0])
    with context as entered:
        assert entered is context
        assert rx.get_replica_context() is context
        assert rx.get_strategy() is strategy
        assert not rx.in_cross_replica_context()
    assert rx.get_replica_context() is not context
    assert not rx.has_strategy()


_one = rx.OneDeviceStrategy("CPU:0")


def _in_thread(fn: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result(60)
