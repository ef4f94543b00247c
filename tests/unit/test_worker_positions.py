"""Positions of data iterators of several workers, resumed on the same and on other numbers.

Whatever the number of workers before and after: each row is given once, or the restore is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers_in_threads import PeersInThreads, run_workers
from vocabulary import refused
from worker_layouts import WorkerLayout, joined_steps, parts_of

import replicax as rx
from replicax.data import AutoShardPolicy, Dataset
from replicax.strategies.inputs import Inputs

OFF = AutoShardPolicy.OFF
PER_REPLICA = rx.InputOptions(experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA)

# Workers and replicas of each.
Size = tuple[int, int]
Make = Callable[[], Any]


def with_policy(dataset: Any, policy: Any) -> Any:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def iterator_of(size: Size, make: Make, peers: PeersInThreads | None) -> Any:
    """The iterator of one worker; of a strategy of one process if there are no peers."""
    if peers is None:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(size[1])])
        return iter(strategy.experimental_distribute_dataset(make()))
    return iter(Inputs(WorkerLayout(peers, size[1])).distribute(make(), None))


def _parts(element: Any) -> list[Any]:
    return (
        parts_of(element) if isinstance(element, rx.PerReplica) else [np.asarray(element).tolist()]
    )


def on_workers(size: Size, fn: Callable[[PeersInThreads | None], Any]) -> list[Any]:
    """What each worker's call returned; in one process, `fn` is called without peers."""
    found = [fn(None)] if size[0] == 1 else run_workers(size[0], fn)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


def taken(size: Size, make: Make, count: int) -> tuple[list[Any], list[Any]]:
    """The rows of the first steps, and the position of each worker, as a checkpoint stores it."""

    def read(peers: PeersInThreads | None) -> Any:
        iterator = iterator_of(size, make, peers)
        steps = [_parts(next(iterator)) for _ in range(count)]
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        return steps, state

    found = on_workers(size, read)
    steps = joined_steps([steps for steps, _ in found])
    return rows_of(steps), [state for _, state in found]


def rest(size: Size, make: Make, states: list[Any]) -> list[Any]:
    """The rows after a position, restored as a checkpoint does it."""

    def read(peers: PeersInThreads | None) -> Any:
        iterator = iterator_of(size, make, peers)
        restore(iterator, states, 0 if peers is None else peers.index, size[0])
        return [_parts(element) for element in iterator]

    return rows_of(joined_steps(on_workers(size, read)))


def restore(iterator: Any, states: list[Any], index: int, workers: int) -> None:
    if all(state == states[0] for state in states):
        iterator.set_state(states[0])
    elif len(states) == workers:
        iterator.set_state(states[index])
    else:
        iterator.set_worker_states(states)


def rows_of(steps: list[list[Any]]) -> list[Any]:
    return [row for step in steps for part in step for row in part]


SIZES: list[Size] = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1)]


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_S143_positions_by_data_resume_on_any_number_of_workers(before: Size, after: Size) -> None:
    def make() -> Any:
        return Dataset.range(30).shuffle(30, seed=3).batch(6)

    for count in (0, 1, 3):
        rows, states = taken(before, make, count)
        assert all(state == states[0] for state in states)
        assert len(rows) == 6 * count
        assert sorted(rows + rest(after, make, states)) == list(range(30))


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> list[str]:
    paths = []
    for i, size in enumerate([9, 4, 7, 6, 5]):
        path = tmp_path / f"part-{i}.txt"
        path.write_text("".join(f"{100 * i + k}\n" for k in range(size)))
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_S143_positions_by_file_resume_on_any_number_of_workers(
    before: Size, after: Size, files: list[str]
) -> None:
    everything = [100 * i + k for i, n in enumerate([9, 4, 7, 6, 5]) for k in range(n)]

    def make() -> Any:
        return rx.data.TextLineDataset(files).map(lambda line: np.int64(int(line))).batch(5)

    for count in (0, 1, 2, 3, 4):
        rows, states = taken(before, make, count)
        assert sorted(rows + rest(after, make, states)) == everything


def test_S143_a_shuffle_by_file_without_a_seed_resumes_on_another_number(files: list[str]) -> None:
    def make() -> Any:
        lines = rx.data.TextLineDataset(files).map(lambda line: np.int64(int(line)))
        return lines.shuffle(4).batch(4)

    # Each worker builds its own dataset, with a seed of its own, and adopts that of the chief.
    rows, states = taken((2, 1), make, 3)
    assert len({json.dumps(state["stream"]["seeds"]) for state in states}) == 1
    for after in [(2, 1), (1, 2), (3, 1)]:
        found = rows + rest(after, make, states)
        assert len(found) == 31
        assert len(set(found)) == 31


@pytest.mark.parametrize("is_file", [True, False])
def test_S143_positions_before_the_first_element_resume_anywhere(
    is_file: bool, files: list[str]
) -> None:
    """Each worker has a seed of its own then: that of the chief is adopted later."""

    def make() -> Any:
        if not is_file:
            return Dataset.range(31).shuffle(31).batch(4)
        lines = rx.data.TextLineDataset(files).map(lambda line: np.int64(int(line)))
        return lines.shuffle(4).batch(4)

    _, states = taken((2, 1), make, 0)
    for after in [(2, 1), (2, 2), (1, 2), (3, 1)]:
        assert len(set(rest(after, make, states))) == 31
    with refused(rx.errors.InvalidArgumentError, "steps 'range > batch'"):
        rest((1, 1), lambda: Dataset.range(31).batch(4), states)


def test_S143_a_position_that_was_resumed_on_another_number_is_saved_again(
    files: list[str],
) -> None:
    def make() -> Any:
        return rx.data.TextLineDataset(files).map(lambda line: np.int64(int(line))).batch(4)

    def some(peers: PeersInThreads | None, size: Size, states: list[Any], count: int) -> Any:
        iterator = iterator_of(size, make, peers)
        restore(iterator, states, 0 if peers is None else peers.index, size[0])
        steps = [_parts(next(iterator)) for _ in range(count)]
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        return steps, state

    rows, states = taken((3, 1), make, 2)
    for size in [(2, 2), (1, 1), (4, 1), (3, 1)]:
        found = on_workers(
            size, lambda peers, size=size, states=states: some(peers, size, states, 1)
        )
        rows += rows_of(joined_steps([steps for steps, _ in found]))
        states = [state for _, state in found]
    rows += rest((2, 1), make, states)
    assert len(rows) == 31
    assert len(set(rows)) == 31


def test_S143_the_next_epoch_after_a_resume_has_the_next_order(files: list[str]) -> None:
    def make() -> Any:
        return Dataset.range(24).shuffle(24, seed=5).batch(6)

    def make_files() -> Any:
        lines = rx.data.TextLineDataset(files).map(lambda line: np.int64(int(line)))
        return lines.shuffle(8, seed=5).batch(6)

    def second_epoch(size: Size, make: Make, states: list[Any]) -> Any:
        def read(peers: PeersInThreads | None) -> Any:
            if peers is None:
                strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(size[1])])
                dataset = strategy.experimental_distribute_dataset(make())
            else:
                dataset = Inputs(WorkerLayout(peers, size[1])).distribute(make(), None)
            iterator = iter(dataset)
            if states:
                restore(iterator, states, 0 if peers is None else peers.index, size[0])
            first = [_parts(e) for e in iterator]
            return first, [_parts(e) for e in dataset]

        found = on_workers(size, read)
        return joined_steps([own for _, own in found])

    for source in (make, make_files):
        _, states = taken((2, 1), source, 2)
        for after in [(1, 2), (2, 1), (3, 1)]:
            expected = second_epoch(after, source, [])
            assert second_epoch(after, source, states) == expected


def test_T70_off_resumes_where_all_workers_are_at_the_same_row() -> None:
    def make(size: int = 4) -> Any:
        return with_policy(Dataset.range(12).batch(size), OFF)

    for count in (0, 1, 2, 3):
        _, states = taken((2, 1), make, count)
        left = list(range(2 * count, 12))
        assert rest((1, 1), make, states) == left
        for after in [(2, 1), (2, 2), (4, 1)]:
            assert sorted(rest(after, make, states)) == sorted(left * after[0])
    _, states = taken((2, 1), lambda: make(7), 1)
    assert [state["rows"] for state in states] == [4, 3]
    assert sorted(rest((2, 1), lambda: make(7), states)) == sorted([*range(4, 12), *range(3, 12)])
    with refused(rx.errors.InvalidArgumentError, "different rows of a batch"):
        rest((1, 1), lambda: make(7), states)


@pytest.mark.parametrize("is_known", [True, False])
def test_T67_positions_inside_batches_of_any_sizes(is_known: bool) -> None:
    """Batches of 5, 4, 3, 2 and 1 rows, and batches of 4 across the passes of `repeat`."""

    def make() -> Any:
        if is_known:
            return with_policy(Dataset.range(15).batch(4).repeat(2), OFF)
        bounds = [(0, 5), (5, 9), (9, 12), (12, 14), (14, 15)]
        sizes = Dataset.from_generator(lambda: (np.arange(*rows) for rows in bounds))
        return with_policy(sizes, OFF)

    everything = list(range(15)) * (2 if is_known else 1)
    for before in [(2, 1), (2, 2), (3, 1)]:
        num_steps = on_workers(
            before, lambda peers, size=before: sum(1 for _ in iterator_of(size, make, peers))
        )[0]
        for count in range(num_steps + 1):
            rows, states = taken(before, make, count)
            found = sorted(rows + rest(before, make, states))
            assert found == sorted(everything * before[0]), (before, count)


def test_T70_off_in_different_orders_resumes_on_the_same_number_only() -> None:
    def make() -> Any:
        return with_policy(Dataset.range(12).shuffle(12).batch(4), OFF)

    rows, states = taken((2, 1), make, 2)
    assert sorted(rows + rest((2, 1), make, states)) == sorted(list(range(12)) * 2)
    with refused(rx.errors.InvalidArgumentError, "different orders"):
        rest((1, 1), make, states)


def test_S143_the_position_of_one_worker_is_not_that_of_another(files: list[str]) -> None:
    def make() -> Any:
        return rx.data.TextLineDataset(files).batch(4)

    _, states = taken((2, 1), make, 2)
    with refused(rx.errors.InvalidArgumentError, "position of worker 1 of 2"):
        iterator_of((1, 1), make, None).set_state(states[1])
    found = run_workers(
        2, lambda peers: iterator_of((2, 1), make, peers).set_state(states[1 - peers.index])
    )
    for error in found:
        assert isinstance(error, rx.errors.InvalidArgumentError)
        assert "its own position" in str(error)


def test_S143_workers_that_restore_different_positions_are_an_error_that_names_both() -> None:
    def make() -> Any:
        return Dataset.range(20).batch(2)

    one, other = taken((1, 1), make, 1)[1][0], taken((1, 1), make, 2)[1][0]

    def read(peers: PeersInThreads) -> Any:
        iterator = iterator_of((2, 1), make, peers)
        iterator.set_state(other if peers.index else one)
        return next(iterator)

    for error in run_workers(2, read):
        assert isinstance(error, rx.errors.InvalidArgumentError)
        assert "the position that was restored" in str(error)
        assert "/job:worker/task:0" in str(error)
        assert "/job:worker/task:1" in str(error)


def _from_function(size: Size, peers: PeersInThreads | None, options: Any) -> Any:
    def dataset_fn(context: rx.InputContext) -> Any:
        own = Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(2)

    if peers is None:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(size[1])])
        return iter(strategy.distribute_datasets_from_function(dataset_fn, options))
    return iter(Inputs(WorkerLayout(peers, size[1])).from_function(dataset_fn, options))


def _some_from_function(size: Size, options: Any, states: list[Any], count: int | None) -> Any:
    def read(peers: PeersInThreads | None) -> Any:
        iterator = _from_function(size, peers, options)
        if states:
            restore(iterator, states, 0 if peers is None else peers.index, size[0])
        steps = [_parts(e) for e in (iterator if count is None else [next(iterator)] * count)]
        state = iterator.get_state()
        iterator.close()
        return steps, state

    found = on_workers(size, read)
    steps = joined_steps([steps for steps, _ in found])
    return rows_of(steps), [state for _, state in found]


def test_S149_positions_of_functions_resume_on_the_same_number_of_workers() -> None:
    rows, states = _some_from_function((2, 1), None, [], 1)
    assert rows == [0, 2, 1, 3]
    for after in [(2, 1), (2, 2)]:
        more, _ = _some_from_function(after, None, states, None)
        assert sorted(rows + more) == list(range(24))
    for after in [(1, 2), (3, 1)]:
        with refused(rx.errors.InvalidArgumentError, "it is from 2"):
            _some_from_function(after, None, states, None)
    alone = _some_from_function((1, 2), None, [], 1)[1]
    with refused(rx.errors.InvalidArgumentError, "it is from 1"):
        _some_from_function((2, 1), None, alone, None)


@pytest.mark.parametrize("before", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("after", [(2, 2), (4, 1), (1, 4)])
def test_T80_positions_per_replica_resume_on_as_many_replicas(before: Size, after: Size) -> None:
    rows, states = _some_from_function(before, PER_REPLICA, [], 1)
    assert sorted(rows) == list(range(8))
    more, _ = _some_from_function(after, PER_REPLICA, states, None)
    assert sorted(rows + more) == list(range(24))


def test_S143_a_worker_that_had_ended_is_ended_after_a_restore() -> None:
    def iterator(peers: PeersInThreads) -> Any:
        dataset = Dataset.range(2 * (4 if peers.index == 0 else 1)).batch(2)
        return iter(Inputs(WorkerLayout(peers, 1)).from_function(lambda _: dataset, None))

    def read(peers: PeersInThreads) -> Any:
        first = iterator(peers)
        for _ in range(2):
            next(first)
        second = iterator(peers)
        second.set_state(first.get_state())
        first.close()
        return [_parts(e) for e in second]

    assert joined_steps(run_workers(2, read)) == [[[4, 5], []], [[6, 7], []]]
