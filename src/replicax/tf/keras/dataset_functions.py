"""Functions of Keras that make or take datasets, which get `replicax.tf` in place of TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from replicax.foundation import lazy
from replicax.foundation.replacements import Replace
from replicax.tf.data.dataset import Dataset
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import Value
from replicax.tf.tensor import Tensor

_tf = lazy.module("replicax.tf")


def install(replace: Replace) -> None:
    """Lets the functions of Keras that make or take datasets use those of `tf.data`."""
    for module in internals.DATASET_MODULES:
        replace(module, "tf", lambda _: _tf)
    replace(internals.DATASET_FUNCTIONS, "labels_to_dataset_tf", lambda _: _labels_to_dataset)
    replace(internals.DATASET_FUNCTIONS, "_split_dataset_tf", _split_dataset)
    replace(internals.DATASET_FUNCTIONS, "_infer_preferred_backend", lambda _: _backend_of)
    replace(internals.IMAGE_DATASETS, "_load_image_tf", _load_image)
    replace(keras.layers.Normalization, "adapt", _adapting)


def _adapting(original: Callable[..., None]) -> Callable[..., None]:
    """Lets `adapt` take a tensor, which it would take for an iterable of batches."""

    @functools.wraps(original)
    def adapt(self: Any, data: Value) -> None:
        original(self, data.numpy() if isinstance(data, Tensor) else data)

    return adapt


def _labels_to_dataset(labels: Value, label_mode: str | None, num_classes: int) -> Any:
    numbers = np.asarray(labels)
    if label_mode == "binary":
        numbers = numbers.astype(np.float32)[:, None]
    elif label_mode == "categorical":
        numbers = np.eye(num_classes, dtype=np.float32)[numbers]
    elif numbers.dtype == np.int64:
        numbers = numbers.astype(np.int32)
    return Dataset.from_tensor_slices(numbers)


def _backend_of(dataset: Value) -> str:
    return "torch" if type(dataset).__module__.startswith("torch.") else "tensorflow"


def _split_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    """Splits arrays, and datasets of `tf.data`, which Keras would ask TensorFlow about."""

    def split_dataset(
        dataset: Value,
        left_size: float | None = None,
        right_size: float | None = None,
        shuffle: bool = False,
        seed: int | None = None,
    ) -> Any:
        sizes = {"left_size": left_size, "right_size": right_size}
        if isinstance(dataset, Dataset):
            rows = list(dataset.as_numpy_iterator())
        elif isinstance(dataset, list | tuple):
            rows = list(zip(*map(np.asarray, dataset), strict=True))
        else:
            rows = list(np.asarray(dataset))
        left, right = internals.rescale_split_sizes(**sizes, num_rows=len(rows))
        order = np.arange(len(rows))
        if shuffle:
            np.random.default_rng(seed).shuffle(order)
        return tuple(
            Dataset.from_tensor_slices(_stacked([rows[i] for i in part]))
            for part in (order[:left], order[len(rows) - right :])
        )

    return split_dataset


def _stacked(rows: list[Any]) -> Any:
    return keras.tree.map_structure(lambda *leaves: np.stack(leaves), *rows)


def _load_image(original: Callable[..., Any]) -> Callable[..., Any]:
    """Cuts images to the wanted ratio itself: Keras would do so with its TensorFlow backend."""

    def load_image(
        path: Value,
        image_size: tuple[int, int],
        num_channels: int,
        interpolation: str,
        data_format: str,
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
    ) -> Any:
        options = (interpolation, data_format)
        if not crop_to_aspect_ratio or pad_to_aspect_ratio:
            found = (crop_to_aspect_ratio, pad_to_aspect_ratio)
            return original(path, image_size, num_channels, *options, *found)
        image = _tf.io.decode_image(
            _tf.io.read_file(path), channels=num_channels, expand_animations=False
        )
        image = _tf.image.resize(_centre(image, image_size), image_size, method=interpolation)
        return image if data_format == "channels_last" else _tf.transpose(image, (2, 0, 1))

    return load_image


def _centre(image: Any, size: tuple[int, int]) -> Any:
    """Returns the largest part around the centre that has the ratio of a size."""
    height, width = image.shape[0], image.shape[1]
    rows = min(height, int(width * size[0] / size[1]))
    columns = min(width, int(height * size[1] / size[0]))
    top, left = (height - rows) // 2, (width - columns) // 2
    return image[top : top + rows, left : left + columns]
