"""SimpleClusterResolver: a cluster that the program defines."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.foundation import errors


class SimpleClusterResolver(ClusterResolver):
    """Returns the cluster and the task that it was given.

    Args:
      cluster_spec: The cluster.
      master: The result of `master()` without arguments.
      task_type: The job of this task.
      task_id: The index of this task in its job.
      environment: The kind of environment where the task runs.
      num_accelerators: The number of accelerators of each kind of every task, such as
        `{"GPU": 8}`; by default, those of this task are counted.
      rpc_layer: The scheme that `master` puts before `://`.

    Raises:
      ArgumentTypeError: An argument has another type.

    >>> cluster = ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1)
    >>> resolver.master("ps", 0)
    'a:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        for name, value, kind in (
            ("cluster_spec", cluster_spec, ClusterSpec),
            ("master", master, str),
            ("num_accelerators", {} if num_accelerators is None else num_accelerators, Mapping),
        ):
            if not isinstance(value, kind):
                raise errors.ArgumentTypeError(
                    f"`{name}` must be a {kind.__name__}",
                    f"it is of type {type(value).__name__}",
                    "Write rx.train.ClusterSpec({...})."
                    if kind is ClusterSpec
                    else f"Pass a {kind.__name__}.",
                )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = None if num_accelerators is None else dict(num_accelerators)
        self._rpc_layer = rpc_layer

    @override
    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, or the given master without a type and an index."""
        found = self._master
        if task_type is not None and task_id is not None:
            found = self._cluster_spec.task_address(task_type, task_id)
        return address.with_layer(found, rpc_layer or self.rpc_layer)

    @override
    def _accelerators_per_task(self) -> Mapping[str, int] | None:
        return self._num_accelerators

    @property
    @override
    def environment(self) -> str:
        return self._environment

    @override
    def explain(self) -> str:
        return summary(self, "SimpleClusterResolver (arguments)")

    @override
    def __repr__(self) -> str:
        return f"<{summary(self, type(self).__name__)}>"
