"""A consistent cut of all that a server keeps for its job, and how a server starts from one.

Pure: no threads, no files. A cut is taken under the lock that every change needs, in
milliseconds: small parts are copied, large ones frozen. So values, versions and the table of
changes in it belong together, although training goes on while it is written; see frozen.py.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.store.accumulation import SavedMean, SavedSum
from replicax.ps.store.applied_updates import Key, OnceTable
from replicax.ps.store.frozen import PIECE_BYTES, Frozen, piece_bytes
from replicax.ps.store.jobs import Job
from replicax.ps.store.parts import LENT_FROM_BYTES, Part
from replicax.ps.store.storage import Storage

# Versions of restored parts lie apart from those that were given out and then lost.
_VERSION_SHIFT = 20
_VERSION_BITS = 31
_VERSIONS = 1 << 61

# Where bytes of a value begin, and the bytes.
Piece = tuple[int, np.ndarray]


class Marks(NamedTuple):
    """What a store counts, to tell whether there is something to save.

    Attributes:
      job: The job that it would save; None if there is none, or nobody has come for it.
      changes: Grows with every change of what a snapshot holds.
      makes: Grows when something is made or dropped, or another coordinator takes over: without
        that, a snapshot is of little use.
      endings: Grows when a coordinator lets its job go: its snapshots are to go too.
    """

    job: str | None
    changes: int
    makes: int
    endings: int


class SavedPart(msgspec.Struct, frozen=True):
    """A part, but for its value."""

    spec: messages.CreatePart
    version: int
    num_missing: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """How many rows it has; 0 without dimensions."""
        return self.spec.shape[0] if self.spec.shape else 0


class SavedOptimizer(msgspec.Struct, frozen=True):
    """An optimizer, but for its programs; `trained` are the parts that it still changes."""

    spec: messages.RegisterOptimizer
    trained: list[int]


class State(msgspec.Struct, frozen=True):
    """All that a server keeps for a job, but for what is long.

    Values of parts, programs and sums of gradients follow it as sections of plain bytes: first
    one for each part, then those whose sizes are in `blobs`.

    Attributes:
      job: The name of the job.
      epoch: Its epoch.
      coordinator: The incarnation of its coordinator.
      fenced: The processes that were declared dead.
      settled: See `OnceTable`, as for the next two.
      newest: The newest closure.
      made: The changes of closures that are not settled.
      parts: The parts.
      optimizers: The optimizers.
      clock: How many steps the values have seen.
      waiting: Gradients that wait for others, without their numbers; `made` knows the closures
        they came from.
      blobs: The sizes of the programs of all optimizers, then of what is taken out of `waiting`.
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
    """A job at one moment; it is to be closed, whether it was written or not.

    Attributes:
      state: All but the sections.
      marks: What the store had counted at that moment.
    """

    def __init__(
        self, state: State, marks: Marks, parts: Iterable[Part], blobs: Iterable[bytes]
    ) -> None:
        self.state = state
        self.marks = marks
        self._parts = list(parts)
        self._values: list[np.ndarray | Frozen] = []
        try:
            for part in self._parts:
                with part.lock:
                    is_small = part.num_bytes < LENT_FROM_BYTES
                    self._values.append(part.read() if is_small else part.freeze())
        except BaseException:
            self.close()
            raise
        self._values += [np.frombuffer(blob, np.uint8) for blob in blobs]

    def pieces(self, section: int) -> Iterator[Piece]:
        """Yields a section, once; a piece is good until the next is asked for."""
        value = self._values[section]
        if isinstance(value, Frozen):
            for start in value.pieces():
                yield start, value.read(start)
            # Changes of this part cost nothing extra from here on.
            self._parts[section].thaw(value)
        else:
            for start in range(0, value.size, PIECE_BYTES):
                yield start, value[start : start + PIECE_BYTES]

    def close(self) -> None:
        """Lets all parts go; again is harmless."""
        for part, value in zip(self._parts, self._values, strict=False):
            if isinstance(value, Frozen):
                part.thaw(value)
        self._parts, self._values = [], []


def take(job: Job, storage: Storage, marks: Marks) -> Cut:
    """Takes a cut of a job; whoever calls this holds `changing`."""
    parts = list(storage.parts.values())
    optimizers = list(storage.optimizers.values())
    once = storage.once
    waiting, sums = _without_sums(storage.accumulation.export())
    blobs = [program for optimizer in optimizers for program in optimizer.programs] + sums
    state = State(
        job=job.name,
        epoch=job.epoch,
        coordinator=job.coordinator,
        fenced=sorted(job.fenced),
        settled=once.settled,
        newest=once.newest,
        made=once.made(),
        parts=[
            SavedPart(part.spec, part.version, part.num_missing, part.num_bytes) for part in parts
        ],
        optimizers=[SavedOptimizer(o.spec, o.trained) for o in optimizers],
        clock=storage.clock.steps,
        waiting=waiting,
        blobs=[len(blob) for blob in blobs],
    )
    return Cut(state, marks, parts, blobs)


def _without_sums(means: Iterable[SavedMean]) -> tuple[list[SavedMean], list[bytes]]:
    """Takes the long byte strings out of means."""
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
    """Puts back what `_without_sums` took out."""
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
    """What was saved, to start from.

    Attributes:
      state: All but the sections.
      pieces: Returns a section by its place; raises if it cannot be read as it was saved.
    """

    state: State
    pieces: Callable[[int], Iterator[Piece]]


def restored(loaded: Loaded, task: str, changing: threading.Lock) -> tuple[Job, Storage]:
    """Makes a job and its storage from what was saved.

    Raises:
      DataLossError: It is not as it was saved.
      DistributeError: It cannot be used; the kind of error says why.
    """
    state = loaded.state
    job = Job.restored(state.job, state.epoch, state.coordinator, state.fenced)
    ahead = secrets.randbits(_VERSION_BITS) + 1 << _VERSION_SHIFT
    storage = Storage(task, changing, first_version=ahead)
    for place, part in enumerate(state.parts):
        version = part.version % _VERSIONS + ahead
        pieces = loaded.pieces(place)
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
            f"What {task} starts from must describe itself",
            f"its sections do not fit ({error!r})",
            "Start from an older snapshot.",
        ) from error
    storage.clock.steps = state.clock
    storage.once = OnceTable(state.settled, state.newest, state.made)
    return job, storage


def _joined(pieces: Iterable[Piece]) -> bytes:
    return b"".join(piece.tobytes() for _, piece in pieces)
