"""Mirrored variables: creation, reads and all kinds of writes (S90-S106, T21-T30, T44-T51)."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import DISTRIBUTED, STRATEGIES, TWO_REPLICAS
from vocabulary import WRITERS, copies, num_copies, number, replica_values
from worker_groups import local_ids, replica_results

import replicax as rx

AGGREGATIONS = tuple(rx.VariableAggregation)
NONE, SUM, MEAN, FIRST = (
    rx.VariableAggregation.NONE,
    rx.VariableAggregation.SUM,
    rx.VariableAggregation.MEAN,
    rx.VariableAggregation.ONLY_FIRST_REPLICA,
)
# One strategy of each kind; the others share its code and run the shorter tests.
MATRIX = ("default", "mirrored_1", "mirrored_2", "virtual_2", "central_2")
DENSE = ("assign", "assign_add", "assign_sub")
SCATTER = tuple(f"scatter_{k}" for k in ("add", "sub", "mul", "div", "min", "max", "update"))
NOT_REDUCIBLE = ("scatter_min", "scatter_max", "scatter_update")
START = np.array([4.0, 8.0, 2.0], np.float32)
ROWS = np.array([2.0, 4.0], np.float32)
INDICES = np.array([0, 2])


def is_plain(strategy: Any) -> bool:
    """Whether variables of the strategy have one copy and one writer."""
    return strategy is rx.get_strategy() or isinstance(strategy, rx.OneDeviceStrategy)


def write(variable: Any, kind: str, factor: Any) -> Any:
    if kind in DENSE:
        return getattr(variable, kind)(jnp.asarray(START) * factor)
    return getattr(variable, kind)(rx.IndexedSlices(jnp.asarray(ROWS) * factor, INDICES))


def model(kind: str, aggregation: Any, num_writers: int) -> list[float]:
    """The value after `num_writers` replicas wrote with factors 1, 2, ..., by plain NumPy."""
    factors = [float(i + 1) for i in range(num_writers)]
    if aggregation is FIRST:
        factors = factors[:1]
    share = 1.0 / len(factors) if aggregation is MEAN else 1.0
    value = START.astype(np.float64)
    if kind in DENSE:
        payload = START * sum(factors) * share
        result = {"assign": payload, "assign_add": value + payload, "assign_sub": value - payload}
        return result[kind].tolist()
    for factor in factors:
        # Slices of several replicas are joined: each row is applied in turn.
        rows = ROWS * factor * share
        old = value[INDICES]
        value[INDICES] = {
            "scatter_add": old + rows,
            "scatter_sub": old - rows,
            "scatter_mul": old * rows,
            "scatter_div": old / rows,
            "scatter_min": np.minimum(old, rows),
            "scatter_max": np.maximum(old, rows),
            "scatter_update": rows,
        }[kind]
    return value.tolist()


# Creation.


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2", "minimal_2")
def test_s90_a_variable_made_in_scope_is_mirrored_and_prints_so(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    assert isinstance(v, rx.MirroredVariable)
    copies_of_this_process = [
        "  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>",
        "  1: <rx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>",
    ][: len(local_ids(strategy))]
    assert repr(v) == "MirroredVariable:{\n" + ",\n".join(copies_of_this_process) + "\n}"
    assert str(v) == repr(v)


@pytest.mark.every_strategy
def test_s91_s106_a_variable_made_outside_of_scope_is_ordinary(strategy: Any) -> None:
    v = rx.Variable(1.0)
    assert repr(v) == "<rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"
    assert not isinstance(v, rx.MirroredVariable)
    assert len(strategy.experimental_local_results(v)) == 1
    if strategy is not rx.get_strategy():
        assert not strategy.extended.variable_created_in_scope(v)


@pytest.mark.every_strategy
@pytest.mark.strategies(*DISTRIBUTED)
@pytest.mark.parametrize(
    "synchronization", [rx.VariableSynchronization.AUTO, rx.VariableSynchronization.ON_WRITE]
)
def test_s92_one_copy_per_device(strategy: Any, synchronization: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], name="w", synchronization=synchronization)
    assert isinstance(v, rx.MirroredVariable)
    found = strategy.experimental_local_results(v)
    assert [c.device for c in found] == list(strategy.extended.worker_devices)
    names = ["w"] + [f"w/replica_{i}" for i in range(1, len(local_ids(strategy)))]
    assert [c.name for c in found] == names
    for component, device in zip(found, strategy.extended.layout.local_devices, strict=True):
        assert component.read_value().devices() == {device}
        assert component.shape == (2,)
        assert component.dtype == jnp.float32
    assert v.name == "w"
    assert v.device == strategy.extended.worker_devices[0]
    assert v.trainable


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "central_2")
def test_s92_single_copy_strategies_keep_one_copy_on_their_device(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], name="w")
    assert not isinstance(v, rx.MirroredVariable)
    assert isinstance(v, rx.Variable)
    assert v.device == strategy.extended.parameter_devices[0]
    assert len(strategy.experimental_local_results(v)) == 1
    assert strategy.extended.variable_created_in_scope(v)


@pytest.mark.every_strategy
def test_s100_variable_created_in_scope_knows_its_own_only(strategy: Any) -> None:
    if strategy is rx.get_strategy():
        assert not rx.OneDeviceStrategy("CPU:0").extended.variable_created_in_scope(
            rx.Variable(1.0)
        )
        return
    other = rx.MirroredStrategy(["CPU:0"])
    outside = rx.Variable(1.0)
    with strategy.scope():
        inside = rx.Variable(1.0)
    with other.scope():
        foreign = rx.Variable(1.0)
    owned = strategy.extended.variable_created_in_scope
    assert (owned(inside), owned(outside), owned(foreign)) == (True, False, False)


@pytest.mark.every_strategy
def test_s104_creators_inside_scope_run_once_per_variable(strategy: Any) -> None:
    seen: list[Any] = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["name"])
        return next_creator(**{**kwargs, "trainable": False})

    with strategy.scope(), rx.variable_creator_scope(creator):
        v = rx.Variable(1.0, name="v")
    assert seen == ["v"]
    assert not v.trainable
    assert copies(strategy, v) == [1.0] * num_copies(strategy, v)


@pytest.mark.every_strategy
@pytest.mark.strategies(
    "one_device", "mirrored_1", "mirrored_2", "mirrored_4", "virtual_2", "tpu_2"
)
def test_s104_creators_outside_scope_run_once_per_copy(strategy: Any) -> None:
    seen: list[Any] = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["name"])
        return next_creator(**kwargs)

    calls: list[int] = []

    def initial() -> Any:
        calls.append(1)
        return jnp.asarray(float(len(calls)))

    with rx.variable_creator_scope(creator), strategy.scope():
        v = rx.Variable(initial, name="v")
    count = strategy.num_replicas_in_sync
    # Each process numbers its own copies.
    assert seen == ["v"] + [f"v/replica_{i}" for i in range(1, len(local_ids(strategy)))]
    assert copies(strategy, v) == [1.0] * count
    assert calls == [1]
    assert strategy.extended.variable_created_in_scope(v)


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2")
def test_s104_a_creator_outside_scope_keeps_working_when_created_in_run(
    strategy: Any, run: Any
) -> None:
    seen: list[Any] = []

    def creator(next_creator: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["name"])
        return next_creator(**kwargs)

    kept: list[Any] = []

    def fn() -> Any:
        made = rx.Variable(lambda: jnp.asarray(3.0), name="v", aggregation=SUM)
        kept.append(made)
        return made * number()

    with rx.variable_creator_scope(creator):
        got = run(strategy, fn)
    assert seen == ["v", "v/replica_1"][: len(local_ids(strategy))]
    assert replica_values(strategy, got) == [3.0, 6.0]
    assert copies(strategy, kept[0]) == [3.0, 3.0]


def test_s104_several_creators_are_asked_innermost_first() -> None:
    order: list[str] = []

    def named(tag: str) -> Any:
        def creator(next_creator: Any, **kwargs: Any) -> Any:
            order.append(tag)
            return next_creator(**{**kwargs, "name": kwargs["name"] + tag})

        return creator

    with rx.variable_creator_scope(named("a")), rx.variable_creator_scope(named("b")):
        v = rx.Variable(1.0, name="v")
    assert order == ["b", "a"]
    assert v.name == "vba"


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2", "minimal_2")
def test_t21_creators_opened_by_a_replica_see_that_replica_only(strategy: Any) -> None:
    def main_creator(next_creator: Any, **kwargs: Any) -> Any:
        return "main"

    def fn() -> Any:
        own = int(rx.get_replica_context().replica_id_in_sync_group)

        def creator(next_creator: Any, **kwargs: Any) -> Any:
            return f"{next_creator(**kwargs)}:{own}"

        with rx.variable_creator_scope(creator):
            rx.get_replica_context().merge_call(lambda _: None)
            made = rx.Variable(1.0)
            rx.get_replica_context().merge_call(lambda _: None)
        return made

    with strategy.scope(), rx.variable_creator_scope(main_creator):
        result = strategy.run(fn)
    expected = tuple(f"main:{i}" for i in local_ids(strategy))
    assert strategy.experimental_local_results(result) == expected


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_t25_t29_a_variable_made_in_run_is_one_variable_initialised_once(
    strategy: Any, run: Any
) -> None:
    calls: list[int] = []
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def initial() -> Any:
        calls.append(1)
        return jax.random.normal(next(keys), (3,))

    made: list[Any] = []

    def fn() -> Any:
        if not made or run.executor == "threaded":
            made.append(rx.Variable(initial, name="made", aggregation=MEAN))
        return made[-1].read_value() * 1.0

    got = replica_values(strategy, run(strategy, fn))
    assert calls == [1]
    assert all(v is made[0] for v in made)
    assert got == [got[0]] * strategy.num_replicas_in_sync
    assert copies(strategy, made[0]) == [got[0]] * num_copies(strategy, made[0])
    if strategy is not rx.get_strategy():
        assert strategy.extended.variable_created_in_scope(made[0])
    with strategy.scope():
        made[0].assign([1.0, 2.0, 3.0])
    assert np.asarray(made[0]).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.every_strategy
def test_t25_a_variable_made_in_run_is_returned_as_the_variable(strategy: Any, run: Any) -> None:
    made: list[Any] = []

    def fn() -> Any:
        made.append(rx.Variable(5.0, name="made"))
        return made[-1]

    got = run(strategy, fn)
    assert got is made[0]
    assert float(got) == 5.0


def test_t30_a_variable_made_on_the_first_call_of_a_step_is_kept(strategy: Any) -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        if not kept:
            kept.append(rx.Variable(jnp.zeros(()) + x, name="kept", aggregation=MEAN))
        return kept[0].assign_add(x).read_value() + 0.0

    step = rx.function(lambda x: strategy.run(fn, args=(x,)))
    results = [replica_values(strategy, step(jnp.asarray(2.0)))[0] for _ in range(3)]
    assert results == [4.0, 6.0, 8.0]
    assert len(kept) == 1
    assert copies(strategy, kept[0]) == [8.0] * num_copies(strategy, kept[0])


def test_t26_names_are_compared_without_numbers_at_the_end() -> None:
    strategy = STRATEGIES["mirrored_2"]()

    def fn(prefix: Any) -> Any:
        own = int(rx.get_replica_context().replica_id_in_sync_group)
        return rx.Variable(1.0, name=prefix[own])

    assert strategy.run(fn, args=(("foo_0", "foo_1"),)).name == "foo_0"
    with pytest.raises(RuntimeError, match="same variables"):
        strategy.run(fn, args=(("foo", "bar"),))
    assert strategy.run(fn, args=(("foo", "foo"),)).name == "foo"


@pytest.mark.every_strategy
def test_t27_variables_of_one_name_are_matched_in_order(strategy: Any, run: Any) -> None:
    made: list[Any] = []

    def fn() -> Any:
        pair = rx.Variable(1.0, name="x"), rx.Variable(2.0, name="x")
        made.append(pair)
        return pair

    first, second = run(strategy, fn)
    assert (float(first), float(second)) == (1.0, 2.0)
    assert all(a is first and b is second for a, b in made)


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"initial_value": [1, 2], "aggregation": MEAN}, ValueError),
    ({"initial_value": [True], "aggregation": MEAN}, ValueError),
    ({"initial_value": 1.0, "synchronization": rx.VariableSynchronization.NONE}, ValueError),
    ({"initial_value": 1.0, "synchronization": "on_write"}, ValueError),
    ({"initial_value": 1.0, "aggregation": "sum"}, ValueError),
    ({"initial_value": 1.0, "aggregation": 1}, ValueError),
    ({"initial_value": None}, ValueError),
    ({"initial_value": [1.0, 2.0], "shape": (3,)}, ValueError),
    ({"initial_value": object()}, TypeError),
    ({"initial_value": "text"}, TypeError),
    ({"initial_value": [[1.0], [1.0, 2.0]]}, TypeError),
    ({"initial_value": 1.0, "colour": "red"}, TypeError),
]


def test_1_7_bad_arguments_of_a_variable_are_refused(strategy: Any) -> None:
    with strategy.scope():
        for kwargs, kind in BAD_ARGUMENTS:
            with pytest.raises(kind) as caught:
                rx.Variable(**kwargs)
            assert isinstance(caught.value, rx.errors.DistributeError), kwargs
        assert float(rx.Variable(1.0)) == 1.0


def test_1_7_an_error_in_the_initialiser_reaches_the_caller(strategy: Any, run: Any) -> None:
    def initial() -> Any:
        raise KeyError("mine")

    def fn() -> Any:
        return rx.Variable(initial)

    with pytest.raises(KeyError, match="mine"):
        run(strategy, fn)
    assert replica_values(strategy, run(strategy, lambda: jnp.zeros(()) + number()))[0] == 1.0


# Reading.


@pytest.mark.every_strategy
def test_s94_s95_s99_reads_work_in_every_context(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
        in_scope = np.asarray(v.read_value()).tolist()
    in_merge: list[Any] = []

    def fn() -> Any:
        def merged(_: Any) -> Any:
            in_merge.append(v.read_value().shape)
            return v.read_value() * 3.0

        return v.read_value() * 1.0, v * 2.0, rx.get_replica_context().merge_call(merged)

    plain, doubled, tripled = run(strategy, fn)
    count = strategy.num_replicas_in_sync
    assert in_scope == [1.0, 2.0]
    assert replica_values(strategy, plain) == [[1.0, 2.0]] * count
    assert replica_values(strategy, doubled) == [[2.0, 4.0]] * count
    assert np.asarray(replica_values(strategy, tripled)[0]).tolist() == [3.0, 6.0]
    assert in_merge == [(2,)]
    assert np.asarray(v.read_value()).tolist() == [1.0, 2.0]


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "mirrored_4", "central_2", "tpu_2", "minimal_2")
def test_s95_replica_reads_are_on_the_replica_device(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    found: list[Any] = []
    strategy.run(lambda: found.append(v.read_value().devices()))
    assert found == [{d} for d in strategy.extended.layout.local_devices]


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "mirrored_4", "tpu_2", "minimal_2")
def test_t51_a_read_under_a_device_takes_the_copy_there(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    for device in strategy.extended.layout.local_devices:
        with rx.device(device):
            assert v.read_value().devices() == {device}
            with strategy.scope():
                assert v.read_value().devices() == {device}


USES: dict[str, Any] = {
    "read_value": lambda v: v.read_value(),
    "value": lambda v: v.value(),
    "numpy": lambda v: v.numpy(),
    "operator": lambda v: v + 1.0,
    "asarray": lambda v: np.asarray(v),
    "jnp": lambda v: jnp.asarray(v),
    "method": lambda v: v.sum(),
    "sparse_read": lambda v: v.sparse_read([0]),
    "assign": lambda v: v.assign([1.0, 2.0]),
    "assign_add": lambda v: v.assign_add([0.0, 0.0]),
    "scatter_add": lambda v: v.scatter_add(rx.IndexedSlices(jnp.zeros(1), jnp.array([0]))),
}


@pytest.mark.strategies(*DISTRIBUTED, "central_2", "one_device")
@pytest.mark.parametrize("how", ["scope", "run"])
def test_1_7_another_strategy_in_force_refuses_reads_and_writes(strategy: Any, how: str) -> None:
    other = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=SUM, name="mine")
    accepted: list[str] = []
    messages: list[str] = []

    def try_all() -> None:
        for name, use in USES.items():
            try:
                use(v)
            except RuntimeError as error:
                messages.append(str(error))
            else:
                accepted.append(name)

    if how == "scope":
        with other.scope():
            try_all()
    else:
        other.run(try_all)
    assert not accepted
    assert all("mine" in text for text in messages)
    assert copies(strategy, v) == [[1.0, 2.0]] * num_copies(strategy, v)
    for use in USES.values():
        use(v)


# Writing.


def expected_error(strategy: Any, kind: str, aggregation: Any) -> Any:
    """The error that a replica's write to a mirrored variable must raise, if any."""
    if is_plain(strategy):
        return None
    if aggregation is NONE:
        return ValueError
    if aggregation in (SUM, MEAN) and kind in NOT_REDUCIBLE:
        return NotImplementedError
    return None


@pytest.mark.every_strategy
@pytest.mark.strategies(*MATRIX)
def test_s96_s97_t44_t49_x4_replica_writes(strategy: Any, run: Any) -> None:
    """Every kind of write by every replica; a refused write changes nothing."""
    with strategy.scope():
        variables = {
            (k, a): rx.Variable(START, name=f"{k}_{a.name}", aggregation=a)
            for k in (*DENSE, *SCATTER)
            for a in AGGREGATIONS
        }
    refused: dict[Any, Any] = {}

    def fn() -> None:
        for (kind, aggregation), v in variables.items():
            try:
                assert write(v, kind, number()) is v
            except (ValueError, NotImplementedError) as error:
                refused[kind, aggregation] = error

    run(strategy, fn)
    expected = {key: expected_error(strategy, *key) for key in variables}
    assert set(refused) == {key for key, kind in expected.items() if kind is not None}
    for key, error in refused.items():
        assert isinstance(error, expected[key])
        assert isinstance(error, rx.errors.DistributeError)
        assert variables[key].name in str(error)
        assert ("aggregation=" if key[1] is NONE else "aggregation") in str(error)
    for key, v in variables.items():
        want = START.tolist()
        if key not in refused:
            want = model(*key, strategy.num_replicas_in_sync)
        got = copies(strategy, v)
        assert got == [got[0]] * num_copies(strategy, v), key
        np.testing.assert_allclose(got[0], want, rtol=1e-6, err_msg=str(key))
    # What was refused in a replica is accepted across replicas.
    with strategy.scope():
        for key in refused:
            write(variables[key], key[0], 1.0)
            got = copies(strategy, variables[key])
            assert got == [model(key[0], FIRST, 1)] * len(got), key


@pytest.mark.every_strategy
@pytest.mark.strategies(*MATRIX)
@pytest.mark.parametrize("place", WRITERS)
def test_s98_t44_t49_cross_replica_writes_reach_every_copy_once(strategy: Any, place: str) -> None:
    aggregations = AGGREGATIONS if place == "compiled" else (NONE, SUM)
    with strategy.scope():
        variables = {
            (k, a): rx.Variable(START, name=k, aggregation=a)
            for k in (*DENSE, *SCATTER)
            for a in aggregations
        }

    def write_all(*_: Any) -> None:
        for (kind, _aggregation), v in variables.items():
            assert write(v, kind, 1.0) is v

    WRITERS[place](strategy, write_all)
    for key, v in variables.items():
        assert copies(strategy, v) == [model(key[0], FIRST, 1)] * num_copies(strategy, v), key


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_s97_x0_sum_mean_and_first_of_one_and_two(strategy: Any, run: Any) -> None:
    with strategy.scope():
        variables = {a: rx.Variable(0.0, aggregation=a) for a in (SUM, MEAN, FIRST)}

    def fn() -> None:
        for v in variables.values():
            v.assign(number())

    run(strategy, fn)
    assert [copies(strategy, v)[0] for v in variables.values()] == [3.0, 1.5, 1.0]
    assert all(len(set(copies(strategy, v))) == 1 for v in variables.values())


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_x0_t44_one_shared_object_is_summed_by_plain_arithmetic(strategy: Any, run: Any) -> None:
    shared = jnp.asarray(2.0)
    names = ("literal", "shared", "argument", "numpy")
    with strategy.scope():
        summed = {(k, n): rx.Variable(1.0, aggregation=SUM) for k in DENSE for n in names}
        others = {(k, a): rx.Variable(1.0, aggregation=a) for k in DENSE for a in (MEAN, FIRST)}

    def fn(x: Any) -> None:
        payloads = {"literal": 2.0, "shared": shared, "argument": x, "numpy": np.float32(2.0)}
        for (kind, name), v in summed.items():
            getattr(v, kind)(payloads[name])
        for (kind, _), v in others.items():
            getattr(v, kind)(shared)

    run(strategy, fn, (jnp.asarray(2.0),))
    total = 2.0 * strategy.num_replicas_in_sync

    def after(kind: str, payload: float) -> float:
        return {"assign": payload, "assign_add": 1.0 + payload, "assign_sub": 1.0 - payload}[kind]

    assert {k: copies(strategy, v)[0] for k, v in summed.items()} == {
        k: after(k[0], total) for k in summed
    }
    assert {k: copies(strategy, v)[0] for k, v in others.items()} == {
        k: after(k[0], 2.0) for k in others
    }


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_s93_copies_stay_equal_over_many_writes(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=MEAN)

    def fn() -> None:
        v.assign_add(jnp.ones(2) * number())
        v.assign(v * 2.0)
        v.assign_sub(jnp.ones(2))

    for _ in range(3):
        run(strategy, fn)
    mean = (1 + strategy.num_replicas_in_sync) / 2
    value = np.array([1.0, 2.0])
    for _ in range(3):
        value = (value + mean) * 2 - 1
    got = copies(strategy, v)
    assert got == [value.tolist()] * num_copies(strategy, v)


def test_s99_reads_and_writes_outlive_the_strategy_object() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=SUM, name="orphan")
    del strategy
    gc.collect()
    v.assign_add(2.0)
    assert [float(c.read_value()) for c in v.components] == [3.0, 3.0]
    with rx.OneDeviceStrategy("CPU:0").scope(), pytest.raises(RuntimeError, match="orphan"):
        v.assign(5.0)
    assert float(v) == 3.0


@pytest.mark.every_strategy
def test_s106_a_variable_made_outside_is_read_by_replicas_and_refuses_their_writes(
    strategy: Any, run: Any
) -> None:
    v = rx.Variable([1.0, 2.0], name="outer")
    got = run(strategy, lambda: v * number())
    assert replica_values(strategy, got) == [
        [1.0 * (i + 1), 2.0 * (i + 1)] for i in range(strategy.num_replicas_in_sync)
    ]

    def fn() -> None:
        v.assign_add(jnp.ones(2))

    if strategy.num_replicas_in_sync == 1:
        run(strategy, fn)
        assert np.asarray(v).tolist() == [2.0, 3.0]
        return
    with pytest.raises(RuntimeError, match="outer"):
        run(strategy, fn)
    assert np.asarray(v).tolist() == [1.0, 2.0]
    v.assign([5.0, 6.0])
    assert np.asarray(v).tolist() == [5.0, 6.0]


@pytest.mark.every_strategy
@pytest.mark.strategies(*DISTRIBUTED)
def test_x4_a_refused_write_that_escapes_leaves_the_strategy_usable(
    strategy: Any, run: Any
) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, name="weights")
        w = rx.Variable(1.0, aggregation=SUM)
    with pytest.raises(ValueError, match=r"weights.*aggregation="):
        run(strategy, lambda: v.assign(number()))
    assert copies(strategy, v) == [1.0] * strategy.num_replicas_in_sync
    run(strategy, lambda: w.assign(number()))
    count = strategy.num_replicas_in_sync
    assert copies(strategy, w) == [count * (count + 1) / 2] * count
    v.assign(7.0)
    assert copies(strategy, v) == [7.0] * count


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS)
def test_t49_scatter_in_cross_replica_context_adds_once(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 1.0, 1.0], aggregation=SUM)
        v.scatter_add(rx.IndexedSlices(jnp.asarray([2.0]), jnp.asarray([0])))
    assert copies(strategy, v) == [[3.0, 1.0, 1.0]] * num_copies(strategy, v)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t49_replicas_may_scatter_different_rows(strategy: Any, run: Any) -> None:
    with strategy.scope():
        table = rx.Variable(jnp.zeros((4, 2)), aggregation=SUM)

    def fn() -> None:
        own = rx.get_replica_context().replica_id_in_sync_group
        indices = jnp.stack([own, jnp.asarray(3, own.dtype)])
        table.scatter_add(rx.IndexedSlices(jnp.ones((2, 2)) * number(), indices))

    run(strategy, fn)
    want = [[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [3.0, 3.0]]
    assert copies(strategy, table) == [want] * num_copies(strategy, table)


# Types and shapes.


TYPES = ("int32", "uint8", "bfloat16", "float16", "complex64")


def numbers(array: Any) -> list[complex]:
    return np.asarray(array.astype(jnp.complex64)).tolist()


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_1_7_s97_variables_of_every_type(strategy: Any, run: Any) -> None:
    start = jnp.asarray([1, 0, 1])
    with strategy.scope():
        first = {t: rx.Variable(start.astype(t), aggregation=FIRST) for t in (*TYPES, "bool")}
        summed = {t: rx.Variable(start, dtype=t, aggregation=SUM) for t in TYPES}
        mean = {t: rx.Variable(start, dtype=t, aggregation=MEAN) for t in TYPES[2:]}

    def fn() -> Any:
        for t, v in first.items():
            v.assign(jnp.asarray([0, 1, 1]).astype(t))
        for t, v in summed.items():
            v.assign_add(jnp.asarray([1, 2, 3]).astype(t))
        for t, v in mean.items():
            v.assign((jnp.ones(3) * number()).astype(t))
        return {t: v.read_value() for t, v in first.items()}

    got = run(strategy, fn)
    n = strategy.num_replicas_in_sync
    for t, value in got.items():
        for own in replica_results(strategy, value):
            assert (own.dtype, numbers(own)) == (jnp.dtype(t), [0, 1, 1])
    for group, want in (
        (first, [0, 1, 1]),
        (summed, [1 + n, 2 * n, 1 + 3 * n]),
        (mean, [(1 + n) / 2] * 3),
    ):
        for t, v in group.items():
            assert v.dtype == jnp.dtype(t)
            for component in v.components:
                own = component.read_value()
                assert (own.dtype, numbers(own)) == (jnp.dtype(t), want)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_1_7_scalar_and_empty_variables(strategy: Any, run: Any) -> None:
    shapes = [(), (0,), (0, 3), (3, 0), (1, 1, 1)]
    with strategy.scope():
        variables = [rx.Variable(jnp.zeros(s), aggregation=MEAN) for s in shapes]

    def fn() -> Any:
        return [v.assign_add(jnp.ones(v.shape)).read_value() + 1.0 for v in variables]

    got = run(strategy, fn)
    for v, value in zip(variables, got, strict=True):
        for own in replica_results(strategy, value):
            assert own.shape == v.shape
            np.testing.assert_array_equal(own, np.full(v.shape, 2.0))
        with strategy.scope():
            v.assign_add(jnp.ones(v.shape))
        for component in v.components:
            np.testing.assert_array_equal(component.read_value(), np.full(v.shape, 2.0))
        assert "Variable" in repr(v)


# Compiled steps and the arrays that users hold.


@pytest.mark.every_strategy
@pytest.mark.parametrize("shape", [(), (3,)])
def test_donation_values_held_across_compiled_calls_stay_valid(strategy: Any, shape: Any) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.zeros(shape), aggregation=MEAN)

    def fn() -> Any:
        return v.assign_add(jnp.ones(shape)).read_value()

    step = rx.function(lambda: strategy.run(fn))
    held, parts, views, results = [], [], [], []
    for _ in range(4):
        held.append(v.value())
        parts.append([c.value() for c in v.components])
        views.append(np.asarray(v.value()))
        results.append(step())
    results.append(step())
    for i in range(4):
        want = np.full(shape, float(i))
        np.testing.assert_array_equal(held[i], want)
        np.testing.assert_array_equal(views[i], want)
        for part in parts[i]:
            np.testing.assert_array_equal(part, want)
        for value in replica_results(strategy, results[i]):
            np.testing.assert_array_equal(value, want + 1)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_donation_values_returned_by_compiled_calls_stay_valid(strategy: Any, shape: Any) -> None:
    with strategy.scope():
        v = rx.Variable(jnp.zeros(shape))

    @rx.function
    def write_and_return() -> Any:
        return v.assign_add(jnp.ones(shape)).read_value()

    @rx.function
    def only_read() -> Any:
        return v.read_value()

    returned, read = [], []
    for _ in range(4):
        with strategy.scope():
            returned.append(write_and_return())
            read.append(only_read())
    for i in range(4):
        np.testing.assert_array_equal(returned[i], np.full(shape, i + 1.0))
        np.testing.assert_array_equal(read[i], np.full(shape, i + 1.0))


def test_donation_the_value_of_a_variable_as_argument_of_a_step_that_writes_it(
    strategy: Any,
) -> None:
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=MEAN)

    def fn(x: Any, y: Any) -> Any:
        v.assign_add(x)
        return v.read_value() - y

    step = rx.function(lambda x, y: strategy.run(fn, args=(x, y)))
    for i in range(3):
        value = v.value()
        difference = step(value, v.value())
        np.testing.assert_array_equal(value, np.array([1.0, 2.0]) * 2**i)
        for own in replica_results(strategy, difference):
            np.testing.assert_array_equal(own, np.array([1.0, 2.0]) * 2**i)
    assert copies(strategy, v) == [[8.0, 16.0]] * num_copies(strategy, v)


def test_donation_one_array_in_two_variables(strategy: Any) -> None:
    array = jnp.asarray([1.0, 2.0])
    with strategy.scope():
        v, w = rx.Variable(array, aggregation=MEAN), rx.Variable(array, aggregation=MEAN)
        w.assign(v)
        v.assign(array)
        w.assign(array)

    def fn() -> None:
        v.assign_add(jnp.ones(2))
        w.assign_sub(jnp.ones(2))

    step = rx.function(lambda: strategy.run(fn))
    for _ in range(3):
        step()
    assert copies(strategy, v)[0] == [4.0, 5.0]
    assert copies(strategy, w)[0] == [-2.0, -1.0]
    np.testing.assert_array_equal(array, [1.0, 2.0])


def test_donation_a_step_that_stores_one_value_in_two_variables_or_swaps_them(
    strategy: Any,
) -> None:
    with strategy.scope():
        v, w = rx.Variable([1.0, 2.0]), rx.Variable([5.0, 6.0])

    @rx.function
    def tie() -> None:
        v.assign_add(jnp.ones(2))
        w.assign(v)

    @rx.function
    def swap() -> None:
        one, other = v.read_value(), w.read_value()
        v.assign(other)
        w.assign(one)

    with strategy.scope():
        for _ in range(3):
            swap()
        assert [copies(strategy, x)[0] for x in (v, w)] == [[5.0, 6.0], [1.0, 2.0]]
        for _ in range(3):
            tie()
        swap()
    assert [copies(strategy, x)[0] for x in (v, w)] == [[8.0, 9.0], [8.0, 9.0]]
    v.assign([0.0, 0.0])
    assert copies(strategy, w)[0] == [8.0, 9.0]


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_capture_a_compiled_step_sees_writes_made_between_calls(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
    step = rx.function(lambda: strategy.run(lambda: v * number()))
    eager = [replica_values(strategy, run(strategy, lambda: v * number()))]
    found = [replica_values(strategy, step())]
    v.assign(10.0)
    eager.append(replica_values(strategy, run(strategy, lambda: v * number())))
    found.append(replica_values(strategy, step()))
    n = strategy.num_replicas_in_sync
    assert found == eager == [[f * (i + 1.0) for i in range(n)] for f in (1.0, 10.0)]


# Threads.


@pytest.mark.one_process("threads take turns in an order of their own on each worker")
@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("way", ["eager", "compiled", "run"])
def test_threads_no_write_is_lost(strategy: Any, way: str) -> None:
    with strategy.scope():
        v = rx.Variable([0.0, 0.0], aggregation=MEAN)
    compiled = rx.function(lambda: v.assign_add(jnp.ones(2)))
    step = rx.function(lambda: strategy.run(lambda: v.assign_add(jnp.ones(2))))
    calls = {"eager": lambda: v.assign_add(np.ones(2)), "compiled": compiled, "run": step}
    calls[way]()
    start = threading.Barrier(2)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            start.wait(60)
            for _ in range(25):
                calls[way]()
                first, second = v.numpy().tolist()
                assert first == second
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not failures
    assert copies(strategy, v) == [[51.0, 51.0]] * num_copies(strategy, v)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_threads_a_thread_without_scope_reads_and_writes(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=SUM)
        seen: list[Any] = []

        def work() -> None:
            v.assign_add(2.0)
            seen.append(float(v))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join(60)
    assert seen == [3.0]
    assert copies(strategy, v) == [3.0] * num_copies(strategy, v)
