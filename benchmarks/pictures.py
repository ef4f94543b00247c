"""Draws the plots of docs/benchmarks.md from measured numbers: `python -m benchmarks.pictures`.

`docs/benchmarks.json` holds the numbers of the last runs that were recorded, as `benchmarks.run`
writes them to out/benchmarks.json. With `--record` the numbers of that file replace those of the
same benchmarks and contestants; then all plots are drawn again. `make bench` does both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import OUT, ROOT

DOCS = ROOT / "docs"
RECORD = DOCS / "benchmarks.json"
COLORS = {"ours": "#6929c4", "handwritten": "#4c78a8", "sharded": "#72b7b2"}
COLORS |= {"tensorflow": "#f58518", "torch": "#d62728", "ahead": "#be95ff"}
LABELS = {
    "ours": "replicax",
    "handwritten": "jit(shard_map) by hand",
    "sharded": "jit + NamedSharding",
    "tensorflow": "TensorFlow",
    "ahead": "replicax, pull_ahead=True",
}


class Plot(NamedTuple):
    """A group of bars for each case, one bar for each contestant that was measured."""

    benchmark: str
    cases: Mapping[str, str]
    contestants: Sequence[str]
    unit: str
    title: str
    value: Callable[[Mapping[str, float]], float]


PLOTS = {
    "speed_steps.svg": Plot(
        "compiled_step",
        {
            "64x4x64": "MLP 64x4",
            "512x4x256": "MLP 512x4",
            "1024x8x256": "MLP 1024x8",
            "32x50x16": "100 small gradients",
        },
        ("ours", "handwritten", "sharded", "tensorflow"),
        "time of a step / that of replicax",
        "Training step on two CPU devices (less is better)",
        lambda found: found["ms"],
    ),
    "speed_parameter_servers.svg": Plot(
        "parameter_server",
        {
            "assign_add": "assign_add",
            "mlp 64x4x64": "MLP 64x4",
            "mlp 512x4x64": "MLP 512x4",
            "embedding": "4,096 rows",
        },
        ("ours", "ahead", "tensorflow"),
        "closures per second / those of TensorFlow",
        "Two servers, two workers (more is better)",
        lambda found: 1e6 / found["us"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="takes over out/benchmarks.json")
    options = parser.parse_args()
    recorded: dict[str, dict[str, dict[str, float]]] = json.loads(RECORD.read_text())
    if options.record:
        run = json.loads((OUT / "benchmarks.json").read_text())
        for benchmark, found in run["numbers"].items():
            if benchmark in {plot.benchmark for plot in PLOTS.values()}:
                recorded.setdefault(benchmark, {}).update(found)
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n")
    for name, plot in PLOTS.items():
        draw(plot, recorded[plot.benchmark], DOCS / name)


def draw(plot: Plot, numbers: Mapping[str, Mapping[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "replicax"  # the same file from the same numbers
    import matplotlib.pyplot as plt

    base = "ours" if plot.unit.endswith("replicax") else "tensorflow"
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
    names = [n for n in plot.contestants if f"{n} {next(iter(plot.cases))}" in numbers]
    width = 0.8 / len(names)
    for position, name in enumerate(names):
        heights: list[Any] = []
        for case in plot.cases:
            unit = plot.value(numbers[f"{base} {case}"])
            heights.append(plot.value(numbers[f"{name} {case}"]) / unit)
        left = [i + (position - (len(names) - 1) / 2) * width for i in range(len(plot.cases))]
        bars = axis.bar(left, heights, width * 0.92, color=COLORS[name], label=LABELS[name])
        axis.bar_label(bars, [f"{h:.2g}" for h in heights], fontsize=8, padding=1)
    axis.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    axis.set_xticks(range(len(plot.cases)), list(plot.cases.values()))
    axis.set_ylabel(plot.unit, fontsize=9)
    axis.set_title(plot.title, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
