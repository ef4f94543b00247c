"""ClusterResolver: the interface of all sources of cluster information."""

from __future__ import annotations

import abc
import collections
from collections.abc import Iterable, Mapping

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import devices, errors
from replicax.protocol.tasks import Task

_TIMES = "\N{MULTIPLICATION SIGN}"
_ACCELERATORS = ("GPU", "TPU")


class ClusterResolver(abc.ABC):
    """Resolves the cluster of a task, and the task itself.

    A subclass defines `cluster_spec`, which returns the cluster at the time of the call. It sets
    `task_type`, `task_id` and `rpc_layer`, or overrides them; it may override `master`.

    >>> class Here(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["localhost:2222"]})
    >>> Here().master("worker", 0), Here().master("worker", 0, rpc_layer="tcp")
    ('localhost:2222', 'tcp://localhost:2222')
    """

    # Defaults on the class: a subclass need not call `super().__init__()`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it is now."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, by default of this task.

        Empty if the task is unknown. With an `rpc_layer`, the address is `layer://host:port`.
        """
        job = task_type or self.task_type
        index = task_id if task_id is not None else self.task_id
        if not job or index is None:
            return ""
        found = self.cluster_spec().task_address(job, index)
        return address.with_layer(found, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        """Returns the number of accelerators of each kind of a task, by default of this task.

        Empty on CPUs; a missing kind counts 0.

        Args:
          task_type: The job of the task.
          task_id: The index of the task.
          config_proto: Accepted for portability.

        Raises:
          UnsupportedError: The accelerators of another task were asked for.
        """
        del config_proto
        known = self._accelerators_per_task()
        if known is not None:
            return _counts(known)
        if task_type not in (None, "", self.task_type) or task_id not in (None, self.task_id):
            job = task_type or self.task_type
            index = task_id if task_id is not None else self.task_id
            raise errors.UnsupportedError(
                "A task can count only its own accelerators",
                f"those of {_task_text(job, index)} were requested, and this is "
                f"{_task_text(self.task_type, self.task_id)}",
                "Call it in that task, or pass the number to the resolver.",
            )
        return _counts({k: len(devices.devices_of_kind(k)) for k in _ACCELERATORS})

    @property
    def environment(self) -> str:
        """The kind of environment where the task runs; empty if it is unknown."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this task; None if it is unknown."""
        return self._default_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this task in its job; None if it is unknown."""
        return self._default_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The scheme of the address that `master` returns, such as "grpc"; None for none."""
        return self._default_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # Overridden by resolvers that detect these values, or read them from another source.

    def _default_task_type(self) -> str | None:
        return None

    def _default_task_id(self) -> int | None:
        return None

    def _default_rpc_layer(self) -> str | None:
        return None

    def _accelerators_per_task(self) -> Mapping[str, int] | None:
        return None

    def explain(self) -> str:
        """Returns a short text: the cluster, the task, and their source."""
        return summary(self, type(self).__name__)

    def __repr__(self) -> str:
        # The task alone: `repr` must not look up a cluster over the network.
        try:
            task = _task_text(self.task_type, self.task_id)
        except errors.DistributeError:
            task = "unknown"
        return f"<{type(self).__name__}: task {task}>"


def _counts(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the kinds that exist; all others count 0."""
    return collections.Counter({kind: count for kind, count in counts.items() if count})


def summary(resolver: ClusterResolver, source: str, notes: Iterable[str] = ()) -> str:
    """Describes the results of a resolver, or its error; the notes follow, one a line."""
    try:
        spec, job, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    except errors.DistributeError as error:
        return "\n".join([f"{source}: cannot be used. {error}", *notes])
    found = f"{source}: task {_task_text(job, index)}, {_jobs_text(spec)}"
    if spec and job is not None and index is not None and not _has_task(spec, job, index):
        found += f"; {Task(job, index)} is not among them"
    return "\n".join([found, *notes])


def _task_text(job: str | None, index: int | None) -> str:
    if job is None and index is None:
        return "unknown"
    return f"{job if job is not None else '?'}/{index if index is not None else '?'}"


def _jobs_text(spec: ClusterSpec) -> str:
    if not spec:
        return "no cluster"
    return "jobs " + ", ".join(f"{job}{_TIMES}{spec.num_tasks(job)}" for job in sorted(spec.jobs))


def _has_task(spec: ClusterSpec, job: str, index: int) -> bool:
    return job in spec.jobs and index in spec.task_indices(job)
