"""Saves or restores a training state under a strategy, with a given number of devices.

Arguments: "save" or "restore", number of devices, number of replicas, path.
"""

from __future__ import annotations

import sys

import numpy as np

import replicax as rx

what, num_devices, num_replicas, path = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
rx.set_virtual_cpu_devices(num_devices)

import jax  # noqa: E402

strategy = (
    rx.get_strategy()
    if num_replicas == 0
    else rx.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
)
with strategy.scope():
    weights = rx.Variable(np.zeros((4, 3), np.float32))
    total = rx.Variable(
        0.0,
        synchronization=rx.VariableSynchronization.ON_READ,
        aggregation=rx.VariableAggregation.SUM,
    )
checkpoint = rx.train.Checkpoint(weights=weights, total=total, key=jax.random.key(0))
if what == "save":
    weights.assign(np.arange(12, dtype=np.float32).reshape(4, 3))
    with strategy.scope():
        total.assign(16.0)
    checkpoint.key = jax.random.key(7)
    checkpoint.write(path)
else:
    checkpoint.restore(path).assert_consumed()
    assert np.asarray(weights).tolist() == np.arange(12.0).reshape(4, 3).tolist()
    assert float(total) == 16.0
    parts = [float(c.read_value()) for c in total.components]
    assert parts == [16.0 / len(parts)] * max(1, num_replicas), parts
    for component in weights.components:
        assert np.array_equal(component.read_value(), weights.read_value())
    expected = jax.random.key_data(jax.random.key(7))
    assert np.array_equal(jax.random.key_data(checkpoint.key), expected)
    assert len(jax.devices()) == num_devices
print("done")
