"""`tf.io`, host functions and custom gradients against results recorded from TensorFlow."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.foundation import errors
from tests.fixtures.tf_data.calls import CALLS
from tests.fixtures.tf_data.facts import structure, tensor

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tf_data"
RECORDED: dict[str, Any] = json.loads((FIXTURES / "calls.json").read_text())


def require_same(found: Any, expected: Any) -> None:
    """Compares structures: types, shapes and texts exactly, numbers almost."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            require_same(found[key], expected[key])
    elif len(expected) == 3 and isinstance(expected[0], str):
        assert found[:2] == expected[:2]
        if expected[0] == "string":
            assert found[2] == expected[2]
        else:
            np.testing.assert_allclose(found[2], expected[2], rtol=1e-5, atol=1e-6)
    else:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_same(one, other)


def test_every_call_is_recorded() -> None:
    assert set(CALLS) == set(RECORDED)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_tensorflow(name: str) -> None:
    require_same(json.loads(json.dumps(structure(CALLS[name](tf), tensor))), RECORDED[name])


# Files.


def test_gfile_reads_writes_and_lists_files(tmp_path: Path) -> None:
    gfile = tf.io.gfile
    folder = tmp_path / "a" / "b"
    gfile.makedirs(folder)
    with gfile.GFile(f"{folder}/x.txt", "w") as file:
        file.write("one\ntwo\n")
    with gfile.GFile(folder / "x.txt") as file:
        assert list(file) == ["one\n", "two\n"]
    assert gfile.exists(f"{folder}/x.txt")
    assert gfile.isdir(str(folder))
    assert gfile.listdir(str(folder)) == ["x.txt"]
    assert gfile.glob(str(folder / "*.txt")) == [str(folder / "x.txt")]
    gfile.copy(f"{folder}/x.txt", f"{folder}/y.txt")
    gfile.rename(f"{folder}/y.txt", f"{folder}/z.txt")
    assert gfile.stat(f"{folder}/z.txt").length == 8
    gfile.rmtree(str(tmp_path / "a"))
    assert not gfile.exists(str(folder))


def test_old_names_of_gfile(tmp_path: Path) -> None:
    gfile = tf.compat.v1.gfile
    gfile.MakeDirs(str(tmp_path / "a"))
    with gfile.Open(str(tmp_path / "a" / "x"), "w") as file:
        file.write("text")
    assert gfile.Exists(str(tmp_path / "a" / "x"))
    assert gfile.ListDirectory(str(tmp_path / "a")) == ["x"]
    assert [len(files) for _, _, files in gfile.Walk(str(tmp_path))] == [0, 1]
    gfile.Remove(str(tmp_path / "a" / "x"))
    assert gfile.Glob(str(tmp_path / "a" / "*")) == []


def test_a_missing_file_is_a_not_found_error() -> None:
    with pytest.raises(tf.errors.NotFoundError):
        tf.io.gfile.GFile("/no/such/file", "rb").read()


def test_read_file_and_write_file_take_and_give_bytes(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "x.bin")
    tf.io.write_file(path, b"\x00\x01\x00")
    assert tf.io.read_file(path).numpy() == b"\x00\x01\x00"
    assert tf.io.matching_files(str(tmp_path / "deep" / "*")).numpy().tolist() == [path.encode()]


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_tfrecords_are_read_as_they_were_written(tmp_path: Path, compression: Any) -> None:
    path = str(tmp_path / "x.tfrecord")
    written = [b"", b"abc\x00", b"x" * 1000]
    with tf.io.TFRecordWriter(path, compression) as writer:
        for record in written:
            writer.write(record)
    found = tf.data.TFRecordDataset([path], compression_type=compression)
    assert [x.numpy() for x in found] == written


def test_a_damaged_tfrecord_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(b"record")
    data = bytearray(path.read_bytes())
    data[14] ^= 1
    path.write_bytes(data)
    with pytest.raises(tf.errors.DataLossError):
        list(tf.data.TFRecordDataset(str(path)))


# Printing.


def printed(capsys: pytest.CaptureFixture[str], *args: Any, **kwargs: Any) -> str:
    tf.print(*args, **{"output_stream": sys.stdout, **kwargs})
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("x:", 3, [1, 2], (1, 2.5), None, True), "x: 3 [1, 2] (1, 2.5) None True"),
        ((np.arange(20),), "[0 1 2 ... 17 18 19]"),
        ((np.float32([0.1, 1e-10, 1e10, np.nan, 1 / 3]),), "[0.1 1e-10 1e+10 nan 0.333333343]"),
        ((np.array([[1, 2], [3, 4]]),), "[[1 2]\n [3 4]]"),
        (({"a": np.array([1, 2]), "b": "s"},), "{'a': [1 2], 'b': 's'}"),
        ((np.array([True, False]), np.zeros(0)), "[1 0] []"),
        ((np.float64(1 / 3), np.float16(0.1)), "0.33333333333333331 0.0999755859"),
        (([np.array([1, 2]), np.array(3)],), "[[1 2], 3]"),
    ],
)
def test_values_are_printed_as_tensorflow_prints_them(
    capsys: pytest.CaptureFixture[str], args: Any, text: str
) -> None:
    """The texts are those of TensorFlow 2.21."""
    assert printed(capsys, *args) == f"{text}\n"


def test_print_takes_separator_end_and_summarize(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, 1, 2, sep="|", end="#") == "1|2#"
    assert printed(capsys, np.arange(8), summarize=-1) == "[0 1 2 3 4 5 6 7]\n"
    assert printed(capsys, tf.constant(["a", "b"]), tf.constant("c")) == '["a" "b"] "c"\n'


def test_print_in_a_compiled_function_prints_at_each_call(
    capfd: pytest.CaptureFixture[str],
) -> None:
    import jax

    @tf.function
    def step(x: Any) -> Any:
        tf.print("x is", x, {"twice": x * 2}, output_stream=sys.stderr)
        return x

    for number in range(3):
        step(tf.constant(number))
    jax.effects_barrier()
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == [f"x is {i} {{'twice': {2 * i}}}" for i in range(3)]


def test_print_writes_to_files_and_loggers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("a", "b"):
        tf.print(text, output_stream=f"file://{tmp_path}/out.txt")
    assert (tmp_path / "out.txt").read_text() == "a\nb\n"
    with caplog.at_level(logging.INFO):
        tf.print("logged", output_stream=logging.info)
    assert "logged" in caplog.text


def test_print_refuses_unknown_arguments() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="sepp"):
        tf.print("a", sepp="")


# Functions of Python.


def test_the_shape_of_a_result_may_be_given_by_a_spec() -> None:
    calls: list[Any] = []

    @tf.function
    def step(x: Any) -> Any:
        def first(value: Any) -> Any:
            calls.append(value.tolist())
            return value[0]

        return tf.numpy_function(first, [x], tf.TensorSpec([], tf.float32))

    assert float(step(tf.constant([5.0, 6.0]))) == 5.0
    assert calls == [[5.0, 6.0]]


def test_a_function_that_fails_with_zeros_needs_a_spec() -> None:
    @tf.function
    def step(x: Any) -> Any:
        return tf.numpy_function(lambda v: np.ones(1 // int(v)), [x], tf.float32)

    with pytest.raises(errors.InvalidArgumentError, match=r"tf\.TensorSpec"):
        step(tf.constant(1))


def test_a_function_without_results_is_called_when_the_program_runs() -> None:
    import jax

    seen: list[float] = []

    @tf.function
    def step(x: Any) -> Any:
        tf.py_function(lambda v: seen.append(float(v)), [x], [])
        return x + 1

    step(tf.constant(1.0))
    step(tf.constant(2.0))
    jax.effects_barrier()
    assert sorted(seen)[-2:] == [1.0, 2.0]


def test_the_number_of_results_must_fit_tout() -> None:
    with pytest.raises(errors.StructureError, match="2 results"):
        tf.numpy_function(lambda x: (x, x, x), [1], [tf.int32, tf.int32])


def test_strings_go_in_and_out_of_host_functions() -> None:
    found = tf.numpy_function(lambda text: text + b"!", ["a"], tf.string)
    assert found.numpy() == b"a!"


# Custom gradients.


def test_a_custom_gradient_that_reads_variables_needs_the_argument() -> None:
    v = tf.Variable(2.0)

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        return x * v, lambda dy: dy

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(errors.InvalidArgumentError, match="variables"):
            scaled(x)


def test_a_custom_gradient_must_have_one_gradient_per_argument() -> None:
    @tf.custom_gradient
    def product(x: Any, y: Any) -> Any:
        return x * y, lambda dy: dy

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = product(x, x)
    with pytest.raises(errors.StructureError, match="one gradient for each"):
        tape.gradient(y, x)


def test_a_custom_gradient_holds_inside_of_a_keras_layer() -> None:
    @tf.custom_gradient
    def reversed_gradient(x: Any) -> Any:
        return x, lambda dy: -dy

    class Reverse(tf.keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return reversed_gradient(x)

    layer, x = Reverse(), tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(layer(x) * 3.0)
    assert tape.gradient(y, x).numpy().tolist() == [-3.0, -3.0]
