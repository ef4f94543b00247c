"""Checkpoints: what is saved of each kind of object, and where restored values go."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from strategies_under_test import STRATEGIES
from vocabulary import copies, num_copies, number, refused
from worker_groups import local_ids, replica_results

import replicax as rx

pytestmark = pytest.mark.every_strategy

PROGRAMS = Path(__file__).parent.parent / "support" / "programs"


def on_read(aggregation: Any, value: Any = 0.0) -> Any:
    return rx.Variable(
        value, synchronization=rx.VariableSynchronization.ON_READ, aggregation=aggregation
    )


def save_one(tmp_path: Path, **objects: Any) -> str:
    return rx.train.Checkpoint(**objects).write(tmp_path / "saved")


def assign_four_and_three(strategy: Any, variable: Any) -> None:
    strategy.run(lambda: variable.assign(5.0 - number()))


# Variables.


@pytest.mark.strategies("mirrored_2", "virtual_2", "tpu_2", "minimal_2")
@pytest.mark.parametrize(
    ("aggregation", "saved", "parts"),
    [
        (rx.VariableAggregation.SUM, 7.0, [3.5, 3.5]),
        (rx.VariableAggregation.MEAN, 3.5, [3.5, 3.5]),
        (rx.VariableAggregation.ONLY_FIRST_REPLICA, 4.0, [4.0, 4.0]),
    ],
)
def test_T59_on_read_saves_its_aggregate(
    strategy: Any, tmp_path: Path, aggregation: Any, saved: float, parts: list[float]
) -> None:
    with strategy.scope():
        variable = on_read(aggregation)
    assign_four_and_three(strategy, variable)
    path = save_one(tmp_path, v=variable)
    assert float(rx.train.load_variable(path, "v")) == saved
    rx.train.Checkpoint(v=variable).restore(path).assert_consumed()
    assert copies(strategy, variable) == parts
    plain = rx.Variable(0.0)
    rx.train.Checkpoint(v=plain).restore(path).assert_consumed()
    assert float(plain) == saved


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_T59_plain_value_is_dealt_out_to_on_read(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        path = save_one(tmp_path, v=rx.Variable(2.0))
        total = on_read(rx.VariableAggregation.SUM)
        mean = on_read(rx.VariableAggregation.MEAN)
    rx.train.Checkpoint(v=total).restore(path)
    rx.train.Checkpoint(v=mean).restore(path)
    assert copies(strategy, total) == [1.0, 1.0]
    assert copies(strategy, mean) == [2.0, 2.0]


@pytest.mark.strategies("mirrored_4")
def test_T59_whole_numbers_keep_their_sum(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        count = on_read(rx.VariableAggregation.SUM, 0)
        count.assign(7)
    path = save_one(tmp_path, v=count)
    rx.train.Checkpoint(v=count).restore(path)
    assert copies(strategy, count) == [2, 2, 2, 1]
    assert int(count) == 7


@pytest.mark.strategies("mirrored_2")
def test_T59_on_read_without_aggregation_is_named(strategy: Any, tmp_path: Path) -> None:
    class Model(rx.Module):
        pass

    model = Model()
    with strategy.scope():
        model.seen = on_read(rx.VariableAggregation.NONE)
    with refused(rx.errors.InvalidArgumentError, "model/seen.*aggregation is NONE"):
        save_one(tmp_path, model=model)
    assert not list(tmp_path.iterdir())


@pytest.mark.strategies("mirrored_2", "tpu_2")
def test_T60_diverged_copies_save_the_first(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        variable = rx.Variable(0.0)
    for i, component in zip(local_ids(strategy), variable.components, strict=True):
        component.assign(3.0 + i)
    with rx.device(variable.components[-1].device):
        path = save_one(tmp_path, v=variable)
    assert float(rx.train.load_variable(path, "v")) == 3.0
    rx.train.Checkpoint(v=variable).restore(path)
    assert copies(strategy, variable) == [3.0, 3.0]


@pytest.mark.parametrize(
    "other",
    [
        "default",
        "virtual_4",
        pytest.param("mirrored_4", marks=pytest.mark.one_process("needs four devices")),
    ],
)
def test_T60_every_strategy_opens_what_any_other_saved(
    strategy: Any, other: str, tmp_path: Path
) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    with strategy.scope():
        source = rx.Variable(value)
    path = save_one(tmp_path, v=source)
    virtual = functools.partial(rx.MirroredStrategy, ["CPU:0"], virtual_replicas=4)
    reader = {**STRATEGIES, "virtual_4": virtual}[other]()
    with reader.scope():
        target = rx.Variable(np.zeros((2, 3), np.float32))
        rx.train.Checkpoint(v=target).restore(path).assert_consumed()
    assert all(np.array_equal(c, value) for c in copies(reader, target))
    # A compiled step may give the restored buffers away; the value stays right.
    with reader.scope():
        rx.function(lambda: target.assign_add(jnp.ones((2, 3))))()
    assert np.array_equal(np.asarray(target), value + 1)


@pytest.mark.strategies("mirrored_2")
def test_S213_save_and_restore_anywhere_but_in_replica_code(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        variable = rx.Variable(2.0)
    checkpoint = rx.train.Checkpoint(v=variable)
    outside = checkpoint.write(tmp_path / "outside")
    with strategy.scope():
        inside = checkpoint.write(tmp_path / "inside")
    with rx.MirroredStrategy(["CPU:0"], virtual_replicas=4).scope():
        other = checkpoint.write(tmp_path / "other")
        variable_there = checkpoint.restore(inside)
    assert variable_there.restored == ("save_counter", "v")
    for path in (outside, inside, other):
        variable.assign(0.0)
        checkpoint.restore(path).assert_consumed()
        assert copies(strategy, variable) == [2.0, 2.0]
    with refused(rx.errors.ContextError, "Checkpoint.write"):
        strategy.run(lambda: checkpoint.write(tmp_path / "replica"))
    with refused(rx.errors.TracingError, "Checkpoint.write"):
        rx.function(lambda: checkpoint.write(tmp_path / "traced"))()
    with refused(rx.errors.TracingError, "Checkpoint.restore"):
        jax.jit(lambda: checkpoint.restore(outside) and 0)()


# Restoring before the objects exist.


class Lazy(rx.Module):
    """Makes its variable when it is first called."""

    w: Any

    def __call__(self) -> Any:
        if not hasattr(self, "w"):
            self.w = rx.Variable(jnp.zeros(2) + 0.5, name="w")
        return self.w * 1.0


@pytest.mark.strategies("default", "one_device", "mirrored_2", "virtual_2", "central_2")
def test_S213_deferred_restore_gives_mirrored_values(strategy: Any, tmp_path: Path) -> None:
    saved = Lazy()
    saved.w = rx.Variable([3.0, 4.0])
    with strategy.scope():
        path = save_one(tmp_path, model=saved, bias=rx.Variable(1.5))
    checkpoint = rx.train.Checkpoint(model=Lazy())
    status = checkpoint.restore(path)
    assert status.pending == ("bias", "model/w")
    with refused(rx.errors.StructureError, "bias"):
        status.assert_consumed()
    status.assert_existing_objects_matched()
    with strategy.scope():
        checkpoint.model()
        checkpoint.bias = rx.Variable(0.0)
    w = checkpoint.model.w
    assert copies(strategy, w) == [[3.0, 4.0]] * num_copies(strategy, w)
    assert float(checkpoint.bias) == 1.5
    status.assert_consumed()
    checkpoint.model.w = rx.Variable([9.0, 9.0])
    assert np.asarray(checkpoint.model.w).tolist() == [9.0, 9.0]


@pytest.mark.strategies("default", "mirrored_2", "virtual_2")
def test_S213_deferred_restore_of_variables_made_in_replica_code(
    strategy: Any, run: Any, tmp_path: Path
) -> None:
    saved = Lazy()
    saved.w = rx.Variable([3.0, 4.0])
    with strategy.scope():
        path = save_one(tmp_path, model=saved)
    model = Lazy()
    checkpoint = rx.train.Checkpoint(model=model)
    checkpoint.restore(path)
    seen = replica_results(strategy, run(strategy, model))
    assert [np.asarray(s).tolist() for s in seen] == [[3.0, 4.0]] * len(seen)
    assert all(c == [3.0, 4.0] for c in copies(strategy, model.w))
    with strategy.scope():
        model.w.assign([5.0, 6.0])
    again = replica_results(strategy, run(strategy, model))
    assert np.asarray(again[0]).tolist() == [5.0, 6.0]


def test_deferred_restore_reaches_nested_modules_lists_and_plain_values(tmp_path: Path) -> None:
    class Node(rx.Module):
        pass

    saved = Node()
    saved.inner = Node()
    saved.inner.rate = 0.25
    saved.layers = [rx.Variable(1.0), rx.Variable(2.0)]
    path = save_one(tmp_path, model=saved)
    model = Node()
    checkpoint = rx.train.Checkpoint(model=model)
    status = checkpoint.restore(path)
    model.inner = Node()
    model.inner.rate = 0.0
    assert model.inner.rate == 0.25
    model.layers = []
    model.layers.append(rx.Variable(0.0))
    model.layers.append(rx.Variable(0.0))
    # An append is noticed by the next query of the status.
    status.assert_consumed()
    assert [float(v) for v in model.layers] == [1.0, 2.0]


def test_a_copy_of_a_module_waits_for_nothing(tmp_path: Path) -> None:
    saved = Lazy()
    saved.w = rx.Variable([3.0, 4.0])
    path = save_one(tmp_path, model=saved)
    checkpoint = rx.train.Checkpoint(model=Lazy())
    checkpoint.restore(path)
    clone = copy.deepcopy(checkpoint.model)
    assert np.asarray(clone()).tolist() == [0.5, 0.5]
    assert np.asarray(checkpoint.model()).tolist() == [3.0, 4.0]


def test_T61_slots_that_appear_later_get_their_values_where_they_are_made(tmp_path: Path) -> None:
    """An object with `checkpoint_children()` tells of new ones through `on_new_child`."""

    class Slots:
        on_new_child: Any = None

        def __init__(self) -> None:
            self._slots: dict[str, Any] = {}

        def build(self, value: float) -> None:
            self._slots["0/m"] = rx.Variable(value)
            if self.on_new_child is not None:
                self.on_new_child("0/m", self._slots["0/m"])

        def checkpoint_children(self) -> dict[str, Any]:
            return self._slots

    saved = Slots()
    saved.build(4.0)
    path = save_one(tmp_path, optimizer=saved)
    strategy = STRATEGIES["mirrored_2"]()
    fresh = Slots()
    checkpoint = rx.train.Checkpoint(optimizer=fresh)
    status = checkpoint.restore(path)
    assert status.pending == ("optimizer/0/m",)
    with strategy.scope():
        fresh.build(0.0)
    slot = fresh.checkpoint_children()["0/m"]
    assert strategy.extended.variable_created_in_scope(slot)
    assert copies(strategy, slot) == [4.0, 4.0]
    status.assert_consumed()


class Line(rx.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = rx.Variable(jnp.ones(3), name="w")


def training(strategy: Any) -> tuple[Any, Any]:
    """A whole training program, and a function that makes some steps of it."""
    with strategy.scope():
        model = Line()
        optimizer = rx.optimizers.Optimizer(optax.adam(0.1), model.trainable_variables)
        mean = rx.metrics.Mean()
    source = rx.data.Dataset.from_tensor_slices(np.arange(60, dtype=np.float32).reshape(20, 3))
    data = iter(strategy.experimental_distribute_dataset(source.shuffle(20, seed=4).batch(4)))

    def step(x: Any) -> None:
        gradient = x.mean(0) * model.w.read_value()
        optimizer.apply_gradients([(gradient, model.w)])
        mean.update_state(gradient.sum())

    def steps(count: int) -> list[float]:
        for _ in range(count):
            strategy.run(step, args=(next(data),))
        return [*np.asarray(model.w).tolist(), float(mean.result()), float(optimizer.iterations)]

    objects = {"model": model, "optimizer": optimizer, "mean": mean, "data": data}
    return rx.train.Checkpoint(**objects), steps


@pytest.mark.strategies("default", "mirrored_2", "virtual_2", "central_2")
def test_T61_training_goes_on_as_if_it_had_not_stopped(strategy: Any, tmp_path: Path) -> None:
    checkpoint, steps = training(strategy)
    steps(2)
    path = checkpoint.write(tmp_path / "middle")
    expected = steps(3)
    checkpoint, steps = training(strategy)
    checkpoint.restore(path).assert_consumed()
    *exact, mean, iterations = steps(3)
    assert [*exact, iterations] == [*expected[:3], 5.0]
    # The sum was distributed over the copies again, so it is rounded differently.
    assert mean == pytest.approx(expected[3], rel=1e-6)
    assert {"optimizer/iterations", "optimizer/0/mu/0"} <= {
        name for name, _, _ in rx.train.list_variables(path)
    }


# Other kinds of objects.


class Pair(NamedTuple):
    left: Any
    right: Any


def test_plain_values_come_back_exactly(tmp_path: Path) -> None:
    values = {
        "yes": True,
        "count": 1 << 80,
        "rate": 0.1 + 0.2,
        "nothing": None,
        "lost": float("nan"),
        "far": float("-inf"),
        "turn": 1 - 2j,
        "text": "ü\n\x00",
        "raw": bytes(range(256)),
        "small": np.float16(0.1),
        "wide": np.arange(3, dtype=np.int64) << 40,
        "words": np.array(["ab", "c"]),
        "swapped": np.arange(3, dtype=">i4"),
        "empty": np.zeros((0, 3)),
        "brain": jnp.array([1.5, -0.0], jnp.bfloat16),
    }
    path = save_one(tmp_path, **values)
    blank = {name: type(v)(0) if isinstance(v, np.generic) else v for name, v in values.items()}
    blank |= {name: np.zeros_like(v) for name, v in values.items() if isinstance(v, np.ndarray)}
    blank["brain"] = jnp.zeros(2, jnp.bfloat16)
    blank |= {"yes": False, "count": 0, "rate": 0.0, "lost": 0.0, "far": 0.0, "turn": 0j}
    blank |= {"text": "", "raw": b"", "nothing": 1}
    checkpoint = rx.train.Checkpoint(**blank)
    checkpoint.restore(path).assert_consumed()
    for name, value in values.items():
        found = getattr(checkpoint, name)
        assert type(found) is type(value), name
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            native = np.asarray(value).astype(value.dtype.newbyteorder("="))
            assert found.dtype == native.dtype, name
            assert np.asarray(found).tobytes() == native.tobytes(), name
        else:
            assert repr(found) == repr(value)


def test_arrays_keep_their_sharding(tmp_path: Path) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    path = save_one(tmp_path, a=jax.device_put(jnp.arange(8.0), sharding))
    checkpoint = rx.train.Checkpoint(a=jax.device_put(jnp.zeros(8), sharding))
    checkpoint.restore(path)
    assert checkpoint.a.sharding == sharding
    assert checkpoint.a.tolist() == list(range(8))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_go_on_where_they_were(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(5, impl=impl), 3)
    path = save_one(tmp_path, keys=keys, raw=jax.random.PRNGKey(2))
    checkpoint = rx.train.Checkpoint(
        keys=jax.random.split(jax.random.key(0, impl=impl), 3), raw=jax.random.PRNGKey(0)
    )
    checkpoint.restore(path).assert_consumed()
    assert jax.random.normal(checkpoint.keys[1]) == jax.random.normal(keys[1])
    assert checkpoint.raw.tolist() == jax.random.PRNGKey(2).tolist()
    other = "rbg" if impl == "threefry2x32" else "threefry2x32"
    wrong = rx.train.Checkpoint(keys=jax.random.split(jax.random.key(0, impl=other), 3))
    with refused(rx.errors.InvalidArgumentError, "'keys'"):
        wrong.restore(path)


def test_pytrees_of_other_libraries_are_rebuilt(tmp_path: Path) -> None:
    params = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params)
    layer = equinox.nn.Linear(2, 3, key=jax.random.key(1))
    old = {"state": state, "layer": layer, "pair": Pair(1, [2.0, (3, "x")])}
    path = save_one(tmp_path, **old)
    names = [name for name, _, _ in rx.train.list_variables(path)]
    assert {"layer/weight", "state/0/mu/w", "state/0/count"} <= set(names)
    fresh = optimizer.init(params)
    kept = fresh[0].mu
    checkpoint = rx.train.Checkpoint(
        state=fresh,
        layer=equinox.nn.Linear(2, 3, key=jax.random.key(2)),
        pair=Pair(0, [0.0, (0, "")]),
    )
    checkpoint.restore(path).assert_consumed()
    restored = (checkpoint.state, checkpoint.layer, checkpoint.pair)
    assert jax.tree.structure(restored) == jax.tree.structure((state, layer, old["pair"]))
    assert all(map(np.array_equal, jax.tree.leaves(restored[:2]), jax.tree.leaves((state, layer))))
    assert checkpoint.pair == Pair(1, [2.0, (3, "x")])
    # A pytree is a value: the old one is not written to.
    assert float(kept["w"].sum()) == 0.0


def test_dicts_and_lists_are_restored_in_place(tmp_path: Path) -> None:
    path = save_one(tmp_path, table={"a/b": 1, 2: [rx.Variable(1.0), "x"], "..": 3, "": 4})
    table: Any = {"a/b": 0, 2: [rx.Variable(0.0), ""], "..": 0, "": 0}
    rx.train.Checkpoint(table=table).restore(path).assert_consumed()
    assert table["a/b"] == 1 and float(table[2][0]) == 1.0 and table[2][1] == "x"
    assert table[".."] == 3 and table[""] == 4
    with refused(rx.errors.InvalidArgumentError, "two are named 'table/1'"):
        save_one(tmp_path, table={1: 0, "1": 0})


class Reader:
    """An iterator with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.is_broken = False

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        if self.is_broken and state != {"at": 0}:
            raise ValueError("cannot seek")
        self.state = state


@pytest.mark.parametrize("state", [{"at": 5, "inner": [1, 2.5, None, "x"]}, b"\x00\xff"])
def test_iterators_go_on_where_they_were(tmp_path: Path, state: Any) -> None:
    path = save_one(tmp_path, reader=Reader(state))
    fresh = Reader(None)
    rx.train.Checkpoint(reader=fresh).restore(path).assert_consumed()
    assert fresh.state == state


def test_grain_iterators_go_on_where_they_were(tmp_path: Path) -> None:
    import grain

    def batches() -> Any:
        dataset = grain.MapDataset.range(20).shuffle(seed=1).batch(2)
        return iter(dataset.to_iter_dataset(grain.ReadOptions(0, 0)))

    iterator = batches()
    first = [next(iterator) for _ in range(3)]
    path = save_one(tmp_path, data=iterator)
    rest = [next(iterator).tolist() for _ in range(3)]
    fresh = batches()
    rx.train.Checkpoint(data=fresh).restore(path).assert_consumed()
    assert [next(fresh).tolist() for _ in range(3)] == rest
    assert len(first) == 3


def test_a_state_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with refused(rx.errors.ArgumentTypeError, "'reader'.*JSON"):
        save_one(tmp_path, reader=Reader({"at": object()}))


def test_one_variable_under_two_names_is_saved_once(tmp_path: Path) -> None:
    class Node(rx.Module):
        pass

    shared = Node()
    shared.w = rx.Variable(2.0)
    shared.me = shared
    path = save_one(tmp_path, a=shared, b=[shared.w], c=shared)
    assert [name for name, _, _ in rx.train.list_variables(path)] == ["a/w"]
    assert float(rx.train.load_variable(path, "c/w")) == 2.0
    apart = Node()
    apart.w = rx.Variable(0.0)
    single = rx.Variable(0.0)
    status = rx.train.Checkpoint(b=[single], c=apart).restore(path)
    assert float(single) == 2.0 and float(apart.w) == 2.0
    assert status.pending == ()


def test_what_holds_no_state_is_skipped_and_what_cannot_be_saved_is_refused(
    tmp_path: Path,
) -> None:
    class Model(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = jax.nn.relu
            self.step = rx.function(lambda: 1)
            self.kind = Model
            self.strategy = STRATEGIES["mirrored_2"]()
            self._lock = threading.Lock()
            self.w = rx.Variable(1.0)

    path = save_one(tmp_path, model=Model(), fn=len, strategy=STRATEGIES["default"]())
    assert [name for name, _, _ in rx.train.list_variables(path)] == ["model/w"]
    with refused(rx.errors.ArgumentTypeError, "'guard'.*lock"):
        rx.train.Checkpoint(guard=threading.Lock())
    with refused(rx.errors.ArgumentTypeError, "'things'.*dtype is object"):
        save_one(tmp_path, things=np.array([object()]))
    with refused(rx.errors.InvalidArgumentError, "'save'"):
        rx.train.Checkpoint(save=1)


# What does not fit.


@pytest.mark.parametrize(
    "target",
    [
        rx.Variable(np.zeros(3, np.float32)),
        rx.Variable(np.zeros(2, np.int32)),
        np.zeros(2, np.float64),
        5,
    ],
    ids=["shape", "dtype", "array", "plain"],
)
def test_a_value_that_does_not_fit_changes_nothing(tmp_path: Path, target: Any) -> None:
    path = save_one(tmp_path, a=rx.Variable(1.0), v=rx.Variable([1.0, 2.0]), z=rx.Variable(1.0))
    first, last = rx.Variable(0.0), rx.Variable(0.0)
    with refused(rx.errors.InvalidArgumentError, r"'v' needs.*saved holds.*\(2,\).*float32"):
        rx.train.Checkpoint(a=first, v=target, z=last).restore(path)
    assert float(first) == 0.0 and float(last) == 0.0


def test_a_broken_iterator_changes_nothing(tmp_path: Path) -> None:
    path = save_one(tmp_path, a=Reader({"at": 1}), b=Reader({"at": 2}), v=rx.Variable(1.0))
    good, bad, variable = Reader({"at": 0}), Reader({"at": 0}), rx.Variable(0.0)
    bad.is_broken = True
    with refused(rx.errors.CheckpointError, "'b'.*cannot seek"):
        rx.train.Checkpoint(a=good, b=bad, v=variable).restore(path)
    assert good.state == {"at": 0} and float(variable) == 0.0


def test_status_says_what_is_missing_and_what_it_may_be(tmp_path: Path) -> None:
    path = save_one(tmp_path, kernel=rx.Variable(1.0), bias=rx.Variable(2.0))
    bias = rx.Variable(0.0)
    status = rx.train.Checkpoint(kernels=rx.Variable(0.0), bias=bias).restore(path)
    assert status.restored == ("bias", "save_counter") and float(bias) == 2.0
    assert status.missing == ("kernels",) and status.pending == ("kernel",)
    with refused(rx.errors.StructureError, "'kernel' looks like 'kernels'"):
        status.assert_existing_objects_matched()
    assert "  kernels (is it 'kernel'?)" in status.report().splitlines()
    assert status.expect_partial().unused == ("kernel",) and status.pending == ()


def test_restore_of_no_checkpoint_does_nothing() -> None:
    variable = rx.Variable(1.0)
    status = rx.train.Checkpoint(v=variable).restore(None)
    assert status.path is None and float(variable) == 1.0
    with refused(rx.errors.StructureError, "'v'"):
        status.assert_consumed()


def test_save_counts_and_write_replaces(tmp_path: Path) -> None:
    variable = rx.Variable(1.0)
    checkpoint = rx.train.Checkpoint(v=variable)
    paths = [checkpoint.save(tmp_path / "model") for _ in range(2)]
    assert [Path(p).name for p in paths] == ["model-1", "model-2"]
    fresh = rx.train.Checkpoint(v=variable)
    fresh.restore(paths[1])
    assert fresh.save_counter == 2
    assert Path(fresh.save(tmp_path / "model")).name == "model-3"
    checkpoint.write(tmp_path / "one")
    variable.assign(5.0)
    checkpoint.write(tmp_path / "one")
    assert float(rx.train.load_variable(tmp_path / "one", "v")) == 5.0
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["model-1", "model-2", "model-3", "one"]


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = save_one(tmp_path, v=rx.Variable(1.0), n=1)
    for name in ("w", "n"):
        with refused(rx.errors.NotFoundError, f"{name!r} must be.*holds v"):
            rx.train.load_variable(path, name)
    with refused(rx.errors.CheckpointError, "nowhere"):
        rx.train.Checkpoint().restore(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saver", "reader"),
    [
        ((8, 8), (1, 0)),
        ((1, 1), (8, 8)),
        pytest.param((8, 8), (2, 2), marks=pytest.mark.slow),
        pytest.param((1, 0), (4, 2), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_moves_between_numbers_of_devices(
    tmp_path: Path, saver: tuple[int, int], reader: tuple[int, int]
) -> None:
    for what, (devices, replicas) in (("save", saver), ("restore", reader)):
        args = [what, str(devices), str(replicas), str(tmp_path / "moved")]
        subprocess.run(
            [sys.executable, str(PROGRAMS / "checkpoint_move.py"), *args], check=True, timeout=250
        )


def test_a_checkpoint_may_be_an_object_of_another_one(tmp_path: Path) -> None:
    inner = rx.train.Checkpoint(x=rx.Variable(3.0), note="first")
    path = rx.train.Checkpoint(net=inner, a=rx.Variable(1.0)).save(tmp_path / "ckpt")
    other = rx.train.Checkpoint()
    status = other.restore(path)
    other.net = rx.train.Checkpoint(note="")
    other.net.x = rx.Variable(0.0)
    assert (float(other.net.x), other.net.note) == (3.0, "first")
    other.a = rx.Variable(0.0)
    status.assert_consumed()
    # A part of a checkpoint by its path, as TensorFlow's guide restores a layer.
    part = rx.Variable(0.0)
    rx.train.Checkpoint(net=rx.train.Checkpoint(x=part)).restore(path).expect_partial()
    assert float(part) == 3.0
