"""The retention policy of checkpoints. Pure: no files, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from replicax.foundation import errors


@dataclasses.dataclass(frozen=True)
class Record:
    """The number of a checkpoint, the time of its save, and its metrics."""

    step: int
    saved_at: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The checkpoints to keep.

    Attributes:
      max_to_keep: The number of newest ones; None for all.
      every_n_steps: Also those whose number is a multiple of this.
      every_n_hours: Also one for each such period.
      keep_best: Also this many with the best metric.
      best_metric: The metric; "-loss" if a smaller "loss" is better.
    """

    max_to_keep: int | None = 5
    every_n_steps: int | None = None
    every_n_hours: float | None = None
    keep_best: int = 0
    best_metric: str | None = None

    def __post_init__(self) -> None:
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise _invalid("max_to_keep", self.max_to_keep)
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise _invalid("keep_every_n_steps", self.every_n_steps)
        if self.keep_best < 0 or (self.keep_best and not self.best_metric):
            raise _invalid("keep_best (which goes with best_metric)", self.keep_best)

    @property
    def needs_only_numbers(self) -> bool:
        """Whether neither the times nor the metrics of checkpoints matter."""
        return self.every_n_hours is None and not self.best_metric

    def expired(self, records: Sequence[Record]) -> list[int]:
        """Returns the numbers of the checkpoints to remove.

        >>> Policy(max_to_keep=2).expired([Record(1), Record(2), Record(3)])
        [1]
        """
        if self.max_to_keep is None:
            return []
        ordered = sorted(records, key=lambda record: record.step)
        kept = {record.step for record in ordered[-self.max_to_keep :]}
        kept.update(record.step for record in self.best(records)[: self.keep_best])
        last_kept: float | None = None
        for record in ordered:
            is_milestone = self.every_n_steps and record.step % self.every_n_steps == 0
            is_due = self.every_n_hours is not None and (
                last_kept is None or record.saved_at - last_kept >= self.every_n_hours * 3600
            )
            if is_milestone or is_due:
                kept.add(record.step)
                last_kept = record.saved_at
        return [record.step for record in ordered if record.step not in kept]

    def best(self, records: Sequence[Record]) -> list[Record]:
        """Returns the checkpoints that have the metric, the best first."""
        if not self.best_metric:
            return []
        name = self.best_metric.removeprefix("-")
        sign = 1.0 if self.best_metric.startswith("-") else -1.0
        able = [r for r in records if r.metrics.get(name, float("nan")) == r.metrics.get(name)]
        return sorted(able, key=lambda r: (sign * r.metrics[name], -r.step))


def _invalid(name: str, value: object) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(
        f"`{name}` must be positive", f"it is {value!r}", "Give a number from 1 up."
    )
