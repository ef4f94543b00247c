"""`tf.keras`: programs as their users write them, with the figures that TensorFlow gives."""

from __future__ import annotations

import contextlib
import importlib
import json
import operator
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf
from replicax.tensorflow_files.events import read_events
from tests.fixtures.tf_keras.programs import PROGRAMS, data

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED: dict[str, Any] = json.loads((FIXTURES / "tf_keras" / "recorded.json").read_text())
FILES = FIXTURES / "tensorflow"
X, Y, CLASSES = data()


@pytest.fixture(params=["alone", "mirrored"])
def scope(request: pytest.FixtureRequest) -> Any:
    """No strategy, and two replicas."""
    if request.param == "alone":
        return contextlib.nullcontext()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


def dense_model(*more: Any) -> Any:
    """A small model with weights of its own."""
    layers = [tf.keras.Input((4,)), *more, tf.keras.layers.Dense(1, kernel_initializer="ones")]
    return tf.keras.Sequential(layers)


# Numbers.


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_under_tensorflow(name: str, scope: Any) -> None:
    with scope:
        found = PROGRAMS[name](tf)
    assert found.keys() == RECORDED[name].keys()
    for key, expected in RECORDED[name].items():
        np.testing.assert_allclose(found[key], expected, rtol=2e-4, atol=2e-5, err_msg=key)


def test_steps_with_a_compiled_loss_equal_the_steps_of_keras(scope: Any) -> None:
    class Old(tf.keras.Sequential):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    class Calling(tf.keras.Sequential):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch)

    histories = []
    for cls in (tf.keras.Sequential, Old, Calling):
        with scope if cls is Old else contextlib.nullcontext():
            dense = tf.keras.layers.Dense(
                1, kernel_initializer="ones", kernel_regularizer=tf.keras.regularizers.l2(0.1)
            )
            model = cls([tf.keras.Input((4,)), dense])
            model.compile("sgd", loss="mse", metrics=["mae"])
        histories.append(model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history)
    for name, values in histories[0].items():
        for other in histories[1:]:
            np.testing.assert_allclose(other[name], values, rtol=1e-5)


def test_a_variable_of_a_layer_is_trained(scope: Any) -> None:
    class Scaled(tf.keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable(2.0, name="scale")
            self.steps = tf.Variable(0.0, trainable=False)

        def build(self, input_shape: Any) -> None:
            self.bias = tf.Variable(tf.zeros([input_shape[-1]]))

        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.steps.assign_add(1.0)
            return inputs * self.scale + self.bias

    with scope:
        model = tf.keras.Sequential([Scaled(), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    layer = model.layers[0]
    assert len(model.trainable_variables) == 4
    assert float(layer.scale.numpy()) != 2.0
    assert np.abs(layer.bias.numpy()).sum() > 0
    assert float(layer.steps.numpy()) == 6.0


def test_ops_of_symbolic_inputs_make_a_functional_model(scope: Any) -> None:
    with scope:
        inputs = tf.keras.Input((4,))
        hidden = tf.nn.relu(tf.keras.layers.Dense(3)(inputs)) * 2.0
        joined = tf.reshape(tf.concat([hidden, inputs], axis=-1), [-1, 7])
        model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(joined))
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    losses = model.fit(X, CLASSES, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    kernel, bias, out, out_bias = model.get_weights()
    expected = np.concatenate([np.maximum(X @ kernel + bias, 0) * 2, X], -1) @ out + out_bias
    np.testing.assert_allclose(model(tf.constant(X)).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_mixed_precision_with_loss_scaling_by_hand(scope: Any) -> None:
    tf.keras.mixed_precision.experimental.set_policy("mixed_float16")
    try:
        with scope:
            model = dense_model(tf.keras.layers.Dense(3))
            optimizer = tf.keras.mixed_precision.LossScaleOptimizer(
                tf.keras.optimizers.SGD(0.1), initial_scale=64
            )
            optimizer.build(model.trainable_variables)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.get_scaled_loss(loss)
        variables = model.trainable_variables
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return scaled / loss, gradients

    before = model.get_weights()
    scale, gradients = step(tf.constant(X), tf.constant(Y))
    assert float(scale) == 64.0
    assert float(optimizer.loss_scale) == 64.0
    for old, new, gradient in zip(before, model.get_weights(), gradients, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * gradient.numpy(), rtol=1e-3, atol=1e-5)


# Data.


def test_fit_takes_tensors_datasets_generators_and_distributed_datasets(scope: Any) -> None:
    def batches() -> Any:
        while True:
            yield tf.constant(X[:8]), tf.constant(Y[:8])

    with scope:
        model = dense_model()
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        distributed = tf.distribute.get_strategy().experimental_distribute_dataset(dataset)
    losses = []
    weights = model.get_weights()
    for given in (dataset, distributed, (tf.constant(X), tf.constant(Y))):
        model.set_weights(weights)
        arguments = given if isinstance(given, tuple) else (given,)
        size = {"batch_size": 8, "shuffle": False} if isinstance(given, tuple) else {}
        losses.append(model.fit(*arguments, **size, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)
    old = {"workers": 2, "max_queue_size": 4, "use_multiprocessing": False}
    model.fit_generator(batches(), steps_per_epoch=2, verbose=0, shuffle=False, **old)
    assert int(model.optimizer.iterations.numpy()) == 11
    assert model.predict(dataset, verbose=0).shape == (24, 1)
    assert model.predict_on_batch(tf.constant(X[:3])).shape == (3, 1)


# Arguments and methods of earlier versions.


def test_optimizers_take_the_arguments_of_keras_2() -> None:
    optimizer = tf.keras.optimizers.legacy.SGD(lr=0.5, momentum=0.0)
    v = tf.Variable(3.0)
    optimizer.minimize(lambda: v * v, var_list=[v])
    assert float(v.numpy()) == 0.0
    optimizer.lr = 0.25
    assert float(optimizer.lr.numpy()) == float(optimizer.learning_rate.numpy()) == 0.25
    tf.keras.backend.set_value(optimizer.lr, 0.125)
    assert tf.keras.backend.get_value(optimizer.lr) == 0.125
    with tf.GradientTape() as tape:
        loss = (v - 4.0) ** 2
    optimizer.minimize(loss, [v], tape=tape)
    assert float(v.numpy()) == 1.0
    optimizer.set_weights(optimizer.get_weights())
    assert [int(optimizer.iterations.numpy()), len(optimizer.weights)] == [2, 2]
    decayed = tf.keras.optimizers.Adam(lr=1.0, decay=0.5)
    decayed.iterations.assign(2)
    assert float(decayed.lr.numpy()) == float(decayed._decayed_lr(tf.float32)) == 0.5


def test_gradients_that_the_user_has_summed_are_not_summed_again() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = tf.keras.optimizers.SGD(1.0)

    def step() -> None:
        context = tf.distribute.get_replica_context()
        gradient = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant(0.25))
        optimizer.apply_gradients([(gradient, v)], experimental_aggregate_gradients=False)

    strategy.run(step)
    assert float(v.numpy()) == 0.5


def test_metrics_losses_and_weights_take_the_arguments_of_keras_2() -> None:
    class Count(tf.keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="count")
            self.rows = self.add_weight("rows", initializer="zeros")

        @tf.function
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.rows.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

        def result(self) -> Any:
            return self.rows

        def reset_states(self) -> None:
            self.rows.assign(0.0)

    count = Count()
    count.update_state(Y, Y)
    assert count.result().numpy() == 24.0
    count.reset_state()
    assert count.result().numpy() == 0.0
    mean = tf.keras.metrics.Mean("loss", dtype=tf.float32)
    mean(2.0)
    mean.update_state([4.0])
    assert mean.result().numpy() == 3.0
    mean.reset_states()
    assert mean.result().numpy() == 0.0
    none = tf.keras.losses.Reduction.NONE
    losses = tf.keras.losses.MeanSquaredError(reduction=none)(Y, Y + 2.0)
    assert losses.numpy().tolist() == pytest.approx([4.0] * 24, abs=1e-5)
    auto = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.AUTO)
    assert float(auto(Y, Y + 2.0)) == pytest.approx(4.0)

    class Old(tf.keras.layers.Layer):
        def build(self, input_shape: Any) -> None:
            self.w = self.add_weight("w", [input_shape[-1], 2], tf.float32, "ones", trainable=False)

        def call(self, inputs: Any) -> Any:
            return tf.matmul(inputs, self.w)

    layer = Old(dynamic=False)
    assert layer(tf.ones((1, 4))).numpy().tolist() == [[4.0, 4.0]]
    assert [layer.w.name, len(layer.trainable_weights)] == ["w", 0]


# Files.


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_models_and_weights_are_saved_to_paths_without_a_suffix(tmp_path: Path) -> None:
    model = dense_model()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    weights = model.get_weights()

    def is_equal(other: Any) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(weights, other.get_weights(), strict=True))

    for name, arguments in (
        ("a", {}),
        ("b/c", {"save_format": "tf"}),
        ("d", {"save_format": "h5"}),
    ):
        for _ in range(2):
            model.save(tmp_path / name, **arguments)
        loaded = tf.keras.models.load_model(str(tmp_path / name))
        assert is_equal(loaded)
        assert int(loaded.optimizer.iterations.numpy()) == 1
    for name, arguments in (
        ("w/ckpt", {}),
        ("w.h5", {}),
        ("v", {"save_format": "h5"}),
        ("u.weights.h5", {}),
    ):
        model.save_weights(str(tmp_path / name), **arguments)
        other = dense_model()
        other.load_weights(str(tmp_path / name))
        assert is_equal(other)
    assert tf.train.latest_checkpoint(str(tmp_path / "w")) == str(tmp_path / "w" / "ckpt")


def test_weights_of_a_tensorflow_checkpoint_are_loaded() -> None:
    inputs = tf.keras.Input((4,))
    x = tf.keras.layers.Dense(3, activation="relu")(inputs)
    x = tf.keras.layers.BatchNormalization()(x)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(x))
    model.load_weights(str(FILES / "keras2" / "weights")).assert_consumed()
    with np.load(FILES / "expected.npz") as expected:
        names = [name for name in expected if name.startswith("keras2/weights|")]
        kernels = [
            expected[name] for name in names if name.endswith("kernel/.ATTRIBUTES/VARIABLE_VALUE")
        ]
    found = model.get_weights()
    assert kernels
    assert all(any(np.array_equal(kernel, weight) for weight in found) for kernel in kernels)


def test_a_saved_model_of_tensorflow_is_refused_with_advice() -> None:
    with pytest.raises(tf.errors.UnimplementedError, match="load_weights"):
        tf.keras.models.load_model(str(FILES / "saved_model"))


def test_callbacks_write_checkpoints_and_event_files(tmp_path: Path, scope: Any) -> None:
    rates = []

    class Rates(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.lr.numpy()))

    with scope:
        model = dense_model()
        model.compile("sgd", "mse")
    callbacks = [
        tf.keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * tf.math.pow(0.5, epoch)),
        tf.keras.callbacks.ModelCheckpoint(
            str(tmp_path / "cp-{epoch:02d}"), save_weights_only=True
        ),
        tf.keras.callbacks.ModelCheckpoint(tmp_path / "best", monitor="loss", save_best_only=True),
        tf.keras.callbacks.TensorBoard(tmp_path / "logs", histogram_freq=1, profile_batch="2,3"),
        Rates(),
    ]
    model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
    assert rates == pytest.approx([0.1, 0.05])
    assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / "cp-02")
    other = dense_model()
    other.load_weights(tmp_path / "cp-02")
    np.testing.assert_array_equal(other.get_weights()[0], model.get_weights()[0])
    assert tf.keras.models.load_model(tmp_path / "best").count_params() == 5
    (file,) = (tmp_path / "logs" / "train").iterdir()
    tags = {value.tag for event in read_events(file) for value in event.values}
    assert {"epoch_loss", "epoch_learning_rate", "keras"} <= tags


# Names.


def test_every_way_to_import_names_works() -> None:
    from replicax.tf.keras.layers import Dense
    from replicax.tf.keras.layers.experimental.preprocessing import Rescaling

    from replicax.tf.keras import Model, layers

    assert Model is tf.keras.models.Model
    assert layers.Dense is Dense is tf.keras.layers.Dense
    assert Rescaling is tf.keras.layers.Rescaling
    backend = importlib.import_module("replicax.tf.keras.backend")
    assert backend is tf.keras.backend
    assert tf.keras.optimizers.experimental.AdamW is tf.keras.optimizers.AdamW
    assert tf.keras.experimental.CosineDecay is tf.keras.optimizers.schedules.CosineDecay
    assert tf.keras.layers.experimental.SyncBatchNormalization().synchronized
    assert "Dense" in dir(tf.keras.layers)
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("utils.multi_gpu_model", "MirroredStrategy"),
        ("estimator.model_to_estimator", "Keras model"),
        ("layers.Dens", "Did you mean `Dense`"),
        ("optimizers.adam", "Did you mean"),
    ],
)
def test_other_names_say_what_to_use(path: str, advice: str) -> None:
    with pytest.raises(AttributeError, match=advice):
        operator.attrgetter(path)(tf.keras)


def test_functions_of_the_backend_compute_with_tensors() -> None:
    k = tf.keras.backend
    x = tf.constant([[1.0, -2.0], [3.0, 4.0]])
    assert k.int_shape(x) == (2, 2)
    assert k.mean(x, axis=0).numpy().tolist() == [2.0, 1.0]
    assert k.sum(k.square(x)).numpy() == 30.0
    assert k.relu(x, alpha=0.5).numpy().tolist() == [[1.0, -1.0], [3.0, 4.0]]
    assert k.concatenate([x, x], axis=0).shape.as_list() == [4, 2]
    assert k.dot(x, k.transpose(x)).numpy().tolist() == [[5.0, -5.0], [-5.0, 25.0]]
    assert k.softmax(tf.zeros((1, 2))).numpy().tolist() == [[0.5, 0.5]]
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = k.mean(k.exp(x) * 0.0 + k.clip(x, -1.0, 3.5))
    assert tape.gradient(loss, x).numpy().tolist() == [[0.25, 0.0], [0.25, 0.0]]
    v = k.variable([1.0, 2.0])
    k.update_add(v, [1.0, 1.0])
    k.moving_average_update(v, [0.0, 0.0], 0.5)
    assert k.get_value(v).tolist() == [1.0, 1.5]


def test_initializers_of_tf_are_functions_and_initialize_layers() -> None:
    assert tf.constant_initializer([1, 2])([2], tf.int32).numpy().tolist() == [1, 2]
    assert tf.random_uniform_initializer(0.0, 1.0, seed=1)([3]).numpy().min() >= 0.0
    layer = tf.keras.layers.Dense(
        2, kernel_initializer=tf.ones_initializer(), bias_initializer=tf.constant_initializer(0.5)
    )
    assert layer(tf.ones((1, 3))).numpy().tolist() == [[3.5, 3.5]]


def test_programs_run_after_the_changes_for_strategies_were_taken_back_and_made_again() -> None:
    layer = tf.keras.layers.Dense(2, kernel_initializer="ones")
    rx.keras.uninstall()
    try:
        assert isinstance(layer(np.ones((1, 3), np.float32)), tf.Tensor)
    finally:
        rx.keras.install()
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(tf.ones((1, 3))))
    assert tape.gradient(total, layer.kernel).numpy().tolist() == [[1.0, 1.0]] * 3


def test_a_mask_that_a_model_deletes_is_not_applied_by_its_loss(scope: Any) -> None:
    class Tagger(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = tf.keras.layers.Embedding(5, 3, mask_zero=True)
            self.out = tf.keras.layers.Dense(4)

        def call(self, x: Any) -> Any:
            logits = self.out(self.embedding(x) * tf.sqrt(3.0))
            # As in TensorFlow's tutorial on transformers: the loss has a mask of its own.
            with contextlib.suppress(AttributeError):
                del logits._keras_mask
            return logits

    def loss(y: Any, y_pred: Any) -> Any:
        losses = tf.keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        weights = tf.cast(y != 0, losses.dtype)
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)

    x = np.asarray([[1, 2, 0], [3, 4, 0]] * 4, np.int32)
    with scope:
        model = Tagger()
        model.compile("sgd", loss, metrics=[loss])
    history = model.fit(x, x % 4, batch_size=4, epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    assert not hasattr(model(tf.constant(x)), "_keras_mask")


def test_iterations_of_accumulating_optimizers_are_tensors(scope: Any) -> None:
    with scope:
        model = dense_model()
        model.compile(tf.keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    model.fit(X, Y, batch_size=len(X) // 4, epochs=1, verbose=0)
    assert model.optimizer.iterations.numpy() == 2


@pytest.mark.parametrize("eagerly", [False, True], ids=["compiled", "eager"])
def test_losses_of_layers_are_found_after_the_tape_of_a_step(scope: Any, eagerly: bool) -> None:
    class Penalty(tf.keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(tf.reduce_mean(x**2))
            return x

    class Trainer(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense_model(Penalty())
            self.penalty = tf.keras.metrics.Mean(name="penalty")

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.inner(x)) + sum(self.inner.losses)
            variables = self.inner.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            self.penalty.update_state(sum(self.inner.losses))
            return {"penalty": self.penalty.result()}

    with scope:
        model = Trainer()
        model.compile("sgd", run_eagerly=eagerly)
    found = model.fit(X, batch_size=len(X), verbose=0).history["penalty"]
    np.testing.assert_allclose(found, [np.mean(X**2)], rtol=1e-5)


def test_a_variable_may_be_the_result_of_a_metric_or_of_a_step() -> None:
    class Seen(tf.keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="seen")
            self.total = self.add_weight(name="total", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.reduce_sum(y_true))

        def result(self) -> Any:
            return self.total

    class Counting(tf.keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"steps": self.optimizer.iterations}

    metric = Seen()
    metric.update_state(tf.ones([3]), tf.ones([3]))
    found = metric.result()
    metric.total.assign(0.0)
    assert isinstance(found, tf.Tensor)
    assert float(found) == 3.0

    x = np.ones((8, 2), np.float32)
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Seen()])
    assert model.fit(x, x[:, :1], 4, verbose=0).history["seen"] == [8.0]
    model = Counting([tf.keras.layers.Dense(1)])
    model.compile("sgd")
    assert model.fit(x, x[:, :1], 4, verbose=0).history["steps"] == [2]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("choose", ["cond", "switch_case"])
def test_branches_of_a_step_assign_variables(replicas: int, choose: str) -> None:
    """Gradient accumulation as programs write it: an update every second step."""

    class Accumulating(tf.keras.Sequential):
        def prepare(self) -> None:
            self.steps = tf.Variable(0, trainable=False)
            self.sums = [
                tf.Variable(tf.zeros_like(v), trainable=False) for v in self.trainable_variables
            ]

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.steps.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            for total, g in zip(
                self.sums, tape.gradient(loss, self.trainable_variables), strict=True
            ):
                total.assign_add(g)
            is_due = tf.equal(self.steps, 2)
            if choose == "cond":
                tf.cond(is_due, self.update, lambda: None)
            else:
                tf.switch_case(tf.cast(is_due, tf.int32), [lambda: None, self.update])
            return {"own_loss": loss}

        def update(self) -> None:
            self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
            self.steps.assign(0)
            for total in self.sums:
                total.assign(tf.zeros_like(total))

    names = ["CPU:0", "CPU:1"][:replicas]
    with tf.distribute.MirroredStrategy(names).scope():
        model = Accumulating([tf.keras.layers.Dense(1, kernel_initializer="ones")])
        model.build((None, 2))
        model.prepare()
        model.compile(tf.keras.optimizers.SGD(0.1))
    x = np.float32([[1.0, 0.0], [0.0, 2.0]] * 3)
    y = np.zeros((6, 1), np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    losses = model.fit(dataset, verbose=0).history["own_loss"]
    # Two steps with the first weights, then one with the new ones; the third is not applied.
    kernel = np.float32([[1.0], [1.0]])
    first = x[:2] @ kernel
    gradient = 2 * 2 * x[:2].T @ first / 2
    bias = 2 * 2 * first.mean()
    kernel = kernel - 0.1 * gradient
    np.testing.assert_allclose(model.trainable_variables[0], kernel, 1e-5)
    np.testing.assert_allclose(model.trainable_variables[1], [-0.1 * bias], 1e-5)
    assert int(model.steps) == 1
    assert losses == pytest.approx([np.mean((x[:2] @ kernel - 0.1 * bias) ** 2)], 1e-4)


def test_weights_of_another_model_are_refused_and_those_of_an_export_loaded() -> None:
    files = Path(__file__).parent.parent / "fixtures" / "tensorflow"
    inputs = tf.keras.Input((4,))
    x = tf.keras.layers.BatchNormalization()(tf.keras.layers.Dense(3, "relu")(inputs))
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(x))
    model.compile("adam", "mse")
    with pytest.raises(rx.errors.StructureError, match="needs a value"):
        model.load_weights(str(files / "saved_model" / "variables" / "variables"))
    model.load_weights(str(files / "export" / "variables" / "variables"))
    with np.load(files / "expected.npz") as expected:
        wanted = expected["export|predictions"]
    rows = np.arange(32, dtype=np.float32).reshape(8, 4) / 8 % 1.0
    np.testing.assert_allclose(model.predict(rows, verbose=0), wanted, 1e-5, 1e-6)


def test_a_loaded_module_without_a_saved_call_says_what_it_needs(tmp_path: Path) -> None:
    class Doubling(tf.Module):
        @tf.function
        def __call__(self, x: Any) -> Any:
            return 2 * x

        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def halved(self, x: Any) -> Any:
            return x / 2

    tf.saved_model.save(Doubling(), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded.halved(tf.constant(3.0))) == 1.5
    with pytest.raises(TypeError, match="input_signature"):
        loaded(tf.constant(3.0))
