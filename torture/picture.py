"""Plots the soak test: finished work, memory, threads and files of every process, and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from torture.samples import Sampler

_PANELS = (("mib", "memory, MiB"), ("threads", "threads"), ("fds", "file descriptors"))
_COLORS = {
    "kill worker": "#d62728",
    "stop worker": "#ff9896",
    "freeze worker": "#e377c2",
    "slow worker": "#ffbb78",
    "kill server": "#2ca02c",
    "stop server": "#9467bd",
    "cut line": "#bcbd22",
    "blip": "#17becf",
    "garbage": "#7f7f7f",
    "full disk": "#8c564b",
}
# Workers are drawn with thin lines. They and one of the servers are killed and started again.
_TASKS = {"coordinator": "#1f77b4", "ps 0": "#2ca02c", "ps 1": "#ff7f0e"}
_WORKERS = "#bbbbbb"


def draw(sampler: Sampler, path: Path) -> None:
    """Writes the plot."""
    with matplotlib.rc_context({"font.size": 9, "axes.grid": True, "grid.alpha": 0.25}):
        figure = Figure(figsize=(12, 10), layout="constrained")
        axes: Any = figure.subplots(
            5, 1, sharex=True, gridspec_kw={"height_ratios": [1.4, 1.6, 2.2, 1.4, 1.4]}
        )
        _draw_faults(sampler, axes[0])
        _draw_work(sampler, axes[1])
        for axis, (field, label) in zip(axes[2:], _PANELS, strict=True):
            _draw_field(sampler, axis, field, label)
        axes[2].legend(loc="lower left", ncols=4, fontsize=8)
        axes[-1].set_xlabel("minutes")
        minutes = sampler.seconds / 60
        figure.suptitle(
            f"{len(sampler.faults)} faults in {minutes:.1f} minutes, "
            f"{sampler.finished[-1][1]:,} closures, longest gap {sampler.longest_gap:.1f} s"
        )
        figure.savefig(path, dpi=110)


def _draw_faults(sampler: Sampler, axis: Any) -> None:
    names = [name for name in _COLORS if any(fault == name for _, fault in sampler.faults)]
    for row, name in enumerate(names):
        times = [second / 60 for second, fault in sampler.faults if fault == name]
        axis.plot(times, [row] * len(times), "|", color=_COLORS[name], markersize=9)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(-0.7, len(names) - 0.3)
    axis.set_title("faults", loc="left", fontsize=9)


def _draw_work(sampler: Sampler, axis: Any) -> None:
    """Plots the finished closures per second, and the seconds without any."""
    pairs = zip(sampler.finished, sampler.finished[1:], strict=False)
    points = [(t1 / 60, (n1 - n0) / (t1 - t0)) for (t0, n0), (t1, n1) in pairs]
    axis.plot(*zip(*points, strict=True), color="#1f77b4", linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_title("closures per second", loc="left", fontsize=9)


def _draw_field(sampler: Sampler, axis: Any, field: str, label: str) -> None:
    workers = sorted({s.task for s in sampler.samples if s.task not in _TASKS})
    for task in [*workers, *_TASKS]:
        # Each incarnation of a process has its own line.
        pids = dict.fromkeys(s.pid for s in sampler.samples if s.task == task)
        for number, pid in enumerate(pids):
            mine = [s for s in sampler.samples if s.task == task and s.pid == pid]
            axis.plot(
                [s.second / 60 for s in mine],
                [getattr(s, field) for s in mine],
                color=_TASKS.get(task, _WORKERS),
                linewidth=1.8 if task in _TASKS else 0.7,
                # The servers are similar: both lines must be visible.
                linestyle="--" if task == "ps 1" else "-",
                label=_label(task, workers) if not number else None,
            )
    axis.set_ylim(bottom=0)
    axis.set_title(label, loc="left", fontsize=9)


def _label(task: str, workers: list[str]) -> str | None:
    if task in _TASKS:
        return task
    return "workers" if task == workers[0] else None
