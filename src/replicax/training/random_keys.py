"""Keys of `jax.random` that are different on each replica, in each step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors, jax_compat
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.values.distributed_values import PerReplica
from replicax.variables.module import Module
from replicax.variables.variable import Variable

_MOST_SEED = 2**32 - 1


def replica_key(key: ArrayLike, *data: ArrayLike) -> Any:
    """Returns a key of `jax.random` for the current replica.

    The number of the replica is folded into the key, and then everything in `data`, such as
    a step counter. Replica 0 of every strategy gets the same key as code without a strategy.

    Args:
      key: A key of `jax.random.key` or `jax.random.PRNGKey`, or a whole number to make one of.
      *data: Whole numbers, arrays or variables to fold in, so that each step has its own key.

    Returns:
      In replica code, the key of that replica. In cross-replica code the keys of all replicas,
      as a `PerReplica` that can be an argument of `run`.

    Raises:
      ContextError: This is neither replica nor cross-replica code.
      ArgumentTypeError: `key` is neither a key nor a whole number.

    >>> import jax
    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> step = rx.Variable(0)
    >>> def noise():
    ...     return jax.random.uniform(rx.random.replica_key(42, step))
    >>> first, second = strategy.experimental_local_results(strategy.run(rx.function(noise)))
    >>> bool(first == second), bool(first == noise())
    (False, True)
    """
    frame = frames.current()
    base = _key_of(key)
    if frame.replica_context is not None:
        return _folded(base, frame.replica_context.replica_id_in_sync_group, *data)
    if frame.mode is Mode.UPDATE or frame.layout is None:
        raise errors.ContextError(
            "`rx.random.replica_key` must be called in replica or cross-replica context",
            f"this is {frame.describe()}",
            "Create the key before, and pass it in `args`.",
        )
    layout = frame.layout
    numbers = range(layout.num_replicas)
    if layout.spans_processes and jax_compat.is_eager():
        numbers = numbers[layout.first_local : layout.first_local + layout.num_local]
    keys = [_folded(base, i, *data) for i in numbers]
    return keys[0] if layout.num_replicas == 1 else PerReplica(keys, layout)


class Generator(Module):
    """A stream of keys that differ between replicas; its position is a variable.

    Create it with the model, in the scope of the strategy. It advances in each call of a compiled
    function, where `random` and `np.random` would return the numbers of the trace again, and
    checkpoints include its position.

    Raises:
      InvalidArgumentError: The seed is not a whole number, or too large.

    >>> import jax
    >>> import replicax as rx
    >>> rng = rx.random.Generator(seed=42)
    >>> draw = rx.function(lambda: jax.random.normal(rng.key(), (2,)))
    >>> bool((draw() == draw()).any())
    False
    """

    def __init__(self, seed: int, name: str | None = None) -> None:
        super().__init__(name)
        is_number = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
        if not is_number or not 0 <= seed <= _MOST_SEED:
            raise errors.InvalidArgumentError(
                f"`seed` must be a whole number from 0 to {_MOST_SEED}",
                f"it is {seed!r}",
                "Choose such a number.",
            )
        # Each replica has its own count: no communication, also inside gradients.
        options: dict[str, Any] = {
            "trainable": False,
            "synchronization": VariableSynchronization.ON_READ,
            "aggregation": VariableAggregation.ONLY_FIRST_REPLICA,
        }
        self.seed = Variable(np.uint32(seed), name=f"{self.name}/seed", **options)
        self.count = Variable(np.uint32(0), name=f"{self.name}/count", **options)

    def key(self) -> Any:
        """Returns the next key; in cross-replica code the next keys of all replicas."""
        count = self.count.read_value()
        self.count.assign(count + np.uint32(1))
        return replica_key(jax.random.key(self.seed.read_value()), count)


def _key_of(key: object) -> jax.Array:
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(key)
    array = jnp.asarray(key) if isinstance(key, np.ndarray) else key
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) and array.ndim == 0:
            return array
        if array.dtype == jnp.uint32 and array.ndim == 1:
            return array
        if jnp.issubdtype(array.dtype, jnp.integer) and array.ndim == 0:
            return jax.random.key(array)
    raise errors.ArgumentTypeError(
        "`rx.random.replica_key` needs one key of jax.random, or a whole number as a seed",
        f"{key!r} was given",
        "Pass jax.random.key(seed), or the seed.",
    )


def _folded(key: jax.Array, *data: ArrayLike) -> jax.Array:
    for number in data:
        key = jax.random.fold_in(key, jnp.asarray(number).astype(jnp.uint32))
    return key
