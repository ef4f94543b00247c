"""Resolvers of cloud services, on recorded answers: Kubernetes, Compute Engine, Cloud TPU."""

from __future__ import annotations

import http.server
import os
import sys
import threading
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import replicax as rx
from replicax import cluster_resolver as resolvers
from replicax.foundation import devices

X = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KUBE", "TPU_", "GCE_")):
            monkeypatch.delenv(name)


# Kubernetes.


def pod(name: str, ip: str | None, phase: str = "Running", host: str = "192.168.0.9") -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name, namespace="train"),
        status=SimpleNamespace(phase=phase, pod_ip=ip, host_ip=host),
    )


class Pods:
    """What `CoreV1Api` answers, by label selector."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self._answers = answers
        self.timeouts: list[float] = []

    def list_pod_for_all_namespaces(self, *, label_selector: str, _request_timeout: float) -> Any:
        self.timeouts.append(_request_timeout)
        return SimpleNamespace(items=self._answers[label_selector])


def test_kubernetes_pods_become_tasks_in_the_order_of_their_names() -> None:
    client = Pods(
        {
            "app=w": [pod(f"w-{i}", f"10.0.0.{i}") for i in (10, 2, 1)],
            "app=spare": [pod("spare-0", "10.0.1.1")],
            "app=ps": [pod("ps-0", "fd00::1")],
        }
    )
    resolver = resolvers.KubernetesClusterResolver(
        {"worker": ["app=w", "app=spare"], "ps": ["app=ps"]}, 2222, override_client=client
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.10:2222", "10.0.1.1:2222"],
        "ps": ["[fd00::1]:2222"],
    }
    assert client.timeouts and all(0 < timeout <= 60 for timeout in client.timeouts)
    assert (resolver.master(), resolver.task_type, resolver.task_id) == ("", None, None)
    assert "set task_type and task_id" in resolver.explain()
    resolver.task_type, resolver.task_id = "ps", 0
    assert resolver.master() == "grpc://[fd00::1]:2222"
    assert resolver.explain().splitlines() == [
        f"Kubernetes (WITHIN_CLUSTER): task ps/0, jobs ps{X}1, worker{X}4",
        "worker: pods with app=w or app=spare, port 2222",
        "ps: pods with app=ps, port 2222",
    ]


def test_kubernetes_answers_with_what_is_true_now() -> None:
    answers = {"job-name=tensorflow": [pod("a", "10.0.0.1")]}
    resolver = resolvers.KubernetesClusterResolver(override_client=Pods(answers))
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
    answers["job-name=tensorflow"].append(pod("b", None, host="10.9.9.9"))
    assert resolver.cluster_spec().task_address("worker", 1) == "10.9.9.9:8470"
    answers["job-name=tensorflow"].append(pod("c", "10.0.0.3", "Pending"))
    with pytest.raises(RuntimeError, match=r"'c' of /job:worker/task:2 .* 'Pending'") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, rx.errors.UnavailableError)


def test_kubernetes_failures_are_typed_and_keep_tokens_to_themselves() -> None:
    class Forbidden(Exception):
        status, reason = 403, "Forbidden"

    class Refusing:
        def list_pod_for_all_namespaces(self, **_: Any) -> Any:
            raise Forbidden("Bearer s3cret")

    resolver = resolvers.KubernetesClusterResolver(override_client=Refusing())
    with pytest.raises(rx.errors.UnavailableError, match=r"Forbidden \(403, Forbidden\)") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value.__cause__, Forbidden)
    assert "s3cret" not in str(caught.value) + resolver.explain()


@pytest.mark.parametrize("location", list(resolvers.KubernetesExecutableLocation))
def test_kubernetes_makes_its_own_client(monkeypatch: pytest.MonkeyPatch, location: Any) -> None:
    calls: list[str] = []
    client, config = types.ModuleType("kubernetes.client"), types.ModuleType("kubernetes.config")
    answer = Pods({"job-name=tensorflow": [pod("a", "10.0.0.1")]})
    client.CoreV1Api = lambda: answer  # type: ignore[attr-defined]
    config.load_kube_config = lambda: calls.append("OFF_CLUSTER")  # type: ignore[attr-defined]
    config.load_incluster_config = lambda: calls.append("WITHIN_CLUSTER")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    monkeypatch.setitem(sys.modules, "kubernetes.client", client)
    monkeypatch.setitem(sys.modules, "kubernetes.config", config)
    resolver = resolvers.KubernetesClusterResolver(executable_location=location)
    assert calls == [location.name]
    assert resolver.cluster_spec().num_tasks("worker") == 1


def test_kubernetes_refuses_a_place_that_is_none() -> None:
    with pytest.raises(ValueError, match="executable_location"):
        resolvers.KubernetesClusterResolver(executable_location=0)  # type: ignore[arg-type]
    assert [e.value for e in resolvers.KubernetesExecutableLocation] == [0, 1]


# Compute Engine.

PREFIX = "https://www.googleapis.com/compute/v1/projects/p/zones/z"
PAGES: list[dict[str, Any]] = [
    {
        "kind": "compute#instanceGroupsListInstances",
        "items": [{"instance": f"{PREFIX}/instances/train-b", "status": "RUNNING"}],
        "nextPageToken": "1",
    },
    {
        "kind": "compute#instanceGroupsListInstances",
        "items": [{"instance": f"{PREFIX}/instances/train-a", "status": "RUNNING"}],
    },
]
MACHINES: dict[str, Any] = {
    "train-a": {"status": "RUNNING", "networkInterfaces": [{"networkIP": "10.1.0.9"}]},
    "train-b": {"status": "RUNNING", "networkInterfaces": [{"networkIP": "10.1.0.2"}]},
}


class Answer:
    def __init__(self, value: Any, page: int = 0) -> None:
        self.value, self.page = value, page

    def execute(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Compute:
    """The part of the Compute Engine client that is used, with its own parameter names."""

    def __init__(self, pages: list[Any], machines: dict[str, Any]) -> None:
        self._pages, self._machines = pages, machines

    def instanceGroups(self) -> Any:
        return self

    def instances(self) -> Any:
        return self

    def listInstances(self, *, project: str, zone: str, instanceGroup: str, body: Any) -> Answer:
        assert (project, zone, instanceGroup) == ("p", "z", "g")
        assert body == {"instanceState": "RUNNING"}
        return Answer(self._pages[0])

    def listInstances_next(self, *, previous_request: Answer, previous_response: Any) -> Any:
        if "nextPageToken" not in previous_response:
            return None
        page = previous_request.page + 1
        return Answer(self._pages[page % len(self._pages)], page)

    def get(self, *, project: str, zone: str, instance: str) -> Answer:
        assert (project, zone) == ("p", "z")
        return Answer(self._machines[instance])


def gce(pages: Any = PAGES, machines: Any = MACHINES, **options: Any) -> Any:
    return resolvers.GCEClusterResolver(
        "p", "z", "g", 8470, service=Compute(pages, machines), **options
    )


def test_gce_machines_become_tasks_in_the_order_of_their_names() -> None:
    resolver = gce(task_id=1)
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.0.9:8470", "10.1.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://10.1.0.2:8470"
    assert resolver.master("worker", 0, rpc_layer="x") == "x://10.1.0.9:8470"
    assert resolver.explain().startswith(
        "Compute Engine (instance group 'g', zone z, project p, port 8470): "
        f"task worker/1, jobs worker{X}2"
    )
    resolver.task_id, resolver.rpc_layer = 0, None
    assert resolver.master() == "10.1.0.9:8470"
    with pytest.raises(RuntimeError, match="Create another resolver"):
        resolver.task_type = "ps"


def test_gce_with_an_empty_task_type_is_the_job_of_workers() -> None:
    resolver = gce(task_type="", task_id=1)
    assert resolver.task_type == ""
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.1.0.9:8470", "10.1.0.2:8470"]}
    assert resolver.master() == resolver.master("", 1) == gce(task_id=1).master()
    assert gce(task_id=1).master("", 0) == gce(task_id=0).master()
    assert resolver.num_accelerators("", 1) == {}


def test_gce_of_an_empty_group_is_a_job_without_tasks() -> None:
    resolver = gce([{"kind": "compute#instanceGroupsListInstances"}], task_type="ps")
    assert resolver.cluster_spec().num_tasks("ps") == 0


def test_gce_failures_are_typed() -> None:
    with pytest.raises(rx.errors.UnavailableError, match="TimeoutError"):
        gce([TimeoutError("s3cret")]).cluster_spec()
    endless = [{**PAGES[0], "items": []}]
    with pytest.raises(rx.errors.UnavailableError, match="pages"):
        gce(endless).cluster_spec()
    with pytest.raises(RuntimeError, match=r"'train-a'.*STAGING"):
        gce(machines={**MACHINES, "train-a": {"status": "STAGING"}}).cluster_spec()


# Cloud TPU.

NODE: dict[str, Any] = {
    "name": "projects/p/locations/z/nodes/my-tpu",
    "acceleratorType": "v3-32",
    "state": "READY",
    "health": "HEALTHY",
    "runtimeVersion": "tpu-ubuntu2204-base",
    "networkEndpoints": [{"ipAddress": f"10.2.0.{i}", "port": 8470} for i in range(1, 5)],
}


class Nodes:
    """The part of the Cloud TPU client that is used."""

    def __init__(self, **changes: Any) -> None:
        self._answer = {**NODE, **changes}
        self.names: list[str] = []

    def projects(self) -> Any:
        return self

    def locations(self) -> Any:
        return self

    def nodes(self) -> Any:
        return self

    def get(self, *, name: str) -> Answer:
        self.names.append(name)
        return Answer(self._answer)


def test_tpu_by_name_has_the_hosts_that_the_api_tells() -> None:
    service = Nodes()
    resolver = resolvers.TPUClusterResolver("my-tpu", "z", "p", service=service)
    hosts = [f"10.2.0.{i}:8470" for i in range(1, 5)]
    assert resolver.cluster_spec().as_dict() == {"worker": hosts}
    assert set(service.names) == {"projects/p/locations/z/nodes/my-tpu"}
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == resolver.get_master() == "grpc://10.2.0.1:8470"
    assert resolver.master("worker", 3) == "grpc://10.2.0.4:8470"
    assert resolver.num_accelerators() == {"TPU": 8}
    assert resolver.tpu_hardware_feature == "v3-32"
    assert resolver.get_coordination_service_leader() == "/job:worker/task:0"
    resolver.set_tpu_topology(b"topology")
    found = resolver.get_tpu_system_metadata()
    assert found[:4] == (32, 4, 8, b"topology")
    assert found.devices[-1] == "/job:worker/replica:0/task:3/device:TPU:7"
    assert resolver.explain() == (
        "TPU (Cloud TPU API, projects/p/locations/z/nodes/my-tpu, from arguments): "
        f"task worker/0, jobs worker{X}4"
    )


@pytest.mark.parametrize(
    ("accelerator", "hosts", "per_host"), [("v4-16", 2, 4), ("v5litepod-16", 4, 4), ("v2-8", 1, 8)]
)
def test_tpu_devices_are_those_that_jax_sees(accelerator: str, hosts: int, per_host: int) -> None:
    endpoints = NODE["networkEndpoints"][:hosts]
    service = Nodes(acceleratorType=accelerator, networkEndpoints=endpoints)
    resolver = resolvers.TPUClusterResolver("my-tpu", "z", "p", service=service)
    assert resolver.num_accelerators() == {"TPU": per_host}


@pytest.mark.parametrize(
    "changes",
    [{"state": "CREATING"}, {"health": "UNHEALTHY_MAINTENANCE"}, {"networkEndpoints": [{}]}],
)
def test_tpu_that_is_not_ready_is_refused(changes: Any) -> None:
    resolver = resolvers.TPUClusterResolver("my-tpu", "z", "p", service=Nodes(**changes))
    with pytest.raises(RuntimeError, match="my-tpu") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, rx.errors.UnavailableError)
    assert "cannot be used" in resolver.explain()


def test_tpu_with_a_coordinator() -> None:
    resolver = resolvers.TPUClusterResolver(
        "my-tpu", "z", "p", coordinator_name="chief", coordinator_address="c:1", service=Nodes()
    )
    assert resolver.cluster_spec().task_address("chief", 0) == "c:1"
    with pytest.raises(ValueError, match="together"):
        resolvers.TPUClusterResolver("my-tpu", coordinator_name="chief", service=Nodes())


def test_tpu_addresses_and_local_tpus_need_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = resolvers.TPUClusterResolver.connect("grpc://1.2.3.4:8470,grpc://1.2.3.5:8471")
    assert resolver.cluster_spec().job_tasks("worker") == ["1.2.3.4:8470", "1.2.3.5:8471"]
    assert (resolver.tpu_hardware_feature, resolver.num_accelerators()) == (None, {})
    with resolvers.TPUClusterResolver("local") as local:
        assert (local.cluster_spec().as_dict(), local.master()) == ({}, "")
        assert local.get_tpu_system_metadata().num_cores == 0
        monkeypatch.setattr(devices, "devices_of_kind", lambda kind: [0] * 4 * (kind == "TPU"))
        assert local.num_accelerators() == {"TPU": 4}
        assert local.get_tpu_system_metadata()[:3] == (4, 1, 4)
        assert local.explain() == "TPU (arguments): the TPUs of this machine, no cluster"


def test_tpu_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="TPU_NAME"):
        resolvers.TPUClusterResolver()
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "t-0.svc,t-1.svc")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    resolver = resolvers.TPUClusterResolver()
    assert resolver.master() == "grpc://t-1.svc:8470"
    assert resolver.explain().startswith("TPU (addresses from TPU_WORKER_HOSTNAMES): task worker/1")
    monkeypatch.setenv("TPU_WORKER_ID", "x")
    with pytest.raises(ValueError, match="TPU_WORKER_ID"):
        resolvers.TPUClusterResolver()
    monkeypatch.setenv("TPU_NAME", "projects/p/locations/z/nodes/my-tpu")
    assert resolvers.TPUClusterResolver(service=Nodes()).cluster_spec().num_tasks("worker") == 4
    monkeypatch.setenv("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "grpc://[fd00::1]:8470,fd00::2")
    assert resolvers.TPUClusterResolver().cluster_spec().job_tasks("worker") == [
        "[fd00::1]:8470",
        "[fd00::2]:8470",
    ]


@pytest.fixture
def metadata_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    answers = {"project/project-id": "p", "instance/zone": "projects/123/zones/z"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = answers.get(self.path.removeprefix("/computeMetadata/v1/"))
            is_good = known is not None and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_good else 403)
            self.end_headers()
            self.wfile.write((known or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


def test_tpu_zone_and_project_are_those_of_the_machine(metadata_server: None) -> None:
    resolver = resolvers.TPUClusterResolver("my-tpu", service=Nodes())
    assert "projects/p/locations/z/nodes/my-tpu" in resolver.explain()


def test_tpu_without_a_metadata_server_asks_for_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(rx.errors.UnavailableError, match="Pass `zone`"):
        resolvers.TPUClusterResolver("my-tpu", project="p", service=Nodes())


# Clients.


@pytest.mark.parametrize(
    ("make", "extra"),
    [
        (resolvers.KubernetesClusterResolver, "kubernetes"),
        (lambda: resolvers.GCEClusterResolver("p", "z", "g", 1), "gce"),
        (lambda: resolvers.TPUClusterResolver("my-tpu", "z", "p"), "tpu"),
    ],
)
def test_a_missing_client_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, make: Any, extra: str
) -> None:
    for package in ("kubernetes", "googleapiclient"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.discovery", None)
        monkeypatch.setitem(sys.modules, f"{package}.client", None)
    with pytest.raises(ImportError, match=rf"pip install replicax\[{extra}\]") as caught:
        make()
    assert isinstance(caught.value, rx.errors.MissingDependencyError)


def test_google_clients_are_made_with_the_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    discovery = types.ModuleType("googleapiclient.discovery")

    def build(api: str, version: str, **options: Any) -> Any:
        calls.append((api, version, options))
        return Compute(PAGES, MACHINES) if api == "compute" else Nodes()

    discovery.build = build  # type: ignore[attr-defined]
    package = types.ModuleType("googleapiclient")
    monkeypatch.setitem(sys.modules, "googleapiclient", package)
    monkeypatch.setitem(sys.modules, "googleapiclient.discovery", discovery)
    monkeypatch.setenv("TPU_API_DISCOVERY_URL", "https://tpu.example.com/{api}")
    assert resolvers.GCEClusterResolver("p", "z", "g", 1).cluster_spec().num_tasks("worker") == 2
    key = object()
    resolvers.TPUClusterResolver("my-tpu", "z", "p", credentials=key, discovery_url="unused")
    assert calls == [
        ("compute", "v1", {"credentials": None, "cache_discovery": False}),
        (
            "tpu",
            "v2",
            {
                "credentials": key,
                "cache_discovery": False,
                "discoveryServiceUrl": "https://tpu.example.com/{api}",
            },
        ),
    ]
