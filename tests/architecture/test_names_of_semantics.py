"""Every name that SEMANTICS lists resolves with a compatible signature, or has a reason not to."""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import semantics_names

import replicax as rx
import replicax.compat.v1.distribute as v1
import replicax.tf as tf
from replicax.contrib import distribute as contrib
from replicax.foundation.options import CommunicationOptions

NAMES = semantics_names.kept()

_PRIVATE_IN_V2 = "deprecated in v2; rx.compat.v1.distribute.Strategy has it"
_NO_RPC = "an RPC framework of its own; use rx.coordinator.ClusterCoordinator.schedule"
# Names that are not offered, and why: names of appendix A, or sections and names of section 1. A
# name that is offered must not be here.
NOT_OFFERED = {
    "tf.distribute.Strategy.configure": _PRIVATE_IN_V2,
    "tf.distribute.Strategy.experimental_distribute_datasets_from_function": _PRIVATE_IN_V2,
    "tf.distribute.Strategy.experimental_run": _PRIVATE_IN_V2,
    "tf.distribute.Strategy.make_dataset_iterator": _PRIVATE_IN_V2,
    "tf.distribute.Strategy.make_input_fn_iterator": _PRIVATE_IN_V2,
    "tf.distribute.Strategy.update_config_proto": _PRIVATE_IN_V2,
    "tf.distribute.experimental.rpc": _NO_RPC,
    "tf.distribute.experimental.rpc.Client": _NO_RPC,
    "tf.distribute.experimental.rpc.Client.call": _NO_RPC,
    "tf.distribute.experimental.rpc.Client.create": _NO_RPC,
    "tf.distribute.experimental.rpc.Server": _NO_RPC,
    "tf.distribute.experimental.rpc.Server.create": _NO_RPC,
    "tf.distribute.experimental.rpc.Server.register": _NO_RPC,
    "tf.distribute.experimental.rpc.Server.start": _NO_RPC,
    "1.12 experimental.rpc.Server.create": _NO_RPC,
    "1.12 rpc.Client.create": _NO_RPC,
    "1.12 register": _NO_RPC,
    "1.12 call": _NO_RPC,
    "1.12 start": _NO_RPC,
    "1.3 copy.copy": "a function of Python, not a name of tf.distribute",
    "1.3 copy.deepcopy": "a function of Python, not a name of tf.distribute",
    "1.9 options": "an argument, not a name",
    "1.13 run_concurrently": "an argument of call_for_each_tower, not a name",
    "1.13 PerDeviceDataset": "the type of a result, never constructed; it is rx.DistributedDataset",
    "1.13 Optimizer._distributed_apply": "private; apply_gradients does it in cross-tower code",
}
# What makes an object whose attributes are set when it is made.
INSTANCES: dict[Any, Any] = {
    rx.InputContext: rx.InputContext,
    rx.experimental.ValueContext: rx.experimental.ValueContext,
    CommunicationOptions: CommunicationOptions,
    rx.RunOptions: rx.RunOptions,
    rx.cluster_resolver.TFConfigClusterResolver: rx.cluster_resolver.TFConfigClusterResolver,
}
# Classes that only the library makes, from arguments of its own.
MADE_BY_THE_LIBRARY = {
    "tf.distribute.DistributedDataset",
    "tf.distribute.DistributedIterator",
    "tf.distribute.DistributedValues",
    "tf.distribute.coordinator.PerWorkerValue",
    "tf.distribute.coordinator.RemoteValue",
}
# The owners of the names of each section: classes and namespaces.
OWNERS: dict[str, list[Any]] = {
    "1.1": [v1],
    "1.2": [rx, v1, contrib],
    "1.3": [rx.Strategy, v1.Strategy],
    "1.4": [rx.StrategyExtended, v1.StrategyExtended],
    "1.5": [rx, v1, v1.experimental.TPUStrategy],
    "1.6": [rx, rx.ReplicaContext],
    "1.7": [rx],
    "1.8": [rx],
    "1.9": [rx, rx.experimental, rx.CrossDeviceOps],
    "1.10": [rx, rx.experimental, rx.experimental.partitioners, rx.coordinator],
    "1.11": [rx, rx.cluster_resolver, rx.cluster_resolver.ClusterResolver],
    "1.12": [rx],
    "1.13": [
        *(contrib.DistributionStrategy, contrib, contrib.TowerContext),
        *(rx.DistributedDataset, rx.DistributedIterator),
    ],
}
# Rows whose names are members of a class that another row names.
MEMBERS_OF = {"1.6": rx.ReplicaContext, "1.10": rx.coordinator.ClusterCoordinator}
# Parameters that the tables of section 1 abbreviate.
ABBREVIATED = {
    "1.3 colocate_vars_with": {"v": "colocate_with_variable"},
    "1.13 colocate_vars_with": {"v": "colocate_with_variable"},
    "1.12 run": {"fn": "distributed_train_function"},
}
# What `inspect` says where a class of TensorFlow hides its signature.
HIDDEN = [["*args", False], ["**kwargs", False]]


class Missing(Exception):
    """Raised for a name that does not resolve."""


def member(owner: Any, name: str) -> Any:
    """Returns an attribute, also one that only instances have."""
    try:
        return (
            inspect.getattr_static(owner, name) if isinstance(owner, type) else getattr(owner, name)
        )
    except AttributeError:
        if owner in INSTANCES:
            return getattr(INSTANCES[owner](), name)
        raise Missing(f"{owner} has no {name}") from None


# Where names of TensorFlow are, for programs that are written with `rx` ...
ROOTS: dict[str, Any] = {
    "tf.distribute": rx,
    "tf.compat.v1.distribute": v1,
    "tf.contrib.distribute": contrib,
    "tf.train": rx.train,
    "tf": contrib,
}


def roots_of_tf() -> dict[str, Any]:
    """... and for programs that import `replicax.tf`."""
    return {
        "tf.distribute": tf.distribute,
        "tf.compat.v1.distribute": tf.compat.v1.distribute,
        "tf.contrib.distribute": tf.contrib.distribute,
    }


def resolve(path: str, owners: list[Any] | None = None, roots: dict[str, Any] | None = None) -> Any:
    """Returns what a name of TensorFlow is here."""
    for prefix, root in (roots or ROOTS).items():
        if path == prefix:
            return root
        if path.startswith(prefix + "."):
            owners, path = [root], path.removeprefix(prefix + ".")
            break
    problems = []
    for owner in owners or []:
        try:
            for part in path.removeprefix(".").split("."):
                owner = member(owner, part)
            return owner
        except Missing as problem:
            problems.append(str(problem))
    raise Missing("; ".join(problems) or path)


def unwrapped(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def require_compatible(name: str, found: Any, expected: list[list[Any]]) -> None:
    """Raises unless a call with the expected parameters is a call of what was found."""
    if expected == HIDDEN:
        return
    found = unwrapped(found)
    own = list(inspect.signature(found).parameters.values())
    if not isinstance(found, type) and own and own[0].name in ("self", "cls"):
        own = own[1:]
    kinds = {p.kind for p in own}
    takes_rest = inspect.Parameter.VAR_POSITIONAL in kinds
    positional = [p for p in own if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: p for p in own}
    for index, (parameter, has_default) in enumerate(expected):
        if parameter.startswith("*"):
            assert kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}, name
            continue
        own_parameter = by_name.get(parameter)
        assert own_parameter is not None or takes_rest, f"{name} has no parameter {parameter!r}"
        if own_parameter is None:
            continue
        if own_parameter in positional:
            assert positional.index(own_parameter) == index, f"{name}: position of {parameter!r}"
        if has_default:
            assert own_parameter.default is not inspect.Parameter.empty, f"{name}({parameter})"
    required = {p.name for p in positional if p.default is inspect.Parameter.empty}
    assert required <= {parameter for parameter, _ in expected}, f"{name} needs more: {required}"


def test_the_kept_names_are_those_of_the_file() -> None:
    if not semantics_names.SEMANTICS.exists():
        pytest.skip("SEMANTICS.md is not beside this clone")
    found = semantics_names.extracted(semantics_names.SEMANTICS.read_text())
    command = "run `python tests/support/semantics_names.py`"
    assert found == NAMES, command


def test_the_lists_are_whole() -> None:
    appendix = {name for name, *_ in NAMES["appendix"]}
    assert len(NAMES["appendix"]) > 300
    assert {"tf.distribute.Strategy.run", "tf.compat.v1.distribute.get_loss_reduction"} <= appendix
    assert {section for section, _ in NAMES["tables"]} == set(OWNERS)
    assert semantics_names.parameters("a, b: Dict[str, int] = {1: 2}, c=(1, 2)") == [
        ["a", False],
        ["b", True],
        ["c", True],
    ]


@pytest.mark.parametrize("face", ["rx", "tf"])
def test_names_of_appendix_a_resolve_with_compatible_signatures(face: str) -> None:
    roots = ROOTS if face == "rx" else roots_of_tf()
    problems = []
    for name, kind, rest in NAMES["appendix"]:
        if name in NOT_OFFERED:
            continue
        try:
            found = resolve(name, roots=roots)
            if kind in ("class", "method", "function") and rest is not None:
                if name not in MADE_BY_THE_LIBRARY:
                    require_compatible(name, found, rest)
            elif kind == "alias":
                same = resolve(rest, roots=roots)
                is_function = name.endswith("CollectiveHints")  # ours warns
                assert is_function or found is same, f"{name} is not {rest}"
            elif kind == "module":
                assert isinstance(found, types.ModuleType), name
            elif kind == "enum":
                assert set(rest) <= set(found.__members__), name
        except (Missing, AssertionError) as problem:
            problems.append(f"{name}: {problem}")
    assert not problems, "\n".join(problems)


def rows() -> Iterator[tuple[str, str, str, list[Any]]]:
    """Yields section, name, arguments and possible owners of the names of section 1."""
    for section, codes in NAMES["tables"]:
        row: list[Any] = [MEMBERS_OF[section]] if section in MEMBERS_OF else []
        for code in codes:
            name, _, arguments = code.partition("(")
            yield section, name.removeprefix("."), code if arguments else "", row + OWNERS[section]
            try:
                found = resolve(name, row + OWNERS[section])
            except Missing:
                continue
            if isinstance(found, type):
                row.insert(0, found)
            elif "." in name.strip(".") and not name.startswith("tf."):
                parent = name.strip(".").rpartition(".")[0]
                row.insert(0, resolve(parent, OWNERS[section]))


def test_names_of_section_1_resolve_with_compatible_signatures() -> None:
    problems = []
    for section, name, code, owners in rows():
        if {name, f"{section} {name}"} & set(NOT_OFFERED):
            continue
        reasons = []
        for owner in owners:
            try:
                found = resolve(name, [owner])
                if code:
                    text = code.partition("(")[2].rpartition(")")[0]
                    expected = semantics_names.parameters(text)
                    words = ABBREVIATED.get(f"{section} {name}", {})
                    require_compatible(name, found, [[words.get(n, n), d] for n, d in expected])
                break
            except (Missing, AssertionError) as problem:
                reasons.append(str(problem))
        else:
            problems.append(f"{section} {name}: {'; '.join(reasons)}")
    assert not problems, "\n".join(problems)


def test_names_that_are_not_offered_have_a_reason_and_are_missing() -> None:
    listed = {name for name, *_ in NAMES["appendix"]} | {f"{s} {n}" for s, n, *_ in rows()}
    assert set(NOT_OFFERED) <= listed
    assert len(NOT_OFFERED) < 30
    for name, reason in NOT_OFFERED.items():
        assert len(reason) > 10
        if name.startswith("tf."):
            with pytest.raises(Missing):
                resolve(name)


@pytest.mark.parametrize("face", ["rx", "tf"])
def test_v1_has_no_names_that_it_had_not(face: str) -> None:
    """Members of v1 strategies that only v2 has are not there."""
    v2_only = {"gather", "experimental_distribute_values_from_function"}
    module = v1 if face == "rx" else tf.compat.v1.distribute
    strategy = module.OneDeviceStrategy("CPU:0")
    assert not [name for name in v2_only if hasattr(strategy, name)]
    listed = {n.rpartition(".")[2] for n, *_ in NAMES["appendix"] if "v1.distribute.Strategy." in n}
    assert not v2_only & listed
    assert listed <= set(dir(strategy))


def test_names_below_tf_are_imported_as_those_of_tensorflow() -> None:
    for name in (
        "distribute.experimental",
        "distribute.cluster_resolver",
        "compat.v1.distribute",
        "compat.v1.distribute.experimental",
        "contrib.distribute",
    ):
        found = importlib.import_module(f"replicax.tf.{name}")
        assert found is functools.reduce(getattr, name.split("."), tf)
    names = set(v1.__all__)
    assert names <= set(dir(tf.compat.v1.distribute))
    assert set(rx.experimental.__all__) <= set(dir(tf.distribute.experimental))
