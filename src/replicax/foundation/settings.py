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
# The directory in which the tasks of a job on this host can be observed; a launcher sets it.
REPLICAX_JOB_DIR = Setting("REPLICAX_JOB_DIR")
# "off" if tasks must not be observable.
REPLICAX_OBSERVE = Setting("REPLICAX_OBSERVE")
# The address at which tasks serve metrics for Prometheus: "host:port", a port, or "on".
REPLICAX_METRICS = Setting("REPLICAX_METRICS")
# A directory in which tasks record, from their start, what they do; see replicax.profiler.
REPLICAX_TRACE = Setting("REPLICAX_TRACE")
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
# The platforms of JAX; servers and coordinators leave accelerators to the workers.
JAX_PLATFORMS = Setting("JAX_PLATFORMS")
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
# A Slurm job: its number, its nodes, and the tasks that it asked for on each.
SLURM_JOB_ID = Setting("SLURM_JOB_ID")
SLURM_JOB_NODELIST = Setting("SLURM_JOB_NODELIST")
SLURM_TASKS_PER_NODE = Setting("SLURM_TASKS_PER_NODE")
# Set in the pods of an indexed Job of Kubernetes: the index of the pod.
JOB_COMPLETION_INDEX = Setting("JOB_COMPLETION_INDEX")
# Set in every pod of Kubernetes: the address of its API.
KUBERNETES_SERVICE_HOST = Setting("KUBERNETES_SERVICE_HOST")
# The Ray cluster to connect to, and whether equal lines of different tasks are shown once.
RAY_ADDRESS = Setting("RAY_ADDRESS")
RAY_DEDUP_LOGS = Setting("RAY_DEDUP_LOGS")
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


def of_this_process(defaults: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child: that of this process, with defaults and changes.

    >>> of_this_process({"HOME": "/"}, {"REPLICAX_EXAMPLE": "1"})["REPLICAX_EXAMPLE"]
    '1'
    """
    return {**defaults, **os.environ, **changes}


def for_task(changes: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    """Returns the environment of a task process on this machine, which computes on the CPU.

    Args:
      changes: Further variables.
      num_threads: The number of threads that it computes with; None for XLA's default.
    """
    found = {**os.environ, JAX_PLATFORMS: "cpu", "PYTHONUNBUFFERED": "1"}
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


def with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of this process with changes, for one that it starts.

    The cluster of this process is not that of its children.
    """
    found = {name: value for name, value in os.environ.items() if name != TF_CONFIG}
    return {**found, **changes}


def visible_gpus() -> list[str]:
    """Returns the GPUs that this process may use: of CUDA_VISIBLE_DEVICES, or of its driver."""
    given = CUDA_VISIBLE_DEVICES.read()
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    try:
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


def for_other_hosts() -> dict[str, str]:
    """Returns the variables of this process that its tasks on other hosts need as well."""
    prefixes = ("JAX_", "REPLICAX_", "XLA_", "KERAS_", "PYTHONPATH")
    return {
        name: value
        for name, value in os.environ.items()
        # A directory of this host.
        if name.startswith(prefixes) and name != REPLICAX_KEYS
    }


def for_launched_task(cores: int, num_devices: int | None, job: str) -> dict[str, str]:
    """Returns the variables that let the tasks of one host share its cores.

    Args:
      cores: The cores that the task may use.
      num_devices: The CPU devices of a worker; None for JAX's own default.
      job: The job of the task.

    >>> for_launched_task(4, 2, "worker")["NPROC"]
    '4'
    >>> for_launched_task(1, None, "ps")["JAX_PLATFORMS"]
    'cpu'
    """
    devices = num_devices or 1
    found = {
        "PYTHONUNBUFFERED": "1",
        # Threads for two programs: see `devices.set_virtual_cpu_devices`.
        NPROC: str(max(2 * devices, cores)),
        "OMP_NUM_THREADS": str(cores),
    }
    if cores == 1:
        flags = f"{XLA_FLAGS.read('')} --xla_cpu_multi_thread_eigen=false"
        found[XLA_FLAGS] = flags.strip()
    if job in ("chief", "ps"):
        # They hold no batch: an accelerator is for the workers.
        found[JAX_PLATFORMS] = JAX_PLATFORMS.read("cpu")
    elif num_devices is not None:
        found["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    return found


def choose_keras_backend() -> None:
    """Lets Keras, which is about to be imported, compute with JAX if nothing else was chosen."""
    if not KERAS_BACKEND.is_set:
        KERAS_BACKEND.write("jax")


def is_observable() -> bool:
    """Tells whether tasks answer requests about themselves; REPLICAX_OBSERVE=off prevents it."""
    value = REPLICAX_OBSERVE.read("")
    if value in ("", "on", "off"):
        return value != "off"
    raise errors.InvalidArgumentError(
        f"The environment variable {REPLICAX_OBSERVE} must be 'on' or 'off'",
        f"it is {value!r}",
        "Correct it, or remove it.",
    )


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
