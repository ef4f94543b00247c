"""The tasks that a process runs, by the job of a cluster."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from replicax.foundation import errors, lazy
from replicax.protocol.messages import Attach
from replicax.protocol.tasks import Role, Task
from replicax.ps.process.snapshots import DEFAULT_EVERY_S
from replicax.transport import addresses
from replicax.transport import keys as key_files
from replicax.transport.keys import Keys

# A program that uses a strategy runs neither.
if TYPE_CHECKING:
    from replicax.ps.process import parameter_server
    from replicax.worker import session, worker
    from replicax.worker.runner import WorkerSession
else:
    parameter_server = lazy.module("replicax.ps.process.parameter_server")
    session = lazy.module("replicax.worker.session")
    worker = lazy.module("replicax.worker.worker")

SERVING = ("ps", "worker")
_WAITING = ("chief", "evaluator")


class RunningTask(Protocol):
    """A task that a process runs."""

    @property
    def address(self) -> str:
        """The address at which it listens; empty if it does not."""
        ...

    @property
    def ending(self) -> str | None:
        """Why it has ended itself; None if it has not."""
        ...

    def status(self) -> Mapping[str, object] | None:
        """Returns what it tells those who observe it; None if there is nothing to observe."""
        ...

    def start(self) -> None:
        """Starts to listen."""
        ...

    def run_forever(self) -> None:
        """Runs the task in this thread, until interrupted or closed."""
        ...

    def interrupt(self) -> None:
        """Makes `run_forever` return soon, without waiting for it."""
        ...

    def close(self) -> None:
        """Stops listening. Idempotent."""
        ...


class WaitingTask:
    """A task without a service: the program of the user does the work."""

    address = ""
    ending: str | None = None

    def __init__(self) -> None:
        self._ended = threading.Event()

    def status(self) -> None:
        """Returns None: the strategy of the program can be observed, if it has one."""

    def start(self) -> None:
        """Does nothing."""

    def run_forever(self) -> None:
        """Waits until the task is interrupted or closed."""
        while not self._ended.wait(timeout=60.0):
            pass

    def interrupt(self) -> None:
        """Ends the wait."""
        self._ended.set()

    def close(self) -> None:
        """Ends the wait."""
        self._ended.set()


def make_task(
    name: Task,
    where: str,
    protocol: str | None,
    keys: str | os.PathLike[str] | Keys | None,
    snapshots: str | os.PathLike[str] | None = None,
    snapshot_every: float = DEFAULT_EVERY_S,
    on_ending: Callable[[str], None] | None = None,
) -> RunningTask:
    """Creates a task that does not listen yet."""
    require_snapshots_fit(name, snapshots, snapshot_every)
    if name.job in _WAITING:
        return WaitingTask()
    if name.job == "ps":
        found = _load(keys, "ps", name.index)
        return parameter_server.ParameterServerTask(
            name.index,
            addresses.resolve(where, protocol, found),
            keys=found,
            # Several servers may be given the same directory.
            snapshots=None if snapshots is None else Path(snapshots) / f"ps-{name.index}",
            snapshot_every=snapshot_every,
        )
    if name.job == "worker":
        found = _load(keys, "worker", name.index)
        location = addresses.resolve(where, protocol, found)
        make_session = _session_maker(name.index, found)
        return worker.WorkerTask(
            name.index, location, make_session, keys=found, on_ending=on_ending
        )
    raise errors.InvalidArgumentError(
        f"A server is of one of the jobs {', '.join([*SERVING, *_WAITING])}",
        f"it is {name}",
        "Rename the job in the cluster.",
    )


def require_snapshots_fit(
    name: Task, snapshots: str | os.PathLike[str] | None, every_s: float
) -> None:
    """Raises if a task cannot keep snapshots, or if the interval is invalid."""
    if snapshots is not None and name.job != "ps":
        raise errors.InvalidArgumentError(
            "`snapshots` are for parameter servers, which hold the variables",
            f"this is {name}",
            "Leave it out here.",
        )
    is_number = isinstance(every_s, (int, float)) and not isinstance(every_s, bool)
    if not is_number or not 0 < every_s < math.inf:
        raise errors.InvalidArgumentError(
            "`snapshot_every` must be a number of seconds above 0",
            f"it is {every_s!r}",
            "Correct it.",
        )


def _session_maker(index: int, keys: Keys | None) -> worker.MakeSession:
    """Returns a function that creates sessions with the index and the keys of this process."""

    def make(attach: Attach, job: str, epoch: int, incarnation: int) -> WorkerSession:
        return session.ParameterServerSession(attach, job, epoch, incarnation, index, keys)

    return make


def _load(keys: str | os.PathLike[str] | Keys | None, role: Role, index: int) -> Keys | None:
    if keys is None:
        return key_files.from_environment(role, index)
    return keys if isinstance(keys, Keys) else key_files.load(keys, role, index)
