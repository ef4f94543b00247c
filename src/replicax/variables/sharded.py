"""`ShardedVariable`: one variable cut into parts along its first dimension."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame
from replicax.contexts.overlay import Change
from replicax.foundation import errors, jax_compat
from replicax.foundation.public_names import show_in_package
from replicax.foundation.types import Tree
from replicax.values.array_surface import as_operand
from replicax.values.indexed_slices import IndexedSlices
from replicax.variables import creators, updates
from replicax.variables.partitioners import split_rows
from replicax.variables.remote import Read, RemoteVariable, RemoteVariableBase, checked_rows
from replicax.variables.row_selection import select_rows
from replicax.variables.slicing import Index
from replicax.variables.updates import Payload, payload_for
from replicax.variables.variable import Variable


@final
class ShardedVariable(RemoteVariableBase):
    """A variable in parts: rows 0 to a in the first, a to b in the second, and so on.

    It reads, slices, converts and computes like the whole. `variables` are its parts, which
    are variables of their own; `rx.Module` lists them in the place of the container.

    Args:
      variables: The parts, in order; they differ in nothing but the number of rows.
      name: The name of the whole.

    Raises:
      ArgumentTypeError: There are no parts, or they are not variables.
      InvalidArgumentError: Their types or shapes do not fit together; or workers use parts that are
        not on servers.

    >>> import replicax as rx
    >>> parts = [rx.Variable([[0.0], [1.0]]), rx.Variable([[2.0]])]
    >>> table = ShardedVariable(parts, name="table")
    >>> table.shape, table[1:].tolist()
    ((3, 1), [[1.0], [2.0]])
    """

    __slots__ = ("starts", "variables")

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        parts = _checked_parts(variables)
        first = parts[0]
        rows = [part.shape[0] for part in parts]
        attributes = creators.VariableAttributes(
            name=name,
            shape=(sum(rows), *first.shape[1:]),
            dtype=first.dtype,
            trainable=first.trainable,
            synchronization=first.synchronization,
            aggregation=first.aggregation,
            constraint=first.constraint,
        )
        self.set_up(attributes, None, owner=first.owner)
        self.variables: list[Variable] = parts
        # The first row of each part.
        self.starts: tuple[int, ...] = tuple(itertools.accumulate([0, *rows[:-1]]))
        for part in parts:
            # What is put together from parts of another variable does not take them away.
            if isinstance(part, RemoteVariable) and part.container is part:
                part.container = self

    @property
    def is_whole_remote(self) -> bool:
        """Whether all parts are on parameter servers, and belong to this variable alone."""
        return all(isinstance(p, RemoteVariable) and p.container is self for p in self.variables)

    @property
    @override
    def device(self) -> str:
        return self.variables[0].device

    @property
    @override
    def components(self) -> tuple[Variable, ...]:
        return tuple(self.variables)

    # Reading.

    @override
    def read(self, frame: Frame) -> jax.Array:
        overlay = frame.overlay
        if overlay is not None and overlay.holds(self):
            return overlay.read(self)
        return jnp.concatenate([part.read(frame) for part in self.variables])

    @override
    def read_copy(self, replica_id: int) -> jax.Array:
        with jax_compat.eagerly(), jax_compat.any_dtype(self.dtype):
            return jnp.concatenate([part.read_copy(replica_id) for part in self.variables])

    @override
    def read_rows(self, frame: Frame, ids: ArrayLike) -> jax.Array:
        if not self.is_whole_remote:
            return super().read_rows(frame, ids)
        if frame.overlay is not None:
            return frame.overlay.read_rows(self, ids)
        first = self.variables[0]
        assert isinstance(first, RemoteVariable)
        with jax_compat.eagerly(), jax_compat.any_dtype(self.dtype):
            return jnp.asarray(first.client.pull([Read(self, ids)])[0])

    @override
    def sparse_read(self, indices: ArrayLike) -> jax.Array:
        """Returns the rows of the first part, then those of the second, and so on.

        Rows of one part keep their order among each other. `rx.nn.embedding_lookup` keeps
        the order of all.
        """
        ids = jnp.asarray(indices)
        rows = checked_rows(self, ids)
        part = jnp.searchsorted(jnp.asarray(self.starts), ids.reshape(-1), side="right")
        return rows.reshape((-1, *self.shape[1:]))[jnp.argsort(part, stable=True)]

    @override
    def read_part(self, index: Index) -> jax.Array:
        selection = select_rows(index, self.shape[0], self.name)
        overlay = frames.current().overlay
        # A gradient with respect to the whole would not include reads of parts.
        is_held = overlay is not None and overlay.holds(self)
        if self.is_whole_remote or is_held or selection is None:
            return super().read_part(index)
        if jax_compat.is_traced(selection.ids):
            return self.read_value()[index]
        # Parts without any of the rows are left alone.
        owners = np.searchsorted(self.starts, selection.ids, side="right") - 1
        pieces = [
            self.variables[i].read_value()[selection.ids[owners == i] - self.starts[i]]
            for i in np.unique(owners)
        ]
        rows = jnp.concatenate(pieces or [jnp.zeros((0, *self.shape[1:]), self.dtype)])
        order = np.argsort(np.argsort(owners, kind="stable"), kind="stable")
        return rows[order][selection.within]

    def consists_of(self, parts: Sequence[Variable]) -> bool:
        """Tells whether these are all the parts, in order."""
        is_same = len(parts) == len(self.variables)
        return is_same and all(a is b for a, b in zip(parts, self.variables, strict=True))

    def part_of(self, row: int) -> int:
        """Returns the place of the part that holds a row."""
        return bisect.bisect_right(self.starts, row) - 1

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.variables)

    # Writing.

    @override
    def _update(self, kind: str, value: object, read_value: bool = True) -> Self | None:
        if kind.startswith("scatter"):
            self._require_scatterable(kind, value)
        return super()._update(kind, value, read_value)

    @override
    def apply_directly(self, frame: Frame, kind: str, payload: Payload) -> None:
        kind, own = self.as_row_update(frame, kind, payload_for(payload, 0))
        if isinstance(own, IndexedSlices) and self.is_whole_remote:
            # One list of rows for all parts: it is cut where it is sent off.
            change = Change(self, kind, own)
            first = self.variables[0]
            assert isinstance(first, RemoteVariable)
            if frame.overlay is not None:
                frame.overlay.record(change)
            else:
                first.client.push([change])
            return
        for start, part in zip(self.starts, self.variables, strict=True):
            part.apply_directly(frame, kind, self._piece(own, start, part.shape[0]))

    def piece_of(self, part: Variable, payload: Payload) -> Payload:
        """Returns what of an array or of rows of the whole belongs to a part."""
        start = next(a for a, v in zip(self.starts, self.variables, strict=True) if v is part)
        return self._piece(payload, start, part.shape[0])

    def _piece(self, payload: Payload, start: int, rows: int) -> Payload:
        if not isinstance(payload, IndexedSlices):
            return payload[start : start + rows]
        # Rows of other parts get a number past the last row, which updates skip, and the value
        # zero, as the rows of a gradient may be added up.
        local = jnp.asarray(payload.indices) - start
        is_own = (local >= 0) & (local < rows)
        values = jnp.asarray(payload.values)
        own = jnp.where(is_own.reshape(-1, *(1 for _ in self.shape[1:])), values, 0)
        shape = (rows, *self.shape[1:])
        return IndexedSlices(own, jnp.where(is_own, local, rows), shape)

    def part_after(self, part: Variable, change: Change, value: Tree) -> Tree:
        """Returns what the value of a part becomes by a change of the whole."""
        return updates.apply(change.kind, value, self.piece_of(part, change.payload))

    def value_after(self, change: Change, value: Tree) -> Tree:
        """Returns what the value of the whole becomes by a change of the whole."""
        return updates.apply(change.kind, value, change.payload)

    @override
    def touches(self, variable: object) -> bool:
        return variable is self or any(variable is part for part in self.variables)

    def _require_scatterable(self, kind: str, payload: object) -> None:
        expected = [stop - start for start, stop in split_rows(self.shape[0], len(self.variables))]
        if [part.shape[0] for part in self.variables] != expected:
            raise errors.UnsupportedError(
                f"`{kind}` on {self.name!r} needs parts of equal size, the first ones with one "
                "row more",
                f"they have {[part.shape[0] for part in self.variables]} rows",
                "Change the parts themselves: `sharded.variables[i]`.",
            )
        indices = payload.indices if isinstance(payload, IndexedSlices) else None
        if indices is not None and np.ndim(as_operand(indices)) != 1:
            raise errors.InvalidArgumentError(
                f"`{kind}` on {self.name!r} needs a list of row numbers",
                f"the indices have {np.ndim(as_operand(indices))} dimensions",
                "Flatten them, and the rows with them.",
            )

    def shipping_key(self) -> tuple[Any, ...]:
        """Returns what another process needs to make a handle of its own."""
        keys = []
        for part in self.variables:
            if not isinstance(part, RemoteVariable):
                raise errors.InvalidArgumentError(
                    f"A function for workers needs variables on parameter servers; "
                    f"{self.name!r} is used in it",
                    f"its part {part.name!r} is on {part.device}",
                    "Create the parts inside `with strategy.scope():`.",
                )
            keys.append(part.own_key())
        return ("sharded", self.name, tuple(keys))

    @override
    def describe(self) -> str:
        head = f"ShardedVariable '{self.name}:0' shape={self.shape} dtype={self.dtype}"
        inside = ", ".join(part.describe() for part in self.variables)
        return f"{head} {{{inside}}}"


def _checked_parts(variables: Sequence[Variable]) -> list[Variable]:
    if not isinstance(variables, list | tuple) or not variables:
        raise errors.ArgumentTypeError(
            "A ShardedVariable needs a list of variables, at least one",
            f"{variables!r} was given",
            "Pass the parts in order.",
        )
    for part in variables:
        if not isinstance(part, Variable) or isinstance(part, ShardedVariable):
            raise errors.ArgumentTypeError(
                "The parts of a ShardedVariable must be variables",
                f"one is a {type(part).__name__}",
                "Pass rx.Variable objects.",
            )
    first = variables[0]
    for part in variables:
        if not part.shape or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
            raise errors.InvalidArgumentError(
                "The parts of a ShardedVariable must have one type and shapes that differ "
                "in the first dimension only",
                f"{first.name!r} is {first.dtype}{list(first.shape)} and {part.name!r} is "
                f"{part.dtype}{list(part.shape)}",
                "Convert or reshape the parts.",
            )
    return list(variables)


show_in_package(ShardedVariable)
