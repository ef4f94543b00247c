"""A Python process that has imported the library, and becomes other processes: it forks.

Run by `warm_starts.py` as `python -c "import warm_process; warm_process.main()" FD`. It starts no
thread and no device, and never runs a program itself. A request names the program; the answer is
the id of the process that runs it, which is a child of the process that asked.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import socket
import sys
import threading
from typing import Any

import ignored_exceptions

# What tasks of clusters and programs of tests import.
_MODULES = (
    *("replicax", "replicax.cli.main", "replicax.cli.serve", "replicax.coordinator"),
    *("replicax.group.group", "replicax.launch.function_files", "replicax.testing"),
    *("replicax.input.nodes.indexed", "replicax.input.nodes.streams"),
    *("replicax.worker.error_reports", "replicax.worker.functions"),
    *("cloudpickle", "grain", "numpy", "optax", "psutil", "pytest"),
    *("jaxlib.mlir.dialects.builtin", "jaxlib.mlir.dialects.mhlo"),
)
MOST_BYTES = 1 << 17
MOST_FDS = 32
# `prctl` option: the signal that this process gets when its parent exits.
_PR_SET_PDEATHSIG = 1
# Above the numbers that programs are given.
_FIRST_HIGH_FD = 500


def main() -> None:
    """Waits for requests; returns in a new process, when its program has ended."""
    control = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD, _FIRST_HIGH_FD))
    os.close(int(sys.argv[1]))
    before = dict(os.environ)
    for name in _MODULES:
        importlib.import_module(name)
    from jax._src import xla_bridge

    # Some modules log with a root logger that has no handler, which adds one.
    logging.root.handlers.clear()
    # Such as the level of logging, which JAX sets if it is not set.
    added = {k: v for k, v in os.environ.items() if k not in before}
    # With devices it would have threads, which a fork does not copy.
    assert not xla_bridge.backends_are_initialized()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_FDS)
        if not data:
            # The one that needs it has ended.
            os._exit(0)
        request = json.loads(data)
        if _is_new_process(control, request):
            control.close()
            _become(request, fds, added)
            return
        for fd in fds:
            os.close(fd)


def _is_new_process(control: socket.socket, request: dict[str, Any]) -> bool:
    """Forks twice: the process between ends, so that the new one gets another parent."""
    report_reading, report = os.pipe()
    go, go_writing = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        if request["new_session"]:
            os.setsid()
        elif request["process_group"] >= 0:
            os.setpgid(0, request["process_group"])
        os.write(report, b"%d" % os.getpid())
        for fd in (report_reading, report, go_writing):
            os.close(fd)
        os.read(go, 1)
        os.close(go)
        return True
    os.close(report)
    os.close(go)
    os.waitpid(between, 0)
    control.send(os.read(report_reading, 32))
    os.close(report_reading)
    # The new process has its parent, which knows it: now it may run.
    os.close(go_writing)
    return False


def _become(request: dict[str, Any], fds: list[int], added: dict[str, str]) -> None:
    """Makes this process what a new one would be, and runs the program."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(high, request["fds"], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update({**added, **request["env"]})
    if (parent := request["parent"]) is not None:
        # As the words do that `task_process.with_parent` puts before a command.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent of this task has exited")
    _configure()
    words: list[str] = request["words"]
    sys.orig_argv = [sys.executable, *words]
    if path := os.environ.get(ignored_exceptions.VARIABLE):
        ignored_exceptions.install(path)
    namespace = sys.modules["__main__"].__dict__
    namespace.pop("warm_process", None)
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        namespace["__file__"] = words[0]
        with open(words[0], "rb") as source:
            code = compile(source.read(), words[0], "exec")
        exec(code, namespace)


def _configure() -> None:
    """Does what the interpreter, JAX and numpy do with the environment when they start."""
    import jax
    import numpy as np

    if os.environ.get("PYTHONUNBUFFERED"):
        # The old one stays open: nothing may close the descriptor.
        sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(line_buffering=True, write_through=True)
    if platforms := os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", platforms)
    if num_devices := os.environ.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", int(num_devices))
    # Its state is the same in all that were forked.
    np.random.seed()
