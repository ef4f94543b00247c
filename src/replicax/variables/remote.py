"""Handles to variables on parameter servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode, StrategyHooks
from replicax.contexts.overlay import Change
from replicax.foundation import devices, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree
from replicax.variables import creators, read_cache, row_numbers, updates
from replicax.variables.replicated import apply_from_replicas
from replicax.variables.row_selection import select_rows
from replicax.variables.slicing import Index, SlicedValue, as_rows
from replicax.variables.updates import Payload, payload_for
from replicax.variables.variable import Variable, require_outside_traces

if TYPE_CHECKING:
    from replicax.bundle.manifest import Part


class Read(NamedTuple):
    """A request for the value of a remote or sharded variable.

    Attributes:
      variable: The variable to read.
      ids: The row numbers to read, in any order, possibly repeated; None for the whole value.
    """

    variable: RemoteVariableBase
    ids: ArrayLike | None = None


class TableRows(NamedTuple):
    """The rows of an array of a checkpoint that one remote variable holds.

    Attributes:
      variable: The variable.
      name: The name of the array.
      shape: The shape of the array.
      start: The row of the array that is the first of the variable.
    """

    variable: RemoteVariable
    name: str
    shape: tuple[int, ...]
    start: int


class VariableClient(Protocol):
    """Reads and updates remote variables."""

    def pull(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """Returns values that include every change this process has pushed."""
        ...

    def push(self, changes: Sequence[Change]) -> None:
        """Sends changes; each is applied exactly once."""
        ...

    def save_rows(self, directory: Path, rows: Sequence[TableRows]) -> list[Part]:
        """Lets all servers write rows into the directory of a bundle, in parallel.

        Raises:
          NotFoundError: A server does not share the directory.
          PermissionDeniedError: A server may not write there.
          UnsupportedError: This process cannot request that.
        """
        ...

    def load_rows(self, path: Path, rows: Sequence[TableRows], *, is_check: bool) -> None:
        """Lets all servers read rows from a checkpoint, in parallel, or check them only.

        Raises:
          DataLossError: Rows are not as they were written.
          DistributeError: As `save_rows`.
        """
        ...


class RemoteVariableBase(Variable):
    """Base class of variables without an array in this process."""

    __slots__ = ()
    is_remote = True

    @property
    @override
    def placement(self) -> tuple[Device, ...]:
        """The devices on which its values are used."""
        layout = None if self.owner is None else self.owner.layout
        return (devices.current(),) if layout is None else layout.devices

    def read_rows(self, frame: Frame, ids: ArrayLike) -> jax.Array:
        """Returns rows by number, in the order of `ids`; only these rows are transferred."""
        return row_numbers.take(self.read(frame), ids)

    @override
    def read_part(self, index: Index) -> jax.Array:
        # A scope that caches reads caches whole values.
        is_whole = not self.shape or read_cache.is_open()
        selection = None if is_whole else select_rows(index, self.shape[0], self.name)
        if selection is None:
            return super().read_part(index)
        frame = frames.current()
        self.check_frame(frame, "The value of")
        rows = self.read_rows(frame, selection.ids)
        if frame.overlay is not None:
            frame.overlay.note_slice(self)
        return rows[selection.within]

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
        layout = frame.layout
        if frame.mode is Mode.REPLICA and layout is not None and layout.num_replicas > 1:
            apply_from_replicas(self, frame, kind, payload)
        else:
            self.apply_directly(frame, kind, payload)

    @override
    def store(self, frame: Frame, value: ArrayLike) -> None:
        self.apply_directly(frame, "assign", value)

    def as_row_update(self, frame: Frame, kind: str, payload: Payload) -> tuple[str, Payload]:
        """Returns an update as an equivalent update of whole rows, the only kind servers apply."""
        if not isinstance(payload, SlicedValue):
            return kind, payload
        return as_rows(self, kind, payload, lambda ids: self.read_rows(frame, ids))

    @override
    def describe(self) -> str:
        head = f"<rx.Variable '{self.name}:0' shape={self.shape} dtype={self.dtype}"
        return f"{head}, on {self.device}>"


@final
class RemoteVariable(RemoteVariableBase):
    """A variable, or a part of one, on one parameter server.

    Attributes:
      number: The number of the part on that server.
      server: The index of the parameter server.
      num_bytes: The size of its value.
      client: Reads and updates the variable.
      container: The sharded variable that it is a part of, else the variable itself.
    """

    __slots__ = ("client", "container", "num_bytes", "number", "server")

    def __init__(
        self,
        attributes: creators.VariableAttributes,
        *,
        number: int,
        server: int,
        client: VariableClient,
        owner: StrategyHooks | None = None,
    ) -> None:
        self.set_up(attributes, None, owner=owner)
        self.number = number
        self.server = server
        self.num_bytes = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        self.client = client
        self.container: Any = self

    @property
    @override
    def device(self) -> str:
        return f"/job:ps/replica:0/task:{self.server}/device:CPU:0"

    @override
    def read(self, frame: Frame) -> jax.Array:
        if frame.overlay is not None:
            return read_cache.read_in_trace(frame.overlay, self)
        require_outside_traces(self, frame)
        return self._fetched(frame, None)

    @override
    def read_rows(self, frame: Frame, ids: ArrayLike) -> jax.Array:
        if frame.overlay is not None:
            return frame.overlay.read_rows(self, ids)
        require_outside_traces(self, frame)
        return self._fetched(frame, ids)

    def _fetched(self, frame: Frame, ids: ArrayLike | None) -> jax.Array:
        with jax_compat.eagerly(), jax_compat.any_dtype(self.dtype):
            value = jnp.asarray(read_cache.pull(self.client, [Read(self, ids)])[0])
            if frame.replica_id is not None and frame.layout is not None:
                return placement.put(value, frame.layout.local_devices[frame.replica_id])
            return value

    @override
    def sparse_read(self, indices: ArrayLike) -> jax.Array:
        return checked_rows(self, indices)

    @override
    def read_copy(self, replica_id: int) -> jax.Array:
        del replica_id
        with jax_compat.eagerly(), jax_compat.any_dtype(self.dtype):
            return jnp.asarray(self.client.pull([Read(self)])[0])

    @override
    def apply_directly(self, frame: Frame, kind: str, payload: Payload) -> None:
        kind, own = self.as_row_update(frame, kind, payload_for(payload, 0))
        change = Change(self, kind, own)
        if frame.overlay is not None:
            frame.overlay.record(change)
        else:
            self.client.push([change])

    def value_after(self, change: Change, value: Tree) -> Tree:
        """Returns the value of this variable after a change."""
        if change.target is self:
            new = updates.apply(change.kind, value, change.payload)
            return new if change.condition is None else jnp.where(change.condition, new, value)
        return self.container.part_after(self, change, value)

    @override
    def follows(self, change: Change) -> bool:
        return change.target is self or change.target is self.container

    def shipping_key(self) -> tuple[Any, ...]:
        """Returns the plain values from which another process creates its own handle."""
        if self.container is not self:
            index = next(i for i, v in enumerate(self.container.variables) if v is self)
            return ("part", index, self.container.shipping_key())
        return self.own_key()

    def own_key(self) -> tuple[Any, ...]:
        """Returns the shipping key of this part without its container."""
        return ("variable", self.number, self.server, *attributes_key(self))


@final
class CopiedVariable(RemoteVariableBase):
    """A small variable with a copy on several parameter servers, each updated independently.

    It holds optimizer state that every part needs locally, such as the step count.
    """

    __slots__ = ("copies",)

    def __init__(
        self,
        attributes: creators.VariableAttributes,
        copies: Sequence[RemoteVariable],
        owner: StrategyHooks,
    ) -> None:
        self.set_up(attributes, None, owner=owner)
        self.copies = tuple(copies)

    @property
    @override
    def device(self) -> str:
        return self.copies[0].device

    @override
    def read(self, frame: Frame) -> jax.Array:
        return self.copies[0].read(frame)

    @override
    def read_copy(self, replica_id: int) -> jax.Array:
        return self.copies[0].read_copy(replica_id)

    @override
    def apply_directly(self, frame: Frame, kind: str, payload: Payload) -> None:
        for copy in self.copies:
            copy.apply_directly(frame, kind, payload)

    def shipping_key(self) -> tuple[Any, ...]:
        """Returns the plain values from which another process creates its own handle."""
        return ("copies", tuple(c.shipping_key() for c in self.copies), attributes_key(self))


def attributes_key(variable: Variable) -> tuple[Any, ...]:
    """Returns the attributes of a variable as plain values."""
    return (
        variable.name,
        variable.shape,
        jnp.dtype(variable.dtype).name,
        variable.trainable,
        variable.synchronization.name,
        variable.aggregation.name,
    )


def checked_rows(variable: RemoteVariableBase, indices: ArrayLike) -> jax.Array:
    """Returns rows of a remote or sharded variable, in the order of the indices."""
    frame = frames.current()
    variable.check_frame(frame, "A lookup in")
    return variable.read_rows(frame, row_numbers.checked("sparse_read", variable, indices))
