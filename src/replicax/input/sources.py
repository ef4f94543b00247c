"""Sources of batches: datasets and loaders of any library, behind one interface.

Libraries are recognized by the module of an object's class, and never imported here.
"""

from __future__ import annotations

import abc
import logging
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.foundation import errors, ordered_trees
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.input.dataset.options import AutoShardPolicy
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY
from replicax.tracing.signature import TensorSpec
from replicax.values.regroup import sequence_like

if TYPE_CHECKING:
    from replicax.input.dataset.plan import IterNode, MapNode

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """One pass over the batches of a source, whose position can be saved and restored."""

    def __next__(self) -> Tree: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> None: ...


class Source(abc.ABC):
    """A sequence of batches that can be read from the start any number of times."""

    # Whether a batch costs less than a background thread would.
    is_quick = False
    # Whether the arrays of a batch have no other owner, now or later.
    is_fresh = False
    # False if elements are known to be single examples.
    is_batched = True
    # Whether all batches have the same number of rows.
    drops_remainder = False
    policy = AutoShardPolicy.AUTO

    @property
    def name(self) -> str:
        """What the dataset is, for comparison with that of other workers."""
        return type(self).__name__

    @property
    def num_batches(self) -> int:
        """The number of batches, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY."""
        return UNKNOWN_CARDINALITY

    @property
    def batch_size(self) -> int | None:
        """The rows of all batches but the last of a pass; None if it is not known."""
        return None

    @abc.abstractmethod
    def open(self) -> Stream:
        """Returns a stream at the first batch."""

    def continue_after(self, state: object) -> None:
        """Makes the next iteration the one after that of a restored stream."""
        del state  # Only epochs of `rx.data` are numbered.

    def batch_spec(self) -> Tree:
        """Returns the spec of batches; the number of rows is None unless all have the same."""
        stream = self.open()
        try:
            batch = next(stream)
        except StopIteration:
            raise errors.InvalidArgumentError(
                "The spec of elements is derived from the first one",
                "the dataset is empty",
                "Add at least one batch.",
            ) from None
        finally:
            close_stream(stream)

        def spec(leaf: Any) -> TensorSpec:
            shape: tuple[int | None, ...] = np.shape(leaf)
            if shape and not self.drops_remainder:
                shape = (None, *shape[1:])
            return TensorSpec(shape, getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)

        return ordered_trees.map(spec, batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


class BuilderSource(Source):
    """A dataset made with `rx.data`."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.is_batched = not dataset.has_examples
        self.is_quick = dataset.is_quick
        self.is_fresh = True
        self.drops_remainder = dataset.drops_remainder
        self.policy = dataset.auto_shard_policy

    @property
    @override
    def name(self) -> str:
        return self.dataset.name

    @property
    @override
    def num_batches(self) -> int:
        return self.dataset.cardinality()

    @property
    @override
    def batch_size(self) -> int | None:
        return self.dataset.batch_size

    @override
    def open(self) -> Stream:
        return iter(self.dataset)

    @override
    def continue_after(self, state: object) -> None:
        if isinstance(state, dict):
            shards = state.get("shards")
            own = shards[0]["stream"] if shards else state
            self.dataset.continue_after(own["epoch"])

    def batch_spec(self) -> Tree:
        # Opening an iterator would count as an epoch, and change the next shuffle.
        spec = self.dataset.element_spec
        if self.dataset.has_known_sizes:
            return spec
        # The last batch of a generator, for instance, may be smaller than the first.
        return ordered_trees.map(
            lambda s: TensorSpec((None, *s.shape[1:])[: len(s.shape)], s.dtype), spec
        )


class GrainSource(Source):
    """A Grain `MapDataset` or `IterDataset` of batches."""

    is_fresh = True

    def __init__(self, dataset: MapNode | IterNode) -> None:
        self._dataset: Any = dataset

    def open(self) -> Stream:
        has_random_access = hasattr(self._dataset, "to_iter_dataset")
        return IndexStream(self._dataset) if has_random_access else iter(self._dataset)


class IndexStream:
    """Reads a Grain `MapDataset` by index.

    Grain's own iterator of such a dataset starts 16 threads; the pipeline reads ahead in one.
    """

    def __init__(self, dataset: MapNode) -> None:
        self._dataset = dataset
        self._next = 0
        self._length = len(dataset)

    def __next__(self) -> Tree:
        while self._next < self._length:
            element = self._dataset[self._next]
            self._next += 1
            # None stands for an element that a filter removed.
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> dict[str, int]:
        """Returns the position in the format of Grain's iterators."""
        return {"next_index": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Restores a position that `get_state` returned."""
        self._next = state["next_index"]


class IterableSource(Source):
    """An iterable that can be iterated any number of times; positions are counts of batches."""

    def __init__(self, make: Callable[[], Iterable[Tree]], *, is_fresh: bool = False) -> None:
        self._make = make
        self.is_fresh = is_fresh

    def open(self) -> Stream:
        return CountingStream(self._make)


class CountingStream:
    """An iterator that counts batches, and restores a position by reading."""

    def __init__(self, make: Callable[[], Iterable[Tree]]) -> None:
        self._make = make
        self._iterator = iter(make())
        self._count = 0

    def __next__(self) -> Tree:
        batch = next(self._iterator)
        self._count += 1
        return to_numpy(batch)

    def get_state(self) -> dict[str, Any]:
        """Returns the number of batches that were read, or the iterator's own state."""
        if hasattr(self._iterator, "get_state"):
            return {"iterator": self._iterator.get_state()}  # type: ignore[attr-defined]
        return {"batches": self._count}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position that `get_state` returned."""
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
        """Releases the iterator and its resources."""
        self._iterator = iter(())


def source_of(dataset: Any) -> Source:
    """Returns a source for a dataset of a supported type, or raises."""
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, Dataset):
        return BuilderSource(dataset)
    if _is_from(dataset, "grain") and hasattr(dataset, "__iter__"):
        return GrainSource(dataset)
    if _is_from(dataset, "tensorflow") and hasattr(dataset, "as_numpy_iterator"):
        return _tf_data_source(dataset)
    if _is_from(dataset, "ray") and hasattr(dataset, "iter_batches"):
        raise unbatched(
            f"a {type(dataset).__name__} of Ray has rows",
            "Pass `rx.ray.batches(dataset, global_batch_size)`.",
        )
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
            "A distributed dataset is iterated once per epoch",
            f"a {type(dataset).__name__} can be iterated only once",
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
        "Define an __iter__ method that yields batches.",
    )


def unbatched(found: str, advice: str = "") -> errors.InvalidArgumentError:
    """Returns the error for elements that are not batches."""
    return errors.InvalidArgumentError(
        "The elements of a distributed dataset must be global batches, which are split along "
        "their first dimension",
        found,
        advice
        or "Batch it first, such as with `rx.data.Dataset.from_tensor_slices(arrays)."
        "batch(global_batch_size)`, or use distribute_datasets_from_function.",
    )


def close_stream(stream: Stream) -> None:
    """Closes a stream that has a `close` method."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _slices(arrays: Tree) -> Iterator[Tree]:
    leaves = ordered_trees.leaves(arrays)
    lengths = {len(a) if np.ndim(a) else None for a in leaves}
    if len(lengths) != 1 or None in lengths:
        raise unbatched(f"these arrays have shapes {[np.shape(a) for a in leaves]}")
    for i in range(lengths.pop() or 0):
        yield ordered_trees.map(lambda a, i=i: a[i], arrays)


def _tf_data_source(dataset: Any) -> Source:
    source = IterableSource(dataset.as_numpy_iterator, is_fresh=True)
    specs = ordered_trees.leaves(dataset.element_spec)
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
    """Returns the start method of a multiprocessing context, without fixing it."""
    return context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _py_dataset_batches(dataset: Any) -> Iterator[Tree]:
    count = getattr(dataset, "num_batches", None)
    if count is None and hasattr(dataset, "__len__"):
        count = len(dataset)
    i = 0
    while count is None or i < count:
        yield dataset[i]
        i += 1
    dataset.on_epoch_end()


def _is_from(value: object, package: str) -> bool:
    return any(_comes_from(c, package) for c in type(value).__mro__)


def _comes_from(cls: type, package: str) -> bool:
    return cls.__module__.partition(".")[0] == package


def to_numpy(batch: Tree) -> Tree:
    """Converts tensors of other libraries, and lists of numbers, to NumPy arrays.

    >>> to_numpy({"x": [1, 2, 3]})
    {'x': array([1, 2, 3])}
    """
    if isinstance(batch, list) and batch and all(isinstance(v, int | float) for v in batch):
        return np.asarray(batch)
    if type(batch).__name__ == "SparseTensorValue":
        return _sparse(batch)
    if isinstance(batch, list | tuple):
        return sequence_like(batch, [to_numpy(item) for item in batch])
    if isinstance(batch, Mapping):
        return {key: to_numpy(value) for key, value in batch.items()}
    return _to_array(batch)


def _to_array(leaf: Any) -> object:
    if isinstance(leaf, np.ndarray | jax.Array) or np.isscalar(leaf) or leaf is None:
        return leaf
    if hasattr(leaf, "detach"):
        # A torch tensor, on any device.
        return leaf.detach().cpu().numpy()
    if type(leaf).__name__ == "RaggedTensorValue":
        return _ragged(leaf)
    if hasattr(leaf, "numpy") and hasattr(leaf, "shape"):
        return leaf.numpy()
    return leaf


def _ragged(value: Any) -> np.ndarray:
    """Returns rows of different lengths as an array of arrays."""
    rows = value.to_list()
    ragged = np.empty(len(rows), object)
    for i, row in enumerate(rows):
        ragged[i] = np.asarray(row)
    return ragged


def _sparse(value: Any) -> object:
    from jax.experimental import sparse  # noqa: PLC0415 - slow to import, and rarely needed

    shape = tuple(int(n) for n in value.dense_shape)
    return sparse.BCOO((jnp.asarray(value.values), jnp.asarray(value.indices)), shape=shape)
