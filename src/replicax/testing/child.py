"""One task of a local cluster: its process, its signals, and what it printed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 64 << 10


class Child:
    """A task that runs `replicax serve`, again and again if it is restarted.

    The process is the leader of its own group, so that a signal reaches what it started.
    It says where it listens through a pipe, which closes if it dies before.
    """

    def __init__(self, job: str, index: int, log: Path) -> None:
        self.job = job
        self.index = index
        # Where it listens; with port 0 until it has said so.
        self.address = ""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        # The reading end of the pipe; None when it has spoken, or died.
        self.pipe: int | None = None
        self._said = b""

    def __str__(self) -> str:
        return f"{self.job} {self.index}"

    @property
    def pid(self) -> int | None:
        """The id of its process, the last one if it has ended."""
        return self._process.pid if self._process is not None else None

    @property
    def exit_code(self) -> int | None:
        """How its process ended; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether its process is there; a stopped one is."""
        return self._process is not None and self._process.poll() is None

    def spawn(self, options: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the process.

        The kernel ends it when the calling thread ends: call this from one that lives.
        """
        self.close_pipe()
        reading, writing = os.pipe()
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
        self.pipe, self._said = reading, b""

    def hear(self) -> bool:
        """Reads what the process says about itself; returns whether it is ready.

        Call it when the pipe has something to read. A pipe that closes with nothing said
        leaves `pipe` as None and returns False: the process is dying.
        """
        assert self.pipe is not None
        piece = os.read(self.pipe, 4096)
        self._said += piece
        if not self._said.endswith(b"\n"):
            if not piece:
                self.close_pipe()
            return False
        self.address = json.loads(self._said)["address"]
        self.close_pipe()
        return True

    def close_pipe(self) -> None:
        """Listens no more to what the process says about itself."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process and what it started, if it is alive."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def freeze(self, timeout: float = 30.0) -> None:
        """Stops the process, and waits until none of its threads runs any more.

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
            # Another thread has seen its end.
            return True

    def reap(self, timeout: float) -> bool:
        """Waits until the process has ended; returns False if it has not."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self, timeout: float = 30.0) -> None:
        """Ends the process at once and waits until it is gone."""
        self.send(signal.SIGKILL)
        self.reap(timeout)
        self.close_pipe()

    def tail(self, lines: int) -> str:
        """The last lines that it printed, of all its lives."""
        try:
            with self._log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
