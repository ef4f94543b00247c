"""What tasks print: into their logs, to the terminal, and the last lines into memory."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from pathlib import Path

from replicax.launch.log_files import RotatingLog
from replicax.protocol.tasks import Task

# A line that is longer is printed in pieces.
_LONGEST_LINE = 16 << 10
_NUM_LINES = 100


class TaskOutput:
    """Takes the output of all tasks, in pieces as they come.

    Args:
      directory: The directory of the logs, `worker-0.log`.
      most_bytes: The most bytes of the log of one task.
      show: Called with each complete line of a task.
      warn: Called once when a log cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        most_bytes: int,
        show: Callable[[Task, str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._most_bytes = most_bytes
        self._show = show
        self._warn = warn
        self._logs: dict[Task, RotatingLog] = {}
        self._partial: dict[Task, bytes] = {}
        self._last: dict[Task, collections.deque[str]] = {}
        # Several threads bring output of their hosts.
        self._lock = threading.Lock()

    def take(self, task: Task, data: bytes) -> None:
        """Takes a piece of output."""
        with self._lock:
            self._write(task, data)
            pieces = (self._partial.pop(task, b"") + data).split(b"\n")
            rest = pieces.pop()
            if len(rest) > _LONGEST_LINE:
                pieces.append(rest)
                rest = b""
            if rest:
                self._partial[task] = rest
            lines = [_shown(piece) for piece in pieces]
            self._last.setdefault(task, collections.deque(maxlen=_NUM_LINES)).extend(lines)
        for line in lines:
            self._show(task, line)

    def finish(self, task: Task) -> None:
        """Shows the last line of a process that has ended without a newline."""
        with self._lock:
            is_partial = task in self._partial
        if is_partial:
            self.take(task, b"\n")

    def tail(self, task: Task, lines: int) -> str:
        """Returns the last lines of a task, of all its processes."""
        with self._lock:
            return "\n".join([*self._last.get(task, ())][-lines:])

    def close(self) -> None:
        """Closes the logs. Idempotent."""
        with self._lock:
            for log in self._logs.values():
                log.close()

    def _write(self, task: Task, data: bytes) -> None:
        log = self._logs.get(task)
        if log is None:
            path = self._directory / f"{task.job}-{task.index}.log"
            log = self._logs[task] = RotatingLog(path, self._most_bytes)
        was_written = log.failure is None
        if not log.write(data) and was_written:
            self._warn(f"{log.path} is incomplete: {log.failure}. The job goes on.")


def _shown(line: bytes) -> str:
    r"""Returns a line as a terminal ends up showing it: what follows the last carriage return.

    >>> _shown(b"10 %\r20 %\r"), _shown(b"done\r\n".rstrip(b"\n"))
    ('20 %', 'done')
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
