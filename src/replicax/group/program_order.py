"""Compares the order in which the members dispatch programs."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence


class ProgramOrder:
    """The programs that each member has dispatched and not all have confirmed yet.

    Example:
      >>> order = ProgramOrder(2)
      >>> order.add(0, 0, [7, 7, 8])
      >>> order.add(1, 0, [7])
      >>> order.add(1, 1, [8])
      (1, 0, 7, 1, 8)
    """

    def __init__(self, count: int) -> None:
        self._programs = [collections.deque[int]() for _ in range(count)]
        # The position of the first kept program, the same for all members.
        self._start = 0
        self._has_gap = False

    def add(
        self, index: int, position: int, programs: Sequence[int]
    ) -> tuple[int, int, int, int, int] | None:
        """Adds programs of a member, which may repeat earlier ones.

        Returns:
          The first difference: its position, a member and its program, another member and its
          program. None if there is none so far.
        """
        mine = self._programs[index]
        if position > self._start + len(mine):
            self._has_gap = True  # Heartbeats were lost with their connection.
        if self._has_gap:
            return None
        mine.extend(programs[max(self._start + len(mine) - position, 0) :])
        self._drop_equal()
        fronts = [(i, each[0]) for i, each in enumerate(self._programs) if each]
        for i, program in fronts[1:]:
            if program != fronts[0][1]:
                return self._start, *fronts[0], i, program
        return None

    def _drop_equal(self) -> None:
        shortest = min(map(len, self._programs))
        for _ in range(shortest):
            first = self._programs[0][0]
            if any(each[0] != first for each in self._programs):
                return
            for each in self._programs:
                each.popleft()
            self._start += 1

    def position(self, index: int) -> int:
        """Returns the number of programs that a member has dispatched."""
        return self._start + len(self._programs[index])

    def at(self, index: int, position: int) -> int | None:
        """Returns the program that a member has dispatched at a position; None if it is unknown."""
        kept = self._programs[index]
        found = position - self._start
        return kept[found] if 0 <= found < len(kept) and not self._has_gap else None

    def behind(self) -> list[int]:
        """Returns the members that have dispatched the fewest programs, if not all have."""
        positions = [self.position(i) for i in range(len(self._programs))]
        least = min(positions)
        behind = [i for i, position in enumerate(positions) if position == least]
        return [] if len(behind) == len(positions) else behind

    def waiting(self, index: int) -> list[int]:
        """Returns the programs that others have dispatched and a member has not."""
        own = len(self._programs[index])
        longest = max(self._programs, key=len)
        return list(itertools.islice(longest, own, own + 10))
