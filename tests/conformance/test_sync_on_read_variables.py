"""Variables whose copies go their own way until they are read (S107-S117, T52-T57, X5)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import WRITERS, copies, num_copies, number, replica_values
from worker_groups import local_ids, replica_results

import replicax as rx

ON_READ = rx.VariableSynchronization.ON_READ
AGGREGATIONS = tuple(rx.VariableAggregation)
NONE, SUM, MEAN, FIRST = (
    rx.VariableAggregation.NONE,
    rx.VariableAggregation.SUM,
    rx.VariableAggregation.MEAN,
    rx.VariableAggregation.ONLY_FIRST_REPLICA,
)
DENSE = ("assign", "assign_add", "assign_sub")
SCATTER = tuple(f"scatter_{k}" for k in ("add", "sub", "mul", "div", "min", "max", "update"))
# Strategies whose ON_READ variables have a copy on each replica.
REPLICATED = (
    "mirrored_1",
    "mirrored_2",
    "mirrored_4",
    "virtual_2",
    "central_2",
    "tpu_2",
    "minimal_2",
)
START = np.array([4.0, 8.0], np.float32)


def on_read(strategy: Any, value: Any, aggregation: Any, **kwargs: Any) -> Any:
    with strategy.scope():
        return rx.Variable(value, synchronization=ON_READ, aggregation=aggregation, **kwargs)


def write(variable: Any, kind: str) -> Any:
    if kind in DENSE:
        return getattr(variable, kind)(jnp.ones(2))
    return getattr(variable, kind)(rx.IndexedSlices(jnp.ones(1), jnp.asarray([0])))


@pytest.mark.every_strategy
@pytest.mark.strategies(*REPLICATED)
def test_s107_one_component_per_device(strategy: Any) -> None:
    v = on_read(strategy, [1.0, 2.0], SUM, name="m")
    assert isinstance(v, rx.SyncOnReadVariable)
    assert isinstance(v, rx.Variable)
    found = strategy.experimental_local_results(v)
    assert [c.device for c in found] == list(strategy.extended.worker_devices)
    names = ["m"] + [f"m/replica_{i}" for i in range(1, len(local_ids(strategy)))]
    assert [c.name for c in found] == names
    assert [c.read_value().devices() for c in found] == [
        {d} for d in strategy.extended.layout.local_devices
    ]
    assert repr(v).startswith("SyncOnReadVariable:{\n  0: <rx.Variable 'm:0' shape=(2,)")
    assert (v.shape, v.dtype, v.synchronization, v.aggregation) == ((2,), jnp.float32, ON_READ, SUM)


@pytest.mark.every_strategy
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a.name)
@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_s108_s110_replicas_touch_their_copy_and_a_read_combines(
    strategy: Any, run: Any, aggregation: Any
) -> None:
    v = on_read(strategy, 0.0, aggregation)
    got = run(strategy, lambda: v.assign(number()).read_value() * 10.0)
    n = strategy.num_replicas_in_sync
    numbers = [float(i + 1) for i in range(n)]
    assert replica_values(strategy, got) == [10.0 * x for x in numbers]
    assert copies(strategy, v) == numbers
    want = {SUM: sum(numbers), MEAN: sum(numbers) / n, FIRST: 1.0}
    if aggregation is NONE:
        if n > 1:
            with strategy.scope(), pytest.raises(ValueError, match="aggregation="):
                v.read_value()
            with pytest.raises(ValueError, match="aggregation="):
                float(v)
        return
    with strategy.scope():
        assert float(v.read_value()) == want[aggregation]
        assert float(rx.function(lambda: v.read_value() + 0.0)()) == want[aggregation]
        assert float(strategy.extended.read_var(v)) == want[aggregation]
    assert float(v) == want[aggregation]
    run(strategy, lambda: v.assign_add(number()).assign_sub(0.5))
    assert copies(strategy, v) == [2 * x - 0.5 for x in numbers]


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s109_a_moving_average_in_replica_context(strategy: Any, run: Any) -> None:
    v = on_read(strategy, 1.0, MEAN)

    def fn() -> None:
        own = rx.get_replica_context().replica_id_in_sync_group
        v.assign(0.9 * v + 0.1 * own)

    run(strategy, fn)
    np.testing.assert_allclose(copies(strategy, v), [0.9, 1.0], rtol=1e-6)
    np.testing.assert_allclose(float(v), 0.95, rtol=1e-6)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s110_a_read_in_merge_call_combines(strategy: Any, run: Any) -> None:
    variables = {a: on_read(strategy, 0.0, a) for a in (SUM, MEAN, FIRST)}

    def fn() -> Any:
        for v in variables.values():
            v.assign(number())
        merged = rx.get_replica_context().merge_call(
            lambda _: [v.read_value() for v in variables.values()]
        )
        return [x * 1.0 for x in merged]

    got = run(strategy, fn)
    assert [replica_values(strategy, x) for x in got] == [[3.0, 3.0], [1.5, 1.5], [1.0, 1.0]]
    assert [copies(strategy, v) for v in variables.values()] == [[1.0, 2.0]] * 3


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "mirrored_1")
def test_s108_1_7_the_matrix_of_replica_writes(strategy: Any, run: Any) -> None:
    variables = {
        (k, a): on_read(strategy, START, a, name=f"{k}_{a.name}")
        for k in (*DENSE, *SCATTER)
        for a in AGGREGATIONS
    }
    refused: dict[Any, Any] = {}

    def fn() -> None:
        for key, v in variables.items():
            try:
                assert write(v, key[0]) is v
            except NotImplementedError as error:
                refused[key] = error

    run(strategy, fn)
    assert set(refused) == {key for key in variables if key[0] in SCATTER}
    assert all(isinstance(e, rx.errors.DistributeError) for e in refused.values())
    assert all(variables[key].name in str(e) for key, e in refused.items())
    after = {"assign": np.ones(2), "assign_add": START + 1, "assign_sub": START - 1}
    for key, v in variables.items():
        want = after.get(key[0], START).tolist()
        assert copies(strategy, v) == [want] * num_copies(strategy, v), key


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_1", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("place", WRITERS)
def test_s111_t52_t53_x5_the_matrix_of_cross_replica_writes(strategy: Any, place: str) -> None:
    variables = {
        (k, a): on_read(strategy, START, a, name=f"{k}_{a.name}")
        for k in (*DENSE, *SCATTER)
        for a in AGGREGATIONS
    }
    refused: dict[Any, Any] = {}

    def write_all(*_: Any) -> None:
        for key, v in variables.items():
            try:
                assert write(v, key[0]) is v
            except (ValueError, NotImplementedError) as error:
                refused[key] = error

    WRITERS[place](strategy, write_all)
    n = strategy.num_replicas_in_sync
    for key, v in variables.items():
        kind, aggregation = key
        if kind == "assign" and aggregation is not NONE:
            assert key not in refused
            want = [1.0 / n if aggregation is SUM else 1.0] * 2
        else:
            expected = NotImplementedError if kind in SCATTER else ValueError
            assert isinstance(refused[key], expected), key
            assert isinstance(refused[key], rx.errors.DistributeError), key
            assert v.name in str(refused[key])
            want = START.tolist()
        assert copies(strategy, v) == [want] * n, key
    # Refused across replicas, accepted in them.
    strategy.run(lambda: [write(variables["assign_add", a], "assign_add") for a in AGGREGATIONS])
    for aggregation in AGGREGATIONS:
        assert copies(strategy, variables["assign_add", aggregation]) == [[5.0, 9.0]] * n


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device")
def test_s107_with_one_replica_an_on_read_variable_is_plain(strategy: Any) -> None:
    for aggregation in AGGREGATIONS:
        v = on_read(strategy, START, aggregation)
        with strategy.scope():
            v.assign_add(np.ones(2))
            v.scatter_add(rx.IndexedSlices(jnp.ones(1), jnp.asarray([0])))
        assert np.asarray(v).tolist() == [6.0, 9.0]
        assert not v.trainable


@pytest.mark.strategies(*TWO_REPLICAS)
def test_t52_assign_is_read_back_as_assigned(strategy: Any) -> None:
    for compiled in (False, True):
        for aggregation, parts in ((SUM, 3.0), (MEAN, 6.0), (FIRST, 6.0)):
            v = on_read(strategy, [0.0, 0.0], aggregation)
            with strategy.scope():

                def assign(v: Any = v) -> None:
                    v.assign([6.0, 6.0])

                (rx.function(assign) if compiled else assign)()
                assert np.asarray(v.read_value()).tolist() == [6.0, 6.0]
            assert copies(strategy, v) == [[parts, parts]] * 2


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
@pytest.mark.parametrize("value", [7, -7, 0, 1])
def test_t52_whole_numbers_are_shared_out_without_loss(strategy: Any, value: int) -> None:
    v = on_read(strategy, jnp.zeros((2,), jnp.int32), SUM)
    with strategy.scope():
        v.assign(jnp.full((2,), value))
        assert v.read_value().dtype == jnp.int32
        assert np.asarray(v.read_value()).tolist() == [value] * 2
        rx.function(lambda: v.assign(jnp.full((2,), value * 3)))()
        assert np.asarray(v.read_value()).tolist() == [value * 3] * 2


@pytest.mark.every_strategy
@pytest.mark.strategies(*REPLICATED)
def test_t55_inside_update_the_assignment_is_raw(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    for compiled in (False, True):
        v = on_read(strategy, 1.0, SUM)
        with strategy.scope():

            def update(v: Any = v) -> None:
                strategy.extended.update(v, lambda c: c.assign(5.0))

            (rx.function(update) if compiled else update)()
            assert float(v.read_value()) == 5.0 * n
            strategy.extended.update(v, lambda c: c.assign_add(1.0))
        assert copies(strategy, v) == [6.0] * n


@pytest.mark.strategies(*TWO_REPLICAS)
def test_s112_t56_without_aggregation_cross_replica_access_fails(strategy: Any) -> None:
    v = on_read(strategy, 1.0, NONE, name="lonely")
    for use in (
        lambda: v.read_value(),
        lambda: v + 1.0,
        lambda: np.asarray(v),
        lambda: v.assign(2.0),
        lambda: rx.function(lambda: v.read_value())(),
        lambda: rx.function(lambda: v.assign(2.0))(),
    ):
        with strategy.scope(), pytest.raises(ValueError, match="lonely"):
            use()
    assert copies(strategy, v) == [1.0, 1.0]
    strategy.run(lambda: v.assign(number()))
    assert copies(strategy, v) == [1.0, 2.0]
    assert "lonely" in repr(v)


def test_s113_t57_trainable_is_false_unless_said(strategy: Any) -> None:
    assert not on_read(strategy, 1.0, SUM).trainable
    assert on_read(strategy, 1.0, SUM, trainable=True).trainable
    assert not on_read(strategy, 1.0, SUM, trainable=False).trainable
    with strategy.scope():
        assert rx.Variable(1.0).trainable
        assert not rx.Variable(1.0, trainable=False).trainable


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")
def test_s116_all_components_start_from_one_initial_value(strategy: Any, run: Any) -> None:
    calls: list[int] = []
    keys = iter(jax.random.split(jax.random.key(3), 32))

    def initial() -> Any:
        calls.append(1)
        return jax.random.normal(next(keys), (2,))

    in_scope = on_read(strategy, initial, SUM)
    assert calls == [1]
    found = copies(strategy, in_scope)
    assert found == [found[0]] * len(found)
    made: list[Any] = []

    def fn() -> Any:
        made.append(rx.Variable(initial, synchronization=ON_READ, aggregation=MEAN))
        return made[-1].assign_add(jnp.ones(2) * number())

    run(strategy, fn)
    assert calls == [1, 1]
    found = np.asarray(copies(strategy, made[0])) - np.arange(1, len(found) + 1)[:, None]
    np.testing.assert_allclose(found, np.broadcast_to(found[0], found.shape), atol=1e-6)


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_s117_gradients_are_kept_apart_for_several_steps(strategy: Any, run: Any) -> None:
    kept = on_read(strategy, jnp.zeros(2), SUM)
    with strategy.scope():
        weights = rx.Variable([1.0, 2.0], aggregation=MEAN)

    def fn() -> None:
        def loss() -> Any:
            return jnp.vdot(weights.read_value(), jnp.ones(2)) * number()

        _, gradients = rx.value_and_grad(loss, [weights])()
        kept.assign_add(gradients[0])

    for _ in range(3):
        run(strategy, fn)
    assert copies(strategy, kept) == [[3.0, 3.0], [6.0, 6.0]]
    assert np.asarray(kept).tolist() == [9.0, 9.0]
    assert copies(strategy, weights)[0] == [1.0, 2.0]


@pytest.mark.strategies("mirrored_1", "mirrored_2", "virtual_2")
def test_1_7_types_and_shapes(strategy: Any, run: Any) -> None:
    cases = [("int32", (2,)), ("bfloat16", ()), ("complex64", (2, 3))]
    cases += [("float32", (0,)), ("float32", (0, 3)), ("float32", (3, 0))]
    variables = [on_read(strategy, jnp.zeros(s, t), SUM) for t, s in cases]

    def fn() -> Any:
        return [v.assign_add(jnp.ones(v.shape, v.dtype)).read_value() + 0 for v in variables]

    got = run(strategy, fn)
    n = strategy.num_replicas_in_sync
    for v, value in zip(variables, got, strict=True):
        for own in replica_results(strategy, value):
            assert (own.shape, own.dtype) == (v.shape, v.dtype)
        with strategy.scope():
            total = v.read_value()
            assert (total.shape, total.dtype) == (v.shape, v.dtype)
            np.testing.assert_array_equal(total.astype(jnp.complex64), np.full(v.shape, n))
            v.assign(jnp.full(v.shape, 2 * n).astype(v.dtype))
        for component in v.components:
            np.testing.assert_array_equal(
                component.read_value().astype(jnp.complex64), np.full(v.shape, 2)
            )
            assert component.read_value().dtype == v.dtype


@pytest.mark.strategies("one_device", "mirrored_1", "mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_donation_values_held_across_compiled_calls_stay_valid(
    strategy: Any, aggregation: Any, shape: Any
) -> None:
    v = on_read(strategy, jnp.zeros(shape), aggregation)
    step = rx.function(lambda: strategy.run(lambda: v.assign_add(jnp.ones(shape))))
    step()
    held, parts, results = [], [], []
    for _ in range(3):
        held.append(v.value())
        results.append(step())
    for _ in range(3):
        parts.append([c.value() for c in v.components])
        step()
    factor = strategy.num_replicas_in_sync if aggregation is SUM else 1
    for i in range(3):
        np.testing.assert_array_equal(held[i], np.full(shape, factor * (i + 1.0)))
        for part in parts[i]:
            np.testing.assert_array_equal(part, np.full(shape, i + 4.0))
    assert copies(strategy, v) == [np.full(shape, 7.0).tolist()] * num_copies(strategy, v)


@pytest.mark.strategies(*REPLICATED)
def test_1_7_another_strategy_in_force_refuses_reads_and_writes(strategy: Any) -> None:
    v = on_read(strategy, [1.0, 2.0], SUM, name="mine")
    other = rx.OneDeviceStrategy("CPU:0")
    accepted = []
    uses: dict[str, Any] = {
        "assign": lambda: v.assign([2.0, 4.0]),
        "add": lambda: v + 1.0,
        "asarray": lambda: np.asarray(v),
        "read_value": lambda: v.read_value(),
        "numpy": lambda: v.numpy(),
    }
    with other.scope():
        for name, use in uses.items():
            try:
                use()
            except RuntimeError:
                continue
            accepted.append(name)
    assert not accepted
    n = strategy.num_replicas_in_sync
    assert np.asarray(v).tolist() == [1.0 * n, 2.0 * n]
