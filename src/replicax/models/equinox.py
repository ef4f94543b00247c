"""Models of equinox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import jax
import jax.numpy as jnp

from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree, TreeDef
from replicax.models.state import Path, StateVariables
from replicax.variables.module import Module
from replicax.variables.pytrees import path_part

if TYPE_CHECKING:
    import equinox
else:
    equinox = lazy.module("equinox")

M = TypeVar("M", bound="equinox.Module")
# How the paths of variables begin.
_MODULE, _STATE = "module", "state"


class EquinoxModel(Module, Generic[M]):
    """An equinox module whose arrays are in variables; `from_equinox` makes it.

    Attributes:
      state: The variables, in dictionaries with the names of the module's fields.
    """

    def __init__(self, static: Tree, structure: TreeDef, state: StateVariables) -> None:
        super().__init__()
        self._static, self._structure, self._state = static, structure, state
        self.state = state.nested()

    def apply(self, function: Callable[..., Tree]) -> Tree:
        """Calls a function with the module, and with its `equinox.nn.State` if it has one.

        A function of module and state returns its result and the new state, which is stored.

        >>> import equinox as eqx
        >>> import jax
        >>> import replicax as rx
        >>> model = rx.models.from_equinox(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
        >>> model.apply(lambda linear: jax.vmap(linear)(jax.numpy.ones((5, 3)))).shape
        (5, 2)
        """
        before = self._state.read()
        arrays = jax.tree.unflatten(self._structure, list(before.values()))
        module, state = equinox.combine(arrays, self._static)
        if state is None:
            return function(module)
        result, state = function(module, state)
        after = equinox.filter((module, state), equinox.is_array)
        self._state.store(before, dict(zip(before, jax.tree.leaves(after), strict=True)))
        return result


def from_equinox(module: M, state: equinox.nn.State | None = None) -> EquinoxModel[M]:
    """Makes the arrays of an equinox module variables of the strategy in whose scope this runs.

    Arrays of floating type in the module become trainable variables. Those of the state are kept
    per replica, and read as their mean outside of replicas.

    Args:
      module: The module.
      state: The state that `equinox.nn.make_with_state` returned with it.

    Raises:
      ArgumentTypeError: It is not an equinox module.
      MissingDependencyError: equinox is not installed.

    >>> import equinox as eqx
    >>> import jax
    >>> import replicax as rx
    >>> model = rx.models.from_equinox(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    >>> [v.name for v in model.trainable_variables]
    ['module/bias', 'module/weight']
    """
    if not isinstance(module, equinox.Module):
        raise errors.ArgumentTypeError(
            "`from_equinox` needs an equinox.Module",
            f"a {type(module).__name__} was given",
            "Use `from_nnx` or `from_linen` for modules of these libraries.",
        )
    arrays, static = equinox.partition((module, state), equinox.is_array)
    own = list(_leaves(arrays[0]))
    parameters = [path for path, array in own if jnp.issubdtype(array.dtype, jnp.inexact)]
    variables = StateVariables((*own, *_state(arrays[1])), parameters)
    return EquinoxModel(static, jax.tree.structure(arrays), variables)


def _leaves(module: Tree) -> Iterator[tuple[Path, jax.Array]]:
    for keys, array in jax.tree_util.tree_flatten_with_path(module)[0]:
        yield (_MODULE, *map(path_part, keys)), array


def _state(state: Tree) -> Iterator[tuple[Path, jax.Array]]:
    # Equinox names no parts of a state; they have an order.
    for number, array in enumerate(jax.tree.leaves(state)):
        yield (_STATE, str(number)), array
