"""The outcome of a restore, and the values that it keeps for objects created later."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from replicax.bundle import dtypes
from replicax.bundle.names import child_path
from replicax.bundle.writers import Writers
from replicax.checkpointing import plain, sources, tables, together
from replicax.checkpointing.graph import Graph
from replicax.checkpointing.manifest import ArrayEntry, Entry, PlainEntry
from replicax.checkpointing.slots import Setter, Slot, StateSlot, describe
from replicax.checkpointing.sources import Source
from replicax.foundation import errors
from replicax.variables.remote import TableRows

# Returns the graph of all objects of the Checkpoint.
Walk = Callable[[], Graph]


class RestoreStatus:
    """The outcome of `Checkpoint.restore`; restores objects that are created later.

    >>> import replicax as rx, tempfile
    >>> v = rx.Variable(1.0)
    >>> path = rx.train.Checkpoint(v=v).write(tempfile.mkdtemp() + "/one")
    >>> rx.train.Checkpoint(v=v).restore(path).assert_consumed().restored
    ('save_counter', 'v')

    Attributes:
      path: The checkpoint that was restored, or None.
      fallbacks: Newer checkpoints that could not be restored, with the error of each.
    """

    def __init__(self, path: Path | None, walk: Walk) -> None:
        self.path = None if path is None else str(path)
        self.fallbacks: list[tuple[str, errors.CheckpointError]] = []
        self._walk = walk
        self._saved: Source | None = None
        self._restored: dict[str, None] = {}
        # Entries that no object has claimed; the arrays among them.
        self._pending: dict[str, Entry] = {}
        self._kept: dict[str, np.ndarray] = {}
        self._is_partial = False

    def __repr__(self) -> str:
        if self.path is None:
            return "<rx.train.RestoreStatus of no checkpoint>"
        return f"<rx.train.RestoreStatus of {self.path!r}, {len(self._restored)} objects restored>"

    @property
    def restored(self) -> tuple[str, ...]:
        """Names of the restored objects."""
        return tuple(sorted(self._restored))

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the objects that the checkpoint has no value for."""
        slots = set(self._settled().slots)
        optional = frozenset() if self._saved is None else self._saved.optional
        return tuple(sorted(slots - set(self._restored) - optional))

    @property
    def pending(self) -> tuple[str, ...]:
        """Names in the checkpoint without an object, which are restored when it is created."""
        self._settled()
        return () if self._is_partial else tuple(sorted(self._pending))

    @property
    def unused(self) -> tuple[str, ...]:
        """Names in the checkpoint without an object, after `expect_partial()`."""
        return tuple(sorted(self._pending)) if self._is_partial else ()

    def assert_consumed(self) -> Self:
        """Raises unless every object was restored and every value was used.

        Raises:
          StructureError: A value of the checkpoint has no object, or an object no value.
        """
        self.assert_existing_objects_matched()
        left = self.pending or self.unused
        if left or self.path is None:
            raise errors.StructureError(
                f"Every value of the checkpoint {self.path} needs an object",
                f"there is none for {_listed(left)}{self._hint(left, self.missing)}",
                "Create these objects, or call `expect_partial()` if they are not wanted.",
            )
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Raises unless every object of the Checkpoint was restored.

        Raises:
          StructureError: An object has no value.
        """
        missing = self.missing
        if missing:
            left = self.pending or self.unused
            raise errors.StructureError(
                f"Every object needs a value in the checkpoint {self.path}",
                f"there is none for {_listed(missing)}{self._hint(missing, left)}",
                "Rename the objects as they were saved, or leave them out.",
            )
        return self

    def expect_partial(self) -> Self:
        """Accepts that parts of the checkpoint stay unused, and releases them."""
        self._settled()
        self._is_partial = True
        self._kept.clear()
        return self

    def report(self) -> str:
        """Returns a readable list of what was restored and what was not."""
        groups = {
            "missing in the checkpoint": self.missing,
            "pending, until an object of this name appears": self.pending,
            "unused": self.unused,
        }
        lines = [f"checkpoint {self.path}"]
        lines += [f"skipped {path}: {error}" for path, error in self.fallbacks]
        lines.append(f"restored: {len(self._restored)}")
        lines += [f"  {name}" for name in self.restored]
        for title, names in groups.items():
            lines += [f"{title}: {len(names)}"] if names else []
            for name in names:
                near = difflib.get_close_matches(name, self._others(name), 1, 0.75)
                lines.append(f"  {name}" + (f" (is it {near[0]!r}?)" if near else ""))
        return "\n".join(lines)

    def _others(self, name: str) -> Sequence[str]:
        left = self.pending or self.unused
        return self.missing if name in left else left

    def _hint(self, names: Sequence[str], others: Sequence[str]) -> str:
        pairs = [(n, difflib.get_close_matches(n, others, 1, 0.75)) for n in names]
        found = [f"{near[0]!r} looks like {name!r}" for name, near in pairs if near]
        return f" ({'; '.join(found[:3])})" if found else ""

    # Restoring.

    def load(self, path: Path, writers: Writers) -> Self:
        """Restores every object on all processes, or raises and changes nothing.

        Raises:
          CheckpointError: The parameter servers cannot read the checkpoint any more.
        """
        graph = self._walk()
        saved, matched, rows, arrays = together.read(
            path, lambda: self._read(graph, path), lambda found: found[0].digest, writers
        )
        on_servers = {row.name for row in rows}
        here = {n: e for n, e in matched.items() if e.name not in on_servers}
        _write(graph, here, arrays, writers)
        if rows and not tables.load(rows, path, is_check=False):
            raise errors.CheckpointError(
                f"The parameter servers must read {path}",
                "they read it before, and cannot any more",
                "Restore again.",
            )
        self._restored = dict.fromkeys(matched)
        taken = {entry.name for entry in matched.values()}
        self._pending = {n: e for n, e in saved.entries.items() if n not in taken}
        self._kept = {n: arrays[n] for n in self._pending if n in arrays}
        self._listen(graph)
        return self

    def _read(
        self, graph: Graph, path: Path
    ) -> tuple[Source, dict[str, Entry], list[TableRows], dict[str, np.ndarray]]:
        """Reads a checkpoint and compares it with the objects.

        Returns:
          The checkpoint, the entry for each object, the tables that servers will read, the arrays.
        """
        with sources.open_source(path) as saved:
            self._saved = saved
            matched = self._match(graph, saved.entries)
            saved.check_files()
            # Servers read tables from files of this library's own format only.
            rows = [
                row
                for name, entry in matched.items()
                for row in tables.rows_of(graph.slots[name], entry.name)
                if saved.is_own_format
            ]
            if rows and not tables.load(rows, path, is_check=True):
                rows = []
            arrays = saved.read(set(saved.array_names) - {row.name for row in rows})
        return saved, matched, rows, arrays

    def give(self, name: str, value: object, put: Setter) -> None:
        """Restores pending values of an object that was just created under `name`."""
        if not self._pending or self._is_partial:
            return
        if self._saved is not None and not self._saved.is_own_format:
            # Names of TensorFlow are found from the Checkpoint down.
            self._settled()
            return
        graph = Graph()
        graph.add(name, value, put)
        self._give_to(graph)

    def _settled(self) -> Graph:
        """Restores pending values of objects that were created unnoticed, such as list items."""
        graph = self._walk()
        if self._pending and not self._is_partial:
            self._give_to(graph)
        return graph

    def _give_to(self, graph: Graph) -> None:
        waiting = {n: s for n, s in graph.slots.items() if n not in self._restored}
        matched = self._match(graph, self._pending, waiting)
        # The other processes create this object as well, each at its own time.
        _write(graph, matched, self._kept, Writers(None))
        self._restored.update(dict.fromkeys(matched))
        for entry in matched.values():
            self._pending.pop(entry.name, None)
            self._kept.pop(entry.name, None)
        self._listen(graph)

    def _match(
        self, graph: Graph, wanted: Mapping[str, Entry], slots: Mapping[str, Slot] | None = None
    ) -> dict[str, Entry]:
        """Returns the entry for each slot that has one, after checking that it fits."""
        assert self._saved is not None
        found = sources.match(self._saved, graph, wanted)
        if slots is not None:
            found = {name: entry for name, entry in found.items() if name in slots}
        for name, entry in found.items():
            graph.slots[name].check(entry, str(self.path))
        return found

    def _listen(self, graph: Graph) -> None:
        if not self._pending:
            return
        for path, value in graph.growing.items():
            value.on_new_child = _NewChild(self, path, value)


class _NewChild:
    """Reports new attributes of one object to a pending restore."""

    def __init__(self, status: RestoreStatus, path: str, parent: object) -> None:
        self._status = status
        self._path = path
        self._parent = parent

    def __call__(self, name: str, value: object) -> None:
        # Not through the object's own `__setattr__`, which would call here again.
        setter_of = getattr(self._parent, "child_setter", None)
        put = setter_of(name) if setter_of else partial(object.__setattr__, self._parent, name)
        self._status.give(child_path(self._path, name), value, put)

    def __reduce__(self) -> Any:
        # Nothing is pending for a copy of the object.
        return type(None), ()


def _write(
    graph: Graph,
    matched: Mapping[str, Entry],
    arrays: Mapping[str, np.ndarray],
    writers: Writers,
) -> None:
    """Writes checked values; states come first, since `set_state` of users may fail."""
    _write_states(graph, matched, writers)
    for name, entry in matched.items():
        slot = graph.slots[name]
        if isinstance(entry, ArrayEntry):
            slot.write(_in_type_of(entry, arrays[entry.name]))
        elif not isinstance(slot, StateSlot):
            slot.write(plain.decode(entry.encoded))
    graph.rebuild()


def _in_type_of(entry: ArrayEntry, value: np.ndarray) -> np.ndarray:
    """Converts whole numbers of TensorFlow that were checked to fit into another type."""
    dtype = dtypes.dtype_named(entry.dtype)
    return value if value.dtype == dtype else value.astype(dtype)


def _write_states(graph: Graph, matched: Mapping[str, Entry], writers: Writers) -> None:
    """Sets the states on all processes, or raises on all and sets none."""
    states = [
        (slot, entry)
        for name, entry in matched.items()
        for slot in (graph.slots[name],)
        if isinstance(slot, StateSlot) and isinstance(entry, PlainEntry)
    ]
    if not states:
        return
    before: list[tuple[StateSlot, Any]] = []

    def write_all() -> None:
        for slot, entry in states:
            before.append((slot, slot.target.get_state()))
            try:
                slot.write_entry(entry, writers.index, writers.count)
            except Exception as error:
                raise errors.CheckpointError(
                    f"`set_state` of {slot.name!r} must accept {describe(entry)}",
                    f"it raised {type(error).__name__}: {error}",
                    "Nothing was restored.",
                ) from error

    try:
        writers.together("checkpoint: set states", write_all, None)
    except BaseException:
        for slot, state in before:
            slot.write(state)
        raise


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) or "any object"
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
