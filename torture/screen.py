"""Progress output: a live line on a terminal, otherwise plain lines."""

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

from torture.checks import Check
from torture.tables import Row

# The interval of progress lines without a terminal.
_PLAIN_SECONDS = 10.0


class Screen:
    """Shows the current check and its progress."""

    def __init__(self, checks: Sequence[Check]) -> None:
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
        self._task = self._progress.add_task("", total=len(checks))
        self._current = ""
        self._reported_s = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, check: Check) -> None:
        """Shows the start of a check."""
        self._current = f"check {check.label}"
        self._reported_s = time.monotonic()
        self._progress.update(self._task, description=f"{self._current}: {check.claim}")
        if not self._console.is_terminal:
            self._print(f"{self._current}: {check.claim}")

    def report(self, text: str) -> None:
        """Shows the progress of the current check."""
        self._progress.update(self._task, description=f"{self._current}: {text}")
        now = time.monotonic()
        if not self._console.is_terminal and now - self._reported_s > _PLAIN_SECONDS:
            self._reported_s = now
            self._print(f"{self._current}: {text}")

    def end(self, row: Row) -> None:
        """Shows the result of a check."""
        self._progress.advance(self._task)
        reasons = f" ({'; '.join(row.reasons)})" if row.reasons else ""
        self._print(
            f"check {row.check}: {row.result}, {row.measured}{reasons}, {row.seconds:.0f} s"
        )

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)
