"""run: what reaches the replicas, how often they run, what comes back (S19-S36, S40, T8-T23)."""

from __future__ import annotations

import _thread
import collections
import concurrent.futures
import contextvars
import dataclasses
import functools
import signal
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vocabulary import copies, num_copies, replica_values
from worker_groups import local_ids, replica_results, spans_workers

import replicax as rx
from replicax.values.regroup import regroup, select, select_mirrored

# One of each kind: one replica, several devices, several replicas on a device, one copy.
KINDS = ("default", "one_device", "mirrored_2", "virtual_2", "central_2")
SEVERAL = ("mirrored_2", "virtual_2", "central_2")


class Pair(NamedTuple):
    left: Any
    right: Any


class Record(dict[str, Any]):
    """A dict subclass."""


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "rest"], meta_fields=["tag"])
@dataclasses.dataclass
class Node:
    x: Any
    rest: Any
    tag: str = "t"


@dataclasses.dataclass
class Opaque:
    """Not registered: a leaf."""

    x: Any


def ids(strategy: Any, dtype: Any = jnp.float32) -> Any:
    """A distributed value that holds each replica's number."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(c.replica_id_in_sync_group, dtype)
    )


def on_each(strategy: Any, value: Any) -> list[Any]:
    """One plain value per replica, also where all replicas have one."""
    found = [_plain(r) for r in replica_results(strategy, value)]
    return found * strategy.num_replicas_in_sync if len(found) == 1 else found


def _plain(value: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, str) else np.asarray(x).tolist(), value)


def context() -> Any:
    return rx.get_replica_context()


# Arguments.


@pytest.mark.every_strategy
def test_s19_each_replica_gets_its_component_on_its_device(strategy: Any) -> None:
    seen: list[Any] = []

    def fn(w: Any) -> Any:
        seen.append((float(w), context().devices[0]))
        return w + 1

    result = strategy.run(fn, args=[ids(strategy)])
    n = strategy.num_replicas_in_sync
    assert [w for w, _ in seen] == local_ids(strategy)
    assert on_each(strategy, result) == [i + 1.0 for i in range(n)]
    if strategy is rx.get_strategy():
        return
    assert tuple(d for _, d in seen) == strategy.extended.worker_devices
    found = [next(iter(r.devices())) for r in strategy.experimental_local_results(result)]
    assert found == list(strategy.extended.layout.local_devices)


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_4", *SEVERAL)
def test_s19_new_arrays_live_on_the_replica_device(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda: jnp.ones(2) * 2)
    found = [next(iter(r.devices())) for r in strategy.experimental_local_results(result)]
    assert found == list(strategy.extended.layout.local_devices)


@pytest.mark.strategies("tpu_2", "minimal_2", *KINDS)
def test_s25_s26_nested_arguments_and_keywords(strategy: Any, run: Any) -> None:
    own = ids(strategy)
    plain = jnp.asarray([1.0, 2.0])
    kinds: list[Any] = []

    def fn(first: Any, *rest: Any, key: Any, other: str = "none") -> Any:
        kinds.append((type(first), type(rest[0]), rest[1], type(key), other))
        return first["a"][0] * 100 + rest[0].left * 10 + key[0] + rest[0].right.sum()

    result = run(
        strategy,
        fn,
        args=({"a": [own]}, Pair(own, plain), "text"),
        kwargs={"key": (own,), "other": "given"},
    )
    assert on_each(strategy, result) == [
        111.0 * i + 3.0 for i in range(strategy.num_replicas_in_sync)
    ]
    assert set(kinds) == {(dict, Pair, "text", tuple, "given")}


@pytest.mark.strategies(*KINDS)
def test_s26_python_values_reach_replicas_as_they_are(strategy: Any, run: Any) -> None:
    seen: list[Any] = []
    marker = object()

    def fn(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    args = (1, 2.5, True, "s", b"b", None, marker, len, 1j)
    run(strategy, fn, args=args, kwargs={"flag": False, "none": None})
    assert seen
    for found, kwargs in seen:
        assert found == args
        assert [type(a) for a in found] == [type(a) for a in args]
        assert kwargs == {"flag": False, "none": None}


@pytest.mark.strategies(*KINDS)
def test_s26_every_replica_gets_containers_of_its_own(strategy: Any, run: Any) -> None:
    given: dict[str, Any] = {"list": [jnp.asarray(1.0)], "name": "n"}
    sizes: list[Any] = []

    def fn(d: Any) -> None:
        sizes.append((len(d), len(d["list"])))
        d["list"].append(2)
        d["more"] = 3

    run(strategy, fn, args=(given,))
    assert set(sizes) == {(2, 1)}
    assert list(given) == ["list", "name"]
    assert len(given["list"]) == 1


@pytest.mark.strategies(*KINDS)
def test_s27_composite_components(strategy: Any, run: Any) -> None:
    slices = strategy.experimental_distribute_values_from_function(
        lambda c: rx.IndexedSlices(
            jnp.asarray([[1.0 + c.replica_id_in_sync_group]]), jnp.asarray([0]), (3, 1)
        )
    )

    def fn(s: Any) -> Any:
        assert isinstance(s, rx.IndexedSlices)
        return rx.IndexedSlices(s.values * 2, s.indices, s.dense_shape), s.values[0, 0]

    result = run(strategy, fn, args=(slices,))
    parts = replica_results(strategy, result)
    assert len(parts) == strategy.num_replicas_in_sync
    for i, (part, value) in enumerate(parts):
        assert isinstance(part, rx.IndexedSlices)
        assert part.values.tolist() == [[2.0 * (i + 1)]]
        assert float(value) == i + 1.0


@pytest.mark.strategies(*SEVERAL)
def test_s25_mirrored_values_are_unwrapped(strategy: Any, run: Any) -> None:
    x = strategy.extended.broadcast_to(jnp.asarray(3.0), strategy.extended.worker_devices)
    result = run(strategy, lambda x: x * 2, args=(x,))
    assert on_each(strategy, result) == [6.0, 6.0]


@pytest.mark.strategies("mirrored_4")
def test_s25_value_of_another_replica_count_is_refused(strategy: Any, run: Any) -> None:
    other = ids(rx.MirroredStrategy(["CPU:0"], virtual_replicas=3))
    with pytest.raises(ValueError, match="component"):
        run(strategy, lambda x: x, args=(other,))


def test_args_must_be_a_list_or_tuple(strategy: Any) -> None:
    for wrong in (3, "ab", {"x": 1}, np.ones(2), None, iter(())):
        with pytest.raises(ValueError, match=r"`args` must be a list or tuple, but it is") as e:
            strategy.run(lambda *a: None, args=wrong)  # type: ignore[arg-type]
        assert type(wrong).__name__ in str(e.value)
        assert "args=(value,)" in str(e.value)


@pytest.mark.strategies("default", "mirrored_2")
def test_args_that_fn_does_not_take(strategy: Any, run: Any) -> None:
    with pytest.raises(TypeError, match="positional"):
        run(strategy, lambda: None, args=(1,))
    with pytest.raises(TypeError, match="unexpected keyword"):
        run(strategy, lambda: None, kwargs={"x": 1})
    with pytest.raises(TypeError):
        strategy.run(lambda: None, kwargs=3)  # type: ignore[arg-type]


@pytest.mark.strategies(*KINDS)
def test_fn_must_be_callable(strategy: Any) -> None:
    for wrong in (None, 3, "fn"):
        with pytest.raises(TypeError, match="callable"):
            strategy.run(wrong)  # type: ignore[arg-type]


@pytest.mark.strategies("default", "mirrored_2")
def test_any_callable_can_run(strategy: Any, run: Any) -> None:
    class Model:
        def step(self, x: Any) -> Any:
            return x + 1

        def __call__(self, x: Any) -> Any:
            return x + 2

    x = jnp.asarray(1.0)
    callables = [
        (Model().step, 2.0),
        (Model(), 3.0),
        (functools.partial(lambda a, b: a + b, 4.0), 5.0),
        (rx.function(lambda x: x * 7), 7.0),
        (jax.jit(lambda x: x * 8), 8.0),
    ]
    for fn, expected in callables:
        result = run(strategy, fn, args=(x,))
        assert on_each(strategy, result) == [expected] * strategy.num_replicas_in_sync


@pytest.mark.strategies(*KINDS)
def test_s35_options(strategy: Any) -> None:
    options = rx.RunOptions(experimental_enable_dynamic_batch_size=False)
    result = strategy.run(lambda x: x, args=(1,), options=options)
    assert result == 1
    assert rx.RunOptions() == (True, False, None)


# Results.


@pytest.mark.every_strategy
def test_s20_one_object_of_all_replicas_is_the_result(strategy: Any) -> None:
    x = jnp.ones(2)
    marker = object()
    for result in (strategy.run(lambda: x), strategy.run(lambda y: y, args=(x,))):
        # Other workers may have another array.
        assert isinstance(result, rx.PerReplica) == spans_workers(strategy)
        assert all(part is x for part in strategy.experimental_local_results(result))
    assert strategy.run(lambda: {"m": marker})["m"] is marker


@pytest.mark.strategies(*SEVERAL)
@pytest.mark.parametrize("how", ["argument", "captured"])
def test_s20_an_array_handed_back_is_not_per_replica(strategy: Any, run: Any, how: str) -> None:
    x = jnp.asarray([1.0, 2.0])
    if how == "argument":
        result = run(strategy, lambda y: (y, y + 1), args=(x,))
    else:
        result = run(strategy, lambda: (x, x + 1))
    if spans_workers(strategy) and run.executor == "threaded":
        # Other workers may have another array.
        assert isinstance(result[0], rx.PerReplica)
        assert replica_values(strategy, result[0]) == [[1.0, 2.0], [1.0, 2.0]]
    else:
        assert isinstance(result[0], jax.Array)
        assert result[0].tolist() == [1.0, 2.0]
    assert isinstance(result[1], rx.PerReplica)


@pytest.mark.strategies("mirrored_4", *SEVERAL)
def test_s21_different_objects_become_distributed(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda x: x + 1, args=(ids(strategy),))
    assert isinstance(result, rx.PerReplica)
    assert isinstance(result, rx.DistributedValues)
    assert [float(v) for v in result.values] == [i + 1.0 for i in local_ids(strategy)]


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS)
def test_s22_components_of_a_variable_become_the_variable(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
    assert run(strategy, lambda: v) is v
    assert run(strategy, lambda: {"v": [v]})["v"][0] is v


@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2", "minimal_2")
def test_s22_explicit_components(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    first = local_ids(strategy)[0]
    fetch = lambda i: v.components[int(i) - first]  # noqa: E731
    assert strategy.run(fetch, args=(ids(strategy, jnp.int32),)) is v


@pytest.mark.strategies(*SEVERAL)
def test_s23_a_mixed_structure(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    x = jnp.asarray(5.0)
    a = ids(strategy)
    shared, own, variable = run(strategy, lambda x, a: (x, a * 2, v), args=(x, a))
    is_apart = spans_workers(strategy) and run.executor == "threaded"
    assert isinstance(shared, rx.DistributedValues) == is_apart
    assert on_each(strategy, shared) == [5.0, 5.0]
    assert [float(p) for p in own.values] == [2.0 * i for i in local_ids(strategy)]
    assert variable is v


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4", *KINDS)
def test_s24_structure_of_the_result(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        return {
            "list": [x, (x + 1,)],
            "pair": Pair(x + 2, {}),
            "ordered": collections.OrderedDict([("z", x + 3), ("a", [])]),
            "default": collections.defaultdict(list, {"k": x + 4}),
            "record": Record(r=x + 5),
            "proxy": types.MappingProxyType({"p": x + 6}),
            "frozen": Frozen({"f": x + 7}),
            "node": Node(x + 8, (x + 9, None), "own"),
            "nothing": None,
            "text": "text",
        }

    result = run(strategy, fn, args=(ids(strategy),))
    assert type(result) is dict
    assert list(result) == [
        *("list", "pair", "ordered", "default", "record"),
        *("proxy", "frozen", "node", "nothing", "text"),
    ]
    assert type(result["list"]) is list
    assert type(result["list"][1]) is tuple
    assert type(result["pair"]) is Pair
    assert result["pair"].right == {}
    assert type(result["ordered"]) is collections.OrderedDict
    assert list(result["ordered"]) == ["z", "a"]
    assert result["ordered"]["a"] == []
    assert type(result["default"]) is collections.defaultdict
    assert result["default"].default_factory is list
    assert type(result["record"]) is Record
    assert type(result["proxy"]) is types.MappingProxyType
    assert type(result["frozen"]) is Frozen
    assert type(result["node"]) is Node
    assert result["node"].tag == "own"
    assert result["node"].rest[1] is None
    assert result["nothing"] is None
    assert result["text"] == "text"
    leaves = [
        result["list"][0],
        result["list"][1][0],
        result["pair"].left,
        result["ordered"]["z"],
        result["default"]["k"],
        result["record"]["r"],
        result["proxy"]["p"],
        result["frozen"]["f"],
        result["node"].x,
        result["node"].rest[0],
    ]
    for k, leaf in enumerate(leaves):
        assert on_each(strategy, leaf) == [
            float(i + k) for i in range(strategy.num_replicas_in_sync)
        ]


@pytest.mark.strategies(*KINDS)
def test_s24_equal_python_results(strategy: Any, run: Any) -> None:
    values = [None, "s", b"b", (), [], {}, (None, None), len, np.float32(1.5), 3, 2.5, True]
    found = run(strategy, lambda: list(values))
    assert len(found) == len(values)
    for result, value in zip(found, values, strict=True):
        # A compiled function returns numbers as arrays.
        if not isinstance(result, jax.Array):
            assert type(result) is type(value)
        assert result == value
        assert not isinstance(result, rx.DistributedValues)


@pytest.mark.strategies("default", "mirrored_2")
def test_s24_no_result_and_a_single_leaf(strategy: Any, run: Any) -> None:
    assert run(strategy, lambda: None) is None
    assert run(strategy, lambda: "text") == "text"
    assert run(strategy, lambda: ()) == ()


@pytest.mark.strategies(*SEVERAL)
def test_s24_equal_python_values_made_by_each_replica(strategy: Any, run: Any) -> None:
    made = run(strategy, lambda: ("".join(["a", "b"]), 10**6 + 1, float("0.1"), [None]))
    assert made == ("ab", 1000001, 0.1, [None])


@pytest.mark.strategies(*SEVERAL)
def test_s24_numpy_results_are_like_in_the_other_executor(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        return np.float32(1.5), np.arange(2)

    scalar, array = run(strategy, fn)
    # An equal immutable scalar is one value; an array made by each replica is not.
    assert len(strategy.experimental_local_results(scalar)) == 1
    assert scalar == 1.5
    assert on_each(strategy, array) == [[0, 1], [0, 1]]


@pytest.mark.strategies(*SEVERAL)
def test_s21_different_python_results(strategy: Any) -> None:
    names = strategy.run(lambda i: f"replica {int(i)}", args=(ids(strategy),))
    own, local = local_ids(strategy), strategy.experimental_local_results
    assert local(names) == tuple(f"replica {i}" for i in own)
    numbers = strategy.run(lambda i: int(i), args=(ids(strategy),))
    assert local(numbers) == tuple(own)
    kinds = strategy.run(lambda i: [1, 1.0][int(i)], args=(ids(strategy),))
    assert [type(v) for v in local(kinds)] == [[int, float][i] for i in own]
    objects = strategy.run(lambda i: Opaque(int(i)), args=(ids(strategy),))
    assert local(objects) == tuple(Opaque(i) for i in own)
    if len(own) > 1:
        assert all(isinstance(v, rx.PerReplica) for v in (names, numbers, kinds, objects))


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_1")
def test_s28_one_replica_returns_plain_values(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        return x + 1, {"total": context().all_reduce("sum", x)}

    result = run(strategy, fn, args=(ids(strategy),))
    assert isinstance(result[0], jax.Array)
    assert isinstance(result[1]["total"], jax.Array)
    assert _plain(result) == (1.0, {"total": 0.0})


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_s31_sample_of_a_product(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda x: x * 2.0, args=(jnp.asarray(3.0),))
    assert isinstance(result, rx.PerReplica)
    assert [float(v) for v in result.values] == [6.0] * len(local_ids(strategy))


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_s32_sample_of_equal_python_values(strategy: Any, run: Any) -> None:
    values = strategy.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    result = run(strategy, lambda x: x * 2, args=(values,))
    assert not isinstance(result, rx.DistributedValues)
    assert int(result) == 4


@pytest.mark.strategies(*SEVERAL)
def test_s33_s34_sample_of_an_all_reduce(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        return context().all_reduce("sum", context().replica_id_in_sync_group)

    result = run(strategy, fn)
    parts = replica_results(strategy, result)
    assert [int(p) for p in parts] == [1, 1]
    assert all(p.dtype == jnp.int32 for p in parts)


@pytest.mark.every_strategy
def test_s40_replica_ids(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        replica_id = context().replica_id_in_sync_group
        assert isinstance(replica_id, jax.Array)
        assert replica_id.dtype == jnp.int32
        assert replica_id.shape == ()
        assert context().num_replicas_in_sync == strategy.num_replicas_in_sync
        return replica_id

    result = run(strategy, fn)
    assert on_each(strategy, result) == list(range(strategy.num_replicas_in_sync))


# Structures that do not match.

MISMATCHES: dict[str, list[Any]] = {
    "length": [[1], [1, 2]],
    "tuple_length": [(1,), (1, 2)],
    "keys": [{"a": 1}, {"b": 1}],
    "more_keys": [{"a": 1}, {"a": 1, "b": 1}],
    "list_and_tuple": [[1], (1,)],
    "tuple_and_named": [(1, 2), Pair(1, 2)],
    "dict_and_ordered": [{"a": 1}, collections.OrderedDict(a=1)],
    "static_field": [Node(1, 2, "a"), Node(1, 2, "b")],
    "number_and_list": [1, [1]],
    "none_and_list": [None, [1]],
    "array_and_dict": [jnp.ones(1), {"a": 1}],
    "nested": [{"a": [1, (2,)]}, {"a": [1, [2]]}],
}


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("case", MISMATCHES)
def test_t15_structures_that_differ_are_refused(case: str, is_reversed: bool) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    results = MISMATCHES[case][::-1] if is_reversed else MISMATCHES[case]
    with pytest.raises(ValueError, match="same structure"):
        strategy.run(lambda i: results[int(i)], args=(ids(strategy),))
    assert strategy.run(lambda: 1) == 1


@pytest.mark.parametrize("is_reversed", [False, True])
def test_t15_none_and_an_array(is_reversed: bool) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    results = [None, jnp.ones(2)][:: -1 if is_reversed else 1]
    result = strategy.run(lambda i: results[int(i)], args=(ids(strategy),))
    assert isinstance(result, rx.PerReplica)
    assert [v is r for v, r in zip(result.values, results, strict=True)] == [True, True]


def test_t15_dicts_in_another_order_match() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    results = [{"a": 1, "b": 2}, {"b": 3, "a": 1}]
    result = strategy.run(lambda i: results[int(i)], args=(ids(strategy),))
    assert result["a"] == 1
    assert result["b"].values == (2, 3)


def test_t15_arrays_of_different_shapes_are_no_mismatch() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    result = strategy.run(lambda i: jnp.ones(int(i) + 1), args=(ids(strategy),))
    assert [v.shape for v in result.values] == [(1,), (2,)]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: Record(a=object()),
        lambda i: collections.OrderedDict(z=object(), a=object()),
        lambda i: collections.defaultdict(int, a=object()),
        lambda i: types.MappingProxyType({"a": object()}),
        lambda i: Frozen({"a": object()}),
        lambda i: Pair(object(), [object()]),
        lambda i: Node(object(), {"a": object()}),
    ],
)
def test_t16_select_undoes_regroup(make: Any) -> None:
    parts = [make(i) for i in range(3)]
    merged = regroup(parts)
    assert type(merged) is type(parts[0])
    leaves = jax.tree.leaves(
        dict(merged) if isinstance(merged, Mapping) else merged,
        is_leaf=lambda x: isinstance(x, rx.PerReplica),
    )
    assert leaves
    assert all(isinstance(leaf, rx.PerReplica) for leaf in leaves)
    for i, part in enumerate(parts):
        again = select(i, merged)
        assert type(again) is type(part)
        if isinstance(part, Mapping):
            assert dict(again) == dict(part)
            assert list(again) == list(part)
        else:
            assert again == part
    with pytest.raises(TypeError, match="equal on all replicas"):
        select_mirrored(0, merged)


def test_t16_regroup_of_one_replica_is_that_value() -> None:
    value = {"a": [object()]}
    assert regroup([value]) is value


# How often, and in which order.


@pytest.mark.strategies("default", "one_device", "mirrored_4", *SEVERAL)
def test_s30_eager_code_is_called_once_per_replica_and_step(strategy: Any) -> None:
    calls: list[int] = []

    def fn() -> None:
        calls.append(int(context().replica_id_in_sync_group))

    for _ in range(3):
        strategy.run(fn)
    assert calls == local_ids(strategy) * 3


@pytest.mark.parametrize("where", ["function_in_run", "run_in_function"])
@pytest.mark.strategies(*KINDS)
def test_s29_t19_one_trace_stands_for_all_replicas_and_steps(strategy: Any, where: str) -> None:
    calls: list[None] = []

    def fn(x: Any) -> Any:
        calls.append(None)
        return x * 2

    traced: Any = rx.function(fn)
    if where == "run_in_function":
        traced = rx.function(lambda x: strategy.run(fn, args=(x,)))

    def step(x: Any) -> Any:
        return traced(x) if where == "run_in_function" else strategy.run(traced, args=(x,))

    for i in range(10):
        assert on_each(strategy, step(jnp.asarray(float(i))))[0] == 2.0 * i
    assert len(calls) == 1
    assert traced.experimental_get_tracing_count() == 1
    step(jnp.ones(3))
    assert len(calls) == 2
    step(jnp.asarray(5.0))
    assert len(calls) == 2
    step(jnp.asarray(5))
    assert len(calls) == 3
    assert traced.experimental_get_tracing_count() == 3


@pytest.mark.strategies(*KINDS)
def test_s29_per_replica_arguments_do_not_trace_again(strategy: Any) -> None:
    calls: list[None] = []

    @rx.function
    def fn(x: Any) -> Any:
        calls.append(None)
        return x + 1

    result: Any = strategy.run(lambda x: x + 0, args=(ids(strategy),))
    for _ in range(5):
        result = strategy.run(fn, args=(result,))
    assert on_each(strategy, result) == [i + 5.0 for i in range(strategy.num_replicas_in_sync)]
    assert len(calls) == 1


@pytest.mark.strategies("mirrored_2")
def test_s29_python_values_are_constants_of_the_trace(strategy: Any) -> None:
    calls: list[Any] = []

    @rx.function
    def fn(x: Any, factor: Any) -> Any:
        calls.append(factor)
        return x * factor

    for factor in (2, 3, 2, 3, 2.0):
        strategy.run(fn, args=(jnp.asarray(1.0), factor))
    assert calls == [2, 3, 2.0]
    assert [type(c) for c in calls] == [int, int, float]


@pytest.mark.one_process("names devices that a worker does not have")
@pytest.mark.strategies("mirrored_2")
def test_s29_each_strategy_has_a_trace_of_its_own(strategy: Any) -> None:
    calls: list[Any] = []

    @rx.function
    def fn(x: Any) -> Any:
        calls.append(rx.get_strategy())
        return x + context().num_replicas_in_sync

    other = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    for _ in range(2):
        assert on_each(strategy, strategy.run(fn, args=(jnp.asarray(1.0),))) == [3.0] * 2
        assert on_each(other, other.run(fn, args=(jnp.asarray(1.0),))) == [5.0] * 4
        assert float(fn(jnp.asarray(1.0))) == 2.0
    assert calls == [strategy, other, rx.get_strategy()]


@pytest.mark.strategies("mirrored_2")
def test_s29_a_failed_trace_is_not_kept(strategy: Any, run: Any) -> None:
    should_fail = True

    def fn(x: Any) -> Any:
        if should_fail:
            raise OSError("disk")
        return x

    with pytest.raises(OSError, match="disk"):
        run(strategy, fn, args=(jnp.ones(1),))
    should_fail = False
    assert on_each(strategy, run(strategy, fn, args=(jnp.ones(1),))) == [[1.0], [1.0]]


@pytest.mark.strategies("mirrored_4", *KINDS)
def test_t20_side_effects_happen_though_the_result_is_unused(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def step() -> None:
        strategy.run(lambda: v.assign_add(1.0))

    step()
    assert float(v) == 1.0
    step()
    assert float(v) == 2.0
    assert copies(strategy, v) == [2.0] * num_copies(strategy, v)


@pytest.mark.strategies(*SEVERAL)
def test_ragged_arguments_of_a_compiled_function_run_eagerly(strategy: Any) -> None:
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(c.replica_id_in_sync_group + 1)
    )
    result = strategy.run(rx.function(lambda x: x.sum()), args=(ragged,))
    assert on_each(strategy, result) == [1.0, 2.0]


@pytest.mark.strategies(*SEVERAL)
def test_ragged_arguments_of_a_compiled_function_with_a_signature(strategy: Any) -> None:
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(c.replica_id_in_sync_group + 1)
    )
    signed = rx.function(lambda x: x.sum(), input_signature=[rx.TensorSpec((None,))])
    assert on_each(strategy, strategy.run(signed, args=(ragged,))) == [1.0, 2.0]


@pytest.mark.strategies(*SEVERAL)
def test_run_with_jit_disabled(strategy: Any, run: Any) -> None:
    with jax.disable_jit():
        result = run(strategy, lambda x: x + 1, args=(ids(strategy),))
        assert on_each(strategy, result) == [1.0, 2.0]


@pytest.mark.strategies(*SEVERAL)
def test_run_with_jit_disabled_and_a_signature(strategy: Any) -> None:
    signed = rx.function(lambda x: x + 1, input_signature=[rx.TensorSpec(())])
    with jax.disable_jit():
        assert on_each(strategy, strategy.run(signed, args=(ids(strategy),))) == [1.0, 2.0]


@pytest.mark.strategies(*SEVERAL)
def test_input_signature_on_replicas(strategy: Any) -> None:
    calls: list[None] = []

    @functools.partial(rx.function, input_signature=[rx.TensorSpec((None,))])
    def fn(x: Any) -> Any:
        calls.append(None)
        return x * 2

    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(2))
    for _ in range(2):
        assert on_each(strategy, strategy.run(fn, args=(x,))) == [[2.0, 2.0]] * 2
    assert len(calls) == 1


@pytest.mark.strategies("mirrored_2")
def test_python_use_of_the_traced_replica_id_is_explained(strategy: Any) -> None:
    def fn() -> Any:
        return 1 if context().replica_id_in_sync_group == 0 else 2

    expected = tuple([1, 2][i] for i in local_ids(strategy))
    assert strategy.experimental_local_results(strategy.run(fn)) == expected
    with pytest.raises(TypeError, match=r"traced value .*replica id"):
        strategy.run(rx.function(fn))


# Nested runs.


@pytest.mark.strategies("default", "one_device", *SEVERAL)
@pytest.mark.every_strategy
def test_t8_run_inside_run_is_refused(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        return strategy.run(lambda: 1)

    with pytest.raises(RuntimeError, match=r"Strategy.run` needs a cross-replica context"):
        run(strategy, fn)
    assert run(strategy, lambda: 1) == 1


@pytest.mark.strategies("default")
def test_other_strategies_may_run_inside_a_run_of_the_default_one(strategy: Any, run: Any) -> None:
    other = rx.OneDeviceStrategy("CPU:1")

    def fn() -> Any:
        with other.scope():
            return other.reduce("SUM", other.run(lambda: jnp.ones(2)), axis=0)

    assert run(strategy, fn) == 2.0


@pytest.mark.strategies("mirrored_4", *KINDS)
def test_t8_run_inside_merge_call(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    def inner(x: Any, y: float) -> Any:
        v.assign_add(x)
        return x * y + context().all_reduce("sum", x)

    def fn(x: Any) -> Any:
        out = context().merge_call(lambda s, x: s.run(inner, args=(x, 10.0)), args=(x + 1,))
        return out + context().replica_id_in_sync_group

    result = run(strategy, fn, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    total = n * (n + 1) / 2
    assert on_each(strategy, result) == [10.0 * (i + 1) + total + i for i in range(n)]
    assert float(v) == total


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t8_run_inside_merge_call_inside_run_inside_merge_call(strategy: Any, run: Any) -> None:
    def deeper(depth: int, x: Any) -> Any:
        if depth == 0:
            return x
        merged = context().merge_call(
            lambda s, x: s.run(functools.partial(deeper, depth - 1), args=(x,)), args=(x + 1,)
        )
        return merged * 2

    result = run(strategy, functools.partial(deeper, 3), args=(ids(strategy),))
    assert on_each(strategy, result) == [24.0, 32.0]


# Failures.


class Custom(Exception):
    """An exception with an argument list of its own."""

    def __init__(self, code: int, *, text: str) -> None:
        super().__init__(code, text)
        self.code = code


FAILURES: list[BaseException] = [
    ValueError("boom"),
    AssertionError("boom"),
    Custom(3, text="boom"),
    StopIteration("boom"),
    KeyboardInterrupt("boom"),
    SystemExit("boom"),
    GeneratorExit("boom"),
]


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_t9a_a_failure_reaches_the_caller(strategy: Any, run: Any) -> None:
    for failure in FAILURES:

        def fn(failure: Any = failure) -> None:
            raise failure

        with pytest.raises(type(failure)) as caught:
            run(strategy, fn)
        assert caught.value is failure
        assert not rx.has_strategy()
    n = strategy.num_replicas_in_sync
    assert on_each(strategy, run(strategy, lambda x: x + 1, args=(ids(strategy),))) == [
        i + 1.0 for i in range(n)
    ]


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_4")
@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("merges", [0, 1, 2])
def test_t9a_t10_a_failure_in_one_replica(strategy: Any, failing: int, merges: int) -> None:
    for failure in FAILURES:
        started: list[int] = []
        ended: list[int] = []

        def fn(failure: Any = failure, started: Any = started, ended: Any = ended) -> None:
            me = int(context().replica_id_in_sync_group)
            started.append(me)
            try:
                for _ in range(merges):
                    context().merge_call(lambda s: None)
                if me == failing:
                    raise failure
                context().merge_call(lambda s: None)
            finally:
                ended.append(me)

        with pytest.raises(type(failure)) as caught:
            strategy.run(fn)
        assert caught.value is failure
        assert started == list(range(failing + 1 if merges == 0 else 4))
        # No replica is left waiting when `run` returns.
        assert sorted(ended) == started
    assert on_each(strategy, strategy.run(lambda x: x, args=(ids(strategy),))) == [0, 1, 2, 3]


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_4")
def test_t9a_one_replica_cannot_swallow_the_failure_of_another(strategy: Any) -> None:
    def fn() -> str:
        me = int(context().replica_id_in_sync_group)
        try:
            context().merge_call(lambda s: None)
        except KeyError:
            return "swallowed"
        if me == 1:
            raise KeyError("of replica 1")
        return "ended"

    with pytest.raises(KeyError, match="of replica 1"):
        strategy.run(fn)
    assert strategy.run(lambda: 1) == 1


@pytest.mark.strategies(*SEVERAL)
def test_t9_a_failure_in_reading_the_arguments(strategy: Any) -> None:
    count = len(local_ids(strategy)) + (1 if spans_workers(strategy) else -1)
    with pytest.raises(ValueError, match="component"):
        strategy.run(lambda x: x, args=(rx.PerReplica((1,) * count),))
    assert strategy.run(lambda: 1) == 1


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t9_ctrl_c_while_the_caller_waits_for_a_replica(strategy: Any) -> None:
    ended, started = threading.Event(), []

    def fn() -> None:
        started.append(int(context().replica_id_in_sync_group))
        try:
            _thread.interrupt_main(signal.SIGINT)
            time.sleep(0.1)
            context().merge_call(lambda s: None)
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        strategy.run(fn)
    assert started == [0]
    assert ended.wait(60)
    assert not rx.has_strategy()
    assert on_each(strategy, strategy.run(lambda x: x, args=(ids(strategy),))) == [0.0, 1.0]


@pytest.mark.strategies("mirrored_2", "mirrored_4")
def test_runs_reuse_their_threads(strategy: Any) -> None:
    def count() -> int:
        return sum(t.name == "replicax-replica" for t in threading.enumerate())

    def failing() -> None:
        context().merge_call(lambda s: None)
        raise OSError

    before = count()
    for _ in range(20):
        strategy.run(lambda: context().merge_call(lambda s: None))
        with pytest.raises(OSError):  # noqa: PT011
            strategy.run(failing)
    assert count() <= max(before, strategy.num_replicas_in_sync)


@pytest.mark.one_process("threads take turns in an order of their own on each worker")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_runs_of_several_threads_at_once(strategy: Any, run: Any) -> None:
    barrier = threading.Barrier(3)

    def fn(x: Any, k: Any) -> Any:
        assert rx.get_strategy() is strategy
        return context().all_reduce("sum", x) * 10 + k

    def work(k: int) -> Any:
        barrier.wait(60)
        found = []
        for _ in range(2):
            found.append(on_each(strategy, run(strategy, fn, (ids(strategy), jnp.asarray(k)))))
        return found

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = [f.result(60) for f in [pool.submit(work, k) for k in range(3)]]
    assert results == [[[10.0 + k] * 2] * 2 for k in range(3)]


def test_runs_of_several_strategies_at_once() -> None:
    strategies = [
        rx.MirroredStrategy(["CPU:0", "CPU:1"]),
        rx.MirroredStrategy(["CPU:1", "CPU:0"]),
        rx.MirroredStrategy(["CPU:1"], virtual_replicas=3),
    ]
    barrier = threading.Barrier(len(strategies))

    def fn(x: Any) -> Any:
        return context().all_reduce("sum", x + 1)

    def work(strategy: Any) -> Any:
        compiled = rx.function(fn)
        barrier.wait(60)
        found = set()
        for _ in range(5):
            found.update(on_each(strategy, strategy.run(fn, args=(ids(strategy),))))
            found.update(on_each(strategy, strategy.run(compiled, args=(ids(strategy),))))
        return found

    with concurrent.futures.ThreadPoolExecutor(len(strategies)) as pool:
        results = [f.result(60) for f in [pool.submit(work, s) for s in strategies]]
    assert results == [{3.0}, {3.0}, {6.0}]


# Settings of the caller.

_note: contextvars.ContextVar[str] = contextvars.ContextVar("note", default="unset")


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_t23_settings_of_the_caller_hold_in_replicas(strategy: Any, run: Any) -> None:
    seen: list[Any] = []

    def fn() -> Any:
        seen.append(
            (
                _note.get(),
                jax.config.jax_numpy_dtype_promotion,  # type: ignore[attr-defined]
                jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
                jax.config.jax_debug_nans,  # type: ignore[attr-defined]
                jax.config.jax_numpy_rank_promotion,  # type: ignore[attr-defined]
            )
        )
        return jnp.asarray(np.float64(1.0))

    token = _note.set("set")
    try:
        with (
            jax.enable_x64(True),
            jax.numpy_dtype_promotion("strict"),
            jax.default_matmul_precision("highest"),
            jax.debug_nans(True),
            jax.numpy_rank_promotion("raise"),
        ):
            result = run(strategy, fn)
            parts = replica_results(strategy, result)
            assert {p.dtype for p in parts} == {np.dtype("float64")}
    finally:
        _note.reset(token)
    assert set(seen) == {("set", "strict", "highest", True, "raise")}
    seen.clear()
    strategy.run(fn)
    assert {s[0] for s in seen} == {"unset"}
    assert {s[1] for s in seen} == {"standard"}


@pytest.mark.strategies("mirrored_2")
def test_t23_debug_nans_of_the_caller(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        return jnp.log(x - 1)

    assert np.isnan(on_each(strategy, run(strategy, fn, args=(jnp.asarray(0.0),)))[0])
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(run(strategy, fn, args=(jnp.asarray(0.0),)))


@pytest.mark.strategies("mirrored_2")
def test_t23_context_variables_set_by_a_replica_do_not_leak(strategy: Any) -> None:
    seen: list[str] = []

    def fn() -> None:
        seen.append(_note.get())
        _note.set(f"of {int(context().replica_id_in_sync_group)}")
        context().merge_call(lambda s: None)
        seen.append(_note.get())

    contextvars.copy_context().run(strategy.run, fn)
    own = local_ids(strategy)
    assert seen == ["unset"] * len(own) + [f"of {i}" for i in own]
