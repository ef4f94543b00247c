"""Parameter servers and processes that die: nothing is lost, nothing counts twice."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameter_servers import Desk, becomes, kept_cluster, mend

import replicax as rx
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors


@pytest.fixture(scope="module")
def harmed_cluster() -> Iterator[rx.testing.LocalCluster]:
    """Workers that tests kill, and must start again."""
    with kept_cluster(workers=3, ps=2) as cluster:
        yield cluster


@pytest.fixture
def desk(harmed_cluster: rx.testing.LocalCluster) -> Iterator[Desk]:
    desk = Desk(harmed_cluster)
    yield desk
    desk.leave()
    mend(harmed_cluster)


class Counting:
    """Training whose every step leaves traces that can be counted."""

    def __init__(self, desk: Desk, tmp_path: Path, **options: Any) -> None:
        self.desk = desk
        self.strategy = desk.strategy(2)
        self.coordinator = desk.coordinator(self.strategy, **options)
        with self.strategy.scope():
            self.counter = rx.Variable(0.0, name="counter")
            self.table = rx.Variable(jnp.zeros((20, 2)), name="table")
            self.w = rx.Variable(jnp.ones((8, 4)), name="w")
            self.optimizer = rx.optimizers.Optimizer(optax.adam(0.001), [self.w])
        self.log = tmp_path / "log"
        self.log.mkdir(parents=True)
        self.step = self._make_step()
        self.values: list[Any] = []

    def _make_step(self) -> Any:
        counter, table, w, optimizer = self.counter, self.table, self.w, self.optimizer
        log = self.log

        @rx.function
        def compiled(row: Any) -> Any:
            gradient = rx.grad(lambda: jnp.sum(w * w), w)()
            optimizer.apply_gradients([(gradient, w)])
            table.scatter_add(rx.IndexedSlices(jnp.ones((1, 2)), row[None]))
            counter.assign_add(1.0)
            return row

        def step(number: int, seconds: float) -> Any:
            with (log / str(number)).open("a") as file:
                file.write("begun\n")
            index = rx.coordinator.experimental_get_current_worker_index()
            asleep = log.parent / f"asleep-{index}"
            asleep.touch()
            time.sleep(seconds)
            asleep.unlink()
            return compiled(jnp.asarray(number % 20))

        return step

    def schedule(self, count: int, seconds: float = 0.0) -> None:
        """Schedules steps; a multiple of 20, the rows of the table, if all are to be checked."""
        for i in range(count):
            self.values.append(self.coordinator.schedule(self.step, args=(i, seconds)))

    def running_on(self, worker: int) -> int:
        return self.coordinator.status().workers[worker].num_closures

    def freeze_in_a_step(self, *workers: int) -> None:
        """Freezes workers when all of them are in the first half of a step.

        Schedules more steps until then: on a busy machine, a worker may take longer to start than
        the others take for those that are queued.
        """
        cluster = self.desk.cluster
        marks = [self.log.parent / f"asleep-{worker}" for worker in workers]

        def is_done() -> bool:
            if self.coordinator.status().num_queued < 20:
                self.schedule(20, seconds=0.05)
            for worker in workers:
                cluster.stop("worker", worker)
            if all(mark.exists() for mark in marks):
                return True
            for worker in workers:
                cluster.cont("worker", worker)
            return False

        becomes(is_done, f"workers {workers} are in the midst of steps")

    def kill_in_a_step(self, *workers: int) -> None:
        """Kills workers when all of them are in the first half of a step."""
        self.freeze_in_a_step(*workers)
        for worker in workers:
            self.desk.cluster.kill("worker", worker)
            (self.log.parent / f"asleep-{worker}").unlink()

    def num_begun(self) -> int:
        return sum(path.read_text().count("begun") for path in self.log.iterdir())

    def check(self) -> None:
        """Checks that each of the scheduled steps counts once."""
        count = len(self.values)
        assert int(self.optimizer.iterations) == count
        assert float(self.counter) == count
        assert self.table.numpy().sum() == 2 * count
        np.testing.assert_array_equal(self.table.numpy(), np.full((20, 2), count / 20))


def test_S190_T111_T113_bar1_bar7_every_step_counts_once_whatever_is_killed(
    desk: Desk, tmp_path: Path
) -> None:
    training = Counting(desk, tmp_path)
    coordinator, num_killed = training.coordinator, 0
    # One, two together, the same one again.
    for workers in [(1,), (0, 1), (0,)]:
        # Enough to be still at it when workers that were killed have come back.
        training.schedule(200, seconds=0.05)
        training.kill_in_a_step(*workers)
        num_killed += len(workers)
        assert not coordinator.done()
        for worker in workers:
            desk.cluster.restart("worker", worker, wait=False)
    coordinator.join(timeout=120)
    training.check()
    num_steps = len(training.values)
    assert [int(v.fetch()) for v in training.values] == [i % 20 for i in range(num_steps)]
    # What was killed in its midst was begun again, and counted once.
    assert num_steps >= 600 and training.num_begun() >= num_steps + num_killed
    assert [w.num_restarts for w in coordinator.status().workers] == [2, 2, 0]


@pytest.mark.slow
def test_T111_a_worker_killed_between_functions_comes_back(desk: Desk, tmp_path: Path) -> None:
    training = Counting(desk, tmp_path)
    coordinator = training.coordinator
    training.schedule(20)
    coordinator.join(timeout=60)
    training.check()
    for i in range(3):
        desk.cluster.kill("worker", i)
        desk.cluster.restart("worker", i, wait=False)
    desk.cluster.wait_until_ready()
    training.schedule(20)
    coordinator.join(timeout=60)
    training.check()


def test_bar8_a_poison_closure_is_named_and_the_others_complete(desk: Desk, tmp_path: Path) -> None:
    training = Counting(desk, tmp_path)
    coordinator = training.coordinator
    # All are queued before the poison takes effect: while an error is pending, `schedule` waits for
    # the closures in flight, and no worker is restarted yet.
    all_are_queued = tmp_path / "all_are_queued"

    def kill_own_worker() -> None:
        deadline = time.monotonic() + 120
        while not all_are_queued.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    training.schedule(80, seconds=0.05)
    poison = coordinator.schedule(kill_own_worker)
    training.schedule(20, seconds=0.05)
    all_are_queued.touch()
    ended = threading.Event()

    def revive() -> None:
        while not ended.wait(0.05):
            mend(desk.cluster)

    reviver = threading.Thread(target=revive)
    reviver.start()
    try:
        with pytest.raises(errors.PoisonClosureError, match="closure"):
            coordinator.join(timeout=120)
    finally:
        ended.set()
        reviver.join()
    with pytest.raises(errors.PoisonClosureError):
        poison.fetch(timeout=0)
    assert sum(w.num_restarts for w in coordinator.status().workers) == 3
    training.check()


@pytest.mark.slow
def test_S190_a_frozen_worker_is_replaced_and_its_late_updates_are_refused(
    desk: Desk, tmp_path: Path
) -> None:
    training = Counting(desk, tmp_path, timing=Timing.fast())
    training.schedule(200, seconds=0.05)
    training.freeze_in_a_step(0)
    try:
        training.coordinator.join(timeout=90)
        training.check()
    finally:
        desk.cluster.cont("worker", 0)
    # It wakes up, sends what it had, and is told to begin again.
    becomes(
        lambda: training.coordinator.status().workers[0].state in ("idle", "busy"),
        "the worker comes back",
    )
    training.check()
    assert training.num_begun() > len(training.values)


def test_bar14_T115_values_survive_the_death_of_all_workers(desk: Desk) -> None:
    coordinator = desk.coordinator()

    def make(number: int) -> Any:
        return {"a": jnp.full(3, number), "b": np.arange(float(number))}

    values = [coordinator.schedule(make, args=(i,)) for i in range(100)]
    coordinator.join(timeout=60)
    # Half of them were looked at before.
    fetched, got = [v.fetch() for v in values[:25]], [v.get() for v in values[25:50]]
    for i in range(3):
        desk.cluster.kill("worker", i)
    becomes(lambda: all(w.num_restarts for w in coordinator.status().workers), "all are lost")
    for found in (fetched + got, [v.fetch() for v in values], [v.get() for v in values]):
        for i, value in enumerate(found):
            np.testing.assert_array_equal(value["a"], np.full(3, i))
            np.testing.assert_array_equal(value["b"], np.arange(float(i)))


@pytest.mark.slow
def test_S187_S190_iterators_are_made_again_on_a_worker_that_came_back(
    desk: Desk, tmp_path: Path
) -> None:
    coordinator = desk.coordinator()
    dataset = coordinator.create_per_worker_dataset(lambda: rx.data.Dataset.range(1000).repeat())
    iterator = iter(dataset)

    def step(iterator: Any) -> Any:
        time.sleep(0.01)
        return next(iterator)

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(90)]
    becomes(lambda: coordinator.status().workers[2].num_done > 3, "worker 2 works")
    desk.cluster.kill("worker", 2)
    assert not coordinator.done(), "killed in the midst of work"
    desk.cluster.restart("worker", 2)
    coordinator.join(timeout=90)
    assert len(coordinator.fetch(values)) == 90
    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(60)]
    coordinator.join(timeout=90)
    assert coordinator.status().workers[2].num_restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "during"])
def test_S191_T114_a_lost_server_ends_training_with_its_name(
    desk: Desk, tmp_path: Path, moment: str
) -> None:
    training = Counting(desk, tmp_path)
    coordinator = training.coordinator
    training.schedule(20)
    coordinator.join(timeout=60)
    begun = time.monotonic()

    def go_on() -> None:
        if moment == "before":
            desk.cluster.kill("ps", 1)
            training.schedule(5)
        else:
            training.schedule(200, seconds=0.05)
            becomes(lambda: training.num_begun() > 25, "it runs")
            desk.cluster.kill("ps", 1)
        coordinator.join(timeout=60)

    with pytest.raises(errors.PSUnavailableError, match="/job:ps/task:1"):
        go_on()
    with pytest.raises(errors.UnavailableError, match="/job:ps/task:1"):
        coordinator.schedule(training.step, args=(0, 0.0))
    # A read of what is gone ends too, in bounded time.
    with pytest.raises(errors.UnavailableError, match="/job:ps/task:1"):
        training.w.numpy()
    assert time.monotonic() - begun < 100
    desk.leave()
    desk.cluster.restart("ps", 1)
    # The cluster takes the next job.
    again = Counting(desk, tmp_path / "again")
    again.schedule(20)
    again.coordinator.join(timeout=60)
    again.check()


@pytest.mark.slow
def test_T114_a_server_that_came_back_without_its_variables_is_told(
    desk: Desk, tmp_path: Path
) -> None:
    training = Counting(desk, tmp_path)
    training.schedule(20)
    training.coordinator.join(timeout=60)
    desk.cluster.kill("ps", 0)
    desk.cluster.restart("ps", 0)
    coordinator = training.coordinator
    becomes(lambda: coordinator.status().servers[0].state == "lost", "the loss is noticed")
    with pytest.raises(errors.UnavailableError, match="/job:ps/task:0"):
        training.schedule(5)
    desk.leave()
    assert desk.coordinator().schedule(lambda: 1).fetch(60) == 1


@pytest.mark.slow
def test_T114_a_server_lost_while_a_worker_recovers(desk: Desk, tmp_path: Path) -> None:
    training = Counting(desk, tmp_path)
    training.schedule(200, seconds=0.05)
    becomes(lambda: training.num_begun() > 10, "it runs")
    desk.cluster.kill("worker", 0)
    desk.cluster.restart("worker", 0, wait=False)
    desk.cluster.kill("ps", 0)
    with pytest.raises(errors.UnavailableError, match="ps"):
        training.coordinator.join(timeout=60)
    desk.cluster.wait_until_ready()


@pytest.mark.slow
def test_S196_training_goes_on_from_a_checkpoint_in_a_new_cluster(
    desk: Desk, tmp_path: Path
) -> None:
    steps_per_epoch = 20

    def run(until: int, parts: int) -> tuple[int, float]:
        strategy = desk.strategy(parts)
        coordinator = desk.coordinator(strategy)
        with strategy.scope():
            w = rx.Variable(jnp.zeros((6, 2)), name="w")
            optimizer = rx.optimizers.Optimizer(optax.sgd(0.5, momentum=0.5), [w])
        checkpoint = rx.train.Checkpoint(w=w, optimizer=optimizer)
        manager = rx.train.CheckpointManager(checkpoint, tmp_path / "saved", max_to_keep=2)
        manager.restore_or_initialize()
        first = int(optimizer.iterations) // steps_per_epoch

        @rx.function
        def step() -> None:
            optimizer.apply_gradients([(jnp.ones((6, 2)), w)])

        for _ in range(first, until):
            for _ in range(steps_per_epoch):
                coordinator.schedule(step)
            coordinator.join(timeout=60)
            manager.save()
        manager.close()
        assert int(optimizer.iterations) == until * steps_per_epoch
        return first, float(w.numpy().sum())

    assert run(2, parts=2)[0] == 0
    desk.leave()
    desk.cluster.kill("ps", 0)
    desk.cluster.restart("ps", 0)
    first, total = run(4, parts=3)
    assert first == 2
    alone = rx.Variable(jnp.zeros((6, 2)))
    optimizer = rx.optimizers.Optimizer(optax.sgd(0.5, momentum=0.5), [alone])
    for _ in range(4 * steps_per_epoch):
        optimizer.apply_gradients([(jnp.ones((6, 2)), alone)])
    np.testing.assert_allclose(total, alone.numpy().sum(), rtol=1e-5)


def test_T119_dropping_coordinator_and_strategy_ends_their_threads(desk: Desk) -> None:
    before = set(threading.enumerate())
    strategy = rx.ParameterServerStrategy(desk.cluster.resolver)
    coordinator = rx.coordinator.ClusterCoordinator(strategy, timing=Timing.fast())
    assert coordinator.schedule(lambda: 3).fetch(60) == 3
    assert set(threading.enumerate()) > before
    del strategy, coordinator
    gc.collect()
    becomes(lambda: set(threading.enumerate()) <= before, "the threads have ended")
    # And the servers are free for the next.
    assert desk.coordinator().schedule(lambda: 4).fetch(60) == 4
