"""`Writers`: the processes that publish one bundle together, of which the chief writes.

Every process makes the same calls in the same order. What one process cannot do raises an error on
all of them, so no process goes on alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec

from replicax.foundation import errors
from replicax.foundation.peers import Peers

_T = TypeVar("_T")


class _Failure(msgspec.Struct):
    """An error of one process, as the others are told about it."""

    kind: str
    text: str
    parts: tuple[str, ...]
    errno: int | None


class _Outcome(msgspec.Struct):
    """What one process computed, or its error."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    failure: _Failure | None = None


class Writers:
    """The processes that save and load a bundle together: those of a group, or this one alone.

    Args:
      peers: The group of this process; None if it works alone.

    >>> alone = Writers(None)
    >>> alone.is_chief, alone.from_chief("double", lambda: 2 * 21, int)
    (True, 42)
    """

    def __init__(self, peers: Peers | None) -> None:
        self._peers = peers

    @property
    def is_alone(self) -> bool:
        """Whether there are no other processes."""
        return self._peers is None

    def guarded(self) -> AbstractContextManager[None]:
        """Replaces an error of JAX that a lost process caused by an error that names the task."""
        return contextlib.nullcontext() if self._peers is None else self._peers.guarded()

    @property
    def is_chief(self) -> bool:
        """Whether this is the process that writes."""
        return self._peers is None or self._peers.index == 0

    @property
    def index(self) -> int:
        """The index of this process."""
        return 0 if self._peers is None else self._peers.index

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1 if self._peers is None else self._peers.count

    def name_of(self, index: int) -> str:
        """Returns the name of a process, for messages."""
        return "this process" if self._peers is None else self._peers.name_of(index)

    def from_chief(self, name: str, work: Callable[[], _T], type_: Any) -> _T:
        """Calls a function on the chief; returns its result, or raises its error, on all.

        Args:
          name: What is done, for messages; the same on all processes.
          work: The function.
          type_: The type of its result, which must be one that `msgspec` decodes from JSON.
        """
        peers = self._peers
        if peers is None:
            return work()
        if self.is_chief:
            # The others wait in the exchange meanwhile, in one round trip with the outcome.
            outcome, value, error = _attempted(work)
            peers.exchange(name, msgspec.json.encode(outcome))
            if error is not None:
                raise error
            return value  # type: ignore[return-value]
        told = msgspec.json.decode(peers.exchange(name, b"")[0], type=_Outcome)
        if told.failure is not None:
            raise _error_of(told.failure, peers.name_of(0))
        return msgspec.json.decode(told.value, type=type_)

    def together(self, name: str, work: Callable[[], _T], type_: Any) -> list[_T]:
        """Calls a function on all processes; returns the results of all, by index.

        If it raised anywhere, all processes raise the error of the first that failed: that process
        its own, the others one of the same type that names the process.
        """
        peers = self._peers
        if peers is None:
            return [work()]
        outcome, _, error = _attempted(work)
        told = [
            msgspec.json.decode(one, type=_Outcome)
            for one in peers.exchange(name, msgspec.json.encode(outcome))
        ]
        for index, one in enumerate(told):
            if one.failure is None:
                continue
            if index == peers.index and error is not None:
                raise error
            raise _error_of(one.failure, peers.name_of(index)) from error
        return [msgspec.json.decode(one.value, type=type_) for one in told]


def _attempted(work: Callable[[], _T]) -> tuple[_Outcome, _T | None, Exception | None]:
    try:
        value = work()
        return _Outcome(msgspec.Raw(msgspec.json.encode(value))), value, None
    except Exception as error:
        return _Outcome(failure=_failure_of(error)), None, error


def _failure_of(error: Exception) -> _Failure:
    parts = error.parts if isinstance(error, errors.DistributeError) else ()
    errno = error.errno if isinstance(error, OSError) else None
    return _Failure(type(error).__name__, str(error), parts, errno)


def _error_of(failure: _Failure, task: str) -> errors.DistributeError:
    """Returns the error that a process raises for the failure of another one."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.DistributeError)):
        return errors.UnavailableError(f"{task} failed: {failure.kind}: {failure.text}")
    if failure.parts:
        required, found, advice = failure.parts
        error = kind(required, f"on {task}, {found}", advice)
    else:
        error = kind(f"{task}: {failure.text}")
    if isinstance(error, OSError):
        error.errno = failure.errno
    return error
