"""When to restart what has ended, and when to give up. Pure: time is a parameter."""

from __future__ import annotations

import collections


class Backoff:
    """Decides when to restart a process or a group.

    It counts the restarts in a sliding window: a job that runs for months may restart any number of
    times, and one that fails at once again and again may not.

    Args:
      most: At most this many restarts in one window.
      window_s: The seconds of the window.
      longest_s: The longest pause before a restart.

    Example:
      >>> backoff = Backoff()
      >>> [backoff.next(100.0) for _ in range(6)]
      [100.2, 100.4, 100.8, 101.6, 103.2, None]
      >>> backoff.next(200.0)
      200.2
    """

    # The pause before the first restart in a window; it doubles with each one up to the longest.
    FIRST_S = 0.2
    LONGEST_S = 5.0
    MOST = 5
    WINDOW_S = 60.0

    def __init__(
        self,
        most: int | None = None,
        window_s: float | None = None,
        longest_s: float | None = None,
    ) -> None:
        self.most = self.MOST if most is None else most
        self.window_s = self.WINDOW_S if window_s is None else window_s
        self._longest_s = self.LONGEST_S if longest_s is None else longest_s
        self._times: collections.deque[float] = collections.deque()

    def next(self, now: float) -> float | None:
        """Returns when to restart; None if it was restarted too often."""
        while self._times and self._times[0] <= now - self.window_s:
            self._times.popleft()
        if len(self._times) >= self.most:
            return None
        pause = min(self.FIRST_S * 2 ** min(len(self._times), 60), self._longest_s)
        self._times.append(now)
        return now + pause
