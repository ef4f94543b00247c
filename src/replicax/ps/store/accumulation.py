"""Synchronous training: a server accumulates gradients until enough of them make one step.

A gradient is acknowledged as soon as it is accumulated; no request blocks. The last gradient of a
round applies the mean of all. Until then the values do not change.

Everything is used under the write lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.ps.store import updates
from replicax.ps.store.applied_updates import AppliedUpdates
from replicax.ps.store.optimizers import Optimizer, PartGradient, Step
from replicax.ps.store.parts import Part


class StepClock:
    """Counts steps of training, and the staleness of the gradients that arrive.

    Used under the write lock; `steps` may be read without it.

    >>> clock = StepClock()
    >>> for _ in range(3):
    ...     clock.tick()
    >>> clock.measure(read_at=1)
    >>> clock.counters()["staleness_max"]
    2

    Attributes:
      steps: How many steps the values have seen.
      num_dropped: How many gradients were dropped because they arrived too late.
    """

    __slots__ = ("_count", "_max", "_sum", "num_dropped", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.num_dropped = 0
        self._sum = 0
        self._count = 0
        self._max = 0

    def tick(self) -> None:
        """Counts a step."""
        self.steps += 1

    def measure(self, read_at: int) -> None:
        """Records the staleness of a gradient for values that were read at step `read_at`."""
        # The clock of a restored server is as old as its values.
        staleness = max(self.steps - read_at, 0)
        self._sum += staleness
        self._count += 1
        if staleness > self._max:
            self._max = staleness

    def counters(self) -> dict[str, int]:
        """Returns the counters by name."""
        return {
            "clock": self.steps,
            "staleness_sum": self._sum,
            "staleness_count": self._count,
            "staleness_max": self._max,
            "stale_dropped": self.num_dropped,
        }


def needed_of(attach: messages.Attach) -> int | None:
    """Returns how many gradients make a step; None if each gradient is a step.

    Raises:
      InvalidArgumentError: The setting is invalid.
    """
    needed = attach.settings.get("aggregate")
    if needed is None or (isinstance(needed, int) and not isinstance(needed, bool) and needed > 0):
        return needed
    raise errors.InvalidArgumentError(
        "The setting 'aggregate' must be a positive int or None",
        f"it is {needed!r}",
        "Check that all tasks run the same version.",
    )


class SavedSum(msgspec.Struct, array_like=True, frozen=True):
    """The sum of the gradients of one part.

    Attributes:
      part: The number of the part.
      dtype: The name of its type.
      shape: Its shape.
      values: Its bytes.
      numbers: The bytes of the row numbers, if it is a sum of some rows.
    """

    part: int
    dtype: str
    shape: tuple[int, ...]
    values: bytes
    numbers: bytes | None


class SavedMean(msgspec.Struct, array_like=True, frozen=True):
    """The accumulated gradients of one optimizer; see `Accumulation.export`."""

    optimizer: int
    count: int
    applied_at: int
    sums: list[SavedSum]


class Accumulation:
    """The accumulated gradients of a job on one server.

    Attributes:
      num_needed: How many gradients make a step; None if each gradient is a step.
      drops_stale: Whether to drop gradients whose values have seen a step since they were read.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._means: dict[int, _Mean] = {}
        self.num_needed: int | None = None
        self.drops_stale = False

    def configure(self, attach: messages.Attach) -> None:
        """Applies the settings of the coordinator, which `needed_of` has validated."""
        self.num_needed = needed_of(attach)
        self.drops_stale = bool(attach.settings.get("drops_stale"))

    def check(
        self,
        optimizer: Optimizer,
        apply: messages.Apply,
        buffers: Sequence[Buffer],
        push: messages.Push,
        applied: AppliedUpdates,
    ) -> updates.CheckedUpdate:
        """Returns the effect of a gradient: it is accumulated, completes a step, or is dropped.

        Args:
          optimizer: The optimizer of the gradient.
          apply: The request to apply it, which is new.
          buffers: The gradients.
          push: All changes of the closure.
          applied: The updates applied before.

        Raises:
          DistributeError: As `Optimizer.check`; or the closure makes a second step.
        """
        same = [c for c in push.changes if isinstance(c, messages.Apply)]
        num_steps = sum(other.optimizer == apply.optimizer for other in same)
        if num_steps > 1 or applied.has_step(push.closure, apply.optimizer):
            raise _second_step(optimizer, push.closure)
        gradients = optimizer.gradients_of(apply, buffers)
        mean = self._means.setdefault(apply.optimizer, _Mean())
        if self.drops_stale and 0 <= push.clock < mean.applied_at:
            return _Dropped(self._clock)
        assert self.num_needed is not None
        if mean.count + 1 < self.num_needed:
            return Contribution(mean, gradients)
        total = mean.plus(gradients)
        return Completion(optimizer.step_of(total.divided(optimizer)), mean, self._clock)

    def rest(self, find: Mapping[int, Optimizer]) -> list[Completion]:
        """Returns the steps of all accumulated gradients, complete or not."""
        found: list[Completion] = []
        for number, mean in self._means.items():
            optimizer = find.get(number)
            if not mean.count:
                continue
            if optimizer is None:
                # Its variables were dropped.
                mean.clear()
                continue
            step = optimizer.step_of(mean.divided(optimizer))
            found.append(Completion(step, mean, self._clock))
        return found

    def export(self) -> list[SavedMean]:
        """Returns all accumulated gradients.

        A snapshot must contain them: their closures are recorded as applied.
        """
        return [
            SavedMean(
                number, mean.count, mean.applied_at, [s.export(p) for p, s in mean.sums.items()]
            )
            for number, mean in self._means.items()
        ]

    def restore(self, means: Sequence[SavedMean]) -> None:
        """Replaces the accumulated gradients by a result of `export`."""
        self._means = {}
        for saved in means:
            mean = self._means[saved.optimizer] = _Mean()
            mean.count, mean.applied_at = saved.count, saved.applied_at
            mean.sums = {s.part: _Sum.restored(s) for s in saved.sums}

    def __len__(self) -> int:
        return sum(mean.count for mean in self._means.values())


class _Sum:
    """The sum of the gradients of one part: dense, or rows that are merged when needed."""

    __slots__ = ("_rows", "_whole")

    def __init__(self) -> None:
        self._whole: np.ndarray | None = None
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def plus(self, gradient: PartGradient) -> _Sum:
        """Returns the sum with one more gradient."""
        other = _Sum()
        other._rows = list(self._rows)
        if self._whole is not None and gradient.numbers is None:
            other._whole = self._whole + gradient.values
            return other
        other._whole = None if self._whole is None else self._whole.copy()
        other.add(gradient.values, gradient.numbers)
        return other

    def add(self, values: np.ndarray, numbers: np.ndarray | None) -> None:
        """Adds a gradient, which is copied."""
        # Narrow types are summed in float32.
        kept = np.float32 if values.dtype.itemsize < 4 else values.dtype
        if numbers is not None:
            self._rows.append((np.array(numbers, np.int64), np.array(values, kept)))
        elif self._whole is None:
            self._whole = np.array(values, kept)
        else:
            self._whole += values
        if self._whole is not None:
            for old, rows in self._rows:
                # The row numbers of one gradient are unique.
                self._whole[old] += rows
            self._rows.clear()

    def divided(self, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the mean, and its row numbers if it is sparse."""
        if self._whole is not None:
            return (self._whole / count).astype(dtype, copy=False), None
        numbers, rows = self._merged()
        return (rows / count).astype(dtype, copy=False), numbers

    def export(self, part: int) -> SavedSum:
        """Returns the sum as plain data."""
        numbers, values = (None, self._whole) if self._whole is not None else self._merged()
        octets = None if numbers is None else numbers.tobytes()
        return SavedSum(part, values.dtype.name, values.shape, values.tobytes(), octets)

    @classmethod
    def restored(cls, saved: SavedSum) -> _Sum:
        """Returns the sum that `export` saved."""
        values = np.frombuffer(saved.values, jnp.dtype(saved.dtype)).reshape(saved.shape)
        numbers = None if saved.numbers is None else np.frombuffer(saved.numbers, np.int64)
        found = cls()
        found.add(values, numbers)
        return found

    def _merged(self) -> tuple[np.ndarray, np.ndarray]:
        if len(self._rows) == 1:
            return self._rows[0]
        numbers = np.concatenate([n for n, _ in self._rows])
        rows = np.concatenate([r for _, r in self._rows])
        if numbers.size:
            order = np.argsort(numbers, kind="stable")
            numbers, rows = numbers[order], rows[order]
            first = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
            numbers, rows = numbers[first], np.add.reduceat(rows, first, axis=0)
        return numbers, rows


class _Mean:
    """The accumulated gradients of one optimizer.

    Attributes:
      count: How many closures have contributed.
      sums: The sum of their gradients, by part.
      applied_at: The clock after the last step.
    """

    __slots__ = ("applied_at", "count", "sums")

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[int, _Sum] = {}
        self.applied_at = 0

    def add(self, gradients: Sequence[PartGradient]) -> None:
        """Adds the gradients of one closure."""
        for gradient in gradients:
            total = self.sums.get(gradient.part)
            if total is None:
                total = self.sums[gradient.part] = _Sum()
            total.add(gradient.values, gradient.numbers)
        self.count += 1

    def plus(self, gradients: Sequence[PartGradient]) -> _Mean:
        """Returns the mean with more gradients; `self` is unchanged, in case a step fails."""
        other = _Mean()
        other.count = self.count + 1
        other.sums = dict(self.sums)
        for gradient in gradients:
            other.sums[gradient.part] = self.sums.get(gradient.part, _Sum()).plus(gradient)
        return other

    def divided(self, optimizer: Optimizer) -> list[PartGradient]:
        """Returns the mean; a missing gradient of a closure counts as zero."""
        found: list[PartGradient] = []
        for part, total in self.sums.items():
            dtype = optimizer.gradient_dtype(part)
            # None for a part that was dropped meanwhile.
            if dtype is not None:
                found.append(PartGradient(part, *total.divided(self.count, dtype)))
        return found

    def clear(self) -> None:
        """Removes all gradients."""
        self.count = 0
        self.sums = {}


class Contribution:
    """A gradient that is accumulated."""

    parts: Sequence[Part] = ()
    num_rows = 0

    def __init__(self, mean: _Mean, gradients: Sequence[PartGradient]) -> None:
        self._mean = mean
        self._gradients = gradients

    def apply(self) -> None:
        """Adds it to the sum."""
        self._mean.add(self._gradients)


class _Dropped:
    """A stale gradient that is not used."""

    parts: Sequence[Part] = ()
    num_rows = 0

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def apply(self) -> None:
        """Counts it."""
        self._clock.num_dropped += 1


class Completion:
    """The last gradient of a round, which makes a step."""

    def __init__(self, step: Step, mean: _Mean, clock: StepClock) -> None:
        self._step, self._mean, self._clock = step, mean, clock
        self.parts = step.parts
        self.num_rows = step.num_rows

    def apply(self) -> None:
        """Makes the step; the clock has ticked."""
        self._step.apply()
        self._mean.clear()
        self._mean.applied_at = self._clock.steps


def _second_step(optimizer: Optimizer, closure: int) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f'With consistency="sync" a closure makes one step of {optimizer.label}',
        f"closure {closure} makes a second one before the first is applied",
        "Schedule each step as a separate closure.",
    )
