"""One initial value for all processes: that of the chief, for all variables of a scope together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import across_processes
from replicax.foundation import errors, gate, jax_compat
from replicax.values.layout import ReplicaLayout
from replicax.variables.variable import Variable

# The size of one broadcast.
_MOST_BYTES = 256 << 20


class _Waiting:
    # Variables whose processes may have different initial values, in the order of creation.
    variables: list[Variable] = []


def make_common(variable: Variable) -> None:
    """Gives a new variable the chief's initial value, before its value is used."""
    _Waiting.variables.append(variable)
    gate.before_next_use(_broadcast)


def _broadcast() -> None:
    variables, _Waiting.variables = _Waiting.variables, []
    for layout in dict.fromkeys(variable.replicas for variable in variables):
        own = [variable for variable in variables if variable.replicas == layout]
        values = _chief_values(own, layout)
        for variable, value in zip(own, values, strict=True):
            if value is not None:
                variable.initialize(value)


def _chief_values(variables: Sequence[Variable], layout: ReplicaLayout) -> list[jax.Array | None]:
    """Returns the chief's values; None for all if no process has another one."""
    assert layout.peers is not None
    hosted = [_on_host(variable) for variable in variables]
    data = b"".join(array.tobytes() for array in hosted)
    kinds = [[v.name, list(v.shape), str(v.dtype)] for v in variables]
    mine = json.dumps([kinds, hashlib.sha256(data).hexdigest()])
    found = layout.peers.exchange("initial values of variables", mine.encode())
    for index, other in enumerate(found):
        _require_same(layout, index, json.loads(other)[0], json.loads(found[0])[0])
    if len(set(found)) == 1:
        return [None] * len(variables)
    received = _first_bytes(data, layout)
    values: list[jax.Array | None] = []
    start = 0
    for variable, array in zip(variables, hosted, strict=True):
        part = np.frombuffer(received, array.dtype, array.size, start).reshape(array.shape)
        values.append(_from_host(variable, part))
        start += array.nbytes
    return values


def _require_same(layout: ReplicaLayout, index: int, other: list[list], chief: list[list]) -> None:
    """Raises if a process has created other variables than the chief."""
    if other == chief:
        return
    assert layout.peers is not None
    first, name = layout.peers.name_of(0), layout.peers.name_of(index)
    pairs = zip(other, chief, strict=False)
    one, two = next(((a, b) for a, b in pairs if a != b), (len(other), len(chief)))
    raise errors.InvalidArgumentError(
        "All workers must create the same variables in the same order",
        f"{name} created {one} where {first} created {two}",
        "Do not let the creation of variables depend on the worker.",
    )


def _first_bytes(data: bytes, layout: ReplicaLayout) -> bytes:
    parts = []
    for start in range(0, len(data), _MOST_BYTES):
        piece = np.frombuffer(data[start : start + _MOST_BYTES], np.uint8)
        column = [jnp.asarray(piece)] * layout.num_local
        (found,) = across_processes.first_replica([column], layout)
        parts.append(np.asarray(across_processes.local_copy(found)).tobytes())
    return b"".join(parts)


def _on_host(variable: Variable) -> np.ndarray:
    with jax_compat.eagerly():
        array = variable.read_copy(0)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        return np.asarray(array)


def _from_host(variable: Variable, value: np.ndarray) -> jax.Array:
    with jax_compat.eagerly(), jax_compat.any_dtype(value.dtype):
        if jnp.issubdtype(variable.dtype, jax.dtypes.prng_key):
            impl = jax.random.key_impl(variable.read_copy(0))
            return jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
        return jnp.asarray(value)
