"""What is launched: a program, its tasks, and the rules for restarts. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Literal

from replicax.foundation import errors, settings
from replicax.protocol.tasks import Task


@dataclasses.dataclass(frozen=True)
class PythonProgram:
    """A Python program and its command line.

    Attributes:
      target: The path of a script, or the name of a module.
      args: Its arguments.
      is_module: Whether the target is a module, as of `python -m`.

    Example:
      >>> PythonProgram("train.py", ("--epochs", "3")).command("python3")
      ['python3', 'train.py', '--epochs', '3']
      >>> PythonProgram("package.train", is_module=True).command("python3")
      ['python3', '-m', 'package.train']
    """

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """What it is called in messages and in names of files."""
        return self.target if self.is_module else PurePath(self.target).stem

    def command(self, python: str) -> list[str]:
        """Returns the command that runs it.

        Args:
          python: The interpreter.
        """
        return [python, *(["-m"] if self.is_module else []), self.target, *self.args]


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A program on a cluster: what `replicax run` was asked for, for every launcher.

    Without parameter servers, every task runs the program, in lock step with the others. With
    them, the chief and the evaluator run it, and workers and servers run `replicax serve`.

    Attributes:
      program: The program.
      workers: The number of workers; the most of them, if the job is elastic.
      ps: The number of parameter servers.
      evaluator: Whether there is an evaluator.
      min_workers: The fewest workers with which the job goes on; None if it needs all of them.
      cpus_per_worker: The cores of each worker; None shares those of a host evenly.
      devices_per_worker: The devices of each worker; None for those that JAX finds.
      hosts: The hosts, in the order in which tasks are placed; empty for this machine.
      env: Environment variables of the tasks, in addition to those of the launcher.
      logs: The directory of the logs; None for a new one.
      log_bytes: The most bytes that the logs of one task take.
      max_restarts: The most restarts of a task, or of a group, within `restart_window_s`.
      restart_window_s: The seconds of that window.
      stop_s: The seconds that tasks get to end after a signal.
      snapshots: Where parameter servers save their variables, and restore them from after a
        restart; None if they do not.
      show: The tasks whose output the launcher prints; the logs have all.
      keys: A directory of keys; None lets the launcher make them where they are needed.
      checkpoints: The directory that the program keeps checkpoints in, where a launcher has to
        provide it, such as a volume.

    Example:
      >>> job = JobSpec(PythonProgram("train.py"), workers=2, ps=1)
      >>> [str(task) for task in job.tasks]
      ['/job:chief/task:0', '/job:worker/task:0', '/job:worker/task:1', '/job:ps/task:0']
      >>> job.command(Task("ps", 0), "python3")
      ['python3', '-m', 'replicax', 'serve']
    """

    program: PythonProgram
    workers: int = 1
    ps: int = 0
    evaluator: bool = False
    min_workers: int | None = None
    cpus_per_worker: int | None = None
    devices_per_worker: int | None = None
    hosts: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    logs: Path | None = None
    log_bytes: int = 64 << 20
    max_restarts: int = 5
    restart_window_s: float = 600.0
    stop_s: float = 14.0
    snapshots: Path | None = None
    show: Literal["all", "chief", "none"] = "all"
    keys: Path | None = None
    checkpoints: Path | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("workers", self.workers, 1),
            ("ps", self.ps, 0),
            ("min_workers", self.min_workers, 1),
            ("cpus_per_worker", self.cpus_per_worker, 1),
            ("devices_per_worker", self.devices_per_worker, 1),
            ("max_restarts", self.max_restarts, 0),
            ("log_bytes", self.log_bytes, 4 << 10),
        ):
            if value is not None and value < least:
                raise errors.InvalidArgumentError(
                    f"`{name}` must be at least {least}", f"it is {value}", "Correct it."
                )
        if self.min_workers is not None and self.min_workers > self.workers:
            raise errors.InvalidArgumentError(
                "The most workers of an elastic job must be at least the fewest",
                f"it is {self.min_workers}:{self.workers}",
                "Write MIN:MAX, such as 2:4.",
            )

    @property
    def is_sync(self) -> bool:
        """Whether all workers run the program in lock step: there is no parameter server."""
        return not self.ps

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in the order in which they are placed on hosts."""
        return self.tasks_with(self.workers)

    def tasks_with(self, workers: int) -> tuple[Task, ...]:
        """Returns all tasks of a run with so many workers."""
        jobs = {
            "chief": 0 if self.is_sync else 1,
            "worker": workers,
            "ps": self.ps,
            "evaluator": int(self.evaluator),
        }
        return tuple(Task(name, index) for name, count in jobs.items() for index in range(count))

    def shows(self, task: Task) -> bool:
        """Returns whether the launcher prints the output of a task."""
        is_chief = task == self.tasks[0]
        return self.show == "all" or (self.show == "chief" and is_chief)

    def serves(self, task: Task) -> bool:
        """Returns whether a task runs `replicax serve` in place of the program."""
        return not self.is_sync and task.job in ("worker", "ps")

    def command(self, task: Task, python: str) -> list[str]:
        """Returns the command of a task, which TF_CONFIG tells which one it is.

        Args:
          task: The task.
          python: The interpreter.
        """
        if not self.serves(task):
            return self.program.command(python)
        options: list[str] = []
        if task.job == "worker" and self.devices_per_worker is not None:
            options = ["--cpu-devices", str(self.devices_per_worker)]
        if task.job == "ps" and self.snapshots is not None:
            options = ["--snapshots", str(self.snapshots)]
        return [python, "-m", "replicax", "serve", *options]

    def variables(
        self, task: Task, cluster: Mapping[str, Sequence[str]], cores: int
    ) -> dict[str, str]:
        """Returns the environment variables of a task, in addition to those of the launcher.

        Args:
          task: The task.
          cluster: The addresses of all tasks, by job.
          cores: The cores that the task may use, of those that the tasks of its host share.
        """
        config = {
            "cluster": {job: list(addresses) for job, addresses in cluster.items()},
            "task": {"type": task.job, "index": task.index},
        }
        found = {settings.TF_CONFIG: json.dumps(config)}
        found |= settings.for_launched_task(cores, self.devices_per_worker, task.job)
        if self.keys is not None:
            found[settings.REPLICAX_KEYS] = str(self.keys)
        return {**found, **self.env}


def cluster_of(tasks: Sequence[Task], addresses: Sequence[str]) -> dict[str, list[str]]:
    """Returns the cluster of TF_CONFIG.

    >>> cluster_of([Task("worker", 0), Task("worker", 1)], ["a:1", "b:1"])
    {'worker': ['a:1', 'b:1']}
    """
    found: dict[str, list[str]] = {}
    for task, address in zip(tasks, addresses, strict=True):
        found.setdefault(task.job, []).append(address)
    return found
