"""Types that many modules name in their signatures."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

# A nest of tuples, lists, dictionaries and registered nodes whose leaves are arrays or scalars. JAX
# itself has no narrower type for it.
Tree: TypeAlias = Any


class TreeDef(Protocol):
    """The structure of a tree without its leaves: `jax.tree_util.PyTreeDef`."""

    @property
    def num_leaves(self) -> int: ...
