"""`Dataset`: pipelines with the names of tf.data, run by Grain."""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from typing_extensions import override

from replicax.foundation import errors, lazy
from replicax.input import builder_checks, builder_elements, builder_steps, stored_elements
from replicax.input import builder_resampling as resampling
from replicax.input import builder_storing as storing
from replicax.input.builder_checks import UserFunction, whole_number
from replicax.input.builder_grouping import GroupingSteps
from replicax.input.builder_plan import (
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
from replicax.input.builder_reading import require_dataset
from replicax.input.builder_storing import StoringSteps
from replicax.input.options import Options

if TYPE_CHECKING:
    from replicax.input import grain_nodes as nodes
    from replicax.input import grain_nodes_streams as streams
else:
    nodes = lazy.module("replicax.input.grain_nodes")
    streams = lazy.module("replicax.input.grain_nodes_streams")


class Dataset(GroupingSteps, StoringSteps):
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
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """Returns the numbers of a Python `range`, as int64."""
        numbers = range(*args)
        facts = numbers.start, numbers.step, len(numbers), output_type
        make = functools.partial(_make_counting, *facts)
        return Dataset(builder_steps.in_memory("range", make, len(numbers), details=facts))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """Returns a dataset of one element."""
        element = builder_elements.copied(builder_elements.as_element(tensors))
        make = functools.partial(_make_listed, [element])
        digest = functools.partial(stored_elements.digest, element)
        return Dataset(
            builder_steps.in_memory("from_tensors", make, 1, has_examples=False, details=(digest,))
        )

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """Returns one element per row of a structure of arrays; the arrays are not copied."""
        arrays = builder_checks.sliceable(tensors)
        length = len(jax.tree.leaves(arrays)[0])
        digest = functools.partial(stored_elements.digest, arrays)
        return Dataset(
            builder_steps.in_memory(
                "from_tensor_slices", lambda: nodes.Rows(arrays), length, details=(digest,)
            )
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
        file_pattern: str | Sequence[str],
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns the names of the files that match, in random order unless told otherwise."""
        patterns = [file_pattern] if isinstance(file_pattern, str) else list(file_pattern)
        found = sorted({name for pattern in patterns for name in glob.glob(os.fspath(pattern))})
        if not found:
            raise errors.NotFoundError(
                f"A file must match {', '.join(map(repr, patterns))}",
                "none does",
                "Correct the pattern.",
            )
        dataset = Dataset(_names(tuple(found)))
        if shuffle is None or shuffle:
            return dataset.shuffle(len(found), seed)
        return dataset

    @staticmethod
    def zip(*datasets: Any, name: str | None = None) -> Dataset:
        """Returns elements side by side, in the structure in which the datasets are given."""
        given = datasets[0] if len(datasets) == 1 else datasets
        found, structure = jax.tree.flatten(given, is_leaf=lambda x: isinstance(x, Dataset))
        for dataset in found:
            require_dataset("zip", dataset)
        return Dataset(builder_steps.zip_plans([d._plan for d in found], structure))

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        element_spec: Any = None,
        compression: str | None = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """Returns the dataset that `save` wrote into a directory, with random access.

        Args:
          path: The directory.
          element_spec: What elements must look like; the directory knows it.
          compression: Accepted for portability; the files know it.
          reader_func: Makes a dataset of a dataset of the shards, which take turns if None.
        """
        del compression
        return storing.load(Dataset, path, element_spec, reader_func)  # type: ignore[return-value]

    @staticmethod
    def counter(
        start: float = 0, step: float = 1, dtype: Any = np.int64, name: str | None = None
    ) -> Dataset:
        """Returns `start`, `start + step`, and so on without end.

        >>> [int(x) for x in Dataset.counter(2, 5).take(3)]
        [2, 7, 12]
        """
        facts = start, step, sys.maxsize, dtype
        make = functools.partial(_make_counting, *facts)
        return Dataset(
            builder_steps.in_memory("counter", make, INFINITE_CARDINALITY, details=facts)
        )

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Returns random numbers from 0 to 2**32 - 1, as int64, without end.

        Args:
          seed: Decides the numbers; without it, a number of the operating system does.
          rerandomize_each_iteration: Whether each iteration and each pass of `repeat` has
            numbers of its own; otherwise all have the same.
          name: Accepted for portability.
        """
        own = Seed() if seed is None else whole_number("seed", seed, 0)
        return Dataset(builder_steps.random_numbers(own, bool(rerandomize_each_iteration)))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Takes each element from the dataset whose number `choice_dataset` gives.

        Args:
          datasets: Datasets with elements of one structure.
          choice_dataset: Gives whole numbers, which count `datasets` from 0.
          stop_on_empty_dataset: Whether it all ends when the chosen dataset has ended;
            otherwise such a choice is passed over.

        >>> evens, odds = Dataset.range(0, 6, 2), Dataset.range(1, 6, 2)
        >>> choices = Dataset.range(2).repeat()
        >>> [int(x) for x in Dataset.choose_from_datasets([evens, odds], choices)]
        [0, 1, 2, 3, 4, 5]
        """
        found = _require_datasets("choose_from_datasets", datasets)
        choices = require_dataset("choose_from_datasets", choice_dataset)._plan
        if choices.is_quick and choices.cardinality:
            # In memory: a wrong type shows here, not at the first element.
            builder_checks.choice(choices.first_element(), len(found))
        plans = [d._plan for d in found]
        return Dataset(builder_steps.choose(choices, plans, stop_on_empty_dataset))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Any = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Takes each element from a dataset that is drawn at random.

        Args:
          datasets: Datasets with elements of one structure.
          weights: How often each is drawn; all alike if None. Weights that change are a
            dataset of vectors. What weighs 0.0 is left out.
          seed: Decides the order; without it, a number of the operating system does.
          stop_on_empty_dataset: Whether it all ends when a drawn dataset has ended; otherwise
            the others go on.
          rerandomize_each_iteration: Whether each iteration draws anew.
        """
        found = _require_datasets("sample_from_datasets", datasets)
        numbers = Dataset.random(seed, rerandomize_each_iteration)
        if isinstance(weights, Dataset):
            drawn = Dataset.zip((weights, numbers)).map(resampling.draw)
        else:
            given = resampling.checked_weights(weights, len(found))
            pairs = [(d, w) for d, w in zip(found, given, strict=True) if w > 0]
            if len(pairs) < 2:
                return pairs[0][0] if pairs else found[0].take(0)
            found, kept = [d for d, _ in pairs], [w for _, w in pairs]
            drawn = numbers.map(functools.partial(resampling.draw, kept))
        plans = [d._plan for d in found]
        return Dataset(builder_steps.choose(drawn._plan, plans, stop_on_empty_dataset))

    # Steps.

    @override
    def _of(self, plan: Plan) -> Dataset:
        return Dataset(plan)

    def _then(self, step: Callable[[Plan], Plan]) -> Dataset:
        return Dataset(follow(step, self._plan))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Returns what a function makes of this dataset.

        >>> [int(x) for x in Dataset.range(9).apply(lambda d: d.filter(lambda x: x < 3))]
        [0, 1, 2]
        """
        return require_dataset("apply", transformation_func(self))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Applies a function to each element; the parts of a tuple are its arguments.

        Args:
          map_func: Returns the new element.
          num_parallel_calls: How many threads call it, where elements can be reached in any
            order; `AUTOTUNE` for a few. Without it, the reader calls it.
          deterministic: Accepted for portability; the order of elements is always kept.
          name: Accepted for portability.
        """
        threads = 0 if num_parallel_calls is None else num_parallel_calls
        if threads != AUTOTUNE:
            threads = whole_number("num_parallel_calls", threads, 0)
        return self._then(lambda plan: builder_steps.map_elements(plan, map_func, threads))

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keeps the elements of which `predicate` is true."""
        return self._then(lambda plan: builder_steps.filter_elements(plan, predicate))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """Keeps the elements before the first of which `predicate` is false."""
        return self._then(lambda plan: builder_steps.take_while(plan, predicate))

    def unique(self, name: str | None = None) -> Dataset:
        """Leaves out elements, integers or text, that have come before; remembers them all.

        >>> [int(x) for x in Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()]
        [1, 37, 2]
        """
        return self._then(builder_steps.unique)

    def scan(
        self, initial_state: Any, scan_func: Callable[..., Any], name: str | None = None
    ) -> Dataset:
        """Makes elements by a function that carries a state along; the state starts each pass.

        Args:
          initial_state: A structure of arrays.
          scan_func: Called with the state and an element; returns the new state, of the same
            structure and types, and the new element.
          name: Accepted for portability.

        >>> sums = Dataset.range(5).scan(np.int64(0), lambda total, x: (total + x, total + x))
        >>> [int(x) for x in sums]
        [0, 1, 3, 6, 10]
        """
        return self._then(lambda plan: builder_steps.scan(plan, initial_state, scan_func))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = True,
        name: str | None = None,
    ) -> Dataset:
        """Changes the order.

        Where elements can be reached in any order, all of them are shuffled, whatever the
        buffer size (only 1 leaves the order as it is). Streams are shuffled by a buffer.

        Args:
          buffer_size: How many elements of a stream are drawn from.
          seed: Decides the order; without it, a number of the operating system does.
          reshuffle_each_iteration: Whether each iteration and each pass of `repeat` has an
            order of its own.
          name: Accepted for portability.
        """
        size = whole_number("buffer_size", buffer_size, 1)
        own = Seed() if seed is None else whole_number("seed", seed, 0)
        if size == 1:
            return self
        is_new = reshuffle_each_iteration is not False
        return self._then(lambda plan: builder_steps.shuffle(plan, size, own, is_new))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """Goes through the elements `count` times; without end for None or -1."""
        times = -1 if count is None else whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.repeat(plan, times))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """Keeps the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.take(plan, number))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """Leaves out the first `count` elements; all of them for -1."""
        number = whole_number("count", count, -1)
        return self._then(lambda plan: builder_steps.skip(plan, number))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Keeps the elements `index`, `index + num_shards`, and so on."""
        num, own = _shard_arguments(num_shards, index)
        return self._then(lambda plan: builder_steps.shard(plan, num, own))

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
        return self._then(lambda plan: builder_steps.batch(plan, size, bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Stacks elements of different sizes, filled up at the end of each dimension.

        Args:
          batch_size: How many elements are stacked.
          padded_shapes: A structure of shapes; None in a shape, or no shapes at all, stand
            for the largest size in the batch.
          padding_values: What to fill up with, one number or a structure of them; 0 if None.
          drop_remainder: Whether a smaller last batch is left out.
          name: Accepted for portability.
        """
        size = whole_number("batch_size", batch_size, 1)
        join = builder_elements.padded_stack(padded_shapes, padding_values)
        return self._then(lambda plan: builder_steps.batch(plan, size, bool(drop_remainder), join))

    def unbatch(self, name: str | None = None) -> Dataset:
        """Makes an element of each row of each element."""
        return self._then(builder_steps.unbatch)

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Any,
        initial_dist: Any = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Leaves out, or repeats, elements so that classes come as often as they should.

        Elements become pairs of their class and themselves.

        Args:
          class_func: Returns the class of an element, counted from 0.
          target_dist: The share that each class should have.
          initial_dist: The share that it has; estimated while reading if None.
          seed: Decides what is left out; without it, a number of the operating system does.
          name: Accepted for portability.
        """
        return resampling.resample(self, class_func, target_dist, initial_dist, seed)

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """Makes a dataset of each element, and goes through them one after the other."""
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
        """Makes a dataset of each element, and takes turns between `cycle_length` of them.

        Args:
          map_func: Returns a dataset.
          cycle_length: How many datasets are open at a time; 4 without it.
          block_length: How many elements each gives in its turn.
          num_parallel_calls: Accepted for portability; datasets are read in turn.
          deterministic: Accepted for portability; so is the order.
          name: Accepted for portability.
        """
        cycle = 4 if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = whole_number("cycle_length", cycle, 1)
        block = whole_number("block_length", block_length, 1)
        return self._interleaved("interleave", map_func, cycle, block)

    def _interleaved(self, name: str, map_func: Any, cycle: int, block: int) -> Dataset:
        fn = UserFunction(map_func, name, f"{self._plan.name} > {name}")

        def step(plan: Plan, num_shards: int = 1, index: int = 0) -> Plan:
            def open_element(element: Any, epoch: Epoch) -> Any:
                inner = require_dataset(name, fn(element))
                if num_shards > 1:
                    inner = inner.shard_records(num_shards, index)
                return inner._plan.open(epoch)

            return builder_steps.interleave(
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
        """Appends the elements of another dataset."""
        other = require_dataset("concatenate", dataset)
        return Dataset(builder_steps.concatenate([self._plan, other._plan]))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Makes each element a pair of its number and itself."""
        return self._then(lambda plan: builder_steps.number(plan, start))

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """Keeps the elements once a pass has reached the end: in memory, or in a directory."""
        if filename:
            return self.snapshot(filename, compression=None)
        return self._then(builder_steps.cache)

    def prefetch(self, buffer_size: int = AUTOTUNE, name: str | None = None) -> Dataset:
        """Reads ahead in a thread; `AUTOTUNE` is 2 elements. In-memory data needs none."""
        size = whole_number("buffer_size", buffer_size, AUTOTUNE)
        return self._then(lambda plan: builder_steps.prefetch(plan, size))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
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
                "`with_files` needs a dataset that starts from files",
                f"this one is {self._plan.name!r}",
                "Start from a reader such as rx.data.TextLineDataset.",
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


def _make_counting(start: float, step: float, length: int, dtype: Any) -> Any:
    return nodes.Counting(start, step, length, dtype)


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
            f"`index` must be below the number of shards, {num}",
            f"it is {own}",
            "Shards are numbered from 0.",
        )
    return num, own


def _require_datasets(step: str, values: Any) -> list[Dataset]:
    datasets = [require_dataset(step, value) for value in values]
    if not datasets:
        raise errors.InvalidArgumentError(
            f"`{step}` needs datasets to choose from",
            "the list is empty",
            "Pass at least one dataset.",
        )
    return datasets
