"""CrossDeviceOps: the replaceable algorithms that combine values of several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.collectives import eager, in_replica
from replicax.collectives.destinations import (
    device_of,
    mirrored,
    place,
    place_all,
    resolve_destinations,
    resolve_pairs,
)
from replicax.foundation import devices, errors, gate, jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.values import printing
from replicax.values.array_surface import as_operand
from replicax.values.distributed_values import (
    DistributedValues,
    PerReplica,
    TracedPerReplica,
    is_array_like,
)
from replicax.values.layout import ReplicaLayout


class CrossDeviceOps:
    """Base of the reduction algorithms; a subclass overrides the `*_implementation` hooks.

    The hooks see a `PerReplica` whose `.values` are the components. In compiled code the
    components are known to the compiler only, and the same hooks work.
    """

    def __repr__(self) -> str:
        return f"{printing.public_name(type(self))}()"

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines the components of one value and puts the result on `destinations`."""
        _require_op(reduce_op)
        targets = resolve_destinations(destinations)
        value = _as_per_replica(per_replica_value)
        return self.reduce_implementation(
            reduce_op, value, targets, options or CommunicationOptions()
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combines several values together; one result per pair, in order."""
        _require_op(reduce_op)
        resolved = resolve_pairs(value_destination_pairs)
        pairs = [(_as_per_replica(value), targets) for value, targets in resolved]
        if not pairs:
            return []
        return self.batch_reduce_implementation(reduce_op, pairs, options or CommunicationOptions())

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to `destinations`."""
        return self.broadcast_implementation(as_operand(tensor), resolve_destinations(destinations))

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        """Hook of `reduce`."""
        raise errors.UnsupportedError(
            "A CrossDeviceOps subclass must define `reduce_implementation`",
            f"{type(self).__name__} does not",
            "Override it, or use rx.ReductionToOneDevice().",
        )

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        """Hook of `batch_reduce`; by default one `reduce_implementation` per pair."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Hook of `broadcast`."""
        return place(tensor, resolve_destinations(destinations))


class _PackedReduction(CrossDeviceOps):
    """What the algorithms of this library share: three places where values can be."""

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> list[Any]:
        values = [v for v, _ in value_destination_pairs]
        targets = [resolve_destinations(d) for _, d in value_destination_pairs]
        for value in values:
            if not isinstance(value, PerReplica):
                raise errors.InvalidArgumentError(
                    "A reduction across devices needs PerReplica values",
                    f"{type(value).__name__} was given",
                    "Pass a result of `strategy.run`.",
                )
        traced = _traced_layout(values)
        if traced is None:
            return self._eager_on(reduce_op, [v.values for v in values], targets, options)
        if all(isinstance(v, TracedPerReplica) for v in values):
            local = [v.local for v in values]
            results = self.in_trace(reduce_op, local, traced.num_replicas, options)
        else:
            results = self._in_outer_trace(reduce_op, values, traced, options)
        return place_all(results, targets)

    def in_trace(self, op: ReduceOp, leaves: Sequence[Any], count: int, options: Any) -> list[Any]:
        """Combines inside compiled replica code."""
        raise NotImplementedError

    def _eager_on(
        self, op: ReduceOp, columns: Sequence[Sequence[Any]], targets: Sequence[Any], options: Any
    ) -> list[Any]:
        return place_all(self._eager(op, columns, targets, options), targets)

    def _in_outer_trace(
        self, op: ReduceOp, values: Sequence[PerReplica], layout: ReplicaLayout, options: Any
    ) -> list[Any]:
        """Combines stored arrays inside compiled code that acts for all replicas."""
        stored: list[Any] = []
        scalars: list[bool] = []
        values = [_of_one_type(value, layout) for value in values]
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

        def on_replica(*local: Any) -> list[Any]:
            flat = iter(local)
            trees = [jax.tree.unflatten(v.treedef, [next(flat) for _ in v.scalars]) for v in values]
            results = self.in_trace(op, trees, layout.num_replicas, options)
            treedefs[:] = [jax.tree.structure(r) for r in results]
            return jax.tree.leaves(results)

        outs = iter(layout.map_replicas(on_replica, stored, (), scalars, num_equal=len(stored)))
        return [jax.tree.unflatten(t, [next(outs) for _ in range(t.num_leaves)]) for t in treedefs]

    def _eager(
        self, op: ReduceOp, columns: Sequence[Sequence[Any]], targets: Sequence[Any], options: Any
    ) -> list[Any]:
        del options
        by_device: dict[Device, list[int]] = {}
        for i, target in enumerate(targets):
            by_device.setdefault(target[0], []).append(i)
        results: list[Any] = [None] * len(columns)
        for device, indices in by_device.items():
            reduced = eager.reduce_to_device(op, [columns[i] for i in indices], device)
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results


class CollectiveAllReduce(_PackedReduction):
    """The default: XLA's all-reduce with small tensors packed, copies in eager code.

    Args:
      is_cpu_mesh: Whether the values are spread over several CPU devices.
    """

    def __init__(self, is_cpu_mesh: bool = False) -> None:
        self._is_cpu_mesh = is_cpu_mesh

    def in_trace(self, op: ReduceOp, leaves: Sequence[Any], count: int, options: Any) -> list[Any]:
        reducer = in_replica.by_size(count) if self._is_cpu_mesh else in_replica.psum
        size = options.bytes_per_pack
        return in_replica.all_reduce(op, leaves, count, reducer=reducer, bytes_per_pack=size)

    def _eager_on(
        self, op: ReduceOp, columns: Sequence[Sequence[Any]], targets: Sequence[Any], options: Any
    ) -> list[Any]:
        if len(set(targets)) == 1 and eager.are_small(columns):
            copies = eager.reduce_packed(op, columns, targets[0])
            return [parts[0] if len(parts) == 1 else mirrored(parts) for parts in copies]
        return super()._eager_on(op, columns, targets, options)


class ReductionToOneDevice(_PackedReduction):
    """Copies all components to one device, adds them there in order, and copies back.

    Args:
      reduce_to_device: Where to add; the first destination if None.
      accumulation_fn: Takes the list of components and returns their sum.
    """

    def __init__(self, reduce_to_device: str | None = None, accumulation_fn: Any = None) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn or eager.add_n

    def __repr__(self) -> str:
        shown = "" if self.reduce_to_device is None else repr(self.reduce_to_device)
        return f"rx.ReductionToOneDevice({shown})"

    def in_trace(self, op: ReduceOp, leaves: Sequence[Any], count: int, options: Any) -> list[Any]:
        reducer = in_replica.gather_and_add(self.accumulation_fn, count)
        return in_replica.all_reduce(op, leaves, count, reducer=reducer, num_packs=0)

    def _eager(
        self, op: ReduceOp, columns: Sequence[Sequence[Any]], targets: Sequence[Any], options: Any
    ) -> list[Any]:
        del options
        results = []
        for column, target in zip(columns, targets, strict=True):
            device = target[0]
            if self.reduce_to_device is not None:
                device = devices.resolve(self.reduce_to_device)
            results += eager.reduce_to_device(op, [column], device, self.accumulation_fn)
        return results


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
        self._programs: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"{printing.public_name(type(self))}(num_packs={self.num_packs})"

    def _reducer(self, count: int) -> in_replica.Reducer:
        del count
        return in_replica.psum

    def in_trace(self, op: ReduceOp, leaves: Sequence[Any], count: int, options: Any) -> list[Any]:
        return in_replica.all_reduce(
            op,
            leaves,
            count,
            reducer=self._reducer(count),
            bytes_per_pack=options.bytes_per_pack,
            num_packs=None if options.bytes_per_pack else self.num_packs,
        )

    def _eager(
        self, op: ReduceOp, columns: Sequence[Sequence[Any]], targets: Sequence[Any], options: Any
    ) -> list[Any]:
        for column in columns:
            eager.require_same_shape(column)
        layout = _mesh_of(columns[0])
        if layout is None or any(_mesh_of(c) != layout for c in columns):
            return super()._eager(op, columns, targets, options)
        values = [PerReplica(column, layout) for column in columns]
        stored = [value.stored(layout) for value in values]
        if any(arrays is None for arrays in stored):
            return super()._eager(op, columns, targets, options)
        kinds = tuple((v.scalars, v.treedef) for v in values)
        key = (op, layout, options.bytes_per_pack, kinds)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(op, layout, options, kinds)
        with gate.state():
            gate.wait_for_previous()
            results, token = program(stored)
            gate.set_running(token)
        return [jax.tree.map(lambda a: a.addressable_shards[0].data, r) for r in results]

    def _compile(self, op: ReduceOp, layout: ReplicaLayout, options: Any, kinds: Any) -> Any:
        def reduce_all(stored: Any) -> tuple[list[Any], jax.Array]:
            values = [
                PerReplica.from_stored(arrays, scalars, treedef, layout)
                for arrays, (scalars, treedef) in zip(stored, kinds, strict=True)
            ]
            return self._in_outer_trace(op, values, layout, options), jnp.zeros(())

        return jax.jit(reduce_all)


class NcclAllReduce(_AllReduce):
    """All-reduce by the devices' own collective library (NCCL on GPUs).

    Args:
      num_packs: Gradients of one type travel in this many packs; 0 for one each.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)


class HierarchicalCopyAllReduce(_AllReduce):
    """All-reduce in two stages: each device sums one part, then all exchange their parts.

    Args:
      num_packs: Gradients of one type travel in this many packs; 0 for one each.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)

    def _reducer(self, count: int) -> in_replica.Reducer:
        return in_replica.scatter_and_gather(count)


def select_cross_device_ops(worker_devices: Sequence[Device]) -> CrossDeviceOps:
    """Returns the algorithm for a set of devices when the user names none."""
    platforms = {d.platform for d in worker_devices}
    if len(platforms) > 1:
        return ReductionToOneDevice()
    if platforms & {"gpu", "cuda", "rocm"}:
        return NcclAllReduce()
    return CollectiveAllReduce(platforms == {"cpu"} and len(worker_devices) > 1)


def _as_per_replica(value: Any) -> Any:
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


def _mesh_of(column: Sequence[Any]) -> ReplicaLayout | None:
    found = tuple(device_of(jax.tree.leaves(c)[0]) for c in column)
    return ReplicaLayout(found) if len(set(found)) == len(found) > 1 else None


def _require_op(reduce_op: Any) -> None:
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
