"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import cloudpickle
import pytest

import replicax as rx
from replicax import foundation

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
# Lists of which a reader looks up one entry: one idea at any length.
CATALOGUES = {"messages.py"}
SHELVES = {"util", "utils", "common", "helpers", "misc", "lib"}


def test_modules_are_read_in_one_sitting() -> None:
    """A long module or function has two ideas that were not separated."""
    long = []
    for path in SOURCES:
        text = path.read_text()
        if (num_lines := len(text.splitlines())) > 600 and path.name not in CATALOGUES:
            long.append(f"{path}: {num_lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                # Without its parameters: those of a command are its options.
                length = (node.end_lineno or 0) - node.body[0].lineno - docstring.count("\n")
                if length > 60:
                    long.append(f"{path}: {node.name} has {length} lines")
    assert not long, "\n".join(long)


def test_modules_have_an_owner_and_a_purpose() -> None:
    for path in SOURCES:
        assert path.stem not in SHELVES, path
        assert not re.search(r"_v\d+$", path.stem), path
        text = path.read_text()
        assert "jax._src" not in text, path
        assert path.stem == "__init__" or ast.get_docstring(ast.parse(text)), path


def test_environment_variables_are_read_and_written_in_one_module() -> None:
    found = [
        path.relative_to(ROOT / "src")
        for path in SOURCES
        if any(
            isinstance(node, ast.Attribute | ast.Name | ast.alias)
            and {"environ", "environb", "getenv", "putenv", "unsetenv"}
            & {getattr(node, name, "") for name in ("attr", "id", "name")}
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert found == [Path("replicax/foundation/settings.py")]


def test_import_has_no_side_effects() -> None:
    code = """
import os, sys
before = dict(os.environ)
import replicax
assert "jax" not in sys.modules, "the launcher would wait for it"
replicax.Variable
assert "jax" in sys.modules
assert dict(os.environ) == before, "environment changed"
optional = {"optax", "orbax", "grain", "keras", "flax", "equinox", "matplotlib", "rich"}
optional |= {"typer", "cryptography"}
assert not optional & set(sys.modules), optional & set(sys.modules)
of_clusters = "cluster cluster_resolver group launch process protocol ps transport worker".split()
found = {name for name in of_clusters if f"replicax.{name}" in sys.modules}
assert not found, f"{found} are imported for names that need no cluster"
import threading
assert threading.active_count() == 1
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend runs
assert len(jax.devices()) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


# Every name of tf.distribute (2.21), and where it stands. A reason means: not offered yet.
INVENTORY = {
    "CrossDeviceOps": "",
    "DistributedDataset": "",
    "DistributedIterator": "",
    "DistributedValues": "",
    "HierarchicalCopyAllReduce": "",
    "InputContext": "",
    "InputOptions": "",
    "InputReplicationMode": "",
    "MirroredStrategy": "",
    "MultiWorkerMirroredStrategy": "",
    "NcclAllReduce": "",
    "OneDeviceStrategy": "",
    "ParameterServerStrategy": "",
    "ReduceOp": "",
    "ReductionToOneDevice": "",
    "ReplicaContext": "",
    "RunOptions": "",
    "Server": "",
    "Strategy": "",
    "StrategyExtended": "",
    "TPUStrategy": "",
    "cluster_resolver": "",
    "coordinator": "",
    "experimental": "",
    "experimental_set_strategy": "",
    "get_replica_context": "",
    "get_strategy": "",
    "has_strategy": "",
    "in_cross_replica_context": "",
}
OWN_NAMES = {
    "CentralStorageStrategy",
    "IndexedSlices",
    "Mirrored",
    "MirroredVariable",
    "Module",
    "PerReplica",
    "PerReplicaSpec",
    "ReplicaLayout",
    "ShardedVariable",
    "SparseTensor",
    "Staleness",
    "SyncOnReadVariable",
    "TensorSpec",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "data",
    "cond",
    "device",
    "errors",
    "fori_loop",
    "function",
    "functions_run_eagerly",
    "grad",
    "make_variables",
    "metrics",
    "models",
    "nn",
    "optimizers",
    "profiler",
    "random",
    "read_variables",
    "run_functions_eagerly",
    "saved_model",
    "scan",
    "set_virtual_cpu_devices",
    "strategy_from_environment",
    "summary",
    "switch",
    "testing",
    "train",
    "value_and_grad",
    "variable_creator_scope",
    "while_loop",
}


def namespaces() -> list[types.ModuleType]:
    """`rx` and every namespace below it, such as `rx.data`."""
    below = (getattr(rx, name) for name in rx.__all__)
    return [rx, *(value for value in below if isinstance(value, types.ModuleType))]


def test_exports_are_pinned_to_the_inventory() -> None:
    offered = {name for name, reason in INVENTORY.items() if not reason}
    assert set(rx.__all__) == offered | OWN_NAMES


def test_namespaces_show_what_they_export_and_nothing_internal() -> None:
    for namespace in namespaces():
        assert len(namespace.__all__) == len(set(namespace.__all__)), namespace.__name__
        shown = {name for name in dir(namespace) if not name.startswith("_")}
        lazy = getattr(namespace, "_LAZY", ())
        assert shown == {*namespace.__all__, *lazy}, namespace.__name__
        for name in shown:
            assert hasattr(namespace, name), f"{namespace.__name__}.{name}"
    assert not {"foundation", "variables", "tracing", "show_as_public", "sys"} & set(dir(rx))


def test_every_error_is_public() -> None:
    defined = {name for name, value in vars(foundation.errors).items() if isinstance(value, type)}
    assert set(rx.errors.__all__) == defined


def test_public_classes_and_functions_show_their_public_path() -> None:
    for namespace in namespaces():
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if not isinstance(value, type | types.FunctionType):
                continue
            home = importlib.import_module(value.__module__)
            assert home in namespaces(), value
            assert getattr(home, value.__name__) is value
            for pickler in (pickle, cloudpickle):
                assert pickle.loads(pickler.dumps(value)) is value


@pytest.mark.parametrize(
    "program",
    [
        "import replicax as rx; rx.MirroredStrategy(['CPU:99'])",
        "import replicax.tf as tf; tf.distribute.MirroredStrategy(['CPU:99'])",
    ],
    ids=["replicax", "replicax.tf"],
)
def test_errors_print_under_their_public_names_in_a_program_that_uses_none(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr.splitlines()[-1].startswith("replicax.errors.InvalidArgumentError: ")


def test_public_names_are_documented() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    offered = {name for name, reason in INVENTORY.items() if not reason}
    missing = sorted(name for name in offered | OWN_NAMES if name not in text)
    assert not missing


def test_page_of_public_names_says_what_docstrings_say() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "reference" / "write_names.py"))
    command = "run `python docs/reference/write_names.py` and commit names.md"
    assert script["PAGE"].read_text() == script["page"](), command
    assert "|  |" not in script["page"](), "a public name has no docstring"


def test_public_classes_and_functions_have_docstrings() -> None:
    for name in OWN_NAMES | {n for n, reason in INVENTORY.items() if not reason}:
        value = getattr(rx, name)
        assert value.__doc__, name
