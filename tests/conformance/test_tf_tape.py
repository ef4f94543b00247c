"""`tf.GradientTape`, alone and under strategies, against results that TensorFlow has given."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tape_programs

import replicax as rx
import replicax.tf as tf

RESULTS = json.loads(tape_programs.RECORDED.read_text())["results"]


def check(found: Any, wanted: Any) -> None:
    """Compares nested results; numbers may differ by rounding."""
    if isinstance(wanted, list):
        assert isinstance(found, list) and len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            check(one, other)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(found, wanted, rtol=3e-5, atol=2e-6)
    else:
        assert found == wanted


def as_it_is(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


@pytest.fixture(params=["eager", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Compiles functions, or leaves them as they are."""
    return tf.function if request.param == "compiled" else as_it_is


# Eager programs compile their many small ops one by one. By default, these are run eagerly as well;
# all others are compiled as a whole only.
_EAGER_BY_DEFAULT = (
    "a_persistent_tape_gives_several_gradients",
    "second_order",
    "unwatched_and_unconnected_sources",
    "a_custom_loop_with_variables",
)


def with_executors(names: Iterable[str]) -> list[Any]:
    """Returns each name with both ways to run it."""
    found = []
    for name in names:
        marks = [] if name in _EAGER_BY_DEFAULT else [pytest.mark.slow]
        found.append(pytest.param(name, as_it_is, id=f"{name}-eager", marks=marks))
        found.append(pytest.param(name, tf.function, id=f"{name}-compiled"))
    return found


@pytest.mark.parametrize(("name", "compiled"), with_executors(tape_programs.PROGRAMS))
def test_programs_give_the_results_of_tensorflow(name: str, compiled: Any) -> None:
    found = tape_programs.PROGRAMS[name](tf, keras, compiled)
    check(tape_programs.plain(found), RESULTS[name])


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
    "mirrored_2": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
}


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize(("name", "compiled"), with_executors(tape_programs.UNDER_STRATEGIES))
def test_programs_under_strategies_give_the_results_of_tensorflow(
    name: str, kind: str, compiled: Any
) -> None:
    found = tape_programs.UNDER_STRATEGIES[name](tf, keras, compiled, STRATEGIES[kind]())
    check(tape_programs.plain(found), RESULTS[f"{name}[{kind}]"])


# What was wrong once, each without an error.


def test_branches_and_loops_use_recorded_tensors_and_variables(compiled: Any) -> None:
    v, w = tf.Variable(2.0), tf.Variable(3.0)

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * v
            z = tf.cond(x > 0.0, lambda: y * w, lambda: y)
            _, total = tf.while_loop(
                lambda i, _: i < 2, lambda i, t: (i + 1, t + y * w), (0, z), maximum_iterations=2
            )
        return tape.gradient(total, [x, v, w])

    # total = 3·x·v·w
    assert [float(g) for g in compute(tf.constant(5.0))] == [18.0, 45.0, 30.0]


def test_a_model_uses_a_variable_that_it_does_not_own(compiled: Any) -> None:
    scale = tf.Variable(3.0)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

        def call(self, x: Any) -> Any:
            return self.dense(x * scale) * scale

    model = Outer()
    model(tf.ones([1, 2]))

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(model(x))
        return tape.gradient(y, [scale, *model.trainable_variables])

    slope, kernel = compute(tf.constant([[1.0, 2.0]]))
    assert float(slope) == 18.0
    assert kernel.numpy().tolist() == [[9.0], [18.0]]


def test_second_order_after_the_block_has_assigned() -> None:
    v = tf.Variable(3.0)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            y = v * v * v
        v.assign(100.0)
        slope = inner.gradient(y, v)
    assert float(slope) == 27.0
    assert float(outer.gradient(slope, v)) == 18.0


def test_dropout_and_batch_statistics_are_those_of_a_call_without_a_tape(compiled: Any) -> None:
    def make() -> Any:
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dropout(0.5, seed=7),
            ]
        )
        return model, tf.constant(tape_programs.numbers((6, 4), 1.0))

    model, x = make()
    plain = [model(x, training=True).numpy() for _ in range(2)]
    state = [v.numpy() for v in model.non_trainable_variables]
    model, x = make()

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x, training=True)
            loss = tf.reduce_sum(y)
        return y, tape.gradient(loss, model.trainable_variables)

    found = [step(x) for _ in range(2)]
    for (y, gradients), wanted in zip(found, plain, strict=True):
        np.testing.assert_allclose(y.numpy(), wanted, atol=1e-6)
        assert len(gradients) == 2
    assert not np.array_equal(plain[0], plain[1])
    for variable, wanted in zip(model.non_trainable_variables, state, strict=True):
        np.testing.assert_allclose(variable.numpy(), wanted, atol=1e-6)


def test_gradients_equal_those_of_value_and_grad(compiled: Any) -> None:
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 3), keras.layers.Flatten()]
    )
    tape_programs.fill(model)
    x = tape_programs.numbers((2, 8, 8, 1))

    @compiled
    def by_tape(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(model(x)) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    def loss_fn(kernel: Any, bias: Any) -> Any:
        convolved = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jax.nn.relu(convolved + bias) ** 2)

    loss, gradients = by_tape(tf.constant(x))
    values = [jnp.asarray(v.numpy()) for v in model.trainable_variables]
    wanted, slopes = jax.value_and_grad(loss_fn, argnums=(0, 1))(*values)
    np.testing.assert_allclose(loss.numpy(), wanted, rtol=1e-6)
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-5, atol=1e-7)


def test_tapes_of_two_threads_do_not_meet() -> None:
    def slope(x: float) -> float:
        v = tf.Variable(x)
        with tf.GradientTape() as tape:
            y = v * v
        return float(tape.gradient(y, v))

    with ThreadPoolExecutor(2) as pool, tf.GradientTape() as outer:
        c = tf.constant(1.0)
        outer.watch(c)
        assert list(pool.map(slope, [1.0, 2.0, 3.0])) == [2.0, 4.0, 6.0]
        y = c * 2.0
    assert float(outer.gradient(y, c)) == 2.0


def test_a_tape_frees_what_it_recorded() -> None:
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = v * v
    kept = weakref.ref(y._raw)
    tape.gradient(y, v)
    del y
    assert kept() is None


@pytest.mark.parametrize("kind", STRATEGIES)
def test_mixed_precision_with_loss_scaling(kind: str, compiled: Any) -> None:
    strategy = STRATEGIES[kind]()
    with strategy.scope():
        policy = keras.mixed_precision.DTypePolicy("mixed_float16")
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        tape_programs.fill(model)
        inner = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
        optimizer.build(model.trainable_variables)
    before = [v.numpy() for v in model.trainable_variables]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2) / 8.0
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @compiled
    def train(x: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    data = tf.data.Dataset.from_tensor_slices(tape_programs.numbers((8, 3))).batch(8)
    [loss] = [train(x) for x in strategy.experimental_distribute_dataset(data)]
    # The same in float32, without scaling.
    k, b, k2, b2 = map(jnp.asarray, before)
    rows = tape_programs.numbers((8, 3))

    def loss_fn(k: Any, b: Any, k2: Any, b2: Any) -> Any:
        return jnp.sum((jnp.tanh(rows @ k + b) @ k2 + b2) ** 2) / 8.0

    wanted, slopes = jax.value_and_grad(loss_fn, argnums=(0, 1, 2, 3))(k, b, k2, b2)
    np.testing.assert_allclose(float(loss), wanted, rtol=5e-3)
    for variable, old, slope in zip(model.trainable_variables, before, slopes, strict=True):
        np.testing.assert_allclose(variable.numpy(), old - 0.1 * slope, atol=2e-3)


# What is refused.


def test_functions_of_jax_on_recorded_tensors_are_refused(compiled: Any) -> None:
    @compiled
    def use(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * 2.0
            with pytest.raises(rx.errors.ContextError, match="stop_recording"):
                jnp.sin(y)
            with pytest.raises(rx.errors.ContextError, match="GradientTape"):
                jax.tree.leaves(y)
            with tape.stop_recording():
                jnp.sin(y)
            z = jnp.ones(()) + y
        return tape.gradient(z, x)

    assert float(use(tf.constant(1.0))) == 2.0


def test_numpy_functions_on_recorded_tensors_are_refused() -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 2.0
        assert y.numpy().tolist() == [2.0, 4.0]
        with pytest.raises(rx.errors.ContextError, match="numpy"):
            np.asarray(y)
    assert np.asarray(y).tolist() == [2.0, 4.0]


def test_arrays_that_no_tape_records_are_refused() -> None:
    with tf.GradientTape() as tape:
        with pytest.raises(TypeError, match=r"convert_to_tensor"):
            tape.watch(jnp.ones(2))
        y = tf.constant(1.0) * 2.0
    with pytest.raises(TypeError, match="no tape records"):
        tape.gradient(jnp.ones(2), tf.constant(1.0))
    with tf.GradientTape() as tape:
        y = tf.constant(1.0) * 2.0
    with pytest.raises(TypeError, match="sources"):
        tape.gradient(y, np.ones(2))


def test_a_second_gradient_needs_a_persistent_tape() -> None:
    v = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = v * v
    tape.gradient(y, v)
    with pytest.raises(rx.errors.ContextError, match="persistent=True"):
        tape.gradient(y, v)


def test_a_tape_is_entered_once_and_paused_inside() -> None:
    tape = tf.GradientTape()
    with tape, pytest.raises(rx.errors.ContextError, match="left"):
        tape.__enter__()
    with pytest.raises(rx.errors.ContextError, match="stop_recording"), tape.stop_recording():
        pass


def test_values_of_all_replicas_are_no_targets() -> None:
    strategy = STRATEGIES["mirrored_2"]()
    with strategy.scope():
        v = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = strategy.run(lambda: v * 2.0)
    with pytest.raises(TypeError, match="inside the function"):
        tape.gradient(y, v)


def test_output_gradients_must_fit() -> None:
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        y = v * v
    with pytest.raises(ValueError, match="shape"):
        tape.gradient(y, v, output_gradients=tf.ones([3]))
    with pytest.raises(ValueError, match="one for each"):
        tape.gradient([y, y], v, output_gradients=[tf.ones([2])])
    with pytest.raises(ValueError, match="batch"):
        tape.batch_jacobian(tf.constant(1.0), v)


def test_watched_variables_and_reset() -> None:
    v, w = tf.Variable(1.0), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        y = v * w
        assert tape.watched_variables() == (v, w) or tape.watched_variables()[0] is v
        tape.reset()
        z = w * 3.0
    assert [found is w for found in tape.watched_variables()] == [True]
    assert float(tape.gradient(z, w)) == 3.0
    assert float(y) == 2.0


# Functional models.


def test_ops_become_nodes_of_functional_models(tmp_path: Path, compiled: Any) -> None:
    a, b = keras.Input((3,)), keras.Input((3,))
    hidden = keras.layers.Dense(3, kernel_initializer="ones")(tf.nn.relu(a))
    joined = tf.concat([hidden, b * 2.0], axis=-1)
    outputs = tf.reduce_sum(tf.cast(joined, tf.float32), axis=1, keepdims=True) + tf.ones([1])
    model = keras.Model([a, b], outputs)
    assert model.output_shape == (None, 1)
    x, y = tf.constant([[1.0, -1.0, 2.0]]), tf.constant([[1.0, 2.0, 3.0]])

    @compiled
    def compute(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            found = model([x, y])
        return found, tape.gradient(found, model.trainable_variables)

    found, gradients = compute(x, y)
    assert found.numpy().tolist() == [[22.0]]
    assert gradients[0].numpy()[:, 0].tolist() == [1.0, 0.0, 2.0]
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.models.load_model(path)
    assert again([x, y]).numpy().tolist() == [[22.0]]


def test_a_tape_around_a_step_of_one_replica(compiled: Any) -> None:
    strategy = STRATEGIES["one_device"]()
    with strategy.scope():
        v = tf.Variable(3.0)

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = strategy.run(lambda x: x * v, args=(x * 2.0,))
        return tape.gradient(y, [x, v])

    assert [float(g) for g in compute(tf.constant(5.0))] == [6.0, 10.0]


@pytest.mark.parametrize("compile_", [lambda f: f, tf.function], ids=["eager", "compiled"])
def test_nothing_that_stop_gradient_returns_leads_to_its_input(compile_: Any) -> None:
    x, c = tf.Variable(2.0), tf.constant(3.0)

    @compile_
    def gradients() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(c)
            some = tf.stop_gradient(c * c) * c + tf.stop_gradient(c) + tf.stop_gradient(x) * x
            none = tf.stop_gradient(x) * 5.0
            inner = tf.stop_gradient({"a": c})["a"] * c
        return tape.gradient(some, [x, c]), tape.gradient(none, x), tape.gradient(inner, c)

    (of_x, of_c), missing, of_inner = gradients()
    assert (float(of_x), float(of_c), float(of_inner)) == (2.0, 9.0, 3.0)
    assert missing is None
