"""The coordinator with real workers and servers: what programs of the seeds rely on."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, becomes, until_all_idle
from vocabulary import refused

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors


def wait_for(path: Path) -> None:
    """Waits, on a worker, for a file that the test makes."""
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def touch_and_wait(begun: Path, goal: Path, value: Any) -> Any:
    begun.touch()
    wait_for(goal)
    return value


def orders_of(coordinator: Any, iterator: Any, path: Path) -> list[Any]:
    """Returns what both workers read first."""

    def read(iterator: Any) -> list[int]:
        (path / str(rx.coordinator.experimental_get_current_worker_index())).touch()
        for index in range(2):
            wait_for(path / str(index))
        return [int(np.ravel(next(iterator))[0]) for _ in range(20)]

    until_all_idle(coordinator)
    values = [coordinator.schedule(read, args=(iterator,)) for _ in range(2)]
    coordinator.join(timeout=60)
    return coordinator.fetch(values)


@pytest.mark.parametrize("kind", ["object", "captured", "distributed"])
def test_each_worker_shuffles_in_an_order_of_its_own(desk: Desk, tmp_path: Path, kind: str) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    shuffled = rx.data.Dataset.range(1000).shuffle(1000).map(lambda x: x)
    given = {
        "object": shuffled,
        "captured": lambda: shuffled.take(500),
        "distributed": strategy.experimental_distribute_dataset(shuffled.batch(1)),
    }[kind]
    first, second = orders_of(
        coordinator, iter(coordinator.create_per_worker_dataset(given)), tmp_path
    )
    assert first != second


def test_a_seed_of_the_user_is_that_of_every_worker(desk: Desk, tmp_path: Path) -> None:
    coordinator = desk.coordinator()
    dataset = rx.data.Dataset.range(1000).shuffle(1000, seed=7)
    first, second = orders_of(
        coordinator, iter(coordinator.create_per_worker_dataset(dataset)), tmp_path
    )
    assert first == second == [int(x) for x in dataset.take(20)]


# The programs of the seeds.


def test_S184_S185_S189_S193_S198_S225_the_training_loop_of_the_seeds(desk: Desk) -> None:
    strategy = rx.experimental.ParameterServerStrategy(
        cluster_resolver=desk.cluster.resolver,
        variable_partitioner=rx.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=64, max_shards=2
        ),
    )
    coordinator = rx.experimental.coordinator.ClusterCoordinator(strategy=strategy)
    with strategy.scope():
        w = rx.Variable(lambda: jnp.zeros((64, 1)), name="w")
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.05), [w])
        loss_metric = rx.metrics.Mean()
    assert isinstance(w, rx.ShardedVariable)

    def dataset_fn() -> Any:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(256, 64)).astype(np.float32)
        data = rx.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
        return data.shuffle(64, seed=1).repeat().batch(32, drop_remainder=True)

    per_worker = coordinator.create_per_worker_dataset(dataset_fn=dataset_fn)

    @rx.function
    def train_step(iterator: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            def loss() -> Any:
                return jnp.mean((x @ w.read_value() - y) ** 2)

            value, gradient = rx.value_and_grad(loss, w)()
            optimizer.apply_gradients([(gradient, w)])
            loss_metric.update_state(value)
            return value

        x, y = next(iterator)
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    results = []
    for _ in range(3):
        loss_metric.reset_state()
        iterator = iter(per_worker)
        began = time.monotonic()
        values = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(20)]
        assert time.monotonic() - began < 60
        coordinator.join(timeout=60)
        assert coordinator.done()
        results.append(float(loss_metric.result()))
        np.testing.assert_allclose(np.mean(coordinator.fetch(values)), results[-1], rtol=1e-4)
    assert int(optimizer.iterations) == 60
    assert results[-1] < 0.2 * results[0]
    coordinator.close()
    strategy.close()


def test_S184_any_callable_any_arguments_any_tree(desk: Desk) -> None:
    coordinator = desk.coordinator(desk.strategy(2))
    with coordinator.strategy.scope():
        table = rx.Variable(np.arange(8.0).reshape(4, 2), name="table")

    class Model(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def __call__(self, x: Any, scale: float = 1.0) -> Any:
            return x @ self.table.read_value().T * scale

    def plain(a: Any, b: Any) -> Any:
        table.assign_add(np.ones((4, 2)))
        return {"rows": table[1:3], "own": [a, (b, None)], "text": "x", "whole": table.numpy()}

    result = coordinator.schedule(plain, args=(1, 2.5)).fetch(60)
    np.testing.assert_array_equal(result["rows"], [[3, 4], [5, 6]])
    assert result["own"] == [1, (2.5, None)] and result["text"] == "x"
    np.testing.assert_array_equal(result["whole"], np.arange(8.0).reshape(4, 2) + 1)
    model = Model()
    x = np.ones((1, 2), np.float32)
    found = coordinator.schedule(model, args=(x,), kwargs={"scale": 2.0}).fetch(60)
    np.testing.assert_array_equal(found, [[6, 14, 22, 30]])
    # Variables are arguments too, and the parts of one.
    first = coordinator.schedule(
        lambda v, p: (v.shape, p.numpy()), args=(table, table.variables[1])
    )
    shape, part = first.fetch(60)
    assert tuple(shape) == (4, 2)
    np.testing.assert_array_equal(part, [[5, 6], [7, 8]])
    assert isinstance(coordinator.schedule(lambda: jnp.ones(2)).fetch(60), np.ndarray)


def test_S188_functions_know_the_index_of_their_worker(desk: Desk) -> None:
    coordinator = desk.coordinator()
    until_all_idle(coordinator)
    index = rx.coordinator.experimental_get_current_worker_index
    values = [coordinator.schedule(lambda: (time.sleep(0.01), index())[1]) for _ in range(40)]
    assert set(coordinator.fetch(values)) == {0, 1}


# Datasets.


def rx_data() -> Any:
    return rx.data.Dataset.range(6).batch(2)


def grain_data() -> Any:
    return grain.MapDataset.range(6).batch(2).to_iter_dataset()


def generator_data() -> Any:
    for i in range(3):
        yield np.array([2 * i, 2 * i + 1])


@pytest.mark.parametrize("make", [rx_data, grain_data, generator_data])
def test_S186_S187_S188_datasets_of_all_kinds(desk: Desk, make: Callable[[], Any]) -> None:
    coordinator = desk.coordinator()
    dataset = coordinator.create_per_worker_dataset(make)

    def element(iterator: Any) -> Any:
        return np.asarray(next(iterator)).tolist()

    def three(iterator: Any) -> Any:
        return [element(iterator) for _ in range(3)]

    for _ in range(2):
        # Again from the beginning, on whichever worker.
        iterator = iter(dataset)
        found = coordinator.schedule(three, args=(iterator,)).fetch(60)
        assert found == [[0, 1], [2, 3], [4, 5]]
    iterator = iter(dataset)

    def read_too_much() -> None:
        # Three elements on each of two workers: the seventh is one too many.
        for _ in range(7):
            coordinator.schedule(element, args=(iterator,))
        coordinator.join(timeout=60)

    with pytest.raises(errors.OutOfRangeError):
        read_too_much()
    assert coordinator.schedule(element, args=(iter(dataset),)).fetch(60) == [0, 1]


def test_S188_the_iterator_feeds_compiled_functions(desk: Desk) -> None:
    coordinator = desk.coordinator()
    dataset = coordinator.create_per_worker_dataset(
        lambda: rx.data.Dataset.from_tensor_slices({"a": np.arange(8.0)}).batch(2).repeat()
    )
    iterator = iter(dataset)
    step = rx.function(lambda it: next(it)["a"].sum())
    values = coordinator.fetch([coordinator.schedule(step, args=(iterator,)) for _ in range(8)])
    assert set(map(float, values)) <= {1.0, 5.0, 9.0, 13.0}
    assert len(set(map(float, values))) > 1


def test_T103_what_a_dataset_may_be_made_from(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    dataset = rx.data.Dataset.range(4).batch(4)
    distributed = strategy.experimental_distribute_dataset(dataset)
    from_function = strategy.distribute_datasets_from_function(lambda context: dataset)
    for given in (dataset, lambda: dataset, distributed, from_function, lambda: distributed):
        iterator = iter(coordinator.create_per_worker_dataset(given))
        value = coordinator.schedule(lambda it: next(it), args=(iterator,))
        assert np.asarray(value.fetch(60)).tolist() == [0, 1, 2, 3]


def test_T103_dataset_functions_that_create_variables_or_fail(desk: Desk) -> None:
    coordinator = desk.coordinator()

    def creates() -> Any:
        rx.Variable(1.0, name="inside")
        return rx.data.Dataset.range(3)

    def fails() -> Any:
        raise FileNotFoundError("no data at the place")

    for function, words in ((creates, "inside"), (fails, "no data at the place")):
        iterator = iter(coordinator.create_per_worker_dataset(function))
        # Unused, it does no harm.
        assert coordinator.schedule(lambda: 1).fetch(60) == 1
        coordinator.schedule(lambda it: next(it), args=(iterator,))
        with pytest.raises(errors.ClosureInputError, match=words) as caught:
            coordinator.join(timeout=60)
        assert "/job:worker/task:" in str(caught.value) + "".join(
            getattr(caught.value, "__notes__", [])
        )
        assert coordinator.schedule(lambda: 2).fetch(60) == 2


def test_per_worker_values(desk: Desk) -> None:
    coordinator = desk.coordinator()
    values = coordinator.create_per_worker_value(lambda n: {"n": np.full(n, 7.0)}, args=(3,))
    found = coordinator.fetch(values)
    assert len(found) == 2
    np.testing.assert_array_equal(found[1]["n"], np.full(3, 7.0))
    total = coordinator.schedule(lambda own: own["n"].sum(), args=(values,)).fetch(60)
    assert float(total) == 21.0


def test_T106_dropped_iterators_free_the_workers(desk: Desk, tmp_path: Path) -> None:
    coordinator = desk.coordinator()

    class Elements:
        """Says when it goes."""

        def __init__(self, path: Path) -> None:
            self.path = path

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return np.ones(1)

        def __del__(self) -> None:
            self.path.touch()

    class Source:
        def __init__(self, path: Path) -> None:
            self.path = path

        def __iter__(self) -> Any:
            return Elements(self.path)

    path = tmp_path / "closed"
    dataset = coordinator.create_per_worker_dataset(lambda: Source(path))
    iterator = iter(dataset)
    assert coordinator.schedule(lambda it: next(it), args=(iterator,)).fetch(60) is not None
    assert not path.exists()
    del iterator, dataset
    gc.collect()
    becomes(path.exists, "the iterator is gone on the worker")


# Errors, cancellation, the queue.


def fail(text: str) -> None:
    raise ValueError(text)


def test_T94_T95_errors_are_raised_once_and_everything_goes_on(desk: Desk) -> None:
    coordinator = desk.coordinator()
    assert coordinator.done()
    coordinator.join()
    for ask in (coordinator.join, coordinator.done, lambda: coordinator.schedule(lambda: 1)):
        value = coordinator.schedule(fail, args=("bad batch",))
        with pytest.raises(ValueError, match="bad batch"):
            value.fetch(60)
        with pytest.raises(ValueError, match="bad batch") as caught:
            ask()
        assert "/job:worker/task:" in "".join(caught.value.__notes__)
        coordinator.join(timeout=60)
        assert coordinator.done()
        assert coordinator.schedule(lambda: 5).fetch(60) == 5


def test_T95_T96_the_first_error_wins_and_what_waits_is_cancelled(
    desk: Desk, tmp_path: Path
) -> None:
    coordinator = desk.coordinator(timing=Timing(cancel_s=20.0))
    begun, goal, trigger = tmp_path / "begun", tmp_path / "goal", tmp_path / "trigger"
    # A worker that joins late would fail before the one that is to fail first.
    until_all_idle(coordinator)

    def fail_when_told() -> None:
        wait_for(trigger)
        fail("first")

    running = coordinator.schedule(touch_and_wait, args=(begun, goal, 42))
    becomes(begun.exists, "it runs")
    failing = coordinator.schedule(fail_when_told)
    waiting = [coordinator.schedule(fail, args=("second",)) for _ in range(50)]
    trigger.touch()
    with pytest.raises(ValueError, match="first"):
        failing.fetch(60)
    goal.touch()
    with pytest.raises(ValueError, match="first"):
        coordinator.join(timeout=60)
    assert running.fetch() == 42
    with pytest.raises(errors.CancelledError):
        waiting[-1].fetch(60)
    assert coordinator.done()


def test_T98_a_full_queue_makes_schedule_wait(desk: Desk) -> None:
    coordinator = desk.coordinator(queue_limit=2)
    values = [coordinator.schedule(lambda i=i: i * i) for i in range(60)]
    coordinator.join(timeout=60)
    assert coordinator.fetch(values) == [i * i for i in range(60)]


def test_T102_X12_arguments_are_checked(desk: Desk) -> None:
    coordinator = desk.coordinator()
    value = coordinator.schedule(lambda: 1)
    with refused(errors.InvalidArgumentError, "RemoteValue"):
        coordinator.schedule(lambda x: x, args=(value,))
    with refused(errors.ArgumentTypeError, "takes a function"):
        coordinator.schedule(3)
    with refused(errors.InvalidArgumentError, "ParameterServerStrategy"):
        rx.coordinator.ClusterCoordinator(rx.MirroredStrategy(["CPU:0"]))
    assert rx.coordinator.ClusterCoordinator(coordinator.strategy) is coordinator
    assert value.fetch(60) == 1


def test_what_a_closure_changed_before_it_failed_does_not_disturb_the_next(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        counter = rx.Variable(0.0, name="counter")

    def step(number: int) -> None:
        counter.assign_add(1.0)
        if number == 3:
            raise ValueError("third")

    for i in range(3):
        coordinator.schedule(step, args=(i,))
    coordinator.join(timeout=60)
    assert float(counter) == 3.0
    coordinator.schedule(step, args=(3,))
    with pytest.raises(ValueError, match="third"):
        coordinator.join(timeout=60)
    coordinator.schedule(step, args=(4,))
    coordinator.join(timeout=60)
    assert float(counter) in (4.0, 5.0)


def test_what_a_step_changed_is_seen_in_it_and_refused_under_a_gradient(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        w, counter = rx.Variable(1.0, name="w"), rx.Variable(0.0, name="counter")
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [w])

    @rx.function
    def counts() -> Any:
        counter.assign_add(1.0)
        counter.assign_add(counter)
        return counter.read_value()

    @rx.function
    def reads_after() -> Any:
        optimizer.apply_gradients([(jnp.float32(1.0), w)])
        return w.read_value()

    @rx.function
    def reads_under_a_gradient() -> Any:
        def loss() -> Any:
            optimizer.apply_gradients([(jnp.float32(1.0), w)])
            return w * w

        return rx.grad(loss, w)()

    def eager() -> Any:
        optimizer.apply_gradients([(jnp.float32(1.0), w)])
        return w.numpy(), optimizer.iterations.numpy()

    assert float(coordinator.schedule(counts).fetch(60)) == 2.0
    coordinator.schedule(reads_under_a_gradient)
    with pytest.raises(errors.UnsupportedError, match="'w' after `apply_gradients`"):
        coordinator.join(timeout=60)
    assert float(w) == 1.0
    value, count = coordinator.schedule(eager).fetch(60)
    assert (float(value), int(count)) == (0.5, 1)
    assert float(coordinator.schedule(reads_after).fetch(60)) == 0.0


# The cluster.


def test_S192_workers_talk_to_servers_and_coordinator_only(desk: Desk) -> None:
    coordinator = desk.coordinator()
    values = [coordinator.schedule(lambda: 1) for _ in range(20)]
    assert sum(coordinator.fetch(values)) == 20
    status = coordinator.status()
    assert [w.task for w in status.workers] == ["/job:worker/task:0", "/job:worker/task:1"]
    assert [s.task for s in status.servers] == ["/job:ps/task:0", "/job:ps/task:1"]
    assert status.num_finished == 20 and "closures: 0 queued" in str(status)


def test_S201_S202_S204_S207_T124_roles_from_TF_CONFIG(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {**desk.cluster.cluster_spec.as_dict(), "chief": ["localhost:0"]}
    task = {"type": "chief", "index": "0"}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("chief", 0)
    strategy = rx.ParameterServerStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    assert coordinator.schedule(lambda: 7).fetch(60) == 7
    coordinator.close()
    strategy.close()


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({"ps": ["a:1"]}, "no worker"),
        ({"worker": ["a:1"]}, "no parameter server|no ps"),
        ({"ps": ["a:1"], "worker": ["a:2"], "chief": ["a:3", "a:4"]}, "chief"),
        ({"ps": ["a:1"], "worker": ["a:2"], "boss": ["a:3"]}, "boss"),
    ],
)
def test_T126_clusters_are_checked(jobs: Any, words: str) -> None:
    spec = rx.train.ClusterSpec(jobs)
    with refused(errors.InvalidArgumentError, words):
        rx.ParameterServerStrategy(rx.cluster_resolver.SimpleClusterResolver(spec))


def test_T126_the_own_task_is_checked() -> None:
    spec = rx.train.ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(spec, task_type="boss", task_id=0)
    with refused(errors.InvalidArgumentError, "boss"):
        rx.ParameterServerStrategy(resolver)


def test_what_a_person_sees_of_a_cluster(desk: Desk) -> None:
    strategy = desk.strategy()
    coordinator = desk.coordinator(strategy)
    until_all_idle(coordinator)
    values = coordinator.create_per_worker_value(lambda: 1)
    value = coordinator.schedule(lambda: 1)
    coordinator.join(timeout=60)
    value.fetch()
    text = "2 of 2 workers and 2 of 2 parameter servers ready, 0 closures queued, 0 running, "
    assert repr(coordinator) == f"<ClusterCoordinator: {text}1 finished>"
    table = coordinator._repr_html_()
    assert table.startswith(f"<table><caption>{text}1 finished</caption>")
    assert "<th>/job:worker/task:0</th><td>idle</td><td>0 closures" in table
    assert repr(values) == "<PerWorkerValues kept by 2 workers>"
    assert repr(values.values[0]) == "<RemoteValue kept by /job:worker/task:0>"
    assert repr(value) == f"<RemoteValue of closure {value._closure.id}, finished>"
    with rx.coordinator.Watchdog(coordinator, timeout=60) as watchdog:
        assert repr(watchdog) == "<Watchdog, watching, timeout 60 s>"
    assert repr(watchdog) == "<Watchdog, stopped, timeout 60 s>"
    assert repr(desk.cluster.resolver).startswith("<SimpleClusterResolver: task chief/0, jobs ps")
    coordinator.close()
    assert repr(coordinator) == "<ClusterCoordinator, closed>"
