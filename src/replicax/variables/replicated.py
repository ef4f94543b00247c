"""Variables that aggregate the updates of replicas: on each write, or when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.collectives import across_processes, eager, in_replica
from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.contexts.overlay import View
from replicax.contexts.rendezvous import (
    Rendezvous,
    acting_for_all,
    different_calls,
    require_meeting,
)
from replicax.foundation import devices, errors, gate, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import VariableAggregation
from replicax.foundation.types import Tree
from replicax.values import printing
from replicax.values.distributed_values import (
    DistributedValues,
)
from replicax.values.layout import AXIS, ReplicaLayout
from replicax.variables import updates
from replicax.variables.creators import VariableAttributes
from replicax.variables.slicing import SlicedValue, api_of
from replicax.variables.updates import Payload
from replicax.variables.variable import (
    LocalVariable,
    Variable,
    require_concrete,
    require_readable,
)

# Copies up to this size are combined, and shared out, by NumPy: for a metric that is read
# once an epoch, the first computation on the devices costs more in compilation than all
# that follow.
_HOST_BYTES = 64 << 10


class ReplicatedVariable(DistributedValues, LocalVariable):
    """Base class of variables with a copy on each replica."""

    __slots__ = ()

    @property
    @override
    def components(self) -> tuple[Variable, ...]:
        layout = self.replicas
        # One program stands for all processes: it numbers all replicas.
        is_local = frames.current().overlay is None
        count = layout.num_local if is_local else layout.num_replicas
        return tuple(VariableComponent(self, i) for i in range(count))

    @property
    @override
    def device(self) -> str:
        """The device of the running replica's copy; outside of replicas, that of the first one."""
        frame = frames.current()
        replica_id = frame.replica_id if frame.layout is self.replicas else None
        return devices.name_of(self.placement[replica_id or 0])

    @override
    def store(self, frame: Frame, value: ArrayLike) -> None:
        if frame.overlay is not None:
            frame.overlay.write(self, value)
        elif frame.replica_id is not None:
            self.store_copy(frame.replica_id, value)
        else:
            self.store_all_copies(frame, value)

    def store_copy(self, replica_id: int, value: ArrayLike) -> None:
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
            self.replicas.num_local,
            lambda i: VariableComponent(self, i).describe(),
        )


@final
class MirroredVariable(ReplicatedVariable):
    """A variable with equal copies; every write reaches all of them.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> with strategy.scope():
    ...     v = rx.Variable(1.0, aggregation=rx.VariableAggregation.SUM)
    >>> _ = strategy.run(lambda: v.assign_add(1.0))  # 1 on each of 2 replicas
    >>> float(v), len(v.values)
    (3.0, 2)
    """

    __slots__ = ()

    @property
    @override
    def sharding_of_stored(self) -> Sharding:
        return self.replicas.replicated

    @override
    def read(self, frame: Frame) -> jax.Array:
        if frame.overlay is not None:
            return frame.overlay.read(self)
        require_readable(self, frame)
        replica_id = frame.replica_id
        if replica_id is None:
            replica_id = self._replica_on(devices.explicit())
        return placement.uncommitted(self.read_copy(replica_id))

    def _replica_on(self, device: Device | None) -> int:
        """Returns the replica whose copy is nearest to a device."""
        local = self.replicas.local_devices
        return local.index(device) if device in local else 0

    @override
    def read_copy(self, replica_id: int) -> jax.Array:
        with gate.state():
            self.is_lent = True
            return self.replicas.copy_for(self.stored, replica_id)

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
        if frame.mode is Mode.REPLICA and not frame.is_default:
            apply_from_replicas(self, frame, kind, payload)
        elif frame.mode is Mode.UPDATE:
            self.apply_directly(frame, kind, payload)
        else:
            apply_to_copies(self, frame, kind, payload)

    @override
    def store_all_copies(self, frame: Frame, value: ArrayLike) -> None:
        if frame.overlay is not None:
            frame.overlay.write(self, value)
            return
        require_concrete(self, value)
        self.store_copies([value] * self.replicas.num_local)

    def lend_copies(self) -> tuple[jax.Array, ...]:
        """Returns the copies of all replicas. The caller holds `gate.state()`."""
        self.is_lent = True
        return self.replicas.copies(self.stored)

    def store_copies(self, values: Sequence[ArrayLike]) -> None:
        """Replaces all copies at once."""
        with gate.state():
            self.stored = self.replicas.from_copies(values)
            self.is_lent = True

    @override
    def store_copy(self, replica_id: int, value: ArrayLike) -> None:
        require_concrete(self, value)
        with gate.state():
            copies: list[ArrayLike] = list(self.replicas.copies(self.stored))
            copies[replica_id] = value
            self.stored = self.replicas.from_copies(copies)
            self.is_lent = True

    @override
    def initialize(self, value: ArrayLike) -> None:
        self.stored = self.replicas.replicate(value)


@final
class AggregatingVariable(LocalVariable):
    """A variable with one copy on a parameter device; updates of replicas are aggregated."""

    __slots__ = ()

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
        if frame.mode is Mode.REPLICA and frame.layout is not None:
            apply_from_replicas(self, frame, kind, payload)
        else:
            apply_to_copies(self, frame, kind, payload)


@final
class SyncOnReadVariable(ReplicatedVariable):
    """A variable with independent copies, which are combined when read from outside.

    Raises:
      UnsupportedError: A scatter method was called.
      InvalidArgumentError: `assign_add` or `assign_sub` is called outside of replica code, or
        copies are combined without a rule.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> with strategy.scope():
    ...     v = rx.Variable(
    ...         0.0,
    ...         synchronization=rx.VariableSynchronization.ON_READ,
    ...         aggregation=rx.VariableAggregation.SUM,
    ...     )
    >>> _ = strategy.run(lambda: v.assign_add(1.0))
    >>> float(v), [float(copy) for copy in v.values]
    (2.0, [1.0, 1.0])
    """

    __slots__ = ()
    is_per_replica = True

    @property
    @override
    def sharding_of_stored(self) -> Sharding:
        return self.replicas.per_replica

    @override
    def read(self, frame: Frame) -> jax.Array:
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
        if self.replicas.spans_processes:
            return self._combine_across_processes()
        with gate.state():
            if self.stored.nbytes <= _HOST_BYTES:
                return self._combine_on_host(self.stored)
            self.is_lent = True
            return self._combine_copies(self.replicas.split(self.stored, not self.shape))

    @override
    def read_copy(self, replica_id: int) -> jax.Array:
        with gate.state():
            self.is_lent = True
            return self.replicas.component(self.stored, replica_id, not self.shape)

    def _combine_across_processes(self) -> jax.Array:
        self._require_aggregation("Reading")
        with gate.state():
            results = across_processes.run_on_mesh(
                "read of an ON_READ variable",
                self.replicas,
                (self.aggregation, self.shape),
                lambda stored: [self._combine_stored(stored)],
                [self.stored],
            )
        return placement.put(across_processes.local_copy(results[0]), devices.current())

    def _combine_on_host(self, stored: jax.Array) -> jax.Array:
        self._require_aggregation("Reading")
        rows = np.asarray(stored).reshape((self.replicas.num_replicas, *self.shape))
        value = rows[0]
        if self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            value = rows.sum(0, dtype=self.dtype)
        if self.aggregation is VariableAggregation.MEAN:
            value = (value / self.replicas.num_replicas).astype(self.dtype)
        with jax_compat.any_dtype(self.dtype):
            return placement.uncommitted(jax.device_put(value, devices.current()))

    def _combine_copies(self, copies: tuple[jax.Array, ...]) -> jax.Array:
        self._require_aggregation("Reading")
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return copies[0]
        op = updates.OPS[self.aggregation]
        total: Tree = eager.reduce_to_device(op, [copies], devices.current())[0]
        return placement.uncommitted(total.astype(self.dtype))

    def _combine_stored(self, stored: jax.Array) -> jax.Array:
        self._require_aggregation("Reading")
        rows = jnp.reshape(stored, (self.replicas.num_replicas, *self.shape))
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return rows[0]
        total = rows.sum(0)
        if self.aggregation is VariableAggregation.MEAN:
            total = total / self.replicas.num_replicas
        return total.astype(self.dtype)

    def _combine_local(self, local: jax.Array) -> jax.Array:
        self._require_aggregation("Reading")
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return in_replica.first_replica(local)
        op = updates.OPS[self.aggregation]
        total: Tree = in_replica.all_reduce(op, [local], self.replicas.num_replicas)[0]
        return total.astype(self.dtype)

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
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

    def _assign_shares(self, frame: Frame, value: ArrayLike) -> None:
        """Sets the copies so that a read from outside returns `value`."""
        shares = self._shares(value)
        if frame.overlay is not None:
            if frame.overlay.view is View.LOCAL:
                shares = shares[jax.lax.axis_index(AXIS)]
            elif frame.overlay.view is View.STORED:
                shares = shares.reshape(self.replicas.global_shape(self.shape))
            else:
                shares = value
            frame.overlay.write(self, shares)
            return
        require_concrete(self, value)
        with gate.state():
            first, count = self.replicas.first_local, self.replicas.num_local
            self.stored = self.replicas.assemble([shares[first + i] for i in range(count)])
            self.is_lent = True

    def _shares(self, value: Tree) -> Any:
        """Returns one value per replica: parts of a sum, or the value itself."""
        count = self.replicas.num_replicas
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
    def store_all_copies(self, frame: Frame, value: ArrayLike) -> None:
        self._assign_shares(frame, value)

    @override
    def store_copy(self, replica_id: int, value: ArrayLike) -> None:
        require_concrete(self, value)
        with gate.state():
            self.stored = self.replicas.with_component(
                self.stored, replica_id, not self.shape, value
            )
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
    def initialize(self, value: ArrayLike) -> None:
        self.stored = stored_for_replicas(self.replicas, value)


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
        return (self.container.replicas.local_devices[self.replica_id],)

    @override
    def read(self, frame: Frame) -> jax.Array:
        overlay = frame.overlay
        if overlay is None:
            require_readable(self.container, frame)
            return placement.uncommitted(self.container.read_copy(self.replica_id))
        value = overlay.read(self.container)
        if self.container.is_per_replica and overlay.view is View.STORED:
            return self.container.replicas.component(value, self.replica_id, not self.shape)
        return value

    @override
    def apply_update(self, frame: Frame, kind: str, payload: Payload) -> None:
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
            layout = self.container.replicas
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
    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        raise errors.UnsupportedError(
            "Only whole variables can be copied",
            f"{self.name!r} is one copy of {self.container.name!r}",
            "Copy the variable.",
        )


def stored_for_replicas(layout: ReplicaLayout, value: ArrayLike) -> jax.Array:
    """Makes the stored array of a variable whose copies all start from one value."""
    array = jnp.asarray(value)
    # The copies may share buffers with each other: a new variable counts as lent.
    return layout.assemble([array] * layout.num_local)


class _Update(NamedTuple):
    """An update of a variable that one replica makes."""

    variable: Variable
    kind: str
    payload: Payload


def apply_from_replicas(variable: Variable, frame: Frame, kind: str, payload: Payload) -> None:
    """Applies the aggregate of the replicas' updates to every copy of a variable."""
    updates.require_reducible(variable, kind)
    if isinstance(payload, SlicedValue):
        payload = updates.of_common_part(variable, kind, payload)
    if frame.overlay is not None and not frame.overlay.meets_other_replicas:
        _apply_under_gradient(variable, frame, kind, payload)
    elif frame.rendezvous is not None:
        _apply_together(frame, frame.rendezvous, _Update(variable, kind, payload))
    else:
        assert frame.executor is not None
        frame.executor.merge_call(_apply_merged, (variable, kind, payload), {})


def _apply_together(frame: Frame, rendezvous: Rendezvous, update: _Update) -> None:
    """Waits for the updates of all eager replicas; the last replica applies their aggregate."""
    replica_id = require_meeting(frame)
    reads = frame.eager_reads
    if reads is not None and reads.has_inner_reads:
        # Traces of this replica are not for the replicas that run meanwhile.
        reads.renew()
    meeting = rendezvous.arrive(replica_id, update)
    if meeting is None:
        return
    with acting_for_all(frame, rendezvous, meeting):
        variable, kind, _ = update
        for i, call in enumerate(meeting.calls):
            if not isinstance(call, _Update) or call.variable is not variable or call.kind != kind:
                raise different_calls(i, _described(meeting.calls[0]), _described(call))
        payload = updates.merged([call.payload for call in meeting.calls], frame)
        combined = updates.combined(frame, variable, payload)
        apply_to_copies(variable, frames.current(), kind, combined)


def _apply_merged(strategy: object, variable: Variable, kind: str, payload: Payload) -> None:
    frame = frames.current()
    apply_to_copies(variable, frame, kind, updates.combined(frame, variable, payload))


def _described(call: object) -> str:
    if not isinstance(call, _Update):
        return f"{call}"
    return f"`{api_of(call.kind)}` of variable {call.variable.name!r}"


def apply_to_copies(variable: Variable, frame: Frame, kind: str, payload: Payload) -> None:
    """Applies one update, as one step, to every copy of a variable with equal copies."""
    if variable.is_remote:
        variable.apply_directly(frame, kind, payload)
        return
    with gate.state():
        if frame.overlay is not None:
            new = updates.apply(kind, frame.overlay.read(variable), updates.payload_for(payload, 0))
            variable.store_all_copies(frame, new)
        elif isinstance(variable, MirroredVariable) and variable.replicas.is_mesh:
            copies = [
                updates.apply_beside(kind, copy, updates.payload_for(payload, i))
                for i, copy in enumerate(variable.lend_copies())
            ]
            variable.store_copies(copies)
        else:
            new = updates.apply_beside(kind, variable.read_copy(0), updates.payload_for(payload, 0))
            variable.store_all_copies(frame, new)


def _apply_under_gradient(variable: Variable, frame: Frame, kind: str, payload: Payload) -> None:
    """Aggregates values that are being differentiated, then writes this replica's copy."""
    assert frame.executor is not None and frame.overlay is not None
    # Before the replicas meet: another replica may store into a shared copy right after.
    old: Tree = None if variable.is_remote else frame.overlay.read(variable)
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        gather = frame.executor.all_gather
        combined = jax.tree.map(lambda x: gather(jnp.expand_dims(x, 0), 0)[0], payload)
    else:
        op = updates.OPS[variable.aggregation]
        combined = frame.executor.all_reduce(op, payload, None)
    combined = jax.lax.stop_gradient(combined)
    if variable.is_remote:
        variable.apply_directly(frame, kind, combined)
    else:
        frame.overlay.write(variable, updates.apply(kind, old, combined))
