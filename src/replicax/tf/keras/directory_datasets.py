"""Datasets of the images below a directory, whose folders are classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replicax.foundation import errors, lazy
from replicax.tf.data.dataset import Dataset
from replicax.tf.keras.argument_types import Value

__all__ = ["image_dataset_from_directory"]

_io = lazy.module("replicax.tf.io")
_image = lazy.module("replicax.tf.image")
_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
_CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}


def image_dataset_from_directory(
    directory: str | os.PathLike[str],
    labels: Value = "inferred",
    label_mode: str | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: str = "rgb",
    batch_size: int | None = 32,
    image_size: tuple[int, int] = (256, 256),
    shuffle: bool = True,
    seed: int | None = None,
    validation_split: float | None = None,
    subset: str | None = None,
    interpolation: str = "bilinear",
    **unused: Any,
) -> Any:
    """Reads images, resized to one size, with the numbers of their folders.

    Args:
      directory: A directory with one folder per class; without labels, with images.
      labels: "inferred" from the folders, None, or a number for each file, in the order of paths.
      label_mode: "int", "categorical" or "binary"; None for images alone.
      class_names: The folders, in the order of their numbers; by default, sorted.
      color_mode: "rgb", "rgba" or "grayscale".
      batch_size: The images of a batch; None for single images.
      image_size: Height and width.
      shuffle: Whether the files are shuffled in each epoch.
      seed: The seed of the order, and of the split.
      validation_split: The share of the files that is left for validation.
      subset: "training" or "validation", with `validation_split`.
      interpolation: How images are resized.
      **unused: Accepted for portability, without effect.

    >>> import tempfile
    >>> from PIL import Image
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("cat", "dog"):
    ...     (folder / name).mkdir()
    ...     Image.new("RGB", (4, 4)).save(folder / name / "0.png")
    >>> dataset = image_dataset_from_directory(folder, image_size=(2, 2), shuffle=False)
    >>> dataset.class_names, [y.numpy().tolist() for x, y in dataset]
    (['cat', 'dog'], [[0, 1]])
    """
    del unused
    root = Path(directory)
    has_classes = labels == "inferred" and label_mode is not None
    names = sorted(p.name for p in root.iterdir() if p.is_dir()) if has_classes else []
    names = list(class_names) if class_names is not None else names
    if has_classes:
        found = [(path, number) for number, n in enumerate(names) for path in _images(root / n)]
    else:
        paths = _images(root)
        given = [0] * len(paths) if labels in (None, "inferred") else list(labels)
        found = list(zip(paths, given, strict=True))
    if not found:
        raise errors.NotFoundError(
            f"{root} must have images ({', '.join(_SUFFIXES)})",
            "none was found",
            "Check the directory; each class is a folder with its images.",
        )
    found = _part(found, seed, shuffle, validation_split, subset)
    files = np.asarray([str(path) for path, _ in found])
    numbers = np.asarray([number for _, number in found], np.int32)
    targets = _targets(numbers, label_mode, len(names))
    dataset: Any = Dataset.from_tensor_slices((files, targets))
    if shuffle:
        dataset = dataset.shuffle(len(files), seed=seed)

    def read(path: Value, target: Value) -> Any:
        image = _decoded(path, color_mode, image_size, interpolation)
        return image if label_mode is None or labels is None else (image, target)

    dataset = dataset.map(read)
    if batch_size is not None:
        dataset = dataset.batch(batch_size)
    dataset.class_names = names
    dataset.file_paths = files.tolist()
    return dataset


def _images(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in _SUFFIXES)


def _part(
    found: list[tuple[Path, int]],
    seed: int | None,
    shuffle: bool,
    share: float | None,
    subset: str | None,
) -> list[tuple[Path, int]]:
    if share is None:
        return found
    if subset not in ("training", "validation") or (shuffle and seed is None):
        raise errors.InvalidArgumentError(
            "`validation_split` needs a `subset`, and a `seed` if files are shuffled",
            f"subset={subset!r} and seed={seed!r} were given",
            "Pass subset='training' or 'validation', and the same seed to both.",
        )
    if shuffle:
        order = np.random.default_rng(seed).permutation(len(found))
        found = [found[i] for i in order]
    kept = len(found) - int(share * len(found))
    return found[:kept] if subset == "training" else found[kept:]


def _targets(numbers: np.ndarray, mode: str | None, classes: int) -> np.ndarray:
    if mode == "categorical":
        return np.eye(classes, dtype=np.float32)[numbers]
    return numbers.astype(np.float32)[:, None] if mode == "binary" else numbers


def _decoded(path: Value, color_mode: str, size: tuple[int, int], interpolation: str) -> Any:
    data = _io.read_file(path)
    image = _io.decode_image(data, channels=_CHANNELS[color_mode], expand_animations=False)
    return _image.resize(image, size, method=interpolation)
