"""How `tf.keras` finds its names: first those of earlier versions, then those of Keras 3.

Keras lists the names of `tf.keras` in a package of its own, `keras._tf_keras.keras`. A namespace
here is a module with the names of the Keras module of the same path, and with those that
`names.py` adds to it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras as _keras
from typing_extensions import override

from replicax.tf import dispatch, not_offered, tape_keras
from replicax.tf.keras import changes, names
from replicax.tf.keras.argument_types import Value
from replicax.tf.namespaces import PACKAGE, Finder, Table

_ROOT = f"{PACKAGE}.keras"
_KERAS_ROOT = "keras._tf_keras.keras"

# Namespaces whose functions compute: they take tensors, and give them to users.
_COMPUTING = ("activations", "losses", "metrics", "ops", "random", "applications")


class KerasTable(Table):
    """The names of one namespace of `tf.keras`.

    Args:
      path: The namespace below `tf.keras`; empty for `tf.keras` itself.
    """

    def __init__(self, path: str) -> None:
        added = names.ADDED.get(path, {})
        children = {name for name in map(functools.partial(_child_of, path), names.ADDED) if name}
        super().__init__(added, children=children)
        self._path = path

    @functools.cached_property
    def _modules(self) -> list[types.ModuleType]:
        return _keras_modules(self._path)

    @override
    def find(self, path: str, name: str) -> Any:
        if name not in self.names and name not in self.children:
            found = next((vars(m)[name] for m in self._modules if name in vars(m)), None)
            if found is None and _keras_modules(f"{self._path}.{name}".removeprefix(".")):
                return importlib.import_module(f"{PACKAGE}.{path}.{name}")
            if isinstance(found, types.ModuleType):
                return importlib.import_module(f"{PACKAGE}.{path}.{name}")
            if found is not None:
                return _for_users(self._path, found)
        return super().find(path, name)

    @override
    def list_names(self) -> list[str]:
        own = {name for module in self._modules for name in vars(module)}
        return sorted({*super().list_names(), *(n for n in own if not n.startswith("_"))})


def _child_of(path: str, other: str) -> str:
    """Returns the next part of a longer path; empty if it is not below this one."""
    if other == path or not other.startswith(f"{path}." if path else ""):
        return ""
    return other.removeprefix(f"{path}." if path else "").partition(".")[0]


@functools.cache
def _keras_modules(path: str) -> list[types.ModuleType]:
    """Returns the modules of Keras with the names of a namespace: those of `tf.keras` first."""
    # Most parts of `tf.keras` are the public modules of Keras, as its attributes.
    found: Any = importlib.import_module(_KERAS_ROOT)
    for part in filter(None, path.split(".")):
        found = getattr(found, part, None)
    candidates = [found, *(_module(f"{root}.{path}") for root in ("keras", _KERAS_ROOT) if path)]
    modules = [module for module in candidates if isinstance(module, types.ModuleType)]
    return list({id(module): module for module in modules}.values())


def _module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _for_users(path: str, value: Value) -> Any:
    """Returns a name of Keras as users of tensors need it."""
    if path.partition(".")[0] in _COMPUTING and isinstance(value, types.FunctionType):
        return giving_tensors(value)
    return value


def giving_tensors(function: types.FunctionType) -> Callable[..., Any]:
    """Lets a function of Keras take tensors, and give them to code outside of Keras."""
    is_recorded = function.__code__.co_filename == tape_keras.__file__
    recorded = function if is_recorded else tape_keras.recorded(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = recorded(*args, **kwargs)
        return found if changes.is_inside_keras() else dispatch.wrap_tree(found)

    return call


def lookup(path: str, into: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a namespace.

    Args:
      path: The namespace below `tf.keras`.
      into: The globals of its module, which keep what was found.
    """
    table = KerasTable(path)
    full = f"keras.{path}" if path else "keras"

    def find(name: str) -> Any:
        if name == "__version__":
            return _keras.__version__
        if name == "__all__":
            # For `from replicax.tf.keras.layers import *`.
            return [one for one in table.list_names() if not one.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(f"module '{PACKAGE}.{full}' has no attribute {name!r}")
        into[name] = value = table.find(full, name)
        return value

    return find, table.list_names


class KerasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the namespaces below `tf.keras`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{_ROOT}."):
            return None
        name = fullname.removeprefix(f"{_ROOT}.")
        is_added = any(_child_of(name, other) or other == name for other in names.ADDED)
        if is_added or _keras_modules(name):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if not_offered.advice(f"keras.{name}"):
            raise not_offered.import_error(f"keras.{name}")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path = module.__name__.removeprefix(f"{_ROOT}.")
        module.__doc__ = f"The names of `tf.keras.{path}`."
        module.__dict__["__getattr__"], module.__dict__["__dir__"] = lookup(path, module.__dict__)


def install() -> None:
    """Adds the finder of the namespaces, and the changes that tensors need in Keras; idempotent."""
    changes.install()
    if any(isinstance(finder, KerasFinder) for finder in sys.meta_path):
        return
    # In front of that of `tf`, which has the last word.
    places = [i for i, finder in enumerate(sys.meta_path) if isinstance(finder, Finder)]
    sys.meta_path.insert(places[0] if places else len(sys.meta_path), KerasFinder())
