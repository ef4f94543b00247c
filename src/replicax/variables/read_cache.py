"""A scope in which remote variables are read once: later reads give what the first one gave."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from replicax.contexts.overlay import Overlay, TracedState
from replicax.foundation import errors
from replicax.foundation.types import Tree

if TYPE_CHECKING:
    from replicax.variables.remote import Read, VariableClient


class _Scope:
    """One use of `cache_variable_reads`."""

    def __init__(self) -> None:
        # Fetched values, with the variable, so that no other one gets its id.
        self.values: dict[int, tuple[object, np.ndarray]] = {}


# The open scope, if there is one.
open_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar(
    "replicax_read_cache", default=None
)


@contextlib.contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Lets variables on parameter servers be fetched once, however often they are read inside.

    Code inside does not see changes, not even its own, of what it has read before. This holds
    for compiled functions that are called inside, and for a scope inside a compiled function.
    Rows of tables are not kept.

    Raises:
      InvalidArgumentError: Such a scope is open already.

    >>> with cache_variable_reads():
    ...     pass
    """
    if open_scope.get() is not None:
        raise errors.InvalidArgumentError(
            "`cache_variable_reads` cannot be nested",
            "a scope is open already",
            "Leave it first.",
        )
    token = open_scope.set(_Scope())
    try:
        yield
    finally:
        open_scope.reset(token)


def is_open() -> bool:
    """Returns whether code runs in such a scope; functions are compiled separately in one."""
    return open_scope.get() is not None


def read_in_trace(overlay: Overlay, variable: TracedState) -> Tree:
    """Returns the value of a remote variable as a trace, and the scope if there is one, sees it."""
    scope = open_scope.get()
    if scope is None:
        return overlay.read(variable)
    key = (scope, variable)
    if key not in overlay.kept_reads:
        overlay.kept_reads[key] = overlay.read(variable)
    return overlay.kept_reads[key]


def pull(client: VariableClient, reads: Sequence[Read]) -> list[np.ndarray]:
    """Pulls the values that the scope, if there is one, has not cached."""
    scope = open_scope.get()
    if scope is None:
        return client.pull(reads)
    cache = scope.values
    # Rows are not kept: there may be more of them than of anything else.
    missing = [r for r in reads if r.ids is not None or id(r.variable) not in cache]
    found = iter(client.pull(missing) if missing else [])
    values = []
    for read in reads:
        known = cache.get(id(read.variable)) if read.ids is None else None
        value = next(found) if known is None else known[1]
        if read.ids is None:
            cache[id(read.variable)] = (read.variable, value)
        values.append(value)
    return values
