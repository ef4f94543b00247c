"""Simulates many histories, optionally in several processes, and sums them up."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
from collections.abc import Generator

from simulation.run import History, SimulationError, simulate
from torture import safeguards

_BATCH = 25


@dataclasses.dataclass
class Tally:
    """The totals of some histories.

    Attributes:
      num_histories: The number of histories.
      num_events: The number of their events.
      fewest_events: The number of events of the shortest one that has ended well.
      seconds: Their duration in virtual time.
      outcomes: The number of each outcome.
      landed: The number of faults of each kind that have hit running work, and of recoveries.
      broken: The text of each violation, by seed.
    """

    num_histories: int = 0
    num_events: int = 0
    fewest_events: int | None = None
    seconds: float = 0.0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    landed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    broken: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, history: History) -> None:
        """Adds a history without a violation."""
        self.num_histories += 1
        self.num_events += history.num_events
        if history.outcome == "done":
            self.fewest_events = _fewest(self.fewest_events, history.num_events)
        self.seconds += history.seconds
        self.outcomes[history.outcome] += 1
        self.landed.update(history.landed)

    def add_broken(self, error: SimulationError) -> None:
        """Adds a history with a violation."""
        self.num_histories += 1
        self.outcomes["rule broken"] += 1
        self.broken[error.seed] = str(error)

    def merge(self, other: Tally) -> None:
        """Adds the totals of other histories."""
        self.num_histories += other.num_histories
        self.num_events += other.num_events
        self.fewest_events = _fewest(self.fewest_events, other.fewest_events)
        self.seconds += other.seconds
        self.outcomes.update(other.outcomes)
        self.landed.update(other.landed)
        self.broken.update(other.broken)


def _fewest(one: int | None, other: int | None) -> int | None:
    return min((n for n in (one, other) if n is not None), default=None)


def run_batch(seeds: range, saboteur: str | None = None) -> Tally:
    """Simulates histories one after the other.

    >>> tally = run_batch(range(2))
    >>> tally.num_histories, tally.broken
    (2, {})
    """
    tally = Tally()
    with contextlib.nullcontext() if saboteur is None else safeguards.disabled(saboteur):
        for seed in seeds:
            try:
                tally.add(simulate(seed))
            except SimulationError as error:
                tally.add_broken(error)
                if saboteur is not None:
                    break
    return tally


def run_batches(
    seeds: range, num_processes: int = 1, saboteur: str | None = None
) -> Generator[Tally, None, None]:
    """Simulates histories, and yields the totals of each batch.

    Args:
      seeds: The seeds.
      num_processes: The number of processes.
      saboteur: A safeguard to disable; see `torture.safeguards`.
    """
    batches = [seeds[start : start + _BATCH] for start in range(0, len(seeds), _BATCH)]
    if num_processes < 2:
        for batch in batches:
            yield run_batch(batch, saboteur)
        return
    # Not forked: JAX has threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        try:
            yield from pool.map(run_batch, batches, [saboteur] * len(batches))
        finally:
            pool.shutdown(cancel_futures=True)
