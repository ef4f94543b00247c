"""Records which updates were applied, so that each takes effect exactly once.

Pure: no clock, no sockets, no arrays. The key of an update is its closure, its index among the
calls of that closure, and the part or optimizer that it changes; neither the attempt nor the worker
that sent it is part of the key. A repeated request, a closure that moved to another worker, and a
worker that was wrongly declared dead therefore have one effect: that of the first arrival. The
table is cleared at the start of each epoch, except for the number of the newest closure: no
coordinator may reuse a closure number.

The store calls the table under its write lock, so an update is never "in progress" when a second
copy of it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable

# (call, part) or (call, ~optimizer): parts and optimizers are numbered independently.
Key = tuple[int, int]


class AppliedUpdates:
    """The updates of closures that are not settled.

    Example:
      >>> table = AppliedUpdates()
      >>> table.is_new(7, (0, 3))
      True
      >>> table.record(7, (0, 3))
      >>> table.is_new(7, (0, 3))
      False
      >>> table.settle(8)
      >>> table.is_settled(7)
      True

    Attributes:
      settled: Closures below this number are settled; their updates are rejected.
      newest: The largest number of a closure that changed something; -1 if there is none.
    """

    __slots__ = ("_closures", "_num_entries", "newest", "settled")

    def __init__(
        self,
        settled: int = 0,
        newest: int = -1,
        entries: Iterable[tuple[int, Iterable[Key]]] = (),
    ) -> None:
        self._closures: dict[int, set[Key]] = {closure: set(keys) for closure, keys in entries}
        self._num_entries = sum(map(len, self._closures.values()))
        self.settled = settled
        self.newest = newest

    def __len__(self) -> int:
        return self._num_entries

    def entries(self) -> list[tuple[int, list[Key]]]:
        """Returns the updates of each closure that is not settled."""
        return [(closure, sorted(keys)) for closure, keys in self._closures.items()]

    def is_settled(self, closure: int) -> bool:
        """Returns whether a closure is settled, so that it may not change anything any more."""
        return closure < self.settled

    def is_new(self, closure: int, key: Key) -> bool:
        """Returns whether an update was not applied yet."""
        applied = self._closures.get(closure)
        return applied is None or key not in applied

    def has_step(self, closure: int, optimizer: int | None = None) -> bool:
        """Returns whether a closure made a step of the given optimizer, or of any."""
        applied = self._closures.get(closure, ())
        if optimizer is None:
            return any(target < 0 for _, target in applied)
        return any(target == ~optimizer for _, target in applied)

    def record(self, closure: int, key: Key) -> None:
        """Records that an update was applied."""
        applied = self._closures.get(closure)
        if applied is None:
            applied = self._closures[closure] = set()
            if closure > self.newest:
                self.newest = closure
        if key not in applied:
            applied.add(key)
            self._num_entries += 1

    def settle(self, limit: int) -> None:
        """Drops all closures below `limit`, and rejects their updates from now on."""
        if limit <= self.settled:
            return
        self.settled = limit
        for closure in [c for c in self._closures if c < limit]:
            self._num_entries -= len(self._closures.pop(closure))
