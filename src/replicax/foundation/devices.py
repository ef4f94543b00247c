"""The JAX devices of names, and the device of a block."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax

from replicax.foundation import errors, gate, settings
from replicax.foundation.device_names import DeviceSpec, parse
from replicax.foundation.jax_compat import Device

_PLATFORMS = {"CPU": ("cpu",), "GPU": ("gpu", "cuda", "rocm"), "TPU": ("tpu",)}
# The packages that add support for a kind of device to JAX, the extra of JAX that installs one,
# and the advice if a package is installed and no device exists.
_SUPPORT = {
    "GPU": (
        ("jax_cuda13_plugin", "jax_cuda12_plugin", "jax_rocm7_plugin"),
        "cuda13",
        "Check the driver with `nvidia-smi`, and JAX_PLATFORMS and CUDA_VISIBLE_DEVICES.",
    ),
    "TPU": (("libtpu",), "tpu", "Check that this machine has a TPU, and JAX_PLATFORMS."),
}
# The device named by the innermost `device(...)` block of this thread.
_current: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "replicax_device", default=None
)


# The requested name, which may be a device of another task.
_requested: contextvars.ContextVar[DeviceSpec | None] = contextvars.ContextVar(
    "replicax_requested_device", default=None
)


def resolve(device: str | Device) -> Device:
    """Returns the local JAX device of a name (or a device itself)."""
    if isinstance(device, Device):
        return device
    if not isinstance(device, str):
        raise errors.ArgumentTypeError(
            "A device must be a name such as 'CPU:0' or a Device",
            f"{device!r} of type {type(device).__name__} was given",
            "Pass a string.",
        )
    spec = parse(device)
    candidates = devices_of_kind(spec.kind or "CPU")
    index = spec.index or 0
    if index >= len(candidates):
        raise errors.InvalidArgumentError(*missing(f"The device {device!r}", spec.kind or "CPU"))
    return candidates[index]


def missing(wanted: str, kind: str) -> tuple[str, str, str]:
    """Returns the three parts of the error for a missing device."""
    found = f"this process has {_available()}"
    if kind in _SUPPORT and not devices_of_kind(kind):
        packages, extra, advice = _SUPPORT[kind]
        install = f'`pip install "jax[{extra}]"`'
        if not any(map(_is_installed, packages)):
            return (
                f"{wanted} needs a JAX with {kind} support",
                f"the installed JAX {jax.__version__} has none, and {found}",
                f"Install it with {install}, or name one of these devices.",
            )
        return f"{wanted} needs a {kind} that JAX can use", found, advice
    advice = "Name one of those."
    if kind == "CPU":
        advice = "For more CPU devices call rx.set_virtual_cpu_devices(n) first in the program."
    return f"{wanted} must exist", found, advice


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def devices_of_kind(kind: str) -> list[Device]:
    """Returns the devices of one kind of this process, in index order."""
    for platform in _PLATFORMS.get(kind.upper(), (kind.lower(),)):
        with contextlib.suppress(RuntimeError):
            return jax.local_devices(backend=platform)
    return []


def name_of(device: Device) -> str:
    """Returns the canonical name of a JAX device.

    >>> name_of(jax.devices("cpu")[0])
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    kind = next((k for k, names in _PLATFORMS.items() if device.platform in names), None)
    kind = kind or device.platform.upper()
    peers = devices_of_kind(kind)
    index = peers.index(device) if device in peers else device.id
    return str(DeviceSpec(kind=kind, index=index))


def default_devices() -> list[Device]:
    """Returns the default devices of a strategy."""
    return devices_of_kind("GPU") or devices_of_kind("TPU") or devices_of_kind("CPU")


def current() -> Device:
    """Returns the device of eager results."""
    explicit = _current.get()
    if explicit is not None:
        return explicit
    configured = getattr(jax.config, "jax_default_device", None)
    if isinstance(configured, Device):
        return configured
    return jax.local_devices()[0]


def explicit() -> Device | None:
    """Returns the device of the innermost `device(...)` block; None without."""
    return _current.get()


def requested() -> DeviceSpec | None:
    """Returns the parsed name of the innermost `device(...)` block; None without."""
    return _requested.get()


@contextlib.contextmanager
def device(name: str | Device | None) -> Iterator[None]:
    """Creates arrays and variables inside the block on one device.

    >>> with device("CPU:0"):
    ...     name_of(current())
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    if name is None:
        yield
        return
    resolved = resolve(name)
    token = _current.set(resolved)
    request = _requested.set(parse(name) if isinstance(name, str) else None)
    try:
        with jax.default_device(resolved):
            yield
    finally:
        _requested.reset(request)
        _current.reset(token)


def set_virtual_cpu_devices(count: int) -> None:
    """Splits this machine's CPU into `count` devices.

    Call it before the first JAX computation. Idempotent for the same number.

    Raises:
      InvalidArgumentError: `count` is not a positive int.
      ContextError: JAX has started.

    >>> import subprocess, sys
    >>> program = "import jax, replicax as rx; rx.set_virtual_cpu_devices(2); print(jax.devices())"
    >>> print(subprocess.check_output([sys.executable, "-c", program], text=True).strip())
    [CpuDevice(id=0), CpuDevice(id=1)]
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise errors.InvalidArgumentError(
            "The number of virtual CPU devices must be 1 or more",
            f"{count!r} was given",
            "Pass a positive int.",
        )
    # Threads for two programs: with fewer, XLA's CPU client can deadlock.
    if not settings.NPROC.is_set:
        settings.NPROC.write(str(max(os.cpu_count() or 1, 2 * count)))
    try:
        jax.config.update("jax_num_cpu_devices", count)
        gate.set_pool(settings.as_index(settings.NPROC.read()) or 0, count)
    except RuntimeError:
        if len(jax.devices("cpu")) == count:
            return
        raise errors.ContextError(
            f"set_virtual_cpu_devices({count}) must run before JAX starts",
            f"JAX already runs with {len(jax.devices('cpu'))} CPU devices",
            "Call it right after the imports, before any array is made.",
        ) from None


def resolve_all(names: Sequence[str | Device]) -> tuple[Device, ...]:
    """Resolves several devices, which must differ."""
    resolved = tuple(resolve(name) for name in names)
    if len(set(resolved)) != len(resolved):
        raise errors.InvalidArgumentError(
            "The devices of a strategy must differ",
            f"{[name_of(d) for d in resolved]} holds one of them twice",
            "Name each device once; for several replicas on one device pass `virtual_replicas=`.",
        )
    return resolved


def _available() -> str:
    return ", ".join(name_of(d).rpartition("device:")[2] for d in jax.local_devices())
