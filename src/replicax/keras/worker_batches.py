"""A batch that every worker has as a whole, and of which each puts its own rows on its devices.

The rows of replica i of n are the i-th of n equal parts. If the batch has no n equal parts, rows
are appended that fill the last ones, and the program removes them before anything is computed. So
no worker depends on the copy of another one, and the appended rows enter no statistics.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors
from replicax.values.distributed_values import PerReplica
from replicax.values.layout import ReplicaLayout


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stored"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class Rows:
    """Parts of one size for all replicas, of which only the first rows are rows of the batch.

    Attributes:
      stored: The parts of all replicas.
      sizes: The number of rows of the batch in each part.
    """

    stored: jax.Array
    sizes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the batch; Keras builds models from it."""
        return (sum(self.sizes), *self.stored.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The type of the batch."""
        return self.stored.dtype

    def whole(self) -> jax.Array:
        """Returns the rows of the batch, in a program over all replicas."""
        most = self.stored.shape[0] // len(self.sizes)
        num_full = next((i for i, size in enumerate(self.sizes) if size < most), len(self.sizes))
        if not any(self.sizes[num_full + 1 :]):
            return self.stored[: sum(self.sizes)]
        parts = [self.stored[i * most : i * most + size] for i, size in enumerate(self.sizes)]
        return jnp.concatenate(parts)


def is_rows(value: object) -> bool:
    """Tells whether a leaf of a placed batch must be cut first."""
    return isinstance(value, Rows)


def placed_leaf(leaf: ArrayLike | Rows, layout: ReplicaLayout) -> jax.Array | Rows:
    """Puts the rows of the local replicas on their devices, without a call of other workers."""
    if isinstance(leaf, Rows) or (isinstance(leaf, jax.Array) and len(leaf.devices()) > 1):
        return leaf
    array = np.asarray(leaf)
    if not array.ndim or not array.shape[0]:
        return layout.replicate(array)
    num_rows = array.shape[0]
    size = -(-num_rows // layout.num_replicas)
    starts = [size * (layout.first_local + i) for i in range(layout.num_local)]
    stored = layout.assemble([_part(array, start, size) for start in starts])
    if size * layout.num_replicas == num_rows:
        return stored
    sizes = [min(size, max(0, num_rows - size * i)) for i in range(layout.num_replicas)]
    return Rows(stored, tuple(sizes))


def joined(parts: PerReplica, layout: ReplicaLayout) -> Rows:
    """Joins arrays of different sizes, one per replica, of a distributed dataset."""
    shapes = parts.all_shapes(layout)
    if shapes is None or any(len(own) != 1 or not own[0] for own in shapes):
        raise errors.InvalidArgumentError(
            "The elements of a distributed dataset must be arrays with rows, for a Keras model",
            f"this one is {parts}",
            "Batch the dataset before it is distributed.",
        )
    (stored,) = parts.padded(layout)
    return Rows(stored, tuple(own[0][0] for own in shapes))


def _part(array: np.ndarray, start: int, size: int) -> np.ndarray:
    """Returns `size` rows; those beyond the end repeat the last row, so that they are ordinary."""
    part = array[start : start + size]
    missing = size - len(part)
    return part if not missing else np.concatenate([part, np.repeat(array[-1:], missing, 0)])
