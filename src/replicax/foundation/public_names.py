"""Sets the module path of public names: `replicax.Variable` instead of the defining module."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Collection


def show_as_public(path: str, names: Collection[str] | None = None) -> None:
    """Sets the `__module__` of public classes and functions to the namespace that exports them.

    Tracebacks, `help()`, `repr(type(x))` and pickles then contain the public path, which stays
    valid when a definition moves. Names that the package itself exports get its own path.

    Args:
      path: The package, or a namespace of it; its `__all__` has the names.
      names: Those of them to set; all by default.
    """
    namespace, package = sys.modules[path], sys.modules["replicax"]
    public = {package.__name__, *(f"{package.__name__}.{name}" for name in package.NAMESPACES)}
    for name in namespace.__all__ if names is None else names:
        value = getattr(namespace, name)
        if not isinstance(value, type | types.FunctionType) or value.__name__ != name:
            continue  # A namespace, a constant, or an alias.
        if value.__module__ not in public:
            _move(value, package.__name__ if name in package.__all__ else path)


def show_in_package(*values: type | types.FunctionType) -> None:
    """Sets the `__module__` of names of the package, in the module that defines them."""
    for value in values:
        _move(value, "replicax")


def _move(value: type | types.FunctionType, path: str) -> None:
    if isinstance(value, type):
        # Annotations are strings, which `typing.get_type_hints` looks up in `__module__`.
        # Those that only a type checker can evaluate are not changed.
        with contextlib.suppress(NameError, TypeError):
            value.__annotations__ = inspect.get_annotations(value, eval_str=True)
    # The attribute that NumPy uses, too, for tools that look for the source.
    setattr(value, "_module_source", value.__module__)
    value.__module__ = path
