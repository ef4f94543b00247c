"""A snapshot: the values of a program at one moment, in host memory of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.checkpointing import storage
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, Manifest, PlainEntry, StoredFile
from replicax.checkpointing.slots import KeySlot, Slot, require_dtype_name
from replicax.foundation import errors, jax_compat


@dataclasses.dataclass
class Snapshot:
    """What a save needs; nothing of it is shared with the program any more.

    Attributes:
      arrays: Descriptions of the arrays.
      plains: Plain values.
      aliases: Further paths of objects.
      stream: The bytes of all arrays.
    """

    arrays: list[ArrayEntry]
    plains: list[PlainEntry]
    aliases: dict[str, str]
    stream: np.ndarray

    def write(self, path: Path, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Writes the snapshot to disk as the checkpoint `path`."""
        saved_at = time.time()

        def describe(files: dict[str, StoredFile]) -> Manifest:
            return Manifest(
                step=step,
                saved_at=saved_at,
                entries={e.name: e for e in [*self.arrays, *self.plains]},
                aliases=self.aliases,
                metrics=dict(metrics or {}),
                size=self.stream.nbytes,
                files=files,
            )

        storage.write(path, self.stream, describe)


def take(graph: Graph, spare: np.ndarray | None = None) -> Snapshot:
    """Copies the values of a graph into host memory.

    Args:
      graph: What to copy.
      spare: The stream of an earlier snapshot that nobody needs any more. Memory that is in
        use is copied to several times faster than memory that is new.
    """
    found = [(slot, slot.read()) for slot in graph.slots.values()]
    plains = [
        PlainEntry(slot.name, slot.kind, value) for slot, value in found if isinstance(value, dict)
    ]
    sources = [(slot, value) for slot, value in found if not isinstance(value, dict)]
    for _, value in sources:
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    arrays: list[ArrayEntry] = []
    hosts: list[np.ndarray] = []
    end = 0
    for slot, value in sources:
        host = _on_host(slot, value)
        key_impl = slot.key_impl if isinstance(slot, KeySlot) else ""
        dtype = require_dtype_name(slot.name, host.dtype)
        arrays.append(ArrayEntry(slot.name, slot.kind, host.shape, dtype, end, key_impl))
        hosts.append(host)
        end += -(-host.nbytes // storage.ALIGNMENT) * storage.ALIGNMENT
    return Snapshot(arrays, plains, graph.aliases, _joined(hosts, arrays, end, spare))


def _on_host(slot: Slot, value: Any) -> np.ndarray:
    if jax_compat.is_traced(value):
        raise errors.TracingError(
            f"{slot.name!r} needs a value to be saved",
            "it is being traced by a compiled function",
            "Save after the function has returned.",
        )
    try:
        host = np.asarray(value)
    except RuntimeError as error:
        raise errors.InvalidArgumentError(
            f"The array {slot.name!r} needs memory to be saved from",
            f"JAX cannot read it: {error}",
            "Save before it is donated or deleted.",
        ) from error
    return host.astype(host.dtype.newbyteorder("="), copy=False)


def _joined(
    hosts: Sequence[np.ndarray],
    arrays: Sequence[ArrayEntry],
    end: int,
    spare: np.ndarray | None,
) -> np.ndarray:
    size = storage.padded_size(end)
    stream = spare if spare is not None and spare.size == size else storage.memory(size)
    filled = 0
    for host, entry in zip(hosts, arrays, strict=True):
        # Gaps must not carry old memory of this process to disk.
        stream[filled : entry.offset] = 0
        filled = entry.offset + host.nbytes
        np.copyto(storage.array_in(stream, entry), host)
    stream[filled:] = 0
    return stream
