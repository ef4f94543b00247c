"""Models of flax.nnx."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import jax

from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree, TreeDef
from replicax.models.state import Path, StateVariables
from replicax.variables.module import Module
from replicax.variables.pytrees import path_part

if TYPE_CHECKING:
    from flax import nnx
else:
    nnx = lazy.module("flax.nnx", "flax")

M = TypeVar("M", bound="nnx.Module")
R = TypeVar("R")


class NnxModel(Module, Generic[M]):
    """An nnx module whose state is in variables; `from_nnx` makes it.

    Attributes:
      state: The variables, in dictionaries with the names of the module's attributes.

    Raises:
      UnsupportedError: A call has changed a static attribute of the module.
    """

    def __init__(self, graph: nnx.GraphDef[M], structure: TreeDef, state: StateVariables) -> None:
        super().__init__()
        self._graph, self._structure, self._state = graph, structure, state
        self.state = state.nested()

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Calls the module, and stores the state that the call has changed."""
        return self.apply(lambda module: cast("Callable[..., Tree]", module)(*args, **kwargs))

    def apply(self, function: Callable[[M], R]) -> R:
        """Calls a function with the module, and stores the state that it has changed.

        Parameters stay as they are: only optimizers and assignments change them.

        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> model = rx.models.from_nnx(nnx.Embed(10, 4, rngs=nnx.Rngs(0)))
        >>> model.apply(lambda embed: embed.attend(jnp.ones(4))).shape
        (10,)
        """
        before = self._state.read()
        module = self._merge(before.values())
        result = function(module)
        graph, after = nnx.split(module)
        leaves = dict(_leaves(after))
        self._state.check_paths(leaves)
        if graph != self._graph:
            raise errors.UnsupportedError(
                "A call must leave the static attributes of an nnx module as they were",
                "it has changed one",
                "Use `view` for another mode, and variables of nnx for what changes.",
            )
        self._state.store(before, leaves)
        return result

    def view(self, **attributes: Tree) -> NnxModel[M]:
        """Returns the model in another mode, with the same variables.

        Args:
          **attributes: As for `nnx.view`, such as `deterministic` and `use_running_average`.

        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import replicax as rx
        >>> model = rx.models.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
        >>> model.view(deterministic=True)(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
        """
        module = self._merge(self._state.shapes())
        graph, state = nnx.split(nnx.view(module, **attributes))
        return NnxModel(graph, jax.tree.structure(state), self._state)

    def _merge(self, leaves: Iterable[Tree]) -> M:
        return nnx.merge(self._graph, jax.tree.unflatten(self._structure, leaves))


def from_nnx(module: M, *, wrt: nnx.filterlib.Filter | None = None) -> NnxModel[M]:
    """Makes the state of an nnx module variables of the strategy in whose scope this runs.

    Parameters become trainable variables; optimizers sum their gradients. Statistics of BatchNorm
    are kept per replica, and read as their mean outside of replicas. Random streams differ between
    replicas. The module itself is left as it is.

    Args:
      module: An `nnx.Module` that has all its state.
      wrt: A filter of nnx, such as `nnx.LoRAParam`, for the parameters to train; all by default.
        The others are variables that are not trainable.

    Raises:
      ArgumentTypeError: It is not an nnx module, or has state other than arrays and numbers.
      MissingDependencyError: flax is not installed.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import replicax as rx
    >>> with rx.MirroredStrategy(["CPU:0"], virtual_replicas=2).scope():
    ...     model = rx.models.from_nnx(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    >>> [v.name for v in model.trainable_variables]
    ['bias', 'scale']
    >>> [v.aggregation.name for v in model.non_trainable_variables]
    ['MEAN', 'MEAN']
    """
    if not isinstance(module, nnx.Module):
        raise errors.ArgumentTypeError(
            "`from_nnx` needs an nnx.Module",
            f"a {type(module).__name__} was given",
            "Use `from_linen` or `from_equinox` for modules of these libraries.",
        )
    graph, state = nnx.split(module)
    parameters = {path for path, _ in _leaves(nnx.state(module, nnx.Param))}
    trainable = parameters if wrt is None else {p for p, _ in _leaves(nnx.state(module, wrt))}
    variables = StateVariables(_leaves(state), parameters | trainable, trainable)
    return NnxModel(graph, jax.tree.structure(state), variables)


def _leaves(state: nnx.State) -> Iterator[tuple[Path, Tree]]:
    """Yields the arrays of a state with their paths, in the order of JAX."""
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        # A variable of nnx is one step of the path, which its name in the module stands for.
        own = [key for key in keys if isinstance(key, jax.tree_util.GetAttrKey)][:1]
        yield tuple(path_part(key) for key in keys if key not in own), leaf
