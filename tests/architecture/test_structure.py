"""What a machine can check of the structure: imports without cycles, types, and what is shipped."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import grimp
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]

# The share of parameters that may be annotated `Any`. To be lowered, never raised.
MOST_ANY = 0.20


def test_imports_have_no_cycles() -> None:
    graph = grimp.build_graph("replicax", exclude_type_checking_imports=True, cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    # Raises CycleError, with the modules of the cycle.
    graphlib.TopologicalSorter(imports).prepare()


def test_few_parameters_are_any() -> None:
    annotations = [
        ast.unparse(argument.annotation) if argument.annotation is not None else ""
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg not in ("self", "cls")
    ]
    share = annotations.count("Any") / len(annotations)
    assert share <= MOST_ANY, f"{annotations.count('Any')} of {len(annotations)} parameters"


def test_the_wheel_has_the_library_and_nothing_else() -> None:
    shipped = [file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()]
    assert "replicax/__init__.py" in shipped
    assert all(path.startswith("replicax/") for path in shipped)
    words = ("simulation", "torture", "sabot", "tests")
    assert not [path for path in shipped if any(word in path for word in words)]
