"""Issue 20: functions of `tf.keras.utils` that make datasets, and split them, as in TensorFlow."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of two classes, and as many texts."""
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "texts" / name).mkdir(parents=True)
        for i in range(5):
            image = np.full((4, 8, 3), 100 * number + i, np.uint8)
            tf.io.write_file(str(tmp_path / f"images/{name}/{i}.png"), tf.io.encode_png(image))
            (tmp_path / f"texts/{name}/{i}.txt").write_text(f"{name} number {i}")
    return tmp_path


def test_windows_of_a_series_are_those_of_tensorflow() -> None:
    data = np.arange(20.0, dtype=np.float32)[:, None] * [1, 10]
    dataset = tf.keras.utils.timeseries_dataset_from_array(
        data, data[4:, 0], sequence_length=3, sampling_rate=2, sequence_stride=3, batch_size=4
    )
    batches = list(dataset)
    # Recorded from TensorFlow 2.21.
    assert [x.shape.as_list() for x, _ in batches] == [[4, 3, 2], [2, 3, 2]]
    assert batches[0][0][1, :, 0].numpy().tolist() == [3.0, 5.0, 7.0]
    assert batches[0][1].numpy().tolist() == [4.0, 7.0, 10.0, 13.0]
    shuffled = tf.keras.utils.timeseries_dataset_from_array(
        data, None, sequence_length=3, shuffle=True, seed=1, batch_size=None
    )
    assert sorted(float(x[0, 0]) for x in shuffled) == list(range(18))


def test_a_model_trains_on_windows_of_a_series() -> None:
    data = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    dataset = tf.keras.preprocessing.timeseries_dataset_from_array(
        data, data[5:, :1], sequence_length=5, batch_size=8
    )

    def split(x: Any, y: Any) -> Any:
        x.set_shape([None, 5, None])
        return x[:, :, 0], y

    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(dataset.map(split), epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    # Keras leaves iterators, with their threads that read ahead, to the garbage collector.
    gc.collect()


def test_images_of_a_directory_are_split_into_two_datasets(folder: Path) -> None:
    options: dict[str, Any] = {"image_size": (4, 8), "batch_size": 4, "seed": 3}
    training, validation = tf.keras.utils.image_dataset_from_directory(
        folder / "images", validation_split=0.3, subset="both", **options
    )
    alone = tf.keras.preprocessing.image_dataset_from_directory(
        folder / "images", validation_split=0.3, subset="training", **options
    )
    assert training.class_names == alone.class_names == ["cat", "dog"]
    assert sorted(alone.file_paths) == sorted(training.file_paths)
    found = [
        (int(x[0, 0, 0]), int(y))
        for part in (training, validation)
        for images, labels in part
        for x, y in zip(images.numpy(), labels.numpy(), strict=True)
    ]
    assert len(list(training.unbatch())) == 7
    assert sorted(found) == [(100 * number + i, number) for number in (0, 1) for i in range(5)]


def test_images_are_padded_or_cut_to_the_wanted_ratio(folder: Path) -> None:
    def first(**options: Any) -> Any:
        dataset = tf.keras.utils.image_dataset_from_directory(
            folder / "images", labels=None, shuffle=False, image_size=(4, 4), **options
        )
        return next(iter(dataset))

    whole, cut = first(), first(crop_to_aspect_ratio=True)
    padded = first(pad_to_aspect_ratio=True, color_mode="grayscale")
    assert whole.shape == cut.shape == (10, 4, 4, 3)
    assert padded.shape == (10, 4, 4, 1)
    assert cut[4].numpy().max() == 4.0
    assert padded[4, 0].numpy().max() == 0.0 < padded[4, 2].numpy().min()


@pytest.mark.parametrize(
    ("mode", "shape", "dtype"),
    [("int", (10,), tf.int32), ("binary", (10, 1), tf.float32), ("categorical", (10, 2), None)],
)
def test_texts_of_a_directory_have_labels(folder: Path, mode: str, shape: Any, dtype: Any) -> None:
    dataset = tf.keras.utils.text_dataset_from_directory(
        folder / "texts", label_mode=mode, shuffle=False
    )
    texts, labels = next(iter(dataset))
    assert texts.numpy()[6] == b"dog number 1"
    assert labels.shape == shape
    assert dtype in (None, labels.dtype)


def test_datasets_and_arrays_are_split_into_two() -> None:
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    left, right = tf.keras.utils.split_dataset(x, left_size=0.7)
    assert [left.cardinality().numpy(), right.cardinality().numpy()] == [7, 3]
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    left, right = tf.keras.utils.split_dataset(dataset, right_size=4, shuffle=True, seed=0)
    rows = [(a.numpy().tolist(), int(b)) for part in (left, right) for a, b in part]
    assert len(list(right)) == 4
    assert sorted(rows, key=lambda row: row[1]) == [([2.0 * i, 2.0 * i + 1], i) for i in range(10)]


ROWS = np.float32([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])


@pytest.mark.parametrize(
    "data",
    [
        lambda: ROWS,
        lambda: tf.constant(ROWS),
        lambda: tf.data.Dataset.from_tensor_slices(ROWS),
        lambda: tf.data.Dataset.from_tensor_slices((ROWS,)).batch(2).map(lambda x: x),
    ],
)
def test_normalization_adapts_to_tensors_and_datasets(data: Any) -> None:
    layer = tf.keras.layers.Normalization()
    layer.adapt(data())
    # Recorded from TensorFlow 2.21.
    np.testing.assert_allclose(layer.mean.numpy(), [[3.0, 5.0]], 1e-6)
    np.testing.assert_allclose(layer.variance.numpy(), [[2.6667, 8.6667]], 1e-4)
    model = tf.keras.Sequential([layer, tf.keras.layers.Dense(1, kernel_initializer="ones")])
    found = model.predict(ROWS, verbose=0)
    np.testing.assert_allclose(found[:, 0], layer(ROWS).numpy().sum(axis=1), 1e-5)


def test_discretization_adapts_to_a_dataset() -> None:
    layer = tf.keras.layers.Discretization(num_bins=2)
    layer.adapt(tf.data.Dataset.from_tensor_slices(ROWS[:, 0]).batch(2))
    assert np.round(layer.bin_boundaries, 3).tolist() == [2.0]
    assert layer(tf.constant([0.0, 10.0])).numpy().tolist() == [0, 1]
