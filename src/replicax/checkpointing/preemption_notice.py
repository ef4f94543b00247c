"""Notices that this process, or another one of its group, will be terminated.

Note [Where notices come from]
    In a group, JAX's preemption service takes the signal SIGTERM from the first watcher on, and
    tells all processes: nothing else may handle it there. Without a watcher, SIGTERM ends the
    process. A process on its own handles it here. A function that the user gives, which asks the
    platform, is called in a thread; in a group it passes the notice on as a SIGTERM to this
    process.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

import jax

from replicax.foundation import errors, jax_compat, peers

_log = logging.getLogger(__name__)

# The interval between two calls of a function that asks for a notice.
_POLL_S = 1.0
_JOIN_S = 5.0


# The longest time that a process waits for the end of others, and how often it looks.
_EXIT_S = 600.0
_LOOK_S = 0.1


class Notice:
    """Whether this process was told that it will be terminated, and when."""

    def __init__(self) -> None:
        self._received_at: float | None = None

    @property
    def received_at(self) -> float | None:
        """The time of the first notice, on the monotonic clock; None if there is none."""
        return self._received_at

    def receive(self) -> None:
        """Records a notice."""
        if self._received_at is None:
            self._received_at = time.monotonic()

    def clear(self) -> None:
        """Forgets the notice."""
        self._received_at = None


# The notice of SIGTERM; one for all objects of the process that watch it.
_of_signal = Notice()
_num_watching = 0
_before: Callable[[int, FrameType | None], object] | int | None = None


def watch_signal(owner: object) -> Notice:
    """Records SIGTERM, instead of ending the process, as long as `owner` exists."""
    global _num_watching, _before
    if threading.current_thread() is not threading.main_thread():
        raise errors.ContextError(
            "SIGTERM can be handled by the main thread only",
            f"this is the thread {threading.current_thread().name!r}",
            "Create the handler in the main thread, or pass a `termination_watcher_fn`.",
        )
    if _num_watching == 0:
        _of_signal.clear()
        _before = signal.signal(signal.SIGTERM, lambda *_: _of_signal.receive())
    _num_watching += 1
    weakref.finalize(owner, _stop_watching)
    return _of_signal


def _stop_watching() -> None:
    global _num_watching
    _num_watching -= 1
    if _num_watching == 0 and threading.current_thread() is threading.main_thread():
        with contextlib.suppress(TypeError):
            # None stands for a handler that Python did not install.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if _before is None else _before)


class Poller:
    """Calls a function each second until it reports a notice.

    Args:
      ask: Returns whether the platform has given notice; must not block.
      on_notice: Called once, in the thread that asks.
    """

    def __init__(self, ask: Callable[[], bool], on_notice: Callable[[], None]) -> None:
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=_poll,
            args=(ask, on_notice, self._is_stopped),
            name="replicax-preemption",
            daemon=True,
        )
        # The thread does not refer to this object, and ends with it.
        self.stop = weakref.finalize(self, _stop, self._is_stopped, self._thread)
        self._thread.start()


def _poll(
    ask: Callable[[], bool], on_notice: Callable[[], None], is_stopped: threading.Event
) -> None:
    while not is_stopped.is_set():
        try:
            if ask():
                on_notice()
                return
        except Exception:
            # An error of the platform, such as a timeout, is not a notice.
            _log.warning("The function that asks for a preemption notice failed", exc_info=True)
        is_stopped.wait(_POLL_S)


def _stop(is_stopped: threading.Event, thread: threading.Thread) -> None:
    is_stopped.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


class PreemptionWatcher:
    """Tells whether a worker of the group, or this process, was told that it will be terminated.

    Create it after the strategy. It only watches; `PreemptionCheckpointHandler` also saves.

    >>> watcher = PreemptionWatcher()
    >>> watcher.preemption_message is None
    True
    """

    def __init__(self) -> None:
        self._peers = peers.of_process()
        self._notice: Notice | None = None
        if self._peers is None:
            self._notice = watch_signal(self)
        else:
            watch_signal_in_group()

    @property
    def preemption_message(self) -> str | None:
        """The notice, with the time when it arrived; None if there is none."""
        if self._notice is None:
            told = jax_compat.preemption_notice()
            return None if told is None else f"SIGTERM at {told}"
        told_at = self._notice.received_at
        if told_at is None:
            return None
        return f"SIGTERM {time.monotonic() - told_at:.1f} s ago"

    def block_until_worker_exit(self) -> None:
        """Waits until another worker of the group has ended. Returns at once without a group.

        Raises:
          DeadlineExceededError: All workers still run after ten minutes.
        """
        if self._peers is None:
            return
        end = time.monotonic() + _EXIT_S
        while time.monotonic() < end:
            try:
                with self._peers.guarded():
                    time.sleep(_LOOK_S)
            except errors.DistributeError:
                # A worker is lost, or has left.
                return
        raise errors.DeadlineExceededError(
            f"No worker of the group has ended within {_EXIT_S:.0f} s"
        )


def signal_this_process() -> None:
    """Passes a notice to JAX's preemption service, which tells the other processes."""
    os.kill(os.getpid(), signal.SIGTERM)


def watch_signal_in_group() -> None:
    """Makes SIGTERM a notice to all processes; raises if JAX's preemption service is off."""
    if not jax.config.jax_enable_preemption_service:  # pyright: ignore[reportAttributeAccessIssue]
        raise errors.ContextError(
            "Preemption of a group of processes needs JAX's preemption service",
            "the configuration option jax_enable_preemption_service is off",
            "Remove this setting before the strategy is created.",
        )
    jax_compat.watch_preemption_signal()


def seconds_since_notice_of_group() -> float:
    """Returns how long ago a process of the group was told, by its clock and the one here."""
    text = jax_compat.preemption_notice()
    if text is None:
        return 0.0
    # Python reads microseconds only, and no time zone that is not +hh:mm.
    seconds, _, fraction = text.partition(".")
    zone = fraction.lstrip("0123456789") or "+00:00"
    told = datetime.datetime.fromisoformat(seconds[:19] + zone)
    return max((datetime.datetime.now(datetime.UTC) - told).total_seconds(), 0.0)
