"""What the elements of a per-worker dataset look like: told by a worker, in plain values."""

from __future__ import annotations

from typing import Any

import jax

from replicax.tracing.signature import PerReplicaSpec, TensorSpec


def described(dataset: Any) -> tuple[Any, list[Any]]:
    """Describes the elements of a worker's dataset; runs on the worker.

    Returns:
      The structure of elements, with numbers as leaves, and for each leaf whether it is one of
      all replicas, and the shapes and types of its components.
    """
    leaves: list[Any] = []

    def number(spec: Any) -> int:
        is_per_replica = isinstance(spec, PerReplicaSpec)
        specs = spec.value_specs if is_per_replica else (spec,)
        shapes = [None if s.shape is None else list(s.shape) for s in specs]
        leaves.append([is_per_replica, shapes, [s.dtype.name for s in specs]])
        return len(leaves) - 1

    return jax.tree.map(number, dataset.element_spec), leaves


def rebuilt(description: tuple[Any, list[Any]]) -> Any:
    """Returns the specs that `described` has described.

    >>> rebuilt(({"x": 0}, [[False, [[None, 2]], ["float32"]]]))
    {'x': TensorSpec(shape=(None, 2), dtype=dtype('float32'), name=None)}
    """
    structure, leaves = description

    def spec(number: int) -> Any:
        is_per_replica, shapes, dtypes = leaves[number]
        specs = [TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return PerReplicaSpec(tuple(specs)) if is_per_replica else specs[0]

    return jax.tree.map(spec, structure)
