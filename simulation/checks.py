"""The invariants of every history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from typing_extensions import override

from replicax.coordinator.scheduling.closures import Closure, State
from replicax.foundation import errors
from simulation.plan import Plan
from simulation.world import BrokenRuleError, World

Values = Mapping[int, np.ndarray]


class Checks:
    """Checks every change of a part, every result and every heartbeat.

    Args:
      world: The simulated world.
      plan: The work of the closures.
      return_s: The time for which a server may recover repeatedly while no closure ends.

    Attributes:
      may_lose_servers: Whether a fault has happened after which a server may be lost.

    Note [Lost updates]
        A server without a mirror recovers with the state of its last snapshot. Later updates are
        lost there, for closures that are finished when the coordinator notices. All others run
        again, and complete. An acknowledged update of the coordinator itself is not repeated. A
        server with a mirror loses nothing that was acknowledged.
    """

    def __init__(self, world: World, plan: Plan, return_s: float) -> None:
        self._world, self._plan = world, plan
        self._return_s = return_s
        # When a closure last finished.
        self._progress_s = world.now
        self.may_lose_servers = False
        self._is_broken = self._has_dropped_job = False
        # All closures, and those whose outcome is not checked yet.
        self._closures: dict[int, Closure] = {}
        self._open: dict[int, Closure] = {}
        # Updates of the coordinator itself, from the time when they are sent.
        self._writes: set[int] = set()
        self._acknowledged: set[int] = set()
        # Closures and writes whose updates a server may have lost. See Note [Lost updates].
        self._excused: set[tuple[int, int]] = set()
        self._values: dict[int, Values] = {}
        self._fenced: set[tuple[int, int]] = set()
        # The incarnations of servers that have dropped the job.
        self._expired: set[tuple[int, int]] = set()
        # The closures that have changed something; and how many there were when an attempt read.
        self._changed: dict[int, None] = {}
        self._read_at: dict[tuple[int, int], int] = {}
        # By server: the newest epoch that it has acknowledged.
        self._epochs: dict[int, int] = {}

    # Events.

    def scheduled(self, element: int, closure: Closure) -> None:
        """Records a scheduled closure."""
        self._closures[element] = self._open[element] = closure

    def reads(self, element: int, incarnation: int) -> None:
        """Records that an attempt of a closure, on an incarnation of a worker, begins to read."""
        self._read_at[element, incarnation] = len(self._changed)

    def writes(self, element: int) -> None:
        """Records that the coordinator begins an update itself."""
        self._writes.add(element)

    def wrote(self, element: int, *, is_acknowledged: bool) -> None:
        """Records the end of such an update."""
        if is_acknowledged:
            self._acknowledged.add(element)
            self._require_complete(element)

    def replaced(self) -> None:
        """Records that another coordinator resumes the job: open closures do not count any more."""
        for element in self._open:
            del self._closures[element]
        self._open.clear()
        self._progress_s = self._world.now

    def attached(self, server: int, epoch: int) -> None:
        """Records that a server is attached to a coordinator."""
        self._epochs[server] = max(epoch, self._epochs.get(server, 0))

    def pinged(self, settled: int) -> None:
        """Checks the watermark of a heartbeat."""
        for closure in self._open.values():
            if closure.id < settled and not closure.is_settled:
                raise BrokenRuleError(f"the watermark is {settled}, but {closure} is not settled")

    def fenced(self, server: int, incarnation: int) -> None:
        """Records that a server has confirmed a fence."""
        self._fenced.add((server, incarnation))

    def emptied(self, server: int) -> None:
        """Records that a server has lost its parts; its fences and epoch still hold."""
        self._values.pop(server, None)

    def restored(self, server: int, saved: Iterable[Values], found: Values) -> None:
        """Checks the values that a server has restored.

        Args:
          server: The server.
          saved: The values of the last snapshot, and of those that were being written.
          found: The values that it has.
        """
        self._values[server] = found
        is_mirrored = self._world.faults.is_mirrored
        self._world.landed["mirror_recovery" if is_mirrored else "snapshot_recovery"] += 1
        if is_mirrored and not self._has_dropped_job:
            for element, closure in self._closures.items():
                if closure.state is State.FINISHED:
                    self._require_complete(element)
            for element in self._acknowledged:
                self._require_complete(element)
            return
        # If all servers have dropped the job, the mirror may have less than the snapshots, or more.
        if not is_mirrored and not any(_are_equal(values, found) for values in saved):
            raise BrokenRuleError(f"ps {server} was not restored as saved")
        ended = [e for e, closure in self._closures.items() if closure.state is State.FINISHED]
        self._excused.update((server, element) for element in (*ended, *self._writes))

    def dropped_job(self, server: int, incarnation: int) -> None:
        """Records that a server has dropped the job because its lease has expired."""
        if (server, incarnation) in self._expired:
            return
        self._expired.add((server, incarnation))
        if not self._world.faults.lease_share:
            raise BrokenRuleError("a server has dropped a job whose coordinator was not away")
        self._world.landed["lease_expired"] += 1
        self._has_dropped_job = True
        self.may_lose_servers = True

    def lost_servers(self) -> None:
        """Records that the job has ended: abandoned closures may still update parts."""
        self._is_broken = True

    def changed(self, server: int, incarnation: int, epoch: int, values: Values) -> None:
        """Checks the values of a server after a request of an incarnation."""
        before = self._values.get(server)
        self._values[server] = values
        for part, value in values.items():
            old = np.zeros_like(value) if before is None else before[part]
            for element in np.flatnonzero(value != old).tolist():
                self._check_epoch(server, epoch, element)
                self._check_change(server, incarnation, part, element, float(value[element]))
                self._check_staleness(element, incarnation)

    def check_results(self, unnoticed: Callable[[], Iterable[int]] = tuple) -> None:
        """Checks the closures that were settled since the last call.

        Args:
          unnoticed: Returns the servers that went away, before the coordinator uses them again.
        """
        for element, closure in [(e, c) for e, c in self._open.items() if c.is_settled]:
            del self._open[element]
            if not self._world.faults.is_mirrored or closure.state is not State.FINISHED:
                # What was cancelled may still run, and is fenced at such a server later.
                self._excused.update((server, element) for server in unnoticed())
            if closure.state is State.FINISHED:
                self._progress_s = self._world.now
                self._require_complete(element)
            self._require_typed(element, closure)

    def ended(self, applied_entries: Mapping[int, int], waiting: Mapping[int, Values]) -> None:
        """Checks the final state, after all messages have arrived.

        Args:
          applied_entries: How many changes each server remembers.
          waiting: The sums of the gradients that wait for others, if none will come.
        """
        left = [c for c in self._closures.values() if not c.is_settled]
        if left:
            raise BrokenRuleError(f"{left} were never settled")
        for server, count in applied_entries.items():
            if count and not self._is_broken:
                raise BrokenRuleError(
                    f"ps {server} still keeps {count} entries of settled closures"
                )
        for element, closure in self._closures.items():
            if closure.state is State.FINISHED:
                self._require_complete(element)
                self._require_applied(element, waiting)

    # Invariants.

    def _check_epoch(self, server: int, epoch: int, element: int) -> None:
        acknowledged = self._epochs.get(server, 0)
        if epoch < acknowledged:
            raise BrokenRuleError(
                f"ps {server} was changed by {self._plan.name_of(element)} in epoch {epoch}, "
                f"though it had acknowledged epoch {acknowledged}"
            )

    def _check_change(
        self, server: int, incarnation: int, part: int, element: int, found: float
    ) -> None:
        what = f"part {part} of ps {server} was changed by {self._plan.name_of(element)}"
        expected = self._plan.touched(element).get(part, 0)
        if found > expected:
            raise BrokenRuleError(f"{what} {found:g} times instead of {expected}")
        if (server, incarnation) in self._fenced:
            raise BrokenRuleError(f"{what} from incarnation {incarnation:x}, which is fenced there")
        closure = self._closures.get(element)
        if closure is None or not closure.is_settled or self._is_broken:
            return
        # A request of a closure that was abandoned while a server was away may still be queued.
        if closure.state is State.FINISHED or (server, element) not in self._excused:
            raise BrokenRuleError(f"{what} after it was settled: {closure}")

    def stepped(self, server: int, before: Values, after: Values) -> None:
        """Checks the steps of synchronous training in a request: each is the mean of a round.

        Every closure has a gradient for each server: a mean of k changes the elements of k.
        """
        elements: dict[float, set[int]] = {}
        for part, value in after.items():
            old = before.get(part, np.zeros_like(value))
            for element in np.flatnonzero(value != old).tolist():
                if element in self._plan.writes:
                    continue
                if old[element]:
                    raise BrokenRuleError(
                        f"part {part} of ps {server} was changed by "
                        f"{self._plan.name_of(element)} in two steps"
                    )
                elements.setdefault(float(value[element]), set()).add(element)
        for share, found in elements.items():
            count = round(1.0 / share) if share > 0.0 else 0
            is_mean = 1 <= count <= (self._plan.num_needed or 0) and abs(share * count - 1) < 1e-6
            if not is_mean or len(found) % count:
                raise BrokenRuleError(
                    f"a step of ps {server} has changed elements {sorted(found)} by {share:g}: it "
                    "is not the mean of their gradients"
                )

    def dropped(self, server: int, closures: Iterable[int]) -> None:
        """Records that a server has dropped a gradient of one of some closures: it came too late.

        It is the one that it does not have.
        """
        if not self._world.faults.backup_workers:
            raise BrokenRuleError(f"ps {server} has dropped a gradient, and each is needed")
        self._world.landed["gradient_dropped"] += 1
        numbers = set(closures)
        elements = [e for e, closure in self._open.items() if closure.id in numbers]
        self._excused.update((server, element) for element in elements)

    def _check_staleness(self, element: int, incarnation: int) -> None:
        """Checks how many others have changed variables since an attempt has read them."""
        if element in self._changed or element in self._plan.writes:
            return
        missed = len(self._changed) - self._read_at.get((element, incarnation), len(self._changed))
        self._changed[element] = None
        faults = self._world.faults
        if faults.staleness_share and missed > faults.staleness:
            raise BrokenRuleError(
                f"{self._plan.name_of(element)} has missed {missed} steps of others, and may miss "
                f"{faults.staleness}"
            )

    def _require_complete(self, element: int) -> None:
        for part, expected in self._plan.touched(element).items():
            server = self._plan.servers[part]
            values = self._values.get(server)
            if values is None or (server, element) in self._excused:
                continue
            found = float(values[part][element])
            if found != expected:
                raise BrokenRuleError(
                    f"{self._plan.name_of(element)} finished, but part {part} was changed by it "
                    f"{found:g} times instead of {expected}"
                )

    def _require_applied(self, element: int, waiting: Mapping[int, Values]) -> None:
        for server, sums in waiting.items():
            if (server, element) in self._excused:
                continue
            if any(value[element] for value in sums.values()):
                raise BrokenRuleError(
                    f"ps {server} still keeps the gradient of {self._plan.name_of(element)}"
                )

    def _require_typed(self, element: int, closure: Closure) -> None:
        error = closure.error
        if error is None:
            return
        is_own = self._plan.work_of(element).fails and isinstance(error, ValueError)
        if not is_own and not isinstance(error, errors.DistributeError):
            raise BrokenRuleError(f"{closure} ended with {error!r}")

    def require_reason(self, error: BaseException, *, is_final: bool) -> None:
        """Checks the type of an error of the user, and that no server is lost without a reason."""
        may_lose = self.may_lose_servers or (not is_final and self._world.faults.can_lose_servers)
        may_lose |= self._world.now - self._progress_s > self._return_s
        if isinstance(error, errors.PSUnavailableError) and not may_lose:
            raise BrokenRuleError(f"a server was lost without a reason: {error}")
        if not isinstance(error, errors.DistributeError | ValueError):
            raise BrokenRuleError(f"the user got {error!r}")


def _are_equal(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[p], other[p]) for p in one)


class Bystander(Checks):
    """Accepts the results of a coordinator that was replaced."""

    def __init__(self) -> None:
        """Needs no state."""

    @override
    def scheduled(self, element: int, closure: Closure) -> None:
        """Not checked: it never runs."""

    @override
    def writes(self, element: int) -> None:
        """Not checked: it is rejected."""

    @override
    def wrote(self, element: int, *, is_acknowledged: bool) -> None:
        """Not checked: it was rejected, or made before."""

    @override
    def pinged(self, settled: int) -> None:
        """Not checked: it is rejected."""

    @override
    def check_results(self, unnoticed: Callable[[], Iterable[int]] = tuple) -> None:
        """Not checked."""

    @override
    def lost_servers(self) -> None:
        """Not recorded: another coordinator uses them."""

    @override
    def require_reason(self, error: BaseException, *, is_final: bool) -> None:
        if not isinstance(error, errors.DistributeError | ValueError):
            raise BrokenRuleError(f"the user got {error!r}")
