"""Smaller namespaces of `tf`: how they are found, and what they hold."""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf
from replicax.foundation import errors
from replicax.tensorflow_files.events import read_events
from replicax.tf import not_offered, tables
from replicax.tf.not_offered import NotOfferedError

# Importing and finding.


def run_python(program: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    return found.stdout.strip()


def test_the_import_loads_neither_keras_nor_readers_nor_tensorflow() -> None:
    program = """
import sys, replicax
replicax.Variable  # imports the public names
before = set(sys.modules)
import replicax.tf as tf
heavy = {"keras", "grain", "optax", "PIL", "tensorflow", "scipy", "fsspec", "absl", "libcst"}
print(sorted(heavy & (set(sys.modules) - before)), len(set(sys.modules) - before) < 40)
x = tf.reduce_sum(tf.constant([1.0, 2.0]))
v = tf.Variable(1.0)
with tf.GradientTape() as tape:
    y = v * v
tape.gradient(y, v)
tf.function(lambda a: a + 1)(x)
print(sorted({"keras", "PIL", "tensorflow", "absl"} & set(sys.modules)))
hasattr(tf, "estimator")
print("keras" in sys.modules)
"""
    assert run_python(program).splitlines() == ["[] True", "[]", "False"]


@pytest.mark.parametrize(
    "program",
    [
        "import replicax.tf as tf; print(float(tf.Variable(1.0) + 1.0))",
        "from replicax import metrics; m = metrics.Mean(); m.update_state(2.0); print(m.result())",
        "from replicax.compat.v1 import distribute; print(2.0 * distribute.has_strategy() + 2.0)",
    ],
)
def test_a_part_of_the_library_works_without_a_name_of_the_package(program: str) -> None:
    assert run_python(program).splitlines() == ["2.0"]


def test_modules_of_the_package_do_not_hide_names_of_tensorflow() -> None:
    file = importlib.import_module("replicax.tf.function")
    importlib.import_module("replicax.tf.dispatch")
    assert tf.function is file.function
    assert tf.dtypes.cast(1.5, tf.int32).numpy() == 1
    assert not hasattr(tf, "dispatch")


def test_every_name_of_a_table_resolves() -> None:
    for path, table in tables.tables().items():
        module = importlib.import_module(f"replicax.tf.{path}" if path else "replicax.tf")
        missing = [name for name in table.list_names() if not hasattr(module, name)]
        assert not missing, f"tf.{path}"


def test_names_can_be_imported_and_listed() -> None:
    assert "reduce_sum" in dir(tf)
    assert "Dataset" in dir(tf.data)
    found: dict[str, Any] = {}
    exec("from replicax.tf.math import *", found)
    assert found["reduce_sum"] is tf.math.reduce_sum
    module = importlib.import_module("replicax.tf.config.experimental")
    assert module.set_memory_growth is tf.config.experimental.set_memory_growth


def test_an_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(NotOfferedError, match="Did you mean `reduce_sum`"):
        _ = tf.reduce_sun
    with pytest.raises(AttributeError, match="Did you mean `map_structure`"):
        _ = tf.nest.map_structur


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("estimator.Estimator", "Keras model"),
        ("Session", "tf.function"),
        ("compat.v1.Session", "tf.function"),
        ("compat.v1.placeholder", "arguments of the function"),
        ("feature_column.numeric_column", "tf.keras.layers"),
        ("lookup.StaticHashTable", "Python dict"),
        ("ragged.constant", "padded_batch"),
        ("RaggedTensor", "padded_batch"),
        ("sparse.sparse_dense_matmul", "dense tensors"),
        ("load_op_library", "jax.ffi"),
        ("lite.TFLiteConverter", "saved_model"),
        ("experimental.dtensor", "jax.sharding"),
        ("data.experimental.service", "InputContext"),
        ("train.AdamOptimizer", "tf.keras.optimizers"),
        ("to_int32", "tf.compat.v1.to_int32"),
        ("log", "tf.math.log"),
        ("gfile.Exists", "io.gfile"),
        ("summary.trace_on", "profiler"),
    ],
)
def test_what_is_not_offered_says_what_to_write(name: str, text: str) -> None:
    with pytest.raises(NotOfferedError) as caught:
        operator.attrgetter(name)(tf)
    assert text in str(caught.value)
    assert text in not_offered.advice(name)


# tf.config, tf.version, tf.tpu, tf.profiler.


def test_devices_are_listed_without_starting_others() -> None:
    assert tf.config.list_physical_devices("GPU") == []
    (cpu,) = tf.config.list_physical_devices("CPU")
    assert cpu.device_type == "CPU"
    assert tf.config.list_logical_devices("CPU")
    tf.config.experimental.set_memory_growth(cpu, True)
    assert tf.config.experimental.get_memory_growth(cpu)
    tf.config.threading.set_intra_op_parallelism_threads(2)
    assert tf.config.threading.get_intra_op_parallelism_threads() == 2
    assert tf.python.client.device_lib.list_local_devices()[0].device_type == "CPU"


def test_versions() -> None:
    assert tf.__version__ == tf.version.VERSION == tf.compat.v1.__version__ == "2.21.0"


def test_tpu_systems_start_with_the_devices_that_there_are() -> None:
    topology = tf.tpu.experimental.initialize_tpu_system(None)
    assert topology.mesh_shape[0] >= 1
    tf.tpu.experimental.shutdown_tpu_system()


def test_a_profile_is_written(tmp_path: Path) -> None:
    profiler = tf.profiler.experimental
    options = profiler.ProfilerOptions(host_tracer_level=1)
    with profiler.Profile(str(tmp_path), options):
        with pytest.raises(errors.ContextError, match="stop"):
            profiler.start(str(tmp_path))
        with profiler.Trace("train", step_num=tf.constant(1), _r=1):
            tf.constant(1.0) + 1.0
    assert list(tmp_path.rglob("*.xplane.pb"))
    with pytest.raises(errors.ContextError, match="start"):
        profiler.stop()


# tf.test.


class Case(tf.test.TestCase):
    # A method of version 1 with the name of a test.
    test_session = None  # type: ignore[assignment]

    def test_assertions(self) -> None:
        self.assertAllClose({"a": [1.0, tf.constant(2.0)]}, {"a": np.array([1.0, 2.0 + 1e-8])})
        self.assertAllEqual([tf.constant([1]), tf.constant([2, 3])], [[1], [2, 3]])
        self.assertNotAllClose([1.0], [1.1])
        self.assertNotAllEqual([1], [2])
        self.assertAllInRange(tf.constant([1, 2]), 1, 2)
        self.assertAllGreater([2, 3], 1)
        self.assertShapeEqual(tf.zeros([2, 3]), np.ones((2, 3)))
        self.assertDTypeEqual(tf.zeros([1]), np.float32)
        self.assertLen([1, 2], 2)
        with self.assertRaisesWithPredicateMatch(ValueError, "bad"):
            raise ValueError("bad value")
        assert self.evaluate({"x": tf.constant(3)}) == {"x": 3}
        assert Path(self.get_temp_dir()).is_dir()


@pytest.mark.parametrize(
    "check",
    [
        lambda case: case.assertAllClose([1.0], [1.1]),
        lambda case: case.assertAllClose([1.0], [[1.0]]),
        lambda case: case.assertAllClose({"a": 1}, {"b": 1}),
        lambda case: case.assertAllEqual([[1], [2, 3]], [[1], [2, 4]]),
        lambda case: case.assertNotAllEqual([1], [1]),
        lambda case: case.assertAllInRange([1, 5], 1, 2),
        lambda case: case.assertAllInSet([1, 5], [1, 2]),
        lambda case: case.assertAllLess([1, 5], 5),
        lambda case: case.assertNear(1.0, 1.5, 0.1),
    ],
)
def test_assertions_fail_where_they_should(check: Any) -> None:
    with pytest.raises(AssertionError):
        check(tf.test.TestCase())


def test_compute_gradient_agrees_with_differences() -> None:
    exact, measured = tf.test.compute_gradient(lambda x: x * x, [tf.constant([1.0, 3.0])])
    np.testing.assert_allclose(exact[0], [[2, 0], [0, 6]])
    np.testing.assert_allclose(measured[0], exact[0], atol=1e-2)


def test_facts_about_the_build() -> None:
    assert not tf.test.is_gpu_available()
    assert tf.test.gpu_device_name() == ""
    assert tf.test.is_built_with_xla()
    with pytest.raises(errors.UnsupportedError, match="replicax launch"):
        tf.test.create_local_cluster(1, 1)


# tf.nest, tf.errors, tf.compat, tf.autograph, tf.experimental.


def test_structures_that_differ_are_found() -> None:
    tf.nest.assert_same_structure({"a": [1]}, {"a": [2]})
    with pytest.raises(ValueError, match="same"):
        tf.nest.assert_same_structure([1, 2], [1])
    with pytest.raises(TypeError, match="check_types"):
        tf.nest.assert_same_structure([1], (1,))
    with pytest.raises(ValueError, match="leaves"):
        tf.nest.pack_sequence_as([1, 2], [1])


def test_errors_of_replicax_are_caught_by_their_names_of_tensorflow() -> None:
    with contextlib.suppress(tf.errors.OutOfRangeError):
        raise errors.OutOfRangeError("no more data")
    assert issubclass(errors.DistributeError, tf.errors.OpError)
    assert tf.errors.error_code(errors.NotFoundError("x")) == tf.errors.NOT_FOUND == 5
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        tf.function(lambda x: 1 if x > 0 else 2)(tf.constant(1.0))


def test_text_and_dimensions() -> None:
    assert tf.compat.as_bytes("ä") == "ä".encode()
    assert tf.compat.as_text(b"a") == tf.compat.as_str(b"a") == "a"
    assert tf.compat.as_str_any(3) == "3"
    assert tf.compat.dimension_value(tf.TensorShape([None, 3])[1]) == 3
    assert tf.compat.dimension_at_index(tf.TensorShape([None, 3]), 0) is None
    with pytest.raises(TypeError):
        tf.compat.as_bytes(3)


def test_settings_of_autograph_are_accepted() -> None:
    assert tf.autograph.experimental.do_not_convert(len) is len
    tf.autograph.set_verbosity(0)
    tf.autograph.experimental.set_loop_options(parallel_iterations=1)


def test_async_scopes_and_optional_values() -> None:
    with tf.experimental.async_scope():
        x = tf.constant(1.0) + 1.0
    assert float(x) == 2.0
    tf.experimental.async_clear_error()
    optional = tf.experimental.Optional.from_value(3)
    assert optional.has_value()
    with pytest.raises(errors.InvalidArgumentError):
        tf.experimental.Optional.empty(tf.TensorSpec([])).get_value()


def test_functions_of_numpy_have_gradients() -> None:
    names = tf.experimental.numpy
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = names.sum(names.square(x))
    assert tape.gradient(y, x).numpy().tolist() == [2.0, 4.0]
    names.random.seed(1)
    first = names.random.randn(3).numpy()
    names.random.seed(1)
    np.testing.assert_array_equal(first, names.random.randn(3).numpy())


def test_control_dependencies_scopes_and_groups_run_as_code_is_written() -> None:
    v = tf.Variable(1.0)
    with tf.control_dependencies([v.assign(2.0)]), tf.name_scope("block") as scope:
        assert scope == "block/"
        assert tf.group(v.assign_add(1.0)) is None
    assert float(v) == 3.0
    assert tf.executing_eagerly()
    assert tf.function(lambda: tf.constant(tf.executing_eagerly()))().numpy() == np.False_
    assert tf.get_static_value(tf.constant([1, 2])).tolist() == [1, 2]
    assert tf.is_tensor(v)
    assert not tf.is_tensor([1])


# tf.compat.v1.


def test_configurations_are_kept() -> None:
    v1 = tf.compat.v1
    config = v1.ConfigProto(allow_soft_placement=True, gpu_options=v1.GPUOptions(allow_growth=True))
    config.gpu_options.per_process_gpu_memory_fraction = 0.5
    config.device_filters.append("/job:ps")
    config.graph_options.rewrite_options.remapping = 1
    assert config.gpu_options.allow_growth
    assert config.allow_soft_placement
    copy = v1.ConfigProto()
    copy.CopyFrom(config)
    assert copy.graph_options.rewrite_options.remapping == 1
    v1.enable_eager_execution()
    v1.enable_v2_behavior()


def test_messages_are_logged_at_their_levels(caplog: pytest.LogCaptureFixture) -> None:
    v1_logging = tf.compat.v1.logging
    before = tf.get_logger().level
    try:
        v1_logging.set_verbosity(v1_logging.INFO)
        assert v1_logging.get_verbosity() == logging.INFO == v1_logging.INFO
        with caplog.at_level(logging.DEBUG, "replicax"):
            v1_logging.info("loss %.1f", 0.5)
            v1_logging.warn("careful")
            for i in range(4):
                v1_logging.log_every_n(v1_logging.INFO, "each %d", 2, i)
    finally:
        tf.get_logger().setLevel(before)
    assert [r.getMessage() for r in caplog.records] == ["loss 0.5", "careful", "each 0", "each 2"]


def test_flags_are_read_from_the_command_line_with_and_without_app_run() -> None:
    program = """
import sys
sys.argv = ["x", "--batch_size=3", "--other=1"]
import replicax.tf as tf
flags = tf.compat.v1.flags
flags.DEFINE_integer("batch_size", 8, "")
flags.DEFINE_string("name", "a", "")
tf.compat.v1.app.flags.DEFINE_bool("fast", False, "")
FLAGS = flags.FLAGS
print(FLAGS.batch_size)
def main(argv):
    print(FLAGS.batch_size, FLAGS.name, FLAGS.fast, argv[1:])
tf.compat.v1.app.run(main, argv=["x", "--batch_size=16", "--fast", "rest"])
"""
    assert run_python(program).splitlines() == ["3", "16 a True ['rest']"]


def test_initializers_of_version_1_take_a_dtype_and_have_its_defaults() -> None:
    v1 = tf.compat.v1
    assert v1.zeros_initializer(tf.float32)([2]).numpy().tolist() == [0.0, 0.0]
    assert v1.constant_initializer(2.0, dtype=tf.float32)([1]).numpy().tolist() == [2.0]
    assert float(np.std(v1.random_normal_initializer(seed=1)([1000]).numpy())) > 0.8
    layer = tf.keras.layers.Dense(2, kernel_initializer=v1.truncated_normal_initializer(stddev=0.1))
    assert np.abs(layer(tf.ones([1, 3])).numpy()).max() < 1.0


def test_the_strategies_of_version_1_are_those_of_replicax() -> None:
    strategy = tf.compat.v1.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    assert isinstance(strategy, rx.compat.v1.distribute.MirroredStrategy)
    values = strategy.run(lambda: tf.constant(1.0))
    assert float(strategy.reduce("SUM", values, axis=None)) == 2.0


def test_namespaces_of_version_1_have_their_own_names_beside_those_of_version_2() -> None:
    v1 = tf.compat.v1
    image = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1)
    found = v1.image.resize_nearest_neighbor(image, [4, 4]).numpy()
    np.testing.assert_array_equal(found[0, ::2, ::2, 0], image[0, :, :, 0])
    assert v1.image.flip_left_right is tf.image.flip_left_right
    v1.random.set_random_seed(5)
    first = v1.random_uniform([3]).numpy()
    v1.set_random_seed(5)
    np.testing.assert_array_equal(first, v1.random.uniform([3]).numpy())
    assert v1.nn.relu is tf.nn.relu
    with pytest.raises(NotOfferedError, match=r"tf\.keras\.losses"):
        _ = v1.losses.mean_squared_error


# tf.summary.


def test_summaries_are_written_with_their_steps(tmp_path: Path) -> None:
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=0):
        tf.summary.scalar("loss", 0.5)
        tf.summary.scalar("loss", tf.constant(0.25), step=1)
        with tf.summary.record_if(False):
            tf.summary.scalar("loss", 9.0, step=2)

    @tf.function
    def step(x: Any, number: Any) -> Any:
        with writer.as_default():
            tf.summary.scalar("inside", x * 2, step=number)
        return x

    for i in range(2):
        step(tf.constant(float(i)), tf.constant(i + 10))
    writer.flush()
    writer.close()
    (path,) = tmp_path.glob("events.*")
    found = [
        (event.step, value.tag, float(value.tensor))
        for event in read_events(path)
        for value in event.values
    ]
    assert sorted(found) == [
        (0, "loss", 0.5),
        (1, "loss", 0.25),
        (10, "inside", 0.0),
        (11, "inside", 2.0),
    ]


# Recorded from TensorFlow 2.21: method, align_corners, width, pixels.
_RESIZED: list[tuple[int, bool, int, list[float]]] = [
    (0, False, 6, [0.0, 6.6667, 13.3333, 20.0, 33.3333, 40.0]),
    (0, False, 3, [0.0, 13.3333, 33.3333]),
    (0, True, 6, [0.0, 6.0, 12.0, 18.0, 28.0, 40.0]),
    (0, True, 3, [0.0, 15.0, 40.0]),
    (1, False, 6, [0.0, 0.0, 10.0, 20.0, 20.0, 40.0]),
    (1, False, 3, [0.0, 10.0, 20.0]),
    (1, True, 6, [0.0, 10.0, 10.0, 20.0, 20.0, 40.0]),
    (1, True, 3, [0.0, 20.0, 40.0]),
    (2, False, 6, [0.0, 5.7443, 13.1462, 20.0, 34.2655, 42.2222]),
    (2, False, 3, [0.0, 13.1462, 34.2655]),
    (2, True, 6, [0.0, 5.036, 12.2416, 16.5575, 28.8483, 40.0]),
    (2, True, 3, [0.0, 14.0625, 40.0]),
    (3, False, 6, [0.0, 5.0, 10.0, 20.0, 30.0, 40.0]),
    (3, False, 3, [2.5, 15.0, 35.0]),
    (3, True, 6, [0.0, 3.3333, 10.0, 16.6667, 20.0, 40.0]),
    (3, True, 3, [3.3333, 16.6667, 40.0]),
]


@pytest.mark.parametrize(("method", "corners", "width", "expected"), _RESIZED)
def test_version_1_resizes_images_by_its_own_rules(
    method: int, corners: bool, width: int, expected: list[float]
) -> None:
    image = np.array([0, 10, 20, 40], np.uint8).reshape(1, 4, 1)
    found = tf.compat.v1.image.resize(image, (1, width), method, align_corners=corners)
    np.testing.assert_allclose(found.numpy().ravel(), expected, atol=1e-3)
    same = tf.compat.v1.image.resize(image, (1, 4), method, align_corners=corners)
    assert same.dtype == tf.uint8


def test_version_1_refuses_two_rules_for_centres_at_once() -> None:
    image = np.zeros((1, 2, 2, 1), np.float32)
    with pytest.raises(errors.InvalidArgumentError, match="align_corners"):
        tf.compat.v1.image.resize_bilinear(image, (4, 4), True, half_pixel_centers=True)
