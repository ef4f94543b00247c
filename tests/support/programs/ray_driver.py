"""Drivers of the tests of `rx.ray`: `python ray_driver.py NAME DIRECTORY` prints JSON at last."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import replicax as rx

ENV = {"REPLICAX_TIMING": "fast", "PYTHONPATH": str(Path(__file__).parent)}
NUM_STEPS, GLOBAL_BATCH = 24, 8


def count_steps(directory: str, lose: tuple[int, int] | None) -> dict[str, float]:
    """Counts steps and the rows of all batches; the task `lose[0]` is killed in step `lose[1]`."""
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        steps, rows = rx.Variable(0), rx.Variable(0.0)
    data = rx.data.Dataset.from_tensor_slices(np.arange(64, dtype=np.float32)).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(data.batch(GLOBAL_BATCH)))

    @rx.function
    def step(batch):
        per_replica = strategy.run(lambda x: x.sum(), args=(batch,))
        rows.assign_add(strategy.reduce("SUM", per_replica, axis=None))
        steps.assign_add(1)

    checkpoint = rx.train.Checkpoint(steps=steps, rows=rows, iterator=iterator)
    with rx.train.CheckpointManager(checkpoint, directory, max_to_keep=2) as manager:
        is_first = manager.restore_or_initialize() is None
        first = int(steps)
        for number in range(first + 1, NUM_STEPS + 1):
            step(next(iterator))
            if number % 6 == 0:
                manager.save(checkpoint_number=number)
            if is_first and (strategy.cluster_resolver.task_id, number) == lose:
                os.kill(os.getpid(), signal.SIGKILL)
    iterator.close()
    return {"first": first, "steps": int(steps), "rows": float(rows)}


def raise_on_one() -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    if strategy.cluster_resolver.task_id == 1:
        raise ValueError("not this one")
    strategy.reduce("SUM", strategy.run(lambda: np.float32(1)), axis=None)


def read_dataset(dataset, by_ray: bool) -> list[float]:
    """Returns the sum of the values of each global batch."""
    strategy = rx.MultiWorkerMirroredStrategy()
    if by_ray:
        import ray.train

        shard = ray.train.get_dataset_shard("rows")
        distributed = strategy.distribute_datasets_from_function(
            lambda context: rx.ray.batches(shard, GLOBAL_BATCH // context.num_input_pipelines)
        )
    else:
        distributed = strategy.experimental_distribute_dataset(
            rx.ray.batches(dataset, GLOBAL_BATCH)
        )
    found = []
    for batch in distributed:
        part = strategy.run(lambda b: b["id"].sum(), args=(batch,))
        found.append(float(strategy.reduce("SUM", part, axis=None)))
    return found


def sync(directory: str) -> object:
    import ray_driver

    with rx.ray.RayCluster(workers=2, env=ENV) as cluster:
        plain = cluster.run(ray_driver.count_steps, (f"{directory}/plain", None))
        lost = cluster.run(ray_driver.count_steps, (f"{directory}/lost", (1, 15)))
        try:
            cluster.run(ray_driver.raise_on_one)
            error = ""
        except ValueError as raised:
            error = str(raised)
    return {"plain": plain, "lost": lost, "error": error}


def data(directory: str) -> object:
    import ray.data
    import ray_driver

    with rx.ray.RayCluster(workers=2, env=ENV) as cluster:
        rows = ray.data.range(30)
        whole = cluster.run(ray_driver.read_dataset, (rows, False))
        even = ray.data.range(32)
        split = cluster.run(ray_driver.read_dataset, (None, True), datasets={"rows": even})
        try:
            rx.MirroredStrategy().experimental_distribute_dataset(rows)
            error = ""
        except ValueError as raised:
            error = str(raised)
    return {"whole": whole, "split": split, "error": error}


def servers(directory: str) -> object:
    with rx.ray.RayCluster(workers=2, ps=1, env=ENV) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver, keys=cluster.keys_directory)
        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            counter = rx.Variable(0)

        @rx.function
        def step():
            counter.assign_add(1)

        pids = []

        def kill() -> None:
            for index in (1, 0):
                killed = cluster.pid("worker", index)
                os.kill(killed, signal.SIGKILL)
                while (restarted := cluster.pid("worker", index)) == killed:
                    time.sleep(0.1)
                pids.extend([killed, restarted])

        killing = threading.Thread(target=kill)
        scheduled = 0
        while scheduled < 200 or killing.is_alive():
            for _ in range(20):
                coordinator.schedule(step)
                scheduled += 1
            if scheduled == 100:
                killing.start()
            time.sleep(0.02)
        coordinator.join()
        return {"scheduled": scheduled, "count": int(counter), "pids": pids}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
