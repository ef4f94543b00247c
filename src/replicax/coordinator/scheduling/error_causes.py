"""What an error that a worker reports means: whose fault it is, by its cause and never its text."""

from __future__ import annotations

import dataclasses

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors
from replicax.protocol.messages import RemoteError

# A worker that was sent a function so often and does not have it will never have it.
_NUM_MISSES = 3
_RESTARTED = errors.PSIncarnationError.__name__


@dataclasses.dataclass(frozen=True)
class Blame:
    """A parameter server did not answer the worker; the closure can run again."""

    server: int
    is_restarted: bool


@dataclasses.dataclass(frozen=True)
class Fenced:
    """The servers take nothing from the worker any more."""


@dataclasses.dataclass(frozen=True)
class Again:
    """The closure was not started, and can run elsewhere."""

    is_function_unknown: bool = False


def judge(
    closure: Closure, worker: int, error: RemoteError, num_servers: int
) -> Blame | Fenced | Again | Exception:
    """Tells what to do about a closure that did not end well; an error is its own.

    >>> from replicax.coordinator.scheduling.closures import Closure
    >>> error = RemoteError("closure", "ValueError", "bad batch", "Traceback ...")
    >>> judge(Closure(7, serialization.ship(print)), 1, error, num_servers=1)
    ValueError('bad batch')
    """
    if error.cause == "server" and 0 <= error.task < num_servers:
        return Blame(error.task, error.kind.rpartition(".")[2] == _RESTARTED)
    if error.cause == "fenced":
        return Fenced()
    if error.cause == "unknown_function":
        closure.num_misses += 1
        if closure.num_misses < _NUM_MISSES:
            return Again(is_function_unknown=True)
    if error.cause == "cancelled":
        return Again()
    return serialization.rebuild_error(error, worker)
