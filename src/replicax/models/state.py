"""The state of a model as variables: which kind each part becomes, and how it is read and stored.

- Parameters are trainable variables. Optimizers sum their gradients over the replicas. A call of
  the model leaves them as they are.
- Other floating-point state, such as the statistics of BatchNorm, is kept per replica, without
  communication in the step, and read outside of replicas as the mean (ON_READ, MEAN).
- Counts and flags are kept per replica too; outside of replicas, those of the first one are read.
- Keys of `jax.random` are kept as they are. Each replica folds its number in when it reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.contexts import frames
from replicax.foundation import errors
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.foundation.types import Tree
from replicax.variables.variable import Variable

Path = tuple[Hashable, ...]


class StateVariables:
    """The variables of a model, by path.

    Args:
      leaves: The arrays and numbers of the model, by path.
      parameters: The paths of parameters.
      trainable: The paths of those that optimizers may change; all parameters by default.

    Raises:
      ArgumentTypeError: A leaf is neither an array nor a number.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[Path, Tree]],
        parameters: Collection[Path],
        trainable: Collection[Path] | None = None,
    ) -> None:
        self._variables: dict[Path, Variable] = {}
        self._parameters = frozenset(parameters)
        # How the keys of random streams are made of their data.
        self._key_types: dict[Path, Any] = {}
        for path, leaf in leaves:
            array = _array(path, leaf)
            if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
                self._key_types[path] = jax.random.key_impl(array)
                array = jax.random.key_data(array)
            if path in self._parameters:
                is_trainable = trainable is None or path in trainable
                self._variables[path] = Variable(array, is_trainable, name=_name(path))
            else:
                self._variables[path] = _per_replica(path, array)

    def read(self) -> dict[Path, jax.Array]:
        """Returns the present values; keys are those of the current replica."""
        return {path: self._read(path, variable) for path, variable in self._variables.items()}

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and types of the values, without reading them."""
        return [self._shape(path, variable) for path, variable in self._variables.items()]

    def _shape(self, path: Path, variable: Variable) -> jax.ShapeDtypeStruct:
        shape = jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        if path not in self._key_types:
            return shape
        wrap = functools.partial(jax.random.wrap_key_data, impl=self._key_types[path])
        return jax.eval_shape(wrap, shape)

    def _read(self, path: Path, variable: Variable) -> jax.Array:
        value = variable.read_value()
        if path not in self._key_types:
            return value
        key = jax.random.wrap_key_data(value, impl=self._key_types[path])
        replica = frames.current().replica_context
        number = 0 if replica is None else replica.replica_id_in_sync_group
        # Layers that are scanned over have a key each.
        fold_in = jax.random.fold_in
        for _ in range(key.ndim):
            fold_in = jax.vmap(fold_in, (0, None))
        return fold_in(key, number)

    def store(self, before: Mapping[Path, jax.Array], after: Mapping[Path, jax.Array]) -> None:
        """Assigns what a call has changed of the state that is neither a parameter nor a key.

        Args:
          before: What `read` has returned.
          after: The state after the call; what is the same object was not changed.
        """
        self.check_paths(after)
        for path, value in after.items():
            variable = self._variables[path]
            # Transformations such as nnx.remat return parameters and keys as new, equal arrays.
            is_fixed = path in self._parameters or path in self._key_types
            if not is_fixed and value is not before[path]:
                variable.assign(value)

    def check_paths(self, after: Mapping[Path, Tree]) -> None:
        """Raises an `UnsupportedError` if a call has added or removed state."""
        if after.keys() != self._variables.keys():
            different = sorted(map(_name, after.keys() ^ self._variables.keys()))
            raise errors.UnsupportedError(
                "A call must leave the model with the state that it had",
                f"it has added or removed {', '.join(different)}",
                "Create all state before, and return intermediate values from the call.",
            )

    def nested(self) -> dict[str, Tree]:
        """Returns the variables as nested dictionaries."""
        result: dict[str, Tree] = {}
        for path, variable in self._variables.items():
            inner = result
            for part in path[:-1]:
                inner = inner.setdefault(str(part), {})
            inner[str(path[-1])] = variable
        return result


def flatten(nested: Tree, path: Path = ()) -> Iterator[tuple[Path, Tree]]:
    """Yields the leaves of nested dictionaries with their paths."""
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value


def unflatten(flat: Mapping[Path, Tree]) -> Tree:
    """Returns the nested dictionaries of `flatten`."""
    result: dict[Hashable, Tree] = {}
    for path, value in flat.items():
        inner = result
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return result


def _array(path: Path, leaf: Tree) -> jax.Array | np.ndarray:
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if not isinstance(leaf, bool | int | float | complex | np.generic):
        raise errors.ArgumentTypeError(
            "The state of a model must be arrays and numbers",
            f"{_name(path)!r} is a {type(leaf).__name__}",
            "Keep it in a plain attribute of the module, which is not state.",
        )
    return jnp.asarray(leaf)


def _per_replica(path: Path, array: jax.Array | np.ndarray) -> Variable:
    is_float = jnp.issubdtype(array.dtype, jnp.inexact)
    first, mean = VariableAggregation.ONLY_FIRST_REPLICA, VariableAggregation.MEAN
    return Variable(
        array,
        trainable=False,
        name=_name(path),
        synchronization=VariableSynchronization.ON_READ,
        aggregation=mean if is_float else first,
    )


def _name(path: Path) -> str:
    return "/".join(map(str, path))
