"""Changes on their way to servers: cut into pieces, and packed per server and closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from replicax.contexts.overlay import Change
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.client.rows import RowPlan
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.sharded import ShardedVariable

Planner = Callable[[Any, np.ndarray], RowPlan]


class Piece(NamedTuple):
    """What of a change one server is told."""

    server: int
    change: messages.Update | messages.Apply
    buffers: list[np.ndarray]


class Outgoing:
    """What will be told to one server with the next question."""

    def __init__(self) -> None:
        # Per closure its changes, their buffers, and the server's clock when it read.
        self.closures: dict[int, tuple[list[Any], list[np.ndarray], int]] = {}
        self.num_bytes = 0

    def add(self, closure: int, piece: Piece, clock: int = -1) -> bool:
        """Adds a piece; tells whether it is the first of its closure."""
        found = self.closures.get(closure)
        is_first = found is None
        changes, buffers, _ = found or ([], [], clock)
        if is_first:
            self.closures[closure] = (changes, buffers, clock)
        changes.append(piece.change)
        buffers += piece.buffers
        self.num_bytes += sum(buffer.nbytes for buffer in piece.buffers)
        return is_first

    def take(self) -> tuple[list[messages.Push], list[np.ndarray], list[int]]:
        """Returns and forgets all pushes, their buffers, and the closures they belong to."""
        if not self.closures:
            return [], [], []
        pushes = [
            messages.Push(closure, changes, clock)
            for closure, (changes, _, clock) in self.closures.items()
        ]
        buffers = [b for _, found, _ in self.closures.values() for b in found]
        closures = list(self.closures)
        self.closures = {}
        self.num_bytes = 0
        return pushes, buffers, closures


def pieces_of(change: Change, call: int, plan: Planner) -> Iterator[Piece]:
    """Cuts a change into pieces for servers."""
    target, kind, payload, condition = change
    if condition is not None and not np.asarray(condition):
        return
    if kind == "apply":
        yield from _applied(target, call, payload, plan)
    elif isinstance(payload, IndexedSlices):
        ids = np.asarray(payload.indices)
        if ids.ndim > 1:
            yield _elements(target, kind, call, payload)
            return
        parts, rows = _cut(target, kind, ids, np.asarray(payload.values), plan)
        for part, numbers, values in zip(parts, *rows, strict=True):
            if numbers.size:
                update = messages.Update(call, kind, part.number)
                yield Piece(part.server, update, [_row_numbers(part, numbers), values])
    else:
        update = messages.Update(call, kind, target.number)
        yield Piece(target.server, update, [_dense(payload, target.dtype)])


def _applied(target: Any, call: int, gradients: list[Any], plan: Planner) -> Iterator[Piece]:
    """Cuts one step of an optimizer: one piece for each server that holds a part of it."""
    found: dict[int, tuple[list[messages.Gradient], list[np.ndarray]]] = {}
    if any(gradient is None for gradient in gradients):
        # A server without a gradient counts the step too.
        found |= {part.server: ([], []) for v in target.trained for part in v.components}
    for variable, gradient in zip(target.trained, gradients, strict=True):
        if gradient is None:
            continue
        if isinstance(gradient, IndexedSlices):
            ids, values = np.asarray(gradient.indices), np.asarray(gradient.values)
            parts, (numbers, rows) = _cut(variable, "gradient", ids, values, plan)
            pieces = [
                (True, [_row_numbers(p, n), r])
                for p, n, r in zip(parts, numbers, rows, strict=True)
            ]
        else:
            is_sharded = isinstance(variable, ShardedVariable)
            parts = cast(Any, variable.variables) if is_sharded else [variable]
            whole, start = _dense(gradient, variable.dtype), 0
            pieces = []
            for part in parts:
                rows_here = part.shape[0] if len(parts) > 1 else 0
                own = whole[start : start + rows_here] if len(parts) > 1 else whole
                pieces.append((False, [own]))
                start += rows_here
        for part, (is_rows, buffers) in zip(parts, pieces, strict=True):
            names, arrays = found.setdefault(part.server, ([], []))
            names.append(messages.Gradient(part.number, is_rows))
            arrays += buffers
    for server, (names, arrays) in found.items():
        yield Piece(server, messages.Apply(call, target.number, names), arrays)


def _cut(
    variable: Any, kind: str, ids: np.ndarray, values: np.ndarray, plan: Planner
) -> tuple[list[Any], tuple[list[np.ndarray], list[np.ndarray]]]:
    found = plan(variable, ids)
    parts = variable.variables if isinstance(variable, ShardedVariable) else [variable]
    rows = found.gather(kind, _as(values, variable.dtype))
    return parts, (found.pieces, [np.ascontiguousarray(r) for r in rows])


def _elements(target: Any, kind: str, call: int, payload: IndexedSlices) -> Piece:
    """Makes a dense change of one of single elements, where that is the same."""
    if kind not in ("scatter_add", "scatter_sub") or isinstance(target, ShardedVariable):
        raise errors.UnsupportedError(
            f"`{kind}` at vectors of indices needs a variable in this process",
            f"{target.name!r} lives on {target.device}",
            "Change whole rows, or read, change and assign the value.",
        )
    dense = np.zeros(target.shape, np.dtype(target.dtype))
    indices = tuple(np.moveaxis(np.asarray(payload.indices), -1, 0))
    np.add.at(dense, indices, np.asarray(payload.values))
    update = messages.Update(call, kind.replace("scatter", "assign"), target.number)
    return Piece(target.server, update, [dense])


def _row_numbers(part: Any, ids: np.ndarray) -> np.ndarray:
    width = np.int32 if part.shape[0] < 2**31 else np.int64
    return np.ascontiguousarray(ids, width)


def _dense(payload: Any, dtype: Any) -> np.ndarray:
    return np.ascontiguousarray(_as(np.asarray(payload), dtype))


def _as(array: np.ndarray, dtype: Any) -> np.ndarray:
    return array if array.dtype == dtype else array.astype(np.dtype(dtype))


def no_closure() -> errors.ContextError:
    """Returns the error for a change on a worker that belongs to nothing."""
    return errors.ContextError(
        "A worker changes variables inside of closures",
        "no closure is running",
        "Change variables in the function that was scheduled.",
    )


def no_answer(peer: Task, timeout: float) -> errors.DeadlineExceededError:
    """Returns the error for a server that takes too long."""
    return errors.DeadlineExceededError(
        f"{peer} must answer within {timeout:g} s",
        "there was no answer",
        "Check that it runs and is not overloaded.",
    )


def strangers(variable: Any, ids: np.ndarray) -> errors.InvalidArgumentError:
    """Returns the error for row numbers that a variable does not have."""
    return errors.InvalidArgumentError(
        f"A lookup in {variable.name!r} needs indices in [0, {variable.shape[0]})",
        f"they reach from {ids.min()} to {ids.max()}",
        "Correct the row numbers.",
    )
