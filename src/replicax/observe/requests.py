"""Requests that every task of this process answers, beside those of its own.

A module that records something about the process, such as spans, registers requests when it is
imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from replicax.foundation import thread_stacks

# Takes the task that is asked, and the arguments of the request; returns what JSON can hold.
#
# It runs in the one thread that answers for the task: it must return within a second or so, and
# take locks that the program holds with a timeout. What takes longer is started here, and read by
# another request; what is larger than a few megabytes is written to a file, whose path is returned.
Handler = Callable[[str, Mapping[str, Any]], object]

_lock = threading.Lock()
_handlers: dict[str, Handler] = {}


def register(name: str, handler: Handler) -> None:
    """Makes all tasks of this process answer a request; the last registration of a name counts.

    >>> register("echo", lambda task, arguments: {"task": task, **arguments})
    >>> find("echo")("/job:ps/task:0", {"text": "x"})
    {'task': '/job:ps/task:0', 'text': 'x'}
    >>> unregister("echo")
    """
    with _lock:
        _handlers[name] = handler


def unregister(name: str) -> None:
    """Undoes `register`. Idempotent."""
    with _lock:
        _handlers.pop(name, None)


def find(name: str) -> Handler | None:
    """Returns the handler of a request, or None."""
    return _handlers.get(name)


def names() -> list[str]:
    """Returns the names of all registered requests."""
    return sorted(_handlers)


def _stack(task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    del task, arguments
    return {"text": thread_stacks.text()}


register("stack", _stack)
