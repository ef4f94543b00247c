"""`rx.contrib.distribute`, the API of r1.9: towers, localities, tower-local variables, input."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
import replicax.tf as tf
from replicax.contrib import distribute
from replicax.contrib.distribute.locality import locality_of

KINDS = ("default", "one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
SEVERAL = ("mirrored_2", "mirrored_4", "virtual_2", "central_2", "tpu_2", "minimal_2")
MIRRORED = ("mirrored_2", "mirrored_4", "virtual_2", "tpu_2")


def face(strategy: Any) -> Any:
    return distribute.DistributionStrategy.of(strategy)


def call(run: Any, d: Any, fn: Any, *args: Any) -> Any:
    """Calls `fn` on towers by each executor; inside a scope."""
    if run.executor == "compiled":
        fn = rx.function(fn)
    if run.executor == "inside":
        return rx.function(lambda *a: d.call_for_each_tower(fn, *a))(*args)
    return d.call_for_each_tower(fn, *args)


def tower_id() -> Any:
    return distribute.get_tower_context().tower_id


def per_tower(d: Any, start: float = 0.0) -> Any:
    return d.call_for_each_tower(lambda: tower_id() + jnp.float32(start))


def numbers(d: Any, value: Any) -> list[float]:
    return [float(np.asarray(x)) for x in d.unwrap(value)]


def on(value: Any) -> list[str]:
    return [f"CPU:{next(iter(x.devices())).id}" for x in value]


@pytest.fixture
def two() -> Any:
    return distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def central() -> Any:
    """Towers and variables on different devices, so that M and V(v) differ."""
    made = rx.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3")
    return face(made)


# Contexts and facts.


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS)
def test_s18_s38_s223_one_tower_or_several(strategy: Any, run: Any) -> None:
    d = face(strategy)
    calls: list[int] = []

    def fn() -> Any:
        calls.append(1)
        context = distribute.get_tower_context()
        assert context.is_single_tower is d.is_single_tower
        assert context.num_towers == d.num_towers
        return tower_id() * 2.0

    with d.scope():
        result = call(run, d, fn)
        assert numbers(d, result) == [2.0 * i for i in range(d.num_towers)]
        average = d.fetch(d.reduce("sum", result)) / d.num_towers
        assert float(average) == float(d.fetch(d.reduce("mean", result)))
    if run.executor == "threaded":
        assert (len(calls) == 1) is d.is_single_tower
    assert d.num_towers == strategy.num_replicas_in_sync


def test_s18_the_default_strategy_is_a_single_tower() -> None:
    context = distribute.get_tower_context()
    assert context.is_single_tower
    assert int(context.tower_id) == 0
    d = distribute.get_distribution_strategy()
    assert d.is_single_tower
    assert d.num_towers == 1
    assert context.distribution_strategy.strategy is d.strategy
    assert not distribute.has_distribution_strategy()
    assert distribute.get_cross_tower_context() is None
    assert context.merge_call(lambda d, x: d.num_towers + x, 2) == 3


def test_contexts_of_scope_tower_and_merge(two: Any) -> None:
    def merge_fn(d: Any) -> None:
        assert d is two
        assert distribute.get_tower_context() is None
        assert distribute.get_cross_tower_context() is two

    def fn() -> None:
        context = distribute.get_tower_context()
        assert context.distribution_strategy is two
        assert distribute.get_cross_tower_context() is None
        assert context.device == two.worker_devices[int(context.tower_id)]
        distribute.require_tower_context(context)
        context.merge_call(merge_fn)

    with two.scope() as entered:
        assert entered is two
        assert distribute.has_distribution_strategy()
        assert distribute.get_distribution_strategy() is two
        assert distribute.get_tower_context() is None
        assert rx.get_strategy() is two.strategy
        two.call_for_each_tower(fn)
    outside = distribute.get_tower_context()
    with two.scope(), pytest.raises(rx.errors.ContextError, match="cross-tower code"):
        distribute.require_tower_context(outside)


def test_the_scope_belongs_to_one_thread(two: Any) -> None:
    seen: list[bool] = []
    with two.scope():
        thread = threading.Thread(target=lambda: seen.append(rx.has_strategy()))
        thread.start()
        thread.join(10)
    assert seen == [False]


def test_a_strategy_of_today_gets_one_face_while_it_is_used() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    d = face(strategy)
    assert face(strategy) is d
    assert d.strategy is strategy
    del d
    gc.collect()
    assert face(strategy).strategy is strategy


@pytest.mark.parametrize("name", ["reduce", "batch_reduce", "broadcast", "update", "towers"])
def test_methods_need_the_cross_tower_context(two: Any, name: str) -> None:
    with two.scope():
        w = rx.Variable(1.0)
    attempt = {
        "reduce": lambda: two.reduce("sum", 1.0),
        "batch_reduce": lambda: two.batch_reduce("sum", [(1.0, None)]),
        "broadcast": lambda: two.broadcast(1.0),
        "update": lambda: two.update(w, lambda v: v.assign(1.0)),
        "towers": lambda: two.call_for_each_tower(lambda: 1),
    }[name]
    with pytest.raises(rx.errors.ContextError, match=r"no scope is open.*with distribution.scope"):
        attempt()
    with two.scope(), pytest.raises(rx.errors.ContextError, match=r"tower context.*merge_call"):
        two.call_for_each_tower(attempt)
    other = distribute.MirroredStrategy(["CPU:2"])
    with other.scope(), pytest.raises(rx.errors.ContextError, match="cross-tower context"):
        attempt()


# Towers.


@pytest.mark.strategies(*KINDS)
def test_s37_arguments_are_forwarded_and_run_concurrently_is_not(strategy: Any) -> None:
    d = face(strategy)
    seen: list[Any] = []

    def fn(*args: Any, **kwargs: Any) -> None:
        seen.append((args, kwargs))

    with d.scope():
        d.call_for_each_tower(fn, 1, "two", three=3)
        d.call_for_each_tower(fn, 1, "two", three=3, run_concurrently=False)
    assert seen == [((1, "two"), {"three": 3})] * (2 * d.num_towers)


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_2", "mirrored_4", "virtual_2")
def test_s39_worker_device_index(strategy: Any) -> None:
    d = face(strategy)
    seen: dict[int, str] = {}

    def fn(device_id: int) -> Any:
        assert isinstance(device_id, int)
        seen[device_id] = distribute.get_tower_context().device
        return jnp.asarray(device_id)

    with d.scope():
        result = d.call_for_each_tower(fn, d.worker_device_index)
    assert numbers(d, result) == list(range(d.num_towers))
    if d.is_single_tower:
        assert d.worker_device_index == 0
    else:
        assert seen == dict(enumerate(d.worker_devices))


@pytest.mark.strategies(*KINDS)
def test_s45_merge_call_of_towers(strategy: Any, run: Any) -> None:
    def merge_fn(distribution: Any, three_plus_tower_id: Any) -> Any:
        return sum(distribution.unwrap(three_plus_tower_id))

    def fn(three: Any) -> Any:
        v = three + tower_id()
        s = distribute.get_tower_context().merge_call(merge_fn, v)
        return s + v

    d = face(strategy)
    n = d.num_towers
    with d.scope():
        result = call(run, d, fn, 3)
    assert numbers(d, result) == [3 * n + n * (n - 1) / 2 + 3 + i for i in range(n)]


def test_towers_that_pass_different_merge_functions_are_told_so(two: Any) -> None:
    def fn() -> Any:
        context = distribute.get_tower_context()
        chosen = [lambda d: 1, lambda d: 2][int(context.tower_id)]
        return context.merge_call(chosen)

    with two.scope(), pytest.raises(rx.errors.ContextError, match="lambda"):
        two.call_for_each_tower(fn)
    with two.scope():
        assert two.call_for_each_tower(
            lambda: distribute.get_tower_context().merge_call(lambda d: 5)
        )
    with two.scope(), pytest.raises(rx.errors.ArgumentTypeError, match="merge_fn"):
        two.call_for_each_tower(lambda: distribute.get_tower_context().merge_call(7))


@pytest.mark.strategies(*KINDS)
def test_s68_s83_unwrap_and_group(strategy: Any) -> None:
    d = face(strategy)
    with d.scope():
        w = rx.Variable(2.0)
        result = per_tower(d, 1.0)
    assert isinstance(d.unwrap(result), list)
    assert numbers(d, result) == [1.0 + i for i in range(d.num_towers)]
    assert d.unwrap(5) == [5]
    assert len(d.unwrap(w)) == len(strategy.experimental_local_results(w))
    assert d.group(result) is None
    assert d.group(result, name="train") is None
    with pytest.raises(TypeError):
        d.group(result, "train", 3)


# Values and their localities.


@pytest.mark.strategies(*SEVERAL)
def test_s63_s64_reduce(strategy: Any) -> None:
    d = face(strategy)
    n = d.num_towers
    with d.scope():
        w = rx.Variable(1.0)
        t = per_tower(d, 1.0)
        total = d.reduce("sum", t)
        assert isinstance(total, rx.Mirrored)
        assert [x.devices() for x in total.values] == [x.devices() for x in d.unwrap(t)]
        assert numbers(d, total) == [n * (n + 1) / 2] * n
        assert numbers(d, d.reduce("mean", t)) == [(n + 1) / 2] * n
        at_v = d.unwrap(d.reduce("sum", t, w))
        assert [x.devices() for x in at_v] == [{p} for p in w.placement][: len(at_v)]
        for method in ("SUM", "Mean", "max", rx.ReduceOp.SUM, None):
            with pytest.raises(rx.errors.InvalidArgumentError, match='"sum" or "mean"'):
                d.reduce(method, t)
            with pytest.raises(rx.errors.InvalidArgumentError, match='"sum" or "mean"'):
                d.batch_reduce(method, [(t, None)])


@pytest.mark.strategies(*KINDS)
def test_s63_batch_reduce_is_several_reduces(strategy: Any) -> None:
    d = face(strategy)
    with d.scope():
        a, b = rx.Variable(1.0), rx.Variable([1.0, 2.0])
        x = per_tower(d, 1.0)
        y = d.call_for_each_tower(lambda: jnp.ones(2) * (1.0 + tower_id()))
        together = d.batch_reduce("sum", [(x, a), (y, b), (x, None)])
        apart = [d.reduce("sum", x, a), d.reduce("sum", y, b), d.reduce("sum", x)]
    assert len(together) == 3
    for one, other in zip(together, apart, strict=True):
        assert type(one) is type(other)
        for p, q in zip(d.unwrap(one), d.unwrap(other), strict=True):
            np.testing.assert_array_equal(p, q)
            assert p.devices() == q.devices()


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
def test_s65_an_all_reduce_in_a_tower_makes_a_mirrored_value(strategy: Any, run: Any) -> None:
    d = face(strategy)

    def fn() -> Any:
        def merge_fn(d: Any, t: Any) -> Any:
            total = d.reduce("sum", t)
            assert isinstance(total, rx.Mirrored)
            return total

        return distribute.get_tower_context().merge_call(merge_fn, tower_id() + 1.0)

    n = d.num_towers
    with d.scope():
        assert numbers(d, call(run, d, fn)) == [n * (n + 1) / 2] * n


def test_s66_broadcast(two: Any) -> None:
    with two.scope():
        w = rx.Variable(1.0)
        for destinations, where in (
            (None, ["CPU:0", "CPU:1"]),
            (w, ["CPU:0", "CPU:1"]),
            (["CPU:2", "CPU:4"], ["CPU:2", "CPU:4"]),
            (["/device:CPU:3", "/cpu:5"], ["CPU:3", "CPU:5"]),
        ):
            value = two.broadcast(jnp.asarray(7.0), destinations)
            assert isinstance(value, rx.Mirrored)
            assert on(value.values) == where
            assert numbers(two, value) == [7.0, 7.0]
        assert on([two.broadcast(7, "CPU:6")]) == ["CPU:6"]
        assert isinstance(two.broadcast(7.0), rx.Mirrored)


def test_s66_the_default_strategy_broadcasts_to_itself() -> None:
    d = distribute.get_distribution_strategy()
    x = jnp.asarray(3.0)
    assert d.broadcast(x) is x
    with pytest.raises(rx.errors.UnsupportedError):
        d.broadcast(x, ["CPU:1"])


def test_s67_fetch(two: Any) -> None:
    computed_on: list[str] = []

    def fn(x: Any) -> Any:
        result = x * 2
        computed_on.extend(on([result]))
        return result

    with two.scope():
        w = rx.Variable(4.0)
        m = two.broadcast(jnp.asarray(3.0), ["CPU:2", "CPU:3"])
        t = per_tower(two, 1.0)
        # The copy on the destination is taken, without a copy.
        assert two.fetch(m, "CPU:3").unsafe_buffer_pointer() == m.values[1].unsafe_buffer_pointer()
        fetched = two.fetch(m, fn=fn)
        assert (float(fetched), on([fetched]), computed_on) == (6.0, ["CPU:0"], ["CPU:2"])
        assert (float(two.fetch(w, "CPU:1")), on([two.fetch(w, "CPU:1")])) == (4.0, ["CPU:1"])
        assert on([two.fetch(w, "CPU:5")]) == ["CPU:5"]
        assert on([two.fetch(jnp.asarray(1.0), "/device:CPU:4")]) == ["CPU:4"]
        computed_on.clear()
        everything = two.fetch(t, fn=fn)
        assert (numbers(two, everything), on(everything.values)) == ([2.0, 4.0], ["CPU:0"] * 2)
        assert computed_on == ["CPU:0", "CPU:1"]
    with pytest.raises(rx.errors.InvalidArgumentError, match="CPU:99"):
        two.fetch(m, "CPU:99")


@pytest.mark.strategies(*KINDS)
def test_s67_fetch_of_any_strategy(strategy: Any) -> None:
    d = face(strategy)
    with d.scope():
        w = rx.Variable([1.0, 2.0])
    np.testing.assert_array_equal(d.fetch(w, fn=lambda x: x + 1), [2.0, 3.0])
    assert d.fetch(2.5) == 2.5


def test_s136_localities(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0)
        with two.colocate_vars_with(v):
            v2 = rx.Variable(2.0)
        with two.tower_local_var_scope("sum"):
            local = rx.Variable(0.0)
        dataset = two.distribute_dataset(rx.data.Dataset.range(4).batch(1))
        t = dataset.make_one_shot_iterator().get_next()
        devices = tuple(jax.devices("cpu")[:2])
        non_slot = two.non_slot_devices([v])
        expected = {
            "T": (True, [t, per_tower(two), local]),
            "M": (False, [two.broadcast(1.0), two.reduce("sum", t)]),
            "V": (False, [v, v2, two.broadcast(1.0, v), two.reduce("sum", t, v)]),
            "update": (False, [two.update(v, lambda c: c.assign_add(1.0))]),
            "N": (False, [two.update_non_slot(non_slot, lambda: jnp.asarray(1.0))]),
        }
    for name, (is_per_tower, values) in expected.items():
        for value in values:
            found = locality_of(value)
            assert found is not None, name
            assert found.is_per_tower is is_per_tower, name
            if not is_per_tower:
                assert found.devices == devices, name
    assert v.placement == v2.placement
    assert locality_of(3.0) is locality_of(jnp.ones(2)) is None


def test_s136_localities_where_variables_have_devices_of_their_own(central: Any) -> None:
    d = central
    assert [x.rpartition("device:")[2] for x in d.worker_devices] == ["CPU:0", "CPU:1"]
    assert [x.rpartition("device:")[2] for x in d.parameter_devices] == ["CPU:3"]
    with d.scope():
        v = rx.Variable(1.0)
        t = per_tower(d, 1.0)
        assert on(d.reduce("sum", t).values) == ["CPU:0", "CPU:1"]
        at_v = d.reduce("sum", t, v)
        assert (float(at_v), on([at_v])) == (3.0, ["CPU:3"])
        assert on([d.broadcast(1.0, v)]) == ["CPU:3"]
        d.update(v, lambda c, x: c.assign_add(x), at_v)
        assert float(v) == 4.0
        m = d.broadcast(2.0)
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"locality V\('Variable'\)"):
            d.update(v, lambda c, x: c.assign_add(x), m)
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"locality N, on CPU:3"):
            d.update_non_slot(d.non_slot_devices([v]), lambda x: x, m)
    assert float(v) == 4.0


def misuses(d: Any) -> dict[str, tuple[Any, str]]:
    """What violates a rule of localities, and what the error says."""
    v = rx.Variable(1.0, name="v")
    with d.tower_local_var_scope("mean"):
        local = rx.Variable(1.0, name="local")
    t = per_tower(d)
    other = d.broadcast(1.0, ["CPU:2", "CPU:3"])
    non_slot = d.non_slot_devices([v])
    return {
        "towers of V": (
            lambda: d.call_for_each_tower(lambda x: x, other),
            r"T or M.*CPU:0, CPU:1.*mirrored value on CPU:2, CPU:3.*broadcast",
        ),
        "towers of V in a nest": (
            lambda: d.call_for_each_tower(lambda x: x, k={"a": [other]}),
            "T or M",
        ),
        "reduce of M": (lambda: d.reduce("sum", d.broadcast(1.0)), "T, one per tower.*equal"),
        "reduce of a variable": (lambda: d.reduce("mean", v), "variable 'v' on CPU:0, CPU:1"),
        "batch_reduce of M": (
            lambda: d.batch_reduce("sum", [(t, v), (other, v)]),
            "T, one per tower",
        ),
        "broadcast of T": (lambda: d.broadcast(t), r"one value.*locality T.*reduce\("),
        "broadcast of a tower-local variable": (lambda: d.broadcast(local), "'local'"),
        "update with T": (
            lambda: d.update(v, lambda c, x: c.assign(x), t),
            r"V\('v'\).*locality T.*reduce\(",
        ),
        "update with a tower-local variable": (
            lambda: d.update(v, lambda c, x: c.assign(x), local),
            "tower-local variable 'local'",
        ),
        "update with other devices": (
            lambda: d.update(v, lambda c, x: c.assign(x), x=other),
            r"V\('v'\).*CPU:2, CPU:3.*destinations",
        ),
        "update_non_slot with T": (lambda: d.update_non_slot(non_slot, lambda x: x, t), "N, on"),
        "update_non_slot with other devices": (
            lambda: d.update_non_slot(non_slot, lambda x: x, other),
            "N, on CPU:0, CPU:1",
        ),
    }


@pytest.mark.parametrize(
    "name",
    [
        "towers of V",
        "towers of V in a nest",
        "reduce of M",
        "reduce of a variable",
        "batch_reduce of M",
        "broadcast of T",
        "broadcast of a tower-local variable",
        "update with T",
        "update with a tower-local variable",
        "update with other devices",
        "update_non_slot with T",
        "update_non_slot with other devices",
    ],
)
def test_s136_violations_of_locality_are_explained(two: Any, name: str) -> None:
    with two.scope():
        attempt, text = misuses(two)[name]
        with pytest.raises(rx.errors.InvalidArgumentError, match=text) as caught:
            attempt()
    assert len(caught.value.parts) == 3


def test_s136_a_variable_that_is_not_colocated_is_refused_by_update(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0, name="v")
        with two.colocate_vars_with(["CPU:5"]):
            apart = rx.Variable(2.0, name="apart")
        with pytest.raises(rx.errors.InvalidArgumentError, match=r"'apart'.*colocate_vars_with"):
            two.update(v, lambda c, x: c.assign(x), apart)


def test_locality_is_checked_in_compiled_code_too(two: Any) -> None:
    with two.scope():
        v = rx.Variable(1.0)
        t = per_tower(two, 1.0)

    @rx.function
    def wrong(t: Any) -> None:
        with two.scope():
            two.update(v, lambda c, x: c.assign(x), t)

    @rx.function
    def right(t: Any) -> None:
        with two.scope():
            two.update(v, lambda c, x: c.assign(x), two.reduce("sum", t, v))

    with pytest.raises(rx.errors.InvalidArgumentError, match="locality T"):
        wrong(t)
    right(t)
    assert float(v) == 3.0


# Tower-local variables.


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "tpu_2")
@pytest.mark.parametrize("method", ["sum", "mean"])
def test_s112_s113_s115_s117_tower_local_variables(strategy: Any, run: Any, method: str) -> None:
    d = face(strategy)
    n = d.num_towers
    with d.scope():
        with d.tower_local_var_scope(method):
            v = rx.Variable(0.0, name="local")
        outside = rx.Variable(0.0)
        assert isinstance(v, rx.SyncOnReadVariable)
        assert not v.trainable
        assert outside.trainable

        def step() -> None:
            v.assign_add(1.0 + tower_id())

        # Several steps without an aggregation.
        for _ in range(3):
            call(run, d, step)
        copies = [3.0 * (1 + i) for i in range(n)]
        assert numbers(d, v) == copies
        expected = sum(copies) / (n if method == "mean" else 1)
        assert float(d.fetch(v)) == expected
        assert float(d.fetch(v, fn=lambda x: x + 1)) == expected + 1
        assert numbers(d, d.reduce(method, v)) == [expected] * n


def test_s113_a_trainable_tower_local_variable_is_refused(two: Any) -> None:
    with two.scope(), two.tower_local_var_scope("sum"):
        with pytest.raises(rx.errors.InvalidArgumentError, match="not trainable"):
            rx.Variable(1.0, trainable=True)
        assert not rx.Variable(1.0, trainable=False).trainable
    with pytest.raises(rx.errors.InvalidArgumentError, match='"sum" or "mean"'):
        two.tower_local_var_scope("first")
    with pytest.raises(rx.errors.ContextError, match="scope"):
        two.tower_local_var_scope("sum")


@pytest.mark.parametrize("method", ["sum", "mean"])
def test_s111_assign_add_outside_of_towers_is_refused(two: Any, method: str) -> None:
    with two.scope():
        with two.tower_local_var_scope(method):
            v = rx.Variable(1.0)
        for write in (v.assign_add, v.assign_sub):
            with pytest.raises(ValueError, match="ON_READ"):
                write(1.0)
    assert numbers(two, v) == [1.0, 1.0]


@pytest.mark.parametrize(("method", "saved"), [("sum", 7.0), ("mean", 3.5)])
def test_s114_saving_stores_the_reduced_value(
    two: Any, method: str, saved: float, tmp_path: Path
) -> None:
    with two.scope():
        with two.tower_local_var_scope(method):
            v = rx.Variable(0.0)
        two.call_for_each_tower(lambda: v.assign(3.0 + tower_id()))
    path = rx.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    with two.scope():
        v.assign(0.0)
    plain = rx.Variable(0.0)
    rx.train.Checkpoint(v=plain).restore(path).assert_consumed()
    assert float(plain) == saved
    rx.train.Checkpoint(v=v).restore(path)
    assert numbers(two, v) == [3.5, 3.5]
    assert float(two.fetch(v)) == saved


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
def test_s116_all_components_start_from_one_random_value(strategy: Any) -> None:
    d = face(strategy)
    calls: list[int] = []

    def initial() -> Any:
        calls.append(1)
        return np.random.default_rng().normal(size=3).astype(np.float32)

    with d.scope(), d.tower_local_var_scope("mean"):
        v = rx.Variable(initial)
    first, *rest = d.unwrap(v)
    for other in rest:
        np.testing.assert_array_equal(first.numpy(), other.numpy())
    assert calls == [1]


# Colocation and updates.


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "one_device", "tpu_2")
def test_s128_colocate_vars_with_in_and_out_of_towers(strategy: Any) -> None:
    d = face(strategy)
    made: list[Any] = []
    with d.scope():
        v1 = rx.Variable(1.0)
        with d.colocate_vars_with(v1):
            v2 = rx.Variable(2.0)

        def fn() -> None:
            with d.colocate_vars_with(v1):
                made.append(rx.Variable(3.0, name="in_tower"))

        d.call_for_each_tower(fn)
        d.update(v1, lambda a, b, c: a.assign_add(b * c), v2, made[0])
    assert v1.placement == v2.placement == made[0].placement
    assert float(v1.read_value()) == 7.0
    other = rx.Variable(1.0)
    with pytest.raises(rx.errors.ContextError, match="scope"):
        d.colocate_vars_with(v1)
    with d.scope(), pytest.raises(rx.errors.InvalidArgumentError):
        d.colocate_vars_with(other)


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2", "central_2", "one_device")
def test_s129_s130_s131_non_slot_variables(strategy: Any) -> None:
    d = face(strategy)
    with d.scope():
        v = rx.Variable(1.0)
        w = rx.Variable(1.0)
        devices = d.non_slot_devices([v, w])
        assert list(devices) == d.parameter_devices
        with d.colocate_vars_with(devices):
            beta1 = rx.Variable(0.5)
            beta2 = rx.Variable(0.25)
        assert beta1.placement == beta2.placement
        assert [x.device for x in d.unwrap(beta1)] == d.parameter_devices
        seen: list[Any] = []

        def fn(x: Any, *, scale: float) -> Any:
            seen.append(1)
            return x * scale

        result = d.update_non_slot(devices, fn, jnp.asarray(2.0), scale=3.0)
        assert numbers(d, result) == [6.0] * len(d.unwrap(result))
        assert len(seen) == len(devices)
        with pytest.raises(rx.errors.InvalidArgumentError, match="non_slot_devices"):
            d.update_non_slot("CPU:0", fn, 1.0, scale=1.0)


def test_s132_the_default_strategy_needs_the_list_of_variables() -> None:
    d = distribute.get_distribution_strategy()
    b, a = rx.Variable(2.0, name="b"), rx.Variable(1.0, name="a")
    assert d.non_slot_devices([b, a]) is a
    assert float(d.update_non_slot(a, lambda x: x + 1, jnp.asarray(1.0))) == 2.0
    with pytest.raises(TypeError):
        d.non_slot_devices()
    with pytest.raises(rx.errors.ContextError, match="devices"):
        _ = d.worker_devices


@pytest.mark.strategies(*KINDS)
def test_the_standard_pattern_of_updates(strategy: Any, run: Any) -> None:
    d = face(strategy)
    n = d.num_towers
    with d.scope():
        v, w = rx.Variable(1.0), rx.Variable([1.0, 2.0])

    def apply(d: Any, grads: Any) -> None:
        for variable, total in zip((v, w), d.batch_reduce("sum", list(grads)), strict=True):
            d.update(variable, lambda c, g: c.assign_sub(g), total)

    def tower() -> None:
        x = 1.0 + tower_id()

        def merge_fn(d: Any, g0: Any, g1: Any) -> None:
            apply(d, [(g0, v), (g1, w)])

        distribute.get_tower_context().merge_call(merge_fn, x * 1.0, jnp.ones(2) * x)

    with d.scope():
        call(run, d, tower)
    total = n * (n + 1) / 2
    assert numbers(d, v) == [1.0 - total] * len(d.unwrap(v))
    np.testing.assert_allclose(d.fetch(w), [1.0 - total, 2.0 - total])


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device", "central_2")
def test_s218_an_optimizer_applies_gradients_in_cross_tower_context(strategy: Any) -> None:
    d = face(strategy)
    n = d.num_towers
    with d.scope():
        w = rx.Variable(1.0)
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [w])
        gradients = d.call_for_each_tower(lambda: 1.0 + tower_id())
        # In the scope, and in a merge function.
        optimizer.apply_gradients([(gradients, w)])
        total = n * (n + 1) / 2
        assert float(d.fetch(w)) == 1.0 - 0.5 * total

        def merge_fn(d: Any, gradient: Any) -> None:
            optimizer.apply_gradients([(gradient, w)])

        d.call_for_each_tower(
            lambda: distribute.get_tower_context().merge_call(merge_fn, 1.0 + tower_id())
        )
        assert float(d.fetch(w)) == 1.0 - total


# Input.


@pytest.mark.strategies(*KINDS)
def test_s159_a_one_shot_iterator_feeds_towers(strategy: Any, run: Any) -> None:
    d = face(strategy)
    n = d.num_towers

    def dataset_fn() -> Any:
        return rx.data.Dataset.range(4 * n).batch(2)

    for given in (dataset_fn, dataset_fn()):
        with d.scope():
            iterator = d.distribute_dataset(given).make_one_shot_iterator()
            seen = []
            for _ in range(2):
                result = call(run, d, lambda x: x * 2, iterator.get_next())
                seen += [np.asarray(x).tolist() for x in d.unwrap(result)]
            with pytest.raises(rx.errors.OutOfRangeError):
                iterator.get_next()
        assert seen == [[4 * i, 4 * i + 2] for i in range(2 * n)]


@pytest.mark.strategies(*KINDS)
def test_s160_an_initializable_iterator_must_be_initialized(strategy: Any) -> None:
    d = face(strategy)
    with d.scope():
        dataset = d.distribute_dataset(lambda: rx.data.Dataset.range(2 * d.num_towers).batch(2))
        iterator = dataset.make_initializable_iterator()
        with pytest.raises(rx.errors.ContextError, match="initialize"):
            iterator.get_next()
        for initialize in (iterator.initializer, iterator.initialize):
            initialize()
            first = d.unwrap(iterator.get_next())[0]
            assert np.asarray(first).tolist() == [0, 1]


def test_input_is_not_read_in_towers(two: Any) -> None:
    with two.scope(), pytest.raises(rx.errors.ContextError):
        two.call_for_each_tower(lambda: two.distribute_dataset([[1.0]]))


# Tensors.


def test_towers_compute_gradients_with_tapes(two: Any) -> None:
    assert tf.contrib.distribute.MirroredStrategy is distribute.MirroredStrategy
    data = tf.data.Dataset.from_tensor_slices(np.arange(1.0, 5.0, dtype=np.float32)).batch(2)
    with two.scope():
        w = tf.Variable(1.0)
        iterator = two.distribute_dataset(lambda: data).make_one_shot_iterator()

        def tower_fn(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(w * x)
            return tape.gradient(loss, w)

        gradients = two.call_for_each_tower(tower_fn, iterator.get_next())
        assert numbers(two, gradients) == [3.0, 7.0]
        total = two.reduce("sum", gradients, w)
        two.update(w, lambda v, g: v.assign_sub(g), total)
        assert numbers(two, w) == [-9.0, -9.0]
        with pytest.raises(rx.errors.InvalidArgumentError, match="locality T"):
            two.update(w, lambda v, g: v.assign_sub(g), gradients)


# Constructors.


def test_configure_returns_the_configuration() -> None:
    d = distribute.OneDeviceStrategy("CPU:1")
    config = object()
    assert d.configure(config) is config
    assert d.configure() is None
    assert d.configure(session_config=config) is config


def test_constructors_of_r1_x() -> None:
    ops = distribute.AllReduceCrossTowerOps("hierarchical_copy", num_packs=2)
    assert isinstance(ops, distribute.CrossTowerOps)
    assert distribute.AllReduceCrossDeviceOps is distribute.AllReduceCrossTowerOps
    d = distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_tower_ops=ops)
    assert d.strategy.extended.cross_device_ops is ops
    assert d.num_towers == 2
    reduction = distribute.ReductionToOneDeviceCrossTowerOps("CPU:2")
    assert distribute.MirroredStrategy(["CPU:0"], None, reduction).is_single_tower
    assert distribute.DistributionStrategy().num_towers == 1
    assert "CPU:3" in distribute.OneDeviceStrategy("CPU:3").worker_devices[0]
    alone = distribute.ParameterServerStrategy()
    assert (alone.num_towers, len(alone.parameter_devices)) == (1, 1)
    with pytest.raises(rx.errors.InvalidArgumentError, match="nccl"):
        distribute.AllReduceCrossTowerOps("pscpu")
    with pytest.raises(rx.errors.InvalidArgumentError, match="`devices` or `num_gpus`"):
        distribute.MirroredStrategy(["CPU:0"], num_gpus=1)
    for make in (distribute.MirroredStrategy, distribute.ParameterServerStrategy):
        name = "num_gpus" if make is distribute.MirroredStrategy else "num_gpus_per_worker"
        for count, text in ((64, "there are 0"), (-1, "0 or more"), (1.5, "0 or more")):
            with pytest.raises(rx.errors.InvalidArgumentError, match=text):
                make(**{name: count})
    with pytest.raises(rx.errors.InvalidArgumentError, match="there are 0"):
        distribute.CollectiveAllReduceStrategy(num_gpus_per_worker=2)


def test_collective_all_reduce_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    d = distribute.CollectiveAllReduceStrategy()
    assert isinstance(d.strategy, rx.MultiWorkerMirroredStrategy)
    assert d.num_towers == len(jax.devices())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("StandardSingleLossStep", "value_and_grad"),
        ("TPUStrategy", "rx.TPUStrategy"),
        ("initialize_tpu_system", "rx.TPUStrategy"),
        ("MiroredStrategy", "Did you mean `MirroredStrategy`"),
    ],
)
def test_names_that_are_not_offered_say_what_to_use(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        getattr(distribute, name)
