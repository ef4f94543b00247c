"""Runs all benchmarks: `python -m benchmarks.run [--quick] [--no-tf] [--only NAME …]`.

Prints a table and writes the numbers, with machine and versions, to out/benchmarks.json.
Only ratios hold on a shared machine, which is why contestants take turns. The exit status is
1 if a target is missed or a contestant fails; with --quick, only if a contestant fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    call_overhead,
    central_storage,
    checkpoints,
    compiled_step,
    eager_all_reduce,
    import_time,
    input_epoch,
    input_wait,
    keras,
    keras_parameter_server,
    launcher,
    metric_read,
    multi_worker,
    observing,
    parameter_server,
    parameter_server_peers,
    parameter_server_scale,
    peer_environments,
    ports,
    secure_transport,
    snapshots,
    sparse_step,
    tracing,
    transformer_step,
    virtual_replicas,
)
from benchmarks.harness import OUT, ContestantFailed, Row, Settings

BENCHMARKS: tuple[ModuleType, ...] = (
    compiled_step,
    transformer_step,
    central_storage,
    call_overhead,
    import_time,
    eager_all_reduce,
    virtual_replicas,
    input_epoch,
    input_wait,
    sparse_step,
    metric_read,
    checkpoints,
    parameter_server,
    parameter_server_peers,
    parameter_server_scale,
    snapshots,
    observing,
    secure_transport,
    tracing,
    multi_worker,
    keras,
    keras_parameter_server,
    ports,
    launcher,
)
PACKAGES = ("replicax", "jax", "jaxlib", "numpy")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round; not to be trusted")
    parser.add_argument("--no-tf", action="store_true", help="leave TensorFlow out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of benchmarks to run")
    options = parser.parse_args()
    progress = Console(stderr=True, highlight=False)

    def report(text: str) -> None:
        progress.print(text, markup=False, soft_wrap=True)

    failures: list[str] = []
    chosen = [b for b in BENCHMARKS if not options.only or name_of(b) in options.only]
    peers: dict[str, str] = {}
    for peer in sorted({peer for b in chosen for peer in getattr(b, "PEERS", ())}):
        if peer == "tensorflow" and options.no_tf:
            continue
        try:
            peers[peer] = peer_environments.python(peer, report)
        except (subprocess.SubprocessError, OSError) as error:
            failures.append(f"{peer} is left out: {error}")
            report(failures[-1])
    rounds, seconds = (1, 0.3) if options.quick else (3, 2.0)
    settings = Settings(rounds=rounds, seconds=seconds, timeout=300.0, peers=peers)
    machine = describe_machine(peers)

    rows: list[Row] = []
    numbers: dict[str, Any] = {}
    for benchmark in chosen:
        try:
            measured, found = benchmark.run(settings, report)
        except ContestantFailed as error:
            failures.append(str(error))
            report(f"Failed: {error}")
            continue
        rows += found
        numbers[name_of(benchmark)] = {
            f"{who} {case}": best for (who, case), best in measured.items()
        }

    # A table cut to 80 columns loses its cells; a pipe has no width of its own.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(table_of(rows))
    path = OUT / "benchmarks.json"
    save(path, settings, machine, numbers, rows, failures)
    console.print(f"Numbers: {path.relative_to(OUT.parent)}", *failures, sep="\n", markup=False)
    missed = not options.quick and any(row.passed is False for row in rows)
    return int(bool(failures) or missed)


def name_of(benchmark: ModuleType) -> str:
    return benchmark.__name__.rpartition(".")[2]


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Speed, best of the rounds")
    for column in ("what", "case"):
        table.add_column(column)
    for column in ("ours", "peer", "ratio", "target"):
        table.add_column(column, justify="right")
    table.add_column("pass", justify="center")
    outcomes = {True: "[green]yes", False: "[red]no", None: ""}
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        cells = (row.what, row.case, row.ours, row.peer, ratio, row.target, outcomes[row.passed])
        is_last = following is not None and following.what != row.what
        table.add_row(*cells, end_section=is_last)
    return table


def describe_machine(peers: dict[str, str]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    for peer, interpreter in peers.items():
        versions[peer] = peer_environments.version(peer, interpreter)
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(
    path: Path,
    settings: Settings,
    machine: dict[str, Any],
    numbers: dict[str, Any],
    rows: Sequence[Row],
    failures: Sequence[str],
) -> None:
    path.parent.mkdir(exist_ok=True)
    content = {
        "machine": machine,
        "settings": {"rounds": settings.rounds, "seconds": settings.seconds},
        "table": [dataclasses.asdict(row) for row in rows],
        "numbers": numbers,
        "failures": list(failures),
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
