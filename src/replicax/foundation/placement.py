"""The devices of arrays, and whether arrays are committed to them.

Note [Uncommitted arrays]
    JAX raises an error for operands that are *committed* to different devices. It copies an
    uncommitted array to the device of the other operands, or to the default device. The library
    returns uncommitted arrays to users, so that arrays of all replicas, strategies and variables
    can be combined. It stores committed arrays, so that its own programs run on their devices.
"""

from __future__ import annotations

import jax
import numpy as np

from replicax.foundation import jax_compat
from replicax.foundation.jax_compat import Device
from replicax.foundation.types import Tree


def uncommitted(array: Tree) -> Tree:
    """Returns an uncommitted array over the buffer of an array of one device.

    Arrays of several devices, tracers and anything else are returned unchanged.
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


def put(value: Tree, device: Device) -> Tree:
    """Copies the arrays of a structure to a device if necessary; uncommitted."""

    def one(leaf: object) -> object:
        if not isinstance(leaf, jax.Array) or jax_compat.is_traced(leaf):
            return leaf
        if leaf.sharding.device_set != {device}:
            leaf = jax.device_put(leaf, device)
        return uncommitted(leaf)

    return one(value) if isinstance(value, jax.Array) else jax.tree.map(one, value)


def usable_on(value: Tree, device: Device) -> Tree:
    """Copies the committed arrays of a structure to a device."""

    def one(leaf: object) -> object:
        if not isinstance(leaf, jax.Array) or jax_compat.is_traced(leaf):
            return leaf
        if not leaf.committed or leaf.sharding.device_set == {device}:
            return leaf
        return jax.device_put(leaf, device)

    return one(value) if isinstance(value, jax.Array) else jax.tree.map(one, value)
