"""The directory of a running job: which one a task uses, and which jobs there are.

Note [Sockets that nothing serves]
    A killed task leaves its socket behind. A socket gets its name by `rename` when a process
    already listens on it; so a socket that refuses connections is left over. Names change only
    while the directory is locked, and a task checks after it has the lock that its directory
    was not removed: a sweep never removes the socket of a running task.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from replicax.foundation import errors, private_directories, settings

SUFFIX = ".sock"
# The seconds that a task waits for others that publish themselves or sweep.
_LOCK_S = 2.0
_LOCK_POLL_S = 0.005
# The number of other directories that a starting task looks at, to remove left-over ones.
_MOST_SWEPT = 50
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")

# The directories of clusters that were started by this process, by the address of a task.
_of_addresses: dict[str, Path] = {}


def root() -> Path:
    """Returns the directory with a directory for each job of this user."""
    directory = private_directories.of_user() / "jobs"
    directory.mkdir(mode=0o700, exist_ok=True)
    private_directories.require_private(directory)
    return directory


def of_cluster(addresses: Iterable[str]) -> Path:
    """Returns the directory of the job that the tasks at these addresses run.

    All tasks of a cluster know the same addresses, and so find the same directory without
    talking to each other. REPLICAX_JOB_DIR, which a launcher sets, takes precedence.

    Args:
      addresses: The addresses of all its workers and parameter servers, in any order.
    """
    chosen = settings.REPLICAX_JOB_DIR.read()
    if chosen:
        return Path(chosen)
    found = sorted(address.rpartition("://")[2] for address in addresses)
    for address in found:
        if address in _of_addresses:
            return _of_addresses[address]
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()
    return root() / f"cluster-{digest[:8]}"


def of_process(name: str) -> Path:
    """Returns the directory of a job that is this process alone.

    Args:
      name: What the job is called; the id of the process is appended.
    """
    chosen = settings.REPLICAX_JOB_DIR.read()
    return Path(chosen) if chosen else root() / f"{safe_name(name)}-{os.getpid()}"


def assign(addresses: Iterable[str], directory: Path) -> None:
    """Makes `of_cluster` return a directory in this process: that of tasks that it started."""
    for address in addresses:
        _of_addresses[address.rpartition("://")[2]] = directory


def forget(directory: Path) -> None:
    """Undoes `assign`."""
    for address in [a for a, found in _of_addresses.items() if found == directory]:
        del _of_addresses[address]


def safe_name(text: str) -> str:
    """Returns a text as the name of a file.

    >>> safe_name("/job:worker/task:1"), safe_name("../x y")
    ('job-worker-task-1', 'x-y')
    """
    return _UNSAFE.sub("-", text).strip("-.")[:60] or "job"


def create(directory: Path) -> None:
    """Creates the directory of a job, private to its user. Idempotent."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    private_directories.require_private(directory)


@contextlib.contextmanager
def locked(directory: Path, timeout: float = _LOCK_S) -> Iterator[int]:
    """Creates and locks a directory for changes of its names; yields its descriptor.

    Raises:
      DeadlineExceededError: Another process holds the lock for too long.
    """
    deadline = time.monotonic() + timeout
    while True:
        descriptor = _opened(directory)
        if descriptor is not None:
            try:
                if _try_lock(descriptor) and _is_at(descriptor, directory):
                    yield descriptor
                    return
            finally:
                os.close(descriptor)
        if time.monotonic() > deadline:
            raise errors.DeadlineExceededError(
                f"The job directory {str(directory)!r} was locked by another process for "
                f"{timeout:g} s. Check for a process that is stopped in it."
            )
        time.sleep(_LOCK_POLL_S)


def _opened(directory: Path) -> int | None:
    """Creates and opens a directory; None if another task has removed it again, as left over."""
    try:
        create(directory)
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, errors.NotFoundError):
        return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(directory))
    except FileNotFoundError:
        return False


def connect(path: Path, timeout: float) -> socket.socket:
    """Returns a connection to the socket of a task.

    The path may be longer than an address of the kernel: the socket is opened relative to its
    directory.

    Raises:
      OSError: Nothing listens there.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(f"/proc/self/fd/{directory}/{path.name}")
        except BaseException:
            connection.close()
            raise
        return connection
    finally:
        os.close(directory)


def sockets(directory: Path) -> list[Path]:
    """Returns the sockets in the directory of a job, in the order of their names."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except (FileNotFoundError, NotADirectoryError):
        return []


def running() -> list[Path]:
    """Returns the directories of the jobs of this user with a running task, the newest first."""
    try:
        found = [path for path in root().iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    alive = [path for path in found if any(map(_is_served, sockets(path)))]
    return sorted(alive, key=_changed_s, reverse=True)


def sweep(limit: int = _MOST_SWEPT) -> None:
    """Removes the sockets and directories that killed tasks have left, of at most `limit` jobs."""
    with contextlib.suppress(OSError, errors.DistributeError):
        for directory in sorted(root().iterdir(), key=_changed_s)[:limit]:
            remove_left_over(directory)


def remove_left_over(directory: Path) -> None:
    """Removes sockets that nothing serves, then the directory if it is empty."""
    with contextlib.suppress(OSError, errors.DistributeError):
        if any(map(_is_served, sockets(directory))):
            return
        with locked(directory, timeout=0.0):
            for path in sockets(directory):
                if not _is_served(path):
                    path.unlink(missing_ok=True)
            # Fails if a file is left, such as a trace: that is the user's.
            directory.rmdir()


def _is_served(path: Path) -> bool:
    try:
        connect(path, 0.2).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        # Busy, or not ours to judge.
        return True
    return True


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
