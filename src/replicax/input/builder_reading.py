"""What can be read of a dataset: its elements, and facts about them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from replicax.foundation import errors
from replicax.input import builder_elements
from replicax.input.builder_iterator import DatasetIterator
from replicax.input.builder_plan import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Plan
from replicax.input.options import AutoShardPolicy
from replicax.tracing.control_flow import reduce_elements
from replicax.tracing.iterators import open_loop
from replicax.values import printing


class ReadableDataset:
    """A dataset as its readers see it; `Dataset` adds the steps.

    Distribution reads `has_examples`, `drops_remainder`, `is_quick`, `files` and
    `auto_shard_policy`, and asks for parts by `with_files` and `shard_records`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # The number that the next iteration has; shuffles depend on it.
        self._next_epoch = 0

    def __iter__(self) -> DatasetIterator:
        feed = open_loop(self)
        assert isinstance(feed, DatasetIterator)
        return feed

    def open_feed(self) -> DatasetIterator:
        """Returns a new iterator, at the first element of the next epoch."""
        epoch = self._next_epoch
        self._set_epoch(epoch)
        return DatasetIterator(self._plan, epoch, self._set_epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._next_epoch = epoch + 1

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Goes through the elements, with NumPy scalars for arrays without dimensions."""
        return map(builder_elements.as_scalars, self)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Returns `reduce_func(state, element)` after the last element."""
        state = builder_elements.as_element(initial_state)
        return reduce_elements(self, state, reduce_func)

    def get_single_element(self, name: str | None = None) -> Any:
        """Returns the element of a dataset of exactly one.

        >>> from replicax.input.builder import Dataset
        >>> Dataset.range(3).batch(3).get_single_element()
        array([0, 1, 2])
        """
        del name
        iterator = iter(self)
        try:
            elements = list(itertools.islice(iterator, 2))
        finally:
            iterator.close()
        if len(elements) != 1:
            raise errors.InvalidArgumentError(
                "`get_single_element` needs a dataset of one element",
                "it has more" if elements else "it is empty",
                "Use `batch` to make one element of all, or `take(1)` for the first.",
            )
        return elements[0]

    def cardinality(self) -> int:
        """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return self._plan.cardinality

    def __len__(self) -> int:
        count = self.cardinality()
        if count < 0:
            raise errors.ArgumentTypeError(
                "`len` needs a dataset with a known number of elements",
                "it is unknown" if count == UNKNOWN_CARDINALITY else "it is infinite",
                "Count the elements, or use `take`.",
            )
        return count

    def __bool__(self) -> bool:
        return True

    @functools.cached_property
    def element_spec(self) -> Any:
        """What elements look like, as a structure of `rx.TensorSpec`; reads the first one."""
        plan = self._plan
        if plan.spec is not None:
            return plan.spec
        if plan.find_spec is not None:
            return plan.find_spec()
        element = plan.first_element()
        size = None if plan.drops_remainder else plan.batch_size
        if size is not None and plan.cardinality in (1, UNKNOWN_CARDINALITY):
            # The first batch may be the last one, and small.
            size = builder_elements.num_rows(element, size)
        return builder_elements.spec_of(element, size, plan.is_padded)

    def to_grain(self) -> Any:
        """Returns the first epoch as a Grain MapDataset or IterDataset."""
        return self._plan.build((0,))

    # What distribution asks.

    @property
    def batch_size(self) -> int | None:
        """The size of the last batch step; None if elements are single examples."""
        return self._plan.batch_size

    @property
    def has_examples(self) -> bool:
        """Whether elements are known to be single examples, and no batches."""
        return self._plan.has_examples

    @property
    def has_known_sizes(self) -> bool:
        """Whether `element_spec` says how many rows elements have, if all have as many."""
        plan = self._plan
        is_counted = plan.has_examples or plan.batch_size is not None
        return (
            is_counted
            or plan.spec is not None
            or plan.find_spec is not None
            or plan.cardinality == 1
        )

    @property
    def drops_remainder(self) -> bool:
        """Whether every batch has exactly `batch_size` rows."""
        return self._plan.drops_remainder

    @property
    def is_quick(self) -> bool:
        """Whether elements come from memory without a function of the user."""
        return self._plan.is_quick

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files that the dataset reads; None if it does not start from files."""
        return self._plan.files

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """How the options want the dataset to be divided among workers."""
        return self._plan.options.experimental_distribute.auto_shard_policy

    def __repr__(self) -> str:
        return f"<rx.data.Dataset {self._plan.name}, {self._describe_elements()}>"

    def _describe_elements(self) -> str:
        """Tells how many elements there are, and of what kind if that runs no code of the user."""
        plan = self._plan
        if plan.cardinality >= 0:
            count = printing.count(plan.cardinality, "element")
        else:
            known = plan.cardinality == INFINITE_CARDINALITY
            count = "infinitely many elements" if known else "an unknown number of elements"
        is_known = plan.spec is not None or "element_spec" in vars(self)
        if is_known or (plan.is_quick and plan.cardinality != 0):
            return f"{count} of {self.element_spec}"
        return count


def require_dataset(step: str, value: Any) -> Any:
    """Returns a dataset that was given to a step or returned by a function, or raises."""
    if isinstance(value, ReadableDataset):
        return value
    raise errors.ArgumentTypeError(
        f"`{step}` needs datasets of rx.data",
        f"{type(value).__name__} was given",
        "Make one with rx.data.Dataset.from_tensor_slices or another source.",
    )
