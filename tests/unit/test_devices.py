"""Device names, the device scope, and virtual CPU devices (section 2, tf.device)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import replicax as rx

CANONICAL = "/job:localhost/replica:0/task:0/device:CPU:1"
SPELLINGS = [
    "CPU:1",
    "cpu:1",
    "/CPU:1",
    "/cpu:1",
    "device:CPU:1",
    "/device:CPU:1",
    "/device:cpu:1",
    "/task:0/device:CPU:1",
    "/job:localhost/device:CPU:1",
    "/job:localhost/replica:0/task:0/device:CPU:1",
    "/job:localhost/replica:0/task:0/cpu:1",
    "job:localhost/replica:0/task:0/device:CPU:1",
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_device_every_spelling_names_the_same_device(name: str, devices: list[Any]) -> None:
    with rx.device(name):
        assert jnp.ones(2).devices() == {devices[1]}
        assert rx.Variable(1.0).device == CANONICAL
    strategy = rx.OneDeviceStrategy(name)
    assert strategy.extended.worker_devices == (CANONICAL,)
    assert rx.MirroredStrategy(["CPU:0", name]).extended.worker_devices[1] == CANONICAL


@pytest.mark.parametrize("name", ["CPU", "/cpu", "/device:CPU", "/device:CPU:*", "/job:localhost"])
def test_device_partial_names_mean_the_first_device(name: str, devices: list[Any]) -> None:
    with rx.device(name):
        assert jnp.ones(2).devices() == {devices[0]}


def test_device_takes_jax_devices(devices: list[Any]) -> None:
    with rx.device(devices[3]):
        assert jnp.ones(2).devices() == {devices[3]}
    assert rx.OneDeviceStrategy(devices[3]).extended.worker_devices[0].endswith("CPU:3")
    assert rx.MirroredStrategy(devices[1:3]).num_replicas_in_sync == 2


BAD_NAMES = [
    "",
    "/",
    "CPU:",
    "CPU:x",
    "CPU:-1",
    "CPU:1.5",
    "CPU:0:1",
    "CPU 0",
    ":0",
    "0",
    "/device:",
    "/device:CPU:x",
    "/task:x/device:CPU:0",
    "/replica:a",
    "CPU:8",
    "CPU:99",
    "GPU:0",
    "TPU:0",
    "XPU:0",
    "/device:GPU:1",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_device_bad_names_are_refused(name: str, devices: list[Any]) -> None:
    for use in (
        lambda: rx.device(name).__enter__(),
        lambda: rx.OneDeviceStrategy(name),
        lambda: rx.MirroredStrategy([name]),
        lambda: rx.MirroredStrategy(["CPU:0", name]),
        lambda: rx.CentralStorageStrategy(["CPU:0"], name),
    ):
        with pytest.raises(ValueError, match="device") as caught:
            use()
        assert isinstance(caught.value, rx.errors.DistributeError)
        assert repr(name) in str(caught.value)
    assert jnp.ones(2).devices() == {devices[0]}


@pytest.mark.parametrize("name", [0, 1.5, ["CPU:0"], object()], ids=lambda v: type(v).__name__)
def test_device_other_types_are_refused(name: Any) -> None:
    for use in (lambda: rx.device(name).__enter__(), lambda: rx.OneDeviceStrategy(name)):
        with pytest.raises(TypeError, match="device") as caught:
            use()
        assert isinstance(caught.value, rx.errors.DistributeError)


def test_device_scopes_nest_and_restore(devices: list[Any]) -> None:
    before = jnp.ones(2).devices()
    with rx.device("CPU:1"):
        with rx.device("CPU:2"):
            assert jnp.ones(2).devices() == {devices[2]}
            with rx.device(None):
                assert jnp.ones(2).devices() == {devices[2]}
        assert jnp.ones(2).devices() == {devices[1]}
        with pytest.raises(KeyError), rx.device("CPU:3"):
            raise KeyError
        assert jnp.ones(2).devices() == {devices[1]}
        assert rx.Variable(1.0).device == CANONICAL
    assert jnp.ones(2).devices() == before
    with rx.device(None):
        assert jnp.ones(2).devices() == before


def test_device_a_scope_object_is_per_thread(devices: list[Any]) -> None:
    found: list[Any] = []
    with rx.device("CPU:4"):
        thread = threading.Thread(target=lambda: found.append(jnp.ones(2).devices()))
        thread.start()
        thread.join(60)
    assert found == [{devices[0]}]


def test_device_does_not_move_variables_of_a_strategy() -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), rx.device("CPU:5"):
        v = rx.Variable(1.0)
    with rx.OneDeviceStrategy("CPU:2").scope(), rx.device("CPU:5"):
        w = rx.Variable(1.0)
    assert [c.device[-5:] for c in v.components] == ["CPU:0", "CPU:1"]
    assert w.device.endswith("CPU:2")


def test_device_a_variable_keeps_its_device_when_written() -> None:
    with rx.device("CPU:3"):
        v = rx.Variable([1.0, 2.0])
    v.assign(jnp.asarray([3.0, 4.0]))
    assert v.device.endswith("CPU:3")
    rx.function(lambda: v.assign_add([1.0, 1.0]))()
    assert v.device.endswith("CPU:3")
    with rx.device("CPU:1"):
        v.assign_add([1.0, 1.0])
    assert v.device.endswith("CPU:3")
    assert v.numpy().tolist() == [5.0, 6.0]


def test_device_results_of_reduce_land_on_the_current_device(devices: list[Any]) -> None:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    value = strategy.run(lambda: jnp.ones(2) * 1.0)
    with rx.device("CPU:6"):
        assert strategy.reduce("sum", value, axis=None).devices() == {devices[6]}


@pytest.mark.parametrize("count", [0, -1, 1.5, "8", None, True])
def test_virtual_devices_bad_numbers_are_refused(count: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        rx.set_virtual_cpu_devices(count)
    assert isinstance(caught.value, rx.errors.DistributeError)
    assert len(jax.devices("cpu")) == 8


def test_virtual_devices_after_jax_started() -> None:
    before = dict(os.environ)
    rx.set_virtual_cpu_devices(8)
    with pytest.raises(RuntimeError, match="before JAX starts"):
        rx.set_virtual_cpu_devices(4)
    assert len(jax.devices("cpu")) == 8
    assert dict(os.environ) == before


def test_virtual_devices_before_jax_starts() -> None:
    code = (
        "import replicax as rx\n"
        "rx.set_virtual_cpu_devices(2); rx.set_virtual_cpu_devices(3)\n"
        "print(rx.MirroredStrategy().num_replicas_in_sync)\n"
        "rx.set_virtual_cpu_devices(3)\n"
        "try:\n    rx.set_virtual_cpu_devices(5)\n"
        "except RuntimeError as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True
    )
    assert done.stdout.split() == ["3", "ContextError"]
