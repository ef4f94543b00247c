"""Where random numbers come from: keys on devices, NumPy generators on the host.

Stateful functions draw from a stream for each seed of an operation. On devices the position of a
stream is a variable of the current strategy, so that a compiled function draws other numbers in
each call, and each replica draws its own. In code that JAX compiles without replicax, where no
variable can be written, and in what runs on a worker of parameter servers, where none can be made,
the position comes from the host by a callback.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from replicax.contexts import worker_index
from replicax.foundation import errors, placement
from replicax.strategies.default import get_strategy
from replicax.tf.dispatch import on_host
from replicax.tf.ops.operands import Array, Value, array, static
from replicax.training import random_keys
from replicax.values.distributed_values import PerReplica

Source: TypeAlias = "np.random.Generator | jax.Array"


class _Streams:
    """The streams of stateful functions, by strategy and seed of the operation."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self._base = secrets.randbits(64) if seed is None else seed
        self._on_devices: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._on_host: dict[int | None, np.random.Generator] = {}
        # Protects both tables.
        self._lock = threading.RLock()
        self._counter = itertools.count()

    def _entropy(self, op_seed: int | None) -> list[int]:
        # A seed of the operation alone makes its numbers repeatable.
        base = 0 if self.seed is None and op_seed is not None else self._base
        return [base % 2**64, 0 if op_seed is None else 1 + op_seed % 2**64]

    def on_host(self, op_seed: int | None) -> np.random.Generator:
        with self._lock:
            if op_seed not in self._on_host:
                self._on_host[op_seed] = np.random.default_rng(self._entropy(op_seed))
            return self._on_host[op_seed]

    def key(self, op_seed: int | None) -> jax.Array:
        worker = worker_index.find()
        if worker is not None:
            return jax.random.fold_in(self._key_from_host(op_seed), worker)
        strategy = get_strategy()
        with self._lock:
            streams = self._on_devices.setdefault(strategy, {})
        found = streams.get(op_seed)
        made = found or random_keys.Generator(self._number(op_seed), name="tf_random")
        try:
            key = made.key()
            streams.setdefault(op_seed, made)
            # Code outside of replicas draws for all of them at once.
            return placement.uncommitted(key.values[0]) if isinstance(key, PerReplica) else key
        except errors.TracingError:
            return self._key_from_host(op_seed)

    def _key_from_host(self, op_seed: int | None) -> jax.Array:
        count = io_callback(self._next, jax.ShapeDtypeStruct((), jnp.uint32))
        return jax.random.fold_in(jax.random.key(self._number(op_seed)), count)

    def _number(self, op_seed: int | None) -> int:
        return int(np.random.SeedSequence(self._entropy(op_seed)).generate_state(1)[0])

    def _next(self) -> np.ndarray:
        return np.asarray(next(self._counter), np.uint32)


_current: list[_Streams] = [_Streams(None)]


def set_seed(seed: int) -> None:
    """Sets the global seed, and starts all streams from their beginning.

    >>> from replicax.tf.ops import random
    >>> random.set_seed(7)
    >>> first = random.uniform([2]).numpy()
    >>> random.set_seed(7)
    >>> bool((random.uniform([2]).numpy() == first).all())
    True
    """
    _current[0] = _Streams(int(static(seed, "seed")))


def stateful(op_seed: Value) -> Source:
    """Returns the next key of a stream, or on the host its generator."""
    number = None if op_seed is None else int(static(op_seed, "seed"))
    return _current[0].on_host(number) if on_host() else _current[0].key(number)


def stateless(seed: Value) -> Source:
    """Returns what two numbers stand for."""
    pair = array(seed)
    if tuple(pair.shape) != (2,):
        raise errors.InvalidArgumentError(
            "`seed` must be two integers", f"its shape is {tuple(pair.shape)}", "Pass [1, 2]."
        )
    if on_host():
        return np.random.default_rng([int(v) % 2**64 for v in pair])
    return key_of_pair(pair)


def key_of_pair(pair: Array) -> jax.Array:
    """Returns a key for two integers, which may be computed in a compiled function."""
    first, second = (jnp.asarray(pair[i]).astype(jnp.uint32) for i in range(2))
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), first), second)


def pairs_of(source: Source, count: int) -> Array:
    """Returns new pairs of numbers, one row for each."""
    if isinstance(source, np.random.Generator):
        return source.integers(-(2**31), 2**31, (count, 2)).astype(np.int32)
    bits = jax.random.bits(source, (count, 2), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)
