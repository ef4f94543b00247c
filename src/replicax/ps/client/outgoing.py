"""Outgoing changes: split by server, and packed by closure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from replicax.contexts.overlay import Change
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.protocol import messages
from replicax.ps.client.rows import RowPlan
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables.remote import RemoteVariable, RemoteVariableBase
from replicax.variables.sharded import ShardedVariable

Planner = Callable[[RemoteVariableBase, np.ndarray], RowPlan]


class _RemoteOptimizer(Protocol):
    """An optimizer whose state is on parameter servers."""

    number: int

    @property
    def trained(self) -> Sequence[RemoteVariableBase]: ...


_Change = messages.Update | messages.Apply


class Piece(NamedTuple):
    """The share of one server in a change."""

    server: int
    change: _Change
    buffers: list[np.ndarray]


class Outgoing:
    """The changes of the next request to one server."""

    def __init__(self) -> None:
        # By closure: its changes, their buffers, and the server's clock at its first read.
        self.closures: dict[int, tuple[list[_Change], list[np.ndarray], int]] = {}
        self.num_bytes = 0

    def add(self, closure: int, piece: Piece, clock: int = -1) -> bool:
        """Adds a piece; returns whether it is the first of its closure."""
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
        """Removes and returns all pushes, their buffers, and their closures."""
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
    """Splits a change by server."""
    target, kind, payload, condition = change
    if condition is not None and not np.asarray(condition):
        return
    if kind == "apply":
        yield from _applied(cast(_RemoteOptimizer, target), call, payload, plan)
        return
    variable = cast(RemoteVariable, target)
    if isinstance(payload, IndexedSlices):
        ids = np.asarray(payload.indices)
        if ids.ndim > 1:
            yield _elements(variable, kind, call, payload)
            return
        parts, rows = _cut(variable, kind, ids, np.asarray(payload.values), plan)
        for part, numbers, values in zip(parts, *rows, strict=True):
            if numbers.size:
                update = messages.Update(call, kind, part.number)
                yield Piece(part.server, update, [_row_numbers(part, numbers), values])
    else:
        update = messages.Update(call, kind, variable.number)
        yield Piece(variable.server, update, [_dense(payload, variable.dtype)])


def _applied(
    target: _RemoteOptimizer, call: int, gradients: Sequence[Tree], plan: Planner
) -> Iterator[Piece]:
    """Splits one step of an optimizer: one piece for each server that holds a part of it."""
    found: dict[int, tuple[list[messages.Gradient], list[np.ndarray]]] = {}
    if any(gradient is None for gradient in gradients):
        # A server without a gradient counts the step as well.
        found |= {part.server: ([], []) for v in target.trained for part in _parts_of(v)}
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
            parts = _parts_of(variable)
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
    variable: RemoteVariableBase, kind: str, ids: np.ndarray, values: np.ndarray, plan: Planner
) -> tuple[Sequence[RemoteVariable], tuple[list[np.ndarray], list[np.ndarray]]]:
    found = plan(variable, ids)
    parts = _parts_of(variable)
    rows = found.gather(kind, _as(values, variable.dtype))
    return parts, (found.pieces, [np.ascontiguousarray(r) for r in rows])


def _elements(target: RemoteVariableBase, kind: str, call: int, payload: IndexedSlices) -> Piece:
    """Returns an update of single elements as a dense one, where that is equivalent."""
    if kind not in ("scatter_add", "scatter_sub") or not isinstance(target, RemoteVariable):
        raise errors.UnsupportedError(
            f"`{kind}` at vectors of indices needs a variable in this process",
            f"{target.name!r} is on {target.device}",
            "Change whole rows, or read, change and assign the value.",
        )
    dense = np.zeros(target.shape, np.dtype(target.dtype))
    indices = tuple(np.moveaxis(np.asarray(payload.indices), -1, 0))
    np.add.at(dense, indices, np.asarray(payload.values))
    update = messages.Update(call, kind.replace("scatter", "assign"), target.number)
    return Piece(target.server, update, [dense])


def _parts_of(variable: RemoteVariableBase) -> Sequence[RemoteVariable]:
    is_sharded = isinstance(variable, ShardedVariable)
    return cast(Sequence[RemoteVariable], variable.variables if is_sharded else [variable])


def _row_numbers(part: RemoteVariable, ids: np.ndarray) -> np.ndarray:
    width = np.int32 if part.shape[0] < 2**31 else np.int64
    return np.ascontiguousarray(ids, width)


def _dense(payload: ArrayLike, dtype: DTypeLike) -> np.ndarray:
    return np.ascontiguousarray(_as(np.asarray(payload), dtype))


def _as(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    return array if array.dtype == dtype else array.astype(np.dtype(dtype))
