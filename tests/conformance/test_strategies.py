"""The strategies themselves: how they are made, copied, and what they say (1.4, 1.5, S105-S138)."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import STRATEGIES, MinimalStrategy

import replicax as rx

pytestmark = pytest.mark.every_strategy

SUM = rx.VariableAggregation.SUM


def names(*indices: int) -> tuple[str, ...]:
    return tuple(f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in indices)


@pytest.mark.parametrize(
    ("name", "workers", "parameters"),
    [
        ("one_device", (1,), (1,)),
        ("mirrored_1", (0,), (0,)),
        ("mirrored_2", (0, 1), (0, 1)),
        ("mirrored_4", (3, 2, 1, 0), (3, 2, 1, 0)),
        ("virtual_2", (2, 2), (2, 2)),
        ("central_2", (0, 1), (0,)),
        ("tpu_2", (6, 7), (6, 7)),
        ("minimal_2", (4, 5), (4, 5)),
    ],
)
def test_s105_s133_s134_s135_facts(name: str, workers: Any, parameters: Any) -> None:
    strategy = STRATEGIES[name]()
    extended = strategy.extended
    assert extended.worker_devices == names(*workers)
    assert extended.parameter_devices == names(*parameters)
    assert strategy.num_replicas_in_sync == len(workers) == extended.num_replicas_in_sync
    assert isinstance(extended.worker_devices, tuple)
    assert isinstance(extended.parameter_devices, tuple)
    assert extended.experimental_require_static_shapes in (True, False)
    assert strategy.cluster_resolver is None
    assert str(len(workers)) in repr(strategy)


def test_1_3_the_default_strategy_has_no_devices() -> None:
    strategy = rx.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match="default strategy"):
            getattr(strategy.extended, name)
    with pytest.raises(NotImplementedError):
        strategy.extended.broadcast_to(jnp.ones(2), ["CPU:0"])


@pytest.mark.parametrize("devices", [None, []])
def test_1_5_no_devices_means_all(devices: Any) -> None:
    for cls in (rx.MirroredStrategy, rx.CentralStorageStrategy):
        strategy = cls(devices)
        assert strategy.extended.worker_devices == names(*range(len(jax.devices("cpu"))))
    assert rx.MirroredStrategy().num_replicas_in_sync == 8
    assert rx.CentralStorageStrategy().extended.parameter_devices == names(0)


def test_1_5_constructors_take_the_documented_spellings() -> None:
    ops = rx.ReductionToOneDevice()
    strategy = rx.MirroredStrategy(devices=("CPU:1", "CPU:2"), cross_device_ops=ops)
    assert strategy.extended.worker_devices == names(1, 2)
    assert strategy.extended.cross_device_ops is ops
    assert rx.MirroredStrategy(["CPU:1"], None).num_replicas_in_sync == 1
    assert rx.MirroredStrategy("CPU:3").extended.worker_devices == names(3)
    assert rx.OneDeviceStrategy(device="CPU:3").extended.worker_devices == names(3)
    central = rx.CentralStorageStrategy(
        compute_devices=["CPU:1", "CPU:2"], parameter_device="CPU:4"
    )
    assert central.extended.worker_devices == names(1, 2)
    assert central.extended.parameter_devices == names(4)
    assert rx.CentralStorageStrategy(["CPU:3"]).extended.parameter_devices == names(3)
    assert rx.experimental.CentralStorageStrategy is rx.CentralStorageStrategy
    resolver = object()
    tpu = rx.TPUStrategy(resolver, ["CPU:0"], experimental_spmd_xla_partitioning=True)
    assert tpu.cluster_resolver is resolver


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda: rx.MirroredStrategy(["CPU:0", "CPU:0"]), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0", "/device:cpu:0"]), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0", "CPU:77"]), ValueError),
        (lambda: rx.MirroredStrategy(["/job:worker/task:0/device:CPU:0"]), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0", "/job:ps/task:1/device:CPU:0"]), ValueError),
        (lambda: rx.MirroredStrategy([0, 1]), TypeError),
        (lambda: rx.MirroredStrategy([None]), TypeError),
        (lambda: rx.MirroredStrategy(8), TypeError),
        (lambda: rx.MirroredStrategy(["CPU:0"], "ring"), TypeError),
        (lambda: rx.MirroredStrategy(["CPU:0"], rx.ReductionToOneDevice), TypeError),
        (lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=0), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=-2), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"], virtual_replicas=2), ValueError),
        (lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas=1.5), (TypeError, ValueError)),
        (lambda: rx.MirroredStrategy(["CPU:0"], virtual_replicas="2"), (TypeError, ValueError)),
        (lambda: rx.OneDeviceStrategy(None), TypeError),
        (lambda: rx.OneDeviceStrategy("CPU:77"), ValueError),
        (lambda: rx.OneDeviceStrategy(["CPU:0"]), TypeError),
        (lambda: rx.CentralStorageStrategy(["CPU:0", "CPU:0"]), ValueError),
        (lambda: rx.CentralStorageStrategy(["CPU:0"], "CPU:77"), ValueError),
        (lambda: rx.CentralStorageStrategy(["CPU:0"], 3), TypeError),
        (lambda: rx.TPUStrategy(), ValueError),
        (lambda: rx.TPUStrategy(None, ["CPU:0", "CPU:0"]), ValueError),
        (lambda: rx.TPUStrategy(None, [3]), TypeError),
    ],
)
def test_1_5_bad_constructor_arguments(build: Any, kind: Any) -> None:
    with pytest.raises(kind) as caught:
        build()
    assert isinstance(caught.value, rx.errors.DistributeError)


def test_1_5_tpu_logical_devices() -> None:
    strategy = STRATEGIES["tpu_2"]()
    x = jnp.ones((2, 3))
    assert strategy.experimental_assign_to_logical_device(x, 0) is x
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    assert strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
    for bad in (1, -1):
        with pytest.raises(ValueError, match="logical_device_id"):
            strategy.experimental_assign_to_logical_device(x, bad)
    for parts in ([1], [2, 1], [1, 1, 1], []):
        with pytest.raises(ValueError, match="partition_dimensions"):
            strategy.experimental_split_to_logical_devices(x, parts)


def test_1_5_one_device_gives_plain_values_and_variables() -> None:
    strategy = rx.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        v = rx.Variable(1.0)
    assert not isinstance(v, rx.MirroredVariable)
    result = strategy.run(lambda: v + 1.0)
    assert isinstance(result, jax.Array)
    assert result.devices() == {jax.devices("cpu")[1]}
    assert float(result) == 2.0
    strategy.run(lambda: v.assign(5.0))
    assert float(v) == 5.0


@pytest.mark.strategies("central_2")
def test_1_5_central_storage_refuses_replica_writes_without_aggregation(
    strategy: Any, run: Any
) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, name="central")
        w = rx.Variable(1.0, aggregation=SUM)
    with pytest.raises(ValueError, match=r"central.*aggregation="):
        run(strategy, lambda: v.assign(2.0))
    assert float(v) == 1.0
    run(strategy, lambda: w.assign_add(1.0))
    assert float(w) == 3.0
    assert w.read_value().devices() == {jax.devices("cpu")[0]}


def test_1_5_central_storage_away_from_the_replicas(run: Any) -> None:
    strategy = rx.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:4")
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=SUM)
    assert v.device == names(4)[0]
    for _ in range(2):
        run(strategy, lambda: v.assign_add(v * 1.0))
    assert v.numpy().tolist() == [9.0, 18.0]
    assert v.device == names(4)[0]
    assert v.read_value().devices() == {jax.devices("cpu")[4]}


# Copies.


def test_1_3_a_deepcopy_is_a_strategy_of_its_own(strategy: Any) -> None:
    with pytest.raises(RuntimeError):
        copy.copy(strategy)
    if strategy is rx.get_strategy():
        with pytest.raises(RuntimeError, match="default strategy"):
            copy.deepcopy(strategy)
        return
    with strategy.scope():
        v = rx.Variable(1.0, aggregation=SUM)
    clone = copy.deepcopy(strategy)
    assert type(clone) is type(strategy)
    assert clone is not strategy
    assert clone.extended is not strategy.extended
    assert clone.extended.container_strategy is clone
    assert strategy.extended.container_strategy is strategy
    assert clone.extended.worker_devices == strategy.extended.worker_devices
    assert clone.num_replicas_in_sync == strategy.num_replicas_in_sync
    with clone.scope():
        assert rx.get_strategy() is clone
        w = rx.Variable(2.0, aggregation=SUM)
        with pytest.raises(RuntimeError, match="Mixing different"), strategy.scope():
            pass
        with pytest.raises(RuntimeError):
            v.assign(3.0)
    assert clone.extended.variable_created_in_scope(w)
    assert not clone.extended.variable_created_in_scope(v)
    assert not strategy.extended.variable_created_in_scope(w)
    clone.run(lambda: w.assign_add(1.0))
    assert float(w) == 2.0 + clone.num_replicas_in_sync
    strategy.run(lambda: v.assign_add(1.0))
    assert float(v) == 1.0 + strategy.num_replicas_in_sync


def test_1_3_a_deepcopy_of_a_tpu_strategy_keeps_its_resolver() -> None:
    resolver = {"name": "local"}
    strategy = rx.TPUStrategy(resolver, ["CPU:0"])
    assert copy.deepcopy(strategy).cluster_resolver == resolver


# Strategies written by users.


def test_s138_a_strategy_needs_only_an_extended_subclass(run: Any) -> None:
    strategy = MinimalStrategy()
    assert isinstance(strategy, rx.Strategy)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], aggregation=rx.VariableAggregation.MEAN)
    assert [c.device for c in v.components] == list(names(4, 5))

    def step(x: Any) -> Any:
        loss, gradients = rx.value_and_grad(lambda: jnp.sum(v.read_value() * x), [v])()
        v.assign_sub(gradients[0])
        return rx.get_replica_context().all_reduce("sum", loss)

    data = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.ones(2) * (c.replica_id_in_sync_group + 1.0)
    )
    loss = run(strategy, step, (data,))
    assert [float(x) for x in strategy.experimental_local_results(loss)] == [9.0, 9.0]
    assert v.numpy().tolist() == [-0.5, 0.5]
    total = strategy.reduce("mean", strategy.run(lambda x: x * 1.0, args=(data,)), axis=None)
    np.testing.assert_array_equal(total, [1.5, 1.5])


def test_s138_what_a_bare_extended_lacks_is_said() -> None:
    class Bare(rx.Strategy):
        def __init__(self, layout: Any = None) -> None:
            super().__init__(rx.StrategyExtended(self, layout))

    with pytest.raises(NotImplementedError, match="layout"):
        _ = Bare().num_replicas_in_sync
    strategy = Bare(rx.ReplicaLayout(jax.devices("cpu")[:2]))
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope(), pytest.raises(NotImplementedError, match="_create_variable"):
        rx.Variable(1.0)
    got = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    assert [int(x) for x in strategy.experimental_local_results(got)] == [0, 1]


def test_s138_an_override_of_create_variable_is_used() -> None:
    seen: list[Any] = []

    class Extended(rx.StrategyExtended):
        def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["name"])
            return next_creator(**kwargs)

    class Mine(rx.Strategy):
        def __init__(self) -> None:
            layout = rx.ReplicaLayout(jax.devices("cpu")[:1])
            super().__init__(Extended(self, layout))

    with Mine().scope():
        v = rx.Variable(1.0, name="v")
    assert seen == ["v"]
    v.assign(2.0)
    assert float(v) == 2.0


def test_s137_run_takes_every_kind_of_value_and_variable(strategy: Any, run: Any) -> None:
    outside = rx.Variable(2.0)
    with strategy.scope():
        inside = rx.Variable(3.0)
        local = rx.Variable(
            4.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation=SUM
        )
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(float(c.replica_id_in_sync_group))
    )

    def fn(a: Any, b: Any, c: Any, d: Any, e: Any = None) -> Any:
        return a + b + c + d["x"] * e

    got = run(strategy, fn, (per_replica, outside, inside, {"x": local}), {"e": 10.0})
    found = [float(x) for x in strategy.experimental_local_results(got)]
    assert found == [45.0 + i for i in range(strategy.num_replicas_in_sync)]


def test_1_5_experimental_names_are_the_older_spellings() -> None:
    strategy = rx.experimental.TPUStrategy(device_assignment=["CPU:0", "CPU:1"])
    assert isinstance(strategy, rx.TPUStrategy)
    assert strategy.num_replicas_in_sync == 2
    hints = rx.experimental.CollectiveHints(bytes_per_pack=3, timeout_seconds=4.0)
    assert isinstance(hints, rx.experimental.CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (3, 4.0)
    assert rx.experimental.CentralStorageStrategy is rx.CentralStorageStrategy
    assert rx.experimental.CollectiveCommunication is rx.experimental.CommunicationImplementation
