"""What a machine can check of the structure: imports without cycles, types, and what is shipped."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import grimp
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]

# The share of parameters that may be annotated `Any`. To be lowered, never raised.
MOST_ANY = 0.006


def test_imports_have_no_cycles() -> None:
    graph = grimp.build_graph("replicax", exclude_type_checking_imports=True, cache_dir=None)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    # Raises CycleError, with the modules of the cycle.
    graphlib.TopologicalSorter(imports).prepare()


def test_few_parameters_are_any() -> None:
    annotations = [annotation for *_, annotation in _parameters()]
    share = annotations.count("Any") / len(annotations)
    assert share <= MOST_ANY, f"{annotations.count('Any')} of {len(annotations)} parameters"


def test_no_strategy_variable_or_layout_is_any() -> None:
    names = ("strategy", "variable", "layout")
    found = [(file, name) for file, name, annotation in _parameters() if annotation == "Any"]
    assert not [(file, name) for file, name in found if name in names]


def _parameters() -> Iterator[tuple[str, str, str]]:
    """Yields file, name and annotation of the parameters of all functions."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                for argument in (
                    *arguments.posonlyargs,
                    *arguments.args,
                    *arguments.kwonlyargs,
                ):
                    if argument.arg not in ("self", "cls"):
                        annotation = argument.annotation
                        text = ast.unparse(annotation) if annotation is not None else ""
                        yield str(path.relative_to(ROOT)), argument.arg, text


def test_the_wheel_has_the_library_and_nothing_else() -> None:
    shipped = [file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()]
    assert "replicax/__init__.py" in shipped
    assert all(path.startswith("replicax/") for path in shipped)
    words = ("simulation", "torture", "sabot", "tests")
    assert not [path for path in shipped if any(word in path for word in words)]
