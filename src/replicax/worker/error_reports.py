"""Describes errors of closures for the coordinator, which rebuilds the exceptions."""

from __future__ import annotations

import builtins
import contextlib
import os
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal

from replicax.foundation import errors
from replicax.protocol.messages import ClosureCall, RemoteError, Result

Cause = Literal["closure", "input", "server", "fenced", "unknown_function"]

# The header of a message contains several errors.
_TEXT_LENGTH = 8_000
_TRACEBACK_LENGTH = 16_000
_MAX_CHAIN = 10
_HERE = os.path.dirname(__file__) + os.sep


class UnknownFunctionError(Exception):
    """The worker does not have a function, or has evicted it."""


def describe(error: BaseException, default: Cause = "closure") -> RemoteError:
    """Describes an error.

    Args:
      error: The error.
      default: The cause, if the chain of the error contains no other.

    >>> remote = describe(KeyError("weights"))
    >>> remote.cause, remote.kind, remote.text
    ('closure', 'KeyError', 'weights')
    """
    cause, root = _classify(error, default)
    if cause in ("server", "fenced"):
        # The coordinator acts on the root, wherever it surfaced.
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
    """Describes a closure that was recalled before it ran."""
    error = errors.CancelledError(
        f"Closure {closure} was recalled from {task} before it ran. Schedule it again."
    )
    return RemoteError("cancelled", _kind_of(type(error)), str(error), "", parts=error.parts)


def recalled(calls: Iterable[ClosureCall], task: str) -> list[Result]:
    """Returns the results of closures that were recalled before they ran."""
    return [
        Result(call.closure, None, cancelled(call.closure, task), 0, attempt=call.attempt)
        for call in calls
    ]


def size_of(error: RemoteError) -> int:
    """Returns the maximum size of an error in a header."""
    texts = (error.kind, error.text, error.traceback, *error.parts)
    return 64 + sum(len(text.encode(errors="replace")) for text in texts)


def _classify(error: BaseException, default: Cause) -> tuple[Cause, BaseException]:
    """Returns the cause of an error, and the error in its chain that determines it."""
    for link in _chain(error):
        if isinstance(link, UnknownFunctionError):
            return "unknown_function", link
        if isinstance(link, errors.FencedError):
            return "fenced", link
        if isinstance(link, errors.PSUnavailableError) or _is_timeout_of_server(link):
            return "server", link
        if isinstance(link, errors.ClosureInputError):
            return "input", link
    return default, error


def _is_timeout_of_server(error: BaseException) -> bool:
    """Returns whether a server did not reply; deadlines of the user's own have no task index."""
    return isinstance(error, errors.DeadlineExceededError) and hasattr(error, "task_index")


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _kind_of(kind: type[BaseException]) -> str:
    """Returns the name of a built-in or replicax class, or the qualified name of another one."""
    if getattr(builtins, kind.__name__, None) is kind:
        return kind.__name__
    if getattr(errors, kind.__name__, None) is kind:
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _text_of(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str):
        # `str` quotes the key, and the coordinator would quote it again.
        return _clean(error.args[0])
    try:
        return _clean(str(error))
    except Exception as failure:
        return f"(its text raises {type(failure).__name__})"


def _parts_of(error: BaseException) -> tuple[str, ...]:
    """Returns the parts of a replicax error; none if its text is too long."""
    if not isinstance(error, errors.DistributeError) or len(str(error)) > _TEXT_LENGTH:
        return ()
    return tuple(map(_clean, error.parts))


def _traceback_of(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        start = _first_user_frame(error.__traceback__)
        lines = traceback.TracebackException(type(error), error, start, compact=True).format()
        return _clean("".join(lines))
    return ""


def _first_user_frame(link: TracebackType | None) -> TracebackType | None:
    """Skips the frames of the worker itself."""
    start = link
    while link is not None and link.tb_frame.f_code.co_filename.startswith(_HERE):
        link = link.tb_next
    return link or start


def _clean(text: str) -> str:
    """Returns a text that can be encoded as UTF-8."""
    return str(text).encode(errors="replace").decode()


def _end_of_data() -> errors.OutOfRangeError:
    return errors.OutOfRangeError(
        "A closure needs another element",
        "its iterator is exhausted",
        "Repeat the dataset, or schedule as many steps as it has.",
    )
