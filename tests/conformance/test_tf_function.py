"""`tf.function`: what is compiled, when, and which loops run where."""

from __future__ import annotations

import functools
import linecache
import re
from typing import Any

import keras
import numpy as np
import pytest

import replicax as rx
import replicax.tf as tf


@pytest.fixture
def two() -> Any:
    """A strategy of two replicas."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_python_code_runs_once_per_signature() -> None:
    traces: list[str] = []

    @tf.function
    def double(x: Any, times: int = 2) -> Any:
        traces.append(f"{x.dtype.name}{x.shape.as_list()}")
        return x * times

    assert double(tf.constant([1, 2])).numpy().tolist() == [2, 4]
    assert double(tf.constant([3, 4])).numpy().tolist() == [6, 8]
    assert traces == ["int32[2]"]
    double(tf.constant([1, 2, 3]))
    double(tf.constant([1.0, 2.0, 3.0]))
    double(tf.constant([1.0, 2.0, 3.0]), times=3)
    assert traces == ["int32[2]", "int32[3]", "float32[3]", "float32[3]"]


def test_reduce_retracing_generalises_python_numbers() -> None:
    traces: list[int] = []

    @tf.function(reduce_retracing=True)
    def scaled(x: Any, factor: float) -> Any:
        traces.append(1)
        return tf.reduce_sum(x) * factor

    found = [float(scaled(tf.ones([2]), float(n))) for n in range(8)]
    assert found == [2.0 * n for n in range(8)]
    assert len(traces) < 8


def test_an_input_signature_converts_and_refuses() -> None:
    traces: list[Any] = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def total(x: Any) -> Any:
        traces.append(x.shape)
        return tf.reduce_sum(x)

    assert float(total(tf.ones([3, 2]))) == 6.0
    assert float(total(np.ones((5, 2), np.float32))) == 10.0
    with pytest.raises(ValueError, match="shape"):
        total(tf.ones([3, 3]))


@pytest.mark.parametrize("nested", [False, True])
def test_a_signature_of_64_bit_types_takes_the_tensors_of_the_program(nested: bool) -> None:
    ids, scale = tf.TensorSpec([None, None], tf.int64), tf.TensorSpec([], tf.float64)

    @tf.function(input_signature=[{"ids": [ids], "scale": scale}] if nested else [ids, scale])
    def scaled(*given: Any) -> Any:
        x, factor = (given[0]["ids"][0], given[0]["scale"]) if nested else given
        return tf.cast(x, tf.float64) * factor

    rows = np.arange(4, dtype=np.int64).reshape(2, 2)
    for x in (rows, tf.constant(rows)):
        factor = tf.constant(2.0, tf.float64)
        found = scaled({"ids": [x], "scale": factor}) if nested else scaled(x, factor)
        assert found.numpy().tolist() == [[0.0, 2.0], [4.0, 6.0]]
    wrong = tf.constant([[1.0]])
    arguments = [{"ids": [wrong], "scale": factor}] if nested else [wrong, factor]
    with pytest.raises(ValueError, match="type"):
        scaled(*arguments)


def test_element_specs_of_64_bit_datasets_are_signatures(two: Any) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(4, dtype=np.int64)).batch(2)
    batches = two.experimental_distribute_dataset(dataset)
    assert dataset.element_spec.dtype == tf.int64

    @tf.function(input_signature=[dataset.element_spec])
    def plain(x: Any) -> Any:
        return tf.reduce_sum(x)

    @tf.function(input_signature=[batches.element_spec])
    def distributed(x: Any) -> Any:
        return two.reduce("SUM", two.run(tf.identity, args=(x,)), axis=0)

    assert [int(plain(x)) for x in dataset] == [1, 5]
    assert [int(distributed(x)) for x in batches] == [1, 5]


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"autograph": False}, {"experimental_relax_shapes": True}, {}],
)
def test_options_that_programs_pass(options: dict[str, Any]) -> None:
    @tf.function(**options)
    def add(x: Any, y: Any) -> Any:
        return x + y

    assert int(add(tf.constant(1), tf.constant(2))) == 3


def test_methods_are_compiled_once_per_object() -> None:
    traces: list[str] = []

    class Counter(tf.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.total = tf.Variable(start)

        @tf.function
        def add(self, x: Any) -> Any:
            traces.append("add")
            return self.total.assign_add(x)

    first, second = Counter(1.0), Counter(10.0)
    assert [float(first.add(tf.constant(2.0))) for _ in range(3)] == [3.0, 5.0, 7.0]
    assert float(second.add(tf.constant(2.0))) == 12.0
    assert traces == ["add", "add"]


@pytest.mark.parametrize("kind", ["plain", "method", "in_tape", "host_loop"])
def test_a_returned_variable_is_the_value_that_it_has_at_the_end(kind: str) -> None:
    class Counter(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = tf.Variable(1.0)

        @tf.function
        def add(self) -> Any:
            return {"count": self.count.assign_add(1.0), "same": [self.count]}

    counter = Counter()

    @tf.function
    def plain() -> Any:
        return counter.add()

    @tf.function
    def host_loop() -> Any:
        for one in tf.data.Dataset.from_tensors(1.0):
            counter.count.assign_add(one)
        return {"count": counter.count, "same": [counter.count]}

    if kind == "in_tape":
        with tf.GradientTape() as tape:
            found = counter.add()
        assert float(tape.gradient(found["count"], counter.count)) == 1.0
    else:
        found = {"plain": plain, "method": counter.add, "host_loop": host_loop}[kind]()
    counter.count.assign(10.0)
    for leaf in (found["count"], found["same"][0]):
        assert isinstance(leaf, tf.Tensor)
        assert float(leaf) == 2.0


def test_returned_variables_of_a_strategy_and_of_keras_are_values(two: Any) -> None:
    with two.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        optimizer = tf.keras.optimizers.SGD(0.1)

    @tf.function
    def step() -> Any:
        two.run(lambda: total.assign_add(2.0))
        return total, optimizer.iterations

    value, iterations = step()
    optimizer.iterations.assign(7)
    total.assign(0.0)
    assert isinstance(iterations, tf.Tensor)
    assert (float(value), int(iterations)) == (4.0, 0)


def test_a_function_of_structures_and_partials() -> None:
    @tf.function
    def swap(pair: Any) -> Any:
        return {"first": pair["b"], "second": [pair["a"], None, "text"]}

    found = swap({"a": tf.constant(1), "b": tf.constant([2.0])})
    assert isinstance(found["first"], tf.Tensor)
    assert found["first"].numpy().tolist() == [2.0]
    assert found["second"][1:] == [None, "text"]
    power = tf.function(functools.partial(tf.pow, y=2))
    assert float(power(tf.constant(3.0))) == 9.0


def test_a_variable_made_in_the_first_call() -> None:
    class Layer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w: Any = None

        @tf.function
        def __call__(self, x: Any) -> Any:
            if self.w is None:
                self.w = tf.Variable(tf.ones([x.shape[-1], 1]))
            return tf.matmul(x, self.w)

    layer = Layer()
    assert layer(tf.ones([1, 3])).numpy().tolist() == [[3.0]]
    layer.w.assign_add(tf.ones([3, 1]))
    assert layer(tf.ones([1, 3])).numpy().tolist() == [[6.0]]


def test_values_are_refused_with_the_line_and_what_to_write() -> None:
    @tf.function
    def branch(x: Any) -> Any:
        if x > 0:
            return x
        return -x

    with pytest.raises(rx.errors.TracedValueError) as caught:
        branch(tf.constant(1.0))
    text = str(caught.value)
    found = re.search(r"test_tf_function\.py:(\d+)", text)
    assert "tf.cond" in text and found, text
    assert linecache.getline(__file__, int(found[1])).strip() == "if x > 0:"

    @tf.function
    def repeat(x: Any) -> Any:
        while tf.reduce_sum(x) < 10.0:
            x = x * 2.0
        return x

    with pytest.raises(rx.errors.TracedValueError, match=r"tf\.while_loop"):
        repeat(tf.constant([1.0]))

    @tf.function
    def convert(x: Any) -> Any:
        return x.numpy()

    with pytest.raises(rx.errors.TracedValueError, match="numpy"):
        convert(tf.constant(1.0))


def test_functions_can_run_eagerly() -> None:
    seen: list[float] = []

    @tf.function
    def look(x: Any) -> Any:
        seen.append(float(x))
        return x if x > 0 else -x

    tf.config.run_functions_eagerly(True)
    try:
        assert float(look(tf.constant(-2.0))) == 2.0
    finally:
        tf.config.run_functions_eagerly(False)
    assert seen == [-2.0]


def test_a_concrete_function_is_compiled_for_its_signature() -> None:
    @tf.function
    def double(x: Any) -> Any:
        return x * 2.0

    concrete = double.get_concrete_function(tf.TensorSpec([2], tf.float32))
    assert concrete(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]


def test_a_function_inside_a_function_and_under_a_tape() -> None:
    v = tf.Variable(2.0)

    @tf.function
    def inner(x: Any) -> Any:
        v.assign_add(1.0)
        return x * v

    @tf.function
    def outer(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x) * inner(x)
        return y, tape.gradient(y, x)

    y, slope = outer(tf.constant(2.0))
    # 2·3 · 2·4, and its derivative 2·x·3·4.
    assert (float(y), float(slope), float(v)) == (48.0, 48.0, 4.0)


# Loops.


def test_a_loop_over_a_range_is_one_loop_of_the_program() -> None:
    rounds: list[Any] = []

    @tf.function
    def power(x: Any, n: Any) -> Any:
        result = tf.ones_like(x)
        for _ in tf.range(n):
            rounds.append(1)
            result = result * x
        return result

    assert float(power(tf.constant(2.0), tf.constant(10))) == 1024.0
    traced = len(rounds)
    assert traced <= 2
    assert float(power(tf.constant(3.0), tf.constant(4))) == 81.0
    assert len(rounds) == traced


def test_a_loop_keeps_names_and_structures() -> None:
    @tf.function
    def run(n: Any) -> Any:
        pair, last, count = (tf.constant(0.0), tf.constant(1.0)), tf.constant(-1), 0
        for i in tf.range(2, n, 3):
            pair = (pair[1], pair[0] + pair[1])
            last = i
            count += 1
        return pair, last, count

    pair, last, count = run(tf.constant(12))
    assert [float(p) for p in pair] == [3.0, 5.0]
    assert (int(last), int(count)) == (11, 4)
    pair, last, count = run(tf.constant(2))
    assert ([float(p) for p in pair], int(last), int(count)) == ([0.0, 1.0], -1, 0)


def test_a_loop_whose_value_changes_its_shape_is_refused() -> None:
    @tf.function
    def grow(n: Any) -> Any:
        rows = tf.zeros([1])
        for _ in tf.range(n):
            rows = tf.concat([rows, rows], 0)
        return rows

    with pytest.raises(ValueError, match=r"'rows'.*TensorArray"):
        grow(tf.constant(3))


def test_loops_over_tensors_and_python_ranges_run_while_tracing() -> None:
    @tf.function
    def run(x: Any) -> Any:
        total = tf.constant(0.0)
        for row in x:
            total += tf.reduce_sum(row)
        for i in range(2):
            total += i
        return total

    assert float(run(tf.constant([[1.0, 2.0], [3.0, 4.0]]))) == 11.0


def test_break_and_return_in_loops() -> None:
    @tf.function
    def first_above(n: int) -> Any:
        total = tf.constant(0)
        for i in tf.range(n):
            total += i
            if i >= 3:
                break
        return total

    # The bound is a Python number, so the rounds are known.
    tf.config.run_functions_eagerly(True)
    try:
        assert int(first_above(10)) == 6
    finally:
        tf.config.run_functions_eagerly(False)

    @tf.function
    def until(data: Any, most: int) -> Any:
        total = tf.constant(0, tf.int64)
        for number, x in enumerate(data):
            if number >= most:
                return total
            total += x
        return total

    assert int(until(tf.data.Dataset.range(10), 4)) == 6
    assert int(until(tf.data.Dataset.range(3), 4)) == 3


@pytest.mark.parametrize("over", ["tensor", "python"])
def test_a_multi_step_loop_compiles_one_step(two: Any, over: str) -> None:
    with two.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    traces: list[int] = []

    def step(x: Any) -> None:
        traces.append(1)
        total.assign_add(tf.reduce_sum(x))

    @tf.function
    def by_tensor(iterator: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            two.run(step, args=(next(iterator),))

    @tf.function
    def by_python(iterator: Any, steps: Any) -> None:
        for _ in range(steps):
            two.run(step, args=(iterator.get_next(),))

    train = by_tensor if over == "tensor" else by_python
    data = tf.data.Dataset.from_tensor_slices(np.ones((100,), np.float32)).batch(4)
    iterator = iter(two.experimental_distribute_dataset(data))
    train(iterator, tf.constant(7) if over == "tensor" else 7)
    assert float(total) == 28.0
    train(iterator, tf.constant(13) if over == "tensor" else 13)
    assert float(total) == 80.0
    assert len(traces) == 1


def test_a_step_that_is_defined_in_the_function_is_compiled_once(two: Any) -> None:
    with two.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    traces: list[int] = []

    @tf.function
    def train(iterator: Any) -> None:
        def step(x: Any) -> None:
            traces.append(1)
            total.assign_add(tf.reduce_sum(x))

        for _ in tf.range(3):
            two.run(step, args=(next(iterator),))

    data = tf.data.Dataset.from_tensor_slices(np.ones((48,), np.float32)).batch(4)
    iterator = iter(two.experimental_distribute_dataset(data))
    for _ in range(4):
        train(iterator)
    assert float(total) == 48.0
    assert len(traces) == 1


def test_an_epoch_inside_a_function_takes_batches_one_by_one(two: Any) -> None:
    taken: list[int] = []

    def rows() -> Any:
        for i in range(6):
            taken.append(i)
            yield np.full((2,), i, np.float32)

    spec = tf.TensorSpec([2], tf.float32)
    data = tf.data.Dataset.from_generator(rows, output_signature=spec)
    distributed = two.experimental_distribute_dataset(data)

    @tf.function
    def epoch(batches: Any) -> Any:
        total, count = 0.0, 0
        for batch in batches:
            found = two.run(lambda x: tf.reduce_sum(x), args=(batch,))
            total += two.reduce("SUM", found, axis=None)
            count += 1
        return total / tf.cast(count, tf.float32)

    assert float(epoch(distributed)) == 5.0
    assert taken == list(range(6))


def test_data_that_ends_in_a_loop_raises_the_error_of_tensorflow(two: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices(np.ones((8,), np.float32)).batch(4)
    iterator = iter(two.experimental_distribute_dataset(data))

    @tf.function
    def train(iterator: Any) -> None:
        for _ in tf.range(5):
            two.run(lambda x: x, args=(next(iterator),))

    with pytest.raises((StopIteration, tf.errors.OutOfRangeError)):
        train(iterator)


def test_a_class_with_a_compiled_step_trains(two: Any) -> None:
    class Trainer:
        def __init__(self) -> None:
            with two.scope():
                self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
                self.optimizer = keras.optimizers.SGD(0.1)
                self.loss = keras.metrics.Mean()
            data = tf.data.Dataset.from_tensor_slices(np.ones((32, 2), np.float32)).batch(8)
            self.data = two.experimental_distribute_dataset(data)

        def step(self, x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.model(x, training=True) - 1.0)) / 2.0
            variables = self.model.trainable_variables
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            self.loss.update_state(loss)

        @tf.function
        def epoch(self) -> None:
            for x in self.data:
                two.run(self.step, args=(x,))

    trainer = Trainer()
    losses = []
    for _ in range(4):
        trainer.loss.reset_state()
        trainer.epoch()
        losses.append(float(trainer.loss.result()))
    assert losses[-1] < 0.2 * losses[0] or losses[-1] < 1e-3
    assert int(trainer.optimizer.iterations.numpy()) == 16


def test_a_loop_that_can_end_early_compiles_its_step(two: Any) -> None:
    with two.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    traces: list[int] = []

    @tf.function
    def epoch(data: Any, most: int) -> int:
        def step(x: Any) -> None:
            traces.append(1)
            total.assign_add(tf.reduce_sum(x))

        rounds = 0
        for x in data:
            if rounds == most:
                break
            two.run(step, args=(x,))
            rounds += 1
        return rounds

    rows = tf.data.Dataset.from_tensor_slices(np.ones((24,), np.float32)).batch(4)
    data = two.experimental_distribute_dataset(rows)
    assert [epoch(data, most) for most in (2, 4, 9)] == [2, 4, 6]
    assert float(total) == 48.0
    assert len(traces) == 1


def test_epochs_around_a_loop_over_data() -> None:
    total, traces = tf.Variable(0.0), []

    @tf.function
    def train(data: Any, epochs: Any) -> Any:
        rounds = 0
        for _ in tf.range(epochs):
            for x in data:
                traces.append(1)
                total.assign_add(tf.reduce_sum(x))
            rounds += 1
        return rounds

    data = tf.data.Dataset.from_tensor_slices(np.ones((6,), np.float32)).batch(2)
    assert int(train(data, tf.constant(3))) == 3
    assert float(total) == 18.0
    assert len(traces) == 1


def test_a_loop_over_layers_inside_a_loop_of_the_program() -> None:
    factors = [tf.constant(2.0), tf.constant(3.0)]

    @tf.function
    def power(x: Any, n: Any) -> Any:
        for _ in tf.range(n):
            for factor in factors:
                x = x * factor
        return x

    assert float(power(tf.constant(1.0), tf.constant(3))) == 216.0


def test_a_loop_over_tf_range_may_call_a_method_that_takes_data(strategy: Any) -> None:
    # As the trainers of the Model Garden do: the loop does not show that its body takes data.
    class Trainer:
        def __init__(self) -> None:
            self.traces = 0
            with strategy.scope():
                self.total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        def train_step(self, iterator: Any) -> None:
            self.traces += 1

            def step_fn(inputs: Any) -> None:
                self.total.assign_add(tf.reduce_sum(inputs))

            strategy.run(step_fn, args=(next(iterator),))

        @tf.function
        def train_loop(self, iterator: Any, num_steps: Any) -> Any:
            for _ in tf.range(num_steps):
                self.train_step(iterator)
            return num_steps * 2

    dataset = tf.data.Dataset.from_tensor_slices(np.arange(40, dtype=np.float32)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    trainer = Trainer()
    assert trainer.train_loop(iterator, tf.constant(3)).numpy() == 6
    assert float(trainer.total) == sum(range(12))
    traces = trainer.traces
    trainer.train_loop(iterator, tf.constant(5))
    assert float(trainer.total) == sum(range(32))
    assert trainer.traces == traces


def test_functions_of_the_host_are_made_by_decorators() -> None:
    @tf.numpy_function(Tout=[tf.float32, tf.int32])
    def both(x: Any, y: Any) -> Any:
        assert type(x) in (np.ndarray, np.float32)
        return x + y, np.int32(7)

    @tf.py_function(Tout=tf.TensorSpec([2], tf.float32))
    def doubled(x: Any) -> Any:
        return x.numpy() * 2

    def call(x: Any) -> Any:
        return both(x[0], 2.0), doubled(x)

    for function in (call, tf.function(call)):
        (total, seven), twice = function(tf.constant([1.0, 3.0]))
        assert (float(total), int(seven), twice.numpy().tolist()) == (3.0, 7, [2.0, 6.0])
    with pytest.raises(TypeError, match=r"@tf\.py_function\(Tout="):
        tf.py_function(lambda: 1)


def test_methods_of_modules_run_in_a_scope_of_names() -> None:
    class Block(tf.Module):
        def __init__(self, name: str | None = None) -> None:
            super().__init__(name=name)
            with self.name_scope as scope:
                self.scope = scope

        @tf.Module.with_name_scope
        def __call__(self, x: Any) -> Any:
            assert tf.get_current_name_scope() == "first"
            return x + 1

    block = Block("first")
    assert block.scope == "first/"
    assert int(block(tf.constant(1))) == 2


def test_a_variable_that_a_function_makes_may_start_with_a_python_number() -> None:
    made: list[Any] = []

    @tf.function
    def scaled(x: Any) -> Any:
        if not made:
            made.extend([tf.Variable(2.0), tf.Variable([[1, 2]])])
        made[0].assign_add(1.0)
        return made[0] * x + tf.cast(made[1][0, 1], tf.float32)

    assert float(scaled(tf.constant(1.0))) == 5.0
    assert float(scaled(tf.constant(2.0))) == 10.0
    assert float(made[0]) == 4.0


def test_a_concrete_function_takes_arguments_by_position_that_its_signature_named() -> None:
    power = tf.function(lambda a, b: a**b)
    square = power.get_concrete_function(a=tf.TensorSpec([], tf.float32), b=2)
    assert float(square(tf.constant(10.0))) == float(square(a=tf.constant(10.0))) == 100.0
    with pytest.raises(TypeError, match="Leave the others out"):
        square(tf.constant(1.0), tf.constant(2.0))


def test_the_size_of_a_tensor_array_is_known_while_a_function_is_compiled() -> None:
    @tf.function
    def rows(n: Any) -> Any:
        return tf.TensorArray(tf.float32, size=n).stack()

    with pytest.raises(rx.errors.TracedValueError, match=r"x\.shape\[0\]"):
        rows(tf.constant(3))


def test_a_compiled_loop_carries_variables_truth_values_and_structures_of_numbers() -> None:
    x = tf.Variable(2.0)

    @tf.function
    def loop(n: Any) -> Any:
        with tf.GradientTape() as tape:
            # The variable itself, not a tensor: its value must be what the loop starts with.
            power, above, word, pair = x, False, "a", {"sum": tf.constant(0.0), "parts": [0, 1]}
            for i in tf.range(n):
                power = power * x
                above = tf.logical_or(above, i > 1)
                word = "b"
                first, second = pair["parts"]
                pair = {"sum": pair["sum"] + 1.0, "parts": [second, first + second]}
        return power, tape.gradient(power, x), above, word, pair

    power, gradient, above, word, pair = loop(3)
    assert (float(power), float(gradient), bool(above), word) == (16.0, 32.0, True, "b")
    assert (float(pair["sum"]), [int(p) for p in pair["parts"]]) == (3.0, [2, 3])


def test_a_name_that_becomes_a_tensor_in_a_compiled_loop_needs_one_before_it() -> None:
    @tf.function
    def last(n: Any) -> Any:
        found = None
        for i in tf.range(n):
            found = i * 2
        return found

    with pytest.raises(rx.errors.InvalidArgumentError, match=r"'found'.*None.*tf\.zeros"):
        last(tf.constant(3))
