"""A simulated machine with a parameter server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from replicax.protocol import messages
from replicax.protocol.tasks import Role, Task
from replicax.ps.process.mirror_copies import MirrorCopies
from replicax.ps.process.mirror_log import State
from replicax.ps.process.parameter_server import ParameterServerTask
from replicax.ps.process.snapshot_files import Saved
from replicax.ps.process.snapshots import Snapshots
from replicax.ps.store.service import ParameterStore, Reply
from replicax.ps.store.snapshot import Cut, Loaded
from replicax.transport.addresses import Location
from simulation.checks import Checks, Values
from simulation.disk import Disk
from simulation.plan import Plan
from simulation.process import Machine
from simulation.world import World

# The seconds between two snapshots, and the longest time to sync a file.
_SAVE_S = 1.2
_SYNC_S = 0.03
# How long a server is away that has ended itself.
_AWAY_S = (0.1, 1.0)
# An incarnation that only reads parts.
_OBSERVER = 1


class SavedValues:
    """What the snapshots of one server hold, across its processes.

    Attributes:
      is_complete: Whether a snapshot has all parts of the server.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        # Of all cuts whose snapshot may be the newest on the disk, by number.
        self._cuts: dict[int, Values] = {}
        self._num_cuts = 0
        self.is_complete = False

    def add(self, values: Values) -> None:
        """Adds a cut that is about to be written."""
        self._num_cuts += 1
        self._cuts[self._num_cuts] = values

    def candidates(self) -> Iterable[Values]:
        """Returns the values that the newest snapshot on the disk may have."""
        return self._cuts.values()

    def observe(self, snapshots: Snapshots) -> None:
        """Observes which cuts are on the disk."""
        files = snapshots._files
        save = files.save

        def observed(cut: Cut, **options: Any) -> Saved:
            number = self._num_cuts
            saved = save(cut, **options)
            # It is newer than all that were taken before.
            self._cuts = {n: values for n, values in self._cuts.items() if n >= number}
            self.is_complete |= len(self._cuts[number]) == self._num_parts
            return saved

        files.save = observed


class ObservedStore:
    """Checks the changes of the variables of one process; replaces methods of its store."""

    def __init__(
        self, machine: ServerMachine, store: ParameterStore, plan: Plan, checks: Checks
    ) -> None:
        self._machine, self._world, self._index = machine, machine.world, machine.task.index
        self._saved = machine.saved
        self._store, self._plan, self._checks = store, plan, checks
        self._handle, self._snapshot, self._restore = store.handle, store.snapshot, store.restore
        store.handle, store.snapshot, store.restore = self.handle, self.snapshot, self.restore
        self._is_restored = False
        # The values after the last step of synchronous training.
        self._last_values: Values | None = {}

    def counts(self) -> Values | None:
        """Returns how often each element of all parts was updated; None if they cannot be read.

        Gradients that wait for others count.
        """
        values, waiting = self._values(), self.waiting()
        if values is None:
            return None
        found = {part: self._plan.counts(value) for part, value in values.items()}
        return {part: count + waiting.get(part, 0.0) for part, count in found.items()}

    def waiting(self) -> Values:
        """Returns the sums of the gradients that wait for others, by part."""
        saved = [one for mean in self._store._storage.accumulation.export() for one in mean.sums]
        return {one.part: np.frombuffer(one.values, one.dtype) for one in saved}

    def _values(self) -> Values | None:
        held = self._store._job
        if held is None or held.awaits_coordinator:
            return None
        reads = self._plan.reads(self._index, frozenset(self._store._storage.complete_parts))
        request = messages.Exchange([], reads)
        _, found = self._handle(
            "worker", _OBSERVER, request, job=held.name, epoch=held.epoch, now=0.0
        )
        return {
            read.part: np.frombuffer(bytes(value), np.float32)
            for read, value in zip(reads, found, strict=True)
        }

    def handle(
        self,
        role: Role,
        incarnation: int,
        body: messages.Body,
        buffers: Sequence[Any] = (),
        *,
        job: str,
        epoch: int,
        now: float,
    ) -> Reply:
        """Handles a request, and checks what it has changed."""
        num_dropped = self._num_dropped
        try:
            reply = self._handle(role, incarnation, body, buffers, job=job, epoch=epoch, now=now)
        finally:
            if isinstance(body, messages.Exchange) and body.pushes:
                self._check_changes(incarnation, epoch)
                if self._num_dropped > num_dropped:
                    dropped = [push.closure for push in body.pushes]
                    self._world.checked(lambda: self._checks.dropped(self._index, dropped))
            if isinstance(body, messages.Exchange | messages.FlushGradients | messages.Attach):
                self._check_steps()
            if self._store.expired is not None:
                self._machine.note_expired()
        if isinstance(body, messages.Fence):
            for fenced in body.incarnations:
                self._checks.fenced(self._index, fenced)
        if isinstance(body, messages.Attach):
            self._checks.attached(self._index, epoch)
            self._check_restored()
        return reply

    def _check_changes(self, incarnation: int, epoch: int) -> None:
        values = self.counts()
        if values is not None:
            check = self._checks.changed
            self._world.checked(lambda: check(self._index, incarnation, epoch, values))

    def _check_steps(self) -> None:
        """Checks what steps of synchronous training have changed."""
        values = self._values()
        if self._plan.num_needed is None or values is None:
            return
        before, self._last_values = self._last_values, values
        if before is not None:
            self._world.checked(lambda: self._checks.stepped(self._index, before, values))

    @property
    def _num_dropped(self) -> int:
        return self._store._storage.clock.num_dropped

    def _check_restored(self) -> None:
        values, is_restored, self._is_restored = self.counts(), self._is_restored, False
        if is_restored and values is not None:
            check, saved = self._checks.restored, self._saved.candidates()
            self._world.checked(lambda: check(self._index, saved, values))

    def snapshot(self, on_cut: Callable[[], None] | None = None) -> Cut | None:
        """Takes a cut, and keeps the values of one for the disk."""

        def cut_now() -> None:
            if on_cut is not None:
                on_cut()
            elif (values := self.counts()) is not None:
                self._saved.add(values)

        return self._snapshot(cut_now)

    def restore(self, loaded: Loaded) -> None:
        """Restores a snapshot, whose values are checked once they can be read."""
        self._restore(loaded)
        self._is_restored = True
        # They become readable when a coordinator has attached it.
        self._last_values = None


class ServerMachine(Machine):
    """Runs a parameter server, and checks each change of its variables.

    Args:
      world: The simulated world.
      index: The index of the server.
      plan: What is done to its variables; None to check nothing.
      checks: The invariants.

    Attributes:
      disk: The disk of its snapshots; None if it keeps none.
      saved: What its snapshots hold.
    """

    def __init__(
        self, world: World, index: int, plan: Plan | None = None, checks: Checks | None = None
    ) -> None:
        super().__init__(world, Task("ps", index))
        self._plan, self._checks = plan, checks
        self.disk = Disk(self._sync) if world.faults.saved_share else None
        self.saved = SavedValues(0 if plan is None else plan.num_parts(index))
        self._server: ParameterServerTask | None = None
        self._observed: ObservedStore | None = None
        self.start()

    def close(self) -> None:
        """Ends the process, and removes all files."""
        self.process.kill()
        if self.disk is not None:
            self.disk.close()

    @property
    def incarnation(self) -> int:
        """The incarnation of its last process."""
        return 0 if self._server is None else self._server._service.incarnation

    @property
    def num_applied_entries(self) -> int:
        """How many changes it remembers."""
        return 0 if self._server is None else int(self._server._store.counters()["applied_entries"])

    @property
    def waiting(self) -> Values:
        """The sums of the gradients that wait for others, by part."""
        return {} if self._observed is None else self._observed.waiting()

    @property
    def is_in_sync(self) -> bool:
        """Whether its mirror has all of its changes, or it has no mirror."""
        server = self._server
        return self.is_up and server is not None and server._log.state is State.IN_SYNC

    @override
    def main(self) -> None:
        process, index = self.process, self.task.index
        path = None if self.disk is None else self.disk.path
        location = Location("inproc", self.url, self.url)
        server = ParameterServerTask(index, location, snapshots=path, snapshot_every=_SAVE_S)
        self._server = server
        if self._plan is not None and self._checks is not None:
            self._observed = ObservedStore(self, server._store, self._plan, self._checks)
        server.start()
        # The kernel closes the files of a killed process, and releases the lock of its directory.
        process.on_exit[-1] = functools.partial(_close_files, server._copies)
        if server._snapshots is not None:
            process.on_exit[-2] = server._snapshots._files.close
            self.saved.observe(server._snapshots)
        server.run_forever()
        server.close()
        if process.is_up:
            self.world.note(f"{self} has ended itself: {server.ending}")
            self.note_expired()
            self.restart_after(self.world.random.uniform(*_AWAY_S))

    def note_expired(self) -> None:
        """Records that the last process has dropped the job because its lease has expired."""
        checks, incarnation = self._checks, self.incarnation
        if checks is not None:
            self.world.checked(lambda: checks.dropped_job(self.task.index, incarnation))

    @override
    def kill(self) -> None:
        super().kill()
        if self._checks is not None:
            self._checks.emptied(self.task.index)

    def _sync(self) -> None:
        """Takes the time of a disk; a machine may fail before it is over."""
        self.world.sleep(self.world.random.uniform(0.0, _SYNC_S))


def _close_files(copies: MirrorCopies) -> None:
    """Closes the snapshots that are in transfer, without its lock: a killed thread may hold it."""
    for transfer in (*copies._incoming.values(), *copies._outgoing.values()):
        transfer.file.close()
