"""The virtual clock and the random numbers of a simulation."""

from __future__ import annotations

import collections
import heapq
import random
from collections.abc import Callable

from simulation.faults import Faults

Action = Callable[[], None]


class World:
    """A discrete-event loop with a virtual clock.

    Attributes:
      now: The virtual time, in seconds.
      random: The random numbers.
      fault_random: Separate random numbers for faults that have no effect where the safeguards
        work: histories do not depend on them.
      faults: The faults that may happen.
      trace: All events, line by line.
      landed: The number of faults of each kind that have hit running work.
      num_events: The number of messages, steps of work, faults and calls of the user.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.fault_random = random.Random(f"mischief {seed}")
        self.faults = faults.drawn(self.random)
        self.trace: list[str] = []
        self.landed: collections.Counter[str] = collections.Counter()
        self.num_events = 0
        # Events of the same time happen in the order in which they were planned.
        self._plan: list[tuple[float, int, Action]] = []
        self._num_planned = 0

    def at(self, when: float, action: Action) -> None:
        """Plans an event."""
        self._num_planned += 1
        heapq.heappush(self._plan, (max(when, self.now), self._num_planned, action))

    def step(self) -> bool:
        """Runs the next event; returns whether there was one."""
        if not self._plan:
            return False
        self.now, _, action = heapq.heappop(self._plan)
        action()
        return True

    def note(self, text: str) -> None:
        """Counts an event, and adds it to the trace."""
        self.num_events += 1
        self.trace.append(f"{self.now:9.4f}  {text}")

    def new_incarnation(self) -> int:
        """Returns a new incarnation."""
        return self.random.getrandbits(62) + 1
