"""Virtual time and chance: what everything in a simulation shares."""

from __future__ import annotations

import collections
import heapq
import random
from collections.abc import Callable

from simulation.faults import Faults

Action = Callable[[], None]


class World:
    """One thread in which everything happens, one event after the other, in an order of its own.

    Attributes:
      now: The virtual time, in seconds.
      random: The source of chance.
      mischief: Another one, for what changes nothing where safeguards work: histories are the
        same with it and without.
      faults: What may go wrong.
      trace: What has happened, line by line.
      landed: How many faults of each kind have hit work that was under way.
      num_events: How many messages, steps of work, faults and calls of the user there were.
    """

    def __init__(self, seed: int, faults: Faults) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.mischief = random.Random(f"mischief {seed}")
        self.faults = faults.drawn(self.random)
        self.trace: list[str] = []
        self.landed: collections.Counter[str] = collections.Counter()
        self.num_events = 0
        # Events of one moment happen in the order in which they were planned.
        self._plan: list[tuple[float, int, Action]] = []
        self._num_planned = 0

    def at(self, when: float, action: Action) -> None:
        """Plans an event."""
        self._num_planned += 1
        heapq.heappush(self._plan, (max(when, self.now), self._num_planned, action))

    def step(self) -> bool:
        """Lets the next event happen; tells whether there was one."""
        if not self._plan:
            return False
        self.now, _, action = heapq.heappop(self._plan)
        action()
        return True

    def note(self, text: str) -> None:
        """Counts an event, and writes down what it was."""
        self.num_events += 1
        self.trace.append(f"{self.now:9.4f}  {text}")

    def life(self) -> int:
        """Returns an incarnation that nobody has had."""
        return self.random.getrandbits(62) + 1
