"""Taking distributed values apart, and wrapping one value per replica."""

from __future__ import annotations

from replicax.foundation.types import Tree
from replicax.values.distributed_values import (
    DistributedValues,
    PerReplica,
    register_components,
)
from replicax.values.layout import ReplicaLayout
from replicax.values.regroup import leaves_of, map_structure


def local_results(value: Tree) -> tuple[Tree, ...]:
    """Returns one structure per replica; a structure without distributed leaves stays one."""
    counts = [len(parts) for parts in map(_components, leaves_of(value)) if parts is not None]
    if not counts:
        return (value,)

    def pick(i: int) -> Tree:
        def one(leaf: Tree) -> Tree:
            parts = _components(leaf)
            return leaf if parts is None else parts[i]

        return map_structure(one, value)

    return tuple(pick(i) for i in range(max(counts)))


def wrapped(values: list[Tree], layout: ReplicaLayout | None) -> Tree:
    """Merges one structure per replica; every leaf becomes PerReplica, equal ones too."""

    def wrap(*leaves: Tree) -> PerReplica:
        result = PerReplica(leaves, layout)
        register_components(result, leaves)
        return result

    return map_structure(wrap, *values)


def _components(leaf: object) -> tuple[Tree, ...] | None:
    return leaf.values if isinstance(leaf, DistributedValues) else None
