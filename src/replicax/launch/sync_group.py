"""The processes of one run of a sync group on this machine: all start, and all end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors, settings
from replicax.launch import function_results, outcomes
from replicax.launch.function_files import SHOW_STACKS
from replicax.launch.outcomes import Outcome
from replicax.launch.ports import ReservedPorts
from replicax.launch.program import PreparedProgram
from replicax.launch.task_process import TaskProcess, with_parent
from replicax.protocol.tasks import Task

# Seconds between two checks of running processes.
_LOOK_S = 0.01
_START_SECONDS = 30.0
_KILLED_SECONDS = 10.0
# The time to print stacks.
_STACKS_S = 0.5
_NUM_LOG_LINES = 30


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """What does not change from one run of a group to the next.

    Attributes:
      directory: A private directory, for the results of functions.
      logs: The directory of the logs, one file for each task, which runs append to.
      env: Environment variables of the tasks, in addition to those of this process.
      devices_per_task: The number of CPU devices of each task.
      keys_directory: The keys of the tasks, for connections over TCP; without, they use sockets in
        a directory of this user.
      hosts: The addresses of the tasks, in their order; all are on the loopback interface by
        default.
      prefixes: For each task, the words before its command, such as those that enter a network
        namespace.
    """

    directory: Path
    logs: Path
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices_per_task: int = 1
    keys_directory: Path | None = None
    hosts: Sequence[str] = ()
    prefixes: Sequence[Sequence[str]] = ()


def tasks_of(workers: int, *, chief: bool = False, evaluator: bool = False) -> tuple[Task, ...]:
    """Returns the tasks of a group: the chief, the workers, and the evaluator.

    >>> [str(task) for task in tasks_of(1, chief=True)]
    ['/job:chief/task:0', '/job:worker/task:0']
    """
    found = [Task("chief", 0)] if chief else []
    found += [Task("worker", index) for index in range(workers)]
    return (*found, *([Task("evaluator", 0)] if evaluator else []))


class SyncGroup:
    """One run of a program by all tasks of a group, each in a process with its own TF_CONFIG.

    Every run has ports of its own, because JAX cannot join a group again on the port of a run that
    was broken off.

    Args:
      plan: What does not change between runs.
      tasks: The tasks, in order.
      program: What each of them runs.
      on_start: Called with each process after it was started.

    Attributes:
      processes: The processes, by job and index.
      cluster_spec: The addresses of the tasks.
    """

    def __init__(
        self,
        plan: GroupPlan,
        tasks: Sequence[Task],
        program: PreparedProgram,
        on_start: Callable[[TaskProcess], None] | None = None,
    ) -> None:
        self._plan = plan
        self._program = program
        self._on_start = on_start
        self._owner = os.getpid()
        hosts = plan.hosts or ["127.0.0.1"] * len(tasks)
        self._ports = [ReservedPorts(1) for _ in tasks]
        cluster: dict[str, list[str]] = {}
        for task, host, reserved in zip(tasks, hosts, self._ports, strict=True):
            cluster.setdefault(task.job, []).append(address.join(host, reserved.ports[0]))
        self.cluster_spec = ClusterSpec(cluster)
        plan.logs.mkdir(parents=True, exist_ok=True)
        self.processes: dict[tuple[str, int], TaskProcess] = {}
        for task in tasks:
            log = plan.logs / f"{task.job}-{task.index}.log"
            self.processes[task.job, task.index] = TaskProcess(task.job, task.index, log)
        # The kernel kills a child when the thread that started it exits. This thread exists as long
        # as the group.
        self._launcher = concurrent.futures.ThreadPoolExecutor(1, "replicax-launch")
        self._lock = threading.RLock()
        # The tasks in the order in which they were seen to have ended, and when.
        self._ended: dict[tuple[str, int], float] = {}
        # Those that were killed by `end`.
        self._killed: set[tuple[str, int]] = set()

    # Starting.

    def start(self) -> None:
        """Starts a process for every task; does not wait for them to meet."""
        prefixes = self._plan.prefixes or [()] * len(self.processes)
        try:
            for (key, process), prefix in zip(self.processes.items(), prefixes, strict=True):
                self._result(key).unlink(missing_ok=True)
                command = [*prefix, *self._program.command_for(self._result(key))]
                spawn = self._launcher.submit(
                    process.spawn_command, with_parent(command), self._env(process.task)
                )
                spawn.result(timeout=_START_SECONDS)
                if self._on_start is not None:
                    self._on_start(process)
        except BaseException:
            self.end()
            raise

    def _env(self, task: Task) -> dict[str, str]:
        plan = self._plan
        cluster = self.cluster_spec.as_dict()
        config = {"cluster": cluster, "task": {"type": task.job, "index": task.index}}
        changes = {**plan.env, settings.TF_CONFIG: json.dumps(config)}
        if plan.keys_directory is not None:
            changes[settings.REPLICAX_KEYS] = str(plan.keys_directory)
        return settings.for_group_task(changes, plan.devices_per_task, len(self.processes))

    def _result(self, key: tuple[str, int]) -> Path:
        return self._plan.directory / f"{key[0]}-{key[1]}.result"

    # Waiting.

    def look(self) -> None:
        """Notes which processes have ended since."""
        with self._lock:
            now = time.monotonic()
            for key, process in self.processes.items():
                if key not in self._ended and process.exit_code is not None:
                    self._ended[key] = now

    @property
    def running(self) -> list[TaskProcess]:
        """The processes that have not ended."""
        self.look()
        return [p for key, p in self.processes.items() if key not in self._ended]

    @property
    def failed_s(self) -> float | None:
        """When the first process was seen to have failed, on the monotonic clock."""
        self.look()
        times = [when for key, when in self._ended.items() if self.processes[key].exit_code]
        return min(times, default=None)

    def wait(self, timeout: float, grace: float | None = None) -> bool:
        """Waits until all processes have ended.

        Args:
          timeout: The most seconds to wait.
          grace: The seconds that the others get to end by themselves when one has failed; then
            they are killed, and so is an evaluator that is left. Without it, they are left alone.

        Returns:
          Whether all have ended in time.
        """
        deadline = time.monotonic() + timeout
        while running := self.running:
            if grace is not None and self._is_over(running, grace):
                self.end()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def _is_over(self, running: Sequence[TaskProcess], grace: float) -> bool:
        """Returns whether a failed group gets no more time; an evaluator would not notice."""
        failed_s = self.failed_s
        if failed_s is None:
            return False
        is_left_alone = all(process.job == "evaluator" for process in running)
        return is_left_alone or time.monotonic() > failed_s + grace

    def outcomes(self) -> list[Outcome]:
        """Returns how each task has ended, in the order of the tasks."""
        self.look()
        return [self._outcome(key) for key in self.processes]

    def first_failure(self) -> Outcome | None:
        """Returns the failure that most likely caused the others; None without."""
        self.look()
        return outcomes.first_cause(self._outcome(key) for key in list(self._ended))

    def _outcome(self, key: tuple[str, int]) -> Outcome:
        process = self.processes[key]
        code = process.exit_code
        value, error = (None, None)
        if code is not None and self._program.is_function:
            value, error = function_results.read_result(self._result(key), process.task)
        log = process.tail(_NUM_LOG_LINES, of_all=False)
        return Outcome(process.task, code, value, error, log, key in self._killed)

    def late(self, timeout: float) -> errors.DeadlineExceededError:
        """Returns the error for tasks that have not ended in time, with their stacks."""
        late = self.running
        if self._program.is_function:
            for process in late:
                process.send(SHOW_STACKS)
            time.sleep(_STACKS_S)
        names = ", ".join(str(process.task) for process in late)
        tails = "\n".join(
            f"{p.task} printed last:\n{p.tail(_NUM_LOG_LINES, of_all=False)}" for p in late
        )
        return errors.DeadlineExceededError(
            f"{self._program.name} did not end within {timeout:g} s on {names}.\n{tails}"
        )

    # Ending.

    def end(self, orderly_s: float = 0.0) -> None:
        """Ends all processes that run. Idempotent.

        Args:
          orderly_s: The seconds between SIGTERM and SIGKILL; 0 kills at once.
        """
        if os.getpid() != self._owner:
            # A fork of the owner.
            return
        running = self.running
        if orderly_s > 0:
            for number in (signal.SIGTERM, signal.SIGCONT):
                for process in running:
                    process.send(number)
            deadline = time.monotonic() + orderly_s
            for process in running:
                process.reap(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for process in self.running:
                self._killed.add((process.job, process.index))
                process.send(signal.SIGKILL)
            deadline = time.monotonic() + _KILLED_SECONDS
            for process in running:
                process.reap(max(0.0, deadline - time.monotonic()))
            self.look()
            for reserved in self._ports:
                reserved.close()
        self._launcher.shutdown(wait=True)
