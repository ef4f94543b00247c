"""`tf.data.experimental`: older names of what datasets have, as transformations for `apply`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.input.dataset.plan import AUTOTUNE as AUTOTUNE
from replicax.input.dataset.plan import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from replicax.input.dataset.plan import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from replicax.tf import namespaces
from replicax.tf.arguments import AnyDataset, PathValue, Structure, Value
from replicax.tf.async_execution import Optional as Optional
from replicax.tf.data.dataset import Count, Dataset
from replicax.tf.data.host_elements import as_element
from replicax.tf.data.options import AutoShardPolicy as AutoShardPolicy
from replicax.tf.data.options import AutotuneAlgorithm as AutotuneAlgorithm
from replicax.tf.data.options import AutotuneOptions as AutotuneOptions
from replicax.tf.data.options import DistributeOptions as DistributeOptions
from replicax.tf.data.options import ExternalStatePolicy as ExternalStatePolicy
from replicax.tf.data.options import OptimizationOptions as OptimizationOptions
from replicax.tf.data.options import ThreadingOptions as ThreadingOptions
from replicax.tf.data.readers import TFRecordDataset
from replicax.tf.io.parsing import parse_example

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "AutotuneAlgorithm",
    "AutotuneOptions",
    "Counter",
    "DistributeOptions",
    "ExternalStatePolicy",
    "OptimizationOptions",
    "Optional",
    "RandomDataset",
    "ThreadingOptions",
    "assert_cardinality",
    "bucket_by_sequence_length",
    "cardinality",
    "choose_from_datasets",
    "copy_to_device",
    "enable_debug_mode",
    "enumerate_dataset",
    "from_list",
    "get_next_as_optional",
    "get_single_element",
    "get_structure",
    "group_by_window",
    "ignore_errors",
    "load",
    "make_batched_features_dataset",
    "map_and_batch",
    "parallel_interleave",
    "parse_example_dataset",
    "prefetch_to_device",
    "rejection_resample",
    "sample_from_datasets",
    "save",
    "scan",
    "shuffle_and_repeat",
    "snapshot",
    "take_while",
    "unbatch",
    "unique",
]

Transformation = Callable[[Any], Any]

choose_from_datasets = Dataset.choose_from_datasets
sample_from_datasets = Dataset.sample_from_datasets
Counter = Dataset.counter
RandomDataset = Dataset.random
load = Dataset.load


def _method(name: str) -> Callable[..., Transformation]:
    """Returns the function that makes a transformation of a method of datasets."""

    def make(*args: Any, **kwargs: Any) -> Transformation:
        return lambda dataset: getattr(dataset, name)(*args, **kwargs)

    make.__name__ = name
    make.__doc__ = f"Returns a transformation for `dataset.apply`; the method `{name}` does it."
    return make


bucket_by_sequence_length = _method("bucket_by_sequence_length")
enumerate_dataset = _method("enumerate")
group_by_window = _method("group_by_window")
ignore_errors = _method("ignore_errors")
rejection_resample = _method("rejection_resample")
scan = _method("scan")
snapshot = _method("snapshot")
take_while = _method("take_while")
unbatch = _method("unbatch")
unique = _method("unique")
prefetch_to_device = _method("prefetch_to_device")


def copy_to_device(target_device: object, source_device: str = "/cpu:0") -> Transformation:
    """Returns a transformation that changes nothing: arrays are placed when they are used."""
    del target_device, source_device
    return lambda dataset: dataset


def assert_cardinality(expected_cardinality: int) -> Transformation:
    """Returns a transformation that sets the number of elements, and checks it while reading.

    >>> made = Dataset.from_generator(lambda: iter([1, 2]), output_types="int32")
    >>> made.apply(assert_cardinality(2)).cardinality()
    2
    """
    expected = int(expected_cardinality)

    def apply(dataset: AnyDataset) -> Any:
        known = dataset.cardinality()
        if known >= 0 and known != expected:
            raise _wrong_count(expected, known)
        counted = dataset.enumerate().map(_check_number(expected))
        return Dataset(dataclasses.replace(counted._plan, cardinality=expected))

    return apply


def _check_number(expected: int) -> Callable[[Any, Any], Any]:
    def check(number: Value, *element: Any) -> Any:
        if expected >= 0 and int(number) >= expected:
            raise _wrong_count(expected, int(number) + 1)
        return element[0] if len(element) == 1 else element

    return check


def _wrong_count(expected: int, found: int) -> errors.OutOfRangeError:
    return errors.OutOfRangeError(
        f"The dataset must have {expected} elements",
        f"it has {found}{' or more' if found > expected else ''}",
        "Correct the number of `assert_cardinality`.",
    )


def cardinality(dataset: AnyDataset) -> Count:
    """Returns the number of elements, INFINITE_CARDINALITY or UNKNOWN_CARDINALITY.

    >>> cardinality(Dataset.range(3)).numpy()
    np.int64(3)
    """
    return Count(dataset.cardinality())


def get_single_element(dataset: AnyDataset) -> Any:
    """Returns the only element of a dataset."""
    return dataset.get_single_element()


def from_list(elements: AnyDataset, name: str | None = None) -> Any:
    """Returns a dataset of the elements of a list.

    >>> [x.numpy().tolist() for x in from_list([(1, 2), (3, 4)]).map(lambda a, b: a + b)]
    [3, 7]
    """
    del name
    found = [as_element(element) for element in elements]
    if not found:
        raise errors.InvalidArgumentError(
            "`from_list` needs elements", "the list is empty", "Pass at least one element."
        )
    columns = jax.tree.map(lambda *parts: np.stack(list(map(np.asarray, parts))), *found)
    return Dataset.from_tensor_slices(columns)


def get_structure(dataset_or_iterator: AnyDataset) -> Any:
    """Returns the spec of the elements.

    >>> get_structure(Dataset.range(3)).dtype
    tf.int64
    """
    return dataset_or_iterator.element_spec


def get_next_as_optional(iterator: AnyDataset) -> Optional:
    """Returns the next element of an iterator; an empty `Optional` at its end.

    >>> iterator = iter(Dataset.range(1))
    >>> [get_next_as_optional(iterator).has_value() for _ in range(2)]
    [True, False]
    """
    try:
        return Optional.from_value(next(iterator))
    except StopIteration:
        return Optional.empty(iterator.element_spec)


def parse_example_dataset(
    features: Structure, num_parallel_calls: int = 1, deterministic: bool | None = None
) -> Transformation:
    """Returns a transformation that parses batches of serialized `Example`s."""
    return lambda dataset: dataset.map(
        lambda serialized: parse_example(serialized, features), num_parallel_calls, deterministic
    )


def save(
    dataset: AnyDataset,
    path: PathValue,
    compression: str | None = None,
    shard_func: Callable[..., Any] | None = None,
) -> None:
    """Writes all elements into a directory, from which `load` reads them."""
    dataset.save(path, compression, shard_func)


def enable_debug_mode() -> None:
    """Accepts the call: functions of datasets run as Python.

    >>> enable_debug_mode()
    """


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Transformation:
    """Returns a transformation that maps, then batches.

    >>> made = Dataset.range(4).apply(map_and_batch(lambda x: x + 1, 2))
    >>> [x.numpy().tolist() for x in made]
    [[1, 2], [3, 4]]
    """
    del num_parallel_batches
    return lambda dataset: dataset.map(map_func, num_parallel_calls).batch(
        batch_size, drop_remainder
    )


def shuffle_and_repeat(
    buffer_size: int, count: int | None = None, seed: int | None = None
) -> Transformation:
    """Returns a transformation that shuffles, then repeats."""
    return lambda dataset: dataset.shuffle(buffer_size, seed).repeat(count)


def parallel_interleave(
    map_func: Callable[..., Any],
    cycle_length: int,
    block_length: int = 1,
    sloppy: bool = False,
    buffer_output_elements: int | None = None,
    prefetch_input_elements: int | None = None,
) -> Transformation:
    """Returns a transformation that interleaves; the order is always deterministic."""
    del sloppy, buffer_output_elements, prefetch_input_elements
    return lambda dataset: dataset.interleave(map_func, cycle_length, block_length)


def make_batched_features_dataset(
    file_pattern: PathValue,
    batch_size: int,
    features: Structure,
    reader: Value = None,
    label_key: str | None = None,
    reader_args: Value = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    reader_num_threads: int | None = None,
    parser_num_threads: int | None = None,
    sloppy_ordering: bool = False,
    drop_final_batch: bool = False,
) -> Any:
    """Returns batches of parsed features of TFRecord files."""
    del reader_num_threads, parser_num_threads, sloppy_ordering
    files = Dataset.list_files(file_pattern, shuffle, shuffle_seed)
    make = reader or TFRecordDataset
    dataset = files.interleave(lambda name: make(name, *(reader_args or ())), 1)
    if shuffle:
        dataset = dataset.shuffle(shuffle_buffer_size, shuffle_seed)
    dataset = dataset.repeat(num_epochs).batch(batch_size, drop_final_batch or num_epochs is None)

    def parse(serialized: Value) -> Any:
        found = parse_example(serialized, features)
        return found if label_key is None else (found, found.pop(label_key))

    return dataset.map(parse).prefetch(prefetch_buffer_size or AUTOTUNE)


__getattr__ = namespaces.refusing(__name__)
