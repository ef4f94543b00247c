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
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

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
    # The pace of this process, if one device of it takes part in such programs.
    pace: _Pace | None = None


# Waking up the thread that dispatches costs as much as the dispatch of a small program. So short
# programs may be dispatched further ahead: this many seconds, but no more than so many programs.
_AHEAD_S = 0.1
_MOST_AHEAD = 32
_LEAST_AHEAD = 2


class _Pace:
    """How far ahead one thread may dispatch one program, by the time that it takes.

    A program that is new starts with one ahead: nothing is known about the time it takes.

    Attributes:
      limit: The number of programs that may be dispatched and unfinished.
    """

    def __init__(self) -> None:
        self.limit = _LEAST_AHEAD
        self._thread = 0
        self._program: object = None
        # What was learned of the programs that were dispatched before.
        self._limits: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._start = 0.0
        self._num_finished = 0

    def is_of_this_thread(self) -> bool:
        """Returns whether the programs that run are of this thread; from now on they are."""
        thread, self._thread = self._thread, threading.get_ident()
        return thread == self._thread

    def is_of_this_program(self, program: object) -> bool:
        """Returns whether the last program was the same; from now on it is."""
        last, self._program = self._program, program
        if last is program:
            return True
        if last is not None:
            self._limits[last] = self.limit
        self.limit = _LEAST_AHEAD if program is None else self._limits.get(program, _LEAST_AHEAD)
        return False

    def restart(self, num_others: int = 0) -> None:
        """Restarts the clock: the device was idle, or runs so many other programs."""
        self._num_finished = -num_others
        self._start = time.monotonic()

    def note_finished(self, count: int) -> None:
        """Notes that so many programs have finished, and learns from the time they took.

        The device has been running programs since the last call, or since `restart`.
        """
        self._num_finished += count
        if self._num_finished <= 0:
            return
        now = time.monotonic()
        each = (now - self._start) / self._num_finished
        self._start, self._num_finished = now, 0
        fitting = int(_AHEAD_S / max(each, 1e-6))
        self.limit = max(_LEAST_AHEAD, min(_MOST_AHEAD, 2 * self.limit, fitting))


class _State(AbstractContextManager[None]):
    """The lock as a context manager; a class, since each call of a program enters it."""

    __slots__ = ()

    def __enter__(self) -> None:
        _lock.acquire()
        if _Pending.actions:
            try:
                settle()
            except BaseException:
                _lock.release()
                raise

    def __exit__(self, *failure: object) -> None:
        _lock.release()


_state = _State()


def state() -> AbstractContextManager[None]:
    """Locks the stored arrays of all variables."""
    return _state


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
    if not pace.is_of_this_program(program):
        _finish(max(0, len(running) - 1))
        pace.restart(len(running))
    if not running:
        pace.restart()
    elif running[-1].is_ready():  # pyright: ignore[reportAttributeAccessIssue]
        # Programs finish in their order. The device waits for this thread: there is nothing
        # to hide.
        _finish(len(running))
        pace.restart()
    elif len(running) >= pace.limit:
        # One wake-up for half of them.
        count = len(running) - pace.limit // 2
        _finish(count)
        pace.note_finished(count)


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
