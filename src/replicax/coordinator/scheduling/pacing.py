"""Pacing: limits how far workers run apart, by deciding when the next closure is assigned.

Pure. A pacing is consulted before each assignment and informed after it; it reads the outcome
of closures from their states.

Note [Bounded staleness]
    A closure reads values after it was assigned, and its gradient is applied before it counts
    as finished. Between the two, values are changed only by closures that were not finished
    when it was assigned: those in flight then, and those assigned since. Each of them is by
    now either gone or still in flight. If a closure is assigned only while both together are
    within the bound, for the new one and for each in flight, no gradient lacks more steps of
    others than the bound. A closure that left without a result, because its worker was lost,
    may have changed values, and counts as finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from replicax.coordinator.scheduling.closures import Closure, State


class Pacing(Protocol):
    """Decides whether an idle worker may get a closure now."""

    def update(self) -> None:
        """Updates its counts from the states of the assigned closures."""
        ...

    def order(self, workers: Iterable[int]) -> list[int]:
        """Returns the workers in the order of their priority."""
        ...

    def admits(self, worker: int) -> bool:
        """Returns whether a worker may get a closure now."""
        ...

    def record_assigned(self, worker: int, closure: Closure) -> None:
        """Records that a closure was assigned to a worker."""
        ...


class BoundedStaleness:
    """Bounds the staleness of gradients; see Note [Bounded staleness].

    >>> first, second = Closure(1, None), Closure(2, None)
    >>> pacing = BoundedStaleness(0)
    >>> pacing.record_assigned(0, first)
    >>> first.assign_to(0)
    >>> pacing.admits(1)
    False
    >>> first.settle(State.FINISHED, None, None)
    >>> pacing.update()
    >>> pacing.admits(1)
    True

    Args:
      bound: The number of steps of others that a gradient may lack.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        # Closures in flight, each with the value of `_num_gone` when it was assigned.
        self._in_flight: dict[int, tuple[Closure, int]] = {}
        self._num_gone = 0
        # Workers in the order of their last assignment: all take turns, even if one would do.
        self._turns: dict[int, None] = {}

    def update(self) -> None:
        gone = [n for n, (c, _) in self._in_flight.items() if c.state is not State.IN_FLIGHT]
        for number in gone:
            del self._in_flight[number]
        self._num_gone += len(gone)

    def order(self, workers: Iterable[int]) -> list[int]:
        turns = {worker: turn for turn, worker in enumerate(self._turns)}
        return sorted(workers, key=lambda worker: (turns.get(worker, -1), worker))

    def admits(self, worker: int) -> bool:
        # The others that are in flight: for the new one these, for each of these the new one.
        num_others = len(self._in_flight)
        oldest = min((before for _, before in self._in_flight.values()), default=self._num_gone)
        return self._num_gone - oldest + num_others <= self._bound

    def record_assigned(self, worker: int, closure: Closure) -> None:
        self._in_flight[closure.id] = (closure, self._num_gone)
        self._turns.pop(worker, None)
        self._turns[worker] = None


class Rounds:
    """Assigns closures in rounds, one to each worker; for synchronous training.

    A round ends when enough of its closures have made a step. Slower closures keep running,
    and their workers take part in a later round. A worker gets a second closure in a round if
    other workers are missing, so that a round ends with any number of workers.

    Args:
      num_workers: The number of workers.
      num_needed: The number of closures that make one step together.

    Attributes:
      is_held: Whether nothing is assigned, because the last round is being completed.
      is_begun: Whether a closure was assigned since the last `restart`.
    """

    def __init__(self, num_workers: int, num_needed: int) -> None:
        self._num_workers = num_workers
        self._num_needed = num_needed
        self._num_stepped = 0
        # Of this round: the running closures, and the number of assignments per worker.
        self._running: dict[int, tuple[Closure, int]] = {}
        self._given: dict[int, int] = {}
        self.is_held = False
        self.is_begun = False

    def update(self) -> None:
        ended = [(c, w) for c, w in self._running.values() if c.state is not State.IN_FLIGHT]
        for closure, worker in ended:
            del self._running[closure.id]
            if closure.state is State.FINISHED and _has_stepped(closure):
                self._num_stepped += 1
            else:
                # It does not count.
                self._given[worker] -= 1
        if self._num_stepped >= self._num_needed:
            self._begin()

    def order(self, workers: Iterable[int]) -> list[int]:
        return sorted(workers, key=lambda worker: (self._given.get(worker, 0), worker))

    def admits(self, worker: int) -> bool:
        if self.is_held:
            return False
        limit = self._num_needed if self._given.get(worker) else self._num_workers
        return self._num_stepped + len(self._running) < limit

    def record_assigned(self, worker: int, closure: Closure) -> None:
        self._running[closure.id] = (closure, worker)
        self._given[worker] = self._given.get(worker, 0) + 1
        self.is_begun = True

    def hold(self) -> None:
        """Stops assignment until `restart`."""
        self.is_held = True

    def restart(self) -> None:
        """Begins a new round, after the servers have applied the rest of the last one."""
        self.is_held = self.is_begun = False
        self._begin()

    def _begin(self) -> None:
        self._num_stepped = 0
        self._running = {}
        self._given = {}


def make(
    settings: Mapping[str, int | float | str | bool | None], num_workers: int
) -> BoundedStaleness | Rounds | None:
    """Returns the pacing that the settings of a job select; None for no pacing."""
    bound, needed = settings.get("staleness"), settings.get("aggregate")
    if isinstance(bound, int):
        return BoundedStaleness(bound)
    if isinstance(needed, int):
        return Rounds(num_workers, needed)
    return None


def _has_stepped(closure: Closure) -> bool:
    """Returns whether an optimizer made a step in a finished closure."""
    result = closure.result
    return result is not None and result[0].has_stepped
