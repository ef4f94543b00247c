"""The one door through which compiled programs and variable states pass.

Note [The gate]
    XLA's CPU client aborts the process when two programs with collectives overlap: their
    devices may see them in different orders, or the thread pool may be too small for
    both. So on CPU devices multi-device programs are dispatched one at a time, in one order
    for all devices, and a program starts only when the one before it has finished. With a
    pool that has threads for two programs, XLA keeps that order by itself; then the next
    program may be dispatched while the one before it still runs, which hides the cost of the
    call. The lock also makes "read the state, dispatch, store the new state" one step,
    without which two threads could donate one buffer twice.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from replicax.foundation.jax_compat import Device

# Protects the stored arrays of all variables and `_Door`. Taken before any other lock of
# the library; held for a dispatch, never while user code runs.
_lock = threading.RLock()


class _Door:
    # A result of each multi-device CPU program that may still run, oldest first; nothing
    # else refers to these arrays.
    running: collections.deque[Any] = collections.deque()
    # How many such programs may have been dispatched and not have finished.
    limit = 1


@contextlib.contextmanager
def state() -> Iterator[None]:
    """Holds the stored arrays of variables still."""
    with _lock:
        yield


def set_pool(num_threads: int, num_devices: int) -> None:
    """Tells how many threads XLA's CPU client will have for how many devices.

    Called before the client starts. If nothing is known, programs do not overlap at all.
    """
    _Door.limit = 2 if num_threads >= 2 * num_devices else 1


def wait_for_previous() -> None:
    """Waits until a multi-device program may be dispatched. The caller holds `state()`."""
    running = _Door.running
    while len(running) >= _Door.limit:
        running.popleft().block_until_ready()


def set_running(token: Any) -> None:
    """Takes an output of the program just dispatched, which nothing else refers to."""
    _Door.running.append(token)


def needs_turns(devices: tuple[Device, ...]) -> bool:
    """Tells whether programs over these devices must not overlap."""
    return len(set(devices)) > 1 and devices[0].platform == "cpu"
