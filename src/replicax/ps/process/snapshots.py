"""Periodic snapshots of a parameter server while it serves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

from replicax.foundation import errors, runtime, spans
from replicax.ps.process.snapshot_files import GivenUpError, SnapshotDirectory
from replicax.ps.store.service import ParameterStore
from replicax.ps.store.snapshot import ChangeCounts

DEFAULT_EVERY_S = 30.0
# How long the last snapshot of a process may take.
LAST_SAVE_S = 20.0
# A cancelled save ends with the piece that is being written.
_CANCEL_S = 3.0
# New parts and optimizers are saved after this long without another creation.
_QUIET_S = 0.2
_CHECK_S = 0.1
# Pauses of a save are up to this much longer than its work, which competes with training.
_MOST_PAUSE = 19.0
# At least this much, even if the save takes longer than the interval.
_LEAST_PAUSE = 1.0
# The share of the interval that a save may take.
_SHARE = 0.9
# Work too short for a pause.
_SHORTEST_WORK_S = 0.005
_NONE = ChangeCounts(None, 0, 0, 0)

_log = logging.getLogger(__name__)


class Schedule:
    """Decides when to save. Pure: time is a parameter.

    >>> schedule = Schedule(every_s=30.0, now=0.0)
    >>> made = ChangeCounts("job", changes=1, creations=1, ended_jobs=0)
    >>> schedule.is_due(made, is_busy=False, now=1.0)
    False
    >>> schedule.is_due(made, is_busy=False, now=1.3)
    True
    """

    def __init__(self, every_s: float, now: float) -> None:
        self._every_s = every_s
        self._began_s = now
        self._has_failed = False
        self._saved = _NONE
        self._seen = _NONE
        self._seen_s = now

    def is_due(self, counts: ChangeCounts, *, is_busy: bool, now: float) -> bool:
        """Returns whether to save now.

        Args:
          counts: The change counts of the store.
          is_busy: Whether parts or optimizers are being created.
          now: The time of a monotonic clock.
        """
        if counts.creations != self._seen.creations:
            self._seen, self._seen_s = counts, now
        if not self.has_news(counts):
            return False
        if now - self._began_s >= self._every_s:
            return True
        is_urgent = counts.creations != self._saved.creations or counts.job != self._saved.job
        is_quiet = not is_busy and now - self._seen_s >= _QUIET_S
        return is_urgent and is_quiet and not self._has_failed

    def has_news(self, counts: ChangeCounts) -> bool:
        """Returns whether there are unsaved changes."""
        return counts.job is not None and counts != self._saved

    def saved(self, counts: ChangeCounts, began_s: float) -> None:
        """Records that a snapshot was saved."""
        self._saved, self._began_s, self._has_failed = counts, began_s, False

    def failed(self, now: float) -> None:
        """Records that a save failed; the next one is due after the interval."""
        self._began_s, self._has_failed = now, True


class Pace:
    """Decides how long to pause between two pieces of a snapshot. Pure: time is a parameter.

    >>> pace = Pace(limit_s=10.0, now=0.0)
    >>> pace.pause(now=0.01, done=0.5)
    0.19
    >>> pace.resumed(now=0.2)
    >>> pace.pause(now=0.201, done=0.6)
    0.0

    Args:
      limit_s: How long the snapshot may take, with shorter pauses if necessary.
      now: The time.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._until_s = now + limit_s
        self._since_s = now
        self._worked_s = 0.0

    def pause(self, now: float, done: float) -> float:
        """Returns the seconds to pause after this share of the work."""
        piece_s = now - self._since_s
        if piece_s < _SHORTEST_WORK_S or done <= 0:
            return 0.0
        self._worked_s += piece_s
        self._since_s = now
        left_s = self._worked_s * (1 / done - 1)
        affordable = (self._until_s - now - left_s) / (left_s + piece_s)
        return piece_s * min(max(affordable, _LEAST_PAUSE), _MOST_PAUSE)

    def resumed(self, now: float) -> None:
        """Records the end of a pause."""
        self._since_s = now


class Snapshots:
    """Saves snapshots of one server, in a thread of its own.

    Args:
      store: The store to save.
      directory: The directory of the snapshots; locked at once.
      every_s: The seconds between two snapshots.
      label: The name of the server in logs.
      is_busy: Returns whether parts or optimizers are being created.

    Raises:
      CheckpointError: Another process has locked the directory, or it cannot be written.
    """

    def __init__(
        self,
        store: ParameterStore,
        directory: Path,
        every_s: float,
        label: str,
        is_busy: Callable[[], bool],
    ) -> None:
        self._store = store
        self._files = SnapshotDirectory(directory)
        self._label = label
        self._is_busy = is_busy
        self._every_s = every_s
        self._schedule = Schedule(every_s, runtime.now())
        self._closing = runtime.Event()
        self._is_cancelled = False
        self._thread = runtime.Thread(target=self._run, name=f"{label}-snapshots", daemon=True)
        # The job of the files, and how many jobs had ended when they were written.
        self._job: str | None = None
        self._num_ended_jobs = 0
        self._saved_s: float | None = None
        self._number = 0
        self._num_bytes = 0
        self._seconds = 0.0
        self._num_failures = 0

    def restore(self) -> None:
        """Restores the store from the newest valid snapshot, if there is one."""
        began_s = runtime.now()
        found = self._files.load(self._store.restore)
        if found is None:
            return
        self._number, self._num_bytes = found
        self._job = self._store.job
        seconds = runtime.now() - began_s
        text = "%s restored job %r from snapshot %d: %d bytes in %.1f s"
        _log.info(text, self._label, self._job, self._number, self._num_bytes, seconds)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Saves unsaved changes in bounded time, and stops the thread. Idempotent."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_SAVE_S)
            self._is_cancelled = True
            self._thread.join(_CANCEL_S)
        self._files.close()

    def counters(self) -> dict[str, int | float]:
        """Returns the counters by name; the age is -1 if there is no snapshot."""
        saved_s = self._saved_s
        return {
            "snapshot_number": self._number,
            "snapshot_age_s": -1.0 if saved_s is None else runtime.now() - saved_s,
            "snapshot_seconds": self._seconds,
            "snapshot_bytes": self._num_bytes,
            "snapshot_failures": self._num_failures,
        }

    def _run(self) -> None:
        while not self._closing.wait(_CHECK_S):
            self._save_if_due(is_last=False)
        self._save_if_due(is_last=True)

    def _save_if_due(self, *, is_last: bool) -> None:
        """Saves a snapshot, or deletes those of an ended job, if due; never raises."""
        try:
            counts = self._store.change_counts()
            if counts.ended_jobs != self._num_ended_jobs:
                self._num_ended_jobs, self._job, self._saved_s = counts.ended_jobs, None, None
                self._files.clear()
            is_due = self._schedule.is_due(counts, is_busy=self._is_busy(), now=runtime.now())
            if is_due or (is_last and self._schedule.has_news(counts)):
                with spans.block("checkpoint", "snapshot"):
                    self._save()
        except GivenUpError:
            _log.info("%s cancelled a snapshot", self._label)
        except Exception as error:
            self._num_failures += 1
            self._schedule.failed(runtime.now())
            if isinstance(error, errors.DistributeError):
                _log.warning("%s could not save a snapshot: %s", self._label, error)
            else:
                _log.exception("%s could not save a snapshot", self._label)

    def _save(self) -> None:
        began_s = runtime.now()
        with self._store.snapshot_lock:
            cut = self._store.snapshot()
            if cut is None:
                return
            try:
                # Snapshots of another job are useless once there is one of this job.
                num_kept = 2 if cut.state.job == self._job else 1
                pace = Pace(self._every_s * _SHARE, began_s)
                is_wanted = functools.partial(self._should_continue, cut.counts, pace)
                saved = self._files.save(cut, num_kept=num_kept, is_wanted=is_wanted)
            finally:
                cut.close()
        self._number, self._num_bytes = saved
        self._job, self._saved_s = cut.state.job, began_s
        self._seconds = runtime.now() - began_s
        self._schedule.saved(cut.counts, began_s)

    def _should_continue(self, counts: ChangeCounts, pace: Pace, done: float) -> bool:
        """Pauses the save of a snapshot; returns whether to continue it."""
        pause_s = pace.pause(runtime.now(), done)
        # A closing process waits for the snapshot: no pauses.
        if pause_s and not self._closing.wait(pause_s):
            pace.resumed(runtime.now())
        return (
            not self._is_cancelled and self._store.change_counts().ended_jobs == counts.ended_jobs
        )
