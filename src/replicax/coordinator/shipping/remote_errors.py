"""Rebuilds errors of workers at the coordinator, with their original type."""

from __future__ import annotations

import builtins

from replicax.foundation import errors
from replicax.protocol.messages import RemoteError
from replicax.protocol.tasks import Task


def _is_simple(kind: object) -> bool:
    """Returns whether an object is an exception class whose instances need only a text."""
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return False
    # The interpreter gives them a meaning, or they need more than a text.
    unfit = (StopIteration, StopAsyncIteration, BaseExceptionGroup, UnicodeError)
    return not issubclass(kind, unfit) or kind is UnicodeError


_BUILTIN = {name: kind for name, kind in vars(builtins).items() if _is_simple(kind)}
_OWN = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DistributeError)
}
_END_OF_DATA = {"StopIteration", "StopAsyncIteration"}


def rebuild_error(error: RemoteError, worker: int | Task) -> Exception:
    """Returns the exception for an error that a worker has reported.

    Errors of Python and of replicax keep their type; others become `ClosureError`. The
    names are looked up in fixed tables: no name that a worker sends is imported or run.

    Args:
      error: The report of the worker.
      worker: The index of the worker, or the task.

    >>> error = RemoteError("closure", "ValueError", "bad batch", "Traceback ...")
    >>> rebuild_error(error, 1)
    ValueError('bad batch')
    """
    task = str(worker if isinstance(worker, Task) else Task("worker", worker))
    made = _rebuild(error, task)
    if error.cause == "input" and not isinstance(made, errors.ClosureInputError):
        inner, made = made, errors.ClosureInputError(*_parts(error, task))
        made.__cause__ = inner
    if error.cause == "server":
        made.task_index = error.task  # type: ignore[attr-defined]
    made.add_note(f"This happened on {task}:\n{error.traceback.rstrip()}")
    return made


def _rebuild(error: RemoteError, task: str) -> Exception:
    if error.kind in _END_OF_DATA:
        return errors.OutOfRangeError(
            f"A closure on {task} needs another element",
            "its iterator is exhausted",
            "Repeat the dataset, or schedule as many steps as it has.",
        )
    kind = _OWN.get(error.kind) or _BUILTIN.get(error.kind)
    if kind is None:
        return errors.ClosureError(*_parts(error, task))
    if len(error.parts) == 3 and issubclass(kind, errors.DistributeError):
        return kind(*error.parts)
    return kind(error.text)


def _parts(error: RemoteError, task: str) -> tuple[str, str, str]:
    return (
        "A closure and what it needs must run without an error",
        f"{error.kind} was raised on {task}: {error.text}",
        "The notes of this error have the traceback of the worker.",
    )
