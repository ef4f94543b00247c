"""A Cloud TPU as Google's API and its metadata server describe it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replicax.cluster import address
from replicax.cluster_resolver import clients
from replicax.cluster_resolver.failures import NotReadyError
from replicax.foundation import errors, lazy, settings

if TYPE_CHECKING:
    import urllib.request as urllib_request
else:
    urllib_request = lazy.module("urllib.request")

DEFAULT_PORT = 8470
_ACCELERATOR = re.compile(r"(?P<generation>v\d+[a-z]*)-(?P<size>\d{1,6})", re.ASCII)
# Types of these generations count two cores for each device that JAX sees.
_CORES_PER_DEVICE = {"v4": 2, "v5p": 2}
_METADATA_TIMEOUT_S = 5.0


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


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parses a list of hosts, with or without `grpc://` and port.

    >>> parse_endpoints("grpc://10.0.0.1:8470,10.0.0.2")
    ('10.0.0.1:8470', '10.0.0.2:8470')
    """
    found = []
    for entry in text.split(","):
        host = entry.strip().rpartition("://")[2]
        has_port = re.search(r"(?:^[^:]*|\]):\d+$", host) is not None
        found.append(host if has_port else address.join(host.strip("[]"), DEFAULT_PORT))
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
        address.join(endpoint["ipAddress"], endpoint.get("port") or DEFAULT_PORT)
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
