"""Programs with tapes that TensorFlow and replicax.tf run, and the results of TensorFlow.

Run this file with an interpreter that has TensorFlow to record `tape_programs.json` again:

    python tests/support/tape_programs.py

Each program takes the module `tf`, the module `keras`, and `compiled`, which is `tf.function` or
returns a function as it is. It returns numbers in lists. Programs of `UNDER_STRATEGIES` take a
strategy of two replicas, or of one, as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).with_suffix(".json")

Program = Callable[..., Any]
PROGRAMS: dict[str, Program] = {}
UNDER_STRATEGIES: dict[str, Program] = {}


def _program(fn: Program) -> Program:
    PROGRAMS[fn.__name__] = fn
    return fn


def _under_strategies(fn: Program) -> Program:
    UNDER_STRATEGIES[fn.__name__] = fn
    return fn


def numbers(shape: tuple[int, ...], scale: float = 0.1, start: int = 0) -> np.ndarray:
    """Returns an array with a pattern, for weights and data."""
    count = int(np.prod(shape))
    return (((np.arange(count) * 7 + start) % 11 - 5) * scale).reshape(shape).astype(np.float32)


def fill(model: Any) -> None:
    """Gives the weights of a built model a pattern; statistics of layers stay."""
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(numbers(tuple(variable.shape), start=number))


# Tapes.


@_program
def a_persistent_tape_gives_several_gradients(tf: Any, keras: Any, compiled: Any) -> Any:
    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
            z = tf.exp(y) * x
        return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(z, y)

    return compute(tf.constant([0.5, -1.0]))


@_program
def variables_are_watched_when_they_are_read(tf: Any, keras: Any, compiled: Any) -> Any:
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(3.0, trainable=False)

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(v * w) ** 2
        return tape.gradient(y, v)

    return compute()


@_program
def unwatched_and_unconnected_sources(tf: Any, keras: Any, compiled: Any) -> Any:
    v, other = tf.Variable(2.0), tf.Variable([1.0, 1.0])

    @compiled
    def compute(c: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = v * c
        with tf.GradientTape(watch_accessed_variables=False) as manual:
            manual.watch(other)
            z = tf.reduce_sum(other) * v
        found = [tape.gradient(y, c), tape.gradient(y, other), tape.gradient(y, v)]
        zeros = tape.gradient(y, [other, c], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        first, second = manual.gradient(z, [v, other])
        return [g is None for g in found], zeros, first is None, second

    return compute(tf.constant(5.0))


@_program
def two_tapes_record_one_computation(tf: Any, keras: Any, compiled: Any) -> Any:
    a, b = tf.Variable(1.5), tf.Variable(-0.5)

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            made = tf.tanh(a)
            score = tf.sigmoid(b * made)
            loss_a, loss_b = -tf.math.log(score), tf.math.log(1.0 + score)
        return first.gradient(loss_a, [a]), second.gradient(loss_b, [b])

    return compute()


@_program
def second_order(tf: Any, keras: Any, compiled: Any) -> Any:
    w = tf.Variable(numbers((3, 2)))

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(tf.tanh(tf.matmul(x, w)) ** 2)
            slope = inner.gradient(y, x)
            penalty = tf.reduce_mean((tf.norm(slope, axis=1) - 1.0) ** 2)
        return slope, outer.gradient(penalty, [x, w])

    return compute(tf.constant(numbers((2, 3), 0.2)))


@_program
def third_order(tf: Any, keras: Any, compiled: Any) -> Any:
    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as one:
            one.watch(x)
            with tf.GradientTape() as two:
                two.watch(x)
                with tf.GradientTape() as three:
                    three.watch(x)
                    y = x**4 + tf.sin(x)
                first = three.gradient(y, x)
            second = two.gradient(first, x)
        return first, second, one.gradient(second, x)

    return compute(tf.constant(0.7))


@_program
def jacobians(tf: Any, keras: Any, compiled: Any) -> Any:
    w = tf.Variable(numbers((3, 2)))

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.nn.relu(tf.matmul(x, w)) ** 2 + tf.reduce_sum(x, 1, keepdims=True)
        return tape.jacobian(y, [x, w]), tape.batch_jacobian(y, x)

    return compute(tf.constant(numbers((2, 3), 0.3)))


@_program
def a_hessian_by_a_jacobian(tf: Any, keras: Any, compiled: Any) -> Any:
    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(x**3) + x[0] * x[1]
            slope = inner.gradient(y, x)
        return outer.jacobian(slope, x)

    return compute(tf.constant([1.0, 2.0, 0.5]))


@_program
def stop_recording_and_stop_gradient(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(3.0)

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            y = v * v
            with tape.stop_recording():
                factor = v * y
            z = y * factor + tf.stop_gradient(v) * v
        return tape.gradient(z, v)

    return compute()


@_program
def output_gradients_and_structures(tf: Any, keras: Any, compiled: Any) -> Any:
    sources = {"a": tf.Variable([1.0, 2.0]), "b": [tf.Variable(3.0), tf.Variable(4.0)]}

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            y = sources["a"] * sources["b"][0]
            z = sources["b"][1] ** 2
        seeds = [tf.constant([1.0, 10.0]), tf.constant(3.0)]
        found = tape.gradient([y, z], sources, output_gradients=seeds)
        return found["a"], found["b"]

    return compute()


@_program
def integers_have_no_gradient(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable([1.5, 2.5])

    @compiled
    def compute() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = v * 2.0
            z = tf.cast(tf.cast(y, tf.int32), tf.float32)
        return tape.gradient(y, v), tape.gradient(z, v) is None

    return compute()


@_program
def an_assignment_between_two_reads(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(2.0)

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            y = v * v
            v.assign_add(1.0)
            z = y * v
        return tape.gradient(z, v), z

    return compute()


@_program
def a_tape_around_a_function(tf: Any, keras: Any, compiled: Any) -> Any:
    w = tf.Variable(numbers((3, 2)))
    calls = tf.Variable(0, trainable=False)

    @tf.function
    def predict(x: Any) -> Any:
        calls.assign_add(1)
        return tf.tanh(tf.matmul(x, w))

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(predict(x) ** 2)
        return loss, tape.gradient(loss, w)

    x = tf.constant(numbers((2, 3)))
    return compute(x), compute(x), calls.numpy()


@_program
def rows_of_a_table(tf: Any, keras: Any, compiled: Any) -> Any:
    table = tf.Variable(numbers((5, 2)))

    @compiled
    def compute(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, ids)
            more = tf.gather(table, ids[0], axis=0)
            loss = tf.reduce_sum(rows**2) + tf.reduce_sum(more)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    return compute(tf.constant([[1, 3], [1, 0]]))


@_program
def clipped_gradients(tf: Any, keras: Any, compiled: Any) -> Any:
    a, b = tf.Variable([3.0, 4.0]), tf.Variable(12.0)

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.l2_loss(a) + tf.nn.l2_loss(b)
        gradients = tape.gradient(loss, [a, b])
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        return clipped, norm

    return compute()


@_program
def a_part_of_a_variable(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(numbers((3, 2), 1.0))

    @compiled
    def compute() -> Any:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(v[1:, 0] ** 2) + v[0, 1]
        v[0].assign([7.0, 8.0])
        v[1, 1].assign(9.0)
        return tape.gradient(y, v), v.read_value()

    return compute()


# Keras.


@_program
def training_a_network(tf: Any, keras: Any, compiled: Any) -> Any:
    layers = [
        keras.layers.Dense(4, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1)),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    fill(model)
    optimizer, loss_fn = keras.optimizers.Adam(0.05), keras.losses.MeanSquaredError()
    metric = keras.metrics.Mean()

    @compiled
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            loss += tf.add_n(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(loss)
        return loss

    x, y = tf.constant(numbers((8, 3))), tf.constant(numbers((8, 1), start=3))
    losses = [step(x, y) for _ in range(4)]
    return losses, metric.result(), [v.numpy() for v in layers[1].non_trainable_variables]


@_program
def a_model_with_masks(tf: Any, keras: Any, compiled: Any) -> Any:
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(6, 3, mask_zero=True),
            keras.layers.LSTM(2, return_sequences=True),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )
    fill(model)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @compiled
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        found = tape.gradient(loss, model.trainable_variables)
        return loss, [tf.convert_to_tensor(g) for g in found]

    return step(tf.constant([[1, 2, 0, 0], [3, 5, 4, 0]]), tf.constant([0, 1]))


@_program
def layers_recorded_one_by_one_pass_masks_on(tf: Any, keras: Any, compiled: Any) -> Any:
    embed = keras.layers.Embedding(6, 3, mask_zero=True)
    recur, dense = keras.layers.GRU(2), keras.layers.Dense(1)
    embed.build((2, 4)), recur.build((2, 4, 3)), dense.build((2, 2))
    for layer in (embed, recur, dense):
        fill(layer)

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(recur(embed(x))) ** 2)
        variables = [*recur.trainable_variables, *dense.trainable_variables]
        return loss, tape.gradient(loss, variables)

    return step(tf.constant([[1, 2, 0, 0], [3, 5, 4, 0]]))


@_program
def a_layer_that_closes_over_a_recorded_tensor(tf: Any, keras: Any, compiled: Any) -> Any:
    class Scaled(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.factor: Any = None
            self.outside: Any = None

        def call(self, x: Any) -> Any:
            return x * self.factor + self.outside

    layer = Scaled()
    layer.built = True
    v, outside = tf.Variable(2.0), tf.Variable([1.0, -1.0])
    layer.__dict__["outside"] = outside

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            layer.__dict__["factor"] = tf.exp(v)
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, [x, v, outside])

    return step(tf.constant([0.5, 0.25]))


@_program
def a_layer_that_adds_losses(tf: Any, keras: Any, compiled: Any) -> Any:
    class Penalised(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: Any) -> Any:
            self.add_loss(0.5 * tf.reduce_sum(tf.square(self.w)))
            return x * self.w

    inner = Penalised()
    model = keras.Sequential([keras.Input((2,)), inner, Penalised()])

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = model(x)
            loss = tf.reduce_sum(y) + sum(model.losses)
        return loss, tape.gradient(loss, model.trainable_variables)

    x = tf.constant([[1.0, 2.0]])
    return step(x), step(x)


@_program
def a_generator_and_a_discriminator(tf: Any, keras: Any, compiled: Any) -> Any:
    maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation="tanh")])
    judge = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    fill(maker), fill(judge)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    maker_optimizer, judge_optimizer = keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.1)

    @compiled
    def step(noise: Any, real: Any) -> Any:
        with tf.GradientTape() as maker_tape, tf.GradientTape() as judge_tape:
            made = maker(noise, training=True)
            real_score, made_score = judge(real, training=True), judge(made, training=True)
            maker_loss = entropy(tf.ones_like(made_score), made_score)
            judge_loss = entropy(tf.ones_like(real_score), real_score)
            judge_loss += entropy(tf.zeros_like(made_score), made_score)
        maker_gradients = maker_tape.gradient(maker_loss, maker.trainable_variables)
        judge_gradients = judge_tape.gradient(judge_loss, judge.trainable_variables)
        maker_optimizer.apply_gradients(
            zip(maker_gradients, maker.trainable_variables, strict=True)
        )
        judge_optimizer.apply_gradients(
            zip(judge_gradients, judge.trainable_variables, strict=True)
        )
        return maker_loss, judge_loss

    noise, real = tf.constant(numbers((4, 2))), tf.constant(numbers((4, 3), 0.2))
    return [step(noise, real) for _ in range(3)]


@_program
def a_gradient_penalty_through_a_model(tf: Any, keras: Any, compiled: Any) -> Any:
    judge = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="softplus"), keras.layers.Dense(1)]
    )
    fill(judge)

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = judge(x, training=True)
            slopes = inner.gradient(score, [x])[0]
            norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=1))
            loss = tf.reduce_mean((norms - 1.0) ** 2) + tf.reduce_mean(score)
        return loss, outer.gradient(loss, judge.trainable_variables)

    return step(tf.constant(numbers((4, 3))))


@_program
def accumulated_gradients(tf: Any, keras: Any, compiled: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    fill(model)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    sums = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.trainable_variables]

    @compiled
    def accumulate(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        for total, gradient in zip(
            sums, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            total.assign_add(gradient / 2.0)
        return loss

    @compiled
    def apply() -> None:
        optimizer.apply_gradients(zip(sums, model.trainable_variables, strict=True))
        for total in sums:
            total.assign(tf.zeros_like(total))

    losses = []
    for number in range(4):
        losses.append(accumulate(tf.constant(numbers((4, 3), start=number))))
        if number % 2:
            apply()
    return losses, [v.numpy() for v in model.trainable_variables]


@_program
def a_plain_model_with_a_keras_optimizer(tf: Any, keras: Any, compiled: Any) -> Any:
    class Linear(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = tf.Variable(numbers((3, 1)), name="w")
            self.b = tf.Variable(0.5, name="b")

        def __call__(self, x: Any) -> Any:
            return tf.matmul(x, self.w) + self.b

    model, optimizer = Linear(), keras.optimizers.Adam(0.1)

    @compiled
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - 1.0) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    x = tf.constant(numbers((4, 3)))
    return [step(x) for _ in range(3)], model.w.numpy(), model.b.numpy()


# Control flow.


@_program
def gradients_of_branches(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(3.0)

    @compiled
    def compute(x: Any, number: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            a = tf.cond(x > 0.0, lambda: x * v, lambda: x - v)
            b = tf.case([(x < -5.0, lambda: v), (x < 5.0, lambda: v * x)], default=lambda: x)
            c = tf.switch_case(number, [lambda: v * 1.0, lambda: v * v, lambda: x * x])
            y = a + 2.0 * b + 3.0 * c
        return y, tape.gradient(y, [x, v], unconnected_gradients="zero")

    arguments = [(2.0, 1), (-2.0, 2), (-6.0, 0), (6.0, 7)]
    return [compute(tf.constant(x), tf.constant(n)) for x, n in arguments]


@_program
def gradients_of_loops(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(0.9)

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, power = tf.while_loop(
                lambda i, p: i < 3, lambda i, p: (i + 1, p * v), (0, x[0]), maximum_iterations=5
            )
            rows = tf.map_fn(lambda r: r * r * v, x)
            sums = tf.scan(lambda a, r: a * v + r, x)
            last = tf.foldl(lambda a, r: a + r * v, x, initializer=tf.constant(1.0))
            first = tf.foldr(lambda a, r: a * r + v, x)
            y = power + tf.reduce_sum(rows) + tf.reduce_sum(sums * sums) + last + first
        return y, rows, sums, tape.gradient(y, [x, v])

    return compute(tf.constant([0.5, 1.5, -1.0]))


@_program
def rows_written_in_a_loop(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(2.0)

    @compiled
    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = tf.TensorArray(tf.float32, size=3)
            state = x
            for i in tf.range(3):
                state = state * v
                rows = rows.write(i, state)
            y = tf.reduce_sum(rows.stack() * tf.constant([[1.0], [2.0], [3.0]]))
        return rows.stack(), tape.gradient(y, v)

    return compute(tf.constant([1.0, -0.5]))


@_program
def loops_over_a_range(tf: Any, keras: Any, compiled: Any) -> Any:
    v = tf.Variable(1.0)

    @compiled
    def compute(count: Any) -> Any:
        total, last = 0.0, tf.constant(0)
        for i in tf.range(count):
            total += tf.cast(i, tf.float32) * 0.5
            last = i
            v.assign_add(total)
        return total, last

    return compute(tf.constant(4)), v.numpy(), compute(tf.constant(2)), v.numpy()


# Strategies.


def _batches(tf: Any, strategy: Any, count: int = 4) -> Any:
    data = (numbers((count * 8, 3)), numbers((count * 8, 1), start=3))
    return strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data).batch(8)
    )


@_under_strategies
def a_custom_loop_with_keras(tf: Any, keras: Any, compiled: Any, strategy: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.01)),
            ]
        )
        fill(model)
        optimizer = keras.optimizers.Adam(0.05)
        # TensorFlow's function cannot make its variables in the first call.
        optimizer.build(model.trainable_variables)
        loss_fn = keras.losses.MeanSquaredError(reduction="none")
        metric = keras.metrics.MeanAbsoluteError()

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_fn(y, predicted), global_batch_size=8)
            loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, predicted)
        return loss

    @compiled
    def train(batch: Any) -> Any:
        losses = strategy.run(step, args=(batch,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    losses = [train(batch) for batch in _batches(tf, strategy)]
    return losses, metric.result(), [v.numpy() for v in model.trainable_variables]


@_under_strategies
def a_custom_loop_with_variables(tf: Any, keras: Any, compiled: Any, strategy: Any) -> Any:
    with strategy.scope():
        w, b = tf.Variable(numbers((3, 1))), tf.Variable([0.5])
        count = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([w, b])

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.matmul(x, w) + b - y) ** 2) / 8.0
        gradients = tape.gradient(loss, [w, b])
        optimizer.apply_gradients(zip(gradients, [w, b], strict=True))
        count.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return loss

    @compiled
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    losses = [train(x, y) for x, y in _batches(tf, strategy)]
    return losses, w.numpy(), b.numpy(), count.numpy()


@_under_strategies
def gradients_through_an_all_reduce(tf: Any, keras: Any, compiled: Any, strategy: Any) -> Any:
    with strategy.scope():
        w = tf.Variable(numbers((3, 1)))

    def step(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            mean = context.all_reduce("MEAN", tf.reduce_mean(tf.matmul(x, w)))
            loss = mean**2
        gradient = tape.gradient(loss, w)
        return loss, context.all_reduce(tf.distribute.ReduceOp.SUM, gradient)

    @compiled
    def compute(x: Any) -> Any:
        loss, gradient = strategy.run(step, args=(x,))
        return strategy.reduce("MEAN", loss, axis=None), strategy.reduce(
            "MEAN", gradient, axis=None
        )

    return [compute(x) for x, _ in _batches(tf, strategy, 2)]


@_under_strategies
def several_steps_in_one_function(tf: Any, keras: Any, compiled: Any, strategy: Any) -> Any:
    with strategy.scope():
        w = tf.Variable(numbers((3, 1)))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([w])
        metric = keras.metrics.Mean()

    def step(batch: Any) -> None:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.matmul(x, w) - y) ** 2) / 8.0
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        metric.update_state(loss)

    @compiled
    def train(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(step, args=(next(iterator),))

    iterator = iter(_batches(tf, strategy, 5))
    train(iterator, tf.constant(3))
    train(iterator, tf.constant(2))
    return w.numpy(), metric.result()


@_under_strategies
def an_epoch_in_one_function(tf: Any, keras: Any, compiled: Any, strategy: Any) -> Any:
    with strategy.scope():
        w = tf.Variable(numbers((3, 1)))

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.matmul(x, w) - y) ** 2) / 8.0
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, w))
        w.assign_sub(0.1 * gradient)
        return loss

    @compiled
    def epoch(data: Any) -> Any:
        total, rounds = 0.0, 0.0
        for x, y in data:
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
            rounds += 1.0
        return total / rounds

    data = _batches(tf, strategy)
    return epoch(data), epoch(data), w.numpy()


def plain(value: Any) -> Any:
    """Returns a result as JSON would: numbers and lists."""
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    return value.tolist() if hasattr(value, "tolist") else value


def _record() -> None:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf  # type: ignore[import-not-found]

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategies = {
        "one_device": tf.distribute.OneDeviceStrategy("/cpu:0"),
        # A second one in the process breaks TensorFlow's collectives.
        "mirrored_2": tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"]),
    }
    results = {name: run(tf, tf.keras, tf.function) for name, run in PROGRAMS.items()}
    for kind, strategy in strategies.items():
        for name, run in UNDER_STRATEGIES.items():
            results[f"{name}[{kind}]"] = run(tf, tf.keras, tf.function, strategy)
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(plain(r))}" for n, r in results.items())
    version = json.dumps(tf.__version__)
    RECORDED.write_text(f'{{\n"tensorflow": {version},\n"results": {{\n{lines}\n}}\n}}\n')


if __name__ == "__main__":
    _record()
