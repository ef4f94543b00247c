"""Elements of datasets as tensors, and functions of tensors as functions of NumPy arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.input.dataset.elements import is_dataset
from replicax.tf import dispatch
from replicax.tf.arguments import DTypeLike, Structure
from replicax.tf.tensor import Tensor, raw
from replicax.values.sparse_tensor import SparseTensor


def as_tensors(element: Structure) -> Any:
    """Returns an element with a tensor for each array and string.

    >>> as_tensors((np.arange(2), b"ab"))[1].dtype
    tf.string
    """
    if isinstance(element, np.ndarray):
        return Tensor(element)
    if isinstance(element, str | bytes):
        return Tensor(_string(element.encode() if isinstance(element, str) else element))
    if isinstance(element, np.generic | int | float):
        return Tensor(np.asarray(element))
    if type(element) is tuple or type(element) is list:
        return type(element)(map(as_tensors, element))
    if type(element) is dict:
        return {name: as_tensors(part) for name, part in element.items()}
    if isinstance(element, Tensor) or element is None or is_dataset(element):
        return element
    if isinstance(element, SparseTensor):
        values, indices = as_tensors(element.values), as_tensors(element.indices)
        return SparseTensor(indices, values, element.dense_shape)
    is_leaf = lambda x: x is not element  # noqa: E731
    leaves, structure = jax.tree.flatten(element, is_leaf=is_leaf)
    if leaves == [element]:
        return element
    return jax.tree.unflatten(structure, list(map(as_tensors, leaves)))


def _string(value: bytes) -> np.ndarray:
    # NumPy would cut trailing zero bytes off in a type of its own.
    array = np.empty((), dtype=object)
    array[()] = value
    return array


def as_arrays(element: Structure) -> Any:
    """Returns an element with a NumPy array, or bytes, for each tensor.

    >>> as_arrays([Tensor(np.arange(2)), 3])
    [array([0, 1]), 3]
    """
    if isinstance(element, Tensor):
        array = np.asarray(raw(element))
        return array.item() if array.dtype == object and array.ndim == 0 else array
    if isinstance(element, np.ndarray | str | bytes | int | float) or element is None:
        return element
    if type(element) is tuple or type(element) is list:
        return type(element)(map(as_arrays, element))
    if type(element) is dict:
        return {name: as_arrays(part) for name, part in element.items()}
    if is_dataset(element):
        return element
    if isinstance(element, jax.Array):
        return np.asarray(element)
    if isinstance(element, SparseTensor):
        values, indices = as_arrays(element.values), as_arrays(element.indices)
        return SparseTensor(indices, values, element.dense_shape)
    found = raw(element)
    if found is not element:
        return np.asarray(found)
    leaves, structure = jax.tree.flatten(element, is_leaf=lambda x: x is not element)
    if len(leaves) == 1 and leaves[0] is element:
        return element
    return jax.tree.unflatten(structure, list(map(as_arrays, leaves)))


def as_element(result: Structure) -> Any:
    """Returns values as an element: a list is one tensor, as in TensorFlow, and text is bytes.

    >>> as_element(([Tensor(np.int64(1)), 2], ["a"]))
    (array([1, 2]), array([b'a'], dtype=object))
    """
    if isinstance(result, np.ndarray) and result.dtype.kind not in "OSU":
        return result
    if type(result) is tuple:
        return tuple(map(as_element, result))
    if type(result) is dict:
        return {name: as_element(part) for name, part in result.items()}
    found = as_arrays(result)
    if isinstance(found, str):
        return found.encode()
    if isinstance(found, np.ndarray) and found.dtype.kind in "OSU":
        return _encoded(found)
    return _stacked(found) if type(found) is list and found else found


def _encoded(texts: np.ndarray) -> np.ndarray:
    """Returns an array of text as an array of `bytes` objects, which keep their last zero bytes."""
    flat = [one.encode() if isinstance(one, str) else one for one in texts.reshape(-1).tolist()]
    found = np.empty(len(flat), dtype=object)
    found[:] = flat
    return found.reshape(texts.shape)


def _stacked(items: list[Any]) -> Any:
    """Returns the array of a list, of the type of its first array; numbers take that type."""
    if _first_leaf(items, str | bytes):
        return _encoded(np.asarray(items, dtype=object))
    parts = [_stacked(item) if type(item) is list else item for item in items]
    typed = next((part.dtype for part in parts if isinstance(part, np.ndarray)), None)
    if typed is None or any(isinstance(part, dict | tuple) or part is None for part in parts):
        return parts
    return np.stack([np.asarray(part, dtype=typed) for part in parts])


def _first_leaf(items: list[Any], kind: DTypeLike) -> bool:
    """Tells whether the first value in lists is of a kind."""
    first = items[0]
    if type(first) is list and first:
        return _first_leaf(first, kind)
    return isinstance(first, kind)


def on_host(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of NumPy elements that calls a function of tensors.

    In the function, ops run on NumPy, and Python can branch on the values of tensors.
    """
    if not callable(fn):
        return fn

    @functools.wraps(fn, updated=())
    def call(*parts: Any) -> Any:
        found = dispatch.call_on_host(fn, map(as_tensors, parts))
        # As in TensorFlow: what `tf.py_function` and its like return are several components.
        return as_element(tuple(found) if type(found) is list else found)

    return call
