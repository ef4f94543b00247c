"""Shutdown of a process that serves a task: by signal, in bounded time, and with its parent.

Note [A forked child is not the task]
    A closure may fork: `os.fork`, `multiprocessing`, a subprocess with `preexec_fn`. The child
    inherits the signal handlers and the wakeup descriptor, a pipe that the task reads: a SIGTERM
    for the child would end the task. So signals are blocked during a fork, and the child restores
    the handlers from before the task installed its own. It exits when the closure ends
    in it: see `worker/runner.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from replicax.foundation import errors

# `prctl` option: the signal that this process gets when its parent exits.
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Not a signal number: ends the watcher thread.
_LEAVE = b"\x00"
# The exit code of a task that has ended itself and can be restarted (EX_TEMPFAIL).
START_AGAIN = 75

_log = logging.getLogger(__name__)

# Callbacks for a forked child, the last first; and the signal mask of the forking thread before
# the fork. See Note [A forked child is not the task].
_undo_in_child: list[Callable[[], None]] = []
_forking = threading.local()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent exits.

    Args:
      parent: The id of the process that started this one. If it is not the parent any more, it
        has already exited.
    """
    # Without `prctl`, orphans end when the lease of their job expires.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise errors.UnavailableError(
            f"The parent process {parent} of this task has exited. Start the cluster again."
        )


@contextlib.contextmanager
def ended_by_signals(end: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Calls `end` at the first SIGTERM or SIGINT, and exits if the block does not return in time.

    The process exits at once at the second signal or after the timeout: a closure may compute for
    hours.

    Args:
      end: Makes the body of the block return soon. Called in a separate thread, because Python runs
        signal handlers only in the main thread, and not while that is inside XLA.
      seconds: The timeout after the first signal.
    """
    owner = os.getpid()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(
        target=_watch, args=(reading, end, seconds), name="replicax-signals", daemon=True
    )
    old_writing = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _ignore) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_writing)

    def undo_in_child() -> None:
        restore()
        os.close(writing)
        os.close(reading)

    _undo_in_child.append(undo_in_child)
    watcher.start()
    try:
        yield
    finally:
        if os.getpid() == owner:
            _undo_in_child.remove(undo_in_child)
            restore()
            os.write(writing, _LEAVE)
            watcher.join(timeout=seconds)
            os.close(writing)
            os.close(reading)


def end_soon(exit_code: int, *, seconds: float) -> None:
    """Exits after a timeout, unless the process has shut down in order before.

    For a task that ends by itself: its running closure may never end.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(exit_code)

    threading.Thread(target=end, name="replicax-end", daemon=True).start()


def _before_fork() -> None:
    if _undo_in_child:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _after_fork() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    while _undo_in_child:
        _undo_in_child.pop()()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The Python-level handler; the watcher thread reads the signal from the pipe."""


def _watch(reading: int, end: Callable[[], None], seconds: float) -> None:
    """Waits for signals. Exits if the descriptors of the process are closed."""
    try:
        _read_signals(reading, end, seconds)
    except (OSError, ValueError) as error:
        # A closure has closed all descriptors: the sockets are gone, too.
        text = "a closure has closed the descriptors of this process (%s): exiting"
        _log.error(text, error)
        os._exit(START_AGAIN)


def _read_signals(reading: int, end: Callable[[], None], seconds: float) -> None:
    """Reads signal numbers, until the block returns or the timeout is over."""
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], left)[0]:
            # A busy task is not a failure.
            _log.warning("still busy %g s after the signal: exiting now", seconds)
            os._exit(0)
        for number in os.read(reading, 64):
            if number == _LEAVE[0]:
                return
            if number not in _SIGNALS:
                continue
            if deadline is not None:
                os._exit(128 + number)
            deadline = time.monotonic() + seconds
            end()
