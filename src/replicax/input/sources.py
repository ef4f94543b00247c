"""Where batches come from: datasets and loaders of any library, under one face.

No library is imported here for its type: an object tells by its class where it is from,
and whoever made it has imported its library.
"""

from __future__ import annotations

import abc
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from replicax.foundation import errors
from replicax.input import foreign_arrays
from replicax.input.builder import Dataset
from replicax.input.options import AutoShardPolicy
from replicax.tracing.signature import TensorSpec

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """One pass over the batches of a source, whose position can be saved and set."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Source(abc.ABC):
    """A sequence of batches that can be read from the start any number of times."""

    # Whether a batch costs so little that a thread in the background would cost more.
    is_quick = False
    # Whether the arrays of a batch are nobody else's, now and later.
    is_fresh = False
    # Whether elements are known not to be single examples.
    is_batched = True
    # Whether the batch size is a promise: every batch has exactly that many rows.
    drops_remainder = False
    policy = AutoShardPolicy.AUTO

    @abc.abstractmethod
    def open(self) -> Stream:
        """Starts at the first batch."""

    def batch_spec(self) -> Any:
        """Describes a batch by `TensorSpec`s; its size is None unless it is a promise."""
        stream = self.open()
        try:
            batch = next(stream)
        except StopIteration:
            raise errors.InvalidArgumentError(
                "The elements of a dataset are known by its first one",
                "the dataset is empty",
                "Give it at least one batch.",
            ) from None
        finally:
            close_stream(stream)

        def spec(leaf: Any) -> TensorSpec:
            shape = np.shape(leaf)
            if shape and not self.drops_remainder:
                shape = (None, *shape[1:])
            return TensorSpec(shape, getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)

        return jax.tree.map(spec, batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


class BuilderSource(Source):
    """A dataset made with `rx.data`."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.is_batched = not dataset.has_examples
        self.is_quick = dataset.is_quick
        self.is_fresh = True
        self.drops_remainder = dataset.drops_remainder
        self.policy = dataset.auto_shard_policy

    def open(self) -> Stream:
        return iter(self.dataset)

    def batch_spec(self) -> Any:
        # An iteration of ours would count as an epoch, and change the next shuffle.
        spec = self.dataset.element_spec
        if self.dataset.has_known_sizes:
            return spec
        # Batches of a generator, say, of which the last may be smaller than the first.
        return jax.tree.map(
            lambda s: TensorSpec((None, *s.shape[1:])[: len(s.shape)], s.dtype), spec
        )


class GrainSource(Source):
    """A Grain `MapDataset` or `IterDataset` of batches."""

    is_fresh = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def open(self) -> Stream:
        has_random_access = hasattr(self._dataset, "to_iter_dataset")
        return IndexStream(self._dataset) if has_random_access else iter(self._dataset)


class IndexStream:
    """Reads a Grain `MapDataset` by index.

    Grain's own iterator of such a dataset starts 16 threads; one of ours reads ahead.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._next = 0
        self._length = len(dataset)

    def __next__(self) -> Any:
        while self._next < self._length:
            element = self._dataset[self._next]
            self._next += 1
            # What a filter removed.
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> Any:
        """Returns the position, as Grain's iterators name it."""
        return {"next_index": self._next}

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""
        self._next = state["next_index"]


class IterableSource(Source):
    """Anything that can be iterated again and again; its position is a count of batches."""

    def __init__(self, make: Callable[[], Iterable[Any]], *, is_fresh: bool = False) -> None:
        self._make = make
        self.is_fresh = is_fresh

    def open(self) -> Stream:
        return CountingStream(self._make)


class CountingStream:
    """An iterator that knows how far it is, and goes there by reading."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make
        self._iterator = iter(make())
        self._count = 0

    def __next__(self) -> Any:
        batch = next(self._iterator)
        self._count += 1
        return foreign_arrays.to_numpy(batch)

    def get_state(self) -> Any:
        """Returns the number of batches that were read, or the iterator's own state."""
        if hasattr(self._iterator, "get_state"):
            return {"iterator": self._iterator.get_state()}  # type: ignore[attr-defined]
        return {"batches": self._count}

    def set_state(self, state: Any) -> None:
        """Goes to a position that `get_state` returned."""
        self._iterator = iter(self._make())
        if "iterator" in state:
            self._iterator.set_state(state["iterator"])  # type: ignore[attr-defined]
            return
        self._count = 0
        while self._count < state["batches"]:
            try:
                next(self)
            except StopIteration:
                raise errors.InvalidArgumentError(
                    f"The saved position is after {state['batches']} batches",
                    f"the dataset now ends after {self._count}",
                    "Restore with the dataset that was saved.",
                ) from None

    def close(self) -> None:
        """Lets go of the iterator, and of what it holds."""
        self._iterator = iter(())


def source_of(dataset: Any) -> Source:
    """Returns a source for any dataset that is understood, or raises."""
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, Dataset):
        return BuilderSource(dataset)
    if _is_from(dataset, "grain") and hasattr(dataset, "__iter__"):
        return GrainSource(dataset)
    if _is_from(dataset, "tensorflow") and hasattr(dataset, "as_numpy_iterator"):
        return _tf_data_source(dataset)
    if _is_from(dataset, "torch") and hasattr(dataset, "collate_fn"):
        return _torch_source(dataset)
    if any(c.__name__ == "PyDataset" and _comes_from(c, "keras") for c in type(dataset).__mro__):
        return IterableSource(lambda: _py_dataset_batches(dataset))
    return _plain_source(dataset)


def _plain_source(dataset: Any) -> Source:
    is_array = isinstance(dataset, np.ndarray | jax.Array)
    if is_array or isinstance(dataset, Mapping | tuple):
        return IterableSource(lambda: _slices(dataset))
    if isinstance(dataset, Iterator):
        raise errors.ArgumentTypeError(
            "A distributed dataset is read from the start in each epoch",
            f"a {type(dataset).__name__} can be read only once",
            "Pass a list, a dataset, or an object whose __iter__ starts again; for a "
            "generator function use rx.data.Dataset.from_generator(function).",
        )
    if hasattr(dataset, "__iter__"):
        return IterableSource(lambda: dataset)
    raise errors.ArgumentTypeError(
        "A dataset must be an rx.data.Dataset, a Grain dataset, arrays whose first dimension "
        "counts batches, an iterable of batches, a torch DataLoader, a tf.data.Dataset or "
        "a keras PyDataset",
        f"{type(dataset).__name__} is none of these",
        "Give it an __iter__ method that yields batches.",
    )


def unbatched(found: str) -> errors.InvalidArgumentError:
    """Says that elements must be batches."""
    return errors.InvalidArgumentError(
        "The elements of a distributed dataset must be global batches, which are cut along "
        "their first dimension",
        found,
        "Batch it first, such as with `rx.data.Dataset.from_tensor_slices(arrays)."
        "batch(global_batch_size)`, or use distribute_datasets_from_function.",
    )


def close_stream(stream: Any) -> None:
    """Ends what a stream does in the background, if it can be told to."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _slices(arrays: Any) -> Iterator[Any]:
    leaves = jax.tree.leaves(arrays)
    lengths = {len(a) if np.ndim(a) else None for a in leaves}
    if len(lengths) != 1 or None in lengths:
        raise unbatched(f"these arrays have shapes {[np.shape(a) for a in leaves]}")
    for i in range(lengths.pop() or 0):
        yield jax.tree.map(lambda a, i=i: a[i], arrays)


def _tf_data_source(dataset: Any) -> Source:
    source = IterableSource(dataset.as_numpy_iterator, is_fresh=True)
    specs = jax.tree.leaves(dataset.element_spec)
    source.drops_remainder = all(
        getattr(s, "shape", None) and s.shape[0] is not None for s in specs
    )
    policy = dataset.options().experimental_distribute.auto_shard_policy
    source.policy = AutoShardPolicy[policy.name]
    return source


def _torch_source(loader: Any) -> Source:
    num_workers = getattr(loader, "num_workers", 0)
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing.get_context()
    if num_workers and _start_method(context) == "fork":
        _log.warning(
            "A torch DataLoader with %d worker processes forks this process, in which JAX runs "
            "threads: a worker may hang. Give it multiprocessing_context='forkserver'; see "
            "'Worker processes of torch' in docs/guides/datasets.md.",
            num_workers,
        )
    source = IterableSource(lambda: loader, is_fresh=True)
    source.drops_remainder = bool(getattr(loader, "drop_last", False))
    return source


def _start_method(context: Any) -> str:
    """Returns how a context of multiprocessing starts processes, without deciding it."""
    return context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _py_dataset_batches(dataset: Any) -> Iterator[Any]:
    count = getattr(dataset, "num_batches", None)
    if count is None and hasattr(dataset, "__len__"):
        count = len(dataset)
    i = 0
    while count is None or i < count:
        yield dataset[i]
        i += 1
    dataset.on_epoch_end()


def _is_from(value: Any, package: str) -> bool:
    return any(_comes_from(c, package) for c in type(value).__mro__)


def _comes_from(cls: type, package: str) -> bool:
    return cls.__module__.partition(".")[0] == package
