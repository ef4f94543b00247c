"""The bridge to models of other JAX libraries: pytrees of arrays as variables, and back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from replicax.foundation.types import Tree
from replicax.variables.variable import Variable


def make_variables(
    tree: Tree, *, trainable: bool | None = None, name: str = "", **attributes: Any
) -> Tree:
    """Replaces every array of a pytree by a variable; other leaves stay as they are.

    Works on the parameters of any JAX library: nested dicts, flax states, equinox modules.
    Variables are named by their path and placed by the strategy in whose scope this runs.

    Args:
      tree: Any pytree.
      trainable: As for `rx.Variable`; by default, arrays of floating type are trainable.
      name: A prefix for the names.
      **attributes: Further arguments of `rx.Variable`, such as `aggregation`.

    >>> import jax.numpy as jnp
    >>> make_variables({"w": jnp.ones(2)})["w"]
    <rx.Variable 'w:0' shape=(2,) dtype=float32, numpy=array([1., 1.], dtype=float32)>
    """

    def make(path: tuple[object, ...], leaf: Tree) -> Tree:
        if isinstance(leaf, Variable) or not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        is_float = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
        own = "/".join(filter(None, [name, *(path_part(p) for p in path)]))
        return Variable(
            leaf, is_float if trainable is None else trainable, name=own or None, **attributes
        )

    return jax.tree_util.tree_map_with_path(
        make, tree, is_leaf=lambda leaf: isinstance(leaf, Variable)
    )


def read_variables(tree: Tree) -> Tree:
    """Replaces every variable of a pytree by its value: the way back from `make_variables`.

    >>> import jax.numpy as jnp
    >>> read_variables(make_variables({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
    """
    # A variable is its value to JAX; mapping reads it.
    return jax.tree.map(lambda leaf: leaf, tree)


def path_part(key: object) -> str:
    """Returns the name of one key of a path in a pytree."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
