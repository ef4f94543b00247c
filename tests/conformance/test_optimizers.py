"""`rx.optimizers.Optimizer`: where it updates, what it refuses, and the state that it keeps."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import (
    copies,
    in_compiled_merge,
    in_eager,
    in_function,
    in_merge,
    number,
    refused,
    values,
)

import replicax as rx

ADAM = optax.adam(0.1)


def make(strategy: Any, transformation: Any = ADAM, **options: Any) -> Any:
    """Two variables of a strategy and their optimizer."""
    with strategy.scope():
        w = rx.Variable([1.0, -2.0], name="w")
        b = rx.Variable(0.5, name="b")
        return w, b, rx.optimizers.Optimizer(transformation, [w, b], **options)


def on_one_device(transformation: Any, gradients: list[Any]) -> list[Any]:
    """What optax alone makes of the two variables."""
    params = [jnp.array([1.0, -2.0]), jnp.array(0.5)]
    state = transformation.init(params)
    for own in gradients:
        updates, state = transformation.update(own, state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(p) for p in params]


def require_equal(strategy: Any, variables: Any, expected: Any) -> None:
    """Every copy of every variable is as expected."""
    for variable, value in zip(variables, expected, strict=True):
        for copy in copies(strategy, variable):
            np.testing.assert_allclose(copy, value, rtol=1e-5, atol=1e-6)


# Where it is called.


@pytest.mark.every_strategy
def test_S214_gradients_are_summed_and_variables_change_in_sync(strategy: Any, run: Any) -> None:
    momentum = optax.sgd(0.1, momentum=0.9)
    w, b, optimizer = make(strategy, momentum)

    def steps() -> None:
        def loss() -> Any:
            return (w * w).sum() * number() + b * number()

        for _ in range(2):
            gradients = rx.grad(loss, [w, b])()
            optimizer.apply_gradients(zip(gradients, [w, b], strict=True))

    run(strategy, steps)
    total = sum(range(1, strategy.num_replicas_in_sync + 1))
    params = [jnp.array([1.0, -2.0]), jnp.array(0.5)]
    state = momentum.init(params)
    for _ in range(2):
        updates, state = momentum.update(
            [2 * total * params[0], jnp.array(1.0 * total)], state, params
        )
        params = optax.apply_updates(params, updates)
    require_equal(strategy, [w, b], params)
    assert int(optimizer.iterations) == 2


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_S214_equal_gradients_count_once_per_replica(strategy: Any, run: Any) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))
    gradient = jnp.array([1.0, 2.0])
    run(strategy, lambda: optimizer.apply_gradients([(gradient, w)]))
    require_equal(strategy, [w, b], [[-1.0, -6.0], 0.5])


PLACES = [in_eager, in_function, in_merge, in_compiled_merge]


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", "mirrored_2", "central_2")
@pytest.mark.parametrize("place", PLACES)
def test_S218_cross_replica_code_takes_plain_gradients_as_they_are(
    strategy: Any, place: Any
) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))

    def apply(_: Any) -> None:
        optimizer.apply_gradients([jnp.array([1.0, 2.0]), 3.0])

    place(strategy, apply)
    require_equal(strategy, [w, b], [[0.0, -4.0], -2.5])


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
@pytest.mark.parametrize("place", PLACES)
def test_S218_cross_replica_code_sums_per_replica_gradients(strategy: Any, place: Any) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))
    gradients = values(strategy, lambda i: jnp.array([1.0, 2.0]) * (i + 1))

    def apply(_: Any, own: Any) -> None:
        optimizer.apply_gradients([(own, w)])

    place(strategy, apply, gradients)
    require_equal(strategy, [w, b], [[-2.0, -8.0], 0.5])


@pytest.mark.strategies(*TWO_REPLICAS)
def test_mirrored_gradients_are_taken_as_they_are(strategy: Any) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))
    with strategy.scope():
        gradients = values(strategy, lambda i: jnp.array([1.0, 2.0]) * (i + 1))
        reduced = strategy.extended.reduce_to("MEAN", gradients, w)
        optimizer.apply_gradients([(reduced, w)])
    require_equal(strategy, [w, b], [[-0.5, -5.0], 0.5])


@pytest.mark.strategies("one_device", "mirrored_2", "central_2", "default")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_outside_of_every_scope_it_acts_as_in_the_scope_of_its_variables(
    strategy: Any, is_compiled: bool
) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))

    def apply(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, w)])

    (rx.function(apply) if is_compiled else apply)(jnp.array([1.0, 2.0]))
    require_equal(strategy, [w, b], [[0.0, -4.0], 0.5])


@pytest.mark.strategies(*TWO_REPLICAS)
def test_per_replica_gradients_are_summed_outside_of_every_scope(strategy: Any) -> None:
    w, b, optimizer = make(strategy, optax.sgd(1.0))
    optimizer.apply_gradients([(values(strategy, lambda i: jnp.array([1.0, 2.0]) * (i + 1)), w)])
    require_equal(strategy, [w, b], [[-2.0, -8.0], 0.5])


@pytest.mark.strategies("mirrored_2")
def test_without_jit_it_does_the_same(strategy: Any) -> None:
    w, b, optimizer = make(strategy)
    with jax.disable_jit():
        strategy.run(lambda: optimizer.apply_gradients([jnp.array([1.0, 2.0]) * number(), 1.0]))
    count = strategy.num_replicas_in_sync
    total = sum(range(1, count + 1))
    gradients = [jnp.array([1.0, 2.0]) * total, jnp.array(1.0 * count)]
    require_equal(strategy, [w, b], on_one_device(ADAM, [gradients]))


@pytest.mark.strategies("mirrored_2", "default")
def test_many_compiled_steps_trace_once(strategy: Any) -> None:
    w, b, optimizer = make(strategy)

    @rx.function
    def step(x: Any) -> None:
        strategy.run(lambda own: optimizer.apply_gradients([own * w, own * b]), args=(x,))

    for i in range(5):
        step(jnp.array(float(i)))
    assert step.experimental_get_tracing_count() == 1
    assert int(optimizer.iterations) == 5


@pytest.mark.strategies("mirrored_2")
def test_of_another_strategy_is_refused(strategy: Any) -> None:
    w, _, optimizer = make(strategy)
    with rx.OneDeviceStrategy("CPU:0").scope(), refused(rx.errors.ContextError, "'w'"):
        optimizer.apply_gradients([(jnp.ones(2), w)])


@pytest.mark.strategies("mirrored_2", "virtual_2", "central_2")
def test_replicas_that_are_differentiating_cannot_meet(strategy: Any) -> None:
    w, b, optimizer = make(strategy)

    def loss() -> Any:
        optimizer.apply_gradients([(jnp.ones(2), w)])
        return (w * w).sum() * b

    with refused(rx.errors.ContextError, "differentiated"):
        strategy.run(lambda: rx.grad(loss, [w])())


def test_under_a_bare_jit_it_is_refused() -> None:
    w, _, optimizer = make(rx.get_strategy())
    with refused(rx.errors.TracingError, "rx.function"):
        jax.jit(lambda g: optimizer.apply_gradients([(g, w)]))(jnp.ones(2))


@pytest.mark.strategies("mirrored_2")
def test_without_a_scope_an_installed_strategy_is_in_force(strategy: Any) -> None:
    rx.experimental_set_strategy(strategy)
    try:
        w = rx.Variable([1.0, 2.0])
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), w)
        strategy.run(lambda: optimizer.apply_gradients([jnp.ones(2)]))
        assert w.numpy().tolist() == [-1.0, 0.0]
        assert optimizer.iterations.owner is strategy.extended
    finally:
        rx.experimental_set_strategy(None)


@pytest.mark.strategies("mirrored_2", "default")
def test_in_an_update_it_is_refused(strategy: Any) -> None:
    w, b, optimizer = make(strategy)
    with strategy.scope(), refused(rx.errors.ContextError, "update context"):
        strategy.extended.update(b, lambda _: optimizer.apply_gradients([(jnp.ones(2), w)]))


# What is passed.


@pytest.mark.strategies("mirrored_2", "central_2", "default")
def test_gradients_may_have_the_structure_of_the_variables(strategy: Any, run: Any) -> None:
    with strategy.scope():
        model = {"w": rx.Variable([1.0, 2.0]), "more": [rx.Variable(1.0), rx.Variable(3.0)]}
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), model)

    def step() -> None:
        def loss() -> Any:
            return (model["w"] * jnp.array([1.0, 4.0])).sum() + model["more"][1] * 2.0

        optimizer.apply_gradients(rx.grad(loss, model)())

    run(strategy, step)
    count = strategy.num_replicas_in_sync
    expected = [[1 - 0.5 * count, 2 - 2.0 * count], 1.0, 3.0 - count]
    require_equal(strategy, [model["w"], *model["more"]], expected)


def test_a_list_a_tuple_and_one_variable_are_one_to_gradients() -> None:
    v, w = rx.Variable(1.0), rx.Variable(2.0)
    optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), (v, w))
    optimizer.apply_gradients([1.0, 1.0])
    optimizer.apply_gradients((1.0, 1.0))
    optimizer.apply_gradients([1.0], [w])
    optimizer.apply_gradients(1.0, w)
    assert (float(v), float(w)) == (-1.0, -2.0)


def test_keys_of_dicts_need_not_be_in_the_order_of_text() -> None:
    model = {i: rx.Variable(float(i)) for i in (10, 2, 1)}
    optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), model)
    optimizer.apply_gradients({i: float(i) / 2 for i in model})
    assert {i: float(v) for i, v in model.items()} == {1: 0.5, 2: 1.0, 10: 5.0}


@pytest.mark.strategies("mirrored_2", "default")
def test_none_leaves_variable_and_slots_unchanged(strategy: Any, run: Any) -> None:
    w, b, optimizer = make(strategy)
    run(strategy, lambda: optimizer.apply_gradients([jnp.ones(2), 1.0]))
    before = float(b), float(optimizer.get_slot(b, "mu"))
    moved = float(w[0])
    run(strategy, lambda: optimizer.apply_gradients([(jnp.ones(2), w), (None, b)]))
    run(strategy, lambda: optimizer.apply_gradients([(jnp.ones(2), w)]))
    assert (float(b), float(optimizer.get_slot(b, "mu"))) == before
    assert float(w[0]) < moved
    assert int(optimizer.iterations) == 3


@pytest.mark.parametrize("gradients", [[], [None, None]])
def test_no_gradient_at_all_is_refused(gradients: Any) -> None:
    _, _, optimizer = make(rx.get_strategy())
    pairs = list(zip(gradients, optimizer._trained, strict=False))
    with refused(rx.errors.InvalidArgumentError, "at least one gradient"):
        optimizer.apply_gradients(pairs)


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_none_on_some_replicas_is_refused(strategy: Any) -> None:
    w, _, optimizer = make(strategy)

    def step() -> None:
        is_first = int(rx.get_replica_context().replica_id_in_sync_group) == 0
        optimizer.apply_gradients([(jnp.ones(2) if is_first else None, w)])

    with refused(rx.errors.InvalidArgumentError, "'w'.*None on replica 1|at least one gradient"):
        strategy.run(step)

    def other() -> None:
        is_first = int(rx.get_replica_context().replica_id_in_sync_group) == 0
        optimizer.apply_gradients([jnp.ones(2) if is_first else None, jnp.array(1.0) * number()])

    with refused(rx.errors.InvalidArgumentError, "'w'.*None on replica 1"):
        strategy.run(other)


def test_bad_gradients_are_refused_by_name() -> None:
    w, b, optimizer = make(rx.get_strategy())
    other = rx.Variable(1.0, name="other")
    with refused(rx.errors.InvalidArgumentError, "'other' is not one of them"):
        optimizer.apply_gradients([(1.0, other)])
    with refused(rx.errors.InvalidArgumentError, r"'w' needs a gradient of shape \(2,\)"):
        optimizer.apply_gradients([(jnp.ones(3), w)])
    with refused(rx.errors.InvalidArgumentError, "two for 'b'"):
        optimizer.apply_gradients([(1.0, b), (1.0, b)])
    with refused(rx.errors.StructureError, "a list of 3"):
        optimizer.apply_gradients([jnp.ones(2), 1.0, 1.0])
    with refused(rx.errors.StructureError, "a dict"):
        optimizer.apply_gradients({"w": jnp.ones(2)})
    with refused(rx.errors.ArgumentTypeError, "'b' must be an array"):
        optimizer.apply_gradients([("1.0", b)])
    assert int(optimizer.iterations) == 0


@pytest.mark.strategies("mirrored_2", "central_2")
def test_a_wrong_shape_is_refused_in_replica_code(strategy: Any, run: Any) -> None:
    w, _, optimizer = make(strategy)
    with refused(rx.errors.InvalidArgumentError, "'w' needs a gradient of shape"):
        run(strategy, lambda: optimizer.apply_gradients([(jnp.ones(3), w)]))
    with strategy.scope(), refused(rx.errors.InvalidArgumentError, "'w' needs a gradient of shape"):
        optimizer.apply_gradients([(values(strategy, lambda i: jnp.ones(3) * i), w)])


# What it is made from.


@pytest.mark.strategies("one_device", "mirrored_1", *TWO_REPLICAS)
def test_T61_outside_of_the_scope_of_its_variables_it_is_refused(strategy: Any) -> None:
    with strategy.scope():
        w = rx.Variable(1.0, name="w")
    outside = rx.Variable(1.0, name="outside")
    with refused(rx.errors.InvalidArgumentError, "'w' belongs to .*with strategy.scope"):
        rx.optimizers.Optimizer(ADAM, [w])
    with strategy.scope(), refused(rx.errors.InvalidArgumentError, "'outside' belongs to no scope"):
        rx.optimizers.Optimizer(ADAM, [w, outside])


@pytest.mark.strategies("mirrored_2", "one_device")
def test_in_replica_code_it_cannot_be_made(strategy: Any, run: Any) -> None:
    w, _, _ = make(strategy)
    with refused(rx.errors.ContextError, "once for all replicas"):
        run(strategy, lambda: rx.optimizers.Optimizer(ADAM, [w]) and None)


def test_variables_that_cannot_be_trained_are_refused() -> None:
    def refuse(kind: Any, match: str, variables: Any) -> None:
        with refused(kind, match):
            rx.optimizers.Optimizer(ADAM, variables)

    v = rx.Variable(1.0, name="v")
    invalid = rx.errors.InvalidArgumentError
    refuse(invalid, "'i' has type int32", [rx.Variable(1, name="i")])
    refuse(invalid, "'n' is not trainable", [rx.Variable(1.0, trainable=False, name="n")])
    refuse(invalid, "'v' is given twice", [v, v])
    refuse(invalid, "there are none", [])
    refuse(rx.errors.ArgumentTypeError, "float was given", [1.0])
    with rx.device("CPU:1"):
        far = rx.Variable(1.0)
    refuse(invalid, "they are on several", [v, far])


@pytest.mark.strategies("mirrored_2", "central_2")
def test_on_read_variables_are_refused(strategy: Any) -> None:
    with strategy.scope():
        own = rx.Variable(
            1.0,
            trainable=True,
            name="own",
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )
        with refused(rx.errors.InvalidArgumentError, "'own' is synchronized ON_READ"):
            rx.optimizers.Optimizer(ADAM, [own])


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_bad_options_are_refused(steps: Any) -> None:
    v = rx.Variable(1.0)
    with refused(rx.errors.InvalidArgumentError, "positive int"):
        rx.optimizers.Optimizer(ADAM, [v], gradient_accumulation_steps=steps)
    with refused(rx.errors.InvalidArgumentError, "sparse='some'"):
        rx.optimizers.Optimizer(ADAM, [v], sparse="some")
    with refused(rx.errors.InvalidArgumentError, "sparse='rows'"):
        rx.optimizers.Optimizer(ADAM, [v], sparse="rows", gradient_accumulation_steps=2)
    with refused(rx.errors.ArgumentTypeError, "has no `init`"):
        rx.optimizers.Optimizer(optax.adam, [v])


def test_a_variable_that_is_being_created_is_refused() -> None:
    @rx.function
    def build(x: Any) -> None:
        rx.optimizers.Optimizer(ADAM, [rx.Variable(x, name="new")])

    with refused(rx.errors.TracingError, "'new' is being created"):
        build(jnp.ones(2))


def test_it_may_be_made_in_a_compiled_function() -> None:
    w = rx.Variable(1.0)
    made: list[Any] = []

    @rx.function
    def step(gradient: Any) -> None:
        if not made:
            made.append(rx.optimizers.Optimizer(optax.sgd(1.0), [w]))
        made[0].apply_gradients([(gradient, w)])

    step(jnp.array(1.0))
    step(jnp.array(2.0))
    assert (float(w), int(made[0].iterations)) == (-2.0, 2)


def test_importing_replicax_does_not_import_optax() -> None:
    code = "import sys, replicax; assert 'optax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# The state.


@pytest.mark.every_strategy
def test_S215_slots_share_the_devices_of_their_variable(strategy: Any) -> None:
    w, b, optimizer = make(strategy)
    for variable in (w, b):
        slots = optimizer.slots(variable)
        assert set(slots) == {"mu", "nu"}
        for name, slot in slots.items():
            assert slot.placement == variable.placement
            assert slot.owner is variable.owner
            assert (slot.shape, slot.trainable) == (variable.shape, False)
            assert slot.name == f"{variable.name}/{name}"
            assert optimizer.get_slot(variable, name) is slot
    assert len(optimizer.variables) == 6
    assert optimizer.variables[0] is optimizer.iterations


def test_S215_slots_of_a_variable_on_a_named_device_are_there() -> None:
    with rx.device("CPU:3"):
        w = rx.Variable(1.0)
    optimizer = rx.optimizers.Optimizer(ADAM, [w])
    optimizer.apply_gradients([(1.0, w)])
    assert {v.device for v in (*optimizer.variables, w)} == {w.device}
    assert w.device.endswith("CPU:3")


@pytest.mark.every_strategy
@pytest.mark.strategies("central_2")
def test_S215_on_central_storage_all_state_is_central(strategy: Any) -> None:
    _, _, optimizer = make(strategy)
    optimizer.apply_gradients([jnp.ones(2), 1.0])
    assert {v.device for v in optimizer.variables} == set(strategy.extended.parameter_devices)


def test_unknown_slots_are_not_found() -> None:
    w, _, optimizer = make(rx.get_strategy())
    with refused(rx.errors.NotFoundError, "'mu', 'nu'"):
        optimizer.get_slot(w, "momentum")
    with refused(rx.errors.InvalidArgumentError, "'other' is not one of them"):
        optimizer.slots(rx.Variable(1.0, name="other"))


def test_slots_of_one_name_are_told_apart_by_their_path() -> None:
    two = optax.chain(optax.trace(0.9), optax.trace(0.5))
    w, _, optimizer = make(rx.get_strategy(), two)
    assert set(optimizer.slots(w)) == {"0/trace", "1/trace"}


def test_names_for_checkpoints_follow_the_state() -> None:
    model = {"a": rx.Variable(1.0), "b": [rx.Variable([2.0])]}
    names = rx.optimizers.Optimizer(ADAM, model).checkpoint_children()
    assert list(names) == ["iterations", "0/count", "0/mu/a", "0/mu/b/0", "0/nu/a", "0/nu/b/0"]
    assert names["0/mu/b/0"].shape == (1,)


@pytest.mark.strategies("mirrored_2", "central_2", "default")
def test_state_that_is_copied_continues_the_training(strategy: Any) -> None:
    w, b, optimizer = make(strategy)
    gradients = [jnp.array([0.3, -1.0]), 2.0]
    for _ in range(3):
        optimizer.apply_gradients(gradients)
    new_w, new_b, other = make(strategy)
    new_w.assign(w.read_value())
    new_b.assign(b.read_value())
    children = optimizer.checkpoint_children()
    for name, variable in other.checkpoint_children().items():
        variable.assign(children[name].read_value())
    optimizer.apply_gradients(gradients)
    other.apply_gradients(gradients)
    assert copies(strategy, new_w) == copies(strategy, w)
    assert copies(strategy, new_b) == copies(strategy, b)


# Hyperparameters.


def injected(**hyperparams: Any) -> Any:
    return optax.inject_hyperparams(optax.sgd)(**hyperparams)


@pytest.mark.strategies("mirrored_2", "central_2", "default")
def test_the_learning_rate_can_be_set(strategy: Any, run: Any) -> None:
    _, b, optimizer = make(strategy, injected(learning_rate=1.0))
    count = strategy.num_replicas_in_sync
    step = rx.function(lambda: strategy.run(lambda: optimizer.apply_gradients([(1.0, b)])))
    step()
    assert float(b) == 0.5 - count
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    assert set(optimizer.hyperparams) == {"learning_rate"}
    step()
    assert float(b) == 0.5 - 1.25 * count

    def half() -> None:
        optimizer.learning_rate = optimizer.learning_rate / 2

    run(strategy, half)
    step()
    assert float(b) == 0.5 - 1.375 * count


def test_a_learning_rate_that_is_no_state_cannot_be_set() -> None:
    _, _, optimizer = make(rx.get_strategy())
    with refused(rx.errors.NotFoundError, "inject_hyperparams"):
        optimizer.learning_rate = 0.1
    with refused(rx.errors.NotFoundError, "inject_hyperparams"):
        _ = optimizer.learning_rate
    assert optimizer.hyperparams == {}


def test_a_scheduled_learning_rate_cannot_be_set() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    _, b, optimizer = make(rx.get_strategy(), injected(learning_rate=schedule))
    optimizer.apply_gradients([(1.0, b)])
    optimizer.apply_gradients([(1.0, b)])
    assert float(optimizer.learning_rate) == 0.75
    assert float(b) == 0.5 - 1.0 - 0.75
    with refused(rx.errors.InvalidArgumentError, "a schedule sets this one"):
        optimizer.learning_rate = 0.1


# Gradient accumulation.


@pytest.mark.strategies("mirrored_2", "central_2")
def test_accumulated_gradients_make_one_update(strategy: Any, run: Any) -> None:
    w, b, optimizer = make(strategy, gradient_accumulation_steps=2)
    count = strategy.num_replicas_in_sync
    gradients = [[jnp.array([1.0, i]), jnp.array(float(i))] for i in range(4)]
    run(strategy, lambda *g: optimizer.apply_gradients(g), gradients[0])
    assert int(optimizer.iterations) == 0
    run(strategy, lambda *gs: [optimizer.apply_gradients(g) for g in gs] and None, gradients[1:])
    assert int(optimizer.iterations) == 2
    means = [
        [count * (x + y) / 2 for x, y in zip(gradients[i], gradients[i + 1], strict=True)]
        for i in (0, 2)
    ]
    require_equal(strategy, [w, b], on_one_device(ADAM, means))


def test_with_accumulation_none_counts_as_zero() -> None:
    w, b, optimizer = make(rx.get_strategy(), optax.sgd(1.0), gradient_accumulation_steps=2)
    optimizer.apply_gradients([(jnp.ones(2), w), (1.0, b)])
    optimizer.apply_gradients([(jnp.ones(2), w)])
    assert (w.numpy().tolist(), float(b)) == ([0.0, -3.0], 0.0)


# Variables of all kinds.


@pytest.mark.strategies("mirrored_2", "default")
def test_constraints_hold_after_each_update(strategy: Any, run: Any) -> None:
    with strategy.scope():
        w = rx.Variable([1.0, 0.1], constraint=lambda x: jnp.maximum(x, 0.0))
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.25), [w])
    run(strategy, lambda: optimizer.apply_gradients([jnp.ones(2)]))
    require_equal(strategy, [w], [[1.0 - 0.25 * strategy.num_replicas_in_sync, 0.0]])


@pytest.mark.strategies("mirrored_2", "default")
def test_bfloat16_stays_bfloat16(strategy: Any, run: Any) -> None:
    start = jnp.array([1.0, 2.0], jnp.bfloat16)
    with strategy.scope():
        w = rx.Variable(start)
        optimizer = rx.optimizers.Optimizer(ADAM, [w])
    gradient = jnp.array([0.5, 3.0], jnp.bfloat16)
    params, state = [start], ADAM.init([start])
    run(strategy, lambda: [optimizer.apply_gradients([gradient]) for _ in range(3)] and None)
    for _ in range(3):
        total = gradient * strategy.num_replicas_in_sync
        updates, state = ADAM.update([total], state, params)
        params = optax.apply_updates(params, updates)
    assert {v.dtype for v in (w, *optimizer.slots(w).values())} == {jnp.dtype(jnp.bfloat16)}
    assert w.numpy().astype(float).tolist() == pytest.approx(
        np.asarray(params[0]).astype(float).tolist(), rel=0.01
    )


def test_numbers_and_integers_become_gradients_of_the_variables_type() -> None:
    v = rx.Variable(1.0)
    optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [v])
    optimizer.apply_gradients([(1, v)])
    optimizer.apply_gradients([(np.float64(1.0), v)])
    assert float(v) == 0.0
    assert v.dtype == jnp.float32


@pytest.mark.one_strategy
@pytest.mark.parametrize(
    "option", [{"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}]
)
def test_options_for_gradients_that_were_summed_are_refused(
    strategy: Any, option: dict[str, bool]
) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)
        optimizer = rx.optimizers.Optimizer(optax.sgd(1.0), [v])

    def step() -> None:
        summed = rx.get_replica_context().all_reduce("SUM", jnp.float32(1.0))
        optimizer.apply_gradients([summed], **option)

    with refused(rx.errors.InvalidArgumentError, f"`{next(iter(option))}` asks it not to"):
        strategy.run(step)
    assert v.numpy() == 1.0
