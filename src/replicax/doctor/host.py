"""Clocks, limits, memory and the runtime directory of this host."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from replicax.doctor.findings import Check, Finding, Level
from replicax.foundation import private_directories
from replicax.observe import job_directory

# A task needs one descriptor per connection, and some for files.
_FEW_DESCRIPTORS, _TOO_FEW_DESCRIPTORS = 4096, 256
# A task that has imported JAX takes a quarter of a GiB, before it holds arrays.
_LITTLE_MEMORY, _TOO_LITTLE_MEMORY = 2 << 30, 512 << 20
_FEW_THREADS = 512
# The error of `adjtimex` above which two hosts may disagree noticeably.
_CLOCK_ERROR_S = 0.5
_UNSYNCHRONIZED = 5
# struct timex of Linux is 208 bytes; `maxerror` is its fourth long.
_TIMEX_BYTES, _MAXERROR_INDEX = 208, 3
_CGROUP = Path("/sys/fs/cgroup")


def checks() -> list[Check]:
    """Returns the checks of this host."""
    return [
        Check("clock", check_clock),
        Check("descriptors", check_descriptors),
        Check("memory", check_memory),
        Check("processes", check_processes),
        Check("runtime directory", check_runtime_directory),
    ]


def check_clock() -> Iterator[Finding]:
    """Asks the kernel whether something keeps the clock right."""
    advice = "Run chrony or systemd-timesyncd on each host: traces and logs of hosts are compared."
    found = _kernel_clock()
    if found is None:
        yield Finding("clock", Level.NOTE, "the kernel does not tell whether its clock is right")
    elif not found[0]:
        yield Finding("clock", Level.WARNING, "nothing synchronizes the clock of this host", advice)
    elif found[1] > _CLOCK_ERROR_S:
        text = f"the clock may be wrong by {found[1]:.2f} s"
        yield Finding("clock", Level.WARNING, text, advice)
    else:
        text = f"synchronized, wrong by {found[1] * 1000:.1f} ms at most"
        yield Finding("clock", Level.OK, text)


def _kernel_clock() -> tuple[bool, float] | None:
    """Returns whether the clock is synchronized, and its maximum error in seconds."""
    if platform.system() != "Linux":
        return None
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (AttributeError, OSError):
        return None
    buffer = (ctypes.c_long * (_TIMEX_BYTES // ctypes.sizeof(ctypes.c_long)))()
    state = adjtimex(ctypes.byref(buffer))
    if state < 0:
        return None
    return state != _UNSYNCHRONIZED, buffer[_MAXERROR_INDEX] / 1e6


def check_descriptors() -> Iterator[Finding]:
    """Compares the limit on open files with what a task needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} open files, which tasks raise to {_limit(hard)} at most"
    advice = "Raise the hard limit: `ulimit -Hn 65536`, or LimitNOFILE= of the service."
    if hard == resource.RLIM_INFINITY or hard >= _FEW_DESCRIPTORS:
        yield Finding("descriptors", Level.OK, text)
    elif hard >= _TOO_FEW_DESCRIPTORS:
        yield Finding("descriptors", Level.WARNING, text, advice)
    else:
        yield Finding("descriptors", Level.PROBLEM, text, advice)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def check_memory() -> Iterator[Finding]:
    """Compares free memory, and the limits on it, with what a task needs."""
    limits = {"free": _free_memory(), "left to this control group": _group_memory()}
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limits["allowed by `ulimit -v`"] = None if soft == resource.RLIM_INFINITY else soft
    known = {name: size for name, size in limits.items() if size is not None}
    if not known:
        yield Finding("memory", Level.NOTE, "the size of the memory is unknown")
        return
    text = ", ".join(f"{size / 2**30:.1f} GiB {name}" for name, size in known.items())
    least = min(known.values())
    advice = "End other processes, raise the limit, or use a larger host."
    if least < _TOO_LITTLE_MEMORY:
        yield Finding("memory", Level.PROBLEM, f"{text}: too little for a task", advice)
    elif least < _LITTLE_MEMORY:
        yield Finding("memory", Level.WARNING, f"{text}: enough for few tasks", advice)
    else:
        yield Finding("memory", Level.OK, text)


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":", 1) for line in lines if ":" in line)
    found = sizes.get("MemAvailable", "").split()
    return int(found[0]) * 1024 if found else None


def _group_file(name: str) -> int | None:
    """Returns a number of the control group of this process; None for "max" or no such file."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    # In a container, the root of the file system is the group itself.
    for directory in (_CGROUP / own.lstrip("/"), _CGROUP):
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _group_memory() -> int | None:
    most, used = _group_file("memory.max"), _group_file("memory.current")
    return None if most is None or used is None else max(most - used, 0)


def check_processes() -> Iterator[Finding]:
    """Compares the limits on processes and threads with what a task needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most, used = _group_file("pids.max"), _group_file("pids.current")
    left = None if most is None or used is None else most - used
    limits = [n for n in (left, None if soft == resource.RLIM_INFINITY else soft) if n is not None]
    cores = len(os.sched_getaffinity(0))
    text = f"{cores} processors, {min(limits):,} more threads" if limits else f"{cores} processors"
    if limits and min(limits) < _FEW_THREADS:
        advice = "Raise `ulimit -u`, or pids.max of the control group: JAX starts many threads."
        yield Finding("processes", Level.WARNING, text, advice)
    else:
        yield Finding("processes", Level.OK, text)


def check_runtime_directory() -> Iterator[Finding]:
    """Checks the private directory of sockets, and lists the jobs that run."""
    directory = private_directories.of_user()
    if not os.access(directory, os.W_OK | os.X_OK):
        advice = "Set XDG_RUNTIME_DIR to a directory made with `mkdir -m 700`."
        yield Finding(
            "runtime directory", Level.PROBLEM, f"{str(directory)!r} cannot be written", advice
        )
        return
    jobs = ", ".join(path.name for path in job_directory.running())
    text = f"{directory}; running jobs: {jobs}" if jobs else str(directory)
    yield Finding("runtime directory", Level.OK, text)
