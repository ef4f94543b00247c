"""Server: one task of a cluster, in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

from replicax.cluster import address as addresses
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.process import roles
from replicax.protocol.tasks import Task
from replicax.ps.process.snapshots import DEFAULT_EVERY_S
from replicax.transport.keys import Keys

# A worker computes in the thread that calls `join`. If none does in this time, in its own.
_WAIT_FOR_JOIN_SECONDS = 1.0
_STOP_SECONDS = 5.0
_EMPTY = "the cluster has no job"
_DEF_KEYS = {"cluster", "job_name", "task_index", "protocol"}


class Server:
    """Serves one task of a cluster: a parameter server or a worker.

    It serves from `start()`, or from the beginning, until `stop()`. A task that is neither,
    such as "chief", serves nothing; its `join()` waits like that of the others, so that one
    program can play every role.

    >>> with Server({"chief": ["localhost:0"]}) as server:
    ...     server.target
    'localhost:0'

    Args:
      server_or_cluster_def: The cluster: a `ClusterSpec`, the dict that it is made from, or
        the `server_def` of another server.
      job_name: The job of the task; may be left out if the cluster has one job.
      task_index: Its index; may be left out if the job has one task.
      protocol: "ipc" and "tcp" choose between a socket in a private directory and TCP. Else,
        also with "grpc", tasks on this machine use the first, and others the second.
      config: Taken for compatibility; there is nothing to configure.
      start: Whether to start at once.
      keys: A directory made by `replicax keys make`; without, the one that the environment
        variable `REPLICAX_KEYS` names. TCP needs keys.
      snapshots: For a parameter server, a directory: it saves what it holds there, in a
        directory of its own, and starts from there. Without, a server that ends takes its
        variables with it.
      snapshot_every: The seconds between two snapshots, if there is anything new.
      on_ending: Called when a worker ends itself, with the reason; see `ending`. A function
        that it runs may never come to an end: whoever owns the process can end it then.

    Raises:
      InvalidArgumentError: If the cluster has no such task.
      AddressInUseError: If another task listens at its address.
      PermissionDeniedError: If its address needs keys and there are none.
      CheckpointError: If another process keeps its snapshots there, or they cannot be written.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        keys: str | os.PathLike[str] | Keys | None = None,
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_every: float = DEFAULT_EVERY_S,
        on_ending: Callable[[str], None] | None = None,
    ) -> None:
        del config
        given = _as_def(server_or_cluster_def)
        self._cluster = ClusterSpec(given["cluster"])
        self._name = _task_name(
            self._cluster,
            given.get("job_name") if job_name is None else job_name,
            given.get("task_index") if task_index is None else task_index,
        )
        self._protocol: str | None = given.get("protocol") if protocol is None else protocol
        self._keys = keys
        roles.require_snapshots_fit(self._name, snapshots, snapshot_every)
        self._snapshots = snapshots
        self._snapshot_every = snapshot_every
        self._on_ending = on_ending
        self._task: roles.RunningTask | None = None
        self._standby: threading.Thread | None = None
        # Protects the life of the task; not held while anything waits.
        self._lock = threading.Lock()
        self._is_taken = False
        self._runner: threading.Thread | None = None
        # Set while no thread is inside the task's `run_forever`.
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._stopping = threading.Event()
        if start:
            self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Server({self._name}, {self.target!r})"

    @staticmethod
    def create_local_server(config: Any = None, start: bool = True) -> Server:
        """Makes a worker that is a cluster of its own, at an address of its choice."""
        return Server({"worker": ["localhost:0"]}, config=config, start=start)

    @property
    def address(self) -> str:
        """Where the task listens; with port 0, known once it is started."""
        task = self._task
        found = task.address if task is not None else ""
        return found or self._cluster.task_address(self._name.job, self._name.index)

    @property
    def target(self) -> str:
        """The address, behind the name of the protocol if one was given: `tcp://host:2222`."""
        return addresses.with_layer(self.address, self._protocol)

    @property
    def ending(self) -> str | None:
        """Why the task has ended itself, for example "the lease of job 'x' ran out".

        None while it serves, or if it was stopped. A process whose task ends itself is of no
        more use; whatever started it may start another.
        """
        task = self._task
        return None if task is None else task.ending

    @property
    def server_def(self) -> dict[str, Any]:
        """The cluster and the task, as plain values that `Server` accepts."""
        return {
            "cluster": self._cluster.as_dict(),
            "job_name": self._name.job,
            "task_index": self._name.index,
            "protocol": self._protocol or "grpc",
        }

    def start(self) -> None:
        """Begins to serve; does nothing if the server does so already."""
        with self._lock:
            if self._stopping.is_set():
                raise errors.ContextError(
                    "A server serves once",
                    f"that of {self._name} was stopped",
                    "Make a new one.",
                )
            if self._task is not None:
                return
            where = self._cluster.task_address(self._name.job, self._name.index)
            try:
                task = roles.make_task(
                    self._name,
                    where,
                    self._protocol,
                    self._keys,
                    self._snapshots,
                    self._snapshot_every,
                    self._on_ending,
                )
            except errors.AddressInUseError as error:
                raise errors.AddressInUseError(f"{self._name}: {error}") from error
            task.start()
            self._task = task
            self._standby = threading.Thread(
                target=self._run_unless_joined, name="replicax-server", daemon=True
            )
            self._standby.start()

    def join(self) -> None:
        """Serves in this thread until the server is stopped or interrupted, or ends itself."""
        if not self._stopping.is_set():
            self.start()
        if self._take():
            self._run()
        while not self._stopping.wait(timeout=60.0):
            pass

    def interrupt(self) -> None:
        """Makes `join` return soon, without waiting for it; the task ends with `stop`."""
        self._stopping.set()
        task = self._task
        if task is not None:
            task.interrupt()

    def stop(self) -> None:
        """Ends the task; again is harmless.

        A worker that is busy with a closure gets some seconds to finish it.
        """
        self.interrupt()
        # A closure may stop its own server: that thread cannot wait for itself.
        if not self._is_running_here():
            self._is_idle.wait(_STOP_SECONDS)
        with self._lock:
            task = self._task
        if task is not None:
            task.close()
        standby = self._standby
        if standby is not None and standby is not threading.current_thread():
            standby.join(_STOP_SECONDS)

    def _take(self) -> bool:
        """Says whether the calling thread is the one that runs the task."""
        with self._lock:
            is_mine = not self._is_taken and not self._stopping.is_set()
            self._is_taken = True
            if is_mine:
                self._is_idle.clear()
                self._runner = threading.current_thread()
            return is_mine

    def _run(self) -> None:
        assert self._task is not None
        try:
            self._task.run_forever()
        finally:
            self._is_idle.set()
            if self._task.ending is not None:
                self._stopping.set()

    def _is_running_here(self) -> bool:
        is_running = not self._is_idle.is_set()
        return is_running and self._runner is threading.current_thread()

    def _run_unless_joined(self) -> None:
        if not self._stopping.wait(_WAIT_FOR_JOIN_SECONDS) and self._take():
            self._run()


def _as_def(given: Any) -> Mapping[str, Any]:
    """Returns a server definition; a bare cluster becomes one without a task."""
    if isinstance(given, Mapping) and "cluster" in given and set(given) <= _DEF_KEYS:
        cluster = given["cluster"]
        # A job may be called "cluster" too: its tasks are a list, or numbered.
        is_tasks = isinstance(cluster, list | tuple) and all(isinstance(t, str) for t in cluster)
        if isinstance(cluster, Mapping):
            is_tasks = any(isinstance(index, int) for index in cluster)
        if not is_tasks:
            return given
    return {"cluster": given}


def _task_name(cluster: ClusterSpec, job: Any, index: Any) -> Task:
    if job is None:
        if len(cluster.jobs) != 1:
            jobs = ", ".join(cluster.jobs)
            raise _missing("job_name", f"the cluster has the jobs {jobs}" if jobs else _EMPTY)
        (job,) = cluster.jobs
    # Raises with the names of all jobs if there is none of this name.
    indices = cluster.task_indices(job)
    if index is None:
        if len(indices) != 1:
            raise _missing("task_index", f"the job {job!r} has {len(indices)} tasks")
        (index,) = indices
    if not isinstance(index, int) or isinstance(index, bool):
        raise errors.ArgumentTypeError(
            "`task_index` must be a whole number",
            f"it is {index!r} of type {type(index).__name__}",
            f"Pass one of {indices}.",
        )
    cluster.task_address(job, index)
    return Task(job, index)


def _missing(name: str, found: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"`{name}` must say which task this is",
        f"it was not given and {found}",
        f"Pass `{name}`.",
    )
