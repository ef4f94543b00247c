"""Checks of the arguments of dataset steps, and calls of the user's functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.input import builder_elements


class UserFunction:
    """A function of the user, called with the parts of an element as tf.data does.

    What it raises keeps its type, and gets a note that says which step called it.
    """

    def __init__(self, fn: Callable[..., Any], step: str, name: str) -> None:
        if not callable(fn):
            raise errors.ArgumentTypeError(
                f"`{step}` needs a function", f"{fn!r} was given", "Pass a callable."
            )
        self._fn, self._step, self._name = fn, step, name

    def __call__(self, element: Any) -> Any:
        try:
            # A tuple is what several arguments look like; a named tuple is one.
            return self._fn(*element) if type(element) is tuple else self._fn(element)
        except StopIteration as error:
            # It would end the dataset without a word.
            raise self.noted(RuntimeError(f"the function raised {error!r}")) from error
        except Exception as error:
            raise self.noted(error) from None

    def noted(self, error: Exception) -> Exception:
        """Adds to an error where it came from."""
        error.add_note(f"Raised by the function of `{self._step}` in the dataset {self._name!r}.")
        return error

    def element(self, element: Any) -> Any:
        """Returns what the function makes of an element, as NumPy arrays."""
        result = self(element)
        if result is None:
            raise self.noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return an element",
                    "it returned None",
                    "Return arrays, or leave elements out with `filter`.",
                )
            )
        return builder_elements.as_element(result)

    def keeps(self, element: Any) -> bool:
        """Returns what a predicate says of an element."""
        return bool(self._scalar(element, "b", "True or False"))

    def number(self, element: Any) -> int:
        """Returns the whole number that the function makes of an element: a key or a class."""
        return int(self._scalar(element, "iu", "a whole number"))

    def _scalar(self, element: Any, kinds: str, wanted: str) -> np.ndarray:
        result = np.asarray(self(element))
        if result.ndim or result.dtype.kind not in kinds:
            raise self.noted(
                errors.InvalidArgumentError(
                    f"The function of `{self._step}` must return {wanted}",
                    f"it returned {result.dtype} of shape {result.shape}",
                    "Reduce it to one value of that type.",
                )
            )
        return result

    def carried(self, state: Any, element: Any) -> tuple[Any, Any]:
        """Returns the new state and the new element of a `scan`."""
        result = self((state, element))
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise self.noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return a pair of the new state and "
                    "the new element",
                    f"it returned {type(result).__name__}",
                    "Return (state, element).",
                )
            )
        new = builder_elements.as_element(result[0])
        self._require_alike(state, new)
        return new, builder_elements.as_element(result[1])

    def _require_alike(self, old: Any, new: Any) -> None:
        wanted, found = [
            (jax.tree.structure(state), [_type_of(leaf) for leaf in jax.tree.leaves(state)])
            for state in (old, new)
        ]
        if wanted != found:
            raise self.noted(
                errors.ArgumentTypeError(
                    f"The function of `{self._step}` must return a state of the structure and "
                    f"types of the initial one, {wanted[0]} of {wanted[1]}",
                    f"it returned {found[0]} of {found[1]}",
                    "Give the initial state the type that the function computes, such as "
                    "np.int64(0).",
                )
            )


def _type_of(leaf: Any) -> str:
    dtype = np.asarray(leaf).dtype
    # Text has no size that would have to stay.
    return "text" if dtype.kind in "OSU" else dtype.name


class Yielded:
    """The elements of a generator, checked against what the user said about them."""

    def __init__(self, make: Callable[..., Iterable[Any]], args: tuple[Any, ...], spec: Any):
        self._make, self._args, self._spec = make, args, spec

    def __call__(self) -> Iterator[Any]:
        for element in self._make(*self._args):
            yield self._checked(builder_elements.as_element(element))

    def _checked(self, element: Any) -> Any:
        if self._spec is None:
            return element
        leaves, structure = jax.tree.flatten(element)
        specs, wanted = jax.tree.flatten(self._spec)
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
        return jax.tree.unflatten(structure, cast)


def whole_number(argument: str, value: Any, least: int, todo: str = "") -> int:
    """Returns a whole number that is not too small, or raises."""
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
            todo or f"Pass {least} or more.",
        )
    return number


def choice(value: Any, num_datasets: int) -> int:
    """Returns which dataset an element of a choice dataset stands for, or raises."""
    array = np.asarray(value)
    if array.ndim or array.dtype.kind not in "iu":
        raise errors.ArgumentTypeError(
            "Elements of the choice dataset must be whole numbers, one each",
            f"there is {array.dtype} of shape {array.shape}",
            "Make them with rx.data.Dataset.range or a `map` to int64.",
        )
    if not 0 <= array < num_datasets:
        raise errors.InvalidArgumentError(
            f"Elements of the choice dataset must be from 0 to {num_datasets - 1}",
            f"there is {array}",
            "Datasets are numbered from 0, in the order in which they are given.",
        )
    return int(array)


def unique_key(element: Any) -> Any:
    """Returns what `unique` compares: an array of integers, or text."""
    leaves = jax.tree.leaves(element)
    if len(leaves) != 1:
        raise errors.InvalidArgumentError(
            "`unique` needs elements of one part",
            f"they have {len(leaves)}",
            "Choose one with `map` first.",
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


def sliceable(tensors: Any) -> Any:
    """Returns a structure of arrays that all have the same number of rows."""
    arrays = builder_elements.as_element(tensors)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
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
