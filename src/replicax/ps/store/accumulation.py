"""Training in sync: gradients wait on the server until enough of them make one step.

Nobody waits here: what a closure contributes is kept, and acknowledged at once. The one that
makes the number full makes the step, with the mean of all. Until then values do not change.

Everything is used under the lock `changing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.store import rules
from replicax.ps.store.applied_updates import OnceTable
from replicax.ps.store.clock import Clock
from replicax.ps.store.optimizers import Optimizer, PartGradient, Step
from replicax.ps.store.parts import Part


def needed_of(attach: messages.Attach) -> int | None:
    """Returns how many gradients the coordinator wants in a step; None to mix none.

    Raises:
      InvalidArgumentError: It makes no sense.
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
    """The gradients of one part, summed.

    Attributes:
      part: The number of the part.
      dtype: The name of the type of the sum.
      shape: Its shape.
      values: Its bytes.
      numbers: If it is a sum of some rows, the bytes of their numbers.
    """

    part: int
    dtype: str
    shape: tuple[int, ...]
    values: bytes
    numbers: bytes | None


class SavedMean(msgspec.Struct, array_like=True, frozen=True):
    """What waits for one optimizer, as plain data; see `Accumulation.export`."""

    optimizer: int
    count: int
    applied_at: int
    sums: list[SavedSum]


class Accumulation:
    """What waits for the optimizers of a job on one server.

    Attributes:
      num_needed: How many gradients make a step; None if each is one by itself.
      drops_stale: Whether gradients are dropped whose values have seen a step since they
        were read.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._means: dict[int, _Mean] = {}
        self.num_needed: int | None = None
        self.drops_stale = False

    def configure(self, attach: messages.Attach) -> None:
        """Takes over what the coordinator wants; `needed_of` has found it to be good."""
        self.num_needed = needed_of(attach)
        self.drops_stale = bool(attach.settings.get("drops_stale"))

    def check(
        self,
        optimizer: Optimizer,
        apply: messages.Apply,
        buffers: Sequence[Any],
        push: messages.Push,
        once: OnceTable,
    ) -> rules.Change:
        """Returns what a gradient changes: it is kept, or makes a step, or is too late.

        Args:
          optimizer: What it is for.
          apply: What the closure said.
          buffers: The gradients.
          push: All that the closure said; it said this for the first time.
          once: What was said before.

        Raises:
          DistributeError: As `Optimizer.check`; or the closure makes a second step.
        """
        same = [c for c in push.changes if isinstance(c, messages.Apply)]
        num_steps = sum(other.optimizer == apply.optimizer for other in same)
        if num_steps > 1 or once.has_step(push.closure, apply.optimizer):
            raise _second_step(optimizer, push.closure)
        gradients = optimizer.gradients_of(apply, buffers)
        mean = self._means.setdefault(apply.optimizer, _Mean())
        if self.drops_stale and 0 <= push.clock < mean.applied_at:
            return _Dropped(self._clock)
        assert self.num_needed is not None, "somebody asked for it"
        if mean.count + 1 < self.num_needed:
            return Contribution(mean, gradients)
        total = mean.plus(gradients)
        return Completion(optimizer.step_of(total.divided(optimizer)), mean, self._clock)

    def rest(self, find: Mapping[int, Optimizer]) -> list[Completion]:
        """Returns the steps of all that waits, however little it is."""
        found: list[Completion] = []
        for number, mean in self._means.items():
            optimizer = find.get(number)
            if not mean.count:
                continue
            if optimizer is None:
                # Its variables are gone, and with them what it would change.
                mean.clear()
                continue
            step = optimizer.step_of(mean.divided(optimizer))
            found.append(Completion(step, mean, self._clock))
        return found

    def export(self) -> list[SavedMean]:
        """Returns all that waits.

        A snapshot must hold it: the closures that contributed are known to have done so.
        """
        return [
            SavedMean(
                number, mean.count, mean.applied_at, [s.export(p) for p, s in mean.sums.items()]
            )
            for number, mean in self._means.items()
        ]

    def restore(self, means: Sequence[SavedMean]) -> None:
        """Takes over what `export` returned, in place of what waits now."""
        self._means = {}
        for saved in means:
            mean = self._means[saved.optimizer] = _Mean()
            mean.count, mean.applied_at = saved.count, saved.applied_at
            mean.sums = {s.part: _Sum.restored(s) for s in saved.sums}

    def __len__(self) -> int:
        return sum(mean.count for mean in self._means.values())


class _Sum:
    """The gradients of one part, added up: as a whole, or by rows that are yet to be merged."""

    __slots__ = ("_rows", "_whole")

    def __init__(self) -> None:
        self._whole: np.ndarray | None = None
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []

    def plus(self, gradient: PartGradient) -> _Sum:
        """Returns what it would be with one more."""
        other = _Sum()
        other._rows = list(self._rows)
        if self._whole is not None and gradient.numbers is None:
            other._whole = self._whole + gradient.values
            return other
        other._whole = None if self._whole is None else self._whole.copy()
        other.add(gradient.values, gradient.numbers)
        return other

    def add(self, values: np.ndarray, numbers: np.ndarray | None) -> None:
        """Adds a gradient; what is kept of it is a copy."""
        # Many small numbers are added with more digits than they have.
        kept = np.float32 if values.dtype.itemsize < 4 else values.dtype
        if numbers is not None:
            self._rows.append((np.array(numbers, np.int64), np.array(values, kept)))
        elif self._whole is None:
            self._whole = np.array(values, kept)
        else:
            self._whole += values
        if self._whole is not None:
            for old, rows in self._rows:
                # Row numbers of one gradient differ.
                self._whole[old] += rows
            self._rows.clear()

    def divided(self, count: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the mean, and the row numbers if it is one of rows."""
        if self._whole is not None:
            return (self._whole / count).astype(dtype, copy=False), None
        numbers, rows = self._merged()
        return (rows / count).astype(dtype, copy=False), numbers

    def export(self, part: int) -> SavedSum:
        """Returns it as plain data."""
        numbers, values = (None, self._whole) if self._whole is not None else self._merged()
        octets = None if numbers is None else numbers.tobytes()
        return SavedSum(part, values.dtype.name, values.shape, values.tobytes(), octets)

    @classmethod
    def restored(cls, saved: SavedSum) -> _Sum:
        """Returns what `export` made plain."""
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
    """The gradients that wait for one optimizer.

    Attributes:
      count: How many closures have contributed.
      sums: What they brought, by part.
      applied_at: What the clock said after the last step.
    """

    __slots__ = ("applied_at", "count", "sums")

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[int, _Sum] = {}
        self.applied_at = 0

    def add(self, gradients: Sequence[PartGradient]) -> None:
        """Adds what one closure brought."""
        for gradient in gradients:
            total = self.sums.get(gradient.part)
            if total is None:
                total = self.sums[gradient.part] = _Sum()
            total.add(gradient.values, gradient.numbers)
        self.count += 1

    def plus(self, gradients: Sequence[PartGradient]) -> _Mean:
        """Returns what it would be with more; it stays as it is, in case a step fails."""
        other = _Mean()
        other.count = self.count + 1
        other.sums = dict(self.sums)
        for gradient in gradients:
            other.sums[gradient.part] = self.sums.get(gradient.part, _Sum()).plus(gradient)
        return other

    def divided(self, optimizer: Optimizer) -> list[PartGradient]:
        """Returns the mean; a closure without a gradient for some part counts as zero there."""
        found: list[PartGradient] = []
        for part, total in self.sums.items():
            dtype = optimizer.gradient_dtype(part)
            # A part that was dropped meanwhile needs no gradient.
            if dtype is not None:
                found.append(PartGradient(part, *total.divided(self.count, dtype)))
        return found

    def clear(self) -> None:
        """Starts anew."""
        self.count = 0
        self.sums = {}


class Contribution:
    """A gradient that waits for others."""

    parts: Sequence[Part] = ()
    num_rows = 0

    def __init__(self, mean: _Mean, gradients: Sequence[PartGradient]) -> None:
        self._mean = mean
        self._gradients = gradients

    def make(self) -> None:
        """Keeps it."""
        self._mean.add(self._gradients)


class _Dropped:
    """A gradient for values that are no more."""

    parts: Sequence[Part] = ()
    num_rows = 0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def make(self) -> None:
        """Counts it."""
        self._clock.num_dropped += 1


class Completion:
    """The gradient that makes a mean full, and with it a step."""

    def __init__(self, step: Step, mean: _Mean, clock: Clock) -> None:
        self._step, self._mean, self._clock = step, mean, clock
        self.parts = step.parts
        self.num_rows = step.num_rows

    def make(self) -> None:
        """Makes the step; the clock has been told."""
        self._step.make()
        self._mean.clear()
        self._mean.applied_at = self._clock.steps


def _second_step(optimizer: Optimizer, closure: int) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        f'With consistency="sync" a closure makes one step of {optimizer.label}',
        f"closure {closure} makes a second one, before the first can be seen",
        "Schedule each step as a closure of its own.",
    )
