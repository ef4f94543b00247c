"""Consistent cuts of the state of a job on a server, and restoring a store from one.

Pure: no threads, no files. A cut is taken under the write lock within milliseconds: small parts are
copied, large ones frozen. So its values, versions and table of applied updates are consistent,
although training continues while it is written; see frozen.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from replicax.foundation import errors, runtime
from replicax.protocol import messages
from replicax.ps.store.accumulation import SavedMean, SavedSum
from replicax.ps.store.applied_updates import AppliedUpdates, Key
from replicax.ps.store.frozen import PIECE_BYTES, FrozenView, piece_bytes
from replicax.ps.store.jobs import Job
from replicax.ps.store.parts import BORROWED_FROM_BYTES, Part
from replicax.ps.store.storage import Storage

# Versions of restored parts differ from those that were assigned and then lost.
_VERSION_SHIFT = 20
_VERSION_BITS = 31
_VERSIONS = 1 << 61

# An offset into a value, and the bytes from there on.
Piece = tuple[int, np.ndarray]


class ChangeCounts(NamedTuple):
    """Counts of a store that tell whether there is something to save.

    Attributes:
      job: The job to save; None if no coordinator has attached one.
      changes: Grows with every change of the state.
      creations: Grows when parts or optimizers are created or dropped, or another coordinator
        resumes the job: a snapshot from before is of little use.
      ended_jobs: Grows when a coordinator ends its job: its snapshots are to be deleted.
    """

    job: str | None
    changes: int
    creations: int
    ended_jobs: int


class SavedPart(msgspec.Struct, frozen=True):
    """A part without its value."""

    spec: messages.CreatePart
    version: int
    num_missing: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """The number of rows; 0 for a scalar."""
        return self.spec.shape[0] if self.spec.shape else 0


class SavedOptimizer(msgspec.Struct, frozen=True):
    """An optimizer without its programs; `trained` are the parts that it still trains."""

    spec: messages.RegisterOptimizer
    trained: list[int]


class State(msgspec.Struct, frozen=True):
    """The state of a job on a server, without long byte strings.

    Values of parts, programs and sums of gradients are separate sections of bytes: first one for
    each part, then those whose sizes are in `blobs`.

    Attributes:
      job: The name of the job.
      epoch: Its epoch.
      coordinator: The incarnation of its coordinator.
      fenced: The processes that were declared dead.
      settled: See `AppliedUpdates`.
      newest: The newest closure.
      made: The applied updates of closures that are not settled.
      parts: The parts.
      optimizers: The optimizers.
      clock: How many steps the values have seen.
      waiting: The accumulated gradients, without their values.
      blobs: The sizes of the programs of all optimizers, then of the sums in `waiting`.
    """

    job: str
    epoch: int
    coordinator: int
    fenced: list[int]
    settled: int
    newest: int
    made: list[tuple[int, list[Key]]]
    parts: list[SavedPart]
    optimizers: list[SavedOptimizer]
    clock: int
    waiting: list[SavedMean]
    blobs: list[int]

    def sections(self) -> list[tuple[int, int]]:
        """Returns the size of each section, and that of its pieces."""
        of_parts = [(p.num_bytes, piece_bytes(p.num_bytes, p.num_rows)) for p in self.parts]
        return of_parts + [(size, PIECE_BYTES) for size in self.blobs]


class Cut:
    """The state of a job at one moment; must be closed.

    Attributes:
      state: The state without the sections.
      counts: The change counts at that moment.
    """

    def __init__(
        self, state: State, counts: ChangeCounts, parts: Iterable[Part], blobs: Iterable[bytes]
    ) -> None:
        self.state = state
        self.counts = counts
        self._parts = list(parts)
        self._values: list[np.ndarray | FrozenView] = []
        try:
            for part in self._parts:
                with part.lock:
                    is_small = part.num_bytes < BORROWED_FROM_BYTES
                    self._values.append(part.read() if is_small else part.freeze())
        except BaseException:
            self.close()
            raise
        self._values += [np.frombuffer(blob, np.uint8) for blob in blobs]

    def pieces(self, section: int) -> Iterator[Piece]:
        """Yields the pieces of a section, once; a piece is valid until the next one."""
        value = self._values[section]
        if isinstance(value, FrozenView):
            for start in value.pieces():
                yield start, value.read(start)
            # Ends the cost of copy-on-write for this part.
            self._parts[section].thaw(value)
        else:
            for start in range(0, value.size, PIECE_BYTES):
                yield start, value[start : start + PIECE_BYTES]

    def close(self) -> None:
        """Releases all parts. Idempotent."""
        for part, value in zip(self._parts, self._values, strict=False):
            if isinstance(value, FrozenView):
                part.thaw(value)
        self._parts, self._values = [], []


def take(job: Job, storage: Storage, counts: ChangeCounts) -> Cut:
    """Takes a cut of a job; the caller holds the write lock."""
    parts = list(storage.parts.values())
    optimizers = list(storage.optimizers.values())
    applied = storage.applied
    waiting, sums = _without_sums(storage.accumulation.export())
    blobs = [program for optimizer in optimizers for program in optimizer.programs] + sums
    state = State(
        job=job.name,
        epoch=job.epoch,
        coordinator=job.coordinator,
        fenced=sorted(job.fenced),
        settled=applied.settled,
        newest=applied.newest,
        made=applied.entries(),
        parts=[
            SavedPart(part.spec, part.version, part.num_missing, part.num_bytes) for part in parts
        ],
        optimizers=[SavedOptimizer(o.spec, o.trained) for o in optimizers],
        clock=storage.clock.steps,
        waiting=waiting,
        blobs=[len(blob) for blob in blobs],
    )
    return Cut(state, counts, parts, blobs)


def _without_sums(means: Iterable[SavedMean]) -> tuple[list[SavedMean], list[bytes]]:
    """Separates the long byte strings from the means."""
    short: list[SavedMean] = []
    blobs: list[bytes] = []
    for mean in means:
        sums: list[SavedSum] = []
        for one in mean.sums:
            blobs.append(one.values)
            if one.numbers is not None:
                blobs.append(one.numbers)
            numbers = None if one.numbers is None else b""
            sums.append(msgspec.structs.replace(one, values=b"", numbers=numbers))
        short.append(msgspec.structs.replace(mean, sums=sums))
    return short, blobs


def _with_sums(means: Iterable[SavedMean], blobs: Iterator[bytes]) -> list[SavedMean]:
    """Reverses `_without_sums`."""
    full: list[SavedMean] = []
    for mean in means:
        sums: list[SavedSum] = []
        for one in mean.sums:
            values = next(blobs)
            numbers = None if one.numbers is None else next(blobs)
            sums.append(msgspec.structs.replace(one, values=values, numbers=numbers))
        full.append(msgspec.structs.replace(mean, sums=sums))
    return full


@dataclass(frozen=True)
class Loaded:
    """A saved cut.

    Attributes:
      state: The state without the sections.
      pieces: Returns the pieces of a section by its index; raises if they are corrupt.
    """

    state: State
    pieces: Callable[[int], Iterator[Piece]]


def restored(loaded: Loaded, task: str, write_lock: runtime.Lock) -> tuple[Job, Storage]:
    """Restores a job and its storage.

    Raises:
      DataLossError: The snapshot is corrupt.
      DistributeError: The snapshot cannot be used.
    """
    state = loaded.state
    job = Job.restored(state.job, state.epoch, state.coordinator, state.fenced)
    ahead = runtime.random_bits(_VERSION_BITS) + 1 << _VERSION_SHIFT
    storage = Storage(task, write_lock, first_version=ahead)
    for index, part in enumerate(state.parts):
        version = part.version % _VERSIONS + ahead
        pieces = loaded.pieces(index)
        storage.put_part(part.spec, version, part.num_missing, part.num_bytes, pieces)
    first = len(state.parts)
    blobs = iter([_joined(loaded.pieces(first + i)) for i in range(len(state.blobs))])
    try:
        for optimizer in state.optimizers:
            programs = [next(blobs) for _ in range(optimizer.spec.num_programs)]
            storage.put_optimizer(optimizer.spec, optimizer.trained, programs)
        storage.accumulation.restore(_with_sums(state.waiting, blobs))
    except (StopIteration, ValueError, TypeError) as error:
        raise errors.DataLossError(
            f"A snapshot of {task} is corrupt: its sections do not match its state ({error!r}). "
            "Start from an older snapshot."
        ) from error
    storage.clock.steps = state.clock
    storage.applied = AppliedUpdates(state.settled, state.newest, state.made)
    return job, storage


def _joined(pieces: Iterable[Piece]) -> bytes:
    return b"".join(piece.tobytes() for _, piece in pieces)
