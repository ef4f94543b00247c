"""Starts and stops the processes of a local cluster."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from replicax.foundation import errors, settings
from replicax.launch.group_supervisor import GroupSupervisor
from replicax.launch.sync_group import SyncGroup
from replicax.observe import job_directory, process_facts
from replicax.protocol.tasks import Role
from replicax.testing.child import Child
from replicax.testing.namespaces import Namespaces
from replicax.testing.proxy import Proxy
from replicax.testing.supervisor import Supervisor
from replicax.testing.throttle import Throttles
from replicax.transport import expected_exits, keys

# The path of a Unix socket is limited by the kernel.
_LONGEST_DIRECTORY = 80
# The time to shut down, and then to exit after SIGKILL.
_ORDERLY_SECONDS = 3.0
_KILLED_SECONDS = 10.0
_START_SECONDS = 30.0
# Seconds between two checks of starting processes.
_LOOK_S = 0.01
# Seconds until all processes must listen. Processes that die before are reported at once, so this
# only limits hangs: two cores need a minute to start ten processes that import JAX.
PATIENCE = 180.0

# Numbers the clusters of this process.
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The configuration of a local cluster; see `LocalCluster`."""

    counts: Mapping[str, int]
    protocol: str
    env: Mapping[str, str]
    devices_per_worker: int
    log_directory: Path | None
    snapshots: bool | Path
    snapshot_every: float
    proxied: tuple[str, ...]
    restarts: bool
    seed: int
    namespaces: bool = False

    @property
    def is_sync(self) -> bool:
        """Whether the tasks form sync groups: there is no parameter server."""
        return not self.counts["ps"]


class ProcessGroup:
    """The running processes of a cluster, with their proxies, throttles and supervisor.

    Attributes:
      directory: The directory of sockets, keys and logs.
      job_directory: The directory in which the tasks can be observed.
      children: The processes, by job and index.
      proxies: The proxies in front of them.
      throttles: The throttled processes.
      keys_directory: The keys, with "tcp".
      namespaces: The network namespaces of the tasks, if they have any.
      snapshots_directory: The directory of the servers' snapshots; None if there are none.
      sync_group: The last run of a program by a sync group.
      group_supervisor: What restarts it, if anything does.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._owner = os.getpid()
        self.directory = _short_directory()
        number = next(_numbers)
        self.job_directory = job_directory.of_process(
            process_facts.program() if number == 1 else f"{process_facts.program()}-{number}"
        )
        self.children: dict[tuple[str, int], Child] = {}
        self.proxies: dict[tuple[str, int], Proxy] = {}
        self.throttles = Throttles()
        self.keys_directory: Path | None = None
        self.namespaces: Namespaces | None = None
        self.snapshots_directory: Path | None = None
        self.sync_group: SyncGroup | None = None
        self.group_supervisor: GroupSupervisor | None = None
        self._supervisor: Supervisor | None = None
        # The kernel kills a child when the thread that started it exits. This thread exists as long
        # as the cluster.
        self._launcher = concurrent.futures.ThreadPoolExecutor(1, "replicax-local-cluster")
        # Serializes starting and stopping by the caller and the supervisor.
        self.process_lock = threading.RLock()

    @property
    def logs(self) -> Path:
        """The directory of the logs."""
        return self._plan.log_directory or self.directory

    @property
    def env(self) -> dict[str, str]:
        """The environment variables of the tasks, in addition to those of this process."""
        return {settings.REPLICAX_JOB_DIR: str(self.job_directory), **self._plan.env}

    # Starting.

    def start(self, timeout: float) -> None:
        """Starts everything, and waits until all processes listen."""
        plan = self._plan
        if plan.protocol == "tcp":
            # A group numbers its chief and its workers together: they share a certificate.
            counts: dict[Role, int] = {} if plan.is_sync else {"ps": plan.counts["ps"]}
            if not plan.is_sync:
                counts["worker"] = plan.counts["worker"]
            self.keys_directory = keys.make(self.directory / "keys", counts=counts)
        if plan.namespaces:
            self.namespaces = Namespaces(sum(plan.counts.values()))
        if plan.snapshots:
            given = plan.snapshots
            self.snapshots_directory = (
                given if isinstance(given, Path) else self.directory / "snapshots"
            )
            self.snapshots_directory.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        # The programs of a sync group start their own processes.
        if not plan.is_sync:
            self._start_serving(timeout)

    def _start_serving(self, timeout: float) -> None:
        plan = self._plan
        for job, count in plan.counts.items():
            for index in range(count):
                child = Child(job, index, self.logs / f"{job}-{index}.log")
                is_tcp = plan.protocol == "tcp"
                where = f"ipc://{self.directory}/{job[0]}{index}"
                child.address = "127.0.0.1:0" if is_tcp else where
                self.children[job, index] = child
        for child in self.children.values():
            self.spawn(child)
        wait_until_ready(self.children.values(), timeout)
        for key in self.children:
            # Another cluster may have used a port before.
            expected_exits.forget(self._addresses(key))
        for number, (key, child) in enumerate(self.children.items()):
            if key[0] in plan.proxied:
                is_tcp = plan.protocol == "tcp"
                where = "127.0.0.1:0" if is_tcp else f"{child.address}-proxy"
                self.proxies[key] = Proxy(where, child.address, plan.seed * 1009 + number)
        for key in self.children:
            job_directory.assign(self._addresses(key), self.job_directory)
        if plan.restarts:
            self._supervisor = Supervisor(self.children.values(), self._start_again)

    def spawn(self, child: Child) -> None:
        """Starts a process, which must not be running."""
        plan = self._plan
        options = ["--protocol", plan.protocol]
        if self.keys_directory is not None:
            options += ["--keys", str(self.keys_directory)]
        if child.job == "worker" and plan.devices_per_worker > 1:
            options += ["--cpu-devices", str(plan.devices_per_worker)]
        if child.job == "ps" and self.snapshots_directory is not None:
            options += ["--snapshots", str(self.snapshots_directory)]
            options += ["--snapshot-every", f"{plan.snapshot_every:g}"]
        cluster: dict[str, list[str]] = {}
        for (job, _), other in self.children.items():
            # Its own address; peers get the address of its proxy.
            cluster.setdefault(job, []).append(other.address)
        config = {"cluster": cluster, "task": {"type": child.job, "index": child.index}}
        changes = {**self.env, settings.TF_CONFIG: json.dumps(config)}
        is_shared = plan.devices_per_worker == 1
        num_threads = _num_threads(child.job, plan.counts["worker"]) if is_shared else None
        env = settings.for_task(changes, num_threads)
        expected_exits.forget(self._addresses((child.job, child.index)))
        with self.process_lock:
            self._launcher.submit(child.spawn, options, env).result(timeout=_START_SECONDS)

    def end_sync_group(self) -> None:
        """Ends the processes of a program, without another restart. Idempotent."""
        if self.group_supervisor is not None:
            self.group_supervisor.close()
        if self.sync_group is not None:
            self.sync_group.end()

    def expect_end(self, tasks: Iterable[tuple[str, int]]) -> None:
        """Announces to coordinators in this process that tasks are stopped on purpose."""
        for key in tasks:
            expected_exits.expect(self._addresses(key))

    def _addresses(self, key: tuple[str, int]) -> list[str]:
        """Returns the address of a task, and that of its proxy."""
        proxy = self.proxies.get(key)
        return [self.children[key].address, *([] if proxy is None else [proxy.address])]

    def _start_again(self, child: Child, pid: int) -> None:
        with self.process_lock:
            if child.pid == pid:
                self.spawn(child)

    # Stopping.

    def end(self) -> None:
        """Stops all processes, and removes the directory."""
        if os.getpid() != self._owner:
            # A fork of the owner.
            return
        self.end_sync_group()
        self.expect_end(self.children)
        if self._supervisor is not None:
            self._supervisor.end()
        self.throttles.end()
        for proxy in self.proxies.values():
            proxy.close()
        children = list(self.children.values())
        for number in (signal.SIGTERM, signal.SIGCONT):
            for child in children:
                child.send(number)
        deadline = time.monotonic() + _ORDERLY_SECONDS
        for child in children:
            child.reap(max(0.0, deadline - time.monotonic()))
        for child in children:
            child.send(signal.SIGKILL)
        deadline = time.monotonic() + _KILLED_SECONDS
        for child in children:
            child.kill(max(0.0, deadline - time.monotonic()))
        self._launcher.shutdown(wait=True)
        if self.namespaces is not None:
            self.namespaces.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        job_directory.forget(self.job_directory)
        job_directory.remove_left_over(self.job_directory)


def wait_until_ready(children: Iterable[Child], timeout: float) -> None:
    """Waits until every process that was started listens.

    Raises:
      UnavailableError: If one ends before; with the last lines that it printed.
      DeadlineExceededError: If one does not listen in time.
    """
    deadline = time.monotonic() + timeout
    # Polled, because other threads may stop and start processes.
    while waiting := [child for child in children if child.is_starting]:
        for child in waiting:
            if not child.hear():
                raise _died(child)
        still = [child for child in waiting if child.is_starting]
        if still and time.monotonic() >= deadline:
            raise late(still, timeout)
        time.sleep(_LOOK_S)


def _num_threads(job: str, num_workers: int) -> int:
    """Returns a number of threads with which the tasks of one machine do not spin."""
    return max(1, (os.cpu_count() or 1) // num_workers) if job == "worker" else 1


def _short_directory() -> Path:
    """Creates a directory with a short path that only this user can access."""
    made = Path(tempfile.mkdtemp(prefix="rx-"))
    if len(os.fsencode(made)) <= _LONGEST_DIRECTORY:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix="rx-", dir="/tmp"))


def _died(child: Child) -> errors.UnavailableError:
    child.reap(5.0)
    return errors.UnavailableError(
        "Every task of a local cluster must start",
        f"{child} ended with exit code {child.exit_code}",
        f"It printed last:\n{child.tail(20)}",
    )


def late(children: Sequence[Child], timeout: float) -> errors.DeadlineExceededError:
    """Returns the error for processes that do not listen in time."""
    names = ", ".join(map(str, children))
    return errors.DeadlineExceededError(
        f"Every task of a local cluster must listen within {timeout:g} s",
        f"{names} did not",
        f"{children[0]} printed last:\n{children[0].tail(20)}",
    )
