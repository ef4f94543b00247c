"""Optimizers on parameter servers: where their state goes, and what the servers are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from replicax.foundation import jax_compat
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.protocol import messages
from replicax.ps.client.initial_values import Initial, uniform_element
from replicax.training.optimizer.remote import Update
from replicax.variables.creators import VariableAttributes
from replicax.variables.remote import CopiedVariable, RemoteVariable
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable


def make_slot(extended: Any, variable: Any, name: str, spec: Any, first: Any) -> Variable:
    """Makes a slot on the servers of a variable, part by part."""
    attributes = _attributes(name, spec)
    parts = variable.components
    if not isinstance(variable, ShardedVariable):
        value = _first_slot(first, variable, spec)
        return extended.make_part(attributes, value, variable.server)
    slots = []
    for i, part in enumerate(parts):
        own = attributes.part(i, part.shape[0])
        piece = jax.ShapeDtypeStruct(own.shape, spec.dtype)
        slots.append(extended.make_part(own, _first_slot(first, part, piece), part.server))
    return ShardedVariable(slots, name=name)


def _first_slot(first: Any, part: Any, spec: Any) -> Initial:
    """Returns the first value of a slot: one number, or a program of the variable's value."""
    value = jax.ShapeDtypeStruct(part.shape, part.dtype)
    with jax_compat.eagerly():
        closed = jax.make_jaxpr(first)(value)
        element = uniform_element(closed)
        if element is not None:
            return Initial(messages.Fill(element.astype(spec.dtype).tobytes()), [])
        program = export.export(jax.jit(first), platforms=("cpu",))(value).serialize()
    return Initial(messages.FromProgram([part.number], 0), [bytes(program)])


def make_shared(extended: Any, variables: Sequence[Any], name: str, value: Any) -> CopiedVariable:
    """Makes a variable with a copy on each server that holds a part of some variables."""
    array = np.asarray(value)
    attributes = _attributes(name, array)
    servers = sorted({part.server for variable in variables for part in variable.components})
    copies = [
        extended.make_part(
            attributes.named(f"{name}/copy_{i}"), Initial(messages.FromBuffer(), [array]), server
        )
        for i, server in enumerate(servers)
    ]
    return CopiedVariable(attributes, copies, extended)


def register(extended: Any, shared: Sequence[Any], updates: Sequence[Update]) -> int:
    """Tells each server how to change the parts that it holds."""
    cluster = extended.require_cluster("The creation of an optimizer")
    number = cluster.next_number()
    servers = sorted({p.server for update in updates for p in update.variable.components})  # type: ignore[attr-defined]
    for server in servers:
        programs: list[bytes] = []
        trained: list[messages.TrainedPart] = []
        for update in updates:
            for i, part in enumerate(update.variable.components):
                if not isinstance(part, RemoteVariable) or part.server != server:
                    continue
                if update.program not in programs:
                    programs.append(update.program)
                slots = [slot.components[i].number for slot in update.slots]  # type: ignore[attr-defined]
                place = programs.index(update.program)
                trained.append(messages.TrainedPart(part.number, slots, place, update.is_row_wise))
        own = [c.number for s in shared for c in s.copies if c.server == server]
        body = messages.RegisterOptimizer(number, own, trained, len(programs))
        cluster.ask(server, body, programs)
    return number


def _attributes(name: str, like: Any) -> VariableAttributes:
    return VariableAttributes(
        name=name,
        shape=tuple(like.shape),
        dtype=jnp.dtype(like.dtype),
        trainable=False,
        synchronization=VariableSynchronization.AUTO,
        aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
    )
