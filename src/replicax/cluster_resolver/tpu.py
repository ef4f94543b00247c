"""TPUClusterResolver: the hosts of a Cloud TPU."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import clients, tpu_node
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.foundation import devices, errors, settings
from replicax.protocol.tasks import Task

_LOCAL = "local"
# The variables with a list of hosts, and those that are tried in turn.
_LISTS = (settings.KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, settings.TPU_WORKER_HOSTNAMES)
_VARIABLES = (_LISTS[0], settings.TPU_NAME, _LISTS[1])


class TPUSystemMetadata(NamedTuple):
    """The size of a TPU: its cores, as JAX counts devices, and its hosts."""

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: object
    devices: tuple[str, ...]


class TPUClusterResolver(ClusterResolver):
    """Resolves the hosts of a Cloud TPU.

    Args:
      tpu: The name of the TPU; or the addresses of its hosts, `grpc://host:port`, separated
        by commas; or "local" for the TPUs of this machine. By default the variables
        KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME and TPU_WORKER_HOSTNAMES are tried.
      zone: The zone of the TPU; by default that of this machine.
      project: The project of the TPU; by default that of this machine.
      job_name: The job of the hosts.
      coordinator_name: An additional job, for the coordinator.
      coordinator_address: The address of the coordinator.
      credentials: The credentials, or "default" for those of the environment.
      service: The client to use instead of the credentials, as made by
        `googleapiclient.discovery.build("tpu", "v2")`.
      discovery_url: The URL of the description of the API; TPU_API_DISCOVERY_URL overrides it.

    >>> TPUClusterResolver("grpc://10.0.0.1:8470,grpc://10.0.0.2:8470").cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if (coordinator_name is None) != (coordinator_address is None):
            raise errors.InvalidArgumentError(
                "`coordinator_name` and `coordinator_address` must be given together",
                "one of them is missing",
                "Start an rx.Server for the coordinator and pass its address.",
            )
        self._tpu, self._source = (tpu, "arguments") if tpu else _from_environment()
        self._task_type = job_name
        self._task_id = _own_index() if self._source == settings.TPU_WORKER_HOSTNAMES else 0
        self._rpc_layer = "grpc"
        self._coordinator = (
            {coordinator_name: [coordinator_address]} if coordinator_name is not None else {}
        )
        self._topology: object = None
        self._service = service
        self._full_name: str | None = None
        if self._is_named():
            if service is None:
                url = settings.TPU_API_DISCOVERY_URL.read(discovery_url)
                options = {"discoveryServiceUrl": url} if url else {}
                self._service = clients.google_service("tpu", "v2", credentials, **options)
            self._full_name = _full_name(self._tpu, zone, project)

    @classmethod
    def connect(
        cls, tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> Self:
        """Creates a resolver and checks that the TPU is ready; JAX starts the devices itself."""
        resolver = cls(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Returns the hosts, from the API if the TPU was given by name.

        Empty for the TPUs of this machine.
        """
        if self._tpu == _LOCAL:
            return ClusterSpec({})
        return ClusterSpec({self.get_job_name(): list(self._node().addresses), **self._coordinator})

    @override
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        if self._tpu == _LOCAL:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type, self.task_id
        found = self.cluster_spec().task_address(task_type or "", task_id or 0)
        return address.with_layer(found, rpc_layer or self.rpc_layer)

    def get_master(self) -> str:
        """Returns the address of this task."""
        return self.master()

    def get_job_name(self) -> str:
        """Returns the job of the hosts."""
        return self.task_type or "worker"

    def get_coordination_service_leader(self) -> str:
        """Returns the task of the first host, which leads the coordination service."""
        return str(Task(self.get_job_name(), 0))

    @override
    def _accelerators_per_task(self) -> Mapping[str, int] | None:
        per_host = None if self._tpu == _LOCAL else self._node().devices_per_host
        return None if per_host is None else {"TPU": per_host}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Returns the size of the TPU: from its type, or the number of local devices."""
        node = tpu_node.TPUNode(("",)) if self._tpu == _LOCAL else self._node()
        per_host = node.devices_per_host
        if per_host is None:
            per_host = len(devices.devices_of_kind("TPU"))
        num_hosts = len(node.addresses)
        names = tuple(
            Task(self.get_job_name(), host).device("TPU", index)
            for host in range(num_hosts)
            for index in range(per_host)
        )
        return TPUSystemMetadata(len(names), num_hosts, per_host, self._topology, names)

    def set_tpu_topology(self, serialized_tpu_topology: object) -> None:
        """Stores a topology for `get_tpu_system_metadata`; JAX needs none."""
        self._topology = serialized_tpu_topology

    @property
    def tpu_hardware_feature(self) -> str | None:
        """The type of the TPU, such as "v3-8"; None if it is unknown."""
        return None if self._tpu == _LOCAL else self._node().accelerator_type

    @override
    def explain(self) -> str:
        if self._tpu == _LOCAL:
            return f"TPU ({self._source}): the TPUs of this machine, no cluster"
        if self._full_name is None:
            return summary(self, f"TPU (addresses from {self._source})")
        return summary(self, f"TPU (Cloud TPU API, {self._full_name}, from {self._source})")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Does nothing: a resolver has no open resources."""

    def _is_named(self) -> bool:
        is_list = "://" in self._tpu or self._source in _LISTS
        return self._tpu != _LOCAL and not is_list

    def _node(self) -> tpu_node.TPUNode:
        if self._full_name is None:
            return tpu_node.TPUNode(tpu_node.parse_endpoints(self._tpu))
        return tpu_node.describe(self._service, self._full_name)


def _from_environment() -> tuple[str, str]:
    for variable in _VARIABLES:
        if value := variable.read():
            return value, variable
    raise errors.InvalidArgumentError(
        "`tpu` must name a TPU",
        f"it is empty, and none of {', '.join(_VARIABLES)} is set",
        "Pass the name of a TPU, or 'local' for the TPUs of this machine.",
    )


def _own_index() -> int:
    value = settings.TPU_WORKER_ID.read("0")
    index = settings.as_index(value)
    if index is None:
        raise errors.InvalidArgumentError(
            f"The environment variable {settings.TPU_WORKER_ID} must be a number",
            f"it is {value[:40]!r}",
            "Set it to the index of this host.",
        )
    return index


def _full_name(tpu: str, zone: str | None, project: str | None) -> str:
    if tpu.startswith("projects/"):
        return tpu
    if not project:
        project = tpu_node.metadata("project/project-id", "project")
    if not zone:
        zone = tpu_node.metadata("instance/zone", "zone").rpartition("/")[2]
    return f"projects/{project}/locations/{zone}/nodes/{tpu}"
