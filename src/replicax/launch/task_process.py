"""One task on this machine: its process, its signals, and its log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicax.protocol.tasks import Task

_TAIL_BYTES = 64 << 10

# Runs a command that the kernel kills when its parent exits. It imports nothing of the library, so
# that it costs milliseconds; `prctl` option 1 survives `exec`.
_WITH_PARENT = """
import ctypes, os, signal, sys
parent, cores, *command = sys.argv[1:]
if cores:
    os.sched_setaffinity(0, map(int, cores.split(",")))
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
except (AttributeError, OSError):
    pass
if os.getppid() != int(parent):
    sys.exit("the parent of this task has exited")
os.execvp(command[0], command)
"""


class TaskProcess:
    """A task that runs a command, with one process after the other if it is restarted.

    The process is the leader of its own group, so that a signal reaches what it started.

    Args:
      job: Its job.
      index: Its index.
      log: The file that its output is appended to; None if it goes to a descriptor.
    """

    def __init__(self, job: str, index: int, log: Path | None) -> None:
        self.job = job
        self.index = index
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        # Where the output of the current process begins in the log.
        self._log_start = 0

    def __str__(self) -> str:
        return f"{self.job} {self.index}"

    @property
    def task(self) -> Task:
        """Its name in the cluster."""
        return Task(self.job, self.index)

    @property
    def pid(self) -> int | None:
        """The id of its current or last process."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """The exit code, -N for a signal N; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether its process runs or is stopped."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended; one that was not reaped yet keeps its number."""
        if self._process is None or self._process.returncode is not None:
            return True
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, how) is not None
        except ChildProcessError:
            return True

    def spawn_command(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        pass_fds: Sequence[int] = (),
        directory: Path | None = None,
        output: int | None = None,
    ) -> None:
        """Starts the process, with its output appended to the log.

        Args:
          command: The program and its arguments.
          env: All its environment variables.
          pass_fds: The descriptors that it inherits.
          directory: The directory that it runs in; the current one by default.
          output: The descriptor of its output, in place of the log.
        """
        with contextlib.ExitStack() as stack:
            if output is None:
                assert self._log is not None, "without a log, there is a descriptor"
                log = stack.enter_context(self._log.open("ab"))
                self._log_start = log.seek(0, os.SEEK_END)
                output = log.fileno()
            self._process = subprocess.Popen(
                list(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=list(pass_fds),
                process_group=0,
                cwd=directory,
            )

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self.send_to_group(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Sends a signal to what is left of its group, before its process is reaped."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def freeze(self, timeout: float = 30.0) -> None:
        """Stops the process, and waits until none of its threads runs.

        The kernel tells one thread, which stops the others once it gets its turn: on a busy
        machine they may answer for a while.
        """
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + timeout
        while self.is_alive and not self.is_stopped and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; True if another thread has reaped it."""
        assert self._process is not None
        how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, how) is not None
        except ChildProcessError:
            # Another thread has reaped it.
            return True

    def reap(self, timeout: float) -> bool:
        """Waits until the process has exited; returns False on timeout."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, timeout: float = 30.0) -> None:
        """Kills the process, and waits until it has exited."""
        self.send(signal.SIGKILL)
        self.reap(timeout)

    def tail(self, lines: int, *, of_all: bool = True) -> str:
        """Returns the last lines of its log.

        Args:
          lines: How many.
          of_all: Whether of all its processes, or of the current one.
        """
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(0 if of_all else self._log_start, end - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def with_parent(command: Sequence[str], cores: Sequence[int] = ()) -> list[str]:
    """Returns a command that does the same, and that the kernel kills with this process.

    Strictly: when the thread that starts it exits.

    Args:
      command: The program and its arguments.
      cores: The cores that it may run on; all by default.

    >>> with_parent(["train.sh", "--fast"])[-2:]
    ['train.sh', '--fast']
    """
    own = [sys.executable, "-I", "-S", "-c", _WITH_PARENT, str(os.getpid())]
    return [*own, ",".join(map(str, cores)), *command]
