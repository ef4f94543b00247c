"""The tasks that this process is shutting down.

A local cluster registers its tasks here before it stops them, so that a coordinator in the same
process, which is still connected to them, logs no warnings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from replicax.transport.addresses import Location

_lock = threading.Lock()
_expected: set[str] = set()


def expect(addresses: Iterable[str]) -> None:
    """Records that the tasks at some addresses are about to exit.

    >>> from replicax.transport import addresses
    >>> expect(["inproc://leaving"])
    >>> is_expected(addresses.resolve("inproc://leaving"))
    True
    >>> forget(["inproc://leaving"])
    >>> is_expected(addresses.resolve("inproc://leaving"))
    False
    """
    with _lock:
        _expected.update(addresses)


def forget(addresses: Iterable[str]) -> None:
    """Records that the tasks at some addresses are meant to run."""
    with _lock:
        _expected.difference_update(addresses)


def is_expected(location: Location) -> bool:
    """Returns whether the task at an address was told to exit."""
    return location.address in _expected
