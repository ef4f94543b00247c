"""The examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from typing import Any

import pytest

import replicax

MODULES = [m.name for m in pkgutil.walk_packages(replicax.__path__, "replicax.")]
ROOMS = sorted({name.split(".")[1] for name in MODULES})
# The examples of several hundred ops compile as many programs; those of the coordinator start a
# cluster each, which other tests do too.
SLOW = ("coordinator", "tf")


class Finder(doctest.DocTestFinder):
    """Finds public names where they are defined, although they show the path of their export."""

    def _from_module(self, module: Any, object: Any) -> bool:
        source = getattr(object, "__dict__", {}).get("_module_source")
        if source is not None:
            return source == module.__name__
        return super()._from_module(module, object)  # type: ignore[misc]


@pytest.mark.parametrize(
    "room", [pytest.param(r, marks=pytest.mark.slow) if r in SLOW else r for r in ROOMS]
)
def test_docstring_examples_run(room: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed = []
    for name in (name for name in MODULES if name.split(".")[1] == room):
        runner = doctest.DocTestRunner(optionflags=flags)
        for test in Finder().find(importlib.import_module(name)):
            runner.run(test)
        if runner.summarize(verbose=False).failed:
            failed.append(name)
    assert not failed


def test_examples_of_public_names_are_found_once_where_they_are_defined() -> None:
    tests = [t for name in MODULES for t in Finder().find(importlib.import_module(name))]
    found = [test.name for test in tests if test.examples]
    assert len(set(found)) == len(found)
    assert {
        "replicax.variables.variable.Variable",
        "replicax.strategies.base.Strategy.run",
        "replicax.tracing.gradients.grad",
    } <= set(found)
    assert not {name for name in found if name.startswith("replicax.nn.")}
