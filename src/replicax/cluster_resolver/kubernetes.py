"""KubernetesClusterResolver: the pods that have certain labels."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from replicax.cluster import address
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import clients
from replicax.cluster_resolver.base import ClusterResolver, summary
from replicax.cluster_resolver.failures import NotReadyError
from replicax.foundation import errors
from replicax.protocol.tasks import Task

_DEFAULT_LABELS = {"worker": ["job-name=tensorflow"]}
_EXTRA = "kubernetes"


class KubernetesExecutableLocation(enum.Enum):
    """Where this program runs, which decides how it finds the Kubernetes API.

    >>> KubernetesExecutableLocation.OFF_CLUSTER
    <KubernetesExecutableLocation.OFF_CLUSTER: 1>
    """

    # In a pod of the cluster: the service account of the pod is used.
    WITHIN_CLUSTER = 0
    # Outside of the cluster: the user's kubeconfig is used.
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Resolves the pods that have certain labels.

    The tasks of a job are numbered by label, then by the names of the pods, where `worker-2` comes
    before `worker-10`. The resolver cannot detect its own task: set `task_type` and `task_id`.

    Args:
      job_to_label_mapping: The label selectors of the pods of each job;
        `{"worker": ["job-name=tensorflow"]}` by default.
      tf_server_port: The port of the servers in the pods.
      rpc_layer: The scheme that `master` puts before `://`.
      override_client: The client to use, such as `kubernetes.client.CoreV1Api()` with loaded
        credentials; created by default.
      executable_location: Where this program runs.

    Raises:
      InvalidArgumentError: `executable_location` is not a member of that enum.

    >>> from types import SimpleNamespace as Reply
    >>> status = Reply(phase="Running", pod_ip="10.0.0.1", host_ip="10.0.1.1")
    >>> pod = Reply(metadata=Reply(name="w0"), status=status)
    >>> client = Reply(list_pod_for_all_namespaces=lambda **options: Reply(items=[pod]))
    >>> resolver = KubernetesClusterResolver({"worker": ["job-name=train"]}, override_client=client)
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise errors.InvalidArgumentError(
                "`executable_location` must be a KubernetesExecutableLocation",
                f"it is {executable_location!r}",
                "Pass WITHIN_CLUSTER or OFF_CLUSTER of that enum.",
            )
        self._labels = {k: list(v) for k, v in (job_to_label_mapping or _DEFAULT_LABELS).items()}
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._location = executable_location
        self._client = override_client
        if override_client is None:
            self._client = _connect(executable_location)

    @override
    def cluster_spec(self) -> ClusterSpec:
        """Queries Kubernetes for the pods; all of them must be running.

        Raises:
          NotReadyError: A pod does not run yet, or has no address.
        """
        return ClusterSpec(
            {
                job: _addresses(job, self._pods(selectors), self._port)
                for job, selectors in self._labels.items()
            }
        )

    @override
    def explain(self) -> str:
        notes = [
            f"{job}: pods with {' or '.join(selectors)}, port {self._port}"
            for job, selectors in self._labels.items()
        ]
        if self._task_type is None or self._task_id is None:
            notes.append("the own task is unknown: set task_type and task_id")
        return summary(self, f"Kubernetes ({self._location.name})", notes)

    def _pods(self, selectors: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for selector in selectors:
            reply = clients.call(
                "the Kubernetes API",
                lambda selector=selector: self._client.list_pod_for_all_namespaces(
                    label_selector=selector, _request_timeout=clients.TIMEOUT_S
                ),
            )
            found += sorted(reply.items, key=lambda pod: _natural(pod.metadata.name))
        return found


def _connect(location: KubernetesExecutableLocation) -> Any:
    name = "KubernetesClusterResolver"
    client = clients.require("kubernetes.client", name, _EXTRA)
    config = clients.require("kubernetes.config", name, _EXTRA)

    def load() -> Any:
        if location is KubernetesExecutableLocation.OFF_CLUSTER:
            config.load_kube_config()
        else:
            config.load_incluster_config()
        return client.CoreV1Api()

    return clients.call("the configuration of Kubernetes", load)


def _addresses(job: str, pods: Sequence[Any], port: int) -> list[str]:
    found: list[str] = []
    for index, pod in enumerate(pods):
        # Two pods of one host differ in the pod's address only.
        hosts = (pod.status.pod_ip, pod.status.host_ip)
        host = next((text for text in hosts if isinstance(text, str) and text), None)
        if pod.status.phase != "Running" or host is None:
            raise NotReadyError(
                f"The pod {pod.metadata.name!r} of {Task(job, index)} must be "
                "running and have an address",
                f"its phase is {pod.status.phase!r}",
                "Wait until all pods run, or select other pods.",
            )
        found.append(address.join(host, port))
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts numbers in names by their value."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in re.split(r"(\d+)", name, flags=re.ASCII)
    ]
