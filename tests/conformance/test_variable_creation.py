"""Variables that replica code creates (S36, T21, T25-T30)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

pytestmark = pytest.mark.every_strategy

KINDS = ("default", "one_device", "mirrored_2", "virtual_2", "central_2")
SEVERAL = ("mirrored_2", "virtual_2", "central_2")
REPLICATED = ("mirrored_2", "virtual_2", "tpu_2", "minimal_2")
ON_READ = rx.VariableSynchronization.ON_READ
SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN


def context() -> Any:
    return rx.get_replica_context()


def me() -> int:
    return int(context().replica_id_in_sync_group)


def copies(v: Any) -> list[Any]:
    return [np.asarray(c).tolist() for c in v.components]


def on_each(strategy: Any, value: Any) -> list[Any]:
    found = [np.asarray(r).tolist() for r in strategy.experimental_local_results(value)]
    return found * strategy.num_replicas_in_sync if len(found) == 1 else found


@pytest.mark.strategies("mirrored_4", "tpu_2", "minimal_2", *KINDS)
def test_s36_t25_one_variable_for_all_replicas(strategy: Any, run: Any) -> None:
    seen: list[Any] = []

    def fn() -> Any:
        v = rx.Variable([1.0, 2.0], name="v", aggregation=MEAN)
        seen.append(v)
        return v

    v = run(strategy, fn)
    assert isinstance(v, rx.Variable)
    assert not isinstance(v, rx.PerReplica)
    assert all(s is v for s in seen)
    assert v.name == "v"
    assert np.asarray(v.read_value()).tolist() == [1.0, 2.0]
    if strategy is not rx.get_strategy():
        assert strategy.extended.variable_created_in_scope(v)


@pytest.mark.strategies(*REPLICATED)
def test_s36_variables_follow_the_policy_of_the_strategy(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        mirrored = rx.Variable(1.0, name="m")
        on_read = rx.Variable(2.0, name="r", synchronization=ON_READ, aggregation=SUM)
        return mirrored, on_read

    mirrored, on_read = run(strategy, fn)
    n = strategy.num_replicas_in_sync
    assert isinstance(mirrored, rx.MirroredVariable)
    assert isinstance(on_read, rx.SyncOnReadVariable)
    assert mirrored.trainable
    assert not on_read.trainable
    assert copies(mirrored) == [1.0] * n
    assert copies(on_read) == [2.0] * n
    with strategy.scope():
        assert float(on_read.read_value()) == 2.0 * n


@pytest.mark.strategies("central_2")
def test_s36_central_storage_keeps_one_copy(strategy: Any, run: Any) -> None:
    v = run(strategy, lambda: rx.Variable(1.0))
    assert len(v.components) == 1
    assert v.device == strategy.extended.parameter_devices[0]


@pytest.mark.strategies(*KINDS)
def test_s36_a_created_variable_is_used_at_once(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        v = rx.Variable(1.0, aggregation=SUM)
        v.assign_add(2.0)
        return v, v.read_value() + 1

    v, result = run(strategy, fn)
    n = strategy.num_replicas_in_sync
    assert copies(v) == [1.0 + 2.0 * n] * len(v.components)
    assert on_each(strategy, result) == [2.0 + 2.0 * n] * n


@pytest.mark.strategies(*KINDS)
def test_s36_a_created_variable_outlives_the_run(strategy: Any, run: Any) -> None:
    v = run(strategy, lambda: rx.Variable(1.0, aggregation=SUM))
    run(strategy, lambda: v.assign_add(1.0))
    n = strategy.num_replicas_in_sync
    assert float(v) == 1.0 + n
    with strategy.scope():
        v.assign(5.0)
    assert copies(v) == [5.0] * len(v.components)


@pytest.mark.strategies(*SEVERAL)
def test_t26_numbers_at_the_end_of_names_do_not_matter(strategy: Any) -> None:
    v = strategy.run(lambda: rx.Variable(float(me()), name=f"foo_{me()}"))
    assert v.name == "foo_0"
    assert copies(v) == [0.0] * len(v.components)
    w = strategy.run(lambda: rx.Variable(1.0, name=["foo", "foo_1"][me()]))
    assert w.name == "foo"


@pytest.mark.strategies(*SEVERAL)
def test_t26_different_names_are_refused(strategy: Any) -> None:
    with pytest.raises(RuntimeError, match="same variables") as caught:
        strategy.run(lambda: rx.Variable(1.0, name=["foo", "bar"][me()]))
    assert "'bar'" in str(caught.value)
    assert "'foo'" in str(caught.value)
    assert strategy.run(lambda: rx.Variable(1.0, name="foo")).name == "foo"


@pytest.mark.strategies(*SEVERAL)
def test_t27_variables_of_one_name_match_in_creation_order(strategy: Any, run: Any) -> None:
    def fn() -> Any:
        first = rx.Variable(1.0, name="foo")
        context().merge_call(lambda s: None)
        second = rx.Variable(2.0, name="foo_1")
        other = rx.Variable(3.0, name="bar")
        third = rx.Variable(4.0, name="foo")
        return first, second, other, third

    made = run(strategy, fn)
    assert [float(v) for v in made] == [1.0, 2.0, 3.0, 4.0]
    assert len({id(v) for v in made}) == 4


@pytest.mark.strategies(*SEVERAL)
def test_t27_variables_without_a_name(strategy: Any, run: Any) -> None:
    made = run(strategy, lambda: [rx.Variable(float(i)) for i in range(3)])
    assert [float(v) for v in made] == [0.0, 1.0, 2.0]


@pytest.mark.strategies(*SEVERAL)
def test_t28_creation_on_replica_0_only_is_not_detected(strategy: Any) -> None:
    made: list[Any] = []

    def fn() -> None:
        if me() == 0:
            made.append(rx.Variable(1.0))

    strategy.run(fn)
    assert float(made[0]) == 1.0
    assert strategy.extended.variable_created_in_scope(made[0])


@pytest.mark.strategies(*SEVERAL)
def test_t28_creation_on_a_later_replica_only_is_refused(strategy: Any) -> None:
    def fn() -> None:
        if me() == 1:
            rx.Variable(1.0, name="late")

    with pytest.raises(RuntimeError, match="'late'"):
        strategy.run(fn)


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t29_initialiser_runs_once_and_copies_are_equal(
    strategy: Any, run: Any, synchronization: str
) -> None:
    calls: list[None] = []
    random = np.random.default_rng(0)

    def initial() -> Any:
        calls.append(None)
        return jnp.asarray(random.normal(size=3), jnp.float32)

    def fn() -> Any:
        return rx.Variable(
            initial,
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=MEAN,
        )

    v = run(strategy, fn)
    assert len(calls) == 1
    found = copies(v)
    assert len(found) == strategy.num_replicas_in_sync
    assert all(c == found[0] for c in found)
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.strategies(*REPLICATED)
def test_t29_in_scope_the_initialiser_runs_once_too(strategy: Any, synchronization: str) -> None:
    calls: list[None] = []

    def initial() -> Any:
        calls.append(None)
        return jax.random.normal(jax.random.key(len(calls)), (2,))

    with strategy.scope():
        v = rx.Variable(
            initial,
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=MEAN,
        )
    assert len(calls) == 1
    found = copies(v)
    assert len(found) == strategy.num_replicas_in_sync
    assert all(c == found[0] for c in found)


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t29_initial_value_that_depends_on_the_replica(
    strategy: Any, run: Any, synchronization: str
) -> None:
    def fn() -> Any:
        v = rx.Variable(
            context().replica_id_in_sync_group + 1.0,
            synchronization=rx.VariableSynchronization[synchronization],
            aggregation=MEAN,
        )
        return v, v.read_value()

    v, read = run(strategy, fn)
    assert copies(v) == [1.0] * len(v.components)
    assert on_each(strategy, read) == [1.0] * strategy.num_replicas_in_sync


@pytest.mark.strategies(*KINDS)
def test_t30_a_variable_created_once_in_a_traced_step(strategy: Any) -> None:
    kept: dict[str, Any] = {}

    def fn(x: Any) -> Any:
        if "v" not in kept:
            kept["v"] = rx.Variable(1.0, aggregation=SUM)
        kept["v"].assign_add(x)
        return kept["v"].read_value()

    @rx.function
    def step(x: Any) -> Any:
        return strategy.run(fn, args=(x,))

    n = strategy.num_replicas_in_sync
    for k in range(1, 4):
        result = step(jnp.asarray(2.0))
        assert on_each(strategy, result) == [1.0 + 2.0 * n * k] * n
    assert float(kept["v"]) == 1.0 + 6.0 * n
    # A new signature causes a new trace, which finds the variable.
    step(jnp.asarray(2))
    assert float(kept["v"]) == 1.0 + 8.0 * n


@pytest.mark.strategies(*KINDS)
def test_t30_a_variable_created_once_by_an_eager_step(strategy: Any) -> None:
    kept: dict[str, Any] = {}

    def fn() -> Any:
        v = kept.get("v")
        if v is None:
            v = kept["new"] = rx.Variable(1.0, aggregation=SUM)
        v.assign_add(1.0)

    n = strategy.num_replicas_in_sync
    for k in range(1, 4):
        strategy.run(fn)
        kept["v"] = kept["new"]
        assert float(kept["v"]) == 1.0 + n * k


@pytest.mark.strategies("mirrored_2")
def test_t30_a_compiled_step_may_not_create_on_every_trace(strategy: Any) -> None:
    @rx.function
    def fn(x: Any) -> Any:
        return rx.Variable(x).read_value()

    strategy.run(fn, args=(jnp.ones(1),))
    with pytest.raises(ValueError, match="first call only"):
        strategy.run(fn, args=(jnp.ones(2),))


@pytest.mark.strategies(*SEVERAL)
def test_t21_creators_opened_in_a_replica_are_its_own(strategy: Any) -> None:
    asked: list[Any] = []

    def fn() -> Any:
        own = me()

        def creator(next_creator: Any, **kwargs: Any) -> Any:
            asked.append((own, me()))
            kwargs["name"] = f"{kwargs['name']}_thread_{own}"
            return next_creator(**kwargs)

        with rx.variable_creator_scope(creator):
            # The other replica opens its scope before this one creates the variable.
            context().merge_call(lambda s: None)
            v = rx.Variable(1.0, name="foo")
            context().merge_call(lambda s: None)
        w = rx.Variable(2.0, name="bar")
        return v, w

    v, w = strategy.run(fn)
    assert asked == [(0, 0), (1, 1)]
    assert v.name == "foo_thread_0"
    assert w.name == "bar"
    assert strategy.run(lambda: rx.Variable(1.0, name="after")).name == "after"


@pytest.mark.strategies(*KINDS)
def test_t21_creators_of_the_caller_hold_in_replicas(strategy: Any, run: Any) -> None:
    def frozen(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "trainable": False})

    with strategy.scope(), rx.variable_creator_scope(frozen):
        v = run(strategy, lambda: rx.Variable(1.0))
    assert not v.trainable
    assert run(strategy, lambda: rx.Variable(1.0)).trainable


@pytest.mark.strategies(*KINDS)
def test_t21_creators_opened_outside_of_the_scope(strategy: Any, run: Any) -> None:
    def frozen(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "trainable": False})

    with rx.variable_creator_scope(frozen):
        v = run(strategy, lambda: rx.Variable(3.0, name="v"))
    assert not v.trainable
    assert copies(v) == [3.0] * len(v.components)
    assert v.name == "v"
    if strategy is not rx.get_strategy():
        assert strategy.extended.variable_created_in_scope(v)


@pytest.mark.strategies(*KINDS)
def test_t21_what_creators_outside_of_the_scope_change_holds(strategy: Any, run: Any) -> None:
    def changing(next_creator: Any, **kwargs: Any) -> Any:
        kwargs["name"] = kwargs["name"].replace("v", "w")
        kwargs["initial_value"] = 2 * kwargs["initial_value"]
        return next_creator(**{**kwargs, "dtype": jnp.float16})

    # Known, and computed by the function that is compiled.
    for initial in (3.0, lambda: 1.0 + 2.0 * jnp.ones(())):
        found: list[Any] = []

        def fn(initial: Any = initial, found: Any = found) -> Any:
            given = initial() if callable(initial) else initial
            if not found:
                found.append(rx.Variable(given, name="v", dtype=jnp.float32))
            return found[0].read_value()

        with rx.variable_creator_scope(changing):
            run(strategy, fn)
        (v,) = found
        v = getattr(v, "container", v)
        assert (v.name, v.dtype) == ("w", jnp.float16)
        assert copies(v) == [6.0] * len(v.components)
        if strategy is not rx.get_strategy():
            assert strategy.extended.variable_created_in_scope(v)


@pytest.mark.strategies(*SEVERAL)
def test_t21_a_creator_scope_left_open_by_a_replica_does_not_leak(strategy: Any) -> None:
    def creator(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**kwargs)

    def fn() -> None:
        with rx.variable_creator_scope(creator):
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011
        strategy.run(fn)
    assert strategy.run(lambda: rx.Variable(1.0, name="v")).name == "v"
    assert rx.Variable(1.0).owner is None


@pytest.mark.strategies(*SEVERAL)
def test_creation_after_a_failed_creation(strategy: Any, run: Any) -> None:
    def initial() -> Any:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        run(strategy, lambda: rx.Variable(initial))
    assert float(run(strategy, lambda: rx.Variable(1.0))) == 1.0


@pytest.mark.strategies("default", *KINDS)
def test_none_is_the_default_of_aggregation_and_synchronization(strategy: Any) -> None:
    def passing_none(next_creator: Any, **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "aggregation": None, "synchronization": None})

    with strategy.scope():
        v = rx.Variable(1.0, aggregation=None, synchronization=None)
        with rx.variable_creator_scope(passing_none):
            w = rx.Variable(1.0)
    for made in (v, w):
        assert made.aggregation is rx.VariableAggregation.NONE
        assert made.synchronization is rx.VariableSynchronization.AUTO
        assert made.trainable


@pytest.mark.strategies("default", *KINDS)
def test_a_name_that_is_no_text_is_refused(strategy: Any) -> None:
    with strategy.scope(), pytest.raises(TypeError, match="`name` of a variable must be a str"):
        rx.Variable(1.0, name=5)
