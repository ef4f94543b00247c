"""A snapshot: the values of a program at one moment, ready to be written.

Note [Snapshots of several processes]
    Variables with equal copies need no communication: the chief reads its own copy. The values of
    ON_READ variables and the states of iterators come from all processes, which combine them here,
    in the thread of the caller and in the order of names. Only the chief keeps values and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.bundle.data_files import ALIGNMENT
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.publishing import BundleWriter
from replicax.bundle.reading import aligned_memory
from replicax.bundle.writers import Writers
from replicax.checkpointing import plain, tables
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import WORKER_STATES, ArrayEntry, Contents, PlainEntry
from replicax.checkpointing.plain import Encoded
from replicax.checkpointing.slots import (
    KeySlot,
    Slot,
    StateSlot,
    VariableSlot,
    local,
    require_dtype_name,
)
from replicax.foundation import errors, jax_compat, spans


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
        with (
            spans.block("checkpoint", "write"),
            self.writer or BundleWriter(path, CHECKPOINT) as writer,
        ):
            writer.write_arrays({entry.name: (entry.dtype, one) for entry, one in self.arrays})
            writer.publish(contents)


def take(
    graph: Graph,
    path: Path,
    writers: Writers,
    *,
    is_copied: bool,
    spare: np.ndarray | None = None,
) -> Snapshot:
    """Reads the values of a graph; parameter servers write their tables at once.

    Args:
      graph: What to read.
      path: The checkpoint that will be written.
      writers: The processes that all call this; only the chief gets the values.
      is_copied: Whether later changes of the values must not show. If not, only arrays that can
        change in place are copied.
      spare: Memory of an earlier snapshot that is not used any more. Copying into it is several
        times faster than into new memory.
    """
    slots = list(graph.slots.values())
    if not writers.is_alone:
        return _take_together(slots, graph.aliases, writers, is_copied, spare)
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
    return _of_values([(slot, slot.read()) for slot in slots], aliases, is_copied, spare)


# A value to be saved: an array, a JSON form, or the entry of a state that differs on the workers.
_Found = tuple[Slot, Any]


def _take_together(
    slots: Sequence[Slot],
    aliases: dict[str, str],
    writers: Writers,
    is_copied: bool,
    spare: np.ndarray | None,
) -> Snapshot:
    """Reads values on all processes; see Note [Snapshots of several processes]."""
    found = _read_together(slots, writers)
    done = {slot.name for slot, _ in found}
    taken = Snapshot([], [], {})

    def take_rest() -> None:
        nonlocal taken
        # Values of a step that a lost process has broken off cannot be read.
        with writers.guarded():
            found.extend((slot, slot.read()) for slot in slots if slot.name not in done)
            taken = _of_values(found, aliases, is_copied, spare)

    writers.from_chief("checkpoint: values", take_rest, None)
    return taken


def _read_together(slots: Sequence[Slot], writers: Writers) -> list[_Found]:
    """Returns the values that come from all processes."""
    ordered = sorted(slots, key=lambda slot: slot.name)
    _require_same_names([f"{slot.name} ({slot.kind})" for slot in ordered], writers)
    found: list[_Found] = []
    states = [slot for slot in ordered if isinstance(slot, StateSlot)]
    if states:
        everywhere: list[list[Encoded]] = writers.together(
            "checkpoint: states", lambda: [slot.read() for slot in states], list[Encoded]
        )
        by_slot = zip(*everywhere, strict=True)
        found += [(s, _joined(s, own)) for s, own in zip(states, by_slot, strict=True)]
    for slot in ordered:
        if isinstance(slot, VariableSlot) and slot.target.is_per_replica:
            found.append((slot, slot.read()))
    return found


def _require_same_names(names: Sequence[str], writers: Writers) -> None:
    """Raises on all processes if they save different objects."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    if len(set(writers.together("checkpoint: names", lambda: digest, str))) == 1:
        return
    everywhere = writers.together("checkpoint: list of names", lambda: list(names), list[str])
    for index, theirs in enumerate(everywhere):
        extra = sorted(set(theirs) - set(everywhere[0]))
        lacking = sorted(set(everywhere[0]) - set(theirs))
        if extra or lacking:
            only, name = (index, extra[0]) if extra else (0, lacking[0])
            other = writers.name_of(0 if extra else index)
            raise errors.StructureError(
                "All workers must save the same objects",
                f"{writers.name_of(only)} has {name!r}, and {other} does not",
                "Create the same variables and the same Checkpoint on all workers.",
            )


def _joined(slot: Slot, states: Sequence[Encoded]) -> Encoded | PlainEntry:
    """Returns the one state of all workers, or an entry with the state of each."""
    if all(state == states[0] for state in states):
        return states[0]
    return PlainEntry(slot.name, WORKER_STATES, plain.encode_each(states))


def _of_values(
    found: Sequence[_Found], aliases: dict[str, str], is_copied: bool, spare: np.ndarray | None
) -> Snapshot:
    plains = [
        value if isinstance(value, PlainEntry) else PlainEntry(slot.name, slot.kind, value)
        for slot, value in found
        if isinstance(value, Encoded | PlainEntry)
    ]
    sources = [
        (slot, local(slot.name, value))
        for slot, value in found
        if not isinstance(value, Encoded | PlainEntry)
    ]
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
    except jax.errors.JaxRuntimeError:
        # The program that computes it has failed.
        raise
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
