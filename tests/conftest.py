"""Fixtures of all tests: eight CPU devices, strategies, executors, and checks for leaks."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ignored_exceptions

# Tests compile the same small programs again and again: JAX caches them on disk, for all processes
# of a run and for the next run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / "out" / "jax-cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# JAX writes cache entries in place. A process that reads an incomplete entry (another process is
# writing it, or was killed) detects the wrong checksum, warns, and compiles. Tests that check the
# output of programs must not see that warning. See also `filterwarnings`.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"ignore:Error {doing} persistent compilation cache entry:UserWarning"
    for doing in ("reading", "writing")
)
# Programs of tests are small and run once: XLA spends two thirds of the compile time on code that
# is never needed to be fast. `make test-all` sets XLA_FLAGS to nothing, and compiles as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1",
)

# Programs carry the stack of each of their operations, for error messages that no test reads.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# Processes that tests start import compiled modules instead of compiling them each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every Python process of the run appends ignored exceptions to one file, see `leaks`. xdist workers
# inherit it from the controller.
_IS_CONTROLLER = ignored_exceptions.VARIABLE not in os.environ
if _IS_CONTROLLER:
    _descriptor, _path = tempfile.mkstemp(prefix="replicax-ignored-exceptions-")
    os.close(_descriptor)
    os.environ[ignored_exceptions.VARIABLE] = _path
    _startup = str(Path(ignored_exceptions.__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [_startup, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    ignored_exceptions.install(_path, exit_code=1)
_IGNORED = Path(os.environ[ignored_exceptions.VARIABLE])

# A shell that runs the suite in the background has it ignore interrupts; some tests interrupt
# themselves.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import warm_starts  # noqa: E402
import worker_groups  # noqa: E402

import replicax as rx  # noqa: E402

# A worker of a battery has made its strategy, see programs/run_battery.py.
WORKER = worker_groups.current()
if WORKER is None:
    rx.set_virtual_cpu_devices(8)
    if warm_starts.is_wanted():
        warm_starts.install()

import jax  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from hostile_partners import watched_ipc_ps as watched_ipc_ps  # noqa: E402
from hostile_partners import watched_ps as watched_ps  # noqa: E402
from hostile_partners import watched_worker as watched_worker  # noqa: E402
from parameter_servers import desk as desk  # noqa: E402
from parameter_servers import kept_processes  # noqa: E402
from parameter_servers import shared_cluster as shared_cluster  # noqa: E402
from scheduling import SharedClusters  # noqa: E402
from strategies_under_test import STRATEGIES, default_strategies, is_single  # noqa: E402

# How long threads, processes and sockets that were told to end may take, on a busy machine.
_MOST_SECONDS = 20.0

# Sockets that XLA opens when a worker first runs a collective of a kind, and keeps.
_COLLECTIVE_FDS = 32

# Variables that importing Keras and Ray sets; a test may be the first to import them.
_SET_BY_IMPORTS = (
    "KERAS_BACKEND",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "RAY_CLIENT_MODE",
    "TF_FORCE_GPU_ALLOW_GROWTH",
)

# Threads of JAX and of the pool that keeps replica threads for a second.
_ALLOWED_THREADS = ("replicax-replica", "jax", "pytest_timeout", "ThreadPoolExecutor")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    definition = metafunc.definition
    if "strategy" in metafunc.fixturenames:
        marker = definition.get_closest_marker("strategies")
        names = [n for n in STRATEGIES if marker is None or n in marker.args]
        if WORKER is not None:
            # The group takes the place of replicas in one process.
            in_place_of = f"mirrored_{WORKER.num_replicas}"
            names = [worker_groups.STRATEGY] * (in_place_of in names)
        fast = names
        if definition.get_closest_marker("every_strategy") is None:
            fast = default_strategies(names)
        if definition.get_closest_marker("one_strategy") is not None:
            fast = fast[:1]
        params = [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]
        metafunc.parametrize("strategy", params, indirect=True)
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", ["threaded", "compiled", "inside"], indirect=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedClusters:
    """Shares the tests among the processes of a parallel run."""
    return SharedClusters(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves executors to the slow suite that run the same code for all strategies.

    `run` inside a function compiles what the compiled executor compiles: one strategy per test runs
    it. Replicas of one device run eagerly as those of several devices do, and a single replica
    is compiled as several are.
    """
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if "run" in params and "strategy" in params:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in by_test.values():
        found = [item.callspec.params for item in cases]  # type: ignore[attr-defined]
        is_marked = cases[0].get_closest_marker("every_strategy") is not None
        fast = default_strategies([params["strategy"] for params in found])
        for item, params in zip(cases, found, strict=True):
            name, executor = params["strategy"], params["run"]
            is_left_out = executor == "inside" and name != fast[0]
            if name != fast[0] and not is_marked and WORKER is None:
                is_left_out |= executor == LEFT_OUT[is_single(name)]
            if is_left_out:
                item.add_marker(pytest.mark.slow)


# By whether a strategy has a single replica, the executor that the default run leaves out.
LEFT_OUT = {False: "threaded", True: "compiled"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Moves all objects made so far out of the garbage collector's way.

    Modules, JAX and the tests themselves are some million objects, which are never freed.
    """
    gc.collect()
    gc.freeze()
    # Traces make many objects that live until the test ends: fewer collections look at them.
    gc.set_threshold(50_000, 50, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Does the same after each module, with what JAX has cached for its programs.

    Otherwise each collection that a test asks for would take a second in the end.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails the run if a process of it, such as an xdist worker, ignored an exception at exit."""
    yield
    if _IS_CONTROLLER:
        if ignored := _IGNORED.read_text():
            print(f"\nExceptions were ignored:\n{ignored}", file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        _IGNORED.unlink()


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy in turn; `@pytest.mark.strategies(...)` picks some."""
    return STRATEGIES[request.param]()


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An empty directory of the test; workers of a group share it."""
    if WORKER is None or WORKER.alone:
        return tmp_path
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]
    shared = Path(WORKER.hub).parent / "shared" / name
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a function on replicas: eagerly, as an rx.function, and inside an rx.function."""

    def threaded(strategy: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        return strategy.run(fn, args=args, kwargs=kwargs)

    def compiled(strategy: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        return strategy.run(rx.function(fn), args=args, kwargs=kwargs)

    def inside(strategy: Any, fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        @rx.function
        def outer(args: Any, kwargs: Any) -> Any:
            return strategy.run(fn, args=args, kwargs=kwargs)

        return outer(tuple(args), kwargs or {})

    chosen = {"threaded": threaded, "compiled": compiled, "inside": inside}[request.param]
    chosen.executor = request.param  # type: ignore[attr-defined]
    return chosen


def _new_threads(known: set[threading.Thread]) -> list[threading.Thread]:
    new = set(threading.enumerate()) - known
    return [t for t in new if t.is_alive() and not t.name.startswith(_ALLOWED_THREADS)]


def _children(process: psutil.Process) -> set[int]:
    try:
        # Detects the existence of children without waiting for them: the list takes milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    return {c.pid for c in process.children(recursive=True)}


def _num_fds(process: psutil.Process) -> int:
    # Each process that others are forked from has a socket.
    return process.num_fds() - len(warm_starts.kept_processes())


def _remaining(look: Callable[[], Any]) -> Any:
    """Returns what is left when nothing is left any more, or when the time is over."""
    deadline = time.monotonic() + _MOST_SECONDS
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


@pytest.fixture(autouse=True)
def leaks() -> Iterator[None]:
    """Fails a test that leaks an environment variable, thread, process, file or scope.

    Also fails a test during which the interpreter of any process of the run ignores an exception.
    """
    env = dict(os.environ)
    threads = set(threading.enumerate())
    process = psutil.Process()
    children = _children(process)
    num_fds = _num_fds(process)
    num_ignored = _IGNORED.stat().st_size
    yield
    changing = ("PYTEST_CURRENT_TEST", *_SET_BY_IMPORTS)
    before, now = ({k: v for k, v in e.items() if k not in changing} for e in (env, os.environ))
    assert now == before, "environment variables leaked"
    left = _remaining(lambda: _new_threads(threads))
    assert not left, f"threads leaked: {left}"
    # A supervisor may restart a task between the two calls.
    left = _remaining(
        lambda: _children(process) - children - kept_processes() - warm_starts.kept_processes()
    )
    assert not left, f"processes leaked: {left}"
    most_fds = num_fds + (2 if WORKER is None else _COLLECTIVE_FDS)
    if _num_fds(process) > most_fds:
        gc.collect()
        # A thread that has just ended may still close its own.
        left = _remaining(lambda: max(0, _num_fds(process) - most_fds))
        assert not left, f"file descriptors leaked: {left}"
    assert not rx.has_strategy(), "a strategy is still in scope"
    assert not rx.in_cross_replica_context(), "a cross-replica context is still open"
    if _IGNORED.stat().st_size > num_ignored:
        ignored = _IGNORED.read_text()[num_ignored:]
        # The run fails at its end as well: another xdist worker may have caused this.
        pytest.fail(f"exceptions were ignored:\n{ignored}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def replica_threads_retire() -> Iterator[None]:
    """Fails the session if idle replica threads outlive their second."""
    yield
    left = _remaining(lambda: [t for t in threading.enumerate() if t.name == "replicax-replica"])
    assert not left, "replica threads do not retire"


@pytest.fixture(scope="session", autouse=True)
def warm_processes_end() -> Iterator[None]:
    """Ends the processes that others were forked from."""
    yield
    warm_starts.close()


@pytest.fixture(scope="module")
def cold_starts() -> Iterator[None]:
    """Starts the processes of a module as users do; see warm_starts.py."""
    with warm_starts.cold():
        yield


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    return jax.local_devices(backend="cpu")
