"""Sync groups on Ray: Ray Train places and restarts them, and our backend connects them.

Note [Ray Train restarts what fails]
    Ray Train restarts a group after any error of a worker, up to `max_failures` times; errors of
    the program itself, too. So a worker returns what must not be restarted (an error of the
    program, an announced preemption) in place of raising it, and the process that started the
    job decides.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from typing_extensions import override

from replicax.cluster import address as addresses
from replicax.foundation import errors, settings
from replicax.foundation.types import Tree
from replicax.group import exit_codes
from replicax.launch import ray_actors
from replicax.launch.backoff import Backoff
from replicax.launch.function_files import FunctionResult
from replicax.launch.job import JobSpec
from replicax.launch.ports import ReservedPorts
from replicax.launch.ray_actors import fetch
from replicax.protocol.tasks import Task

# How long a worker that has lost another one waits for the error that ended that one.
_FAILURE_S = 2.0
# The ports of this process, reserved until the program listens.
_reserved: list[ReservedPorts] = []


class GroupRestart(Exception):
    """A worker has lost the others, or was ended by a signal: Ray Train restarts the group."""


@dataclasses.dataclass
class GroupConfig(BackendConfig):
    """The backend of a sync group: every worker gets its TF_CONFIG and keys, and a new port.

    Attributes:
      state: The actor of the `JobState`.
    """

    state: Any = None

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        return GroupBackend


class WorkerGroup(Protocol):
    """What is used of Ray Train's worker group."""

    def __len__(self) -> int: ...

    def execute_single_async(
        self, worker_index: int, func: Callable[..., object], *args: object
    ) -> Any: ...


class GroupBackend(Backend):
    """Tells the workers about each other, each time that Ray Train starts a group."""

    @override
    def on_start(self, worker_group: WorkerGroup, backend_config: GroupConfig) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        ranks = range(len(worker_group))
        fetch(backend_config.state.begin_run.remote())
        found = [worker_group.execute_single_async(rank, _reserve_address) for rank in ranks]
        cluster = {"worker": fetch(found)}
        ready = [
            worker_group.execute_single_async(rank, _configure, rank, cluster, backend_config.state)
            for rank in ranks
        ]
        fetch(ready)


def _reserve_address() -> str:
    """Reserves a port of this node for this worker; nothing else gets it until it listens."""
    host = ray.util.get_node_ip_address()
    reserved = ReservedPorts(1, host)
    _reserved.append(reserved)
    return addresses.join(host, reserved.ports[0])


def _configure(rank: int, cluster: Mapping[str, Sequence[str]], state: Any) -> None:
    keys = ray_actors.private_keys(fetch(state.keys_of.remote("worker")))
    for name, value in ray_actors.task_variables(Task("worker", rank), cluster, keys).items():
        settings.Setting(name).write(value)


@dataclasses.dataclass(frozen=True)
class GroupRun:
    """One job of a sync group.

    Attributes:
      state: The actor of the `JobState`.
      workers: The number of workers.
      cpus_per_worker: The cores that Ray reserves for each.
      env: Environment variables of the workers.
      max_restarts: The most restarts.
      storage: A directory for the records of Ray Train.
      datasets: Datasets of `ray.data`, which workers get by `ray.train.get_dataset_shard`.
    """

    state: Any
    workers: int
    cpus_per_worker: int
    env: Mapping[str, str]
    max_restarts: int
    storage: str
    datasets: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, train: Callable[[dict[str, Any]], int], config: dict[str, Any]) -> int:
        """Runs a training to its end.

        Args:
          train: Runs on every worker; returns its exit code, or raises `GroupRestart`.
          config: Its argument.

        Returns:
          The exit code of the first failure; 0 without.

        Raises:
          UnavailableError: The group was restarted too often.
        """
        backoff = Backoff(max(self.max_restarts, 1), float("inf"))
        while True:
            try:
                code = self._fit(train, config)
            except ray.train.ControllerError as error:
                # A worker was lost while Ray Train was starting the group, which it does not retry.
                due_s = backoff.next(time.monotonic()) if self.max_restarts else None
                if due_s is None or "died" not in str(error):
                    raise errors.UnavailableError(
                        f"Ray Train could not start the group of {self.workers} workers: {error}"
                    ) from error
                time.sleep(max(0.0, due_s - time.monotonic()))
                continue
            except ray.train.TrainingFailedError as error:
                raise errors.UnavailableError(
                    f"The group was restarted {self.max_restarts} times and failed again: {error}"
                ) from error
            failure = fetch(self.state.failure.remote())
            if failure is not None:
                return failure[1]
            # An announced preemption is not counted: all workers have saved.
            if code != exit_codes.PREEMPTED:
                return code

    def _fit(self, train: Callable[[dict[str, Any]], int], config: dict[str, Any]) -> int:
        trainer = DataParallelTrainer(
            train,
            train_loop_config={**config, "state": self.state},
            backend_config=GroupConfig(self.state),
            scaling_config=ray.train.ScalingConfig(
                num_workers=self.workers,
                resources_per_worker={"CPU": float(self.cpus_per_worker)},
            ),
            run_config=ray.train.RunConfig(
                storage_path=self.storage,
                failure_config=ray.train.FailureConfig(max_failures=self.max_restarts),
                worker_runtime_env={"env_vars": dict(self.env)},
                # Without its dashboard, Ray Train warns every second that it cannot ask it.
                logging_config=ray.train.LoggingConfig(log_level="ERROR"),
            ),
            datasets=dict(self.datasets) or None,
        )
        return trainer.fit().return_value or 0


def train_program(config: dict[str, Any]) -> int:
    """Runs a program in a child process of a worker of Ray Train."""
    job: JobSpec = config["job"]
    task = Task("worker", ray.train.get_context().get_world_rank())
    command = job.command(task, sys.executable)
    code = ray_actors.run_command(task, command, config["directory"], {}, config["logs"])
    return _settle(config["state"], task.index, code)


def train_function(config: dict[str, Any]) -> int:
    """Calls a function in a worker of Ray Train, where it can use `ray.train` and `ray.data`."""
    from replicax.group import group  # noqa: PLC0415 - imports JAX, which must see the variables
    from replicax.protocol import trees  # noqa: PLC0415
    from replicax.worker import error_reports  # noqa: PLC0415

    state, rank = config["state"], ray.train.get_context().get_world_rank()
    try:
        value = config["function"](*config["args"], **config["kwargs"])
        encoded = trees.encode(value, name="what the function returned")
    except Exception as error:
        code = group.exit_code_of(error)
        if code == exit_codes.FAILED:
            described = FunctionResult(None, [], error_reports.describe(error))
            _set_result(state, rank, described)
            fetch(state.set_failure.remote(rank, code))
        group.leave(f"{type(error).__name__}: {error}"[:500])
        return _settle(state, rank, code)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        group.leave(None if code == 0 else f"SystemExit: {ended.code}")
        return _settle(state, rank, code)
    _set_result(
        state, rank, FunctionResult(encoded.tree, [bytes(b) for b in encoded.buffers], None)
    )
    group.leave(None)
    return 0


def _set_result(state: Any, rank: int, result: FunctionResult) -> None:
    fetch(state.set_result.remote(rank, msgspec.msgpack.encode(result)))


def _settle(state: Any, rank: int, code: int) -> int:
    """Returns the exit code of a worker, or raises to have the group restarted."""
    is_lost = code < 0 or code == exit_codes.RESTART_GROUP
    if not is_lost:
        if code not in (0, exit_codes.PREEMPTED):
            fetch(state.set_failure.remote(rank, code))
        return code
    deadline = time.monotonic() + _FAILURE_S
    while code >= 0 and time.monotonic() < deadline:
        if fetch(state.failure.remote()) is not None:
            return code
        time.sleep(0.1)
    raise GroupRestart(f"worker {rank} ended with exit code {code} in process {os.getpid()}")


def values_of(state: Any, workers: int) -> list[Tree]:
    """Returns what the function returned on each worker; raises what it raised on one."""
    from replicax.coordinator.shipping import remote_errors  # noqa: PLC0415 - imports JAX
    from replicax.protocol import trees  # noqa: PLC0415

    values: list[Tree] = [None] * workers
    for rank, raw in sorted(fetch(state.results.remote()).items()):
        result = msgspec.msgpack.decode(raw, type=FunctionResult)
        if result.error is not None:
            raise remote_errors.rebuild_error(result.error, Task("worker", rank))
        assert result.tree is not None, "a result has a value or an error"
        values[rank] = trees.decode(result.tree, result.buffers)
    return values
