"""The lock for the state of variables and the dispatch of multi-device programs.

Note [The gate]
    XLA's CPU client aborts the process when two programs with collectives overlap: their
    devices may see them in different orders, or the thread pool may be too small for
    both. So on CPU devices multi-device programs are dispatched one at a time, in one order
    for all devices, and a program starts only when the one before it has finished. With a
    pool that has threads for two programs, XLA keeps that order by itself; then the next
    program may be dispatched while the one before it still runs, which hides the cost of the
    call. A process with one device of a program of several processes needs no such pool: XLA runs
    what one thread dispatches to a device in its order, but not what several threads dispatch.
    The lock also makes "read the state, dispatch, store the new state" atomic; otherwise two
    threads could donate one buffer twice.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

from replicax.foundation.jax_compat import Device

# Protects the stored arrays of all variables and `_Dispatch`. Taken before any other lock of
# the library; held for a dispatch, never while user code runs.
_lock = threading.RLock()


class _Pending:
    # Run before the stored arrays are used next: variables that need a common value first.
    actions: list[Callable[[], None]] = []


class _Dispatch:
    # A result of each multi-device CPU program that may still run, oldest first; nothing
    # else refers to these arrays.
    running: collections.deque[jax.Array] = collections.deque()
    # The number of such programs that may be dispatched and unfinished.
    limit = 1
    # The pace of this thread, if one device of this process takes part in such programs.
    pace: _Pace | None = None


# Waking up the thread that dispatches costs as much as the dispatch of a small program. So short
# programs may be dispatched further ahead: this many seconds, but no more than so many programs.
_AHEAD_S = 0.01
_MOST_AHEAD = 32


class _Pace:
    """How far ahead one thread may dispatch one program, by the time that it takes.

    Any other program starts with one ahead: nothing is known about the time it takes.

    Attributes:
      limit: The number of programs that may be dispatched and unfinished.
    """

    def __init__(self) -> None:
        self.limit = 2
        self._thread = 0
        self._program: object = None
        self._start = 0.0
        self._num_finished = 0

    def is_of_this_thread(self) -> bool:
        """Returns whether the programs that run are of this thread; from now on they are."""
        thread, self._thread = self._thread, threading.get_ident()
        return thread == self._thread

    def is_of_this_program(self, program: object) -> bool:
        """Returns whether the last program was the same; from now on it is."""
        last, self._program = self._program, program
        return last is program

    def restart(self, num_others: int = 0) -> None:
        """Forgets what was learned; so many other programs still run."""
        self.limit, self._num_finished = 2, -num_others
        self._start = time.monotonic()

    def note_finished(self, count: int) -> None:
        """Notes that so many programs were found finished."""
        self._num_finished += count

    def adapt(self) -> None:
        """Learns from the time since the last call, through which programs were running."""
        if self._num_finished <= 0:
            return
        now = time.monotonic()
        each = (now - self._start) / self._num_finished
        self._start, self._num_finished = now, 0
        fitting = int(_AHEAD_S / max(each, 1e-6))
        self.limit = max(2, min(_MOST_AHEAD, 2 * self.limit, fitting))


@contextlib.contextmanager
def state() -> Iterator[None]:
    """Locks the stored arrays of all variables."""
    with _lock:
        if _Pending.actions:
            settle()
        yield


def before_next_use(action: Callable[[], None]) -> None:
    """Makes the next use of stored arrays, or `settle`, call a function once."""
    with _lock:
        if action not in _Pending.actions:
            _Pending.actions.append(action)


def settle() -> None:
    """Calls what waits for the next use of stored arrays."""
    with _lock:
        actions, _Pending.actions = _Pending.actions, []
        for action in actions:
            action()


def set_pool(num_threads: int, num_devices: int) -> None:
    """Sets the numbers of threads and devices of XLA's CPU client, before it starts.

    By default, programs do not overlap at all.
    """
    _Dispatch.limit = 2 if num_threads >= 2 * num_devices else 1


def set_one_device_per_process() -> None:
    """Says that programs of several processes have one device in this one."""
    _Dispatch.pace = _Pace()


def wait_for_previous(program: object = None) -> None:
    """Waits until a multi-device program may be dispatched. Called inside of `state()`.

    Args:
      program: What is to be dispatched; calls with the same one take about the same time.
    """
    running, pace = _Dispatch.running, _Dispatch.pace
    if pace is not None:
        _wait_at_pace(pace, program)
        return
    while len(running) >= _Dispatch.limit:
        running.popleft().block_until_ready()


def _wait_at_pace(pace: _Pace, program: object) -> None:
    running = _Dispatch.running
    if not pace.is_of_this_thread():
        _finish(len(running))
        pace.restart()
    if not pace.is_of_this_program(program):
        _finish(max(0, len(running) - 1))
        pace.restart(len(running))
    num_ready = 0
    while running and running[0].is_ready():  # pyright: ignore[reportAttributeAccessIssue]
        running.popleft().block_until_ready()
        num_ready += 1
    pace.note_finished(num_ready)
    if not running:
        # The device waits for this thread: there is nothing to hide.
        pace.restart()
    elif len(running) >= pace.limit:
        count = len(running) - pace.limit // 2
        _finish(count)
        pace.note_finished(count)
        pace.adapt()


def wait_for_all() -> None:
    """Waits for all programs that were dispatched; raises the error of one that failed."""
    with _lock:
        _finish(len(_Dispatch.running))


def _finish(count: int) -> None:
    """Waits for the oldest programs: once, for the last of them, before the rest is checked."""
    tokens = [_Dispatch.running.popleft() for _ in range(count)]
    for token in reversed(tokens):
        token.block_until_ready()


def set_running(token: jax.Array) -> None:
    """Stores an output of the program just dispatched, which nothing else refers to."""
    _Dispatch.running.append(token)


def needs_turns(devices: tuple[Device, ...]) -> bool:
    """Returns whether programs over these devices must not overlap."""
    return len(set(devices)) > 1 and devices[0].platform == "cpu"
