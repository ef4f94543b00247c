"""The coordinator's record of each parameter server."""

from __future__ import annotations

from collections import deque

from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors

# The first two reports may be caused by a short disturbance.
_NUM_REPORTS = 3
# The value of the counter `mirror_state` while a server sends its mirror a full copy.
_SEEDING = 2


class Server:
    """One parameter server. Only the policy changes it.

    Attributes:
      index: Its index in the job "ps".
      incarnation: The incarnation that holds the variables; 0 before it was connected.
      last_seen_s: When its last message arrived.
      loss: Why the job cannot continue without it; None while it is not lost.
      has_lost_variables: Whether its process was replaced by one without variables.
      is_saved: Whether it keeps snapshots, so that it can recover.
      away_since_s: When the job began to wait for its recovery; None if it does not.
      rejoin_sent_s: When it was last asked to rejoin the job.
      reason: Why it is away, for messages.
      num_returns: The number of times it recovered.
      pending_fences: Incarnations of workers that it has to fence before it is used again.
      counters: The counters of its last heartbeat.
      unmirrored_s: Its counter `mirror_unconfirmed_s` when it first missed its mirror, or when the
        mirror was last away; None if the mirror confirms changes.
    """

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.incarnation = 0
        self.last_seen_s = now
        self.loss: str | None = None
        self.has_lost_variables = False
        self.is_saved = False
        self.away_since_s: float | None = None
        self.rejoin_sent_s = now
        self.reason = ""
        self.num_returns = 0
        self.pending_fences: set[int] = set()
        self.counters: dict[str, int | float] = {}
        self.unmirrored_s: float | None = None
        # Reports of workers that could not reach it: when, and by which worker.
        self._reports: deque[tuple[float, int]] = deque()

    def __str__(self) -> str:
        return f"/job:ps/task:{self.index}"

    @property
    def is_away(self) -> bool:
        """Whether the job waits for its recovery."""
        return self.away_since_s is not None

    @property
    def is_available(self) -> bool:
        """Whether it is neither lost nor away."""
        return self.loss is None and self.away_since_s is None

    def is_overdue(self, timing: Timing, now: float) -> bool:
        """Returns whether it has been away for longer than allowed."""
        return self.away_since_s is not None and now - self.away_since_s > timing.return_s

    def is_silent(self, timing: Timing, now: float) -> bool:
        """Returns whether it is away and does not reply; a reported server may still reply."""
        return self.is_away and now - self.last_seen_s >= 2 * timing.beat_s

    @property
    def is_seeding(self) -> bool:
        """Whether it sends its mirror a full copy, and makes progress with it."""
        return self.counters.get("mirror_state") == _SEEDING and self.unmirrored_s is None

    def update_unmirrored(self, is_mirror_available: bool) -> float:
        """Returns for how long its mirror has not confirmed changes though it is available."""
        # By the server's own clock, which stops while it sends its mirror a copy.
        alone_s = self.counters.get("mirror_unconfirmed_s", 0)
        if self.loss is not None or not is_mirror_available or not alone_s > 0:
            self.unmirrored_s = None
            return 0.0
        self.unmirrored_s = (
            alone_s if self.unmirrored_s is None else min(self.unmirrored_s, alone_s)
        )
        return alone_s - self.unmirrored_s

    def add_report(self, worker: int, num_workers: int, timing: Timing, now: float) -> bool:
        """Adds the report of a worker that got no reply; returns whether it is unreachable.

        Reports expire, so that short disturbances of a long run do not add up. Reports of a
        single worker do not suffice while there are others: only the connection between the
        two may be broken. The closures assigned to a worker fail together, so its reports
        within one heartbeat count as one.
        """
        reports = self._reports
        while reports and now - reports[0][0] > timing.blame_s:
            reports.popleft()
        if not any(w == worker and now - when < timing.beat_s for when, w in reports):
            reports.append((now, worker))
        num_reporters = len({w for _, w in reports})
        return len(reports) >= _NUM_REPORTS and num_reporters >= min(2, num_workers)

    def has_repeated_reporter(self, worker: int) -> bool:
        """Returns whether a single worker has made as many reports as suffice from two."""
        return sum(w == worker for _, w in self._reports) >= _NUM_REPORTS

    def error(self) -> errors.PSUnavailableError:
        """Returns a new error that explains why the job cannot continue."""
        if self.has_lost_variables:
            return errors.PSIncarnationError(
                f"{self} has lost its variables: {self.loss or 'its process was replaced'}. "
                "Create the strategy again and restore the variables from a checkpoint."
            )
        return errors.PSUnavailableError(
            f"{self} is lost, and closures need every parameter server: "
            f"{self.loss or 'it does not reply'}. Read its log; restart the job from a "
            "checkpoint if its process is gone."
        )
