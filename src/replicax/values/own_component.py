"""Which component of a per-replica value the running code means: in replica code, its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What `find` returns where code acts for all replicas, or for none.
NOT_HERE = object()


class _Finder:
    # Set once by contexts/running_replica.py; values know no frames.
    find: Callable[[Any], Any] = staticmethod(lambda value: NOT_HERE)


def set_finder(find: Callable[[Any], Any]) -> None:
    """Sets the function that finds the running replica's component of a per-replica value."""
    _Finder.find = staticmethod(find)


def find(value: object) -> Any:
    """Returns the component of the running replica, or NOT_HERE outside of replica code."""
    return _Finder.find(value)
