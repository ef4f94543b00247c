"""What the coordinator knows of each parameter server, and when it is given up."""

from __future__ import annotations

import dataclasses
from collections import deque

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors

# The first two reports may be a blip; the third one is believed.
_NUM_REPORTS = 3
# What `mirror_state` says of a server that gives its mirror everything.
_SEEDING = 2


class Server:
    """One parameter server. Changed by the policy alone.

    Attributes:
      index: Its index in the job "ps".
      incarnation: The life of its process that holds the variables; 0 if it was not reached.
      heard_s: When it last gave a sign of life.
      loss: Why the job cannot go on without it; None while it is there.
      has_lost_variables: Whether its process was replaced by one without variables.
      is_saved: Whether it keeps snapshots, so that it can come back.
      away_s: Since when it is waited for; None if it is there, or given up.
      asked_s: When it was last asked to rejoin the job.
      reason: Why it is away, for people.
      num_returns: How often it came back.
      owed: Fences that it has not confirmed and must learn of when it comes back.
      figures: What it said of itself last.
      lonely_s: For how long it had been without its mirror when it first said so, or when the
        mirror was last waited for; None if it is not.
    """

    def __init__(self, index: int, now: float) -> None:
        self.index = index
        self.incarnation = 0
        self.heard_s = now
        self.loss: str | None = None
        self.has_lost_variables = False
        self.is_saved = False
        self.away_s: float | None = None
        self.asked_s = now
        self.reason = ""
        self.num_returns = 0
        self.owed: set[int] = set()
        self.figures: dict[str, int | float] = {}
        self.lonely_s: float | None = None
        # When it was blamed, and by which worker.
        self._reports: deque[tuple[float, int]] = deque()

    def __str__(self) -> str:
        return f"/job:ps/task:{self.index}"

    @property
    def is_away(self) -> bool:
        """Whether it is waited for."""
        return self.away_s is not None

    @property
    def is_there(self) -> bool:
        """Whether it can be asked."""
        return self.loss is None and self.away_s is None

    def is_overdue(self, timing: Timing, now: float) -> bool:
        """Tells whether it was waited for longer than was agreed."""
        return self.away_s is not None and now - self.away_s > timing.return_s

    def is_missed(self, timing: Timing, now: float) -> bool:
        """Tells whether it is waited for and silent; one that was blamed may still answer."""
        return self.is_away and now - self.heard_s >= 2 * timing.beat_s

    @property
    def is_seeding(self) -> bool:
        """Whether it gives its mirror everything, and gets on with it."""
        return self.figures.get("mirror_state") == _SEEDING and self.lonely_s is None

    def note_mirror(self, is_there: bool) -> float:
        """Looks at what it says of its mirror; returns for how long it has waited in vain.

        Args:
          is_there: Whether the mirror is; if the job waits for that one, nothing is counted.
        """
        # By its own clock, which stands still while it is at work for its mirror.
        alone_s = self.figures.get("mirror_unconfirmed_s", 0)
        if self.loss is not None or not is_there or not alone_s > 0:
            self.lonely_s = None
            return 0.0
        self.lonely_s = alone_s if self.lonely_s is None else min(self.lonely_s, alone_s)
        return alone_s - self.lonely_s

    def is_condemned(self, worker: int, num_workers: int, timing: Timing, now: float) -> bool:
        """Counts a worker's report; tells whether the server has to be believed gone.

        Reports grow old, so blips of a long run do not add up. One worker alone is not
        believed as long as there are others: the way between the two may be what broke. The
        closures of one window fail together, so reports of one beat are one report.
        """
        reports = self._reports
        while reports and now - reports[0][0] > timing.blame_s:
            reports.popleft()
        if not any(w == worker and now - when < timing.beat_s for when, w in reports):
            reports.append((now, worker))
        num_reporters = len({w for _, w in reports})
        return len(reports) >= _NUM_REPORTS and num_reporters >= min(2, num_workers)

    def has_accuser(self, worker: int) -> bool:
        """Tells whether one worker has blamed it as often as would be enough for two."""
        return sum(w == worker for _, w in self._reports) >= _NUM_REPORTS

    def error(self) -> errors.PSUnavailableError:
        """Returns a new error that says why the job cannot go on."""
        if self.has_lost_variables:
            return errors.PSIncarnationError(
                f"The variables of {self} live in its process",
                self.loss or "another process answers there",
                "Make the strategy anew and restore the variables from a checkpoint.",
            )
        return errors.PSUnavailableError(
            f"Closures need every parameter server, and {self} is one",
            self.loss or "it does not answer",
            "Look into its log; restart the job from a checkpoint if its process is gone.",
        )


@dataclasses.dataclass
class Fencing:
    """A worker's life that is being forbidden everywhere.

    Attributes:
      worker: Its index.
      incarnation: The life.
      closures: What it had, in its order; the first may have ended it.
      missing: The servers that have not confirmed yet.
      deadline_s: A server that has not confirmed by then is lost itself.
      error: If the closures are not to run again: why.
    """

    worker: int
    incarnation: int
    closures: list[Closure]
    missing: set[int]
    deadline_s: float
    error: BaseException | None = None
