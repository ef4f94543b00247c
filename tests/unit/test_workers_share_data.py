"""Distributed datasets of several workers: what each takes, and how they agree and end together.

Workers are threads with a layout of their own: everything below the arrays of all processes.
tests/multiprocess/test_multi_worker_input.py has real ones.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers_in_threads import PeersInThreads, run_workers
from worker_layouts import WorkerLayout, joined_steps, parts_of

import replicax as rx
from replicax.data import AutoShardPolicy, Dataset
from replicax.strategies.inputs import Inputs

DATA, FILE, OFF, AUTO, HINT = (AutoShardPolicy[n] for n in ("DATA", "FILE", "OFF", "AUTO", "HINT"))
PER_REPLICA = rx.InputOptions(experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA)


def with_policy(dataset: Any, policy: Any) -> Any:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def text_files(directory: Path, sizes: list[int]) -> list[str]:
    paths = []
    for i, size in enumerate(sizes):
        path = directory / f"part-{i}.txt"
        path.write_text("".join(f"{100 * i + k}\n" for k in range(size)))
        paths.append(str(path))
    return paths


def numbers_of(paths: list[str]) -> Any:
    return rx.data.TextLineDataset(paths).map(lambda line: np.int64(int(line)))


class Worker:
    """One worker: its inputs, and the number of exchanges that it took part in."""

    def __init__(self, peers: PeersInThreads, replicas: int) -> None:
        self.peers = peers
        self.layout = WorkerLayout(peers, replicas)
        self.inputs = Inputs(self.layout)

    def distribute(self, dataset: Any) -> Any:
        return self.inputs.distribute(dataset, None)

    @property
    def num_exchanges(self) -> int:
        return sum(self.peers.calls.values())


def on_workers(workers: int, replicas: int, fn: Callable[[Worker], Any]) -> list[Any]:
    """What each worker's call of `fn` returned; the first error is raised."""
    found = run_workers(workers, lambda peers: fn(Worker(peers, replicas)))
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def steps_of(make: Callable[[Worker], Any], workers: int, replicas: int) -> list[list[Any]]:
    """Per step, the parts of all replicas of all workers, of a dataset that each distributes."""

    def read(worker: Worker) -> list[list[Any]]:
        return [parts_of(element) for element in worker.distribute(make(worker))]

    return joined_steps(on_workers(workers, replicas, read))


def rows_of(steps: list[list[Any]]) -> list[Any]:
    return [row for step in steps for part in step for row in part]


# Contexts.


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (2, 2), (3, 1)])
def test_S149_context_of_a_function_per_worker(workers: int, replicas: int) -> None:
    def read(worker: Worker) -> list[Any]:
        seen: list[Any] = []

        def dataset_fn(context: rx.InputContext) -> Any:
            seen.append(
                (
                    context.num_input_pipelines,
                    context.input_pipeline_id,
                    context.num_replicas_in_sync,
                    context.get_per_replica_batch_size(12),
                )
            )
            return Dataset.range(1).batch(1)

        worker.inputs.from_function(dataset_fn, None)
        return seen

    total = workers * replicas
    expected = [[(workers, i, total, 12 // total)] for i in range(workers)]
    assert on_workers(workers, replicas, read) == expected


def test_T80_context_of_a_function_per_replica() -> None:
    def read(worker: Worker) -> Any:
        seen: list[Any] = []

        def dataset_fn(context: rx.InputContext) -> Any:
            seen.append((context.num_input_pipelines, context.input_pipeline_id))
            own = Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id)
            return own.batch(1)

        distributed = worker.inputs.from_function(dataset_fn, PER_REPLICA)
        return seen, [parts_of(e) for e in distributed]

    found = on_workers(2, 2, read)
    assert [seen for seen, _ in found] == [[(4, 0), (4, 1)], [(4, 2), (4, 3)]]
    steps = joined_steps([own for _, own in found])
    assert steps == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]


# By data.


def test_S143_S144_S145_T70_by_data_without_an_exchange_per_step() -> None:
    def read(worker: Worker) -> Any:
        elements = list(worker.distribute(Dataset.range(36).batch(8)))
        assert [e.is_stored for e in elements] == [True] * 4 + [True]
        return worker.num_exchanges, [parts_of(e) for e in elements]

    found = on_workers(2, 2, read)
    # The first `next` compares the datasets; no step needs more.
    assert [count for count, _ in found] == [1, 1]
    steps = joined_steps([own for _, own in found])
    assert steps[0] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert sorted(rows_of(steps)) == list(range(36))


def test_T66_T70_an_uneven_end_by_data_has_the_shapes_of_all() -> None:
    def read(worker: Worker) -> Any:
        last = list(worker.distribute(Dataset.range(9).batch(8)))[-1]
        assert not last.is_stored
        shapes = last.all_shapes(worker.layout)
        return worker.num_exchanges, shapes, [parts_of(last)]

    found = on_workers(2, 2, read)
    assert joined_steps([own for _, _, own in found]) == [[[8], [], [], []]]
    for count, shapes, _ in found:
        assert count == 1
        assert shapes == (((1,),), ((0,),), ((0,),), ((0,),))


def test_T68_only_full_batches_with_drop_remainder() -> None:
    steps = steps_of(lambda _: Dataset.range(9).batch(4, drop_remainder=True), 2, 2)
    assert steps == [[[0], [2], [1], [3]], [[4], [6], [5], [7]]]


def test_S145_a_shuffle_without_a_seed_has_one_order_on_all_workers() -> None:
    def read(worker: Worker) -> Any:
        distributed = worker.distribute(Dataset.range(40).shuffle(40).batch(8))
        return [[parts_of(e) for e in distributed] for _ in range(2)]

    found = on_workers(2, 2, read)
    epochs = [joined_steps([own[i] for own in found]) for i in range(2)]
    for steps in epochs:
        assert sorted(rows_of(steps)) == list(range(40))
    assert epochs[0] != epochs[1]


def test_S145_an_epoch_that_only_one_worker_read_does_not_change_the_order() -> None:
    def read(worker: Worker) -> Any:
        dataset = Dataset.range(16).shuffle(16).batch(4)
        if worker.peers.index == 1:
            list(dataset)
        return [parts_of(e) for e in worker.distribute(dataset)]

    assert sorted(rows_of(joined_steps(on_workers(2, 1, read)))) == list(range(16))


@pytest.mark.parametrize("is_slow", [False, True])
def test_T67_T70_sources_of_unknown_length_by_data(is_slow: bool) -> None:
    def make(worker: Worker) -> Any:
        dataset = Dataset.range(21).filter(lambda x: True).batch(5)
        return dataset.map(lambda x: x + 0) if is_slow else dataset

    steps = steps_of(make, 2, 2)
    assert steps[0] == [[0, 1], [3], [2], [4]]
    assert steps[-1] == [[20], [], [], []]
    assert sorted(rows_of(steps)) == list(range(21))


def test_S145_a_source_that_ends_early_on_one_worker_is_an_error_that_names_it() -> None:
    def read(worker: Worker) -> Any:
        def numbers() -> Iterator[np.ndarray]:
            for i in range(6 if worker.peers.index == 0 else 3):
                yield np.arange(4) + 4 * i

        taken = 0
        try:
            for _ in worker.distribute(Dataset.from_generator(numbers)):
                taken += 1
        except rx.errors.InvalidArgumentError as error:
            return taken, str(error)
        return taken, ""

    found = on_workers(2, 1, read)
    assert found[0] == found[1]
    assert found[0][0] <= 3
    assert "/job:worker/task:1 has no batch left" in found[0][1]
    assert "step 4" in found[0][1]


def test_S143_different_datasets_are_an_error_that_names_both() -> None:
    def read(worker: Worker) -> Any:
        dataset = Dataset.range(8)
        if worker.peers.index == 1:
            dataset = dataset.map(lambda x: x)
        try:
            next(iter(worker.distribute(dataset.batch(2))))
        except rx.errors.InvalidArgumentError as error:
            return str(error)
        return ""

    for message in on_workers(2, 1, read):
        assert "/job:worker/task:0 has 'range > batch'" in message
        assert "/job:worker/task:1 has 'range > map > batch'" in message


# Own streams.


def test_T70_off_reads_everything_on_each_worker() -> None:
    steps = steps_of(lambda _: with_policy(Dataset.range(4).batch(2), OFF), 2, 1)
    assert steps == [[[0], [0]], [[1], [1]], [[2], [2]], [[3], [3]]]


def test_T67_own_streams_take_one_global_batch_per_step() -> None:
    steps = steps_of(lambda _: with_policy(Dataset.range(14).batch(7), OFF), 2, 2)
    assert [[len(p) for p in step] for step in steps] == [[2, 2, 2, 1], [2, 1, 2, 2]] * 2


# Recorded from MultiWorkerMirroredStrategy of TensorFlow, with two workers of one CPU: per worker,
# its part of each step.
RECORDED: dict[str, tuple[Callable[[], Any], list[Any], list[Any]]] = {
    "off 9/4": (
        lambda: with_policy(Dataset.range(9).batch(4), OFF),
        [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
        [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
    ),
    "off 10/7": (
        lambda: with_policy(Dataset.range(10).batch(7), OFF),
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]],
    ),
    "off 11/7": (
        lambda: with_policy(Dataset.range(11).batch(7), OFF),
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], []],
        [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10]],
    ),
    "off 10/7 twice": (
        lambda: with_policy(Dataset.range(10).batch(7).repeat(2), OFF),
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 0], [1, 2, 3], [4, 5, 6, 7], [8, 9]],
        [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [0, 1, 2, 3], [4, 5, 6], [7, 8, 9]],
    ),
    "data 11/8": (
        lambda: Dataset.range(11).batch(8),
        [[0, 1, 2, 3], [8, 9]],
        [[4, 5, 6, 7], [10]],
    ),
    "data 21/5": (
        lambda: Dataset.range(21).filter(lambda x: True).batch(5),
        [[0, 1, 2], [5, 6, 7], [10, 11, 12], [15, 16, 17], [20]],
        [[3, 4], [8, 9], [13, 14], [18, 19], []],
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_T67_T70_steps_are_those_of_tensorflow(name: str) -> None:
    make, first, second = RECORDED[name]
    assert steps_of(lambda _: make(), 2, 1) == [
        list(step) for step in zip(first, second, strict=True)
    ]


def test_T72_steps_by_file_are_those_of_tensorflow(tmp_path: Path) -> None:
    paths = text_files(tmp_path, [9, 4, 2])
    recorded = {
        4: (
            [[0, 1], [2, 3], [4, 5], [6, 7], [8, 200], [201]],
            [[100, 101], [102, 103], [], [], [], []],
        ),
        6: ([[0, 1, 2], [3, 4, 5], [6, 7, 8], [200, 201]], [[100, 101, 102], [103], [], []]),
    }
    for size, (first, second) in recorded.items():
        for policy in (FILE, AUTO):
            steps = steps_of(
                lambda _, size=size, policy=policy: with_policy(
                    numbers_of(paths).batch(size), policy
                ),
                2,
                1,
            )
            assert steps == [list(step) for step in zip(first, second, strict=True)]


def test_S144_T72_hint_leaves_sharding_to_the_dataset() -> None:
    def make(worker: Worker) -> Any:
        own = Dataset.range(8).shard(worker.peers.count, worker.peers.index)
        return with_policy(own.batch(4), HINT)

    assert steps_of(make, 2, 1) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]


@pytest.mark.parametrize("policy", [DATA, OFF])
def test_S147_replicas_of_a_worker_share_batches_whatever_the_policy(policy: Any) -> None:
    steps = steps_of(lambda _: with_policy(Dataset.range(8).batch(8), policy), 2, 2)
    assert all(len(part) == 2 for part in steps[0])


@pytest.mark.parametrize("policy", [FILE, AUTO])
@pytest.mark.parametrize("sizes", [[4, 4], [9, 2], [1, 12], [5, 3, 4]])
def test_S143_S144_T72_files_of_any_sizes_are_read_once(
    tmp_path: Path, policy: Any, sizes: list[int]
) -> None:
    paths = text_files(tmp_path, sizes)
    for replicas in (1, 2):
        steps = steps_of(lambda _: with_policy(numbers_of(paths).batch(4), policy), 2, replicas)
        assert sorted(rows_of(steps)) == [
            100 * i + k for i, n in enumerate(sizes) for k in range(n)
        ]
        # By file: worker 0 reads only the files 0 and 2.
        own = rows_of([step[:replicas] for step in steps])
        assert {row // 100 for row in own} <= {0, 2}


def test_S146_T72_a_worker_without_files_gets_parts_without_rows(tmp_path: Path) -> None:
    paths = text_files(tmp_path, [4])
    steps = steps_of(lambda _: with_policy(numbers_of(paths).batch(2), FILE), 2, 1)
    assert steps == [[[0], []], [[1], []], [[2], []], [[3], []]]


def test_S146_fewer_files_than_workers_go_by_data(tmp_path: Path) -> None:
    paths = text_files(tmp_path, [5])
    steps = steps_of(lambda _: numbers_of(paths).batch(4), 2, 1)
    assert steps == [[[0, 1], [2, 3]], [[4], []]]


def test_T72_a_shuffle_of_files_without_a_seed_reads_each_row_once(tmp_path: Path) -> None:
    text_files(tmp_path, [5, 3, 4, 2])

    def make(worker: Worker) -> Any:
        names = Dataset.list_files(str(tmp_path / "*.txt"))
        lines = names.interleave(rx.data.TextLineDataset)
        return lines.map(lambda line: np.int64(int(line))).shuffle(8).batch(4)

    assert len(set(rows_of(steps_of(make, 2, 1)))) == 14


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (0, 2), (5, 0), (4, 4), (0, 0)])
def test_S143_workers_with_different_amounts_of_data_end_together(sizes: tuple[int, ...]) -> None:
    def read(worker: Worker) -> Any:
        count = sizes[worker.peers.index]

        def dataset_fn(context: rx.InputContext) -> Any:
            start = 100 * context.input_pipeline_id
            return Dataset.range(start, start + 2 * count).map(lambda x: {"x": x}).batch(2)

        distributed = worker.inputs.from_function(dataset_fn, None)
        iterator = iter(distributed)
        found = [parts_of(element["x"]) for element in iterator]
        with pytest.raises(StopIteration):
            next(iterator)
        return found

    steps = joined_steps(on_workers(2, 1, read))
    assert len(steps) == max(sizes)
    for i, step in enumerate(steps):
        for worker, count in enumerate(sizes):
            rows = [100 * worker + 2 * i, 100 * worker + 2 * i + 1]
            assert step[worker] == (rows if i < count else [])


def test_S143_parts_without_rows_keep_type_and_rank() -> None:
    Pair = collections.namedtuple("Pair", ["a", "b"])

    def read(worker: Worker) -> Any:
        arrays = Pair(np.ones((4, 3), np.float32), (np.zeros((4, 2, 5), np.int8),))
        dataset = Dataset.from_tensor_slices(arrays).batch(2).take(2 * (1 - worker.peers.index))
        (first, *_), seen = list(worker.inputs.from_function(lambda _: dataset, None)), []
        for leaf in (first[0], first[1][0]):
            (part,) = leaf.values
            seen.append((part.shape, str(part.dtype), leaf.all_shapes(worker.layout)))
        return seen

    own, other = on_workers(2, 1, read)
    assert [s[:2] for s in own] == [((2, 3), "float32"), ((2, 2, 5), "int8")]
    assert [s[:2] for s in other] == [((0, 3), "float32"), ((0, 2, 5), "int8")]
    assert [s[2] for s in own] == [s[2] for s in other]
    assert own[0][2] == (((2, 3),), ((0, 3),))


def test_S143_scalars_cannot_be_empty_on_any_worker() -> None:
    def read(worker: Worker) -> Any:
        dataset = Dataset.range(2 + worker.peers.index)
        iterator = iter(worker.inputs.from_function(lambda _: dataset, None))
        taken = 0
        try:
            for _ in iterator:
                taken += 1
        except rx.errors.InvalidArgumentError as error:
            return taken, str(error)
        return taken, ""

    found = on_workers(2, 1, read)
    assert found[0] == found[1]
    assert "each of the 2 replicas" in found[0][1]


def test_S143_an_error_of_one_worker_reaches_all_after_the_steps_before_it() -> None:
    def read(worker: Worker) -> Any:
        def fail(x: np.ndarray) -> np.ndarray:
            if worker.peers.index == 1 and x[0] >= 6:
                raise ValueError("a damaged record")
            return x

        dataset = Dataset.range(20).batch(2).map(fail)
        iterator = iter(worker.inputs.from_function(lambda _: dataset, None))
        taken = []
        try:
            for element in iterator:
                taken.append(parts_of(element))
        except ValueError as error:
            return taken, "own", str(error)
        except rx.errors.UnavailableError as error:
            return taken, "other", str(error)
        return taken, "none", ""

    (taken0, kind0, other), (taken1, kind1, own) = on_workers(2, 1, read)
    assert (kind0, kind1) == ("other", "own")
    assert len(taken0) == len(taken1) == 3
    assert "a damaged record" in own
    assert "/job:worker/task:1 could not: ValueError: a damaged record" in other
    assert "step 4" in other


def test_S143_elements_of_different_types_are_an_error_that_names_both() -> None:
    def read(worker: Worker) -> Any:
        dtype = np.float32 if worker.peers.index else np.int32
        dataset = Dataset.from_tensor_slices(np.zeros(4, dtype)).batch(2)
        try:
            next(iter(worker.inputs.from_function(lambda _: dataset, None)))
        except rx.errors.StructureError as error:
            return str(error)
        return ""

    for message in on_workers(2, 1, read):
        assert "/job:worker/task:0 are" in message
        assert "/job:worker/task:1 are" in message
        assert "int32" in message
        assert "float32" in message


def test_S143_iterators_that_are_closed_early_leave_no_exchange_open() -> None:
    def read(worker: Worker) -> Any:
        dataset = with_policy(Dataset.range(1000).map(lambda x: x).batch(2), OFF)
        distributed = worker.distribute(dataset)
        found = []
        for taken in range(8):
            iterator = iter(distributed)
            found.append([parts_of(next(iterator)) for _ in range(taken)])
            iterator.close()
        return found

    found = on_workers(2, 1, read)
    assert found[0] == found[1]
    assert [len(own) for own in found[0]] == list(range(8))


def test_S143_two_iterators_are_read_in_turn() -> None:
    def read(worker: Worker) -> Any:
        train = iter(worker.distribute(with_policy(Dataset.range(12).batch(4), OFF)))
        test = iter(worker.distribute(with_policy(Dataset.range(50, 56).batch(2), OFF)))
        return [[parts_of(next(train)), parts_of(next(test))] for _ in range(6)]

    found = on_workers(2, 1, read)
    assert found[0] == found[1]
    assert [train[0] for train, _ in found[0]][:3] == [[0, 1], [2, 3], [4, 5]]
    assert [test[0] for _, test in found[0]][:3] == [[50], [51], [52]]


def test_T80_elements_that_stay_on_the_host() -> None:
    def read(worker: Worker) -> Any:
        options = rx.InputOptions(experimental_fetch_to_device=False)
        distributed = worker.inputs.distribute(Dataset.range(4).batch(4), options)
        (element,) = list(distributed)
        return [type(v) for v in element.values], element.all_shapes(worker.layout)

    assert on_workers(2, 1, read) == [([np.ndarray], (((2,),), ((2,),)))] * 2


def test_T78_spec_of_elements() -> None:
    def read(worker: Worker) -> Any:
        dataset = Dataset.range(16).batch(8, drop_remainder=True)
        return worker.distribute(dataset).element_spec

    for spec in on_workers(2, 2, read):
        assert spec == rx.PerReplicaSpec((rx.TensorSpec((2,), np.int32),) * 2)
