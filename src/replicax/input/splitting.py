"""From batches on the host to elements of all replicas."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.input import sources
from replicax.input.rebatching import Rows, Share, steps_of_batch
from replicax.values.distributed_values import PerReplica
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure

_LEAF = jax.tree.structure(0)
# What devices can hold; text, objects and sparse rows stay on the host.
_NUMERIC = "biufcV"


class Splitter:
    """Cuts global batches, and puts the parts where the replicas are."""

    def __init__(self, layout: ReplicaLayout, share: Share, to_device: bool, copies: bool) -> None:
        self._layout = layout
        self._share = share
        self._to_device = to_device
        # Whether arrays may be somebody else's, who may change them after we read them.
        self._copies = copies

    @property
    def has_many_steps(self) -> bool:
        """Whether one global batch may last for several steps."""
        return self._share.num_workers > 1 and not self._share.cuts_each_batch

    def steps(self, batch: Any) -> list[Any]:
        """Returns the elements of all steps that a global batch serves."""
        count = self._layout.num_replicas
        if count == 1 and self._share.num_workers == 1:
            return [self.place(batch, 0)]
        size = rows_of(batch)
        steps = steps_of_batch(size, self._share)
        if len(steps) == 1 and self._share.num_workers == 1 and size % count == 0 and size:
            return [self._whole(batch)]
        return [self._parts([_rows(batch, rows) for rows in step]) for step in steps]

    def _whole(self, batch: Any) -> Any:
        """Distributes a batch whose parts are equal, without cutting it on the host."""
        leaves = leaves_of(batch)
        dense = [i for i, leaf in enumerate(leaves) if self._to_device and _is_dense(leaf)]
        own = self._owned([leaves[i] for i in dense])
        put = jax.device_put(own, self._layout.per_replica)
        placed = dict(zip(dense, put, strict=True))
        layout, count = self._layout, self._layout.num_replicas
        size = rows_of(batch) // count
        bounds = [(i * size, (i + 1) * size) for i in range(count)]
        elements = iter(
            PerReplica.from_stored([placed[i]], [False], _LEAF, layout)
            if i in placed
            else PerReplica([leaf[start:stop] for start, stop in bounds], layout)
            for i, leaf in enumerate(leaves)
        )
        return map_structure(lambda _: next(elements), batch)

    def _parts(self, parts: list[Any]) -> Any:
        """Distributes one structure per replica, of any sizes."""
        placed = [self.place(part, i) for i, part in enumerate(parts)]
        return joined(placed, self._layout)

    def place(self, part: Any, replica_id: int) -> Any:
        """Puts the part of one replica on its device."""
        if not self._to_device:
            return part
        leaves = leaves_of(part)
        dense = [i for i, leaf in enumerate(leaves) if _is_dense(leaf)]
        own = self._owned([leaves[i] for i in dense])
        put = jax.device_put(own, self._layout.devices[replica_id])
        placed = dict(zip(dense, put, strict=True))
        found = iter([placed.get(i, leaf) for i, leaf in enumerate(leaves)])
        return map_structure(lambda _: next(found), part)

    def _owned(self, arrays: list[Any]) -> list[Any]:
        """Copies arrays that `device_put` would share with somebody who may change them."""
        if not self._copies:
            return arrays
        return [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]


def joined(parts: list[Any], layout: ReplicaLayout) -> Any:
    """Makes one element of one structure per replica."""
    if len(parts) == 1:
        return parts[0]
    return map_structure(lambda *leaves: PerReplica(leaves, layout), *parts)


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch, the same for each of its arrays."""
    sizes = {}
    for leaf in leaves_of(batch):
        shape = getattr(leaf, "shape", None)
        if not shape:
            what = "a scalar" if shape == () or np.isscalar(leaf) else type(leaf).__name__
            raise sources.unbatched(f"this one contains {what}")
        sizes[tuple(shape)] = shape[0]
    if len(set(sizes.values())) != 1:
        found = f"it has shapes {list(sizes)}" if sizes else "it has none"
        raise errors.InvalidArgumentError(
            errors.message(
                "All arrays of a batch must have the same number of rows",
                found,
                "Give every array of the batch the same first dimension.",
            )
        )
    return next(iter(sizes.values()))


def empty_like(batch: Any) -> Any:
    """Returns a batch without rows, of the same types and ranks; None if that cannot be."""
    if any(not getattr(leaf, "shape", None) for leaf in leaves_of(batch)):
        return None
    return _rows(batch, (0, 0))


def _rows(batch: Any, rows: Rows) -> Any:
    start, stop = rows
    return map_structure(lambda leaf: leaf[start:stop], batch)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic)
        and leaf.dtype.kind in _NUMERIC
        and leaf.dtype.names is None
    )
