"""A Keras optimizer as programs of single variables, which servers run without Keras."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax import export

from replicax.foundation import errors, jax_compat
from replicax.keras import internals
from replicax.keras.variables import DistributedVariable


class OptimizerPrograms:
    """The update of each variable of a Keras optimizer, as a function of arrays.

    Args:
      optimizer: The optimizer, which is built.

    Attributes:
      trained: The variables that it updates.
      state: Its own variables.
      owners: For each of its own variables, the number of the trained variable whose slot it is;
        None if it belongs to no variable.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        self.trained: list[DistributedVariable] = internals.trainable_variables_of(optimizer)
        self.state: list[DistributedVariable] = optimizer.variables
        self.owners = self._find_owners()

    def slots(self, number: int) -> list[int]:
        """Returns the indices of the slots of a variable in the state."""
        return [i for i, owner in enumerate(self.owners) if owner == number]

    @property
    def shared(self) -> list[int]:
        """The indices of the state that belongs to no variable."""
        return [i for i, owner in enumerate(self.owners) if owner is None]

    def _apply(
        self,
        gradients: Sequence[tuple[int, jax.Array]],
        params: Sequence[jax.Array],
        state: Sequence[jax.Array],
    ) -> tuple[list[Any], list[Any]]:
        """Returns the parameters and the state after a step with some gradients."""
        with _without_norms(self._optimizer), keras.StatelessScope() as scope:
            # Not as a mapping, which compares shapes.
            for variable, value in zip(
                (*self.trained, *self.state), (*params, *state), strict=True
            ):
                scope.add_update((variable, value))
            self._optimizer.apply(
                [gradient for _, gradient in gradients],
                [self.trained[number] for number, _ in gradients],
            )
        return (
            [scope.get_current_value(variable) for variable in self.trained],
            [scope.get_current_value(variable) for variable in self.state],
        )

    def _find_owners(self) -> list[int | None]:
        """Finds the variable that each part of the state depends on, in the program of a step."""
        params, state = _specs(self.trained), _specs(self.state)

        def step(
            gradients: list[jax.Array], params: list[jax.Array], state: list[jax.Array]
        ) -> tuple[list[Any], list[Any]]:
            return self._apply(list(enumerate(gradients)), params, state)

        with jax_compat.eagerly():
            closed = jax.make_jaxpr(step)(params, params, state)
        count = len(params)
        found = jax_compat.dependencies(closed.jaxpr)
        owners: list[int | None] = []
        for index, needed in enumerate(found[count:]):
            numbers = {n % count for n in needed if n < 2 * count}
            if len(numbers) > 1:
                raise self._coupled(self.state[index].path, sorted(numbers))
            owners.append(next(iter(numbers), None))
        origins = [*range(count), *range(count), *owners]
        for number, needed in enumerate(found[:count]):
            others = {o for n in needed if (o := origins[n]) not in (None, number)}
            if others:
                raise self._coupled(self.trained[number].path, [o for o in others if o is not None])
        return owners

    def _coupled(self, path: str, others: Sequence[int]) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            "An optimizer on parameter servers must update each variable independently",
            f"{path!r} of {type(self._optimizer).__name__} depends on the gradient of "
            f"{self.trained[others[0]].path!r}",
            "Use another optimizer, or a strategy on this machine.",
        )

    def update(self, number: int) -> Callable[..., list[jax.Array]]:
        """Returns the update of a variable.

        It takes the gradient, the value, the slots and the state that belongs to no variable, and
        returns the new value, slots and state. Arrays may have any number of rows if all of them
        have as many.
        """
        own, shared = self.slots(number), self.shared

        def program(gradient: jax.Array, value: jax.Array, *rest: jax.Array) -> list[jax.Array]:
            params = [jnp.zeros(v.shape, v.dtype) for v in self.trained]
            state = [jnp.zeros(v.shape, v.dtype) for v in self.state]
            params[number] = value
            for index, array in zip((*own, *shared), rest, strict=True):
                state[index] = array
            variables = [self.trained[number], *(self.state[i] for i in own)]
            shapes = [value.shape, *(array.shape for array in rest[: len(own)])]
            with internals.shaped(variables, shapes):
                new, after = self._apply([(number, gradient)], params, state)
            dtypes = [value.dtype, *(array.dtype for array in rest)]
            found = [new[number], *(after[i] for i in (*own, *shared))]
            return [jnp.asarray(x, dtype) for x, dtype in zip(found, dtypes, strict=True)]

        return program

    def has_rows(self, number: int) -> bool:
        """Tells whether a variable and its slots have rows, as many each."""
        rows = self.trained[number].shape[:1]
        return bool(rows) and all(self.state[i].shape[:1] == rows for i in self.slots(number))

    def exported(self, number: int, *, is_open: bool) -> bytes:
        """Returns the update of a variable for servers.

        Args:
          number: The variable.
          is_open: Whether it takes any number of rows.
        """
        scope = export.SymbolicScope()

        def spec(variable: keras.Variable) -> jax.ShapeDtypeStruct:
            if not is_open:
                return jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            rest = ", ".join(map(str, variable.shape[1:]))
            shape = export.symbolic_shape(f"n, {rest}" if rest else "n,", scope=scope)
            return jax.ShapeDtypeStruct(shape, variable.dtype)

        variable = self.trained[number]
        own = [spec(variable), spec(variable), *(spec(self.state[i]) for i in self.slots(number))]
        shared = _specs([self.state[i] for i in self.shared])
        with jax_compat.eagerly():
            program = export.export(jax.jit(self.update(number)), platforms=("cpu",))
            return bytes(program(*own, *shared).serialize())


def _specs(variables: Sequence[keras.Variable]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]


@contextlib.contextmanager
def _without_norms(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Leaves out what workers do to whole gradients; see `clipping`."""
    before = optimizer.clipnorm, optimizer.global_clipnorm
    optimizer.clipnorm = optimizer.global_clipnorm = None
    try:
        yield
    finally:
        optimizer.clipnorm, optimizer.global_clipnorm = before
