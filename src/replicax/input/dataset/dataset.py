"""`Dataset`: pipelines with the names of tf.data, run by Grain."""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import ArrayLike
from typing_extensions import override

from replicax.foundation import errors, ordered_trees
from replicax.foundation.types import Tree
from replicax.input.dataset import elements, sampling, steps, stored_format, storing
from replicax.input.dataset.elements import UserFunction, whole_number
from replicax.input.dataset.grouping import GroupingSteps
from replicax.input.dataset.options import Options
from replicax.input.dataset.plan import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Epoch,
    Plan,
    Seed,
    follow,
    over_files,
    over_records,
)
from replicax.input.dataset.reading import require_dataset
from replicax.input.dataset.storing import StoringSteps
from replicax.input.nodes import indexed, streams

if TYPE_CHECKING:
    from replicax.input.dataset.plan import StreamIterator


class Dataset(GroupingSteps, StoringSteps):
    """A sequence of elements that can be iterated any number of times.

    Elements are structures (tuples, dicts, pytrees) of NumPy arrays; a list is an array. Each
    method returns a new dataset. `iter` returns an iterator whose position can be saved and
    restored: see `DatasetIterator`.

    >>> dataset = Dataset.range(5).map(lambda x: x * 10).batch(2)
    >>> [batch.tolist() for batch in dataset]
    [[0, 10], [20, 30], [40]]
    """

    # Sources.

    @staticmethod
    def range(*args: int, output_type: DTypeLike = np.int64, name: str | None = None) -> Dataset:
        """Returns the numbers of a Python `range`, as int64."""
        numbers = range(*args)
        facts = numbers.start, numbers.step, len(numbers), output_type
        return Dataset(_counting("range", facts, len(numbers)))

    @staticmethod
    def from_tensors(tensors: Tree, name: str | None = None) -> Dataset:
        """Returns a dataset of one element."""
        element = elements.copied(elements.as_element(tensors))
        digest = functools.partial(stored_format.digest, element)
        return Dataset(
            steps.in_memory(
                "from_tensors",
                lambda: indexed.Listed([element]),
                1,
                has_examples=False,
                details=(digest,),
            )
        )

    @staticmethod
    def from_tensor_slices(tensors: Tree, name: str | None = None) -> Dataset:
        """Returns one element per row of a structure of arrays; the arrays are not copied."""
        arrays = elements.sliceable(tensors)
        length = len(ordered_trees.leaves(arrays)[0])
        digest = functools.partial(stored_format.digest, arrays)
        return Dataset(
            steps.in_memory(
                "from_tensor_slices", lambda: indexed.Rows(arrays), length, details=(digest,)
            )
        )

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Tree]],
        *,
        output_signature: Tree = None,
        args: Sequence[Any] = (),
    ) -> Dataset:
        """Returns the elements of a generator; a saved position is restored by counting.

        Args:
          generator: Called with `args` for each pass.
          output_signature: A structure of `rx.TensorSpec` to check and convert elements.
          args: Its arguments.
        """
        make = elements.Yielded(generator, tuple(args), output_signature)
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
        file_pattern: str | Sequence[str],
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns the names of files that match, shuffled unless `shuffle` is False.

        Raises:
          NotFoundError: No file matches.
        """
        patterns = [file_pattern] if isinstance(file_pattern, str) else list(file_pattern)
        found = sorted({name for pattern in patterns for name in glob.glob(os.fspath(pattern))})
        if not found:
            raise errors.NotFoundError(
                f"At least one file must match {', '.join(map(repr, patterns))}",
                "none does",
                "Correct the pattern.",
            )
        dataset = Dataset(_names(tuple(found)))
        if shuffle is None or shuffle:
            return dataset.shuffle(len(found), seed)
        return dataset

    @staticmethod
    def zip(*datasets: Tree, name: str | None = None) -> Dataset:
        """Combines elements of several datasets, in the structure that holds the datasets."""
        given = datasets[0] if len(datasets) == 1 else datasets
        found, structure = ordered_trees.flatten(given, is_leaf=lambda x: isinstance(x, Dataset))
        for dataset in found:
            require_dataset("zip", dataset)
        return Dataset(steps.zip_plans([d._plan for d in found], structure))

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        element_spec: Tree = None,
        compression: str | None = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Returns the dataset that `save` wrote into a directory, with random access.

        Args:
          path: The directory.
          element_spec: The expected spec; stored in the directory too.
          compression: Accepted for portability; stored in the files.
          reader_func: Maps a dataset of the shards to a dataset; interleaves them if None.
        """
        del compression
        return storing.load(Dataset, path, element_spec, reader_func)

    @staticmethod
    def counter(
        start: float = 0, step: float = 1, dtype: DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """Returns `start`, `start + step`, and so on, endlessly.

        >>> [int(x) for x in Dataset.counter(2, 5).take(3)]
        [2, 7, 12]
        """
        facts = start, step, sys.maxsize, dtype
        return Dataset(_counting("counter", facts, INFINITE_CARDINALITY))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns random numbers from 0 to 2**32 - 1, as int64, endlessly.

        Args:
          seed: The seed; drawn from the operating system if None.
          rerandomize_each_iteration: Whether each iteration and each pass of `repeat` has other
            numbers.
          name: Accepted for portability.
        """
        own = Seed() if seed is None else whole_number("seed", seed, 0)
        return Dataset(steps.random_numbers(own, bool(rerandomize_each_iteration)))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Takes each element from the dataset whose index `choice_dataset` gives.

        Args:
          datasets: Datasets with elements of one structure.
          choice_dataset: A dataset of indices into `datasets`.
          stop_on_empty_dataset: Whether the end of a chosen dataset ends the iteration;
            otherwise choices of a dataset that has ended are skipped.

        Raises:
          InvalidArgumentError: There are no datasets to choose from.

        >>> evens, odds = Dataset.range(0, 6, 2), Dataset.range(1, 6, 2)
        >>> choices = Dataset.range(2).repeat()
        >>> [int(x) for x in Dataset.choose_from_datasets([evens, odds], choices)]
        [0, 1, 2, 3, 4, 5]
        """
        found = _require_datasets("choose_from_datasets", datasets)
        choices = require_dataset("choose_from_datasets", choice_dataset)._plan
        if choices.is_quick and choices.cardinality:
            # In memory: a wrong type is found here, not at the first element.
            elements.choice(choices.first_element(), len(found))
        plans = [d._plan for d in found]
        return Dataset(steps.choose(choices, plans, stop_on_empty_dataset))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: ArrayLike | Dataset | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Takes each element from a dataset that is drawn at random.

        Args:
          datasets: Datasets with elements of one structure.
          weights: The relative frequencies; equal if None. A dataset of vectors changes them
            per element. A dataset with weight 0.0 is excluded.
          seed: The seed of the draws; drawn from the operating system if None.
          stop_on_empty_dataset: Whether the end of a drawn dataset ends the iteration; otherwise
            the others continue.
          rerandomize_each_iteration: Whether each iteration has other draws.

        Raises:
          InvalidArgumentError: There are no datasets to choose from.
        """
        found = _require_datasets("sample_from_datasets", datasets)
        numbers = Dataset.random(seed, rerandomize_each_iteration)
        if isinstance(weights, Dataset):
            drawn = Dataset.zip((weights, numbers)).map(sampling.draw)
        else:
            given = sampling.checked_weights(weights, len(found))
            pairs = [(d, w) for d, w in zip(found, given, strict=True) if w > 0]
            if len(pairs) < 2:
                return pairs[0][0] if pairs else found[0].take(0)
            found, kept = [d for d, _ in pairs], [w for _, w in pairs]
            drawn = numbers.map(functools.partial(sampling.draw, kept))
        plans = [d._plan for d in found]
        return Dataset(steps.choose(drawn._plan, plans, stop_on_empty_dataset))

    # Steps.

    @override
    def _of(self, plan: Plan) -> Dataset:
        return Dataset(plan)

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Returns the result of a function of this dataset.

        >>> [int(x) for x in Dataset.range(9).apply(lambda d: d.filter(lambda x: x < 3))]
        [0, 1, 2]
        """
        return require_dataset("apply", transformation_func(self))

    def map(
        self,
        map_func: Callable[..., Tree],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Applies a function to each element; the parts of a tuple are its arguments.

        Args:
          map_func: Returns the new element.
          num_parallel_calls: The number of threads that call it, if elements have random
            access; `AUTOTUNE` for a few. Called in the reading thread if None.
          deterministic: Accepted for portability; the order of elements is always kept.
          name: Accepted for portability.
        """
        threads = 0 if num_parallel_calls is None else num_parallel_calls
        if threads != AUTOTUNE:
            threads = whole_number("num_parallel_calls", threads, 0)
        return self._then(lambda plan: steps.map_elements(plan, map_func, threads))

    def filter(self, predicate: Callable[..., Tree], name: str | None = None) -> Dataset:
        """Keeps the elements for which `predicate` is true."""
        return self._then(lambda plan: steps.filter_elements(plan, predicate))

    def take_while(self, predicate: Callable[..., Tree], name: str | None = None) -> Dataset:
        """Keeps the elements before the first for which `predicate` is false."""
        return self._then(lambda plan: steps.take_while(plan, predicate))

    def unique(self, name: str | None = None) -> Dataset:
        """Removes duplicates among elements that are integers or text; keeps all of them in memory.

        >>> [int(x) for x in Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
        [1, 37, 2]
        """
        return self._then(steps.unique)

    def scan(
        self, initial_state: Tree, scan_func: Callable[..., Tree], name: str | None = None
    ) -> Dataset:
        """Maps elements with a function that carries a state, reset in each pass.

        Args:
          initial_state: A structure of arrays.
          scan_func: Called with the state and an element; returns the new state, of the same
            structure and types, and the new element.
          name: Accepted for portability.

        >>> sums = Dataset.range(5).scan(np.int64(0), lambda total, x: (total + x, total + x))
        >>> [int(x) for x in sums]
        [0, 1, 3, 6, 10]
        """
        return self._then(lambda plan: steps.scan(plan, initial_state, scan_func))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset:
        """Shuffles elements.

        Elements with random access are all shuffled, whatever the buffer size (1 keeps their
        order). Streams are shuffled by a buffer.

        Args:
          buffer_size: The number of elements of a stream to draw from.
          seed: The seed; drawn from the operating system if None.
          reshuffle_each_iteration: Whether each iteration and each pass of `repeat` has another
            order.
          name: Accepted for portability.
        """
        size = whole_number("buffer_size", buffer_size, 1)
        own = Seed() if seed is None else whole_number("seed", seed, 0)
        if size == 1:
            return self
        is_new = reshuffle_each_iteration is not False
        return self._then(lambda plan: steps.shuffle(plan, size, own, is_new))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Repeats the elements `count` times; endlessly for None or -1."""
        times = -1 if count is None else whole_number("count", count, -1)
        return self._then(lambda plan: steps.repeat(plan, times))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Keeps the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: steps.take(plan, number))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Removes the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: steps.skip(plan, number))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Keeps the elements `index`, `index + num_shards`, and so on.

        Raises:
          InvalidArgumentError: `index` is not below the number of shards.
        """
        num, own = _shard_arguments(num_shards, index)
        return self._then(lambda plan: steps.shard(plan, num, own))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Stacks `batch_size` elements; the last batch may be smaller, or is dropped."""
        size = whole_number("batch_size", batch_size, 1)
        return self._then(lambda plan: steps.batch(plan, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Tree = None,
        padding_values: Tree = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Stacks elements of different sizes, padded at the end of each dimension.

        Args:
          batch_size: The number of elements of a batch.
          padded_shapes: A structure of shapes; None in a shape, or no shapes at all, is the
            largest size in the batch.
          padding_values: A padding value, or a structure of them; 0 if None.
          drop_remainder: Whether a smaller last batch is dropped.
          name: Accepted for portability.
        """
        size = whole_number("batch_size", batch_size, 1)
        join = elements.padded_stack(padded_shapes, padding_values)
        return self._then(lambda plan: steps.batch(plan, size, bool(drop_remainder), join))

    def unbatch(self, name: str | None = None) -> Dataset:
        """Makes an element of each row of each element."""
        return self._then(steps.unbatch)

    def rejection_resample(
        self,
        class_func: Callable[..., Tree],
        target_dist: ArrayLike,
        initial_dist: ArrayLike | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Resamples elements so that their classes follow `target_dist`.

        Elements become pairs of their class and themselves.

        Args:
          class_func: Returns the class of an element, counted from 0.
          target_dist: The target probability of each class.
          initial_dist: The probability of each class; estimated while reading if None.
          seed: The seed; drawn from the operating system if None.
          name: Accepted for portability.
        """
        return sampling.resample(self, class_func, target_dist, initial_dist, seed)

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """Maps each element to a dataset, and concatenates them."""
        return self._interleaved("flat_map", map_func, 1, 1)

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Maps each element to a dataset, and interleaves `cycle_length` of them.

        Args:
          map_func: Returns a dataset.
          cycle_length: The number of datasets that are open at a time; 4 if None.
          block_length: The number of consecutive elements of one dataset.
          num_parallel_calls: Accepted for portability; datasets are read in turn.
          deterministic: Accepted for portability; the order is always kept.
          name: Accepted for portability.
        """
        cycle = 4 if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = whole_number("cycle_length", cycle, 1)
        block = whole_number("block_length", block_length, 1)
        return self._interleaved("interleave", map_func, cycle, block)

    def _interleaved(
        self, name: str, map_func: Callable[..., Dataset], cycle: int, block: int
    ) -> Dataset:
        fn = UserFunction(map_func, name, f"{self._plan.name} > {name}")

        def step(plan: Plan, num_shards: int = 1, index: int = 0) -> Plan:
            def open_element(element: Tree, epoch: Epoch) -> StreamIterator:
                inner = require_dataset(name, fn(element))
                if num_shards > 1:
                    inner = inner.shard_records(num_shards, index)
                return inner._plan.open(epoch)

            return steps.interleave(
                plan,
                name,
                open_element,
                cycle,
                block,
                step,
                lambda element: require_dataset(name, fn(element)).element_spec,
            )

        return self._then(step)

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """Appends another dataset."""
        other = require_dataset("concatenate", dataset)
        return Dataset(steps.concatenate([self._plan, other._plan]))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs each element with its number."""
        return self._then(lambda plan: steps.number(plan, start))

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """Keeps the elements of the first complete pass, in memory or in a directory."""
        if filename:
            return self.snapshot(filename, compression=None)
        return self._then(steps.cache)

    def prefetch(self, buffer_size: int = AUTOTUNE, name: str | None = None) -> Dataset:
        """Reads ahead in a thread, except from memory; `AUTOTUNE` is 2 elements."""
        size = whole_number("buffer_size", buffer_size, AUTOTUNE)
        return self._then(lambda plan: steps.prefetch(plan, size))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """Returns the dataset with options merged into its own."""

        def step(plan: Plan) -> Plan:
            return dataclasses.replace(plan, options=plan.options.merge(options))

        return self._then(step)

    def options(self) -> Options:
        """Returns the options of the dataset."""
        return Options().merge(self._plan.options)

    # Shards.

    def with_files(self, files: Sequence[str]) -> Dataset:
        """Returns the same steps over other files.

        Raises:
          NotFoundError: The dataset does not start from files.
        """
        plan = over_files(self._plan, tuple(files))
        if plan is None:
            raise errors.NotFoundError(
                "`with_files` needs a dataset that starts from files",
                f"this one is {self._plan.name!r}",
                "Start from a reader such as rx.data.TextLineDataset.",
            )
        return Dataset(plan)

    def shard_records(self, num_shards: int, index: int) -> Dataset:
        """Returns a shard: of the records of each file, or of the elements before a prefetch.

        Raises:
          InvalidArgumentError: `index` is not below the number of shards.
        """
        num, own = _shard_arguments(num_shards, index)
        plan = over_records(self._plan, num, own)
        if plan is not None:
            return Dataset(plan)
        if self._plan.is_prefetch and self._plan.origin is not None:
            step, before = self._plan.origin
            return Dataset(before).shard_records(num, own)._then(step)
        return self.shard(num, own)


def _counting(name: str, facts: tuple[float, float, int, DTypeLike], cardinality: int) -> Plan:
    """Returns the plan of numbers with a start, a step, a length and a type."""
    return steps.in_memory(name, lambda: indexed.Counting(*facts), cardinality, details=facts)


def _names(files: tuple[str, ...]) -> Plan:
    """Returns the plan of a dataset of file names."""
    plan = steps.in_memory("list_files", lambda: indexed.Listed(files), len(files))
    return dataclasses.replace(
        plan,
        files=files,
        with_files=_names,
        shard_records=lambda num, index: follow(
            lambda names: steps.shard(names, num, index), _names(files)
        ),
    )


def _shard_arguments(num_shards: int, index: int) -> tuple[int, int]:
    num = whole_number("num_shards", num_shards, 1)
    own = whole_number("index", index, 0)
    if own >= num:
        raise errors.InvalidArgumentError(
            f"`index` must be below the number of shards, {num}",
            f"it is {own}",
            "Shards are numbered from 0.",
        )
    return num, own


def _require_datasets(step: str, values: Iterable[object]) -> list[Dataset]:
    datasets = [require_dataset(step, value) for value in values]
    if not datasets:
        raise errors.InvalidArgumentError(
            f"`{step}` needs datasets to choose from",
            "the list is empty",
            "Pass at least one dataset.",
        )
    return datasets


def seeds_of(dataset: Dataset) -> tuple[Seed, ...]:
    """Returns the seeds of a dataset that its user did not choose."""
    return dataset._plan.seeds
