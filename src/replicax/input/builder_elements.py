"""Elements of datasets: how they become NumPy arrays, and many of them one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tracing.signature import TensorSpec

# Text and records stay Python objects: NumPy's own types cut off trailing zero bytes.
_OBJECTS = (bytes, str)


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """What an element that is itself a dataset looks like, as the windows of `window` are.

    >>> DatasetSpec(TensorSpec((), "int64")).element_spec.shape
    ()
    """

    element_spec: Any
    dataset_shape: tuple[int, ...] = ()


def is_dataset(value: Any) -> bool:
    """Tells whether a part of an element is a dataset."""
    return hasattr(type(value), "element_spec")


def as_element(tree: Any) -> Any:
    """Returns a structure with NumPy arrays as leaves; a list is an array.

    >>> as_element({"x": [1, 2], "y": 0.5})
    {'x': array([1, 2], dtype=int32), 'y': array(0.5, dtype=float32)}
    """
    if isinstance(tree, np.ndarray):
        return tree
    return jax.tree.map(_as_leaf, tree, is_leaf=lambda x: isinstance(x, list))


def _as_leaf(value: Any) -> Any:
    if isinstance(value, np.ndarray | bytes | str) or is_dataset(value):
        return value
    # A NumPy float64 is a float of Python too, but it has a size.
    is_python = isinstance(value, int | float | list) and not isinstance(value, np.generic)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise errors.InvalidArgumentError(
            "A list in an element must become an array",
            str(error),
            "Give rows of one length, or a tuple to keep the parts apart.",
        ) from None
    if array.dtype.kind in "SU":
        return array.astype(object) if isinstance(value, list) else array
    if not is_python:
        return array
    # Numbers of Python have no size; tf.data and JAX take 32 bits for them.
    if array.dtype == np.float64:
        return array.astype(np.float32)
    fits = array.dtype == np.int64 and (not array.size or abs(array).max() < 2**31)
    return array.astype(np.int32) if fits else array


def as_scalars(element: Any) -> Any:
    """Returns an element whose arrays without dimensions are NumPy scalars."""
    return jax.tree.map(lambda x: x[()] if isinstance(x, np.ndarray) else x, element)


def copied(element: Any) -> Any:
    """Returns an element that shares no memory with the given one."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, element)


def stack(elements: Sequence[Any]) -> Any:
    """Puts elements of equal structure and shapes into one batch."""
    return _combine(elements, _stack_leaves)


def padded_stack(shapes: Any, values: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that batches elements of different sizes by filling them up.

    Args:
      shapes: None, or a structure of shapes, in which None or -1 is the largest of the batch.
      values: A number to fill up with, or a structure of numbers; None is 0.
    """

    def pad(elements: Sequence[Any]) -> Any:
        structure = jax.tree.structure(elements[0])
        count = structure.num_leaves
        is_shape = isinstance(shapes, tuple | list) and all(
            size is None or isinstance(size, int) for size in shapes
        )
        flat = [shapes] * count
        if shapes is not None and not (is_shape and count == 1):
            flat = structure.flatten_up_to(shapes)
        fill = [values] * count
        if isinstance(values, dict | tuple | list):
            fill = structure.flatten_up_to(values)
        each = iter(zip(flat, fill, strict=True))
        return _combine(elements, lambda leaves: _stack_padded(leaves, *next(each)))

    return pad


def spec_of(element: Any, num_rows: int | None, is_padded: bool) -> Any:
    """Describes an element; sizes that other elements may not share are None.

    Args:
      element: The first element.
      num_rows: How many rows it has if it is a batch and others may have another number.
      is_padded: Whether all sizes may differ.
    """

    def describe(leaf: Any) -> TensorSpec | DatasetSpec:
        if is_dataset(leaf):
            return DatasetSpec(leaf.element_spec)
        if isinstance(leaf, _OBJECTS):
            return TensorSpec((), object)
        if is_padded:
            return TensorSpec((None,) * leaf.ndim, leaf.dtype)
        shape = tuple(leaf.shape)
        if shape and num_rows is not None and shape[0] == num_rows:
            shape = (None, *shape[1:])
        return TensorSpec(shape, leaf.dtype)

    return jax.tree.map(describe, element)


def kind_of(element: Any) -> tuple[Any, ...]:
    """Returns what elements of one dataset have in common: structure, types and ranks."""
    leaves, structure = jax.tree.flatten(element)
    return structure, *(_kind_of_leaf(leaf) for leaf in leaves)


def _kind_of_leaf(leaf: Any) -> Any:
    if is_dataset(leaf):
        return "dataset"
    array = np.asarray(leaf)
    return "text" if array.dtype.kind in "OSU" else array.dtype.name, array.ndim


def num_rows(element: Any, batch_size: int) -> int:
    """Returns how many rows a batch has, which may be fewer than its size says."""
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(element) if np.ndim(leaf)]
    return sizes[0] if sizes and batch_size not in sizes else batch_size


def _combine(elements: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    columns, structure = [], None
    for element in elements:
        leaves, own = jax.tree.flatten(element)
        if structure is not None and own != structure:
            raise errors.StructureError(
                "Elements of one batch must have one structure",
                f"there are {structure} and {own}",
                "Return the same structure from `map` for every element.",
            )
        structure = own
        columns.append(leaves)
    assert structure is not None
    return jax.tree.unflatten(structure, [join(list(c)) for c in zip(*columns, strict=True)])


def _stack_leaves(leaves: list[Any]) -> Any:
    if isinstance(leaves[0], _OBJECTS) or is_dataset(leaves[0]):
        return np.array(leaves, dtype=object)
    shapes = {np.shape(leaf): None for leaf in leaves}
    if len(shapes) > 1:
        raise errors.InvalidArgumentError(
            "Elements of one batch must have one shape",
            f"the shapes are {', '.join(map(str, shapes))}",
            "Use `padded_batch`, or bring them to one shape in `map` first.",
        )
    return np.stack(leaves)


def _stack_padded(leaves: list[Any], shape: Any, fill: Any) -> Any:
    if isinstance(leaves[0], _OBJECTS):
        return np.array(leaves, dtype=object)
    ranks = {leaf.ndim for leaf in leaves}
    if len(ranks) > 1 or (shape is not None and {len(shape)} != ranks):
        raise errors.InvalidArgumentError(
            "Padding needs elements with one number of dimensions, that of `padded_shapes`",
            f"the elements have {sorted(ranks)}, the shape is {shape}",
            "Reshape them in `map` first.",
        )
    largest = np.max([leaf.shape for leaf in leaves], axis=0).astype(int).tolist()
    wanted = [
        size if given is None or given == -1 else given
        for size, given in zip(largest, shape or [None] * len(largest), strict=True)
    ]
    if any(size > room for size, room in zip(largest, wanted, strict=True)):
        raise errors.InvalidArgumentError(
            f"Elements must fit into the padded shape {tuple(wanted)}",
            f"the largest sizes are {tuple(largest)}",
            "Give larger `padded_shapes`, or None for the largest of the batch.",
        )
    batch = np.full((len(leaves), *wanted), 0 if fill is None else fill, leaves[0].dtype)
    for row, leaf in enumerate(leaves):
        batch[(row, *(slice(size) for size in leaf.shape))] = leaf
    return batch
