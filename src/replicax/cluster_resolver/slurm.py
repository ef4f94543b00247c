"""SlurmClusterResolver: the tasks of a Slurm job step, started with `srun`."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.slurm_lists import expand_counts, expand_hosts
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.simple import SimpleClusterResolver
from replicax.foundation import errors, settings
from replicax.protocol.tasks import Task

_GPU_FILE = re.compile(r"nvidia\d+")


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The tasks of a job step.

    Attributes:
      cluster: The addresses of the tasks, by job.
      task: The task of this process; None if its rank is in no job.
      host: The index of its node.
      local_rank: Its index among the tasks of its node.
    """

    cluster: dict[str, list[str]]
    task: Task | None
    host: int
    local_rank: int


class SlurmClusterResolver(ClusterResolver):
    """Resolves the tasks of a Slurm job step.

    Ranks are assigned to the jobs in the order of `jobs`. The tasks of one node listen at
    consecutive ports.

    Args:
      jobs: The number of tasks of each job; by default all are workers.
      port_base: The port of the first task on each node.
      gpus_per_node: The number of GPUs of each node; detected by default.
      gpus_per_task: The number of GPUs of each task; equal shares by default.
      tasks_per_node: The number of tasks on each node; that of Slurm by default.
      auto_set_gpu: Whether `cluster_spec()` narrows CUDA_VISIBLE_DEVICES to the GPUs of
        this task. To have an effect, it must be called before JAX starts.
      rpc_layer: The scheme that `master` puts before `://`.

    Raises:
      ContextError: The variables of Slurm are missing, or do not fit the jobs, the GPUs or the
        ranks.

    >>> import os
    >>> from unittest import mock
    >>> step = {  # as srun sets them
    ...     "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
    ...     "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    ... }
    >>> with mock.patch.dict(os.environ, step):
    ...     resolver = SlurmClusterResolver(auto_set_gpu=False)
    ...     resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['node1:8888', 'node2:8888']}), 1)
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._jobs = None if jobs is None else dict(jobs)
        self._port_base = port_base
        self._tasks_per_node = tasks_per_node
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        self._hosts, self._counts = self._read_nodes()
        self._gpus_per_node = _gpus_here() if gpus_per_node is None else gpus_per_node
        most = max(self._counts)
        self._gpus_per_task = (
            self._gpus_per_node // most if gpus_per_task is None else gpus_per_task
        )
        if most * self._gpus_per_task > self._gpus_per_node:
            raise errors.ContextError(
                f"{most} tasks with {self._gpus_per_task} GPUs each must fit on one node",
                f"a node has {self._gpus_per_node} GPUs",
                "Lower `gpus_per_task`, or start fewer tasks per node.",
            )
        self._allocation()

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster; narrows CUDA_VISIBLE_DEVICES to this task's GPUs.

        Raises:
          ContextError: The tasks of the step are not those of the jobs.
        """
        allocation = self._allocation()
        if self._auto_set_gpu:
            _narrow_gpus(allocation.local_rank, self._gpus_per_task, self._gpus_per_node)
        return ClusterSpec(allocation.cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the job of this task, and its index there."""
        return self.task_type, self.task_id

    @override
    def _accelerators_per_task(self) -> Mapping[str, int]:
        return {"GPU": self._gpus_per_task}

    @override
    def _default_task_type(self) -> str | None:
        task = self._allocation().task
        return None if task is None else task.job

    @override
    def _default_task_id(self) -> int | None:
        task = self._allocation().task
        return None if task is None else task.index

    @override
    def explain(self) -> str:
        source = "Slurm (environment)"
        try:
            allocation, rank = self._allocation(), _number(settings.SLURM_PROCID)
        except errors.DistributeError as error:
            return f"{source}: cannot be used. {error}"
        # Not through `cluster_spec`, which sets an environment variable.
        found = SimpleClusterResolver(
            ClusterSpec(allocation.cluster), task_type=self.task_type, task_id=self.task_id
        )
        per_node = "`tasks_per_node`" if self._tasks_per_node else "SLURM_STEP_TASKS_PER_NODE"
        notes = [
            f"{len(self._hosts)} nodes from SLURM_STEP_NODELIST, tasks per node from {per_node}, "
            f"rank {rank} from SLURM_PROCID",
            f"{self._gpus_per_task} of {self._gpus_per_node} GPUs per node for each task"
            + ("" if self._auto_set_gpu else f"; {settings.CUDA_VISIBLE_DEVICES} is not changed"),
        ]
        return summary(found, source, notes)

    def _read_nodes(self) -> tuple[list[str], list[int]]:
        hosts = expand_hosts(_variable(settings.SLURM_STEP_NODELIST))
        if self._tasks_per_node is not None:
            counts = [self._tasks_per_node] * len(hosts)
        else:
            counts = expand_counts(_variable(settings.SLURM_STEP_TASKS_PER_NODE))
        if len(counts) != len(hosts) or min(counts) < 1:
            raise errors.ContextError(
                "Each node of the Slurm step must have one task or more",
                f"there are {len(hosts)} nodes, and the tasks per node are {counts[:20]}",
                "Check `tasks_per_node` and the SLURM_STEP_* variables.",
            )
        return hosts, counts

    def _allocation(self) -> Allocation:
        num_tasks, rank = sum(self._counts), _number(settings.SLURM_PROCID)
        jobs = self._jobs
        if jobs is None:
            from_slurm = self._tasks_per_node is None
            jobs = {"worker": _number(settings.SLURM_STEP_NUM_TASKS) if from_slurm else num_tasks}
        if sum(jobs.values()) != num_tasks or rank >= num_tasks:
            raise errors.ContextError(
                f"The {sum(jobs.values())} tasks of the jobs {jobs} must be those of the "
                "Slurm step",
                f"the step has {num_tasks} tasks, and this one has rank {rank}",
                "Change `jobs`, or the number of tasks of srun (-n).",
            )
        found = allocate(jobs, self._hosts, self._counts, rank, self._port_base)
        if settings.SLURM_NODEID.is_set and _number(settings.SLURM_NODEID) != found.host:
            raise errors.ContextError(
                "The ranks of the Slurm step must fill one node after the other",
                f"rank {rank} is on node {_number(settings.SLURM_NODEID)}, not on {found.host}",
                "Use `srun --distribution=block`, and leave out `tasks_per_node`.",
            )
        return found


def _variable(name: settings.Setting) -> str:
    value = name.read()
    if not value:
        raise errors.ContextError(
            "SlurmClusterResolver must run in a step of a Slurm job",
            f"the environment variable {name} is not set",
            "Start the tasks with `srun`.",
        )
    return value


def _number(name: settings.Setting) -> int:
    value = _variable(name)
    index = settings.as_index(value)
    if index is None:
        raise errors.ContextError(
            f"The environment variable {name} must be a number",
            f"it is {value[:40]!r}",
            "Start the tasks with `srun`.",
        )
    return index


def _gpus_here() -> int:
    if settings.SLURM_GPUS_ON_NODE.is_set:
        return _number(settings.SLURM_GPUS_ON_NODE)
    visible = settings.CUDA_VISIBLE_DEVICES.read()
    if visible is not None:
        return _num_visible(visible)
    return sum(1 for name in os.listdir("/dev") if _GPU_FILE.fullmatch(name))


def _num_visible(given: str) -> int:
    """Counts the entries before the first that is not a device, as CUDA does."""
    names = [name.strip() for name in given.split(",")]
    is_named = [bool(name) and not name.startswith("-") for name in names]
    return is_named.index(False) if False in is_named else len(names)


def _narrow_gpus(local_rank: int, gpus_per_task: int, gpus_per_node: int) -> None:
    if not gpus_per_task:
        return
    given = settings.CUDA_VISIBLE_DEVICES.read()
    if given is None:
        visible = [str(index) for index in range(gpus_per_node)]
    else:
        visible = [name for name in given.split(",") if name]
        # Already narrowed, by Slurm or by an earlier call, or all hidden by the user.
        if len(visible) <= gpus_per_task:
            return
    first = local_rank * gpus_per_task
    if len(visible) >= first + gpus_per_task:
        settings.CUDA_VISIBLE_DEVICES.write(",".join(visible[first : first + gpus_per_task]))


def allocate(
    jobs: Mapping[str, int], hosts: Sequence[str], counts: Sequence[int], rank: int, port_base: int
) -> Allocation:
    """Assigns the ranks to the nodes and to the jobs, both in order.

    >>> allocate({"ps": 1, "worker": 2}, ["a", "b"], [2, 1], rank=2, port_base=8888)
    Allocation(cluster={'ps': ['a:8888'], 'worker': ['a:8889', 'b:8888']},
        task=Task(job='worker', index=1), host=1, local_rank=0)
    """
    slots = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    addresses = [address.join(hosts[host], port_base + local) for host, local in slots]
    cluster: dict[str, list[str]] = {}
    task = None
    first = 0
    for job, count in jobs.items():
        cluster[job] = addresses[first : first + count]
        if first <= rank < first + count:
            task = Task(job, rank - first)
        first += count
    host, local_rank = slots[rank]
    return Allocation(cluster, task, host, local_rank)
