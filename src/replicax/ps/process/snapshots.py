"""Saves what a parameter server keeps, again and again, while it serves."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from replicax.foundation import errors
from replicax.ps.process.snapshot_files import GivenUpError, SnapshotDirectory
from replicax.ps.store.service import ParameterStore
from replicax.ps.store.snapshot import Marks

DEFAULT_EVERY_S = 30.0
# How long the last snapshot of a process may take.
LAST_SAVE_S = 20.0
# It ends with the piece that is being written.
_GIVE_UP_S = 3.0
# Something was made, and nothing more for so long: then it is time to save it.
_QUIET_S = 0.2
_LOOK_S = 0.1
# Saving rests so much longer than it works: training needs the processor and the memory, too.
_MOST_REST = 19.0
# Also when there is more to save than fits between two snapshots.
_LEAST_REST = 1.0
# Which part of the time between two snapshots one may take.
_SHARE = 0.9
# Not worth a rest.
_SHORTEST_WORK_S = 0.005
_NOTHING = Marks(None, 0, 0, 0)

_log = logging.getLogger(__name__)


class Schedule:
    """Decides when to save. Pure: time is a parameter.

    >>> schedule = Schedule(every_s=30.0, now=0.0)
    >>> made = Marks("job", changes=1, makes=1, endings=0)
    >>> schedule.is_due(made, is_busy=False, now=1.0)
    False
    >>> schedule.is_due(made, is_busy=False, now=1.3)
    True
    """

    def __init__(self, every_s: float, now: float) -> None:
        self._every_s = every_s
        self._began_s = now
        self._has_failed = False
        self._saved = _NOTHING
        self._seen = _NOTHING
        self._seen_s = now

    def is_due(self, marks: Marks, *, is_busy: bool, now: float) -> bool:
        """Tells whether to save now.

        Args:
          marks: What the store has counted.
          is_busy: Whether it is making something.
          now: The time, of a clock that never jumps.
        """
        if marks.makes != self._seen.makes:
            self._seen, self._seen_s = marks, now
        if not self.has_news(marks):
            return False
        if now - self._began_s >= self._every_s:
            return True
        is_urgent = marks.makes != self._saved.makes or marks.job != self._saved.job
        is_quiet = not is_busy and now - self._seen_s >= _QUIET_S
        return is_urgent and is_quiet and not self._has_failed

    def has_news(self, marks: Marks) -> bool:
        """Tells whether there is anything that is not saved."""
        return marks.job is not None and marks != self._saved

    def saved(self, marks: Marks, began_s: float) -> None:
        """Notes that a snapshot was saved."""
        self._saved, self._began_s, self._has_failed = marks, began_s, False

    def failed(self, now: float) -> None:
        """Notes that a snapshot could not be saved: the next one waits for its time."""
        self._began_s, self._has_failed = now, True


class Pace:
    """Decides how long to rest between two pieces of a snapshot. Pure: time is a parameter.

    >>> pace = Pace(limit_s=10.0, now=0.0)
    >>> pace.rest(now=0.01, done=0.5)
    0.19
    >>> pace.rested(now=0.2)
    >>> pace.rest(now=0.201, done=0.6)
    0.0

    Args:
      limit_s: How long the snapshot may take, if need be with shorter rests.
      now: The time.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._until_s = now + limit_s
        self._since_s = now
        self._worked_s = 0.0

    def rest(self, now: float, done: float) -> float:
        """Returns the seconds to rest, when this share of the work is done."""
        piece_s = now - self._since_s
        if piece_s < _SHORTEST_WORK_S or done <= 0:
            return 0.0
        self._worked_s += piece_s
        self._since_s = now
        left_s = self._worked_s * (1 / done - 1)
        affordable = (self._until_s - now - left_s) / (left_s + piece_s)
        return piece_s * min(max(affordable, _LEAST_REST), _MOST_REST)

    def rested(self, now: float) -> None:
        """Notes that work goes on after a rest."""
        self._since_s = now


class Snapshots:
    """Keeps the snapshots of one server, in a thread of its own.

    Args:
      store: What to save.
      directory: Where to; it is taken at once.
      every_s: The seconds between two snapshots.
      label: What the log calls the server.
      is_busy: Tells whether the server is making something.

    Raises:
      CheckpointError: Another process has the directory, or it cannot be written.
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
        self._schedule = Schedule(every_s, time.monotonic())
        self._ending = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name=f"{label}-snapshots", daemon=True)
        # The job of the files, and how many jobs had been let go when they were written.
        self._job: str | None = None
        self._num_endings = 0
        self._saved_s: float | None = None
        self._number = 0
        self._num_bytes = 0
        self._seconds = 0.0
        self._num_failures = 0

    def restore(self) -> None:
        """Lets the store start from the newest good snapshot, if there is one."""
        began_s = time.monotonic()
        found = self._files.load(self._store.restore)
        if found is None:
            return
        self._number, self._num_bytes = found
        self._job = self._store.job
        seconds = time.monotonic() - began_s
        text = "%s has restored job %r from snapshot %d: %d bytes in %.1f s"
        _log.info(text, self._label, self._job, self._number, self._num_bytes, seconds)

    def start(self) -> None:
        """Begins to save."""
        self._thread.start()

    def close(self) -> None:
        """Saves what is not saved, in bounded time, and ends; again is harmless."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_SAVE_S)
            self._is_given_up = True
            self._thread.join(_GIVE_UP_S)
        self._files.close()

    def figures(self) -> dict[str, int | float]:
        """Returns how it is going, by name; without a snapshot, its age is -1."""
        saved_s = self._saved_s
        return {
            "snapshot_number": self._number,
            "snapshot_age_s": -1.0 if saved_s is None else time.monotonic() - saved_s,
            "snapshot_seconds": self._seconds,
            "snapshot_bytes": self._num_bytes,
            "snapshot_failures": self._num_failures,
        }

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            self._look(is_last=False)
        self._look(is_last=True)

    def _look(self, *, is_last: bool) -> None:
        """Does what is to be done now; whatever goes wrong, the server serves on."""
        try:
            marks = self._store.marks()
            if marks.endings != self._num_endings:
                self._num_endings, self._job, self._saved_s = marks.endings, None, None
                self._files.clear()
            is_due = self._schedule.is_due(marks, is_busy=self._is_busy(), now=time.monotonic())
            if is_due or (is_last and self._schedule.has_news(marks)):
                self._save()
        except GivenUpError:
            _log.info("%s gave up a snapshot", self._label)
        except Exception as error:
            self._num_failures += 1
            self._schedule.failed(time.monotonic())
            if isinstance(error, errors.DistributeError):
                _log.warning("%s could not save a snapshot: %s", self._label, error)
            else:
                _log.exception("%s could not save a snapshot", self._label)

    def _save(self) -> None:
        began_s = time.monotonic()
        with self._store.cutting:
            cut = self._store.snapshot()
            if cut is None:
                return
            try:
                # Snapshots of another job are of no use once there is one of this.
                num_kept = 2 if cut.state.job == self._job else 1
                pace = Pace(self._every_s * _SHARE, began_s)
                is_wanted = functools.partial(self._is_wanted, cut.marks, pace)
                saved = self._files.save(cut, num_kept=num_kept, is_wanted=is_wanted)
            finally:
                cut.close()
        self._number, self._num_bytes = saved
        self._job, self._saved_s = cut.state.job, began_s
        self._seconds = time.monotonic() - began_s
        self._schedule.saved(cut.marks, began_s)

    def _is_wanted(self, marks: Marks, pace: Pace, done: float) -> bool:
        """Tells whether to go on with a snapshot, when it is time to."""
        rest_s = pace.rest(time.monotonic(), done)
        # Whoever ends the process waits for the snapshot.
        if rest_s and not self._ending.wait(rest_s):
            pace.rested(time.monotonic())
        return not self._is_given_up and self._store.marks().endings == marks.endings
