"""`tf.train` and `tf.saved_model`: checkpoints, readers, averages, and exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax.tf as tf
from replicax.foundation import errors

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tensorflow"


class Scale(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable([2.0, 3.0], name="w")
        self.steps = tf.Variable(0, trainable=False, name="steps")

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def __call__(self, x: Any) -> Any:
        return x * self.w

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32, name="x")])
    def total(self, x: Any) -> Any:
        return {"total": tf.reduce_sum(x), "count": tf.size(x)}


# Checkpoints.


def test_a_checkpoint_saves_and_restores_by_name(tmp_path: Path) -> None:
    module = Scale()
    checkpoint = tf.train.Checkpoint(model=module, epoch=tf.Variable(7))
    path = checkpoint.save(str(tmp_path / "ckpt"), options=tf.train.CheckpointOptions())
    assert path == str(tmp_path / "ckpt-1")
    assert checkpoint.save_counter.numpy() == 1
    module.w.assign([0.0, 0.0])
    checkpoint.restore(path).assert_consumed()
    assert module.w.numpy().tolist() == [2.0, 3.0]
    assert tf.train.list_variables(path) == [
        ("epoch", []),
        ("model/steps", []),
        ("model/w", [2]),
    ]


def test_a_root_is_saved_without_a_name_and_a_directory_means_its_newest(tmp_path: Path) -> None:
    module = Scale()
    checkpoint = tf.train.Checkpoint(module)
    checkpoint.save(str(tmp_path / "ckpt"))
    module.w.assign([5.0, 6.0])
    checkpoint.save(str(tmp_path / "ckpt"))
    module.w.assign([0.0, 0.0])
    checkpoint.restore(str(tmp_path)).expect_partial()
    assert module.w.numpy().tolist() == [5.0, 6.0]
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert reader.has_tensor("w")
    assert reader.get_variable_to_shape_map() == {"steps": [], "w": [2]}
    assert reader.get_variable_to_dtype_map()["w"] == "float32"
    assert reader.get_tensor("w/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [5.0, 6.0]
    assert tf.train.load_variable(str(tmp_path), "w").tolist() == [5.0, 6.0]


def test_a_root_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentTypeError, match="root"):
        tf.train.Checkpoint(object()).save(str(tmp_path / "ckpt"))


def test_no_checkpoint_to_restore_does_nothing(tmp_path: Path) -> None:
    module = Scale()
    found = tf.train.latest_checkpoint(str(tmp_path))
    assert found is None
    tf.train.Checkpoint(module=module).restore(found)
    assert tf.train.get_checkpoint_state(str(tmp_path)) is None
    assert module.w.numpy().tolist() == [2.0, 3.0]


def test_a_manager_keeps_the_newest(tmp_path: Path) -> None:
    step = tf.Variable(0)
    checkpoint = tf.train.Checkpoint(step=step)
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    for number in range(1, 4):
        step.assign(number)
        assert manager.save() == str(tmp_path / f"ckpt-{number}")
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-3")
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == manager.latest_checkpoint
    assert state.all_model_checkpoint_paths == manager.checkpoints
    assert len(manager.checkpoints) == 2
    step.assign(0)
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert int(step) == 3
    manager.save(checkpoint_number=10)
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-10")


def test_a_manager_waits_for_its_interval(tmp_path: Path) -> None:
    step = tf.Variable(0)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step),
        str(tmp_path),
        max_to_keep=None,
        step_counter=step,
        checkpoint_interval=5,
    )
    saved = []
    for number in range(1, 12):
        step.assign(number)
        if manager.save():
            saved.append(number)
    assert saved == [1, 6, 11]


def test_variables_of_a_strategy_are_restored_on_all_replicas(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = tf.Variable([1.0, 2.0])
    path = tf.train.Checkpoint(v=v).write(str(tmp_path / "a"))
    v.assign([0.0, 0.0])
    tf.train.Checkpoint(v=v).read(path).assert_consumed()
    values = strategy.run(lambda: v + 0.0)
    assert [x.numpy().tolist() for x in values.values] == [[1.0, 2.0]] * 2


def test_checkpoints_that_tensorflow_wrote_are_read() -> None:
    folder = str(FIXTURES / "module")
    listed = dict(tf.train.list_variables(folder))
    assert listed["model/dense/kernel/.ATTRIBUTES/VARIABLE_VALUE"] == [3, 4]
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    kernel = reader.get_tensor("model/dense/kernel/.ATTRIBUTES/VARIABLE_VALUE")
    module = tf.Module()
    module.dense = tf.Module()
    module.dense.kernel = tf.Variable(tf.zeros([3, 4]))
    tf.train.Checkpoint(model=module).restore(folder).expect_partial()
    np.testing.assert_array_equal(module.dense.kernel.numpy(), kernel)
    assert reader.has_tensor("model/dense/bias/.ATTRIBUTES/VARIABLE_VALUE")


def test_new_checkpoints_are_iterated_over(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(v=tf.Variable(1.0)).save(str(tmp_path / "ckpt"))
    assert list(tf.train.checkpoints_iterator(str(tmp_path), timeout=0)) == [path]


def test_python_state_is_saved_as_a_string(tmp_path: Path) -> None:
    class Names(tf.train.experimental.PythonState):
        def __init__(self) -> None:
            self.names = ["a", "b"]

        def serialize(self) -> str:
            return ",".join(self.names)

        def deserialize(self, string_value: str) -> None:
            self.names = string_value.split(",")

    state = Names()
    checkpoint = tf.train.Checkpoint(names=state)
    path = checkpoint.save(str(tmp_path / "ckpt"))
    state.names = []
    checkpoint.restore(path)
    assert state.names == ["a", "b"]


def test_a_cluster_spec_has_jobs_and_addresses() -> None:
    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})
    assert spec.num_tasks("worker") == 2
    assert spec.task_address("ps", 0) == "c:3"


# Saved models.


def test_a_module_is_exported_and_loaded_without_its_class(tmp_path: Path) -> None:
    tf.saved_model.save(Scale(), str(tmp_path / "model"))
    assert tf.saved_model.contains_saved_model(str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert loaded(tf.ones([1, 2])).numpy().tolist() == [[2.0, 3.0]]
    assert int(loaded.total(tf.constant([1.0, 2.0]))["count"]) == 2
    assert isinstance(loaded.w, tf.Variable)
    loaded.w.assign([1.0, 1.0])
    assert loaded(tf.ones([2, 2])).numpy().tolist() == [[1.0, 1.0]] * 2
    assert [v.name for v in loaded.trainable_variables] == ["w:0"]


def test_signatures_take_names_and_return_dicts(tmp_path: Path) -> None:
    module = Scale()
    tf.saved_model.save(
        module,
        str(tmp_path / "model"),
        signatures={"serving_default": module.total, "scale": module.__call__},
        options=tf.saved_model.SaveOptions(experimental_io_device="/job:localhost"),
    )
    loaded = tf.saved_model.load(str(tmp_path / "model"), options=tf.saved_model.LoadOptions())
    total = loaded.signatures[tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY]
    assert float(total(x=tf.constant([1.0, 2.0]))["total"]) == 3.0
    scaled = loaded.signatures["scale"](tf.ones([1, 2]))
    assert scaled["output_0"].numpy().tolist() == [[2.0, 3.0]]
    assert total.structured_input_signature[0][0].shape == [None]


def test_a_function_with_specs_of_its_own_is_a_signature(tmp_path: Path) -> None:
    module = Scale()
    double = tf.function(lambda x: x * 2)
    concrete = double.get_concrete_function(tf.TensorSpec([None], tf.float32))
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=concrete)
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    found = loaded.signatures["serving_default"](tf.constant([1.0, 4.0]))
    assert found["output_0"].numpy().tolist() == [2.0, 8.0]


def test_the_gradient_of_a_loaded_function_reaches_its_variables(tmp_path: Path) -> None:
    tf.saved_model.save(Scale(), str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(loaded(tf.constant([[1.0, 10.0]])))
    assert tape.gradient(y, loaded.w).numpy().tolist() == [1.0, 10.0]


def test_keras_models_are_exported_in_inference(tmp_path: Path) -> None:
    keras = tf.keras
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
    )
    x = np.ones((2, 4), np.float32)
    tf.saved_model.save(model, str(tmp_path / "m"))
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    expected = model(x, training=False).numpy()
    np.testing.assert_allclose(loaded(x).numpy(), expected, rtol=1e-6)
    found = loaded.signatures["serving_default"](inputs=tf.constant(x))["output_0"]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert loaded(np.ones((5, 4), np.float32)).shape == (5, 3)
    assert len(loaded.trainable_variables) == 4


def test_keras_models_of_several_inputs_are_exported_by_name(tmp_path: Path) -> None:
    keras = tf.keras
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
    model = keras.Model(inputs, keras.layers.Add()([inputs["a"], inputs["b"]]))
    tf.saved_model.save(model, str(tmp_path / "m"))
    found = tf.saved_model.load(str(tmp_path / "m")).signatures["serving_default"]
    result = found(a=tf.constant([[1.0]]), b=tf.constant([[2.0]]))
    assert result["output_0"].numpy().tolist() == [[3.0]]


def test_a_model_that_was_not_built_cannot_be_exported(tmp_path: Path) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    with pytest.raises(errors.InvalidArgumentError, match="was not built"):
        tf.saved_model.save(model, str(tmp_path / "m"))


def test_a_model_of_tensorflow_is_refused_with_the_way_to_its_weights() -> None:
    with pytest.raises(errors.UnsupportedError, match="load_checkpoint"):
        tf.saved_model.load(str(FIXTURES / "saved_model"))
    assert tf.saved_model.contains_saved_model(str(FIXTURES / "saved_model"))
    assert tf.train.list_variables(str(FIXTURES / "saved_model"))
