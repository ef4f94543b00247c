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
                errors.message(
                    f"`{step}` needs a function", f"{fn!r} was given", "Pass a callable."
                )
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
                    errors.message(
                        f"The function of `{self._step}` must return an element",
                        "it returned None",
                        "Return arrays, or leave elements out with `filter`.",
                    )
                )
            )
        return builder_elements.as_element(result)

    def keeps(self, element: Any) -> bool:
        """Returns what a predicate says of an element."""
        return bool(np.asarray(self(element)))


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
                errors.message(
                    f"The generator must yield elements like {self._spec}",
                    f"it yielded {structure} with shapes {shapes}",
                    "Correct `output_signature` or the generator.",
                )
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
            errors.message(
                f"`{argument}` must be a whole number of at least {least}",
                f"it is {value!r}",
                todo or f"Pass {least} or more.",
            )
        )
    return number


def sliceable(tensors: Any) -> Any:
    """Returns a structure of arrays that all have the same number of rows."""
    arrays = builder_elements.as_element(tensors)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(arrays)]
    if not shapes or () in shapes:
        raise errors.InvalidArgumentError(
            errors.message(
                "`from_tensor_slices` needs arrays with at least one dimension",
                f"the shapes are {shapes}",
                "Use `from_tensors` for a dataset of one element.",
            )
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise errors.InvalidArgumentError(
            errors.message(
                "`from_tensor_slices` needs arrays of one length",
                f"the shapes are {', '.join(map(str, shapes))}",
                "Cut them to the same number of rows.",
            )
        )
    return arrays
