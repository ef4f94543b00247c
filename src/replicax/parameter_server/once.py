"""Decides which changes were made before, so that each has its effect exactly once.

Pure: no clock, no sockets, no arrays. A change is known by its closure, by its place among the
changes of that closure, and by what it changes: not by the attempt, nor by the worker that
sent it. A repeated request, a closure that moved to another worker, and a worker that was
wrongly taken for dead all come to one effect: that of the first to arrive. The epoch is part of
the key as well, but only one is alive at a time: the table starts anew with each.

The table is used under the lock of the store, by one thread at a time: there is no state "in
progress" that a second arrival could meet.
"""

from __future__ import annotations

# (call, part), or (call, ~optimizer): a part and an optimizer of one number are two things.
Key = tuple[int, int]


class OnceTable:
    """What was changed by closures that are not settled.

    Example:
      >>> table = OnceTable()
      >>> table.is_new(7, (0, 3))
      True
      >>> table.record(7, (0, 3))
      >>> table.is_new(7, (0, 3))
      False
      >>> table.settle(8)
      >>> table.is_stale(7)
      True

    Attributes:
      settled: Closures with smaller numbers are settled; no change of theirs is accepted.
      newest: The largest number of a closure that changed something; -1 for none.
    """

    __slots__ = ("_closures", "_num_entries", "newest", "settled")

    def __init__(self) -> None:
        self._closures: dict[int, set[Key]] = {}
        self._num_entries = 0
        self.settled = 0
        self.newest = -1

    def __len__(self) -> int:
        return self._num_entries

    def is_stale(self, closure: int) -> bool:
        """Tells whether a closure is settled, so that it may change nothing any more."""
        return closure < self.settled

    def is_new(self, closure: int, key: Key) -> bool:
        """Tells whether a change was not made yet."""
        made = self._closures.get(closure)
        return made is None or key not in made

    def record(self, closure: int, key: Key) -> None:
        """Notes that a change was made."""
        made = self._closures.get(closure)
        if made is None:
            made = self._closures[closure] = set()
            if closure > self.newest:
                self.newest = closure
        if key not in made:
            made.add(key)
            self._num_entries += 1

    def settle(self, limit: int) -> None:
        """Forgets all closures below `limit`, and refuses them from now on."""
        if limit <= self.settled:
            return
        self.settled = limit
        for closure in [c for c in self._closures if c < limit]:
            self._num_entries -= len(self._closures.pop(closure))
