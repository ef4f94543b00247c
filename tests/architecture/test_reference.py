"""The reference documents every public name, with a signature and an example."""

from __future__ import annotations

import inspect
import runpy
import types
from pathlib import Path
from typing import Any

import replicax as rx

DOCS = Path(__file__).parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "reference_names.py"))
# Names without an example of their own; the guides have one. A new name does not come in here.
WITHOUT_EXAMPLE = {
    "replicax.StrategyExtended",  # docs/guides/new-strategy.md
    "replicax.TPUStrategy",  # needs a TPU
    "replicax.set_virtual_cpu_devices",  # must run before anything else
    "replicax.cluster_resolver.GCEClusterResolver",
    "replicax.cluster_resolver.KubernetesClusterResolver",
    "replicax.cluster_resolver.KubernetesExecutableLocation",
    "replicax.cluster_resolver.SlurmClusterResolver",
    "replicax.cluster_resolver.UnionClusterResolver",
    "replicax.cluster_resolver.UnionResolver",
    "replicax.coordinator.ClusterCoordinator",  # needs processes
    "replicax.coordinator.PerWorkerDataset",
    "replicax.coordinator.PerWorkerIterator",
    "replicax.coordinator.RemoteValue",
    "replicax.coordinator.Watchdog",
    "replicax.coordinator.WorkerStatus",
    "replicax.data.ArrayRecordDataset",
    "replicax.data.FixedLengthRecordDataset",
    "replicax.data.TFRecordDataset",
    "replicax.experimental.CollectiveCommunication",
    "replicax.experimental.CommunicationImplementation",
    "replicax.experimental.ElasticResult",
    "replicax.experimental.MultiWorkerMirroredStrategy",
    "replicax.experimental.TPUStrategy",
    "replicax.experimental.partitioners.Partitioner",
    "replicax.keras.DatasetCreator",
    "replicax.models.EquinoxModel",  # made by the functions, which have examples
    "replicax.models.LinenModel",
    "replicax.models.NnxModel",
    "replicax.profiler.MetricsServer",
    "replicax.profiler.Trace",
    "replicax.profiler.draw",
    "replicax.profiler.merge",
    "replicax.summary.MLflowTracker",  # needs a package
    "replicax.summary.SummaryWriter",
    "replicax.summary.WandbTracker",
    "replicax.testing.LaunchedProgram",
    "replicax.testing.LocalCluster",
    "replicax.testing.Proxy",
    "replicax.testing.fill",
    "replicax.testing.small_disk",
}


def documented() -> dict[str, Any]:
    """Every name of the reference, without other spellings of it and without errors."""
    found = {}
    for path in PAGES["names_of_pages"]():
        namespace, _, name = path.rpartition(".")
        value = getattr(PAGES["_namespace"](namespace), name)
        is_own = getattr(value, "__module__", namespace) in (
            namespace,
            "replicax.variables.partitioners",
        )
        if is_own and not (isinstance(value, type) and issubclass(value, Exception)):
            found[path] = value
    return found


def examples_of(value: Any) -> str:
    members = vars(value).values() if isinstance(value, type) else ()
    return "".join(inspect.getdoc(v) or "" for v in (value, *members) if not isinstance(v, str))


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    on_pages = PAGES["names_of_pages"]()
    assert len(on_pages) == len(set(on_pages))
    namespaces = {"replicax": rx}
    for name in rx.__all__:
        if isinstance(getattr(rx, name), types.ModuleType):
            namespaces[f"replicax.{name}"] = getattr(rx, name)
    public = {
        f"{path}.{name}"
        for path, namespace in namespaces.items()
        for name in namespace.__all__
        if not isinstance(getattr(namespace, name), types.ModuleType)
    }
    assert public - set(on_pages) == set()


def test_every_public_callable_has_a_signature() -> None:
    for path, value in documented().items():
        if callable(value):
            assert inspect.signature(value) is not None, path


def test_every_public_name_has_an_example() -> None:
    names = {p: v for p, v in documented().items() if callable(v) and ".compat." not in p}
    names = {p: v for p, v in names.items() if ".contrib." not in p}
    without = {path for path, value in names.items() if ">>>" not in examples_of(value)}
    assert without <= WITHOUT_EXAMPLE
