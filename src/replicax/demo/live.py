"""A table that changes while something runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_PER_SECOND = 8
_BARS = " ▁▂▃▄▅▆▇█"


class LiveTable:
    """Draws a table again and again on a terminal; without one, draws it once at the end.

    Args:
      console: Where to.
      title: What is above the table.
      columns: The names of the columns. The first names the rows.
      is_kept: Whether the table stays when it is done.
    """

    def __init__(
        self, console: Console, title: str, columns: Sequence[str], is_kept: bool = True
    ) -> None:
        self.title = title
        self._console, self._columns, self._is_kept = console, columns, is_kept
        self._rows: dict[str, Sequence[str]] = {}
        self._live = Live(
            console=console,
            get_renderable=self._draw,
            refresh_per_second=_PER_SECOND,
            transient=not is_kept,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        elif self._is_kept and error is None:
            self._console.print(self._draw())

    def set(self, row: str, *cells: str) -> None:
        """Adds a row, or changes it."""
        self._rows[row] = cells

    def _draw(self) -> Table:
        table = Table(title=self.title)
        for number, column in enumerate(self._columns):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        # A copy: a thread draws while rows are added.
        for name, cells in tuple(self._rows.items()):
            table.add_row(name, *cells)
        return table


def bar(part: float, width: int) -> str:
    """Returns a bar that is filled in part.

    >>> bar(0.5, 8)
    '━━━━────'
    """
    filled = round(width * min(1.0, max(0.0, part)))
    return "━" * filled + "─" * (width - filled)


def sparkline(values: Sequence[float], width: int, most: float) -> str:
    """Returns the last values as bars of different height.

    >>> sparkline([0, 1, 2, 4], width=3, most=4)
    '▂▄█'
    """
    steps = len(_BARS) - 1
    heights = (round(steps * min(1.0, value / most)) if most else 0 for value in values[-width:])
    return "".join(_BARS[height] for height in heights).rjust(width)
