"""Handles of variables that another process created; one handle per variable."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from replicax.contexts.frames import StrategyHooks
from replicax.foundation import errors
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.variables.creators import VariableAttributes
from replicax.variables.remote import CopiedVariable, RemoteVariable, VariableClient
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable


class VariableRegistry:
    """Registers the handles of remote variables in this process.

    Args:
      client: Reads and updates them.
      owner: The `StrategyExtended` that they belong to.
    """

    def __init__(self, client: VariableClient, owner: StrategyHooks) -> None:
        self._client = client
        # Weak: the strategy owns its lower half, which owns this registry.
        self._owner = weakref.ref(owner)
        self._parts: weakref.WeakValueDictionary[int, RemoteVariable] = (
            weakref.WeakValueDictionary()
        )
        self._copied: weakref.WeakValueDictionary[Any, CopiedVariable] = (
            weakref.WeakValueDictionary()
        )

    def add(self, variable: RemoteVariable) -> None:
        """Adds a variable that this process created."""
        self._parts[variable.number] = variable

    def variable(self, number: int) -> Variable | None:
        """Returns the variable with a part of this number, if this process has a handle of it."""
        part = self._parts.get(number)
        return None if part is None else part.container

    def adopt(self, key: tuple[Any, ...]) -> Variable:
        """Returns the handle of the variable whose `shipping_key` another process sent."""
        kind, *rest = key
        if kind == "variable":
            return self._part(rest[0], rest[1], attributes_of(rest[2:]))
        if kind == "part":
            index, container = rest
            whole = self.adopt(container)
            assert isinstance(whole, ShardedVariable)
            return whole.variables[index]
        if kind == "sharded":
            name, keys = rest
            parts = [self.adopt(part) for part in keys]
            known = getattr(parts[0], "container", None)
            if isinstance(known, ShardedVariable) and known.consists_of(parts):
                return known
            return ShardedVariable(parts, name=name)
        if kind == "copies":
            return self._copies(*rest)
        raise errors.ProtocolError(
            "A variable must have a key of a known kind",
            f"it has {kind!r}",
            "Check that all tasks run the same version.",
        )

    def _part(self, number: int, server: int, attributes: VariableAttributes) -> RemoteVariable:
        found = self._parts.get(number)
        if found is None:
            found = RemoteVariable(
                attributes, number=number, server=server, client=self._client, owner=self._owner()
            )
            self._parts[number] = found
        return found

    def _copies(self, keys: tuple[Any, ...], attributes: tuple[Any, ...]) -> CopiedVariable:
        found = self._copied.get(keys)
        if found is None:
            copies = [self.adopt(key) for key in keys]
            found = CopiedVariable(attributes_of(attributes), copies, self._owner())  # type: ignore[arg-type]
            self._copied[keys] = found
        return found


def attributes_of(key: Sequence[Any]) -> VariableAttributes:
    """Returns the attributes that `attributes_key` made plain values of."""
    name, shape, dtype, trainable, synchronization, aggregation = key
    return VariableAttributes(
        name=name,
        shape=tuple(shape),
        dtype=jnp.dtype(dtype),
        trainable=trainable,
        synchronization=VariableSynchronization[synchronization],
        aggregation=VariableAggregation[aggregation],
    )
