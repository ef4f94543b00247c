"""Saved models: what is saved under each strategy, and what it is after loading."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from strategies_under_test import DISTRIBUTED, TWO_REPLICAS
from vocabulary import copies, number, refused, replica_values, values

import replicax as rx

SUM = rx.VariableAggregation.SUM
MEAN = rx.VariableAggregation.MEAN
FIRST = rx.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = rx.VariableSynchronization.ON_READ
ROWS = rx.TensorSpec((None, 3))
# One strategy of each way to keep variables.
KINDS = ("default", "mirrored_4", "virtual_2", "central_2")
PROGRAMS = Path(__file__).parent.parent / "support" / "programs"


class Scorer(rx.Module):
    """A layer, a counter in several places, and functions that read and write them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = rx.Variable(np.arange(6.0, dtype=np.float32).reshape(3, 2), name="w")
        self.calls = rx.Variable(0.0, trainable=False, name="calls", aggregation=SUM)
        self.seen = rx.Variable(0.0, name="seen", synchronization=ON_READ, aggregation=SUM)
        self.average = rx.Variable(0.0, trainable=False, name="average", aggregation=MEAN)
        self.parts = [self.w, {"again": self.w, "limit": 3}]
        self.num_traces = 0

    @rx.function(input_signature=[ROWS])
    def __call__(self, x: Any) -> Any:
        self.num_traces += 1
        return {"scores": x @ self.w, "rows": (jnp.asarray(x.shape[0]), None)}

    @rx.function(input_signature=[rx.TensorSpec((1,))])
    def count(self, by: Any) -> Any:
        return self.calls.assign_add(by[0])

    @rx.function(input_signature=[rx.TensorSpec(())])
    def observe(self, value: Any) -> Any:
        """Replica code: an ON_READ variable takes `assign_add` nowhere else."""
        self.seen.assign_add(value)
        total = rx.get_replica_context().all_reduce("SUM", value)
        self.average.assign(self.average * 0.5 + total * 0.5)
        return total

    @rx.function
    def undescribed(self, x: Any) -> Any:
        return x + self.calls


def made(strategy: Any) -> Scorer:
    with strategy.scope():
        return Scorer()


def loaded(strategy: Any, folder: Any) -> Any:
    with strategy.scope():
        return rx.saved_model.load(folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Scorer of four replicas, which every strategy can load."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    # A worker of a group has fewer devices.
    names = [f"CPU:{i}" for i in range(min(4, jax.local_device_count()))]
    rx.saved_model.save(made(rx.MirroredStrategy(names)), folder)
    return folder


@pytest.mark.every_strategy
def test_S212_a_model_is_saved_in_scope_and_out_of_scope(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    rx.saved_model.save(model, tmp_path / "out")
    with strategy.scope():
        rx.saved_model.save(model, tmp_path / "in")
    x = np.ones((4, 3), np.float32)
    expected = x @ np.arange(6.0).reshape(3, 2)
    for folder in ("out", "in"):
        alone = rx.saved_model.load(tmp_path / folder)
        assert isinstance(alone, rx.Module)
        assert type(alone).__name__ != "Scorer"
        np.testing.assert_allclose(alone(x)["scores"], expected)
        assert alone(x)["rows"] == (4, None)
        again = loaded(strategy, tmp_path / folder)
        assert type(again.w) is type(model.w)
        np.testing.assert_allclose(again(x)["scores"], expected)


@pytest.mark.strategies(*KINDS)
def test_S170_a_variable_is_saved_once_whatever_leads_to_it(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    rx.saved_model.save(model, tmp_path)
    variables = json.loads((tmp_path / "manifest.json").read_text())["contents"]["variables"]
    assert [v["name"] for v in variables] == ["average", "calls", "w", "seen"]
    arrays = safetensors.numpy.load_file(tmp_path / "data-00000.safetensors")
    assert [arrays[v["array"]].nbytes for v in variables] == [4, 4, 24, 4]
    again = rx.saved_model.load(tmp_path)
    assert again.parts[0] is again.w
    assert again.parts[1]["again"] is again.w
    assert again.parts[1]["limit"] == 3
    assert len(again.variables) == 4
    assert [v.name for v in again.trainable_variables] == ["w"]


def test_attributes_of_variables_come_back(strategy: Any, saved: Path) -> None:
    again = loaded(strategy, saved)
    assert again.seen.synchronization is ON_READ
    assert again.seen.aggregation is SUM
    assert again.average.aggregation is MEAN
    assert not again.average.trainable
    assert again.name == "scorer"


@pytest.mark.strategies(*KINDS)
def test_functions_that_write_keep_their_state(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    model.count(jnp.ones(1))
    rx.saved_model.save(model, tmp_path)
    again = loaded(strategy, tmp_path)
    assert float(again.count(jnp.ones(1))) == 2.0
    assert float(again.count(jnp.ones(1))) == 3.0
    assert float(again.calls) == 3.0
    assert float(model.calls) == 1.0


@pytest.mark.strategies(*KINDS)
def test_a_model_that_was_loaded_is_saved_again(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    rx.saved_model.save(model, tmp_path / "one", signatures={"counting": model.count})
    first = loaded(strategy, tmp_path / "one")
    first.count(jnp.full(1, 5.0))
    rx.saved_model.save(first, tmp_path / "two")
    second = rx.saved_model.load(tmp_path / "two")
    assert float(second.signatures["counting"](jnp.ones(1))) == 6.0
    assert second.signatures["counting"] is second.count
    assert second(np.ones((2, 3), np.float32))["scores"].shape == (2, 2)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_T63_an_on_read_sum_is_the_same_wherever_it_is_read(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        total = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda x: total.assign(x), args=(values(strategy, lambda i: 3.0 + 4.0 * i),))
    assert copies(strategy, total) == [3.0, 7.0]
    folder = tmp_path / "first"
    rx.saved_model.save({"total": total}, folder)
    for generation in range(3):
        outside = rx.saved_model.load(folder)
        assert float(outside.total) == 10.0
        inside = loaded(strategy, folder)
        assert copies(strategy, inside.total) == [5.0, 5.0]
        with strategy.scope():
            assert float(inside.total) == 10.0
        folder = tmp_path / f"{generation}"
        rx.saved_model.save(inside, folder)


@pytest.mark.strategies(*TWO_REPLICAS)
def test_an_on_read_integer_sum_loses_nothing(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        total = rx.Variable(0, synchronization=ON_READ, aggregation=SUM)
        total.assign(7)
    rx.saved_model.save({"total": total}, tmp_path)
    assert int(loaded(strategy, tmp_path).total) == 7


@pytest.mark.one_process("writes the copies of both replicas")
@pytest.mark.strategies("mirrored_2")
def test_T60_of_copies_made_to_differ_the_first_is_saved(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        v = rx.Variable(0.0)
    for component, value in zip(v.components, (3.0, 4.0), strict=True):
        component.assign(value)
    rx.saved_model.save({"v": v}, tmp_path)
    assert copies(strategy, loaded(strategy, tmp_path).v) == [3.0, 3.0]


@pytest.mark.strategies(*KINDS)
def test_T62_saving_traces_once_and_a_second_save_not_at_all(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    model(np.ones((2, 3), np.float32))
    before = model.num_traces
    rx.saved_model.save(model, tmp_path / "one")
    assert model.num_traces == before + 1
    rx.saved_model.save(model, tmp_path / "two")
    model.w.assign(model.w * 2.0)
    rx.saved_model.save(model, tmp_path / "two")
    assert model.num_traces == before + 1
    x = np.ones((1, 3), np.float32)
    one, two = (rx.saved_model.load(tmp_path / name)(x)["scores"] for name in ("one", "two"))
    np.testing.assert_allclose(two, 2 * np.asarray(one))


@pytest.mark.strategies(*KINDS)
def test_T62_the_program_knows_no_devices_and_no_other_replicas(
    strategy: Any, tmp_path: Path
) -> None:
    rx.saved_model.save(made(strategy), tmp_path)
    functions = json.loads((tmp_path / "manifest.json").read_text())["contents"]["functions"]
    arrays = safetensors.numpy.load_file(tmp_path / "data-00000.safetensors")
    assert len(functions) == 3
    for entry in functions:
        program = jax.export.deserialize(bytearray(arrays[entry["array"]].tobytes()))
        assert program.nr_devices == 1
        assert set(program.platforms) >= {"cpu"}
        text = program.mlir_module()
        for word in ("all_reduce", "all_gather", "sharding", "CPU:", "cpu:", "num_replicas = 2"):
            assert word not in text


@pytest.mark.strategies(*KINDS)
def test_T64_a_function_without_signature_is_refused_if_asked_for(
    strategy: Any, tmp_path: Path
) -> None:
    model = made(strategy)
    model.undescribed(jnp.ones(2))
    with refused(ValueError, "input_signature"):
        rx.saved_model.save(model, tmp_path, signatures={"serve": model.undescribed})
    assert not rx.saved_model.contains_saved_model(tmp_path)
    rx.saved_model.save(model, tmp_path)
    assert not hasattr(rx.saved_model.load(tmp_path), "undescribed")


@pytest.mark.strategies(*KINDS)
def test_a_function_without_signature_is_saved_with_specs(strategy: Any, tmp_path: Path) -> None:
    model = made(strategy)
    specs = [rx.TensorSpec((None,))]
    rx.saved_model.save(model, tmp_path, signatures={"serve": (model.undescribed, specs)})
    again = rx.saved_model.load(tmp_path)
    assert again.undescribed is again.signatures["serve"]
    assert again.undescribed.input_signature == (rx.TensorSpec((None,)),)
    again.calls.assign(2.0)
    np.testing.assert_array_equal(again.undescribed(jnp.ones(2)), [3.0, 3.0])


def test_loaded_functions_run_on_replicas(strategy: Any, run: Any, saved: Path) -> None:
    again = loaded(strategy, saved)

    def replica(x: Any) -> Any:
        return again(x)["scores"] * number()

    x = values(strategy, lambda i: jnp.full((2, 3), 1.0 + i))
    count = strategy.num_replicas_in_sync
    expected = [(np.full((2, 2), [6.0, 9.0]) * (i + 1) ** 2).tolist() for i in range(count)]
    assert replica_values(strategy, run(strategy, replica, (x,))) == expected


def test_replica_functions_see_one_replica_when_exported(
    strategy: Any, run: Any, saved: Path
) -> None:
    """`observe` sums over replicas; exported, it is alone and its sum is its own value."""
    again = loaded(strategy, saved)
    count = strategy.num_replicas_in_sync
    x = values(strategy, lambda i: jnp.float32(i + 1))
    found = run(strategy, again.observe, (x,))
    assert replica_values(strategy, found) == [1.0 + i for i in range(count)]
    assert float(again.average) == pytest.approx(np.mean(np.arange(count) + 1) / 2)
    with strategy.scope():
        assert float(again.seen) == sum(range(count + 1))


@pytest.mark.every_strategy
@pytest.mark.strategies(*TWO_REPLICAS, "mirrored_4")
def test_T65_writes_of_loaded_functions_are_aggregated(
    strategy: Any, run: Any, tmp_path: Path
) -> None:
    with strategy.scope():
        made_here = {
            "total": rx.Variable(10.0, aggregation=SUM, name="total"),
            "mean": rx.Variable(10.0, aggregation=MEAN, name="mean"),
            "first": rx.Variable(10.0, aggregation=FIRST, name="first"),
        }

    @rx.function(input_signature=[rx.TensorSpec(())])
    def add(x: Any) -> None:
        for variable in made_here.values():
            variable.assign_add(x)

    rx.saved_model.save({**made_here, "add": add}, tmp_path)
    again = loaded(strategy, tmp_path)
    run(strategy, again.add, (values(strategy, lambda i: jnp.float32(i + 1)),))
    count = strategy.num_replicas_in_sync
    ids = np.arange(count) + 1
    assert copies(strategy, again.total) in ([10.0 + ids.sum()] * count, [10.0 + ids.sum()])
    assert float(again.mean) == 10.0 + ids.mean()
    assert float(again.first) == 11.0


@pytest.mark.strategies(*TWO_REPLICAS)
def test_T65_copies_of_a_loaded_variable_never_diverge(
    strategy: Any, run: Any, tmp_path: Path
) -> None:
    with strategy.scope():
        v = rx.Variable(1.0, name="lonely")

    @rx.function(input_signature=[rx.TensorSpec(())])
    def put(x: Any) -> None:
        v.assign(x)

    rx.saved_model.save({"v": v, "put": put}, tmp_path)
    again = loaded(strategy, tmp_path)
    with refused(ValueError, "lonely.*aggregation"):
        run(strategy, again.put, (values(strategy, lambda i: jnp.float32(i)),))
    again.put(5.0)
    assert set(copies(strategy, again.v)) == {5.0}


def test_gradients_flow_through_loaded_functions(strategy: Any, run: Any, saved: Path) -> None:
    again = loaded(strategy, saved)

    def replica(x: Any) -> Any:
        loss = lambda: again(x)["scores"].sum()  # noqa: E731
        return rx.grad(loss, again.trainable_variables)()

    x = values(strategy, lambda i: jnp.full((2, 3), 1.0 + i))
    (found,) = run(strategy, replica, (x,))
    expected = [np.full((3, 2), 2.0 + 2 * i).tolist() for i in range(strategy.num_replicas_in_sync)]
    assert replica_values(strategy, found) == expected


@pytest.mark.strategies(*DISTRIBUTED)
def test_a_loaded_model_trains_on(strategy: Any, tmp_path: Path) -> None:
    """X3, S212: loading inside the scope is the start of distributed training."""
    with strategy.scope():
        w = rx.Variable(jnp.zeros(3), name="w", aggregation=MEAN)

    @rx.function(input_signature=[ROWS, rx.TensorSpec((None,))])
    def loss(x: Any, y: Any) -> Any:
        return jnp.mean((x @ w - y) ** 2)

    rx.saved_model.save({"w": w, "loss": loss}, tmp_path)
    again = loaded(strategy, tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32)

    @rx.function
    def step(x: Any, y: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            value, grad = rx.value_and_grad(again.loss, again.w)(x, y)
            again.w.assign_sub(0.1 * grad)
            return value

        return strategy.reduce("MEAN", strategy.run(replica, args=(x, y)), axis=None)

    for _ in range(100):
        final = step(x, y)
    assert float(final) < 1e-3
    np.testing.assert_allclose(again.w, [1.0, -2.0, 0.5], atol=0.05)


@pytest.mark.strategies("mirrored_2", "virtual_2")
def test_a_function_that_runs_replicas_is_refused(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        v = rx.Variable(1.0)

    @rx.function(input_signature=[rx.TensorSpec(())])
    def whole(x: Any) -> Any:
        return strategy.run(lambda: v * x)

    with refused(RuntimeError, "strategy.run"):
        rx.saved_model.save({"v": v, "whole": whole}, tmp_path)


@pytest.mark.strategies("mirrored_2")
def test_save_and_load_belong_outside_of_replica_and_compiled_code(
    strategy: Any, tmp_path: Path
) -> None:
    model = made(strategy)
    rx.saved_model.save(model, tmp_path)
    with refused(RuntimeError, "cross-replica"):
        strategy.run(lambda: rx.saved_model.save(model, tmp_path))
    with refused(RuntimeError, "cross-replica"):
        strategy.run(lambda: rx.saved_model.load(tmp_path))
    with refused(RuntimeError, "traces"):
        rx.function(lambda: rx.saved_model.save(model, tmp_path))()


def test_experimental_set_strategy_changes_nothing(tmp_path: Path) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    rx.experimental_set_strategy(strategy)
    try:
        model = Scorer()
        rx.saved_model.save(model, tmp_path)
        assert isinstance(rx.saved_model.load(tmp_path).w, rx.MirroredVariable)
    finally:
        rx.experimental_set_strategy(None)
    assert float(rx.saved_model.load(tmp_path).count(jnp.ones(1))) == 1.0


@pytest.mark.parametrize("kind", ["alone", "mirrored"])
def test_a_second_process_serves_without_the_source(tmp_path: Path, kind: str) -> None:
    strategy = rx.MirroredStrategy(["CPU:3", "CPU:2", "CPU:1", "CPU:0"])
    model = made(strategy)
    model.count(jnp.full(1, 4.0))
    rx.saved_model.save(model, tmp_path, signatures={"serve": model.__call__})
    batches = [np.ones((2, 3)).tolist(), np.full((5, 3), 2.0).tolist()]
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "serve_model.py"), str(tmp_path), kind],
        input=json.dumps(batches),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for batch, answer in zip(batches, report["answers"], strict=True):
        np.testing.assert_allclose(answer, np.asarray(batch) @ np.arange(6.0).reshape(3, 2))
    assert report["calls"] == 5.0
    assert report["names"] == ["average", "calls", "w", "seen"]
    assert ("MirroredVariable" in report["kinds"]) == (kind == "mirrored")
    assert report["signatures"] == ["serve"]
    assert report["foreign"] == []


@pytest.mark.slow
def test_a_killed_save_leaves_a_whole_model(tmp_path: Path) -> None:
    """A process that saves over and over is killed; the old model or the new one is there."""
    folder = tmp_path / "model"
    for delay in (0.05, 0.11, 0.23):
        saver = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "serve_overwrites.py"), str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "saving\n"
            time.sleep(delay)
        finally:
            saver.kill()
            saver.communicate(timeout=30)
        model = rx.saved_model.load(folder)
        stamps = {float(v) for part in model.parts for v in np.unique(np.asarray(part))}
        assert len(stamps) == 1
        assert float(model.stamp()) in stamps
