"""Splits batches on the host, and places the parts on the devices of the replicas.

Note [Steps of several workers]
    An element of a layout that spans processes holds the parts of all workers, of which a worker
    reads only its own: a `LocalStep`. It becomes an element when the shapes of all parts are
    known. Where all parts of an array have one shape, the element holds one array of all replicas,
    and otherwise the local parts with the shapes of all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from typing_extensions import override

from replicax.foundation import errors, ordered_trees, placement
from replicax.foundation.jax_compat import Device
from replicax.foundation.ordered_trees import Structure
from replicax.foundation.types import Tree
from replicax.input import sources
from replicax.input.rebatching import Rows, Share, rows_of_all_replicas, steps_of_batch
from replicax.values.distributed_values import PerReplica
from replicax.values.layout import ReplicaLayout

_LEAF = jax.tree.structure(0)
# Kinds of types that devices support; text, objects and sparse rows stay on the host.
_NUMERIC = "biufcV"

# Per leaf of an element, the shape of its part on each replica; None if leaves have no shape.
Shapes: TypeAlias = list[list[tuple[int, ...]] | None]


class Splitter:
    """Splits global batches, and places the parts on the devices of the replicas."""

    def __init__(self, layout: ReplicaLayout, share: Share, to_device: bool, copies: bool) -> None:
        self._layout = layout
        self._share = share
        self._to_device = to_device
        # Whether arrays may have another owner, which may change them later.
        self._copies = copies

    @property
    def num_parts(self) -> int:
        """The number of parts that `join` takes: one for each local replica."""
        return self._layout.num_local

    def split(self, batch: Tree) -> Tree:
        """Splits a global batch, of which all workers read the same, into an element."""
        layout, is_alone = self._layout, self._share.num_workers == 1
        if layout.num_replicas == 1 and is_alone:
            return self.place(batch, 0)
        leaves, treedef = _flatten(batch)
        size = _rows_of(leaves)
        if is_alone and size and size % layout.num_replicas == 0:
            return ordered_trees.unflatten(treedef, self._whole(leaves, size))
        (parts,) = steps_of_batch(size, self._share)
        return self.join([rows_between(batch, *rows) for rows in parts])

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

    def join(self, parts: list[Tree]) -> Tree:
        """Distributes one structure per replica, of any sizes."""
        return joined([self.place(part, i) for i, part in enumerate(parts)], self._layout)

    def place(self, part: Tree, replica_id: int) -> Tree:
        """Places the part of one replica on its device."""
        leaves, treedef = _flatten(part)
        placed = self._on_devices(leaves, self._layout.devices[replica_id])
        return ordered_trees.unflatten(
            treedef, [placed.get(i, leaf) for i, leaf in enumerate(leaves)]
        )

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


class LocalStep:
    """What the replicas of this process take in one step; see Note [Steps of several workers].

    Args:
      columns: Per leaf, the part of each local replica.
      treedef: The structure of an element.
      num_rows: The rows of the global batch, if all workers read the same one.
      all_shapes: The shapes of the parts of all replicas, if they follow from that batch.
    """

    def __init__(
        self,
        columns: list[list[Any]],
        treedef: Structure,
        num_rows: int | None = None,
        all_shapes: Shapes | None = None,
    ) -> None:
        self.columns = columns
        self.treedef = treedef
        self.num_rows = num_rows
        self.all_shapes = all_shapes

    @property
    def shapes(self) -> Shapes:
        """The shapes of the local parts."""
        return [
            [tuple(part.shape) for part in column] if _has_shape(column[0]) else None
            for column in self.columns
        ]

    @property
    def kinds(self) -> str:
        """The structure and the types, in which the steps of all workers must agree."""
        types = [str(getattr(column[0], "dtype", type(column[0]))) for column in self.columns]
        return f"{self.treedef} of {', '.join(types)}"

    def without_rows(self) -> Tree:
        """Returns a part without rows, on the host; None if leaves are no batches."""
        first = [column[0] for column in self.columns]
        if any(not getattr(leaf, "shape", None) for leaf in first):
            return None
        empty = [
            np.zeros((0, *leaf.shape[1:]), leaf.dtype) if _has_shape(leaf) else leaf[0:0]
            for leaf in first
        ]
        return ordered_trees.unflatten(self.treedef, empty)

    def element(self, layout: ReplicaLayout, shapes: Shapes) -> Tree:
        """Returns the element of all replicas, given the shapes of all parts."""
        leaves: list[PerReplica] = []
        for column, own in zip(self.columns, shapes, strict=True):
            is_even = own is not None and len(set(own)) == 1 and math.prod(own[0]) > 0
            if own is not None and is_even and isinstance(column[0], jax.Array):
                array = layout.assemble(column)
                leaves.append(PerReplica.from_stored((array,), (not own[0],), _LEAF, layout))
            else:
                parts = [placement.uncommitted(part) for part in column]
                leaves.append(PerReplica(parts, layout, all_shapes=own))
        return ordered_trees.unflatten(self.treedef, leaves)


class LocalSplitter(Splitter):
    """Splits batches for a layout that spans processes: into a `LocalStep` each."""

    @override
    def split(self, batch: Tree) -> LocalStep:
        leaves, _ = _flatten(batch)
        size = _rows_of(leaves)
        own, rows = _shares_of(size, self._share)
        step = self.join([rows_between(batch, *part) for part in own])
        step.num_rows = size
        step.all_shapes = [
            [(count, *leaf.shape[1:]) for count in rows] if _has_shape(leaf) else None
            for leaf in leaves
        ]
        return step

    @override
    def join(self, parts: list[Tree]) -> LocalStep:
        columns, treedef = _columns(parts)
        on_device = [i for i, column in enumerate(columns) if all(map(_is_dense, column))]
        if self._to_device and on_device:
            arrays = [self._owned(columns[i]) for i in on_device]
            devices = [list(self._layout.local_devices)] * len(arrays)
            for i, placed in zip(on_device, jax.device_put(arrays, devices), strict=True):
                columns[i] = placed
        return LocalStep(columns, treedef)


@functools.lru_cache(maxsize=64)
def _shares_of(size: int, share: Share) -> tuple[list[Rows], list[int]]:
    """Returns the local rows of a batch that all workers read, and the numbers of rows of all."""
    return steps_of_batch(size, share)[0], rows_of_all_replicas(size, share)


def joined(parts: list[Any], layout: ReplicaLayout) -> Any:
    """Makes one element of one structure per replica."""
    if len(parts) == 1:
        return parts[0]
    columns, treedef = _columns(parts)
    return ordered_trees.unflatten(treedef, [PerReplica(column, layout) for column in columns])


def _columns(parts: Sequence[Tree]) -> tuple[list[list[Any]], Structure]:
    """Returns the leaves of all parts, per leaf, and their common structure."""
    flat = [_flatten(part) for part in parts]
    treedef = flat[0][1]
    if any(other != treedef for _, other in flat):
        raise errors.StructureError(
            "The batches of all replicas must have one structure",
            f"these have {[str(t) for _, t in flat]}",
            "Make every dataset yield the same containers and keys.",
        )
    return [list(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)], treedef


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


def no_empty_elements(num_replicas: int, num_given: int) -> errors.InvalidArgumentError:
    """Returns the error for a last step whose missing elements cannot be empty ones."""
    return errors.InvalidArgumentError(
        f"The last step needs an element for each of the {num_replicas} replicas, or elements "
        "that can be empty",
        f"there are {num_given}, without a batch dimension",
        "Batch the dataset, or make its length a multiple of the replicas.",
    )


def empty_like(batch: Tree) -> Tree:
    """Returns a batch without rows, of the same types and ranks; None if it has scalars."""
    if any(not getattr(leaf, "shape", None) for leaf in _flatten(batch)[0]):
        return None
    return rows_between(batch, 0, 0)


def rows_between(batch: Tree, start: int, stop: int) -> Tree:
    """Returns consecutive rows of a batch."""
    leaves, treedef = _flatten(batch)
    return ordered_trees.unflatten(treedef, [leaf[start:stop] for leaf in leaves])


def concatenated(batches: Sequence[Tree]) -> Tree:
    """Returns a batch of the rows of several."""
    if len(batches) == 1:
        return batches[0]
    columns, treedef = _columns(batches)
    return ordered_trees.unflatten(treedef, [_joined_rows(column) for column in columns])


def _joined_rows(parts: list[Any]) -> Any:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    if hasattr(parts[0], "todense"):
        from jax.experimental import sparse  # noqa: PLC0415 - slow to import, and rarely needed

        return sparse.bcoo_concatenate(parts, dimension=0)
    return jnp.concatenate(parts)


def _flatten(batch: Tree) -> tuple[list[Any], Structure]:
    # A sparse matrix is one leaf: its rows are not the rows of its arrays.
    return ordered_trees.flatten(batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


def _has_shape(leaf: object) -> bool:
    """Returns whether a leaf is one array; the arrays of a sparse matrix have other shapes."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def remaining_rows(batch: Tree, num_given: int) -> Tree:
    """Returns a batch without its first rows; None if no row is left."""
    size = _rows_of(_flatten(batch)[0])
    return None if num_given >= size else rows_between(batch, num_given, size)


def rows_of(batch: Tree) -> int:
    """Returns the number of rows of a batch, the same for each of its arrays."""
    return _rows_of(_flatten(batch)[0])


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) or (
        isinstance(leaf, np.ndarray | np.generic)
        and leaf.dtype.kind in _NUMERIC
        and leaf.dtype.names is None
    )
