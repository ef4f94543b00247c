"""The one door through which compiled programs and variable states pass.

Note [The gate]
    XLA's CPU client aborts the process when two programs with collectives overlap: their
    devices may see them in different orders, or the thread pool may be too small for
    both. So on CPU devices a multi-device program starts only when the one before it has
    finished. The lock also makes "read the state, dispatch, store the new state" one
    step, without which two threads could donate one buffer twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from replicax.foundation.jax_compat import Device

# Protects the stored arrays of all variables and `_Door.running`. Taken before any other
# lock of the library; held for a dispatch, never while user code runs.
_lock = threading.RLock()


class _Door:
    # A result of the multi-device CPU program that was dispatched last; nobody else holds it.
    running: Any = None


@contextlib.contextmanager
def state() -> Iterator[None]:
    """Holds the stored arrays of variables still."""
    with _lock:
        yield


def take_turn() -> None:
    """Waits until a multi-device program may start. The caller holds `state()`."""
    running, _Door.running = _Door.running, None
    if running is not None:
        jax.block_until_ready(running)


def hand_over(token: Any) -> None:
    """Names an output of the program just started, one that is not given to anybody else."""
    _Door.running = token


def needs_turns(devices: tuple[Device, ...]) -> bool:
    """Tells whether programs over these devices must not overlap."""
    return len(set(devices)) > 1 and devices[0].platform == "cpu"
