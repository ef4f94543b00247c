"""Arrays of different devices can be used together, in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

# None of these computes on the default device only.
_PLACES: dict[str, Callable[[], Any]] = {
    "mirrored_2": lambda: rx.MirroredStrategy(["CPU:1", "CPU:3"]),
    "mirrored_4": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"]),
    "virtual_2": lambda: rx.MirroredStrategy(["CPU:2"], virtual_replicas=2),
    "one_device": lambda: rx.OneDeviceStrategy("CPU:2"),
    "central_2": lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:2"),
}


@pytest.fixture(
    params=[
        pytest.param(n, marks=pytest.mark.slow) if n in ("mirrored_4", "virtual_2") else n
        for n in _PLACES
    ]
)
def placed(request: pytest.FixtureRequest) -> Any:
    return _PLACES[request.param]()


@pytest.fixture(params=["eager", "compiled"])
def called(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a function as it is, or as an rx.function."""
    return (lambda fn, *args: fn(*args)) if request.param == "eager" else _compiled


def _compiled(fn: Any, *args: Any) -> Any:
    return rx.function(fn)(*args)


def _everywhere(placed: Any) -> list[Any]:
    """Returns ones of shape (2,): of all devices, committed or not, of a mesh and of NumPy."""
    devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(devices[4:6]), "x")
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    ones = np.ones(2, np.float32)
    return [
        ones,
        jnp.ones(2),
        jax.device_put(ones, devices[3]),
        jax.device_put(ones, sharded),
        placed.reduce("mean", placed.run(lambda: jnp.ones(2)), axis=None),
        rx.OneDeviceStrategy("CPU:6").run(rx.function(lambda: jnp.ones(2))),
    ]


def _ids(placed: Any) -> Any:
    """Returns [0., 0.] of the first replica, [1., 1.] of the second, ..."""

    def fn() -> Any:
        return jnp.ones(2) * rx.get_replica_context().replica_id_in_sync_group

    return placed.run(fn)


def test_components_of_all_replicas_in_one_expression(placed: Any) -> None:
    count = placed.num_replicas_in_sync
    expected = [float(i) for i in range(count) for _ in range(2)]
    compiled = placed.run(rx.function(lambda x: x * 1.0), args=(_ids(placed),))
    batches = rx.data.Dataset.from_tensor_slices(np.asarray(expected, np.float32)).batch(2 * count)
    element = next(iter(placed.experimental_distribute_dataset(batches)))
    returned = placed.run(lambda x: x, args=(_ids(placed),))
    for value in (_ids(placed), compiled, element, returned):
        parts = placed.experimental_local_results(value)
        layout = placed.extended.layout
        assert [p.devices() for p in parts] == [{d} for d in layout.devices]
        assert jnp.concatenate(parts).tolist() == expected
        assert jnp.stack(parts).shape == (count, 2)
        assert sum(parts).tolist() == [sum(range(count))] * 2
        assert (parts[0] + parts[-1]).tolist() == [count - 1.0] * 2
        assert jax.jit(lambda *p: sum(p))(*parts).tolist() == [sum(range(count))] * 2
        assert rx.function(lambda *p: sum(p))(*parts).tolist() == [sum(range(count))] * 2


def test_captured_arrays_of_any_device_in_replica_code(placed: Any, called: Any) -> None:
    with placed.scope():
        v = rx.Variable(jnp.ones(2) * 3, aggregation=rx.VariableAggregation.MEAN)
    v.assign_add(jnp.zeros(2))
    for t in _everywhere(placed):

        def fn(x: Any, t: Any = t) -> Any:
            v.assign(v * t)
            return v * t + t, t * v, x + t, jnp.add(t, v), v.read_value() + x

        result = called(lambda x, fn=fn: placed.run(fn, args=(x,)), _ids(placed))
        for leaf, base in zip(result, (4, 3, 1, 4, 3), strict=True):
            parts = placed.experimental_local_results(leaf)
            moving = 1 if base in (1, 3) and leaf is not result[1] else 0
            expected = [[base + moving * float(i)] * 2 for i in range(len(parts))]
            assert np.stack(parts).tolist() == expected, t
            assert [p.devices() for p in parts] == [{d} for d in placed.extended.layout.devices]


def test_arguments_of_run_of_any_device(placed: Any, called: Any) -> None:
    with placed.scope():
        v = rx.Variable(jnp.ones(2) * 3)
    for t in _everywhere(placed):
        result = called(lambda t: placed.run(lambda t: v * t + t, args=(t,)), t)
        assert placed.reduce("mean", result, axis=None).tolist() == [4.0, 4.0]
        result = placed.run(rx.function(lambda t: v * t + t), args=(t,))
        assert placed.reduce("mean", result, axis=None).tolist() == [4.0, 4.0]
        assert placed.run(lambda t: t, args=(t,)) is t


def test_updates_with_arrays_of_any_device(placed: Any, called: Any) -> None:
    with placed.scope():
        v, w = (rx.Variable(jnp.ones(2)) for _ in range(2))
    plain = rx.Variable(jnp.ones(2))
    plain.assign_add(jnp.zeros(2))
    arrays = [*_everywhere(placed), v.read_value(), w.read_value(), plain.read_value(), w, plain]

    def update(t: Any) -> Any:
        def fn(copy: Any, t: Any) -> Any:
            copy.assign(jnp.ones(2))
            copy.assign_add(t)
            copy.assign(copy + t * copy.read_value())
            return copy.read_value() + t

        return placed.extended.update(v, fn, args=(t,))

    def merged(t: Any) -> Any:
        return placed.run(
            lambda: rx.get_replica_context().merge_call(lambda strategy: (update(t), None)[1])
        )

    for t in arrays:
        for fn in (update, lambda t: placed.run(lambda: None) or merged(t)):
            v.assign(jnp.zeros(2))
            called(lambda fn=fn, t=t: (fn(t), None)[1])
            assert v.read_value().tolist() == [4.0, 4.0]
    with placed.scope():
        v.assign(jnp.ones(2))
        result = called(lambda: placed.extended.update(v, lambda c: c.read_value() * 2))
    parts = placed.experimental_local_results(result)
    assert sum(parts).tolist() == [2.0 * len(parts)] * 2


def test_variables_of_different_devices_in_one_expression(called: Any) -> None:
    with rx.OneDeviceStrategy("CPU:1").scope():
        one = rx.Variable(jnp.ones(2))
    with rx.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:2").scope():
        central = rx.Variable(jnp.ones(2))
    mirrored, total = [], 4.0
    for placed in (_PLACES["mirrored_2"](), _PLACES["mirrored_4"](), _PLACES["virtual_2"]()):
        with placed.scope():
            mirrored.append(rx.Variable(jnp.ones(2)))
            on_read = rx.Variable(
                jnp.ones(2),
                synchronization=rx.VariableSynchronization.ON_READ,
                aggregation=rx.VariableAggregation.MEAN,
            )
            mirrored.append(on_read)
        total += 2
    plain = rx.Variable(jnp.ones(2))
    with rx.device("CPU:5"):
        on_fifth = rx.Variable(jnp.ones(2))
    variables = [one, central, plain, on_fifth, *mirrored]

    def add() -> Any:
        return sum(variables[1:], variables[0] + 0.0), jnp.concatenate(variables).sum()

    for _ in range(2):
        whole, summed = called(add)
        assert whole.tolist() == [total, total]
        assert summed == 2 * total
    one.assign_add(mirrored[0])
    mirrored[0].assign_add(one.read_value())
    plain.assign(mirrored[0] * central)
    on_fifth.assign_sub(plain)
    places = [v.placement for v in variables]

    def write() -> Any:
        for v in variables:
            v.assign(plain + v * 0.0 + on_fifth * 0.0)
        return [v.read_value() for v in variables]

    for _ in range(2):
        assert [v.tolist() for v in called(write)] == [[3.0, 3.0]] * len(variables)
    assert [v.read_value().tolist() for v in variables] == [[3.0, 3.0]] * len(variables)
    assert [v.placement for v in variables] == places
    kept = [v for v in variables if not v.is_per_replica]
    assert all(v.read_value().devices() <= set(v.placement) for v in kept)


def test_arrays_of_different_devices_in_a_function(placed: Any) -> None:
    with placed.scope():
        v = rx.Variable(jnp.ones(2))
    arrays = _everywhere(placed)
    total = float(len(arrays))

    @rx.function
    def with_variable(*arrays: Any) -> Any:
        return v + sum(arrays)

    @rx.function
    def without(*arrays: Any) -> Any:
        return sum(arrays)

    @rx.function
    def captures() -> Any:
        return sum(arrays) + v

    for _ in range(2):
        first = with_variable(*arrays)
        assert first.tolist() == [total + 1, total + 1]
        assert without(*arrays).tolist() == [total, total]
        assert without(*reversed(arrays)).tolist() == [total, total]
        assert captures().tolist() == [total + 1, total + 1]
    for t in arrays:
        assert (v + t).tolist() == (t + v).tolist() == [2.0, 2.0]
        assert rx.function(lambda x: v + x)(t).tolist() == [2.0, 2.0]
        assert (first + without(t) + v).tolist() == [total + 3] * 2
        v.assign(t)
        v.assign_add(t)
        v.assign_sub(t)
        assert v.read_value().tolist() == [1.0, 1.0]


def test_results_of_two_strategies_in_one_program(placed: Any) -> None:
    other = rx.OneDeviceStrategy("CPU:7")
    with placed.scope():
        accuracy, loss = rx.metrics.Mean(), rx.metrics.Sum()
        v = rx.Variable(jnp.ones(2))
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.5), [v])

    def step(x: Any) -> Any:
        accuracy.update_state(x)
        loss.update_state(x)
        optimizer.apply_gradients([(jnp.ones(2), v)])
        return x

    with placed.scope():
        for fn in (step, rx.function(step)):
            placed.run(fn, args=(jnp.ones(2),))
    there = other.run(lambda: jnp.ones(2)) + other.run(rx.function(lambda: jnp.ones(2)))
    gathered = placed.gather(_ids(placed), axis=0)
    count = placed.num_replicas_in_sync
    assert gathered.shape == (2 * count,)
    results = accuracy.result() + loss.result() + optimizer.iterations
    assert (results + there + gathered[:2]).shape == (2,)
    assert other.run(lambda a, b: a + b, args=(there, gathered[:2])).shape == (2,)
    assert other.run(rx.function(lambda a, b: a + b), args=(there, gathered[:2])).shape == (2,)
    doubled = other.run(lambda: there * results)
    assert placed.reduce("mean", placed.run(lambda: doubled * v), axis=None).shape == (2,)


@pytest.mark.parametrize("called", ["eager", "compiled"], indirect=True)
def test_an_entered_replica_context_is_the_replica_that_it_names(placed: Any, called: Any) -> None:
    layout, count = placed.extended.layout, placed.num_replicas_in_sync
    with placed.scope():
        own = rx.Variable(
            jnp.zeros(2),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
        v = rx.Variable(jnp.ones(2), aggregation=rx.VariableAggregation.MEAN)
    read = rx.function(lambda: own.read_value() + v)
    for i in range(count):

        def visit(i: int = i) -> Any:
            with rx.ReplicaContext(placed, i) as context:
                assert context.replica_id_in_sync_group == i
                assert context.devices == (placed.extended.worker_devices[i],)
                own.assign(jnp.ones(2) * i)
                own.assign_add(jnp.ones(2))
                seen = own.read_value(), v.read_value(), read(), jnp.ones(2) * own
                v.assign(v + 1.0)
                merged = context.merge_call(lambda strategy: own.read_value())
            return seen, merged

        seen, merged = called(visit)
        expected = [i + 1.0, i + 1.0, 2.0 * i + 2, i + 1.0]
        assert [x.tolist() for x in seen] == [[e, e] for e in expected]
        assert merged.tolist() == [(i + 1) * (i + 2) / 2] * 2
        if called.__name__ != "_compiled":
            assert [x.devices() for x in seen] == [{layout.devices[i]}] * 4
    assert own.read_value().tolist() == [count * (count + 1) / 2] * 2
    parts = placed.experimental_local_results(placed.run(own.read_value))
    assert np.stack(parts).tolist() == [[i + 1.0] * 2 for i in range(count)]
    assert v.read_value().tolist() == [count + 1.0] * 2


def test_an_entered_replica_context_needs_a_replica_of_its_strategy(placed: Any) -> None:
    for wrong in (-1, placed.num_replicas_in_sync):
        with pytest.raises(ValueError, match=r"replicas.*has|has.*replicas"):
            rx.ReplicaContext(placed, wrong).__enter__()


def test_what_each_replica_reads_is_its_own_value(placed: Any, called: Any) -> None:
    count = placed.num_replicas_in_sync
    with placed.scope():
        mirrored = rx.Variable(jnp.ones(3))
        own = rx.Variable(jnp.ones(3), synchronization=rx.VariableSynchronization.ON_READ)
    plain = rx.Variable(jnp.ones(3))
    for variable in (mirrored, own, plain):
        for read in (variable.read_value, variable.value, lambda v=variable: v * 1.0):
            result = called(lambda read=read: placed.run(read))
            assert isinstance(result, rx.PerReplica) == (count > 1)
            assert placed.gather(result, axis=0).shape == (3 * count,)
            assert placed.reduce("sum", result, axis=None).tolist() == [count] * 3
    shared = jnp.ones(3)
    assert placed.run(lambda: shared) is shared
    assert placed.run(lambda: mirrored) is mirrored


_KINDS = ["assign", "assign_add", "assign_sub", "scatter_add", "scatter_update"]


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_replica_code_that_captures_a_per_replica_value_writes_its_own(
    placed: Any, called: Any, aggregation: str
) -> None:
    how = rx.VariableAggregation[aggregation]
    count = placed.num_replicas_in_sync
    with placed.scope():
        v = rx.Variable(jnp.ones(2), aggregation=how)
        own = rx.Variable(
            jnp.ones(2), synchronization=rx.VariableSynchronization.ON_READ, aggregation=how
        )
    captured = _ids(placed)
    rows = placed.run(lambda x: rx.IndexedSlices(x, jnp.array([0, 1])), args=(captured,))
    summed = sum(range(count))
    total = {"SUM": summed, "MEAN": summed / count, "ONLY_FIRST_REPLICA": 0.0}[aggregation]
    if count == 1:
        total = 0.0
    expected = {"assign_sub": 1 - total, "assign_add": 1 + total, "scatter_add": 1 + total}
    for kind in _KINDS:
        if kind == "scatter_update" and aggregation != "ONLY_FIRST_REPLICA":
            continue
        payload = rows if kind.startswith("scatter") else captured
        v.assign(jnp.ones(2))
        called(lambda k=kind, p=payload: (placed.run(lambda: getattr(v, k)(p)), None)[1])
        assert v.read_value().tolist() == [expected.get(kind, total)] * 2, kind
        if kind.startswith("assign"):
            placed.run(lambda: own.assign(jnp.zeros(2)))
            called(lambda k=kind, p=payload: (placed.run(lambda: getattr(own, k)(p)), None)[1])
            found = placed.experimental_local_results(placed.run(own.read_value))
            sign = -1.0 if kind == "assign_sub" else 1.0
            assert np.stack(found).tolist() == [[sign * i] * 2 for i in range(count)]


def test_replica_code_that_captures_a_per_replica_value_computes_with_its_own(
    placed: Any, called: Any
) -> None:
    count = placed.num_replicas_in_sync
    if count == 1:
        return  # what one replica returns is an array
    with placed.scope():
        v = rx.Variable(jnp.ones(2))
    x = _ids(placed)
    scalar = placed.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    jitted = jax.jit(lambda y: x * y + x[0])

    def again() -> Any:
        made = placed.run(lambda: x + 0.0)
        return placed.run(lambda: (made * 2.0 + made, jnp.add(made, x) + made)), made

    def fn() -> Any:
        context = rx.get_replica_context()
        return (
            x * 2.0 + x,
            3.0 * (1.0 * x + v * x - x),
            jnp.add(x, x) + x,
            jnp.where(x > 0, x, 0.0) * 3.0,
            jnp.stack([x, x]).sum(0) + x,
            jitted(2.0),
            jnp.ones(2) * scalar * 3,
            jax.tree.map(lambda leaf: leaf * 3.0, {"x": x})["x"],
            -x * -3,
            rx.value_and_grad(lambda: (v * x).sum() * 3.0, [v])()[1][0],
            context.all_gather(x, axis=0)[: 2 * count : 2] * 0 + jnp.asarray(3.0) * x[0],
            context.merge_call(lambda strategy, merged: merged, args=(x,)) * 3,
        )

    def combined() -> Any:
        return rx.get_replica_context().all_reduce("sum", x)

    for _ in range(2):
        for leaf in called(lambda: placed.run(fn)):
            found = placed.experimental_local_results(leaf)
            assert [set(part.tolist()) for part in found] == [{3.0 * i} for i in range(count)]
        (first, second), made = called(again)
        for leaf in (first, second):
            found = placed.experimental_local_results(leaf)
            assert [set(part.tolist()) for part in found] == [{3.0 * i} for i in range(count)]
        assert placed.reduce("sum", made, axis=None).tolist() == [sum(range(count))] * 2
        total = placed.experimental_local_results(called(lambda: placed.run(combined)))
        assert [part.tolist() for part in total] == [[sum(range(count))] * 2] * count
    assert placed.run(lambda: x) is x
    with pytest.raises(TypeError, match="replica context"):
        x + 1
    with pytest.raises(ValueError, match="single value"):
        jnp.asarray(x)
    assert not hasattr(x, "shape")
    assert len(jax.tree.leaves(x)) == count


def test_one_function_runs_the_replicas_of_several_strategies() -> None:
    strategies = [fn() for fn in _PLACES.values()]
    variables = []
    for placed in strategies:
        with placed.scope():
            v = rx.Variable(jnp.ones(2), aggregation=rx.VariableAggregation.SUM)
            own = rx.Variable(jnp.ones(2), synchronization=rx.VariableSynchronization.ON_READ)
        variables.append((v, own))

    def both(ids: Any) -> Any:
        results = []
        for placed, (v, own), x in zip(strategies, variables, ids, strict=True):

            def fn(x: Any, v: Any = v, own: Any = own) -> Any:
                own.assign(x + v)
                v.assign_add(x)
                return x * v, rx.get_replica_context().all_reduce("sum", x)

            results.append(placed.run(fn, args=(x,)))
            results.append(placed.reduce("sum", x, axis=None) + v)
        return results

    compiled = rx.function(both)
    ids = [_ids(placed) for placed in strategies]
    found: dict[str, Any] = {}
    for name, fn in {"eager": both, "compiled": compiled, "again": compiled}.items():
        for v, own in variables:
            v.assign(jnp.ones(2))
            own.owner.container_strategy.run(lambda own=own: own.assign(jnp.zeros(2)))
        results = fn(ids)
        per_replica, states = [], []
        for i, placed in enumerate(strategies):
            for leaf in results[2 * i]:
                parts = placed.experimental_local_results(leaf)
                per_replica.append([p.tolist() for p in parts])
                devices = [{d} for d in placed.extended.layout.devices]
                assert len(parts) == 1 or [p.devices() for p in parts] == devices
            parts = placed.experimental_local_results(placed.run(variables[i][1].read_value))
            states.append([p.tolist() for p in parts])
        reduced = [r.tolist() for r in results[1::2]]
        places = [v.placement for v, _ in variables]
        found[name] = per_replica, states, reduced, places
    for name in ("compiled", "again"):
        for expected, got in zip(found["eager"], found[name], strict=True):
            assert got == expected, name
