"""Launches a job on a Ray cluster, which places and restarts its tasks."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from replicax.foundation import errors, settings
from replicax.group import exit_codes
from replicax.launch.backoff import Backoff
from replicax.launch.job import JobSpec
from replicax.protocol.tasks import Task

if TYPE_CHECKING:
    from replicax.launch.ray_cluster import RayCluster

_log = logging.getLogger(__name__)

# A year: a training has no natural limit, and every wait has a bound.
_LONGEST_S = 365 * 24 * 3600.0


class RayLauncher:
    """Runs sync groups by Ray Train, and ps clusters as actors in a placement group.

    Args:
      address: The Ray cluster, such as "auto"; by default that of RAY_ADDRESS, or a new one on
        this machine, which ends with the job.
      show: Prints a line for the user.

    Attributes:
      address: See above.
    """

    name = "ray"

    def __init__(
        self, address: str | None = None, *, show: Callable[[str], None] = _log.info
    ) -> None:
        self.address = address
        self._show = show

    def detect(self) -> bool:
        """Returns whether Ray is installed."""
        return importlib.util.find_spec("ray") is not None

    def explain(self) -> str:
        """Returns what was found of Ray."""
        if not self.detect():
            return "ray: not installed; `pip install replicax[ray]`"
        if settings.RAY_ADDRESS.is_set:
            return f"ray: installed, and {settings.RAY_ADDRESS} is {settings.RAY_ADDRESS.read()!r}"
        return f"ray: installed, and {settings.RAY_ADDRESS} is not set: starts one on this machine"

    def launch(self, job: JobSpec) -> int:
        """Runs a job to its end."""
        if not self.detect():
            raise errors.MissingDependencyError(
                "--ray needs the package 'ray'",
                "it is not installed",
                "Run `pip install replicax[ray]`.",
            )
        _check(job)
        if not settings.RAY_DEDUP_LOGS.is_set:
            # Ray reads it when it is imported; workers print equal lines.
            settings.RAY_DEDUP_LOGS.write("0")
        from replicax.launch.ray_cluster import RayCluster  # noqa: PLC0415 - imports Ray

        program = job.program
        if not program.is_module:
            program = dataclasses.replace(program, target=str(Path(program.target).absolute()))
        job = dataclasses.replace(job, program=program)
        cluster = RayCluster(
            job.workers,
            job.ps,
            address=self.address,
            cpus_per_worker=job.cpus_per_worker or 1,
            devices_per_worker=job.devices_per_worker,
            max_restarts=job.max_restarts,
            env=job.env,
            snapshots=None if job.checkpoints is None else job.checkpoints / ".replicax-snapshots",
        )
        with cluster:
            return _run_group(cluster, job) if job.is_sync else self._run_chief(cluster, job)

    def _run_chief(self, cluster: RayCluster, job: JobSpec) -> int:
        """Runs the program of a ps cluster in an actor, again if it is lost."""
        import ray  # noqa: PLC0415 - slow
        import ray.exceptions  # noqa: PLC0415

        from replicax.launch.ray_actors import fetch  # noqa: PLC0415

        task = Task("chief", 0)
        backoff = Backoff(max(job.max_restarts, 1), job.restart_window_s)
        addresses = cluster.cluster_spec.as_dict()
        while True:
            actor, state = cluster.program()
            running = actor.run.remote(
                state,
                task,
                job.command(task, sys.executable),
                os.getcwd(),
                addresses,
                cluster.variables(task.job),
                _logs(job),
            )
            try:
                code: int = fetch(running, _LONGEST_S)
            except ray.exceptions.RayActorError:
                code = exit_codes.RESTART_GROUP
            finally:
                ray.kill(actor)
            if code >= 0 and code not in (exit_codes.RESTART_GROUP, exit_codes.PREEMPTED):
                return code
            now = time.monotonic()
            due_s = backoff.next(now) if job.max_restarts else None
            if due_s is None:
                self._show(f"the chief was restarted {job.max_restarts} times and failed again")
                return code if code >= 0 else 128 - code
            self._show(f"the chief ended with exit code {code}: restarting it")
            time.sleep(due_s - now)


def _run_group(cluster: RayCluster, job: JobSpec) -> int:
    from replicax.launch import ray_groups  # noqa: PLC0415 - imports Ray

    config = {"job": job, "directory": os.getcwd(), "logs": _logs(job)}
    return cluster.group_run().run(ray_groups.train_program, config)


def _logs(job: JobSpec) -> str | None:
    return None if job.logs is None else str(job.logs.absolute())


def _check(job: JobSpec) -> None:
    if job.min_workers is not None or job.hosts or job.evaluator:
        raise errors.UnsupportedError(
            "On Ray, a job has a fixed number of workers, no evaluator, and Ray places the tasks",
            "an elastic job, hosts or an evaluator were asked for",
            "Leave --elastic, --hosts and --evaluator out.",
        )
    if not job.program.is_module and not Path(job.program.target).is_file():
        raise errors.NotFoundError(
            "The program must be a Python script that exists",
            f"there is no file {job.program.target!r}",
            "Correct the path.",
        )
