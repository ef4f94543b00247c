"""The output of a launcher: lines with the name of their task, and a line of status below them."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO, TypeAlias

from replicax.foundation import lazy
from replicax.protocol.tasks import Task

if TYPE_CHECKING:
    from rich import console as rich_console
    from rich import live as rich_live
    from rich import text as rich_text
else:
    # Only terminals need them.
    rich_console, rich_live, rich_text = map(
        lazy.module, ("rich.console", "rich.live", "rich.text")
    )

# The lines that may wait for a slow terminal; more are in the logs only.
_MOST_WAITING = 10_000
_MOST_TOGETHER = 1000
_REFRESH_S = 0.25
_END_SECONDS = 5.0
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "red")
_OWN = "replicax"

# A line, and its task; None for the launcher itself.
_Line: TypeAlias = tuple[Task | None, str]


def label(task: Task) -> str:
    """Returns the name of a task in front of its lines.

    >>> label(Task("worker", 1))
    'worker 1'
    """
    return f"{task.job} {task.index}"


class Terminal:
    """Prints lines from any thread, without making them wait for the terminal.

    On a terminal, names have colours and the status is the last line; in a file or a pipe, all is
    plain text, and there is no status.

    Args:
      status: Returns the line of status.
      tasks: The tasks, for the width of their names.
      shows: Whether to print the lines of a task.
      stream: Where to print; stdout by default.
    """

    def __init__(
        self,
        status: Callable[[], str],
        tasks: tuple[Task, ...],
        shows: Callable[[Task], bool] = lambda task: True,
        stream: TextIO | None = None,
    ) -> None:
        self._status = status
        self._shows = shows
        self._stream = sys.stdout if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper):
            # Programs print what the encoding of this terminal may not have.
            self._stream.reconfigure(errors="backslashreplace")
        self._width = max(len(name) for name in (_OWN, *map(label, tasks)))
        self._colours = {task: _COLOURS[i % len(_COLOURS)] for i, task in enumerate(tasks)}
        self._waiting: queue.Queue[_Line | None] = queue.Queue(_MOST_WAITING)
        self._num_skipped = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-terminal", daemon=True)
        self._thread.start()

    def show(self, task: Task, line: str) -> None:
        """Prints a line of a task."""
        if self._shows(task):
            self._put(task, line)

    def say(self, text: str) -> None:
        """Prints a message of the launcher itself."""
        for line in text.splitlines():
            self._put(None, line)

    def close(self) -> None:
        """Prints what waits, and ends. Idempotent."""
        self._is_closing.set()
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)  # So that it does not wait for a line.
        self._thread.join(_END_SECONDS)

    def _put(self, task: Task | None, line: str) -> None:
        try:
            self._waiting.put_nowait((task, line))
        except queue.Full:
            self._num_skipped += 1

    # The thread.

    def _run(self) -> None:
        try:
            if self._stream.isatty():
                self._print_with_status()
            else:
                self._print_plain()
        except (OSError, ValueError):
            # The reader of the output has gone: the logs have it. Python flushes the stream once
            # more when it exits, which must not fail.
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._stream.fileno())
                os.close(nothing)

    def _print_plain(self) -> None:
        while (lines := self._take()) is not None:
            for task, line in lines:
                name = _OWN if task is None else label(task)
                self._stream.write(f"{name:<{self._width}} | {line}\n")
            if lines:
                self._stream.flush()

    def _print_with_status(self) -> None:
        console = rich_console.Console(file=self._stream, highlight=False, soft_wrap=True)
        live = rich_live.Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with live:
            while (lines := self._take()) is not None:
                for task, line in lines:
                    console.print(self._styled(task, line))
                text = rich_text.Text(
                    self._status(), style="dim", no_wrap=True, overflow="ellipsis"
                )
                live.update(text, refresh=True)

    def _styled(self, task: Task | None, line: str) -> rich_text.Text:
        name = _OWN if task is None else label(task)
        style = "bold" if task is None else self._colours.get(task, "white")
        prefix = (f"{name:<{self._width}} | ", style)
        return rich_text.Text.assemble(prefix, rich_text.Text.from_ansi(line))

    def _take(self) -> list[_Line] | None:
        """Returns the lines that wait; None when there will be no more."""
        is_closing = self._is_closing.is_set()
        found: list[_Line | None] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._waiting.get(timeout=0.01 if is_closing else _REFRESH_S))
            while len(found) < _MOST_TOGETHER:
                found.append(self._waiting.get_nowait())
        lines = [line for line in found if line is not None]
        if self._num_skipped:
            skipped, self._num_skipped = self._num_skipped, 0
            lines.append((None, f"{skipped} lines were not printed; the logs have them"))
        return None if is_closing and not found else lines
