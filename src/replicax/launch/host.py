"""`Host`: starts tasks on one machine, and says what becomes of them."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

import msgspec

from replicax.foundation import settings
from replicax.launch.guardian import Guardian
from replicax.launch.ports import ReservedPorts
from replicax.launch.task_process import TaskProcess, with_parent
from replicax.protocol.tasks import Task

# A task that a signal has stopped for so long is killed: its peers have given it up by then.
STOPPED_S = 10.0
# Seconds between two looks at processes that no descriptor reports.
_LOOK_S = 0.5
_POLL_S = 0.02
_READ_BYTES = 64 << 10
_END_SECONDS = 10.0
# The exit code of shells for a program that cannot be started.
_CANNOT_START = 126


@dataclasses.dataclass(frozen=True)
class Started:
    """A process of a task was started.

    Attributes:
      task: The task.
      incarnation: Which process of it.
      pid: Its id on its host.
    """

    task: Task
    incarnation: int
    pid: int


@dataclasses.dataclass(frozen=True)
class Exited:
    """A process of a task has ended.

    Attributes:
      task: The task.
      incarnation: Which process of it.
      code: Its exit code, -N for a signal N.
    """

    task: Task
    incarnation: int
    code: int


@dataclasses.dataclass(frozen=True)
class HostLost:
    """A host is not connected any more; its tasks end by themselves.

    Attributes:
      host: Its name.
      reason: What happened.
    """

    host: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Signalled:
    """The launcher itself has received a signal."""

    number: int


Event: TypeAlias = Started | Exited | HostLost | Signalled


class Start(msgspec.Struct, frozen=True):
    """How to start a task.

    Attributes:
      job: The job of the task.
      index: Its index.
      incarnation: The number of this process of the task; the next one has a higher number.
      command: The program and its arguments.
      variables: Environment variables, in addition to those of the host.
      cores: The cores that it may run on; empty for all.
      directory: The directory that it runs in.
    """

    job: str
    index: int
    incarnation: int
    command: list[str]
    variables: dict[str, str]
    cores: list[int]
    directory: str

    @property
    def task(self) -> Task:
        """The task."""
        return Task(self.job, self.index)


class Host(Protocol):
    """A machine that runs tasks. Its events and the output come from other threads.

    Attributes:
      name: Its name in messages.
      address: Where other tasks reach its tasks.
      cores: The cores that its tasks may use.
      gpus: The GPUs that its tasks may use, as of CUDA_VISIBLE_DEVICES.
      python: The interpreter of its tasks.
    """

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def cores(self) -> Sequence[int]: ...

    @property
    def gpus(self) -> Sequence[str]: ...

    @property
    def python(self) -> str: ...

    @property
    def is_connected(self) -> bool: ...

    def reconnect(self) -> None:
        """Connects again after the connection was lost.

        Raises:
          UnavailableError: It cannot be reached.
        """
        ...

    def reserve(self, ports: Sequence[int]) -> list[int]:
        """Reserves ports for tasks, in place of those that were reserved before.

        Args:
          ports: The ports; 0 for any.
        """
        ...

    def start(self, start: Start) -> None:
        """Starts a process of a task; a second request with the same numbers does nothing."""
        ...

    def send(self, task: Task, number: int) -> None:
        """Sends a signal to the process of a task and to what it has started."""
        ...

    def close(self) -> None:
        """Kills what runs, and disconnects. Idempotent."""
        ...


def usable_cores() -> list[int]:
    """Returns the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class _Running:
    def __init__(self, start: Start, process: TaskProcess, output: int) -> None:
        self.start = start
        self.process = process
        self.output = output
        self.exit_fd: int | None = None
        self.stopped_s: float | None = None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; only the thread of the host reaps the process."""
        if not self.process.has_ended:
            self.process.send_to_group(number)


class LocalHost:
    """This machine.

    The kernel kills the tasks when the thread that starts them exits; call `start` from one that
    exists as long as the job.

    Args:
      on_event: Called with each event.
      on_output: Called with the output of tasks.
      address: Where other tasks reach its tasks.
    """

    name = "this machine"
    is_connected = True

    def __init__(
        self,
        on_event: Callable[[Event], None],
        on_output: Callable[[Task, bytes], None],
        address: str = "127.0.0.1",
    ) -> None:
        self._on_event = on_event
        self._on_output = on_output
        self.address = address
        self.python = sys.executable
        self.cores = usable_cores()
        self.gpus = settings.visible_gpus()
        self._reserved: ReservedPorts | None = None
        self._guardian = Guardian()
        # Protects the processes; not held while waiting.
        self._lock = threading.Lock()
        self._running: dict[Task, _Running] = {}
        self._new: list[_Running] = []
        self._started: dict[Task, int] = {}
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, name="replicax-host", daemon=True)
        self._thread.start()

    def reconnect(self) -> None:
        """Does nothing: this machine is always connected."""

    def reserve(self, ports: Sequence[int]) -> list[int]:
        """Reserves ports for tasks, in place of those that were reserved before."""
        if self._reserved is not None:
            self._reserved.close()
        is_here = self.address in ("127.0.0.1", "localhost")
        self._reserved = ReservedPorts(ports, "127.0.0.1" if is_here else "0.0.0.0")
        return list(self._reserved.ports)

    def start(self, start: Start) -> None:
        """Starts a process of a task; a second request with the same numbers does nothing."""
        task = start.task
        if self._started.get(task, -1) >= start.incarnation:
            return
        self._started[task] = start.incarnation
        process = TaskProcess(start.job, start.index, None)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            process.spawn_command(
                with_parent(start.command, start.cores),
                settings.with_changes(start.variables),
                output=writing,
                directory=Path(start.directory),
            )
        except OSError as error:
            os.close(reading)
            self._on_output(task, f"cannot be started: {error}\n".encode())
            self._on_event(Exited(task, start.incarnation, _CANNOT_START))
            return
        finally:
            os.close(writing)
        assert process.pid is not None
        self._guardian.watch(process.pid)
        self._on_event(Started(task, start.incarnation, process.pid))
        running = _Running(start, process, reading)
        with self._lock:
            self._running[task] = running
            self._new.append(running)
        self._wake.send(b"\0")

    def send(self, task: Task, number: int) -> None:
        """Sends a signal to the process of a task and to what it has started."""
        with self._lock:
            running = self._running.get(task)
        if running is not None:
            running.send(signal.Signals(number))

    def close(self) -> None:
        """Kills what runs, and waits for it. Idempotent."""
        if self._is_closing:
            return
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                left = list(self._running.values())
            if not left:
                break
            for running in left:
                running.send(signal.SIGKILL)
            time.sleep(_POLL_S)
        self._is_closing = True
        self._wake.send(b"\0")
        self._thread.join(_END_SECONDS)
        self._wake.close()
        self._woken.close()
        self._selector.close()
        self._guardian.close()
        if self._reserved is not None:
            self._reserved.close()

    # The thread.

    def _watch(self) -> None:
        look_s = 0.0
        while not self._is_closing:
            with self._lock:
                # Until their descriptors are registered, processes are looked at often.
                has_descriptors = all(r.exit_fd is not None for r in self._running.values())
            for key, _ in self._selector.select(_LOOK_S if has_descriptors else _POLL_S):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._add_new()
                elif key.data[1] == "output":
                    self._read(key.data[0])
            self._reap()
            now = time.monotonic()
            if now >= look_s:
                look_s = now + _LOOK_S
                self._kill_stopped(now)
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._woken:
                self._selector.unregister(key.fileobj)
                os.close(key.fd)

    def _add_new(self) -> None:
        with self._lock:
            new, self._new = self._new, []
        for running in new:
            self._selector.register(running.output, selectors.EVENT_READ, (running, "output"))
            pid = running.process.pid
            if hasattr(os, "pidfd_open") and pid is not None:
                running.exit_fd = os.pidfd_open(pid)
                self._selector.register(running.exit_fd, selectors.EVENT_READ, (running, "exit"))

    def _read(self, running: _Running) -> bool:
        """Takes one piece of output; returns whether there may be more."""
        try:
            piece = os.read(running.output, _READ_BYTES)
        except BlockingIOError:
            return False
        if piece:
            self._on_output(running.start.task, piece)
            return True
        self._close_output(running)
        return False

    def _read_rest(self, running: _Running) -> None:
        """Takes what a process has printed before it ended.

        Another process that has left the group may hold the pipe, and print for ever.
        """
        most_pieces = 1 + _pipe_bytes(running.output) // _READ_BYTES
        for _ in range(most_pieces):
            if running.output < 0 or not self._read(running):
                break
        self._close_output(running)

    def _close_output(self, running: _Running) -> None:
        if running.output >= 0:
            self._selector.unregister(running.output)
            os.close(running.output)
            running.output = -1

    def _reap(self) -> None:
        with self._lock:
            found = [r for r in self._running.values() if r not in self._new]
        for running in found:
            process = running.process
            if not process.has_ended:
                continue
            # What it has started ends with it; its number is not reused before it was reaped.
            process.send_to_group(signal.SIGKILL)
            code = process.exit_code
            assert code is not None and process.pid is not None
            self._guardian.forget(process.pid)
            if running.exit_fd is not None:
                self._selector.unregister(running.exit_fd)
                os.close(running.exit_fd)
            self._read_rest(running)
            with self._lock:
                if self._running.get(running.start.task) is running:
                    del self._running[running.start.task]
            self._on_event(Exited(running.start.task, running.start.incarnation, code))

    def _kill_stopped(self, now: float) -> None:
        with self._lock:
            found = list(self._running.values())
        for running in found:
            if running.process.has_ended or not running.process.is_stopped:
                running.stopped_s = None
            elif running.stopped_s is None:
                running.stopped_s = now
            elif now >= running.stopped_s + STOPPED_S:
                text = f"[stopped for {STOPPED_S:g} s: killed by its launcher]\n"
                self._on_output(running.start.task, text.encode())
                running.send(signal.SIGKILL)


def _pipe_bytes(descriptor: int) -> int:
    """Returns the most bytes that wait in a pipe; 0 if it is closed."""
    if descriptor < 0:
        return 0
    if not hasattr(fcntl, "F_GETPIPE_SZ"):
        return _READ_BYTES
    return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
