"""Elements of datasets: NumPy arrays, batches of them, and calls of users' functions with them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from replicax.foundation import errors, ordered_trees
from replicax.foundation.types import Tree
from replicax.tracing.signature import TensorSpec

# Text and records stay Python objects: NumPy's own types cut off trailing zero bytes.
_OBJECTS = (bytes, str)


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """The spec of an element that is itself a dataset, such as the windows of `window`.

    >>> DatasetSpec(TensorSpec((), "int64")).element_spec.shape
    ()
    """

    element_spec: Tree
    dataset_shape: tuple[int, ...] = ()


class Cache:
    """The elements of a cached dataset; None before a complete pass over it."""

    def __init__(self) -> None:
        self.elements: list[Tree] | None = None


def is_dataset(value: object) -> bool:
    """Returns whether a part of an element is a dataset."""
    return hasattr(type(value), "element_spec")


def as_element(tree: Tree) -> Tree:
    """Returns a structure with NumPy arrays as leaves; a list is an array.

    >>> as_element({"x": [1, 2], "y": 0.5})
    {'x': array([1, 2], dtype=int32), 'y': array(0.5, dtype=float32)}
    """
    if isinstance(tree, np.ndarray):
        return tree
    if type(tree) is tuple and all(type(part) is np.ndarray for part in tree):
        return tree
    return ordered_trees.map(_as_leaf, tree, is_leaf=lambda x: isinstance(x, list))


def _as_leaf(value: object) -> object:
    if isinstance(value, np.ndarray | bytes | str) or is_dataset(value):
        return value
    # np.float64 is a subclass of float, but it has a size.
    is_python = isinstance(value, int | float | list) and not isinstance(value, np.generic)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise errors.InvalidArgumentError(
            "A list in an element is converted to an array",
            str(error),
            "Pass rows of one length, or a tuple of separate arrays.",
        ) from None
    if array.dtype.kind in "SU":
        return array.astype(object) if isinstance(value, list) else array
    if not is_python:
        return array
    # Python numbers have no size; tf.data and JAX use 32 bits for them.
    if array.dtype == np.float64:
        return array.astype(np.float32)
    fits = array.dtype == np.int64 and (not array.size or abs(array).max() < 2**31)
    return array.astype(np.int32) if fits else array


def as_scalars(element: Tree) -> Tree:
    """Returns an element whose arrays without dimensions are NumPy scalars."""
    return ordered_trees.map(lambda x: x[()] if isinstance(x, np.ndarray) else x, element)


def copied(element: Tree) -> Tree:
    """Returns a deep copy of an element."""
    return ordered_trees.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, element)


def stack(elements: Sequence[Tree]) -> Tree:
    """Returns elements of equal structure and shapes as one batch."""
    return _combine(elements, _stack_leaves)


def padded_stack(shapes: Tree, values: Tree) -> Callable[[Sequence[Tree]], Tree]:
    """Returns a function that pads elements to one shape and batches them.

    Args:
      shapes: None, or a structure of shapes, in which None or -1 is the largest of the batch.
      values: A padding value, or a structure of them; None is 0.
    """

    def pad(elements: Sequence[Tree]) -> Tree:
        structure = ordered_trees.structure(elements[0])
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


def spec_of(element: Tree, num_rows: int | None, is_padded: bool) -> Tree:
    """Returns the spec of elements; sizes that may differ between elements are None.

    Args:
      element: The first element.
      num_rows: Its number of rows, if it is a batch and other batches may be smaller.
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

    return ordered_trees.map(describe, element)


def kind_of(element: Tree) -> tuple[object, ...]:
    """Returns the structure, types and ranks of an element."""
    leaves, structure = ordered_trees.flatten(element)
    return structure, *(_kind_of_leaf(leaf) for leaf in leaves)


def _kind_of_leaf(leaf: object) -> object:
    if is_dataset(leaf):
        return "dataset"
    array = np.asarray(leaf)
    return "text" if array.dtype.kind in "OSU" else array.dtype.name, array.ndim


def num_rows(element: Tree, batch_size: int) -> int:
    """Returns the number of rows of a batch, which may be smaller than `batch_size`."""
    sizes = [leaf.shape[0] for leaf in ordered_trees.leaves(element) if np.ndim(leaf)]
    return sizes[0] if sizes and batch_size not in sizes else batch_size


def _combine(elements: Sequence[Tree], join: Callable[[list[np.ndarray]], np.ndarray]) -> Tree:
    columns, structure = [], None
    for element in elements:
        leaves, own = ordered_trees.flatten(element)
        if structure is not None and own != structure:
            raise errors.StructureError(
                "Elements of one batch must have one structure",
                f"there are {structure} and {own}",
                "Return the same structure from `map` for every element.",
            )
        structure = own
        columns.append(leaves)
    assert structure is not None
    return ordered_trees.unflatten(structure, [join(list(c)) for c in zip(*columns, strict=True)])


def _stack_leaves(leaves: list[np.ndarray]) -> np.ndarray:
    if isinstance(leaves[0], _OBJECTS) or is_dataset(leaves[0]):
        return np.array(leaves, dtype=object)
    shapes = {np.shape(leaf): None for leaf in leaves}
    if len(shapes) > 1:
        raise errors.InvalidArgumentError(
            "Elements of one batch must have one shape",
            f"the shapes are {', '.join(map(str, shapes))}",
            "Use `padded_batch`, or reshape them with `map` first.",
        )
    return np.stack(leaves)


def _stack_padded(
    leaves: list[np.ndarray], shape: Sequence[int | None] | None, fill: float | None
) -> np.ndarray:
    if isinstance(leaves[0], _OBJECTS):
        return np.array(leaves, dtype=object)
    ranks = {leaf.ndim for leaf in leaves}
    if len(ranks) > 1 or (shape is not None and {len(shape)} != ranks):
        raise errors.InvalidArgumentError(
            "Padding needs elements with one number of dimensions, that of `padded_shapes`",
            f"the elements have {sorted(ranks)}, the shape is {shape}",
            "Reshape them with `map` first.",
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
            "Pass larger `padded_shapes`, or None for the largest of the batch.",
        )
    batch = np.full((len(leaves), *wanted), 0 if fill is None else fill, leaves[0].dtype)
    for row, leaf in enumerate(leaves):
        batch[(row, *(slice(size) for size in leaf.shape))] = leaf
    return batch


class UserFunction:
    """A user's function, called with the parts of an element as arguments as in tf.data.

    Its exceptions keep their type, and get a note that names the step.
    """

    def __init__(self, fn: Callable[..., Any], step: str, name: str) -> None:
        if not callable(fn):
            raise errors.ArgumentTypeError(
                f"`{step}` needs a function", f"{fn!r} was given", "Pass a callable."
            )
        self._fn, self._step, self._name = fn, step, name

    def __call__(self, element: Tree) -> Tree:
        try:
            # A tuple becomes several arguments; a named tuple is one.
            return self._fn(*element) if type(element) is tuple else self._fn(element)
        except StopIteration as error:
            # It would end the iteration silently.
            raise self._noted(RuntimeError(f"the function raised {error!r}")) from error
        except Exception as error:
            raise self._noted(error) from None

    def _noted(self, error: Exception) -> Exception:
        error.add_note(f"Raised by the function of `{self._step}` in the dataset {self._name!r}.")
        return error

    def element(self, element: Tree) -> Tree:
        """Returns the function's result as an element."""
        result = self(element)
        if result is None:
            raise self._noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return an element",
                    "it returned None",
                    "Return arrays, or remove elements with `filter`.",
                )
            )
        return as_element(result)

    def keeps(self, element: Tree) -> bool:
        """Returns the result of a predicate."""
        return bool(self._scalar(element, "b", "True or False"))

    def number(self, element: Tree) -> int:
        """Returns a result that is a whole number: a key or a class."""
        return int(self._scalar(element, "iu", "a whole number"))

    def _scalar(self, element: Tree, kinds: str, wanted: str) -> np.ndarray:
        result = np.asarray(self(element))
        if result.ndim or result.dtype.kind not in kinds:
            raise self._noted(
                errors.InvalidArgumentError(
                    f"The function of `{self._step}` must return {wanted}",
                    f"it returned {result.dtype} of shape {result.shape}",
                    "Reduce it to one value of that type.",
                )
            )
        return result

    def carried(self, state: Tree, element: Tree) -> tuple[Tree, Tree]:
        """Returns the new state and the new element of a `scan`."""
        result = self((state, element))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self._noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return a pair of the new state and "
                    "the new element",
                    f"it returned {type(result).__name__}",
                    "Return (state, element).",
                )
            )
        new = as_element(result[0])
        self._require_same_types(state, new)
        return new, as_element(result[1])

    def _require_same_types(self, old: Tree, new: Tree) -> None:
        wanted, found = [
            (
                ordered_trees.structure(state),
                [_type_of(leaf) for leaf in ordered_trees.leaves(state)],
            )
            for state in (old, new)
        ]
        if wanted != found:
            raise self._noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return a state of the structure and "
                    f"types of the initial one, {wanted[0]} of {wanted[1]}",
                    f"it returned {found[0]} of {found[1]}",
                    "Pass an initial state of the type that the function returns, such as "
                    "np.int64(0).",
                )
            )


def _type_of(leaf: object) -> str:
    dtype = np.asarray(leaf).dtype
    # The length of text may change.
    return "text" if dtype.kind in "OSU" else dtype.name


class Yielded:
    """The elements of a generator, checked against the spec that the user gave."""

    def __init__(
        self, make: Callable[..., Iterable[Tree]], args: tuple[Any, ...], spec: Tree
    ) -> None:
        self._make, self._args, self._spec = make, args, spec

    def __call__(self) -> Iterator[Tree]:
        for element in self._make(*self._args):
            yield self._checked(as_element(element))

    def _checked(self, element: Tree) -> Tree:
        if self._spec is None:
            return element
        leaves, structure = ordered_trees.flatten(element)
        specs, wanted = ordered_trees.flatten(self._spec)
        shapes = [np.shape(leaf) for leaf in leaves]
        pairs = zip(specs, shapes, strict=False)
        if structure != wanted or not all(spec.accepts(shape) for spec, shape in pairs):
            raise errors.InvalidArgumentError(
                f"The generator must yield elements like {self._spec}",
                f"it yielded {structure} with shapes {shapes}",
                "Correct `output_signature` or the generator.",
            )
        cast = [
            leaf.astype(spec.dtype, copy=False) if isinstance(leaf, np.ndarray) else leaf
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        return ordered_trees.unflatten(wanted, cast)


def whole_number(argument: str, value: Any, least: int) -> int:
    """Returns a whole number of at least `least`, or raises."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise errors.InvalidArgumentError(
            f"`{argument}` must be a whole number of at least {least}",
            f"it is {value!r}",
            f"Pass {least} or more.",
        )
    return number


def choice(value: object, num_datasets: int) -> int:
    """Returns an element of a choice dataset as the index of a dataset, or raises."""
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iu":
        raise errors.ArgumentTypeError(
            "Elements of the choice dataset must be scalar whole numbers",
            f"there is {array.dtype} of shape {array.shape}",
            "Make them with rx.data.Dataset.range or a `map` to int64.",
        )
    if not 0 <= array < num_datasets:
        raise errors.InvalidArgumentError(
            f"Elements of the choice dataset must be from 0 to {num_datasets - 1}",
            f"there is {array}",
            "Datasets are numbered from 0, in the order of the list.",
        )
    return int(array)


def unique_key(element: Tree) -> Hashable:
    """Returns the key that `unique` compares, of an array of integers or text."""
    leaves = ordered_trees.leaves(element)
    if len(leaves) != 1:
        raise errors.InvalidArgumentError(
            "`unique` needs elements of one part",
            f"they have {len(leaves)}",
            "Select one with `map` first.",
        )
    array = np.asarray(leaves[0])
    if array.dtype.kind not in "iuOSU":
        raise errors.ArgumentTypeError(
            "`unique` compares integers and text",
            f"elements are {array.dtype}",
            "Map them to integers first.",
        )
    text = array.dtype.kind in "OSU"
    return array.shape, tuple(array.reshape(-1).tolist()) if text else array.tobytes()


def sliceable(tensors: Tree) -> Tree:
    """Returns a structure of arrays that all have the same number of rows."""
    arrays = as_element(tensors)
    shapes = [np.shape(leaf) for leaf in ordered_trees.leaves(arrays)]
    if not shapes or () in shapes:
        raise errors.InvalidArgumentError(
            "`from_tensor_slices` needs arrays with at least one dimension",
            f"the shapes are {shapes}",
            "Use `from_tensors` for a dataset of one element.",
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise errors.InvalidArgumentError(
            "`from_tensor_slices` needs arrays of one length",
            f"the shapes are {', '.join(map(str, shapes))}",
            "Cut them to the same number of rows.",
        )
    return arrays
