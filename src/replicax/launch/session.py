"""One launch from the command line: its terminal, its logs, its signals and its hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from replicax.foundation import errors, settings
from replicax.launch import observing
from replicax.launch.host import Event, Host, Signalled
from replicax.launch.job import JobSpec
from replicax.launch.supervision import Supervisor
from replicax.launch.task_output import TaskOutput
from replicax.launch.terminal import Terminal
from replicax.observe.endpoint import Endpoint
from replicax.protocol.tasks import Task

# Connects to the hosts, given where events and output go.
Connect: TypeAlias = Callable[
    [Callable[[Event], None], Callable[[Task, bytes], None]], Sequence[Host]
]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOGS = "replicax-logs"
# Next to the logs: which process runs each task, for debuggers and for `kill`.
PROCESSES = "processes.json"


def run_on_hosts(job: JobSpec, connect: Connect, *, has_snapshots: bool = False) -> int:
    """Runs a job to its end on hosts that start processes.

    Args:
      job: The job.
      connect: Connects to the hosts.
      has_snapshots: Whether parameter servers keep snapshots next to the logs, so that they can
        be restarted.

    Returns:
      The exit code.
    """
    _check_program(job)
    logs = _directory_for_logs(job)
    snapshots = logs / "snapshots"
    if has_snapshots and job.ps and job.snapshots is None:
        job = dataclasses.replace(job, snapshots=snapshots.absolute())
    directory = observing.directory_of(job)
    if directory is not None:
        # One for all runs of a group: each has other addresses.
        env = {settings.REPLICAX_JOB_DIR: str(directory), **job.env}
        job = dataclasses.replace(job, env=env)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    supervisor: Supervisor | None = None
    terminal = Terminal(
        lambda: "" if supervisor is None else f"{supervisor.status()} · {logs}",
        job.tasks,
        shows=lambda task: job.shows(task),
    )
    output = TaskOutput(logs, job.log_bytes, terminal.show, terminal.say)
    hosts: Sequence[Host] = ()
    endpoint: Endpoint | None = None
    try:
        with _signals_as_events(events.put):
            terminal.say(f"{_counted(job)}; logs in {logs}")
            hosts = connect(events.put, output.take)
            supervisor = Supervisor(
                job,
                hosts,
                events,
                output,
                terminal.say,
                os.getcwd(),
                lambda processes: _write_processes(logs / PROCESSES, processes),
            )
            if directory is not None:
                endpoint = observing.open_endpoint(directory, supervisor, hosts)
            code = supervisor.run()
            terminal.say(_summary(code, supervisor))
            return code
    finally:
        for host in hosts:
            host.close()
        output.close()
        terminal.close()
        if endpoint is not None:
            endpoint.close()
        shutil.rmtree(snapshots, ignore_errors=True)


def _check_program(job: JobSpec) -> None:
    path = Path(job.program.target)
    if not job.program.is_module and not path.is_file():
        raise errors.NotFoundError(
            "The program must be a Python script that exists",
            f"there is no file {str(path)!r}",
            "Correct the path; `-m` runs a module.",
        )


def _directory_for_logs(job: JobSpec) -> Path:
    if job.logs is None:
        return _new_directory(job.program.name)
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise errors.InvalidArgumentError(
            "The logs need a directory", f"it cannot be made: {error}", "Pass another one."
        ) from error
    return job.logs


def _new_directory(name: str) -> Path:
    """Creates a directory for the logs of this launch, which no other launch uses."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    path = Path(_LOGS) / stem
    try:
        path.mkdir(parents=True)
    except OSError:
        # A directory that this user cannot write to.
        return Path(tempfile.mkdtemp(prefix=f"{_LOGS}-{name}-"))
    return path


def _counted(job: JobSpec) -> str:
    counts: dict[str, int] = {}
    for task in job.tasks:
        counts[task.job] = counts.get(task.job, 0) + 1
    names = {"worker": "workers"}
    texts = [f"{n} {names.get(name, name) if n > 1 else name}" for name, n in counts.items()]
    return f"{job.program.name} with {', '.join(texts)}"


def _summary(code: int, supervisor: Supervisor) -> str:
    how = "finished" if code == 0 else f"ended with exit code {code}"
    restarts = supervisor.num_restarts
    return how if not restarts else f"{how}, {restarts} restart{'s' if restarts > 1 else ''}"


def _write_processes(path: Path, processes: Sequence[dict[str, object]]) -> None:
    new = path.with_suffix(".new")
    # A full disk does not end a job.
    with contextlib.suppress(OSError):
        new.write_text("\n".join(["[", ",\n".join(map(json.dumps, processes)), "]\n"]))
        new.replace(path)


@contextlib.contextmanager
def _signals_as_events(put: Callable[[Event], None]) -> Iterator[None]:
    """Turns signals into events while the block runs."""

    def handle(number: int, frame: FrameType | None) -> None:
        # `SimpleQueue.put` is reentrant.
        put(Signalled(number))

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
