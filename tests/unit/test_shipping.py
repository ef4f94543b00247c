"""What travels to workers: functions and arguments; and what comes back: results and errors."""

from __future__ import annotations

import functools
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

import replicax as rx
from replicax.coordinator.cluster_coordinator import ClusterCoordinator
from replicax.coordinator.per_worker import PerWorkerIterator
from replicax.coordinator.remote_value import RemoteValue
from replicax.coordinator.shipping import pickling, serialization
from replicax.coordinator.shipping.remote_errors import rebuild_error
from replicax.foundation import errors
from replicax.protocol import codec, trees
from replicax.protocol.messages import RemoteError, Result
from replicax.values.distributed_values import PerReplica
from replicax.worker import error_reports, runner
from replicax.worker.functions import Functions, unpickle

SCALE = 3


class ServerVariable:
    """Stands for a variable on servers."""

    def __init__(self, number: int, owner: Any) -> None:
        self.number, self.owner, self.name = number, owner, f"v{number}"

    def shipping_key(self) -> tuple[Any, ...]:
        return ("part", self.number)


def tree(node: trees.Node) -> bytes:
    return msgspec.msgpack.encode(node)


def travel(fn: Any, strategy: Any = None, resolve: Any = lambda name: name) -> Any:
    shipped = serialization.ship(fn, strategy)
    assert shipped.sha == codec.fingerprint(shipped.buffers)
    functions = Functions()
    functions.store(shipped.sha, [memoryview(b) for b in shipped.buffers])
    return functions.load(shipped.sha, resolve)


def unpack(packed: tuple[list[int], list[Any]]) -> Any:
    assert packed[0] == []
    return unpickle(packed[1], lambda name: name)


# Functions.


def test_S184_plain_functions_lambdas_partials_and_methods_travel() -> None:
    class Model:
        def __init__(self) -> None:
            self.weight = np.arange(5000.0)

        def total(self, x: float) -> float:
            return float(self.weight.sum() * x)

    assert travel(lambda x: x * SCALE)(2) == 6
    assert travel(functools.partial(pow, 2))(5) == 32
    assert travel(Model().total)(2.0) == 2 * np.arange(5000.0).sum()
    assert travel(len) is len


def test_S184_rx_functions_travel_and_compile_on_arrival() -> None:
    weight = jnp.ones((700, 3), jnp.bfloat16)
    key = jax.random.key(3)

    @rx.function(input_signature=[rx.TensorSpec(())])
    def step(x: Any) -> Any:
        return (weight * x.astype(jnp.bfloat16)).sum(), jax.random.uniform(key)

    came = travel(step)
    assert type(came) is type(step) and came.name == "step"
    assert came.input_signature == step.input_signature
    total, draw = came(2.0)
    assert total == 4192 and draw == jax.random.uniform(key)
    assert came.experimental_get_tracing_count() == 1 and step.experimental_get_tracing_count() == 0


def test_functions_that_refer_to_themselves_travel() -> None:
    @rx.function
    def again(n: int) -> Any:
        return 0 if n == 0 else 1 + again(n - 1)

    assert travel(again)(3) == 3


def test_methods_that_are_rx_functions_travel() -> None:
    class Model:
        bias = 2.0

        @rx.function
        def call(self, x: Any) -> Any:
            return x + self.bias

    model = Model()
    model.call(1.0)
    assert travel(model.call)(1.0) == 3.0


def test_rx_functions_are_pickled_once_and_forgotten_with_the_function() -> None:
    seen = []

    class Probe:
        def __reduce__(self) -> Any:
            seen.append(1)
            return (int, ())

    probe = Probe()
    step = rx.function(lambda: probe)
    assert serialization.ship(step) is serialization.ship(step)
    assert len(seen) == 1
    serialization.ship(lambda: probe)
    serialization.ship(lambda: probe)
    assert len(seen) == 3
    alive = weakref.ref(serialization.ship(step))
    del step
    gc.collect()
    assert alive() is None


def test_equal_functions_have_one_name() -> None:
    def make(k: int) -> Any:
        return lambda: k

    assert serialization.ship(make(1)).sha == serialization.ship(make(1)).sha
    assert serialization.ship(make(1)).sha != serialization.ship(make(2)).sha


def test_bar13_calls_of_one_function_wait_with_one_pickle() -> None:
    def call() -> None:
        pass

    first = serialization.ship(call)
    assert serialization.ship(call) is first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_arrays_lie_beside_the_pickle_and_are_copies() -> None:
    big = np.zeros(100_000)
    half = np.zeros(100_000, jnp.bfloat16)
    on_device = jnp.zeros(100_000)
    shipped = serialization.ship(lambda: (big, half, on_device))
    assert len(shipped.buffers) == 4 and len(shipped.buffers[0]) < 5_000
    big[:] = 7
    functions = Functions()
    functions.store(shipped.sha, shipped.buffers)
    came, came_half, came_device = functions.load(shipped.sha, lambda n: n)()
    assert came.sum() == 0
    came += 1
    assert came_half.dtype == jnp.bfloat16 and isinstance(came_device, jax.Array)


def test_code_that_workers_cannot_import_goes_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps_of_user.py").write_text(
        "import constants_of_user\n"
        "class Box:\n    def __init__(self, x): self.x = x\n"
        "def step(x): return Box(x + constants_of_user.OFFSET).x\n"
    )
    (tmp_path / "constants_of_user.py").write_text("OFFSET = 40\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import steps_of_user  # type: ignore[import-not-found]

    shipped = serialization.ship(steps_of_user.step)
    for name in ("steps_of_user", "constants_of_user"):
        monkeypatch.delitem(sys.modules, name)
    assert cloudpickle.list_registry_pickle_by_value() == set()
    (tmp_path / "buffers").write_bytes(shipped.buffers[0])
    # A process that has never heard of these modules.
    code = (
        "import pathlib, sys\n"
        "from replicax.worker.functions import unpickle\n"
        "data = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "assert unpickle([data], None)(2) == 42\n"
        "assert 'steps_of_user' not in sys.modules\n"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "buffers")]
    subprocess.run(command, check=True, timeout=250, cwd="/")


def test_code_of_packages_goes_by_name() -> None:
    for shared in (jax.nn.relu, jnp.exp, np.linalg.norm, rx.OneDeviceStrategy, jax.lax.psum):
        assert travel(shared) is shared


def test_transformed_functions_travel() -> None:
    doubled = jax.jit(lambda x: x * 2)
    slope = jax.grad(lambda x: jax.nn.relu(x) ** 2)
    block = jax.checkpoint(lambda x: jnp.sin(x) * SCALE)
    assert travel(lambda x: slope(doubled(x)))(1.5) == 6.0
    assert travel(jax.grad(block))(0.0) == 3.0


def test_datasets_travel() -> None:
    dataset = rx.data.Dataset.range(4).map(lambda x: x * SCALE).batch(2)
    assert [b.tolist() for b in travel(lambda: dataset)()] == [[0, 3], [6, 9]]


# What goes by name.


def test_variables_strategy_and_resources_go_by_name() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    variable = ServerVariable(3, strategy.extended)

    class Resource:
        is_per_worker = True
        resource = 9

    iterator = Resource()
    extended, layout = strategy.extended, strategy.extended.layout
    named = travel(
        lambda: (variable, strategy, extended, layout, iterator),
        strategy,
        lambda name: f"<{name}>",
    )()
    assert named == (
        "<('variable', ('part', 3))>",
        "<('strategy',)>",
        "<('extended',)>",
        "<('layout',)>",
        "<('resource', 9)>",
    )


def test_distributed_datasets_of_the_strategy_travel() -> None:
    strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    dataset = strategy.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2))
    other = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    came = travel(lambda: dataset, strategy, lambda name: other.extended.layout)()
    first = next(iter(came))
    assert [int(v[0]) for v in other.experimental_local_results(first)] == [0, 1]


# What does not travel.


class Guarded:
    def __init__(self) -> None:
        self.parts = {"a": [1, threading.Lock()]}


def generate() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: threading.Lock(), r"captured 'thing' is a <class '_thread.lock'>"),
        (Guarded, r"captured 'thing'\.parts\['a'\]\[1\] is a <class '_thread.lock'>"),
        (generate, r"captured 'thing' is a <class 'generator'>"),
        (
            lambda: os.fdopen(os.open(os.devnull, os.O_RDONLY), "rb"),
            r"captured 'thing' is a <class '_io.BufferedReader'>",
        ),
    ],
)
def test_bad_input_what_cannot_be_pickled_is_named(make: Any, words: str) -> None:
    thing = make()
    with pytest.raises(errors.ArgumentTypeError, match=words):
        serialization.ship(lambda: thing)
    with pytest.raises(errors.ArgumentTypeError, match=r"args\[1\]"):
        serialization.pack_arguments((0, [thing]), None)
    with pytest.raises(errors.ArgumentTypeError, match=r"kwargs\['k'\]"):
        serialization.pack_arguments((), {"k": [thing]})
    if isinstance(thing, io.IOBase):
        thing.close()


def test_S163_variables_of_the_coordinator_are_refused() -> None:
    local = rx.Variable(1.0, name="local")
    with pytest.raises(errors.InvalidArgumentError, match=r"'local' is on the coord.*'local'"):
        serialization.ship(rx.function(lambda: local + 1))
    with pytest.raises(errors.InvalidArgumentError, match=r"args\[0\]\['w'\]"):
        serialization.pack_arguments(({"w": local},), None)


def test_bad_input_variable_of_another_cluster_is_refused() -> None:
    mine, other = rx.OneDeviceStrategy("CPU:0"), rx.OneDeviceStrategy("CPU:0")
    variable = ServerVariable(3, other.extended)
    with pytest.raises(errors.InvalidArgumentError, match="'v3' belongs to another strategy"):
        serialization.ship(lambda: variable, mine)
    with pytest.raises(errors.InvalidArgumentError, match=r"OneDeviceStrategy.*captured 'other'"):
        serialization.ship(lambda: other.run, mine)
    with pytest.raises(errors.InvalidArgumentError, match="strategy of its own cluster"):
        serialization.ship(lambda: mine)


def test_T102_remote_values_and_the_coordinator_are_refused() -> None:
    home: Any = None
    value = RemoteValue(home, None)
    with pytest.raises(errors.InvalidArgumentError, match="RemoteValue"):
        serialization.pack_arguments((1, [value]), None)
    with pytest.raises(errors.InvalidArgumentError, match=r"RemoteValue.*captured 'value'"):
        serialization.ship(lambda: value)
    coordinator = object.__new__(ClusterCoordinator)
    with pytest.raises(errors.InvalidArgumentError, match="ClusterCoordinator"):
        serialization.ship(lambda: coordinator)


def test_iterators_and_traced_values_are_refused() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    iterator = iter(strategy.experimental_distribute_dataset(rx.data.Dataset.range(4).batch(2)))
    with pytest.raises(errors.ArgumentTypeError, match="create_per_worker_dataset"):
        serialization.ship(lambda: next(iterator))
    with pytest.raises(errors.TracedValueError, match="being traced"):
        jax.jit(lambda x: serialization.pack_arguments((x,), None))(1.0)


def test_too_large_functions_are_refused_and_name_what_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pickling, "MAX_INLINE_BYTES", 100_000)
    monkeypatch.setattr(pickling, "MAX_BYTES", 1_000_000)
    table, text, small = np.zeros(250_000), "x" * 200_000, np.zeros(2)
    with pytest.raises(errors.ResourceExhaustedError, match=r"captured 'table' has 2\.0 MB"):
        serialization.ship(lambda: (table, small))
    with pytest.raises(errors.ResourceExhaustedError, match=r"captured 'text' has 0\.2 MB"):
        serialization.ship(lambda: (text, small))
    assert travel(lambda: small)().tolist() == [0, 0]


# Arguments.


def test_arguments_that_are_per_worker_objects_go_by_number() -> None:
    iterator = object.__new__(PerWorkerIterator)
    iterator.resource = 5
    assert serialization.pack_arguments((iterator, iterator), None) == ([5, 5], [])
    mixed = unpack(serialization.pack_arguments((iterator, 1), {"k": [iterator]}))
    assert mixed == ((("resource", 5), 1), {"k": [("resource", 5)]})
    assert serialization.pack_arguments(None, None) == ([], [])


def test_arguments_travel_and_are_copies() -> None:
    batch = np.arange(3.0)
    packed = serialization.pack_arguments((batch, 1, "a"), {"flag": True})
    nested = serialization.pack_arguments(([batch], np.zeros(2000)), None)
    batch[:] = -1
    (came, *rest), kwargs = unpack(packed)
    assert came.tolist() == [0, 1, 2] and rest == [1, "a"] and kwargs == {"flag": True}
    came += 1
    (([inner], _), _) = unpack(nested)
    assert inner.tolist() == [0, 1, 2]
    (array,), _ = unpack(serialization.pack_arguments((jnp.ones(2),), None))
    assert isinstance(array, jax.Array)


# Results.


def test_results_with_values_of_replicas_slices_and_variables() -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")
    value = {
        "per": PerReplica((jnp.ones(2), jnp.zeros(2))),
        "rows": rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([3]), (4, 2)),
        "v": ServerVariable(3, strategy.extended),
        "plain": rx.Variable(2.0),
    }
    encoded = runner.encode_result(value)
    result = Result(1, encoded.tree, None, len(encoded.buffers))
    cluster = types.SimpleNamespace(variable=lambda key: ("found", key))
    came = serialization.unpack_result(result, encoded.buffers, cluster)
    assert [v.tolist() for v in came["per"].values] == [[1, 1], [0, 0]]
    assert came["rows"].indices.tolist() == [3] and came["rows"].dense_shape == (4, 2)
    assert came["v"] == ("found", ("part", 3)) and came["plain"] == 2.0


@pytest.mark.parametrize(
    "result",
    [
        Result(1, None, None, 0),
        Result(1, tree(None), None, 1),
        Result(1, tree(trees.Items("slices", [None] * 3)), None, 0),
        Result(1, tree(trees.Items("per_replica", [])), None, 0),
        Result(1, b"\x92\xa8Variable\x01", None, 0),
        Result(1, tree(trees.Items("pickle", ["x"])), None, 0),
    ],
)
def test_bar43_malformed_results_are_refused(result: Result) -> None:
    cluster = types.SimpleNamespace(variable=lambda key: key)
    with pytest.raises(errors.ProtocolError):
        serialization.unpack_result(result, [], cluster)


# Errors.


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [ValueError("a"), KeyError("k"), ZeroDivisionError("z"), FileNotFoundError("f")]
    + [errors.StructureError("s"), errors.OutOfRangeError("o"), MemoryError("m"), UserWarning("w")],
)
def test_T95_errors_keep_their_type_and_text(error: Exception) -> None:
    came = rebuild_error(error_reports.describe(raised(error)), 2)
    assert type(came) is type(error) and str(came) == str(error)
    (note,) = came.__notes__
    assert "/job:worker/task:2" in note and "raise error" in note


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    "error", [OwnError("o"), SystemExit(3), KeyboardInterrupt(), ExceptionGroup("g", [OwnError()])]
)
def test_T95_other_errors_are_closure_errors(error: BaseException) -> None:
    came = rebuild_error(error_reports.describe(raised(error)), 1)
    assert type(came) is errors.ClosureError
    assert type(error).__name__ in str(came) and "/job:worker/task:1" in str(came)


def test_T95_the_end_of_data_is_out_of_range() -> None:
    came = rebuild_error(error_reports.describe(raised(StopIteration())), 0)
    assert type(came) is errors.OutOfRangeError
    came = rebuild_error(RemoteError("closure", "StopIteration", "", ""), 0)
    assert type(came) is errors.OutOfRangeError


def test_errors_that_misbehave_are_described() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    remote = error_reports.describe(raised(Rude("x")))
    assert "RuntimeError" in remote.text
    long = error_reports.describe(raised(ValueError("é\ud800" * 100_000)))
    assert error_reports.size_of(long) < 60_000
    assert type(rebuild_error(long, 0)) is ValueError


def test_T118_errors_of_servers_and_fences_are_found_behind_others() -> None:
    blamed = errors.PSUnavailableError("ps 1 is gone")
    blamed.task_index = 1  # type: ignore[attr-defined]
    outer = RuntimeError("step failed")
    outer.__cause__ = blamed
    remote = error_reports.describe(raised(outer))
    assert (remote.cause, remote.kind, remote.task) == ("server", "PSUnavailableError", 1)
    came: Any = rebuild_error(remote, 0)
    assert type(came) is errors.PSUnavailableError and came.task_index == 1
    assert error_reports.describe(raised(errors.FencedError("f"))).cause == "fenced"


def test_T100_errors_of_inputs_name_the_worker_and_keep_the_cause() -> None:
    remote = error_reports.describe(raised(ValueError("bad file")), "input")
    came = rebuild_error(remote, 4)
    assert type(came) is errors.ClosureInputError and "/job:worker/task:4" in str(came)
    assert type(came.__cause__) is ValueError


@pytest.mark.parametrize("kind", ["os.system", "eval", "print", "BaseException", "message", ""])
def test_bar43_names_of_errors_are_not_trusted(kind: str) -> None:
    came = rebuild_error(RemoteError("closure", kind, "x", ""), 0)
    assert type(came) is errors.ClosureError


# The policy about pickles.


def test_bar42_one_place_unpickles() -> None:
    root = Path(rx.__file__).parent
    pattern = re.compile(r"pickle\.loads?\b|Unpickler\(|import dill|marshal\.loads")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert found == {"worker/functions.py"}


def test_bar43_the_coordinator_unpickles_nothing() -> None:
    found = []
    watching = True

    def watch(event: str, args: Any) -> None:
        if watching and event == "pickle.find_class":
            found.append(args)

    sys.addaudithook(watch)
    bomb = b"cos\nsystem\n(S'true'\ntR."
    value = tree(trees.Array("bytes", (len(bomb),)))
    assert serialization.unpack_result(Result(1, value, None, 1), [bomb]) == bomb
    rebuild_error(RemoteError("closure", "x", bomb.decode(), ""), 0)
    serialization.ship(lambda: bomb)
    assert not found
    travel(lambda: bomb)
    assert found
    watching = False


def test_functions_not_used_for_long_are_forgotten() -> None:
    functions = Functions(max_functions=2)
    shipped = [serialization.ship(functools.partial(int, i)) for i in range(3)]
    for one in shipped:
        functions.store(one.sha, one.buffers)
    assert len(functions) == 2
    with pytest.raises(error_reports.UnknownFunctionError):
        functions.load(shipped[0].sha, lambda n: n)
    first = functions.load(shipped[1].sha, lambda n: n)
    functions.store(shipped[0].sha, shipped[0].buffers)
    assert functions.load(shipped[1].sha, lambda n: n) is first
    functions.store("0" * 64, shipped[0].buffers)
    with pytest.raises(errors.ProtocolError, match="SHA-256"):
        functions.load("0" * 64, lambda n: n)


def test_functions_are_bounded_in_bytes_beyond_the_last_ones() -> None:
    functions = Functions(max_bytes=1_000)
    for number in range(50):
        data = [number.to_bytes(100, "little")]
        functions.store(codec.fingerprint(data), data)
    assert len(functions) == 32


def test_many_arrays_do_not_fill_the_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "_MAX_BUFFERS", 5)
    arrays = [np.full(500, i) for i in range(20)]
    shipped = serialization.ship(lambda: arrays)
    assert len(shipped.buffers) == 6
    assert [int(a[0]) for a in travel(lambda: arrays)()] == list(range(20))


def test_an_error_of_replicax_keeps_its_parts_from_worker_to_coordinator() -> None:
    error = errors.InvalidArgumentError("`axis` must be 0", "it is 3", "Pass 0.")
    came = rebuild_error(error_reports.describe(error), 0)
    assert type(came) is errors.InvalidArgumentError and str(came) == str(error)
    assert isinstance(came, errors.InvalidArgumentError)
    assert (came.required, came.found, came.advice) == ("`axis` must be 0", "it is 3", "Pass 0.")
    copy = pickle.loads(pickle.dumps(came))
    assert copy.parts == came.parts and copy.args == came.args
