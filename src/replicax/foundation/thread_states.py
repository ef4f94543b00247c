"""State that other libraries keep per thread, for threads that continue the work of another one.

Replicas of an eager run are threads, but one program to the user: what was set around the run
holds in all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

# Enters, in another thread, the state that was found in the thread of the capture.
Enter: TypeAlias = Callable[[], AbstractContextManager[None]]

_captures: list[Callable[[], Enter]] = []


def register(capture: Callable[[], Enter]) -> None:
    """Adds a function that captures the state of a library in the current thread."""
    _captures.append(capture)


def captured() -> list[Enter]:
    """Captures the states of all libraries in the current thread."""
    return [capture() for capture in _captures]


@contextlib.contextmanager
def entered(states: list[Enter]) -> Iterator[None]:
    """Enters the states that `captured` returned in another thread."""
    with contextlib.ExitStack() as stack:
        for enter in states:
            stack.enter_context(enter())
        yield
