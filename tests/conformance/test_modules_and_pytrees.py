"""Modules, and the parameters of other JAX libraries as variables (section 2, tf.Module)."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

MEAN = rx.VariableAggregation.MEAN
FIRST = rx.VariableAggregation.ONLY_FIRST_REPLICA
FEW = pytest.mark.strategies("default", "mirrored_2", "virtual_2")


class Dense(rx.Module):
    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self.w = rx.Variable(jnp.ones(size), name="w", aggregation=MEAN)
        self.b = rx.Variable(0.0, name="b", aggregation=MEAN)
        self.steps = rx.Variable(0, name="steps", trainable=False)
        self.size = size

    def __call__(self, x: Any) -> Any:
        return x * self.w + self.b


def test_module_collects_variables_in_the_order_of_attribute_names(strategy: Any) -> None:
    with strategy.scope():
        dense = Dense(2)
    assert [v.name for v in dense.variables] == ["b", "steps", "w"]
    assert [v.name for v in dense.trainable_variables] == ["b", "w"]
    assert [v.name for v in dense.non_trainable_variables] == ["steps"]
    assert isinstance(dense.variables, tuple)
    assert dense.submodules == ()
    if strategy is not rx.get_strategy():
        assert all(map(strategy.extended.variable_created_in_scope, dense.variables))


def test_module_names() -> None:
    class MyBigLayer(rx.Module):
        pass

    class Forgetful(rx.Module):
        def __init__(self) -> None:
            self.v = rx.Variable(1.0)

    assert MyBigLayer().name == "my_big_layer"
    assert MyBigLayer("other").name == MyBigLayer(name="other").name == "other"
    assert Forgetful().name == "forgetful"
    assert len(Forgetful().variables) == 1


def test_module_searches_containers_and_submodules_once() -> None:
    class Model(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Dense(1), (Dense(2), {"z": Dense(3), "a": rx.Variable(1.0, name="a")})]
            self.shared = self.layers[0]
            self.again = self.layers[0].w
            self.me = self
            self.text = "text"
            self.array = jnp.ones(3)
            self.extra = collections.OrderedDict(q=rx.Variable(2.0, name="q"))

    model = Model()
    found = model.variables
    assert len(found) == len({id(v) for v in found}) == 3 * 3 + 2
    assert sorted(v.name for v in found) == sorted(["w", "b", "steps"] * 3 + ["a", "q"])
    assert [id(m) for m in model.submodules] == [
        id(model.layers[0]),
        id(model.layers[1][0]),
        id(model.layers[1][1]["z"]),
    ]
    before = len(found)
    model.late = rx.Variable(1.0)
    assert len(model.variables) == before + 1


@pytest.mark.one_strategy
@FEW
def test_module_trains_alike_in_both_executors(strategy: Any, run: Any) -> None:
    with strategy.scope():
        dense = Dense(2)
    trainable = dense.trainable_variables

    def fn(x: Any) -> Any:
        loss, gradients = rx.value_and_grad(lambda: jnp.sum(dense(x)), trainable)()
        for v, g in zip(trainable, gradients, strict=True):
            v.assign_sub(0.1 * g)
        return loss

    for _ in range(2):
        run(strategy, fn, (jnp.asarray([1.0, 2.0]),))
    np.testing.assert_allclose(dense.w, [0.8, 0.6], rtol=1e-6)
    np.testing.assert_allclose(dense.b, -0.4, rtol=1e-6)


# Pytrees.


class Pair(NamedTuple):
    first: Any
    second: Any


def test_make_variables_keeps_the_structure_and_names_by_path(strategy: Any) -> None:
    tree = {
        "dense": {"kernel": jnp.ones((2, 3)), "bias": np.zeros(3, np.float32)},
        "layers": [jnp.ones(1), Pair(jnp.ones(2), jnp.arange(3))],
        "rate": 0.5,
        "name": "model",
        "none": None,
    }
    with strategy.scope():
        made = rx.make_variables(tree, name="net", aggregation=FIRST)
    assert isinstance(made["dense"]["kernel"], rx.Variable)
    assert made["dense"]["kernel"].name == "net/dense/kernel"
    assert made["dense"]["bias"].name == "net/dense/bias"
    assert made["layers"][0].name == "net/layers/0"
    assert made["layers"][1].second.name.startswith("net/layers/1/")
    assert (made["rate"], made["name"], made["none"]) == (0.5, "model", None)
    assert made["dense"]["kernel"].trainable
    assert not made["layers"][1].second.trainable
    if strategy is not rx.get_strategy():
        assert strategy.extended.variable_created_in_scope(made["dense"]["kernel"])
    back = rx.read_variables(made)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back["dense"], tree["dense"])
    assert isinstance(back["layers"][1], Pair)
    assert back["layers"][1].second.dtype == jnp.int32


def test_make_variables_edge_cases() -> None:
    assert rx.make_variables({}) == {}
    assert rx.make_variables(None) is None
    single = rx.make_variables(jnp.ones(2), name="only")
    assert (single.name, single.shape) == ("only", (2,))
    frozen = rx.make_variables({"a": jnp.ones(2)}, trainable=False)
    assert not frozen["a"].trainable
    forced = rx.make_variables({"a": jnp.arange(2)}, trainable=True)
    assert forced["a"].trainable
    kept = rx.make_variables(frozen)
    assert kept["a"] is frozen["a"]
    array = jnp.ones(2)
    one = rx.make_variables({"a": array, "b": array})
    one["a"].assign([5.0, 5.0])
    assert one["b"].numpy().tolist() == [1.0, 1.0]
    assert rx.read_variables({"a": 1, "b": [frozen["a"]]})["b"][0].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="aggregation"):
        rx.make_variables({"a": jnp.arange(2)}, aggregation=MEAN)


def variables_of(tree: Any) -> list[Any]:
    found = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, rx.Variable))
    return [leaf for leaf in found if isinstance(leaf, rx.Variable)]


def train(strategy: Any, run: Any, variables: Any, predict: Any, x: Any) -> Any:
    """One step of gradient descent on sum(predict(parameters, x)), by value_and_grad."""
    leaves = variables_of(variables)

    def fn(x: Any) -> Any:
        def loss() -> Any:
            return jnp.sum(predict(rx.read_variables(variables), x))

        value, gradients = rx.value_and_grad(loss, leaves)()
        for v, g in zip(leaves, gradients, strict=True):
            v.assign_sub(0.1 * g)
        return value

    return run(strategy, fn, (x,))


def expected(parameters: Any, predict: Any, x: Any) -> Any:
    gradients = jax.grad(lambda p: jnp.sum(predict(p, x)))(parameters)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)


def check(after: Any, want: Any) -> None:
    got, wanted = jax.tree.leaves(after), jax.tree.leaves(want)
    assert len(got) == len(wanted) > 0
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.one_strategy
@FEW
def test_a_dict_of_parameters_trains(strategy: Any, run: Any) -> None:
    parameters = {"w": jnp.asarray([[1.0, 2.0]]), "b": jnp.asarray([0.5])}
    x = jnp.asarray([[3.0], [4.0]])

    def predict(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p["w"]) + p["b"]

    with strategy.scope():
        variables = rx.make_variables(parameters, aggregation=MEAN)
    train(strategy, run, variables, predict, x)
    check(rx.read_variables(variables), expected(parameters, predict, x))


@pytest.mark.strategies("mirrored_2")
def test_an_equinox_module_trains(strategy: Any, run: Any) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.nn.Lambda(jnp.tanh)])
    x = jnp.asarray([0.5, -1.0])
    parameters, static = eqx.partition(model, eqx.is_array)

    def predict(p: Any, x: Any) -> Any:
        return eqx.combine(p, static)(x)

    with strategy.scope():
        variables = rx.make_variables(parameters, aggregation=MEAN)
        whole = rx.make_variables(model)
    assert variables.layers[0].weight.name == "layers/0/weight"
    np.testing.assert_allclose(rx.read_variables(whole)(x), model(x), rtol=1e-6)
    train(strategy, run, variables, predict, x)
    check(rx.read_variables(variables), expected(parameters, predict, x))


@pytest.mark.strategies("mirrored_2")
def test_flax_linen_parameters_train(strategy: Any, run: Any) -> None:
    linen = pytest.importorskip("flax.linen")
    model = linen.Dense(3)
    x = jnp.asarray([[0.5, -1.0]])
    parameters = model.init(jax.random.key(0), x)
    with strategy.scope():
        variables = rx.make_variables(parameters, aggregation=MEAN)
    assert variables["params"]["kernel"].name == "params/kernel"
    train(strategy, run, variables, model.apply, x)
    check(rx.read_variables(variables), expected(parameters, model.apply, x))


@pytest.mark.strategies("mirrored_2")
def test_a_flax_nnx_state_trains(strategy: Any, run: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.asarray([[0.5, -1.0]])
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    def predict(p: Any, x: Any) -> Any:
        return nnx.merge(graph, p)(x)

    with strategy.scope():
        variables = rx.make_variables(state, aggregation=MEAN)
    names = sorted(v.name for v in variables_of(variables))
    assert len(names) == 2
    assert names[0].startswith("bias")
    assert names[1].startswith("kernel")
    train(strategy, run, variables, predict, x)
    check(rx.read_variables(variables), expected(state, predict, x))


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A pytree node that belongs to no known library."""

    def __init__(self, weight: Any, scale: Any, name: str = "scaled") -> None:
        self.weight, self.scale, self.name = weight, scale, name

    def tree_flatten(self) -> Any:
        return (self.weight, self.scale), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: Any) -> Any:
        return cls(*children, name=name)


ONES = jnp.ones((2, 3))


def nnx_state() -> Any:
    nnx = pytest.importorskip("flax.nnx")
    return nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)


def equinox_mlp(only_arrays: bool) -> Any:
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))
    return {"model": eqx.filter(mlp, eqx.is_array) if only_arrays else mlp}


def optax_state() -> Any:
    return {"state": pytest.importorskip("optax").trace(0.9).init({"w": ONES})}


MODELS: dict[str, Any] = {
    "nnx": nnx_state,
    "nnx in a dict": lambda: {"model": nnx_state(), "scale": ONES},
    "equinox with None": lambda: equinox_mlp(only_arrays=True),
    "equinox with functions": lambda: equinox_mlp(only_arrays=False),
    "node": lambda: {"layer": Scaled(ONES, ONES * 2.0)},
    "node with a number": lambda: {"layer": [Scaled(ONES, 3)]},
    "frozen": lambda: pytest.importorskip("flax").core.freeze({"params": {"w": ONES}}),
    "optax": optax_state,
}


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.strategies("mirrored_2")
def test_gradients_have_the_structure_of_what_make_variables_made(strategy: Any, kind: str) -> None:
    tree = MODELS[kind]()

    def loss_of(tree: Any) -> Any:
        arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
        return sum(jnp.sum((a + 0.5) ** 2) for a in arrays)

    with strategy.scope():
        variables = rx.make_variables(tree)
        both = rx.value_and_grad(lambda: loss_of(rx.read_variables(variables)), variables)
        eager, compiled = both(), rx.function(both)()
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    for loss, gradients in (eager, compiled):
        np.testing.assert_allclose(loss, loss_of(tree), rtol=1e-6)
        assert type(gradients) is type(tree)
        found = jax.tree.leaves(gradients)
        for gradient, array in zip(found, arrays, strict=True):
            np.testing.assert_allclose(gradient, 2 * array + 1.0, rtol=1e-6)


def test_gradients_with_respect_to_no_variable_are_refused() -> None:
    v = rx.Variable(1.0)
    for wrong in (3, None, {"a": 3}, jnp.ones(2), [v, jnp.ones(2)]):
        with pytest.raises(TypeError, match="Gradients need variables"):
            rx.value_and_grad(lambda: v * 1.0, wrong)
    assert rx.value_and_grad(lambda: v * 1.0, [])() == (1.0, [])
