"""Datasets of a MultiWorkerMirroredStrategy: real processes, one or two devices each.

One program per size of the cluster reads all datasets; each test looks at a part of what it found.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.group import exit_codes
from replicax.testing import LocalCluster

# Lines of each file; by file, worker 0 reads the files 0 and 2.
FILES = [9, 4, 2]
LINES = [100 * i + k for i, n in enumerate(FILES) for k in range(n)]


# The program of the workers.


def lines_of(directory: str, num_files: int = len(FILES)) -> Any:
    paths = [f"{directory}/part-{i}.txt" for i in range(num_files)]
    return rx.data.TextLineDataset(paths).map(lambda line: np.float32(int(line)))


def with_policy(dataset: Any, name: str) -> Any:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = rx.data.AutoShardPolicy[name]
    return dataset.with_options(options)


def numbers(count: int) -> Any:
    return rx.data.Dataset.from_tensor_slices(np.arange(count, dtype=np.float32))


def datasets(strategy: Any, directory: str) -> dict[str, Any]:
    def own(context: rx.InputContext) -> Any:
        """Three batches on worker 0, one on worker 1."""
        start = 100 * context.input_pipeline_id
        count = 6 if context.input_pipeline_id == 0 else 2
        return numbers(200).skip(start).take(count * context.num_replicas_in_sync // 2).batch(2)

    def none_here(context: rx.InputContext) -> Any:
        return numbers(8).take(0 if context.input_pipeline_id else 8).batch(2)

    distribute = strategy.experimental_distribute_dataset
    from_function = strategy.distribute_datasets_from_function
    return {
        "even": distribute(numbers(16).batch(8)),
        "data": distribute(numbers(9).batch(8)),
        "dropped": distribute(numbers(9).batch(8, drop_remainder=True)),
        "uneven": distribute(numbers(14).batch(7)),
        "shuffled": distribute(numbers(32).shuffle(32, reshuffle_each_iteration=False).batch(8)),
        "filtered": distribute(numbers(21).filter(lambda x: True).batch(5)),
        "off": distribute(with_policy(numbers(8).batch(4), "OFF")),
        "file": distribute(lines_of(directory).batch(4)),
        "one_file": distribute(with_policy(lines_of(directory, 1).batch(4), "FILE")),
        "function": from_function(own),
        "nothing": from_function(none_here),
    }


def read_all(directory: str) -> dict[str, Any]:
    """Reads each dataset eagerly, in compiled steps, and with `next` in a compiled function."""
    strategy = rx.MultiWorkerMirroredStrategy()

    def total(x: Any) -> Any:
        # A number, which differs between the replicas of the last step.
        return x.sum(), 1.0 * x.shape[0]

    def step(x: Any) -> Any:
        sums, counts = strategy.run(total, args=(x,))
        return strategy.reduce("SUM", sums, axis=None), strategy.reduce("SUM", counts, axis=None)

    compiled = rx.function(step)
    fed = rx.function(lambda iterator: step(next(iterator)))
    found: dict[str, Any] = {"contexts": contexts_of(strategy), "failures": failures(strategy)}
    found["resumed"] = resumed(strategy, directory)
    for name, dataset in datasets(strategy, directory).items():
        parts, eager = [], []
        for x in dataset:
            parts.append([np.asarray(v) for v in strategy.experimental_local_results(x)])
            eager.append(tuple(map(float, step(x))))
        from_feed: list[Any] = []
        iterator = iter(dataset)
        for _ in parts:
            from_feed.append(tuple(map(float, fed(iterator))))
        try:
            fed(iterator)
        except rx.errors.OutOfRangeError:
            from_feed.append("end")
        found[name] = {"parts": parts, "eager": eager, "fed": from_feed}
    dataset = datasets(strategy, directory)["data"]
    found["data"]["compiled"] = [tuple(map(float, compiled(x))) for x in dataset]
    found["captured"] = captured(strategy)
    found["values"] = [
        int(v)
        for v in strategy.experimental_local_results(
            strategy.experimental_distribute_values_from_function(
                lambda context: np.int32(context.replica_id_in_sync_group)
            )
        )
    ]
    return found


def captured(strategy: Any) -> Any:
    """Steps that capture their iterator, and count in a variable of this process only."""
    iterator = iter(strategy.experimental_distribute_dataset(numbers(24).batch(8)))
    count = rx.Variable(0)

    @rx.function
    def step() -> Any:
        count.assign_add(1)
        return strategy.reduce("SUM", strategy.run(jnp.sum, args=(next(iterator),)), axis=None)

    found: list[Any] = [float(step()) for _ in range(3)]
    try:
        step()
    except rx.errors.OutOfRangeError:
        found.append("end")
    return found, int(count.read_value())


def failures(strategy: Any) -> dict[str, str]:
    """The errors of datasets that fail on worker 1 only."""
    index = strategy.cluster_resolver.task_id

    def ends_early() -> Iterator[np.ndarray]:
        for _ in range(3 if index else 5):
            yield np.ones(4, np.float32)

    def fail(x: np.ndarray) -> np.ndarray:
        if index and x[0] >= 4:
            raise KeyError("a damaged record")
        return x

    damaged = with_policy(numbers(8).batch(2).map(fail), "OFF")
    found = {}
    for name, dataset in {
        "early": rx.data.Dataset.from_generator(ends_early),
        "damaged": damaged,
    }.items():
        try:
            for _ in strategy.experimental_distribute_dataset(dataset):
                pass
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def resumed(strategy: Any, directory: str) -> list[float]:
    """Continues at the position of one process, takes a step, and saves the position."""
    iterator = iter(strategy.experimental_distribute_dataset(lines_of(directory).batch(4)))
    checkpoint = rx.train.Checkpoint(iterator=iterator)
    checkpoint.restore(f"{directory}/alone").assert_consumed()
    taken = next(iterator)
    workers = strategy.num_replicas_in_sync
    checkpoint.write(f"{directory}/together-{workers}")
    iterator.close()
    return [float(v) for part in strategy.experimental_local_results(taken) for v in part]


def contexts_of(strategy: Any) -> dict[str, Any]:
    seen: dict[str, list[Any]] = {"worker": [], "replica": []}

    def dataset_fn(kind: str) -> Callable[[rx.InputContext], Any]:
        def make(context: rx.InputContext) -> Any:
            seen[kind].append(
                (
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                )
            )
            return numbers(1).batch(1)

        return make

    mode = rx.InputReplicationMode.PER_REPLICA
    strategy.distribute_datasets_from_function(dataset_fn("worker"))
    strategy.distribute_datasets_from_function(
        dataset_fn("replica"), rx.InputOptions(experimental_replication_mode=mode)
    )
    return seen


# What is expected of any number of workers and replicas.


@pytest.fixture(scope="module", name="directory")
def _directory(tmp_path_factory: Any) -> Path:
    return with_files(tmp_path_factory.mktemp("files"))


def with_files(directory: Path) -> Path:
    """Writes the files, and the position of one process that has taken a batch."""
    for i, size in enumerate(FILES):
        text = "".join(f"{100 * i + k}\n" for k in range(size))
        (directory / f"part-{i}.txt").write_text(text)
    iterator = lines_alone(directory, 1)
    assert np.asarray(next(iterator)).tolist() == LINES[:4]
    rx.train.Checkpoint(iterator=iterator).write(str(directory / "alone"))
    iterator.close()
    return directory


def lines_alone(directory: Path, replicas: int) -> Any:
    """The iterator of one process over all files."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    dataset = lines_of(str(directory)).batch(4)
    return iter(strategy.experimental_distribute_dataset(dataset))


class Found:
    """What all workers of a cluster found."""

    def __init__(self, workers: list[dict[str, Any]], replicas: int) -> None:
        self.workers = workers
        self.replicas = replicas

    def steps(self, name: str) -> list[list[list[float]]]:
        """Per step, the rows of each replica of all workers."""
        own = [worker[name]["parts"] for worker in self.workers]
        return [
            [part.tolist() for parts in step for part in parts] for step in zip(*own, strict=True)
        ]

    def rows(self, name: str) -> list[float]:
        return sorted(row for step in self.steps(name) for part in step for row in part)


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.slow)],
    ids=["2x1", "2x2"],
    name="found",
)
def _found(request: Any, directory: Path) -> Iterator[Found]:
    replicas = request.param
    with LocalCluster(workers=2, ps=0, devices_per_worker=replicas, timing="fast") as cluster:
        yield Found(cluster.run(read_all, args=(str(directory),)), replicas)


def test_S149_T80_contexts(found: Found) -> None:
    total = 2 * found.replicas
    for index, worker in enumerate(found.workers):
        assert worker["contexts"]["worker"] == [(2, index, total)]
        first = index * found.replicas
        ids = range(first, first + found.replicas)
        assert worker["contexts"]["replica"] == [(total, i, total) for i in ids]
        assert worker["values"] == list(ids)


def test_S143_S144_S145_T66_T70_by_data(found: Found) -> None:
    if found.replicas == 1:
        assert found.steps("data") == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8], []]]
    else:
        assert found.steps("data") == [[[0, 1], [4, 5], [2, 3], [6, 7]], [[8], [], [], []]]
    assert found.rows("even") == list(range(16))
    assert found.rows("shuffled") == list(range(32))
    assert found.rows("filtered") == list(range(21))


def test_T67_T68_sizes_of_parts(found: Found) -> None:
    assert len(found.steps("dropped")) == 1
    sizes = [len(part) for part in found.steps("uneven")[0]]
    assert sizes == ([4, 3] if found.replicas == 1 else [2, 2, 2, 1])
    assert found.rows("uneven") == list(range(14))


def test_T70_off_reads_everything_on_each_worker(found: Found) -> None:
    assert found.rows("off") == sorted(2 * list(range(8)))


def test_S143_S144_T72_by_file(found: Found) -> None:
    assert found.rows("file") == sorted(LINES)
    own = {row // 100 for parts in found.workers[1]["file"]["parts"] for p in parts for row in p}
    assert own == {1.0}


def test_S146_S143_T72_workers_that_end_early_get_parts_without_rows(found: Found) -> None:
    for name in ("function", "nothing", "one_file"):
        first, second = (worker[name]["parts"] for worker in found.workers)
        assert len(first) == len(second)
        for part in second[-1]:
            assert part.shape == (0,)
            assert part.dtype == np.float32
    assert found.rows("nothing") == list(range(8))


@pytest.mark.parametrize("how", ["eager", "compiled", "fed"])
def test_S143_S147_steps_of_all_workers_have_the_sums_of_all_rows(found: Found, how: str) -> None:
    names = [n for n, value in found.workers[0].items() if "parts" in value and how in value]
    assert len(names) == (1 if how == "compiled" else 11)
    for name in names:
        steps = found.steps(name)
        expected: list[Any] = [(sum(map(sum, step)), float(sum(map(len, step)))) for step in steps]
        if how == "fed":
            expected.append("end")
        for worker in found.workers:
            assert worker[name][how] == expected, name


def test_T78_a_captured_iterator_and_a_variable_of_each_process(found: Found) -> None:
    for worker in found.workers:
        assert worker["captured"] == ([28.0, 92.0, 156.0, "end"], 3)


def test_S143_positions_resume_on_other_numbers_of_workers(found: Found, directory: Path) -> None:
    iterator = lines_alone(directory, 2)
    checkpoint = rx.train.Checkpoint(iterator=iterator)
    checkpoint.restore(str(directory / f"together-{2 * found.replicas}")).assert_consumed()
    rest = [float(v) for element in iterator for part in element.values for v in part]
    together = [row for worker in found.workers for row in worker["resumed"]]
    assert sorted(LINES[:4] + together + rest) == sorted(LINES)
    assert len(together) == 4


def test_S145_data_that_ends_early_on_one_worker_is_an_error_that_names_it(found: Found) -> None:
    for worker in found.workers:
        message = worker["failures"]["early"]
        assert message.startswith("InvalidArgumentError: All workers must read the same batches")
        assert "for step 4, /job:worker/task:0 has 4 rows, " in message
        assert "/job:worker/task:1 has no batch left" in message


def test_S143_an_error_of_one_worker_is_raised_on_all(found: Found) -> None:
    other, own = (worker["failures"]["damaged"] for worker in found.workers)
    assert own.startswith("KeyError: 'a damaged record'")
    assert other.startswith("UnavailableError: Every worker must read its part of step 5")
    assert "/job:worker/task:1 could not: KeyError: 'a damaged record'" in other


@pytest.mark.slow
def test_S143_S145_S147_four_workers(tmp_path: Path) -> None:
    directory = with_files(tmp_path)
    with LocalCluster(workers=4, ps=0, timing="fast") as cluster:
        found = Found(cluster.run(read_all, args=(str(directory),)), 1)
    counts = {"even": 16, "data": 9, "dropped": 8, "uneven": 14, "shuffled": 32, "filtered": 21}
    for name, count in counts.items():
        assert found.rows(name) == list(range(count))
    assert found.rows("off") == sorted(4 * list(range(8)))
    # Fewer files than workers.
    assert found.rows("file") == sorted(LINES)
    for how in ("eager", "compiled", "fed"):
        test_S143_S147_steps_of_all_workers_have_the_sums_of_all_rows(found, how)
    iterator = lines_alone(directory, 2)
    checkpoint = rx.train.Checkpoint(iterator=iterator)
    checkpoint.restore(str(directory / "together-4")).assert_consumed()
    rest = [float(v) for element in iterator for part in element.values for v in part]
    together = [row for worker in found.workers for row in worker["resumed"]]
    assert sorted(LINES[:4] + together + rest) == sorted(LINES)


# Faults.


def wait_for_data(directory: str, odd: int, fault: str) -> None:
    """One worker stops reading in step 4: it is killed, or its source never gives the batch."""
    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    note = Path(directory) / f"{fault}-{odd}-worker-{index}"

    def slow(x: np.ndarray) -> np.ndarray:
        if index == odd and x[0] >= 3:
            note.write_text(str(time.time()))
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return x

    def own(context: rx.InputContext) -> Any:
        return numbers(10).batch(1).map(slow)

    taken = 0
    try:
        for _ in strategy.distribute_datasets_from_function(own):
            taken += 1
    except rx.errors.DistributeError as error:
        if index != odd:
            note.write_text(f"{time.time()} {taken} {type(error).__name__}: {error}")
            # The main thread has got the error: the group leaves it the time to react.
            time.sleep(4.0)
            note.write_text(note.read_text() + " went on")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("fault", ["kill", "stall"])
def test_bar31_S143_a_worker_that_gives_no_data_is_named(
    tmp_path: Path, fault: str, odd: int
) -> None:
    with LocalCluster(workers=2, ps=0, timing="fast") as cluster:
        program = cluster.launch(wait_for_data, args=(str(tmp_path), odd, fault))
        ended = program.wait(timeout=60)
    at = float((tmp_path / f"{fault}-{odd}-worker-{odd}").read_text())
    text = (tmp_path / f"{fault}-{odd}-worker-{1 - odd}").read_text()
    when, taken, message = text.split(" ", 2)
    assert float(when) - at < 15.0
    # A killed worker was reading ahead.
    assert int(taken) <= 3 if fault == "kill" else int(taken) == 3
    assert f"/job:worker/task:{odd}" in message
    if fault == "kill":
        assert message.startswith("UnavailableError: ")
        assert ended[odd].exit_code == -signal.SIGKILL
    else:
        # In 10 s, the time for an exchange with fast timings.
        assert message.startswith("DeadlineExceededError: ")
        assert "'data iterator 0'" in message
    assert message.endswith(" went on")
    assert ended[1 - odd].exit_code == exit_codes.RESTART_GROUP
