"""Auto-sharding: what each of several workers reads.

The workers here are contexts: what a worker reads depends on nothing but its number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.data import AutoShardPolicy
from replicax.input.distribution import distribute_dataset, distribute_from_function
from replicax.input.sharding import autoshard

DATA, FILE, OFF, AUTO = (AutoShardPolicy[n] for n in ("DATA", "FILE", "OFF", "AUTO"))


def with_policy(dataset: Any, policy: Any) -> Any:
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def steps_of(dataset: Any, workers: int, replicas: int) -> list[list[Any]]:
    """Per step, the parts of all replicas of all workers."""
    layout = rx.ReplicaLayout(jax.devices("cpu")[:replicas])
    found = []
    for worker in range(workers):
        context = rx.InputContext(workers, worker, workers * replicas)
        distributed = distribute_dataset(dataset, None, layout, context)
        found.append([_parts(element) for element in distributed])
    return [[p for own in step for p in own] for step in zip(*found, strict=True)]


def _parts(element: Any) -> list[Any]:
    values = element.values if isinstance(element, rx.PerReplica) else (element,)
    return [np.asarray(v).tolist() for v in values]


def text_files(directory: Path, count: int, lines: int) -> list[str]:
    paths = []
    for i in range(count):
        path = directory / f"part-{i}.txt"
        path.write_text("".join(f"{i}.{k}\n" for k in range(lines)))
        paths.append(str(path))
    return paths


def test_S143_S144_S145_T70_by_data() -> None:
    dataset = rx.data.Dataset.range(4).batch(2)
    assert steps_of(dataset, 2, 1) == [[[0], [1]], [[2], [3]]]
    eight = rx.data.Dataset.range(9).batch(8)
    assert steps_of(eight, 2, 2) == [[[0, 1], [4, 5], [2, 3], [6, 7]], [[8], [], [], []]]


def test_T70_off() -> None:
    dataset = with_policy(rx.data.Dataset.range(4).batch(2), OFF)
    assert steps_of(dataset, 2, 1) == [[[0], [0]], [[1], [1]], [[2], [2]], [[3], [3]]]


def test_T67_own_streams_take_one_global_batch_per_step() -> None:
    dataset = with_policy(rx.data.Dataset.range(14).batch(7), OFF)
    steps = steps_of(dataset, 2, 2)
    assert [[len(p) for p in step] for step in steps] == [[2, 2, 2, 1], [2, 1, 2, 2]] * 2
    for worker in (0, 1):
        own = [v for step in steps for p in step[2 * worker : 2 * worker + 2] for v in p]
        assert own == list(range(14))


@pytest.mark.parametrize("policy", [DATA, OFF])
def test_S147_replicas_of_a_worker_share_batches_whatever_the_policy(policy: Any) -> None:
    dataset = with_policy(rx.data.Dataset.range(4).batch(4), policy)
    assert steps_of(dataset, 1, 2) == [[[0, 1], [2, 3]]]


def test_T70_positions_inside_a_batch_that_lasts_several_steps() -> None:
    dataset = with_policy(rx.data.Dataset.range(12).batch(6), OFF)
    layout = rx.ReplicaLayout(jax.devices("cpu")[:1])
    whole = distribute_dataset(dataset, None, layout, rx.InputContext(3, 1, 3))
    expected = [_parts(e) for e in whole]
    for position in range(len(expected) + 1):
        iterator = iter(whole)
        for _ in range(position):
            next(iterator)
        resumed = iter(whole)
        resumed.set_state(iterator.get_state())
        assert [_parts(e) for e in resumed] == expected[position:]


def test_S144_T72_files_go_to_workers(tmp_path: Path) -> None:
    paths = text_files(tmp_path, count=10, lines=2)
    dataset = rx.data.TextLineDataset(paths)
    for policy in (FILE, AUTO):
        own = [line.decode() for line in autoshard(dataset, policy, 5, 3).as_numpy_iterator()]
        assert own == ["3.0", "3.1", "8.0", "8.1"]
    layout = rx.ReplicaLayout(jax.devices("cpu")[:1])
    found = []
    for worker in range(5):
        context = rx.InputContext(5, worker, 5)
        distributed = distribute_dataset(dataset.batch(5), None, layout, context)
        found += [line for e in distributed for line in np.asarray(e).tolist()]
    assert sorted(found) == sorted(f"{i}.{k}".encode() for i in range(10) for k in range(2))


def test_S144_S146_fewer_files_than_workers_go_by_data(tmp_path: Path) -> None:
    dataset = rx.data.TextLineDataset(text_files(tmp_path, count=2, lines=6)).batch(3)
    layout = rx.ReplicaLayout(jax.devices("cpu")[:1])
    steps = []
    for worker in range(3):
        distributed = distribute_dataset(dataset, None, layout, rx.InputContext(3, worker, 3))
        steps.append([[v.decode() for v in np.asarray(e).tolist()] for e in distributed])
    assert [own[0] for own in steps] == [["0.0"], ["0.1"], ["0.2"]]


def test_T72_data_policy_on_files_keeps_records_of_every_file(tmp_path: Path) -> None:
    dataset = rx.data.TextLineDataset(text_files(tmp_path, count=2, lines=7))
    own = [line.decode() for line in autoshard(dataset, DATA, 5, 0).as_numpy_iterator()]
    assert own == ["0.0", "0.5", "1.0", "1.5"]


def test_T72_invalid_policies_are_refused(tmp_path: Path) -> None:
    with refused(rx.errors.NotFoundError, "reads files"):
        autoshard(rx.data.Dataset.range(4), FILE, 2, 0)
    with refused(ValueError, "each of 5 workers"):
        autoshard(rx.data.Dataset.range(4), DATA, 5, 0)
    dataset = rx.data.TextLineDataset(text_files(tmp_path, count=2, lines=1))
    assert list(autoshard(dataset, FILE, 3, 2).as_numpy_iterator()) == []
    layout = rx.ReplicaLayout(jax.devices("cpu")[:2])
    with refused(ValueError, "same number of replicas"):
        distribute_dataset(
            rx.data.Dataset.range(4).batch(2), None, layout, rx.InputContext(2, 0, 3)
        )


def test_T73_sharding_comes_before_a_trailing_prefetch() -> None:
    dataset = rx.data.Dataset.range(6).prefetch(4)
    assert [int(v) for v in autoshard(dataset, DATA, 2, 1).as_numpy_iterator()] == [1, 3, 5]


def test_S154_T81_a_function_is_called_once_per_worker() -> None:
    calls: list[Any] = []

    def dataset_fn(context: Any) -> Any:
        calls.append((context.num_input_pipelines, context.input_pipeline_id))
        return (
            rx.data.Dataset.range(8)
            .shard(context.num_input_pipelines, context.input_pipeline_id)
            .batch(2)
        )

    layout = rx.ReplicaLayout(jax.devices("cpu")[:2])
    found = []
    for worker in range(2):
        context = rx.InputContext(2, worker, 4)
        distributed = distribute_from_function(dataset_fn, None, layout, context)
        found.append([_parts(e) for e in distributed])
        assert [_parts(e) for e in distributed] == found[-1]
    assert calls == [(2, 0), (2, 1)]
    assert found == [[[[0, 2], [4, 6]]], [[[1, 3], [5, 7]]]]
