"""`Dataset`: pipelines with the names of tf.data, run by Grain."""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.foundation import errors, lazy
from replicax.input import builder_checks, builder_elements, builder_steps
from replicax.input.builder_checks import UserFunction, whole_number
from replicax.input.builder_plan import (
    AUTOTUNE,
    UNKNOWN_CARDINALITY,
    Epoch,
    Plan,
    Seed,
    follow,
    over_files,
    over_records,
)
from replicax.input.builder_reading import ReadableDataset
from replicax.input.options import Options

if TYPE_CHECKING:
    from replicax.input import grain_nodes as nodes
    from replicax.input import grain_nodes_streams as streams
else:
    nodes = lazy.module("replicax.input.grain_nodes")
    streams = lazy.module("replicax.input.grain_nodes_streams")


class Dataset(ReadableDataset):
    """A sequence of elements that can be gone through again and again.

    Elements are structures (tuples, dicts, pytrees) of NumPy arrays; a list is an array. Each
    method returns a new dataset. `iter` returns an iterator whose position can be saved and
    set: see `DatasetIterator`.

    >>> dataset = Dataset.range(5).map(lambda x: x * 10).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 10], [20, 30], [40]]
    """

    # Sources.

    @staticmethod
    def range(*args: int, output_type: Any = np.int64) -> Dataset:
        """Returns the numbers of a Python `range`, as int64."""
        numbers = range(*args)
        make = functools.partial(_make_counting, numbers, output_type)
        return Dataset(builder_steps.in_memory("range", make, len(numbers)))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """Returns a dataset of one element."""
        element = builder_elements.copied(builder_elements.as_element(tensors))
        make = functools.partial(_make_listed, [element])
        return Dataset(builder_steps.in_memory("from_tensors", make, 1, has_examples=False))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Returns one element per row of a structure of arrays; the arrays are not copied."""
        arrays = builder_checks.sliceable(tensors)
        length = len(jax.tree.leaves(arrays)[0])
        return Dataset(
            builder_steps.in_memory("from_tensor_slices", lambda: nodes.Rows(arrays), length)
        )

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        *,
        output_signature: Any = None,
        args: Sequence[Any] = (),
    ) -> Dataset:
        """Returns what a generator yields; a saved position is found again by counting.

        Args:
          generator: Called with `args` for each pass.
          output_signature: A structure of `rx.TensorSpec` to check and convert elements.
          args: Its arguments.
        """
        make = builder_checks.Yielded(generator, tuple(args), output_signature)
        return Dataset(
            Plan(
                "from_generator",
                lambda epoch: streams.Stream(lambda: streams.Generated(make)),
                False,
                UNKNOWN_CARDINALITY,
                spec=output_signature,
            )
        )

    @staticmethod
    def list_files(
        file_pattern: str | Sequence[str], shuffle: bool | None = None, seed: int | None = None
    ) -> Dataset:
        """Returns the names of the files that match, in random order unless told otherwise."""
        patterns = [file_pattern] if isinstance(file_pattern, str) else list(file_pattern)
        found = sorted({name for pattern in patterns for name in glob.glob(os.fspath(pattern))})
        if not found:
            raise errors.NotFoundError(
                errors.message(
                    f"A file must match {', '.join(map(repr, patterns))}",
                    "none does",
                    "Correct the pattern.",
                )
            )
        dataset = Dataset(_names(tuple(found)))
        if shuffle is None or shuffle:
            return dataset.shuffle(len(found), seed)
        return dataset

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Returns elements side by side, in the structure in which the datasets are given."""
        given = datasets[0] if len(datasets) == 1 else datasets
        found, structure = jax.tree.flatten(given, is_leaf=lambda x: isinstance(x, Dataset))
        for dataset in found:
            _require_dataset("zip", dataset)
        return Dataset(builder_steps.zip_plans([d._plan for d in found], structure))

    # Steps.

    def _then(self, step: Callable[[Plan], Plan]) -> Dataset:
        return Dataset(follow(step, self._plan))

    def map(self, map_func: Callable[..., Any], num_parallel_calls: int | None = None) -> Dataset:
        """Applies a function to each element; the parts of a tuple are its arguments.

        Args:
          map_func: Returns the new element.
          num_parallel_calls: How many threads call it, where elements can be reached in any
            order; `AUTOTUNE` for a few. Without it, the reader calls it.
        """
        threads = 0 if num_parallel_calls is None else num_parallel_calls
        if threads != AUTOTUNE:
            threads = whole_number("num_parallel_calls", threads, 0)
        return self._then(lambda plan: builder_steps.map_elements(plan, map_func, threads))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements of which `predicate` is true."""
        return self._then(lambda plan: builder_steps.filter_elements(plan, predicate))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
    ) -> Dataset:
        """Changes the order.

        Where elements can be reached in any order, all of them are shuffled, whatever the
        buffer size (only 1 leaves the order as it is). Streams are shuffled by a buffer.

        Args:
          buffer_size: How many elements of a stream are drawn from.
          seed: Decides the order; without it, a number of the operating system does.
          reshuffle_each_iteration: Whether each iteration and each pass of `repeat` has an
            order of its own.
        """
        size = whole_number("buffer_size", buffer_size, 1)
        own = Seed() if seed is None else whole_number("seed", seed, 0)
        if size == 1:
            return self
        is_new = reshuffle_each_iteration is not False
        return self._then(lambda plan: builder_steps.shuffle(plan, size, own, is_new))

    def repeat(self, count: int | None = None) -> Dataset:
        """Goes through the elements `count` times; without end for None or -1."""
        times = -1 if count is None else whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.repeat(plan, times))

    def take(self, count: int) -> Dataset:
        """Keeps the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.take(plan, number))

    def skip(self, count: int) -> Dataset:
        """Leaves out the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.skip(plan, number))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps the elements `index`, `index + num_shards`, and so on."""
        num, own = _shard_arguments(num_shards, index)
        return self._then(lambda plan: builder_steps.shard(plan, num, own))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stacks `batch_size` elements; the last batch may be smaller, or is dropped."""
        size = whole_number("batch_size", batch_size, 1)
        return self._then(lambda plan: builder_steps.batch(plan, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Stacks elements of different sizes, filled up at the end of each dimension.

        Args:
          batch_size: How many elements are stacked.
          padded_shapes: A structure of shapes; None in a shape, or no shapes at all, stand
            for the largest size in the batch.
          padding_values: What to fill up with, one number or a structure of them; 0 if None.
          drop_remainder: Whether a smaller last batch is left out.
        """
        size = whole_number("batch_size", batch_size, 1)
        join = builder_elements.padded_stack(padded_shapes, padding_values)
        return self._then(lambda plan: builder_steps.batch(plan, size, bool(drop_remainder), join))

    def unbatch(self) -> Dataset:
        """Makes an element of each row of each element."""
        return self._then(builder_steps.unbatch)

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Makes a dataset of each element, and goes through them one after the other."""
        return self._interleaved("flat_map", map_func, 1, 1)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
    ) -> Dataset:
        """Makes a dataset of each element, and takes turns between `cycle_length` of them.

        Args:
          map_func: Returns a dataset.
          cycle_length: How many datasets are open at a time; 4 without it.
          block_length: How many elements each gives in its turn.
          num_parallel_calls: Accepted for portability; datasets are read in turn.
        """
        del num_parallel_calls
        cycle = 4 if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = whole_number("cycle_length", cycle, 1)
        block = whole_number("block_length", block_length, 1)
        return self._interleaved("interleave", map_func, cycle, block)

    def _interleaved(self, name: str, map_func: Any, cycle: int, block: int) -> Dataset:
        fn = UserFunction(map_func, name, f"{self._plan.name} > {name}")

        def step(plan: Plan, num_shards: int = 1, index: int = 0) -> Plan:
            def open_element(element: Any, epoch: Epoch) -> Any:
                inner = _require_dataset(name, fn(element))
                if num_shards > 1:
                    inner = inner.shard_records(num_shards, index)
                return inner._plan.open(epoch)

            return builder_steps.interleave(plan, name, open_element, cycle, block, step)

        return self._then(step)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Appends the elements of another dataset."""
        other = _require_dataset("concatenate", dataset)
        return Dataset(builder_steps.concatenate([self._plan, other._plan]))

    def enumerate(self, start: int = 0) -> Dataset:
        """Makes each element a pair of its number and itself."""
        return self._then(lambda plan: builder_steps.number(plan, start))

    def cache(self) -> Dataset:
        """Keeps the elements in memory once a pass has reached the end."""
        return self._then(builder_steps.cache)

    def prefetch(self, buffer_size: int = AUTOTUNE) -> Dataset:
        """Reads ahead in a thread; `AUTOTUNE` is 2 elements. In-memory data needs none."""
        size = whole_number("buffer_size", buffer_size, AUTOTUNE)
        return self._then(lambda plan: builder_steps.prefetch(plan, size))

    def with_options(self, options: Options) -> Dataset:
        """Returns the dataset with options on top of those that it has."""

        def step(plan: Plan) -> Plan:
            return dataclasses.replace(plan, options=plan.options.merge(options))

        return self._then(step)

    def options(self) -> Options:
        """Returns the options of the dataset."""
        return Options().merge(self._plan.options)

    # Other files, and parts of them.

    def with_files(self, files: Sequence[str]) -> Dataset:
        """Returns the same steps over other files."""
        plan = over_files(self._plan, tuple(files))
        if plan is None:
            raise errors.NotFoundError(
                errors.message(
                    "`with_files` needs a dataset that starts from files",
                    f"this one is {self._plan.name!r}",
                    "Start from a reader such as rx.data.TextLineDataset.",
                )
            )
        return Dataset(plan)

    def shard_records(self, num_shards: int, index: int) -> Dataset:
        """Returns a part: of the records of each file, or of the elements before prefetching."""
        num, own = _shard_arguments(num_shards, index)
        plan = over_records(self._plan, num, own)
        if plan is not None:
            return Dataset(plan)
        if self._plan.is_prefetch and self._plan.origin is not None:
            step, before = self._plan.origin
            return Dataset(before).shard_records(num, own)._then(step)
        return self.shard(num, own)


def _make_counting(numbers: range, dtype: Any) -> Any:
    return nodes.Counting(numbers, dtype)


def _make_listed(elements: Sequence[Any]) -> Any:
    return nodes.Listed(elements)


def _names(files: tuple[str, ...]) -> Plan:
    """Returns the plan of a dataset of file names."""
    plan = builder_steps.in_memory("list_files", lambda: nodes.Listed(files), len(files))
    return dataclasses.replace(
        plan,
        files=files,
        with_files=_names,
        shard_records=lambda num, index: follow(
            lambda names: builder_steps.shard(names, num, index), _names(files)
        ),
    )


def _shard_arguments(num_shards: int, index: int) -> tuple[int, int]:
    num = whole_number("num_shards", num_shards, 1)
    own = whole_number("index", index, 0)
    if own >= num:
        raise errors.InvalidArgumentError(
            errors.message(
                f"`index` must be below the number of shards, {num}",
                f"it is {own}",
                "Shards are numbered from 0.",
            )
        )
    return num, own


def _require_dataset(step: str, value: Any) -> Dataset:
    if isinstance(value, Dataset):
        return value
    raise errors.ArgumentTypeError(
        errors.message(
            f"`{step}` needs datasets of rx.data",
            f"{type(value).__name__} was given",
            "Make one with rx.data.Dataset.from_tensor_slices or another source.",
        )
    )
