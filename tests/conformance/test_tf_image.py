"""`tf.image` computes what TensorFlow 2.21 has computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.tf import dispatch
from tests.fixtures.tf_image import comparing, files, images
from tests.fixtures.tf_image.case import Case

CASES: dict[str, list[Case]] = {}
for _case in [*images.table.cases, *files.table.cases]:
    CASES.setdefault(_case.path, []).append(_case)
FILES = {case.path for case in files.table.cases}
REFUSED = {"image.decode_jxl", "image.generate_bounding_box_proposals"}
IMAGE = images.BYTES
FLOATS = images.FLOATS


@pytest.mark.parametrize("path", CASES)
def test_results_on_the_host_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_on_host(CASES[path]) == []


def some(cases: list[Case]) -> list[Case]:
    """Returns about two cases that can be compiled: compiling all of them takes minutes."""
    able = [c for c in cases if c.compiled and not isinstance(comparing.RECORDED[c.name], str)]
    return able[:: max(1, len(able) // 2)]


@pytest.mark.parametrize("path", sorted({*CASES} - FILES))
def test_compiled_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_compiled(some(CASES[path])) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted({*CASES} - FILES))
def test_all_compiled_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_compiled(CASES[path]) == []


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES)
def test_eager_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_eager(CASES[path]) == []


@pytest.mark.parametrize("case", images.gradients.cases, ids=lambda case: case.name)
def test_gradients_are_those_of_tensorflow(case: Case) -> None:
    assert comparing.gradient_problem(case) is None


def test_functions_have_the_parameters_of_tensorflow() -> None:
    right = {p: n for p, n in comparing.parameters().items() if p.startswith("image.")}
    names = sorted({*right} - REFUSED)
    found = {path: comparing.own_parameters(path) for path in names}
    assert found == {path: right[path] for path in names}


# Files.


def test_png_keeps_all_pixels() -> None:
    for pixels in (IMAGE, IMAGE[..., :1], np.dstack([IMAGE, IMAGE[..., :1]])):
        found = tf.image.decode_png(tf.image.encode_png(pixels))
        assert found.dtype == tf.uint8
        assert np.array_equal(found.numpy(), pixels)


def test_jpeg_of_high_quality_keeps_a_smooth_image() -> None:
    rows, columns = np.mgrid[:32, :24]
    image = np.stack([rows * 7, columns * 9, rows + columns], -1).astype(np.uint8)
    data = tf.image.encode_jpeg(image, quality=100, chroma_downsampling=False)
    assert bool(tf.image.is_jpeg(data))
    assert tf.image.extract_jpeg_shape(data).numpy().tolist() == [32, 24, 3]
    found = tf.image.decode_jpeg(data).numpy().astype(int)
    assert np.abs(found - image).max() <= 4


# Random functions: other numbers than TensorFlow's, from the same distributions.

Draw = Callable[[Any, int | None], Any]
Stateless = Callable[[Any, Any], Any]
BATCH = np.arange(8 * 2 * 3 * 3, dtype=np.float32).reshape(8, 2, 3, 3) / 200
STATEFUL: dict[str, Draw] = {
    "random_brightness": lambda x, seed: tf.image.random_brightness(x, 0.3, seed),
    "random_contrast": lambda x, seed: tf.image.random_contrast(x, 0.2, 1.8, seed),
    "random_crop": lambda x, seed: tf.image.random_crop(x, (3, 3, 3), seed),
    "random_flip_left_right": lambda x, seed: tf.image.random_flip_left_right(x, seed),
    "random_flip_up_down": lambda x, seed: tf.image.random_flip_up_down(x, seed),
    "random_hue": lambda x, seed: tf.image.random_hue(x, 0.4, seed),
    "random_jpeg_quality": lambda x, seed: tf.image.random_jpeg_quality(x, 1, 95, seed),
    "random_saturation": lambda x, seed: tf.image.random_saturation(x, 0.2, 1.8, seed),
    "sample_distorted_bounding_box": lambda x, seed: (
        tf.image.sample_distorted_bounding_box(
            x.shape, tf.zeros([1, 0, 4]), seed or 0, use_image_if_no_bounding_boxes=True
        ).begin
    ),
}
STATELESS: dict[str, Stateless] = {
    "random_brightness": lambda x, seed: tf.image.stateless_random_brightness(x, 0.3, seed),
    "random_contrast": lambda x, seed: tf.image.stateless_random_contrast(x, 0.2, 1.8, seed),
    "random_crop": lambda x, seed: tf.image.stateless_random_crop(x, (3, 3, 3), seed),
    "random_flip_left_right": tf.image.stateless_random_flip_left_right,
    "random_flip_up_down": tf.image.stateless_random_flip_up_down,
    "random_hue": lambda x, seed: tf.image.stateless_random_hue(x, 0.4, seed),
    "random_jpeg_quality": lambda x, seed: tf.image.stateless_random_jpeg_quality(x, 1, 95, seed),
    "random_saturation": lambda x, seed: tf.image.stateless_random_saturation(x, 0.2, 1.8, seed),
    "sample_distorted_bounding_box": lambda x, seed: (
        tf.image.stateless_sample_distorted_bounding_box(
            x.shape, tf.zeros([1, 0, 4]), seed, use_image_if_no_bounding_boxes=True
        ).begin
    ),
}


def distinct(results: list[Any]) -> int:
    return len({np.asarray(result.numpy()).tobytes() for result in results})


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("name", STATEFUL)
def test_random_functions_draw_other_numbers_in_each_call(name: str, is_host: bool) -> None:
    with dispatch.host_mode(is_host):
        found = [STATEFUL[name](IMAGE, None) for _ in range(16)]
    assert distinct(found) >= 2
    if not name.startswith("sample"):
        assert all(image.dtype == tf.uint8 for image in found)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("name", STATEFUL)
def test_random_functions_with_a_seed_repeat_their_numbers(name: str, is_host: bool) -> None:
    runs = []
    for _ in range(2):
        tf.random.set_seed(5)
        with dispatch.host_mode(is_host):
            runs.append([STATEFUL[name](IMAGE, 3).numpy() for _ in range(4)])
    assert np.array_equal(runs[0], runs[1])


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("name", STATELESS)
def test_stateless_functions_depend_on_their_seed_alone(name: str, is_host: bool) -> None:
    with dispatch.host_mode(is_host):
        found = [STATELESS[name](IMAGE, (1, seed)) for seed in range(12)]
        again = [STATELESS[name](IMAGE, (1, seed)) for seed in range(12)]
    assert distinct(found) >= 2
    for one, other in zip(found, again, strict=True):
        assert np.array_equal(one.numpy(), other.numpy())


def test_random_flips_decide_for_each_image_of_a_batch() -> None:
    flipped = tf.image.stateless_random_flip_left_right(BATCH, (1, 2)).numpy()
    is_same = [np.array_equal(a, b) for a, b in zip(flipped, BATCH, strict=True)]
    is_turned = [np.array_equal(a, b[:, ::-1]) for a, b in zip(flipped, BATCH, strict=True)]
    assert all(a != b for a, b in zip(is_same, is_turned, strict=True))
    assert 0 < sum(is_turned) < len(BATCH)


def test_random_changes_stay_in_their_range() -> None:
    grey = np.full((2, 2, 3), 0.5, np.float32)
    with dispatch.host_mode():
        added = [tf.image.random_brightness(grey, 0.2).numpy()[0, 0, 0] for _ in range(200)]
        crops = [tf.image.random_crop(np.arange(5), [3]).numpy()[0] for _ in range(60)]
    assert -0.2 <= min(added) - 0.5 < -0.15 and 0.15 < max(added) - 0.5 <= 0.2
    assert set(crops) == {0, 1, 2}


def test_compiled_random_functions_draw_other_numbers_in_each_call() -> None:
    step = tf.function(
        lambda x: tf.image.random_crop(tf.image.random_flip_left_right(x), (3, 3, 3))
    )
    x = tf.constant(FLOATS)
    assert distinct([step(x) for _ in range(12)]) >= 3


def test_random_functions_differ_between_replicas() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = tf.constant(FLOATS)

    @tf.function
    def step() -> Any:
        return strategy.run(lambda: tf.image.random_brightness(x, 0.5))

    first, second = strategy.experimental_local_results(step())
    assert not np.array_equal(first.numpy(), second.numpy())


def test_random_augmentation_in_a_dataset_differs_between_elements() -> None:
    data = tf.data.Dataset.from_tensor_slices(np.stack([IMAGE] * 16))

    def augment(image: Any) -> Any:
        image = tf.image.convert_image_dtype(image, tf.float32)
        image = tf.image.random_flip_left_right(image)
        image = tf.image.random_brightness(image, 0.1)
        return tf.image.random_crop(image, [4, 4, 3])

    found = [image for image in data.map(augment)]
    assert all(image.shape == (4, 4, 3) and image.dtype == tf.float32 for image in found)
    assert distinct(found) > 8


@pytest.mark.parametrize("is_host", [True, False])
def test_distorted_boxes_keep_their_limits(is_host: bool) -> None:
    height, width = 120, 200
    target = np.asarray([0.2, 0.3, 0.6, 0.7], np.float32)
    covered = []
    for seed in range(30):
        with dispatch.host_mode(is_host):
            begin, size, corners = tf.image.stateless_sample_distorted_bounding_box(
                [height, width, 3],
                target[None, None],
                seed=(1, seed),
                min_object_covered=0.5,
                aspect_ratio_range=(0.8, 1.25),
                area_range=(0.1, 0.9),
            )
        (top, left, zero), (rows, columns, all_channels) = begin.numpy(), size.numpy()
        assert (zero, all_channels) == (0, -1)
        assert top >= 0 and left >= 0 and top + rows <= height and left + columns <= width
        assert 0.1 * height * width <= rows * columns <= 0.9 * height * width
        assert 0.75 < columns / rows < 1.32
        right = [top / height, left / width, (top + rows) / height, (left + columns) / width]
        np.testing.assert_allclose(corners.numpy()[0, 0], right, atol=1e-6)
        low, high = np.maximum(right[:2], target[:2]), np.minimum(right[2:], target[2:])
        covered.append(np.prod(np.maximum(high - low, 0)) / np.prod(target[2:] - target[:2]))
    assert min(covered) >= 0.45
    assert len({round(share, 3) for share in covered}) > 3


def test_distorted_box_is_the_whole_image_if_no_box_is_found() -> None:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        [10, 20, 3], [[[0.0, 0.0, 1.0, 1.0]]], min_object_covered=1.0, area_range=(0.1, 0.5)
    )
    assert begin.numpy().tolist() == [0, 0, 0]
    assert size.numpy().tolist() == [10, 20, -1]


def test_distorted_box_without_boxes_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="use_image_if_no_bounding_boxes"):
        tf.image.sample_distorted_bounding_box([10, 20, 3], tf.zeros([1, 0, 4]))


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_glimpses_outside_of_the_image_are_noise(noise: str) -> None:
    offsets = np.full((8, 2), 5.0, np.float32)
    found = tf.image.extract_glimpse(BATCH, [2, 2], offsets, noise=noise).numpy()
    assert found.shape == (8, 2, 2, 3) and len(np.unique(found)) > 50
    with pytest.raises(ValueError, match="noise"):
        tf.image.extract_glimpse(BATCH, [2, 2], offsets, noise="pink")


def test_resize_methods_have_their_names() -> None:
    assert tf.image.resize(IMAGE, (3, 3), tf.image.ResizeMethod.NEAREST_NEIGHBOR).dtype == tf.uint8
    names = {name: value for name, value in vars(tf.image.ResizeMethod).items() if name.isupper()}
    assert {*names.values()} == {*images.METHODS}


PROPERTIES = {
    "image.ResizeMethod": test_resize_methods_have_their_names,
    "image.encode_png": test_png_keeps_all_pixels,
    "image.encode_jpeg": test_jpeg_of_high_quality_keeps_a_smooth_image,
    **{f"image.{name}": test_random_functions_draw_other_numbers_in_each_call for name in STATEFUL},
    **{
        f"image.stateless_{name}": test_stateless_functions_depend_on_their_seed_alone
        for name in STATELESS
    },
}


def test_every_public_name_has_a_case_or_advice() -> None:
    assert set(comparing.public_names("image")) == {*CASES, *PROPERTIES, *REFUSED}
    assert {f"image.{name}" for name in dir(tf.image)} == {*CASES, *PROPERTIES}
    for path in REFUSED:
        with pytest.raises(AttributeError, match=r"tf\.image\.(decode_png|non_max)"):
            getattr(tf.image, path.partition(".")[2])


# What compiled functions take and refuse.


def test_offsets_of_a_crop_may_be_computed_in_a_compiled_function() -> None:
    step = tf.function(lambda top: tf.image.crop_to_bounding_box(FLOATS, top, top + 1, 2, 3))
    assert np.array_equal(step(tf.constant(2)).numpy(), FLOATS[2:4, 3:6])


def test_boxes_of_unknown_number_are_refused_in_a_compiled_function() -> None:
    step = tf.function(lambda boxes, scores: tf.image.non_max_suppression(boxes, scores, 3))
    with pytest.raises(Exception, match="non_max_suppression_padded"):
        step(tf.constant(images.BOXES), tf.constant(images.SCORES))


def test_size_computed_by_a_compiled_function_is_refused() -> None:
    step = tf.function(lambda size: tf.image.resize(FLOATS, size))
    with pytest.raises(Exception, match="must be known when the function is compiled"):
        step(tf.constant([2, 2]))


def test_jpeg_quality_changes_in_a_compiled_function() -> None:
    step = tf.function(lambda x, quality: tf.image.adjust_jpeg_quality(x, quality))
    found = step(tf.constant(IMAGE), tf.constant(50)).numpy()
    assert np.array_equal(found, tf.image.adjust_jpeg_quality(IMAGE, 50).numpy())


def test_images_of_a_wrong_shape_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match="newaxis"):
        tf.image.resize(IMAGE[..., 0], (3, 3))
    with pytest.raises(ValueError, match="3 channels"):
        tf.image.rgb_to_grayscale(IMAGE[..., :2])
    with pytest.raises(ValueError, match="resize_with_crop_or_pad"):
        tf.image.crop_to_bounding_box(IMAGE, 0, 0, 50, 50)
