"""`tf.strings` computes what TensorFlow 2.21 has computed."""

from __future__ import annotations

import numpy as np
import pytest

import replicax.tf as tf
from replicax.tf import dispatch
from tests.fixtures.tf_image import comparing, texts
from tests.fixtures.tf_image.case import Case

CASES: dict[str, list[Case]] = {}
for _case in texts.table.cases:
    CASES.setdefault(_case.path, []).append(_case)
REFUSED = {"strings.unicode_script"}


@pytest.mark.parametrize("path", CASES)
def test_results_on_the_host_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_on_host(CASES[path]) == []


@pytest.mark.parametrize("path", CASES)
def test_eager_results_are_those_of_tensorflow(path: str) -> None:
    assert comparing.problems_eager(CASES[path]) == []


@pytest.mark.parametrize("path", sorted({*comparing.public_names("strings")} - REFUSED))
def test_functions_have_the_parameters_of_tensorflow(path: str) -> None:
    assert comparing.own_parameters(path) == comparing.parameters()[path]


def test_every_public_name_has_a_case_or_advice() -> None:
    assert set(comparing.public_names("strings")) == {*CASES, *REFUSED}
    for path in REFUSED:
        with pytest.raises(AttributeError, match="py_function"):
            getattr(tf.strings, path.partition(".")[2])


@pytest.mark.parametrize("name", ["split", "bytes_split", "unicode_split", "unicode_decode"])
def test_several_strings_that_would_be_ragged_are_refused_with_advice(name: str) -> None:
    args = ("UTF-8",) if name.startswith("unicode") else ()
    with pytest.raises(NotImplementedError, match=r"dataset\.map"):
        getattr(tf.strings, name)(["a b", "c"], *args)


def test_label_comes_from_a_path_inside_a_dataset() -> None:
    files = tf.data.Dataset.from_tensor_slices(["data/cats/1.jpg", "data/dogs/2.jpg"])
    labels = files.map(lambda path: tf.strings.split(path, "/")[-2] == "cats")
    assert [bool(label) for label in labels] == [True, False]


def test_line_of_numbers_is_parsed_inside_a_dataset() -> None:
    lines = tf.data.Dataset.from_tensor_slices(["1,2,3", "4,5,6"])
    rows = lines.map(lambda line: tf.strings.to_number(tf.strings.split(line, ","), tf.int32))
    assert [row.numpy().tolist() for row in rows] == [[1, 2, 3], [4, 5, 6]]


def test_numbers_of_strings_are_on_the_device_in_eager_code() -> None:
    doubled = tf.strings.to_number(["1", "2"]) * tf.constant(2.0)
    assert doubled.numpy().tolist() == [2.0, 4.0]
    assert (tf.strings.length("abc") + tf.constant(1)).numpy() == 4


def test_large_buckets_keep_all_their_bits() -> None:
    with dispatch.host_mode():
        wide = tf.strings.to_hash_bucket_fast(["a", "b"], 2**62).numpy()
    assert wide.dtype == np.int64
    assert tf.strings.to_hash_bucket_fast(["a", "b"], 2**62).numpy().tolist() == wide.tolist()


def test_pattern_of_unicode_classes_is_refused_with_advice() -> None:
    with pytest.raises(NotImplementedError, match="punct"):
        tf.strings.regex_replace("a", r"\pL", "")


def test_strings_of_numpy_are_compared_by_their_text() -> None:
    # As programs find the label of a file: TensorFlow's tutorial on loading images.
    names = np.array(["daisy", "rose"])
    parts = tf.strings.split("flowers/rose/1.png", "/")
    assert (parts[-2] == names).numpy().tolist() == [False, True]
    assert (parts[-2] != np.array([b"rose", b"x"])).numpy().tolist() == [False, True]
    assert bool(names[1] == parts[-2])
    files = tf.data.Dataset.from_tensor_slices(["a/rose/1", "b/daisy/2"])
    labels = files.map(lambda path: tf.argmax(tf.strings.split(path, "/")[-2] == names))
    assert [int(label) for label in labels] == [1, 0]


def test_unstacked_strings_are_tensors() -> None:
    assert [part.numpy() for part in tf.unstack(tf.constant(["a", "b"]))] == [b"a", b"b"]
