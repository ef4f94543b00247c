"""Pipelines that tf.data and rx.data build with the same calls, and the orders tf.data gives.

Run this file with an interpreter that has TensorFlow to record `tf_data_orders.json` again:

    python tests/support/tf_data_orders.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_suffix(".json")

Numbers = Callable[..., Any]


def pipelines(dataset: Any, numbers: Numbers) -> dict[str, Any]:
    """Returns datasets by name.

    Args:
      dataset: The class `Dataset` of tf.data or of rx.data.
      numbers: Makes the dataset of a Python `range`, with or without random access.
    """
    return {
        **_element_steps(dataset, numbers),
        **_batch_steps(numbers),
        **_combining_steps(dataset, numbers),
        **_nested_steps(dataset, numbers),
        **_grouping_steps(numbers),
    }


def _element_steps(dataset: Any, numbers: Numbers) -> dict[str, Any]:
    return {
        "range": numbers(3, 20, 4),
        "range_down": numbers(5, 0, -2),
        "map": numbers(4).map(lambda x: x * x),
        "map_pairs": numbers(4).enumerate(5).map(lambda i, x: i * x),
        "filter": numbers(10).filter(lambda x: x % 3 == 0),
        "filter_none": numbers(3).filter(lambda x: x > 5),
        "take": numbers(5).take(3),
        "take_none": numbers(5).take(0),
        "take_all": numbers(5).take(-1),
        "take_more": numbers(3).take(9),
        "skip": numbers(5).skip(3),
        "skip_all": numbers(5).skip(-1),
        "skip_more": numbers(3).skip(9),
        "take_skip": numbers(10).skip(2).take(5).skip(1),
        "shard_0": numbers(10).shard(4, 0),
        "shard_3": numbers(10).shard(4, 3),
        "shard_beyond": numbers(2).shard(4, 3),
        "take_while": numbers(9).take_while(lambda x: x < 4),
        "enumerate": numbers(3).enumerate(),
        "enumerate_from": numbers(3).enumerate(start=7),
        "repeat": numbers(3).repeat(3),
        "repeat_none": numbers(3).repeat(0),
        "repeat_empty": numbers(0).repeat(),
        "repeat_endless": numbers(3).repeat().take(8),
        "repeat_repeat": numbers(2).repeat(2).skip(1).repeat(2),
        "enumerate_repeat": numbers(2).enumerate().repeat(2),
        "repeat_enumerate": numbers(2).repeat(2).enumerate(),
        "cache": numbers(4).map(lambda x: x + 1).cache().repeat(2),
        "prefetch": numbers(5).prefetch(2),
        "shuffle_of_one": numbers(5).shuffle(1),
        "unique": numbers(9).map(lambda x: x % 4).unique(),
        "scan": numbers(5).scan(
            dataset.range(1).get_single_element(), lambda total, x: (total + x, total)
        ),
    }


def _batch_steps(numbers: Numbers) -> dict[str, Any]:
    return {
        "batch": numbers(7).batch(3),
        "batch_dropping": numbers(7).batch(3, drop_remainder=True),
        "batch_exact": numbers(6).batch(3),
        "batch_large": numbers(3).batch(5),
        "batch_large_dropping": numbers(3).batch(5, drop_remainder=True),
        "batch_batch": numbers(8).batch(2).batch(3),
        "batch_pairs": numbers(5).enumerate().batch(2),
        "batch_repeat": numbers(5).batch(2).repeat(2),
        "repeat_batch": numbers(5).repeat(2).batch(3),
        "repeat_batch_dropping": numbers(5).repeat(2).batch(4, drop_remainder=True),
        "shard_batch": numbers(9).shard(2, 1).batch(3),
        "batch_shard": numbers(9).batch(2).shard(2, 1),
        "unbatch": numbers(7).batch(3).unbatch(),
        "unbatch_pairs": numbers(5).enumerate().batch(2).unbatch(),
        "unbatch_take": numbers(9).batch(4).unbatch().take(6),
        "rebatch": numbers(7).batch(3).rebatch(2),
        "rebatch_dropping": numbers(7).batch(3).rebatch(2, drop_remainder=True),
        "rebatch_sizes": numbers(9).batch(4).rebatch([2, 1]),
    }


def _combining_steps(dataset: Any, numbers: Numbers) -> dict[str, Any]:
    return {
        "concatenate": numbers(3).concatenate(numbers(5, 8)),
        "concatenate_empty": numbers(0).concatenate(numbers(2)).concatenate(numbers(0)),
        "concatenate_repeat": numbers(2).concatenate(numbers(9, 10)).repeat(2),
        "repeat_concatenate": numbers(2).repeat(2).concatenate(numbers(1)),
        "concatenate_batch": numbers(3).concatenate(numbers(5, 8)).batch(2),
        "batch_concatenate": numbers(3).batch(2).concatenate(numbers(5, 8).batch(2)),
        "zip": dataset.zip((numbers(4), numbers(10, 14))),
        "zip_shortest_first": dataset.zip((numbers(2), numbers(10, 15))),
        "zip_shortest_last": dataset.zip((numbers(5), numbers(10, 12))),
        "zip_empty": dataset.zip((numbers(5), numbers(0))),
        "zip_endless": dataset.zip((numbers(2).repeat(), numbers(5))),
        "zip_nested": dataset.zip((numbers(3), (numbers(4, 7), numbers(8, 12)))),
        "zip_repeat": dataset.zip((numbers(2), numbers(3))).repeat(2),
        "zip_batch": dataset.zip((numbers(5), numbers(10, 15))).batch(2),
        "choose": dataset.choose_from_datasets(
            [numbers(3), numbers(10, 12)], numbers(2).repeat(4), stop_on_empty_dataset=False
        ),
        "choose_stopping": dataset.choose_from_datasets(
            [numbers(3), numbers(10, 12)], numbers(2).repeat(4), stop_on_empty_dataset=True
        ),
    }


def _nested_steps(dataset: Any, numbers: Numbers) -> dict[str, Any]:
    def lengths(count: int) -> Any:
        """Elements 3, 0, 2, 1, …, which inner datasets have as their lengths."""
        return numbers(count).map(lambda x: (x * 5 + 3) % 4)

    def ten(x: Any) -> Any:
        return dataset.range(10 * x, 10 * x + x)

    # Elements of the lengths 1, 2, 3, …
    growing = numbers(5).flat_map(lambda x: dataset.range(10 * x, 11 * x + 1).batch(9))
    cases = {
        "padded_batch": growing.padded_batch(2),
        "padded_batch_dropping": growing.padded_batch(2, drop_remainder=True),
        "padded_batch_shape": growing.padded_batch(3, padded_shapes=[6]),
        "padded_batch_unbatch": growing.padded_batch(3).unbatch(),
        "flat_map": numbers(4).flat_map(ten),
        "flat_map_batches": numbers(7).batch(3).flat_map(dataset.from_tensor_slices),
        "flat_map_flat_map": numbers(4).flat_map(ten).flat_map(lambda x: dataset.range(x % 3)),
        "flat_map_repeat": numbers(3).flat_map(ten).repeat(2),
        "flat_map_empty": numbers(3).flat_map(lambda x: dataset.range(0)),
    }
    for cycle in (1, 2, 3, 7):
        for block in (1, 2, 5):
            same = numbers(1, 5).interleave(
                lambda x: dataset.from_tensors(x).repeat(6), cycle_length=cycle, block_length=block
            )
            different = lengths(6).interleave(ten, cycle_length=cycle, block_length=block)
            cases[f"interleave_{cycle}_{block}"] = same
            cases[f"interleave_lengths_{cycle}_{block}"] = different
    return cases


def _grouping_steps(numbers: Numbers) -> dict[str, Any]:
    cases = {}
    for size, shift, stride, drops in (
        (3, None, 1, False),
        (3, None, 1, True),
        (2, 1, 1, False),
        (2, 1, 2, True),
        (2, 3, 1, False),
        (3, 1, 2, False),
    ):
        windows = numbers(8).window(size, shift=shift, stride=stride, drop_remainder=drops)
        batches = windows.flat_map(lambda window, size=size: window.batch(size))
        cases[f"window_{size}_{shift}_{stride}_{drops}"] = batches
    for size in (1, 2, 4):
        cases[f"group_by_window_{size}"] = numbers(11).group_by_window(
            key_func=lambda x: x % 3,
            reduce_func=lambda key, window, size=size: window.batch(size),
            window_size=size,
        )
    return cases


def plain(element: Any) -> Any:
    """Returns an element of NumPy arrays as JSON would: numbers and lists."""
    if isinstance(element, tuple | list):
        return [plain(part) for part in element]
    return element.tolist() if hasattr(element, "tolist") else element


def _record() -> None:
    import tensorflow as tf  # type: ignore[import-not-found]

    built = pipelines(tf.data.Dataset, tf.data.Dataset.range)
    orders = {name: [plain(e) for e in d.as_numpy_iterator()] for name, d in built.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(o)}" for name, o in orders.items())
    version = json.dumps(tf.__version__)
    RECORDED.write_text(f'{{\n"tensorflow": {version},\n"orders": {{\n{lines}\n}}\n}}\n')


if __name__ == "__main__":
    _record()
