"""The parts of an object that are saved, and the references between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.tracing.function import Function
from replicax.variables.module import Module
from replicax.variables.variable import Variable

_SCALARS = (bool, int, float, str)
# The prefix of the attributes in which instances cache bound functions.
_BOUND = "_rx_function_"


class LoadedModule(Module):
    """A part of a loaded model: the attributes of what was saved, without its class.

    The model as a whole also has `signatures`, a dict of functions by name.
    """

    signatures: dict[str, Function]

    def __repr__(self) -> str:
        return f"<loaded module {self.name!r} with {sorted(attributes_of(self))}>"


class CallableLoadedModule(LoadedModule):
    """A loaded part that was saved with an exported `__call__`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["__call__"](*args, **kwargs)


class ObjectGraph:
    """The nodes of an object to save, each once, and its variables."""

    def __init__(self, is_exported: Callable[[Function], bool]) -> None:
        self._is_exported = is_exported
        self.nodes: list[dict[str, Any]] = []
        # The variables by number, and the first path to each.
        self.variables: list[Variable] = []
        self.paths: list[str] = []
        self._numbers: dict[Variable, int] = {}
        self.functions: dict[int, Function] = {}
        self._places: dict[int, int] = {}
        # Keeps objects alive whose ids are in use.
        self._seen: list[object] = []

    def add_root(self, root: object) -> None:
        """Adds the object to save, as node 0."""
        if isinstance(root, Mapping):
            attributes = dict(root)
            if not all(isinstance(key, str) and key.isidentifier() for key in attributes):
                raise errors.InvalidArgumentError(
                    "The keys of a dict that is saved must be names of attributes",
                    f"they are {list(attributes)}",
                    "Rename them, or put the dict into an attribute of an rx.Module.",
                )
        elif isinstance(root, Variable | Function) or not hasattr(root, "__dict__"):
            raise errors.ArgumentTypeError(
                "`saved_model.save` needs an object with attributes, or a dict",
                f"{type(root).__name__} was given",
                "Put it into an rx.Module or a dict.",
            )
        else:
            attributes = attributes_of(root)
        attributes.pop("signatures" if isinstance(root, LoadedModule) else "", None)
        self._add_module(root, attributes, "")

    def add_variable(self, variable: Variable, path: str) -> int:
        """Adds a variable, once, and returns its number."""
        variable = getattr(variable, "container", variable)
        if variable not in self._numbers:
            self._numbers[variable] = len(self.variables)
            self.variables.append(variable)
            self.paths.append(path)
        return self._numbers[variable]

    def _add(self, value: object, path: str) -> int | None:
        """Adds a value, and returns its node; None if it cannot be saved."""
        if isinstance(value, Variable):
            return self._new({"variable": self.add_variable(value, path)}, value)
        if isinstance(value, Function):
            if not self._is_exported(value):
                return None
            self.functions[id(value)] = value
            return self._new({"function": id(value)}, value)
        if id(value) in self._places and not isinstance(value, _SCALARS):
            return self._places[id(value)]
        if isinstance(value, Module):
            return self._add_module(value, attributes_of(value), path)
        if isinstance(value, Mapping | list | tuple):
            return self._add_container(value, path)
        return self._new({"value": value}) if isinstance(value, _SCALARS) else None

    def _add_module(self, value: object, attributes: dict[str, object], path: str) -> int:
        node: dict[str, Any] = {"module": {}}
        place = self._new(node, value)
        for name in sorted(attributes):
            child = self._add(attributes[name], f"{path}/{name}".lstrip("/"))
            if child is not None:
                node["module"][name] = child
        return place

    def _add_container(
        self, value: Mapping[object, object] | Sequence[object], path: str
    ) -> int | None:
        """Adds a list, tuple or dict, unless it holds nothing to save."""
        if not _holds_state(value, set()):
            return None
        if isinstance(value, Mapping):
            node: dict[str, Any] = {"dict": []}
            place = self._new(node, value)
            for key, item in value.items():
                if isinstance(key, str | int):
                    node["dict"].append([key, self._add(item, f"{path}/{key}")])
            return place
        node = {"list" if isinstance(value, list) else "tuple": []}
        place = self._new(node, value)
        node[next(iter(node))] += [self._add(v, f"{path}/{i}") for i, v in enumerate(value)]
        return place

    def _new(self, node: dict[str, Any], value: object = None) -> int:
        self.nodes.append(node)
        if value is not None:
            self._seen.append(value)
            self._places[id(value)] = len(self.nodes) - 1
        return len(self.nodes) - 1


def attributes_of(value: object) -> dict[str, object]:
    """Returns the attributes of an object that may be saved, functions of its class too."""
    found = {
        name: getattr(value, name)
        for cls in type(value).__mro__
        for name, attribute in vars(cls).items()
        if isinstance(attribute, Function)
    }
    own = {k: v for k, v in vars(value).items() if not k.startswith(_BOUND)}
    return {**found, **own}


def build(
    nodes: list[dict[str, Any]], variables: list[Variable], functions: list[Function]
) -> LoadedModule:
    """Builds the object that nodes describe; node 0 is the root."""
    built: dict[int, Any] = {}

    def make(place: int | None) -> Any:
        if place is None or place in built:
            return None if place is None else built[place]
        ((kind, content),) = nodes[place].items()
        if kind == "module":
            module = CallableLoadedModule() if "__call__" in content else LoadedModule()
            built[place] = module
            # Not setattr: a name must not reach a property of the class.
            vars(module).update({name: make(child) for name, child in content.items()})
        elif kind == "list":
            built[place] = []
            built[place] += [make(child) for child in content]
        elif kind == "tuple":
            built[place] = tuple(make(child) for child in content)
        elif kind == "dict":
            built[place] = {}
            built[place].update({key: make(child) for key, child in content})
        else:
            parts = {"variable": variables, "function": functions}
            built[place] = parts[kind][content] if kind in parts else content
        return built[place]

    return make(0)


def _holds_state(value: object, seen: set[int]) -> bool:
    if isinstance(value, Variable | Function | Module):
        return True
    if id(value) in seen or not isinstance(value, Mapping | list | tuple):
        return False
    seen.add(id(value))
    children = value.values() if isinstance(value, Mapping) else value
    return any(_holds_state(child, seen) for child in children)
