"""How far workers may run apart: when the next closure may be handed out.

Pure, like all that decides. A pacing is asked before each closure and told after; how closures
end, it sees by itself, by their states.

Note [Bounded staleness]
    A closure reads values after it was handed out, and its gradient is applied before it
    counts as finished. So between the two, only closures can change values that were not
    finished when it was handed out: those in flight then, and those that were handed out since.
    Each of them is by now either gone or still in flight. If no closure is handed out unless
    both together are within the bound, for the new one and for each that is in flight, then
    no gradient lacks more steps of others than that. What leaves without a result, because
    its worker was lost, may have changed something, and counts like what has finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from replicax.coordinator.scheduling.closures import Closure, State


class Pacing(Protocol):
    """Decides whether a worker without closures may have one now."""

    def look(self) -> None:
        """Learns what has happened to the closures that were handed out."""
        ...

    def order(self, workers: Iterable[int]) -> list[int]:
        """Puts workers in the order in which they are to be asked."""
        ...

    def admits(self, worker: int) -> bool:
        """Tells whether a worker may have a closure now."""
        ...

    def hand_out(self, worker: int, closure: Closure) -> None:
        """Notes that a worker got a closure."""
        ...


class BoundedStaleness:
    """Keeps gradients from lacking more than some steps; see Note [Bounded staleness].

    >>> first, second = Closure(1, None), Closure(2, None)
    >>> pacing = BoundedStaleness(0)
    >>> pacing.hand_out(0, first)
    >>> first.give_to(0)
    >>> pacing.admits(1)
    False
    >>> first.settle(State.FINISHED, None, None)
    >>> pacing.look()
    >>> pacing.admits(1)
    True

    Args:
      bound: How many steps of others a gradient may lack.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        # Closures in flight, each with the number of those that had gone before it came.
        self._in_flight: dict[int, tuple[Closure, int]] = {}
        self._num_gone = 0
        # Who got something, the last one at the end: all take turns, also where one would do.
        self._turns: dict[int, None] = {}

    def look(self) -> None:
        """See `Pacing`."""
        gone = [n for n, (c, _) in self._in_flight.items() if c.state is not State.IN_FLIGHT]
        for number in gone:
            del self._in_flight[number]
        self._num_gone += len(gone)

    def order(self, workers: Iterable[int]) -> list[int]:
        """See `Pacing`."""
        turns = {worker: turn for turn, worker in enumerate(self._turns)}
        return sorted(workers, key=lambda worker: (turns.get(worker, -1), worker))

    def admits(self, worker: int) -> bool:
        """See `Pacing`."""
        # The others that are in flight: for the new one these, for each of these the new one.
        num_others = len(self._in_flight)
        oldest = min((before for _, before in self._in_flight.values()), default=self._num_gone)
        return self._num_gone - oldest + num_others <= self._bound

    def hand_out(self, worker: int, closure: Closure) -> None:
        """See `Pacing`."""
        self._in_flight[closure.id] = (closure, self._num_gone)
        self._turns.pop(worker, None)
        self._turns[worker] = None


class Rounds:
    """Hands out closures in rounds, one for each worker; for training in sync.

    A round ends when enough of its closures have made a step. Closures that are slower keep
    running; their workers take part in a later round. A worker gets a second closure in a
    round if others are missing, so that a round ends with any number of workers.

    Args:
      num_workers: How many workers there are.
      num_needed: How many closures make a step together.

    Attributes:
      is_held: Whether nothing is handed out, because the last round is being completed.
      is_begun: Whether anything was handed out since rounds began anew.
    """

    def __init__(self, num_workers: int, num_needed: int) -> None:
        self._num_workers = num_workers
        self._num_needed = num_needed
        self._num_stepped = 0
        # Of this round: the closures that run, and who got how many.
        self._running: dict[int, tuple[Closure, int]] = {}
        self._given: dict[int, int] = {}
        self.is_held = False
        self.is_begun = False

    def look(self) -> None:
        """See `Pacing`."""
        ended = [(c, w) for c, w in self._running.values() if c.state is not State.IN_FLIGHT]
        for closure, worker in ended:
            del self._running[closure.id]
            if closure.state is State.FINISHED and _has_stepped(closure):
                self._num_stepped += 1
            else:
                # It is as if it had not been.
                self._given[worker] -= 1
        if self._num_stepped >= self._num_needed:
            self._begin()

    def order(self, workers: Iterable[int]) -> list[int]:
        """See `Pacing`."""
        return sorted(workers, key=lambda worker: (self._given.get(worker, 0), worker))

    def admits(self, worker: int) -> bool:
        """See `Pacing`."""
        if self.is_held:
            return False
        limit = self._num_needed if self._given.get(worker) else self._num_workers
        return self._num_stepped + len(self._running) < limit

    def hand_out(self, worker: int, closure: Closure) -> None:
        """See `Pacing`."""
        self._running[closure.id] = (closure, worker)
        self._given[worker] = self._given.get(worker, 0) + 1
        self.is_begun = True

    def hold(self) -> None:
        """Hands out nothing, until rounds begin anew."""
        self.is_held = True

    def begin_anew(self) -> None:
        """Begins with a new round: servers have applied what they had."""
        self.is_held = self.is_begun = False
        self._begin()

    def _begin(self) -> None:
        self._num_stepped = 0
        self._running = {}
        self._given = {}


def make(
    settings: Mapping[str, int | float | str | bool | None], num_workers: int
) -> BoundedStaleness | Rounds | None:
    """Returns the pacing that the settings of a job ask for; None for no pacing."""
    bound, needed = settings.get("staleness"), settings.get("aggregate")
    if isinstance(bound, int):
        return BoundedStaleness(bound)
    if isinstance(needed, int):
        return Rounds(num_workers, needed)
    return None


def _has_stepped(closure: Closure) -> bool:
    """Tells whether an optimizer made a step in a closure that ended well."""
    result = closure.result
    return result is not None and result[0].has_stepped
