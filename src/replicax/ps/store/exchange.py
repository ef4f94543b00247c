"""The one question of training: closures change parts of a server, then parts are read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from replicax.ps.store import rules
from replicax.ps.store.accumulation import Completion, Contribution
from replicax.ps.store.counters import Figures
from replicax.ps.store.optimizers import Step
from replicax.ps.store.parts import Part
from replicax.ps.store.storage import Checked, Storage, num_buffers

# What reads of a closure led to, and what of it moves the values.
_GRADIENTS = (Step, Contribution, Completion)
_STEPS = (Step, Completion)


def require_buffers(body: messages.Exchange, buffers: Sequence[Any], task: str) -> None:
    """Raises ProtocolError unless there are as many buffers as the question speaks of."""
    expected = sum(read.is_rows for read in body.reads)
    for push in body.pushes:
        expected += sum(map(num_buffers, push.changes))
    if expected != len(buffers):
        raise errors.ProtocolError(
            f"This exchange with {task} must bring {expected} buffers",
            f"it brings {len(buffers)}",
            "Update both sides.",
        )


def push_all(
    storage: Storage,
    pushes: Sequence[messages.Push],
    buffers: Sequence[Any],
    figures: Figures,
    *,
    is_alone: bool = False,
) -> list[messages.PushFailure]:
    """Makes what closures ask for, each as a whole or not at all; returns those that failed.

    Whoever calls this holds `changing`. Should memory run out between two changes of a closure,
    the first stays made, and the table knows it: a repetition makes the rest. Gradients that are
    `is_alone`, such as those of the coordinator, do not wait for others in any mode.
    """
    failures: list[messages.PushFailure] = []
    position = 0
    with np.errstate(all="ignore"):
        for push in pushes:
            used = sum(map(num_buffers, push.changes))
            own = buffers[position : position + used]
            position += used
            figures.updates += len(push.changes)
            try:
                checked = storage.check(push, own, is_alone=is_alone)
                figures.duplicates += len(push.changes) - len(checked)
                _make(storage, push, checked, figures)
            except errors.DistributeError as error:
                refused = error_replies.from_error(error)
                failures.append(messages.PushFailure(push.closure, refused))
            except MemoryError as error:
                exhausted = errors.ResourceExhaustedError(
                    f"The changes of closure {push.closure} need memory",
                    f"there was not enough: {error}",
                    "Use smaller parts, or more servers.",
                )
                refused = error_replies.from_error(exhausted)
                failures.append(messages.PushFailure(push.closure, refused))
    figures.failures += len(failures)
    return failures


def _make(
    storage: Storage, push: messages.Push, checked: Sequence[Checked], figures: Figures
) -> None:
    clock = storage.clock
    # A closure is one step of the clock, however many optimizers and questions it needs.
    is_told = False
    if any(isinstance(change, _GRADIENTS) for _, change in checked):
        is_again = storage.once.has_step(push.closure)
        is_told = is_again and storage.accumulation.num_needed is None
        if push.clock >= 0:
            clock.measure(push.clock + is_again)
    with _locked([change for _, change in checked]):
        for key, change in checked:
            if not is_told and isinstance(change, _STEPS):
                clock.tick()
                is_told = True
            change.make()
            storage.once.record(push.closure, key)
            figures.applied += 1
            figures.rows_written += change.num_rows


def apply_rest(storage: Storage) -> None:
    """Lets gradients that wait for others make a step without them; `changing` is held."""
    try:
        steps = storage.accumulation.rest(storage.optimizers)
        with np.errstate(all="ignore"), _locked(steps):
            if steps:
                storage.clock.tick()
            for step in steps:
                step.make()
    except MemoryError as error:
        raise errors.ResourceExhaustedError(
            "A step of an optimizer needs memory",
            f"there was not enough: {error}",
            "Use smaller parts, or more servers.",
        ) from error


def _locked(changes: Sequence[rules.Change]) -> contextlib.AbstractContextManager[Any]:
    """Locks the parts that some changes need, in the order of their numbers."""
    if len(changes) == 1 and len(changes[0].parts) == 1:
        return changes[0].parts[0].lock
    parts: dict[int, Part] = {p.spec.part: p for change in changes for p in change.parts}
    stack = contextlib.ExitStack()
    for number in sorted(parts):
        stack.enter_context(parts[number].lock)
    return stack


def read_all(
    storage: Storage, reads: Sequence[messages.Read], buffers: Sequence[Any], figures: Figures
) -> tuple[list[messages.ReadResult], list[Any]]:
    """Reads parts or rows of them; each is read at one moment, never half changed."""
    results: list[messages.ReadResult] = []
    values: list[Any] = []
    given = iter(buffers)
    for read in reads:
        part = storage.part(read.part)
        numbers = rules.as_rows_to_read(next(given), part) if read.is_rows else None
        with part.lock:
            version = part.version
            is_known = version == read.known
            if not is_known:
                values.append(part.read() if numbers is None else part.read_rows(numbers))
        results.append(messages.ReadResult(version, is_known))
        figures.reads += 1
        figures.known_reads += is_known
        if numbers is not None and not is_known:
            figures.rows_read += numbers.size
    return results, values
