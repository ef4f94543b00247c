"""The simulated parameter server: the real store behind a simulated socket."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.process.master_record import MasterRecordFile
from replicax.ps.process.snapshot_files import GivenUpError, SnapshotDirectory
from replicax.ps.store import snapshot
from replicax.ps.store.service import ParameterStore
from replicax.transport.service import Session
from simulation.checks import Checks, Values
from simulation.disk import Disk
from simulation.network import Network
from simulation.plan import Plan
from simulation.service import ListeningProcess, Reply
from simulation.world import World

# The seconds between two snapshots, and to write one.
_SAVE_S = 0.7
_WRITING_S = (0.01, 0.3)
# An incarnation that only reads parts.
_OBSERVER = 1


class SimulatedServer(ListeningProcess):
    """One parameter server.

    Attributes:
      disk: The disk of its snapshots; None if it keeps none.
    """

    def __init__(
        self, world: World, network: Network, index: int, plan: Plan, checks: Checks
    ) -> None:
        super().__init__(world, network, Task("ps", index))
        self._plan, self._checks = plan, checks
        self.disk = Disk() if world.faults.saved_share else None
        # The values of each snapshot, by its number.
        self._values_of: dict[int, Values] = {}
        # The values that it must have restored, until they are checked: that needs a coordinator.
        self._expected: Values | None = None
        self._begin()

    def _begin(self) -> None:
        """Initializes the state of a new process, from the disk if there is one."""
        self._files: SnapshotDirectory | None = None
        self._num_saved_changes = -1
        self._expected = None
        record = None
        if self.disk is not None:
            record = MasterRecordFile(self.disk.path)
            record.read()
        self._store = ParameterStore(
            self.task.index, is_saved=self.disk is not None, master_record=record
        )
        if self.disk is not None:
            self._files = SnapshotDirectory(self.disk.path)
            found = self._files.load(self._store.restore)
            self._expected = None if found is None else self._values_of[found.number]

    def close(self) -> None:
        """Removes all files."""
        if self._files is not None:
            self._files.close()
        if self.disk is not None:
            self.disk.close()

    def prepare(self, attach: messages.Attach, coordinator: int, job: str, epoch: int) -> None:
        """Takes the server into the job, and creations its parts, before anything goes wrong."""
        for body in (attach, *self._plan.creations(self.task.index)):
            self._store.handle(
                "coordinator", coordinator, body, job=job, epoch=epoch, now=self.world.now
            )
        self._job = job, epoch
        if self._files is not None:
            self._write(*self._take_snapshot())
            self.later(_SAVE_S, self._save)

    @property
    def num_applied_entries(self) -> int:
        """How many changes it remembers."""
        return int(self._store.counters()["applied_entries"])

    @override
    def crash(self) -> None:
        super().crash()
        if self._files is not None:
            self._files.close()
        self._checks.emptied(self.task.index)

    @override
    def start(self) -> None:
        super().start()
        self._begin()
        if self._files is not None:
            self.later(_SAVE_S, self._save)

    def _save(self) -> None:
        """Takes a snapshot if there were changes, and writes it a little later."""
        self.later(_SAVE_S, self._save)
        changes = self._store.change_counts().changes
        if changes == self._num_saved_changes:
            return
        cut, values = self._take_snapshot()
        if cut is None:
            return
        self._num_saved_changes = changes
        seconds = self.world.random.uniform(*_WRITING_S)
        self.later(seconds, lambda: self._write(cut, values))

    def _take_snapshot(self) -> tuple[snapshot.Cut | None, Values]:
        cut = self._store.snapshot()
        return cut, {} if cut is None else self._values()

    def _write(self, cut: snapshot.Cut | None, values: Values) -> None:
        assert cut is not None and self._files is not None
        ended_jobs = cut.counts.ended_jobs
        try:
            saved = self._files.save(
                cut, is_wanted=lambda _: self._store.change_counts().ended_jobs == ended_jobs
            )
        except GivenUpError:
            return
        finally:
            cut.close()
        self._values_of[saved.number] = values

    @override
    def handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Reply | None:
        body, index = envelope.body, self.task.index
        try:
            reply = self._store.handle(
                session.role,
                session.incarnation,
                body,
                buffers,
                job=envelope.job,
                epoch=envelope.epoch,
                now=self.world.now,
            )
        finally:
            if isinstance(body, messages.Exchange) and body.pushes and self._store.job:
                epoch = envelope.epoch
                self._checks.changed(index, session.incarnation, epoch, self._values())
        if isinstance(body, messages.Fence):
            for incarnation in body.incarnations:
                self._checks.fenced(index, incarnation)
        if isinstance(body, messages.Attach):
            self._job = envelope.job, envelope.epoch
            self._checks.attached(index, envelope.epoch)
            if self._expected is not None:
                expected, self._expected = self._expected, None
                self._checks.restored(index, expected, self._values())
        return reply

    def _values(self) -> Values:
        """Returns the values of all parts."""
        reads = self._plan.reads(self.task.index)
        job, epoch = self._job
        request = messages.Exchange([], reads)
        _, found = self._store.handle(
            "worker", _OBSERVER, request, job=job, epoch=epoch, now=self.world.now
        )
        return {
            read.part: np.frombuffer(bytes(value), np.float32)
            for read, value in zip(reads, found, strict=True)
        }
