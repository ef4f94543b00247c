"""A snapshot: the values of a program at one moment, ready to be written."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from replicax.bundle.data_files import ALIGNMENT
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.publishing import BundleWriter
from replicax.bundle.reading import aligned_memory
from replicax.checkpointing import tables
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, Contents, PlainEntry
from replicax.checkpointing.plain import Encoded
from replicax.checkpointing.slots import KeySlot, Slot, require_dtype_name
from replicax.foundation import errors, jax_compat


@dataclasses.dataclass
class Snapshot:
    """The values that a save writes.

    Attributes:
      arrays: Descriptions of the arrays, with their values.
      plains: Plain values.
      aliases: Further paths of objects.
      memory: The memory that the values were copied into; None if they were not copied.
      tables: Descriptions of the arrays that servers have written already.
      writer: The bundle that servers have written into; None if they have not.
    """

    arrays: list[tuple[ArrayEntry, np.ndarray]]
    plains: list[PlainEntry]
    aliases: dict[str, str]
    memory: np.ndarray | None = None
    tables: list[ArrayEntry] = dataclasses.field(default_factory=list)
    writer: BundleWriter | None = None

    def write(self, path: Path, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Writes the snapshot to disk as the checkpoint `path`."""
        entries = [*(entry for entry, _ in self.arrays), *self.tables, *self.plains]
        contents = Contents.of(entries, self.aliases, step, time.time(), metrics or {})
        with self.writer or BundleWriter(path, CHECKPOINT) as writer:
            writer.write_arrays({entry.name: (entry.dtype, one) for entry, one in self.arrays})
            writer.publish(contents)


def take(graph: Graph, path: Path, *, is_copied: bool, spare: np.ndarray | None = None) -> Snapshot:
    """Reads the values of a graph; parameter servers write their tables at once.

    Args:
      graph: What to read.
      path: The checkpoint that will be written.
      is_copied: Whether later changes of the values must not show. If not, only arrays that can
        change in place are copied.
      spare: Memory of an earlier snapshot that is not used any more. Copying into it is several
        times faster than into new memory.
    """
    slots = list(graph.slots.values())
    rows = [row for slot in slots for row in tables.rows_of(slot)]
    if not rows:
        return _take(slots, graph.aliases, is_copied, spare)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(BundleWriter(path, CHECKPOINT))
        written = tables.save(rows, writer.directory)
        if written is None:
            return _take(slots, graph.aliases, is_copied, spare)
        for part in written:
            writer.add(part)
        names = {row.name for row in rows}
        left = [slot for slot in slots if slot.name not in names]
        taken = _take(left, graph.aliases, is_copied, spare)
        taken.tables = [
            ArrayEntry(slot.name, slot.kind, tuple(slot.target.shape), dtype)
            for slot in slots
            if slot.name in names
            for dtype in (require_dtype_name(slot.name, np.dtype(slot.target.dtype)),)
        ]
        taken.writer = writer
        # From here on, writing the snapshot publishes or discards the bundle.
        stack.pop_all()
        return taken


def _take(
    slots: Sequence[Slot], aliases: dict[str, str], is_copied: bool, spare: np.ndarray | None
) -> Snapshot:
    found = [(slot, slot.read()) for slot in slots]
    plains = [
        PlainEntry(slot.name, slot.kind, value)
        for slot, value in found
        if isinstance(value, Encoded)
    ]
    sources = [(slot, value) for slot, value in found if not isinstance(value, Encoded)]
    for _, value in sources:
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    arrays: list[tuple[ArrayEntry, np.ndarray]] = []
    for slot, value in sources:
        host = _on_host(slot, value)
        if not is_copied and not isinstance(value, jax.Array):
            host = host.copy()
        key_impl = slot.key_impl if isinstance(slot, KeySlot) else ""
        dtype = require_dtype_name(slot.name, host.dtype)
        arrays.append((ArrayEntry(slot.name, slot.kind, host.shape, dtype, key_impl), host))
    if not is_copied:
        return Snapshot(arrays, plains, aliases)
    copies, memory = _copied([host for _, host in arrays], spare)
    entries = [entry for entry, _ in arrays]
    return Snapshot(list(zip(entries, copies, strict=True)), plains, aliases, memory)


def _on_host(slot: Slot, value: object) -> np.ndarray:
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


def _copied(
    hosts: Sequence[np.ndarray], spare: np.ndarray | None
) -> tuple[list[np.ndarray], np.ndarray]:
    """Copies arrays into one block of memory; returns the copies and the block."""
    sizes = [-(-host.nbytes // ALIGNMENT) * ALIGNMENT for host in hosts]
    total = sum(sizes)
    memory = spare if spare is not None and spare.size == total else aligned_memory(total)
    copies: list[np.ndarray] = []
    start = 0
    for host, size in zip(hosts, sizes, strict=True):
        copy = memory[start : start + host.nbytes].view(host.dtype).reshape(host.shape)
        np.copyto(copy, host)
        copies.append(copy)
        start += size
    return copies, memory
