"""What a person sees when a public object is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx


class Dense(rx.Module):
    def __init__(self) -> None:
        super().__init__(name="dense")
        self.w = rx.Variable(2.0, name="w")

    @rx.function(input_signature=[rx.TensorSpec((), jnp.float32)])
    def apply(self, x: Any) -> Any:
        return self.w * x


def strategies() -> dict[str, rx.Strategy]:
    return {
        "default": rx.get_strategy(),
        "one": rx.OneDeviceStrategy("CPU:0"),
        "mirrored": rx.MirroredStrategy(["CPU:0", "CPU:1"]),
        "virtual": rx.MirroredStrategy(["CPU:0"], virtual_replicas=1024),
        "central": rx.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:1"),
    }


def public_objects(directory: Path) -> list[Any]:
    """One of each kind of public object of the array side."""
    strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    found: list[Any] = [*strategies().values(), strategy.extended, strategy.scope()]
    with strategy.scope():
        dense = Dense()
        on_read = rx.Variable(
            [1.0],
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
        optimizer = rx.optimizers.Optimizer(optax.sgd(0.1), [dense.w])
        found += [dense, dense.w, dense.w.components[1], on_read, optimizer, optimizer.iterations]
        found += [rx.metrics.Mean(), rx.metrics.AUC(), rx.metrics.MeanTensor(shape=(2,))]
    plain = Dense()
    found += [plain.w, rx.ShardedVariable([rx.Variable([1.0]), rx.Variable([2.0])])]

    dataset = rx.data.Dataset.range(4).map(lambda x: x + 1).batch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    found += [dataset, iter(dataset), distributed, iter(distributed), distributed.element_spec]
    found += [iter(distributed).get_next_as_optional(), rx.data.TFRecordDataset([])]
    found += [rx.data.Options(), rx.data.DistributeOptions(), rx.data.AutoShardPolicy.DATA]
    found += [rx.InputContext(), rx.InputOptions(), rx.RunOptions(), rx.TensorSpec((None,))]

    contexts: list[Any] = [rx.get_replica_context()]
    strategy.run(lambda: contexts.append(rx.get_replica_context()))
    per_replica = strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group)
    found += [*contexts, per_replica, rx.Mirrored([1.0, 1.0]), dense.apply, rx.function(np.sum)]
    found += [rx.experimental.ValueContext(), rx.experimental.CommunicationOptions()]
    found += [rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([0])), strategy.extended.layout]
    found += [rx.ReductionToOneDevice(), rx.NcclAllReduce(), rx.HierarchicalCopyAllReduce()]
    found += [strategy.extended.cross_device_ops]
    partitioners = rx.experimental.partitioners
    found += [partitioners.MinSizePartitioner(), partitioners.FixedShardsPartitioner(2)]
    found += [rx.Staleness(2), rx.coordinator.Timing(), rx.train.ClusterSpec({"ps": ["a:1"]})]

    checkpoint = rx.train.Checkpoint(dense=plain)
    with rx.train.CheckpointManager(checkpoint, directory / "run") as manager:
        found += [checkpoint, manager, checkpoint.restore(manager.save()), checkpoint.restore(None)]
    rx.saved_model.save(plain, directory / "model")
    loaded = rx.saved_model.load(directory / "model")
    return [*found, loaded, loaded.apply, loaded.w]


def test_public_objects_do_not_print_as_addresses(tmp_path: Path) -> None:
    for value in public_objects(tmp_path):
        for text in (repr(value), str(value)):
            assert " object at 0x" not in text, text
            assert "replicax." not in text, text


def test_strategies_show_devices_and_number_of_replicas() -> None:
    shown = {name: repr(strategy) for name, strategy in strategies().items()}
    assert shown == {
        "default": "<DefaultStrategy replicas=1>",
        "one": "<rx.OneDeviceStrategy replicas=1, devices=CPU:0>",
        "mirrored": "<rx.MirroredStrategy replicas=2, devices=CPU:0, CPU:1>",
        "virtual": "<rx.MirroredStrategy replicas=1,024, devices=CPU:0>",
        "central": (
            "<rx.CentralStorageStrategy replicas=2, devices=CPU:0, CPU:1, variables on=CPU:1>"
        ),
    }


def test_strategies_are_tables_in_notebooks() -> None:
    class Own(rx.MirroredStrategy):
        pass

    assert rx.MirroredStrategy(["CPU:0", "CPU:1"])._repr_html_() == (
        "<table><caption>rx.MirroredStrategy</caption><tr><th>replicas</th><td>2</td></tr>"
        "<tr><th>devices</th><td>CPU:0, CPU:1</td></tr></table>"
    )
    # A class that was defined in a function has such a name.
    assert "&lt;locals&gt;.Own</caption>" in Own(["CPU:0"])._repr_html_()


@pytest.mark.strategies("mirrored_2", "virtual_2", "one_device")
def test_metrics_format_as_numbers(strategy: Any, run: Any) -> None:
    with strategy.scope():
        loss = rx.metrics.Mean(name="loss")
    run(strategy, loss.update_state, args=(2.5,))
    assert f"{loss:.3f}" == "2.500"
    assert f"{loss}" == "2.5"
    assert f"{loss.result():.3f}" == "2.500"
    assert repr(loss) == "<rx.metrics.Mean name=loss>"


def test_datasets_show_elements_without_running_the_users_code() -> None:
    calls = []
    mapped = rx.data.Dataset.range(3).map(calls.append)
    assert repr(mapped) == "<rx.data.Dataset range > map, 3 elements>"
    assert calls == []
    batched = rx.data.Dataset.range(3).batch(2, drop_remainder=True)
    assert repr(batched).startswith("<rx.data.Dataset range > batch, 1 element of TensorSpec(")
    assert "infinitely many" in repr(batched.repeat())


def test_many_replicas_and_names_are_elided() -> None:
    strategy = strategies()["virtual"]
    data = strategy.experimental_distribute_dataset(rx.data.Dataset.range(2048).batch(1024))
    assert len(repr(data.element_spec)) < 200
    dense = Dense()
    dense.more = [rx.Variable(float(i), name=f"v{i}") for i in range(100)]  # type: ignore
    assert len(repr(dense)) < 200
