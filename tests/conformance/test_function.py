"""`rx.function`: signatures, state, nested JAX code, donation, threads (S16, S29, S36, T19-T30)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from worker_groups import local_ids, replica_results

import replicax as rx

MIRRORED = ("mirrored_2", "virtual_2", "central_2", "tpu_2")


# Signatures.


def test_arrays_are_told_apart_by_shape_and_dtype_only() -> None:
    traces = []

    @rx.function
    def double(x: Any) -> Any:
        traces.append(x.shape)
        return x * 2

    for value in (0.0, 1.0, 2.0):
        np.testing.assert_array_equal(
            double(jnp.full(3, value, jnp.float32)), np.full(3, 2 * value)
        )
    assert len(traces) == 1
    double(np.ones(3, np.float32))
    assert len(traces) == 1
    double(jnp.ones(4))
    double(jnp.ones(3, jnp.int32))
    assert len(traces) == 3
    double(jnp.ones(4)), double(jnp.ones(3)), double(jnp.ones(3, jnp.int32))
    assert len(traces) == 3 == double.experimental_get_tracing_count()


def test_python_values_are_constants() -> None:
    seen = []

    @rx.function
    def scale(x: Any, factor: Any, is_negative: bool = False) -> Any:
        seen.append((factor, is_negative))
        assert isinstance(factor, int | float | str)
        return -x * factor if is_negative else x * factor

    x = jnp.asarray(2.0)
    assert float(scale(x, 3)) == 6.0
    assert float(scale(x, 3)) == 6.0
    assert float(scale(x, 4)) == 8.0
    assert float(scale(x, 3, True)) == -6.0
    assert float(scale(x, 3, is_negative=True)) == -6.0
    assert float(scale(x, 3)) == 6.0
    assert seen[:3] == [(3, False), (4, False), (3, True)]


def test_equal_python_values_of_different_types_are_different_constants() -> None:
    kinds = []

    @rx.function
    def kind(value: Any) -> Any:
        kinds.append(type(value))
        return jnp.asarray(value)

    assert kind(1).dtype == jnp.int32
    assert kind(1.0).dtype == jnp.float32
    assert kind(True).dtype == jnp.bool_
    assert kinds == [int, float, bool]
    assert np.signbit(kind(-0.0)) and not np.signbit(kind(0.0))


def test_nan_argument_does_not_retrace() -> None:
    @rx.function
    def same(value: float) -> Any:
        return jnp.asarray(value)

    assert np.isnan(same(float("nan"))) and np.isnan(same(float("nan")))
    assert same.experimental_get_tracing_count() == 1


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "central_2", "tpu_2", "minimal_2")
def test_per_replica_arguments_do_not_retrace(strategy: Any) -> None:
    traces = []

    @rx.function
    def step(x: Any) -> Any:
        def fn(x: Any) -> Any:
            traces.append(1)
            return x + 1

        return strategy.reduce("SUM", strategy.run(fn, args=(x,)), axis=0)

    n = strategy.num_replicas_in_sync
    for offset in range(5):
        x = strategy.experimental_distribute_values_from_function(
            lambda c, o=offset: jnp.full(3, 1.0 * c.replica_id_in_sync_group + o)
        )
        expected = 3 * sum(i + offset + 1 for i in range(n))
        assert float(step(x)) == expected
    # A result of a run as the next argument is the same kind of value.
    for _ in range(3):
        x = strategy.run(rx.function(lambda x: x * 1), args=(x,))
        assert float(step(x)) == expected
    assert len(traces) == 1


@pytest.mark.every_strategy
def test_t19_no_further_traces(strategy: Any) -> None:
    calls = []

    def fn(x: Any) -> Any:
        calls.append(1)
        return x

    compiled = rx.function(fn)
    outer = rx.function(lambda x: strategy.run(fn, args=(x,)))
    for _ in range(10):
        strategy.run(compiled, args=(jnp.ones(2),))
        outer(jnp.ones(2))
    assert len(calls) <= 2 * strategy.num_replicas_in_sync


def test_config_changes_retrace() -> None:
    @rx.function
    def zeros() -> Any:
        return jnp.zeros((), float)

    assert zeros().dtype == jnp.float32
    with jax.enable_x64(True):
        assert zeros().dtype == jnp.float64
    assert zeros().dtype == jnp.float32
    assert zeros.experimental_get_tracing_count() == 2
    assert "settings of JAX" in zeros.explain_traces()


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device", "central_2")
def test_x64_holds_inside_run(strategy: Any, run: Any) -> None:
    with jax.enable_x64(True):
        result = run(strategy, lambda: jnp.zeros((), float) + 1)
    for value in replica_results(strategy, result):
        assert value.dtype == jnp.float64


def test_scope_changes_retrace() -> None:
    one, other = rx.OneDeviceStrategy("CPU:0"), rx.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def replicas() -> Any:
        return jnp.asarray(rx.get_strategy().num_replicas_in_sync)

    assert int(replicas()) == 1
    with other.scope():
        assert int(replicas()) == 2
    with one.scope():
        assert int(replicas()) == 1
    with other.scope():
        assert int(replicas()) == 2
    assert replicas.experimental_get_tracing_count() == 3


@pytest.mark.slow
def test_a_new_strategy_is_not_taken_for_a_dead_one() -> None:
    @rx.function
    def replicas() -> Any:
        return jnp.asarray(rx.get_strategy().num_replicas_in_sync)

    for i in range(20):
        count = 1 + i % 3
        strategy = rx.MirroredStrategy([f"CPU:{d}" for d in range(count)])
        with strategy.scope():
            assert int(replicas()) == count
        del strategy
        gc.collect()


def test_explain_traces_names_the_argument() -> None:
    @rx.function
    def fn(x: Any, factor: int) -> Any:
        return x * factor

    fn(jnp.ones(3), 1), fn(jnp.ones(4), 1), fn(jnp.ones(4), 2)
    text = fn.explain_traces()
    assert "fn was traced 3 times" in text
    assert "argument 0: float32[3] became float32[4]" in text
    assert "argument 1: 1 became 2" in text


def test_explain_traces_of_a_function_that_run_compiled() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    fn = rx.function(lambda x: x)
    strategy.run(fn, args=(jnp.ones(2),))
    strategy.run(fn, args=(jnp.ones(3),))
    strategy.run(fn, args=(jnp.ones(3),))
    assert fn.experimental_get_tracing_count() == 2
    assert "float32[2] became float32[3]" in fn.explain_traces()


def test_weak_types_are_kept() -> None:
    @rx.function
    def add(x: Any) -> Any:
        return x + jnp.ones((), jnp.bfloat16)

    assert add(jnp.asarray(1.0)).dtype == (jnp.asarray(1.0) + jnp.ones((), jnp.bfloat16)).dtype
    assert add(jnp.asarray(1.0, jnp.float32)).dtype == jnp.float32


def test_unhashable_argument_is_explained() -> None:
    class Odd:
        __hash__ = None  # type: ignore[assignment]

    fn = rx.function(lambda x: 1)
    with pytest.raises(rx.errors.ArgumentTypeError, match="hashable"):
        fn(Odd())


@dataclasses.dataclass
class Plain:
    """A class that JAX does not know."""

    loss: Any
    step: int = 0


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_results_that_would_carry_tracers_out_are_refused(strategy: Any) -> None:
    def replica() -> Plain:
        return Plain(rx.get_replica_context().replica_id_in_sync_group + 1.0)

    functions = {
        "function": lambda: Plain(jnp.ones(2) * 2),
        "nest": lambda: {"a": [Plain({"loss": [jnp.ones(2) * 2]})]},
        "object in object": lambda: Plain(Plain(jnp.ones(2) * 2)),
        "run": lambda: strategy.run(replica),
    }
    for fn in functions.values():
        with pytest.raises(TypeError, match=r"Plain is none.*'loss'.*register_dataclass"):
            rx.function(fn)()
    with pytest.raises(TypeError, match="Plain is none"):
        strategy.run(rx.function(replica))
    # Eagerly there is no trace, and what belongs to a trace around is no result of this one.
    assert all(
        float(p.loss) >= 1.0 for p in strategy.experimental_local_results(strategy.run(replica))
    )

    def around(x: Any) -> Any:
        plain = Plain(x * 2)
        return strategy.run(lambda: plain).loss

    np.testing.assert_array_equal(rx.function(around)(jnp.ones(2)), np.full(2, 2.0))
    assert rx.function(lambda: Plain(3.0))() == Plain(3.0)


def test_not_callable_is_refused() -> None:
    with pytest.raises(TypeError, match="needs a function"):
        rx.function(3)  # type: ignore[call-overload]


# input_signature.


def test_input_signature_with_an_open_dimension() -> None:
    @rx.function(input_signature=[rx.TensorSpec((None, 2), jnp.float32)])
    def total(x: Any) -> Any:
        return x.sum()

    assert float(total(jnp.ones((3, 2)))) == 6.0
    assert float(total(jnp.ones((5, 2)))) == 10.0
    assert float(total(np.ones((1, 2), np.float32))) == 2.0
    assert float(total([[1.0, 2.0]])) == 3.0
    with pytest.raises(ValueError, match=r"\(None, 2\)"):
        total(jnp.ones((3, 3)))
    with pytest.raises(ValueError, match="float32"):
        total(jnp.ones((3, 2), jnp.int32))
    with pytest.raises(ValueError, match="shape"):
        total(jnp.ones(2))
    assert float(total(jnp.ones((3, 2)))) == 6.0


def test_an_input_signature_of_a_64_bit_type_takes_what_jax_makes_of_such_arrays() -> None:
    @rx.function(input_signature=[rx.TensorSpec((None,), np.int64)])
    def double(x: Any) -> Any:
        return x * 2

    numbers = np.arange(3, dtype=np.int64)
    assert double(numbers).tolist() == double(jnp.asarray(numbers)).tolist() == [0, 2, 4]
    with pytest.raises(rx.errors.InvalidArgumentError, match="type"):
        double(numbers.astype(np.float64))


def test_input_signature_turns_python_numbers_into_arrays() -> None:
    @rx.function(input_signature=[rx.TensorSpec((), jnp.float32), rx.TensorSpec((), jnp.int32)])
    def product(x: Any, n: Any) -> Any:
        assert isinstance(x, jax.Array) and isinstance(n, jax.Array)
        return x * n

    for i in range(5):
        assert float(product(float(i), i)) == i * i
        assert float(product(n=i, x=float(i))) == i * i
    assert product.experimental_get_tracing_count() == 1


def test_input_signature_counts_arguments() -> None:
    @rx.function(input_signature=[rx.TensorSpec((), jnp.float32)])
    def one(x: Any) -> Any:
        return x

    with pytest.raises(TypeError, match="1 argument"):
        one(1.0, 2.0)
    with pytest.raises(TypeError):
        one()
    with pytest.raises(TypeError):
        one(y=1.0)
    assert float(one(1.0)) == 1.0


def test_input_signature_of_a_structure() -> None:
    spec = {"x": rx.TensorSpec((None,), jnp.float32), "y": [rx.TensorSpec((), jnp.int32)]}

    @rx.function(input_signature=[spec])
    def fn(batch: Any) -> Any:
        return batch["x"].sum() + batch["y"][0]

    assert float(fn({"x": jnp.ones(3), "y": [2]})) == 5.0
    with pytest.raises(ValueError, match="structure"):
        fn({"x": jnp.ones(3), "y": [2, 3]})


def test_input_signature_of_a_method() -> None:
    class Model:
        @rx.function(input_signature=[rx.TensorSpec((None,), jnp.float32)])
        def __call__(self, x: Any) -> Any:
            return x.sum()

        @rx.function(input_signature=[rx.TensorSpec((None,), jnp.float32)])
        def step(self, x: Any) -> Any:
            return x.sum()

    assert float(Model().step(jnp.ones(3))) == 3.0
    assert float(Model().step([1.0])) == 1.0
    assert float(Model()(jnp.ones(3))) == 3.0


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device", "central_2")
def test_input_signature_under_run(strategy: Any) -> None:
    @rx.function(input_signature=[rx.TensorSpec((None,), jnp.float32)])
    def fn(x: Any) -> Any:
        return x * 2

    x = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.full(2, float(c.replica_id_in_sync_group))
    )
    result = strategy.run(fn, args=(x,))
    values = replica_results(strategy, result)
    np.testing.assert_array_equal(np.stack(values), [[2.0 * i] * 2 for i in range(len(values))])
    bad = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="shape"):
        strategy.run(fn, args=(bad,))


# Arguments and results.


class Point(NamedTuple):
    x: Any
    y: Any


class Bag(dict):  # type: ignore[type-arg]
    """A dict with an attribute."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a"], meta_fields=["tag"])
@dataclasses.dataclass
class Record:
    a: Any
    tag: str


def test_s24_structures_pass_through() -> None:
    @rx.function
    def fn(point: Point, *rest: Any, record: Record, **more: Any) -> Any:
        bag = Bag(x=point.x + 1)
        return {
            "point": Point(point.y, point.x),
            "rest": [r * 2 for r in rest],
            "record": Record(record.a + 1, record.tag),
            "bag": bag,
            "ordered": collections.OrderedDict(b=point.x, a=point.y),
            "none": None,
            "text": "text",
            "more": (more["z"],),
        }

    out = fn(
        Point(jnp.asarray(1.0), jnp.asarray(2.0)),
        jnp.asarray(3.0),
        4,
        record=Record(jnp.asarray(5.0), "tag"),
        z=jnp.asarray(6.0),
    )
    assert isinstance(out["point"], Point) and float(out["point"].x) == 2.0
    assert [float(r) for r in out["rest"]] == [6.0, 8.0]
    assert isinstance(out["record"], Record)
    assert (float(out["record"].a), out["record"].tag) == (6.0, "tag")
    assert type(out["bag"]) is Bag and float(out["bag"]["x"]) == 2.0
    assert list(out["ordered"]) == ["b", "a"]
    assert type(out["ordered"]) is collections.OrderedDict
    assert out["none"] is None and out["text"] == "text"
    assert float(out["more"][0]) == 6.0


def test_results_of_later_calls_do_not_change_earlier_ones() -> None:
    @rx.function
    def fn(x: Any) -> Any:
        return Bag(x=x, all=collections.defaultdict(list, y=x * 2))

    first = fn(jnp.asarray(1.0))
    second = fn(jnp.asarray(2.0))
    assert first["all"].default_factory is list
    assert float(first["x"]) == 1.0 and float(first["all"]["y"]) == 2.0
    assert float(second["x"]) == 2.0 and float(second["all"]["y"]) == 4.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2")
def test_s24_structures_of_run_results(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        return Bag(x=[x, (None, "s")], point=Point(x * 2, 3))

    out = run(strategy, fn, args=(jnp.asarray(1.0),))
    assert type(out) is Bag and isinstance(out["point"], Point)
    assert out["x"][1] == (None, "s")
    assert int(out["point"].y) == 3
    for value in replica_results(strategy, out["point"].x):
        assert float(value) == 2.0


def test_keyword_order_does_not_matter() -> None:
    @rx.function
    def fn(a: Any = 0, b: Any = 0) -> Any:
        return a - b

    one, two = jnp.asarray(1.0), jnp.asarray(2.0)
    assert float(fn(a=one, b=two)) == -1.0
    assert float(fn(b=two, a=one)) == -1.0
    assert float(fn(b=one, a=two)) == 1.0


def test_dict_arguments_in_another_order() -> None:
    @rx.function
    def fn(d: Any) -> Any:
        return d["a"] - d["b"]

    one, two = jnp.asarray(1.0), jnp.asarray(2.0)
    assert float(fn({"a": one, "b": two})) == -1.0
    assert float(fn({"b": two, "a": one})) == -1.0
    assert float(fn({"b": one, "a": two})) == 1.0


def test_variable_as_argument_is_that_variable() -> None:
    v, w = rx.Variable(1.0), rx.Variable(10.0)

    @rx.function
    def bump(variable: Any) -> Any:
        return variable.assign_add(1.0)

    assert bump(v) is v
    assert bump(w) is w
    bump(v)
    assert (float(v), float(w)) == (3.0, 11.0)


def test_closures_over_arrays_are_constants_of_the_program() -> None:
    table = jnp.arange(5.0)
    mask = np.asarray([1.0, 0, 1, 0, 1], np.float32)

    @rx.function
    def fn(x: Any) -> Any:
        return (table * mask * x).sum()

    assert float(fn(jnp.asarray(1.0))) == 6.0
    assert float(fn(jnp.asarray(2.0))) == 12.0


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "central_2", "one_device", "tpu_2")
def test_closure_over_an_array_inside_run(strategy: Any, run: Any) -> None:
    table = jnp.arange(4.0)
    value = float(strategy.num_replicas_in_sync)
    result = run(strategy, lambda x: (table * x).sum(), args=(jnp.asarray(value),))
    for part in replica_results(strategy, result):
        assert float(part) == 6.0 * value


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_closure_over_a_per_replica_value(strategy: Any) -> None:
    made_eagerly = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.full(2, 1.0 + c.replica_id_in_sync_group)
    )
    made_by_run = strategy.run(lambda x: x * 1, args=(made_eagerly,))
    made_compiled = strategy.run(rx.function(lambda x: x * 1), args=(made_eagerly,))
    for value in (made_eagerly, made_by_run, made_compiled):

        @rx.function
        def step(value: Any = None, held: Any = value) -> Any:
            return strategy.reduce("SUM", strategy.run(lambda x: x * 2, args=(held,)), axis=0)

        assert float(step()) == 12.0
        assert float(step()) == 12.0


# State.


@pytest.mark.every_strategy
def test_s16_state_changes_as_in_eager_code(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])

    def change(x: Any) -> Any:
        v.assign_add(x)
        first = v * 1.0
        v.assign(v * 2.0)
        return first, v.read_value()

    compiled = rx.function(change)
    for i in range(3):
        before = np.asarray(v)
        first, second = compiled(jnp.full(2, float(i)))
        np.testing.assert_array_equal(first, before + i)
        np.testing.assert_array_equal(second, 2 * (before + i))
        np.testing.assert_array_equal(np.asarray(v), 2 * (before + i))
    before = np.asarray(v)
    change(jnp.ones(2))
    np.testing.assert_array_equal(np.asarray(v), 2 * (before + 1))
    compiled(jnp.ones(2))
    np.testing.assert_array_equal(np.asarray(v), 2 * (2 * (before + 1) + 1))


def test_eager_writes_between_calls_are_seen(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    read = rx.function(lambda: v * 1.0)
    for i in range(4):
        v.assign(float(i))
        assert float(read()) == float(i)
    for copy in strategy.experimental_local_results(v):
        copy.assign(7.0)
    assert float(read()) == 7.0


def test_t20_side_effects_happen_without_a_result(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def step() -> None:
        strategy.run(lambda: v.assign_add(1.0))

    assert step() is None
    assert float(v) == 1.0
    step()
    assert float(v) == 2.0


@pytest.mark.parametrize("kind", ["constant", "array", "traced", "callable"])
def test_t30_variables_created_on_the_first_call(kind: str) -> None:
    made: list[Any] = []
    starts = {
        "constant": lambda x: 2.0,
        "array": lambda x: jnp.asarray(2.0),
        "traced": lambda x: x * 2,
        "callable": lambda x: lambda: jnp.asarray(2.0),
    }

    @rx.function
    def count(x: Any) -> Any:
        if not made:
            made.append(rx.Variable(starts[kind](x), name="made"))
        return made[0].assign_add(x) * 1.0

    assert float(count(jnp.asarray(1.0))) == 3.0
    assert float(made[0]) == 3.0
    assert float(count(jnp.asarray(1.0))) == 4.0
    assert float(count(jnp.asarray(10.0))) == 14.0
    assert float(made[0]) == 14.0
    assert made[0].name == "made"
    assert count.experimental_get_tracing_count() == 1


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize(
    ("kind", "synchronization"),
    [("constant", "AUTO"), ("traced", "AUTO"), ("callable", "AUTO"), ("traced", "ON_READ")],
)
def test_s36_t25_variables_created_inside_run(
    strategy: Any, run: Any, kind: str, synchronization: str
) -> None:
    made: list[Any] = []
    starts = {
        "constant": lambda x: 2.0,
        "traced": lambda x: x * 2,
        "callable": lambda x: lambda: jnp.asarray(2.0),
    }

    def fn(x: Any) -> Any:
        if rx.get_replica_context() is not None and len(made) < 1:
            variable = rx.Variable(
                starts[kind](x),
                name="made",
                synchronization=rx.VariableSynchronization[synchronization],
                aggregation=rx.VariableAggregation.SUM,
            )
            if run.executor != "threaded" or len(seen) == len(local_ids(strategy)) - 1:
                made.append(variable)
            seen.append(variable)
        variable = seen[0]
        variable.assign_add(x)
        return variable * 1.0

    seen: list[Any] = []
    n = strategy.num_replicas_in_sync
    is_shared = strategy is not rx.get_strategy() and synchronization == "AUTO"
    result = run(strategy, fn, args=(jnp.asarray(1.0),))
    expected = 2.0 + (n if is_shared else 1.0)
    values = replica_results(strategy, result)
    assert [float(v) for v in values] == [expected] * n
    assert len({id(v) for v in seen}) == 1
    assert float(replica_results(strategy, seen[0])[0]) == expected


def test_random_initial_value_is_drawn_once() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    made: list[Any] = []

    @rx.function
    def step(key: Any) -> Any:
        def fn(key: Any) -> Any:
            if not made:
                made.append(rx.Variable(jax.random.normal(key, (3,)), name="w"))
            return made[0] * 1.0

        return strategy.run(fn, args=(key,))

    first = step(jax.random.PRNGKey(0))
    copies = [np.asarray(c) for c in replica_results(strategy, made[0])]
    np.testing.assert_array_equal(copies[0], copies[1])
    second = step(jax.random.PRNGKey(1))
    np.testing.assert_array_equal(np.asarray(first.values[0]), np.asarray(second.values[1]))
    np.testing.assert_allclose(copies[0], jax.random.normal(jax.random.PRNGKey(0), (3,)), rtol=1e-6)


def test_creation_on_a_later_trace_is_refused() -> None:
    @rx.function
    def leaky(x: Any) -> Any:
        return rx.Variable(x.sum(), name="leak") + x.sum()

    assert float(leaky(jnp.ones(2))) == 4.0
    with pytest.raises(ValueError, match="first call only"):
        leaky(jnp.ones(3))
    assert float(leaky(jnp.ones(2))) == 4.0


def test_creation_of_a_constant_on_a_later_trace_is_refused() -> None:
    @rx.function
    def leaky(x: Any) -> Any:
        return rx.Variable(1.0, name="leak") + x.sum()

    assert float(leaky(jnp.ones(2))) == 3.0
    with pytest.raises(ValueError, match="first call only"):
        leaky(jnp.ones(3))


def test_a_retrace_may_use_the_variable_of_the_first_trace() -> None:
    made: list[Any] = []

    @rx.function
    def count(x: Any) -> Any:
        if not made:
            made.append(rx.Variable(0.0))
        return made[0].assign_add(x.sum()) * 1.0

    assert float(count(jnp.ones(2))) == 2.0
    assert float(count(jnp.ones(3))) == 5.0
    assert float(count(jnp.ones(2))) == 7.0


def test_variable_created_from_another_created_variable() -> None:
    made: list[Any] = []

    @rx.function
    def fn(x: Any) -> Any:
        if not made:
            first = rx.Variable(x, name="first")
            made.extend([first, rx.Variable(first * 2, name="second")])
        made[1].assign_add(made[0])
        return made[1] * 1.0

    assert float(fn(jnp.asarray(1.0))) == 3.0
    assert float(fn(jnp.asarray(5.0))) == 4.0
    assert (float(made[0]), float(made[1])) == (1.0, 4.0)


def test_nested_functions_share_one_trace() -> None:
    v = rx.Variable(0.0)
    inner_calls = []

    @rx.function
    def inner(x: Any) -> Any:
        inner_calls.append(1)
        v.assign_add(x)
        return v * 1.0

    @rx.function
    def outer(x: Any) -> Any:
        return inner(x), inner(x * 10)

    first, second = outer(jnp.asarray(1.0))
    assert (float(first), float(second)) == (1.0, 11.0)
    first, second = outer(jnp.asarray(1.0))
    assert (float(first), float(second)) == (12.0, 22.0)
    calls = len(inner_calls)
    assert float(inner(jnp.asarray(1.0))) == 23.0
    assert len(inner_calls) == calls + 1


def test_decorator_in_a_class_body() -> None:
    class Counter:
        def __init__(self, start: float) -> None:
            self.total = rx.Variable(start)

        @rx.function
        def add(self, x: Any) -> Any:
            """Adds."""
            return self.total.assign_add(x) * 1.0

    one, other = Counter(0.0), Counter(100.0)
    assert float(one.add(jnp.asarray(1.0))) == 1.0
    assert float(other.add(jnp.asarray(1.0))) == 101.0
    assert float(one.add(jnp.asarray(1.0))) == 2.0
    assert one.add is one.add
    assert one.add.experimental_get_tracing_count() == 1
    assert Counter.add.__doc__ == "Adds."


def test_methods_survive_inheritance_and_super() -> None:
    class Base:
        @rx.function
        def step(self, x: Any) -> Any:
            return x + 1

    class Derived(Base):
        @rx.function
        def step(self, x: Any) -> Any:
            return super().step(x) * 10

    model = Derived()
    assert float(model.step(jnp.asarray(1.0))) == 20.0
    assert float(model.step(jnp.asarray(2.0))) == 30.0
    assert float(Base().step(jnp.asarray(1.0))) == 2.0


def test_a_method_does_not_keep_its_instance_alive() -> None:
    import weakref

    class Model:
        @rx.function
        def step(self, x: Any) -> Any:
            return x

    model = Model()
    model.step(jnp.asarray(1.0))
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_a_function_keeps_captured_variables_alive() -> None:
    def make() -> Any:
        v = rx.Variable(3.0)
        return rx.function(lambda: v.assign_add(1.0) * 1.0)

    fn = make()
    gc.collect()
    assert float(fn()) == 4.0
    gc.collect()
    assert float(fn()) == 5.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_exceptions_leave_state_unchanged(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
        w = rx.Variable(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )

    class Oops(Exception):
        pass

    def fn(x: Any, is_bad: bool) -> Any:
        if is_bad and run.executor == "threaded":
            raise Oops
        v.assign_add(x)
        w.assign_add(x)
        if is_bad:
            raise Oops
        return v * 1.0

    with pytest.raises(Oops):
        run(strategy, fn, args=(jnp.asarray(1.0), True))
    assert (float(v), float(w)) == (1.0, 1.0)
    run(strategy, fn, args=(jnp.asarray(1.0), False))
    assert (float(v), float(w)) == (2.0, 2.0)
    assert not rx.has_strategy()


def test_runtime_errors_leave_state_usable() -> None:
    v = rx.Variable(1.0)

    def check(x: Any) -> Any:
        if x > 1:
            raise ValueError("too much")
        return x

    @rx.function
    def step(x: Any) -> Any:
        y = io_callback(check, jax.ShapeDtypeStruct((), jnp.float32), x)
        v.assign_add(y)
        return y

    step(jnp.asarray(1.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="too much"):
        jax.block_until_ready((step(jnp.asarray(2.0)), v.value()))
    v.assign(5.0)
    step(jnp.asarray(1.0))
    assert float(v) == 6.0


# Callbacks.


def test_debug_print_inside(capfd: pytest.CaptureFixture[str]) -> None:
    v = rx.Variable(1.0)

    @rx.function
    def step(x: Any) -> Any:
        jax.debug.print("x is {x}, v is {v}", x=x, v=v.read_value())
        return v.assign_add(x) * 1.0

    for i in range(3):
        step(jnp.asarray(float(i)))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert "x is 2.0, v is 2.0" in out
    assert out.count("x is") == 3
    assert float(v) == 4.0


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callback_inside(ordered: bool) -> None:
    v = rx.Variable(1.0)
    seen: list[float] = []

    @rx.function
    def step(x: Any) -> Any:
        io_callback(lambda y: seen.append(float(y)), None, v * x, ordered=ordered)
        v.assign_add(1.0)
        return x

    for _ in range(4):
        step(jnp.asarray(10.0))
    jax.effects_barrier()
    assert sorted(seen) == [10.0, 20.0, 30.0, 40.0]
    if ordered:
        assert seen == sorted(seen)
    assert float(v) == 5.0


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_callbacks_inside_run(strategy: Any) -> None:
    seen: list[float] = []
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def step(x: Any) -> Any:
        def fn(x: Any) -> None:
            mine = rx.get_replica_context().replica_id_in_sync_group
            jax.debug.callback(lambda y: seen.append(float(y)), v * x + 0 * mine)
            v.assign_add(x)

        strategy.run(fn, args=(x,))

    for _ in range(3):
        step(jnp.asarray(1.0))
    jax.effects_barrier()
    assert sorted(seen) == sorted([1.0, 3.0, 5.0] * len(local_ids(strategy)))
    assert float(v) == 7.0


# Variables inside the bodies of JAX's own control flow.

SHARED: dict[str, Any] = {}


def scan_body(carry: Any, x: Any) -> Any:
    return carry + SHARED["v"] * x, None


def true_body(x: Any) -> Any:
    return x * SHARED["v"].read_value()


def false_body(x: Any) -> Any:
    return -x * SHARED["v"].read_value()


def while_cond(state: Any) -> Any:
    return state[0] < 3


def while_body(state: Any) -> Any:
    return state[0] + 1, state[1] + SHARED["v"].read_value()


@jax.jit
def jitted_body(x: Any) -> Any:
    return x * SHARED["v"].read_value()


@jax.checkpoint
def checkpointed_body(x: Any) -> Any:
    return x * SHARED["v"].read_value()


def with_scan(x: Any) -> Any:
    return jax.lax.scan(scan_body, jnp.zeros(()), jnp.stack([x, x]))[0] / 2


def with_cond(x: Any) -> Any:
    return jax.lax.cond(x > 0, true_body, false_body, x)


def with_while(x: Any) -> Any:
    return jax.lax.while_loop(while_cond, while_body, (0, jnp.zeros(())))[1] / 3 * x


def with_jit(x: Any) -> Any:
    return jitted_body(x)


def with_vmap(x: Any) -> Any:
    return jax.vmap(true_body)(x[None])[0]


def with_fori(x: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, y: y + true_body(x), jnp.zeros(())) / 2


def with_map(x: Any) -> Any:
    return jax.lax.map(true_body, x[None])[0]


def with_switch(x: Any) -> Any:
    return jax.lax.switch(0, [true_body, false_body], x)


def with_checkpoint(x: Any) -> Any:
    return checkpointed_body(x)


def with_jit_in_scan(x: Any) -> Any:
    def body(carry: Any, y: Any) -> Any:
        return carry + jitted_body(y), None

    return jax.lax.scan(body, jnp.zeros(()), x[None])[0]


BODIES = [
    with_scan,
    with_cond,
    with_while,
    with_jit,
    with_vmap,
    with_fori,
    with_map,
    with_switch,
    with_checkpoint,
    with_jit_in_scan,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_reads_in_nested_bodies_are_never_stale(body: Any) -> None:
    v = SHARED["v"] = rx.Variable(2.0)
    one = jnp.asarray(1.0)

    @rx.function
    def twice(x: Any) -> Any:
        first = body(x)
        v.assign(v * 10.0)
        return first, body(x)

    @rx.function
    def once(x: Any) -> Any:
        return body(x)

    first, second = twice(one)
    assert (float(first), float(second)) == (2.0, 20.0)
    first, second = twice(one)
    assert (float(first), float(second)) == (20.0, 200.0)
    assert float(once(one)) == 200.0
    v.assign(3.0)
    assert float(once(one)) == 3.0
    # Another variable under the same body.
    w = SHARED["v"] = rx.Variable(7.0)
    fresh = rx.function(lambda x: body(x))
    assert float(fresh(one)) == 7.0
    w.assign(8.0)
    assert float(fresh(one)) == 8.0
    assert float(once(one)) == 8.0


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "one_device", "tpu_2")
@pytest.mark.parametrize(
    "body", [with_scan, with_cond, with_while, with_jit, with_map], ids=lambda f: f.__name__
)
def test_reads_in_nested_bodies_inside_run(strategy: Any, body: Any) -> None:
    with strategy.scope():
        v = SHARED["v"] = rx.Variable(2.0, aggregation=rx.VariableAggregation.MEAN)

    def fn(x: Any) -> Any:
        first = body(x)
        v.assign(v * 10.0)
        return first, body(x)

    @rx.function
    def step(x: Any) -> Any:
        return strategy.run(fn, args=(x,))

    for value in (2.0, 20.0):
        first, second = step(jnp.asarray(1.0))
        for a in replica_results(strategy, first):
            assert float(a) == value
        for b in replica_results(strategy, second):
            assert float(b) == value * 10
    v.assign(5.0)
    first, second = strategy.run(rx.function(fn), args=(jnp.asarray(1.0),))
    assert float(replica_results(strategy, first)[0]) == 5.0
    assert float(replica_results(strategy, second)[0]) == 50.0


EAGER_BODY = """
import jax, jax.numpy as jnp
import replicax as rx
v = rx.Variable(2.0)
@jax.jit
def body(x):
    return x * v.read_value()
def scan_body(carry, x):
    return carry + v * x, None
one = jnp.asarray(1.0)
assert float(rx.function(lambda x: body(x))(one)) == 2.0
assert float(rx.function(lambda x: jax.lax.scan(scan_body, 0.0, x[None])[0])(one)) == 2.0
v.assign(3.0)
for bare in (lambda: body(one), lambda: jax.lax.scan(scan_body, 0.0, one[None])[0]):
    try:
        bare()
    except rx.errors.TracingError:
        continue
    raise SystemExit("an eager read in a nested body was neither refused")
"""


def test_reads_in_nested_bodies_in_eager_code_are_refused() -> None:
    """A body traced inside the first function of a process must not be cached for eager code."""
    done = subprocess.run(
        [sys.executable, "-c", EAGER_BODY], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_alternating_functions_with_one_body() -> None:
    v = SHARED["v"] = rx.Variable(1.0)
    w = rx.Variable(100.0)

    def pick(variable: Any) -> Any:
        def fn(x: Any) -> Any:
            SHARED["v"] = variable
            return with_scan(x) + with_jit(x)

        return rx.function(fn)

    first, second = pick(v), pick(w)
    for i in range(3):
        v.assign(float(i))
        assert float(first(jnp.asarray(1.0))) == 2.0 * i
        assert float(second(jnp.asarray(1.0))) == 200.0


def test_writes_inside_scan_are_refused() -> None:
    v = rx.Variable(0.0)

    @rx.function
    def step(xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            v.assign_add(x)
            return carry, None

        return jax.lax.scan(body, 0.0, xs)[0]

    with pytest.raises(rx.errors.TracingError, match="loop"):
        step(jnp.ones(3))
    assert float(v) == 0.0
    rx.function(lambda: v.assign_add(1.0))()
    assert float(v) == 1.0


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "cond", "checkpoint"])
def test_writes_inside_nested_transformations_are_refused(transform: str) -> None:
    v = rx.Variable(0.0)

    def write(x: Any) -> Any:
        v.assign_add(x)
        return x * 1.0

    applied = {
        "jit": lambda x: jax.jit(write)(x),
        "grad": lambda x: jax.grad(write)(x),
        "vmap": lambda x: jax.vmap(write)(x[None]),
        "cond": lambda x: jax.lax.cond(x > 0, write, write, x),
        "checkpoint": lambda x: jax.checkpoint(write)(x),
    }[transform]
    with pytest.raises(rx.errors.TracingError, match=r"(?s)assign it afterwards|rx\.function"):
        rx.function(applied)(jnp.asarray(1.0))
    assert float(v) == 0.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=["jit", "grad", "vmap"])
def test_writes_under_bare_transformations_are_refused(strategy: Any, transform: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)

    def write(x: Any) -> Any:
        v.assign_add(x)
        return x * 1.0

    argument = jnp.ones(2) if transform is jax.vmap else jnp.asarray(1.0)
    with pytest.raises(rx.errors.TracingError, match=r"needs `rx\.function`"):
        transform(write)(argument)
    assert float(v) == 1.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("kind", ["read_value", "operator", "convert", "jnp", "component"])
def test_reads_under_bare_jit_are_refused(strategy: Any, kind: str) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    copy = strategy.experimental_local_results(v)[-1]
    read = {
        "read_value": lambda x: x * v.read_value(),
        "operator": lambda x: x * v,
        "convert": lambda x: x + jnp.asarray(v),
        "jnp": lambda x: jnp.add(x, v),
        "component": lambda x: x * copy,
    }[kind]
    with pytest.raises(rx.errors.TracingError, match=r"needs `rx\.function`.*Use `rx\.function`"):
        jax.jit(read)(jnp.asarray(1.0))
    assert float(rx.function(read)(jnp.asarray(1.0))) in (1.0, 2.0)


def test_reads_under_bare_grad_and_vmap_work() -> None:
    v = rx.Variable(3.0)
    assert float(jax.grad(lambda x: x * v.read_value())(2.0)) == 3.0
    np.testing.assert_array_equal(
        jax.vmap(lambda x: x * v.read_value())(jnp.arange(3.0)), [0, 3, 6]
    )
    v.assign(4.0)
    assert float(jax.grad(lambda x: x * v.read_value())(2.0)) == 4.0


def test_transformations_around_a_function() -> None:
    v = rx.Variable(3.0)

    @rx.function
    def f(x: Any) -> Any:
        return x * x * v.read_value()

    assert float(jax.grad(f)(2.0)) == 12.0
    np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0.0, 3.0, 12.0])
    v.assign(1.0)
    assert float(jax.grad(f)(2.0)) == 4.0
    np.testing.assert_array_equal(jax.vmap(f)(jnp.arange(3.0)), [0.0, 1.0, 4.0])
    assert float(f(jnp.asarray(2.0))) == 4.0
    value, grad = rx.value_and_grad(lambda: f(jnp.asarray(2.0)), v)()
    assert (float(value), float(grad)) == (4.0, 4.0)


def test_function_under_bare_jit() -> None:
    f = rx.function(lambda x: x + 1)
    assert float(jax.jit(lambda x: f(x))(jnp.asarray(1.0))) == 2.0
    v = rx.Variable(1.0)
    g = rx.function(lambda x: x + v.read_value())
    with pytest.raises(rx.errors.TracingError, match=r"rx\.function"):
        jax.jit(lambda x: g(x))(jnp.asarray(1.0))


def test_disable_jit_runs_python() -> None:
    v = rx.Variable(1.0)
    seen = []

    @rx.function
    def step(x: Any) -> Any:
        seen.append(float(x))
        if x > 1:
            v.assign_add(x)
        return v * 1.0

    with jax.disable_jit():
        assert float(step(jnp.asarray(2.0))) == 3.0
        assert float(step(jnp.asarray(1.0))) == 3.0
    assert seen == [2.0, 1.0]


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_disable_jit_under_run(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    n = strategy.num_replicas_in_sync

    def fn(x: Any) -> Any:
        v.assign_add(x)
        return rx.get_replica_context().all_reduce("SUM", x)

    @rx.function
    def outer(x: Any) -> Any:
        return strategy.run(fn, args=(x,))

    with jax.disable_jit():
        for call in (lambda x: strategy.run(rx.function(fn), args=(x,)), outer):
            result = call(jnp.asarray(2.0))
            assert float(replica_results(strategy, result)[0]) == 2.0 * n
    assert float(v) == 1.0 + 4.0 * n


def test_tracers_do_not_leak() -> None:
    v = rx.Variable(1.0)

    @rx.function
    def step(x: Any) -> Any:
        loss, grad = rx.value_and_grad(lambda: v * v * x, v)()
        v.assign_sub(grad * 0.1)
        return loss

    with jax.checking_leaks():
        step(jnp.asarray(1.0))
    assert float(v) == pytest.approx(0.8)


def test_jax_objects_as_results_and_arguments() -> None:
    key = jax.random.key(0)

    @rx.function
    def split(key: Any) -> Any:
        return jax.random.split(key)

    keys = split(key)
    np.testing.assert_array_equal(
        jax.random.key_data(keys), jax.random.key_data(jax.random.split(key))
    )


def test_empty_arrays() -> None:
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope() as strategy:
        v = rx.Variable(jnp.zeros((0, 3)))

    @rx.function
    def step(x: Any) -> Any:
        v.assign_add(jnp.zeros((0, 3)))
        return strategy.run(lambda x: x * 2, args=(x,))

    result = step(jnp.zeros((0, 2)))
    assert [x.shape for x in result.values] == [(0, 2)] * 2
    assert v.shape == (0, 3)


# Donation.


def test_a_held_value_survives_later_steps(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.zeros(1000))
    bump = rx.function(lambda: v.assign_add(jnp.ones(1000)))
    bump()
    held = [v.value(), v.read_value(), v[:], jnp.asarray(v)]
    parts = [c.value() for c in strategy.experimental_local_results(v)]
    as_numpy = np.asarray(v)
    for _ in range(3):
        bump()
    for array in [*held, *parts, as_numpy]:
        np.testing.assert_array_equal(array, np.ones(1000))
    np.testing.assert_array_equal(np.asarray(v), np.full(1000, 4.0))


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_the_value_of_a_written_variable_as_argument(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.ones(100))

    @rx.function
    def step(x: Any) -> Any:
        v.assign_add(x)
        return x.sum()

    for i in range(5):
        assert float(step(v.value())) == 100.0 * 2**i
    held = v.value()
    assert float(step(held)) == 3200.0
    assert float(step(held)) == 3200.0
    np.testing.assert_array_equal(held, np.full(100, 32.0))


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_two_variables_from_one_array(strategy: Any) -> None:
    start = jnp.zeros(100)
    with strategy.scope():
        v, w = rx.Variable(start), rx.Variable(start)

    @rx.function
    def step() -> None:
        v.assign_add(jnp.ones(100))
        w.assign_sub(jnp.ones(100))

    @rx.function
    def copy_over() -> None:
        v.assign(w)

    step()
    step()
    assert float(v[0]) == 2.0 and float(w[0]) == -2.0 and float(start[0]) == 0.0
    v.assign(w)
    step()
    assert float(v[0]) == -1.0 and float(w[0]) == -3.0
    copy_over()
    step()
    step()
    assert float(v[0]) == -1.0 and float(w[0]) == -5.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_a_function_that_swaps_and_returns_state(strategy: Any) -> None:
    with strategy.scope():
        v, w = rx.Variable(jnp.zeros(100)), rx.Variable(jnp.ones(100))

    @rx.function
    def swap() -> Any:
        old = v.read_value()
        v.assign(w)
        w.assign(old)
        return old, v.read_value()

    results = [swap() for _ in range(4)]
    for i, (old, new) in enumerate(results):
        np.testing.assert_array_equal(old, np.full(100, i % 2))
        np.testing.assert_array_equal(new, np.full(100, 1 - i % 2))


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_held_components_of_results_and_on_read_variables(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(
            jnp.zeros(100),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    @rx.function
    def step() -> Any:
        def fn() -> Any:
            v.assign_add(jnp.ones(100))
            return v.read_value()

        return strategy.run(fn)

    results = [step() for _ in range(3)]
    held = [c.value() for c in strategy.experimental_local_results(v)]
    total = v.read_value()
    step()
    for i, result in enumerate(results):
        for part in replica_results(strategy, result):
            np.testing.assert_array_equal(part, np.full(100, i + 1.0))
    for part in held:
        np.testing.assert_array_equal(part, np.full(100, 3.0))
    np.testing.assert_array_equal(total, np.full(100, 6.0))


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "tpu_2")
def test_per_replica_argument_survives(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.zeros(100), aggregation=rx.VariableAggregation.SUM)
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(100))

    @rx.function
    def step(x: Any) -> Any:
        strategy.run(lambda x: v.assign_add(x), args=(x,))

    for i in range(4):
        step(x)
        assert float(v[0]) == 2.0 * (i + 1)
    for part in x.values:
        np.testing.assert_array_equal(part, np.ones(100))


def test_a_deep_copied_variable_is_its_own() -> None:
    import copy

    for strategy in (rx.get_strategy(), rx.MirroredStrategy(["CPU:0", "CPU:1"])):
        with strategy.scope():
            v = rx.Variable(jnp.zeros(100))
        bump = rx.function(lambda v=v: v.assign_add(jnp.ones(100)))
        bump()
        w = copy.deepcopy(v)
        bump()
        rx.function(lambda w=w: w.assign_sub(jnp.ones(100)))()
        assert float(v[0]) == 2.0 and float(w[0]) == 0.0


def test_numpy_initial_value_is_copied() -> None:
    data = np.zeros(1024, np.float32)
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        v = rx.Variable(data)
    data[:] = 9.0
    assert float(v[0]) == 0.0
    rx.function(lambda: v.assign_add(jnp.ones(1024)))()
    assert data[0] == 9.0 and float(v[0]) == 1.0


# Threads.


def in_threads(count: int, work: Any) -> list[Any]:
    errors: list[BaseException] = []
    results: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def body(i: int) -> None:
        try:
            barrier.wait(30)
            results[i] = work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


@pytest.mark.one_process("threads take turns in an order of their own on each worker")
@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_calls_from_several_threads_lose_no_update(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0)
    traces = []

    @rx.function
    def count() -> Any:
        traces.append(1)
        return v.assign_add(1.0) * 1.0

    results = in_threads(4, lambda i: [float(count()) for _ in range(25)])
    assert float(v) == 100.0
    assert sorted(x for r in results for x in r) == [float(i + 1) for i in range(100)]
    assert len(traces) == 1


@pytest.mark.one_process("threads take turns in an order of their own on each worker")
@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_run_from_several_threads(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce("SUM", x)

    def work(i: int) -> Any:
        results = []
        for j in range(3):
            result = run(strategy, fn, args=(jnp.asarray(float(10 * i + j)),))
            results.append(float(replica_results(strategy, result)[-1]))
        return results

    for i, found in enumerate(in_threads(3, work)):
        assert found == [2.0 * (10 * i + j) for j in range(3)]


def test_different_signatures_from_several_threads() -> None:
    v = rx.Variable(0.0)

    @rx.function
    def total(x: Any) -> Any:
        v.assign_add(1.0)
        return x.sum()

    def work(i: int) -> Any:
        return [float(total(jnp.ones(1 + (i + j) % 4))) for j in range(8)]

    for i, found in enumerate(in_threads(4, work)):
        assert found == [1.0 + (i + j) % 4 for j in range(8)]
    assert float(v) == 32.0
    assert total.experimental_get_tracing_count() == 4


def test_first_call_creates_variables_once_in_all_threads() -> None:
    made: list[Any] = []

    @rx.function
    def count() -> Any:
        if not made:
            made.append(rx.Variable(0.0))
        return made[0].assign_add(1.0) * 1.0

    in_threads(4, lambda i: count())
    assert len(made) == 1
    assert float(made[0]) == 4.0


def test_eager_reads_while_a_compiled_step_runs() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(jnp.zeros(1000))
    bump = rx.function(lambda: v.assign_add(jnp.ones(1000)))

    def work(i: int) -> None:
        for _ in range(30):
            if i == 0:
                bump()
            else:
                value = np.asarray(v)
                assert value.min() == value.max()

    in_threads(2, work)
    assert float(v[0]) == 30.0
