"""One serving task of a local cluster, which reports where it listens."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from replicax.launch.task_process import TaskProcess


class Child(TaskProcess):
    """A task that runs `replicax serve`, with one process after the other if it is restarted.

    It says where it listens through a pipe, which closes if it dies before.
    """

    def __init__(self, job: str, index: int, log: Path) -> None:
        super().__init__(job, index, log)
        # Its address; with port 0 until it has reported its port.
        self.address = ""
        # Held by the thread that restarts it, until it listens or times out.
        self.restarting = threading.RLock()
        # The reading end of the pipe; None when the process has reported, or died. Any thread may
        # read it, and any may stop or start the process meanwhile: `_listening` protects both.
        self._pipe: int | None = None
        self._said = b""
        self._listening = threading.Lock()

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
            self.spawn_command(command, env, pass_fds=[writing])
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

    @override
    def reap(self, timeout: float) -> bool:
        has_exited = super().reap(timeout)
        if has_exited:
            self.close_pipe()
        return has_exited

    @override
    def kill(self, timeout: float = 30.0) -> None:
        super().kill(timeout)
        self.close_pipe()
