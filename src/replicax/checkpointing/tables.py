"""Large variables on parameter servers: the servers write and read them, in parallel.

The values never pass through this process. Where a server does not share the file system, or may
not use it, the values are transferred through this process instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from replicax.bundle.manifest import Part
from replicax.checkpointing.slots import Slot, VariableSlot
from replicax.foundation import errors
from replicax.variables.remote import RemoteVariable, TableRows, VariableClient
from replicax.variables.sharded import ShardedVariable

# Smaller variables cost less as values than as requests and files of their own.
_TABLE_BYTES = 1 << 20

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def rows_of(slot: Slot, name: str | None = None) -> list[TableRows]:
    """Returns the rows of each part of a table; an empty list for all other objects.

    Args:
      slot: The object.
      name: The name of its array in the checkpoint; by default, that of the slot.
    """
    variable = slot.target
    if not isinstance(slot, VariableSlot):
        return []
    if isinstance(variable, RemoteVariable):
        parts, starts = [variable], (0,)
    elif isinstance(variable, ShardedVariable) and variable.is_whole_remote:
        parts = [part for part in variable.variables if isinstance(part, RemoteVariable)]
        starts = variable.starts
    else:
        return []
    if not variable.shape or sum(part.num_bytes for part in parts) < _TABLE_BYTES:
        return []
    array = slot.name if name is None else name
    shape = tuple(variable.shape)
    return [TableRows(part, array, shape, start) for part, start in zip(parts, starts, strict=True)]


def save(rows: Sequence[TableRows], directory: Path) -> list[Part] | None:
    """Lets the servers write tables; returns None if the values must be transferred."""
    target = Path(os.path.abspath(directory))
    found = _on_servers(rows, lambda client, own: client.save_rows(target, own))
    return None if found is None else [part for parts in found for part in parts]


def load(rows: Sequence[TableRows], path: Path, *, is_check: bool) -> bool:
    """Lets the servers read or check tables; returns False if the values must be transferred."""
    source = Path(os.path.realpath(path))

    def read(client: VariableClient, own: Sequence[TableRows]) -> None:
        client.load_rows(source, own, is_check=is_check)

    return _on_servers(rows, read) is not None


def _on_servers(
    rows: Sequence[TableRows], request: Callable[[VariableClient, list[TableRows]], _T]
) -> list[_T] | None:
    clients = {id(row.variable.client): row.variable.client for row in rows}
    try:
        return [
            request(client, [row for row in rows if row.variable.client is client])
            for client in clients.values()
        ]
    except (errors.NotFoundError, errors.PermissionDeniedError, errors.UnsupportedError) as error:
        _log.warning("Tables are transferred through this process: %s", error)
        return None
