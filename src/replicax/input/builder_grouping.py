"""The steps that put elements into groups: windows, batches of other sizes, keys, lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.foundation import errors, lazy
from replicax.input import builder_steps
from replicax.input.builder_checks import UserFunction, whole_number
from replicax.input.builder_plan import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Epoch,
    Plan,
)
from replicax.input.builder_reading import ReadableDataset, require_dataset

if TYPE_CHECKING:
    from replicax.input import grain_nodes as nodes
    from replicax.input import grain_nodes_grouping as grouping
    from replicax.input.builder import Dataset
else:
    nodes = lazy.module("replicax.input.grain_nodes")
    grouping = lazy.module("replicax.input.grain_nodes_grouping")


class GroupingSteps(ReadableDataset):
    """The steps of `Dataset` that put elements into groups."""

    if TYPE_CHECKING:

        def _then(self, step: Callable[[Plan], Plan]) -> Dataset: ...
        def _of(self, plan: Plan) -> Dataset: ...

    def rebatch(
        self,
        batch_size: int | Sequence[int],
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Makes batches of another size out of batches, as `unbatch` and `batch` would.

        Args:
          batch_size: The size, or a list of sizes that take turns.
          drop_remainder: Whether a smaller last batch is left out.
          name: Accepted for portability.

        >>> from replicax.input.builder import Dataset
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
        """Makes datasets of consecutive elements; each array of an element has its own.

        Args:
          size: How many elements a window has.
          shift: How far the next window begins after this one; `size` if None.
          stride: How far apart the elements of a window are.
          drop_remainder: Whether smaller windows at the end are left out.
          name: Accepted for portability.

        >>> from replicax.input.builder import Dataset
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
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Dataset], Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Gathers elements by key, and makes a dataset of each `window_size` with one key.

        Args:
          key_func: Returns the key of an element, a whole number.
          reduce_func: Called with a key and a dataset of elements; returns a dataset.
          window_size: How many elements of a key are gathered; fewer at the end.
          window_size_func: Returns that for a key, instead of `window_size`.
          name: Accepted for portability.

        >>> from replicax.input.builder import Dataset
        >>> pairs = Dataset.range(6).group_by_window(lambda x: x % 2, lambda k, w: w.batch(2), 2)
        >>> [x.tolist() for x in pairs]
        [[0, 2], [1, 3], [4], [5]]
        """
        del name
        sizes = _window_sizes(window_size, window_size_func)

        def reduce(key: Any, plan: Plan) -> Dataset:
            return require_dataset("group_by_window", reduce_func(key, self._of(plan)))

        return self._then(
            lambda plan: _group_by_window(plan, key_func, sizes, reduce, lambda d: d._plan)
        )

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batches elements of similar lengths together, so that little is padded.

        Args:
          element_length_func: Returns the length of an element.
          bucket_boundaries: The lengths at which a new bucket begins, in order.
          bucket_batch_sizes: The batch size of each bucket, one more than boundaries.
          padded_shapes: As of `padded_batch`.
          padding_values: As of `padded_batch`.
          pad_to_bucket_boundary: Whether unknown sizes are padded to the longest that the
            bucket takes, not to the longest of the batch. Unknown are those that
            `padded_shapes`, or the signature of a generator, leave open; without either, the
            first size of each array.
          no_padding: Whether elements are stacked as they are.
          drop_remainder: Whether smaller batches at the end are left out.
          name: Accepted for portability.
        """
        del name
        buckets = _Buckets(element_length_func, bucket_boundaries, bucket_batch_sizes)

        def as_batch(bucket: Any, elements: Dataset) -> Dataset:
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


def _group_plan(parent: Plan, elements: list[Any]) -> Plan:
    """Returns the plan of a dataset of some elements of another one."""
    plan = builder_steps.in_memory("window", lambda: nodes.Listed(elements), len(elements))
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
    as_dataset: Callable[[Plan], Any],
) -> Plan:
    """Makes datasets of consecutive elements, one for each array of an element."""

    def make(elements: list[Any]) -> Any:
        structure = jax.tree.structure(elements[0])
        columns = zip(*map(jax.tree.leaves, elements), strict=True)
        found = [as_dataset(_group_plan(parent, list(column))) for column in columns]
        return jax.tree.unflatten(structure, found)

    known = parent.cardinality
    if known >= 0 and drops_remainder:
        last_start = known - ((size - 1) * stride + 1)
        known = 0 if last_start < 0 else last_start // shift + 1
    elif known >= 0:
        known = -(-known // shift)
    return parent.then(
        "window",
        None,
        lambda iterator, epoch: grouping.Windowed(
            iterator, size, shift, stride, drops_remainder, make
        ),
        cardinality=known,
        batch_size=None,
        drops_remainder=False,
        is_padded=False,
        # Datasets, which no strategy can cut.
        has_examples=True,
    )


def _rebatch_sizes(batch_size: Any) -> list[int]:
    """Returns the sizes that batches of `rebatch` have in turn, or raises."""
    given = np.asarray(batch_size)
    sizes = given.reshape(-1).tolist()
    is_whole = given.ndim <= 1 and given.dtype.kind in "iu"
    if not is_whole or not sizes or min(sizes) < 0 or max(sizes) == 0:
        raise errors.InvalidArgumentError(
            "`batch_size` of `rebatch` must be a positive whole number, or a list of whole "
            "numbers that are not all 0",
            f"it is {batch_size!r}",
            "Pass the sizes that batches should have.",
        )
    return sizes


def _rebatch(parent: Plan, sizes: list[int], drops_remainder: bool) -> Plan:
    """Makes batches of other sizes, which take turns."""
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
        lambda iterator, epoch: grouping.Rebatched(iterator, sizes, drops_remainder),
        cardinality=UNKNOWN_CARDINALITY,
        batch_size=max(sizes),
        drops_remainder=is_one_size and (drops_remainder or fits),
        has_examples=False,
    )


def _window_sizes(window_size: Any, window_size_func: Any) -> Callable[[Any], Any]:
    """Returns the function of `group_by_window` that says how large windows are, or raises."""
    if (window_size is None) == (window_size_func is None):
        raise errors.InvalidArgumentError(
            "`group_by_window` needs one of `window_size` and `window_size_func`",
            "none was given" if window_size is None else "both were given",
            "Pass one of them.",
        )
    return window_size_func or (lambda key: window_size)


def _group_by_window(
    parent: Plan,
    key_func: Any,
    size_func: Any,
    reduce_group: Callable[[Any, Plan], Any],
    plan_of: Callable[[Any], Plan],
) -> Plan:
    """Gathers elements by key, and makes a dataset of each group.

    Args:
      parent: The plan before.
      key_func: Returns the key of an element.
      size_func: Returns how many elements of a key make a group.
      reduce_group: Makes a dataset of a key and the plan of its elements.
      plan_of: Returns the plan of a dataset.
    """
    name = f"{parent.name} > group_by_window"
    key_of = UserFunction(key_func, "group_by_window", name)
    size_of = UserFunction(size_func, "group_by_window", name)

    def size(key: int) -> int:
        return whole_number("window_size", np.asarray(size_of(np.int64(key)))[()], 1)

    def reduced(key: int, elements: list[Any]) -> Any:
        return reduce_group(np.array(key, np.int64), _group_plan(parent, elements))

    def spec() -> Any:
        element = parent.first_element()
        return reduced(key_of.number(element), [element]).element_spec

    def stream(iterator: Any, epoch: Epoch) -> Any:
        return grouping.GroupedByKey(
            iterator,
            key_of.number,
            size,
            lambda key, elements: plan_of(reduced(key, elements)).open(epoch),
        )

    endless = parent.cardinality == INFINITE_CARDINALITY
    return parent.then(
        "group_by_window",
        None,
        stream,
        cardinality=INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY,
        batch_size=None,
        drops_remainder=False,
        is_padded=False,
        is_quick=False,
        find_spec=spec,
        has_examples=False,
    )


class _Buckets:
    """Which elements `bucket_by_sequence_length` puts together, and how it batches them."""

    def __init__(
        self, length: Callable[..., Any], boundaries: Sequence[int], batch_sizes: Sequence[int]
    ) -> None:
        if len(batch_sizes) != len(boundaries) + 1:
            raise errors.InvalidArgumentError(
                "`bucket_batch_sizes` needs one size more than there are `bucket_boundaries`, "
                f"{len(boundaries) + 1}",
                f"there are {len(batch_sizes)}",
                "The last size is for elements that are longer than every boundary.",
            )
        self._length = length
        self._boundaries = [int(boundary) for boundary in boundaries]
        self._sizes = [whole_number("bucket_batch_sizes", size, 1) for size in batch_sizes]

    def key(self, *parts: Any) -> np.ndarray:
        """Returns the number of the bucket of an element."""
        length = int(np.asarray(self._length(*parts)))
        uppers = enumerate(self._boundaries)
        return np.array(
            next((i for i, upper in uppers if length < upper), len(self._boundaries)), np.int64
        )

    def size(self, bucket: Any) -> int:
        """Returns how many elements of a bucket make a batch."""
        return self._sizes[int(bucket)]

    def filled_shapes(self, bucket: Any, shapes: Any) -> Any:
        """Returns shapes whose unknown sizes are the largest of a bucket."""
        if int(bucket) == len(self._boundaries):
            raise errors.InvalidArgumentError(
                "With pad_to_bucket_boundary=True, elements must be shorter than the last of "
                f"`bucket_boundaries`, {self._boundaries[-1] if self._boundaries else 'none'}",
                "there is a longer one",
                "Add a boundary, or filter long elements out.",
            )
        largest = self._boundaries[int(bucket)] - 1
        return jax.tree.map(
            lambda shape: tuple(largest if size in (None, -1) else size for size in shape),
            shapes,
            is_leaf=_is_shape,
        )


def _is_shape(value: Any) -> bool:
    """Tells whether a part of a structure of shapes is a shape."""
    return isinstance(value, tuple | list) and all(
        size is None or isinstance(size, int | np.integer) for size in value
    )


def _open_shapes(spec: Any, is_certain: bool) -> Any:
    """Returns the shapes of elements by their spec.

    One that was read off the first element knows all sizes of it; then the first size of
    each array is the one that differs.
    """

    def shape(leaf: Any) -> tuple[int | None, ...]:
        return leaf.shape if is_certain or not leaf.shape else (None, *leaf.shape[1:])

    return jax.tree.map(shape, spec)
