"""`tf.data.Dataset`: rx.data's dataset, whose functions and users see tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from typing_extensions import override

from replicax.foundation import errors, ordered_trees
from replicax.input.dataset import dataset as rx_dataset
from replicax.input.dataset.plan import AUTOTUNE, Plan
from replicax.input.dataset.reading import DatasetIterator
from replicax.tf import dispatch, dtypes
from replicax.tf.arguments import (
    AnyDataset,
    DTypeLike,
    Ignored,
    Number,
    PathValue,
    Structure,
    Value,
)
from replicax.tf.data.host_elements import as_arrays, as_element, as_tensors, on_host
from replicax.tf.data.options import Options
from replicax.tf.io.gfile import path_text
from replicax.tf.tensor import Tensor, TensorShape
from replicax.tf.tensor_spec import TensorSpec
from replicax.tracing.iterators import open_loop


def plain(dataset: AnyDataset) -> Any:
    """Returns the same dataset with NumPy elements, as rx.data has them."""
    if type(dataset) is rx_dataset.Dataset or not isinstance(dataset, rx_dataset.Dataset):
        return dataset
    found = rx_dataset.Dataset(dataset._plan)
    found._next_epoch = dataset._next_epoch
    return found


class Count(int):
    """A number of elements, which programs also ask for its `numpy()`.

    >>> Count(3).numpy()
    np.int64(3)
    """

    def numpy(self) -> np.int64:
        """Returns the number."""
        return np.int64(self)


class TensorIterator(DatasetIterator):
    """An iterator over a dataset, whose elements are tensors."""

    @override
    def _read(self) -> Any:
        return as_tensors(super()._read())

    @property
    def element_spec(self) -> Any:
        """The spec of the elements."""
        return Dataset(self._plan).element_spec

    def next(self) -> Any:
        """Returns the next element."""
        return next(self)


class Dataset(rx_dataset.Dataset):
    """A sequence of elements: structures of tensors.

    Functions of `map`, `filter` and the like run once per element, on the host: ops compute with
    NumPy there, `tensor.numpy()` works, and so does `if` on a value.

    >>> dataset = Dataset.range(4).map(lambda x: x * 10 if x > 1 else x).batch(2)
    >>> [batch.numpy().tolist() for batch in dataset]
    [[0, 1], [20, 30]]
    """

    # Computes the spec, if more is known about it than the first element shows.
    _find_spec: Callable[[], Any] | None = None

    @override
    def _of(self, plan: Plan) -> Dataset:
        return Dataset(plan)

    def _with_spec(self, find_spec: Callable[[], Any]) -> Dataset:
        self._find_spec = find_spec
        return self

    # Reading.

    def __iter__(self) -> Any:
        return open_loop(self)

    @override
    def open_feed(self) -> TensorIterator:
        epoch = self._next_epoch
        self.continue_after(epoch)
        return TensorIterator(self._plan, epoch, self.continue_after)

    @override
    def as_numpy_iterator(self) -> Iterator[Any]:
        return plain(self).as_numpy_iterator()

    @override
    def cardinality(self) -> Count:
        return Count(super().cardinality())

    @functools.cached_property
    def element_spec(self) -> Any:
        """The structure of elements, with a `tf.TensorSpec` per tensor; reads the first one."""
        found = plain(self).element_spec if self._find_spec is None else self._find_spec()
        return ordered_trees.map(
            lambda spec: TensorSpec.of(spec), found, is_leaf=lambda x: hasattr(x, "dtype")
        )

    @override
    def reduce(  # type: ignore[override]
        self,
        initial_state: Structure,
        reduce_func: Callable[[Any, Any], Any],
        name: str | None = None,
    ) -> Any:
        """Returns the last state of `state = reduce_func(state, element)`.

        >>> Dataset.range(4).reduce(np.int64(0), lambda total, x: total + x).numpy()
        np.int64(6)
        """
        del name
        state = as_tensors(as_arrays(initial_state))
        iterator = self.open_feed()
        try:
            with dispatch.host_mode():
                for element in iterator:
                    state = as_tensors(as_arrays(reduce_func(state, element)))
        finally:
            iterator.close()
        return state

    @override
    def get_single_element(self, name: str | None = None) -> Any:
        return as_tensors(plain(self).get_single_element(name))

    # Sources.

    @staticmethod
    def range(*args: Any, output_type: DTypeLike = np.int64, name: str | None = None) -> Dataset:
        """Returns the numbers of a Python `range`, as int64."""
        kind = dtypes.as_dtype(output_type).as_numpy_dtype
        numbers = [int(number) for number in args]
        made = Dataset(rx_dataset.Dataset.range(*numbers, output_type=kind, name=name)._plan)
        return made._with_spec(lambda: TensorSpec((), output_type))

    @staticmethod
    def from_tensors(tensors: Structure, name: str | None = None) -> Dataset:
        """Returns a dataset of one element."""
        return Dataset(rx_dataset.Dataset.from_tensors(as_element(tensors), name)._plan)

    @staticmethod
    def from_tensor_slices(tensors: Structure, name: str | None = None) -> Dataset:
        """Returns one element per row of a structure of tensors; arrays are not copied.

        >>> [x.numpy().tolist() for x in Dataset.from_tensor_slices([[1, 2], [3, 4]])]
        [[1, 2], [3, 4]]
        """
        arrays = as_element(_columns(tensors))
        return Dataset(rx_dataset.Dataset.from_tensor_slices(arrays, name)._plan)

    @staticmethod
    def from_generator(  # type: ignore[override]
        generator: Callable[..., Iterable[Any]],
        output_types: DTypeLike = None,
        output_shapes: Structure = None,
        args: Structure = None,
        output_signature: Structure = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns the elements of a generator.

        Args:
          generator: Called with `args` for each pass.
          output_types: A structure of types; older than `output_signature`.
          output_shapes: A structure of shapes that goes with it.
          args: Its arguments, given as NumPy arrays.
          output_signature: A structure of `tf.TensorSpec`.
          name: Accepted for portability.

        >>> made = Dataset.from_generator(lambda: iter([1, 2]), output_types=dtypes.float32)
        >>> [x.numpy().item() for x in made]
        [1.0, 2.0]
        """
        del name
        if not callable(generator):
            raise errors.ArgumentTypeError(
                "`from_generator` needs a function that returns an iterable",
                f"{type(generator).__name__} was given",
                "Pass the function, or `lambda: iterable`.",
            )
        if output_signature is None and output_types is not None:
            output_signature = _signature(output_types, output_shapes)

        def elements(*values: Any) -> Iterator[Any]:
            return map(as_element, generator(*values))

        made = rx_dataset.Dataset.from_generator(
            elements, output_signature=output_signature, args=tuple(as_arrays(args or ()))
        )
        return Dataset(made._plan)

    @staticmethod
    def list_files(
        file_pattern: PathValue,
        shuffle: bool | None = None,
        seed: Number = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns the names of files that match, shuffled unless `shuffle` is False."""
        given = as_arrays(file_pattern)
        if isinstance(given, np.ndarray):
            given = given.reshape(-1).tolist()
        given = [given] if isinstance(given, str | bytes) else given
        patterns = [p.decode() if isinstance(p, bytes) else p for p in given]
        return Dataset(rx_dataset.Dataset.list_files(patterns, shuffle, _seed(seed), name)._plan)

    @staticmethod
    def zip(*args: Any, datasets: AnyDataset = None, name: str | None = None) -> Dataset:
        """Combines elements of several datasets, in the structure that holds the datasets."""
        given = args if datasets is None else (datasets,)
        structure = given[0] if len(given) == 1 else given
        is_dataset = lambda part: isinstance(part, rx_dataset.Dataset)  # noqa: E731
        made = Dataset(rx_dataset.Dataset.zip(*given, name=name)._plan)
        return made._with_spec(
            lambda: ordered_trees.map(lambda part: part.element_spec, structure, is_leaf=is_dataset)
        )

    @staticmethod
    def load(
        path: PathValue,
        element_spec: Structure = None,
        compression: str | None = None,
        reader_func: Callable[[Any], Any] | None = None,
        wait: bool = False,
    ) -> Dataset:
        """Returns the dataset that `save` wrote into a directory."""
        del wait, element_spec

        def read(shards: AnyDataset) -> Any:
            assert reader_func is not None
            return reader_func(Dataset(shards._plan))

        reader = None if reader_func is None else read
        found = rx_dataset.Dataset.load(path_text(path), None, compression, reader)
        return Dataset(found._plan)

    @staticmethod
    def counter(
        start: Number = 0, step: Number = 1, dtype: DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """Returns `start`, `start + step`, and so on, endlessly."""
        kind = dtypes.as_dtype(dtype).as_numpy_dtype
        return Dataset(rx_dataset.Dataset.counter(start, step, kind, name)._plan)

    @staticmethod
    def random(
        seed: Number = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns random numbers from 0 to 2**32 - 1, as int64, endlessly."""
        found = rx_dataset.Dataset.random(_seed(seed), rerandomize_each_iteration, name)
        return Dataset(found._plan)

    @staticmethod
    def choose_from_datasets(
        datasets: AnyDataset, choice_dataset: AnyDataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Takes each element from the dataset whose index `choice_dataset` gives."""
        found = rx_dataset.Dataset.choose_from_datasets(
            datasets, plain(choice_dataset), stop_on_empty_dataset
        )
        return Dataset(found._plan)

    @staticmethod
    def sample_from_datasets(
        datasets: AnyDataset,
        weights: Value = None,
        seed: Number = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Takes each element from a dataset that is drawn at random."""
        chosen = plain(weights) if isinstance(weights, rx_dataset.Dataset) else as_arrays(weights)
        found = rx_dataset.Dataset.sample_from_datasets(
            datasets, chosen, _seed(seed), stop_on_empty_dataset, rerandomize_each_iteration
        )
        return Dataset(found._plan)

    # Steps with functions.

    @override
    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: Number = None,
        deterministic: bool | None = None,
        name: str | None = None,
        **_: Any,
    ) -> Any:
        calls = None if num_parallel_calls is None else int(num_parallel_calls)
        return super().map(on_host(map_func), calls, deterministic, name)

    def map_with_legacy_function(self, map_func: Callable[..., Any], *args: Any) -> Any:
        """Applies a function to each element, as `map` does."""
        return self.map(map_func, *args)

    @override
    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Any:
        return super().filter(on_host(predicate), name)

    @override
    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Any:
        return super().take_while(on_host(predicate), name)

    @override
    def scan(
        self, initial_state: Structure, scan_func: Callable[..., Any], name: str | None = None
    ) -> Any:
        return super().scan(as_arrays(initial_state), on_host(scan_func), name)

    @override
    def flat_map(self, map_func: Callable[..., Any], name: str | None = None) -> Any:
        return super().flat_map(on_host(map_func), name)

    @override
    def interleave(
        self,
        map_func: Callable[..., Any],
        cycle_length: Number = None,
        block_length: Number = None,
        num_parallel_calls: Number = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Any:
        block = 1 if block_length is None else block_length
        return super().interleave(
            on_host(map_func), cycle_length, block, num_parallel_calls, deterministic, name
        )

    @override
    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Any], Any],
        window_size: Number = None,
        window_size_func: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> Any:
        sizes = None if window_size_func is None else on_host(window_size_func)
        return super().group_by_window(
            on_host(key_func), on_host(reduce_func), window_size, sizes, name
        )

    @override
    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Value,
        initial_dist: Value = None,
        seed: Number = None,
        name: str | None = None,
    ) -> Any:
        found = plain(self).rejection_resample(
            on_host(class_func), as_arrays(target_dist), as_arrays(initial_dist), _seed(seed), name
        )
        return Dataset(found._plan)

    @override
    def concatenate(self, dataset: AnyDataset, name: str | None = None) -> Any:
        return Dataset(super().concatenate(dataset, name)._plan)

    @override
    def padded_batch(
        self,
        batch_size: Number,
        padded_shapes: Structure = None,
        padding_values: Structure = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Any:
        shapes = None if padded_shapes is None else _plain_shapes(padded_shapes)
        fill = as_arrays(padding_values)
        made: Any = super().padded_batch(int(batch_size), shapes, fill, bool(drop_remainder), name)
        if shapes is None:
            return made
        size = int(batch_size) if drop_remainder else None
        return made._with_spec(lambda: _padded_spec(self.element_spec, shapes, size))

    @override
    def shuffle(
        self,
        buffer_size: Number,
        seed: Number = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Any:
        return super().shuffle(int(buffer_size), _seed(seed), reshuffle_each_iteration, name)

    @override
    def save(  # type: ignore[override]
        self,
        path: PathValue,
        compression: str | None = None,
        shard_func: Callable[..., Any] | None = None,
        checkpoint_args: Ignored = None,
    ) -> None:
        del checkpoint_args
        shard = None if shard_func is None else on_host(shard_func)
        plain(self).save(path_text(path), compression, shard)

    @override
    def snapshot(
        self,
        path: PathValue,
        compression: str | None = "AUTO",
        reader_func: Callable[[Any], Any] | None = None,
        shard_func: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> Any:
        shard = None if shard_func is None else on_host(shard_func)
        reader = None
        if reader_func is not None:
            reader = lambda parts: plain(reader_func(Dataset(parts._plan)))  # noqa: E731
        found = plain(self).snapshot(path_text(path), compression, reader, shard, name)
        return Dataset(found._plan)

    @override
    def with_options(self, options: Ignored, name: str | None = None) -> Any:
        return super().with_options(options, name)

    @override
    def options(self) -> Options:
        found = Options()
        found.experimental_distribute = super().options().experimental_distribute
        return found

    def prefetch_to_device(self, device: object, buffer_size: int | None = None) -> Any:
        """Reads ahead; arrays are placed when they are used."""
        del device
        return self.prefetch(AUTOTUNE if buffer_size is None else buffer_size)

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Any:
        """Not offered: an error names its element and step."""
        raise errors.UnsupportedError(
            "A dataset ends at the first error of a function",
            "ignore_errors was called",
            "Catch the error in the function of `map`, return a flag, and `filter` by it.",
        )

    def ragged_batch(self, *args: object, **kwargs: object) -> Any:
        """Not offered: batches are arrays."""
        raise errors.UnsupportedError(
            "The rows of a batch must have one length",
            "ragged_batch was called",
            "Use `padded_batch`, and `tf.sequence_mask` for the lengths.",
        )

    def sparse_batch(self, *args: object, **kwargs: object) -> Any:
        """Not offered: batches are arrays."""
        raise errors.UnsupportedError(
            "The rows of a batch must be dense",
            "sparse_batch was called",
            "Use `map(tf.sparse.to_dense)` and `padded_batch`.",
        )

    def make_one_shot_iterator(self) -> Any:
        """Returns an iterator; the older name of `iter(dataset)`."""
        return iter(self)

    def __repr__(self) -> str:
        return super().__repr__().replace("rx.data", "tf.data", 1)


def _seed(seed: Number) -> int | None:
    return None if seed is None else int(seed)


def _columns(tensors: Structure) -> Any:
    """Returns arrays for lists of rows, as `from_tensor_slices` takes them."""
    if isinstance(tensors, Tensor):
        return tensors._raw
    if type(tensors) is dict:
        return {name: _columns(value) for name, value in tensors.items()}
    if type(tensors) is tuple:
        return tuple(map(_columns, tensors))
    if isinstance(tensors, np.ndarray) or not hasattr(tensors, "to_numpy"):
        return tensors
    # A column of a table of pandas.
    return tensors.to_numpy()


def _signature(types: DTypeLike, shapes: Structure) -> Any:
    """Returns the specs of types and shapes of one structure."""
    if isinstance(types, tuple | list):
        given = [None] * len(types) if shapes is None else shapes
        return tuple(_signature(t, s) for t, s in zip(types, given, strict=True))
    if isinstance(types, dict):
        given = dict.fromkeys(types) if shapes is None else shapes
        return {name: _signature(kind, given[name]) for name, kind in types.items()}
    return TensorSpec(None if shapes is None else TensorShape(shapes), types)


def _padded_spec(spec: Structure, shapes: Structure, size: int | None) -> Any:
    """Returns the spec of padded batches of elements, given the shapes that they are padded to."""
    if isinstance(spec, dict):
        return {name: _padded_spec(part, shapes[name], size) for name, part in spec.items()}
    if isinstance(spec, list | tuple):
        pairs = zip(spec, shapes, strict=True)
        return type(spec)(_padded_spec(part, shape, size) for part, shape in pairs)
    sizes = (None if one in (None, -1) else one for one in shapes)
    return TensorSpec([size, *sizes], spec.dtype)


def _plain_shapes(shapes: Structure) -> Any:
    """Returns a structure of shapes as tuples of ints and None."""
    if isinstance(shapes, TensorShape):
        return tuple(shapes)
    if isinstance(shapes, Tensor):
        return tuple(shapes.numpy().tolist())
    if isinstance(shapes, dict):
        return {name: _plain_shapes(shape) for name, shape in shapes.items()}
    if isinstance(shapes, list | tuple):
        is_shape = all(size is None or isinstance(size, int | np.integer) for size in shapes)
        return tuple(shapes) if is_shape else tuple(map(_plain_shapes, shapes))
    return shapes
