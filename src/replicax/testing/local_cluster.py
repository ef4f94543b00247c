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
from replicax.foundation.types import Tree
from replicax.launch.program import Program
from replicax.launch.sync_group import tasks_of
from replicax.launch.task_process import TaskProcess
from replicax.testing import launching, lock_step
from replicax.testing.child import Child
from replicax.testing.lock_step import LaunchedProgram
from replicax.testing.namespaces import Namespaces
from replicax.testing.proxy import Proxy


class LocalCluster:
    """Starts the tasks of a cluster as processes on this machine.

    With parameter servers, the tasks serve a coordinator, which is this process::

        with rx.testing.LocalCluster(workers=3, ps=2) as cluster:
            strategy = rx.ParameterServerStrategy(cluster.resolver)
            ...
            cluster.kill("worker", 1)
            cluster.restart("worker", 1)

    Without, every task runs the same program, in lock step with the others::

        with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
            losses = cluster.run(train, args=(directory,))  # One process per worker.

            training = cluster.launch(train, args=(directory,))
            cluster.kill("worker", 1)
            for outcome in training.wait(timeout=60):
                print(outcome.text)

    The processes end with the block, and with this process however it ends. They use CPU devices
    unless `env` sets `JAX_PLATFORMS`, and communicate over sockets in a directory that only this
    user can access, or over TCP with keys that are generated for this cluster.

    A process that stops itself, because it was declared dead (exit code 75) or because of a fatal
    error (SIGABRT), is restarted, as by a cluster manager; one that is killed is not, until
    `restart`.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers; 0 for a cluster that runs programs in lock step.
      protocol: "ipc" or "tcp". JAX itself always uses TCP on the loopback interface.
      timing: "fast" shortens the time after which tasks count as dead, for tests.
      env: Environment variables of the processes, in addition to those of this one.
      devices_per_worker: The CPU devices of each worker, for several replicas on each.
      log_directory: The directory of the logs; by default, they are removed with the cluster.
      snapshots: Whether parameter servers save snapshots, or the directory of the snapshots.
      snapshot_every: The seconds between two snapshots.
      proxied: The jobs whose tasks are behind a `Proxy`, such as ("ps",), which injects faults into
        their connections. It is slower.
      restarts: Whether processes that stop themselves are restarted. The tasks of a lock-step
        program are not: none of them can join the others again.
      seed: The seed of random faults.
      chief: Whether there is a chief beside the workers; only without parameter servers.
      evaluator: Whether there is an evaluator, which is not part of the group; only without
        parameter servers.
      namespaces: Whether each task has a network namespace of its own, as if it were on a host of
        its own, and communicates over TCP; needs the rights of root. Then `cut` and `mend` are for
        programs in lock step, too. Only without parameter servers.

    Raises:
      InvalidArgumentError: The tasks or options do not make a cluster, or a method names a task
        that is not one of it.
      ContextError: It is started twice, or asked for what it has only while it runs.

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
    ...     cluster.run(lambda: rx.MultiWorkerMirroredStrategy().num_replicas_in_sync)
    [2, 2]
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
        chief: bool = False,
        evaluator: bool = False,
        namespaces: bool = False,
    ) -> None:
        if namespaces:
            protocol = "tcp"
        _check(workers, ps, protocol, devices_per_worker)
        _check_more(snapshot_every, proxied)
        _check_sync(ps, snapshots, proxied, chief or evaluator or namespaces)
        self._tasks = tasks_of(workers, chief=chief, evaluator=evaluator)
        extra = dict(env or {})
        if timing is not None:
            extra.setdefault(settings.REPLICAX_TIMING, timing)
        self._plan = launching.Plan(
            {"chief": int(chief), "worker": workers, "evaluator": int(evaluator), "ps": ps},
            protocol,
            extra,
            devices_per_worker,
            Path(log_directory) if log_directory is not None else None,
            snapshots if isinstance(snapshots, bool) else Path(snapshots),
            snapshot_every,
            tuple(proxied),
            restarts,
            seed,
            namespaces,
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
        """The addresses of the tasks, or of their proxies; without servers, of the last run."""
        group = self._group("where its tasks listen")
        if group.sync_group is not None:
            return group.sync_group.cluster_spec
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

    # Programs in lock step.

    def run(
        self,
        program: Program,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        timeout: float = launching.PATIENCE,
        max_restarts: int = 0,
    ) -> list[Tree]:
        """Runs a program once per task, as `launch` does, and returns what the functions return.

        Args:
          program: See `launch`.
          args: See `launch`.
          kwargs: See `launch`.
          timeout: The most seconds that it may take.
          max_restarts: See `launch`.

        Returns:
          One value per task: of the chief, the workers, and the evaluator. None for scripts and
          commands.

        Raises:
          Exception: What a function raised, if it is an error of Python or replicax; any other
            becomes a `ClosureError`. Its notes have the traceback, and the end of the log.
          UnavailableError: A process ended with another exit code than 0.
          DeadlineExceededError: It took longer; with the stacks of the tasks. They are killed.
        """
        return self.launch(program, args, kwargs, max_restarts=max_restarts).values(timeout)

    def launch(
        self,
        program: Program,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        max_restarts: int = 0,
    ) -> LaunchedProgram:
        """Starts a program once per task, in processes whose TF_CONFIG names the task.

        The next program can be started when all processes of this one have ended. Each gets new
        ports.

        Args:
          program: A function, which is pickled, by value if it is the user's own; the path of a
            Python script; or a command, as a list of strings.
          args: The positional arguments of the function, or the command line of the script.
          kwargs: The keyword arguments of the function.
          max_restarts: How often all tasks are restarted, as by a cluster manager, after one was
            lost. Announced preemptions are not counted. An error that the program raises is final.

        Returns:
          The running processes, to be waited for.

        Raises:
          ArgumentTypeError: The function or an argument cannot be pickled.
        """
        group = self._group("a program")
        if not self._plan.is_sync:
            raise errors.ContextError(
                "Programs run in lock step on a cluster without parameter servers",
                f"{self!r} has {self._plan.counts['ps']}",
                "Pass `ps=0`, or use a ClusterCoordinator.",
            )
        prepared = lock_step.prepare(group, self._plan, program, args, kwargs)
        return lock_step.launch(group, self._plan, self._tasks, prepared, max_restarts)

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
        if isinstance(child, Child):
            group.expect_end([(job, index)])
        with group.process_lock:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)
            if not child.reap(timeout):
                child.kill()
        return child.exit_code

    def preempt(self, job: str, index: int) -> None:
        """Announces to a process that it will be preempted (SIGTERM), and does not wait.

        A program with a `PreemptionCheckpointHandler` saves on all workers, and ends.
        """
        self._task(job, index)[1].send(signal.SIGTERM)

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
        if not isinstance(child, Child):
            raise errors.ContextError(
                f"{child} cannot join the others again",
                "it runs a program in lock step with them",
                "Launch the program again, for all tasks.",
            )
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
        assert pid is not None, "processes are started when they are made"
        return pid

    def logs(self, job: str, index: int, lines: int = 100) -> str:
        """Returns the last lines of the log of a task, of all its processes."""
        return self._task(job, index)[1].tail(lines)

    # Connections.

    def proxy(self, job: str, index: int) -> Proxy:
        """Returns the proxy of a task.

        Raises:
          InvalidArgumentError: There is none: `proxied` does not name the job.
          UnsupportedError: The tasks run in lock step.
        """
        group, child = self._task(job, index)
        found = group.proxies.get((job, index))
        if self._plan.is_sync:
            raise errors.UnsupportedError(
                "A proxy can be in front of tasks that serve a coordinator",
                f"{child} runs in lock step, and JAX connects its processes directly",
                "Use `stop`, or `cut` with `namespaces=True`.",
            )
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
            by default. Only with "ipc" and parameter servers.

        Raises:
          UnsupportedError: One caller was named, and the tasks run in lock step.
        """
        network = self._network(job, index)
        if network is None:
            self.proxy(job, index).cut(caller)
        elif caller is None:
            network[0].cut(network[1])
        else:
            raise errors.UnsupportedError(
                "A task that runs in lock step can be cut off from all others",
                f"`caller` is {caller!r}",
                "Leave it out.",
            )

    def mend(self, job: str, index: int) -> None:
        """Ends a `cut` between a task and its peers."""
        network = self._network(job, index)
        if network is None:
            self.proxy(job, index).mend()
        else:
            network[0].mend(network[1])

    def blip(self, job: str, index: int) -> int:
        """Closes all connections to a task once; returns how many there were."""
        return self.proxy(job, index).blip()

    # Internals.

    def _network(self, job: str, index: int) -> tuple[Namespaces, int] | None:
        """Returns the namespaces and the number of that of a task; None without."""
        group, child = self._task(job, index)
        if group.namespaces is None:
            return None
        return group.namespaces, self._tasks.index(child.task)

    def _group(self, asked: str) -> launching.ProcessGroup:
        if self._running is None:
            raise errors.ContextError(
                "The tasks of a local cluster are there while it runs",
                f"{self!r} was asked for {asked}",
                "Use it inside its `with` block.",
            )
        return self._running

    def _task(self, job: str, index: int) -> tuple[launching.ProcessGroup, TaskProcess]:
        group = self._group(f"{job} {index}")
        if self._plan.is_sync:
            child = None
            if group.sync_group is not None:
                child = group.sync_group.processes.get((job, index))
            what = ", ".join(map(str, self._tasks)) if group.sync_group else "launched nothing"
            found = f"it has {what}"
        else:
            child = group.children.get((job, index))
            counts = self._plan.counts
            found = f"it has {counts['worker']} workers and {counts['ps']} ps"
        if child is None:
            raise errors.InvalidArgumentError(
                "A task of the cluster was expected",
                f"{job!r} {index!r} was named and {found}",
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


def _check_sync(
    ps: int,
    snapshots: bool | str | os.PathLike[str],
    proxied: Sequence[str],
    is_for_sync: bool,
) -> None:
    if ps and is_for_sync:
        raise errors.InvalidArgumentError(
            "A cluster with a chief, an evaluator or namespaces runs programs in lock step",
            f"it has {ps} parameter servers",
            "Pass `ps=0`; with parameter servers, this process is the coordinator.",
        )
    if not ps and (snapshots or proxied):
        raise errors.InvalidArgumentError(
            "`snapshots` and `proxied` are for clusters with parameter servers",
            "`ps` is 0",
            "Leave them out.",
        )
