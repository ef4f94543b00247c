"""`CheckpointManager`: numbered checkpoints in a directory, the old ones removed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, SupportsFloat, SupportsInt

import msgspec
import numpy as np

from replicax.bundle import names, publishing
from replicax.bundle.manifest import CHECKPOINT
from replicax.bundle.writers import Writers
from replicax.checkpointing.background import BackgroundWork
from replicax.checkpointing.checkpoint import Checkpoint
from replicax.checkpointing.directory import WriterLock, steps_in
from replicax.checkpointing.manifest import SavedCheckpoint
from replicax.checkpointing.retention import Policy, Record
from replicax.checkpointing.snapshot import Snapshot
from replicax.checkpointing.status import RestoreStatus
from replicax.foundation import errors, peers

_logger = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a `Checkpoint` under increasing numbers, keeps the newest, restores the last good one.

    Only one process may manage a directory, until `close()` or its end. The workers of a strategy
    over several processes manage it together: all of them make the same calls, in the same order;
    the chief decides and writes, in the directory that it was given. It must be one that all
    workers can read.

    Args:
      checkpoint: What to save.
      directory: The directory of the checkpoints; created if it does not exist.
      max_to_keep: How many checkpoints to keep; None keeps all.
      keep_checkpoint_every_n_hours: Also keeps one checkpoint for each such period.
      checkpoint_name: The prefix of the name of each checkpoint.
      step_counter: A variable or number that counts steps; needed for `checkpoint_interval`.
      checkpoint_interval: `save` does nothing until so many steps after the last save.
      init_fn: Called by `restore_or_initialize` if there is no checkpoint.
      keep_every_n_steps: Also keeps those whose number is a multiple of this.
      keep_best: Also keeps so many with the best value of `best_metric`.
      best_metric: A name from the `metrics` given to `save`; "-loss" if less is better.
      save_async: Whether `save` returns after copying the values and writes in the background.

    Raises:
      InvalidArgumentError: `checkpoint_name` is a path, or an interval has no `step_counter`.

    >>> import replicax as rx, tempfile
    >>> v = rx.Variable(1.0)
    >>> with CheckpointManager(Checkpoint(v=v), tempfile.mkdtemp(), max_to_keep=2) as manager:
    ...     for _ in range(3):
    ...         path = manager.save()
    ...     [path.rsplit("/", 1)[1] for path in manager.checkpoints]
    ['ckpt-2', 'ckpt-3']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: SupportsInt | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        keep_every_n_steps: int | None = None,
        keep_best: int = 0,
        best_metric: str | None = None,
        save_async: bool = False,
    ) -> None:
        self._policy = Policy(
            max_to_keep, keep_every_n_steps, keep_checkpoint_every_n_hours, keep_best, best_metric
        )
        _require_name(checkpoint_name)
        if checkpoint_interval is not None and step_counter is None:
            raise errors.InvalidArgumentError(
                "`checkpoint_interval` needs something that counts steps",
                "`step_counter` is not given",
                "Pass step_counter=optimizer.iterations, or a variable of your own.",
            )
        self._checkpoint = checkpoint
        self._directory = Path(directory)
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._last_saved_at: int | None = None
        self._init_fn = init_fn
        self._is_async = save_async
        self._work = BackgroundWork()
        # Whether a save in the background may have an outcome that not all workers know.
        self._is_unconfirmed = False
        self._writers: Writers | None = None
        # The finished checkpoints that all workers know of; None if this process is alone.
        self._agreed: dict[int, str] | None = None
        # Host memory of the last save, reused by the next one.
        self._spare: np.ndarray | None = None
        # The records of the checkpoints that this manager has saved or read.
        self._known: dict[int, Record] = {}
        self._lock = WriterLock(self._directory)
        # Without a variable, it is not known yet whether other workers manage the directory too.
        if self._together().is_alone and peers.of_process() is None:
            self._open(Writers(None))

    def _together(self) -> Writers:
        """Returns the workers that manage the directory, once they are known."""
        if self._writers is None:
            writers = self._checkpoint.writers()
            if writers.is_alone:
                return writers
            self._writers = writers
            self._open(writers)
        return self._writers

    def _open(self, writers: Writers) -> None:
        """Locks the directory and removes what dead writers left."""

        def lock() -> tuple[str, dict[int, str]]:
            if self._lock.acquire():
                publishing.remove_leftovers(self._directory)
            if writers.is_alone:
                return "", {}
            return os.path.abspath(self._directory), self._found()

        directory, found = writers.from_chief("CheckpointManager", lock, tuple[str, dict[int, str]])
        if not writers.is_alone:
            if os.path.abspath(self._directory) != directory:
                _logger.info("Checkpoints are in %s, the directory of the chief", directory)
                self._directory = Path(directory)
            self._agreed = found

    def _found(self) -> dict[int, str]:
        """Returns the finished checkpoints on disk, by number."""
        return {step: str(path) for step, path in steps_in(self._directory, self._name).items()}

    def __repr__(self) -> str:
        return f"<rx.train.CheckpointManager of {self._checkpoint!r} in {self.directory!r}>"

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return str(self._directory)

    @property
    def checkpoint_interval(self) -> int | None:
        """The least number of steps between two saves."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the finished checkpoints, the newest last."""
        return [str(path) for path in self._steps().values()]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest finished checkpoint."""
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> str | None:
        """Path of the checkpoint with the best metric."""
        steps = self._steps()
        best = self._policy.best(self._records(steps))
        return str(steps[best[0].step]) if best else None

    def _steps(self) -> dict[int, Path]:
        if self._agreed is not None:
            return {step: Path(path) for step, path in self._agreed.items()}
        self._work.raise_error()
        return steps_in(self._directory, self._name)

    # Saving.

    def save(
        self,
        checkpoint_number: SupportsInt | None = None,
        check_interval: bool = True,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        asynchronous: bool | None = None,
    ) -> str | None:
        """Saves a checkpoint and removes those that have expired.

        Args:
          checkpoint_number: Its number, such as the step; by default one more than the last.
          check_interval: Whether to do nothing if `checkpoint_interval` is not over yet.
          metrics: Numbers to save with it.
          asynchronous: Whether to write in the background; `save_async` is the default.
            The values are copied before this returns. An error in the background is
            raised by the next call, on all workers.

        Returns:
          The path of the checkpoint, or None if it was not time yet.

        Raises:
          CheckpointError: The directory cannot be written.
        """
        writers = self._together()
        now = None if self._step_counter is None else int(self._step_counter)
        given = None if checkpoint_number is None else int(checkpoint_number)
        plan = writers.from_chief(
            "CheckpointManager.save", lambda: self._plan(now, given, check_interval), _Plan
        )
        self._is_unconfirmed = False
        if plan.number is None:
            return None
        number, path = plan.number, Path(plan.path)
        is_async = self._is_async if asynchronous is None else asynchronous
        spare, self._spare = self._spare, None
        taken = self._checkpoint.take_snapshot(
            "CheckpointManager.save", number, path, writers, is_copied=is_async, spare=spare
        )
        # Free again when the next save starts, which waits for this one.
        self._spare = taken.memory
        measured = {name: float(value) for name, value in (metrics or {}).items()}
        if is_async:
            self._is_unconfirmed = not writers.is_alone
            if self._is_unconfirmed:
                self._agreed = dict(plan.steps)
            if writers.is_chief:
                self._work.start(lambda: _delete(self._write(taken, path, number, measured)))
        else:
            self._write_now(taken, path, number, measured, writers)
        self._last_saved_at = now
        return str(path)

    def _plan(self, now: int | None, number: int | None, check_interval: bool) -> _Plan:
        """Decides whether and where to save; only the chief does."""
        self._work.wait()
        if check_interval and not self._is_due(now):
            return _Plan(None, "", {})
        if not self._lock.acquire():
            denied = PermissionError("it can only be read by this process")
            raise publishing.cannot_write(self._directory, denied, CHECKPOINT)
        steps = self._found()
        number = self._number(number, steps)
        return _Plan(number, str(self._directory / f"{self._name}-{number}"), steps)

    def _write_now(
        self,
        taken: Snapshot,
        path: Path,
        number: int,
        metrics: Mapping[str, float],
        writers: Writers,
    ) -> None:
        def write() -> dict[int, str]:
            expired = self._write(taken, path, number, metrics)
            if expired:
                # They are hidden already; freeing their space takes a while.
                self._work.start(lambda: _delete(expired))
            return {} if writers.is_alone else self._found()

        found = writers.from_chief("CheckpointManager.save to disk", write, dict[int, str])
        if not writers.is_alone:
            self._agreed = found

    def _is_due(self, now: int | None) -> bool:
        if self._interval is None or now is None or self._last_saved_at is None:
            return True
        return now - self._last_saved_at >= self._interval

    def _number(self, given: int | None, steps: Mapping[int, str]) -> int:
        if given is None:
            # A program that did not restore must not replace earlier checkpoints.
            return max(int(self._checkpoint.save_counter), *steps, 0) + 1
        if given < 0:
            raise errors.InvalidArgumentError(
                "`checkpoint_number` must be 0 or more", f"it is {given}", "Pass the step."
            )
        return given

    def _write(
        self, taken: Snapshot, path: Path, number: int, metrics: Mapping[str, float]
    ) -> list[Path]:
        """Writes a checkpoint; returns what is left of those that have expired."""
        taken.write(path, number, metrics)
        self._known[number] = Record(number, time.time(), metrics)
        steps = steps_in(self._directory, self._name)
        expired = self._policy.expired(self._records(steps))
        return [publishing.put_aside(steps[step]) for step in expired if step != number]

    def _records(self, steps: Mapping[int, Path]) -> list[Record]:
        """Returns the records of checkpoints; that of a damaged one has its number only.

        Manifests are read once, and only if the policy needs more than numbers.
        """
        if self._policy.needs_only_numbers:
            return [Record(step) for step in steps]
        for step, path in steps.items():
            if step in self._known:
                continue
            self._known[step] = Record(step)
            with contextlib.suppress(errors.CheckpointError), SavedCheckpoint(path) as saved:
                self._known[step] = Record(step, saved.saved_at, saved.metrics)
        return [self._known[step] for step in steps]

    def wait(self) -> None:
        """Waits for a save in the background; raises its error."""
        if self._is_unconfirmed:
            self._confirm()
        else:
            self._work.wait()

    sync = wait

    def _confirm(self) -> None:
        """Waits for the chief; tells all workers which checkpoints there are, or its error."""

        def finish() -> dict[int, str]:
            self._work.wait()
            return self._found()

        self._is_unconfirmed = False
        writers = self._together()
        self._agreed = writers.from_chief("CheckpointManager.wait", finish, dict[int, str])

    def close(self) -> None:
        """Waits for a save in the background and releases the directory."""
        self._spare = None
        try:
            self.wait()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # The other workers may not come here.
            self._is_unconfirmed = False
        self.close()

    # Restoring.

    def restore_latest(self) -> RestoreStatus:
        """Restores the newest checkpoint that is not damaged.

        A damaged one is skipped with a warning, and listed in `status.fallbacks`. Without any
        checkpoint nothing happens, and the path of the status is None.

        Raises:
          DataLossError: All checkpoints are damaged.
        """
        writers = self._together()
        if writers.is_alone:
            self._work.wait()
        else:
            self._confirm()
        steps = self._steps()
        failed: list[tuple[str, errors.CheckpointError]] = []
        for step, path in reversed(steps.items()):
            try:
                status = self._checkpoint.restore(path)
            except errors.CheckpointError as error:
                failed.append((str(path), error))
                continue
            for bad, error in failed:
                _logger.warning(
                    "Restored %s (step %d) instead of %s, which cannot be used: %s",
                    path,
                    step,
                    bad,
                    error,
                )
            status.fallbacks = failed
            self._last_saved_at = None if self._step_counter is None else int(self._step_counter)
            return status
        if failed:
            reasons = "; ".join(str(error) for _, error in failed)
            raise errors.DataLossError(
                f"One of the {len(failed)} checkpoints in {self._directory} must be whole",
                f"none is: {reasons}",
                "Copy them again from their source, or start in another directory.",
            ) from failed[0][1]
        return self._checkpoint.restore(None)

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is not damaged; without any, calls `init_fn`.

        Returns:
          The path that was restored, or None.
        """
        path = self.restore_latest().path
        if path is None and self._init_fn is not None:
            self._init_fn()
        return path


class _Plan(msgspec.Struct):
    """What the chief has decided about a save.

    Attributes:
      number: The number of the checkpoint; None if it is not time yet.
      path: The checkpoint.
      steps: The finished checkpoints before this one.
    """

    number: int | None
    path: str
    steps: dict[int, str]


def _delete(paths: list[Path]) -> None:
    """Deletes hidden checkpoints."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _require_name(name: str) -> None:
    try:
        names.require_name(name)
        is_good = "/" not in name and publishing.TEMPORARY not in name
    except ValueError:
        is_good = False
    if not is_good:
        raise errors.InvalidArgumentError(
            "`checkpoint_name` must be a plain file name", f"it is {name!r}", 'Try "ckpt".'
        )
