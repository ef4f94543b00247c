"""`rx.compat.v1.distribute`: the API of v1 over the parts of the strategies of today."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from vocabulary import refused

import replicax as rx
import replicax.compat.v1.distribute as v1
import replicax.tf as tf
from replicax.compat.v1.distribute import deprecation
from replicax.compat.v1.distribute.multi_step import MultiStepContext

KINDS = ("one_device", "mirrored_1", "mirrored_2", "mirrored_4", "virtual_2", "central_2", "tpu_2")
SEVERAL = ("mirrored_2", "mirrored_4", "virtual_2", "tpu_2")


def as_v1(strategy: Any) -> Any:
    """A v1 strategy of the same parts."""
    return v1.Strategy(strategy.extended)


def replica_id() -> Any:
    return v1.get_replica_context().replica_id_in_sync_group


def per_replica(strategy: Any, start: float = 0.0) -> Any:
    return strategy.run(lambda: replica_id() + jnp.float32(start))


def numbers(strategy: Any, value: Any) -> list[float]:
    return [float(np.asarray(x)) for x in strategy.unwrap(value)]


@pytest.fixture
def two() -> Any:
    return v1.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    deprecation.forget()
    yield
    deprecation.forget()


# The module.


def test_names_of_v2_are_the_same_objects() -> None:
    for name in v1.__all__:
        own = {"MirroredStrategy", "OneDeviceStrategy", "Strategy", "StrategyExtended"}
        own |= {"experimental", "get_loss_reduction"}
        if name not in own:
            assert getattr(v1, name) is getattr(rx, name), name
    for kind in (v1.Strategy, v1.MirroredStrategy, v1.OneDeviceStrategy):
        assert issubclass(kind, rx.Strategy)
    assert issubclass(v1.StrategyExtended, rx.StrategyExtended)


def test_v1_is_imported_when_it_is_first_used() -> None:
    code = """
import sys
import replicax as rx
faces = ("replicax.compat", "replicax.contrib")
assert not [name for name in sys.modules if name.startswith(faces)]
assert rx.compat.v1.distribute.get_loss_reduction() is rx.ReduceOp.SUM
assert rx.contrib.distribute.get_tower_context().is_single_tower
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_s226_get_loss_reduction() -> None:
    assert v1.get_loss_reduction() is v1.ReduceOp.SUM
    with v1.OneDeviceStrategy("CPU:0").scope():
        assert v1.get_loss_reduction() is v1.ReduceOp.SUM


# The strategy.


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS, "minimal_2")
def test_v1_has_no_gather_and_no_values_from_a_function(strategy: Any) -> None:
    old = as_v1(strategy)
    for name in ("gather", "experimental_distribute_values_from_function"):
        assert not hasattr(old, name)
        assert name not in dir(old)
        with pytest.raises(AttributeError, match=f"'{name}'.*Use"):
            getattr(old, name)
    assert "experimental_run" in dir(old)
    assert not hasattr(rx.MirroredStrategy(["CPU:0"]), "experimental_run")


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS, "minimal_2")
def test_parts_are_those_of_the_strategy_of_today(strategy: Any) -> None:
    old = as_v1(strategy)
    assert isinstance(old.extended, v1.StrategyExtended)
    assert isinstance(old.extended, type(strategy.extended))
    assert old.extended.layout is strategy.extended.layout
    assert old.extended.container_strategy is old
    assert strategy.extended.container_strategy is strategy
    with old.scope():
        v = rx.Variable(1.0)
        assert v1.get_strategy() is old
        assert v1.has_strategy()
        assert v1.in_cross_replica_context()
    assert old.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(v)
    assert old.cluster_resolver is None


@pytest.mark.strategies(*KINDS)
def test_reduce_has_no_axis_by_default(strategy: Any, run: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    result = run(old, lambda: jnp.ones(2) * (1.0 + replica_id()))
    np.testing.assert_array_equal(old.reduce("SUM", result), [n * (n + 1) / 2] * 2)
    np.testing.assert_array_equal(old.reduce(v1.ReduceOp.MEAN, result), [(n + 1) / 2] * 2)
    assert float(old.reduce("sum", result, axis=0)) == n * (n + 1)
    with refused(TypeError, "axis"):
        strategy.reduce("SUM", result)


def test_contexts_of_v1(two: Any) -> None:
    seen: list[Any] = []

    def merge_fn(strategy: Any, value: Any) -> Any:
        seen.append((strategy, v1.in_cross_replica_context(), v1.get_replica_context()))
        return strategy.reduce("SUM", value)

    def fn() -> Any:
        context = v1.get_replica_context()
        assert isinstance(context, v1.ReplicaContext)
        assert context.strategy is two
        return context.merge_call(merge_fn, args=(replica_id() + 1.0,))

    assert float(two.run(fn)) == 3.0
    assert seen == [(two, True, None)]
    v1.experimental_set_strategy(two)
    try:
        assert v1.get_strategy() is two
    finally:
        v1.experimental_set_strategy(None)


def test_s83_s68_unwrap_and_group(two: Any) -> None:
    result = per_replica(two, 1.0)
    assert isinstance(two.unwrap(result), list)
    assert numbers(two, result) == [1.0, 2.0]
    assert two.unwrap(3) == [3]
    assert two.group(result, name="g") is None
    assert two.experimental_local_results(result) == tuple(two.unwrap(result))


def test_configure_and_update_config_proto(two: Any) -> None:
    config = {"gpu_options": {"allow_growth": True}}
    assert two.configure(config) is None
    assert two.configure(session_config=config) is None
    updated = two.update_config_proto(config)
    assert updated == config
    assert updated is not config
    with refused(NotImplementedError, "cluster_resolver"):
        two.configure(cluster_spec={"worker": ["a:1"]}, task_type="worker", task_id=0)


def test_a_copy_keeps_the_api_of_v1(two: Any) -> None:
    clone = copy.deepcopy(two)
    assert isinstance(clone.extended, v1.StrategyExtended)
    assert clone.extended.container_strategy is clone
    assert numbers(clone, per_replica(clone)) == [0.0, 1.0]
    assert not hasattr(clone, "gather")


def test_a_v1_strategy_of_ones_own() -> None:
    class Extended(v1.StrategyExtended):
        def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
            return next_creator(**kwargs)

    class Own(v1.Strategy):
        def __init__(self) -> None:
            super().__init__(Extended(self, rx.ReplicaLayout(jax.devices("cpu")[:2])))

    own = Own()
    assert type(own.extended) is Extended
    assert numbers(own, own.experimental_run(lambda: replica_id() * 1.0)) == [0.0, 1.0]


# Iterators.


@pytest.mark.strategies(*KINDS)
def test_make_dataset_iterator_divides_global_batches(strategy: Any, run: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    iterator = old.make_dataset_iterator(rx.data.Dataset.range(4 * n).batch(2 * n))
    with refused(RuntimeError, "initialize"):
        iterator.get_next()
    for _ in range(2):
        iterator.initialize()
        element = iterator.get_next()
        result = run(old, lambda x: jnp.sum(x), (element,))
        assert numbers(old, result) == [4 * i + 1 for i in range(n)]
    iterator.get_next()
    with refused(IndexError):
        iterator.get_next()


@pytest.mark.strategies(*KINDS)
def test_experimental_run_takes_the_next_element(strategy: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    iterator = old.make_dataset_iterator(rx.data.Dataset.range(2 * n).batch(n))
    iterator.initialize()
    first = old.experimental_run(lambda x: x[0] * 2, iterator)
    second = old.experimental_run(lambda x: x[0] * 2, input_iterator=iterator)
    assert numbers(old, first) == [2 * i for i in range(n)]
    assert numbers(old, second) == [2 * (n + i) for i in range(n)]
    assert numbers(old, old.experimental_run(lambda: replica_id() + 0.5)) == [
        i + 0.5 for i in range(n)
    ]


@pytest.mark.strategies(*KINDS)
def test_make_input_fn_iterator_feeds_per_replica_batches(strategy: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    contexts: list[Any] = []

    def input_fn(context: Any) -> Any:
        contexts.append(context)
        size = context.get_per_replica_batch_size(2 * n)
        return rx.data.Dataset.range(4 * n).batch(size)

    iterator = old.make_input_fn_iterator(input_fn)
    assert [c.num_replicas_in_sync for c in contexts] == [n]
    iterator.initialize()
    for step in range(2):
        parts = old.unwrap(iterator.get_next())
        first = 2 * n * step
        assert [np.asarray(p).tolist() for p in parts] == [
            [first + 2 * i, first + 2 * i + 1] for i in range(n)
        ]


def test_make_input_fn_iterator_takes_a_function_that_returns_batches(two: Any) -> None:
    def input_fn(context: Any) -> Any:
        batches = iter(np.arange(8, dtype=np.float32).reshape(4, 2))
        return lambda: next(batches)

    iterator = two.make_input_fn_iterator(input_fn)
    iterator.initialize()
    seen = []
    for _ in range(2):
        seen += [np.asarray(x).tolist() for x in two.unwrap(iterator.get_next())]
    assert seen == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    with refused(IndexError):
        iterator.get_next()


def test_make_input_fn_iterator_refuses_another_mode(two: Any) -> None:
    for mode in (v1.InputReplicationMode.PER_REPLICA, "PER_WORKER", None):
        with refused(ValueError, "PER_WORKER"):
            two.make_input_fn_iterator(lambda c: [], replication_mode=mode)


def test_experimental_make_numpy_dataset(two: Any) -> None:
    features, labels = np.arange(8.0).reshape(4, 2), np.arange(4)
    for make in (two, two.extended):
        dataset = make.experimental_make_numpy_dataset((features, labels))
        iterator = two.make_dataset_iterator(dataset.batch(2))
        iterator.initialize()
        x, y = iterator.get_next()
        assert [np.asarray(p).tolist() for p in two.unwrap(x)] == [[[0.0, 1.0]], [[2.0, 3.0]]]
        assert [np.asarray(p).tolist() for p in two.unwrap(y)] == [[0], [1]]
        with refused(NotImplementedError, "session"):
            make.experimental_make_numpy_dataset(labels, session=object())


def test_s159_s160_iterators_train(two: Any) -> None:
    with two.scope():
        w = rx.Variable(0.0)
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.25), [w])
    data = two.experimental_make_numpy_dataset(np.ones(16, np.float32)).batch(4)
    iterator = two.make_dataset_iterator(data)

    @rx.function
    def step(x: Any) -> Any:
        def loss_fn() -> Any:
            return rx.nn.compute_average_loss((w - x) ** 2, global_batch_size=4)

        loss, gradients = rx.value_and_grad(loss_fn, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss

    losses = []
    for _ in range(2):
        iterator.initialize()
        for _ in range(4):
            losses.append(
                float(two.reduce(v1.get_loss_reduction(), two.run(step, (iterator.get_next(),))))
            )
    assert losses == [4.0**-i for i in range(8)]


# StrategyExtended.


@pytest.mark.strategies(*KINDS)
def test_members_of_extended(strategy: Any) -> None:
    old = as_v1(strategy)
    extended = old.extended
    with old.scope():
        w = rx.Variable(2.0)
        assert float(extended.read_var(w)) == 2.0
        result = extended.call_for_each_replica(lambda x: x + replica_id(), args=(1.0,))
        assert numbers(old, result) == [1.0 + i for i in range(old.num_replicas_in_sync)]
        assert extended.broadcast_to(3, w) == 3
        mirrored = extended.broadcast_to(jnp.asarray(3.0), extended.worker_devices)
        assert numbers(old, mirrored) == [3.0] * len(old.unwrap(mirrored))
        devices = extended.non_slot_devices([w])
        assert devices == extended.parameter_devices
        done = extended.update_non_slot(devices, lambda x: x * 2, args=(4.0,), group=False)
        assert list(done) == [8.0] * len(devices)
    assert extended.experimental_between_graph is isinstance(strategy, rx.TPUStrategy)
    for fact in ("experimental_should_init", "should_checkpoint", "should_save_summary"):
        assert getattr(extended, fact) is True
    assert extended.experimental_require_static_shapes is False


@pytest.mark.strategies(*SEVERAL)
def test_s65_all_reduce_makes_a_mirrored_value(strategy: Any, run: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    result = run(old, lambda: v1.get_replica_context().all_reduce("sum", replica_id() + 1.0))
    assert numbers(old, result) == [n * (n + 1) / 2] * n


@pytest.mark.strategies(*SEVERAL)
def test_s63_s66_reduce_to_and_broadcast_to_destinations(strategy: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    with old.scope():
        w = rx.Variable(1.0)
        value = per_replica(old, 1.0)
        for destinations in (value, w):
            total = old.extended.reduce_to("SUM", value, destinations)
            assert isinstance(total, rx.Mirrored)
            assert numbers(old, total) == [n * (n + 1) / 2] * n
        copied = old.extended.broadcast_to(jnp.asarray(5.0), w)
        assert [x.devices() for x in copied.values] == [{d} for d in w.placement]


@pytest.mark.strategies(*SEVERAL)
def test_s111_s112_s113_s115_s117_read_var_of_sync_on_read_variables(
    strategy: Any, run: Any
) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    with old.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )
    for _ in range(3):
        run(old, lambda: v.assign_add(1.0 + replica_id()))
    assert numbers(old, v) == [3.0 * (1 + i) for i in range(n)]
    with old.scope():
        assert float(old.extended.read_var(v)) == 3.0 * (n + 1) / 2
        with refused(ValueError, "ON_READ"):
            v.assign_add(1.0)
    assert not v.trainable


def test_s114_a_checkpoint_holds_the_aggregated_value(two: Any, tmp_path: Path) -> None:
    with two.scope():
        v = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    two.run(lambda: v.assign(3.0 + replica_id()))
    path = rx.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    plain = rx.Variable(0.0)
    rx.train.Checkpoint(v=plain).restore(path).assert_consumed()
    assert float(plain) == 7.0


def test_s116_copies_start_from_one_value(two: Any) -> None:
    calls: list[int] = []

    def initial() -> Any:
        calls.append(1)
        return np.random.default_rng().normal(size=3).astype(np.float32)

    with two.scope():
        v = rx.Variable(
            initial,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
    first, second = two.unwrap(v)
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    assert calls == [1]


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2", "one_device")
def test_s128_s129_s130_s131_colocation_and_non_slot_variables(strategy: Any) -> None:
    old = as_v1(strategy)
    made: list[Any] = []
    with old.scope():
        v = rx.Variable(1.0)
        with old.colocate_vars_with(v):
            made.append(rx.Variable(2.0))
        old.run(lambda: made.append(_colocated_in_replica(old, v)))
        devices = old.extended.non_slot_devices([v])
        with old.extended.colocate_vars_with(devices):
            betas = [rx.Variable(0.5), rx.Variable(0.25)]
        old.extended.update_non_slot(devices, lambda: betas[0].assign(0.125))
    assert {x.placement for x in made} == {v.placement}
    assert betas[0].placement == betas[1].placement
    assert float(betas[0].read_value()) == 0.125


def _colocated_in_replica(strategy: Any, v: Any) -> Any:
    with strategy.extended.colocate_vars_with(v):
        return rx.Variable(3.0, name="in_replica")


def test_s132_the_default_strategy_needs_the_list_of_variables() -> None:
    extended = v1.get_strategy().extended
    b, a = rx.Variable(1.0, name="b"), rx.Variable(1.0, name="a")
    assert extended.non_slot_devices([b, a]) is a


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_s218_gradients_are_applied_in_cross_replica_context(strategy: Any, run: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    with old.scope():
        w = rx.Variable(1.0)
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [w])

    def merge_fn(strategy: Any, gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, w)])

    run(old, lambda: v1.get_replica_context().merge_call(merge_fn, args=(1.0 + replica_id(),)))
    assert float(w.read_value()) == 1.0 - 0.5 * n * (n + 1) / 2


# Several steps.


@pytest.mark.strategies(*KINDS)
def test_steps_on_an_iterator(strategy: Any) -> None:
    old = as_v1(strategy)
    n = old.num_replicas_in_sync
    iterator = old.make_dataset_iterator(rx.data.Dataset.range(6 * n).batch(n))
    iterator.initialize()
    with old.scope():
        steps = rx.Variable(0, aggregation=rx.VariableAggregation.ONLY_FIRST_REPLICA)
    compiled = rx.function(lambda x: jnp.sum(x) * 1.0)

    def step(context: Any, x: Any) -> None:
        assert v1.in_cross_replica_context()
        steps.assign_add(1)
        context.set_last_step_output("loss", old.run(compiled, args=(x,)), v1.ReduceOp.SUM)
        context.set_last_step_output("parts", x)
        context.set_non_tensor_output("name", "step")

    context = old.extended.experimental_run_steps_on_iterator(step, iterator, iterations=3)
    assert isinstance(context, MultiStepContext)
    assert int(steps.read_value()) == 3
    last = list(range(2 * n, 3 * n))
    assert float(context.last_step_outputs["loss"]) == sum(last)
    parts = old.unwrap(context.last_step_outputs["parts"])
    assert [int(p[0]) for p in parts] == last
    assert context.non_tensor_outputs == {"name": "step"}
    context = old.extended.experimental_run_steps_on_iterator(step, iterator)
    assert int(steps.read_value()) == 4
    with refused(IndexError):
        old.extended.experimental_run_steps_on_iterator(step, iterator, iterations=3)


def test_steps_set_outputs_in_replicas(two: Any) -> None:
    iterator = two.make_dataset_iterator(rx.data.Dataset.range(8).batch(4))
    iterator.initialize()

    def replica_fn(context: Any, x: Any) -> None:
        context.set_last_step_output("mean", jnp.mean(x * 1.0), "MEAN")
        context.set_non_tensor_output("ids", f"replica {int(replica_id())}")

    def step(context: Any, x: Any) -> None:
        two.run(replica_fn, args=(context, x))

    context = two.extended.experimental_run_steps_on_iterator(
        step, iterator, iterations=2, initial_loop_values={"mean": -1.0, "other": 5.0}
    )
    assert float(context.last_step_outputs["mean"]) == 5.5
    assert context.last_step_outputs["other"] == 5.0
    assert context.non_tensor_outputs == {"ids": ("replica 0", "replica 1")}
    context = two.extended.experimental_run_steps_on_iterator(step, iterator, 0, {"mean": -1.0})
    assert context.last_step_outputs == {"mean": -1.0}


def test_steps_explain_mistakes(two: Any) -> None:
    iterator = two.make_dataset_iterator(rx.data.Dataset.range(40).batch(2))
    iterator.initialize()
    run_steps = two.extended.experimental_run_steps_on_iterator

    def without_op(context: Any, x: Any) -> None:
        two.run(lambda x: context.set_last_step_output("loss", x), args=(x,))

    with refused(ValueError, "reduce_op"):
        run_steps(without_op, iterator)

    def compiled(context: Any, x: Any) -> None:
        def fn(x: Any) -> None:
            context.set_last_step_output("loss", jnp.sum(x), "SUM")

        two.run(rx.function(fn), args=(x,))

    with refused(RuntimeError, "'loss'"):
        run_steps(compiled, iterator)
    for bad in (-1, 1.5, True):
        with refused(ValueError, "iterations"):
            run_steps(without_op, iterator, iterations=bad)


# Deprecated names.


def test_deprecated_names_warn_once(two: Any, fresh_warnings: None) -> None:
    with pytest.warns(DeprecationWarning, match=r"experimental_run_v2.*use `Strategy.run`") as seen:
        assert numbers(two, two.experimental_run_v2(lambda: replica_id() * 1.0)) == [0.0, 1.0]
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two.experimental_run_v2(lambda x, *, y: None, args=(1,), kwargs={"y": 2}, options=None)
    name = "experimental_distribute_datasets_from_function"
    with pytest.warns(DeprecationWarning, match=name):
        dataset = getattr(two, name)(lambda context: rx.data.Dataset.range(4).batch(1))
    assert [[float(part[0]) for part in two.unwrap(x)] for x in dataset] == [[0.0, 1.0], [2.0, 3.0]]
    with pytest.warns(DeprecationWarning, match="CommunicationOptions"):
        hints = v1.experimental.CollectiveHints(bytes_per_pack=8)
    assert isinstance(hints, v1.experimental.CommunicationOptions)
    assert v1.experimental.CollectiveHints(timeout_seconds=2.0).timeout_seconds == 2.0


def test_deprecated_names_raise_each_time_if_warnings_are_errors(
    two: Any, fresh_warnings: None
) -> None:
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(DeprecationWarning):
                two.experimental_run_v2(lambda: None)


# experimental.


def test_strategies_of_experimental(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    central = v1.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2")
    assert [d.rpartition("device:")[2] for d in central.extended.parameter_devices] == ["CPU:2"]
    workers = v1.experimental.MultiWorkerMirroredStrategy()
    assert isinstance(workers.cluster_resolver, v1.cluster_resolver.TFConfigClusterResolver)
    assert workers.extended.experimental_between_graph
    tpu = v1.experimental.TPUStrategy(device_assignment=["CPU:6", "CPU:7"])
    assert (tpu.steps_per_run, tpu.num_replicas_in_sync) == (1, 2)
    assert v1.experimental.TPUStrategy(None, 5, ["CPU:6"]).steps_per_run == 5
    for strategy in (central, workers, tpu):
        assert isinstance(strategy, v1.Strategy)
        assert isinstance(strategy.extended, v1.StrategyExtended)
        assert float(strategy.reduce("SUM", strategy.run(lambda: 1.0 + 0 * replica_id()))) == (
            strategy.num_replicas_in_sync
        )
    with refused(NotImplementedError, "rx.ParameterServerStrategy"):
        v1.experimental.ParameterServerStrategy()


# `tf.compat.v1`: the same API, with tensors.


@pytest.fixture
def two_of_tf() -> Any:
    return tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_s159_iterators_and_results_of_tf_are_tensors(two_of_tf: Any) -> None:
    strategy = two_of_tf
    assert isinstance(strategy, v1.Strategy)
    iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(8).batch(4))
    iterator.initialize()
    result = strategy.experimental_run(lambda x: tf.reduce_sum(x), iterator)
    parts = strategy.experimental_local_results(result)
    assert all(isinstance(part, tf.Tensor) for part in (*parts, *strategy.unwrap(result)))
    assert [part.numpy() for part in parts] == [1, 5]
    total = strategy.reduce("SUM", result)
    assert isinstance(total, tf.Tensor)
    assert total.numpy() == 6

    def input_fn(context: Any) -> Any:
        size = context.get_per_replica_batch_size(4)
        return tf.data.Dataset.from_tensor_slices(np.arange(8.0, dtype=np.float32)).batch(size)

    iterator = strategy.make_input_fn_iterator(input_fn)
    iterator.initialize()
    result = strategy.run(lambda x: x * 2.0, args=(iterator.get_next(),))
    assert [part.numpy().tolist() for part in strategy.unwrap(result)] == [[0.0, 2.0], [4.0, 6.0]]


def test_tf_has_the_members_of_v1_only(two_of_tf: Any, fresh_warnings: None) -> None:
    for name in ("gather", "experimental_distribute_values_from_function"):
        assert not hasattr(two_of_tf, name)
    with pytest.warns(DeprecationWarning, match="use `Strategy.run`"):
        result = two_of_tf.experimental_run_v2(lambda x: x + 1.0, args=(tf.constant(1.0),))
    assert [part.numpy() for part in two_of_tf.unwrap(result)] == [2.0, 2.0]
    dataset = two_of_tf.experimental_make_numpy_dataset(np.arange(4))
    assert [int(row) for row in dataset] == [0, 1, 2, 3]
    module = tf.compat.v1.distribute
    assert module.get_loss_reduction() is tf.distribute.ReduceOp.SUM
    with two_of_tf.scope():
        assert module.get_strategy() is tf.distribute.get_strategy() is two_of_tf
    central = module.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2")
    assert isinstance(central.run(lambda: tf.constant(1.0)).values[0], tf.Tensor)


def test_get_variable_makes_a_variable_for_each_call(two_of_tf: Any) -> None:
    get_variable = tf.compat.v1.get_variable
    with two_of_tf.scope():
        w = get_variable("w", [20, 30])
        again = get_variable("w", [20, 30], trainable=False)
        count = get_variable("count", [2], tf.int32)
        value = get_variable("value", initializer=[1.0, 2.0])
        filled = get_variable("filled", [2], initializer=lambda shape, dtype: tf.ones(shape, dtype))
    assert all(isinstance(v, rx.MirroredVariable) for v in (w, again, count, value, filled))
    assert again is not w
    assert (w.trainable, again.trainable) == (True, False)
    # Glorot's bound: the square root of 6 over the sizes of input and output.
    bound = (6 / 50) ** 0.5
    assert bound * 0.9 < np.abs(w.numpy()).max() <= bound
    assert (count.dtype, count.numpy().tolist()) == (tf.int32, [0, 0])
    assert value.numpy().tolist() == [1.0, 2.0]
    assert filled.numpy().tolist() == [1.0, 1.0]
    with refused(ValueError, "shape"):
        get_variable("v")
    for argument in ("regularizer", "custom_getter"):
        with refused(NotImplementedError, argument):
            get_variable("v", [1], **{argument: lambda x: x})
