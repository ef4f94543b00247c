"""A parameter server in a simulation: the real store behind a simulated socket."""

from __future__ import annotations

import msgspec
import numpy as np
from typing_extensions import override

from replicax.parameter_server import snapshot
from replicax.parameter_server.promises import Promise
from replicax.parameter_server.service import ParameterStore
from replicax.testing.simulation.checks import Checks, Values
from replicax.testing.simulation.network import Network
from replicax.testing.simulation.plan import Plan
from replicax.testing.simulation.service import Answer, ListeningProcess
from replicax.testing.simulation.world import World
from replicax.transport import messages
from replicax.transport.callers import Caller
from replicax.transport.tasks import Task

# Seconds between two snapshots, and until one is on the disk.
_SAVE_S = 0.7
_WRITING_S = (0.01, 0.3)
# A life that only looks at parts.
_OBSERVER = 1


class Saved:
    """A snapshot, as bytes, and the values in it."""

    def __init__(self, cut: snapshot.Cut, values: Values) -> None:
        self._state = msgspec.msgpack.encode(cut.state)
        sections = range(len(cut.state.sections()))
        self._sections = [[(at, p.copy()) for at, p in cut.pieces(i)] for i in sections]
        cut.close()
        self.values = values

    def loaded(self) -> snapshot.Loaded:
        """Returns what a new process finds on the disk."""
        state = msgspec.msgpack.decode(self._state, type=snapshot.State)
        return snapshot.Loaded(state, lambda section: iter(self._sections[section]))


class Promised:
    """What a disk says of whom a server obeys."""

    def __init__(self) -> None:
        self.kept: Promise | None = None

    def keep(self, promise: Promise) -> None:
        """Remembers a promise."""
        self.kept = promise

    def forget(self) -> None:
        """The job is over."""
        self.kept = None


class SimulatedServer(ListeningProcess):
    """One parameter server."""

    def __init__(
        self, world: World, network: Network, index: int, plan: Plan, checks: Checks
    ) -> None:
        super().__init__(world, network, Task("ps", index))
        self._plan, self._checks = plan, checks
        self._is_saved = bool(world.faults.saved_share)
        self._promises = Promised() if self._is_saved else None
        self._store = self._new_store()
        self._saved: Saved | None = None
        self._num_saved_changes = -1
        # Whether it was restored, and nobody has looked yet: that needs a coordinator.
        self._is_unchecked = False

    def _new_store(self) -> ParameterStore:
        return ParameterStore(self.task.index, is_saved=self._is_saved, promises=self._promises)

    def prepare(self, attach: messages.Attach, coordinator: int, job: str, epoch: int) -> None:
        """Takes the server into the job, and makes its parts, before anything goes wrong."""
        for body in (attach, *self._plan.creations(self.task.index)):
            self._store.handle(
                "coordinator", coordinator, body, job=job, epoch=epoch, now=self.world.now
            )
        self._job = job, epoch
        if self._is_saved:
            self._saved = self._take_snapshot()
            self.later(_SAVE_S, self._save)

    @property
    def num_once_entries(self) -> int:
        """How many changes it remembers."""
        return int(self._store.figures()["once_entries"])

    @override
    def crash(self) -> None:
        super().crash()
        self._checks.emptied(self.task.index)

    @override
    def start(self) -> None:
        super().start()
        self._store = self._new_store()
        if self._saved is not None:
            self._store.restore(self._saved.loaded())
            self._num_saved_changes = -1
            self._is_unchecked = True
            self.later(_SAVE_S, self._save)

    def _save(self) -> None:
        """Takes a snapshot if something has changed; it is on the disk a little later."""
        self.later(_SAVE_S, self._save)
        changes = self._store.marks().changes
        taken = self._take_snapshot() if changes != self._num_saved_changes else None
        if taken is None:
            return
        self._num_saved_changes = changes

        def written() -> None:
            self._saved = taken

        self.later(self.world.random.uniform(*_WRITING_S), written)

    def _take_snapshot(self) -> Saved | None:
        cut = self._store.snapshot()
        return None if cut is None else Saved(cut, self._values())

    @override
    def handle(
        self, caller: Caller, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Answer | None:
        body, index = envelope.body, self.task.index
        try:
            answer = self._store.handle(
                caller.role,
                caller.incarnation,
                body,
                buffers,
                job=envelope.job,
                epoch=envelope.epoch,
                now=self.world.now,
            )
        finally:
            if isinstance(body, messages.Exchange) and body.pushes and self._store.job:
                epoch = envelope.epoch
                self._checks.changed(index, caller.incarnation, epoch, self._values())
        if isinstance(body, messages.Fence):
            for life in body.incarnations:
                self._checks.fenced(index, life)
        if isinstance(body, messages.Attach):
            self._job = envelope.job, envelope.epoch
            self._checks.attached(index, envelope.epoch)
            if self._is_unchecked and self._saved is not None:
                self._is_unchecked = False
                self._checks.restored(index, self._saved.values, self._values())
        return answer

    def _values(self) -> Values:
        """Reads all parts, in the name of nobody."""
        reads = self._plan.reads(self.task.index)
        job, epoch = self._job
        question = messages.Exchange([], reads)
        _, found = self._store.handle(
            "worker", _OBSERVER, question, job=job, epoch=epoch, now=self.world.now
        )
        return {
            read.part: np.frombuffer(bytes(value), np.float32)
            for read, value in zip(reads, found, strict=True)
        }
