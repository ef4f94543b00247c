"""Every environment variable that the library reads or writes.

No other module of the library uses `os.environ`; a test checks it. Variables that only JAX or
another library reads (JAX_PLATFORMS, JAX_TRACEBACK_FILTERING) appear here if the library sets them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import overload

from replicax.foundation import errors


class Setting(str):
    """The name of an environment variable; its value is read on every call.

    >>> Setting("REPLICAX_EXAMPLE").read()
    >>> Setting("REPLICAX_EXAMPLE").read("none")
    'none'
    """

    __slots__ = ()

    @overload
    def read(self) -> str | None: ...

    @overload
    def read(self, default: str) -> str: ...

    @overload
    def read(self, default: str | None) -> str | None: ...

    def read(self, default: str | None = None) -> str | None:
        """Returns the value; the default if the variable is not set."""
        return os.environ.get(self, default)

    def write(self, value: str) -> None:
        """Sets the variable, for this process and those that it starts later."""
        os.environ[self] = value

    @property
    def is_set(self) -> bool:
        """Whether the variable is set, also to an empty text."""
        return self in os.environ


# Of replicax itself.

# The directory with the certificates of the cluster; connections over TCP require them. Or three
# files: the certificates of the authority, the certificate of this task, and its private key.
REPLICAX_KEYS = Setting("REPLICAX_KEYS")
REPLICAX_TLS_CA = Setting("REPLICAX_TLS_CA")
REPLICAX_TLS_CERT = Setting("REPLICAX_TLS_CERT")
REPLICAX_TLS_KEY = Setting("REPLICAX_TLS_KEY")
# The timeouts of the coordinator: "default", or "fast" for tests.
REPLICAX_TIMING = Setting("REPLICAX_TIMING")
# "full" keeps the frames of the library in tracebacks.
REPLICAX_TRACEBACK = Setting("REPLICAX_TRACEBACK")

# Of Keras: which library computes.
KERAS_BACKEND = Setting("KERAS_BACKEND")

# Of this machine and of JAX.

# The private directory of the user for sockets; a directory in TMPDIR is used without it.
XDG_RUNTIME_DIR = Setting("XDG_RUNTIME_DIR")
# The number of threads of XLA's CPU client; `set_virtual_cpu_devices` sets it if it is not set.
NPROC = Setting("NPROC")
# Flags of XLA; a local cluster adds some for its tasks.
XLA_FLAGS = Setting("XLA_FLAGS")
# The GPUs that a process may use; SlurmClusterResolver narrows it to those of its task.
CUDA_VISIBLE_DEVICES = Setting("CUDA_VISIBLE_DEVICES")

# Of clusters.

# The cluster and this task, as JSON; see TFConfigClusterResolver.
TF_CONFIG = Setting("TF_CONFIG")
# A step of a Slurm job: its nodes, the tasks of each, their number, and the rank, the node and the
# GPUs of this task.
SLURM_STEP_NODELIST = Setting("SLURM_STEP_NODELIST")
SLURM_STEP_TASKS_PER_NODE = Setting("SLURM_STEP_TASKS_PER_NODE")
SLURM_STEP_NUM_TASKS = Setting("SLURM_STEP_NUM_TASKS")
SLURM_PROCID = Setting("SLURM_PROCID")
SLURM_NODEID = Setting("SLURM_NODEID")
SLURM_GPUS_ON_NODE = Setting("SLURM_GPUS_ON_NODE")
# A Cloud TPU: the addresses of its hosts on GKE, its name, or the names of its hosts and the index
# of this host; and the description of the API.
KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS = Setting("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
TPU_NAME = Setting("TPU_NAME")
TPU_WORKER_HOSTNAMES = Setting("TPU_WORKER_HOSTNAMES")
TPU_WORKER_ID = Setting("TPU_WORKER_ID")
TPU_API_DISCOVERY_URL = Setting("TPU_API_DISCOVERY_URL")
# The metadata server of Compute Engine.
GCE_METADATA_HOST = Setting("GCE_METADATA_HOST")


def as_index(value: object) -> int | None:
    """Returns the index that a value, or a text, denotes; None for anything else.

    >>> as_index("12"), as_index(0), as_index("-1"), as_index("x"), as_index(True)
    (12, 0, None, None, None)
    """
    text = str(value)
    is_index = isinstance(value, int | str) and text.isascii() and text.isdigit()
    return int(text) if is_index and len(text) < 10 else None


def for_task(changes: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    """Returns the environment of a task process on this machine, which computes on the CPU.

    Args:
      changes: Further variables.
      num_threads: The number of threads that it computes with; None for XLA's default.
    """
    found = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    # Counts the threads for the devices of this process.
    found.pop(NPROC, None)
    if num_threads is not None:
        found[NPROC] = str(num_threads)
    if num_threads == 1:
        flags = f"{found.get(XLA_FLAGS, '')} --xla_cpu_multi_thread_eigen=false"
        found[XLA_FLAGS] = flags.strip()
    return {**found, **changes}


def for_group_task(changes: Mapping[str, str], num_devices: int, num_tasks: int) -> dict[str, str]:
    """Returns the environment of one of several processes of a sync group on this machine.

    Args:
      changes: Further variables.
      num_devices: The number of CPU devices of the process.
      num_tasks: The number of processes, which share the cores.
    """
    # Threads for two programs: see `devices.set_virtual_cpu_devices`.
    found = for_task({}, max(2 * num_devices, (os.cpu_count() or 1) // num_tasks))
    # For programs that do not call `set_virtual_cpu_devices`.
    found["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    # The cluster of this process is not that of its children.
    found.pop(TF_CONFIG, None)
    return {**found, **changes}


def choose_keras_backend() -> None:
    """Lets Keras, which is about to be imported, compute with JAX if nothing else was chosen."""
    if not KERAS_BACKEND.is_set:
        KERAS_BACKEND.write("jax")


def wants_fast_timing() -> bool:
    """Tells whether REPLICAX_TIMING selects the short timeouts for tests."""
    name = REPLICAX_TIMING.read("")
    if name in ("", "default", "fast"):
        return name == "fast"
    raise errors.InvalidArgumentError(
        f"The environment variable {REPLICAX_TIMING} must be 'default' or 'fast'",
        f"it is {name!r}",
        "Correct it, or remove it.",
    )
