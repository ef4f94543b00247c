"""Models of flax.nnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree
from replicax.models.state import StateVariables, flatten, unflatten
from replicax.variables.module import Module

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

    def __init__(self, graph: nnx.GraphDef[M], template: nnx.State, state: StateVariables) -> None:
        super().__init__()
        self._graph, self._template, self._state = graph, template, state
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
        module = self._merge(unflatten(before))
        result = function(module)
        graph, after = nnx.split(module)
        self._state.store(before, dict(flatten(nnx.to_pure_dict(after))))
        if graph != self._graph:
            raise errors.UnsupportedError(
                "A call must leave the static attributes of an nnx module as they were",
                "it has changed one",
                "Use `view` for another mode, and variables of nnx for what changes.",
            )
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
        module = self._merge(nnx.to_pure_dict(self._template))
        graph, template = nnx.split(nnx.view(module, **attributes))
        return NnxModel(graph, template, self._state)

    def _merge(self, values: Tree) -> M:
        state = nnx.clone(self._template)
        nnx.replace_by_pure_dict(state, values)
        return nnx.merge(self._graph, state)


def from_nnx(module: M) -> NnxModel[M]:
    """Makes the state of an nnx module variables of the strategy in whose scope this runs.

    Parameters become trainable variables; optimizers sum their gradients. Statistics of BatchNorm
    are kept per replica, and read as their mean outside of replicas. Random streams differ between
    replicas. The module itself is left as it is.

    Args:
      module: An `nnx.Module` that has all its state.

    Raises:
      ArgumentTypeError: It is not an nnx module.
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
    graph, template = nnx.split(module)
    parameters = dict(flatten(nnx.to_pure_dict(nnx.state(module, nnx.Param))))
    arrays = flatten(nnx.to_pure_dict(template))
    state = StateVariables((path, array, path in parameters) for path, array in arrays)
    return NnxModel(graph, template, state)
