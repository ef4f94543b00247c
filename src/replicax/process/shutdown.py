"""How a process that serves a task ends: by signal, in bounded time, and with its parent.

Note [A forked child is not the task]
    A closure may fork: `os.fork`, `multiprocessing`, a subprocess with `preexec_fn`. The child
    inherits the signal handlers and the descriptor that signals are written to, which is a pipe
    that the task reads: a SIGTERM for the child would end the task. So signals wait while a
    process forks, and the child restores what was there before the task installed its own. It ends
    when the closure ends in it: see `worker/forked_children.py`.
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

# `prctl` of the C library: which signal this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# No signal has this number.
_LEAVE = b"\x00"
# The exit code of a task that has ended itself: starting it again helps (EX_TEMPFAIL).
START_AGAIN = 75

_log = logging.getLogger(__name__)

# What to undo in a forked child, the last first; and the signals that a thread which forks had
# blocked before. See Note [A forked child is not the task].
_undo_in_child: list[Callable[[], None]] = []
_forking = threading.local()


def die_with_parent(parent: int) -> None:
    """Makes the kernel end this process when its parent ends.

    Args:
      parent: The id of the process that started this one. If it is the parent no more, it
        ended before it could be watched.
    """
    # Where there is no such call the lease of the coordinator is what ends orphans.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise errors.UnavailableError(
            f"The process {parent} must be there while its tasks serve",
            "it has ended",
            "Start the cluster again.",
        )


@contextlib.contextmanager
def ended_by_signals(end: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Calls `end` at the first SIGTERM or SIGINT; ends the process if that does not help.

    The second signal, or the end of the time given, ends the process where it stands: a
    closure may compute for hours.

    Args:
      end: Makes the body of the block return soon. Called in a thread of its own, because
        Python runs handlers only in the main thread, and not while that is inside XLA.
      seconds: How long the body may take after the first signal.
    """
    owner = os.getpid()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(
        target=_watch, args=(reading, end, seconds), name="replicax-signals", daemon=True
    )
    old_writing = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _pass_by) for number in _SIGNALS}

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
    """Ends the process where it stands, unless it has ended in order by then.

    For a task that ends by itself: a closure that it runs may never come to an end.
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


def _pass_by(number: int, frame: FrameType | None) -> None:
    """What Python calls for a signal; the thread that watches has already heard of it."""


def _watch(reading: int, end: Callable[[], None], seconds: float) -> None:
    """Waits for signals. Ends the process if its descriptors are closed under it."""
    try:
        _read_signals(reading, end, seconds)
    except (OSError, ValueError) as error:
        # The pipe wakes this thread when it is closed. Nothing else works any more either: sockets
        # are gone, and ZeroMQ would abort the process sooner or later.
        text = "the descriptors of this process were closed by the code that it ran (%s): ending"
        _log.error(text, error)
        os._exit(START_AGAIN)


def _read_signals(reading: int, end: Callable[[], None], seconds: float) -> None:
    """Reads the numbers of signals, until told to leave or out of time."""
    deadline: float | None = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], left)[0]:
            # Being busy when told to end is no failure of the task.
            _log.warning("still busy %g s after the signal to end: ending now", seconds)
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
