"""What users get wrong with parameter servers: a typed error that names it, and life goes on."""

from __future__ import annotations

import ast
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from parameter_servers import Desk, tasks_of
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors

SOURCE = Path(rx.__file__).parent


@contextlib.contextmanager
def still_usable(desk: Desk, coordinator: Any = None) -> Iterator[Any]:
    """After what happens inside, in bounded time, the cluster runs a closure."""
    coordinator = coordinator or desk.coordinator(desk.strategy(2))
    with coordinator.strategy.scope():
        counter = rx.Variable(0.0, name="probe")
    began = time.monotonic()
    yield coordinator
    assert time.monotonic() - began < 100
    coordinator.schedule(lambda: counter.assign_add(1.0) and None)
    coordinator.join(timeout=60)
    assert float(counter) == 1.0


def fails(
    coordinator: Any, fn: Any, args: Any = (), kind: Any = ValueError, words: str = ""
) -> None:
    """A closure fails with an error that says where."""
    coordinator.schedule(fn, args=args)
    with pytest.raises(kind, match=words) as caught:
        coordinator.join(timeout=60)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "/job:worker/task:" in str(caught.value) + notes


# Variables.


@pytest.mark.parametrize("how", ["filled", "computed", "given in parts"])
def test_a_part_that_is_larger_than_the_memory(desk: Desk, how: str) -> None:
    with still_usable(desk) as coordinator, coordinator.strategy.scope():
        rows = 1 << 36
        values = {
            "filled": lambda: jnp.zeros((rows, 64)),
            "computed": lambda: jnp.broadcast_to(jnp.arange(64.0), (rows, 64)),
            "given in parts": lambda shape, dtype, partition_shape=None, partition_offset=None: (
                jnp.ones(partition_shape or shape, dtype)
            ),
        }
        with refused(errors.ResourceExhaustedError, r"huge.*(/job:ps/task|ps \d)"):
            rx.Variable(values[how], shape=(rows, 64), dtype=jnp.float32, name="huge")


def test_payloads_that_do_not_fit(desk: Desk) -> None:
    with still_usable(desk) as coordinator:
        with coordinator.strategy.scope():
            table = rx.Variable(np.zeros((6, 2), np.float32), name="table")
            whole = rx.Variable(np.zeros(3, np.float32), name="whole")
        slices = rx.IndexedSlices(np.ones((2, 3), np.float32), [0, 1])
        beyond = rx.IndexedSlices(np.ones((1, 2), np.float32), [6])
        cases: list[Any] = [
            (lambda: table.assign(np.zeros((5, 2), np.float32)), "'table' needs a value of shape"),
            (lambda: whole.assign_add(np.zeros(4, np.float32)), "'whole' needs a value of shape"),
            (lambda: whole.assign("text"), "'whole'"),
            (lambda: table.scatter_add(slices), "'table'.*needs values of shape"),
            (lambda: table.scatter_add(beyond), r"'table' needs indices in \[0, 6\)"),
            (lambda: rx.nn.embedding_lookup(table, [6]), r"'table' needs indices in \[0, 6\)"),
            (lambda: rx.nn.embedding_lookup(whole, [-1]), r"'whole' needs indices in \[0, 3\)"),
            (lambda: rx.nn.embedding_lookup(table, [0.5]), "integers"),
        ]
        for case, words in cases:
            with refused(errors.InvalidArgumentError, words):
                case()
            fails(coordinator, case, (), errors.InvalidArgumentError, words)
        compiled = rx.function(lambda ids: rx.nn.embedding_lookup(table, ids))
        words = r"'table' needs indices in \[0, 6\)"
        fails(coordinator, compiled, (np.array([7]),), errors.InvalidArgumentError, words)
        assert not table.numpy().any() and not whole.numpy().any()


def test_a_variable_made_outside_the_scope(desk: Desk) -> None:
    outside = rx.Variable(np.ones(2), name="outside")
    with still_usable(desk) as coordinator:
        for fn, args in ((lambda: outside.numpy(), ()), (lambda v: v.numpy(), (outside,))):
            with refused((errors.InvalidArgumentError, errors.ArgumentTypeError), "outside"):
                coordinator.schedule(fn, args=args)
        assert coordinator.done()


@pytest.fixture
def other_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A second cluster, with one parameter server in this process."""
    directory = tmp_path / "other"
    directory.mkdir(mode=0o700)
    jobs = {"ps": [f"ipc://{directory}/p0"], "worker": [f"ipc://{directory}/w0"]}
    with rx.Server(jobs, job_name="ps", task_index=0):
        strategy = rx.ParameterServerStrategy(
            rx.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec(jobs))
        )
        yield strategy
        strategy.close()


def test_a_variable_of_another_cluster(desk: Desk, other_cluster: Any) -> None:
    with other_cluster.scope():
        foreign = rx.Variable(1.0, name="foreign")
    with still_usable(desk) as coordinator:
        with coordinator.strategy.scope():
            own = rx.Variable(2.0, name="own")
        for fn, args in ((lambda: foreign.numpy(), ()), (lambda v: v.numpy(), (foreign,))):
            with refused((errors.InvalidArgumentError, errors.ArgumentTypeError), "foreign"):
                coordinator.schedule(fn, args=args)
        with pytest.raises(rx.errors.DistributeError, match="foreign"):
            rx.function(lambda: own + foreign)()
    assert float(foreign) == 1.0


def test_variables_of_a_job_that_has_ended(desk: Desk) -> None:
    strategy = desk.strategy()
    with strategy.scope():
        variable = rx.Variable(1.0, name="gone")
    desk.leave()
    with still_usable(desk):
        for case in (
            variable.numpy,
            lambda: variable.assign(2.0),
            rx.function(lambda: variable + 1),
        ):
            with refused(errors.ContextError, "it was closed"):
                case()
        with strategy.scope(), refused(errors.ContextError, "it was closed"):
            rx.Variable(1.0)
        with refused(errors.ContextError, "it was closed"):
            rx.coordinator.ClusterCoordinator(strategy)
    strategy.close()


# Functions and results.


def test_what_cannot_travel(desk: Desk) -> None:
    lock, generator = threading.Lock(), (i for i in range(3))
    with still_usable(desk) as coordinator:
        for fn, args, words in [
            (lambda: lock, (), "lock"),
            (lambda x: x, (lock,), r"args\[0\]"),
            (lambda x: x, ({"deep": [generator]},), "deep"),
        ]:
            with refused(errors.ArgumentTypeError, words):
                coordinator.schedule(fn, args=args)
        with refused(errors.ArgumentTypeError, "takes a function"):
            coordinator.schedule("text")
        assert coordinator.done()


class Opaque:
    """No tree of arrays."""


def test_results_that_are_no_trees_of_arrays(desk: Desk) -> None:
    with still_usable(desk) as coordinator:
        for make in (lambda: Opaque(), lambda: {"a": [Opaque()]}, lambda: threading.Lock()):
            fails(coordinator, make, (), errors.DistributeError, "Opaque|lock")


class OwnError(Exception):
    """Known to the program alone."""


def test_errors_of_any_class_come_back(desk: Desk) -> None:
    def raise_own() -> None:
        raise OwnError("my own")

    def exits() -> None:
        sys.exit(3)

    def recurses(n: int = 0) -> Any:
        return recurses(n + 1)

    with still_usable(desk) as coordinator:
        fails(coordinator, raise_own, (), Exception, "my own")
        fails(coordinator, exits, (), Exception, "3")
        fails(coordinator, recurses, (), Exception, "recursion")
        fails(coordinator, lambda: 1 / 0, (), ZeroDivisionError, "division")
        fails(coordinator, lambda x: x, (), TypeError, "missing")


def test_what_workers_may_not_do(desk: Desk) -> None:
    with still_usable(desk) as coordinator:
        strategy = coordinator.strategy

        def creates() -> None:
            with strategy.scope():
                rx.Variable(1.0, name="late")

        fails(coordinator, creates, (), errors.ContextError, "'late' needs the coordinator")


# Clusters and tasks.


def test_addresses_and_names_that_are_taken_or_wrong(desk: Desk) -> None:
    spec = desk.cluster.cluster_spec
    with still_usable(desk):
        with refused(errors.AddressInUseError, "p0"):
            rx.Server(spec, job_name="ps", task_index=0)
        with refused(errors.InvalidArgumentError, "boss"):
            rx.Server(spec, job_name="boss", task_index=0)
        with refused(errors.InvalidArgumentError, "7"):
            rx.Server(spec, job_name="ps", task_index=7)
        resolver = desk.cluster.resolver
        for options in ({"replicas_per_worker": 0}, {"replicas_per_worker": "two"}):
            with refused(errors.InvalidArgumentError, "replicas_per_worker"):
                rx.ParameterServerStrategy(resolver, **options)
        with refused(errors.ArgumentTypeError, "variable_partitioner"):
            rx.ParameterServerStrategy(resolver, variable_partitioner=3)
        with refused(errors.ArgumentTypeError, "cluster_resolver"):
            rx.ParameterServerStrategy(spec)  # type: ignore[arg-type]


def test_servers_that_are_not_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    spec = {"ps": [f"ipc://{tmp_path}/p0"], "worker": [f"ipc://{tmp_path}/w0"]}
    resolver = rx.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec(spec))
    strategy = rx.ParameterServerStrategy(resolver, connect_timeout=0.3)
    with refused(errors.PSUnavailableError, "/job:ps/task:0|ps 0"), strategy.scope():
        rx.Variable(1.0)
    with refused(errors.PSUnavailableError, "/job:ps/task:0|ps 0"):
        rx.coordinator.ClusterCoordinator(strategy)
    strategy.close()


def test_a_second_coordinator_is_told_that_the_servers_are_taken(desk: Desk) -> None:
    with still_usable(desk):
        second = rx.ParameterServerStrategy(desk.cluster.resolver, connect_timeout=0.5)
        with pytest.raises(rx.errors.DistributeError, match="ps"), second.scope():
            rx.Variable(1.0)
        second.close()


# What unauthenticated peers can reach.


def calls_of_pickle(path: Path) -> set[str]:
    """The ways to make objects of bytes that a module has."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "Unpickler"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in ("pickle", "cloudpickle", "marshal", "dill", "shelve", "joblib"):
                found.add(f"{owner}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "cloudpickle"):
            found |= {f"{node.module}.{a.name}" for a in node.names if "oad" in a.name}
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            value = node.value.value if isinstance(node.value, ast.Constant) else True
            if value is not False:
                found.add("allow_pickle")
    return found


def test_bar_42_one_module_unpickles_and_it_is_the_workers() -> None:
    found = {
        str(path.relative_to(SOURCE)): calls
        for path in SOURCE.rglob("*.py")
        if (calls := calls_of_pickle(path))
    }
    assert len(found) == 1, found
    (module,) = found
    name = f"replicax.{module.removesuffix('.py').replace('/', '.')}"
    users = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if name in path.read_text() or f"import {name.rsplit('.', 1)[1]}" in path.read_text()
    ]
    assert not [user for user in users if user.startswith(("parameter_server/", "transport/"))]


_unpickled: list[Any] = []
_is_watching = False


def _watch(event: str, args: Any) -> None:
    if _is_watching and event == "pickle.find_class":
        _unpickled.append(args)


@pytest.fixture
def unpickled() -> Iterator[list[Any]]:
    """What was unpickled in this process while the test ran; hooks stay for ever."""
    global _is_watching
    if not getattr(sys, "_replicax_watch", False):
        sys.addaudithook(_watch)
        sys._replicax_watch = True  # type: ignore[attr-defined]
    _unpickled.clear()
    _is_watching = True
    yield _unpickled
    _is_watching = False


def test_bar_42_the_coordinator_unpickles_nothing(desk: Desk, unpickled: list[Any]) -> None:
    strategy = desk.strategy(2)
    coordinator = desk.coordinator(strategy)
    with strategy.scope():
        table = rx.Variable(np.zeros((6, 2), np.float32), name="table")
    dataset = coordinator.create_per_worker_dataset(lambda: rx.data.Dataset.range(100).repeat())
    iterator = iter(dataset)

    def step(iterator: Any) -> Any:
        table.assign_add(np.ones((6, 2), np.float32))
        return {"n": next(iterator), "rows": table[1:3], "list": [None, "text", 1.5, table]}

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(10)]
    assert len(coordinator.fetch(values)) == 10
    coordinator.schedule(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        coordinator.join(timeout=60)
    assert str(coordinator.status())
    assert unpickled == []


def test_bar_40_nothing_listens_on_the_network(desk: Desk) -> None:
    coordinator = desk.coordinator()
    assert coordinator.schedule(lambda: 1).fetch(60) == 1
    pids = [desk.cluster.pid(job, i) for job, i in tasks_of(desk.cluster)]
    for process in [psutil.Process(), *map(psutil.Process, pids)]:
        assert [c for c in process.net_connections("inet") if c.status == "LISTEN"] == []
