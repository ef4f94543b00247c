"""Models of flax and equinox, made variables by `rx.models`, train as plain JAX computes it.

The reference computes each replica by itself: its part of the batch, its own statistics and its own
random keys; gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import replicax as rx

RATE, STEPS, MOMENTUM = 0.1, 3, 0.75
ON_READ = rx.VariableSynchronization.ON_READ
# Not alike on the replicas, so that means of statistics differ from those of one of them.
X = jax.random.normal(jax.random.key(1), (8, 4)) + jnp.arange(8.0)[:, None]
Y = jax.random.normal(jax.random.key(2), (8, 2))
SEVERAL = ("one_device", "mirrored_2", "mirrored_4", "virtual_2", "central_2")

pytestmark = [pytest.mark.strategies(*SEVERAL), pytest.mark.one_strategy]


@pytest.fixture(params=[pytest.param("threaded", marks=pytest.mark.slow), "compiled"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=MOMENTUM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(8, 2, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        x = self.dropout(nnx.relu(self.norm(self.hidden(x))))
        return self.heads[0](x)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any, is_training: bool = True) -> Any:
        x = linen.Dense(8)(x)
        x = linen.BatchNorm(momentum=MOMENTUM, use_running_average=not is_training)(x)
        x = linen.Dropout(0.5, deterministic=not is_training)(linen.relu(x))
        return linen.Dense(2)(x)


class EquinoxNet(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.hidden = eqx.nn.Linear(4, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", momentum=MOMENTUM, mode="batch")
        self.out = eqx.nn.Linear(8, 2, key=key)

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.norm(self.hidden(x), state)
        return self.out(jax.nn.relu(x)), state


def batched(net: Any, x: Any, state: Any) -> Any:
    call = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return call(x, state)


def mean_of_losses(answers: Any, y: Any) -> Any:
    return jnp.sum((answers - y) ** 2) / len(Y)


def train(strategy: Any, model: Any, predict: Callable[[Any], Any], is_compiled: bool) -> list:
    """Trains for a few steps, and returns the losses of all of them."""
    size = len(X) // strategy.num_replicas_in_sync
    with strategy.scope():
        optimizer = rx.optimizers.Optimizer(optax.sgd(RATE), model.trainable_variables)

    def part(array: Any) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda c: array[c.replica_id_in_sync_group * size :][:size]
        )

    def step(x: Any, y: Any) -> Any:
        loss, gradients = rx.value_and_grad(
            lambda: mean_of_losses(predict(x), y), model.trainable_variables
        )()
        optimizer.apply_gradients(gradients)
        return loss

    step = rx.function(step) if is_compiled else step
    losses = [strategy.run(step, args=(part(X), part(Y))) for _ in range(STEPS)]
    return [float(strategy.reduce("SUM", loss, axis=None)) for loss in losses]


def reference(
    num_replicas: int, params: Any, states: list, predict: Callable[[int, Any, Any, Any], Any]
) -> tuple[Any, list, list]:
    """Trains replica by replica; `predict` returns answers and the new state of a replica."""
    size, losses = len(X) // num_replicas, []
    for _ in range(STEPS):
        total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
        for i in range(num_replicas):
            x, y = X[i * size :][:size], Y[i * size :][:size]

            def loss_fn(params: Any, i: int = i, x: Any = x, y: Any = y) -> Any:
                answers, state = predict(i, params, states[i], x)
                return mean_of_losses(answers, y), state

            (loss, states[i]), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
            total, sums = total + float(loss), jax.tree.map(jnp.add, sums, grads)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, sums)
        losses.append(total)
    return params, states, losses


def test_an_nnx_model_with_batch_norm_and_dropout(strategy: Any, is_compiled: bool) -> None:
    n = strategy.num_replicas_in_sync
    graph, params, others = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def predict(i: int, params: Any, others: Any, x: Any) -> Any:
        net = nnx.merge(graph, params, nnx.clone(others))
        answers = net(x)
        return answers, nnx.state(net, nnx.Not(nnx.Param))

    def others_of(i: int) -> Any:
        own = nnx.clone(others)
        key = own["dropout"]["rngs"]["key"]
        key.set_value(jax.random.fold_in(key.get_value(), i))
        return own

    expected, states, losses = reference(n, params, [others_of(i) for i in range(n)], predict)
    with strategy.scope():
        model = rx.models.from_nnx(Net(nnx.Rngs(0)))
    found = train(strategy, model, model, is_compiled)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    kernel = model.state["heads"]["0"]["kernel"]
    np.testing.assert_allclose(kernel, expected["heads"][0]["kernel"][...], rtol=1e-3, atol=1e-5)
    means = [np.asarray(state["norm"]["mean"][...]) for state in states]
    copies = strategy.experimental_local_results(model.state["norm"]["mean"])
    np.testing.assert_allclose(list(map(np.asarray, copies)), means, rtol=1e-4, atol=1e-5)
    with strategy.scope():
        mean = model.state["norm"]["mean"].read_value()
    np.testing.assert_allclose(mean, np.mean(means, axis=0), rtol=1e-4, atol=1e-5)
    assert int(model.state["dropout"]["rngs"]["count"].read_value()) == STEPS


class Layers(nnx.Module):
    """Layers that are scanned over: their state, and the keys of their dropout, are stacked."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(Layer, in_axes=0, out_axes=0)
        self.stacked = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x: Any) -> Any:
        run = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return run(self.stacked, x)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.linear(x))


def test_layers_of_nnx_that_are_scanned_over_have_a_key_each(
    strategy: Any, is_compiled: bool
) -> None:
    with strategy.scope():
        model = rx.models.from_nnx(Layers(nnx.Rngs(0)))

    def fn() -> Any:
        return model(jnp.ones((1, 4)))

    found = strategy.run(rx.function(fn) if is_compiled else fn)
    for i, answer in enumerate(strategy.experimental_local_results(found)):
        plain = Layers(nnx.Rngs(0))
        key = plain.stacked.dropout.rngs.key
        key.set_value(jax.vmap(jax.random.fold_in, (0, None))(key.get_value(), i))
        np.testing.assert_allclose(answer, plain(jnp.ones((1, 4))), rtol=1e-5, atol=1e-6)


def test_only_the_parameters_of_a_filter_are_trained(strategy: Any, is_compiled: bool) -> None:
    def make() -> nnx.Module:
        return nnx.LoRALinear(4, 2, lora_rank=2, rngs=nnx.Rngs(0))

    graph, lora, others = nnx.split(make(), nnx.LoRAParam, ...)
    n = strategy.num_replicas_in_sync

    def predict(i: int, lora: Any, state: Any, x: Any) -> Any:
        return nnx.merge(graph, lora, others)(x), state

    expected, _, losses = reference(n, lora, [None] * n, predict)
    with strategy.scope():
        model = rx.models.from_nnx(make(), wrt=nnx.LoRAParam)
    found = train(strategy, model, model, is_compiled)
    assert [v.name for v in model.trainable_variables] == ["lora/lora_a", "lora/lora_b"]
    # A value of the strategy's own kind, not one per replica.
    assert model.state["kernel"].synchronization is not ON_READ
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    found_b, expected_b = model.state["lora"]["lora_b"], expected["lora"]["lora_b"][...]
    np.testing.assert_allclose(found_b, expected_b, rtol=1e-3)
    np.testing.assert_array_equal(model.state["kernel"], others["kernel"][...])


def test_a_linen_model_with_batch_norm_and_dropout(strategy: Any, is_compiled: bool) -> None:
    n = strategy.num_replicas_in_sync
    net = LinenNet()
    first = net.init(jax.random.key(0), X, is_training=False)
    counts = [0] * n

    def predict(i: int, params: Any, stats: Any, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), i), counts[i])
        counts[i] += 1
        collections = {"params": params, "batch_stats": stats}
        return net.apply(collections, x, rngs={"dropout": key}, mutable=["batch_stats"])

    def and_stats(i: int, params: Any, stats: Any, x: Any) -> Any:
        answers, changed = predict(i, params, stats, x)
        return answers, changed["batch_stats"]

    stats = [first["batch_stats"]] * n
    expected, states, losses = reference(n, first["params"], stats, and_stats)
    with strategy.scope():
        model = rx.models.from_linen(net, first, rngs={"dropout": 5})
    found = train(strategy, model, model, is_compiled)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    kernel = model.state["params"]["Dense_1"]["kernel"]
    np.testing.assert_allclose(kernel, expected["Dense_1"]["kernel"], rtol=1e-3, atol=1e-5)
    means = [np.asarray(state["BatchNorm_0"]["mean"]) for state in states]
    with strategy.scope():
        mean = model.state["batch_stats"]["BatchNorm_0"]["mean"].read_value()
    np.testing.assert_allclose(mean, np.mean(means, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("library", ["nnx", "linen"])
def test_a_model_that_is_called_for_all_replicas_draws_as_the_first(
    strategy: Any, library: str
) -> None:
    """As after training, in the scope, to look at an answer."""

    def make() -> Any:
        if library == "nnx":
            return rx.models.from_nnx(Net(nnx.Rngs(0)))
        net = LinenNet()
        return rx.models.from_linen(net, net.init(jax.random.key(0), X, False), {"dropout": 5})

    expected = make()(X)
    with strategy.scope():
        model = make()
        np.testing.assert_allclose(model(X), expected, rtol=1e-5, atol=1e-6)


def test_an_equinox_model_with_batch_norm(strategy: Any, is_compiled: bool) -> None:
    n = strategy.num_replicas_in_sync
    net, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    arrays, static = eqx.partition(net, eqx.is_inexact_array)

    def predict(i: int, arrays: Any, state: Any, x: Any) -> Any:
        return batched(eqx.combine(arrays, static), x, state)

    # A state of equinox can be used once.
    clones = [jax.tree.map(lambda leaf: leaf, state) for _ in range(n)]
    expected, states, losses = reference(n, arrays, clones, predict)
    with strategy.scope():
        model = rx.models.from_equinox(net, state)
    found = train(
        strategy,
        model,
        lambda x: model.apply(lambda net, state: batched(net, x, state)),
        is_compiled,
    )
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    weight = model.state["module"]["out"]["weight"]
    np.testing.assert_allclose(weight, expected.out.weight, rtol=1e-3, atol=1e-5)
    for number, leaf in enumerate(jax.tree.leaves(states[0])):
        copies = strategy.experimental_local_results(model.state["state"][str(number)])
        np.testing.assert_allclose(np.asarray(copies[0]), leaf, rtol=1e-4, atol=1e-5)


def test_a_model_continues_from_a_checkpoint_under_another_strategy(
    strategy: Any, tmp_path: Path
) -> None:
    with strategy.scope():
        model = rx.models.from_nnx(Net(nnx.Rngs(0)))
    train(strategy, model, model, is_compiled=True)
    saved = rx.train.Checkpoint(model=model).save(tmp_path / "net")
    with rx.OneDeviceStrategy("CPU:0").scope():
        other = rx.models.from_nnx(Net(nnx.Rngs(7)))
        rx.train.Checkpoint(model=other).restore(saved).assert_consumed()
    with strategy.scope():
        expected = [np.asarray(v.read_value()) for v in model.variables]
    for variable, value in zip(other.variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-6)


class TestWithoutAStrategy:
    def test_a_view_shares_the_variables_and_changes_nothing(self) -> None:
        model = rx.models.from_nnx(Net(nnx.Rngs(0)))
        plain = Net(nnx.Rngs(0))
        plain.eval()
        serving = model.view(deterministic=True, use_running_average=True)
        assert serving.variables == model.variables
        before = [np.asarray(v) for v in model.variables]
        np.testing.assert_allclose(serving(X), plain(X), rtol=1e-6)
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable, value)

    def test_each_call_has_another_dropout_mask(self) -> None:
        model = rx.models.from_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
        call = rx.function(model)
        assert (call(jnp.ones(64)) != call(jnp.ones(64))).any()

    def test_state_of_nnx_may_be_numbers_none_and_nested(self) -> None:
        class Odd(nnx.Module):
            def __init__(self) -> None:
                self.calls = nnx.Variable(0)
                self.scale = nnx.Param(2.0)
                self.nothing = nnx.Param(None)
                self.line = nnx.Param({"slope": jnp.ones(2), "offset": jnp.zeros(())})

            def __call__(self, x: Any) -> Any:
                self.calls.set_value(self.calls.get_value() + 1)
                line = self.line.get_value()
                return self.scale * (x * line["slope"] + line["offset"])

        model = rx.models.from_nnx(Odd())
        names = ["line/offset", "line/slope", "scale"]
        assert sorted(v.name for v in model.trainable_variables) == names
        call = rx.function(model)
        np.testing.assert_array_equal(call(jnp.ones(2)), [2.0, 2.0])
        model.state["line"]["offset"].assign(1.0)
        np.testing.assert_array_equal(call(jnp.ones(2)), [4.0, 4.0])
        assert int(model.state["calls"]) == 2

    def test_state_that_is_neither_an_array_nor_a_number_is_refused(self) -> None:
        class Named(nnx.Module):
            def __init__(self) -> None:
                self.name = nnx.Variable("net")

        with pytest.raises(rx.errors.ArgumentTypeError, match="'name' is a str"):
            rx.models.from_nnx(Named())

    def test_a_call_that_is_refused_stores_nothing(self) -> None:
        class Counting(nnx.Module):
            def __init__(self) -> None:
                self.calls, self.seen = 0, nnx.Variable(jnp.zeros(()))

            def __call__(self, x: Any) -> Any:
                self.calls += 1
                self.seen.set_value(x)
                return x

        model = rx.models.from_nnx(Counting())
        with pytest.raises(rx.errors.UnsupportedError, match="static attributes"):
            model(jnp.ones(()))
        assert float(model.state["seen"]) == 0.0

    def test_state_that_a_call_adds_is_refused(self) -> None:
        class Remembering(nnx.Module):
            def __call__(self, x: Any) -> Any:
                self.seen = nnx.Cache(x)
                return x

        model = rx.models.from_nnx(Remembering())
        with pytest.raises(rx.errors.UnsupportedError, match="added or removed seen"):
            model(jnp.ones(2))

    def test_a_static_attribute_that_a_call_changes_is_refused(self) -> None:
        class Counting(nnx.Module):
            def __init__(self) -> None:
                self.calls = 0

            def __call__(self, x: Any) -> Any:
                self.calls += 1
                return x

        with pytest.raises(rx.errors.UnsupportedError, match="static attributes"):
            rx.models.from_nnx(Counting())(jnp.ones(2))

    @pytest.mark.parametrize("make", ["from_nnx", "from_linen", "from_equinox"])
    def test_another_object_is_refused(self, make: str) -> None:
        arguments = ({},) if make == "from_linen" else ()
        with pytest.raises(rx.errors.ArgumentTypeError, match=f"`{make}` needs an? "):
            getattr(rx.models, make)(lambda x: x, *arguments)
