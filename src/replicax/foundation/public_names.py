"""The path under which a public name is shown: `replicax.Variable`, not where it is defined."""

from __future__ import annotations

import contextlib
import inspect
import types


def show_as_public(package: types.ModuleType) -> None:
    """Sets the `__module__` of public classes and functions to the namespace that exports them.

    Tracebacks, `help()`, `repr(type(x))` and pickles then hold the public path, which stays
    valid when a definition moves. What the package itself exports is shown as its own.

    Args:
      package: A module whose `__all__` holds its names and its namespaces, each of which is
        a module with an `__all__` of its own.
    """
    exported = [getattr(package, name) for name in package.__all__]
    namespaces = [package, *(value for value in exported if isinstance(value, types.ModuleType))]
    public = {namespace.__name__ for namespace in namespaces}
    for namespace in namespaces:
        for name in namespace.__all__:
            value = getattr(namespace, name)
            if not isinstance(value, type | types.FunctionType) or value.__name__ != name:
                continue  # A namespace, a constant, or a second name of something.
            if value.__module__ not in public:
                _move(value, namespace.__name__)


def _move(value: type | types.FunctionType, path: str) -> None:
    if isinstance(value, type):
        # Annotations are strings, which `typing.get_type_hints` looks up in `__module__`.
        # Those that only a type checker can evaluate stay as they are.
        with contextlib.suppress(NameError, TypeError):
            value.__annotations__ = inspect.get_annotations(value, eval_str=True)
    # The name under which NumPy keeps it too, for tools that look for the source.
    setattr(value, "_module_source", value.__module__)
    value.__module__ = path
