"""Splits batches on the host, and places the parts on the devices of the replicas."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from replicax.foundation import errors, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree, TreeDef
from replicax.input import sources
from replicax.input.rebatching import Rows, Share, steps_of_batch
from replicax.values.distributed_values import PerReplica
from replicax.values.layout import ReplicaLayout

_LEAF = jax.tree.structure(0)
# Kinds of types that devices support; text, objects and sparse rows stay on the host.
_NUMERIC = "biufcV"


class Splitter:
    """Splits global batches, and places the parts on the devices of the replicas."""

    def __init__(self, layout: ReplicaLayout, share: Share, to_device: bool, copies: bool) -> None:
        self._layout = layout
        self._share = share
        self._to_device = to_device
        # Whether arrays may have another owner, which may change them later.
        self._copies = copies

    @property
    def has_many_steps(self) -> bool:
        """Whether one global batch may last for several steps."""
        return self._share.num_workers > 1 and not self._share.cuts_each_batch

    def steps(self, batch: Tree) -> list[Tree]:
        """Returns one element for each step that a global batch lasts for."""
        layout, is_alone = self._layout, self._share.num_workers == 1
        if layout.num_replicas == 1 and is_alone:
            return [self.place(batch, 0)]
        leaves, treedef = _flatten(batch)
        size = _rows_of(leaves)
        if is_alone and size and size % layout.num_replicas == 0:
            return [jax.tree.unflatten(treedef, self._whole(leaves, size))]
        steps = steps_of_batch(size, self._share)
        return [self._parts([_rows(batch, rows) for rows in step]) for step in steps]

    def _whole(self, leaves: list[Any], size: int) -> list[Any]:
        """Distributes a batch of equal parts, without slicing it on the host."""
        layout = self._layout
        placed = self._on_devices(leaves, layout.per_replica)
        if len(placed) == len(leaves):
            arrays = placed.values()
            return [PerReplica.from_stored((a,), (False,), _LEAF, layout) for a in arrays]
        part = size // layout.num_replicas
        bounds = [(i * part, (i + 1) * part) for i in range(layout.num_replicas)]
        return [
            PerReplica.from_stored((placed[i],), (False,), _LEAF, layout)
            if i in placed
            else PerReplica([leaf[start:stop] for start, stop in bounds], layout)
            for i, leaf in enumerate(leaves)
        ]

    def _parts(self, parts: list[Tree]) -> Tree:
        """Distributes one structure per replica, of any sizes."""
        return joined([self.place(part, i) for i, part in enumerate(parts)], self._layout)

    def place(self, part: Tree, replica_id: int) -> Tree:
        """Places the part of one replica on its device."""
        leaves, treedef = _flatten(part)
        placed = self._on_devices(leaves, self._layout.devices[replica_id])
        return jax.tree.unflatten(treedef, [placed.get(i, leaf) for i, leaf in enumerate(leaves)])

    def _on_devices(self, leaves: list[Any], where: Device | Sharding) -> dict[int, jax.Array]:
        """Copies the leaves that devices support in one call; returns them by position."""
        if not self._to_device:
            return {}
        dense = [i for i, leaf in enumerate(leaves) if _is_dense(leaf)]
        arrays = self._owned([leaves[i] for i in dense])
        if isinstance(where, Device) and all(isinstance(array, np.ndarray) for array in arrays):
            # Host arrays go to the default device, and are not committed to it.
            with jax.default_device(where):
                put = jax.device_put(arrays)
        else:
            put = [placement.uncommitted(array) for array in jax.device_put(arrays, where)]
        return dict(zip(dense, put, strict=True))

    def _owned(self, arrays: list[Any]) -> list[Any]:
        """Copies arrays that `device_put` would share with another owner."""
        if not self._copies:
            return arrays
        return [np.array(a) if isinstance(a, np.ndarray) else a for a in arrays]


def joined(parts: list[Any], layout: ReplicaLayout) -> Any:
    """Makes one element of one structure per replica."""
    if len(parts) == 1:
        return parts[0]
    flat = [_flatten(part) for part in parts]
    treedef = flat[0][1]
    if any(other != treedef for _, other in flat):
        raise errors.StructureError(
            "The batches of all replicas must have one structure",
            f"these have {[str(t) for _, t in flat]}",
            "Make every dataset yield the same containers and keys.",
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(treedef, [PerReplica(column, layout) for column in columns])


def _rows_of(leaves: list[Any]) -> int:
    """Returns the number of rows of a batch, the same for each of its arrays."""
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    for leaf, shape in zip(leaves, shapes, strict=True):
        if not shape:
            what = "a scalar" if shape == () or np.isscalar(leaf) else type(leaf).__name__
            raise sources.unbatched(f"this one contains {what}")
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1:
        found = f"it has shapes {shapes}" if shapes else "it has none"
        raise errors.InvalidArgumentError(
            "All arrays of a batch must have the same number of rows",
            found,
            "Use the same first dimension for every array of the batch.",
        )
    return sizes.pop()


def empty_like(batch: Tree) -> Tree:
    """Returns a batch without rows, of the same types and ranks; None if it has scalars."""
    if any(not getattr(leaf, "shape", None) for leaf in _flatten(batch)[0]):
        return None
    return _rows(batch, (0, 0))


def _rows(batch: Tree, rows: Rows) -> Tree:
    start, stop = rows
    leaves, treedef = _flatten(batch)
    return jax.tree.unflatten(treedef, [leaf[start:stop] for leaf in leaves])


def _flatten(batch: Tree) -> tuple[list[Any], TreeDef]:
    # A sparse matrix is one leaf: its rows are not the rows of its arrays.
    return jax.tree.flatten(batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic)
        and leaf.dtype.kind in _NUMERIC
        and leaf.dtype.names is None
    )
