"""`extended.update` and its relatives: code per copy of a variable (S118-S132, X6, X9, T55)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import DISTRIBUTED, STRATEGIES, TWO_REPLICAS
from vocabulary import copies, num_copies
from worker_groups import replica_results

import replicax as rx

pytestmark = pytest.mark.every_strategy

SUM = rx.VariableAggregation.SUM
ON_READ = rx.VariableSynchronization.ON_READ
HAS_DEVICES = ("one_device", *DISTRIBUTED, "central_2")


def numbers(strategy: Any, value: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in replica_results(strategy, value)]


def in_scope(strategy: Any, fn: Any, how: str) -> Any:
    """Calls `fn` in cross-replica context: as it is, or compiled."""
    with strategy.scope():
        return (rx.function(fn) if how == "compiled" else fn)()


HOW = pytest.mark.parametrize("how", ["eager", "compiled"])


@HOW
def test_s118_s122_update_reaches_every_copy(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    calls: list[Any] = []

    def fn(copy: Any, delta: Any, factor: Any = 1.0) -> Any:
        calls.append((rx.in_cross_replica_context(), rx.get_replica_context(), rx.get_strategy()))
        assert isinstance(copy, rx.Variable)
        copy.assign_add(delta * factor)
        return copy.read_value() * 10.0

    def update() -> Any:
        return strategy.extended.update(v, fn, args=(jnp.ones(2),), kwargs={"factor": 3.0})

    result = in_scope(strategy, update, how)
    assert copies(strategy, v) == [[4.0, 5.0]] * num_copies(strategy, v)
    found = numbers(strategy, result)
    assert found == [[40.0, 50.0]] * len(found)
    np.testing.assert_array_equal(result, [40.0, 50.0])
    assert calls
    for is_cross, context, current in calls:
        assert is_cross
        assert context is None
        assert current is strategy
    if how == "eager":
        assert len(calls) == len(v.components)


@pytest.mark.strategies(*HAS_DEVICES)
def test_s118_update_runs_under_the_device_of_each_copy(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
        found: list[Any] = []

        def fn(copy: Any) -> None:
            found.append((jnp.ones(()).devices(), copy.device, copy.read_value().devices()))

        strategy.extended.update(v, fn)
    assert [f[1] for f in found] == list(strategy.extended.parameter_devices)
    for made, _, read in found:
        assert made == read
        assert len(made) == 1


@pytest.mark.strategies(*TWO_REPLICAS)
@HOW
def test_s119_mirrored_arguments_are_unwrapped(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable([0.0, 0.0])
    seen: list[Any] = []
    per_replica = strategy.run(
        lambda: jnp.ones(2) * (1.0 + rx.get_replica_context().replica_id_in_sync_group)
    )

    def update() -> None:
        reduced = strategy.extended.reduce_to("sum", per_replica, destinations=v)

        def fn(copy: Any, delta: Any, more: Any) -> None:
            seen.append((isinstance(delta, rx.Mirrored), isinstance(more["x"], rx.Mirrored)))
            copy.assign_add(delta + more["x"])

        strategy.extended.update(v, fn, args=(reduced,), kwargs={"more": {"x": reduced}})

    in_scope(strategy, update, how)
    assert set(seen) == {(False, False)}
    assert copies(strategy, v) == [[6.0, 6.0]] * num_copies(strategy, v)


@pytest.mark.strategies(*TWO_REPLICAS)
@HOW
def test_s121_x6_per_replica_arguments_are_refused(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    value = strategy.run(lambda: 1.0 + rx.get_replica_context().replica_id_in_sync_group)
    for arguments in (
        {"args": (value,)},
        {"kwargs": {"delta": value}},
        {"args": ([{"x": value}],)},
    ):

        def update(arguments: Any = arguments) -> None:
            strategy.extended.update(v, lambda c, delta: c.assign_add(2.0), **arguments)

        with pytest.raises(ValueError, match="reduce_to") as caught:
            in_scope(strategy, update, how)
        assert isinstance(caught.value, rx.errors.DistributeError)
        assert copies(strategy, v) == [1.0] * num_copies(strategy, v)
    in_scope(strategy, lambda: strategy.extended.update(v, lambda c: c.assign_add(2.0)), how)
    assert copies(strategy, v) == [3.0] * num_copies(strategy, v)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@HOW
def test_s121_x6_on_read_variables_take_and_are_no_per_replica_arguments(
    strategy: Any, how: str
) -> None:
    with strategy.scope():
        v, w = (rx.Variable(1.0, synchronization=ON_READ, aggregation=SUM) for _ in range(2))
        equal = rx.Variable(2.0)
    value = strategy.run(lambda: 1.0 + rx.get_replica_context().replica_id_in_sync_group)

    def update(argument: Any) -> Any:
        return strategy.extended.update(v, lambda c, d: c.assign_add(d), args=(argument,))

    for argument in (value, w, rx.PerReplica((1.0, 2.0))):
        with pytest.raises(ValueError, match="equal on all replicas"):
            in_scope(strategy, lambda a=argument: update(a), how)
    assert copies(strategy, v) == [1.0, 1.0]
    in_scope(strategy, lambda: update(equal), how)
    assert copies(strategy, v) == [3.0, 3.0]


def test_s121_x6_the_default_strategy_refuses_per_replica_arguments() -> None:
    strategy, v = rx.get_strategy(), rx.Variable(1.0)
    value = rx.PerReplica((1.0, 2.0))
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.extended.update(v, lambda c, d: c.assign_add(d), args=(value,))
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.extended.update_non_slot(v, lambda d: d, args=(value,))


@pytest.mark.parametrize("other", ["mirrored_2", "one_device", "central_2", "default"])
@HOW
def test_s17_cross_replica_methods_under_another_strategy_are_refused(other: str, how: str) -> None:
    strategy, current = STRATEGIES[other](), rx.MirroredStrategy(["CPU:2", "CPU:3"])
    with strategy.scope():
        v = rx.Variable(1.0)
    value, extended = jnp.ones(2), strategy.extended
    calls = {
        "reduce_to": lambda: extended.reduce_to("sum", value, "CPU:0"),
        "batch_reduce_to": lambda: extended.batch_reduce_to("sum", [(value, "CPU:0")]),
        "broadcast_to": lambda: extended.broadcast_to(value, ["CPU:0", "CPU:1"]),
        "call_for_each_replica": lambda: extended.call_for_each_replica(lambda: 1.0),
        "update": lambda: extended.update(v, lambda c: c.assign_add(1.0)),
        "update_non_slot": lambda: extended.update_non_slot(("CPU:0",), lambda: 1.0),
        "reduce": lambda: strategy.reduce("sum", value, axis=None),
        "gather": lambda: strategy.gather(value, axis=0),
        "run": lambda: strategy.run(lambda: 1.0),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match="Mixing different") as caught:
            in_scope(current, call, how)
        assert isinstance(caught.value, rx.errors.ContextError), name
        with pytest.raises(RuntimeError, match=r"Mixing different|cross-replica"):
            current.run(call)
    assert v.read_value() == 1.0


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s121_x6_replica_arguments_that_differ_are_refused(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)

    def fn() -> None:
        own = 1.0 + rx.get_replica_context().replica_id_in_sync_group
        rx.get_strategy().extended.update(v, lambda c, x: c.assign_add(x), args=(own,))

    with pytest.raises(ValueError, match="PerReplica"):
        run(strategy, fn)
    assert copies(strategy, v) == [1.0] * num_copies(strategy, v)
    assert numbers(strategy, run(strategy, lambda: jnp.ones(()) * 1.0))


@pytest.mark.strategies("one_device", "mirrored_1", *TWO_REPLICAS)
def test_1_4_update_in_replica_context_goes_through_merge_call(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    seen: list[Any] = []

    def fn() -> Any:
        def change(copy: Any, x: float) -> Any:
            seen.append(rx.get_replica_context())
            copy.assign_add(x)
            return copy.read_value() * 2.0

        return rx.get_strategy().extended.update(v, change, args=(2.0,)) + 0.0

    result = run(strategy, fn)
    assert copies(strategy, v) == [3.0] * num_copies(strategy, v)
    assert numbers(strategy, result) == [6.0] * strategy.num_replicas_in_sync
    assert set(seen) == {None}


@HOW
def test_s123_without_group_each_result_leaf_is_a_tuple(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])

    def update() -> Any:
        def fn(copy: Any) -> Any:
            copy.assign_add(jnp.ones(2))
            return {"new": copy.read_value() * 2.0, "pair": (copy.read_value() * 3.0, 5)}

        return strategy.extended.update(v, fn, group=False)

    result = in_scope(strategy, update, how)
    # Compiled code acts for the copies of all workers.
    count = num_copies(strategy, v) if how == "compiled" else len(v.components)
    assert set(result) == {"new", "pair"}
    assert isinstance(result["new"], tuple)
    assert [np.asarray(x).tolist() for x in result["new"]] == [[4.0, 6.0]] * count
    first, second = result["pair"]
    assert [np.asarray(x).tolist() for x in first] == [[6.0, 9.0]] * count
    assert [int(x) for x in second] == [5] * count
    assert copies(strategy, v) == [[2.0, 3.0]] * num_copies(strategy, v)


@HOW
def test_s122_returning_the_copy_gives_the_variable(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)

    def update() -> Any:
        return strategy.extended.update(v, lambda c: c.assign_add(1.0))

    assert in_scope(strategy, update, how) is v
    assert float(v) == 2.0


@pytest.mark.strategies("one_device", "default", "central_2")
def test_s120_an_unmirrored_variable_is_passed_itself(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
        got = strategy.extended.update(v, lambda x, d: (x is v, float(x.assign_add(d))), (2.0,))
    assert got == (True, 3.0)


@pytest.mark.strategies(*HAS_DEVICES)
def test_s120_1_4_what_is_not_a_variable_of_the_strategy_is_refused(strategy: Any) -> None:
    other = rx.MirroredStrategy(["CPU:0"])
    outside = rx.Variable(1.0)
    with other.scope():
        foreign = rx.Variable(1.0)
    with strategy.scope():
        for bad in (outside, foreign, jnp.ones(()), 1.0, None, "v"):
            with pytest.raises(ValueError, match="variable") as caught:
                strategy.extended.update(bad, lambda c: None)
            assert isinstance(caught.value, rx.errors.DistributeError)
    assert float(outside) == float(foreign) == 1.0


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2", "central_2")
def test_s17_update_under_another_strategy_is_refused(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    with rx.OneDeviceStrategy("CPU:0").scope(), pytest.raises(RuntimeError):
        strategy.extended.update(v, lambda c: c.assign(2.0))
    assert copies(strategy, v) == [1.0] * num_copies(strategy, v)
    strategy.extended.update(v, lambda c: c.assign(2.0))
    assert copies(strategy, v) == [2.0] * num_copies(strategy, v)


@pytest.mark.strategies("default", "one_device", *TWO_REPLICAS)
@HOW
def test_s118_an_error_in_the_update_keeps_its_type(strategy: Any, how: str) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)

    def fn(copy: Any) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        in_scope(strategy, lambda: strategy.extended.update(v, fn), how)
    assert not rx.in_cross_replica_context()
    in_scope(strategy, lambda: strategy.extended.update(v, lambda c: c.assign_add(1.0)), how)
    assert copies(strategy, v) == [2.0] * num_copies(strategy, v)


# Colocation.


@pytest.mark.strategies(*HAS_DEVICES)
@HOW
def test_s124_s125_colocated_variables_meet_in_update(strategy: Any, how: str) -> None:
    with strategy.scope():
        v1 = rx.Variable([1.0, 2.0], name="v1")
        with strategy.extended.colocate_vars_with(v1):
            v2 = rx.Variable([10.0, 20.0], name="v2")
            v3 = rx.Variable(3.0, name="v3")
        after = rx.Variable(0.0)
    for v in (v2, v3):
        assert [c.device for c in v.components] == [c.device for c in v1.components]
        assert strategy.extended.variable_created_in_scope(v)
        assert type(v) is type(v1)
    assert [c.device for c in after.components] == [c.device for c in v1.components]

    def update() -> None:
        def fn(a: Any, b: Any, c: Any) -> None:
            if how == "eager":
                assert b.read_value().devices() == a.read_value().devices()
            a.assign_add(b * c)
            b.assign(b * 2.0)

        strategy.extended.update(v1, fn, args=(v2, v3))

    in_scope(strategy, update, how)
    assert copies(strategy, v1) == [[31.0, 62.0]] * num_copies(strategy, v1)
    assert copies(strategy, v2) == [[20.0, 40.0]] * num_copies(strategy, v2)
    assert copies(strategy, v3) == [3.0] * num_copies(strategy, v3)


@pytest.mark.strategies(*HAS_DEVICES)
def test_s126_s127_colocation_outside_its_scope_or_with_other_variables(strategy: Any) -> None:
    outside = rx.Variable(1.0)
    other = rx.MirroredStrategy(["CPU:0"])
    with other.scope():
        foreign = rx.Variable(1.0)
    with strategy.scope():
        v = rx.Variable(1.0)
    colocate = strategy.extended.colocate_vars_with
    with pytest.raises(RuntimeError, match="scope"), colocate(v):
        pass
    with other.scope(), pytest.raises(RuntimeError, match="scope"), colocate(v):
        pass
    with strategy.scope():
        bad = [outside, foreign, None, 3.0, jnp.ones(2), ()]
        if len(v.components) > 1:
            bad.append(v.components[0])
        for value in bad:
            with pytest.raises(ValueError, match="colocate_vars_with"), colocate(value):
                pass
        with colocate(v):
            assert strategy.extended.variable_created_in_scope(rx.Variable(2.0))
        with strategy.colocate_vars_with(v):
            assert strategy.extended.variable_created_in_scope(rx.Variable(2.0))


@pytest.mark.strategies("one_device", *TWO_REPLICAS)
def test_s128_colocation_works_in_replica_context(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v1 = rx.Variable([1.0, 2.0])
    made: list[Any] = []

    def fn() -> Any:
        with rx.get_strategy().extended.colocate_vars_with(v1):
            made.append(rx.Variable(5.0, name="made"))
        return made[-1] * 2.0

    assert numbers(strategy, run(strategy, fn)) == [10.0] * strategy.num_replicas_in_sync
    assert [c.device for c in made[0].components] == [c.device for c in v1.components]
    assert strategy.extended.variable_created_in_scope(made[0])


def test_s129_s130_s131_s132_non_slot_variables(strategy: Any) -> None:
    extended = strategy.extended
    is_default = strategy is rx.get_strategy()
    with strategy.scope():
        v, w = rx.Variable(1.0, name="b"), rx.Variable([1.0, 2.0], name="a")
        where = extended.non_slot_devices([v, w])
        if is_default:
            assert where is w
        else:
            assert where == extended.parameter_devices
            assert where == extended.non_slot_devices([w])
        with extended.colocate_vars_with(where):
            beta = rx.Variable(0.5, name="beta")
        if not is_default:
            assert tuple(c.device for c in beta.components) == where

        def fn(x: Any, factor: float = 1.0) -> Any:
            assert rx.in_cross_replica_context()
            assert rx.get_replica_context() is None
            beta.assign(beta * x)
            return beta.read_value() * factor

        grouped = extended.update_non_slot(where, fn, args=(2.0,), kwargs={"factor": 3.0})
        assert float(grouped) == 3.0
        separate = extended.update_non_slot(where, fn, args=(2.0,), group=False)
    assert isinstance(separate, tuple)
    assert [float(x) for x in separate] == [2.0] * len(beta.components)
    assert copies(strategy, beta) == [2.0] * num_copies(strategy, beta)


def test_s131_update_non_slot_in_compiled_code(strategy: Any) -> None:
    extended = strategy.extended
    with strategy.scope():
        v = rx.Variable(1.0, name="v")
        where = extended.non_slot_devices([v])
        with extended.colocate_vars_with(where):
            beta = rx.Variable(0.5)

        @rx.function
        def step(x: Any) -> Any:
            def fn(x: Any) -> Any:
                beta.assign(beta * x)
                return beta.read_value() * 10.0

            return extended.update_non_slot(where, fn, args=(x,))

        results = [float(step(jnp.asarray(2.0))) for _ in range(2)]
    assert results == [10.0, 20.0]
    assert copies(strategy, beta) == [2.0] * num_copies(strategy, beta)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s131_x6_bad_arguments_of_update_non_slot(strategy: Any, run: Any) -> None:
    extended = strategy.extended
    with strategy.scope():
        v = rx.Variable(1.0)
    value = strategy.run(lambda: 1.0 + rx.get_replica_context().replica_id_in_sync_group)
    where = extended.non_slot_devices([v])
    with strategy.scope():
        for bad in (v, "CPU:0", None, 3):
            with pytest.raises(ValueError, match="non_slot_devices"):
                extended.update_non_slot(bad, lambda: None)
        with pytest.raises(ValueError, match="PerReplica"):
            extended.update_non_slot(where, lambda x: None, args=(value,))
    with pytest.raises(RuntimeError, match="update_non_slot"):
        run(strategy, lambda: extended.update_non_slot(where, lambda: None))
    assert float(v) == 1.0


@pytest.mark.strategies("mirrored_2", "mirrored_4", "tpu_2")
def test_s129_s136_variables_may_be_colocated_with_one_device(strategy: Any) -> None:
    device = strategy.extended.worker_devices[-1]
    with strategy.scope(), strategy.extended.colocate_vars_with((device,)):
        v = rx.Variable([1.0, 2.0], aggregation=SUM)
    assert [c.device for c in v.components] == [device]
    assert strategy.extended.variable_created_in_scope(v)
    strategy.run(lambda: v.assign_add(jnp.ones(2)))
    n = strategy.num_replicas_in_sync
    assert np.asarray(v).tolist() == [1.0 + n, 2.0 + n]
    strategy.run(rx.function(lambda: v.assign_add(jnp.ones(2))))
    assert np.asarray(v).tolist() == [1.0 + 2 * n, 2.0 + 2 * n]
    assert v.read_value().devices() == {strategy.extended.layout.local_devices[-1]}
