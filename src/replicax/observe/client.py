"""Asks the tasks of a running job, from another process of the same user."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.foundation import errors
from replicax.observe import job_directory
from replicax.observe.endpoint import receive_line

_MOST_REPLY_BYTES = 64 * 1024**2
_CREDENTIALS = struct.Struct("3i")
_TIMEOUT_S = 3.0
# How many tasks are asked at a time.
_MOST_AT_ONCE = 16
# The task that a launcher is in the directory of its job.
LAUNCHER = "launcher"
# Between two looks whether the tasks of other hosts have answered.
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class Answer:
    """The reply of one task, or why there is none.

    Attributes:
      path: Its socket.
      pid: The process that listens there, as the kernel tells it; None if nothing listens.
      reply: What it replied; None without a reply.
      error: Why it has not replied; empty if it has.
      host: The host that it runs on, for the launcher; empty for this one.
      is_gone: Whether nothing listens there: the task has ended.
    """

    path: Path
    pid: int | None = None
    reply: Any = None
    error: str = ""
    host: str = ""
    is_gone: bool = False

    @property
    def name(self) -> str:
        """The name of its socket, such as "job-worker-task-0"."""
        return self.path.stem


def find_job(name: str | None = None) -> Path:
    """Returns the directory of a running job.

    Args:
      name: The name of its directory, its path, or a beginning of its name; None if one job runs.

    Raises:
      NotFoundError: No job, or no such job, runs.
      InvalidArgumentError: Several do.
    """
    if name is not None and os.sep in name:
        directory = Path(name)
        if not job_directory.sockets(directory):
            raise errors.NotFoundError(
                "The directory of a job has a socket for each of its tasks",
                f"{name!r} has none",
                "Check the path; the job may have ended.",
            )
        return directory
    jobs = job_directory.running()
    found = [job for job in jobs if name is None or job.name == name]
    if not found and name is not None:
        found = [job for job in jobs if job.name.startswith(name)]
    names = ", ".join(job.name for job in jobs) or "none"
    if not found:
        raise errors.NotFoundError(
            "A job of this user must run on this host"
            if name is None
            else f"Job {name!r} must run",
            f"these run: {names}",
            "Start it, or pass the directory that its REPLICAX_JOB_DIR names.",
        )
    if len(found) > 1:
        raise errors.InvalidArgumentError(
            "One job must be chosen",
            f"these run: {names}",
            "Pass the name of one of them.",
        )
    return found[0]


def ask(
    path: Path,
    request: str,
    arguments: Mapping[str, object] | None = None,
    timeout: float = _TIMEOUT_S,
) -> Answer:
    """Asks one task; its silence and its errors are in the answer.

    Args:
      path: Its socket.
      request: The name of the request.
      arguments: Its arguments.
      timeout: The seconds that each part of the exchange may take.
    """
    pid: int | None = None
    try:
        with job_directory.connect(path, timeout) as connection:
            pid = _peer(connection)
            return _exchange(connection, path, pid, request, arguments, timeout)
    except (OSError, ValueError) as error:
        is_gone = isinstance(error, ConnectionRefusedError | FileNotFoundError)
        return Answer(path, pid, error=str(error) or type(error).__name__, is_gone=is_gone)


def ask_all(
    directory: Path,
    request: str,
    arguments: Mapping[str, object] | None = None,
    timeout: float = _TIMEOUT_S,
) -> list[Answer]:
    """Asks all tasks of a job on this host, and its launcher, several at a time."""
    return ask_each(job_directory.sockets(directory), request, arguments, timeout)


def ask_each(
    paths: Sequence[Path],
    request: str,
    arguments: Mapping[str, object] | None = None,
    timeout: float = _TIMEOUT_S,
) -> list[Answer]:
    """Asks the tasks at these sockets, several at a time."""
    if not paths:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(paths), _MOST_AT_ONCE)) as pool:
        return list(pool.map(lambda path: ask(path, request, arguments, timeout), paths))


def launcher_of(directory: Path) -> Path:
    """Returns the socket of the launcher of a job, if it has one on this host."""
    return directory / f"{LAUNCHER}{job_directory.SUFFIX}"


def task_of(path: Path) -> str:
    """Returns the task of a socket.

    >>> task_of(Path("job-ps-task-1.sock")), task_of(Path("launcher.sock"))
    ('/job:ps/task:1', 'launcher')
    """
    job, separator, index = path.stem.removeprefix("job-").rpartition("-task-")
    return f"/job:{job}/task:{index}" if separator and path.stem[:4] == "job-" else path.stem


def ask_hosts(
    directory: Path,
    request: str,
    arguments: Mapping[str, object] | None = None,
    timeout: float = _TIMEOUT_S,
    *,
    task: str | None = None,
    files: Path | None = None,
) -> list[Answer]:
    """Asks the tasks of a job on other hosts than this one, through its launcher.

    Without a launcher on this host that has started tasks on others, there are no answers.

    Args:
      directory: The directory of the job.
      request: The name of the request.
      arguments: Its arguments.
      timeout: The seconds to wait for all answers; those that came are returned.
      task: The task that is asked; None for all.
      files: Where the files of a trace go.
    """
    launcher = launcher_of(directory)
    deadline = time.monotonic() + timeout
    wanted: dict[str, object] = {
        "request": request,
        "arguments": dict(arguments or {}),
        "task": task,
        "directory": None if files is None else str(files),
    }
    begun = ask(launcher, "ask_hosts", wanted, timeout).reply if launcher.exists() else None
    if not isinstance(begun, dict) or not begun["hosts"]:
        return []
    while True:
        reply = ask(launcher, "hosts_answers", {"number": begun["number"]}, timeout).reply
        if not isinstance(reply, dict):
            return []
        if reply["is_complete"] or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return [
        Answer(
            directory / f"{found['name']}{job_directory.SUFFIX}",
            found["pid"],
            found["reply"],
            found["error"],
            found["host"],
        )
        for found in reply["answers"]
    ]


def kill_through_launcher(directory: Path, task: str, pid: int) -> int:
    """Has the launcher of a job kill the process of a task on another host.

    Raises:
      UnavailableError: It does not run any more, or the launcher does not.
    """
    found = ask(launcher_of(directory), "kill", {"task": task, "pid": pid})
    if not isinstance(found.reply, dict):
        raise errors.UnavailableError(
            f"The launcher of {directory.name} has not killed {task}: {found.error}"
        )
    return pid


def kill(path: Path, number: signal.Signals = signal.SIGKILL, timeout: float = _TIMEOUT_S) -> int:
    """Sends a signal to the process of a task, and returns its id.

    The signal reaches the process that listens at the socket, or none: it is sent through a
    descriptor of the process, which was opened while it listened.

    Raises:
      UnavailableError: No process listens there.
    """
    try:
        with job_directory.connect(path, timeout) as connection:
            pid = _peer(connection)
            descriptor = os.pidfd_open(pid)
            try:
                # Listens there still, so the descriptor is that of the listener.
                with job_directory.connect(path, timeout) as again:
                    if _peer(again) != pid:
                        raise ProcessLookupError("it was replaced by another process")
                signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)
            return pid
    except OSError as error:
        raise errors.UnavailableError(
            f"The task {path.stem} does not run on this host ({error.strerror or error}). "
            "`replicax top` shows those that do."
        ) from error


def _exchange(
    connection: socket.socket,
    path: Path,
    pid: int,
    request: str,
    arguments: Mapping[str, object] | None,
    timeout: float,
) -> Answer:
    line = json.dumps({"request": request, "arguments": dict(arguments or {})})
    connection.sendall(line.encode() + b"\n")
    received = receive_line(connection, _MOST_REPLY_BYTES, timeout)
    if received is None:
        return Answer(path, pid, error="it closed the connection")
    found = json.loads(received)
    error = found.get("error") if isinstance(found, dict) else "not a reply"
    if error is not None:
        return Answer(path, pid, error=str(error))
    return Answer(path, pid, found.get("reply"))


def _peer(connection: socket.socket) -> int:
    """Returns the id of the process that listens at the other end."""
    with contextlib.suppress(struct.error):
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(found)[0]
        if pid > 0:
            return pid
    raise OSError("the process of the task is in another namespace")
