"""The index of the worker that runs the current code."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from replicax.foundation import errors

_index: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "replicax_worker_index", default=None
)


def experimental_get_current_worker_index() -> int:
    """Returns the index of the worker that runs this closure or dataset function.

    Raises:
      ContextError: This code does not run on a worker.

    >>> experimental_get_current_worker_index()
    Traceback (most recent call last):
      ...
    replicax.errors.ContextError: The index of the worker is known inside ...
    """
    index = _index.get()
    if index is None:
        raise errors.ContextError(
            "The index of the worker is known inside functions that a worker runs",
            "this code runs on no worker",
            "Call it in a function that is given to `schedule` or `create_per_worker_dataset`.",
        )
    return index


def find() -> int | None:
    """Returns the index of the worker that runs this code; None outside of closures."""
    return _index.get()


@contextlib.contextmanager
def on_worker(index: int) -> Iterator[None]:
    """Sets the index of the worker for the code inside."""
    token = _index.set(index)
    try:
        yield
    finally:
        _index.reset(token)
