"""merge_call: all replicas meet, one function acts for all (S41-S48, T9, T11, T12, T14)."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import TWO_REPLICAS
from vocabulary import copies, num_copies
from worker_groups import local_ids, replica_results, spans_workers

import replicax as rx

KINDS = ("default", "one_device", "mirrored_2", "virtual_2", "central_2")
SEVERAL = ("mirrored_2", "virtual_2", "central_2")
SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN


def context() -> Any:
    return rx.get_replica_context()


def merge(fn: Any, *args: Any, **kwargs: Any) -> Any:
    return context().merge_call(fn, args=args, kwargs=kwargs)


def ids(strategy: Any, dtype: Any = jnp.float32) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(c.replica_id_in_sync_group, dtype)
    )


def on_each(strategy: Any, value: Any) -> list[Any]:
    """One plain value per replica, also where all replicas have one."""
    found = [
        jax.tree.map(lambda x: np.asarray(x).tolist(), r) for r in replica_results(strategy, value)
    ]
    return found * strategy.num_replicas_in_sync if len(found) == 1 else found


def me() -> int:
    return int(context().replica_id_in_sync_group)


# The meeting.


@pytest.mark.every_strategy
@pytest.mark.strategies("default", "one_device", "mirrored_4", *TWO_REPLICAS)
def test_s41_merge_fn_waits_for_all_replicas(strategy: Any) -> None:
    order: list[str] = []

    def fn() -> None:
        order.append(f"a{me()}")
        merge(lambda s: order.append("merge"))
        order.append(f"b{me()}")

    strategy.run(fn)
    own = local_ids(strategy)
    assert order == [f"a{i}" for i in own] + ["merge"] + [f"b{i}" for i in own]


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS)
def test_s42_merge_fn_is_called_once_with_the_strategy_and_merged_arguments(
    strategy: Any, run: Any
) -> None:
    seen: list[Any] = []

    def merge_fn(s: Any, own: Any, text: str, *, key: Any, number: int = 0) -> Any:
        seen.append((s, text, number, sorted(key), rx.in_cross_replica_context()))
        return s.reduce("sum", own, axis=None), s.reduce("sum", key["k"][0], axis=None)

    def fn(x: Any) -> Any:
        return merge(merge_fn, x + 1, "text", key={"k": [x * 10]}, number=7)

    result = run(strategy, fn, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert seen == [(strategy, "text", 7, ["k"], True)]
    assert on_each(strategy, result) == [(n * (n + 1) / 2, 10 * n * (n - 1) / 2)] * n


@pytest.mark.strategies(*SEVERAL)
def test_s42_merged_arguments_are_what_run_would_return(strategy: Any) -> None:
    seen: list[Any] = []
    x = jnp.ones(1)
    strategy.run(lambda i: merge(lambda s, *a: seen.append(a), x, i, "t", 3), args=(ids(strategy),))
    ((shared, own, text, number),) = seen
    if spans_workers(strategy):
        # Whether the others have an equal array is not known here.
        shared = shared.values[0]
    assert shared is x
    assert isinstance(own, rx.PerReplica)
    assert [float(v) for v in own.values] == local_ids(strategy)
    assert (text, number) == ("t", 3)


@pytest.mark.every_strategy
@pytest.mark.strategies("mirrored_4", *SEVERAL)
def test_s43_each_replica_gets_its_part_of_the_result(strategy: Any, run: Any) -> None:
    def merge_fn(s: Any, own: Any) -> Any:
        return {"own": [own], "all": s.reduce("sum", own, axis=None), "none": None, "text": "t"}

    def fn(x: Any) -> Any:
        answer = merge(merge_fn, x + 1)
        assert answer["none"] is None
        assert answer["text"] == "t"
        assert isinstance(answer["own"][0], jax.Array)
        assert isinstance(answer["all"], jax.Array)
        return answer["own"][0] * 100 + answer["all"]

    result = run(strategy, fn, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert on_each(strategy, result) == [100.0 * (i + 1) + n * (n + 1) / 2 for i in range(n)]


@pytest.mark.strategies(*SEVERAL)
def test_s43_distributed_values_made_by_merge_fn_are_unwrapped(strategy: Any, run: Any) -> None:
    made = ids(strategy)

    def merge_fn(s: Any, x: Any) -> Any:
        everywhere = s.extended.broadcast_to(jnp.asarray(5.0), s.extended.worker_devices)
        return made, everywhere, s.extended.reduce_to("sum", x, x)

    def fn(x: Any) -> Any:
        own, everywhere, total = merge(merge_fn, x)
        return own * 100 + everywhere * 10 + total

    result = run(strategy, fn, args=(ids(strategy),))
    assert on_each(strategy, result) == [51.0, 151.0]


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_s43_merge_fn_without_a_result(strategy: Any, run: Any) -> None:
    def fn() -> None:
        assert merge(lambda s: None) is None
        assert merge(lambda s: ()) == ()
        assert merge(lambda s, t: t, "text") == "text"

    assert run(strategy, fn) is None


@pytest.mark.strategies("mirrored_2", "mirrored_4", "virtual_2")
def test_s44_any_number_of_calls(strategy: Any) -> None:
    order: list[Any] = []

    def fn() -> None:
        for k in range(3):
            order.append(me())
            merge(lambda s, k=k: order.append(f"m{k}"))

    strategy.run(fn)
    assert order == [x for k in range(3) for x in [*local_ids(strategy), f"m{k}"]]


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_s44_results_of_calls_in_a_row(strategy: Any, run: Any) -> None:
    def fn(x: Any) -> Any:
        for _ in range(3):
            x = merge(lambda s, y: s.reduce("sum", y, axis=None), x) + x
        return x

    result = run(strategy, fn, args=(ids(strategy),))
    if strategy.num_replicas_in_sync == 1:
        assert on_each(strategy, result) == [0.0]
    else:
        # (0, 1) -> (1, 2) -> (4, 5) -> (13, 14)
        assert on_each(strategy, result) == [13.0, 14.0]


@pytest.mark.strategies("mirrored_4", *KINDS)
def test_s45_sample(strategy: Any, run: Any) -> None:
    def merge_fn(s: Any, value: Any) -> Any:
        return s.reduce("sum", value, axis=None)

    def fn(x: Any) -> Any:
        v = x + context().replica_id_in_sync_group
        return merge(merge_fn, v) + v

    result = run(strategy, fn, args=(3,))
    n = strategy.num_replicas_in_sync
    expected = [3 * n + n * (n - 1) // 2 + 3 + i for i in range(n)]
    assert on_each(strategy, result) == expected
    if n == 2:
        assert [int(v) for v in strategy.unwrap(result)] == [10 + i for i in local_ids(strategy)]


@pytest.mark.every_strategy
@pytest.mark.strategies("one_device", *SEVERAL)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_s46_update_recipe_equals_assign(strategy: Any, run: Any, op: str) -> None:
    with strategy.scope():
        by_recipe = rx.Variable([1.0, 1.0])
        by_batch = rx.Variable([1.0, 1.0])
        by_assign = rx.Variable([1.0, 1.0], aggregation=rx.VariableAggregation[op])

    def merge_fn(s: Any, g: Any) -> None:
        total = s.extended.reduce_to(op, g, by_recipe)
        s.extended.update(by_recipe, lambda v, d: v.assign_sub(d), args=(total,))
        (total,) = s.extended.batch_reduce_to(op, [(g, by_batch)])
        s.extended.update(by_batch, lambda v, d: v.assign_sub(d), kwargs={"d": total})

    def fn(x: Any) -> Any:
        g = jnp.stack([x, x + 1])
        merge(merge_fn, g)
        by_assign.assign_sub(g)
        return by_recipe.read_value(), by_assign.read_value()

    result = run(strategy, fn, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    total = np.asarray([n * (n - 1) / 2, n * (n + 1) / 2]) / (n if op == "MEAN" else 1)
    expected = (1.0 - total).tolist()
    for v in (by_recipe, by_batch, by_assign):
        assert copies(strategy, v) == [expected] * num_copies(strategy, v)
    # Replicas see the new value after the call.
    assert on_each(strategy, result) == [(expected, expected)] * n


@pytest.mark.every_strategy
@pytest.mark.strategies(*KINDS)
def test_s47_s48_a_layer_may_reduce_and_update(strategy: Any, run: Any) -> None:
    class Norm(rx.Module):
        """Subtracts the mean over all replicas and counts its calls."""

        def __init__(self) -> None:
            self.calls = rx.Variable(0.0, trainable=False)

        def __call__(self, x: Any) -> Any:
            def merge_fn(s: Any, x: Any) -> Any:
                s.extended.update(self.calls, lambda v: v.assign_add(1.0))
                return s.reduce("mean", x, axis=None)

            assert context().all_reduce("sum", x).shape == x.shape
            return x - merge(merge_fn, x)

    with strategy.scope():
        layer = Norm()
    result = run(strategy, lambda x: layer(layer(x) + 1), args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert on_each(strategy, result) == [i - (n - 1) / 2 for i in range(n)]
    assert float(layer.calls) == 2.0


@pytest.mark.strategies(*KINDS)
def test_variables_written_and_created_by_merge_fn(strategy: Any, run: Any) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=SUM)
    made: list[Any] = []

    def merge_fn(s: Any, x: Any) -> Any:
        v.assign_add(s.reduce("sum", x, axis=None))
        if not made:
            made.append(rx.Variable(7.0, name="made"))
        return v.read_value()

    def fn(x: Any) -> Any:
        seen = merge(merge_fn, x + 1)
        return seen + v.read_value()

    result = run(strategy, fn, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    expected = 1.0 + n * (n + 1) / 2
    assert float(v) == expected
    assert on_each(strategy, result) == [2 * expected] * n
    assert len(made) == 1
    assert float(made[0]) == 7.0
    assert strategy is rx.get_strategy() or strategy.extended.variable_created_in_scope(made[0])


# Errors.


@pytest.mark.strategies("default", "mirrored_2")
def test_merge_fn_must_be_callable(strategy: Any, run: Any) -> None:
    for wrong in (None, 3, "fn"):

        def fn(wrong: Any = wrong) -> None:
            merge(wrong)

        with pytest.raises(TypeError, match="callable"):
            run(strategy, fn)


@pytest.mark.strategies(*KINDS)
def test_merge_call_of_a_captured_context_inside_merge_fn(strategy: Any, run: Any) -> None:
    def fn() -> None:
        own = context()
        own.merge_call(lambda s: own.merge_call(lambda s: None))

    with pytest.raises(RuntimeError, match="call_for_each_replica"):
        run(strategy, fn)
    assert run(strategy, lambda: merge(lambda s: "fine")) == "fine"


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_4")
@pytest.mark.parametrize("lacking", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("lacking_calls_more", [False, True])
def test_t11_different_numbers_of_calls(
    strategy: Any, lacking: int, before: int, lacking_calls_more: bool
) -> None:
    ended: list[int] = []

    def fn() -> None:
        try:
            for _ in range(before + ((me() == lacking) == lacking_calls_more)):
                merge(lambda s: None)
        finally:
            ended.append(me())

    with pytest.raises(RuntimeError, match="equally often"):
        strategy.run(fn)
    assert sorted(ended) == [0, 1, 2, 3]
    assert strategy.run(lambda: merge(lambda s: 1)) == 1


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t11_a_collective_on_one_replica_only(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=SUM)

    def reduces() -> None:
        if me() == 1:
            context().all_reduce("sum", jnp.ones(1))

    def writes() -> None:
        if me() == 0:
            v.assign_add(1.0)

    for fn in (reduces, writes):
        with pytest.raises(RuntimeError, match="equally often"):
            strategy.run(fn)
    assert float(v) == 0.0


def _largest(strategy: Any, x: Any) -> Any:
    return "largest"


def _smallest(strategy: Any, x: Any) -> Any:
    return "smallest"


class _Callable:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, strategy: Any, x: Any) -> Any:
        return self.name


DIFFERENT: dict[str, list[Any]] = {
    "functions": [_largest, _smallest],
    "lambdas": [lambda s, x: 1, lambda s, x: 2],
    "partials": [functools.partial(_largest), functools.partial(_smallest)],
    "builtins": [max, min],
    "compiled": [rx.function(_largest), rx.function(_smallest)],
    "mixed": [_largest, functools.partial(_largest)],
    "objects": [_Callable("a"), _Callable("b")],
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_t12_different_functions_are_refused(case: str) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(RuntimeError, match="same function"):
        strategy.run(lambda: merge(DIFFERENT[case][me()], 1))
    assert strategy.run(lambda: merge(_largest, 1)) == "largest"


def test_t12_one_function_made_by_each_replica_is_accepted(run: Any) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    def fn(x: Any) -> Any:
        def inner(s: Any, y: Any) -> Any:
            return s.reduce("sum", y, axis=None)

        first = merge(inner, x)
        second = merge(lambda s, y: s.reduce("sum", y, axis=None), x)
        third = merge(functools.partial(inner), x)
        return first + second + third

    assert on_each(strategy, run(strategy, fn, args=(ids(strategy),))) == [3.0, 3.0]


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2")
def test_t12_a_collective_met_by_merge_call_is_refused(strategy: Any) -> None:
    def fn() -> None:
        if me() == 0:
            merge(lambda s: None)
        else:
            context().all_reduce("sum", jnp.ones(1))

    with pytest.raises(RuntimeError, match="same function"):
        strategy.run(fn)
    assert strategy.run(lambda: 1) == 1


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t15_arguments_of_different_structure(strategy: Any) -> None:
    cases: list[Any] = [([1], [1, 2]), ({"a": 1}, {"b": 1}), ([1], (1,))]
    for case in cases:
        with pytest.raises(ValueError, match="same structure"):
            strategy.run(lambda case=case: merge(lambda s, x: None, case[me()]))
    with pytest.raises(ValueError, match="same structure"):
        strategy.run(lambda: merge(lambda s, *x: None, *range(me())))
    assert strategy.run(lambda: merge(lambda s: 1)) == 1


@pytest.mark.one_process("a worker may run a single replica")
@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_merge_fn_result_with_too_few_components(strategy: Any) -> None:
    with pytest.raises(ValueError, match="component"):
        strategy.run(lambda: merge(lambda s: rx.PerReplica((1,))))
    assert strategy.run(lambda: 1) == 1


# Failures.

FAILURES: list[BaseException] = [
    ValueError("boom"),
    StopIteration("boom"),
    KeyboardInterrupt("boom"),
    SystemExit("boom"),
]


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_t9b_a_failure_in_merge_fn(strategy: Any, run: Any) -> None:
    for failure in FAILURES:

        def fn(failure: Any = failure) -> None:
            def merge_fn(s: Any) -> None:
                raise failure

            merge(merge_fn)

        with pytest.raises(type(failure)) as caught:
            run(strategy, fn)
        assert caught.value is failure
        assert not rx.has_strategy()
    assert run(strategy, lambda: merge(lambda s: "fine")) == "fine"


@pytest.mark.strategies("mirrored_4")
def test_t9b_no_replica_is_left_waiting(strategy: Any) -> None:
    ended: list[int] = []

    def merge_fn(s: Any) -> None:
        raise OSError("boom")

    def fn() -> None:
        try:
            merge(merge_fn)
        finally:
            ended.append(me())

    with pytest.raises(OSError, match="boom"):
        strategy.run(fn)
    assert sorted(ended) == local_ids(strategy)


@pytest.mark.strategies("mirrored_4")
def test_t9b_replica_code_may_not_turn_the_failure_into_another(strategy: Any) -> None:
    def merge_fn(s: Any) -> None:
        raise KeyError("of merge_fn")

    def fn() -> str:
        try:
            merge(merge_fn)
        except KeyError:
            return "handled"
        return "unreachable"

    # All replicas see the failure, or the caller does; never a part of the replicas.
    try:
        result = strategy.run(fn)
    except KeyError as error:
        assert "of merge_fn" in str(error)  # noqa: PT017
    else:
        assert result == "handled"
    assert strategy.run(lambda: 1) == 1


@pytest.mark.strategies("one_device", "mirrored_2")
@pytest.mark.parametrize("where", ["inner_fn", "inner_merge_fn"])
def test_t9cd_a_failure_in_a_run_inside_merge_fn(strategy: Any, run: Any, where: str) -> None:
    for failure in FAILURES[1:3]:

        def fail(*_: Any, failure: Any = failure) -> None:
            raise failure

        def inner(fail: Any = fail) -> None:
            if where == "inner_fn":
                fail()
            merge(fail)

        with pytest.raises(type(failure)) as caught:
            run(strategy, lambda inner=inner: merge(lambda s: s.run(inner)))
        assert caught.value is failure
    assert run(strategy, lambda: merge(lambda s: "fine")) == "fine"


@pytest.mark.one_process("what one worker does and another does not is an error of their group")
@pytest.mark.strategies("mirrored_2")
def test_t9_a_failure_in_a_replica_of_a_run_inside_merge_fn(strategy: Any) -> None:
    for failing in (0, 1):

        def inner(failing: int = failing) -> None:
            merge(lambda s: None)
            if me() == failing:
                raise OSError("boom")
            merge(lambda s: None)

        with pytest.raises(OSError, match="boom"):
            strategy.run(lambda inner=inner: merge(lambda s: s.run(inner)))
    assert strategy.run(lambda: merge(lambda s: 1)) == 1


# Nested functions, gradients and control flow.


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_t14_inside_a_nested_function(strategy: Any, run: Any) -> None:
    @rx.function
    def nested(x: Any) -> Any:
        return merge(lambda s, y: s.reduce("sum", y, axis=None), x)

    result = run(strategy, lambda x: nested(x + 1) + x, args=(ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert on_each(strategy, result) == [n * (n + 1) / 2 + i for i in range(n)]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t14_inside_a_jit_of_eager_replica_code_is_refused(strategy: Any) -> None:
    @jax.jit
    def nested(x: Any) -> Any:
        return merge(lambda s, y: s.reduce("sum", y, axis=None), x)

    caught: list[BaseException] = []

    def work() -> None:
        try:
            strategy.run(lambda x: nested(x), args=(ids(strategy),))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the replicas wait for each other for ever"
    assert isinstance(caught[0], RuntimeError)
    assert on_each(strategy, strategy.run(lambda x: x, args=(ids(strategy),))) == [0.0, 1.0]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t14_inside_a_loop_of_compiled_replica_code(strategy: Any) -> None:
    def fn(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return merge(lambda s, y: s.reduce("sum", y, axis=None), carry) + carry, None

        return jax.lax.scan(body, x, None, length=3)[0]

    result = strategy.run(rx.function(fn), args=(ids(strategy),))
    assert on_each(strategy, result) == [13.0, 14.0]


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_t14_inside_a_gradient_of_eager_replica_code_is_refused(strategy: Any) -> None:
    with strategy.scope():
        v = rx.Variable(2.0)

    def fn(x: Any) -> Any:
        def loss() -> Any:
            return merge(lambda s, y: s.reduce("sum", y, axis=None), v * x)

        return rx.grad(loss, [v])()

    with pytest.raises(RuntimeError, match=r"merge_call.*differentiated"):
        strategy.run(fn, args=(ids(strategy),))
    assert strategy.run(lambda: 1) == 1
