"""On which devices arrays are, and whether they bind computations to these.

Note [Uncommitted arrays]
    JAX refuses to compute with arrays of different devices if they were put there, which it
    calls *committed*. Arrays that are not committed have a device too, but JAX copies them to
    wherever the other operands are, or to the default device. What the library hands to users
    is not committed, so that arrays of all replicas, strategies and variables can be used
    together. What it stores is, so that its own programs run where the state is.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.foundation.jax_compat import Device


def uncommitted(array: Any) -> Any:
    """Returns an array of one device such that it can be used with arrays of other devices.

    The result shares its buffer with `array`. Arrays of several devices, tracers and anything
    else come back as they are.
    """
    if not isinstance(array, jax.Array) or jax_compat.is_traced(array) or not array.committed:
        return array
    if len(array.sharding.device_set) > 1:
        return array
    if isinstance(array.dtype, np.dtype):
        return jax_compat.uncommitted_view(array)
    # Random keys: an array of numbers in a wrapper of JAX's.
    with jax_compat.eagerly(), jax.default_device(next(iter(array.devices()))):
        numbers = jax_compat.uncommitted_view(jax.random.key_data(array))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(array))


def put(value: Any, device: Device) -> Any:
    """Copies the arrays of a structure to a device, unless they are there; uncommitted."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or jax_compat.is_traced(leaf):
            return leaf
        if leaf.sharding.device_set != {device}:
            leaf = jax.device_put(leaf, device)
        return uncommitted(leaf)

    return one(value) if isinstance(value, jax.Array) else jax.tree.map(one, value)


def usable_on(value: Any, device: Device) -> Any:
    """Copies those arrays of a structure to a device that JAX would not copy there itself."""

    def one(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array) and not jax_compat.is_traced(leaf)
        if not is_array or not leaf.committed or leaf.sharding.device_set == {device}:
            return leaf
        return jax.device_put(leaf, device)

    return one(value) if isinstance(value, jax.Array) else jax.tree.map(one, value)
