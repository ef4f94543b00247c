"""Python processes of tests that start without importing the library again.

An import of JAX and the library takes more than a second of processor time, and the tests start
hundreds of processes. `install` replaces `subprocess.Popen`: tasks of clusters, and the programs in
tests/support/programs, are forked from a process that has imported everything and done nothing
else (`warm_process.py`). They have parameters, an environment, descriptors and a process group of
their own, and they are children of the process that starts them, as any others. Other commands are
started as usual, and so are all with REPLICAX_TEST_COLD_STARTS=1, as in `make test-all`.

There are two such processes, used in turn: two workers of a group have different hash seeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from warm_process import MOST_BYTES, MOST_FDS

from replicax.launch import task_process

VARIABLE = "REPLICAX_TEST_COLD_STARTS"
_HERE = Path(__file__).parent
_PROGRAMS = str(_HERE / "programs") + os.sep
_MODULES = ("replicax", "replicax.launch.run_function")
# Variables that are read when a process starts, except those of `warm_process._configure`.
_READ_AT_START = ("JAX_", "PYTHON")
_CONFIGURED = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PYTHONUNBUFFERED")
# `prctl` option: descendants that lose their parent become children of this process.
_PR_SET_CHILD_SUBREAPER = 36
_MOST_SECONDS = 60.0
# The words before a command that ends with this process, see `task_process.with_parent`.
_NUM_WORDS_WITH_PARENT = len(task_process.with_parent([]))

_ColdPopen = subprocess.Popen
_signature = inspect.signature(_ColdPopen._execute_child)  # type: ignore[attr-defined]
# The environment of the processes that others are forked from.
_environment: dict[str, str] = {}
_started: dict[int, _WarmProcess] = {}
_numbers: Iterator[int] = itertools.cycle(range(2))
_lock = threading.Lock()


def is_wanted() -> bool:
    """Whether the run of the tests may fork processes."""
    return sys.platform == "linux" and not os.environ.get(VARIABLE)


def install() -> None:
    """Lets this process start others without their imports, from now on."""
    if not _environment:
        _environment.update(os.environ)
    subprocess.Popen = WarmPopen  # type: ignore[misc]


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Starts all processes as usual, for tests of how processes start, or of their command line."""
    installed, subprocess.Popen = subprocess.Popen, _ColdPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = installed  # type: ignore[misc]


def close() -> None:
    """Ends the processes that others are forked from."""
    with _lock:
        while _started:
            _started.popitem()[1].close()


def kept_processes() -> set[int]:
    """Returns the processes that others are forked from, which live as long as this one."""
    return {one.process.pid for one in _started.values()}


class _WarmProcess:
    """A process that has imported the library."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_MOST_SECONDS)
        env = {k: v for k, v in _environment.items() if k not in (*_CONFIGURED, "XLA_FLAGS")}
        code = f"import sys; sys.path.insert(1, {str(_HERE)!r}); import warm_process; "
        code += "del sys.path[1], sys; warm_process.main()"
        with theirs:
            self.process = _ColdPopen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def start(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Returns the id of a new process."""
        data = json.dumps(request).encode()
        assert len(data) < MOST_BYTES
        _adopt_orphans(True)
        try:
            socket.send_fds(self._control, [data], fds)
            return int(self._control.recv(32))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        self._control.close()
        self.process.wait(_MOST_SECONDS)


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """A process of a program, which is forked if that makes no difference to the program."""

    def _execute_child(self, *given: Any) -> None:
        bound = _signature.bind(self, *given)
        call = bound.arguments
        words = _program(call)
        env = dict(os.environ if call["env"] is None else call["env"])
        if words is None or _start_of(env) != _start_of(_environment):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        with_parent = task_process.with_parent([])
        is_with_parent = words[: len(with_parent)] == with_parent
        if is_with_parent:
            words = words[len(with_parent) :]
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        targets = [0, 1, 2, *sorted(call["pass_fds"])]
        fds = [given if given >= 0 else i for i, given in enumerate(streams)] + targets[3:]
        assert len(fds) <= MOST_FDS
        sys.stdout.flush()
        sys.stderr.flush()
        request = {
            "words": words[1:],
            "env": env,
            "directory": os.fspath(call["cwd"] or os.getcwd()),
            "fds": targets,
            "parent": os.getpid() if is_with_parent else None,
            "new_session": call["start_new_session"],
            "process_group": call["process_group"],
        }
        with _lock:
            number = next(_numbers)
            if number not in _started:
                _started[number] = _WarmProcess()
            self.pid = _started[number].start(request, fds)
        self._child_created = True
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(call[name] for name in ("errread", "errwrite")),
        )


def _program(call: Mapping[str, Any]) -> list[str] | None:
    """Returns the command of a process that can be forked; None for others."""
    usual = {"preexec_fn": None, "shell": False, "gid": None, "gids": None, "uid": None}
    usual |= {"umask": -1, "close_fds": True}
    is_usual = all(call[name] == value for name, value in usual.items())
    if not is_usual or isinstance(call["args"], str | bytes | os.PathLike):
        return None
    words = [os.fspath(word) for word in call["args"]]
    if call["executable"] not in (None, sys.executable, words[0]):
        return None
    rest = words
    if words[:_NUM_WORDS_WITH_PARENT] == task_process.with_parent([]):
        rest = words[_NUM_WORDS_WITH_PARENT:]
    if rest[:1] != [sys.executable] or len(rest) < 2:
        return None
    is_module = rest[1] == "-m" and rest[2] in _MODULES
    return words if is_module or rest[1].startswith(_PROGRAMS) else None


def _start_of(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that must be those of the processes that others are forked from."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_READ_AT_START) and name not in _CONFIGURED
    }


def _adopt_orphans(is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
