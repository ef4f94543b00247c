"""What people see while the bars run: a moving line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from torture.bars import Bar
from torture.tables import Row

# Elsewhere than on a terminal a bar says where it stands so often.
_PLAIN_SECONDS = 10.0


class Screen:
    """Shows which bar runs, and how far it is. Only this draws."""

    def __init__(self, bars: Sequence[Bar]) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=len(bars))
        self._current = ""
        self._said_s = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, bar: Bar) -> None:
        """Shows that a bar begins."""
        self._current = f"bar {bar.label}"
        self._said_s = time.monotonic()
        self._progress.update(self._task, description=f"{self._current}: {bar.promise}")
        if not self._console.is_terminal:
            self._print(f"{self._current}: {bar.promise}")

    def say(self, text: str) -> None:
        """Shows how far the current bar is."""
        self._progress.update(self._task, description=f"{self._current}: {text}")
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_s > _PLAIN_SECONDS:
            self._said_s = now
            self._print(f"{self._current}: {text}")

    def end(self, row: Row) -> None:
        """Shows how a bar ended."""
        self._progress.advance(self._task)
        reasons = f" ({'; '.join(row.reasons)})" if row.reasons else ""
        self._print(f"bar {row.bar}: {row.verdict}, {row.figure}{reasons}, {row.seconds:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
