"""Objects of every strategy are restored from checkpoints that TensorFlow 2.21 has written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.checkpointing import sources

FILES = Path(__file__).parent.parent / "fixtures" / "tensorflow"
EXPECTED: dict[str, np.ndarray] = dict(np.load(FILES / "expected.npz"))
FACTS: dict[str, Any] = json.loads((FILES / "expected.json").read_text())
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class Dense(rx.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.kernel = rx.Variable(np.zeros(shape, np.float32), name="kernel")
        self.bias = rx.Variable(np.zeros(shape[-1:], np.float32), name="bias")


class Model(rx.Module):
    """The model of `make_fixtures.write_module`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = Dense(3, 4)
        self.blocks = [Dense(2, 2), Dense(2, 2)]
        self.heads = {"a": Dense(1, 2), "b": Dense(1, 2)}
        self.shared = self.blocks[0].kernel


def expected(prefix: str, path: str) -> np.ndarray:
    return EXPECTED[f"{prefix}|{path}{VALUE}"]


def require_model(model: Model, prefix: str = "module/ckpt-2") -> None:
    variables = {
        "model/dense/kernel": model.dense.kernel,
        "model/dense/bias": model.dense.bias,
        "model/shared": model.blocks[0].kernel,
        "model/blocks/1/bias": model.blocks[1].bias,
        "model/heads/b/kernel": model.heads["b"].kernel,
    }
    for path, variable in variables.items():
        for copy in getattr(variable, "values", (variable,)):
            np.testing.assert_array_equal(np.asarray(copy.numpy()), expected(prefix, path))


# Modules, variables and plain values.


@pytest.mark.every_strategy
def test_a_module_is_restored_by_object_path(strategy: Any) -> None:
    with strategy.scope():
        model = Model()
        # TensorFlow's counter has 64 bits, ours 32.
        step = rx.Variable(0, name="step")
    checkpoint = rx.train.Checkpoint(model=model, step=step)
    status = checkpoint.restore(FILES / "module/ckpt-2").assert_consumed()
    require_model(model)
    assert int(step) == 42 and step.dtype == np.int32
    assert checkpoint.save_counter == 2
    assert "model/dense/kernel" in status.restored and len(status.restored) == 12
    # Prefixes, directories with a state file, and `read` mean the same.
    step.assign(0)
    checkpoint.read(FILES / "module").assert_consumed()
    assert int(step) == 42
    checkpoint.restore(str(FILES / "module/ckpt-1")).assert_consumed()
    assert int(step) == 41 and checkpoint.save_counter == 1
    require_model(model, "module/ckpt-1")


@pytest.mark.every_strategy
def test_objects_created_after_the_restore_get_their_values(strategy: Any) -> None:
    checkpoint = rx.train.Checkpoint()
    status = checkpoint.restore(FILES / "module/ckpt-2")
    with strategy.scope():
        checkpoint.model = model = Model()
        require_model(model)
        checkpoint.step = 0
    assert checkpoint.step == 42
    status.assert_consumed()

    class Late(rx.Module):
        pass

    late = Late()
    checkpoint = rx.train.Checkpoint(model=late)
    checkpoint.restore(FILES / "module/ckpt-2")
    with strategy.scope():
        late.dense = Dense(3, 4)  # type: ignore[attr-defined]
    found = late.dense.kernel.numpy()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found, expected("module/ckpt-2", "model/dense/kernel"))


def test_plain_values_and_arrays_are_restored() -> None:
    checkpoint = rx.train.Checkpoint(
        scalar=0.0, scalar_text="", int64=np.zeros((2, 3), np.int64), bool=np.zeros((2, 3), bool)
    )
    status = checkpoint.restore(FILES / "dtypes/all")
    status.assert_existing_objects_matched()
    assert checkpoint.scalar == 2.5 and checkpoint.scalar_text == "hello"
    assert checkpoint.int64.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert "bfloat16" in status.pending and "text" in status.pending
    with pytest.raises(rx.errors.StructureError, match="there is none for 'bfloat16'"):
        status.assert_consumed()
    assert "bfloat16" in status.expect_partial().unused


def test_variables_of_a_saved_model_are_restored(strategy: Any) -> None:
    class Scale(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = rx.Variable(np.zeros(3, np.float32))
            self.offset = rx.Variable(np.zeros(3, np.float32))

    with strategy.scope():
        scale = Scale()
    # The root of a SavedModel is the model itself, whatever its name is here.
    rx.train.Checkpoint(anything=scale).read(FILES / "saved_model").assert_consumed()
    assert scale.factor.numpy().tolist() == [2.0, 2.125, 2.25]
    assert scale.offset.numpy().tolist() == [9.0, 9.125, 9.25]


def test_checkpoints_without_objects_are_restored_by_name(strategy: Any) -> None:
    with strategy.scope():
        rows, whole = rx.Variable(np.zeros((5, 3), np.float32)), rx.Variable([0.0, 0.0])
    status = rx.train.Checkpoint(rows=rows, whole=whole).restore(FILES / "sliced/parts")
    status.assert_existing_objects_matched()
    np.testing.assert_array_equal(rows.numpy(), EXPECTED["sliced/parts|rows"])
    assert whole.numpy().tolist() == [7.0, 7.125] and status.pending == ("columns", "long")


# What does not fit.


def test_nothing_is_restored_if_a_shape_type_or_value_does_not_fit(strategy: Any) -> None:
    with strategy.scope():
        kernel = rx.Variable(np.zeros((4, 3), np.float32), name="kernel")
        step = rx.Variable(7, name="step")
        real = rx.Variable(7.0, name="real")
    objects: list[tuple[Any, str]] = [
        ({"model": {"dense": {"kernel": kernel}}, "step": step}, r"\(3, 4\)"),
        ({"step": real}, "int64"),
    ]
    for given, match in objects:
        with pytest.raises(rx.errors.InvalidArgumentError, match=match):
            rx.train.Checkpoint(**given).restore(FILES / "module/ckpt-2")
        assert int(step) == 7 and float(real) == 7.0 and not kernel.numpy().any()
    small = np.zeros(8300, np.uint8)
    checkpoint = rx.train.Checkpoint(long=small)
    checkpoint.restore(FILES / "sliced/parts")
    assert checkpoint.long.tolist() == [i % 100 for i in range(8300)]


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    # Eight times the largest value of the fixture is more than an int8 of ours could hold.
    checkpoint = rx.train.Checkpoint(uint64=np.zeros((2, 3), np.int8))
    checkpoint.restore(FILES / "dtypes/all")
    assert checkpoint.uint64.tolist() == [[0, 1, 2], [3, 4, 5]]
    steps = rx.train.Checkpoint(v=np.zeros(2, np.int64))
    steps.v[:] = [1, 2**40]
    with pytest.raises(rx.errors.InvalidArgumentError):
        rx.train.Checkpoint(v=np.zeros(2, np.int32)).restore(steps.write(tmp_path / "own"))


def test_objects_without_values_are_reported(strategy: Any) -> None:
    with strategy.scope():
        model = Model()
        model.extra = rx.Variable(1.0)  # type: ignore[attr-defined]
    status = rx.train.Checkpoint(model=model).restore(FILES / "module/ckpt-2")
    assert status.missing == ("model/extra",) and status.pending == ("step",)
    with pytest.raises(rx.errors.StructureError, match="model/extra"):
        status.assert_existing_objects_matched()
    assert "missing in the checkpoint: 1" in status.report()


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    shutil.copytree(FILES / "module", tmp_path / "module")
    data = tmp_path / "module" / "ckpt-2.data-00000-of-00001"
    octets = bytearray(data.read_bytes())
    octets[3] ^= 1
    data.write_bytes(octets)
    model, step = Model(), rx.Variable(7)
    with pytest.raises(rx.errors.DataLossError, match="checksum"):
        rx.train.Checkpoint(model=model, step=step).restore(tmp_path / "module")
    assert int(step) == 7 and not any(v.numpy().any() for v in model.variables)


def test_the_file_that_all_workers_must_see(tmp_path: Path) -> None:
    assert sources.file_of(FILES / "module") == FILES / "module" / "ckpt-2.index"
    assert sources.file_of(tmp_path / "own") == tmp_path / "own" / "manifest.json"


# Optimizers of optax.

LAYERS = {
    "keras2/adam-1": ("layer_with_weights-0", "layer_with_weights-1", "layer_with_weights-2"),
    "keras2/legacy_adam-1": ("layer-1", "layer-2", "layer-3"),
    "keras3/adam-1": ("_operations/1", "_operations/2", "_operations/3"),
}
WEIGHTS = (("kernel", (4, 3)), ("bias", (3,))), (("gamma", (3,)), ("beta", (3,))), (
    ("kernel", (3, 2)), ("bias", (2,)),
)  # fmt: skip


def model_of(prefix: str) -> tuple[dict[str, Any], list[rx.Variable]]:
    """A model of dicts, with the names of a Keras model in TensorFlow."""
    model: dict[str, Any] = {}
    trained: list[rx.Variable] = []
    for path, weights in zip(LAYERS[prefix], WEIGHTS, strict=True):
        layer = model
        for part in path.split("/"):
            layer = layer.setdefault(part, {})
        for name, shape in weights:
            layer[name] = rx.Variable(np.zeros(shape, np.float32), name=f"{path}/{name}")
            trained.append(layer[name])
    return model, trained


@pytest.mark.parametrize("prefix", LAYERS)
@pytest.mark.strategies("mirrored_2", "default")
def test_the_state_of_adam_is_restored_into_optax(strategy: Any, prefix: str) -> None:
    with strategy.scope():
        model, trained = model_of(prefix)
        # In another order than in TensorFlow.
        optimizer = rx.optimizers.Optimizer(
            optax.inject_hyperparams(optax.adam)(learning_rate=1.0), trained[::-1]
        )
    status = rx.train.Checkpoint(model=model, optimizer=optimizer).restore(FILES / prefix)
    assert int(optimizer.iterations) == 3
    assert float(optimizer.learning_rate) == pytest.approx(0.05)
    loaded = rx.train.load_tf_checkpoint(FILES / prefix)
    for index, variable in enumerate(trained):
        for name, list_name, legacy in (("mu", "_momentums", "m"), ("nu", "_velocities", "v")):
            path = f"optimizer/{list_name}/{index}"
            if "legacy" in prefix:
                layer, _, weight = variable.name.removesuffix(":0").rpartition("/")
                layer = layer.replace("layer-", "layer_with_weights-")
                number = int(layer[-1]) - 1
                path = f"model/{layer[:-1]}{number}/{weight}/.OPTIMIZER_SLOT/optimizer/{legacy}"
            slot = optimizer.get_slot(variable, name)
            np.testing.assert_array_equal(slot.numpy(), loaded[path])
            assert slot.numpy().any() or variable.name.startswith("_op")
    children = optimizer.checkpoint_children()
    counts = [variable for path, variable in children.items() if path.endswith("count")]
    assert counts and all(int(count) == 3 for count in counts)
    assert not [name for name in status.missing if "hyperparams" not in name]


@pytest.mark.strategies("default")
def test_a_momentum_of_another_scale_is_not_restored(strategy: Any) -> None:
    with strategy.scope():
        model, trained = model_of("keras2/adam-1")
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.05, momentum=0.9), trained)
    status = rx.train.Checkpoint(model=model, optimizer=optimizer).restore(FILES / "keras2/sgd-1")
    assert int(optimizer.iterations) == 3
    assert [name for name in status.missing if "trace" in name] == list(status.missing)
    assert len(status.missing) == 6


# Models and optimizers of Keras.


def keras_model() -> keras.Model:
    """The model of `make_fixtures.keras_model`."""
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, activation="relu", name="first")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="second")(x))


class Own(keras.Model):
    """The model of `make_fixtures.write_keras3`, with layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = [keras.layers.Dense(3, activation="relu"), keras.layers.Dense(3)]
        self.head = keras.layers.Dense(2)

    def call(self, x: Any, training: Any = None) -> Any:
        for layer in self.body:
            x = layer(x)
        return self.head(x)


def numbers(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) / 8).reshape(shape).astype(np.float32)


def adam(rate: float) -> keras.optimizers.Optimizer:
    """Divides by no less than epsilon, which keeps rounding errors from growing."""
    return keras.optimizers.Adam(rate, epsilon=1e-2)


X, Y = numbers(8, 4) % 1.0, numbers(8, 2) % 0.5
KERAS = {
    "keras2/adam-1": (keras_model, adam, ()),
    "keras2/legacy_adam-1": (keras_model, adam, ("beta_1", "beta_2", "decay")),
    "keras2/sgd-1": (keras_model, lambda rate: keras.optimizers.SGD(rate, momentum=0.9), ()),
    "keras3/adam-1": (keras_model, adam, ()),
    "keras3/own-1": (Own, lambda rate: keras.optimizers.SGD(rate, momentum=0.9), ()),
}


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("prefix", KERAS)
@pytest.mark.strategies("mirrored_2")
def test_a_keras_model_continues_where_tensorflow_stopped(
    strategy: Any, prefix: str, is_built: bool
) -> None:
    make_model, make_optimizer, left = KERAS[prefix]
    with strategy.scope():
        model, optimizer = make_model(), make_optimizer(1.0)
        model(X)
        if is_built or prefix == "keras3/own-1":
            optimizer.build(model.trainable_variables)
        model.compile(optimizer, loss="mse")
        checkpoint = rx.train.Checkpoint(model=model, optimizer=optimizer)
        status = checkpoint.restore(FILES / prefix)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), EXPECTED[f"{prefix}|predictions"], rtol=1e-5, atol=1e-6
    )
    for _ in range(3):
        model.train_on_batch(X, Y)
    np.testing.assert_allclose(
        model.predict(X, verbose=0), EXPECTED[f"{prefix}|later"], rtol=2e-4, atol=1e-5
    )
    assert int(optimizer.iterations.numpy()) == 6
    assert float(np.asarray(optimizer.learning_rate)) == pytest.approx(0.05)
    assert status.pending == tuple(f"optimizer/{name}" for name in left)
    # TensorFlow saves no metrics of `compile`, and does not miss them either.
    status.assert_existing_objects_matched()


def test_weights_that_keras_3_exported_are_read() -> None:
    model = keras_model()
    status = rx.train.Checkpoint(model=model).read(FILES / "export")
    status.assert_existing_objects_matched()
    found = np.asarray(model(X, training=False))
    np.testing.assert_allclose(found, EXPECTED["export|predictions"], rtol=1e-5, atol=1e-6)


def test_weights_that_keras_2_saved_alone_are_read() -> None:
    model = keras_model()
    rx.train.Checkpoint(model=model).read(FILES / "keras2/weights").assert_consumed()
    found = np.asarray(model(X, training=False))
    np.testing.assert_allclose(found, EXPECTED["keras2/weights|predictions"], rtol=1e-5, atol=1e-6)
