"""`AgentHost`: a host whose tasks an agent starts, at the other end of a command's pipes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from replicax.foundation import errors, settings
from replicax.launch import agent_protocol as protocol
from replicax.launch import certificates, observing
from replicax.launch.agent import version
from replicax.launch.host import Event, Exited, HostLost, Start, Started
from replicax.launch.job import JobSpec
from replicax.launch.session import run_on_hosts
from replicax.protocol.tasks import Task
from replicax.transport import keys

_CONNECT_SECONDS = 30.0
_REPLY_SECONDS = 30.0
_END_SECONDS = 10.0
_NUM_ERROR_LINES = 20
# How often the time of a host is asked for; the quickest reply tells most.
_NUM_TIMES = 8
# Replies that something waits for.
_Reply: TypeAlias = protocol.Ready | protocol.Reserved | protocol.TimeIs


class AgentHost:
    """A host that an agent starts tasks on; see `Host`.

    Args:
      name: The host, for messages.
      address: Where other tasks reach its tasks.
      command: The command that runs the agent there, connected to its input and output.
      reached_by: What the command is, for messages: "ssh".
      python: The interpreter of the host.
      keys: The files of the keys of the cluster, by name.
      job: The name of the directory in which its tasks can be observed; empty if they cannot.
      on_event: Called with each event.
      on_output: Called with the output of tasks.
    """

    def __init__(
        self,
        name: str,
        address: str,
        command: Sequence[str],
        reached_by: str,
        python: str,
        keys: dict[str, bytes],
        job: str,
        on_event: Callable[[Event], None],
        on_output: Callable[[Task, bytes], None],
    ) -> None:
        self.name = name
        self.address = address
        self.python = python
        self.cores: Sequence[int] = ()
        self.gpus: Sequence[str] = ()
        self._command = list(command)
        self._reached_by = reached_by
        self._keys = keys
        self._job = job
        # What is called with the answer to each request.
        self._asked: dict[int, Callable[[protocol.Answered], None]] = {}
        self._on_event = on_event
        self._on_output = on_output
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._stderr: collections.deque[str] = collections.deque(maxlen=_NUM_ERROR_LINES)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._is_lost = threading.Event()

    @property
    def is_connected(self) -> bool:
        """Whether its agent can be reached."""
        return self._process is not None and not self._is_lost.is_set()

    # Connecting.

    def reconnect(self) -> None:
        """Connects again after the connection was lost."""
        self.close()
        self._is_closing.clear()
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Starts to connect; `finish` waits for it."""
        self._is_lost.clear()
        self._replies = queue.SimpleQueue()
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The terminal must not interrupt it: the launcher ends tasks in order.
            start_new_session=True,
        )
        targets = (self._read_replies, self._read_errors, self._beat)
        self._threads = [
            threading.Thread(
                target=target, args=(process,), name="replicax-agent-host", daemon=True
            )
            for target in targets
        ]
        for thread in self._threads:
            thread.start()
        self._tell(protocol.Hello(self.address, self._keys, version(), self._job))

    def finish(self) -> None:
        """Waits until the agent is there.

        Raises:
          UnavailableError: It cannot be reached; with what the command has printed.
          InvalidArgumentError: It has other versions.
        """
        found = self._wait(_CONNECT_SECONDS)
        assert isinstance(found, protocol.Ready)
        if found.version != version():
            raise errors.InvalidArgumentError(
                "All hosts must have the versions of the launcher",
                f"{self.name} has {found.version}, and this machine {version()}",
                "Install the same versions.",
            )
        self.cores, self.gpus, self.python = found.cores, found.gpus, found.python

    def _wait(self, seconds: float) -> _Reply:
        try:
            found = self._replies.get(timeout=seconds)
        except queue.Empty:
            found = None
        if found is None:
            time.sleep(0.1)  # For its last words.
            said = "\n".join(self._stderr) or f"no reply within {seconds:g} s"
            raise errors.UnavailableError(
                f"{self.name} cannot be reached by {self._reached_by}: {said}"
            )
        return found

    def clock_difference(self) -> tuple[float, float]:
        """Returns how many seconds the clock of the host is ahead, and how wrong that can be.

        Raises:
          UnavailableError: The connection is lost.
        """
        found: list[tuple[int, int]] = []
        for _ in range(_NUM_TIMES):
            asked = time.time_ns()
            began = time.monotonic_ns()
            self._tell(protocol.AskTime())
            reply = self._wait(_REPLY_SECONDS)
            took = time.monotonic_ns() - began
            assert isinstance(reply, protocol.TimeIs)
            found.append((took, reply.nanoseconds - asked - took // 2))
        took, ahead = min(found)
        return ahead / 1e9, took / 2e9

    # Tasks.

    def reserve(self, ports: Sequence[int]) -> list[int]:
        """Reserves ports for tasks, in place of those that were reserved before."""
        self._tell(protocol.Reserve(list(ports)))
        found = self._wait(_REPLY_SECONDS)
        assert isinstance(found, protocol.Reserved)
        if found.error:
            raise errors.AddressInUseError(f"{self.name}: {found.error}")
        return found.ports

    def start(self, start: Start) -> None:
        """Starts a process of a task; a second request with the same numbers does nothing."""
        variables = {**settings.for_other_hosts(), **start.variables}
        self._tell(protocol.Launch(msgspec.structs.replace(start, variables=variables)))

    def send(self, task: Task, number: int) -> None:
        """Sends a signal to the process of a task and to what it has started."""
        self._tell(protocol.Send(task.job, task.index, number))

    def ask(self, ask: protocol.Ask, on_answer: Callable[[protocol.Answered], None]) -> None:
        """Asks the tasks of the host; the answer is empty if the connection is lost."""
        self._asked[ask.number] = on_answer
        self._tell(ask)
        if self._is_lost.is_set():
            self._answer_all_asked()

    def _answer_all_asked(self) -> None:
        for number in list(self._asked):
            self._answer(protocol.Answered(number, [], {}))

    def _answer(self, message: protocol.Answered) -> None:
        on_answer = self._asked.pop(message.number, None)
        if on_answer is not None:
            on_answer(message)

    def close(self) -> None:
        """Ends the connection; the agent kills what runs. Idempotent."""
        self._is_closing.set()
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError), self._lock:
            process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(_END_SECONDS)
        for thread in self._threads:
            thread.join(_END_SECONDS)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        self._process = None

    # Messages.

    def _tell(self, message: protocol.ToAgent) -> None:
        process = self._process
        if process is None or self._is_lost.is_set():
            return
        assert process.stdin is not None
        # A connection that is gone ends the replies, and that is reported.
        with contextlib.suppress(OSError, ValueError), self._lock:
            protocol.write(process.stdin, message)

    def _beat(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not self._is_closing.wait(protocol.BEAT_S):
            self._tell(protocol.Beat())

    def _read_replies(self, process: subprocess.Popen[bytes]) -> None:
        stream = process.stdout
        assert stream is not None
        reason = "the connection has ended"
        try:
            if _skip_to_beginning(stream):
                while (raw := protocol.read(stream)) is not None:
                    self._take(protocol.decode_from_agent(raw))
        except (OSError, ValueError, msgspec.DecodeError, errors.ProtocolError) as error:
            reason = f"{reason}: {error}"
        self._is_lost.set()
        self._replies.put(None)
        self._answer_all_asked()
        if not self._is_closing.is_set():
            said = "; ".join(self._stderr)
            self._on_event(HostLost(self.name, f"{reason}. {said}".strip()))

    def _take(self, message: protocol.FromAgent) -> None:
        if isinstance(message, protocol.Printed):
            self._on_output(Task(message.job, message.index), message.data)
        elif isinstance(message, protocol.Begun):
            task = Task(message.job, message.index)
            self._on_event(Started(task, message.incarnation, message.pid))
        elif isinstance(message, protocol.Ended):
            task = Task(message.job, message.index)
            self._on_event(Exited(task, message.incarnation, message.code))
        elif isinstance(message, protocol.Answered):
            self._answer(message)
        else:
            self._replies.put(message)

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in process.stderr:
                self._stderr.append(line.decode(errors="replace").strip())


def _skip_to_beginning(stream: IO[bytes]) -> bool:
    """Reads until the agent begins; returns False if it does not."""
    seen = b""
    while not seen.endswith(protocol.BEGINNING):
        byte = stream.read(1)
        if not byte:
            return False
        seen = (seen + byte)[-len(protocol.BEGINNING) :]
    return True


@dataclasses.dataclass(frozen=True)
class Destination:
    """A host to connect to.

    Attributes:
      name: The host, for messages.
      address: Where other tasks reach its tasks.
      command: The command that runs the agent there.
    """

    name: str
    address: str
    command: tuple[str, ...]


def run_through_agents(
    job: JobSpec, destinations: Sequence[Destination], reached_by: str, python: str
) -> int:
    """Runs a job to its end on other hosts, and returns its exit code.

    Args:
      job: The job.
      destinations: The hosts, each as often as it has slots.
      reached_by: What their commands are, for messages.
      python: The interpreter of the hosts.
    """
    with _key_files_of(job.keys) as files:
        # Each agent has the keys in a directory of its own.
        job = dataclasses.replace(job, keys=None)
        directory = observing.directory_of(job)
        name = "" if directory is None else directory.name

        def connect(
            on_event: Callable[[Event], None], on_output: Callable[[Task, bytes], None]
        ) -> Sequence[AgentHost]:
            hosts = {
                to.name: AgentHost(
                    to.name,
                    to.address,
                    to.command,
                    reached_by,
                    python,
                    files,
                    name,
                    on_event,
                    on_output,
                )
                for to in destinations
            }
            try:
                for host in hosts.values():
                    host.begin()
                for host in hosts.values():
                    host.finish()
            except BaseException:
                for host in hosts.values():
                    host.close()
                raise
            return [hosts[to.name] for to in destinations]

        return run_on_hosts(job, connect)


@contextlib.contextmanager
def _key_files_of(directory: Path | None) -> Iterator[dict[str, bytes]]:
    """Yields the files of the keys: those of a directory, or new ones."""
    with tempfile.TemporaryDirectory(prefix="rx-keys-") as temporary:
        source = keys.make(Path(temporary) / "keys") if directory is None else directory
        yield certificates.read(source)
