"""TPUClusterResolver: the hosts of a Cloud TPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import clients
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.failures import NotReadyError
from replicax.foundation import devices, errors, lazy, settings
from replicax.protocol.tasks import Task

if TYPE_CHECKING:
    import urllib.request as urllib_request
else:
    urllib_request = lazy.module("urllib.request")

_LOCAL = "local"
_DEFAULT_PORT = 8470
_ACCELERATOR = re.compile(r"(?P<generation>v\d+[a-z]*)-(?P<size>\d{1,6})", re.ASCII)
# Types of these generations count two cores for each device that JAX sees.
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
_METADATA_TIMEOUT_S = 5.0
# The variables with a list of hosts, and those that are tried in turn.
_LISTS = (settings.KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, settings.TPU_WORKER_HOSTNAMES)
_VARIABLES = (_LISTS[0], settings.TPU_NAME, _LISTS[1])


@dataclasses.dataclass(frozen=True)
class TPUNode:
    """A TPU.

    Attributes:
      addresses: The addresses of its hosts, in order.
      accelerator_type: Its type, such as "v3-8"; None if it is unknown.
    """

    addresses: tuple[str, ...]
    accelerator_type: str | None = None

    @property
    def devices_per_host(self) -> int | None:
        """The number of devices that JAX sees on each host; None if it is unknown.

        >>> TPUNode(("a:8470", "b:8470"), "v3-16").devices_per_host
        8
        """
        match = _ACCELERATOR.fullmatch(self.accelerator_type or "")
        if match is None or not self.addresses:
            return None
        per_device = _CORES_PER_DEVICE.get(match.group("generation"), 1)
        return int(match.group("size")) // per_device // len(self.addresses)


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

    Raises:
      InvalidArgumentError: No TPU is named, its variables are wrong, or only one part of the
        coordinator is given.

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
        node = TPUNode(("",)) if self._tpu == _LOCAL else self._node()
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

    def _node(self) -> TPUNode:
        if self._full_name is None:
            return TPUNode(parse_endpoints(self._tpu))
        return describe(self._service, self._full_name)


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
        project = metadata("project/project-id", "project")
    if not zone:
        zone = metadata("instance/zone", "zone").rpartition("/")[2]
    return f"projects/{project}/locations/{zone}/nodes/{tpu}"


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parses a list of hosts, with or without `grpc://` and port.

    >>> parse_endpoints("grpc://10.0.0.1:8470,10.0.0.2")
    ('10.0.0.1:8470', '10.0.0.2:8470')
    """
    found = []
    for entry in text.split(","):
        host = entry.strip().rpartition("://")[2]
        has_port = re.search(r"(?:^[^:]*|\]):\d+$", host) is not None
        found.append(host if has_port else address.join(host.strip("[]"), _DEFAULT_PORT))
    return tuple(found)


def read_node(reply: Mapping[str, Any], name: str) -> TPUNode:
    """Parses the API's description of a TPU, which must be ready for use."""
    state, health = reply.get("state", "READY"), reply.get("health", "HEALTHY")
    if state != "READY" or health not in ("HEALTHY", "HEALTH_UNSPECIFIED"):
        raise NotReadyError(
            f"The TPU {name!r} must be ready and healthy",
            f"its state is {state}, its health is {health}",
            "Wait until it has started, or repair it.",
        )
    endpoints = reply.get("networkEndpoints") or [reply]
    addresses = [
        address.join(endpoint["ipAddress"], endpoint.get("port") or _DEFAULT_PORT)
        for endpoint in endpoints
        if endpoint.get("ipAddress")
    ]
    if not addresses:
        raise NotReadyError(
            f"The TPU {name!r} must have an address",
            "its description has none",
            "Wait until it has started.",
        )
    return TPUNode(tuple(addresses), reply.get("acceleratorType"))


def metadata(path: str, argument: str) -> str:
    """Queries the metadata server of Compute Engine about this machine.

    Args:
      path: The path of the entry, such as "project/project-id".
      argument: The argument that makes the query unnecessary, for the error message.
    """
    host = settings.GCE_METADATA_HOST.read("metadata.google.internal")
    request = urllib_request.Request(
        f"http://{host}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    # The server is on this machine's own link: never through a proxy.
    opener = urllib_request.build_opener(urllib_request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_TIMEOUT_S) as reply:
            return reply.read(10_000).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.UnavailableError(
            f"Without `{argument}`, the metadata server of Compute Engine must be reachable",
            f"the request failed ({type(error).__name__})",
            f"Pass `{argument}`; use tpu='local' for TPUs of this machine.",
        ) from error


def describe(service: Any, name: str) -> TPUNode:
    """Queries the API for a TPU by its full name."""
    request = service.projects().locations().nodes().get(name=name)
    return read_node(clients.call("the Cloud TPU API", request.execute), name)
