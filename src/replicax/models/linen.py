"""Models of flax.linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

from replicax.foundation import errors, lazy
from replicax.foundation.types import Tree
from replicax.models.state import StateVariables, flatten, unflatten
from replicax.training.random_keys import Generator
from replicax.values.distributed_values import PerReplica
from replicax.variables.module import Module

if TYPE_CHECKING:
    from flax import linen
else:
    linen = lazy.module("flax.linen", "flax")

_PARAMETERS = "params"


class LinenModel(Module):
    """A linen module and its collections, in variables; `from_linen` makes it.

    Attributes:
      state: The variables of all collections, in dictionaries as `init` returns them.
      rngs: The random streams, by name.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import replicax as rx
    >>> from flax import linen
    >>> module = linen.Dense(3)
    >>> model = rx.models.from_linen(module, module.init(jax.random.key(0), jnp.ones((1, 2))))
    >>> model(jnp.ones((5, 2))).shape, sorted(model.state)
    ((5, 3), ['params'])
    """

    def __init__(
        self, module: linen.Module, state: StateVariables, rngs: Mapping[str, Generator]
    ) -> None:
        super().__init__()
        self._module, self._state = module, state
        self.state = state.nested()
        self.rngs = dict(rngs)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Applies the module, and stores the collections that the call has changed.

        Args:
          *args: The arguments of the module, or of `method`.
          **kwargs: More of them, and `method` as for `linen.Module.apply`.
        """
        before = self._state.read()
        collections = unflatten(before)
        changing = [name for name in collections if name != _PARAMETERS]
        keys = {name: _one_key(stream) for name, stream in self.rngs.items()}
        if not changing:
            return self._module.apply(collections, *args, rngs=keys, **kwargs)
        result, changed = self._module.apply(
            collections, *args, rngs=keys, mutable=changing, **kwargs
        )
        self._state.store(before, {**before, **dict(flatten(changed))})
        return result


def _one_key(stream: Generator) -> jax.Array:
    key = stream.key()
    # Code that acts for all replicas draws what the first of them would.
    return key.values[0] if isinstance(key, PerReplica) else key


def from_linen(
    module: linen.Module,
    variables: Mapping[str, Tree],
    rngs: Mapping[str, int] | None = None,
) -> LinenModel:
    """Makes the collections of a linen module variables of the strategy in whose scope this runs.

    The collection "params" becomes trainable variables. Others, such as "batch_stats", are kept
    per replica; floating-point state is read as its mean outside of replicas.

    Args:
      module: The module.
      variables: Its collections, as `module.init` returns them.
      rngs: A seed for each random stream of the module, such as `{"dropout": 0}`. Streams differ
        between replicas, and advance with each call.

    Raises:
      ArgumentTypeError: It is not a linen module.
      MissingDependencyError: flax is not installed.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import linen
    >>> import replicax as rx
    >>> module, x = linen.Dense(2), jnp.ones((1, 3))
    >>> model = rx.models.from_linen(module, module.init(jax.random.key(0), x))
    >>> model(x).shape, [v.name for v in model.trainable_variables]
    ((1, 2), ['params/bias', 'params/kernel'])
    """
    if not isinstance(module, linen.Module):
        raise errors.ArgumentTypeError(
            "`from_linen` needs a linen.Module",
            f"a {type(module).__name__} was given",
            "Use `from_nnx` or `from_equinox` for modules of these libraries.",
        )
    leaves = dict(flatten(linen.unbox(variables)))
    state = StateVariables(leaves.items(), [path for path in leaves if path[0] == _PARAMETERS])
    streams = {name: Generator(seed, name) for name, seed in (rngs or {}).items()}
    return LinenModel(module, state, streams)
