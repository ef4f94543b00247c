"""The view of a job as a table, for `--once` and for the live view."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replicax.top.view import Row, View, pick_loss

_GOOD, _IDLE, _WAITING, _BAD = "green", "dim", "yellow", "bold red"
_STYLES = {
    "busy": _GOOD,
    "ready": _GOOD,
    "running": _GOOD,
    "running its program": _GOOD,
    "idle": _IDLE,
    "detached": _IDLE,
    "connecting": _WAITING,
    "attaching": _WAITING,
    "starting": _WAITING,
    "away": _WAITING,
    "restarting": _WAITING,
    "ended": _BAD,
    "failed": _BAD,
    "fenced": _BAD,
    "lost": _BAD,
    "no answer": _BAD,
}
Column = tuple[str, Callable[[Row], str]]
# Each column of numbers: its title, and its text.
_COLUMNS: tuple[Column, ...] = (
    ("pid", lambda row: _number(row.pid, plain=True)),
    ("rate", lambda row: rate_text(row)),
    ("done", lambda row: count_text(row)),
    ("in flight", lambda row: _number(row.in_flight)),
    ("loss", lambda row: loss_text(row)),
    ("stale", lambda row: staleness_text(row)),
    ("memory", lambda row: bytes_text(row.memory)),
    ("variables", lambda row: bytes_text(row.held)),
    ("cpu", lambda row: "" if row.cpu is None else f"{row.cpu:.0%}"),
    ("restarts", lambda row: _number(row.restarts)),
)


# What is left out first if the terminal is too narrow.
_LEFT_OUT = ("cpu", "variables", "pid", "memory", "stale", "in flight", "restarts", "loss")
_STATE_WIDTH = 34


def columns(view: View, width: int | None = None) -> list[Column]:
    """Returns the columns of numbers in which some task has a text.

    Args:
      view: The view.
      width: The number of characters of a line; less important columns are left out if all do
        not fit. None for any number.
    """
    found = [column for column in _COLUMNS if any(column[1](row) for row in view.rows)]
    if width is None:
        return found
    states = max((min(len(row.state), _STATE_WIDTH) for row in view.rows), default=5)
    first = max((len(row.task) for row in view.rows), default=4) + states + 2
    for name in _LEFT_OUT:
        if first + sum(_width(column, view) for column in found) <= width:
            break
        found = [column for column in found if column[0] != name]
    return found


def _width(column: Column, view: View) -> int:
    title, text = column
    return 2 + max(len(title), *(len(text(row)) for row in view.rows))


def render(
    view: View,
    selected: str | None = None,
    *,
    width: int | None = None,
    most_waits: int = 12,
    note: str = "",
) -> RenderableType:
    """Returns a view as something that rich prints.

    Args:
      view: The view.
      selected: The task that is highlighted.
      width: The number of characters of a line.
      most_waits: The number of sentences about waits that are shown.
      note: A line below everything.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", expand=False)
    table.add_column("task", no_wrap=True)
    table.add_column("state", no_wrap=True, max_width=_STATE_WIDTH)
    shown = columns(view, width)
    for title, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for row in view.rows:
        is_selected = row.task == selected
        state = Text(row.state) if is_selected else _state(row)
        cells = [Text(row.task), state, *(text(row) for _, text in shown)]
        table.add_row(*cells, style="reverse" if is_selected else "")
    parts: list[RenderableType] = [_title(view), "", table]
    reasons = [row for row in view.rows if row.reason]
    if reasons or view.waits:
        parts.append("")
    for row in reasons[:most_waits]:
        line = f"{row.task}: {row.state}: {row.reason}"
        parts.append(Text(line, state_style(row), overflow="fold"))
    for line in view.waits[:most_waits]:
        parts.append(Text(line, "yellow", overflow="ellipsis", no_wrap=True))
    if len(view.waits) > most_waits:
        parts.append(Text(f"… and {len(view.waits) - most_waits} more", "dim"))
    if note:
        parts += ["", Text(note, "dim")]
    return Group(*parts)


def title_parts(view: View) -> list[tuple[str, str]]:
    """Returns the parts of the first line, each with its style."""
    parts = [(view.job, "bold"), (view.program, "cyan")]
    if not view.rows or view.has_ended:
        return [*parts, ("the job has ended, or no task answers", _BAD)]
    parts.append((f"up {duration_text(view.age_s)}", "dim"))
    rows = [row for row in view.rows if row.role in ("coordinator", "member", "program")]
    rates = [row for row in rows if row.rate is not None]
    if rates:
        # The members of a group do the same steps.
        fastest = max(row.rate or 0.0 for row in rates)
        parts.append((f"{fastest:,.1f} {rates[0].unit}/s", "green"))
    loss = pick_loss(view.rows)
    if loss is not None:
        parts.append((f"{loss[0]} {loss[1]:.4g}", "magenta"))
    return [part for part in parts if part[0]]


def _title(view: View) -> Text:
    return Text("  ").join(Text(text, style) for text, style in title_parts(view))


def _state(row: Row) -> Text:
    return Text(row.state, state_style(row), overflow="ellipsis", no_wrap=True)


def state_style(row: Row) -> str:
    """Returns the style of the state of a task."""
    if row.state in _STYLES:
        return _STYLES[row.state]
    return _WAITING if row.state.startswith("waiting") else _GOOD if row.pid else _IDLE


def _number(value: int | None, *, plain: bool = False) -> str:
    return "" if value is None else f"{value}" if plain else f"{value:,}"


def rate_text(row: Row) -> str:
    """Returns the rate.

    >>> rate_text(Row("a", "ps", "ready", rate=1234.56, unit="requests"))
    '1,234.6/s'
    """
    return "" if row.rate is None else f"{row.rate:,.1f}/s"


def count_text(row: Row) -> str:
    """Returns what the task has done.

    >>> count_text(Row("a", "ps", "ready", count=1234, unit="requests"))
    '1,234 requests'
    """
    return "" if row.count is None else f"{row.count:,} {row.unit}"


def loss_text(row: Row) -> str:
    """Returns the loss, or another value that the task has logged; empty if it has none."""
    found = pick_loss([row])
    return "" if found is None else f"{found[1]:.4g}"


def staleness_text(row: Row) -> str:
    """Returns the mean and the maximum staleness: "1.3 (4)"."""
    if row.mean_staleness is None or not row.max_staleness:
        return ""
    return f"{row.mean_staleness:.1f} ({row.max_staleness})"


def bytes_text(size: int | None) -> str:
    """Returns a size in binary units.

    >>> bytes_text(300 << 20), bytes_text(5 << 30), bytes_text(12)
    ('300.0 MiB', '5.0 GiB', '12 B')
    """
    if size is None:
        return ""
    if size < 1000:
        return f"{size} B"
    number, unit = size / 1024, "KiB"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1000 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.1f} {unit}"


def duration_text(seconds: float) -> str:
    """Returns a duration.

    >>> duration_text(59.6), duration_text(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
