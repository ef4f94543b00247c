"""A cluster of real processes on this machine, and the ways to harm it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import selectors
import shutil
import signal
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.foundation import errors
from replicax.testing.child import Child
from replicax.transport import keys

# The name of a socket in a directory has to fit into what the kernel keeps for it.
_LONGEST_DIRECTORY = 80
# Ending: the time to end in order, and then to be gone after SIGKILL.
_ORDERLY_SECONDS = 3.0
_KILLED_SECONDS = 2.0


class LocalCluster:
    """Starts workers and parameter servers as processes of this machine.

        with rx.testing.LocalCluster(workers=3, ps=2) as cluster:
            strategy = rx.ParameterServerStrategy(cluster.resolver)
            ...
            cluster.kill("worker", 1)
            cluster.restart("worker", 1)

    The processes end with the block, and with this process however it ends. They compute on
    CPU devices unless `env` says otherwise (`JAX_PLATFORMS`), and use sockets in a directory
    that only this user can enter, or TCP on this machine with keys made for this cluster.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers.
      protocol: "ipc" or "tcp".
      timing: "fast" shortens the time after which tasks count as dead, for tests.
      env: Environment variables of the processes, beside those of this one.
      devices_per_worker: The CPU devices of each worker, for several replicas on each.
      log_directory: Where the output of the processes is kept; else it goes with the cluster.
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
    ) -> None:
        _check(workers, ps, protocol, devices_per_worker)
        self._counts = {"worker": workers, "ps": ps}
        self._protocol = protocol
        self._extra_env = dict(env or {})
        if timing is not None:
            self._extra_env.setdefault("REPLICAX_TIMING", timing)
        self._devices_per_worker = devices_per_worker
        self._log_directory = Path(log_directory) if log_directory is not None else None
        self._children: dict[tuple[str, int], Child] = {}
        self._directory: Path | None = None
        self._keys_directory: Path | None = None
        self._launcher: concurrent.futures.ThreadPoolExecutor | None = None
        self._end: weakref.finalize[..., Any] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tasks = ", ".join(f"{count} {job}" for job, count in self._counts.items() if count)
        state = "running" if self._end is not None else "not running"
        return f"LocalCluster({tasks}, {self._protocol}, {state})"

    def start(self, timeout: float = 60.0) -> None:
        """Starts every process and waits until all of them listen."""
        if self._end is not None:
            raise errors.ContextError(
                errors.message(
                    "A local cluster is started once",
                    f"{self!r} is running",
                    "Use it, or close it first.",
                )
            )
        directory = _short_directory()
        self._directory = directory
        # The kernel ends a child when the thread that started it ends. This one lives as
        # long as the cluster, whichever thread the caller is in.
        self._launcher = concurrent.futures.ThreadPoolExecutor(1, "replicax-local-cluster")
        self._end = weakref.finalize(
            self, _end, os.getpid(), self._children, self._launcher, directory
        )
        try:
            if self._protocol == "tcp":
                self._keys_directory = directory / "keys"
                keys.make(self._keys_directory)
            self._make_children(directory)
            for child in self._children.values():
                self._spawn(child)
            self.wait_until_ready(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends every process and removes what the cluster wrote; again is harmless."""
        if self._end is not None:
            self._end()
            self._end = None
        self._children.clear()
        self._launcher = self._directory = self._keys_directory = None

    @property
    def cluster_spec(self) -> ClusterSpec:
        """Where the tasks listen."""
        jobs = ("worker", "ps")
        addresses = {
            job: [self._child(job, i).address for i in range(self._counts[job])] for job in jobs
        }
        return ClusterSpec({job: found for job, found in addresses.items() if found})

    @property
    def resolver(self) -> SimpleClusterResolver:
        """Says to this process that it is the coordinator of the cluster."""
        layer = "tcp" if self._protocol == "tcp" else None
        return SimpleClusterResolver(
            self.cluster_spec, task_type="chief", task_id=0, rpc_layer=layer
        )

    @property
    def directory(self) -> Path:
        """Where the cluster keeps sockets, keys and logs; it goes when the cluster ends."""
        if self._directory is None:
            raise self._not_running("its directory")
        return self._directory

    @property
    def keys_directory(self) -> Path | None:
        """The keys of the cluster, with "tcp"."""
        return self._keys_directory

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Waits until every process that was started listens.

        Raises:
          UnavailableError: If one ends before; with the last lines that it printed.
          DeadlineExceededError: If one does not listen in time.
        """
        deadline = time.monotonic() + timeout
        waiting = {c.pipe: c for c in self._children.values() if c.pipe is not None}
        with selectors.DefaultSelector() as selector:
            for pipe in waiting:
                selector.register(pipe, selectors.EVENT_READ)
            while waiting:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise _late(list(waiting.values()), timeout)
                for key, _ in ready:
                    pipe = key.fd
                    child = waiting[pipe]
                    is_ready = child.hear()
                    if child.pipe is not None:
                        continue
                    selector.unregister(pipe)
                    del waiting[pipe]
                    if not is_ready:
                        raise _died(child)

    def kill(self, job: str, index: int) -> None:
        """Ends a process at once (SIGKILL)."""
        self._child(job, index).kill()

    def stop(self, job: str, index: int) -> None:
        """Freezes a process (SIGSTOP): it keeps its sockets and says nothing."""
        self._child(job, index).send(signal.SIGSTOP)

    def cont(self, job: str, index: int) -> None:
        """Lets a frozen process go on (SIGCONT)."""
        self._child(job, index).send(signal.SIGCONT)

    def terminate(self, job: str, index: int, timeout: float = 10.0) -> int | None:
        """Asks a process to end (SIGTERM), waits, and returns its exit code.

        One that has not ended in time is killed.
        """
        child = self._child(job, index)
        child.send(signal.SIGTERM)
        child.send(signal.SIGCONT)
        if not child.reap(timeout):
            child.kill()
        child.close_pipe()
        return child.exit_code

    def restart(self, job: str, index: int, *, wait: bool = True, timeout: float = 60.0) -> None:
        """Starts a process again at the same address; kills it first if it is alive."""
        child = self._child(job, index)
        child.kill()
        self._spawn(child)
        if wait:
            self.wait_until_ready(timeout)

    def alive(self, job: str, index: int) -> bool:
        """Whether a process is there; a frozen one is."""
        return self._child(job, index).is_alive

    def pid(self, job: str, index: int) -> int:
        """The id of the process that plays a task, or that played it last."""
        pid = self._child(job, index).pid
        assert pid is not None, "children are started when they are made"
        return pid

    def logs(self, job: str, index: int, lines: int = 100) -> str:
        """The last lines that a task printed, of all its processes."""
        return self._child(job, index).tail(lines)

    def _make_children(self, directory: Path) -> None:
        logs = self._log_directory or directory
        logs.mkdir(parents=True, exist_ok=True)
        for job, count in self._counts.items():
            for index in range(count):
                child = Child(job, index, logs / f"{job}-{index}.log")
                child.address = (
                    "127.0.0.1:0"
                    if self._protocol == "tcp"
                    else f"ipc://{directory}/{job[0]}{index}"
                )
                self._children[job, index] = child

    def _spawn(self, child: Child) -> None:
        assert self._launcher is not None
        options = ["--protocol", self._protocol]
        if self._keys_directory is not None:
            options += ["--keys", str(self._keys_directory)]
        if child.job == "worker" and self._devices_per_worker > 1:
            options += ["--cpu-devices", str(self._devices_per_worker)]
        config = {
            "cluster": self.cluster_spec.as_dict(),
            "task": {"type": child.job, "index": child.index},
        }
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
        # Counts the threads that this process needs for its own devices.
        env.pop("NPROC", None)
        if self._devices_per_worker == 1:
            env |= _share_of_machine(child.job, self._counts["worker"])
        env |= {**self._extra_env, "TF_CONFIG": json.dumps(config)}
        self._launcher.submit(child.spawn, options, env).result(timeout=30.0)

    def _child(self, job: str, index: int) -> Child:
        if self._end is None:
            raise self._not_running(f"{job} {index}")
        child = self._children.get((job, index))
        if child is None:
            raise errors.InvalidArgumentError(
                errors.message(
                    "A task of the cluster was expected",
                    f"{job!r} {index!r} was named and it has {self._counts['worker']} workers "
                    f"and {self._counts['ps']} ps",
                    'Name one of them, such as ("worker", 0).',
                )
            )
        return child

    def _not_running(self, asked: str) -> errors.ContextError:
        return errors.ContextError(
            errors.message(
                "The tasks of a local cluster are there while it runs",
                f"{self!r} was asked for {asked}",
                "Use it inside its `with` block.",
            )
        )


def _share_of_machine(job: str, num_workers: int) -> dict[str, str]:
    """Keeps tasks of one machine from waiting, awake, for cores that others compute on."""
    num_threads = max(1, (os.cpu_count() or 1) // num_workers) if job == "worker" else 1
    if num_threads > 1:
        return {"NPROC": str(num_threads)}
    flags = os.environ.get("XLA_FLAGS", "")
    return {"NPROC": "1", "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen=false".strip()}


def _end(
    owner: int,
    children: dict[tuple[str, int], Child],
    launcher: concurrent.futures.ThreadPoolExecutor,
    directory: Path,
) -> None:
    """Ends all processes, together, and removes the directory."""
    if os.getpid() != owner:
        # A fork of the owner: the cluster is not its own.
        return
    for number in (signal.SIGTERM, signal.SIGCONT):
        for child in children.values():
            child.send(number)
    deadline = time.monotonic() + _ORDERLY_SECONDS
    for child in children.values():
        child.reap(max(0.0, deadline - time.monotonic()))
    for child in children.values():
        child.send(signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_SECONDS
    for child in children.values():
        child.kill(max(0.0, deadline - time.monotonic()))
    launcher.shutdown(wait=True)
    shutil.rmtree(directory, ignore_errors=True)


def _short_directory() -> Path:
    """A new directory that only this user can enter, with a short name."""
    made = Path(tempfile.mkdtemp(prefix="rx-"))
    if len(os.fsencode(made)) <= _LONGEST_DIRECTORY:
        return made
    made.rmdir()
    return Path(tempfile.mkdtemp(prefix="rx-", dir="/tmp"))


def _check(workers: int, ps: int, protocol: str, devices_per_worker: int) -> None:
    for name, value, least in (
        ("workers", workers, 0),
        ("ps", ps, 0),
        ("devices_per_worker", devices_per_worker, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise errors.InvalidArgumentError(
                errors.message(
                    f"{name} must be a whole number of at least {least}",
                    f"it is {value!r}",
                    "Pass an int.",
                )
            )
    if workers + ps == 0:
        raise errors.InvalidArgumentError(
            errors.message(
                "A cluster has at least one task",
                "workers and ps are both 0",
                "Ask for a worker or a parameter server.",
            )
        )
    if protocol not in ("ipc", "tcp"):
        raise errors.InvalidArgumentError(
            errors.message(
                'protocol must be "ipc" or "tcp"', f"it is {protocol!r}", "Choose one of them."
            )
        )


def _died(child: Child) -> errors.UnavailableError:
    child.reap(5.0)
    return errors.UnavailableError(
        errors.message(
            "Every task of a local cluster must start",
            f"{child} ended with exit code {child.exit_code}",
            f"It printed last:\n{child.tail(20)}",
        )
    )


def _late(children: list[Child], timeout: float) -> errors.DeadlineExceededError:
    names = ", ".join(map(str, children))
    return errors.DeadlineExceededError(
        errors.message(
            f"Every task of a local cluster must listen within {timeout:g} s",
            f"{names} did not",
            f"{children[0]} printed last:\n{children[0].tail(20)}",
        )
    )
