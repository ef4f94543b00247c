"""What a checkpoint adds to a bundle: the objects that were saved, and how to find them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from replicax.bundle import manifest as bundles
from replicax.bundle import names
from replicax.bundle.dtypes import dtype_named
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.reading import Bundle
from replicax.checkpointing import plain


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """An array of a checkpoint.

    Attributes:
      name: The path of the object that it belongs to.
      kind: "variable", "array", or "key" (the data of a typed PRNG key).
      shape: Its shape.
      dtype: The name of its type.
      key_impl: The PRNG implementation of a key, otherwise "".
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * dtype_named(self.dtype).itemsize


# The kind of an entry that holds a state for each worker.
WORKER_STATES = "worker_states"


class PlainEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plain value, or the state of an iterator, stored in the manifest itself.

    Attributes:
      name: The path of the object that it belongs to.
      kind: "value", "state", or "worker_states" (a state for each worker, where they differ).
      encoded: The value.
    """

    name: str
    kind: str
    encoded: plain.Encoded

    def __post_init__(self) -> None:
        _require_kind(self.kind, "value", "state", WORKER_STATES)
        names.require_name(self.name)
        if self.kind == WORKER_STATES:
            plain.decode_each(self.encoded)
        else:
            plain.decode(self.encoded)


Entry = ArrayEntry | PlainEntry


class _ArrayKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    key_impl: str = ""

    def __post_init__(self) -> None:
        _require_kind(self.kind, "variable", "array", "key")


def _require_kind(kind: str, *known: str) -> None:
    if kind not in known:
        raise ValueError(f"{kind[:40]!r} is none of {known}")


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of the manifest of a checkpoint.

    Attributes:
      step: The number of the checkpoint.
      saved_at: When it was saved, in seconds since 1970; it does not decide the order.
      arrays: The kind of each array, by name.
      values: Plain values.
      aliases: Further paths of objects (or of all below them) that are saved once.
      metrics: The numbers given to `CheckpointManager.save`; None if not finite.
    """

    step: int
    saved_at: float
    arrays: dict[str, _ArrayKind]
    values: list[PlainEntry]
    aliases: dict[str, str]
    metrics: dict[str, float | None]

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"the step is {self.step}")
        for path in (*self.aliases, *self.aliases.values()):
            names.require_name(path)

    @classmethod
    def of(
        cls,
        entries: Iterable[Entry],
        aliases: Mapping[str, str],
        step: int,
        saved_at: float,
        metrics: Mapping[str, float],
    ) -> Contents:
        """Returns the contents for entries."""
        listed = list(entries)
        arrays = [entry for entry in listed if isinstance(entry, ArrayEntry)]
        return cls(
            step,
            saved_at,
            {entry.name: _ArrayKind(entry.kind, entry.key_impl) for entry in arrays},
            [entry for entry in listed if isinstance(entry, PlainEntry)],
            dict(aliases),
            {name: one if math.isfinite(one) else None for name, one in metrics.items()},
        )


class SavedCheckpoint:
    """A checkpoint on disk; it is read only as far as it is asked for, and must be closed.

    Args:
      path: The checkpoint.

    Attributes:
      step: Its number.
      saved_at: When it was saved, in seconds since 1970.
      metrics: The numbers that were saved with it.
      entries: Arrays and plain values, by name.
      aliases: Further paths of objects that are saved once.
      optional: Slots that are not missed if the checkpoint has no value for them.

    Raises:
      CheckpointError: It cannot be read, or has another format.
      DataLossError: Its manifest is damaged.
    """

    is_own_format = True
    optional: frozenset[str] = frozenset()

    def __init__(self, path: Path) -> None:
        self.bundle = Bundle(path, CHECKPOINT)
        try:
            contents = self.bundle.contents(Contents)
            if contents.arrays.keys() != self.bundle.arrays.keys():
                raise self.bundle.damaged(bundles.FILE_NAME, "its lists of arrays differ")
            arrays = {
                name: ArrayEntry(name, own.kind, stored.shape, stored.dtype, own.key_impl)
                for name, own in contents.arrays.items()
                for stored in (self.bundle.arrays[name],)
            }
            plains = {entry.name: entry for entry in contents.values}
            if len(plains) < len(contents.values) or plains.keys() & arrays.keys():
                raise self.bundle.damaged(bundles.FILE_NAME, "two entries have the same name")
        except BaseException:
            self.bundle.close()
            raise
        self.step = contents.step
        self.saved_at = contents.saved_at
        self.metrics = {
            name: math.nan if one is None else one for name, one in contents.metrics.items()
        }
        self.entries: dict[str, Entry] = {**arrays, **plains}
        self.aliases = contents.aliases

    def __enter__(self) -> SavedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.bundle.close()

    @property
    def arrays(self) -> list[ArrayEntry]:
        """The arrays, in the order of their names."""
        found = [entry for entry in self.entries.values() if isinstance(entry, ArrayEntry)]
        return sorted(found, key=lambda entry: entry.name)

    @property
    def array_names(self) -> Iterable[str]:
        """The names of all arrays."""
        return self.bundle.arrays.keys()

    @property
    def digest(self) -> str:
        """The digest of the manifest, which contains the checksums of all bytes."""
        return self.bundle.digest

    def check_files(self) -> None:
        """Raises DataLossError if a file is missing, foreign, or has another size."""
        self.bundle.check_files()

    def find(self, name: str) -> Entry | None:
        """Returns the entry for a path of an object, which may be one of several."""
        found = self.entries.get(name)
        prefix, rest = name, ""
        while found is None and prefix:
            if prefix in self.aliases:
                found = self.entries.get(self.aliases[prefix] + rest)
            prefix, _, last = prefix.rpartition("/")
            rest = f"/{last}{rest}"
        return found

    def read(self, wanted: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Returns arrays by name, all of them by default, after comparing their checksums."""
        return self.bundle.read(self.bundle.arrays if wanted is None else wanted)

    def verify(self) -> None:
        """Reads everything, one piece in memory at a time, and compares all checksums."""
        self.bundle.check_files()
        for name in self.bundle.arrays:
            for _ in self.bundle.pieces(name):
                pass
