"""The progress display of `join`: a bar on a terminal, a line per second otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from replicax.foundation import lazy

if TYPE_CHECKING:
    from rich import console as rich_console
    from rich import progress as rich_progress
else:
    rich_console = lazy.module("rich.console")
    rich_progress = lazy.module("rich.progress")

_LINE_S = 1.0


class Progress:
    """Shows how many of the scheduled closures have ended, as a context manager.

    Args:
      counts: Returns the numbers of ended and of open closures.
      stream: The stream to write to; the standard error stream if None.
    """

    def __init__(self, counts: Callable[[], tuple[int, int]], stream: TextIO | None = None) -> None:
        self._counts = counts
        self._stream = sys.stderr if stream is None else stream
        self._first = 0
        self._begun_s = self._shown_s = 0.0
        self._bar: Any = None
        self._bar_task: Any = None

    def __enter__(self) -> Progress:
        self._first, _ = self._counts()
        self._begun_s = self._shown_s = time.monotonic()
        if self._stream.isatty():
            columns = (
                rich_progress.TextColumn("closures"),
                rich_progress.BarColumn(),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeRemainingColumn(),
            )
            console = rich_console.Console(file=self._stream)
            self._bar = rich_progress.Progress(*columns, console=console)
            self._bar_task = self._bar.add_task("closures", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._show(is_last=True)
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        """Updates the display, at most once per second without a terminal."""
        self._show(is_last=False)

    def _show(self, is_last: bool) -> None:
        finished, left = self._counts()
        ended = finished - self._first
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=ended, total=ended + left)
            return
        now = time.monotonic()
        if is_last or now - self._shown_s >= _LINE_S:
            self._shown_s = now
            rate = ended / max(now - self._begun_s, 1e-9)
            self._stream.write(f"closures: {ended} of {ended + left} ended, {rate:.1f}/s\n")
            self._stream.flush()
