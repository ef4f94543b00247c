"""`Endpoint`: the socket at which one task answers requests about itself.

A connection carries one request and one reply, each one line of JSON:

    {"request": "status", "arguments": {}}
    {"reply": {...}}        or        {"error": "what went wrong"}

Every task answers "ping", "requests", "status" and "stack", and what `requests` and `recording`
register.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from replicax.foundation import errors, settings, spans
from replicax.observe import (
    job_directory,
    metrics,
    process_facts,
    progress,
    recording,
    requests,
)

_log = logging.getLogger(__name__)

# Returns what a task tells about itself, for its status.
Status = Callable[[], Mapping[str, object]]

# The seconds that one connection may take to send its request, and to receive the reply. Others
# wait in the backlog meanwhile.
_RECEIVE_S = 1.0
_SEND_S = 5.0
# Those who ask a process that is stopped leave a connection each.
_BACKLOG = 1024
_MOST_REQUEST_BYTES = 64 * 1024
_MOST_REPLY_BYTES = 32 * 1024**2
# The pause after an error of `accept`, such as too many open files.
_ACCEPT_PAUSE_S = 0.2
# The seconds that `close` waits for the thread.
_CLOSE_S = 1.0
# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")

_open: weakref.WeakSet[Endpoint] = weakref.WeakSet()


class Endpoint:
    """Answers requests about one task, in one thread, from its creation until `close`.

    Args:
      task: The name of the task, such as "/job:worker/task:0".
      directory: The directory of its job.
      status: Returns what the task knows; called in the thread of the endpoint, see
        `requests.Handler` for what it must not do.
      handlers: Further requests that this task answers.

    Raises:
      OSError: The socket cannot be created.
      DistributeError: The directory is not private, or locked for too long.
    """

    def __init__(
        self,
        task: str,
        directory: Path,
        status: Status,
        handlers: Mapping[str, requests.Handler] | None = None,
    ) -> None:
        self.task = task
        self.directory = directory
        self._status = status
        self._handlers = dict(handlers or {})
        self._started_s = time.time()
        self._is_closed = False
        self.path = directory / f"{job_directory.safe_name(task)}{job_directory.SUFFIX}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._inode = self._listen()
        except BaseException:
            self._listener.close()
            raise
        _open.add(self)
        self._thread = threading.Thread(
            target=self._serve, name=f"replicax-observe-{self.path.stem}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Endpoint of {self.task} at {str(self.path)!r}>"

    def _listen(self) -> int:
        """Listens, and then takes the name of the task from an earlier process of the task."""
        with job_directory.locked(self.directory) as descriptor:
            name = f".{secrets.token_hex(8)}"
            self._listener.bind(f"/proc/self/fd/{descriptor}/{name}")
            try:
                os.chmod(name, 0o600, dir_fd=descriptor)
                self._listener.listen(_BACKLOG)
                inode = os.stat(name, dir_fd=descriptor).st_ino
                os.rename(name, self.path.name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=descriptor)
                raise
            return inode

    def close(self, wait_s: float = _CLOSE_S) -> None:
        """Stops answering, and removes the socket. Idempotent.

        Args:
          wait_s: The seconds to wait for the thread, which may answer a request, and then removes
            the socket; 0 returns at once.
        """
        if not self._is_closed:
            self._is_closed = True
            _open.discard(self)
            # Ends `accept`, in which the thread waits.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        if wait_s > 0 and threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def _remove(self) -> None:
        """Removes the socket, and the directory with the last one."""
        with (
            contextlib.suppress(OSError, errors.DistributeError),
            job_directory.locked(self.directory) as descriptor,
        ):
            # Another process may have the name by now.
            if os.stat(self.path.name, dir_fd=descriptor).st_ino == self._inode:
                os.unlink(self.path.name, dir_fd=descriptor)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def _close_in_child(self) -> None:
        """Closes the descriptor in a forked child; the socket stays with the other process."""
        self._is_closed = True
        self._listener.close()

    # The thread.

    def _serve(self) -> None:
        with self._listener:
            self._answer_all()
        self._remove()

    def _answer_all(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EBADF):
                    return
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user not in (os.getuid(), 0) or _has_left(connection):
            return
        line = receive_line(connection, _MOST_REQUEST_BYTES, _RECEIVE_S)
        if line is None:
            # Something that only looked whether anyone listens.
            return
        try:
            reply = {"reply": self._handle(line)}
        except Exception as error:
            # The request is wrong, or its handler: the task goes on.
            _log.debug("%s could not answer a request", self.task, exc_info=True)
            reply = {"error": f"{type(error).__name__}: {error}"}
        encoded = msgspec.json.encode(reply, enc_hook=_as_plain)
        if len(encoded) > _MOST_REPLY_BYTES:
            encoded = msgspec.json.encode(
                {"error": f"The reply has {len(encoded):,} bytes, of at most {_MOST_REPLY_BYTES:,}"}
            )
        connection.settimeout(_SEND_S)
        connection.sendall(encoded + b"\n")

    def _handle(self, line: bytes) -> object:
        request = json.loads(line)
        name = request.get("request") if isinstance(request, dict) else None
        arguments = request.get("arguments") or {} if isinstance(request, dict) else {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError('a request is {"request": NAME, "arguments": {...}}')
        handler = self._own_handler(name) or requests.find(name)
        if handler is None:
            known = ", ".join(self._names())
            raise ValueError(f"{self.task} does not know the request {name!r}; it knows {known}")
        return handler(self.task, arguments)

    def _own_handler(self, name: str) -> requests.Handler | None:
        if name in self._handlers:
            return self._handlers[name]
        if name == "ping":
            return lambda task, _: {"task": task, "pid": os.getpid()}
        if name == "requests":
            return lambda _, __: self._names()
        if name == "status":
            return lambda _, __: self.status()
        return None

    def _names(self) -> list[str]:
        return sorted({"ping", "requests", "status", *self._handlers, *requests.names()})

    def status(self) -> dict[str, object]:
        """Returns the status: facts about the process, its progress, and what the task knows."""
        return {
            "task": self.task,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "program": process_facts.program(),
            "started_s": self._started_s,
            "metrics": metrics.current_address(),
            "process": process_facts.measure(),
            **progress.snapshot(),
            **self._status(),
        }


def is_any_open() -> bool:
    """Returns whether a task of this process can be observed."""
    return bool(_open)


def open_for(
    task: str,
    directory: Callable[[], Path],
    status: Status,
    handlers: Mapping[str, requests.Handler] | None = None,
    *,
    is_task: bool = True,
) -> Endpoint | None:
    """Opens the endpoint of a task; None if it must not or cannot be observed.

    A job trains without being observed: a full disk or a directory of another user is logged, not
    raised.

    Args:
      task: See `Endpoint`.
      directory: Returns the directory of the job.
      status: See `Endpoint`.
      handlers: See `Endpoint`.
      is_task: Whether this is a task of the job, which records spans and serves metrics if that
        is asked for.
    """
    if is_task:
        spans.set_task(task)
    if not settings.is_observable():
        return None
    try:
        job_directory.sweep()
        found = Endpoint(task, directory(), status, handlers)
        if is_task:
            metrics.serve_if_asked(statuses)
        return found
    except (OSError, errors.DistributeError) as error:
        _log.warning("%s cannot be observed: %s", task, error)
        return None


def statuses() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields job, name and status of each task of this process."""
    found = list(_open)
    for endpoint in found:
        yield endpoint.directory.name, endpoint.task, endpoint.status()
    if not found:
        yield from metrics.of_process()


def receive_line(connection: socket.socket, limit: int, timeout: float) -> bytes | None:
    """Receives one line within a time; None if the peer closes before it is complete.

    Raises:
      TimeoutError: The line was not complete in time.
      ConnectionError: It is longer than the limit.
    """
    deadline = time.monotonic() + timeout
    received = bytearray()
    while True:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = connection.recv(1 << 16)
        if not data:
            return None
        received += data
        if received.endswith(b"\n"):
            return bytes(received)
        if len(received) > limit:
            raise ConnectionError(f"a line of more than {limit:,} bytes")


def _has_left(connection: socket.socket) -> bool:
    """Returns whether the peer has closed the connection: it did not wait for the answer."""
    poll = select.poll()
    poll.register(connection, select.POLLHUP)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _as_plain(value: object) -> object:
    """Encodes numbers of NumPy and paths."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


def _close_all_in_child() -> None:
    for endpoint in list(_open):
        endpoint._close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_all_in_child)
for _name, _handler in recording.HANDLERS.items():
    requests.register(_name, _handler)
requests.register("metrics", lambda _, __: {"text": metrics.text(statuses)})
