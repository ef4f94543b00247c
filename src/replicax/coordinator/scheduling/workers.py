"""What the coordinator knows of each worker, and how many closures it may hold at a time."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from replicax.coordinator.scheduling.closures import Closure

# A window this large hides the way to a worker and back behind quick closures. For very quick
# ones it holds more: as many as take about this long.
WINDOW = 8
_LARGEST_WINDOW = 64
_WINDOW_S = 0.01
# Longer closures are handed out one by one, with one waiting, so that work spreads.
_LONG_S = 0.05
_VERY_LONG_S = 1.0
# Before its first result a worker may be compiling: little is put behind that.
_FIRST_WINDOW = 2
# The coordinator remembers which functions a worker has; the worker itself keeps more.
_NUM_FUNCTIONS = 900
# What a worker has finished, it has reported after this time. See Note [Who is to blame].
_UNREPORTED_S = 0.5
_SMOOTHING = 0.5
_SLOW_SMOOTHING = 0.1


class WorkerState(enum.Enum):
    """What a worker can be used for."""

    CONNECTING = "connecting"  # at the start, and when its process is gone
    ATTACHING = "attaching"  # when it was reached, until it has joined the job
    READY = "ready"  # has joined the job; is idle if its window is empty
    FENCED = "fenced"  # was given up while its process may live: waits for a new incarnation


class Worker:
    """One worker. Changed by the policy alone.

    Attributes:
      index: Its index in the job "worker".
      state: What it can be used for.
      incarnation: The life of its process that was reached last.
      window: The closures that it has, in the order in which it runs them.
      errands: Closures that only this worker may run.
      functions: The functions that this life of it has, the last used at the end.
      heard_s: When it last gave a sign of life.
      ready_s: When it was last ready.
      asked_s: When it was last given an errand.
      since_s: Since when the first closure of the window may be running.
      estimate_s: How long its closures take; None if that is not known.
      pace_s: The same on a long average, which one odd report does not change much.
      benched_s: Until when it gets nothing, because it cannot reach a server that others can.
      is_refused: Whether it has refused to join, and is to be asked again.
      is_paced: Whether it may hold one closure only; see `pacing`.
      seen_idle: Its window when it last said that it has nothing to do.
      figures: What it said of itself with its last beat.
      num_done: How many closures it has finished, over all its lives.
      num_restarts: How often it was lost.
      reason: Why it is not ready, for people.
    """

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.state = WorkerState.CONNECTING
        self.incarnation = 0
        self.window: dict[int, Closure] = {}
        self.errands: deque[Closure] = deque()
        self.functions: dict[str, None] = {}
        self.heard_s = now
        self.since_s = now
        self.ready_s = now
        self.asked_s = now
        self.estimate_s: float | None = None
        self.pace_s = _WINDOW_S
        self.benched_s = 0.0
        self.is_refused = False
        self.is_paced = False
        self.seen_idle: tuple[int, ...] = ()
        self.figures: Mapping[str, int | float] = {}
        self.num_done = 0
        self.num_restarts = 0
        self.reason = "it was never reached"

    def __str__(self) -> str:
        return f"/job:worker/task:{self.index}"

    @property
    def limit(self) -> int:
        """How many closures it may hold."""
        if self.is_paced or self._has_suspect:
            return 1
        if self.estimate_s is None:
            return _FIRST_WINDOW
        if self.estimate_s > _VERY_LONG_S:
            return 1
        if self.estimate_s > _LONG_S:
            return _FIRST_WINDOW
        return int(min(max(_WINDOW_S / max(self.pace_s, 1e-6), WINDOW), _LARGEST_WINDOW))

    @property
    def _has_suspect(self) -> bool:
        return len(self.window) == 1 and next(iter(self.window.values())).num_deaths > 0

    @property
    def is_hungry(self) -> bool:
        """Whether it is ready and at least half of its window is free."""
        return self.state is WorkerState.READY and len(self.window) <= self.limit // 2

    def assign(self, closures: list[Closure], now: float) -> None:
        """Notes that closures were sent to it."""
        if not self.window:
            self.since_s = now
        for closure in closures:
            self.window[closure.id] = closure

    def suspects(self, now: float) -> list[Closure]:
        """Returns the closures that may have ended it. See Note [Who is to blame]."""
        closures = list(self.window.values())
        return closures if now - self.since_s < _UNREPORTED_S else closures[:1]

    def note_finished(self, count: int, now: float) -> None:
        """Learns from `count` closures that were finished since the last time."""
        spent_s = (now - self.since_s) / count
        self.since_s = now
        self.num_done += count
        old = self.estimate_s
        self.pace_s += _SLOW_SMOOTHING * (spent_s - self.pace_s)
        # Down at once: the first closure may have compiled. Up in steps: one may be odd.
        if old is None or spent_s < old:
            self.estimate_s = spent_s
        else:
            self.estimate_s = old + _SMOOTHING * (spent_s - old)

    def late_closure(self, now: float) -> Closure | None:
        """Returns the closure that runs, if it has run for longer than its deadline."""
        running = next(iter(self.window.values()), None)
        if running is None or running.deadline_s is None:
            return None
        return running if now - self.since_s > running.deadline_s else None

    def needs_function(self, sha: str) -> bool:
        """Tells whether a function has to be sent to it; from now on it has it."""
        functions = self.functions
        if sha in functions:
            if next(reversed(functions)) != sha:
                functions[sha] = functions.pop(sha)
            return False
        functions[sha] = None
        if len(functions) > _NUM_FUNCTIONS:
            del functions[next(iter(functions))]
        return True

    def begin_life(self, incarnation: int, now: float) -> None:
        """Notes that a process was reached of which nothing is known."""
        self.incarnation = incarnation
        self.state = WorkerState.ATTACHING
        self.functions.clear()
        self.is_refused = False
        self.estimate_s = None
        self.pace_s = _WINDOW_S
        self.heard_s = now
        self.reason = "it has not joined the job yet"
