"""Arguments and results of the functions of strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.dispatch import on_host
from replicax.tf.ops.operands import (
    Array,
    Value,
    array,
    kind_of,
)

_LARGEST_INT32 = 2**31 - 1


def strings_of(value: Value, name: str) -> np.ndarray:
    """Returns an array of `bytes`."""
    found = array(value)
    if kind_of(found.dtype) != "O":
        raise errors.ArgumentTypeError(
            f"`tf.strings.{name}` takes strings",
            f"the tensor has {np.dtype(found.dtype).name}",
            "Convert it with tf.strings.as_string.",
        )
    return found


def array_of(values: Iterable[object], shape: tuple[int, ...]) -> np.ndarray:
    """Returns strings as an array of objects, which keeps zero bytes at their ends."""
    found = np.empty(shape, object)
    found.reshape(-1)[:] = list(values)
    return found


def mapped(value: Value, name: str, change: Callable[[bytes], bytes]) -> np.ndarray:
    """Returns an array with a function applied to each string."""
    strings = strings_of(value, name)
    if not strings.ndim:
        return array_of([change(strings.item())], ())
    return array_of(map(change, strings.reshape(-1).tolist()), strings.shape)


def placed(found: np.ndarray) -> Array:
    """Returns numbers where they will be used: in eager code on the device."""
    if on_host():
        return found
    if found.dtype == np.int64 and found.size and int(np.abs(found).max()) > _LARGEST_INT32:
        # A device would cut the upper half off.
        return found
    return jnp.asarray(found.astype(dtypes.device_dtype(found.dtype)))


def only_string(value: Value, name: str) -> bytes:
    """Returns the only string of a function whose rows would have different lengths."""
    strings = strings_of(value, name)
    if strings.ndim:
        raise errors.UnsupportedError(
            f"`tf.strings.{name}` takes one string: several would give a ragged tensor",
            f"the shape is {strings.shape}",
            f"Call it for each string, as in `dataset.map(lambda x: tf.strings.{name}(x))` before "
            "`padded_batch`, or in Python: `[s.split() for s in strings.numpy()]`.",
        )
    return strings.item()


def text_of(value: Value) -> bytes:
    """Returns an argument that is one string, such as a separator."""
    found = array(value)
    return found.item()
