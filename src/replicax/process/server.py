"""`Server`: runs one task of a cluster in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from replicax.cluster import address as addresses
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.foundation.public_names import show_in_package
from replicax.observe import endpoint, job_directory
from replicax.process import roles
from replicax.protocol.tasks import Task
from replicax.ps.process.snapshots import DEFAULT_EVERY_S
from replicax.transport.keys import Keys

# A worker computes in the thread that calls `join`, or in its own thread after this time.
_WAIT_FOR_JOIN_SECONDS = 1.0
_STOP_SECONDS = 5.0
_EMPTY = "the cluster has no job"
_DEF_KEYS = {"cluster", "job_name", "task_index", "protocol"}


class Server:
    """Runs one task of a cluster: a parameter server or a worker.

    It runs from `start()`, or from the constructor, until `stop()`. Other tasks, such as "chief",
    have no service; their `join()` waits like that of the others, so that one program can play
    every role.

    >>> with Server({"chief": ["localhost:0"]}) as server:
    ...     server.target
    'localhost:0'

    Args:
      server_or_cluster_def: The cluster: a `ClusterSpec`, the dict that it is made from, or
        the `server_def` of another server.
      job_name: The job of the task; may be left out if the cluster has one job.
      task_index: Its index; may be left out if the job has one task.
      protocol: "ipc" for a socket in a private directory, or "tcp". Otherwise, also with "grpc",
        tasks on this machine use "ipc", and others "tcp".
      config: Accepted for compatibility, and ignored.
      start: Whether to start at once.
      keys: A directory made by `replicax keys make`; by default that of the environment variable
        `REPLICAX_KEYS`. TCP needs keys.
      snapshots: For a parameter server, the directory in which it saves its variables, in a
        subdirectory of its own, and from which it recovers. Without it, variables are lost with
        the process.
      snapshot_every: The minimum number of seconds between two snapshots.
      on_ending: Called with the reason when a worker ends itself; see `ending`. Its running
        function may never end: the owner of the process can end it then.

    Raises:
      InvalidArgumentError: If the cluster has no such task.
      AddressInUseError: If another task listens at its address.
      PermissionDeniedError: If its address needs keys and there are none.
      CheckpointError: If another process keeps its snapshots there, or they cannot be written.
      ArgumentTypeError: `task_index` is not a whole number.
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, object],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
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
        self._endpoint: endpoint.Endpoint | None = None
        self._standby: threading.Thread | None = None
        # Protects the task and the flags below; not held while waiting.
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
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Creates a worker that is a cluster of its own, at any free address."""
        return Server({"worker": ["localhost:0"]}, config=config, start=start)

    @property
    def address(self) -> str:
        """The address of the task; with port 0, known after `start`."""
        task = self._task
        found = task.address if task is not None else ""
        return found or self._cluster.task_address(self._name.job, self._name.index)

    @property
    def target(self) -> str:
        """The address, with the protocol if one was given: `tcp://host:2222`."""
        return addresses.with_layer(self.address, self._protocol)

    @property
    def ending(self) -> str | None:
        """Why the task has ended itself, for example "the lease of job 'x' ran out".

        None while it runs, or if it was stopped. The process of a task that has ended itself
        should exit, and may be restarted.
        """
        task = self._task
        return None if task is None else task.ending

    @property
    def server_def(self) -> dict[str, Any]:
        """The cluster and the task, as a dict that `Server` accepts."""
        return {
            "cluster": self._cluster.as_dict(),
            "job_name": self._name.job,
            "task_index": self._name.index,
            "protocol": self._protocol or "grpc",
        }

    def start(self) -> None:
        """Starts the task. Idempotent.

        Raises:
          ContextError: It was stopped.
          AddressInUseError: Another process listens at its address.
        """
        with self._lock:
            if self._stopping.is_set():
                raise errors.ContextError(
                    "A server is started once",
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
            if task.status() is not None:
                self._endpoint = endpoint.open_for(
                    str(self._name), self._job_directory, lambda: task.status() or {}
                )
            self._standby = threading.Thread(
                target=self._run_unless_joined, name="replicax-server", daemon=True
            )
            self._standby.start()

    def join(self) -> None:
        """Runs the task in this thread until it is stopped, is interrupted, or ends itself."""
        if not self._stopping.is_set():
            self.start()
        if self._take():
            self._run()
        while not self._stopping.wait(timeout=60.0):
            pass

    def interrupt(self) -> None:
        """Makes `join` return soon, without waiting for it; `stop` ends the task."""
        self._stopping.set()
        task = self._task
        if task is not None:
            task.interrupt()

    def stop(self) -> None:
        """Stops the task. Idempotent.

        A busy worker has some seconds to finish its closure.
        """
        self.interrupt()
        # A closure may stop its own server, and cannot wait for itself.
        if not self._is_running_here():
            self._is_idle.wait(_STOP_SECONDS)
        with self._lock:
            task = self._task
        if self._endpoint is not None:
            self._endpoint.close()
        if task is not None:
            task.close()
        standby = self._standby
        if standby is not None and standby is not threading.current_thread():
            standby.join(_STOP_SECONDS)

    def _job_directory(self) -> Path:
        """Returns the directory in which the tasks of this cluster can be observed."""
        jobs = [job for job in roles.SERVING if job in self._cluster.jobs]
        tasks = [(job, index) for job in jobs for index in self._cluster.task_indices(job)]
        return job_directory.of_cluster(self._cluster.task_address(*task) for task in tasks)

    def _take(self) -> bool:
        """Returns whether the calling thread is to run the task."""
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


def _as_def(given: ClusterSpec | Mapping[str, object]) -> Mapping[str, Any]:
    """Returns a server definition, without a task for a bare cluster."""
    if isinstance(given, Mapping) and "cluster" in given and set(given) <= _DEF_KEYS:
        cluster = given["cluster"]
        # A job may be called "cluster" too: its tasks are a list, or a dict by index.
        is_tasks = isinstance(cluster, list | tuple) and all(isinstance(t, str) for t in cluster)
        if isinstance(cluster, Mapping):
            is_tasks = any(isinstance(index, int) for index in cluster)
        if not is_tasks:
            return given
    return {"cluster": given}


def _task_name(cluster: ClusterSpec, job: str | None, index: int | None) -> Task:
    if job is None:
        if len(cluster.jobs) != 1:
            jobs = ", ".join(cluster.jobs)
            raise _missing("job_name", f"the cluster has the jobs {jobs}" if jobs else _EMPTY)
        (job,) = cluster.jobs
    # Raises an error with the names of all jobs if the job is unknown.
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
        f"`{name}` selects the task of this process",
        f"it was not given and {found}",
        f"Pass `{name}`.",
    )


show_in_package(Server)
