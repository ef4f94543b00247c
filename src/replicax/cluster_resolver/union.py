"""UnionResolver: merges the clusters of several resolvers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.failures import DuplicateTaskError
from replicax.foundation import errors, spelling
from replicax.protocol.tasks import Task

_OPTIONS = ("rpc_layer", "task_type", "task_id")
_Tasks = list[str] | dict[int, str]


class UnionResolver(ClusterResolver):
    """Merges the clusters of several resolvers.

    Lists of one job are concatenated. If one of them is a dict from index to address, all are
    merged by index, and indices must be unique. Everything else, such as the own task, is that of
    the first resolver.

    Args:
      *args: The resolvers.
      **kwargs: `task_type`, `task_id` and `rpc_layer`, which override those of the first
        resolver.

    Raises:
      InvalidArgumentError: There is no resolver, or an option that does not exist.
      ArgumentTypeError: An argument is not a resolver.
      DuplicateTaskError: `cluster_spec` finds a task that two resolvers describe differently.

    >>> import replicax as rx
    >>> workers, servers = (
    ...     rx.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec({job: [address]}))
    ...     for job, address in (("worker", "a:2222"), ("ps", "b:2222"))
    ... )
    >>> rx.cluster_resolver.UnionResolver(workers, servers).cluster_spec()
    ClusterSpec({'ps': ['b:2222'], 'worker': ['a:2222']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _OPTIONS:
                raise errors.InvalidArgumentError(
                    f"The options of UnionResolver are {', '.join(_OPTIONS)}",
                    f"{name!r} was given",
                    spelling.advice([name], _OPTIONS),
                )
        if not args:
            raise errors.InvalidArgumentError(
                "UnionResolver needs at least one resolver",
                "none was given",
                "Pass one or more, such as UnionResolver(a, b).",
            )
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise errors.ArgumentTypeError(
                    "UnionResolver takes resolvers",
                    f"an argument is of type {type(resolver).__name__}",
                    "Put a ClusterSpec into a SimpleClusterResolver first.",
                )
        self._resolvers = args
        self._task_type = kwargs.get("task_type")
        self._task_id = kwargs.get("task_id")
        self._rpc_layer = kwargs.get("rpc_layer")

    @override
    def cluster_spec(self) -> ClusterSpec:
        found: dict[str, list[_Tasks]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                found.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _join(job, parts) for job, parts in found.items()})

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, or the first's master without a type and an index."""
        if task_type is not None and task_id is not None:
            found = self.cluster_spec().task_address(task_type, task_id)
            return address.with_layer(found, rpc_layer or self.rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer or self._rpc_layer)

    @override
    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> Mapping[str, int]:
        if task_type in (None, self.task_type) and task_id in (None, self.task_id):
            return self._resolvers[0].num_accelerators(config_proto=config_proto)
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    @override
    def environment(self) -> str:
        return self._resolvers[0].environment

    @override
    def _default_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    @override
    def _default_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    @override
    def _default_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer

    @override
    def explain(self) -> str:
        parts = [
            f"  {number}. {line}" if place == 0 else f"     {line}"
            for number, resolver in enumerate(self._resolvers, start=1)
            for place, line in enumerate(resolver.explain().splitlines())
        ]
        return summary(self, f"UnionResolver (of {len(self._resolvers)})", parts)


def _join(job: str, parts: list[_Tasks]) -> _Tasks:
    if all(isinstance(part, list) for part in parts):
        return [text for part in parts for text in part if isinstance(text, str)]
    joined: dict[int, str] = {}
    for part in parts:
        for index, text in part.items() if isinstance(part, dict) else enumerate(part):
            if index in joined:
                raise DuplicateTaskError(
                    "No task may be described by two resolvers",
                    f"{Task(job, index)} is {joined[index]!r} in one and {text!r} in another",
                    "Give each task its own index.",
                )
            joined[index] = text
    return joined
