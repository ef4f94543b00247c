"""Draws a trace: one row per thread or device of each task, one colour per kind of span."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy
from replicax.timeline import perfetto
from replicax.timeline.parts import Part, Span

if TYPE_CHECKING:
    from matplotlib import figure as figures
    from matplotlib import patches
    from matplotlib.axes import Axes
    from matplotlib.backends import backend_agg
else:
    figures = lazy.module("matplotlib.figure", "replicax[demo]")
    patches = lazy.module("matplotlib.patches", "replicax[demo]")
    backend_agg = lazy.module("matplotlib.backends.backend_agg", "replicax[demo]")

# Kinds that contain others are drawn lighter, behind them.
COLOURS: Mapping[str, str] = {
    "closure": "#d9d9d9",
    "call": "#d9d9d9",
    "agree": "#e8dff5",
    "schedule": "#8c564b",
    "assign": "#c49c94",
    "finish": "#e377c2",
    "trace": "#bcbd22",
    "compile": "#dbdb8d",
    "pull": "#1f77b4",
    "read": "#9ecae1",
    "compute": "#2ca02c",
    "push": "#ff7f0e",
    "apply": "#d62728",
    "all-reduce": "#9467bd",
    "all-gather": "#9467bd",
    "reduce-scatter": "#9467bd",
    "wait": "#f2f2f2",
    "checkpoint": "#17becf",
}
_OTHER = "#7f7f7f"
_BEHIND = ("closure", "call", "agree", "wait")
# The mean part of the time that a span takes whose edges can be seen.
_WIDE = 4e-3
# Rows whose spans take a smaller part of the time than this are left out.
_LEAST_SHARE = 2e-4
_ROW_INCHES, _WIDTH_INCHES = 0.3, 11.0
_MOST_ROWS = 60
_NUM_COLUMNS = 10  # of the legend


def draw(
    trace: str | os.PathLike[str],
    picture: str | os.PathLike[str],
    *,
    title: str = "",
    start_s: float = 0.0,
    seconds: float | None = None,
    marks: Mapping[float, str] | None = None,
) -> None:
    """Draws a trace as a picture, PNG or SVG: a row per thread or device of each task.

    Args:
      trace: The file of the trace.
      picture: The file to write.
      title: The title.
      start_s: Where the picture starts, in seconds after the start of the trace.
      seconds: How many seconds it shows; all if None.
      marks: Moments, in seconds after the start of the trace, each with a text. The loss of tasks
        that were restarted is marked in any case.

    Raises:
      MissingDependencyError: Matplotlib is not installed.
      InvalidArgumentError: There is nothing to draw.

    >>> import tempfile
    >>> import replicax as rx
    >>> folder = tempfile.TemporaryDirectory()
    >>> with rx.profiler.trace(folder.name) as trace:
    ...     _ = rx.function(lambda: 2.0)()
    >>> rx.profiler.draw(trace.path, f"{folder.name}/timeline.svg")
    >>> folder.cleanup()
    """
    parts = perfetto.read(trace)
    moments = [span.start for part in parts for span in part.spans]
    if not moments:
        raise errors.InvalidArgumentError(
            "A picture of a trace needs spans", f"{os.fspath(trace)} has none", "Record it again."
        )
    zero = min(moments)
    end = max(span.end for part in parts for span in part.spans)
    first = zero + int(start_s * 1e9)
    last = end if seconds is None else min(end, first + int(seconds * 1e9))
    rows = _rows(parts, first, last)
    figure = figures.Figure(
        figsize=(_WIDTH_INCHES, 1.5 + _ROW_INCHES * len(rows)), layout="constrained"
    )
    backend_agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit, unit_ns = ("s", 1e9) if last - first > 2e9 else ("ms", 1e6)
    for number, (_, spans) in enumerate(rows):
        _draw_row(axes, -number, spans, zero, unit_ns, (last - first) / unit_ns)
    _label(figure, axes, rows, title, f"time ({unit})")
    found = _restarts(parts) | {zero + int(s * 1e9): text for s, text in (marks or {}).items()}
    for moment, text in found.items():
        at = (moment - zero) / unit_ns
        axes.axvline(at, color="#d62728", linewidth=1.2, linestyle="--", zorder=4)
        axes.annotate(
            text, (at, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 3),
            textcoords="offset points", color="#d62728", fontsize=8,
        )  # fmt: skip
    axes.set_xlim((first - zero) / unit_ns, (last - zero) / unit_ns)
    figure.savefig(os.fspath(picture), dpi=130)


def _rows(parts: Sequence[Part], first: int, last: int) -> list[tuple[str, list[Span]]]:
    """Returns the label and the spans of each row; a task that was restarted has one row."""
    tracks: dict[tuple[str, str], list[Span]] = {}
    for part in parts:
        for span in part.spans:
            if span.end >= first and span.start <= last:
                tracks.setdefault((part.task, span.track), []).append(span)
    found: list[tuple[str, list[Span]]] = []
    for (task, track), spans in tracks.items():
        busy = sum(span.duration for span in spans if span.kind != "wait")
        if busy >= _LEAST_SHARE * (last - first):
            found.append((f"{_task(task)} · {_short(track)}", spans))
    return found[:_MOST_ROWS]


def _restarts(parts: Sequence[Part]) -> dict[int, str]:
    """Returns when tasks were lost that were started again: the first one of each restart."""
    incarnations: dict[str, list[Part]] = {}
    for part in parts:
        if part.spans:
            incarnations.setdefault(part.task, []).append(part)
    lost: dict[int, tuple[int, str]] = {}
    for task, own in incarnations.items():
        for number, part in enumerate(sorted(own, key=lambda p: p.spans[0].start)[:-1]):
            end = max(span.end for span in part.spans)
            lost[number] = min(lost.get(number, (end, task)), (end, task))
    return {end: f"{_task(task)} lost" for end, task in lost.values()}


def _task(task: str) -> str:
    return task.removeprefix("/job:").replace("/task:", " ")


def _short(track: str) -> str:
    return {"MainThread": "program"}.get(track, track.removeprefix("replicax-"))


def _draw_row(
    axes: Axes, y: int, spans: Sequence[Span], zero: int, unit_ns: float, shown: float
) -> None:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        bar = (span.start - zero) / unit_ns, max(span.duration, 1) / unit_ns
        by_kind.setdefault(span.kind, []).append(bar)
    for kind, bars in by_kind.items():
        is_behind = kind in _BEHIND
        height = 0.84 if is_behind else 0.6
        # Spans that follow each other at once are separated, unless only the lines would be seen.
        is_wide = sum(length for _, length in bars) / len(bars) > _WIDE * shown
        axes.broken_barh(
            bars,
            (y - height / 2, height),
            facecolors=COLOURS.get(kind, _OTHER),
            edgecolors=("#bbbbbb" if is_behind else "white") if is_wide else "none",
            linewidth=0.4,
            zorder=2 if is_behind else 3,
        )


def _label(
    figure: figures.Figure,
    axes: Axes,
    rows: Sequence[tuple[str, list[Span]]],
    title: str,
    unit: str,
) -> None:
    axes.set_yticks([-i for i in range(len(rows))], [label for label, _ in rows], fontsize=8)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_xlabel(unit)
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    present = {span.kind for _, spans in rows for span in spans}
    known = [kind for kind in COLOURS if kind in present]
    handles: list[Any] = [
        patches.Patch(facecolor=COLOURS[kind], edgecolor="#bbbbbb", linewidth=0.4, label=kind)
        for kind in known
    ]
    if present - set(known):
        handles.append(
            patches.Patch(facecolor=_OTHER, label=", ".join(sorted(present - set(known))))
        )
    figure.legend(
        handles=handles, loc="outside lower center", ncols=_NUM_COLUMNS, fontsize=8, frameon=False
    )
    if title:
        figure.suptitle(title, fontsize=11)
