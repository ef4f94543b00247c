"""What goes to workers by name, because it lives there or on servers; and what must not go."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.core

from replicax.foundation import errors
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.tracing.iterators import Feed
from replicax.values.layout import ReplicaLayout
from replicax.variables.variable import Variable


class Refusal(Exception):
    """Something that must not travel: the kind of error, and its three parts.

    Attributes:
      culprit: The thing.
    """

    def __init__(self, kind: type[Exception], required: str, found: str, todo: str) -> None:
        super().__init__(required, found, todo)
        self.kind = kind
        self.culprit: Any = None
        self.required, self.found, self.todo = required, found, todo

    def error(self, place: str) -> Exception:
        """Returns the error to raise, given where the thing was found."""
        return self.kind(self.required, f"{self.found}{place}", self.todo)


def name_of(obj: Any, strategy: Any) -> Any:
    """Returns the name under which workers find an object; None if it goes by value.

    Args:
      obj: The object.
      strategy: The one that the closure belongs to; None for that of any cluster.

    Raises:
      Refusal: It must not travel.
    """
    role = _role_of(type(obj))
    if role is None:
        return None
    try:
        return _NAMING[role](obj, strategy)
    except Refusal as refusal:
        refusal.culprit = obj
        raise


# The coordinator's own classes are known by their public names: they are made above this module.
_COORDINATOR_CLASSES = {
    "replicax.coordinator.RemoteValue": "remote_value",
    "replicax.coordinator.ClusterCoordinator": "coordinator",
}
_ROLE_OF_CLASS: list[tuple[type, str]] = [
    (Variable, "local_variable"),
    (Strategy, "strategy"),
    (StrategyExtended, "extended"),
    (ReplicaLayout, "layout"),
    (Feed, "iterator"),
    (jax.core.Tracer, "tracer"),
]
_roles: weakref.WeakKeyDictionary[type, str | None] = weakref.WeakKeyDictionary()


def _role_of(kind: type) -> str | None:
    """Returns what objects of a class are to the cluster; None for ordinary ones."""
    try:
        return _roles[kind]
    except KeyError:
        role = _roles[kind] = next(_possible_roles(kind), None)
        return role


def _possible_roles(kind: type) -> Iterator[str]:
    # Asked of the dictionaries: `hasattr` would run the code of a metaclass.
    names = {name for base in kind.__mro__ for name in vars(base)}
    if "shipping_key" in names:
        yield "variable"
    if "is_per_worker" in names:
        yield "resource"
    for base in kind.__mro__:
        known = _COORDINATOR_CLASSES.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            yield known
    for base, role in _ROLE_OF_CLASS:
        if issubclass(kind, base):
            yield role


def _name_variable(variable: Any, strategy: Any) -> Any:
    owner = getattr(variable, "owner", None)
    if strategy is not None and owner is not None and owner is not strategy.extended:
        raise Refusal(
            errors.InvalidArgumentError,
            "A closure may use variables of its own cluster",
            f"variable {variable.name!r} belongs to another strategy",
            "Create it inside `with strategy.scope():` of the strategy that runs the closure.",
        )
    return ("variable", variable.shipping_key())


def _name_strategy(found: Any, strategy: Any) -> Any:
    is_own = found is strategy if strategy is not None else hasattr(found.extended, "cluster")
    if not is_own:
        raise _foreign_strategy(found)
    return ("strategy",)


def _name_extended(found: Any, strategy: Any) -> Any:
    is_own = found is strategy.extended if strategy is not None else hasattr(found, "cluster")
    if not is_own:
        raise _foreign_strategy(found.container_strategy)
    return ("extended",)


def _name_layout(layout: Any, strategy: Any) -> Any:
    if strategy is not None and getattr(strategy.extended, "layout", None) != layout:
        raise _foreign_strategy(layout)
    return ("layout",)


def _foreign_strategy(found: Any) -> Refusal:
    return Refusal(
        errors.InvalidArgumentError,
        "A closure may use the strategy of its own cluster",
        f"it holds {type(found).__name__}, which belongs to the devices of the coordinator",
        "Use the ParameterServerStrategy, or rx.get_strategy() inside the closure.",
    )


def _refuse_local_variable(variable: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "A closure may use variables that live on parameter servers",
        f"variable {variable.name!r} lives on the coordinator, or belongs to another strategy",
        "Create it inside `with strategy.scope():`, or pass its value as an argument.",
    )


def _refuse_remote_value(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "The inputs of a closure must be there when it is scheduled",
        "there is a RemoteValue",
        "Pass `value.fetch()`, or do both steps in one closure.",
    )


def _refuse_coordinator(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.InvalidArgumentError,
        "A closure runs on a worker, where there is no coordinator",
        "it holds a ClusterCoordinator",
        "Call `schedule`, `join` and `fetch` outside of the function.",
    )


def _refuse_iterator(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.ArgumentTypeError,
        "A closure reads data that is made on its worker",
        f"it holds a {type(value).__name__} of the coordinator",
        "Use `iter(coordinator.create_per_worker_dataset(dataset_fn))`, and pass that.",
    )


def _refuse_tracer(value: Any, strategy: Any) -> Any:
    raise Refusal(
        errors.TracedValueError,
        "A closure is scheduled with values",
        "there is a value that is being traced",
        "Call `schedule` outside of compiled functions.",
    )


_NAMING: dict[str, Any] = {
    "variable": _name_variable,
    "resource": lambda found, _: ("resource", found.resource),
    "strategy": _name_strategy,
    "extended": _name_extended,
    "layout": _name_layout,
    "local_variable": _refuse_local_variable,
    "remote_value": _refuse_remote_value,
    "coordinator": _refuse_coordinator,
    "iterator": _refuse_iterator,
    "tracer": _refuse_tracer,
}
