"""`run_elastic`: a sync group that goes on with the workers that are left."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.launch import program as programs
from replicax.launch.backoff import Backoff
from replicax.launch.group_supervisor import GroupSupervisor
from replicax.launch.restart_rules import Attempt, next_num_workers
from replicax.launch.sync_group import GroupPlan, SyncGroup, tasks_of

LearningRateRule = Literal["unchanged", "linear", "square_root"]
_POWERS: Mapping[str, float] = {"unchanged": 0.0, "linear": 1.0, "square_root": 0.5}
# A year: a training has no natural limit, and every wait has a bound.
_LONGEST_S = 365 * 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class KeepGlobalBatch:
    """The global batch stays the same; each replica gets more of it when there are fewer workers.

    The steps compute the same gradients with any number of workers, up to rounding, and the
    learning rate needs no change. Each replica needs more memory when there are fewer of them.

    Args:
      size: The number of examples of a global batch.

    Example:
      >>> KeepGlobalBatch(64).global_size(num_replicas=2), KeepGlobalBatch(64).global_size(4)
      (64, 64)
      >>> KeepGlobalBatch(64).learning_rate(0.1, num_workers=1, max_workers=2)
      0.1
    """

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    def global_size(self, num_replicas: int) -> int:
        """Returns the number of examples of a global batch."""
        return self.size

    def learning_rate(self, base: float, num_workers: int, max_workers: int) -> float:
        """Returns the learning rate, unchanged."""
        return base


@dataclasses.dataclass(frozen=True)
class KeepReplicaBatch:
    """The batch of each replica stays the same; the global batch shrinks with the workers.

    The steps compute other gradients, of fewer examples, so the rule for the learning rate must be
    named: "linear" in the number of workers, "square_root", or "unchanged". The base learning rate
    is that of `max_workers` workers.

    Args:
      size: The number of examples of a replica.
      learning_rate_rule: How the learning rate follows the number of workers.

    Example:
      >>> policy = KeepReplicaBatch(16, learning_rate_rule="linear")
      >>> policy.global_size(num_replicas=4), policy.global_size(num_replicas=2)
      (64, 32)
      >>> policy.learning_rate(0.1, num_workers=1, max_workers=2)
      0.05
    """

    size: int
    learning_rate_rule: LearningRateRule

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.learning_rate_rule not in _POWERS:
            raise errors.InvalidArgumentError(
                f"`learning_rate_rule` must be one of {', '.join(map(repr, _POWERS))}",
                f"it is {self.learning_rate_rule!r}",
                "Choose one; there is no default, because it changes the result.",
            )

    def global_size(self, num_replicas: int) -> int:
        """Returns the number of examples of a global batch."""
        return self.size * num_replicas

    def learning_rate(self, base: float, num_workers: int, max_workers: int) -> float:
        """Returns the learning rate for a number of workers."""
        return base * math.pow(num_workers / max_workers, _POWERS[self.learning_rate_rule])


class BatchPolicy(Protocol):
    """What happens to the global batch and the learning rate when the number of workers changes."""

    def global_size(self, num_replicas: int) -> int: ...

    def learning_rate(self, base: float, num_workers: int, max_workers: int) -> float: ...


@dataclasses.dataclass(frozen=True)
class ElasticRun:
    """One run of the training function, between two restarts; its first argument.

    Attributes:
      number: 0 for the first run; the number of restarts before.
      num_workers: The number of workers of this run.
      max_workers: The number of workers of a full group.
      batch: The policy that was passed to `run_elastic`.

    Example:
      >>> run = ElasticRun(1, 2, 4, KeepReplicaBatch(8, "linear"))
      >>> run.global_batch_size(num_replicas=2), run.learning_rate(0.4)
      (16, 0.2)
    """

    number: int
    num_workers: int
    max_workers: int
    batch: BatchPolicy

    def global_batch_size(self, num_replicas: int) -> int:
        """Returns the number of examples of a global batch.

        Args:
          num_replicas: The replicas of all workers, `strategy.num_replicas_in_sync`.
        """
        return self.batch.global_size(num_replicas)

    def learning_rate(self, base: float) -> float:
        """Returns the learning rate of this run.

        Args:
          base: That of a full group of `max_workers`.
        """
        return self.batch.learning_rate(base, self.num_workers, self.max_workers)


@dataclasses.dataclass(frozen=True)
class ElasticResult:
    """What came of `run_elastic`.

    Attributes:
      values: What the function returned on each worker of the last run.
      num_workers: The number of workers of each run, in order.
      reasons: Why each run has ended; the last one is "finished".

    >>> result = ElasticResult(values=[0.9, 0.9], num_workers=[3, 2], reasons=["lost"])
    >>> f"{len(result.num_workers) - 1} restart, {result.num_workers[-1]} workers at the end"
    '1 restart, 2 workers at the end'
    """

    values: list[Tree]
    num_workers: list[int]
    reasons: list[str]


def run_elastic(
    train_fn: Callable[..., object],
    args: Sequence[object] = (),
    *,
    min_workers: int,
    max_workers: int,
    batch: BatchPolicy,
    available_workers: Callable[[], int] | None = None,
    devices_per_worker: int = 1,
    max_restarts: int = 10,
    restart_window: float = 600.0,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    log_directory: str | None = None,
) -> ElasticResult:
    """Trains with as many workers as there are, and restarts all of them when one is lost.

    `train_fn(run, *args)` runs once per worker, in a process of its own with TF_CONFIG: it creates
    a `MultiWorkerMirroredStrategy`, restores the last checkpoint, trains, and saves checkpoints.
    After the loss of a worker the others go on from the last checkpoint, if `min_workers` are left;
    lost workers come back at the next restart. An exception that `train_fn` raises ends the run.

    Nothing is scaled behind the scenes: `batch` says what happens to the global batch and to the
    learning rate when the number of workers changes, and `train_fn` asks `run` for both.

    The workers are processes on this machine. On several machines, the launcher of each must start
    its own worker again with a new TF_CONFIG; `available_workers` does not reach other machines.

    Args:
      train_fn: The training; its first argument is an `ElasticRun`.
      args: Its further arguments.
      min_workers: The fewest workers with which to go on.
      max_workers: The most workers, with which it starts.
      batch: `KeepGlobalBatch(size)` or `KeepReplicaBatch(size, learning_rate_rule=...)`.
      available_workers: Returns how many workers could run; called before each run.
      devices_per_worker: The CPU devices of each worker.
      max_restarts: The most restarts within `restart_window` seconds. Announced preemptions are
        not counted.
      restart_window: The seconds of the window.
      timeout: The most seconds for all runs together.
      env: Environment variables of the workers, in addition to those of this process.
      log_directory: The directory of the logs, `worker-<index>.log`; they are removed by default.

    Returns:
      The results of the last run, and the number of workers of all.

    Raises:
      Exception: What `train_fn` raised.
      UnavailableError: The group was restarted too often.
      DeadlineExceededError: It took longer than `timeout`.
      InvalidArgumentError: A number of workers, restarts or seconds is out of its range.

    Example:
      >>> def train(run):
      ...     return run.num_workers, run.global_batch_size(num_replicas=run.num_workers)
      >>> run_elastic(train, min_workers=1, max_workers=1, batch=KeepGlobalBatch(64)).values
      [(1, 64)]
    """
    _check_counts(min_workers, max_workers, max_restarts)
    directory = Path(tempfile.mkdtemp(prefix="rx-elastic-"))
    logs = directory if log_directory is None else Path(log_directory)
    plan = GroupPlan(directory, logs, dict(env or {}), devices_per_worker)

    def start(number: int, before: Sequence[Attempt]) -> SyncGroup:
        available = None if available_workers is None else available_workers()
        count = next_num_workers(before, min_workers, max_workers, available)
        run = ElasticRun(number, count, max_workers, batch)
        prepared = programs.prepare(
            train_fn, (run, *args), None, directory=directory, num_devices=devices_per_worker
        )
        group = SyncGroup(plan, tasks_of(count), prepared)
        group.start()
        return group

    limit_s = _LONGEST_S if timeout is None else timeout
    try:
        supervisor = GroupSupervisor(start, Backoff(max_restarts, restart_window))
        try:
            supervisor.begin()
            ended = supervisor.wait(limit_s)
            if ended is None:
                raise supervisor.group.late(limit_s)
        finally:
            supervisor.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return ElasticResult(
        [outcome.value for outcome in ended],
        [len(attempt.tasks) for attempt in supervisor.attempts],
        [attempt.ending.value for attempt in supervisor.attempts],
    )


def _check_size(size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise errors.InvalidArgumentError(
            "The size of a batch must be a whole number of at least 1",
            f"it is {size!r}",
            "Pass the number of examples.",
        )


def _check_counts(min_workers: int, max_workers: int, max_restarts: int) -> None:
    for name, value, least in (
        ("min_workers", min_workers, 1),
        ("max_workers", max_workers, min_workers),
        ("max_restarts", max_restarts, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise errors.InvalidArgumentError(
                f"`{name}` must be a whole number of at least {least}",
                f"it is {value!r}",
                "Pass an int.",
            )
