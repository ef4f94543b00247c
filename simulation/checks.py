"""What must hold in every history, whatever goes wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from typing_extensions import override

from replicax.coordinator.scheduling.closures import Closure, State
from replicax.foundation import errors
from simulation.plan import Plan
from simulation.world import World

Values = Mapping[int, np.ndarray]


class BrokenRuleError(Exception):
    """Something happened that must never happen."""


class Checks:
    """Looks at every change of a part, every result and every beat.

    Args:
      world: Where and when it happens.
      plan: What closures do.
      return_s: For how long a server may come back again and again while no closure ends.

    Attributes:
      may_lose_servers: Whether something has happened that may cost the job a server.

    Note [What a snapshot may lose]
        A server that comes back has its state of some moment before. What changed after that
        moment is lost there, for closures that count as finished by the time at which the
        coordinator knows. All others are run again, and complete in the end. A change of the
        coordinator's own is not run again where it was acknowledged before.
    """

    def __init__(self, world: World, plan: Plan, return_s: float) -> None:
        self._world, self._plan = world, plan
        self._return_s = return_s
        # When a closure ended well last.
        self._progress_s = world.now
        self.may_lose_servers = False
        self._is_broken = False
        # All closures, and those of them whose end was not looked at yet.
        self._closures: dict[int, Closure] = {}
        self._open: dict[int, Closure] = {}
        # Changes of the coordinator's own, from the moment when they are sent.
        self._writes: set[int] = set()
        # Closures and writes that a server may have lost. See Note [What a snapshot may lose].
        self._excused: set[tuple[int, int]] = set()
        self._values: dict[int, Values] = {}
        self._fenced: set[tuple[int, int]] = set()
        # By server: the newest coordinator that it has promised to obey.
        self._epochs: dict[int, int] = {}

    # What happens.

    def scheduled(self, element: int, closure: Closure) -> None:
        """The user has scheduled a closure."""
        self._closures[element] = self._open[element] = closure

    def writes(self, element: int) -> None:
        """The coordinator begins to make a change of its own."""
        self._writes.add(element)

    def wrote(self, element: int, *, is_acknowledged: bool) -> None:
        """A change of the coordinator's own was made, or it does not know."""
        if is_acknowledged:
            self._require_complete(element)

    def replaced(self) -> None:
        """Another coordinator begins to take the job over: nobody waits for what is open."""
        for element in self._open:
            del self._closures[element]
        self._open.clear()
        self._progress_s = self._world.now

    def attached(self, server: int, epoch: int) -> None:
        """A server has said that it is in the hands of a coordinator."""
        self._epochs[server] = max(epoch, self._epochs.get(server, 0))

    def pinged(self, settled: int) -> None:
        """The coordinator says that all closures below a number are settled."""
        for closure in self._open.values():
            if closure.id < settled and not closure.is_settled:
                raise BrokenRuleError(f"the watermark is {settled}, but {closure} is not settled")

    def fenced(self, server: int, incarnation: int) -> None:
        """A server has confirmed that it takes nothing more from a life."""
        self._fenced.add((server, incarnation))

    def emptied(self, server: int) -> None:
        """A server has lost its parts; what it has promised still holds when it is back."""
        self._values.pop(server, None)

    def restored(self, server: int, saved: Values, found: Values) -> None:
        """A server has come back with what it had saved."""
        for part, value in saved.items():
            if not np.array_equal(value, found[part]):
                raise BrokenRuleError(f"part {part} of ps {server} was not restored as saved")
        self._values[server] = found
        ended = [e for e, closure in self._closures.items() if closure.state is State.FINISHED]
        self._excused.update((server, element) for element in (*ended, *self._writes))

    def lost_servers(self) -> None:
        """The job has ended: closures that run are given up, and may still change something."""
        self._is_broken = True

    def changed(self, server: int, incarnation: int, epoch: int, values: Values) -> None:
        """A server has answered a request of some life that may have changed its parts."""
        before = self._values.get(server)
        self._values[server] = values
        for part, value in values.items():
            old = np.zeros_like(value) if before is None else before[part]
            for element in np.flatnonzero(value != old).tolist():
                self._check_epoch(server, epoch, element)
                self._check_change(server, incarnation, part, element, float(value[element]))

    def results_came(self, strangers: Iterable[int] = ()) -> None:
        """The coordinator has heard of tasks: looks at what was settled by that.

        Args:
          strangers: Servers that have gone and may be back, while the coordinator does not know.
        """
        for element, closure in [(e, c) for e, c in self._open.items() if c.is_settled]:
            del self._open[element]
            self._excused.update((server, element) for server in strangers)
            if closure.state is State.FINISHED:
                self._progress_s = self._world.now
                self._require_complete(element)
            self._require_typed(element, closure)

    def ended(self, applied_entries: Mapping[int, int]) -> None:
        """Everything is over, and all messages have arrived."""
        left = [c for c in self._closures.values() if not c.is_settled]
        if left:
            raise BrokenRuleError(f"{left} were never settled")
        for server, count in applied_entries.items():
            if count and not self._is_broken:
                raise BrokenRuleError(
                    f"ps {server} still keeps {count} entries of closures that are settled"
                )
        for element, closure in self._closures.items():
            if closure.state is State.FINISHED:
                self._require_complete(element)

    # What must hold.

    def _check_epoch(self, server: int, epoch: int, element: int) -> None:
        promised = self._epochs.get(server, 0)
        if epoch < promised:
            raise BrokenRuleError(
                f"ps {server} was changed by {self._plan.name_of(element)} in epoch {epoch}, "
                f"though it had promised to obey epoch {promised}"
            )

    def _check_change(
        self, server: int, incarnation: int, part: int, element: int, found: float
    ) -> None:
        what = f"part {part} of ps {server} was changed by {self._plan.name_of(element)}"
        expected = self._plan.touched(element).get(part, 0)
        if found > expected:
            raise BrokenRuleError(f"{what} {found:g} times instead of {expected}")
        if (server, incarnation) in self._fenced:
            raise BrokenRuleError(f"{what}, from life {incarnation:x}, which was fenced there")
        closure = self._closures.get(element)
        if closure is None or not closure.is_settled or self._is_broken:
            return
        # One that was given up while a server was away may have left something in its inbox.
        if closure.state is State.FINISHED or (server, element) not in self._excused:
            raise BrokenRuleError(f"{what} after it was settled: {closure}")

    def _require_complete(self, element: int) -> None:
        for part, expected in self._plan.touched(element).items():
            server = self._plan.servers[part]
            values = self._values.get(server)
            if values is None or (server, element) in self._excused:
                continue
            found = float(values[part][element])
            if found != expected:
                raise BrokenRuleError(
                    f"{self._plan.name_of(element)} ended well, but part {part} was changed by it "
                    f"{found:g} times instead of {expected}"
                )

    def _require_typed(self, element: int, closure: Closure) -> None:
        error = closure.error
        if error is None:
            return
        is_own = self._plan.work_of(element).fails and isinstance(error, ValueError)
        if not is_own and not isinstance(error, errors.DistributeError):
            raise BrokenRuleError(f"{closure} ended with {error!r}")

    def require_reason(self, error: BaseException, *, is_final: bool) -> None:
        """The user got an error: it has a type, and servers are not given up for nothing."""
        may_lose = self.may_lose_servers or (not is_final and self._world.faults.can_lose_servers)
        may_lose |= self._world.now - self._progress_s > self._return_s
        if isinstance(error, errors.PSUnavailableError) and not may_lose:
            raise BrokenRuleError(f"a server was given up without a reason: {error}")
        if not isinstance(error, errors.DistributeError | ValueError):
            raise BrokenRuleError(f"the user got {error!r}")


class Bystander(Checks):
    """Looks at a coordinator that was replaced: what it says of its closures counts no more."""

    def __init__(self) -> None:
        """It needs to know nothing."""

    @override
    def scheduled(self, element: int, closure: Closure) -> None:
        """It will never run."""

    @override
    def writes(self, element: int) -> None:
        """It will be refused."""

    @override
    def wrote(self, element: int, *, is_acknowledged: bool) -> None:
        """It was refused, or made before."""

    @override
    def pinged(self, settled: int) -> None:
        """Nobody listens."""

    @override
    def results_came(self, strangers: Iterable[int] = ()) -> None:
        """Nobody waits for them."""

    @override
    def lost_servers(self) -> None:
        """They are those of another one."""

    @override
    def require_reason(self, error: BaseException, *, is_final: bool) -> None:
        if not isinstance(error, errors.DistributeError | ValueError):
            raise BrokenRuleError(f"the user got {error!r}")
