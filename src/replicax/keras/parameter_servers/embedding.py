"""Embedding layers whose table is on parameter servers: only rows travel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from replicax.keras import internals
from replicax.keras.parameter_servers import step_values
from replicax.keras.variables import DistributedVariable, cross_replica
from replicax.tracing.gradients import embedding_lookup
from replicax.variables.variable import Variable


def looking_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `keras.layers.Embedding.call`."""

    @functools.wraps(original)
    def call(self: Any, inputs: ArrayLike) -> Any:
        table = _table(self)
        if table is None:
            return original(self, inputs)
        ids = jnp.asarray(inputs)
        if ids.dtype not in (jnp.int32, jnp.int64):
            ids = ids.astype(jnp.int32)
        return keras.ops.cast(_rows(self, table, ids), self.compute_dtype)

    return call


def _table(layer: keras.layers.Embedding) -> Variable | None:
    """Returns the variable on the servers in which a layer looks rows up."""
    if not internals.is_plain_table(layer):
        return None
    variable = internals.table_of(layer)
    scope = step_values.current()
    if scope is not None:
        return scope.table(variable)
    is_ours = isinstance(variable, DistributedVariable) and not internals.in_stateless_scope()
    twin = variable.twin if is_ours else None
    return twin if twin is not None and twin.is_remote else None


def _rows(layer: keras.layers.Embedding, table: Variable, ids: jax.Array) -> jax.Array:
    variable = internals.table_of(layer)
    if isinstance(variable, DistributedVariable):
        with cross_replica(variable.strategy):
            return embedding_lookup(table, ids)
    return embedding_lookup(table, ids)
