"""An optimizer for synchronous training: it adds gradients to variables."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from replicax.contexts.overlay import Change
from replicax.foundation import jax_compat
from replicax.strategies.parameter_server import ParameterServerExtended
from replicax.training.optimizer.remote import RemoteOptimizer, Update
from replicax.variables.remote import RemoteVariable


class SumOptimizer:
    """Adds the mean gradient of a round to variables, which have the same size.

    Args:
      extended: Registers it on the servers.
      variables: The variables.
    """

    def __init__(
        self, extended: ParameterServerExtended, variables: Sequence[RemoteVariable]
    ) -> None:
        program = _exported(variables[0].shape[0])
        updates = [Update(variable, [], program, is_row_wise=False) for variable in variables]
        number = extended.register([], updates)
        self._remote = RemoteOptimizer(number, variables, [])

    def step(self, gradients: Mapping[int, np.ndarray]) -> Change:
        """Returns a step with gradients of some variables, by the numbers of their parts."""
        trained = self._remote.trained
        found = [gradients.get(variable.number) for variable in trained]  # type: ignore[attr-defined]
        return Change(self._remote, "apply", found)


@functools.cache
def _exported(size: int) -> bytes:
    """Returns the program of an update, from the gradient and the value to the value."""
    spec = jax.ShapeDtypeStruct((size,), jnp.dtype("float32"))
    with jax_compat.eagerly():
        program = export.export(jax.jit(lambda g, v: (v + g,)), platforms=("cpu",))(spec, spec)
    return bytes(program.serialize())
