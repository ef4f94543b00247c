"""A launched job as something that can be observed: the launcher itself, and tasks of other hosts.

The launcher has an endpoint like every task. Through it, `replicax top` and `replicax trace` also
ask the tasks of other hosts: the launcher passes a request on to its agents, each of which asks
the tasks of its host. Two requests, as an endpoint must not wait:

    ask_hosts {"request": R, "arguments": {...}, "task": T or None, "directory": D or None}
                                        ->  {"number": N, "hosts": how many were asked}
    hosts_answers {"number": N}         ->  {"is_complete": bool, "answers": [...]}

Spans of a trace are files: an agent sends those that a `trace_stop` ends, and they arrive in the
directory that came with the request.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from replicax.foundation import settings, spans
from replicax.launch.agent_protocol import Answered, Ask, TaskAnswer
from replicax.launch.host import Host
from replicax.launch.job import JobSpec
from replicax.launch.supervision import Supervisor
from replicax.observe import client, endpoint, job_directory

# The seconds that a task of another host may take to answer: those who ask wait a little longer.
_ANSWER_S = 1.0
# How many requests to other hosts are remembered until they are asked for.
_MOST_ASKED = 64


def directory_of(job: JobSpec) -> Path | None:
    """Returns the directory of a job that this process launches; None if it is not observed."""
    return job_directory.of_process(job.program.name) if settings.is_observable() else None


# At the launcher.


@runtime_checkable
class _HostThatAsks(Protocol):
    """A host whose tasks are asked by an agent."""

    @property
    def name(self) -> str: ...

    @property
    def is_connected(self) -> bool: ...

    def ask(self, ask: Ask, on_answer: Callable[[Answered], None]) -> None: ...


@dataclasses.dataclass
class _Asked:
    directory: Path | None
    num_left: int
    answers: list[dict[str, object]] = dataclasses.field(default_factory=list)


class _Relay:
    """Asks the tasks of other hosts."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = [host for host in dict.fromkeys(hosts) if isinstance(host, _HostThatAsks)]
        self._numbers = itertools.count()
        # Protects what was asked; answers come from the threads of the hosts.
        self._lock = threading.Lock()
        self._asked: collections.OrderedDict[int, _Asked] = collections.OrderedDict()

    def ask(self, task: str, arguments: Mapping[str, Any]) -> dict[str, object]:
        """Passes a request on to the agents."""
        del task
        hosts = [host for host in self.hosts if host.is_connected]
        number = next(self._numbers)
        directory = arguments.get("directory")
        asked = _Asked(None if directory is None else Path(str(directory)), len(hosts))
        with self._lock:
            self._asked[number] = asked
            while len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)
        message = Ask(
            number,
            str(arguments["request"]),
            dict(arguments.get("arguments") or {}),
            arguments.get("task"),
        )
        for host in hosts:
            host.ask(message, lambda found, host=host: self._take(asked, host.name, found))
        return {"number": number, "hosts": len(hosts)}

    def _take(self, asked: _Asked, host: str, found: Answered) -> None:
        if asked.directory is not None:
            for name, data in found.files.items():
                # Of two hosts with tasks of the same name and process.
                path = asked.directory / f"{job_directory.safe_name(host)}-{Path(name).name}"
                path.write_bytes(data)
        answers = [
            {"name": a.name, "host": host, "pid": a.pid, "reply": a.reply, "error": a.error}
            for a in found.answers
        ]
        with self._lock:
            asked.answers += answers
            asked.num_left -= 1

    def answers(self, task: str, arguments: Mapping[str, Any]) -> dict[str, object]:
        """Returns what has been answered."""
        del task
        number = int(arguments["number"])
        with self._lock:
            asked = self._asked.get(number)
            if asked is None:
                raise ValueError(f"there is no request {number}, or it was asked long ago")
            if not asked.num_left:
                del self._asked[number]
            return {"is_complete": not asked.num_left, "answers": list(asked.answers)}


def open_endpoint(
    directory: Path, supervisor: Supervisor, hosts: Sequence[Host]
) -> endpoint.Endpoint | None:
    """Opens the endpoint of a launcher; None if that is not possible.

    Args:
      directory: The directory of the job.
      supervisor: Knows the tasks, and kills them.
      hosts: The hosts of the job.
    """
    relay = _Relay(hosts)

    def status() -> dict[str, object]:
        return {**supervisor.observed(), "hosts": [host.name for host in relay.hosts]}

    def kill(task: str, arguments: Mapping[str, Any]) -> dict[str, object]:
        del task
        return {"pid": supervisor.kill(str(arguments["task"]), int(arguments["pid"]))}

    handlers = {"ask_hosts": relay.ask, "hosts_answers": relay.answers, "kill": kill}
    # REPLICAX_TRACE and REPLICAX_METRICS are for its tasks.
    return endpoint.open_for(client.LAUNCHER, lambda: directory, status, handlers, is_task=False)


# At an agent.


def answer(ask: Ask, directory: Path, traces: Path) -> Answered:
    """Asks the tasks of this host, and returns what they answer.

    Args:
      ask: The request.
      directory: The directory of the job on this host.
      traces: A directory of this host for spans.
    """
    # On the host of the launcher itself, everyone reaches them without it.
    if client.launcher_of(directory).exists():
        return Answered(ask.number, [], {})
    arguments = dict(ask.arguments)
    folder = traces / job_directory.safe_name(str(arguments.get("trace", "")))
    if ask.request == "trace_start":
        folder.mkdir(parents=True, exist_ok=True)
        arguments["directory"] = str(folder)
    paths = job_directory.sockets(directory)
    if ask.task is not None:
        paths = [path for path in paths if client.task_of(path) == ask.task]
    found = client.ask_each(paths, ask.request, arguments, _ANSWER_S)
    answers = [TaskAnswer(a.name, a.pid, a.reply, a.error) for a in found]
    files: dict[str, bytes] = {}
    if ask.request == "trace_stop":
        for path in folder.glob(f"*{spans.SUFFIX}"):
            files[path.name] = path.read_bytes()
            path.unlink()
    return Answered(ask.number, answers, files)
