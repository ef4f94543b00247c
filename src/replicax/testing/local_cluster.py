"""A cluster of real processes on this machine, with fault injection."""

from __future__ import annotations

import os
import shutil
import signal
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.foundation import errors, settings
from replicax.testing import launching
from replicax.testing.child import Child
from replicax.testing.proxy import Proxy


class LocalCluster:
    """Starts workers and parameter servers as processes on this machine.

        with rx.testing.LocalCluster(workers=3, ps=2) as cluster:
            strategy = rx.ParameterServerStrategy(cluster.resolver)
            ...
            cluster.kill("worker", 1)
            cluster.restart("worker", 1)

    The processes end with the block, and with this process however it ends. They use CPU devices
    unless `env` sets `JAX_PLATFORMS`, and communicate over sockets in a directory that only this
    user can access, or over TCP with keys that are generated for this cluster.

    A process that stops itself, because it was declared dead (exit code 75) or because of a fatal
    error (SIGABRT), is restarted, as by a cluster manager; one that is killed is not, until
    `restart`.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers.
      protocol: "ipc" or "tcp".
      timing: "fast" shortens the time after which tasks count as dead, for tests.
      env: Environment variables of the processes, in addition to those of this one.
      devices_per_worker: The CPU devices of each worker, for several replicas on each.
      log_directory: The directory of the logs; by default, they are removed with the cluster.
      snapshots: Whether parameter servers save snapshots, or the directory of the snapshots.
      snapshot_every: The seconds between two snapshots.
      proxied: The jobs whose tasks are behind a `Proxy`, such as ("ps",), which injects faults into
        their connections. It is slower.
      restarts: Whether processes that stop themselves are restarted.
      seed: The seed of random faults.
    """

    def __init__(
        self,
        workers: int = 2,
        ps: int = 1,
        *,
        protocol: Literal["ipc", "tcp"] = "ipc",
        timing: str | None = None,
        env: Mapping[str, str] | None = None,
        devices_per_worker: int = 1,
        log_directory: str | os.PathLike[str] | None = None,
        snapshots: bool | str | os.PathLike[str] = False,
        snapshot_every: float = 1.0,
        proxied: Sequence[str] = (),
        restarts: bool = True,
        seed: int = 0,
    ) -> None:
        _check(workers, ps, protocol, devices_per_worker)
        _check_more(snapshot_every, proxied)
        extra = dict(env or {})
        if timing is not None:
            extra.setdefault(settings.REPLICAX_TIMING, timing)
        self._plan = launching.Plan(
            {"worker": workers, "ps": ps},
            protocol,
            extra,
            devices_per_worker,
            Path(log_directory) if log_directory is not None else None,
            snapshots if isinstance(snapshots, bool) else Path(snapshots),
            snapshot_every,
            tuple(proxied),
            restarts,
            seed,
        )
        self._running: launching.ProcessGroup | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tasks = ", ".join(f"{count} {job}" for job, count in self._plan.counts.items() if count)
        state = "running" if self._running is not None else "not running"
        return f"LocalCluster({tasks}, {self._plan.protocol}, {state})"

    def start(self, timeout: float = launching.PATIENCE) -> None:
        """Starts every process and waits until all of them listen."""
        if self._running is not None:
            raise errors.ContextError(
                "A local cluster is started once",
                f"{self!r} is running",
                "Use it, or close it first.",
            )
        self._running = group = launching.ProcessGroup(self._plan)
        self._end = weakref.finalize(self, group.end)
        try:
            group.start(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops all processes, and removes the files of the cluster. Idempotent."""
        if self._end is not None:
            self._end()
        self._running = self._end = None

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the tasks, or of their proxies."""
        group = self._group("where its tasks listen")
        found: dict[str, list[str]] = {}
        for key, child in group.children.items():
            proxy = group.proxies.get(key)
            found.setdefault(key[0], []).append(child.address if proxy is None else proxy.address)
        return ClusterSpec(found)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """Configures this process as the coordinator of the cluster."""
        layer = "tcp" if self._plan.protocol == "tcp" else None
        return SimpleClusterResolver(
            self.cluster_spec, task_type="chief", task_id=0, rpc_layer=layer
        )

    @property
    def directory(self) -> Path:
        """The directory of sockets, keys and logs, which is removed with the cluster."""
        return self._group("its directory").directory

    @property
    def keys_directory(self) -> Path | None:
        """The keys of the cluster, with "tcp"."""
        return self._running.keys_directory if self._running is not None else None

    @property
    def snapshots_directory(self) -> Path | None:
        """The directory of the servers' snapshots, with one directory `ps-<index>` each."""
        return self._group("its snapshots").snapshots_directory

    def wait_until_ready(self, timeout: float = launching.PATIENCE) -> None:
        """Waits until every process that was started listens.

        Raises:
          UnavailableError: If one ends before; with the last lines that it printed.
          DeadlineExceededError: If one does not listen in time.
        """
        launching.wait_until_ready(self._group("its tasks").children.values(), timeout)

    # Processes.

    def kill(self, job: str, index: int) -> None:
        """Kills a process (SIGKILL)."""
        group, child = self._task(job, index)
        group.throttles.set(child, 1)
        with group.process_lock:
            child.kill()

    def stop(self, job: str, index: int) -> None:
        """Freezes a process (SIGSTOP): its sockets stay open."""
        group, child = self._task(job, index)
        group.throttles.set(child, 1)
        child.freeze()

    def cont(self, job: str, index: int) -> None:
        """Continues a frozen or throttled process (SIGCONT)."""
        group, child = self._task(job, index)
        group.throttles.set(child, 1)
        child.send(signal.SIGCONT)

    def slow(self, job: str, index: int, throttle: float) -> None:
        """Throttles a process: it is stopped and continued in turn.

        Args:
          job: Its job.
          index: Its index.
          throttle: The share of the time that it runs; 0.1 is ten times slower, 1 is full speed.
        """
        group, child = self._task(job, index)
        group.throttles.set(child, throttle)

    def terminate(self, job: str, index: int, timeout: float = 10.0) -> int | None:
        """Terminates a process (SIGTERM), waits, and returns its exit code.

        One that has not ended in time is killed.
        """
        group, child = self._task(job, index)
        group.throttles.set(child, 1)
        group.expect_end([(job, index)])
        with group.process_lock:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)
            if not child.reap(timeout):
                child.kill()
            child.close_pipe()
        return child.exit_code

    def restart(
        self,
        job: str,
        index: int,
        *,
        wait: bool = True,
        timeout: float = launching.PATIENCE,
        empty: bool = False,
    ) -> None:
        """Restarts a process at the same address; kills it first if it is running.

        Any thread may call it. Of several that restart one task, each waits for the one before.

        Args:
          job: Its job.
          index: Its index.
          wait: Whether to wait until it listens.
          timeout: How long.
          empty: Whether a parameter server loses its snapshots before.

        Raises:
          UnavailableError: If a process ends before it listens; with the last lines of its log.
          DeadlineExceededError: If it does not listen in time.
        """
        group, child = self._task(job, index)
        deadline = time.monotonic() + timeout
        if not child.restarting.acquire(timeout=timeout):
            raise launching.late([child], timeout)
        try:
            group.throttles.set(child, 1)
            with group.process_lock:
                child.kill()
                if empty and group.snapshots_directory is not None:
                    shutil.rmtree(group.snapshots_directory / f"{job}-{index}", ignore_errors=True)
                group.spawn(child)
            if wait:
                self.wait_until_ready(max(deadline - time.monotonic(), 0.0))
        finally:
            child.restarting.release()

    def alive(self, job: str, index: int) -> bool:
        """Returns whether a process runs or is frozen."""
        return self._task(job, index)[1].is_alive

    def pid(self, job: str, index: int) -> int:
        """Returns the id of the current or last process of a task."""
        pid = self._task(job, index)[1].pid
        assert pid is not None, "children are started when they are made"
        return pid

    def logs(self, job: str, index: int, lines: int = 100) -> str:
        """Returns the last lines of the log of a task, of all its processes."""
        return self._task(job, index)[1].tail(lines)

    # Connections.

    def proxy(self, job: str, index: int) -> Proxy:
        """Returns the proxy of a task.

        Raises:
          InvalidArgumentError: There is none: `proxied` does not name the job.
        """
        group, child = self._task(job, index)
        found = group.proxies.get((job, index))
        if found is None:
            raise errors.InvalidArgumentError(
                f"{child} must be called through a proxy",
                f"`proxied` is {self._plan.proxied!r}",
                f"Pass `proxied=({job!r},)` to LocalCluster.",
            )
        return found

    def cut(self, job: str, index: int, caller: tuple[str, int] | None = None) -> None:
        """Holds back all messages between a task and its peers silently.

        Args:
          job: Its job.
          index: Its index.
          caller: Who is cut off from it, such as ("worker", 1) or ("coordinator", 0); everybody
            by default. Only with "ipc".
        """
        self.proxy(job, index).cut(caller)

    def mend(self, job: str, index: int) -> None:
        """Ends a `cut` between a task and its peers."""
        self.proxy(job, index).mend()

    def blip(self, job: str, index: int) -> int:
        """Closes all connections to a task once; returns how many there were."""
        return self.proxy(job, index).blip()

    # Internals.

    def _group(self, asked: str) -> launching.ProcessGroup:
        if self._running is None:
            raise errors.ContextError(
                "The tasks of a local cluster are there while it runs",
                f"{self!r} was asked for {asked}",
                "Use it inside its `with` block.",
            )
        return self._running

    def _task(self, job: str, index: int) -> tuple[launching.ProcessGroup, Child]:
        group = self._group(f"{job} {index}")
        child = group.children.get((job, index))
        if child is None:
            counts = self._plan.counts
            raise errors.InvalidArgumentError(
                "A task of the cluster was expected",
                f"{job!r} {index!r} was named and it has {counts['worker']} workers "
                f"and {counts['ps']} ps",
                'Name one of them, such as ("worker", 0).',
            )
        return group, child


def _check(workers: int, ps: int, protocol: str, devices_per_worker: int) -> None:
    for name, value, least in (
        ("workers", workers, 0),
        ("ps", ps, 0),
        ("devices_per_worker", devices_per_worker, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise errors.InvalidArgumentError(
                f"{name} must be a whole number of at least {least}",
                f"it is {value!r}",
                "Pass an int.",
            )
    if workers + ps == 0:
        raise errors.InvalidArgumentError(
            "A cluster has at least one task",
            "workers and ps are both 0",
            "Ask for a worker or a parameter server.",
        )
    if protocol not in ("ipc", "tcp"):
        raise errors.InvalidArgumentError(
            'protocol must be "ipc" or "tcp"', f"it is {protocol!r}", "Choose one of them."
        )


def _check_more(snapshot_every: float, proxied: Sequence[str]) -> None:
    if not snapshot_every > 0:
        raise errors.InvalidArgumentError(
            "`snapshot_every` must be positive", f"it is {snapshot_every!r}", "Pass seconds."
        )
    if isinstance(proxied, str) or not set(proxied) <= {"ps", "worker"}:
        raise errors.InvalidArgumentError(
            '`proxied` must be a sequence of jobs, of "ps" and "worker"',
            f"it is {proxied!r}",
            'Pass ("ps",).',
        )
