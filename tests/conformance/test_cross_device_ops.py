"""The replaceable reduction algorithms (section 1.9, T37, T43)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies_under_test import STRATEGIES
from vocabulary import refused

import replicax as rx
from replicax.collectives.cross_device_ops import CollectiveAllReduce

SUM, MEAN = rx.ReduceOp.SUM, rx.ReduceOp.MEAN


class OnlyReduce(rx.CrossDeviceOps):
    """A user's algorithm, with the one hook that it must have."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        self.calls.append((reduce_op, per_replica_value, destinations, options))
        parts = [jnp.asarray(v) for v in self.to_one_device(per_replica_value.values)]
        total = sum(parts[1:], parts[0])
        if reduce_op is MEAN:
            total = total / len(parts)
        return self.broadcast(total, destinations)

    @staticmethod
    def to_one_device(parts: Any) -> Any:
        if any(isinstance(p, jax.core.Tracer) for p in parts):
            return parts
        return jax.device_put(list(parts), jax.devices()[0])


ALGORITHMS: dict[str, Callable[[], Any]] = {
    "default": CollectiveAllReduce,
    "one_device": rx.ReductionToOneDevice,
    "one_named_device": lambda: rx.ReductionToOneDevice(reduce_to_device="CPU:5"),
    "nccl": rx.NcclAllReduce,
    "nccl_0": lambda: rx.NcclAllReduce(num_packs=0),
    "nccl_3": lambda: rx.NcclAllReduce(num_packs=3),
    "hierarchical": rx.HierarchicalCopyAllReduce,
    "hierarchical_0": lambda: rx.HierarchicalCopyAllReduce(num_packs=0),
    "hierarchical_3": lambda: rx.HierarchicalCopyAllReduce(num_packs=3),
    "user": OnlyReduce,
}
LIBRARY = [name for name in ALGORITHMS if name != "user"]

LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "mesh": lambda ops: rx.MirroredStrategy(["CPU:2", "CPU:0", "CPU:1"], ops),
    "virtual": lambda ops: rx.MirroredStrategy(["CPU:2"], ops, virtual_replicas=3),
}
N = 3


@pytest.fixture(params=list(ALGORITHMS))
def ops(request: pytest.FixtureRequest) -> Any:
    return ALGORITHMS[request.param]()


@pytest.fixture(params=["default", "one_device", "nccl"])
def library_ops(request: pytest.FixtureRequest) -> Any:
    return ALGORITHMS[request.param]()


layouts = pytest.mark.parametrize("layout", list(LAYOUTS))


def values(strategy: Any, fn: Callable[[int], Any]) -> Any:
    return strategy.experimental_distribute_values_from_function(
        lambda ctx: fn(ctx.replica_id_in_sync_group)
    )


def on_devices(fn: Callable[[int], Any], names: Any = ("CPU:2", "CPU:0", "CPU:1")) -> Any:
    """A PerReplica whose components are on devices of their own."""
    found = [jax.devices()[int(name[4:])] for name in names]
    return rx.PerReplica([jax.device_put(fn(i), d) for i, d in enumerate(found)])


DTYPES = ["float16", "bfloat16", "int32", "uint8", "complex64", "bool"]
SHAPES = [(), (1,), (0, 2), (5,), (4, 1, 2)]


def one_of_each(i: int) -> Any:
    """Arrays of many types and shapes; replica i holds other numbers than the others."""
    arrays = [np.full(s, i + k, np.float32) for k, s in enumerate(SHAPES)]
    arrays += [np.array([1, i % 2, 0]).astype(jnp.dtype(d)) for d in DTYPES]
    arrays += [np.array([[i]]).astype(jnp.dtype(d)) for d in ("bfloat16", "int32")]
    return arrays


def expected(op: Any) -> Any:
    columns = zip(*[one_of_each(i) for i in range(N)], strict=True)
    sums = []
    for column in columns:
        total = np.sum([np.asarray(c, np.complex64) for c in column], axis=0)
        sums.append(total / N if op is MEAN else total)
    return sums


def result_type(dtype: Any, op: Any) -> Any:
    if op is MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.float32
    return jnp.int32 if dtype == jnp.bool_ else dtype


def check_all(results: Any, op: Any) -> None:
    originals = one_of_each(0)
    assert len(results) == len(originals)
    for result, original, total in zip(results, originals, expected(op), strict=True):
        assert result.shape == original.shape
        assert result.dtype == result_type(original.dtype, op), (original.dtype, op)
        tolerance = 1e-2 if result.dtype in (jnp.float16, jnp.bfloat16) else 1e-6
        np.testing.assert_allclose(np.asarray(result, np.complex64), total, rtol=tolerance)


# Every algorithm in a strategy, in both executors.


CASES = [(name, "mesh") for name in LIBRARY]
CASES += [(name, "virtual") for name in ("default", "one_device", "hierarchical_3")]


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_1_9_all_reduce_with_every_algorithm(name: str, layout: str, compiled: bool) -> None:
    strategy = LAYOUTS[layout](ALGORITHMS[name]())

    op = MEAN if compiled else SUM

    def fn(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(op, x)

    fn = rx.function(fn) if compiled else fn
    result = strategy.run(fn, args=(values(strategy, one_of_each),))
    local = strategy.experimental_local_results(result)
    assert len(local) == N
    for reduced in local:
        check_all(reduced, op)


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("user", "mesh"), ("user", "virtual")])
def test_1_9_reduce_with_every_algorithm(name: str, layout: str) -> None:
    strategy = LAYOUTS[layout](ALGORITHMS[name]())
    x = values(strategy, lambda i: [jnp.arange(4.0) + i, jnp.int32(i)])

    def reduce(x: Any) -> Any:
        return (
            strategy.reduce("SUM", x, axis=None),
            strategy.reduce("MEAN", x[0], axis=0),
            strategy.extended.reduce_to("MEAN", x[0], strategy.extended.worker_devices),
        )

    for fn in (reduce, rx.function(reduce)):
        with strategy.scope():
            (rows, total), mean, mirrored = fn(x)
        np.testing.assert_allclose(rows, 3 * np.arange(4.0) + 3)
        assert int(total) == 3 and total.dtype == jnp.int32
        np.testing.assert_allclose(mean, 2.5)
        assert isinstance(mirrored, rx.Mirrored)
        np.testing.assert_allclose(mirrored, np.arange(4.0) + 1)


@layouts
@pytest.mark.parametrize("name", ["one_device", "hierarchical_3"])
def test_1_9_indexed_slices_with_every_algorithm(name: str, layout: str, run: Any) -> None:
    strategy = LAYOUTS[layout](ALGORITHMS[name]())

    def fn(i: Any) -> Any:
        slices = rx.IndexedSlices(
            jnp.ones((2, 2)) * (i + 1), jnp.stack([0, i + 1]), dense_shape=(4, 2)
        )
        context = rx.get_replica_context()
        return [context.all_reduce(op, [slices, i])[0] for op in (SUM, MEAN)]

    result = run(strategy, fn, (values(strategy, lambda i: jnp.int32(i)),))
    for total, mean in strategy.experimental_local_results(result):
        np.testing.assert_allclose(total.to_dense()[:, 0], [6, 1, 2, 3])
        np.testing.assert_allclose(mean.to_dense()[:, 0], np.array([6, 1, 2, 3]) / 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["hierarchical", "user"])
def test_1_9_training_with_every_algorithm(name: str, run: Any) -> None:
    strategy = LAYOUTS["mesh"](ALGORITHMS[name]())
    with strategy.scope():
        w = rx.Variable([1.0, 1.0], aggregation=rx.VariableAggregation.SUM)

    def step(x: Any) -> Any:
        gradient = rx.grad(lambda: (w * w * x).sum(), w)()
        gradient = rx.get_replica_context().all_reduce("MEAN", gradient)
        w.assign_sub(0.1 * gradient)

    run(strategy, step, (values(strategy, lambda i: jnp.array([1.0, 2.0]) * i),))
    # Mean gradient [2, 4]; the SUM variable then subtracts it three times.
    np.testing.assert_allclose(w, [1 - 0.6, 1 - 1.2], rtol=1e-5, atol=1e-6)
    for component in w.components:
        np.testing.assert_allclose(component, w)


@pytest.mark.parametrize("name", ["default", "one_device", "nccl_3", "hierarchical", "user"])
def test_1_9_gradients_through_every_algorithm(name: str) -> None:
    strategy = LAYOUTS["mesh"](ALGORITHMS[name]())

    def fn(x: Any) -> Any:
        return jax.grad(lambda v: (rx.get_replica_context().all_reduce("SUM", v) ** 2).sum())(x)

    x = values(strategy, lambda i: jnp.array([1.0, 2.0, 3.0]) * (i + 1))
    for runner in (fn, rx.function(fn)):
        for part in strategy.run(runner, args=(x,)).values:
            # The sum is 6x; each of three replicas sends the cotangent 12x.
            np.testing.assert_allclose(part, [36, 72, 108], rtol=1e-6)


# Called directly.


def test_1_9_reduce_and_batch_reduce_on_destinations(ops: Any, devices: Any) -> None:
    x = on_devices(lambda i: jnp.arange(3.0) + i)
    y = on_devices(lambda i: jnp.float32(i))
    result = ops.reduce(SUM, x, "CPU:4")
    np.testing.assert_allclose(result, [3, 6, 9])
    assert result.devices() == {devices[4]}
    result = ops.reduce(MEAN, x, destinations=x)
    assert isinstance(result, rx.Mirrored)
    assert [v.devices() for v in result.values] == [{devices[i]} for i in (2, 0, 1)]
    for part in result.values:
        np.testing.assert_allclose(part, [1, 2, 3])
    mixed = ops.batch_reduce(SUM, [(x, "CPU:4"), (y, ["CPU:6", "CPU:7"]), (x, y)])
    assert type(mixed) is list and len(mixed) == 3
    assert mixed[0].devices() == {devices[4]}
    assert [v.devices() for v in mixed[1].values] == [{devices[6]}, {devices[7]}]
    assert [float(v) for v in mixed[1].values] == [3.0, 3.0]
    assert [v.devices() for v in mixed[2].values] == [{devices[i]} for i in (2, 0, 1)]
    np.testing.assert_allclose(mixed[2], [3, 6, 9])
    assert ops.batch_reduce(SUM, []) == []


@pytest.mark.parametrize(
    ("name", "bytes_per_pack"),
    [("default", 0), ("one_device", 20), ("nccl", 20), ("nccl_3", 0), ("hierarchical_0", 1)],
)
def test_1_9_batch_reduce_of_many_types_and_shapes(name: str, bytes_per_pack: int) -> None:
    ops = ALGORITHMS[name]()
    options = rx.experimental.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    count = len(one_of_each(0))
    pairs = [(on_devices(lambda i, k=k: one_of_each(i)[k]), "CPU:0") for k in range(count)]
    op = MEAN if name in ("nccl", "one_device") else SUM
    check_all(ops.batch_reduce(op, pairs, options), op)


def test_1_9_one_object_reduces_values_of_changing_shape(ops: Any) -> None:
    """A compiled reduction that is kept must not be used for values of another shape."""
    shapes: list[Any] = [(), (1,), (3,), (1, 1), (), (3, 1), (0,), (1,)]
    for shape in shapes:
        x = on_devices(lambda i, s=shape: jnp.full(s, i, jnp.float32))
        result = ops.reduce(SUM, x, "CPU:0")
        assert result.shape == shape
        np.testing.assert_array_equal(result, np.full(shape, 3.0))
    for k in (1, 2):
        x = on_devices(lambda i, k=k: jnp.full((2,), i * k, jnp.int32), ("CPU:0", "CPU:5"))
        np.testing.assert_array_equal(ops.reduce(SUM, x, "CPU:0"), [k, k])


@pytest.mark.parametrize("ops", ["default", "user"], indirect=True)
def test_1_9_broadcast(ops: Any, devices: Any) -> None:
    one = ops.broadcast(jnp.arange(2.0), "CPU:3")
    assert isinstance(one, jax.Array) and one.devices() == {devices[3]}
    for destinations in (["CPU:3", "CPU:4"], on_devices(jnp.float32, ("CPU:3", "CPU:4"))):
        both = ops.broadcast(jnp.arange(2.0), destinations)
        assert isinstance(both, rx.Mirrored)
        assert [v.devices() for v in both.values] == [{devices[3]}, {devices[4]}]
        np.testing.assert_array_equal(both, [0, 1])


@pytest.mark.parametrize("ops", ["default", "user"], indirect=True)
def test_1_9_destination_variable(ops: Any) -> None:
    strategy = LAYOUTS["mesh"](ops)
    with strategy.scope():
        v = rx.Variable(0.0)
        result = ops.reduce(SUM, on_devices(jnp.float32), v)
    assert [p.devices() for p in result.values] == [{d} for d in v.placement]
    assert float(result) == 3.0


@pytest.mark.parametrize("layout", ["mirrored_2", "virtual_2"])
def test_1_9_variables_and_mirrored_values_are_reduced_copy_by_copy(
    library_ops: Any, layout: str
) -> None:
    strategy = STRATEGIES[layout]()
    with strategy.scope():
        v = rx.Variable([1.0, 3.0])
        w = rx.Variable([2.0, 2.0], synchronization=rx.VariableSynchronization.ON_READ)
    w.components[1].assign([4.0, 0.0])
    mirrored = rx.Mirrored([copy.read_value() for copy in v.components])
    for op, of_v, of_w in (
        (rx.ReduceOp.MEAN, [1.0, 3.0], [3.0, 1.0]),
        (rx.ReduceOp.SUM, [2.0, 6.0], [6.0, 2.0]),
    ):
        np.testing.assert_array_equal(library_ops.reduce(op, v, v), of_v)
        np.testing.assert_array_equal(library_ops.reduce(op, mirrored, "CPU:0"), of_v)
        found = library_ops.batch_reduce(op, [(v, v), (w, "CPU:0")])
        np.testing.assert_array_equal(found[0], of_v)
        np.testing.assert_array_equal(found[1], of_w)
        with strategy.scope():
            compiled = rx.function(lambda op=op: library_ops.reduce(op, v, v) + 0.0)()
        np.testing.assert_array_equal(compiled, of_v)
    np.testing.assert_array_equal(library_ops.broadcast(v, v), [1.0, 3.0])


@pytest.mark.parametrize("ops", ["default", "user"], indirect=True)
def test_1_9_bad_arguments(ops: Any) -> None:
    x = on_devices(jnp.float32)
    for op in ("SUM", "mean", None, rx.VariableAggregation.SUM):
        with refused(ValueError, "ReduceOp"):
            ops.reduce(op, x, "CPU:0")
        with refused(ValueError, "ReduceOp"):
            ops.batch_reduce(op, [(x, "CPU:0")])
    for destinations in (None, [], (), "", "CPU:99", 3.0):
        with refused(ValueError):
            ops.reduce(SUM, x, destinations)
        with refused(ValueError):
            ops.batch_reduce(SUM, [(x, destinations)])
        with refused(ValueError):
            ops.broadcast(jnp.ones(1), destinations)


def test_1_9_bad_pairs(library_ops: Any) -> None:
    x = on_devices(jnp.float32)
    for bad in [x], [(x,)], [(x, "CPU:0", 1)], [3]:
        with pytest.raises((ValueError, TypeError)) as info:
            library_ops.batch_reduce(SUM, bad)
        assert isinstance(info.value, rx.errors.DistributeError), repr(info.value)


def test_1_9_bad_values(library_ops: Any) -> None:
    with refused(ValueError):
        library_ops.reduce(SUM, rx.PerReplica(()), "CPU:0")
    with refused(ValueError, r"\(1,\), \(2,\), \(3,\)"):
        library_ops.reduce(SUM, on_devices(lambda i: jnp.ones(i + 1)), "CPU:0")
    with refused(TypeError):
        library_ops.reduce(SUM, rx.PerReplica(("a", "b")), "CPU:0")


def test_1_9_components_on_one_device_and_python_numbers(library_ops: Any) -> None:
    result = library_ops.reduce(SUM, rx.PerReplica((1.0, 2.5)), "CPU:1")
    assert float(result) == 3.5
    result = library_ops.reduce(MEAN, rx.PerReplica((np.ones(2), np.zeros(2))), "CPU:1")
    np.testing.assert_allclose(result, [0.5, 0.5])
    assert float(library_ops.reduce(SUM, rx.PerReplica((jnp.float32(4),)), "CPU:0")) == 4.0


# The classes one by one.


def test_1_9_base_class_has_no_algorithm() -> None:
    base = rx.CrossDeviceOps()
    x = on_devices(jnp.float32)
    with refused(NotImplementedError, "reduce_implementation"):
        base.reduce(SUM, x, "CPU:0")
    with refused(NotImplementedError, "reduce_implementation"):
        base.batch_reduce(SUM, [(x, "CPU:0")])
    with refused(ValueError, "ReduceOp"):
        base.reduce("SUM", x, "CPU:0")


@pytest.mark.parametrize("cls", [rx.NcclAllReduce, rx.HierarchicalCopyAllReduce])
def test_1_9_num_packs(cls: Any) -> None:
    with refused(ValueError, "num_packs"):
        cls(num_packs=-1)
    with refused(ValueError, "num_packs"):
        cls(-3)
    with pytest.raises(TypeError):
        cls(num_packs="many")
    assert isinstance(cls(num_packs=0), rx.CrossDeviceOps)


@pytest.mark.parametrize("cls", [rx.NcclAllReduce, rx.HierarchicalCopyAllReduce])
@pytest.mark.parametrize(("num_packs", "most"), [(0, 7), (1, 1), (3, 3), (50, 7)])
def test_1_9_number_of_packs_is_the_number_of_collectives(
    cls: Any, num_packs: int, most: int
) -> None:
    strategy = LAYOUTS["mesh"](cls(num_packs))
    x = values(strategy, lambda i: [jnp.full((k,), i, jnp.float32) for k in range(1, 8)])

    @jax.jit
    def reduced(stored: Any) -> Any:
        return strategy.extended.layout.map_replicas(
            lambda *local: strategy.extended.cross_device_ops.in_trace(SUM, local, N, pack_bytes=0),
            stored,
            (),
            [False] * len(stored),
            num_equal=len(stored),
        )

    layout = strategy.extended.layout
    stored = [v.stored(layout)[0] for v in x]
    text = str(reduced.trace(stored).jaxpr)
    assert text.count("reduce_scatter" if cls is rx.HierarchicalCopyAllReduce else "psum") == most
    for k, part in enumerate(reduced(stored), 1):
        np.testing.assert_array_equal(part, np.full((k,), 3.0))


def test_1_9_reduction_to_one_device_adds_on_that_device(devices: Any) -> None:
    seen: list[Any] = []

    def biggest(parts: Any) -> Any:
        seen.extend(p.devices() for p in parts if not isinstance(p, jax.core.Tracer))
        result = parts[0]
        for part in parts[1:]:
            result = jnp.maximum(result, part)
        return result

    ops = rx.ReductionToOneDevice(reduce_to_device="CPU:5", accumulation_fn=biggest)
    result = ops.reduce(SUM, on_devices(lambda i: jnp.array([i, -i])), "CPU:1")
    np.testing.assert_array_equal(result, [2, 0])
    assert result.devices() == {devices[1]}
    assert seen == [{devices[5]}] * N


@layouts
def test_1_9_accumulation_fn_in_both_executors(layout: str, run: Any) -> None:
    calls: list[int] = []

    def product(parts: Any) -> Any:
        calls.append(len(parts))
        result = parts[0]
        for part in parts[1:]:
            result = result * part
        return result

    strategy = LAYOUTS[layout](rx.ReductionToOneDevice(accumulation_fn=product))
    x = values(strategy, lambda i: jnp.array([i + 1.0, 2.0]))
    result = run(strategy, lambda v: rx.get_replica_context().all_reduce("SUM", v), (x,))
    assert calls and set(calls) == {N}
    for part in strategy.experimental_local_results(result):
        np.testing.assert_allclose(part, [6, 8])


def test_1_9_reduce_to_an_unknown_device() -> None:
    with refused(ValueError, "CPU:77"):
        ops = rx.ReductionToOneDevice(reduce_to_device="CPU:77")
        ops.reduce(SUM, on_devices(jnp.float32), "CPU:0")


@layouts
def test_1_9_hooks_get_resolved_arguments(layout: str, run: Any) -> None:
    ops = OnlyReduce()
    strategy = LAYOUTS[layout](ops)
    x = values(strategy, lambda i: jnp.float32(i))
    options = rx.experimental.CommunicationOptions(bytes_per_pack=7)
    result = run(
        strategy, lambda v: rx.get_replica_context().all_reduce("mean", [v, v * 2], options), (x,)
    )
    assert [float(v) for v in strategy.experimental_local_results(result)[1]] == [1.0, 2.0]
    assert len(ops.calls) == 2
    for op, value, destinations, given in ops.calls:
        assert op is MEAN
        assert isinstance(value, rx.PerReplica)
        assert tuple(destinations) == strategy.extended.layout.devices
        assert given.bytes_per_pack == 7


def test_1_9_strategy_uses_the_given_algorithm_everywhere() -> None:
    ops = OnlyReduce()
    strategy = LAYOUTS["mesh"](ops)
    assert strategy.extended.cross_device_ops is ops
    x = values(strategy, lambda i: jnp.array([1.0, 2.0]) * i)
    uses = [
        lambda: strategy.reduce("SUM", x, axis=None),
        lambda: strategy.reduce("MEAN", x, axis=0),
        lambda: strategy.extended.reduce_to("SUM", x, "CPU:0"),
        lambda: strategy.extended.batch_reduce_to("SUM", [(x, "CPU:0")]),
        lambda: strategy.run(lambda v: rx.get_replica_context().all_reduce("SUM", v), args=(x,)),
        rx.function(lambda: strategy.run(_all_reduce_sum, args=(x,))),
    ]
    for count, use in enumerate(uses, 1):
        with strategy.scope():
            use()
        assert len(ops.calls) == count


def _all_reduce_sum(value: Any) -> Any:
    return rx.get_replica_context().all_reduce("SUM", value)


def test_1_9_batch_hook_replaces_the_loop() -> None:
    class Batched(OnlyReduce):
        batches = 0

        def batch_reduce_implementation(
            self, reduce_op: Any, value_destination_pairs: Any, options: Any
        ) -> Any:
            self.batches += 1
            pairs = list(value_destination_pairs)
            return [self.reduce_implementation(reduce_op, v, d, options) for v, d in pairs]

    ops = Batched()
    strategy = LAYOUTS["mesh"](ops)
    x = values(strategy, lambda i: jnp.float32(i))
    strategy.run(lambda v: rx.get_replica_context().all_reduce("SUM", [v, v]), args=(x,))
    assert ops.batches == 1 and len(ops.calls) == 2


def test_1_9_a_failing_hook_reaches_the_caller(run: Any) -> None:
    class Failing(rx.CrossDeviceOps):
        def reduce_implementation(self, *args: Any) -> Any:
            raise KeyError("mine")

    strategy = LAYOUTS["mesh"](Failing())
    x = values(strategy, lambda i: jnp.float32(i))
    with pytest.raises(KeyError, match="mine"):
        run(strategy, _all_reduce_sum, (x,))
    assert len(strategy.run(lambda v: v + 1, args=(x,)).values) == N


@pytest.mark.parametrize("bad", ["nccl", 3, rx.NcclAllReduce, object()])
def test_1_9_what_is_no_algorithm_is_refused(bad: Any) -> None:
    with refused(TypeError, "CrossDeviceOps"):
        rx.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=bad)


def test_1_9_one_replica_needs_no_algorithm(run: Any) -> None:
    strategy = rx.MirroredStrategy(["CPU:1"], cross_device_ops=OnlyReduce())
    result = run(strategy, _all_reduce_sum, (jnp.float32(2),))
    assert float(strategy.experimental_local_results(result)[0]) == 2.0
    assert float(strategy.reduce("SUM", result, axis=None)) == 2.0


def test_t43_cpu_strategies_choose_an_algorithm() -> None:
    assert isinstance(
        rx.MirroredStrategy(["CPU:0", "CPU:1"]).extended.cross_device_ops, rx.CrossDeviceOps
    )


# Options.


def test_1_9_communication_options() -> None:
    make = rx.experimental.CommunicationOptions
    implementation = rx.experimental.CommunicationImplementation
    assert rx.experimental.CollectiveCommunication is implementation
    options = make()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is implementation.AUTO
    assert make(implementation="ring").implementation is implementation.RING
    assert make(timeout_seconds=-1.0).timeout_seconds == -1.0
    with refused(ValueError, "bytes_per_pack"):
        make(bytes_per_pack=-1)
    for bad in ("MPI", None, 3, rx.ReduceOp.SUM):
        with refused(ValueError, "implementation"):
            make(implementation=bad)


def test_1_9_merging_options_keeps_what_the_newer_sets() -> None:
    make = rx.experimental.CommunicationOptions
    nccl = rx.experimental.CommunicationImplementation.NCCL
    old = make(bytes_per_pack=8, timeout_seconds=3.0, implementation=nccl)
    merged = old.merge(make(timeout_seconds=5.0))
    assert (merged.bytes_per_pack, merged.timeout_seconds) == (8, 5.0)
    assert merged.implementation is nccl
    merged = make().merge(old)
    assert (merged.bytes_per_pack, merged.timeout_seconds) == (8, 3.0)
    assert old.merge(None).bytes_per_pack == 8
