"""Reading a dataset: its iterators, and facts about its elements."""

from __future__ import annotations

import atexit
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.input.dataset import elements
from replicax.input.dataset.options import AutoShardPolicy
from replicax.input.dataset.plan import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Plan, follow
from replicax.input.iterators import DataIterator
from replicax.tracing.control_flow import reduce_elements
from replicax.tracing.iterators import open_loop
from replicax.values import printing

if TYPE_CHECKING:
    from replicax.input.dataset.dataset import Dataset
    from replicax.input.dataset.plan import IterNode, MapNode


class ReadableDataset:
    """The part of `Dataset` that reads elements; `Dataset` adds the steps."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # The number of the next iteration; shuffles depend on it.
        self._next_epoch = 0

    def _of(self, plan: Plan) -> Dataset:
        """Returns the dataset of a plan."""
        raise NotImplementedError

    def _then(self, step: Callable[[Plan], Plan]) -> Dataset:
        return self._of(follow(step, self._plan))

    def __iter__(self) -> DatasetIterator:
        feed = open_loop(self)
        assert isinstance(feed, DatasetIterator)
        return feed

    def open_feed(self) -> DatasetIterator:
        """Returns a new iterator, at the first element of the next epoch."""
        epoch = self._next_epoch
        self.continue_after(epoch)
        return DatasetIterator(self._plan, epoch, self.continue_after)

    def continue_after(self, epoch: int) -> None:
        """Makes the next iteration the one after this epoch."""
        self._next_epoch = epoch + 1

    def as_numpy_iterator(self) -> Iterator[Tree]:
        """Returns an iterator whose elements have NumPy scalars for arrays without dimensions."""
        return map(elements.as_scalars, self)

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Any, Any], Any]) -> Tree:
        """Returns the last state of `state = reduce_func(state, element)`."""
        state = elements.as_element(initial_state)
        return reduce_elements(self, state, reduce_func)

    def get_single_element(self, name: str | None = None) -> Tree:
        """Returns the only element of a dataset.

        >>> from replicax.input.dataset.dataset import Dataset
        >>> Dataset.range(3).batch(3).get_single_element()
        array([0, 1, 2])
        """
        del name
        iterator = iter(self)
        try:
            found = list(itertools.islice(iterator, 2))
        finally:
            iterator.close()
        if len(found) != 1:
            raise errors.InvalidArgumentError(
                "`get_single_element` needs a dataset of one element",
                "it has more" if found else "it is empty",
                "Use `batch` to combine all elements, or `take(1)` for the first.",
            )
        return found[0]

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
    def element_spec(self) -> Tree:
        """The structure of elements, with an `rx.TensorSpec` per array; reads the first one."""
        plan = self._plan
        if plan.spec is not None:
            return plan.spec
        if plan.find_spec is not None:
            return plan.find_spec()
        element = plan.first_element()
        size = None if plan.drops_remainder else plan.batch_size
        if size is not None and plan.cardinality in (1, UNKNOWN_CARDINALITY):
            # The first batch may also be the last one, and smaller.
            size = elements.num_rows(element, size)
        return elements.spec_of(element, size, plan.is_padded)

    def to_grain(self) -> MapNode | IterNode:
        """Returns the first epoch as a Grain MapDataset or IterDataset."""
        return self._plan.build((0,))

    # Facts that distribution needs.

    @property
    def name(self) -> str:
        """The steps, such as "range > shuffle > batch"."""
        return self._plan.name

    @property
    def batch_size(self) -> int | None:
        """The size of the last batch step, or None."""
        return self._plan.batch_size

    @property
    def has_examples(self) -> bool:
        """Whether elements are known to be single examples."""
        return self._plan.has_examples

    @property
    def has_known_sizes(self) -> bool:
        """Whether sizes in `element_spec` are those of all elements, not only of the first."""
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
        """Whether elements come from memory without a user's function."""
        return self._plan.is_quick

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files that the dataset reads, or None."""
        return self._plan.files

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy of the options."""
        return self._plan.options.experimental_distribute.auto_shard_policy

    def __repr__(self) -> str:
        return f"<rx.data.Dataset {self._plan.name}, {self._describe_elements()}>"

    def _describe_elements(self) -> str:
        """Describes number and spec of elements, without running a user's function."""
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


# Those that a program has not closed. Threads of Grain can be stopped as long as its modules are
# whole, so it happens when the interpreter exits, not when it removes its modules.
_open_iterators: weakref.WeakSet[DatasetIterator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for iterator in list(_open_iterators):
        iterator.close()


class DatasetIterator(DataIterator):
    """An iterator over a dataset, returned by `iter(dataset)`.

    Inside an `rx.function`, as an argument or captured, each call takes new elements.

    `get_state` returns a small dict that JSON can hold. Any process that builds the same dataset
    can restore it with `set_state`, and continues with the element that would have come next.

    >>> from replicax.input.dataset.dataset import Dataset
    >>> iterator = iter(Dataset.range(4))
    >>> int(next(iterator))
    0
    >>> state = iterator.get_state()
    >>> other = iter(Dataset.range(4))
    >>> other.set_state(state)
    >>> int(next(other))
    1
    """

    def __init__(self, plan: Plan, epoch: int, on_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self._plan = plan
        self._epoch = epoch
        # Sets the epoch of the dataset when a position is restored.
        self._on_epoch = on_epoch
        self._iterator = plan.open((epoch,))
        # The last state of a closed iterator.
        self._end: dict[str, Any] | None = None
        _open_iterators.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._end is not None else f"epoch {self._epoch}"
        return f"<rx.data.DatasetIterator of {self._plan.name}, {state}>"

    @override
    def _read(self) -> Tree:
        if self._end is not None:
            raise StopIteration
        try:
            return next(self._iterator)
        except StopIteration:
            self.close()
            raise

    @override
    def _position(self) -> dict[str, Any]:
        return {
            "pipeline": self._plan.name,
            "epoch": self._epoch,
            "seeds": [seed.value for seed in self._plan.seeds],
            "position": self._iterator.get_state() if self._end is None else self._end,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned, in this process or another.

        Raises:
          InvalidArgumentError: The position is that of a dataset with other steps.
        """
        found = state.get("pipeline") if isinstance(state, dict) else None
        if found != self._plan.name:
            raise errors.InvalidArgumentError(
                f"The position must be from a dataset with the steps {self._plan.name!r}",
                f"it is from {found!r}",
                "Build the dataset with the same steps as when the position was saved.",
            )
        with self._lock:
            self.restart(state)
            self._iterator.set_state(state["position"])

    @property
    def order(self) -> dict[str, Any]:
        """The epoch, and the seeds that the user did not choose: they decide the order."""
        return {"epoch": self._epoch, "seeds": [seed.value for seed in self._plan.seeds]}

    def restart(self, order: dict[str, Any]) -> None:
        """Starts at the first element again, in the order of another process."""
        for seed, value in zip(self._plan.seeds, order["seeds"], strict=True):
            seed.value = value
        with self._lock:
            self._returned = []
            self.close()
            self._end = None
            self._epoch = order["epoch"]
            self._on_epoch(self._epoch)
            self._iterator = self._plan.open((self._epoch,))

    @override
    def close(self) -> None:
        """Stops threads and closes files; the iterator then has no more elements."""
        if self._end is None:
            self._end = self._iterator.get_state()
            self._iterator.close()
            # Grain's iterators close themselves again when they are freed, which fails when the
            # interpreter has begun to remove its modules.
            del self._iterator

    def __del__(self) -> None:
        # An abandoned iterator may hold threads and files.
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator.close()


def require_dataset(step: str, value: object) -> Dataset:
    """Returns a value that must be a dataset, or raises."""
    if isinstance(value, ReadableDataset):
        return value  # type: ignore[return-value]
    raise errors.ArgumentTypeError(
        f"`{step}` needs datasets of rx.data",
        f"{type(value).__name__} was given",
        "Make one with rx.data.Dataset.from_tensor_slices or another source.",
    )
