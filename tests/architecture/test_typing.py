"""What editors and type checkers see of the public API."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

from vocabulary import refused

import replicax as rx
from replicax.variables import creators

ROOT = Path(__file__).parents[2]


def test_pyright_finds_the_errors_in_uses_of_the_api_and_no_others() -> None:
    uses = ROOT / "tests" / "architecture" / "typing" / "uses.py"
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, str(uses)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=250
    )
    reports = json.loads(done.stdout)["generalDiagnostics"]
    found = {r["range"]["start"]["line"] + 1: r["message"] for r in reports}
    lines = enumerate(uses.read_text().splitlines(), start=1)
    assert found.keys() == {n for n, line in lines if line.endswith("# error")}, found
    assert 'No parameter named "nam"' in found.values()


def test_variable_has_the_signature_of_its_creation() -> None:
    shown = inspect.signature(rx.Variable).parameters
    taken = inspect.signature(creators.create).parameters
    assert [n for n in shown if n != "ignored"] == [n for n in taken if n != "others"]
    assert all(shown[n].default == taken[n].default for n in taken if n != "others")
    assert list(inspect.signature(rx.ShardedVariable).parameters) == ["variables", "name"]


def test_misspelt_arguments_are_corrected() -> None:
    with refused(TypeError, match="Did you mean `name`?"):
        rx.Variable(1.0, nam="x")  # type: ignore[call-arg]
    with refused(TypeError, match="`colour` was given. Leave it out"):
        rx.Variable(1.0, colour="x")  # type: ignore[call-arg]
    with refused(ValueError, match="Did you mean `task_type`?"):
        rx.cluster_resolver.UnionResolver(task_typ="worker")


def test_a_subclass_of_variable_is_refused() -> None:
    class OwnVariable(rx.Variable):
        pass

    with refused(NotImplementedError, match="Call rx.Variable"):
        OwnVariable(1.0)
