"""Decides which changes were made before, so that each has its effect exactly once.

Pure: no clock, no sockets, no arrays. A change is known by its closure, by its place among the
changes of that closure, and by what it changes: not by the attempt, nor by the worker that
sent it. A repeated request, a closure that moved to another worker, and a worker that was
wrongly taken for dead all come to one effect: that of the first to arrive. The epoch is part of
the key as well, but only one is alive at a time: the table starts anew with each. The number of
the newest closure outlives epochs, so that no coordinator uses a number again.

The table is used under the lock of the store, by one thread at a time: there is no state "in
progress" that a second arrival could meet.
"""

from __future__ import annotations

from collections.abc import Iterable

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

    def __init__(
        self,
        settled: int = 0,
        newest: int = -1,
        made: Iterable[tuple[int, Iterable[Key]]] = (),
    ) -> None:
        self._closures: dict[int, set[Key]] = {closure: set(keys) for closure, keys in made}
        self._num_entries = sum(map(len, self._closures.values()))
        self.settled = settled
        self.newest = newest

    def __len__(self) -> int:
        return self._num_entries

    def made(self) -> list[tuple[int, list[Key]]]:
        """Returns the changes of each closure that is not settled, for another table."""
        return [(closure, sorted(keys)) for closure, keys in self._closures.items()]

    def is_stale(self, closure: int) -> bool:
        """Tells whether a closure is settled, so that it may change nothing any more."""
        return closure < self.settled

    def is_new(self, closure: int, key: Key) -> bool:
        """Tells whether a change was not made yet."""
        made = self._closures.get(closure)
        return made is None or key not in made

    def has_step(self, closure: int, optimizer: int | None = None) -> bool:
        """Tells whether a closure has made a step of an optimizer, or of any."""
        made = self._closures.get(closure, ())
        if optimizer is None:
            return any(changed < 0 for _, changed in made)
        return any(changed == ~optimizer for _, changed in made)

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
