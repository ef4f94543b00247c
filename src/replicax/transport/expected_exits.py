"""Tasks that end because this process has asked them to: no reason for alarm.

A local cluster ends its tasks while a coordinator in the same process may still be connected to
them. It says so here, and the coordinator, which sees tasks vanish, writes no warnings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from replicax.transport.addresses import Location

_lock = threading.Lock()
_expected: set[str] = set()


def expect(addresses: Iterable[str]) -> None:
    """Notes that the tasks at some addresses are about to end.

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
    """Notes that tasks at some addresses are meant to run."""
    with _lock:
        _expected.difference_update(addresses)


def is_expected(location: Location) -> bool:
    """Tells whether the task at a place was asked to end."""
    return location.address in _expected
