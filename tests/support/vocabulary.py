"""Words that several test files use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from worker_groups import of_all_workers, replica_results

import replicax as rx

# Errors about what the user wrote; others may be about the state of the system.
_MISTAKES = (
    rx.errors.ArgumentTypeError,
    rx.errors.ContextError,
    rx.errors.InvalidArgumentError,
    rx.errors.UnsupportedError,
)


@contextlib.contextmanager
def refused(kind: type[Exception], match: str | None = None) -> Iterator[None]:
    """Expects an error of the library: of three parts for mistakes, else also of one text."""
    with pytest.raises(kind, match=match) as info:
        yield
    assert isinstance(info.value, rx.errors.DistributeError), repr(info.value)
    error = info.value
    assert error.parts or not isinstance(error, _MISTAKES), f"not three parts: {error!r}"
    assert error.parts or ". " in str(error), f"says not what to do: {error!r}"


def values(strategy: Any, fn: Callable[[int], Any]) -> Any:
    """A PerReplica of `fn(replica id)`."""
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: fn(ctx.replica_id_in_sync_group)
    )


def number() -> Any:
    """1.0 on replica 0, 2.0 on replica 1, and so on."""
    return 1.0 + rx.get_replica_context().replica_id_in_sync_group


def copies(strategy: Any, variable: Any) -> list[Any]:
    """What each copy of a variable holds, on all workers, as lists or numbers."""
    found = strategy.experimental_local_results(variable)
    own = [np.asarray(c.read_value()).tolist() for c in found]
    return of_all_workers(strategy, own) if _has_copies(variable) else own


def num_copies(strategy: Any, variable: Any) -> int:
    """The number of copies of a variable, on all workers."""
    own = len(variable.components)
    return len(of_all_workers(strategy, [None] * own)) if _has_copies(variable) else own


def _has_copies(variable: Any) -> bool:
    return isinstance(variable, rx.MirroredVariable | rx.SyncOnReadVariable)


def replica_values(strategy: Any, value: Any) -> list[Any]:
    """The components of a value, on all workers, as lists or numbers."""
    return [np.asarray(v).tolist() for v in replica_results(strategy, value)]


# The four places in which cross-replica code runs.


def in_eager(strategy: Any, fn: Any, *args: Any) -> Any:
    with strategy.scope():
        return fn(strategy, *args)


def in_function(strategy: Any, fn: Any, *args: Any) -> Any:
    with strategy.scope():
        return rx.function(lambda *inner: fn(strategy, *inner))(*args)


def _merge(fn: Any) -> Any:
    return lambda *own: rx.get_replica_context().merge_call(fn, own)


def in_merge(strategy: Any, fn: Any, *args: Any) -> Any:
    result = strategy.run(_merge(fn), args=args)
    return strategy.experimental_local_results(result)[0]


def in_compiled_merge(strategy: Any, fn: Any, *args: Any) -> Any:
    result = strategy.run(rx.function(_merge(fn)), args=args)
    return strategy.experimental_local_results(result)[0]


def outside(strategy: Any, fn: Any, *args: Any) -> Any:
    """Not one of the four: code without a scope."""
    return fn(strategy, *args)


# Where variables are written from cross-replica code, by the name of a test's case.
WRITERS = {"scope": in_eager, "outside": outside, "compiled": in_function, "merge_call": in_merge}
