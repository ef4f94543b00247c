"""A scope in which remote variables are read once: later reads give what the first one gave."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

from replicax.foundation import errors

_cache: contextvars.ContextVar[dict[int, tuple[Any, Any]] | None] = contextvars.ContextVar(
    "replicax_read_cache", default=None
)


@contextlib.contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Lets variables on parameter servers be fetched once, however often they are read inside.

    Code inside does not see changes, not even its own, of what it has read before.

    >>> with cache_variable_reads():
    ...     pass
    """
    if _cache.get() is not None:
        raise errors.InvalidArgumentError(
            errors.message(
                "`cache_variable_reads` cannot be nested",
                "a scope is open already",
                "Leave it first.",
            )
        )
    token = _cache.set({})
    try:
        yield
    finally:
        _cache.reset(token)


def pull(home: Any, reads: Sequence[Any]) -> list[Any]:
    """Pulls what the scope, if there is one, does not have yet."""
    cache = _cache.get()
    if cache is None:
        return home.pull(reads)
    # Rows are not kept: there may be more of them than of anything else.
    missing = [r for r in reads if r.ids is not None or id(r.variable) not in cache]
    found = iter(home.pull(missing) if missing else [])
    values = []
    for read in reads:
        known = cache.get(id(read.variable)) if read.ids is None else None
        value = next(found) if known is None else known[1]
        if read.ids is None:
            # With the variable, so that no other one gets its id.
            cache[id(read.variable)] = (read.variable, value)
        values.append(value)
    return values
