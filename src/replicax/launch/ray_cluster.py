"""`RayCluster`: the tasks of a cluster as actors of Ray, for drivers and notebooks."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.foundation import errors, lazy, settings
from replicax.foundation.types import Tree
from replicax.launch import certificates, ray_actors
from replicax.launch.ray_actors import fetch
from replicax.protocol.tasks import Task
from replicax.transport import expected_exits, keys

if TYPE_CHECKING:
    import ray
    import ray.exceptions
    import ray.util
    import ray.util.scheduling_strategies as scheduling

    from replicax.launch import ray_groups
else:
    # Imported when a cluster is started: Ray changes environment variables when it is imported.
    ray = lazy.module("ray", "replicax[ray]")
    scheduling = lazy.module("ray.util.scheduling_strategies", "replicax[ray]")
    ray_groups = lazy.module("replicax.launch.ray_groups")

_log = logging.getLogger(__name__)

# The seconds in which Ray must place all tasks, and in which they must listen.
_PLACED_S = 120.0
_LISTEN_S = 180.0
_STOP_S = 5.0
_RETRY_S = 0.2


class RayCluster:
    """Places the tasks of a cluster on a Ray cluster, which restarts them.

    With parameter servers, the tasks serve a coordinator, which is this process:

        with rx.ray.RayCluster(workers=3, ps=2) as cluster:
            strategy = rx.ParameterServerStrategy(cluster.resolver, keys=cluster.keys_directory)
            ...

    Without, `run` calls a function on every worker, in lock step with the others:

        with rx.ray.RayCluster(workers=2) as cluster:
            losses = cluster.run(train, args=(directory,))

    If this process is not connected to Ray, it connects, to the cluster at `address` or to one
    that it starts on this machine, and disconnects at the end.

    Servers and workers are actors in a placement group. Ray restarts one that ends at the same
    address; servers restore their variables from their last snapshot. A sync group is run by Ray
    Train, which restarts all its workers when one is lost.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers; 0 for a sync group.
      address: The Ray cluster, such as "auto"; by default the one that this process is connected
        to, or a new one on this machine.
      cpus_per_worker: The cores that Ray reserves for each worker.
      devices_per_worker: The CPU devices of each worker; JAX's own choice by default.
      max_restarts: The most restarts of each task, or of a sync group.
      env: Environment variables of the tasks.
      snapshots: The directory of the servers' snapshots; one on each node by default, since Ray
        restarts a server on the same node.
    """

    def __init__(
        self,
        workers: int = 2,
        ps: int = 0,
        *,
        address: str | None = None,
        cpus_per_worker: int = 1,
        devices_per_worker: int | None = None,
        max_restarts: int = 5,
        env: Mapping[str, str] | None = None,
        snapshots: str | os.PathLike[str] | None = None,
    ) -> None:
        _check(workers, ps, cpus_per_worker, max_restarts)
        self._counts = {"worker": workers, "ps": ps}
        self._address = address
        self._cpus = cpus_per_worker
        self._devices = devices_per_worker
        self._max_restarts = max_restarts
        self._env = dict(env or {})
        name = f"rx-ray-{secrets.token_hex(4)}"
        self._snapshots = str(snapshots or Path(tempfile.gettempdir()) / name)
        self._directory: Path | None = None
        self._state: Any = None
        self._group: Any = None
        self._actors: dict[Task, Any] = {}
        self._addresses: dict[str, list[str]] = {}
        self._owns_connection = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        tasks = ", ".join(f"{count} {job}" for job, count in self._counts.items() if count)
        state = "running" if self._state is not None else "not running"
        return f"RayCluster({tasks}, {state})"

    def start(self) -> None:
        """Connects to Ray, places all servers and workers, and waits until they listen.

        Raises:
          ResourceExhaustedError: The Ray cluster has not enough free cores.
          UnavailableError: A task could not be started.
        """
        if self._state is not None:
            raise errors.ContextError(
                "A cluster on Ray is started once", f"{self!r} is running", "Close it first."
            )
        self._owns_connection = connect(self._address, self._num_cpus)
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="rx-ray-keys-"))
            # Not earlier: strategies in this process look for renewed keys.
            atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
            made = keys.make(self._directory / "keys")
            self._state = ray.remote(num_cpus=0)(ray_actors.JobState).remote()
            files = certificates.read(made)
            # In a call: see Note [Keys on Ray].
            fetch(self._state.set_keys.remote(files), _LISTEN_S)
            if self._counts["ps"]:
                self._place()
                self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def _num_cpus(self) -> int:
        return self._counts["worker"] * self._cpus + self._counts["ps"] + 1

    def _place(self) -> None:
        # One core for each server, and for a chief.
        bundles = [{"CPU": 1.0}]
        tasks = [Task(job, index) for job, count in self._counts.items() for index in range(count)]
        bundles += [{"CPU": float(self._cpus if t.job == "worker" else 1)} for t in tasks]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(_PLACED_S):
            needed = sum(bundle["CPU"] for bundle in bundles)
            raise errors.ResourceExhaustedError(
                f"Ray could not place {len(bundles)} tasks with {needed:g} cores within "
                f"{_PLACED_S:g} s; the cluster has {ray.cluster_resources().get('CPU', 0):g}, of "
                f"which {ray.available_resources().get('CPU', 0):g} are free. Use fewer tasks, or "
                "a larger cluster."
            )
        serving = ray.remote(ray_actors.ServingTask)
        for number, task in enumerate(tasks, start=1):
            self._actors[task] = serving.options(
                num_cpus=self._cpus if task.job == "worker" else 1,
                max_restarts=self._max_restarts,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
                runtime_env={"env_vars": self.variables(task.job)},
            ).remote(self._state, task, self._snapshots if task.job == "ps" else None)

    def variables(self, job: str) -> dict[str, str]:
        """Returns the environment variables of the tasks of a job."""
        return {**settings.for_launched_task(self._cpus, self._devices, job), **self._env}

    def _wait_until_ready(self) -> None:
        found = {task: actor.address.remote() for task, actor in self._actors.items()}
        ray.wait(list(found.values()), num_returns=len(found), timeout=_LISTEN_S)
        for task, address in found.items():
            try:
                text = fetch(address)
            except ray.exceptions.RayError as error:
                raise errors.UnavailableError(
                    f"{task} could not be started on Ray: {error}"
                ) from error
            # Another cluster may have used the port before.
            expected_exits.forget([text])
            self._addresses.setdefault(task.job, []).append(text)

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the servers and workers of a ps cluster."""
        self._require_ps("where its tasks listen")
        return ClusterSpec(self._addresses)

    @property
    def resolver(self) -> SimpleClusterResolver:
        """Configures this process as the coordinator of a ps cluster."""
        return SimpleClusterResolver(
            self.cluster_spec, task_type="chief", task_id=0, rpc_layer="tcp"
        )

    @property
    def keys_directory(self) -> Path:
        """The keys of the cluster."""
        if self._directory is None:
            raise self._not_running("its keys")
        return self._directory / "keys"

    def pid(self, job: str, index: int, timeout: float = _LISTEN_S) -> int:
        """Returns the process of a server or worker, on its node; waits for a restart."""
        self._require_ps("its tasks")
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return fetch(self._actors[Task(job, index)].pid.remote(), left)
            except ray.exceptions.ActorUnavailableError:
                # Ray has not restarted it yet.
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)
            except ray.exceptions.RayActorError as error:
                raise errors.UnavailableError(f"{Task(job, index)} has ended: {error}") from error

    def run(
        self,
        function: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        *,
        datasets: Mapping[str, Any] | None = None,
    ) -> list[Tree]:
        """Calls a function on every worker of a sync group, and returns what it returns.

        It runs in a worker of Ray Train, with TF_CONFIG, and creates a
        `MultiWorkerMirroredStrategy` first. When a worker is lost, all of them start again, from
        their last checkpoint.

        Args:
          function: The function.
          args: Its positional arguments.
          kwargs: Its keyword arguments.
          datasets: Datasets of `ray.data`, which Ray splits between the workers; the function gets
            its part by `ray.train.get_dataset_shard(name)`.

        Raises:
          Exception: What the function raised on one worker, if it is not the loss of another one.
          UnavailableError: The group was restarted too often.
        """
        if self._state is None:
            raise self._not_running("a program")
        if self._counts["ps"]:
            raise errors.ContextError(
                "Functions run in lock step on a cluster without parameter servers",
                f"{self!r} has {self._counts['ps']}",
                "Pass `ps=0`, or use a ClusterCoordinator.",
            )
        config = {"function": function, "args": tuple(args), "kwargs": dict(kwargs or {})}
        code = self.group_run(datasets).run(ray_groups.train_function, config)
        values = ray_groups.values_of(self._state, self._counts["worker"])
        if code:
            raise errors.UnavailableError(f"A worker on Ray ended with exit code {code}.")
        return values

    def group_run(self, datasets: Mapping[str, Any] | None = None) -> ray_groups.GroupRun:
        """Returns a run of the sync group, which Ray Train starts and restarts."""
        return ray_groups.GroupRun(
            self._state,
            self._counts["worker"],
            self._cpus,
            self.variables("worker"),
            self._max_restarts,
            str(self._directory),
            dict(datasets or {}),
        )

    def program(self) -> tuple[Any, Any]:
        """Returns a new actor for the program of a chief, and the state that it needs."""
        actor = ray.remote(ray_actors.ProgramTask).options(
            num_cpus=1,
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=0
            ),
        )
        return actor.remote(), self._state

    def close(self) -> None:
        """Stops all tasks, and disconnects from Ray if this object has connected. Idempotent."""
        # Coordinators in this process do not report them as lost.
        expected_exits.expect([each for found in self._addresses.values() for each in found])
        if ray.is_initialized():
            stopping = [actor.stop.remote() for actor in self._actors.values()]
            if stopping:
                ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_S)
            for actor in [*self._actors.values(), *([self._state] if self._state else [])]:
                ray.kill(actor, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._actors, self._addresses = {}, {}
        self._state = self._group = None
        self._directory = None
        if self._owns_connection:
            ray.shutdown()
            self._owns_connection = False

    def _require_ps(self, what: str) -> None:
        if self._state is None:
            raise self._not_running(what)
        if not self._counts["ps"]:
            raise errors.ContextError(
                "The tasks of a sync group exist while `run` runs",
                f"{what} was requested",
                "Pass `ps=1` or more for a cluster of servers, or call `run`.",
            )

    def _not_running(self, what: str) -> errors.ContextError:
        return errors.ContextError(
            f"{what} of a cluster on Ray is known while it runs",
            f"{self!r} does not",
            "Use it in a `with` block, or call `start`.",
        )


def connect(address: str | None, num_cpus: int) -> bool:
    """Connects this process to Ray, unless it is.

    Args:
      address: The cluster; None for that of RAY_ADDRESS, or a new one on this machine.
      num_cpus: The cores that a new one must offer at least, as tasks of a laptop share them.

    Returns:
      Whether this call has connected it.
    """
    if ray.is_initialized():
        return False
    if address is not None or settings.RAY_ADDRESS.is_set:
        try:
            ray.init(address=address, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            where = address or settings.RAY_ADDRESS.read()
            raise errors.UnavailableError(
                f"The Ray cluster at {where!r} cannot be reached: {error}. Check the address; a "
                "cluster with tokens needs RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH here, too."
            ) from error
    else:
        ray.init(
            address="local",
            num_cpus=max(num_cpus, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    return True


def _check(workers: int, ps: int, cpus_per_worker: int, max_restarts: int) -> None:
    for name, value, least in (
        ("workers", workers, 1),
        ("ps", ps, 0),
        ("cpus_per_worker", cpus_per_worker, 1),
        ("max_restarts", max_restarts, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise errors.InvalidArgumentError(
                f"`{name}` must be a whole number of at least {least}",
                f"it is {value!r}",
                "Pass an int.",
            )
