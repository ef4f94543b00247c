"""GCEClusterResolver: the running machines of an instance group of Compute Engine."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import clients
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.failures import NotReadyError
from replicax.foundation import errors

_SERVICE = "the Compute Engine API"
# 500 machines a page; no group is larger than a few thousand.
_MAX_PAGES = 100

# The job of the machines, also where `task_type` is empty.
_DEFAULT_JOB = "worker"


class GCEClusterResolver(ClusterResolver):
    """Resolves the running machines of an instance group as one job.

    The tasks are numbered by the names of the machines.

    Args:
      project: The project of the group.
      zone: The zone of the group.
      instance_group: The name of the group.
      port: The port of the servers on the machines.
      task_type: The name of the job, "worker" if it is empty; it cannot be changed later.
      task_id: The index of this task.
      rpc_layer: The scheme that `master` puts before `://`.
      credentials: The credentials, or "default" for those of the environment.
      service: The client to use instead of the credentials, as made by
        `googleapiclient.discovery.build("compute", "v1")`.

    >>> resolver = GCEClusterResolver(
    ...     "my-project", "us-central1-a", "my-group", 8470, service=object()
    ... )  # without `service`: the credentials of the environment
    >>> resolver.task_type, resolver.task_id
    ('worker', 0)
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = _DEFAULT_JOB,
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: object = "default",
        service: Any = None,
    ) -> None:
        self._project = project
        self._zone = zone
        self._instance_group = instance_group
        self._port = port
        self._job = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        if service is None:
            service = clients.google_service("compute", "v1", credentials)
        self._service = service

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Queries Compute Engine for the machines that run now.

        Raises:
          NotReadyError: A machine has no address yet.
          UnavailableError: The list of the group does not end.
        """
        return ClusterSpec(
            {
                self._job or _DEFAULT_JOB: [
                    address.join(self._host(name), self._port) for name in sorted(self._names())
                ]
            }
        )

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        return super().master(task_type or self._job or _DEFAULT_JOB, task_id, rpc_layer)

    @property
    @override
    def task_type(self) -> str | None:
        return self._job

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise errors.ContextError(
            "The job of a GCEClusterResolver cannot be changed",
            f"it was set from {self._job!r} to {task_type!r}",
            "Create another resolver.",
        )

    @override
    def explain(self) -> str:
        source = (
            f"Compute Engine (instance group {self._instance_group!r}, zone {self._zone}, "
            f"project {self._project}, port {self._port})"
        )
        return summary(self, source, ["machines that do not run are omitted"])

    def _names(self) -> list[str]:
        groups = self._service.instanceGroups()
        request = groups.listInstances(
            project=self._project,
            zone=self._zone,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
        )
        names: list[str] = []
        for _ in range(_MAX_PAGES):
            reply = clients.call(_SERVICE, request.execute)
            names += [item["instance"].rpartition("/")[2] for item in reply.get("items", [])]
            request = groups.listInstances_next(previous_request=request, previous_response=reply)
            if request is None:
                return names
        raise errors.UnavailableError(
            f"The list of instance group {self._instance_group!r} must end",
            f"it has more than {_MAX_PAGES} pages",
            "Use a smaller group.",
        )

    def _host(self, name: str) -> str:
        request = self._service.instances().get(
            project=self._project, zone=self._zone, instance=name
        )
        reply = clients.call(_SERVICE, request.execute)
        for interface in reply.get("networkInterfaces", []):
            host = interface.get("networkIP") or interface.get("ipv6Address")
            if host:
                return host
        raise NotReadyError(
            f"The machine {name!r} of instance group {self._instance_group!r} must have an "
            "address in its network",
            f"it has none; its status is {reply.get('status', 'unknown')}",
            "Wait until it has started.",
        )
