"""`tf.distribute`: steps, values, contexts and datasets with tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compiles functions, or leaves them as they are."""
    return tf.function if request.param == "compiled" else lambda fn: fn


@pytest.fixture
def two() -> Any:
    """A strategy of two replicas."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES: dict[str, Callable[[], Any]] = {
    "default": tf.distribute.get_strategy,
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
    "mirrored_2": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "virtual_2": lambda: tf.distribute.MirroredStrategy(["CPU:2"], virtual_replicas=2),
    "central_2": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "tpu_2": lambda: tf.distribute.TPUStrategy(experimental_device_assignment=["CPU:6", "CPU:7"]),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_steps_take_and_give_tensors(kind: str, compiled: Any) -> None:
    strategy = STRATEGIES[kind]()
    seen: list[bool] = []

    def step(x: Any, options: Any) -> Any:
        seen.append(isinstance(x, tf.Tensor) and isinstance(options["scale"], tf.Tensor))
        return {"sum": tf.reduce_sum(x) * options["scale"], "rows": x * 1.0}

    @compiled
    def call(x: Any) -> Any:
        found = strategy.run(step, args=(x, {"scale": tf.constant(2.0)}))
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, found["sum"], axis=None)
        mean = strategy.reduce("MEAN", found["rows"], axis=0)
        return total, mean, strategy.gather(found["rows"], axis=0)

    total, mean, rows = call(tf.constant([1.0, 2.0]))
    count = strategy.num_replicas_in_sync
    assert all(seen)
    assert all(isinstance(value, tf.Tensor) for value in (total, mean, rows))
    assert float(total) == 6.0 * count and float(mean) == 1.5
    assert rows.numpy().tolist() == [1.0, 2.0] * count


def test_local_results_and_values_are_tensors(two: Any) -> None:
    found = two.run(lambda: tf.constant([1.0, 2.0]))
    assert isinstance(found, tf.distribute.DistributedValues)
    for part in (*found.values, *two.experimental_local_results(found), *two.unwrap(found)):
        assert isinstance(part, tf.Tensor)
        assert part.numpy().tolist() == [1.0, 2.0]
    assert [p.numpy() for p in two.experimental_local_results(tf.constant(3))] == [3]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_distributed_datasets_give_tensors(kind: str, compiled: Any) -> None:
    strategy = STRATEGIES[kind]()
    data = tf.data.Dataset.from_tensor_slices({"x": np.arange(8.0, dtype=np.float32)}).batch(4)
    distributed = strategy.experimental_distribute_dataset(data)

    @compiled
    def total(batch: Any) -> Any:
        def step(batch: Any) -> Any:
            assert isinstance(batch["x"], tf.Tensor)
            return tf.reduce_sum(batch["x"])

        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    assert [float(total(batch)) for batch in distributed] == [6.0, 22.0]
    iterator = iter(distributed)
    for wanted in ([0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]):
        batch = iterator.get_next() if hasattr(iterator, "get_next") else next(iterator)
        parts = strategy.experimental_local_results(batch["x"])
        assert np.concatenate([part.numpy() for part in parts]).tolist() == wanted
    with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
        next(iterator)


def test_datasets_from_a_function(two: Any) -> None:
    def make(context: Any) -> Any:
        size = context.get_per_replica_batch_size(4)
        data = tf.data.Dataset.range(8).map(lambda x: tf.cast(x, tf.float32) * 2.0)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    found = []
    for batch in two.distribute_datasets_from_function(make):
        found += [part.numpy().tolist() for part in batch.values]
    assert found == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]]


def test_values_from_a_function(two: Any) -> None:
    def value(context: Any) -> Any:
        return tf.constant(float(context.replica_id_in_sync_group))

    made = two.experimental_distribute_values_from_function(value)
    found = two.run(lambda x: x + 1.0, args=(made,))
    assert [part.numpy() for part in found.values] == [1.0, 2.0]


def test_collectives_of_replica_code(two: Any, compiled: Any) -> None:
    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == 2
        number = tf.cast(context.replica_id_in_sync_group, tf.float32)
        own = x * (number + 1.0)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
        nested = context.all_reduce("MEAN", {"a": own, "b": [number]})
        gathered = context.all_gather(own, axis=0)
        assert isinstance(summed, tf.Tensor) and isinstance(nested["a"], tf.Tensor)
        return summed, nested, gathered

    @compiled
    def call(x: Any) -> Any:
        return two.run(step, args=(x,))

    summed, nested, gathered = call(tf.constant([1.0, 10.0]))
    assert summed.values[1].numpy().tolist() == [3.0, 30.0]
    assert nested["a"].values[0].numpy().tolist() == [1.5, 15.0]
    assert nested["b"][0].values[0].numpy() == 0.5
    assert gathered.values[0].numpy().tolist() == [1.0, 10.0, 2.0, 20.0]


def test_the_gradient_of_collectives(two: Any, compiled: Any) -> None:
    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = context.all_gather(x, axis=0)
            total = context.all_reduce("SUM", tf.reduce_sum(x**2))
            y = tf.reduce_sum(rows) * 2.0 + total
        return tape.gradient(y, x)

    found = compiled(lambda x: two.run(step, args=(x,)))(tf.constant([1.0, 2.0]))
    # Each replica's y depends on the x of both.
    for part in found.values:
        assert part.numpy().tolist() == [8.0, 12.0]


def test_merge_call_gets_the_values_of_all_replicas(two: Any, compiled: Any) -> None:
    with two.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def merge(strategy: Any, value: Any) -> Any:
        assert strategy is two
        total = strategy.reduce("SUM", value, axis=None)
        assert isinstance(total, tf.Tensor)
        strategy.extended.update(v, lambda own, x: own.assign_add(x), args=(total,))
        return total * 10.0

    def step(x: Any) -> Any:
        found = tf.distribute.get_replica_context().merge_call(merge, args=(x,))
        assert isinstance(found, tf.Tensor)
        return found

    found = compiled(lambda: two.run(step, args=(tf.constant(3.0),)))()
    assert {float(part) for part in two.experimental_local_results(found)} == {60.0}
    assert float(v) == 7.0


def test_extended_takes_and_gives_tensors(two: Any) -> None:
    with two.scope():
        v = tf.Variable([1.0, 2.0])
    found = two.run(lambda: tf.constant([1.0, 1.0]))
    reduced = two.extended.reduce_to("SUM", found, v)
    two.extended.update(v, lambda own, x: own.assign_add(x), args=(reduced,))
    assert v.numpy().tolist() == [3.0, 4.0]
    [first, second] = two.extended.batch_reduce_to("MEAN", [(found, v), (found, v)])
    assert np.asarray(first).tolist() == np.asarray(second).tolist() == [1.0, 1.0]
    sent = two.extended.broadcast_to(tf.constant(4.0), two.extended.worker_devices[1])
    assert np.asarray(sent) == 4.0
    called = two.extended.call_for_each_replica(lambda x: x * 2.0, args=(tf.constant(4.0),))
    assert [part.numpy() for part in two.experimental_local_results(called)] == [8.0, 8.0]
    assert two.extended.worker_devices == two.extended.parameter_devices


def test_contexts_are_those_of_tensorflow(two: Any) -> None:
    assert not tf.distribute.has_strategy()
    assert tf.distribute.get_replica_context().num_replicas_in_sync == 1
    with two.scope():
        assert tf.distribute.get_strategy() is two and tf.distribute.has_strategy()
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_replica_context() is None
    seen = []
    two.run(lambda: seen.append(tf.distribute.get_replica_context().replica_id_in_sync_group))
    assert [int(number) for number in seen] == [0, 1]


def test_the_default_strategy_takes_tensors() -> None:
    strategy = tf.distribute.get_strategy()
    with strategy.scope():
        v = tf.Variable(2.0)
    found = strategy.run(lambda x: x * v, args=(tf.constant(3.0),))
    assert isinstance(found, tf.Tensor)
    assert float(strategy.reduce("SUM", found, axis=None)) == 6.0
    data = tf.data.Dataset.range(2)
    assert strategy.experimental_distribute_dataset(data) is data
    assert isinstance(strategy, tf.distribute.Strategy)


def test_a_variable_without_aggregation_can_be_written_by_replicas(two: Any, compiled: Any) -> None:
    with two.scope():
        step_number = tf.Variable(0, trainable=False)

    def step() -> Any:
        return step_number.assign_add(1)

    train = compiled(lambda: two.run(step))
    for _ in range(3):
        train()
    assert int(step_number) == 3
    assert [int(part.numpy()) for part in step_number.values] == [3, 3]


@pytest.mark.parametrize("kind", ["one_device", "mirrored_2", "virtual_2", "central_2"])
def test_a_model_trains_alike_under_all_strategies(kind: str, compiled: Any) -> None:
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.set_weights([np.asarray([[0.5], [-0.5]], np.float32), np.zeros(1, np.float32)])
        optimizer = keras.optimizers.SGD(0.1)
        loss_fn = keras.losses.MeanSquaredError(reduction="none")

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(loss_fn(y, model(x)), global_batch_size=4)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Not built before: the first call makes its variables.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    rows = np.asarray([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [-1.0, 1.0]], np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1] * 2.0)).batch(4).repeat(3)
    train = compiled(lambda x, y: strategy.run(step, args=(x, y)))
    losses = []
    for x, y in strategy.experimental_distribute_dataset(data):
        losses.append(float(strategy.reduce("SUM", train(x, y), axis=None)))
    # Computed by hand with NumPy.
    w, b, wanted = np.asarray([[0.5], [-0.5]]), 0.0, []
    for _ in range(3):
        error = rows @ w + b - rows[:, :1] * 2.0
        wanted.append(float((error**2).mean()))
        w, b = w - 0.1 * (2 * rows.T @ error / 4), b - 0.1 * float(2 * error.mean())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_uneven_last_batches_train_in_both_executors(two: Any, compiled: Any) -> None:
    with two.scope():
        w = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.01)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    data = tf.data.Dataset.from_tensor_slices(np.ones((7,), np.float32)).batch(4)
    train = compiled(lambda x: two.run(step, args=(x,)))
    for batch in two.experimental_distribute_dataset(data):
        train(batch)
    np.testing.assert_allclose(w.numpy(), 1.0 - 0.01 * 7, rtol=1e-6)


def test_names_of_tf_distribute_are_those_of_replicax() -> None:
    assert issubclass(tf.distribute.MirroredStrategy, rx.MirroredStrategy)
    assert tf.distribute.ReduceOp.SUM is rx.ReduceOp.SUM
    assert tf.distribute.MirroredStrategy.__name__ == "MirroredStrategy"
    with pytest.raises(AttributeError, match="NoSuchThing"):
        tf.distribute.NoSuchThing  # noqa: B018


def test_batches_keep_the_order_of_their_keys(two: Any) -> None:
    rows = {"b": np.float32([[1.0], [2.0]]), "a": np.float32([[3.0], [4.0]])}
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(2)

    @tf.function
    def columns(batch: Any) -> Any:
        return two.run(lambda x: tf.concat(list(x.values()), axis=1), args=(batch,))

    (batch,) = two.experimental_distribute_dataset(dataset)
    found = two.gather(columns(batch), axis=0)
    assert found.numpy().tolist() == [[1.0, 3.0], [2.0, 4.0]]
