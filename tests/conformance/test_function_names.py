"""Compiled functions follow names: to new variables, and to nothing that a trace uses up."""

from __future__ import annotations

import itertools
import random
import textwrap
from collections.abc import Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


class Cells:
    """Runs pieces of a program in one namespace, as a notebook does."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"rx": rx, "jnp": jnp, "np": np, "random": random}
        self.names["__name__"] = "__main__"

    def run(self, text: str) -> Any:
        exec(compile(textwrap.dedent(text), "cell.py", "exec"), self.names)
        return self.names


def test_a_new_variable_under_the_old_name_is_used() -> None:
    cells = Cells()
    cells.run("v = rx.Variable(1.0)")
    names = cells.run("step = rx.function(lambda: v.assign_add(1.0).read_value())")
    step, old = names["step"], names["v"]
    assert [float(step()), float(step())] == [2.0, 3.0]
    cells.run("v = rx.Variable(10.0)")
    assert [float(step()), float(step())] == [11.0, 12.0]
    assert float(old.read_value()) == 3.0
    assert step.experimental_get_tracing_count() == 2
    assert "'v' is bound to another object now" in step.explain_traces()


@pytest.mark.parametrize("is_run", [False, True])
def test_a_new_model_and_optimizer_are_used(is_run: bool) -> None:
    cells = Cells()
    cells.names["optax"] = pytest.importorskip("optax")
    cells.run("strategy = rx.MirroredStrategy(['CPU:0'], virtual_replicas=2)")
    make = """
    class Model(rx.Module):
        def __init__(self):
            super().__init__()
            self.w = rx.Variable(1.0)
        def __call__(self, x):
            return self.w * x
    with strategy.scope():
        model = Model()
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), model.trainable_variables)
    """
    cells.run(make)
    names = cells.run("""
    def loss(x):
        return model(x)
    def replica(x):
        grads = rx.grad(lambda: loss(x), model.trainable_variables)()
        optimizer.apply_gradients(zip(grads, model.trainable_variables))
    inner = rx.function(replica)
    outer = rx.function(lambda x: strategy.run(replica, args=(x,)))
    """)
    for _ in range(2):
        for _ in range(2):
            x = jnp.ones(())
            names["strategy"].run(names["inner"], args=(x,)) if is_run else names["outer"](x)
        assert float(names["model"].w.read_value()) == -3.0
        assert int(names["optimizer"].iterations) == 2
        cells.run(make)


def test_a_new_helper_function_is_used() -> None:
    cells = Cells()
    cells.run("def helper(x): return x + 1")
    step = cells.run("step = rx.function(lambda x: helper(x))")["step"]
    assert float(step(jnp.ones(()))) == 2.0
    cells.run("def helper(x): return x + 2")
    assert float(step(jnp.ones(()))) == 3.0


def test_other_cells_of_closures_and_helpers_are_noticed() -> None:
    v = rx.Variable(1.0)

    def helper() -> Any:
        return v.read_value()

    step = rx.function(lambda: helper() * 2)
    assert float(step()) == 2.0
    v = rx.Variable(5.0)
    assert float(step()) == 10.0


def test_replaced_attributes_and_items_are_noticed() -> None:
    class Part(rx.Module):
        def __init__(self) -> None:
            self.w = rx.Variable(1.0)

    class Holder:
        def __init__(self) -> None:
            self.part = Part()
            self.w = rx.Variable(10.0)
            self.both = [rx.Variable(100.0)]
            self.named = {"v": rx.Variable(1000.0)}

        @rx.function
        def total(self) -> Any:
            return self.part.w + self.w + self.both[0] + self.named["v"]

    holder = Holder()
    assert float(holder.total()) == 1111.0
    holder.part.w = rx.Variable(2.0)
    assert float(holder.total()) == 1112.0
    holder.w = rx.Variable(20.0)
    assert float(holder.total()) == 1122.0
    holder.both[0] = rx.Variable(200.0)
    assert float(holder.total()) == 1222.0
    holder.named["v"] = rx.Variable(2000.0)
    assert float(holder.total()) == 2222.0
    holder.part = Part()
    assert float(holder.total()) == 2221.0
    assert float(holder.total()) == 2221.0
    assert holder.total.experimental_get_tracing_count() == 6


def test_new_variables_may_be_created_after_a_name_was_bound_again() -> None:
    cells = Cells()
    cells.run("v = None")
    step = cells.run("""
    @rx.function
    def step():
        global v
        if v is None:
            v = rx.Variable(1.0)
        return v.assign_add(1.0).read_value()
    """)["step"]
    assert [float(step()), float(step())] == [2.0, 3.0]
    assert step.experimental_get_tracing_count() == 1
    cells.run("v = None")
    assert [float(step()), float(step())] == [2.0, 3.0]
    assert step.experimental_get_tracing_count() == 2


def test_numbers_and_other_names_cause_no_trace() -> None:
    cells = Cells()
    step = cells.run("""
    v, rate, losses = rx.Variable(0.0), 0.5, []
    step = rx.function(lambda x: v.assign_add(rate * x.sum() + len(losses)).read_value())
    """)["step"]
    for i in range(4):
        cells.names["x"] = cells.names["sum"] = jnp.ones(2)
        step(cells.names["x"])
        cells.names["rate"] = float(i)
        cells.names["losses"].append(jnp.ones(()))
    assert step.experimental_get_tracing_count() == 1


def test_elements_of_data_and_names_together() -> None:
    cells = Cells()
    cells.run("v = rx.Variable(1.0)\nit = iter(rx.data.Dataset.range(6))")
    step = cells.run("step = rx.function(lambda: v * next(it))")["step"]
    assert [float(step()), float(step())] == [0.0, 1.0]
    cells.run("v = rx.Variable(10.0)")
    assert [float(step()), float(step())] == [20.0, 30.0]
    cells.run("it = iter(rx.data.Dataset.range(6))")
    assert [float(step()), float(step())] == [0.0, 10.0]


# What a trace would use up.


def numbers() -> Iterator[float]:
    while True:
        yield random.random()


class Loader:
    def __init__(self) -> None:
        self.num_classes = 2
        self._rows = iter(range(9))

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> int:
        return next(self._rows)


captured_iterators = {
    "generator": lambda: numbers(),
    "list": lambda: iter([1.0, 2.0]),
    "enumerate": lambda: enumerate(iter(rx.data.Dataset.range(4))),
    "zip": lambda: zip([1, 2], [3, 4], strict=True),
    "map": lambda: map(float, [1, 2]),
    "cycle": lambda: itertools.cycle([1, 2]),
    "count": lambda: itertools.count(),
    "dict": lambda: iter({1: 2}),
    "loader": lambda: Loader(),
    "array": lambda: iter(np.arange(3)),
    "grain": lambda: iter(
        rx.data.Dataset.range(4).to_grain().to_iter_dataset(grain.ReadOptions(num_threads=0))
    ),
}


@pytest.mark.parametrize("kind", list(captured_iterators))
@pytest.mark.parametrize("where", ["closure", "attribute", "helper"])
def test_captured_iterators_are_refused(kind: str, where: str) -> None:
    it = captured_iterators[kind]()

    class Box:
        def __init__(self) -> None:
            self.it = it

        def take(self) -> Any:
            return next(self.it)

    box = Box()

    def helper() -> Any:
        return jax.tree.leaves(next(it))[0]

    functions = {
        "closure": lambda: jax.tree.leaves(next(it))[0] + jnp.zeros(()),
        "attribute": lambda: jax.tree.leaves(box.take())[0] + jnp.zeros(()),
        "helper": lambda: [helper()][0] + jnp.zeros(()),
    }
    with pytest.raises(rx.errors.TracingError, match="argument of the function"):
        rx.function(functions[where])()


class Shelf:
    """Takes elements where code names no method."""

    it = iter(range(9))

    def __getitem__(self, index: int) -> int:
        return next(Shelf.it)

    def __add__(self, other: Any) -> Any:
        return next(Shelf.it) + other

    @staticmethod
    def taken() -> int:
        return next(Shelf.it)

    @classmethod
    def taken_by_class(cls) -> int:
        return next(cls.it)


shelf = Shelf()
take_next = iter([1.0, 2.0]).__next__
send = numbers().send


@pytest.mark.parametrize(
    "takes",
    [
        lambda: take_next(),
        lambda: send(None),
        lambda: shelf[0],
        lambda: shelf + 1,
        lambda: Shelf.taken(),
        lambda: Shelf.taken_by_class(),
    ],
    ids=["next", "send", "getitem", "add", "staticmethod", "classmethod"],
)
def test_iterators_behind_methods_are_refused(takes: Any) -> None:
    with pytest.raises(rx.errors.TracingError, match="argument of the function"):
        rx.function(lambda: takes() + jnp.zeros(()))()


def test_an_iterator_that_is_not_advanced_is_no_error() -> None:
    loader = Loader()
    step = rx.function(lambda x: x * loader.num_classes)
    assert float(step(jnp.ones(()))) == 2.0


rng = np.random.default_rng(0)
python_rng = random.Random(0)
legacy_rng = np.random.RandomState(0)
bits = np.random.PCG64(0)
seeds = np.random.SeedSequence(0)


def draw() -> float:
    return float(np.random.normal())


@pytest.mark.parametrize(
    ("draws", "label"),
    [
        (lambda: random.random(), "random"),
        (lambda: np.random.normal(), "np.random"),
        (lambda: np.random.default_rng().normal() + np.random.rand(), "np.random"),
        (lambda: draw(), "np.random"),
        (lambda: rng.normal(), "rng"),
        (lambda: python_rng.random(), "python_rng"),
        (lambda: legacy_rng.rand(), "legacy_rng"),
        (lambda: float(bits.random_raw()), "bits"),
        (lambda: float(seeds.spawn(1)[0].generate_state(1)[0]), "seeds"),
    ],
)
def test_random_numbers_of_python_are_refused(draws: Any, label: str) -> None:
    with pytest.raises(rx.errors.TracingError, match=f"draws from {label}.*rx.random"):
        rx.function(lambda x: x + draws())(jnp.ones(()))


@pytest.mark.parametrize("generator", [np.random.default_rng(0), random.Random(0)])
def test_generators_of_numbers_as_arguments_are_refused(generator: Any) -> None:
    step = rx.function(lambda given, x: x + given["rng"].random())
    with pytest.raises(rx.errors.TracingError, match="draws from argument 0"):
        step({"rng": generator}, jnp.ones(()))


def test_random_numbers_by_imported_names_are_refused() -> None:
    from random import uniform

    from numpy.random import rand

    for fn in (lambda: jnp.asarray(rand()), lambda: jnp.asarray(uniform(0, 1))):
        with pytest.raises(rx.errors.TracingError, match=r"rx\.random"):
            rx.function(fn)()

    def local_import() -> Any:
        import random as other

        return jnp.asarray(other.random())

    with pytest.raises(rx.errors.TracingError, match=r"rx\.random"):
        rx.function(local_import)()


@pytest.mark.strategies("one_device", "mirrored_2", "virtual_2")
def test_random_numbers_in_replica_code_are_refused(strategy: Any) -> None:
    def replica(x: Any) -> Any:
        return x + np.random.normal()

    inside = rx.function(lambda x: strategy.run(replica, args=(x,)))
    for call in (lambda x: strategy.run(rx.function(replica), args=(x,)), inside):
        with pytest.raises(rx.errors.TracingError, match=r"np\.random"):
            call(jnp.ones(()))
    strategy.run(replica, args=(jnp.ones(()),))


@pytest.mark.strategies("default", "mirrored_2")
def test_initial_values_may_be_random(strategy: Any) -> None:
    made: list[Any] = []

    @rx.function
    def step() -> Any:
        if not made:
            with strategy.scope():
                made.append(rx.Variable(lambda: np.random.normal(size=2)))
        return made[0].read_value()

    assert step().tolist() == step().tolist()

    def noisy() -> Any:
        np.random.normal()
        return rx.Variable(lambda: np.random.normal(size=2)).read_value()

    with pytest.raises(rx.errors.TracingError, match=r"rx\.Variable\(lambda"):
        rx.function(noisy)()


def test_numbers_that_others_draw_are_not_blamed() -> None:
    assert float(rx.function(lambda: jax.random.uniform(jax.random.key(0)))()) < 1
    assert float(rx.function(lambda x: x + 1)(jnp.ones(()))) == 2.0
    dataset = rx.data.Dataset.range(4).map(lambda x: x + np.random.randint(1, 2) + draw() * 0)
    iterator = iter(dataset)

    @rx.function
    def step(it: Any) -> Any:
        assert not isinstance(it, np.random.Generator)
        return next(it)

    assert [int(step(iterator)), int(step(iter([3, 4])))] == [1, 3]


def test_a_trace_that_fails_after_a_name_was_bound_again_can_be_repeated() -> None:
    cells = Cells()
    step = cells.run("v = rx.Variable(1.0)\nstep = rx.function(lambda: v.read_value())")["step"]
    assert float(step()) == 1.0
    cells.run("v = None")
    for _ in range(2):
        with pytest.raises(AttributeError):
            step()
    cells.run("v = rx.Variable(2.0)")
    assert float(step()) == 2.0
