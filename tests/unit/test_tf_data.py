"""`tf.data`: elements, specs and orders against TensorFlow's, and datasets as input of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.foundation import errors
from tests.fixtures.tf_data.facts import facts
from tests.fixtures.tf_data.pipelines import PIPELINES

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tf_data"
RECORDED: dict[str, Any] = json.loads((FIXTURES / "recorded.json").read_text())

# TensorFlow does not know these shapes before it reads; here they are those of the first element.
SPECS_OF_THE_FIRST_ELEMENT = {"numpy_function", "assert_cardinality"}


def test_every_pipeline_is_recorded() -> None:
    assert set(PIPELINES) == set(RECORDED)


@pytest.mark.parametrize("name", PIPELINES)
def test_elements_spec_and_cardinality_are_those_of_tensorflow(name: str) -> None:
    found = json.loads(json.dumps(facts(PIPELINES[name](tf))))
    expected = dict(RECORDED[name])
    if name in SPECS_OF_THE_FIRST_ELEMENT:
        del found["spec"], expected["spec"]
    assert found == expected


# Functions of elements.


def test_values_of_elements_can_be_used_in_python_inside_of_map() -> None:
    def describe(x: Any) -> Any:
        assert x.shape.as_list() == []
        x.set_shape([])
        if x > 1:
            return tf.constant([int(x)] * 2)
        return tf.zeros([x.numpy() + 1], tf.int32)

    found = [x.numpy().tolist() for x in tf.data.Dataset.range(3).map(describe)]
    assert found == [[0], [0, 0], [2, 2]]


def test_ops_run_on_numpy_inside_of_map() -> None:
    kinds: set[type] = set()

    def step(x: Any) -> Any:
        y = tf.reduce_sum(tf.one_hot(x, 3) * 2.0) + tf.cast(x, tf.float32)
        kinds.add(type(y._raw))
        return y

    assert [float(x) for x in tf.data.Dataset.range(3).map(step)] == [2.0, 3.0, 4.0]
    assert all(issubclass(kind, np.ndarray | np.generic) for kind in kinds)


def test_64_bit_types_exist_inside_of_map() -> None:
    data = tf.data.Dataset.range(2).map(lambda x: tf.cast(x, tf.int64) * 2**40 + 1)
    assert [int(x) for x in data.as_numpy_iterator()] == [1, 2**40 + 1]


def test_random_ops_give_another_value_for_each_element() -> None:
    tf.random.set_seed(3)
    data = tf.data.Dataset.range(20).map(lambda x: tf.random.uniform([]))
    found = [float(x) for x in data]
    assert len(set(found)) == 20
    assert all(0 <= x < 1 for x in found)


def test_a_tf_function_runs_as_python_inside_of_map() -> None:
    @tf.function
    def step(x: Any) -> Any:
        return x * 2 if x > 0 else x - 1

    assert [int(x) for x in tf.data.Dataset.range(3).map(step)] == [-1, 2, 4]


def test_an_error_of_a_function_names_the_step() -> None:
    data = tf.data.Dataset.range(3).map(lambda x: tf.reshape(x, [2]))
    with pytest.raises(errors.InvalidArgumentError):
        list(data)


# Reading.


def test_elements_are_tensors_with_numpy_values() -> None:
    image, name = next(iter(tf.data.Dataset.from_tensors((np.zeros((2, 3), np.uint8), "a"))))
    assert isinstance(image, tf.Tensor)
    assert image.dtype == tf.uint8
    assert image.shape.as_list() == [2, 3]
    assert name.numpy() == b"a"
    assert name.dtype == tf.string


def test_as_numpy_iterator_gives_arrays_and_bytes() -> None:
    data = tf.data.Dataset.from_tensor_slices({"a": [1.5], "b": ["x"]})
    (row,) = data.as_numpy_iterator()
    assert row["a"].dtype == np.float32
    assert row["b"] == b"x"


def test_len_cardinality_and_reduce() -> None:
    data = tf.data.Dataset.range(5)
    assert len(data) == 5
    assert data.cardinality().numpy() == 5
    assert data.repeat().cardinality() == tf.data.INFINITE_CARDINALITY
    assert data.filter(lambda x: x > 1).cardinality() == tf.data.UNKNOWN_CARDINALITY
    total, count = data.reduce((np.int64(0), 0), lambda state, x: (state[0] + x, state[1] + 1))
    assert (int(total), int(count)) == (10, 5)


def test_a_shuffled_dataset_has_another_order_in_each_pass_unless_it_is_told_otherwise() -> None:
    data = tf.data.Dataset.range(50).shuffle(50, seed=7)
    first, second = ([int(x) for x in data] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    fixed = tf.data.Dataset.range(50).shuffle(50, seed=7, reshuffle_each_iteration=False)
    assert [int(x) for x in fixed] == [int(x) for x in fixed]


def test_cached_functions_run_once_per_element() -> None:
    calls: list[int] = []

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x

    data = tf.data.Dataset.range(3).map(note).cache()
    assert [int(x) for x in data] == [int(x) for x in data] == [0, 1, 2]
    assert calls == [0, 1, 2]


def test_saved_elements_are_loaded(tmp_path: Path) -> None:
    tf.data.Dataset.range(4).batch(2).save(str(tmp_path / "data"))
    found = tf.data.Dataset.load(str(tmp_path / "data"))
    assert [x.numpy().tolist() for x in found] == [[0, 1], [2, 3]]
    assert isinstance(next(iter(found)), tf.Tensor)


def test_lines_and_records_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    names = tf.data.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert [Path(x.numpy().decode()).name for x in names] == ["a.txt", "b.txt"]
    lines = names.interleave(tf.data.TextLineDataset, cycle_length=2)
    assert [x.numpy() for x in lines] == [b"one", b"three", b"two"]
    (tmp_path / "c.bin").write_bytes(b"HHabcdEE")
    records = tf.data.FixedLengthRecordDataset(str(tmp_path / "c.bin"), 2, 2, 2)
    assert [x.numpy() for x in records] == [b"ab", b"cd"]


def test_a_generator_must_be_a_function() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="lambda: iterable"):
        tf.data.Dataset.from_generator([1, 2], output_types=tf.int32)


def test_unknown_options_are_errors_with_a_suggestion() -> None:
    options = tf.data.Options()
    with pytest.raises(errors.InvalidArgumentError, match="deterministic"):
        options.determinism = False


def test_a_type_spec_of_a_sequence_feature_is_sparse_and_becomes_dense() -> None:
    examples = [
        tf.train.Example(
            features=tf.train.Features(
                feature={"x": tf.train.Feature(int64_list=tf.train.Int64List(value=range(n)))}
            )
        ).SerializeToString()
        for n in (1, 3)
    ]
    data = tf.data.Dataset.from_tensor_slices(examples).map(
        lambda text: tf.io.parse_single_example(text, {"x": tf.io.VarLenFeature(tf.int64)})
    )
    found = [tf.sparse.to_dense(row["x"]).numpy().tolist() for row in data]
    assert found == [[0], [0, 1, 2]]


def test_what_needs_ragged_or_sparse_batches_is_refused_with_advice() -> None:
    for refused in ("ragged_batch", "sparse_batch"):
        with pytest.raises(errors.UnsupportedError, match="padded_batch"):
            getattr(tf.data.Dataset.range(3), refused)(2)
    with pytest.raises(errors.UnsupportedError, match="filter"):
        tf.data.Dataset.range(3).ignore_errors()


def test_sizes_and_counts_may_be_tensors() -> None:
    data = tf.data.Dataset.range(10)
    assert len(list(data.batch(tf.constant(4), drop_remainder=True))) == 2
    assert len(list(data.take(tf.constant(3)).repeat(tf.constant(2)))) == 6
    assert len(list(data.shard(tf.constant(2), 0).skip(np.int64(1)))) == 4
    iterator = iter(data)
    assert int(iterator.get_next()) == 0
    assert iterator.get_next_as_optional().has_value()


# As input of training.


def test_a_dataset_goes_into_a_strategy() -> None:
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    data = tf.data.Dataset.range(8).map(lambda x: tf.cast(x, tf.float32)).batch(4)
    dist = strategy.experimental_distribute_dataset(data)

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(lambda x: tf.reduce_sum(x), (batch,))

    sums = [float(strategy.reduce("SUM", step(batch), axis=None)) for batch in dist]
    assert sums == [6.0, 22.0]


def test_a_function_of_the_input_context_makes_the_datasets_of_a_strategy() -> None:
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    def make(context: Any) -> Any:
        size = context.get_per_replica_batch_size(4)
        data = tf.data.Dataset.range(8).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return data.batch(size)

    dist = strategy.distribute_datasets_from_function(make)
    parts = strategy.experimental_local_results(next(iter(dist)))
    assert [part.numpy().tolist() for part in parts] == [[0, 1], [2, 3]]


def test_a_loop_over_a_dataset_in_a_tf_function_adds_all_elements() -> None:
    data = tf.data.Dataset.range(5)

    @tf.function
    def total(data: Any) -> Any:
        result = tf.constant(0, tf.int32)
        for x in data:
            result += tf.cast(x, tf.int32)
        return result

    assert int(total(data)) == 10


def test_keras_models_are_fitted_and_predict() -> None:
    x = np.linspace(0, 1, 16, dtype=np.float32)[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(4)
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    model.compile(tf.keras.optimizers.SGD(0.1), "mse")
    history = model.fit(data.repeat(), epochs=2, steps_per_epoch=4, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert model.predict(data.map(lambda x, y: x), verbose=0).shape == (16, 1)


def test_a_list_that_a_function_of_map_returns_is_a_tuple_of_components() -> None:
    numbers = tf.data.Dataset.range(3)
    pairs = numbers.map(lambda x: [x, x / 2])
    assert [(a.dtype, float(b)) for a, b in pairs][1] == (tf.int64, 0.5)
    assert [int(x) for x in numbers.map(lambda x: [x, x * 2]).map(lambda a, b: a + b)] == [0, 3, 6]
    called = numbers.map(
        lambda x: tf.numpy_function(lambda v: (v, v * 1.5), [x], [tf.int64, tf.float64])
    )
    # Below the top, a list is one tensor.
    assert [(int(a), float(b)) for a, b in called] == [(0, 0.0), (1, 1.5), (2, 3.0)]
    inner = numbers.map(lambda x: {"a": [x, x]}).batch(3)
    assert next(iter(inner))["a"].shape == (3, 2)
    lines = tf.data.Dataset.from_tensors("1,x").map(lambda x: tf.io.decode_csv(x, [0, ""]))
    number, text = next(iter(lines))
    assert (int(number), text.numpy()) == (1, b"x")


def test_joined_strings_are_tensors() -> None:
    found = tf.constant("a") + "b"
    assert (found.dtype, found.numpy()) == (tf.string, b"ab")
    paths = tf.data.Dataset.from_tensor_slices(["x", "y"]).map(lambda p: "dir/" + p + ".png")
    assert [p.numpy() for p in paths] == [b"dir/x.png", b"dir/y.png"]
