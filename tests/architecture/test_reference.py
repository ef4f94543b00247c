"""The reference documents every public name, with a signature and an example."""

from __future__ import annotations

import ast
import functools
import inspect
import runpy
import types
from pathlib import Path
from typing import Any

import replicax as rx

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(rx.__file__).parent
PAGES = runpy.run_path(str(DOCS / "reference_names.py"))


def documented() -> dict[str, Any]:
    """Every name of the reference, without other spellings of it and without errors."""
    found = {}
    for path in PAGES["names_of_pages"]():
        namespace, _, name = path.rpartition(".")
        value = getattr(PAGES["_namespace"](namespace), name)
        is_own = getattr(value, "__module__", namespace) in (
            namespace,
            "replicax.variables.partitioners",
        )
        if is_own and not (isinstance(value, type) and issubclass(value, Exception)):
            found[path] = value
    return found


def examples_of(value: Any) -> str:
    members = vars(value).values() if isinstance(value, type) else ()
    return "".join(inspect.getdoc(v) or "" for v in (value, *members) if not isinstance(v, str))


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    on_pages = PAGES["names_of_pages"]()
    assert len(on_pages) == len(set(on_pages))
    namespaces = {"replicax": rx}
    for name in rx.__all__:
        if isinstance(getattr(rx, name), types.ModuleType):
            namespaces[f"replicax.{name}"] = getattr(rx, name)
    public = {
        f"{path}.{name}"
        for path, namespace in namespaces.items()
        for name in namespace.__all__
        if not isinstance(getattr(namespace, name), types.ModuleType)
    }
    assert public - set(on_pages) == set()


def test_every_public_callable_has_a_signature() -> None:
    for path, value in documented().items():
        if callable(value):
            assert inspect.signature(value) is not None, path


def functions_of(value: Any) -> list[tuple[str, types.FunctionType]]:
    """The public functions of a public name: itself, or its methods, with what documents each."""
    if not isinstance(value, type):
        found = {inspect.getdoc(value) or "": [value]}
    else:
        about = inspect.getdoc(value) or ""
        found = {about: [v for n, v in vars(value).items() if n[0] != "_" or n == "__init__"]}
    functions = []
    for about, members in found.items():
        for member in members:
            wrapped = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = inspect.unwrap(wrapped) if callable(wrapped) else wrapped
            if isinstance(function, types.FunctionType):
                functions.append((f"{about}\n{inspect.getdoc(function) or ''}", function))
    return functions


@functools.cache
def parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def raised_in(function: types.FunctionType) -> set[str]:
    """The errors that a function raises, and the private ones of its module that it calls."""
    code = function.__code__
    if not code.co_filename.startswith(str(SOURCE)):
        return set()
    module = parsed(code.co_filename)
    defined = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    (own,) = (
        node
        for node in defined
        if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno
    )
    called = {called_name(node.func) for node in ast.walk(own) if isinstance(node, ast.Call)}
    helpers = [n for n in defined if n.name in called and n.name[0] == "_" and n.name[1] != "_"]
    raised = [n.exc for f in (own, *helpers) for n in ast.walk(f) if isinstance(n, ast.Raise)]
    names = [called_name(node.func) for node in raised if isinstance(node, ast.Call)]
    return {name for name in names if name in rx.errors.__all__}


def called_name(node: ast.expr) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def test_every_public_name_says_which_errors_it_raises() -> None:
    without = [
        f"{path}.{function.__name__}: {error}"
        for path, value in documented().items()
        if callable(value) and ".compat." not in path and ".contrib." not in path
        for about, function in functions_of(value)
        for error in sorted(raised_in(function))
        if error not in about.partition("Raises:")[2]
    ]
    assert without == []


def test_every_public_name_has_an_example() -> None:
    names = {p: v for p, v in documented().items() if callable(v) and ".compat." not in p}
    names = {p: v for p, v in names.items() if ".contrib." not in p}
    assert [path for path, value in names.items() if ">>>" not in examples_of(value)] == []
