"""Making parts of variables on servers."""

from __future__ import annotations

import math
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.protocol import messages
from replicax.ps.client.cluster import CHUNK_BYTES, Cluster
from replicax.ps.client.initial_values import Initial
from replicax.variables.creators import VariableAttributes
from replicax.variables.remote import RemoteVariable, VariableClient


def create_part(
    cluster: Cluster,
    client: VariableClient,
    owner: Any,
    attributes: VariableAttributes,
    initial: Initial,
    server: int,
) -> RemoteVariable:
    """Makes a part on a server, and a handle to it; the part goes when the handle goes."""
    cluster.drop_forgotten()
    number = cluster.next_number()
    dtype = jnp.dtype(attributes.dtype)
    size = math.prod(attributes.shape) * dtype.itemsize
    body = messages.CreatePart(number, attributes.name, attributes.shape, dtype.name, initial.how)
    buffers, rest = initial.buffers, None
    if isinstance(initial.how, messages.FromBuffer) and size > CHUNK_BYTES and attributes.shape:
        rows = max(1, CHUNK_BYTES * attributes.shape[0] // size)
        buffers, rest = [initial.buffers[0][:rows]], initial.buffers[0][rows:]
    cluster.ask(server, body, buffers, size)
    cluster.hold(server, number)
    variable = RemoteVariable(attributes, number=number, server=server, client=client, owner=owner)
    weakref.finalize(variable, cluster.forget, server, number).atexit = False
    if rest is not None and not cluster.was_found(server, number):
        _write_rest(cluster, server, number, buffers[0].shape[0], rest)
    return variable


def _write_rest(cluster: Cluster, server: int, number: int, start: int, rest: np.ndarray) -> None:
    """Sends the rows of a long first value, some at a time."""
    rows = start
    for first in range(0, rest.shape[0], rows):
        chunk = rest[first : first + rows]
        update = messages.Update(0, "write_rows", number, start + first)
        write = cluster.begin_write()
        try:
            push = messages.Push(write, [update])
            cluster.ask(server, messages.Exchange([push], []), [chunk], chunk.nbytes)
        finally:
            cluster.end_write(write)
