"""Variables of which each worker of a cluster has its own copy, which no other one sees."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, final

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, StrategyHooks
from replicax.foundation import errors
from replicax.variables import creators
from replicax.variables.plain import create_plain
from replicax.variables.updates import Payload
from replicax.variables.variable import Variable


class Copies(Protocol):
    """The copies of a variable, one on each worker.

    Attributes:
      resource: The number by which workers find their copy.
    """

    resource: int

    def fetch_all(self) -> list[Any]:
        """Returns the values of all workers, in their order."""
        ...


class CopiesHost(Protocol):
    """Creates objects on workers, and keeps them there: a coordinator."""

    def make_copies(self, make: Callable[[], Any]) -> Copies:
        """Calls a function on each worker, now and whenever a worker restarts."""
        ...


@final
class PerWorkerVariable(Variable):
    """A variable with a copy on each worker; made by `rx.Variable(..., per_worker_variable=True)`.

    Functions that run on a worker read and change the copy there, like any other variable. A
    worker that restarts begins again with the initial value. At the coordinator `read_all`
    returns the values of all workers.

    Args:
      attributes: Its attributes.
      make: Makes a copy on a worker.
      owner: The `StrategyExtended` that it belongs to.
    """

    __slots__ = ("_copies", "_make")
    # Shipped as a number: see coordinator/shipping/persistent_ids.py.
    is_per_worker = True

    def __init__(
        self, attributes: creators.VariableAttributes, make: Callable[[], Any], owner: StrategyHooks
    ) -> None:
        self.set_up(attributes, None, owner=owner)
        self._make = make
        self._copies: Copies | None = None

    def attach(self, host: CopiesHost) -> None:
        """Creates the copies on the workers of a coordinator."""
        self._copies = host.make_copies(self._make)

    @property
    def resource(self) -> int:
        """The number by which workers find their copy."""
        return self._require_copies().resource

    def _require_copies(self) -> Copies:
        if self._copies is None:
            raise errors.ContextError(
                f"The copies of {self.name!r} are made by an rx.coordinator.ClusterCoordinator",
                "the strategy has none yet",
                "Make one before the variable is used.",
            )
        return self._copies

    def read_all(self) -> list[Any]:
        """Returns the values of all workers, in their order; waits until all are connected."""
        return [jnp.asarray(value) for value in self._require_copies().fetch_all()]

    @property
    @override
    def device(self) -> str:
        return "/job:worker/replica:0"

    @override
    def read(self, frame: Frame) -> NoReturn:
        raise self._not_here("read")

    @override
    def read_copy(self, replica_id: int) -> NoReturn:
        raise self._not_here("read")

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> NoReturn:
        raise self._not_here("changed")

    @override
    def store(self, frame: Frame, value: ArrayLike) -> NoReturn:
        raise self._not_here("changed")

    def _not_here(self, what: str) -> errors.ContextError:
        return errors.ContextError(
            f"The copies of {self.name!r} are on the workers",
            f"it is {what} at the coordinator",
            "Do that in a function that is scheduled; `read_all()` returns all values.",
        )

    @override
    def describe(self) -> str:
        head = f"<rx.Variable '{self.name}:0' shape={self.shape} dtype={self.dtype}"
        return f"{head}, a copy on each worker>"


def make_copy(kwargs: dict[str, Any]) -> Variable:
    """Makes the copy of the worker on which this runs."""
    owner = frames.current().hooks
    layout = owner.layout
    is_shared = layout is not None and layout.num_replicas > 1
    device = None if layout is None else layout.devices[0]
    return create_plain(owner, device, is_aggregating=is_shared, **kwargs)


def create_per_worker(
    owner: StrategyHooks, spec: creators.InitialSpec, kwargs: dict[str, Any]
) -> PerWorkerVariable:
    """Makes a variable with a copy on each worker.

    Args:
      owner: The `StrategyExtended` that it belongs to.
      spec: Shape and type of its value.
      kwargs: The arguments of `rx.Variable`.
    """
    attributes = creators.resolve_attributes(kwargs, spec)
    own = {k: v for k, v in kwargs.items() if k not in ("per_worker_variable", "colocate_with")}
    if not callable(own["initial_value"]):
        own["initial_value"] = jax.device_get(creators.initial_array(kwargs))
    return PerWorkerVariable(attributes, functools.partial(make_copy, own), owner)


class PerWorkerVariables:
    """The per-worker variables of a strategy, and the coordinator that has their copies made."""

    def __init__(self) -> None:
        self._variables: weakref.WeakSet[PerWorkerVariable] = weakref.WeakSet()
        self._host: weakref.ref[CopiesHost] | None = None

    def add(self, variable: PerWorkerVariable) -> None:
        """Adds one; its copies are made at once if there is a coordinator, and else with it."""
        self._variables.add(variable)
        host = None if self._host is None else self._host()
        if host is not None:
            variable.attach(host)

    def attach(self, host: CopiesHost) -> None:
        """Creates the copies of all variables on the workers of a coordinator."""
        self._host = weakref.ref(host)
        for variable in list(self._variables):
            variable.attach(host)
