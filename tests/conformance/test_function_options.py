"""The options of `rx.function`, its concrete functions, and what it says about retracing."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import replicax as rx

# NumPy numbers are arrays.


@pytest.mark.parametrize(
    "kind",
    [np.float32, np.float64, np.int64, np.int8, np.uint16, np.bool_, np.complex64]
    + [ml_dtypes.bfloat16],
)
def test_numpy_numbers_are_arrays_without_dimensions(kind: Any) -> None:
    traces = []

    @rx.function
    def add(x: Any) -> Any:
        traces.append(x)
        return x + x

    results = [add(kind(i)) for i in range(4)]
    assert len(traces) == 1
    for i, result in enumerate(results):
        expected = jnp.asarray(kind(i)) + jnp.asarray(kind(i))
        assert result == expected and result.dtype == expected.dtype
    add(np.asarray(kind(1)))
    assert len(traces) == 1


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2", "central_2")
def test_numpy_numbers_as_arguments_of_run_are_arrays(strategy: Any) -> None:
    traces = []

    def fn(x: Any, more: Any) -> Any:
        traces.append(x)
        return x + more["y"]

    compiled = rx.function(fn)
    for i in range(4):
        value = strategy.run(compiled, args=(np.float64(i), {"y": np.float32(1)}))
        assert [float(v) for v in strategy.experimental_local_results(value)] == (
            [i + 1.0] * strategy.num_replicas_in_sync
        )
        own = strategy.experimental_distribute_values_from_function(
            lambda c, i=i: np.float64(c.replica_id_in_sync_group + i)
        )
        strategy.run(compiled, args=(own, {"y": np.float32(1)}))
    assert len(traces) == 2


def test_numpy_numbers_as_results_are_arrays() -> None:
    result = rx.function(lambda: {"a": np.float32(3), "b": np.str_("text")})()
    assert isinstance(result["a"], jnp.ndarray) and result["b"] == "text"


# Retracing.


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_function_that_is_traced_in_every_call_warns_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @rx.function
    def scale(x: Any, factor: Any) -> Any:
        return x * factor

    for i in range(40):
        scale(jnp.ones(2), i)
    first, second = _warnings(caplog)
    assert "scale was traced 5 times in its last 5 calls" in first
    assert "argument 1: 3 became 4" in first and "reduce_retracing=True" in first
    assert "8 became 9" in second


def test_a_function_that_is_traced_now_and_then_does_not_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    double = rx.function(lambda x: x * 2)
    for size in range(1, 10):
        for _ in range(3):
            double(np.ones(size, np.float32))
    assert not _warnings(caplog)


def test_making_the_function_again_in_a_loop_warns(caplog: pytest.LogCaptureFixture) -> None:
    strategy = rx.OneDeviceStrategy("CPU:0")

    def step(x: Any) -> Any:
        return x + 1

    for _ in range(5):
        strategy.run(rx.function(step), args=(jnp.ones(1),))
    (text,) = _warnings(caplog)
    assert "step was traced 5 times" in text and "outside of loops" in text


def test_reduce_retracing_makes_arrays_of_numbers_that_change() -> None:
    seen = []

    @rx.function(reduce_retracing=True)
    def scale(x: Any, factor: Any, is_negative: bool = False) -> Any:
        seen.append(type(factor))
        return -x * factor if is_negative else x * factor

    for i in range(6):
        result = scale(jnp.ones(2, jnp.float16), i)
        assert result.dtype == jnp.float16
        np.testing.assert_array_equal(result, [i, i])
    assert seen[0] is int and len(seen) == 2
    # Flags stay Python values.
    assert float(scale(jnp.ones(()), 2, is_negative=True)) == -2.0
    assert float(scale(jnp.ones(()), 2, is_negative=False)) == 2.0


def test_reduce_retracing_leaves_numbers_alone_that_must_be_python_numbers() -> None:
    @rx.function(reduce_retracing=True)
    def zeros(n: int, x: Any) -> Any:
        return jnp.zeros(n) + x

    assert [zeros(n, 1.0).shape for n in (1, 2, 3, 2)] == [(1,), (2,), (3,), (2,)]
    assert zeros.experimental_get_tracing_count() == 3


@pytest.mark.strategies("mirrored_2")
def test_reduce_retracing_under_run(strategy: Any) -> None:
    compiled = rx.function(lambda x: x + 1, reduce_retracing=True)
    values = [strategy.run(compiled, args=(i,)) for i in range(5)]
    assert [float(strategy.reduce("SUM", v, axis=None)) for v in values] == [2, 4, 6, 8, 10]
    assert compiled.experimental_get_tracing_count() == 2


def test_a_retracing_worker_warns_in_the_log_of_the_coordinator(
    desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = desk.coordinator()

    @rx.function
    def retraced(n: int) -> Any:
        return jnp.asarray(n)

    for i in range(20):
        coordinator.schedule(retraced, args=(i,))
    coordinator.join()
    texts = [text for text in _warnings(caplog) if "retraced was traced 5 times" in text]
    assert texts and all(text.startswith("/job:worker/task:") for text in texts)


def test_numpy_numbers_as_arguments_of_closures_do_not_retrace(
    desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = desk.coordinator()
    double = rx.function(lambda x: x * 2)
    values = [coordinator.schedule(double, args=(np.float32(i),)) for i in range(20)]
    assert [float(v.fetch()) for v in values] == [2.0 * i for i in range(20)]
    assert not _warnings(caplog)


# Options.


@pytest.mark.parametrize("jit_compile", [None, True, False])
def test_options_of_tf_function_are_accepted(jit_compile: bool | None) -> None:
    @rx.function(jit_compile=jit_compile, autograph=False, reduce_retracing=True)
    def double(x: Any) -> Any:
        return x * 2

    assert float(double(jnp.asarray(2.0))) == 4.0
    by_position = rx.function(lambda x: x * 2, [rx.TensorSpec((), jnp.float32)])
    assert float(by_position(2)) == 4.0


@pytest.mark.strategies("mirrored_2", "one_device")
def test_run_functions_eagerly(strategy: Any) -> None:
    seen: list[float] = []
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

    @rx.function
    def step(x: Any) -> Any:
        def fn(x: Any) -> Any:
            # Works on values only.
            seen.append(float(x))
            return v.assign_add(x) if x > 0 else None

        return strategy.run(fn, args=(x,))

    rx.run_functions_eagerly(True)
    try:
        assert rx.functions_run_eagerly()
        step(jnp.asarray(1.0))
        strategy.run(rx.function(lambda x: seen.append(float(x))), args=(jnp.asarray(2.0),))
    finally:
        rx.run_functions_eagerly(False)
    count = strategy.num_replicas_in_sync
    assert seen == [1.0] * count + [2.0] * count
    assert float(v) == count and not rx.functions_run_eagerly()
    with pytest.raises(rx.errors.TracedValueError):
        step(jnp.asarray(1.0))


def test_the_signature_of_the_function_is_kept() -> None:
    def scale(x: float, factor: int = 2, *, name: str = "") -> float:
        """Scales."""
        return x * factor

    compiled = rx.function(scale)
    assert inspect.signature(compiled) == inspect.signature(scale)
    assert compiled.__doc__ == "Scales." and compiled.__name__ == "scale"

    class Model:
        @rx.function
        def call(self, x: Any, training: bool = False) -> Any:
            return x

    assert list(inspect.signature(Model().call).parameters) == ["x", "training"]
    assert list(inspect.signature(Model.call).parameters) == ["self", "x", "training"]


# Concrete functions.


def test_a_concrete_function_is_compiled_once_and_has_a_signature() -> None:
    v = rx.Variable(2.0, name="v")
    table = jnp.arange(3.0)
    traces = []

    @rx.function
    def step(x: Any, factor: int, more: Any = None) -> Any:
        traces.append(1)
        v.assign_add(1.0)
        return {"y": x * factor + table, "v": v.read_value(), "more": more}

    concrete = step.get_concrete_function(rx.TensorSpec((3,)), 2)
    assert float(v) == 2.0 and len(traces) == 1
    assert concrete.structured_input_signature == ((rx.TensorSpec((3,)), 2), {})
    assert concrete.structured_outputs == {
        "y": rx.TensorSpec((3,)),
        "v": rx.TensorSpec(()),
        "more": None,
    }
    assert concrete.variables == (v,) == concrete.trainable_variables
    assert concrete.captured_inputs[0] is v and len(concrete.captured_inputs) == 2
    result = concrete(jnp.ones(3))
    np.testing.assert_array_equal(result["y"], [2.0, 3.0, 4.0])
    assert float(v) == 3.0 == float(result["v"])
    concrete(jnp.ones(3), 2), concrete(x=[1.0, 2.0, 3.0]), step(jnp.ones(3), 2)
    assert len(traces) == 1 and float(v) == 6.0
    assert concrete.pretty_printed_signature().startswith("step(x: float32[3], factor: 2) -> {")


def test_a_concrete_function_refuses_what_does_not_fit() -> None:
    step = rx.function(lambda x, factor: x * factor)
    concrete = step.get_concrete_function(rx.TensorSpec((None, 2)), factor=2)
    assert concrete.structured_outputs == rx.TensorSpec((None, 2))
    assert concrete(jnp.ones((5, 2))).shape == (5, 2)
    for bad in (jnp.ones(2), jnp.ones((1, 3)), jnp.ones((1, 2), jnp.int32)):
        with pytest.raises(rx.errors.InvalidArgumentError, match="needs an argument of shape"):
            concrete(bad)
    with pytest.raises(rx.errors.InvalidArgumentError, match="compiled with factor = 2"):
        concrete(jnp.ones((1, 2)), factor=3)
    with pytest.raises(rx.errors.ArgumentTypeError, match="needs the argument 'x'"):
        concrete()
    with pytest.raises(rx.errors.ArgumentTypeError, match="takes x, factor"):
        concrete(jnp.ones((1, 2)), 2, 3)
    with pytest.raises(rx.errors.InvalidArgumentError, match="number of dimensions"):
        step.get_concrete_function(rx.TensorSpec(None), 2)


def test_a_concrete_function_of_an_input_signature_and_of_arrays() -> None:
    double = rx.function(lambda x, y: x * 2 + y, input_signature=[rx.TensorSpec((2,))] * 2)
    concrete = double.get_concrete_function()
    np.testing.assert_array_equal(concrete([1.0, 2.0], y=jnp.ones(2)), [3.0, 5.0])
    other = rx.function(lambda x, flag, y: x - y if flag else x + y)
    subtract = other.get_concrete_function(np.float32(1), True, jnp.ones(()))
    # Arrays alone, without the flag between them.
    assert float(subtract(5.0, 3.0)) == 2.0 == float(subtract(5.0, True, 3.0))
    with pytest.raises(rx.errors.DistributeError):
        subtract(5.0, False, 3.0)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_a_concrete_function_of_a_distributed_iterator_takes_nothing(strategy: Any) -> None:
    data = rx.data.Dataset.from_tensor_slices(np.arange(8.0, dtype=np.float32)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @rx.function
    def step(it: Any) -> Any:
        return strategy.run(lambda x: x * 2, args=(next(it),))

    concrete = step.get_concrete_function(iterator)
    assert concrete.structured_outputs == rx.PerReplicaSpec((rx.TensorSpec((2,)),) * 2)
    first = strategy.gather(concrete(iterator), axis=0)
    np.testing.assert_array_equal(first, [0.0, 2.0, 4.0, 6.0])

    @rx.function
    def total(x: Any) -> Any:
        return strategy.reduce("SUM", x, axis=0)

    with strategy.scope():
        spec = total.get_concrete_function(data_spec := iterator.element_spec)
        assert isinstance(data_spec, rx.PerReplicaSpec)
        assert float(spec(next(iterator))) == 22.0


def test_a_concrete_function_is_a_signature_of_a_saved_model(tmp_path: Any) -> None:
    class Model(rx.Module):
        def __init__(self) -> None:
            self.v = rx.Variable(2.0)

        @rx.function
        def call(self, x: Any, factor: int) -> Any:
            return {"y": x * self.v * factor}

    model = Model()
    concrete = model.call.get_concrete_function(rx.TensorSpec((None, 2)), 3)
    rx.saved_model.save(model, tmp_path / "model", signatures=concrete)
    loaded = rx.saved_model.load(tmp_path / "model")
    result = loaded.signatures["serving_default"](jnp.ones((4, 2)))
    np.testing.assert_array_equal(result["y"], np.full((4, 2), 6.0))
