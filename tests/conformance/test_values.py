"""Distributed values: PerReplica, Mirrored, merging, local results (S80-S89, S101-S103, T16)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import STRATEGIES, TWO_REPLICAS
from vocabulary import refused, values

import replicax as rx
from replicax.values.regroup import leaves_of, map_structure, regroup, select, select_mirrored

ON_READ = rx.VariableSynchronization.ON_READ
MANY_REPLICAS = ("mirrored_4", *TWO_REPLICAS)
Point = collections.namedtuple("Point", ["x", "y"])


def mirrored(strategy: Any, value: Any = (1.0, 3.0)) -> rx.Mirrored:
    x = values(strategy, lambda i: jnp.array(value))
    result = strategy.extended.reduce_to("MEAN", x, strategy.extended.worker_devices)
    assert isinstance(result, rx.Mirrored)
    return result


# PerReplica.


def test_1_7_per_replica_is_a_distributed_value() -> None:
    x = rx.PerReplica([1, "two"])
    assert isinstance(x, rx.DistributedValues)
    assert x.values == (1, "two")
    assert not isinstance(x, rx.Mirrored)


def test_1_7_per_replica_printed_form(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    result = run(strategy, lambda x: x + 1, (values(strategy, lambda i: jnp.float32(i)),))
    if n == 1:
        assert float(result) == 1.0
        return
    lines = [f"  {i}: <jax.Array: shape=(), dtype=float32, numpy={i + 1}.0>" for i in range(n)]
    assert repr(result) == str(result) == "PerReplica:{\n" + ",\n".join(lines) + "\n}"


@pytest.mark.strategies(*TWO_REPLICAS)
def test_1_7_printed_forms(strategy: Any) -> None:
    text = str(values(strategy, lambda i: f"r{i}"))
    assert text == "PerReplica:{\n  0: 'r0',\n  1: 'r1'\n}"
    text = str(mirrored(strategy))
    part = "<jax.Array: shape=(2,), dtype=float32, numpy=array([1., 3.], dtype=float32)>"
    assert text == f"Mirrored:{{\n  0: {part},\n  1: {part}\n}}"


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_printed_form_inside_merge_fn(strategy: Any, run: Any) -> None:
    seen: list[str] = []

    def merge_fn(strategy: Any, x: Any) -> None:
        seen.append(str(x))

    x = values(strategy, lambda i: jnp.ones(3) * i)
    run(strategy, lambda v: rx.get_replica_context().merge_call(merge_fn, (v,)), (x,))
    assert seen and all(s.startswith("PerReplica:{") and "(3,)" in s for s in seen)


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "x + 1": lambda x: x + 1,
    "1 + x": lambda x: 1 + x,
    "x - x": lambda x: x - x,
    "2 * x": lambda x: 2 * x,
    "x / 2": lambda x: x / 2,
    "x // 2": lambda x: x // 2,
    "2 // x": lambda x: 2 // x,
    "x % 2": lambda x: x % 2,
    "2 % x": lambda x: 2 % x,
    "x ** 2": lambda x: x**2,
    "x @ x": lambda x: x @ x,
    "-x": lambda x: -x,
    "+x": lambda x: +x,
    "~x": lambda x: ~x,
    "x & 1": lambda x: x & 1,
    "abs(x)": abs,
    "x < 1": lambda x: x < 1,
    "x >= x": lambda x: x >= x,
    "x[0]": lambda x: x[0],
    "float(x)": float,
    "int(x)": int,
    "iter(x)": lambda x: list(x),
    "len(x)": len,
    "range(x)": range,
    "bool(x)": bool,
}


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_operators_on_per_replica_are_refused(strategy: Any) -> None:
    x = strategy.run(lambda i: i + 1, args=(values(strategy, lambda i: jnp.int32(i)),))
    accepted = []
    for text, operate in OPERATORS.items():
        with contextlib.suppress(TypeError):
            operate(x)
            accepted.append(text)
        with strategy.scope(), contextlib.suppress(TypeError):
            operate(x)
            accepted.append(text)
    assert accepted == []


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_operator_errors_say_what_to_do(strategy: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i))
    for text in ("x + 1", "1 + x", "x < 1", "float(x)", "x[0]"):
        with refused(TypeError, "strategy.run.*strategy.reduce"):
            OPERATORS[text](x)


@pytest.mark.strategies("mirrored_2", "virtual_2")
@pytest.mark.parametrize(
    "convert", [jnp.asarray, np.asarray, jnp.sin, np.sum, lambda x: jnp.ones(()) + x]
)
def test_1_7_per_replica_does_not_become_an_array(strategy: Any, convert: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i))
    with strategy.scope(), pytest.raises((ValueError, TypeError)) as info:
        convert(x)
    assert isinstance(info.value, rx.errors.DistributeError), repr(info.value)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_per_replica_captured_by_replica_code_is_its_own(strategy: Any, run: Any) -> None:
    x = values(strategy, lambda i: jnp.float32(i))
    assert [float(part) for part in run(strategy, lambda: x + 1).values] == [1.0, 2.0]


@pytest.mark.strategies(*MANY_REPLICAS)
def test_1_7_tree_map_maps_over_components(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.float32(i))
    y = jax.tree.map(lambda v: v * 10, x)
    assert isinstance(y, rx.PerReplica)
    assert [float(v) for v in y.values] == [10.0 * i for i in range(n)]
    again = strategy.run(lambda v: v + 1, args=(y,))
    assert [float(v) for v in again.values] == [10.0 * i + 1 for i in range(n)]


@pytest.mark.strategies("mirrored_2", "virtual_2", "mirrored_4")
def test_1_7_wrong_number_of_components(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    for count in (n - 1, n + 1):
        x = rx.PerReplica([jnp.float32(i) for i in range(count)])
        with refused(ValueError):
            run(strategy, lambda v: v, (x,))


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_value_of_another_strategy(strategy: Any, run: Any) -> None:
    """A value of two replicas is moved to the devices of the two replicas that use it."""
    other = rx.MirroredStrategy(["CPU:6", "CPU:7"])
    x = values(other, lambda i: jnp.arange(2.0) + i)
    x = other.run(rx.function(lambda v: v + 1), args=(x,))
    result = run(strategy, lambda v: v * 2, (x,))
    for i, (part, device) in enumerate(
        zip(result.values, strategy.extended.layout.devices, strict=True)
    ):
        np.testing.assert_array_equal(part, 2 * (np.arange(2.0) + i + 1))
        assert part.devices() == {device}


# Mirrored.


@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2")
def test_1_7_mirrored_computes_like_an_array(strategy: Any) -> None:
    m = mirrored(strategy)
    assert isinstance(m, rx.DistributedValues) and not isinstance(m, rx.PerReplica)
    assert m.shape == (2,) and m.dtype == jnp.float32 and m.ndim == 1 and m.size == 2
    with strategy.scope():
        np.testing.assert_array_equal(m + 1, [2, 4])
        np.testing.assert_array_equal(1 - m, [0, -2])
        np.testing.assert_array_equal(m * m, [1, 9])
        np.testing.assert_array_equal(2**m, [2, 8])
        np.testing.assert_array_equal(m @ m, 10)
        np.testing.assert_array_equal(-m, [-1, -3])
        np.testing.assert_array_equal(m > 2, [False, True])
        np.testing.assert_array_equal(m == jnp.array([1.0, 0.0]), [True, False])
        np.testing.assert_array_equal(m != jnp.array([1.0, 0.0]), [False, True])
        np.testing.assert_array_equal(m == m, [True, True])
        np.testing.assert_array_equal(jnp.sin(m), jnp.sin(jnp.array([1.0, 3.0])))
        np.testing.assert_array_equal(jnp.add(m, 1), [2, 4])
        np.testing.assert_array_equal(np.asarray(m), [1, 3])
        np.testing.assert_array_equal(jnp.ones(2) + m, [2, 4])
        np.testing.assert_array_equal(np.ones(2, np.float32) + m, [2, 4])
        assert float(m[1]) == 3.0 and len(m) == 2 and [float(v) for v in m] == [1.0, 3.0]
        assert float(m.mean()) == 2.0 and float(m.sum()) == 4.0
        assert hash(m) == hash(m)
    scalar = mirrored(strategy, 2.0)
    assert float(scalar) == 2.0 and int(scalar) == 2 and bool(scalar)
    assert divmod(scalar, 2.0) == (1.0, 0.0)


@pytest.mark.strategies("mirrored_4", "tpu_2", "minimal_2")
def test_1_7_mirrored_is_the_copy_of_the_current_device(strategy: Any, devices: Any) -> None:
    m = mirrored(strategy)
    layout = strategy.extended.layout
    for device in layout.devices:
        with rx.device(device):
            assert (m + 1).devices() == {device}
    with rx.device("CPU:5" if devices[5] not in layout.devices else "CPU:0"):
        np.testing.assert_array_equal(m + 1, [2, 4])


@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
def test_1_7_mirrored_captured_by_replica_code_is_the_local_copy(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    m = mirrored(strategy)
    x = strategy.run(lambda v: v * 2, args=(values(strategy, lambda i: jnp.arange(2.0) + i),))
    result = run(strategy, lambda v: v + m, (x,))
    for i, part in enumerate(result.values):
        np.testing.assert_array_equal(part, 2 * (np.arange(2.0) + i) + np.array([1, 3]))
    assert len(result.values) == n


@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
def test_s65_mirrored_as_argument_is_the_local_copy(strategy: Any, run: Any) -> None:
    m = mirrored(strategy)
    x = values(strategy, lambda i: jnp.float32(i))
    result = run(strategy, lambda a, b: a["m"] * b, ({"m": m}, x))
    for i, part in enumerate(result.values):
        np.testing.assert_array_equal(part, np.array([1.0, 3.0]) * i)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_mirrored_goes_in_and_out_of_a_function(strategy: Any) -> None:
    m = mirrored(strategy)
    with strategy.scope():
        same, plus = rx.function(lambda m: (m, m + 1))(m)
    assert isinstance(same, rx.Mirrored)
    assert len(same.values) == 2
    np.testing.assert_array_equal(same, [1, 3])
    np.testing.assert_array_equal(plus, [2, 4])
    for part, device in zip(same.values, strategy.extended.layout.devices, strict=True):
        assert part.devices() == {device}


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_jax_takes_a_mirrored_value_for_one_array(strategy: Any) -> None:
    m = mirrored(strategy)
    assert len(jax.tree.leaves(m)) == 1
    np.testing.assert_array_equal(jax.tree.map(lambda v: v + 1, m), [2, 4])
    np.testing.assert_array_equal(jax.jit(lambda v: v * 2)(m), [2, 6])


def test_1_7_variables_with_copies_are_distributed_values() -> None:
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        mirrored, on_read = rx.Variable(1.0), rx.Variable(1.0, synchronization=ON_READ)
    for v in (mirrored, on_read):
        assert isinstance(v, rx.DistributedValues)
        assert [c.device for c in v.values] == [c.device for c in v.components]
        assert len(v.values) == 2
        results = strategy.experimental_local_results(v)
        assert [r.name for r in results] == [c.name for c in v.values]
        # In replica code a variable is itself, not a copy.
        same = strategy.run(lambda x, v=v: x is v, args=(v,))
        assert same is True
    sharded = rx.ShardedVariable([rx.Variable([1.0])])
    assert not isinstance(sharded, rx.DistributedValues)
    assert not isinstance(rx.Variable(1.0), rx.DistributedValues)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_values_made_by_hand_are_compiled_as_others(
    strategy: Any, run: Any, caplog: pytest.LogCaptureFixture, devices: Any
) -> None:
    components = {
        "numpy": (np.ones(2, np.float32), np.full(2, 2.0, np.float32)),
        "jax": (jnp.ones(2), jnp.full(2, 2.0)),
        "other devices": tuple(
            jax.device_put(jnp.full(2, i + 1.0), device) for i, device in enumerate(devices[3:5])
        ),
        "dicts": ({"x": jnp.ones(2)}, {"x": jnp.full(2, 2.0)}),
    }
    for name, parts in components.items():
        made = rx.PerReplica(parts)
        for _ in range(2):
            result = run(strategy, lambda x: jax.tree.map(lambda a: a * 10.0, x), (made,))
            found = strategy.experimental_local_results(result)
            values = [np.asarray(jax.tree.leaves(own)[0]).tolist() for own in found]
            assert values == [[10.0, 10.0], [20.0, 20.0]], name
    assert "different shapes" not in caplog.text


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_1_7_the_truth_of_a_per_replica_value_is_refused(strategy: Any) -> None:
    value = values(strategy, lambda i: jnp.float32(i))
    with refused(TypeError, "has 2, one for each replica.*local_results"):
        bool(value)
    with refused(TypeError, "one truth value"):
        assert not rx.PerReplica((1, 2))


def test_1_7_of_many_replicas_eight_are_printed() -> None:
    for value in (rx.PerReplica(range(1024)), rx.Mirrored([jnp.ones(5000)] * 1024)):
        text = repr(value)
        assert len(text) < 5000
        assert "(1,024 in all)" in text
        assert "  3: " in text and "  1020: " in text and "  4: " not in text
    assert repr(rx.PerReplica(range(8))).count(": ") == 8
    assert f"{rx.PerReplica((1, 2))}" == repr(rx.PerReplica((1, 2)))
    assert f"{rx.Mirrored([jnp.float32(1.5)] * 2)}" == "1.5"
    strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=20)
    with strategy.scope():
        v = rx.Variable(1.0, name="v")
    assert "v/replica_19" in repr(v) and "replica_9" not in repr(v).replace("replica_19", "")
    assert "20 replicas on" in repr(strategy.extended.layout)


# Merging structures and taking them apart (T16).


class Custom(dict):  # type: ignore[type-arg]
    """A dict subclass with more than its items."""

    def __init__(self, *args: Any, note: str = "") -> None:
        super().__init__(*args)
        self.note = note


class Frozen(collections.abc.Mapping):  # type: ignore[type-arg]
    """A Mapping that cannot be written to."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Items(list):  # type: ignore[type-arg]
    """A list subclass."""


class Estimate(collections.namedtuple("Estimate", ["mode", "loss"])):
    """A named tuple whose `__new__` takes other arguments, and changes them."""

    def __new__(cls, loss: Any, *, mode: Any = None) -> Any:
        return super().__new__(cls, mode=loss if mode is None else mode, loss=[loss])


class Pair(tuple):  # type: ignore[type-arg]
    """A tuple whose `__new__` does not take its items as one argument."""

    def __new__(cls, a: Any, b: Any) -> Any:
        self = super().__new__(cls, (a, b))
        self.note = "kept"
        return self


class PairList(list):  # type: ignore[type-arg]
    """A list whose `__init__` does not take its items as one argument."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__([a, b])


class Ordered(collections.OrderedDict):  # type: ignore[type-arg]
    """An OrderedDict with an `__init__` of its own."""

    def __init__(self, z: Any, *, a: Any) -> None:
        super().__init__(z=z, a=a)


class Defaults(collections.defaultdict):  # type: ignore[type-arg]
    """A defaultdict with an `__init__` of its own."""

    def __init__(self, z: Any, *, a: Any) -> None:
        super().__init__(list, z=z, a=a)


@jax.tree_util.register_pytree_node_class
class RegisteredMapping(Frozen):
    """A mapping that says itself what its children are."""

    def __init__(self, scale: int, k: Any) -> None:
        super().__init__({"k": k, "scale": scale})

    def tree_flatten(self) -> Any:
        return (self["k"],), self["scale"]

    @classmethod
    def tree_unflatten(cls, scale: int, children: Any) -> Any:
        return cls(scale, *children)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    """A registered dataclass."""

    b: Any
    a: Any


NESTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda v: [v, [v, []]],
    "tuple": lambda v: (v, (), (v,)),
    "namedtuple": lambda v: Point(v, [v]),
    "dict": lambda v: {"b": v, "a": {"c": v}},
    "OrderedDict": lambda v: collections.OrderedDict([("z", v), ("a", v)]),
    "defaultdict": lambda v: collections.defaultdict(list, {"k": v}),
    "UserDict": lambda v: collections.UserDict({"k": v}),
    "subclass": lambda v: Custom({"k": v}, note="kept"),
    "Mapping": lambda v: Frozen({"k": v, "l": [v]}),
    "proxy": lambda v: types.MappingProxyType({"k": v}),
    "list subclass": lambda v: Items([v, v]),
    "int keys": lambda v: {1: v, 0: v},
    "named tuple with __new__": lambda v: Estimate(v),
    "tuple with __new__": lambda v: Pair(v, [v]),
    "list with __init__": lambda v: PairList(v, (v,)),
    "OrderedDict with __init__": lambda v: Ordered(v, a=v),
    "defaultdict with __init__": lambda v: Defaults(v, a=v),
    "registered mapping": lambda v: RegisteredMapping(3, [v]),
    "dataclass": lambda v: Record(v, {"x": v}),
}


@pytest.mark.parametrize("kind", list(NESTS))
def test_t16_regroup_keeps_containers_and_select_undoes_it(kind: str) -> None:
    make = NESTS[kind]
    nests = [make(jnp.float32(i)) for i in range(3)]
    merged = regroup(nests)
    assert type(merged) is type(nests[0])
    leaves: list[Any] = []
    map_structure(leaves.append, merged)
    assert leaves and all(isinstance(leaf, rx.PerReplica) for leaf in leaves)
    for i, nest in enumerate(nests):
        again = select(i, merged)
        assert type(again) is type(nest)
        got: list[Any] = []
        expected: list[Any] = []
        map_structure(got.append, again)
        map_structure(expected.append, nest)
        assert len(got) == len(expected)
        assert all(a is b for a, b in zip(got, expected, strict=True))
    if isinstance(merged, dict):
        assert list(merged) == list(nests[0])


def test_t16_what_a_subclass_carries_is_kept() -> None:
    merged = regroup([Custom({"k": 1.5}, note="kept"), Custom({"k": 2.5}, note="kept")])
    assert merged.note == "kept" and merged["k"].values == (1.5, 2.5)
    merged = regroup([collections.defaultdict(list, a=i) for i in (1, 2)])
    assert merged["new"] == []
    merged = regroup([Defaults(i, a=i) for i in (1, 2)])
    assert merged["new"] == []
    assert regroup([Pair(i, i) for i in (1, 2)]).note == "kept"
    assert regroup([RegisteredMapping(3, i) for i in (1, 2)])["scale"] == 3


def test_t16_a_mapping_that_cannot_be_rebuilt_is_refused() -> None:
    class Fixed(Frozen):
        def __init__(self, a: Any, b: Any) -> None:
            super().__init__({"a": a, "b": b})

    with refused(TypeError, "register_pytree_node"):
        regroup([Fixed(1, 2), Fixed(3, 4)])


WITH_OWN_NEW = [kind for kind in NESTS if "__" in kind]


@pytest.mark.parametrize("kind", WITH_OWN_NEW)
@pytest.mark.strategies("mirrored_2", "one_device")
def test_t16_classes_with_their_own_new_through_all_calls(
    strategy: Any, run: Any, kind: str
) -> None:
    make, value = NESTS[kind], values(strategy, lambda i: jnp.float32(i + 1))
    result = run(strategy, make, (value,))
    results = {
        "argument": run(strategy, lambda nest: nest, (result,)),
        "merge_call": run(
            strategy,
            lambda v: rx.get_replica_context().merge_call(lambda _, nest: nest, (make(v),)),
            (value,),
        ),
        "all_reduce": run(
            strategy, lambda v: rx.get_replica_context().all_reduce("sum", make(v)), (value,)
        ),
        "reduce": strategy.reduce("sum", result, axis=None),
    }
    for name, found in results.items():
        assert type(found) is type(result), name
    total = sum(range(strategy.num_replicas_in_sync + 1))
    assert {float(leaf) for leaf in leaves_of(results["reduce"])} == {total}


@pytest.mark.parametrize("kind", ["namedtuple", "subclass", "Mapping"])
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t16_containers_through_run(strategy: Any, run: Any, kind: str) -> None:
    result = run(strategy, NESTS[kind], (values(strategy, lambda i: jnp.float32(i)),))
    assert type(result) is type(NESTS[kind](0))
    for i, own in enumerate(strategy.experimental_local_results(result)):
        assert type(own) is type(result)
        leaves: list[Any] = []
        map_structure(leaves.append, own)
        assert leaves and all(float(leaf) == i for leaf in leaves)


def test_t16_regroup_merges_equal_and_different_leaves() -> None:
    shared = jnp.ones(2)
    merged = regroup([(shared, 7, "a", None, 1.0), (shared, 7, "b", None, 2.0)])
    assert merged[0] is shared
    assert merged[1] == 7 and merged[3] is None
    assert merged[2].values == ("a", "b")
    assert merged[4].values == (1.0, 2.0)
    assert regroup([shared]) is shared
    different = regroup([1, True])
    assert isinstance(different, rx.PerReplica), "1 and True are equal but not the same"
    assert regroup([None, shared]).values[1] is shared


def test_t16_regroup_as_mirrored() -> None:
    merged = regroup([{"a": jnp.ones(1)}, {"a": jnp.ones(1)}], wrap=rx.Mirrored)
    assert isinstance(merged["a"], rx.Mirrored)
    assert select_mirrored(1, merged)["a"] is merged["a"].values[1]
    assert select_mirrored(1, [3, "x"]) == [3, "x"]


def test_t16_select_mirrored_refuses_per_replica() -> None:
    with refused(TypeError, "PerReplica"):
        select_mirrored(0, {"a": rx.PerReplica((1, 2))})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 2, 3]),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, [1]),
        ({"a": 1}, collections.OrderedDict(a=1)),
        (Point(1, 2), (1, 2)),
        ([[1], 2], [1, [2]]),
    ],
)
def test_t15_t16_different_structures_are_refused(one: Any, other: Any) -> None:
    for pair in ([one, other], [other, one]):
        with refused(ValueError, "structure"):
            regroup(pair)


def test_select_beyond_the_components() -> None:
    with refused(ValueError, "2"):
        select(2, [rx.PerReplica((1, 2))])


# Local results.


@pytest.mark.every_strategy
def test_s80_x13_local_results(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    result = run(strategy, lambda x: {"a": x, "b": [x * 2]}, (values(strategy, jnp.float32),))
    local = strategy.experimental_local_results(result)
    assert type(local) is tuple and len(local) == n
    assert [float(v["a"]) for v in local] == list(range(n))
    assert [float(v["b"][0]) for v in local] == [2 * i for i in range(n)]
    unwrapped = strategy.unwrap(result["a"])
    assert type(unwrapped) is list and [float(v) for v in unwrapped] == list(range(n))


@pytest.mark.every_strategy
def test_s80_a_plain_value_gives_a_tuple_of_it(strategy: Any) -> None:
    x = jnp.ones(2)
    assert strategy.experimental_local_results(x) == (x,)
    assert strategy.experimental_local_results(x)[0] is x
    assert strategy.experimental_local_results([1, "a"]) == ([1, "a"],)
    assert strategy.experimental_local_results(None) == (None,)
    assert strategy.unwrap(3) == [3]


@pytest.mark.every_strategy
def test_s80_allowed_in_every_context(strategy: Any) -> None:
    seen: list[Any] = []

    def fn(x: Any) -> None:
        seen.append(strategy.experimental_local_results(x))

    strategy.run(fn, args=(values(strategy, jnp.float32),))
    with strategy.scope():
        fn(jnp.float32(7))
    assert all(type(s) is tuple and len(s) == 1 for s in seen)
    assert len(seen) == strategy.num_replicas_in_sync + 1


@pytest.mark.every_strategy
@pytest.mark.strategies(*MANY_REPLICAS)
def test_s80_nest_of_distributed_and_plain_values(strategy: Any) -> None:
    nest = (values(strategy, jnp.float32), "plain", {"m": mirrored(strategy)})
    local = strategy.experimental_local_results(nest)
    assert len(local) == strategy.num_replicas_in_sync
    for i, (own, plain, other) in enumerate(local):
        assert float(own) == i and plain == "plain"
        np.testing.assert_array_equal(other["m"], [1, 3])


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4", "virtual_2", "central_2")
def test_s80_in_compiled_cross_replica_code(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    @rx.function
    def fn(x: Any) -> Any:
        y = strategy.run(lambda v: v + 1, args=(x,))
        parts = strategy.experimental_local_results(y)
        return sum(k * part for k, part in enumerate(parts, 1))

    assert float(fn(values(strategy, jnp.float32))) == sum(k * k for k in range(1, n + 1))


@pytest.mark.every_strategy
def test_s82_local_results_of_a_variable(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    local = strategy.experimental_local_results(v)
    assert type(local) is tuple
    assert len(local) == len(v.components)
    for part in local:
        np.testing.assert_array_equal(part, [1, 2])


@pytest.mark.every_strategy
def test_s82_nest_of_a_result_and_a_variable(strategy: Any) -> None:
    """A variable with one copy stands in the results of every replica."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(5.0)
    local = strategy.experimental_local_results((values(strategy, jnp.float32), v))
    assert len(local) == n
    for i, (own, part) in enumerate(local):
        assert float(own) == i
        assert float(part) == 5.0


# Values from a function.


@pytest.mark.every_strategy
def test_s84_value_fn_is_called_once_per_replica(strategy: Any) -> None:
    seen: list[Any] = []

    def value_fn(*args: Any) -> Any:
        assert len(args) == 1
        seen.append(args[0])
        return jnp.float32(args[0].replica_id_in_sync_group)

    x = strategy.experimental_distribute_values_from_function(value_fn)
    n = strategy.num_replicas_in_sync
    assert all(isinstance(c, rx.experimental.ValueContext) for c in seen)
    assert [c.replica_id_in_sync_group for c in seen] == list(range(n))
    assert [c.num_replicas_in_sync for c in seen] == [n] * n
    assert [float(v) for v in strategy.experimental_local_results(x)] == list(range(n))


@pytest.mark.every_strategy
def test_s85_s86_s87_samples(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    make = strategy.experimental_distribute_values_from_function
    local = strategy.experimental_local_results
    assert local(make(lambda ctx: 1.0)) == (1.0,) * n
    array = np.array([3.0, 2.0, 1.0, 0.0])
    got = local(make(lambda ctx: array[ctx.replica_id_in_sync_group]))
    assert got == tuple(array[:n])
    assert local(make(lambda ctx: ctx.num_replicas_in_sync)) == (n,) * n


def test_s87_values_are_arguments_of_run(strategy: Any, run: Any) -> None:
    n = strategy.num_replicas_in_sync
    x = strategy.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync)
    result = run(strategy, lambda v: v * 2, (x,))
    assert all(int(v) == 2 * n for v in strategy.experimental_local_results(result))


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
def test_s88_placed_values_keep_their_device(strategy: Any, devices: Any) -> None:
    x = values(strategy, lambda i: jax.device_put(jnp.ones(2), devices[7 - i]))
    for i, part in enumerate(strategy.experimental_local_results(x)):
        assert part.devices() == {devices[7 - i]}
    result = strategy.run(lambda v: v + 1, args=(x,))
    for part, device in zip(result.values, strategy.extended.layout.devices, strict=True):
        assert part.devices() == {device}


@pytest.mark.strategies(*MANY_REPLICAS)
def test_s89_equal_values_are_wrapped_leaf_by_leaf(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    shared = jnp.ones(2)
    x = strategy.experimental_distribute_values_from_function(
        lambda ctx: {"a": [1], "b": (shared, "s", None)}
    )
    for leaf in (x["a"][0], *x["b"]):
        assert isinstance(leaf, rx.PerReplica) and len(leaf.values) == n
    assert x["b"][0].values[n - 1] is shared


@pytest.mark.strategies(*MANY_REPLICAS)
def test_s89_different_structures_are_refused(strategy: Any) -> None:
    with refused(ValueError, "structure"):
        values(strategy, lambda i: [1] * (i + 1))


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_s84_replica_context_is_refused(strategy: Any, run: Any) -> None:
    with refused(RuntimeError, "cross-replica"):
        run(strategy, lambda: values(strategy, lambda i: 1.0))


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2")
def test_s84_an_error_of_value_fn_reaches_the_caller(strategy: Any) -> None:
    def value_fn(ctx: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.experimental_distribute_values_from_function(value_fn)
    assert float(strategy.reduce("MEAN", 1.0, axis=None)) == 1.0


def test_s84_value_context() -> None:
    context = rx.experimental.ValueContext()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    context = rx.experimental.ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=3)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (2, 3)
    assert "2" in repr(context) and "3" in repr(context)


# value_container.


@pytest.mark.every_strategy
def test_s101_container_of_a_variable_component(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    for component in strategy.experimental_local_results(v):
        assert strategy.extended.value_container(component) is v
    assert strategy.extended.value_container(v) is v


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "mirrored_4")
def test_s101_s103_container_of_a_component(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda x: x + 1, (values(strategy, jnp.float32),))
    for component in strategy.experimental_local_results(result):
        container = strategy.extended.value_container(component)
        assert container is result
        local = strategy.experimental_local_results(container)
        assert any(component is part for part in local)


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_s103_container_of_mirrored_and_made_values(strategy: Any) -> None:
    m = mirrored(strategy)
    for part in m.values:
        assert strategy.extended.value_container(part) is m
    x = values(strategy, jnp.float32)
    assert strategy.extended.value_container(x.values[1]) is x
    assert strategy.extended.value_container(x) is x


def test_s102_no_container(strategy: Any) -> None:
    for x in (jnp.ones(2), 3, "text", None, np.ones(1)):
        assert strategy.extended.value_container(x) is x


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_s102_dead_container(strategy: Any, run: Any) -> None:
    result = run(strategy, lambda x: x + 1, (values(strategy, jnp.float32),))
    component = strategy.experimental_local_results(result)[0]
    del result
    gc.collect()
    assert strategy.extended.value_container(component) is component


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_s103_component_of_two_containers(strategy: Any) -> None:
    """A component that a later merge holds as well is still found in its container."""
    x = values(strategy, jnp.float32)
    again = strategy.run(lambda v: v, args=(x,))
    component = strategy.experimental_local_results(again)[0]
    container = strategy.extended.value_container(component)
    assert any(component is v for v in strategy.experimental_local_results(container))
