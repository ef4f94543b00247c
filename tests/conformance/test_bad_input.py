"""User mistakes: a typed error in three parts, state unchanged, and the next call works."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN
ON_READ = rx.VariableSynchronization.ON_READ
REPRESENTATIVE = ("mirrored_2", "virtual_2", "central_2")


@contextlib.contextmanager
def refused(kind: type[Exception], match: str | None = None) -> Iterator[None]:
    """Checks type and form of an error: what was required, what was found, what to do."""
    with pytest.raises(kind, match=match) as info:
        yield
    assert isinstance(info.value, rx.errors.DistributeError), repr(info.value)
    text = str(info.value).split("\n-----")[0].strip()
    assert re.fullmatch(r"(?s).+, but .+\. .+\.?", text), text
    assert not rx.has_strategy() or rx.in_cross_replica_context() or rx.get_replica_context()


def works(strategy: Any, run: Any) -> None:
    """Checks that a strategy is usable after an error."""
    fn = lambda x: rx.get_replica_context().all_reduce("SUM", x)  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.asarray(1.0))
    result = strategy.experimental_local_results(run(strategy, fn, args=(x,)))
    assert [float(r) for r in result] == [strategy.num_replicas_in_sync] * len(result)


# Context.


@pytest.mark.strategies("one_device", *REPRESENTATIVE)
@pytest.mark.parametrize(
    "api",
    ["reduce", "gather", "run", "scope", "reduce_to", "batch_reduce_to", "values", "broadcast_to"],
)
def test_s17_cross_replica_calls_in_replica_context(strategy: Any, run: Any, api: str) -> None:
    calls = {
        "reduce": lambda x: strategy.reduce("SUM", x, axis=None),
        "gather": lambda x: strategy.gather(x, axis=0),
        "run": lambda x: strategy.run(lambda: x),
        "scope": lambda x: strategy.scope().__enter__(),
        "reduce_to": lambda x: strategy.extended.reduce_to("SUM", x, "CPU:0"),
        "batch_reduce_to": lambda x: strategy.extended.batch_reduce_to("SUM", [(x, "CPU:0")]),
        "values": lambda x: strategy.experimental_distribute_values_from_function(lambda c: x),
        "broadcast_to": lambda x: strategy.extended.broadcast_to(x, "CPU:0"),
    }
    with refused(RuntimeError, "cross-replica"):
        run(strategy, calls[api], args=(jnp.ones(1),))
    works(strategy, run)


@pytest.mark.strategies(*REPRESENTATIVE)
def test_replica_calls_outside_of_run(strategy: Any, run: Any) -> None:
    held: list[Any] = []
    run(strategy, lambda: held.append(rx.get_replica_context()))
    for call in (
        lambda c: c.all_reduce("SUM", jnp.ones(())),
        lambda c: c.all_gather(jnp.ones(1), axis=0),
        lambda c: c.merge_call(lambda s: None),
    ):
        with refused(RuntimeError, "replica context|ReplicaContext"), strategy.scope():
            call(held[0])
        with refused(RuntimeError, "ReplicaContext"):
            run(strategy, lambda call=call: call(held[0]))
    works(strategy, run)


@pytest.mark.strategies(*REPRESENTATIVE)
def test_another_strategy(strategy: Any, run: Any) -> None:
    other = rx.MirroredStrategy(["CPU:6", "CPU:7"])
    with other.scope():
        v = rx.Variable(1.0, aggregation=MEAN, name="foreign")
    with refused(RuntimeError, "Mixing"), other.scope():
        run(strategy, lambda: 1)
    with refused(RuntimeError, "'foreign'.*owns"), strategy.scope():
        v.assign(2.0)
    with refused(RuntimeError, "'foreign'.*owns"):
        run(strategy, lambda: v.assign_add(1.0))
    with refused(RuntimeError, "'foreign'.*owns"):
        run(strategy, lambda: v * 1.0)
    with refused(RuntimeError):
        run(strategy, lambda: other.run(lambda: 1))
    assert float(v) == 1.0
    works(strategy, run)
    works(other, run)


@pytest.mark.strategies(*REPRESENTATIVE)
def test_a_value_of_another_strategy(strategy: Any, run: Any) -> None:
    four = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    one = rx.PerReplica((jnp.ones(()),))
    many = four.experimental_distribute_values_from_function(lambda _: jnp.ones(()))
    with refused(ValueError, "component"):
        run(strategy, lambda x: x * 1, args=(one,))
    with refused(ValueError, "component"):
        run(strategy, lambda x: x * 1, args=(many,))
    works(strategy, run)


@pytest.mark.strategies(*REPRESENTATIVE)
def test_a_plain_variable_written_by_several_replicas(strategy: Any, run: Any) -> None:
    v = rx.Variable(1.0, name="outside")
    with refused(RuntimeError, "'outside'.*strategy.scope"):
        run(strategy, lambda: v.assign_add(1.0))
    assert float(v) == 1.0
    read = strategy.experimental_local_results(run(strategy, lambda: v * 2.0))
    assert float(read[0]) == 2.0


@pytest.mark.strategies("one_device", *REPRESENTATIVE)
def test_x4_a_write_without_aggregation(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, name="bare")
    if strategy.num_replicas_in_sync == 1:
        run(strategy, lambda: v.assign_add(1.0))
        assert float(v) == 2.0
        return
    for call in (lambda: v.assign(2.0), lambda: v.assign_add(1.0), lambda: v.assign_sub(1.0)):
        with refused(ValueError, "'bare'.*aggregation"):
            run(strategy, call)
    assert float(strategy.experimental_local_results(v)[0]) == 1.0
    v.assign(3.0)
    assert float(v) == 3.0


@pytest.mark.strategies(*REPRESENTATIVE)
def test_x5_t56_sync_on_read_in_cross_replica_context(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, synchronization=ON_READ, aggregation=SUM, name="s")
        bare = rx.Variable(1.0, synchronization=ON_READ, name="bare")
    for call in (lambda: v.assign_add(1.0), lambda: v.assign_sub(1.0)):
        for how in (call, rx.function(call)):
            with refused(ValueError, "'s'.*replica context"):
                how()
    for call in (lambda: bare.read_value(), lambda: bare.assign(2.0), lambda: bare * 1.0):
        for how in (call, rx.function(call)):
            with refused(ValueError, "'bare'.*aggregation"):
                how()
    assert float(v) == 2.0
    v.assign(6.0)
    assert float(v) == 6.0


# Structures, shapes, axes, types.


@pytest.mark.strategies(*REPRESENTATIVE)
def test_t15_different_structures(strategy: Any) -> None:
    for one, other in ([[1], [1, 2]], [{"a": 1}, {"b": 1}], [[1], (1,)], [{"a": 1}, [1]]):

        def fn(one: Any = one, other: Any = other) -> Any:
            return one if int(rx.get_replica_context().replica_id_in_sync_group) == 0 else other

        with refused(rx.errors.StructureError, "same structure"):
            strategy.run(fn)
    result = strategy.run(
        lambda: [None, jnp.ones(())][int(rx.get_replica_context().replica_id_in_sync_group)]
    )
    assert result.values[0] is None


@pytest.mark.strategies("default", "one_device", *REPRESENTATIVE)
def test_arguments_of_run(strategy: Any, run: Any) -> None:
    with refused(ValueError, "list or tuple"):
        strategy.run(lambda x: x, args=jnp.ones(2))
    with refused(TypeError, "callable"):
        strategy.run(3)
    with pytest.raises(TypeError):
        run(strategy, lambda x: x, args=(1, 2))
    works(strategy, run)


@pytest.mark.strategies("default", "one_device", *REPRESENTATIVE)
def test_op_names(strategy: Any, run: Any) -> None:
    value = strategy.run(lambda: jnp.ones(2))
    for op in ("MAX", "", None, 3, rx.VariableAggregation.NONE):
        with refused(ValueError, "SUM"):
            strategy.reduce(op, value, axis=None)
        with refused(ValueError, "SUM"):
            run(strategy, lambda op=op: rx.get_replica_context().all_reduce(op, jnp.ones(())))
    np.testing.assert_array_equal(strategy.reduce("mEaN", value, axis=None), np.ones(2))
    works(strategy, run)


@pytest.mark.strategies("one_device", *REPRESENTATIVE)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_axes_of_reduce_and_gather(strategy: Any, is_compiled: bool) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((2, 3)))
    scalar = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(()))
    wrap = rx.function if is_compiled else lambda f: f
    for axis in (2, -3, (0, 2)):
        with refused(ValueError, "axis"):
            wrap(lambda v, a=axis: strategy.reduce("SUM", v, axis=a))(value)
    for axis in (0.5, "0", True, object()):
        with refused(TypeError, "axis"):
            wrap(lambda v, a=axis: strategy.reduce("SUM", v, axis=a))(value)
    for axis in (2, -3):
        with refused(ValueError, "axis"):
            wrap(lambda v, a=axis: strategy.gather(v, axis=a))(value)
    for axis in (None, 0.5, True):
        with refused(TypeError, "axis"):
            wrap(lambda v, a=axis: strategy.gather(v, axis=a))(value)
    with refused(ValueError, "scalar"):
        wrap(lambda v: strategy.gather(v, axis=0))(scalar)
    with pytest.raises(TypeError):
        strategy.reduce("SUM", value)
    n = strategy.num_replicas_in_sync
    assert wrap(lambda v: strategy.gather(v, axis=-1))(value).shape == (2, 3 * n)
    assert float(wrap(lambda v: strategy.reduce("SUM", v, axis=(0, 1)))(value)) == 6.0 * n


@pytest.mark.strategies(*REPRESENTATIVE)
def test_axes_of_all_gather(strategy: Any, run: Any) -> None:
    def gather(x: Any, axis: Any) -> Any:
        return rx.get_replica_context().all_gather(x, axis=axis)

    with refused(ValueError, "axis"):
        run(strategy, lambda: gather(jnp.ones((1, 2)), 2))
    with refused(TypeError, "axis"):
        run(strategy, lambda: gather(jnp.ones((1, 2)), "0"))
    with refused(ValueError, "scalar.*expand_dims"):
        run(strategy, lambda: gather(jnp.ones(()), 0))
    with refused(NotImplementedError, "to_dense"):
        run(strategy, lambda: gather(rx.IndexedSlices(jnp.ones((1, 2)), jnp.zeros(1, int)), 0))
    with refused(TypeError, "arrays"):
        run(strategy, lambda: gather("text", 0))
    with refused(TypeError, "arrays"):
        run(strategy, lambda: rx.get_replica_context().all_reduce("SUM", {"a": "text"}))
    works(strategy, run)


@pytest.mark.strategies(*REPRESENTATIVE)
def test_s53_shapes_that_cannot_be_reduced(strategy: Any) -> None:
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(1 + c.replica_id_in_sync_group)
    )
    with refused(ValueError, r"\(1,\), \(2,\).*axis=0"):
        strategy.reduce("SUM", ragged, axis=None)
    with refused(ValueError, "shape"):
        strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(ragged,))
    with refused(TypeError, "str"):
        words = strategy.experimental_distribute_values_from_function(lambda c: "word")
        strategy.reduce("SUM", words, axis=None)
    assert float(strategy.reduce("SUM", ragged, axis=0)) == 3.0


@pytest.mark.strategies("default", "one_device", *REPRESENTATIVE)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_writes_of_the_wrong_shape_and_type(strategy: Any, is_compiled: bool) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.ones((2, 3)), name="v")
        count = rx.Variable(1, name="count")
    wrap = rx.function if is_compiled else lambda f: f
    for value in (jnp.ones((3, 2)), jnp.ones(6), 1.0, jnp.ones((1, 2, 3))):
        with refused(ValueError, r"'v'.*\(2, 3\)"):
            wrap(lambda value=value: v.assign(value))()
    with refused(ValueError, "'count'.*int32.*float"):
        wrap(lambda: count.assign_add(0.5))()
    with refused(ValueError, "'v'.*float32.*complex"):
        wrap(lambda: v.assign(jnp.ones((2, 3), jnp.complex64)))()
    with refused(TypeError, "IndexedSlices"):
        wrap(lambda: v.scatter_add(jnp.ones((2, 3))))()
    slices = rx.IndexedSlices(jnp.ones((1, 3)), jnp.asarray([0.5]))
    with refused(ValueError, "integer"):
        wrap(lambda: v.scatter_add(slices))()
    with refused(ValueError, "shape"):
        wrap(lambda: v.scatter_add(rx.IndexedSlices(jnp.ones((1, 4)), jnp.asarray([0]))))()
    if not is_compiled:
        # Compiled code drops rows out of range, as XLA does.
        with refused(ValueError, r"\[0, 2\)"):
            v.scatter_add(rx.IndexedSlices(jnp.ones((1, 3)), np.asarray([2])))
    for value in ("text", object(), None):
        with refused((TypeError, ValueError)):  # type: ignore[arg-type]
            wrap(lambda value=value: v.assign(value))()
    np.testing.assert_array_equal(np.asarray(v), np.ones((2, 3)))
    assert int(count) == 1
    wrap(lambda: count.assign_add(2))()
    assert int(count) == 3


@pytest.mark.strategies("default", "one_device", *REPRESENTATIVE)
def test_variables_that_cannot_be_made(strategy: Any) -> None:
    with strategy.scope():
        with refused(ValueError, "initial value"):
            rx.Variable()
        with refused(ValueError, "MEAN.*int32"):
            rx.Variable(1, aggregation=MEAN)
        with refused(ValueError, "NONE"):
            rx.Variable(1.0, synchronization=rx.VariableSynchronization.NONE)
        with refused(ValueError, "synchronization"):
            rx.Variable(1.0, synchronization="ON_READ")
        with refused(ValueError, "aggregation"):
            rx.Variable(1.0, aggregation="SUM")
        with refused(ValueError, r"\(3,\).*\(2,\)"):
            rx.Variable(jnp.ones(2), shape=(3,))
        with refused(TypeError, "array"):
            rx.Variable("text")
        with refused(TypeError, "array"):
            rx.Variable([[1.0], [1.0, 2.0]])
        with refused(TypeError, "'colour'|colour"):
            rx.Variable(1.0, colour="red")
        assert float(rx.Variable(1.0)) == 1.0


def test_devices_that_are_not_there() -> None:
    for make in (
        lambda: rx.MirroredStrategy(["CPU:99"]),
        lambda: rx.MirroredStrategy(["CPU:0", "CPU:0"]),
        lambda: rx.MirroredStrategy(["TOASTER:0"]),
        lambda: rx.OneDeviceStrategy("CPU:99"),
        lambda: rx.OneDeviceStrategy("nonsense"),
        lambda: rx.CentralStorageStrategy(["CPU:0"], "CPU:99"),
        lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=0),
    ):
        with refused((ValueError, TypeError, RuntimeError)):  # type: ignore[arg-type]
            make()
    with refused((ValueError, RuntimeError)), rx.device("CPU:99"):  # type: ignore[arg-type]
        pass


@pytest.mark.strategies(*REPRESENTATIVE)
def test_destinations_of_reductions(strategy: Any) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(()))
    with strategy.scope():
        for destinations in ("CPU:99", "", [], None, 3.5):
            with refused((ValueError, TypeError)):  # type: ignore[arg-type]
                strategy.extended.reduce_to("SUM", value, destinations)
        with refused((ValueError, TypeError)):  # type: ignore[arg-type]
            strategy.extended.batch_reduce_to("SUM", [(value,)])
        assert float(strategy.extended.reduce_to("SUM", value, "CPU:0")) == 2.0


@pytest.mark.strategies(*REPRESENTATIVE)
def test_x6_update_with_per_replica_arguments(strategy: Any) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(()))
    with strategy.scope():
        v = rx.Variable(1.0)
        with refused(ValueError, "reduce_to"):
            strategy.extended.update(v, lambda v, x: v.assign(x), args=(value,))
        with refused((TypeError, ValueError)):  # type: ignore[arg-type]
            strategy.extended.update(jnp.ones(()), lambda v: v)
    assert float(v) == 1.0


@pytest.mark.strategies(*REPRESENTATIVE)
def test_per_replica_values_are_not_arrays(strategy: Any) -> None:
    value = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(2))
    for call in (
        lambda: value + 1,
        lambda: 1 * value,
        lambda: value @ value,
        lambda: -value,
        lambda: value[0],
        lambda: value < 1,
        lambda: float(value),
        lambda: np.asarray(value),
        lambda: jnp.asarray(value),
    ):
        with refused((TypeError, ValueError), "PerReplica"):  # type: ignore[arg-type]
            call()


# Traced values used as Python values.


def as_int(i: Any) -> Any:
    return int(i)


def as_bool(i: Any) -> Any:
    return 1 if i else 0


def as_condition(i: Any) -> Any:
    return 1 if i == 0 else 2


def as_index(i: Any) -> Any:
    return [10, 20][i]


def as_range(i: Any) -> Any:
    return sum(range(i))


def as_float(i: Any) -> Any:
    return float(i)


def as_numpy(i: Any) -> Any:
    return np.asarray(i) + 1


def as_shape(i: Any) -> Any:
    return jnp.ones((i,))


def as_item(i: Any) -> Any:
    return i.item()


@pytest.mark.strategies(*REPRESENTATIVE)
@pytest.mark.parametrize(
    "use",
    [as_int, as_bool, as_condition, as_index, as_range, as_float, as_numpy, as_shape, as_item],
    ids=lambda f: f.__name__,
)
def test_replica_id_as_a_python_value(strategy: Any, run: Any, use: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=SUM)

    def fn() -> Any:
        if run.executor != "threaded":
            v.assign_add(1.0)
        return use(rx.get_replica_context().replica_id_in_sync_group)

    if run.executor == "threaded":
        run(strategy, fn)
        return
    with refused(rx.errors.TracedValueError, r"jnp\.where.*strategy\.run"):
        run(strategy, fn)
    assert issubclass(rx.errors.TracedValueError, TypeError)
    assert float(v) == 0.0
    works(strategy, run)


@pytest.mark.parametrize(
    "use", [as_int, as_bool, as_index, as_numpy, as_item], ids=lambda f: f.__name__
)
def test_arguments_and_variables_as_python_values(use: Any) -> None:
    v = rx.Variable(1)
    with refused(rx.errors.TracedValueError, r"jnp\.where"):
        rx.function(lambda x: use(x))(jnp.asarray(1))
    with refused(rx.errors.TracedValueError, r"jnp\.where"):
        rx.function(lambda: use(v))()
    assert int(rx.function(lambda: v + 1)()) == 2


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_ragged_arguments_inside_a_function(strategy: Any) -> None:
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(1 + c.replica_id_in_sync_group)
    )

    @rx.function
    def inside() -> Any:
        return strategy.run(lambda x: x * 2, args=(ragged,))

    assert [p.shape for p in inside().values] == [(1,), (2,)]
    whole = rx.function(lambda x: strategy.run(lambda x: x * 2, args=(x,)))
    assert [p.shape for p in whole(ragged).values] == [(1,), (2,)]


@pytest.mark.strategies(*REPRESENTATIVE)
def test_t11_unequal_numbers_of_merge_calls(strategy: Any) -> None:
    for lacking in (0, 1):

        def fn(lacking: int = lacking) -> Any:
            context = rx.get_replica_context()
            if int(context.replica_id_in_sync_group) != lacking:
                return context.all_reduce("SUM", jnp.ones(()))
            return jnp.ones(())

        with refused(RuntimeError, "equally often"):
            strategy.run(fn)
    works(strategy, lambda s, f, args=(): s.run(f, args=args))


def test_merge_fn_must_be_callable(strategy: Any) -> None:
    with refused(TypeError, "callable"):
        strategy.run(lambda: rx.get_replica_context().merge_call(3))
