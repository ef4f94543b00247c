"""The lock for the state of variables and the dispatch of multi-device programs.

Note [The gate]
    XLA's CPU client aborts the process when two programs with collectives overlap: their
    devices may see them in different orders, or the thread pool may be too small for
    both. So on CPU devices multi-device programs are dispatched one at a time, in one order
    for all devices, and a program starts only when the one before it has finished. With a
    pool that has threads for two programs, XLA keeps that order by itself; then the next
    program may be dispatched while the one before it still runs, which hides the cost of the
    call. The lock also makes "read the state, dispatch, store the new state" atomic; otherwise two
    threads could donate one buffer twice.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

import jax

from replicax.foundation.jax_compat import Device

# Protects the stored arrays of all variables and `_Dispatch`. Taken before any other lock of
# the library; held for a dispatch, never while user code runs.
_lock = threading.RLock()


class _Dispatch:
    # A result of each multi-device CPU program that may still run, oldest first; nothing
    # else refers to these arrays.
    running: collections.deque[jax.Array] = collections.deque()
    # The number of such programs that may be dispatched and unfinished.
    limit = 1


@contextlib.contextmanager
def state() -> Iterator[None]:
    """Locks the stored arrays of all variables."""
    with _lock:
        yield


def set_pool(num_threads: int, num_devices: int) -> None:
    """Sets the numbers of threads and devices of XLA's CPU client, before it starts.

    By default, programs do not overlap at all.
    """
    _Dispatch.limit = 2 if num_threads >= 2 * num_devices else 1


def wait_for_previous() -> None:
    """Waits until a multi-device program may be dispatched. Called inside of `state()`."""
    running = _Dispatch.running
    while len(running) >= _Dispatch.limit:
        running.popleft().block_until_ready()


def set_running(token: jax.Array) -> None:
    """Stores an output of the program just dispatched, which nothing else refers to."""
    _Dispatch.running.append(token)


def needs_turns(devices: tuple[Device, ...]) -> bool:
    """Returns whether programs over these devices must not overlap."""
    return len(set(devices)) > 1 and devices[0].platform == "cpu"
