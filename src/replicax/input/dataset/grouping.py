"""Steps that group elements: windows, batches of other sizes, keys, sequence lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.foundation import errors, ordered_trees
from replicax.foundation.types import Tree
from replicax.input.dataset import steps
from replicax.input.dataset.elements import UserFunction, whole_number
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY, Epoch, Plan
from replicax.input.dataset.reading import ReadableDataset, require_dataset
from replicax.input.nodes import combined, indexed
from replicax.tracing.signature import TensorSpec

if TYPE_CHECKING:
    from replicax.input.dataset.dataset import Dataset
    from replicax.input.dataset.plan import StreamIterator


class GroupingSteps(ReadableDataset):
    """The steps of `Dataset` that group elements."""

    def rebatch(
        self,
        batch_size: int | Sequence[int],
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Changes the size of batches, like `unbatch` and `batch`.

        Args:
          batch_size: The size, or a list of sizes that are used in turn.
          drop_remainder: Whether a smaller last batch is dropped.
          name: Accepted for portability.

        >>> from replicax.input.dataset.dataset import Dataset
        >>> [x.tolist() for x in Dataset.range(6).batch(2).rebatch([1, 2])]
        [[0], [1, 2], [3], [4, 5]]
        """
        del name
        sizes = _rebatch_sizes(batch_size)
        return self._then(lambda plan: _rebatch(plan, sizes, bool(drop_remainder)))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Makes datasets of consecutive elements, one dataset for each array of an element.

        Args:
          size: The number of elements of a window.
          shift: The distance between the starts of windows; `size` if None.
          stride: The distance between the elements of a window.
          drop_remainder: Whether smaller windows at the end are dropped.
          name: Accepted for portability.

        >>> from replicax.input.dataset.dataset import Dataset
        >>> windows = Dataset.range(5).window(3, shift=1, drop_remainder=True)
        >>> [x.tolist() for x in windows.flat_map(lambda window: window.batch(3))]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        del name
        count = whole_number("size", size, 1)
        step = count if shift is None else whole_number("shift", shift, 1)
        apart = whole_number("stride", stride, 1)
        return self._then(
            lambda plan: _window(plan, count, step, apart, bool(drop_remainder), self._of)
        )

    def group_by_window(
        self,
        key_func: Callable[..., Tree],
        reduce_func: Callable[[Any, Dataset], Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Tree] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Groups elements by key, and reduces each group of `window_size` to a dataset.

        Args:
          key_func: Returns the key of an element, a whole number.
          reduce_func: Called with a key and a dataset of elements; returns a dataset.
          window_size: The number of elements of a group; fewer at the end.
          window_size_func: Returns it for a key, instead of `window_size`.
          name: Accepted for portability.

        >>> from replicax.input.dataset.dataset import Dataset
        >>> pairs = Dataset.range(6).group_by_window(lambda x: x % 2, lambda k, w: w.batch(2), 2)
        >>> [x.tolist() for x in pairs]
        [[0, 2], [1, 3], [4], [5]]
        """
        del name
        sizes = _window_sizes(window_size, window_size_func)

        def reduce(key: np.ndarray, plan: Plan) -> Dataset:
            return require_dataset("group_by_window", reduce_func(key, self._of(plan)))

        return self._then(lambda plan: _group_by_window(plan, key_func, sizes, reduce))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Tree],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batches elements of similar lengths, which need little padding.

        Args:
          element_length_func: Returns the length of an element.
          bucket_boundaries: The lengths at which a new bucket begins, in order.
          bucket_batch_sizes: The batch size of each bucket, one more than boundaries.
          padded_shapes: As in `padded_batch`.
          padding_values: As in `padded_batch`.
          pad_to_bucket_boundary: Whether unknown sizes are padded to the largest length of the
            bucket, not of the batch. Unknown are the sizes that are None in `padded_shapes` or in
            the signature of a generator; without either, the first size of each array.
          no_padding: Whether elements are stacked without padding.
          drop_remainder: Whether smaller batches at the end are dropped.
          name: Accepted for portability.
        """
        del name
        buckets = _Buckets(element_length_func, bucket_boundaries, bucket_batch_sizes)

        def as_batch(bucket: np.ndarray, elements: Dataset) -> Dataset:
            size, shapes = buckets.size(bucket), padded_shapes
            if no_padding:
                return elements.batch(size, drop_remainder)
            if pad_to_bucket_boundary:
                spec = elements.element_spec if self._plan.spec is None else self._plan.spec
                is_given = self._plan.spec is not None
                shapes = shapes or _open_shapes(spec, is_given)
                shapes = buckets.filled_shapes(bucket, shapes)
            return elements.padded_batch(size, shapes, padding_values, drop_remainder)

        return self.group_by_window(buckets.key, as_batch, window_size_func=buckets.size)


def _group_plan(parent: Plan, elements: list[Tree]) -> Plan:
    """Returns the plan of a dataset of some elements of another one."""
    plan = steps.in_memory("window", lambda: indexed.Listed(elements), len(elements))
    return dataclasses.replace(
        plan,
        batch_size=parent.batch_size,
        has_examples=parent.has_examples,
        drops_remainder=parent.drops_remainder,
        is_padded=parent.is_padded,
    )


def _window(
    parent: Plan,
    size: int,
    shift: int,
    stride: int,
    drops_remainder: bool,
    as_dataset: Callable[[Plan], Dataset],
) -> Plan:
    """Makes datasets of consecutive elements, one for each array of an element."""

    def make_window(elements: list[Tree]) -> Tree:
        structure = ordered_trees.structure(elements[0])
        columns = zip(*map(jax.tree.leaves, elements), strict=True)
        found = [as_dataset(_group_plan(parent, list(column))) for column in columns]
        return ordered_trees.unflatten(structure, found)

    known = parent.cardinality
    if known >= 0 and drops_remainder:
        last_start = known - ((size - 1) * stride + 1)
        known = 0 if last_start < 0 else last_start // shift + 1
    elif known >= 0:
        known = -(-known // shift)
    return parent.then(
        "window",
        None,
        lambda iterator, epoch: combined.Windowed(
            iterator, size, shift, stride, drops_remainder, make_window
        ),
        cardinality=known,
        batch_size=None,
        drops_remainder=False,
        is_padded=False,
        # Elements are datasets, which cannot be split among replicas.
        has_examples=True,
    )


def _rebatch_sizes(batch_size: int | Sequence[int]) -> list[int]:
    """Returns the sizes of batches of `rebatch`, or raises."""
    given = np.asarray(batch_size)
    sizes = given.reshape(-1).tolist()
    is_whole = given.ndim <= 1 and given.dtype.kind in "iu"
    if not is_whole or not sizes or min(sizes) < 0 or max(sizes) == 0:
        raise errors.InvalidArgumentError(
            "`batch_size` of `rebatch` must be a positive whole number, or a list of whole "
            "numbers that are not all 0",
            f"it is {batch_size!r}",
            "Pass a batch size, or several.",
        )
    return sizes


def _rebatch(parent: Plan, sizes: list[int], drops_remainder: bool) -> Plan:
    """Makes batches of other sizes, used in turn."""
    is_one_size = len(set(sizes)) == 1
    fits = (
        parent.drops_remainder
        and parent.batch_size is not None
        and is_one_size
        and parent.batch_size % sizes[0] == 0
    )
    return parent.then(
        "rebatch",
        None,
        lambda iterator, epoch: combined.Rebatched(iterator, sizes, drops_remainder),
        cardinality=UNKNOWN_CARDINALITY,
        batch_size=max(sizes),
        drops_remainder=is_one_size and (drops_remainder or fits),
        has_examples=False,
    )


def _window_sizes(
    window_size: int | None, window_size_func: Callable[[Any], Tree] | None
) -> Callable[[Any], Tree]:
    """Returns a function from a key to the size of its windows, or raises."""
    if (window_size is None) == (window_size_func is None):
        raise errors.InvalidArgumentError(
            "`group_by_window` needs one of `window_size` and `window_size_func`",
            "none was given" if window_size is None else "both were given",
            "Pass one of them.",
        )
    return window_size_func or (lambda key: window_size)


def _group_by_window(
    parent: Plan,
    key_func: Callable[..., Tree],
    size_func: Callable[[Any], Tree],
    reduce_group: Callable[[np.ndarray, Plan], Dataset],
) -> Plan:
    """Groups elements by key, and reduces each group to a dataset.

    Args:
      parent: The plan before.
      key_func: Returns the key of an element.
      size_func: Returns the number of elements of a group with a key.
      reduce_group: Makes a dataset of a key and the plan of its elements.
    """
    name = f"{parent.name} > group_by_window"
    key_of = UserFunction(key_func, "group_by_window", name)
    size_of = UserFunction(size_func, "group_by_window", name)

    def size(key: int) -> int:
        return whole_number("window_size", np.asarray(size_of(np.int64(key)))[()], 1)

    def reduced(key: int, elements: list[Tree]) -> Dataset:
        return reduce_group(np.array(key, np.int64), _group_plan(parent, elements))

    def spec() -> Tree:
        element = parent.first_element()
        return reduced(key_of.number(element), [element]).element_spec

    def stream(iterator: StreamIterator, epoch: Epoch) -> StreamIterator:
        return combined.GroupedByKey(
            iterator,
            key_of.number,
            size,
            lambda key, elements: reduced(key, elements)._plan.open(epoch),
        )

    return parent.then(
        "group_by_window",
        None,
        stream,
        cardinality=steps.infinite_or_unknown(parent),
        batch_size=None,
        drops_remainder=False,
        is_padded=False,
        is_quick=False,
        find_spec=spec,
        has_examples=False,
    )


class _Buckets:
    """The buckets of `bucket_by_sequence_length`."""

    def __init__(
        self, length: Callable[..., Tree], boundaries: Sequence[int], batch_sizes: Sequence[int]
    ) -> None:
        if len(batch_sizes) != len(boundaries) + 1:
            raise errors.InvalidArgumentError(
                "`bucket_batch_sizes` must have one size more than `bucket_boundaries`, "
                f"{len(boundaries) + 1}",
                f"it has {len(batch_sizes)}",
                "The last size is for elements that are longer than every boundary.",
            )
        self._length = length
        self._boundaries = [int(boundary) for boundary in boundaries]
        self._sizes = [whole_number("bucket_batch_sizes", size, 1) for size in batch_sizes]

    def key(self, *parts: Tree) -> np.ndarray:
        """Returns the number of the bucket of an element."""
        length = int(np.asarray(self._length(*parts)))
        uppers = enumerate(self._boundaries)
        return np.array(
            next((i for i, upper in uppers if length < upper), len(self._boundaries)), np.int64
        )

    def size(self, bucket: np.ndarray) -> int:
        """Returns the batch size of a bucket."""
        return self._sizes[int(bucket)]

    def filled_shapes(self, bucket: np.ndarray, shapes: Tree) -> Tree:
        """Returns shapes whose unknown sizes are the largest of a bucket."""
        if int(bucket) == len(self._boundaries):
            raise errors.InvalidArgumentError(
                "With pad_to_bucket_boundary=True, elements must be shorter than the last of "
                f"`bucket_boundaries`, {self._boundaries[-1] if self._boundaries else 'none'}",
                "there is a longer one",
                "Add a boundary, or remove long elements with `filter`.",
            )
        largest = self._boundaries[int(bucket)] - 1
        return ordered_trees.map(
            lambda shape: tuple(largest if size in (None, -1) else size for size in shape),
            shapes,
            is_leaf=_is_shape,
        )


def _is_shape(value: object) -> bool:
    """Returns whether a part of a structure of shapes is a shape."""
    return isinstance(value, tuple | list) and all(
        size is None or isinstance(size, int | np.integer) for size in value
    )


def _open_shapes(spec: Tree, is_certain: bool) -> Tree:
    """Returns the shapes of elements by their spec.

    A spec derived from the first element has all of its sizes; then the first size of each
    array is taken to differ.
    """

    def shape(leaf: TensorSpec) -> tuple[int | None, ...] | None:
        return leaf.shape if is_certain or not leaf.shape else (None, *leaf.shape[1:])

    return ordered_trees.map(shape, spec)
