"""The objects that the code of a function can reach by name, found without running it.

A trace runs Python once. Names outside of the code (globals, variables of enclosing functions,
attributes) are resolved once too. `Reach` resolves them in the same way: from the names that the
byte code loads to their values, through helper functions, methods and containers. Code of libraries
is not followed.

A program uses the variables that its trace found. When a notebook cell is run again, or an
attribute is set, the same names are bound to other variables, and the function must be traced
again: `Bindings` compares identities in every call, in loops that run in C.
"""

from __future__ import annotations

import dis
import functools
import operator
import os
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from typing_extensions import TypeIs

from replicax.tracing.iterators import Feed, is_iterator
from replicax.values.array_surface import ArraySurface
from replicax.variables.module import Module, Replacements

# Longer containers hold data rather than objects that code refers to by name.
_MOST_ITEMS = 256
# The number of objects, besides modules, whose attributes are compared in every call.
_MOST_OBJECTS = 16
# Longer lists hold data.
_MOST_COMPARED = 64
# A bound for long chains of references.
_MOST_VISITS = 20_000
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic, type(Ellipsis), type(NotImplemented))
_LEAVES = (*_NUMBERS, jax.Array, np.ndarray, Feed, ArraySurface)
_GENERATORS = (
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    np.random.SeedSequence,
)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Special methods that make objects, or describe them, rather than compute.
_MAKERS = frozenset(
    ("__new__", "__init__", "__init_subclass__", "__repr__", "__class__", "__reduce__")
)
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARIES = tuple(
    os.path.join(sysconfig.get_path(name), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class TorchGenerator(Protocol):
    """A random number generator of torch."""

    def get_state(self) -> Any: ...


NumberGenerator: TypeAlias = (
    random.Random
    | np.random.Generator
    | np.random.RandomState
    | np.random.BitGenerator
    | np.random.SeedSequence
    | TorchGenerator
)
_Function: TypeAlias = Callable[..., Any]


class Binding(NamedTuple):
    """A name that code looks up, and the object that it is bound to.

    Attributes:
      owner: The dictionary of a module or an object, a dict, a list, or the cell of a closure.
      name: The name in it; None for a cell.
      value: The object.
      label: The name as the user writes it.
      holder: The object that owns the dictionary, for attributes.
    """

    owner: dict[Any, Any] | list[Any] | types.CellType
    name: object
    value: Any
    label: str
    holder: object = None


class _Names(NamedTuple):
    """The names that some code, and the code inside it, loads."""

    globals: frozenset[str]
    cells: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]


class Reach:
    """The objects that a function, called with some arguments, can reach by name.

    Attributes:
      bindings: The names that the code looks up.
      iterators: Labels and iterators that are not feeds, by id.
      generators: Labels and random number generators, by id.
      modules: The modules of random numbers that the code uses.
    """

    def __init__(self, function: _Function, arguments: Iterable[object] = ()) -> None:
        self.bindings: list[Binding] = []
        self.iterators: dict[int, tuple[str, Iterator[Any]]] = {}
        self.generators: dict[int, tuple[str, NumberGenerator]] = {}
        self.modules: set[str] = set()
        self._seen: set[tuple[int, int]] = set()
        # Keeps objects alive while their ids are in use.
        self._kept: list[object] = []
        self._root = _innermost(function)
        self._home = _top_package(self._root)
        self._follow(function, "function")
        names = _names_of(function)
        if names is not None:
            for i, argument in enumerate(arguments):
                self._visit(argument, names.attributes, f"argument {i}")

    # Code.

    def _follow(self, function: _Function, label: str) -> None:
        """Follows the names that a function loads; `label` is the function's name to the user."""
        if isinstance(function, functools.partial):
            self._follow(function.func, label)
            for value in (*function.args, *function.keywords.values()):
                self._visit(value, frozenset(), label)
            return
        inner = _wrapped(function)
        if inner is not None:
            self._follow(inner, label)
            return
        if isinstance(function, types.MethodType):
            self._follow(function.__func__, label)
            names = _names_of(function.__func__)
            if names is not None and isinstance(function.__func__, types.FunctionType):
                self._visit(function.__self__, names.attributes, label.rpartition(".")[0] or "self")
            return
        if isinstance(function, types.FunctionType):
            is_own = self._is_own_file(function.__code__.co_filename)
            if is_own or function is self._root:
                self._follow_code(function)
            elif "__wrapped__" in function.__dict__:
                # A library's wrapper of the user's function, such as `jax.vmap`.
                self._visit(function.__dict__["__wrapped__"], frozenset(), label)

    def _follow_code(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        if self._is_seen(function, names.attributes):
            return
        for name in sorted(names.globals & function.__globals__.keys()):
            value = function.__globals__[name]
            self._bind(Binding(function.__globals__, name, value, name))
            self._visit(value, names.attributes, name)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if name in names.cells:
                self._bind(Binding(cell, None, value, name))
                self._visit(value, names.attributes, name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(value, names.attributes, "a default argument")
        self._note_imports(names)

    def _note_imports(self, names: _Names) -> None:
        if "random" in names.imports:
            self.modules.add("random")
        if any(n == "numpy" or n.startswith("numpy.") for n in names.imports):
            self.modules.update({"np.random"} if "random" in names.attributes else ())
        if "numpy.random" in names.imports:
            self.modules.add("np.random")

    # Values.

    def _visit(self, value: object, attributes: frozenset[str], label: str) -> None:
        if value is None or isinstance(value, _LEAVES) or self._is_seen(value, attributes):
            return
        if _is_generator_of_numbers(value):
            self.generators[id(value)] = (label, value)
        elif is_iterator(value):
            self.iterators[id(value)] = (label, value)
        elif isinstance(value, types.ModuleType):
            self._visit_module(value, attributes, label)
        elif isinstance(value, Mapping):
            self._visit_mapping(value, attributes, label)
        elif isinstance(value, list | tuple | set | frozenset):
            self._visit_items(value, attributes, label)
        elif callable(value):
            self._visit_callable(value, attributes, label)
        else:
            self._visit_object(value, attributes, label)

    def _visit_callable(self, value: _Function, attributes: frozenset[str], label: str) -> None:
        owner = getattr(value, "__self__", None)
        if _is_generator_of_numbers(owner):
            self._note_drawing(owner, label)
        elif isinstance(value, type):
            self._visit_class(value, attributes, label)
        elif is_iterator(owner) and not isinstance(value, types.MethodType):
            # A method such as `__next__`, without code that names the iterator.
            self._visit(owner, attributes, label)
        elif isinstance(value, _FUNCTIONS) or _wrapped(value) is not None:
            self._follow(value, label)
        else:
            self._visit_object(value, attributes, label)

    def _visit_class(self, cls: type, attributes: frozenset[str], label: str) -> None:
        if self._is_own_class(cls):
            for name in sorted(attributes | {"__init__"}):
                self._follow_member(cls, name, attributes, f"{label}.{name}", cls)

    def _visit_module(
        self, module: types.ModuleType, attributes: frozenset[str], label: str
    ) -> None:
        name = module.__name__
        if name == "random":
            self.modules.add("random")
        elif name == "numpy.random" or (name == "numpy" and "random" in attributes):
            self.modules.add("np.random")
        elif name == "torch" or name.startswith("torch."):
            self.modules.add("torch")
        elif self._is_own_file(getattr(module, "__file__", None)):
            for found in sorted(attributes & vars(module).keys()):
                own = vars(module)[found]
                self._bind(Binding(vars(module), found, own, f"{label}.{found}"))
                self._visit(own, attributes, f"{label}.{found}")

    def _visit_mapping(
        self, value: Mapping[Any, Any], attributes: frozenset[str], label: str
    ) -> None:
        if type(value) is not dict or len(value) > _MOST_ITEMS:
            return
        for key, item in list(value.items()):
            if self._is_stateful(item):
                self._bind(Binding(value, key, item, f"{label}[{key!r}]"))
            self._visit(item, attributes, f"{label}[{key!r}]")

    def _visit_items(self, value: Collection[Any], attributes: frozenset[str], label: str) -> None:
        if len(value) > _MOST_ITEMS:
            return
        if type(value) is list and any(map(self._is_stateful, value)):
            self._bind(Binding(value, slice(None), tuple(value), f"an item of {label}"))
        for i, item in enumerate(value):
            self._visit(item, attributes, f"{label}[{i}]")

    def _visit_object(self, value: object, attributes: frozenset[str], label: str) -> None:
        cls = type(value)
        if cls.__module__.partition(".")[0] == "torch":
            self.modules.add("torch")
        if not any(map(self._is_own_class, cls.__mro__[:-1])):
            return
        own = _dict_of(value)
        for name in sorted(attributes & own.keys()):
            self._bind(Binding(own, name, own[name], f"{label}.{name}", value))
            self._visit(own[name], attributes, f"{label}.{name}")
        names = attributes | _special_methods(cls)
        for name in sorted(names - own.keys()):
            self._follow_member(cls, name, attributes, f"{label}.{name}", value)

    def _follow_member(
        self,
        cls: type,
        name: str,
        attributes: frozenset[str],
        label: str,
        instance: object = None,
    ) -> None:
        """Follows a method or property of a class, or an object that is its attribute."""
        for base in cls.__mro__:
            found = vars(base).get(name)
            if found is None:
                continue
            found = found.fget if isinstance(found, property) else found
            found = getattr(found, "__func__", found)
            found = _wrapped(found) or found
            if isinstance(found, types.FunctionType) and self._is_own_file(
                found.__code__.co_filename
            ):
                self._follow_code(found)
                if instance is not None:
                    names = _names_in(found.__code__)
                    self._visit(instance, names.attributes, label.rpartition(".")[0])
            elif not callable(found):
                self._visit(found, attributes, label)
            return

    def _note_drawing(self, owner: NumberGenerator, label: str) -> None:
        """Records the owner of a method such as `from numpy.random import normal` imports."""
        if owner is getattr(random.random, "__self__", None):
            self.modules.add("random")
        elif owner is getattr(np.random.random_sample, "__self__", None):
            self.modules.add("np.random")
        else:
            self.generators[id(owner)] = (label, owner)

    # Bookkeeping.

    def _bind(self, binding: Binding) -> None:
        """Records a binding, unless its value is a constant, a library's, or a strategy.

        A new strategy comes with new variables; a recorded strategy would be kept alive by the
        function.
        """
        value = binding.value
        if isinstance(value, (*_NUMBERS, types.ModuleType, types.BuiltinFunctionType)):
            return
        if hasattr(type(value), "num_replicas_in_sync"):
            return
        if isinstance(value, type) and not self._is_own_class(value):
            return
        if isinstance(value, types.FunctionType) and not self._is_own_file(
            value.__code__.co_filename
        ):
            return
        self.bindings.append(binding)

    def _is_stateful(self, value: object) -> bool:
        """Returns whether a value is a variable, or an object that may hold variables."""
        is_object = bool(_dict_of(value)) and not isinstance(value, type)
        return isinstance(value, ArraySurface) or (is_object and self._is_own_class(type(value)))

    def _is_seen(self, value: object, attributes: frozenset[str]) -> bool:
        key = (id(value), id(attributes))
        if key in self._seen or len(self._seen) > _MOST_VISITS:
            return True
        self._seen.add(key)
        self._kept.append((value, attributes))
        return False

    def _is_own_class(self, cls: type) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or cls.__module__ == "builtins":
            return False
        return cls.__module__ == "__main__" or self._is_own_file(getattr(module, "__file__", None))

    def _is_own_file(self, file: str | None) -> bool:
        """Returns whether code is the user's: in no library, or in the function's own package."""
        if file is None:
            return False
        if file.startswith(_PACKAGE):
            return False
        return not _is_library(file) or (bool(self._home) and file.startswith(self._home))


# By the id of a dictionary: the dictionary, and the names in it with their values.
_Groups: TypeAlias = dict[int, tuple[dict[Any, Any], dict[Any, Any]]]


class Bindings:
    """The names that the trace of a function followed, and the objects they were bound to."""

    def __init__(self, reach: Reach) -> None:
        self._labels: dict[tuple[int, Any], str] = {}
        self._cells: list[tuple[types.CellType, object, str]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...], str]] = []
        dictionaries: _Groups = {}
        modules: _Groups = {}
        for binding in reach.bindings:
            self._add(binding, dictionaries, modules)
        self._dictionaries = _columns(dictionaries)
        self._modules = _columns(modules)
        self._replacements = Replacements.count

    def _add(self, binding: Binding, dictionaries: _Groups, modules: _Groups) -> None:
        owner, name, value = binding.owner, binding.name, binding.value
        if isinstance(owner, types.CellType):
            self._cells.append((owner, value, binding.label))
            return
        if isinstance(owner, list):
            if len(value) <= _MOST_COMPARED:
                self._lists.append((owner, value, binding.label))
            return
        group = modules if isinstance(binding.holder, Module) else dictionaries
        if id(owner) not in group and len(group) == _MOST_OBJECTS and group is dictionaries:
            return
        self._labels[id(owner), name] = binding.label
        group.setdefault(id(owner), (owner, {}))[1][name] = value

    def changed(self) -> str | None:
        """Returns a name that is bound to another object now; None if there is none."""
        same = operator.is_
        for owner, names, values in self._dictionaries:
            if not all(map(same, map(owner.get, names), values)):
                return self._first(owner, names, values)
        for cell, value, label in self._cells:
            try:
                if cell.cell_contents is not value:
                    return label
            except ValueError:
                return label
        for items, values, label in self._lists:
            if len(items) != len(values) or not all(map(same, items, values)):
                return label
        if Replacements.count != self._replacements:
            return self._changed_module()
        return None

    def _changed_module(self) -> str | None:
        now = Replacements.count
        for owner, names, values in self._modules:
            if not all(map(operator.is_, map(owner.get, names), values)):
                return self._first(owner, names, values)
        self._replacements = now
        return None

    def _first(
        self, owner: dict[Any, Any], names: tuple[object, ...], values: tuple[object, ...]
    ) -> str:
        found = zip(names, values, strict=True)
        name = next((name for name, value in found if owner.get(name) is not value), names[0])
        return self._labels[id(owner), name]


def _columns(
    groups: _Groups,
) -> list[tuple[dict[Any, Any], tuple[object, ...], tuple[object, ...]]]:
    return [(owner, tuple(found), tuple(found.values())) for owner, found in groups.values()]


def _wrapped(value: object) -> _Function | None:
    """Returns the Python function inside a compiled one; None for anything else."""
    own = _dict_of(value)
    inner = own.get("python_function")
    if inner is None and not isinstance(value, type | types.FunctionType):
        inner = own.get("__wrapped__")
    return inner if callable(inner) else None


def _innermost(function: _Function) -> _Function:
    while True:
        inner = _wrapped(function)
        if inner is None and isinstance(function, functools.partial):
            inner = function.func
        if inner is None and isinstance(function, types.MethodType):
            inner = function.__func__
        if inner is None:
            return function
        function = inner


def _dict_of(value: object) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}


def _is_generator_of_numbers(value: object) -> TypeIs[NumberGenerator]:
    if isinstance(value, _GENERATORS):
        return True
    return type(value).__module__.startswith("torch") and type(value).__name__ == "Generator"


def _names_of(function: _Function) -> _Names | None:
    code = getattr(_innermost(function), "__code__", None)
    return _names_in(code) if isinstance(code, types.CodeType) else None


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    found: dict[str, set[str]] = {"GLOBAL": set(), "CELL": set(), "ATTRIBUTE": set()}
    imports: set[str] = set()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
            found["GLOBAL"].add(name)
        elif kind in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            found["CELL"].add(name)
        elif kind in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            found["ATTRIBUTE"].add(name)
        elif kind == "IMPORT_NAME":
            imports.add(name)
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return _Names(
        frozenset(found["GLOBAL"]).union(*(n.globals for n in inner)),
        frozenset(found["CELL"]).union(*(n.cells for n in inner)),
        frozenset(found["ATTRIBUTE"]).union(*(n.attributes for n in inner)),
        frozenset(imports).union(*(n.imports for n in inner)),
    )


def _top_package(function: _Function) -> str:
    """Returns the directory of the function's top-level package; "" if it has none."""
    name = getattr(function, "__module__", None) or ""
    package = sys.modules.get(name.partition(".")[0])
    file = getattr(package, "__file__", None)
    if file is None or not hasattr(package, "__path__"):
        return ""
    return os.path.join(os.path.dirname(file), "")


@functools.lru_cache(maxsize=4096)
def _special_methods(cls: type) -> frozenset[str]:
    """Returns the methods of a class that code calls without naming them, such as `__getitem__`."""
    found = (n for base in cls.__mro__[:-1] for n, v in vars(base).items() if callable(v))
    return frozenset(n for n in found if n.startswith("__") and n.endswith("__")) - _MAKERS


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    path = os.path.abspath(file)
    return path.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in path
