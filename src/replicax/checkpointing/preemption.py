"""Saving at one common step when a worker will be preempted, and continuing after the restart.

In a group the workers choose a common step (`preemption_sync.py`). With a grace period they save
there, train on, and decide before each step together whether the time is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from replicax.bundle.writers import Writers
from replicax.checkpointing import preemption_notice
from replicax.checkpointing.checkpoint import Checkpoint
from replicax.checkpointing.manager import CheckpointManager
from replicax.checkpointing.preemption_notice import Notice, Poller
from replicax.checkpointing.preemption_sync import SyncPoint
from replicax.foundation import errors, peers

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

# The exit code of a process that has saved and wants to be restarted, as in TensorFlow.
RESTART_EXIT_CODE = 42
# The name in the checkpoint of the number of calls of `run`, as in TensorFlow.
_RUNS = "checkpointed_runs"
# How many steps before the end of the grace period the last save begins: a worker may have to wait
# for a step of the others, and estimates are rough.
_STEPS_BEFORE_END = 6


class _ClusterSpec(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


class _ClusterResolver(Protocol):
    """The part of a cluster resolver that is used here."""

    def cluster_spec(self) -> _ClusterSpec: ...


@dataclasses.dataclass
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` learns of a preemption, and ends the program.

    Args:
      termination_watcher_fn: Called each second, in a thread; returns whether the platform has
        given notice. Must not block. By default, SIGTERM is the notice.
      exit_fn: Called when the last checkpoint is on disk; by default it ends the process with exit
        code 42, which asks a supervisor for a restart.
      grace_period: The seconds from the notice to the end of the machine. With a positive number
        training continues until they are nearly over; by default the program ends at once.
      save_fn: Saves, instead of the checkpoint manager. All workers call it.

    >>> TerminationConfig(grace_period=60).grace_period
    60
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None


class PreemptionCheckpointHandler:
    """Saves a checkpoint on all workers when one of them is preempted, and ends the program.

    Restores the newest checkpoint when it is created, so a restarted program continues. In a group
    of workers all of them save at one common step. A process on its own handles SIGTERM itself.

    Each call of `run` is a step. The state is saved before a step begins: pass an iterator to the
    step rather than an element of it, which would be taken before and lost.

    Args:
      cluster_resolver: The cluster resolver of the strategy, or None.
      checkpoint_or_checkpoint_manager: What to save. A Checkpoint gets a manager that keeps one
        checkpoint.
      checkpoint_dir: The directory for a Checkpoint; all workers must be able to read it.
      termination_config: Changes how notices arrive, how to save, and how to end.

    Raises:
      InvalidArgumentError: If a Checkpoint is given without a directory.
      UnsupportedError: If the cluster has parameter servers.
      ArgumentTypeError: If something else is to be saved.

    >>> import replicax as rx, tempfile
    >>> step = rx.Variable(0)
    >>> handler = PreemptionCheckpointHandler(
    ...     None, rx.train.Checkpoint(step=step), tempfile.mkdtemp()
    ... )
    >>> while handler.total_run_calls < 3:
    ...     _ = handler.run(step.assign_add, 1)
    >>> int(step)
    3
    """

    def __init__(
        self,
        cluster_resolver: _ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        _require_no_servers(cluster_resolver)
        self._config = termination_config or TerminationConfig()
        given = checkpoint_or_checkpoint_manager
        self._checkpoint = given.checkpoint if isinstance(given, CheckpointManager) else given
        _require_savable(given, checkpoint_dir)
        # The group of this process, also if the checkpoint has no variable of it yet.
        writers = Writers(peers.of_process())
        if not writers.is_alone:
            preemption_notice.watch_signal_in_group()
        if not hasattr(self._checkpoint, _RUNS):
            setattr(self._checkpoint, _RUNS, 0)
        self._owns_manager = not isinstance(given, CheckpointManager)
        if isinstance(given, CheckpointManager):
            self._manager = given
        else:
            self._manager = CheckpointManager(given, checkpoint_dir or "", max_to_keep=1)
        self._manager.restore_or_initialize()
        self._num_runs = int(getattr(self._checkpoint, _RUNS))
        self._num_timed = 0
        self._step_s = self._save_s = 0.0
        # When to save for the last time, on the monotonic clock; None if no grace period runs.
        self._ends_at: float | None = None
        self._poller: Poller | None = None
        self._notices = self._watch(writers)

    def _watch(self, writers: Writers) -> _Notices:
        ask = self._config.termination_watcher_fn
        if not writers.is_alone:
            if ask is not None:
                self._poller = Poller(ask, preemption_notice.signal_this_process)
            return _GroupNotices(writers, self._num_runs)
        if ask is None:
            return _OwnNotices(preemption_notice.watch_signal(self))
        notice = Notice()
        self._poller = Poller(ask, notice.receive)
        return _OwnNotices(notice)

    def __repr__(self) -> str:
        return f"<rx.experimental.PreemptionCheckpointHandler after {self._num_runs} runs>"

    @property
    def total_run_calls(self) -> int:
        """The number of calls of `run`, with those before the last restart."""
        return self._num_runs

    def run(self, distributed_train_function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Calls a function that trains one step; saves and ends the program before it if preempted.

        An error of the function on one worker ends the training of all: the other workers raise an
        error that names this worker.

        Returns:
          What the function returns.
        """
        self._save_if_preempted((), {})
        begun = time.monotonic()
        result = distributed_train_function(*args, **kwargs)
        self._num_timed += 1
        self._step_s += (time.monotonic() - begun - self._step_s) / min(self._num_timed, 100)
        self._count_run()
        return result

    def _count_run(self) -> None:
        self._num_runs += 1
        # Also for checkpoints that the program saves itself.
        setattr(self._checkpoint, _RUNS, self._num_runs)

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and ends the program if a worker is preempted; in the place of `run`.

        To be called once per step, after the step and the change of all counters.

        Args:
          *args: Arguments of `CheckpointManager.save`, or of `save_fn`.
          **kwargs: More of them.
        """
        self._save_if_preempted(args, kwargs)
        self._count_run()

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A context for a training loop that calls `run`; `run` does all that is needed."""
        yield

    def _save_if_preempted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ends_at is None:
            told_s_ago = self._notices.reached(self._num_runs)
            if told_s_ago is None:
                return
            _log.warning("A worker will be preempted: saving after %d runs", self._num_runs)
            self._save(args, kwargs)
            if self._config.grace_period and self._config.grace_period > 0:
                reserve_s = _STEPS_BEFORE_END * self._step_s + 2 * self._save_s
                left_s = self._config.grace_period - told_s_ago - reserve_s
                self._ends_at = time.monotonic() + left_s
                _log.warning("Training continues for %.0f s of grace", max(left_s, 0.0))
                return
        elif not self._notices.is_any(time.monotonic() >= self._ends_at):
            return
        else:
            _log.warning("The grace period ends: saving after %d runs", self._num_runs)
            self._save(args, kwargs)
        self._exit()

    def _save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun = time.monotonic()
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(*args, **{"check_interval": False, "asynchronous": False, **kwargs})
        self._manager.wait()
        # No worker leaves before all have saved.
        self._notices.meet()
        self._save_s = time.monotonic() - begun

    def _exit(self) -> None:
        if self._poller is not None:
            self._poller.stop()
        if self._owns_manager:
            self._manager.close()
        self._ends_at = None
        self._notices.forget()
        if self._config.exit_fn is None:
            sys.exit(RESTART_EXIT_CODE)
        self._config.exit_fn()


class _Notices(Protocol):
    """The notices that concern this process."""

    def reached(self, step: int) -> float | None:
        """Returns how long ago the notice was given, if this is the step to save at."""
        ...

    def is_any(self, value: bool) -> bool:
        """Returns whether a process passes True."""
        ...

    def meet(self) -> None:
        """Waits for all processes."""
        ...

    def forget(self) -> None:
        """Forgets a notice that was handled."""
        ...


class _OwnNotices:
    """The notices of a process without a group."""

    def __init__(self, notice: Notice) -> None:
        self._notice = notice

    def reached(self, step: int) -> float | None:
        at = self._notice.received_at
        return None if at is None else time.monotonic() - at

    def is_any(self, value: bool) -> bool:
        return value

    def meet(self) -> None: ...

    def forget(self) -> None:
        self._notice.clear()


class _GroupNotices:
    """The notices of a group."""

    def __init__(self, writers: Writers, next_step: int) -> None:
        self._writers = writers
        self._sync_point = SyncPoint(writers, next_step)

    def reached(self, step: int) -> float | None:
        if not self._sync_point.reached(step):
            return None
        return preemption_notice.seconds_since_notice_of_group()

    def is_any(self, value: bool) -> bool:
        return any(self._writers.together("the end of the grace period", lambda: value, bool))

    def meet(self) -> None:
        self._writers.together("the checkpoint of a preemption", lambda: None, None)

    def forget(self) -> None:
        # JAX gives one notice in the life of a process.
        self._sync_point.stop()


def _require_no_servers(resolver: _ClusterResolver | None) -> None:
    if resolver is not None and "ps" in resolver.cluster_spec().as_dict():
        raise errors.UnsupportedError(
            "PreemptionCheckpointHandler works with strategies whose workers train in sync",
            "the cluster has parameter servers",
            "With ParameterServerStrategy a lost worker needs no restart: use a CheckpointManager.",
        )


def _require_savable(given: object, directory: object) -> None:
    if isinstance(given, CheckpointManager):
        return
    if not isinstance(given, Checkpoint):
        raise errors.ArgumentTypeError(
            "`checkpoint_or_checkpoint_manager` must be a Checkpoint or a CheckpointManager",
            f"it is a {type(given).__name__}",
            "Pass rx.train.Checkpoint(...) and a directory, or a rx.train.CheckpointManager.",
        )
    if not directory:
        raise errors.InvalidArgumentError(
            "A Checkpoint needs a directory to be saved in",
            "`checkpoint_dir` is not given",
            "Pass checkpoint_dir, or a CheckpointManager.",
        )
