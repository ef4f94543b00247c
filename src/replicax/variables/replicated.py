"""Variables with a copy on each replica: kept equal on write, or combined on read."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from typing_extensions import override

from replicax.collectives import eager, in_replica
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import View
from replicax.foundation import devices, errors, gate, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import ReduceOp, VariableAggregation
from replicax.values import printing
from replicax.values.distributed_values import DistributedValues
from replicax.values.layout import AXIS
from replicax.variables import aggregation, updates
from replicax.variables.creators import VariableAttributes
from replicax.variables.slicing import api_of
from replicax.variables.trace_guards import require_concrete, require_readable
from replicax.variables.variable import LocalVariable, Variable

# Copies up to this size are combined, and shared out, by NumPy: for a metric that is read
# once an epoch, the first computation on the devices costs more in compilation than all
# that follow.
_HOST_BYTES = 64 << 10


class ReplicatedVariable(DistributedValues, LocalVariable):
    """What variables with a copy on each replica have in common."""

    __slots__ = ()

    @property
    @override
    def components(self) -> tuple[Variable, ...]:
        return tuple(VariableComponent(self, i) for i in range(self.layout.num_replicas))

    @override
    def store(self, frame: Frame, value: Any) -> None:
        if frame.overlay is not None:
            frame.overlay.write(self, value)
        elif frame.replica_id is not None:
            self.store_copy(frame.replica_id, value)
        else:
            self.store_all_copies(frame, value)

    def store_copy(self, replica_id: int, value: Any) -> None:
        """Replaces one copy and leaves the others as they are."""
        raise NotImplementedError

    @property
    @override
    def values(self) -> tuple[Variable, ...]:
        """The copies, in replica order."""
        return self.components

    @override
    def __repr__(self) -> str:
        return printing.braces(
            type(self).__name__,
            self.layout.num_replicas,
            lambda i: VariableComponent(self, i).describe(),
        )


@final
class MirroredVariable(ReplicatedVariable):
    """A variable with equal copies; every write reaches all of them."""

    __slots__ = ()

    @property
    @override
    def sharding_of_stored(self) -> Sharding:
        return self.layout.replicated

    @override
    def read(self, frame: Frame) -> Any:
        if frame.overlay is not None:
            return frame.overlay.read(self)
        require_readable(self, frame)
        replica_id = frame.replica_id
        if replica_id is None:
            replica_id = self._replica_on(devices.explicit())
        return placement.uncommitted(self.read_copy(replica_id))

    def _replica_on(self, device: Device | None) -> int:
        """Returns the replica whose copy is nearest to a device."""
        return self.layout.devices.index(device) if device in self.layout.devices else 0

    @override
    def read_copy(self, replica_id: int) -> Any:
        with gate.state():
            self.is_lent = True
            return self.layout.copy_for(self.stored, replica_id)

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Any) -> None:
        if frame.mode is Mode.REPLICA and not frame.is_default:
            aggregation.change_from_replicas(self, frame, kind, payload)
        elif frame.mode is Mode.UPDATE:
            self.apply_directly(frame, kind, payload)
        else:
            aggregation.apply_to_copies(self, frame, kind, payload)

    @override
    def store_all_copies(self, frame: Frame, value: Any) -> None:
        if frame.overlay is not None:
            frame.overlay.write(self, value)
            return
        require_concrete(self, value)
        self.store_copies([value] * self.layout.num_replicas)

    def store_copies(self, values: list[Any]) -> None:
        """Replaces all copies at once."""
        with gate.state():
            self.stored = self.layout.from_copies(values)
            self.is_lent = True

    @override
    def store_copy(self, replica_id: int, value: Any) -> None:
        require_concrete(self, value)
        with gate.state():
            copies = list(self.layout.copies(self.stored))
            copies[replica_id] = value
            self.stored = self.layout.from_copies(copies)
            self.is_lent = True

    @override
    def initialize(self, value: Any) -> None:
        self.stored = self.layout.replicate(value)


@final
class SyncOnReadVariable(ReplicatedVariable):
    """A variable whose copies go their own way, and are combined when read from outside."""

    __slots__ = ()
    is_per_replica = True

    @property
    @override
    def sharding_of_stored(self) -> Sharding:
        return self.layout.per_replica

    @override
    def read(self, frame: Frame) -> Any:
        if frame.overlay is not None:
            value = frame.overlay.read(self)
            is_seen_from_outside = frame.mode is Mode.CROSS_REPLICA or frame.is_default
            if frame.overlay.view is View.READ or not is_seen_from_outside:
                return value
            if frame.overlay.view is View.STORED:
                return self._combine_stored(value)
            return self._combine_local(value)
        require_readable(self, frame)
        if frame.replica_id is not None:
            return placement.uncommitted(self.read_copy(frame.replica_id))
        with gate.state():
            if self.stored.nbytes <= _HOST_BYTES:
                return self._combine_on_host(self.stored)
            self.is_lent = True
            return self._combine_copies(self.layout.split(self.stored, not self.shape))

    @override
    def read_copy(self, replica_id: int) -> Any:
        with gate.state():
            self.is_lent = True
            return self.layout.component(self.stored, replica_id, not self.shape)

    def _combine_on_host(self, stored: Any) -> Any:
        self._require_aggregation("Reading")
        rows = np.asarray(stored).reshape((self.layout.num_replicas, *self.shape))
        value = rows[0]
        if self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            value = rows.sum(0, dtype=self.dtype)
        if self.aggregation is VariableAggregation.MEAN:
            value = (value / self.layout.num_replicas).astype(self.dtype)
        with jax_compat.any_dtype(self.dtype):
            return placement.uncommitted(jax.device_put(value, devices.current()))

    def _combine_copies(self, copies: tuple[Any, ...]) -> Any:
        self._require_aggregation("Reading")
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return copies[0]
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        total = eager.reduce_to_device(op, [copies], devices.current())[0]
        return placement.uncommitted(total.astype(self.dtype))

    def _combine_stored(self, stored: Any) -> Any:
        self._require_aggregation("Reading")
        rows = jnp.reshape(stored, (self.layout.num_replicas, *self.shape))
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return rows[0]
        total = rows.sum(0)
        if self.aggregation is VariableAggregation.MEAN:
            total = total / self.layout.num_replicas
        return total.astype(self.dtype)

    def _combine_local(self, local: Any) -> Any:
        self._require_aggregation("Reading")
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return in_replica.first_replica(local)
        op = ReduceOp.from_variable_aggregation(self.aggregation)
        total = in_replica.all_reduce(op, [local], self.layout.num_replicas)[0]
        return total.astype(self.dtype)

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Any) -> None:
        if kind.startswith("scatter"):
            raise errors.UnsupportedError(
                f"`{kind}` needs a variable that is synchronized on write",
                f"variable {self.name!r} is synchronized ON_READ",
                "Use assign, assign_add or assign_sub with a dense value.",
            )
        if frame.mode is not Mode.CROSS_REPLICA and not frame.is_default:
            self.apply_directly(frame, kind, payload)
            return
        if kind not in ("assign", "slice_assign"):
            raise errors.InvalidArgumentError(
                f"`{api_of(kind)}` on the ON_READ variable {self.name!r} needs a replica context",
                f"this is {frame.describe()}",
                "Call it inside `strategy.run`, or use `assign` here.",
            )
        self._require_aggregation("Assigning")
        if kind == "slice_assign":
            with gate.state():
                self._assign_shares(frame, updates.apply(kind, self.read(frame), payload))
        else:
            self._assign_shares(frame, payload)

    def _assign_shares(self, frame: Frame, value: Any) -> None:
        """Gives the copies values that are read back as `value`."""
        shares = self._shares(value)
        if frame.overlay is not None:
            if frame.overlay.view is View.LOCAL:
                shares = shares[jax.lax.axis_index(AXIS)]
            elif frame.overlay.view is View.STORED:
                shares = shares.reshape(self.layout.global_shape(self.shape))
            else:
                shares = value
            frame.overlay.write(self, shares)
            return
        require_concrete(self, value)
        with gate.state():
            self.stored = self.layout.assemble([shares[i] for i in range(len(shares))])
            self.is_lent = True

    def _shares(self, value: Any) -> Any:
        """Returns one value per replica: parts of a sum, or the value itself."""
        count = self.layout.num_replicas
        is_on_host = not jax_compat.is_traced(value) and value.nbytes * count <= _HOST_BYTES
        xnp: Any = np if is_on_host else jnp
        value = xnp.asarray(value)
        shape = (count, *self.shape)
        if self.aggregation is not VariableAggregation.SUM:
            return xnp.broadcast_to(value, shape)
        if jnp.issubdtype(self.dtype, jnp.integer):
            # Whole numbers: the first replicas take what does not divide.
            extra = xnp.arange(count).reshape((count,) + (1,) * len(self.shape))
            return (value // count + (extra < value % count)).astype(self.dtype)
        return xnp.broadcast_to(value / count, shape).astype(self.dtype)

    @override
    def store_all_copies(self, frame: Frame, value: Any) -> None:
        self._assign_shares(frame, value)

    @override
    def store_copy(self, replica_id: int, value: Any) -> None:
        require_concrete(self, value)
        with gate.state():
            self.stored = self.layout.with_component(self.stored, replica_id, not self.shape, value)
            self.is_lent = True

    def _require_aggregation(self, what: str) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise errors.InvalidArgumentError(
                f"{what} the ON_READ variable {self.name!r} in cross-replica context needs "
                "a rule to combine its copies",
                "its aggregation is NONE",
                "Create it with aggregation=rx.VariableAggregation.SUM, MEAN or "
                "ONLY_FIRST_REPLICA.",
            )

    @override
    def initialize(self, value: Any) -> None:
        self.stored = stored_for_replicas(self.layout, value)


@final
class VariableComponent(Variable):
    """One copy of a replicated variable; writes to it touch no other copy."""

    __slots__ = ("container", "replica_id")

    def __init__(self, container: ReplicatedVariable, replica_id: int) -> None:
        name = container.name if replica_id == 0 else f"{container.name}/replica_{replica_id}"
        attributes = VariableAttributes(
            name,
            container.shape,
            container.dtype,
            container.trainable,
            container.synchronization,
            container.aggregation,
            container.constraint,
        )
        self.set_up(attributes, container.stored, owner=container.owner)
        self.container = container
        self.replica_id = replica_id

    @property
    @override
    def placement(self) -> tuple[Device, ...]:
        return (self.container.layout.devices[self.replica_id],)

    @override
    def read(self, frame: Frame) -> Any:
        overlay = frame.overlay
        if overlay is None:
            require_readable(self.container, frame)
            return placement.uncommitted(self.container.read_copy(self.replica_id))
        value = overlay.read(self.container)
        if self.container.is_per_replica and overlay.view is View.STORED:
            return self.container.layout.component(value, self.replica_id, not self.shape)
        return value

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Any) -> None:
        overlay = frame.overlay
        if overlay is None:
            with gate.state():
                old = self.container.read_copy(self.replica_id)
                new = updates.apply_beside(kind, old, payload)
                self.container.store_copy(self.replica_id, new)
            return
        new = updates.apply(kind, self.read(frame), payload)
        if overlay.view is View.LOCAL or frame.mode is Mode.UPDATE:
            overlay.write(self.container, new)
        elif self.container.is_per_replica:
            stored = overlay.read(self.container)
            layout = self.container.layout
            scalar = not self.shape
            new = layout.with_component(stored, self.replica_id, scalar, new)
            overlay.write(self.container, new)
        else:
            raise errors.UnsupportedError(
                f"A write to one copy of {self.container.name!r} in compiled code needs "
                "`extended.update`",
                "it would make the copies differ",
                "Write to the variable itself.",
            )

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        raise errors.UnsupportedError(
            "Only whole variables can be copied",
            f"{self.name!r} is one copy of {self.container.name!r}",
            "Copy the variable.",
        )


def stored_for_replicas(layout: Any, value: Any) -> jax.Array:
    """Makes the stored array of a variable whose copies all start from one value."""
    array = jnp.asarray(value)
    # The copies may share buffers with each other: a new variable counts as lent.
    return layout.assemble([array] * layout.num_replicas)
