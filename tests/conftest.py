"""What every test gets: eight CPU devices, the strategies, the executors, and the police."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Tests compile the same small programs over and over; JAX keeps them on disk, for all processes
# of a run, and for the next one.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / "out" / "jax-cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# It writes them in place: a process that reads what another one is writing, or did not finish
# because it was killed, finds that the sum over the bytes is wrong, warns, and compiles. Programs
# that tests start must not say so, as tests look at what those say. See also `filterwarnings`.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"ignore:Error {doing} persistent compilation cache entry:UserWarning"
    for doing in ("reading", "writing")
)

# A shell that runs the suite in the background has it ignore interrupts; some tests interrupt
# themselves.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import replicax as rx

rx.set_virtual_cpu_devices(8)

import jax  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from hostile_partners import watched_ipc_ps as watched_ipc_ps  # noqa: E402
from hostile_partners import watched_ps as watched_ps  # noqa: E402
from hostile_partners import watched_worker as watched_worker  # noqa: E402
from parameter_servers import desk as desk  # noqa: E402
from parameter_servers import kept_processes  # noqa: E402
from parameter_servers import shared_cluster as shared_cluster  # noqa: E402
from strategies_under_test import RELATIVES, STRATEGIES  # noqa: E402

# What was told to end may take a moment, or many on a machine that has much else to do.
_MOST_SECONDS = 20.0

# Threads of JAX and of the pool that keeps replica threads for a second.
_ALLOWED_THREADS = ("replicax-replica", "jax", "pytest_timeout", "ThreadPoolExecutor")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "strategy" in metafunc.fixturenames:
        names = list(STRATEGIES)
        marker = metafunc.definition.get_closest_marker("strategies")
        if marker is not None:
            names = [n for n in names if n in marker.args]
        is_on_top = metafunc.definition.get_closest_marker("on_top") is not None
        late = RELATIVES if is_on_top and not set(names) <= set(RELATIVES) else ()
        params = [pytest.param(n, marks=pytest.mark.slow) if n in late else n for n in names]
        metafunc.parametrize("strategy", params, indirect=True)
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", ["threaded", "compiled", "inside"], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves to the slow suite what relatives do inside a function: they are compiled alike."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("run") == "inside" and params.get("strategy") in RELATIVES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Any:
    """Each strategy in turn; `@pytest.mark.strategies(...)` picks some."""
    return STRATEGIES[request.param]()


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
        # Looks whether there is any, without waiting for it: the list takes milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    return {c.pid for c in process.children(recursive=True)}


def _what_is_left(look: Callable[[], Any]) -> Any:
    """Looks until nothing is left, but not for ever."""
    deadline = time.monotonic() + _MOST_SECONDS
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    """Fails a test that leaves an environment variable, thread, process, file or scope."""
    env = dict(os.environ)
    threads = set(threading.enumerate())
    process = psutil.Process()
    children = _children(process)
    num_fds = process.num_fds()
    yield
    env.pop("PYTEST_CURRENT_TEST", None)
    now = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    assert now == env, "environment variables leaked"
    left = _what_is_left(lambda: _new_threads(threads))
    assert not left, f"threads leaked: {left}"
    # A supervisor may start a task again between the two looks.
    left = _what_is_left(lambda: _children(process) - children - kept_processes())
    assert not left, f"processes leaked: {left}"
    if process.num_fds() > num_fds + 2:
        gc.collect()
        # ZeroMQ closes sockets in a thread of its own.
        left = _what_is_left(lambda: max(0, process.num_fds() - num_fds - 2))
        assert not left, f"file descriptors leaked: {left}"
    assert not rx.has_strategy(), "a strategy is still in scope"
    assert not rx.in_cross_replica_context(), "a cross-replica context is still open"


@pytest.fixture(scope="session", autouse=True)
def replica_threads_retire() -> Iterator[None]:
    """Fails the session if idle replica threads outlive their second."""
    yield
    left = _what_is_left(lambda: [t for t in threading.enumerate() if t.name == "replicax-replica"])
    assert not left, "replica threads do not retire"


@pytest.fixture(scope="session")
def devices() -> list[Any]:
    return jax.devices("cpu")
