"""`tf.config`: the devices of this process, and settings that JAX has, decides itself or lacks."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import jax

from replicax.foundation import devices, errors
from replicax.tf.arguments import Value
from replicax.tracing.function import functions_run_eagerly as functions_run_eagerly
from replicax.tracing.function import run_functions_eagerly as run_functions_eagerly

_log = logging.getLogger(__name__)

# Packages that bring devices to JAX; without them there is no need to start it and look.
_PLUGINS = {
    "GPU": ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin"),
    "TPU": ("libtpu",),
}


@dataclasses.dataclass(frozen=True)
class PhysicalDevice:
    """A device of this machine.

    >>> PhysicalDevice("/physical_device:CPU:0", "CPU").device_type
    'CPU'
    """

    name: str
    device_type: str


@dataclasses.dataclass(frozen=True)
class LogicalDevice:
    """A device that programs can name.

    >>> LogicalDevice("/device:CPU:0", "CPU").name
    '/device:CPU:0'
    """

    name: str
    device_type: str


@dataclasses.dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One part of a device that is split.

    >>> LogicalDeviceConfiguration(memory_limit=1024).memory_limit
    1024
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


class _Settings:
    """What programs have set, for the functions that ask for it."""

    logical: dict[str, list[LogicalDeviceConfiguration]] = {}
    memory_growth: dict[str, bool] = {}
    values: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the devices of this machine, of one kind or of all; the CPU is one device.

    >>> list_physical_devices("CPU")
    [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    kinds = ("CPU", "GPU", "TPU") if device_type is None else (device_type.upper(),)
    return [device for kind in kinds for device in _physical(kind)]


def _physical(kind: str) -> list[PhysicalDevice]:
    if kind == "CPU":
        count = 1
    elif not _may_have(kind):
        count = 0
    else:
        count = len(devices.devices_of_kind(kind))
    return [PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for i in range(count)]


def _may_have(kind: str) -> bool:
    """Tells whether JAX could have devices of a kind, without starting it.

    A program asks for GPUs first and splits the CPU later, which JAX allows until it has started.
    """
    if getattr(jax.config, "jax_platforms", None) == "cpu":
        return False
    return any(importlib.util.find_spec(package) for package in _PLUGINS.get(kind, ()))


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """Returns the devices that programs can name; starts JAX.

    >>> list_logical_devices("CPU")[0].name
    '/device:CPU:0'
    """
    kinds = ("CPU", "GPU", "TPU") if device_type is None else (device_type.upper(),)
    return [
        LogicalDevice(f"/device:{kind}:{i}", kind)
        for kind in kinds
        if kind == "CPU" or _may_have(kind)
        for i in range(len(devices.devices_of_kind(kind)))
    ]


def experimental_list_devices() -> list[str]:
    """Returns the full names of all devices.

    >>> experimental_list_devices()[0]
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    return [devices.name_of(device) for device in jax.local_devices()]


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Returns the devices that JAX uses: all of them.

    >>> len(get_visible_devices("CPU"))
    1
    """
    return list_physical_devices(device_type)


def set_visible_devices(
    devices: PhysicalDevice | Sequence[PhysicalDevice], device_type: str | None = None
) -> None:
    """Checks that all devices stay visible: JAX cannot hide devices once they are listed.

    Args:
      devices: Devices of `list_physical_devices`.
      device_type: The kind that the choice is about.

    Raises:
      UnsupportedError: If a device would be hidden.

    >>> set_visible_devices([], "GPU") if not list_physical_devices("GPU") else None
    """
    chosen = [devices] if isinstance(devices, PhysicalDevice) else list(devices)
    kind = None if device_type is None else device_type.upper()
    for device in chosen:
        if kind is not None and device.device_type != kind:
            raise errors.InvalidArgumentError(
                f"The devices must be of the kind {kind!r}",
                f"{device.name!r} is of the kind {device.device_type!r}",
                "Pass devices of list_physical_devices(device_type).",
            )
    kinds = {kind} if kind is not None else {device.device_type for device in chosen}
    hidden = [d for k in kinds if k for d in list_physical_devices(k) if d not in chosen]
    if hidden:
        names = ", ".join(device.name.rpartition("physical_device:")[2] for device in hidden)
        raise errors.UnsupportedError(
            "JAX sees the devices that it finds when it starts",
            f"{names} would be hidden",
            "Set CUDA_VISIBLE_DEVICES (or JAX_PLATFORMS=cpu) before Python starts, or name the "
            "devices: `tf.distribute.MirroredStrategy(devices=['/gpu:0'])`.",
        )


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration]
) -> None:
    """Splits the CPU into several devices; call it before the first computation.

    Args:
      device: The CPU of `list_physical_devices("CPU")`.
      logical_devices: One entry for each new device.
    """
    if device.device_type == "CPU":
        devices.set_virtual_cpu_devices(len(logical_devices))
    elif len(logical_devices) > 1:
        raise errors.UnsupportedError(
            "JAX can split the CPU only",
            f"{device.name} would become {len(logical_devices)} devices",
            "Pass `virtual_replicas=` to `tf.distribute.MirroredStrategy` for several replicas "
            "on one device.",
        )
    elif any(part.memory_limit for part in logical_devices):
        _log.info("A memory limit is set by the variable XLA_PYTHON_CLIENT_MEM_FRACTION.")
    _Settings.logical[device.name] = list(logical_devices)


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """Returns what `set_logical_device_configuration` has set, or None.

    >>> get_logical_device_configuration(PhysicalDevice("/physical_device:GPU:9", "GPU"))
    """
    return _Settings.logical.get(device.name)


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Accepts the choice; JAX allocates by the variable XLA_PYTHON_CLIENT_PREALLOCATE.

    >>> set_memory_growth(list_physical_devices("CPU")[0], True)
    """
    _Settings.memory_growth[device.name] = bool(enable)


def get_memory_growth(device: PhysicalDevice) -> bool | None:
    """Returns what `set_memory_growth` has set, or None.

    >>> get_memory_growth(PhysicalDevice("/physical_device:GPU:9", "GPU"))
    """
    return _Settings.memory_growth.get(device.name)


def get_memory_info(device: str) -> dict[str, int]:
    """Returns the bytes in use of a device, now and at most.

    >>> sorted(get_memory_info("CPU:0"))
    ['current', 'peak']
    """
    resolved: Any = devices.resolve(device)
    found = resolved.memory_stats() or {}
    current = int(found.get("bytes_in_use", 0))
    return {"current": current, "peak": int(found.get("peak_bytes_in_use", current))}


def get_memory_usage(device: str) -> int:
    """Returns the bytes in use of a device.

    >>> get_memory_usage("CPU:0") >= 0
    True
    """
    return get_memory_info(device)["current"]


def get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """Returns the model of a device; empty for a CPU.

    >>> get_device_details(PhysicalDevice("/physical_device:CPU:0", "CPU"))
    {}
    """
    if device.device_type == "CPU":
        return {}
    found: Any = devices.resolve(device.name.replace("/physical_device:", "/"))
    return {"device_name": found.device_kind}


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: object = None, *args: object, **kwargs: object
) -> None:
    """Accepts the call: a strategy connects to its cluster itself.

    >>> experimental_connect_to_cluster(None)
    """


def experimental_connect_to_host(remote_host: object = None, job_name: str = "worker") -> None:
    """Not offered: a strategy connects to its cluster itself."""
    raise errors.UnsupportedError(
        "Devices of other hosts are used through a strategy",
        f"a connection to {remote_host!r} was asked for",
        "Remove the line and pass a cluster resolver to the strategy.",
    )


def _setting(name: str, default: Value) -> tuple[Any, Any]:
    """Returns a getter and a setter of a value that is kept and has no effect."""

    def get() -> Any:
        return _Settings.values.get(name, default)

    def put(value: Value) -> None:
        _Settings.values[name] = value

    get.__name__, put.__name__ = f"get_{name}", f"set_{name}"
    get.__doc__ = f"Returns what `set_{name}` has set; XLA decides this itself."
    put.__doc__ = "Accepts the choice; XLA decides this itself."
    return get, put


get_soft_device_placement, set_soft_device_placement = _setting("soft_device_placement", True)
get_inter_op_parallelism_threads, set_inter_op_parallelism_threads = _setting(
    "inter_op_parallelism_threads", 0
)
get_intra_op_parallelism_threads, set_intra_op_parallelism_threads = _setting(
    "intra_op_parallelism_threads", 0
)
get_synchronous_execution, set_synchronous_execution = _setting("synchronous_execution", True)
get_jit, set_jit = _setting("jit", "")
get_device_policy, set_device_policy = _setting("device_policy", "silent")


def get_experimental_options() -> dict[str, Any]:
    """Returns the graph optimizer options that were set.

    >>> isinstance(get_experimental_options(), dict)
    True
    """
    return dict(_Settings.optimizer)


def set_experimental_options(options: dict[str, Any]) -> None:
    """Accepts options of the graph optimizer: XLA optimizes every compiled function.

    >>> set_experimental_options({"layout_optimizer": True})
    """
    _Settings.optimizer.update(options)


def enable_op_determinism() -> None:
    """Accepts the call: XLA's programs are deterministic on CPU and TPU.

    On GPU, set XLA_FLAGS=--xla_gpu_deterministic_ops=true before Python starts.

    >>> enable_op_determinism()
    """


def enable_tensor_float_32_execution(enabled: bool) -> None:
    """Chooses the precision of float32 products: TensorFloat-32 or full."""
    jax.config.update("jax_default_matmul_precision", "tensorfloat32" if enabled else "float32")


def tensor_float_32_execution_enabled() -> bool:
    """Returns whether float32 products may use TensorFloat-32.

    >>> isinstance(tensor_float_32_execution_enabled(), bool)
    True
    """
    chosen = getattr(jax.config, "jax_default_matmul_precision", None)
    return chosen in (None, "default", "tensorfloat32")


VirtualDeviceConfiguration = LogicalDeviceConfiguration


class ClusterDeviceFilters:
    """Which devices tasks see of each other; accepted for portability, without effect.

    >>> ClusterDeviceFilters().set_device_filters("ps", 0, ["/job:worker"])
    """

    def set_device_filters(self, job_name: str, task_index: int, device_filters: object) -> None:
        """Accepts the filters of a task."""


def reset_memory_stats(device: str | PhysicalDevice) -> None:
    """Accepts the call: JAX cannot reset the peak of a device.

    >>> reset_memory_stats("CPU:0")
    """


def enable_mlir_bridge() -> None:
    """Does nothing: XLA compiles every function.

    >>> enable_mlir_bridge()
    """


disable_mlir_bridge = enable_mlir_bridge
