"""CrossDeviceOps: the replaceable algorithms that combine values of several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives import across_processes, eager, in_replica
from replicax.collectives.arguments import (
    Component,
    checked_axis,
    common_axis,
    device_of,
    gather_of_slices,
    of_common_type,
    resolve_destinations,
    resolve_pairs,
)
from replicax.collectives.eager import mirrored, place, place_all
from replicax.foundation import devices, errors, gate, jax_compat, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from replicax.foundation.types import Tree
from replicax.values import printing
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    TracedPerReplica,
    is_array_like,
    require_number,
)
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.layout import ReplicaLayout

Targets: TypeAlias = Sequence[Device]  # Resolved: every device that gets a copy of the result.


class CrossDeviceOps:
    """Base of the reduction algorithms; a subclass overrides the `*_implementation` hooks.

    The hooks get a `PerReplica` whose `.values` are the components, and destinations as a tuple
    of devices. In compiled code the components are traced, and the same hooks work.

    Attributes:
      options: The options of reductions that have none of their own.

    Raises:
      InvalidArgumentError: An operation is not a ReduceOp, or IndexedSlices are gathered.
      UnsupportedError: A subclass does not define `reduce_implementation`.
    """

    options = CommunicationOptions()

    def __repr__(self) -> str:
        return f"{printing.public_name(type(self))}()"

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Tree:
        """Combines the components of one value and puts the result on `destinations`."""
        _require_op(reduce_op)
        targets = resolve_destinations(destinations)
        value = _as_per_replica(per_replica_value)
        return self.reduce_implementation(reduce_op, value, targets, self._merged(options))

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Combines several values together; one result per pair, in order."""
        _require_op(reduce_op)
        resolved = resolve_pairs(value_destination_pairs)
        pairs = [(_as_per_replica(value), targets) for value, targets in resolved]
        if not pairs:
            return []
        return self.batch_reduce_implementation(reduce_op, pairs, self._merged(options))

    def broadcast(self, tensor: object, destinations: object) -> Tree:
        """Copies a value to `destinations`."""
        return self.broadcast_implementation(as_operand(tensor), resolve_destinations(destinations))

    def _merged(self, options: CommunicationOptions | None) -> CommunicationOptions:
        return self.options if options is None else self.options.merge(options)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Targets,
        options: CommunicationOptions,
    ) -> Tree:
        """Hook of `reduce`."""
        raise errors.UnsupportedError(
            "A CrossDeviceOps subclass must define `reduce_implementation`",
            f"{type(self).__name__} does not",
            "Override it, or use rx.ReductionToOneDevice().",
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Targets]],
        options: CommunicationOptions,
    ) -> list[Tree]:
        """Hook of `batch_reduce`; by default one `reduce_implementation` per pair."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Tree, destinations: Targets) -> Tree:
        """Hook of `broadcast`."""
        return place(tensor, destinations)

    # The `Reducer` of a strategy: see contexts/frames.py.

    def reduce_values(
        self,
        op: ReduceOp,
        values: Sequence[object],
        targets: Sequence[Targets],
        count: int,
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Combines several values over `count` replicas; plain and mirrored ones are equal."""
        pairs: list[tuple[PerReplica, Targets]] = []
        for value, target in zip(values, targets, strict=True):
            if isinstance(value, PerReplica):
                value.require_numbers(count)
                pairs.append((value, target))
        if count == 1:
            reduced = [place(_alone(op, v.values[0]), t) for v, t in pairs]
        elif pairs:
            reduced = self.batch_reduce_implementation(op, pairs, self._merged(options))
        else:
            reduced = []
        if len(pairs) == len(values):
            return reduced
        found = iter(reduced)
        return [
            next(found)
            if isinstance(value, PerReplica)
            else place(_equal_everywhere(op, value, count), target)
            for value, target in zip(values, targets, strict=True)
        ]

    def gather_values(self, value: object, axis: int, target: Device, count: int) -> Tree:
        """Concatenates the components of a value along an axis, on one device."""
        if isinstance(value, IndexedSlices):
            raise gather_of_slices()
        if isinstance(value, Mirrored):
            # Equal on all replicas, those of other processes included.
            value = PerReplica(value.values[:1] * count)
        if not isinstance(value, PerReplica):
            return value
        if isinstance(value, TracedPerReplica):
            if isinstance(value.local, IndexedSlices):
                raise gather_of_slices()
            return in_replica.all_gather(value.local, checked_axis(axis, jnp.ndim(value.local)))
        parts = value.values
        if any(isinstance(p, IndexedSlices) for p in parts):
            raise gather_of_slices()
        value.require_numbers(count)
        if jax_compat.is_eager() and _spanning([value]) is not None:
            return placement.put(across_processes.gather(value, axis), target)
        axis = common_axis(axis, [np.shape(p) for p in parts])
        if jax_compat.is_eager():
            moved = jax.device_put([jnp.asarray(p) for p in parts], target)
            return placement.uncommitted(jnp.concatenate(moved, axis))
        return _gather_in_trace(value, axis)

    def broadcast_value(self, value: object, targets: Targets) -> Tree:
        """Copies a value to devices."""
        return self.broadcast_implementation(as_operand(value), targets)


def _alone(op: ReduceOp, value: object) -> Component:
    if isinstance(value, IndexedSlices):
        return value
    return in_replica.summable(op, require_number(value))


def _equal_everywhere(op: ReduceOp, value: object, count: int) -> Component:
    """Combines `count` equal values by arithmetic."""
    if isinstance(value, Mirrored):
        value = value.values[0]
    if isinstance(value, IndexedSlices):
        return value if op is ReduceOp.MEAN else value.map_values(lambda v: v * count)
    array = in_replica.summable(op, require_number(value))
    return array if op is ReduceOp.MEAN or count == 1 else array * count


def _gather_in_trace(value: PerReplica, axis: int) -> jax.Array:
    layout = value.layout
    stored = None if layout is None else value.stored(layout)
    if stored is None or layout is None or layout.num_replicas == 1:
        return jnp.concatenate([jnp.asarray(p) for p in value.values], axis)
    return layout.map_replicas(
        lambda x: [in_replica.all_gather(x, axis)], stored, (), value.scalars, num_equal=1
    )[0]


def _spanning(values: Sequence[PerReplica]) -> ReplicaLayout | None:
    """Returns the layout of values whose replicas run in several processes."""
    layout = values[0].layout if values else None
    return layout if layout is not None and layout.spans_processes else None


class _Batch(NamedTuple):
    """Values to combine: a column of components, and devices for the result, of each."""

    op: ReduceOp
    columns: Sequence[Sequence[Component]]
    targets: Sequence[Targets]
    options: CommunicationOptions


class _PackedReduction(CrossDeviceOps):
    """Shared by the algorithms of this library: eager, in replica code, in a trace around it."""

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Targets,
        options: CommunicationOptions,
    ) -> Tree:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Targets]],
        options: CommunicationOptions,
    ) -> list[Tree]:
        values = [v for v, _ in value_destination_pairs]
        targets = [tuple(d) for _, d in value_destination_pairs]
        for value in values:
            if not isinstance(value, PerReplica):
                raise errors.InvalidArgumentError(
                    "A reduction across devices needs PerReplica values",
                    f"{type(value).__name__} was given",
                    "Pass a result of `strategy.run`.",
                )
        traced = _traced_layout(values)
        if traced is None and (layout := _spanning(values)) is not None:
            return self._across_processes(reduce_op, values, layout, targets, options)
        if traced is None:
            columns = [value.values for value in values]
            return self._eager_on(_Batch(reduce_op, columns, targets, options))
        if all(isinstance(v, TracedPerReplica) for v in values):
            local = [v.local for v in values if isinstance(v, TracedPerReplica)]
            results = self.in_trace(reduce_op, local, traced.num_replicas, options.bytes_per_pack)
        else:
            results = self._in_outer_trace(reduce_op, values, traced, options.bytes_per_pack)
        return place_all(results, targets)

    def in_trace(
        self, op: ReduceOp, leaves: Sequence[Component], count: int, pack_bytes: int
    ) -> list[Component]:
        """Combines inside compiled replica code, in packs of `pack_bytes` if that is not 0."""
        raise NotImplementedError

    def _eager_on(self, batch: _Batch) -> list[Tree]:
        return place_all(self._eager(batch), batch.targets)

    def _across_processes(
        self,
        op: ReduceOp,
        values: Sequence[PerReplica],
        layout: ReplicaLayout,
        targets: Sequence[Targets],
        options: CommunicationOptions,
    ) -> list[Tree]:
        """Combines concrete values of all processes; the results are on local devices."""
        columns = [value.values for value in values]
        for column in columns:
            eager.require_same_shape(column)
        is_dense = [not isinstance(column[0], IndexedSlices) for column in columns]
        dense = [of_common_type(c) for c, d in zip(columns, is_dense, strict=True) if d]
        count, pack_bytes = layout.num_replicas, options.bytes_per_pack

        def combine(local: Sequence[jax.Array]) -> Sequence[Any]:
            return self.in_trace(op, list(local), count, pack_bytes)

        summed: list[jax.Array] = []
        if dense:
            key = (type(self), pack_bytes)
            summed = across_processes.reduce_arrays(op.value, dense, layout, combine, key)
        copies = iter([layout.copies(array) for array in summed])
        results: list[Tree] = []
        for column, target, own in zip(columns, targets, is_dense, strict=True):
            if not own:
                results.append(place(across_processes.gather_slices(op, column, layout), target))
                continue
            found = next(copies)
            if target == layout.local_devices:
                found = tuple(map(placement.uncommitted, found))
                results.append(found[0] if len(found) == 1 else mirrored(found))
            else:
                results.append(place(found[0], target))
        return results

    def _in_outer_trace(
        self, op: ReduceOp, values: Sequence[PerReplica], layout: ReplicaLayout, pack_bytes: int
    ) -> list[Component]:
        """Combines stored arrays inside compiled code that acts for all replicas."""
        joined = in_replica.uneven_rows(op, values, layout)
        even = [v for v, rows in zip(values, joined, strict=True) if rows is None]
        values = [_of_one_type(value, layout) for value in even]
        stored: list[jax.Array] = []
        scalars: list[bool] = []
        for value in values:
            arrays = value.stored(layout)
            if arrays is None:
                raise errors.InvalidArgumentError(
                    "A reduction needs arrays of one shape and type on each replica",
                    f"it got {value}",
                    "Reduce arrays only.",
                )
            stored += arrays
            scalars += value.scalars
        treedefs: list[Any] = []

        def on_replica(*local: jax.Array) -> list[jax.Array]:
            flat = iter(local)
            trees = [jax.tree.unflatten(v.treedef, [next(flat) for _ in v.scalars]) for v in values]
            results = self.in_trace(op, trees, layout.num_replicas, pack_bytes)
            treedefs[:] = [jax.tree.structure(r) for r in results]
            return jax.tree.leaves(results)

        outs = iter(layout.map_replicas(on_replica, stored, (), scalars, num_equal=len(stored)))
        sums = (jax.tree.unflatten(t, [next(outs) for _ in range(t.num_leaves)]) for t in treedefs)
        return [next(sums) if rows is None else rows for rows in joined]

    def _eager(self, batch: _Batch) -> list[Component]:
        by_device: dict[Device, list[int]] = {}
        for i, target in enumerate(batch.targets):
            by_device.setdefault(target[0], []).append(i)
        results: dict[int, Component] = {}
        for device, indices in by_device.items():
            columns = [batch.columns[i] for i in indices]
            reduced = eager.reduce_to_device(batch.op, columns, device)
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return [results[i] for i in range(len(batch.columns))]


class CollectiveAllReduce(_PackedReduction):
    """The default: XLA's all-reduce with small tensors packed, copies in eager code.

    Args:
      is_cpu_mesh: Whether the values are spread over several CPU devices.
      num_processes: The number of processes that the devices belong to.
    """

    def __init__(self, is_cpu_mesh: bool = False, num_processes: int = 1) -> None:
        self._packing = in_replica.WITHIN_A_PROCESS
        self._array_sum: Callable[[int], in_replica.ArraySum] | None = None
        if is_cpu_mesh and num_processes == 1:
            self._array_sum = in_replica.by_size
        elif is_cpu_mesh:
            self._packing = in_replica.ACROSS_PROCESSES
            self._array_sum = in_replica.across_processes

    def in_trace(
        self, op: ReduceOp, leaves: Sequence[Component], count: int, pack_bytes: int
    ) -> list[Component]:
        # XLA's own all-reduce is a ring on CPU devices.
        is_ring = self.options.implementation is CommunicationImplementation.RING
        chosen = None if is_ring else self._array_sum
        return in_replica.all_reduce(
            op,
            leaves,
            count,
            array_sum=in_replica.psum if chosen is None else chosen(count),
            packing=self._packing,
            bytes_per_pack=pack_bytes,
        )

    def _eager_on(self, batch: _Batch) -> list[Tree]:
        if len(set(batch.targets)) == 1 and eager.are_small(batch.columns):
            copies = eager.reduce_packed(batch.op, batch.columns, batch.targets[0])
            return [parts[0] if len(parts) == 1 else mirrored(parts) for parts in copies]
        return super()._eager_on(batch)


class ReductionToOneDevice(_PackedReduction):
    """Copies all components to one device, adds them there in order, and copies back.

    Args:
      reduce_to_device: Where to add; the first destination if None.
      accumulation_fn: Takes the list of components and returns their sum.

    >>> import replicax as rx
    >>> ops = rx.ReductionToOneDevice("CPU:0")
    >>> strategy = rx.MirroredStrategy(["CPU:0"], cross_device_ops=ops)
    """

    def __init__(
        self, reduce_to_device: str | None = None, accumulation_fn: eager.Accumulate | None = None
    ) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn or eager.add_n

    def __repr__(self) -> str:
        shown = "" if self.reduce_to_device is None else repr(self.reduce_to_device)
        return f"rx.ReductionToOneDevice({shown})"

    def in_trace(
        self, op: ReduceOp, leaves: Sequence[Component], count: int, pack_bytes: int
    ) -> list[Component]:
        array_sum = in_replica.gather_and_add(self.accumulation_fn, count)
        return in_replica.all_reduce(op, leaves, count, array_sum=array_sum, num_packs=0)

    def _eager(self, batch: _Batch) -> list[Component]:
        results: list[Component] = []
        for column, target in zip(batch.columns, batch.targets, strict=True):
            device = target[0]
            if self.reduce_to_device is not None:
                device = devices.resolve(self.reduce_to_device)
            results += eager.reduce_to_device(batch.op, [column], device, self.accumulation_fn)
        return results


# Of each value: which of its leaves are scalars, and its structure.
_Kinds: TypeAlias = tuple[tuple[tuple[bool, ...], Any], ...]


class _AllReduce(_PackedReduction):
    """All-reduce in packs; also runs as a small compiled program in eager code."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise errors.InvalidArgumentError(
                "`num_packs` must be 0 or more",
                f"it is {num_packs}",
                "Pass 0 to send every tensor on its own.",
            )
        self.num_packs = num_packs
        self._programs: dict[object, Callable[..., tuple[list[Component], jax.Array]]] = {}

    def __repr__(self) -> str:
        return f"{printing.public_name(type(self))}(num_packs={self.num_packs})"

    def _array_sum(self, count: int) -> in_replica.ArraySum:
        del count
        return in_replica.psum

    def in_trace(
        self, op: ReduceOp, leaves: Sequence[Component], count: int, pack_bytes: int
    ) -> list[Component]:
        return in_replica.all_reduce(
            op,
            leaves,
            count,
            array_sum=self._array_sum(count),
            bytes_per_pack=pack_bytes,
            num_packs=None if pack_bytes else self.num_packs,
        )

    def _eager(self, batch: _Batch) -> list[Component]:
        columns = batch.columns
        for column in columns:
            eager.require_same_shape(column)
        layout = _mesh_of(columns[0])
        if layout is None or any(_mesh_of(c) != layout for c in columns):
            return super()._eager(batch)
        values = [PerReplica(column, layout) for column in columns]
        stored = [value.stored(layout) for value in values]
        if any(arrays is None for arrays in stored):
            return super()._eager(batch)
        kinds = tuple((v.scalars, v.treedef) for v in values)
        key = (batch.op, layout, batch.options.bytes_per_pack, kinds)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(*key)
        with gate.state():
            gate.wait_for_previous()
            results, token = program(stored)
            gate.set_running(token)
        return [jax.tree.map(lambda a: a.addressable_shards[0].data, r) for r in results]

    def _compile(
        self, op: ReduceOp, layout: ReplicaLayout, pack_bytes: int, kinds: _Kinds
    ) -> Callable[..., tuple[list[Component], jax.Array]]:
        def reduce_all(stored: list[tuple[jax.Array, ...]]) -> tuple[list[Component], jax.Array]:
            values = [
                PerReplica.from_stored(arrays, scalars, treedef, layout)
                for arrays, (scalars, treedef) in zip(stored, kinds, strict=True)
            ]
            return self._in_outer_trace(op, values, layout, pack_bytes), jnp.zeros(())

        return jax.jit(reduce_all)


class NcclAllReduce(_AllReduce):
    """All-reduce by the devices' own collective library (NCCL on GPUs).

    Args:
      num_packs: Gradients of one type travel in this many packs; 0 for one each.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], cross_device_ops=rx.NcclAllReduce())
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)


class HierarchicalCopyAllReduce(_AllReduce):
    """All-reduce in two stages: each device sums one part, then all exchange their parts.

    Args:
      num_packs: Gradients of one type travel in this many packs; 0 for one each.

    >>> import replicax as rx
    >>> ops = rx.HierarchicalCopyAllReduce(num_packs=2)
    >>> strategy = rx.MirroredStrategy(["CPU:0"], cross_device_ops=ops)
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _array_sum(self, count: int) -> in_replica.ArraySum:
        return in_replica.scatter_and_gather(count)


def select_cross_device_ops(worker_devices: Sequence[Device]) -> CrossDeviceOps:
    """Returns the algorithm for a set of devices when the user names none."""
    platforms = {d.platform for d in worker_devices}
    if len(platforms) > 1:
        return ReductionToOneDevice()
    if platforms & {"gpu", "cuda", "rocm"}:
        return NcclAllReduce()
    num_processes = len({d.process_index for d in worker_devices})
    return CollectiveAllReduce(platforms == {"cpu"} and len(worker_devices) > 1, num_processes)


def _as_per_replica(value: object) -> Any:
    """Returns the copies of a mirrored value or of a variable as a value per replica."""
    if isinstance(value, PerReplica) or not isinstance(value, DistributedValues):
        return value
    copies = [as_operand(copy) for copy in value.values]
    return PerReplica(copies, getattr(value, "layout", None))


def _traced_layout(values: Sequence[PerReplica]) -> ReplicaLayout | None:
    """Returns the layout of compiled values, or None if all values are concrete."""
    for value in values:
        if isinstance(value, TracedPerReplica):
            return value.layout
    if jax_compat.is_eager():
        return None
    return next((v.layout for v in values if v.layout is not None), None)


def _mesh_of(column: Sequence[Component]) -> ReplicaLayout | None:
    found = tuple(device_of(jax.tree.leaves(c)[0]) for c in column)
    return ReplicaLayout(found) if len(set(found)) == len(found) > 1 else None


def _require_op(reduce_op: object) -> None:
    if not isinstance(reduce_op, ReduceOp):
        raise errors.InvalidArgumentError(
            "CrossDeviceOps need a ReduceOp",
            f"{reduce_op!r} was given",
            "Pass rx.ReduceOp.SUM or rx.ReduceOp.MEAN.",
        )


def _of_one_type(value: PerReplica, layout: ReplicaLayout) -> PerReplica:
    """Promotes components of different types; raises if their shapes differ."""
    if value.stored(layout) is not None or not all(map(is_array_like, value.values)):
        return value
    eager.require_same_shape(value.values)
    dtype = jnp.result_type(*value.values)
    return PerReplica([jnp.asarray(v, dtype) for v in value.values], layout)
