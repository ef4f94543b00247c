"""The clock of a parameter server: how many steps its values have seen, and gradients lacked."""

from __future__ import annotations


class Clock:
    """Counts steps of training, and how many of them gradients lacked when they came.

    Used under the lock `changing`; `steps` may be read without it.

    >>> clock = Clock()
    >>> for _ in range(3):
    ...     clock.tick()
    >>> clock.measure(read_at=1)
    >>> clock.figures()["staleness_max"]
    2

    Attributes:
      steps: How many steps the values have seen.
      num_dropped: How many gradients were not used because they came too late.
    """

    __slots__ = ("_count", "_max", "_sum", "num_dropped", "steps")

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.num_dropped = 0
        self._sum = 0
        self._count = 0
        self._max = 0

    def tick(self) -> None:
        """Notes that the values see one more step."""
        self.steps += 1

    def measure(self, read_at: int) -> None:
        """Notes that a gradient came for values that were read when the clock said `read_at`."""
        # A server that came back with older values has an older clock, too.
        staleness = max(self.steps - read_at, 0)
        self._sum += staleness
        self._count += 1
        if staleness > self._max:
            self._max = staleness

    def figures(self) -> dict[str, int]:
        """Returns what was counted, by name."""
        return {
            "clock": self.steps,
            "staleness_sum": self._sum,
            "staleness_count": self._count,
            "staleness_max": self._max,
            "stale_dropped": self.num_dropped,
        }
