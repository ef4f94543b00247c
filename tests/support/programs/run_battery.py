"""A worker of a battery: `run_battery.py PARENT FILE... -- OPTION...`; see battery.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "startup")]

import jax  # noqa: E402
import pytest  # noqa: E402
import worker_groups  # noqa: E402
from battery import TEST_SECONDS  # noqa: E402

import replicax as rx  # noqa: E402
from replicax.process import shutdown  # noqa: E402


class Battery:
    """Selects the tests of the group, and compares outcomes with the other workers."""

    def __init__(self, worker: worker_groups.Worker) -> None:
        self.worker = worker
        self._failure: str | None = None
        self._seconds = 0.0

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--core", action="store_true", help="one case of each test")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        chosen = [item for item in items if _is_for_the_group(item)]
        if config.getoption("--core"):
            chosen = _core(chosen, self.worker.devices % 2 == 1)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        names = [item.nodeid for item in items]
        for other in self.worker.exchange("collected", names):
            assert other == names, "the workers have collected different tests"
        self.worker.report("collected", names)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._failure, self._seconds = None, 0.0
        self.worker.report("running", item.nodeid)
        result = yield
        self.worker.report("outcome", (item.nodeid, self._failure, self._seconds))
        try:
            failed = self.worker.exchange(f"outcome of {item.nodeid}", self._failure is not None)
        except worker_groups.Disagreement as error:
            item.session.shouldstop = f"after {item.nodeid}, {error}"
        else:
            if len(set(failed)) > 1:
                who = [i for i, one in enumerate(failed) if one]
                item.session.shouldstop = f"{item.nodeid} failed on some workers only: {who}"
        if item.session.shouldstop:
            self.worker.report("ended early", str(item.session.shouldstop))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if report.failed:
            self._failure = f"{self._failure or ''}{report.when}: {report.longreprtext}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.worker.report("ended early", f"cannot collect: {report.longreprtext}")


def _is_for_the_group(item: Any) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    # Kinds of variables in test_variables.py.
    is_made = params.get("make") in ("mirrored", "on_read")
    is_run = params.get("strategy") == worker_groups.STRATEGY
    return (is_made or is_run) and item.get_closest_marker("one_process") is None


# The parameters of tests that say where code runs, and what they are in eager and compiled code.
_PLACES = ("run", "cross", "how", "place", "where")
_EAGER = ("threaded", "eager", "in_eager", "scope")
_COMPILED = ("compiled", "in_function")


def _core(items: list[Any], is_odd: bool) -> list[Any]:
    """Returns one case of each test, of every other test in compiled code.

    Args:
      items: All cases of all tests.
      is_odd: Takes the eager cases of those tests of which otherwise compiled ones are taken.
    """
    by_test: dict[str, list[Any]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = []
    for number, cases in enumerate(by_test.values()):
        wanted = _COMPILED if (number + is_odd) % 2 else _EAGER
        chosen.append(next((case for case in cases if _place(case) in wanted), cases[0]))
    return chosen


def _place(item: Any) -> str | None:
    params = item.callspec.params
    found = [params[name] for name in _PLACES if name in params]
    return getattr(found[0], "__name__", found[0]) if found else None


def _cache_compiled_programs() -> None:
    """Lets this worker write to the compilation cache: JAX lets the first process only.

    It would compile the programs of its own devices in each run of the tests.
    """
    jax.distributed.initialize.__globals__["global_state"].process_id = 0


def main() -> None:
    parent, *rest = sys.argv[1:]
    shutdown.die_with_parent(int(parent))
    worker = worker_groups.current()
    assert worker is not None
    worker.connection  # noqa: B018
    rx.set_virtual_cpu_devices(worker.devices)
    # JAX must not have devices before the group exists: importing tests may use some.
    worker.new_strategy()
    if not worker.alone:
        _cache_compiled_programs()
    split = rest.index("--")
    # pytest removes old directories of all its runs: workers that start together would collide.
    own = Path(worker.hub).parent / f"own_{worker.index}"
    fixed = [
        f"--basetemp={own}",
        "-p",
        "no:xdist",
        "-q",
        "--tb=short",
        f"--timeout={TEST_SECONDS}",
        "--maxfail=200",
    ]
    code = pytest.main([*fixed, *rest[split + 1 :], *rest[:split]], plugins=[Battery(worker)])
    worker.report("finished", None)
    sys.exit(code)


if __name__ == "__main__":
    main()
