"""MultiWorkerMirroredStrategy: replicas on the devices of many workers, in lock step."""

from __future__ import annotations

from typing_extensions import override

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import ClusterResolver, TFConfigClusterResolver
from replicax.collectives.cross_device_ops import select_cross_device_ops
from replicax.foundation import device_names, devices, errors, gate
from replicax.foundation.options import CommunicationImplementation, CommunicationOptions
from replicax.foundation.public_names import show_in_package
from replicax.group import group
from replicax.protocol.tasks import Task
from replicax.strategies.base import Strategy
from replicax.strategies.mirrored import MirroredExtended
from replicax.strategies.placement import CopyPerReplica
from replicax.values.layout import ReplicaLayout

# The jobs whose tasks train together; an evaluator works by itself.
_IN_SYNC = ("chief", "worker")
_EVALUATOR = "evaluator"


class MultiWorkerExtended(MirroredExtended):
    """Mirrored replicas over several processes, of which the chief writes files.

    Args:
      strategy: The strategy.
      layout: The replicas of all workers.
      options: The options of reductions that have none of their own.
    """

    def __init__(
        self, strategy: Strategy, layout: ReplicaLayout, options: CommunicationOptions
    ) -> None:
        ops = select_cross_device_ops(layout.devices)
        ops.options = options
        super().__init__(strategy, layout, None, ops, placement=CopyPerReplica())

    @property
    @override
    def experimental_between_graph(self) -> bool:
        return True

    @property
    @override
    def should_checkpoint(self) -> bool:
        return self._is_chief

    @property
    @override
    def should_save_summary(self) -> bool:
        return self._is_chief

    @property
    def _is_chief(self) -> bool:
        peers = self._require_layout().peers
        return peers is None or peers.index == 0


class MultiWorkerMirroredStrategy(Strategy):
    """Trains in sync on all devices of several workers.

    Every worker runs the same program, each in a process of its own. Each device runs one replica;
    variables have a copy on each, and start from the values of the chief: the task "chief", or
    worker 0. Create the strategy first in the program, before anything runs on a device.

    Without a cluster, it trains on the devices of this process; so does an evaluator.

    Args:
      cluster_resolver: The cluster and this task; by default those of TF_CONFIG.
      communication_options: The options of reductions that have none of their own; its timeout
        also limits the time that workers wait for each other.

    Raises:
      InvalidArgumentError: If the cluster has no such task.
      DeadlineExceededError: If a worker is missing after the timeout; the error names it.

    >>> import replicax as rx
    >>> strategy = rx.MultiWorkerMirroredStrategy()
    >>> strategy.cluster_resolver.cluster_spec()
    ClusterSpec({})
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        options = communication_options or CommunicationOptions()
        _require_types(cluster_resolver, options)
        self._resolver = cluster_resolver or TFConfigClusterResolver()
        layout = layout_of_cluster(self._resolver, options)
        _require_implementation(layout, options)
        super().__init__(MultiWorkerExtended(self, layout, options))

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster, and the type and index of this task."""
        return self._resolver


def layout_of_cluster(resolver: ClusterResolver, options: CommunicationOptions) -> ReplicaLayout:
    """Returns the replicas of all workers of a cluster; joins their group if there are several."""
    spec = ClusterSpec(resolver.cluster_spec())
    task = _task_of(resolver, spec) if spec else None
    if task is None or task.job == _EVALUATOR or _num_workers(spec) == 1:
        return ReplicaLayout(devices.default_devices())
    return _joined(spec, task, options)


def layout_of_hosts(
    resolver: ClusterResolver, options: CommunicationOptions
) -> ReplicaLayout | None:
    """Returns the devices of all hosts of a cluster; None if this process is on its own.

    So is a client that names no task: it uses the devices of this host.
    """
    if resolver.task_type is None or resolver.task_id is None:
        return None
    spec = ClusterSpec(resolver.cluster_spec())
    if _num_workers(spec) < 2:
        return None
    return _joined(spec, _task_of(resolver, spec), options)


def _num_workers(spec: ClusterSpec) -> int:
    return sum(spec.num_tasks(job) for job in _IN_SYNC if job in spec.jobs)


def _joined(spec: ClusterSpec, task: Task, options: CommunicationOptions) -> ReplicaLayout:
    joined = group.join(spec, task.job, task.index, timeout_seconds=options.timeout_seconds)
    device_names.set_task(task.job, task.index)
    layout = ReplicaLayout(joined.devices, peers=joined)
    if layout.num_local == 1:
        gate.set_one_device_per_process()
    return layout


def _task_of(resolver: ClusterResolver, spec: ClusterSpec) -> Task:
    job, index = resolver.task_type, resolver.task_id
    if job is None or index is None:
        raise errors.InvalidArgumentError(
            "A cluster needs the type and the index of this task",
            f"the resolver gives type {job!r} and index {index!r}",
            'Set {"task": {"type": "worker", "index": 0}} in TF_CONFIG, or pass task_type and '
            "task_id to the resolver.",
        )
    if job not in (*_IN_SYNC, _EVALUATOR):
        raise errors.InvalidArgumentError(
            "A task of MultiWorkerMirroredStrategy must be a chief, a worker or an evaluator",
            f"this task is {job!r}",
            "Use rx.ParameterServerStrategy for a cluster with parameter servers.",
        )
    if job != _EVALUATOR and (job not in spec.jobs or not 0 <= index < spec.num_tasks(job)):
        raise errors.InvalidArgumentError(
            "This task must be one of the cluster",
            f"it is {job} {index}, and the cluster is {spec.as_dict()}",
            "Add the address of this task to the cluster.",
        )
    return Task(job, index)


def _require_types(resolver: object, options: object) -> None:
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise errors.InvalidArgumentError(
            "`cluster_resolver` must be a cluster resolver",
            f"it is {type(resolver).__name__}",
            "Pass e.g. rx.cluster_resolver.TFConfigClusterResolver().",
        )
    if not isinstance(options, CommunicationOptions):
        raise errors.InvalidArgumentError(
            "`communication_options` must be rx.experimental.CommunicationOptions",
            f"it is {type(options).__name__}",
            "Pass rx.experimental.CommunicationOptions(...), or leave it out.",
        )


def _require_implementation(layout: ReplicaLayout, options: CommunicationOptions) -> None:
    platform = layout.devices[0].platform
    if options.implementation is CommunicationImplementation.NCCL and platform not in (
        "gpu",
        "cuda",
        "rocm",
    ):
        raise errors.InvalidArgumentError(
            "CommunicationImplementation.NCCL needs GPUs",
            f"the devices are of kind {platform!r}",
            "Leave the implementation to AUTO.",
        )


show_in_package(MultiWorkerMirroredStrategy)
