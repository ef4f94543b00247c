"""How the namespaces of `replicax.tf` find their names when they are first used.

A namespace is a module. Those with code of their own are files of this package; the others (such
as `tf.math`) are listed in `tables.py`, and the finder below makes them. Both raise an error that
says what to write for a name that they do not have.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax.tf import not_offered

PACKAGE = "replicax.tf"
_FOLDER = pathlib.Path(__file__).parent


class Table:
    """Where the names of a namespace come from.

    Args:
      names: Names with their source, "module:attribute" or "module"; a source that starts with
        a dot is below `replicax.tf`.
      modules: Modules whose public names (`__all__`) belong to the namespace, searched in turn.
      children: Namespaces below this one.
      overrides: Modules whose public names come before `names`.
    """

    def __init__(
        self,
        names: Mapping[str, str] | None = None,
        modules: Sequence[str] = (),
        children: Iterable[str] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        self.names = dict(names or {})
        self.modules = tuple(modules)
        self.children = frozenset(children)
        self.overrides = tuple(overrides)

    def find(self, path: str, name: str) -> Any:
        """Returns the value of a name of the namespace `path`, or raises."""
        if name in self.children:
            return importlib.import_module(".".join(filter(None, (PACKAGE, path, name))))
        for module in self.overrides:
            found = _import(module)
            if name in found.__all__:
                return getattr(found, name)
        source = self.names.get(name)
        if source is not None:
            module, _, attribute = source.partition(":")
            found = _import(module)
            return getattr(found, attribute) if attribute else found
        full = f"{path}.{name}" if path else name
        # Before the search, which imports all modules.
        for module in () if not_offered.is_listed(full) else self.modules:
            found = _import(module)
            if name in found.__all__:
                return getattr(found, name)
        raise not_offered.error(full, self.list_names)

    def list_names(self) -> list[str]:
        """Returns all names; imports the modules that hold them."""
        holding = (*self.overrides, *self.modules)
        listed = [name for module in holding for name in _import(module).__all__]
        return sorted({*listed, *self.names, *self.children})


def _import(module: str) -> types.ModuleType:
    return importlib.import_module(module, PACKAGE)


def _is_internal(name: str, table: Table) -> bool:
    """Tells whether a name is that of a module of this package that is not a namespace."""
    if name in table.children:
        return False
    return (_FOLDER / f"{name}.py").is_file() or (_FOLDER / name / "__init__.py").is_file()


def lookup(
    path: str, table: Table, into: dict[str, Any]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a module.

    Args:
      path: The namespace, such as "data.experimental"; "" for `tf`.
      table: Its names.
      into: The globals of the module, which keep what was found.
    """

    def find(name: str) -> Any:
        if name == "__all__":
            # For `from replicax.tf.math import *`.
            return [one for one in names() if not one.startswith("_")]
        if name.startswith("__") and name not in table.names:
            # Python asks for these itself, and for `__path__` to see whether it is a package.
            raise AttributeError(f"module '{PACKAGE}' has no attribute {name!r}")
        if not path and name not in table.names and _is_internal(name, table):
            # Python imports it next; to search for it here would import modules in a circle.
            raise AttributeError(f"module '{PACKAGE}' has no attribute {name!r}")
        into[name] = value = table.find(path, name)
        return value

    def names() -> list[str]:
        own = [name for name in into.get("__all__", ())]
        return sorted({*own, *table.list_names()})

    return find, names


class Package(types.ModuleType):
    """The class of `replicax.tf`: of its files, only namespaces become its attributes.

    Python makes each imported submodule an attribute of its package. `function.py` would take the
    place of `tf.function`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        is_file = isinstance(value, types.ModuleType) and value.__name__ == f"{PACKAGE}.{name}"
        if not is_file or name in self.__dict__["_namespace_names"]:
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def refusing(module_name: str) -> Callable[[str], Any]:
    """Returns `__getattr__` of a module that has all of its names.

    >>> import replicax.tf.nest
    >>> find = refusing("replicax.tf.nest")
    >>> try:
    ...     find("flaten")
    ... except AttributeError as error:
    ...     print(str(error).partition(". ")[2])
    Did you mean `flatten`?
    """
    path = module_name.removeprefix(f"{PACKAGE}.")

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
        raise not_offered.error(f"{path}.{name}", lambda: sys.modules[module_name].__all__)

    return find


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the namespaces of tables, and refuses modules with advice.

    Args:
      tables: Returns the tables, by path below `replicax.tf`.
    """

    def __init__(self, tables: Callable[[], Mapping[str, Table]]) -> None:
        self._tables = tables
        self._searched: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        name = fullname.removeprefix(f"{PACKAGE}.")
        if name in self._tables():
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        module = self._module_of(fullname)
        if module is not None:
            return importlib.machinery.ModuleSpec(fullname, _Known(module), is_package=True)
        # The last finder: no file has this name.
        if not_offered.advice(name):
            raise not_offered.import_error(name)
        return None

    def _module_of(self, fullname: str) -> types.ModuleType | None:
        """Returns the module that a namespace has under a name, such as `data` of `compat.v1`."""
        parent, _, name = fullname.rpartition(".")
        namespace = sys.modules.get(parent)
        if namespace is None or parent == PACKAGE or fullname in self._searched:
            return None
        # A namespace may import the module to find the name.
        self._searched.add(fullname)
        try:
            found = getattr(namespace, name, None)
        finally:
            self._searched.discard(fullname)
        return found if isinstance(found, types.ModuleType) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        path = module.__name__.removeprefix(f"{PACKAGE}.")
        table = self._tables()[path]
        module.__doc__ = f"The names of `tf.{path}` that programs use."
        find, names = lookup(path, table, module.__dict__)
        module.__dict__["__getattr__"] = find
        module.__dict__["__dir__"] = names


class _Known(importlib.abc.Loader):
    """Gives a module that was imported before a further name."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        # Python has given it the one of the further name.
        module.__spec__ = self._spec


def install(tables: Callable[[], Mapping[str, Table]]) -> None:
    """Adds the finder after Python's own; idempotent."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder(tables))
