"""The coordinator's record of each worker, and how many closures it may hold at a time."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping

from replicax.coordinator.scheduling.closures import Closure

# So many assigned closures hide the round trip to a worker behind quick closures. Very quick ones
# get a higher limit: as many as take about this long together.
DEFAULT_LIMIT = 8
_MAX_LIMIT = 64
_TARGET_S = 0.01
# Longer closures are assigned one by one, with one waiting, so that work spreads.
_LONG_S = 0.05
_VERY_LONG_S = 1.0
# Before its first result a worker may be compiling: few closures wait behind that.
_FIRST_LIMIT = 2
# The number of functions that the coordinator tracks per worker; the worker itself keeps more.
_NUM_FUNCTIONS = 900
# A worker reports a finished closure within this time. See Note [Poison closures].
_UNREPORTED_S = 0.5
_SMOOTHING = 0.5
_SLOW_SMOOTHING = 0.1


class WorkerState(enum.Enum):
    """The state of a worker."""

    CONNECTING = "connecting"  # at the start, and after its process is gone
    ATTACHING = "attaching"  # connected, but not yet attached to the job
    READY = "ready"  # attached to the job; idle if nothing is assigned to it
    FENCED = "fenced"  # fenced while its process may be alive: waits for a new incarnation


class Worker:
    """One worker. Only the policy changes it.

    Attributes:
      index: Its index in the job "worker".
      state: Its state.
      incarnation: The incarnation that was last connected.
      assigned: Its closures, in the order in which it runs them.
      pinned_closures: Queued closures that only this worker may run.
      functions: The functions that this incarnation has, the last used at the end.
      last_seen_s: When its last message arrived.
      ready_s: When it was last ready.
      pinned_s: When a pinned closure was last queued for it.
      since_s: When the first assigned closure may have started.
      estimate_s: The estimated duration of its closures; None if unknown.
      pace_s: A slow moving average of the same, which one outlier does not change much.
      excluded_until_s: When it may get closures again, after it failed to reach a server that
        other workers can reach.
      must_reattach: Whether its attach request failed and has to be repeated.
      is_paced: Whether it may hold one closure only; see `pacing`.
      reported_idle: The closures that were assigned when it last reported to be idle.
      counters: The counters of its last heartbeat.
      num_done: The number of closures that all its incarnations have finished.
      num_restarts: The number of times it was lost.
      reason: Why it is not ready, for messages.
    """

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.state = WorkerState.CONNECTING
        self.incarnation = 0
        self.assigned: dict[int, Closure] = {}
        self.pinned_closures: deque[Closure] = deque()
        self.functions: dict[str, None] = {}
        self.last_seen_s = now
        self.since_s = now
        self.ready_s = now
        self.pinned_s = now
        self.estimate_s: float | None = None
        self.pace_s = _TARGET_S
        self.excluded_until_s = 0.0
        self.must_reattach = False
        self.is_paced = False
        self.reported_idle: tuple[int, ...] = ()
        self.counters: Mapping[str, int | float] = {}
        self.num_done = 0
        self.num_restarts = 0
        self.reason = "it was never reached"

    def __str__(self) -> str:
        return f"/job:worker/task:{self.index}"

    @property
    def limit(self) -> int:
        """The number of closures that it may hold."""
        if self.is_paced or self._has_suspect:
            return 1
        if self.estimate_s is None:
            return _FIRST_LIMIT
        if self.estimate_s > _VERY_LONG_S:
            return 1
        if self.estimate_s > _LONG_S:
            return _FIRST_LIMIT
        return int(min(max(_TARGET_S / max(self.pace_s, 1e-6), DEFAULT_LIMIT), _MAX_LIMIT))

    @property
    def _has_suspect(self) -> bool:
        return len(self.assigned) == 1 and next(iter(self.assigned.values())).num_deaths > 0

    @property
    def is_in_use(self) -> bool:
        """Whether the job uses it, or attaches it."""
        return self.state in (WorkerState.ATTACHING, WorkerState.READY)

    @property
    def has_capacity(self) -> bool:
        """Whether it can take more closures; refilling waits until half of the limit is free."""
        return self.state is WorkerState.READY and len(self.assigned) <= self.limit // 2

    def assign(self, closures: list[Closure], now: float) -> None:
        """Records that closures were sent to it."""
        if not self.assigned:
            self.since_s = now
        for closure in closures:
            self.assigned[closure.id] = closure

    def suspects(self, now: float) -> list[Closure]:
        """Returns the closures that may have killed it. See Note [Poison closures]."""
        closures = list(self.assigned.values())
        return closures if now - self.since_s < _UNREPORTED_S else closures[:1]

    def record_finished(self, count: int, now: float) -> None:
        """Updates its estimates after `count` closures have finished since the last call."""
        spent_s = (now - self.since_s) / count
        self.since_s = now
        self.num_done += count
        old = self.estimate_s
        self.pace_s += _SLOW_SMOOTHING * (spent_s - self.pace_s)
        # Down at once: the first closure may have compiled. Up in steps: one may be an outlier.
        if old is None or spent_s < old:
            self.estimate_s = spent_s
        else:
            self.estimate_s = old + _SMOOTHING * (spent_s - old)

    def overdue_closure(self, now: float) -> Closure | None:
        """Returns the running closure if it has exceeded its deadline."""
        running = next(iter(self.assigned.values()), None)
        if running is None or running.deadline_s is None:
            return None
        return running if now - self.since_s > running.deadline_s else None

    def needs_function(self, sha: str) -> bool:
        """Returns whether a function has to be sent to it, and records it as sent."""
        functions = self.functions
        if sha in functions:
            if next(reversed(functions)) != sha:
                functions[sha] = functions.pop(sha)
            return False
        functions[sha] = None
        if len(functions) > _NUM_FUNCTIONS:
            del functions[next(iter(functions))]
        return True

    def begin_incarnation(self, incarnation: int, now: float) -> None:
        """Resets the record for a new process."""
        self.incarnation = incarnation
        self.state = WorkerState.ATTACHING
        self.functions.clear()
        self.must_reattach = False
        self.estimate_s = None
        self.pace_s = _TARGET_S
        self.last_seen_s = now
        self.reason = "it is not attached to the job yet"
