"""`python -m simulation`: simulates histories, and shows the trace of a seed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from replicax.foundation import lazy
from simulation.batches import Tally, run_batch, run_batches
from simulation.run import simulate
from torture import safeguards

if TYPE_CHECKING:
    from rich import console as rich_console
    from rich import progress as rich_progress
else:
    rich_console = lazy.module("rich.console")
    rich_progress = lazy.module("rich.progress")

_MAX_REPORTS = 3
_LINE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if an invariant was violated."""
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _show_one(options.seed, options.trace, options.saboteur)
    seeds = range(*options.seeds)
    begun_s = time.monotonic()
    tally = _simulate(seeds, options.processes, options.saboteur)
    _print(_summary(tally, time.monotonic() - begun_s))
    for report in list(tally.broken.values())[:_MAX_REPORTS]:
        _print("", report)
    return 1 if tally.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulation",
        description="Simulates jobs on clusters with faults.",
    )
    parser.add_argument("--seed", type=int, help="simulate one history")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the whole trace")
    parser.add_argument(
        "--seeds", type=_seeds, default=(0, 1000), help="first:end, 0:1000 by default"
    )
    parser.add_argument("--processes", type=int, default=1, help="the number of processes")
    parser.add_argument(
        "--saboteur",
        choices=safeguards.NAMES,
        help="disable a safeguard",
    )
    return parser


def _seeds(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    return int(first), int(end)


def _show_one(seed: int, is_traced: bool, saboteur: str | None) -> int:
    tally = run_batch(range(seed, seed + 1), saboteur)
    if tally.broken:
        _print(tally.broken[seed])
        return 1
    if is_traced:
        _print(*simulate(seed).trace)
    _print(_summary(tally, None))
    return 0


def _simulate(seeds: range, num_processes: int, saboteur: str | None) -> Tally:
    tally = Tally()
    bar = _bar(len(seeds)) if sys.stdout.isatty() else None
    shown_s = time.monotonic()
    batches = run_batches(seeds, num_processes, saboteur)
    try:
        for batch in batches:
            tally.merge(batch)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=tally.num_histories)
            elif time.monotonic() - shown_s >= _LINE_S:
                shown_s = time.monotonic()
                _print(
                    f"{tally.num_histories} of {len(seeds)} histories, {len(tally.broken)} broken"
                )
            if saboteur is not None and tally.broken:
                break
    finally:
        batches.close()
        if bar is not None:
            bar.stop()
    return tally


def _bar(total: int) -> rich_progress.Progress:
    columns = (
        rich_progress.TextColumn("histories"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    bar = rich_progress.Progress(*columns, console=rich_console.Console(file=sys.stdout))
    bar.add_task("histories", total=total)
    bar.start()
    return bar


def _summary(tally: Tally, seconds: float | None) -> str:
    took = "" if seconds is None else f" in {seconds:.1f} s"
    return "\n".join(
        (
            f"{tally.num_histories} histories{took}: {tally.num_events} events, at least "
            f"{tally.fewest_events} each, {tally.seconds:.0f} virtual seconds",
            f"ended: {_counts(tally.outcomes)}",
            f"faults that hit running work: {_counts(tally.landed)}",
            f"violations: {len(tally.broken)}"
            + (f", by seeds {', '.join(map(str, sorted(tally.broken)))}" if tally.broken else ""),
        )
    )


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
