"""One task of a local cluster: its process, its signals, and its log."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 64 << 10


class Child:
    """A task that runs `replicax serve`, with one process after the other if it is restarted.

    The process is the leader of its own group, so that a signal reaches what it started.
    It says where it listens through a pipe, which closes if it dies before.
    """

    def __init__(self, job: str, index: int, log: Path) -> None:
        self.job = job
        self.index = index
        # Its address; with port 0 until it has reported its port.
        self.address = ""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        # Held by the thread that restarts it, until it listens or times out.
        self.restarting = threading.RLock()
        # The reading end of the pipe; None when the process has reported, or died. Any thread may
        # read it, and any may stop or start the process meanwhile: `_listening` protects both.
        self._pipe: int | None = None
        self._said = b""
        self._listening = threading.Lock()

    def __str__(self) -> str:
        return f"{self.job} {self.index}"

    @property
    def pid(self) -> int | None:
        """The id of its current or last process."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether its process runs or is stopped."""
        return self._process is not None and self._process.poll() is None

    def spawn(self, options: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the process.

        The kernel kills it when the calling thread exits.
        """
        self.close_pipe()
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        command = [sys.executable, "-m", "replicax", "serve", "--ready-fd", str(writing)]
        command += ["--die-with-parent", str(os.getpid()), *options]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writing],
                    process_group=0,
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with self._listening:
            self._pipe, self._said = reading, b""

    @property
    def is_starting(self) -> bool:
        """Whether the process was started, and has not reported yet that it listens."""
        return self._pipe is not None

    def hear(self) -> bool:
        """Reads the report of the process without blocking.

        Returns:
          False if it has ended before it said that it listens; True if it listens, if it may
          still say so, and if another thread has ended it.
        """
        with self._listening:
            if self._pipe is None:
                return True
            try:
                piece = os.read(self._pipe, 4096)
            except BlockingIOError:
                return True
            self._said += piece
            is_complete = self._said.endswith(b"\n")
            if is_complete:
                self.address = json.loads(self._said)["address"]
            if is_complete or not piece:
                self._close_pipe()
            return is_complete or bool(piece)

    def close_pipe(self) -> None:
        """Closes the pipe."""
        with self._listening:
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children, if it runs."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def freeze(self, timeout: float = 30.0) -> None:
        """Stops the process, and waits until none of its threads runs.

        The kernel tells one thread, which stops the others once it gets its turn: on a busy
        machine they may answer for a while.
        """
        self.send(signal.SIGSTOP)
        deadline = time.monotonic() + timeout
        while self.is_alive and not self._is_stopped() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
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
        self.close_pipe()

    def tail(self, lines: int) -> str:
        """Returns the last lines of its log, of all its processes."""
        try:
            with self._log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
