"""Objects that are sent to workers by persistent id, and objects that must not be sent."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import jax
import jax.core

from replicax.foundation import errors
from replicax.strategies.base import Strategy
from replicax.strategies.extended import StrategyExtended
from replicax.tracing.iterators import Feed
from replicax.values.layout import ReplicaLayout
from replicax.variables.variable import Variable

PersistentId = tuple[object, ...]


class ShippableVariable(Protocol):
    """A variable that workers can find by its key."""

    @property
    def name(self) -> str: ...

    def shipping_key(self) -> object: ...


class NotShippableError(Exception):
    """An object must not be sent to workers.

    Args:
      kind: The class of the error to raise.
      required: Its first part.
      found: Its second part.
      advice: Its third part.

    Attributes:
      culprit: The object.
    """

    def __init__(
        self, kind: type[errors.DistributeError], required: str, found: str, advice: str
    ) -> None:
        super().__init__(required, found, advice)
        self.culprit: object = None
        self._kind, self._parts = kind, (required, found, advice)

    def error(self, path: str) -> errors.DistributeError:
        """Returns the error to raise, given the path of the object."""
        required, found, advice = self._parts
        return self._kind(required, f"{found}{path}", advice)


def persistent_id_of(obj: object, strategy: Strategy | None) -> PersistentId | None:
    """Returns the persistent id of an object; None if it is pickled by value.

    Args:
      obj: The object.
      strategy: The strategy of the closure; None for any strategy.

    Raises:
      NotShippableError: It must not be sent.
    """
    role = _role_of(type(obj))
    if role is None:
        return None
    try:
        found = _HANDLERS[role](obj, strategy)
        # A face of the library, such as `replicax.tf`, has classes of its own for shared objects.
        face = getattr(type(obj), "shipped_as", None)
        return found if face is None else ("as", face, found)
    except NotShippableError as error:
        error.culprit = obj
        raise


# The coordinator's classes are recognized by name: they are defined above this module.
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
    """Returns the role that objects of a class have in the cluster; None for other classes."""
    try:
        return _roles[kind]
    except KeyError:
        role = _roles[kind] = next(_possible_roles(kind), None)
        return role


def _possible_roles(kind: type) -> Iterator[str]:
    # Not `hasattr`, which runs the code of a metaclass.
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


def _id_of_variable(variable: ShippableVariable, strategy: Strategy | None) -> PersistentId:
    owner = getattr(variable, "owner", None)
    if strategy is not None and owner is not None and owner is not strategy.extended:
        raise NotShippableError(
            errors.InvalidArgumentError,
            "A closure may use variables of its own cluster",
            f"variable {variable.name!r} belongs to another strategy",
            "Create it inside `with strategy.scope():` of the strategy that runs the closure.",
        )
    return ("variable", variable.shipping_key())


def _id_of_strategy(found: Strategy, strategy: Strategy | None) -> PersistentId:
    is_own = found is strategy if strategy is not None else hasattr(found.extended, "cluster")
    if not is_own:
        raise _foreign_strategy(found)
    return ("strategy",)


def _id_of_extended(found: StrategyExtended, strategy: Strategy | None) -> PersistentId:
    is_own = found is strategy.extended if strategy is not None else hasattr(found, "cluster")
    if not is_own:
        raise _foreign_strategy(found.container_strategy)
    return ("extended",)


def _id_of_layout(layout: ReplicaLayout, strategy: Strategy | None) -> PersistentId:
    if strategy is not None and getattr(strategy.extended, "layout", None) != layout:
        raise _foreign_strategy(layout)
    return ("layout",)


def _foreign_strategy(found: object) -> NotShippableError:
    return NotShippableError(
        errors.InvalidArgumentError,
        "A closure may use the strategy of its own cluster",
        f"it holds {type(found).__name__}, which belongs to the devices of the coordinator",
        "Use the ParameterServerStrategy, or rx.get_strategy() inside the closure.",
    )


def _reject_local_variable(variable: Variable, strategy: Strategy | None) -> NoReturn:
    raise NotShippableError(
        errors.InvalidArgumentError,
        "A closure may use variables that live on parameter servers",
        f"variable {variable.name!r} is on the coordinator, or belongs to another strategy",
        "Create it inside `with strategy.scope():`, or pass its value as an argument.",
    )


def _reject_remote_value(value: object, strategy: Strategy | None) -> NoReturn:
    raise NotShippableError(
        errors.InvalidArgumentError,
        "The inputs of a closure must be known when it is scheduled",
        "a RemoteValue is among them",
        "Pass `value.fetch()`, or do both steps in one closure.",
    )


def _reject_coordinator(value: object, strategy: Strategy | None) -> NoReturn:
    raise NotShippableError(
        errors.InvalidArgumentError,
        "A closure runs on a worker, where there is no coordinator",
        "it holds a ClusterCoordinator",
        "Call `schedule`, `join` and `fetch` outside of the function.",
    )


def _reject_iterator(value: object, strategy: Strategy | None) -> NoReturn:
    raise NotShippableError(
        errors.ArgumentTypeError,
        "A closure reads data that its worker creates",
        f"it holds a {type(value).__name__} of the coordinator",
        "Use `iter(coordinator.create_per_worker_dataset(dataset_fn))`, and pass that.",
    )


def _reject_tracer(value: object, strategy: Strategy | None) -> NoReturn:
    raise NotShippableError(
        errors.TracedValueError,
        "A closure is scheduled with values",
        "a value that is being traced is among them",
        "Call `schedule` outside of compiled functions.",
    )


_HANDLERS: dict[str, Callable[[Any, Strategy | None], PersistentId]] = {
    "variable": _id_of_variable,
    "resource": lambda found, _: ("resource", found.resource),
    "strategy": _id_of_strategy,
    "extended": _id_of_extended,
    "layout": _id_of_layout,
    "local_variable": _reject_local_variable,
    "remote_value": _reject_remote_value,
    "coordinator": _reject_coordinator,
    "iterator": _reject_iterator,
    "tracer": _reject_tracer,
}
