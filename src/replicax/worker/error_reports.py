"""Errors of a worker's closures as texts: the coordinator makes exceptions of them again."""

from __future__ import annotations

import builtins
import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Literal

from replicax.foundation import errors
from replicax.protocol.messages import ClosureCall, RemoteError, Result

Cause = Literal["closure", "input", "server", "fenced", "unknown_function"]

# Errors travel in headers, several in one.
_TEXT_LENGTH = 8_000
_TRACEBACK_LENGTH = 16_000
_LONGEST_CHAIN = 10
_HERE = os.path.dirname(__file__) + os.sep


class UnknownFunctionError(Exception):
    """The coordinator named a function that the worker does not have, or has no more."""


def describe(error: BaseException, otherwise: Cause = "closure") -> RemoteError:
    """Puts an error into words.

    Args:
      error: The error.
      otherwise: What it is blamed on if it is not the fault of anything known.

    >>> remote = describe(KeyError("weights"))
    >>> remote.cause, remote.kind, remote.text
    ('closure', 'KeyError', 'weights')
    """
    cause, root = _blame(error, otherwise)
    if cause in ("server", "fenced"):
        # Wherever it surfaced, it is this error that the coordinator acts on.
        error = root
    if isinstance(error, StopIteration):
        error = _end_of_data().with_traceback(error.__traceback__)
    return RemoteError(
        cause,
        _kind_of(type(error)),
        _text_of(error)[:_TEXT_LENGTH],
        _traceback_of(error)[-_TRACEBACK_LENGTH:],
        getattr(error, "task_index", -1) if cause == "server" else -1,
        _parts_of(error),
    )


def cancelled(closure: int, task: str) -> RemoteError:
    """Describes a closure that was taken back before it ran."""
    error = errors.CancelledError(
        "A closure runs unless it is cancelled before",
        f"closure {closure} was taken from the queue of {task}",
        "Schedule it again.",
    )
    return RemoteError("cancelled", _kind_of(type(error)), str(error), "", parts=error.parts)


def taken_back(calls: Iterable[ClosureCall], task: str) -> list[Result]:
    """Returns what is said about closures that were taken back before they ran."""
    return [
        Result(call.closure, None, cancelled(call.closure, task), 0, attempt=call.attempt)
        for call in calls
    ]


def size_of(error: RemoteError) -> int:
    """Returns what an error takes in a header, at most."""
    texts = (error.kind, error.text, error.traceback, *error.parts)
    return 64 + sum(len(text.encode(errors="replace")) for text in texts)


def _blame(error: BaseException, otherwise: Cause) -> tuple[Cause, BaseException]:
    """Looks along the causes of an error for one that is not the closure's own."""
    for link in _chain(error):
        if isinstance(link, UnknownFunctionError):
            return "unknown_function", link
        if isinstance(link, errors.FencedError):
            return "fenced", link
        if isinstance(link, errors.PSUnavailableError) or _is_silence(link):
            return "server", link
        if isinstance(link, errors.ClosureInputError):
            return "input", link
    return otherwise, error


def _is_silence(error: BaseException) -> bool:
    """Tells whether a server gave no answer; a deadline of the user's own names no task."""
    return isinstance(error, errors.DeadlineExceededError) and hasattr(error, "task_index")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _kind_of(kind: type[BaseException]) -> str:
    """Returns a bare name for types that the coordinator knows, a qualified one for others."""
    if getattr(builtins, kind.__name__, None) is kind:
        return kind.__name__
    if getattr(errors, kind.__name__, None) is kind:
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text_of(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        # Python shows the key in quotes, and would do so again at the coordinator.
        return _clean(error.args[0])
    try:
        return _clean(str(error))
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def _parts_of(error: BaseException) -> tuple[str, ...]:
    """Returns the parts of one of our errors; none if its text has to be cut."""
    if not isinstance(error, errors.DistributeError) or len(str(error)) > _TEXT_LENGTH:
        return ()
    return tuple(map(_clean, error.parts))


def _traceback_of(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        start = _first_foreign(error.__traceback__)
        lines = traceback.TracebackException(type(error), error, start, compact=True).format()
        return _clean("".join(lines))
    return ""


def _first_foreign(link: TracebackType | None) -> TracebackType | None:
    """Leaves out the calls of the worker itself."""
    start = link
    while link is not None and link.tb_frame.f_code.co_filename.startswith(_HERE):
        link = link.tb_next
    return link or start


def _clean(text: Any) -> str:
    """Returns a text that can be written as UTF-8."""
    return str(text).encode(errors="replace").decode()


def _end_of_data() -> errors.OutOfRangeError:
    return errors.OutOfRangeError(
        "A closure needs another element",
        "the iterator that it reads has come to its end",
        "Repeat the dataset, or schedule as many steps as it has.",
    )
