"""Optimizers on a server: one step is one update of parts.

Note [State of an optimizer]: the slots of a part are parts, and so is the state that belongs to no
variable, such as a step count. All programs of one step get the shared state before the step; the
result of the last one is stored. So a count grows by one in each step, whatever the number of parts
with a gradient.

Note [Programs of a step]: launching a program costs more than the work on a small part. All dense
gradients of a step therefore go through one compiled program. Gradients of rows have one each, with
the number of rows padded to a power of two: a joint program would have to be compiled for each
combination of those numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.ps.store import programs, updates
from replicax.ps.store.parts import Part

# The smallest number of rows that a program is compiled for; then powers of two.
_FEWEST_ROWS = 8
# How many compiled programs an optimizer caches; a training loop needs a few.
_MOST_PROGRAMS = 256

FindPart = Callable[[int], Part]


@dataclass(frozen=True)
class _Trained:
    """A part, its state (itself and its slots), and its program."""

    part: Part
    state: tuple[Part, ...]
    index: int
    program: programs.Program
    is_row_wise: bool

    def shapes(self, num_rows: int | None) -> list[programs.Shape]:
        """Returns the shapes of gradient, value and slots, for all rows or for some."""
        shapes = [part.shape for part in (self.part, *self.state)]
        return shapes if num_rows is None else [(num_rows, *shape[1:]) for shape in shapes]


class Optimizer:
    """An optimizer on one server.

    Attributes:
      spec: The request that created it.
      label: Its name in errors.
      programs: Its serialized programs.
      state: The numbers of the parts that hold its slots and its shared state.
    """

    def __init__(
        self, spec: messages.RegisterOptimizer, buffers: Sequence[Buffer], find: FindPart, task: str
    ) -> None:
        self.spec = spec
        self.label = f"optimizer {spec.optimizer} on {task}"
        self.programs = [bytes(buffer) for buffer in buffers]
        loaded = [programs.Program(buffer, self.label) for buffer in self.programs]
        self._keys = [program.key for program in loaded]
        self._shared = tuple(find(number) for number in spec.shared)
        self._trained: dict[int, _Trained] = {}
        self._compiled: dict[tuple[object, ...], programs.Compiled] = {}
        slots = [number for trained in spec.trained for number in trained.slots]
        self.state = frozenset([*slots, *spec.shared])
        self._require_distinct([*(t.part for t in spec.trained), *slots, *spec.shared])
        for trained in spec.trained:
            self._trained[trained.part] = self._adopt(trained, loaded, find)

    @property
    def trained(self) -> list[int]:
        """The numbers of the parts that it still trains."""
        return list(self._trained)

    def warm_up(self) -> None:
        """Compiles the program of a step with dense gradients of all parts."""
        full = [trained for trained in self._trained.values() if trained.part.num_bytes]
        # Parts that can be trained by rows usually are, if there are others.
        usual = [trained for trained in full if not trained.is_row_wise] or full
        if usual:
            self._whole(usual)

    def is_created_by(self, spec: messages.RegisterOptimizer, buffers: Sequence[Buffer]) -> bool:
        """Returns whether a request repeats the one that created it."""
        return self.spec == spec and self._keys == [programs.key_of(buffer) for buffer in buffers]

    def keep(self, parts: Mapping[int, Part]) -> int:
        """Stops training parts that are not among these; returns how many it still trains.

        Without its shared state it trains none.
        """
        has_shared = all(parts.get(part.spec.part) is part for part in self._shared)
        self._trained = {
            number: trained
            for number, trained in self._trained.items()
            if has_shared and all(parts.get(p.spec.part) is p for p in trained.state)
        }
        return len(self._trained)

    def check(self, apply: messages.Apply, buffers: Sequence[Buffer]) -> Step:
        """Validates a step.

        Raises:
          NotFoundError: It does not train one of the parts.
          InvalidArgumentError: A part has two gradients, or rows are out of range.
          ProtocolError: A gradient has the wrong size.
        """
        return self.step_of(self.gradients_of(apply, buffers))

    def gradients_of(self, apply: messages.Apply, buffers: Sequence[Buffer]) -> list[PartGradient]:
        """Returns the gradients of a request; raises as `check`."""
        found: list[PartGradient] = []
        position = 0
        seen: set[int] = set()
        for gradient in apply.gradients:
            trained = self._trained.get(gradient.part)
            if trained is None or gradient.part in seen:
                raise self._unexpected(gradient.part, is_known=trained is not None)
            seen.add(gradient.part)
            used = 2 if gradient.is_rows else 1
            found.append(_checked(trained, gradient, buffers[position : position + used]))
            position += used
        return found

    def gradient_dtype(self, part: int) -> np.dtype | None:
        """Returns the type of the gradients of a part; None if it does not train the part."""
        trained = self._trained.get(part)
        return None if trained is None else trained.program.arguments[0].dtype

    def step_of(self, gradients: Sequence[PartGradient]) -> Step:
        """Returns the step for some gradients, at most one for each part that it trains."""
        whole: list[_Gradient] = []
        rows: list[_Gradient] = []
        for gradient in gradients:
            trained = self._trained[gradient.part]
            # Programs do not take empty arrays.
            if trained.part.num_bytes:
                fitted = _fitted(trained, gradient)
                (whole if fitted.numbers is None else rows).append(fitted)
        runs = [_Run([g], self._rows(g.trained, g.gradient.shape[0])) for g in rows]
        if whole:
            runs.append(_Run(whole, self._whole([g.trained for g in whole])))
        if not runs:
            runs += self._shared_only()
        return Step(runs, self._shared)

    def _shared_only(self) -> list[_Run]:
        """Returns a run that updates only the shared state, if other servers have the gradients."""
        full = (trained for trained in self._trained.values() if trained.part.num_bytes)
        some = next(full, None)
        if some is None:
            return []
        zeros = np.zeros(some.part.shape, some.program.arguments[0].dtype)
        gradient = _Gradient(some, zeros, is_kept=False)
        return [_Run([gradient], self._whole([some]))]

    def _whole(self, trained: Sequence[_Trained]) -> programs.Compiled:
        """Returns the program for dense gradients of some parts."""
        key = tuple(t.part.spec.part for t in trained)
        compiled = self._compiled.get(key)
        return compiled or self._compile(key, [(t, t.shapes(None)) for t in trained])

    def _rows(self, trained: _Trained, num_rows: int) -> programs.Compiled:
        """Returns the program for a gradient of `num_rows` rows of a part."""
        shapes = trained.shapes(num_rows)
        key = trained.index, *shapes
        compiled = self._compiled.get(key)
        return compiled or self._compile(key, [(trained, shapes)])

    def _compile(
        self, key: tuple[object, ...], trained: Sequence[tuple[_Trained, list[programs.Shape]]]
    ) -> programs.Compiled:
        shared = [part.shape for part in self._shared]
        bundle = [(t.program, shapes) for t, shapes in trained]
        compiled = programs.Compiled(bundle, shared, self.label)
        kept = [shape for _, shapes in trained for shape in shapes[1:]] + shared
        if compiled.shapes != kept:
            raise self._invalid(f"programs that return shapes {kept}", f"got {compiled.shapes}")
        if len(self._compiled) >= _MOST_PROGRAMS:
            # Evicts the oldest; threads that use it hold a reference.
            self._compiled.pop(next(iter(self._compiled)), None)
        self._compiled[key] = compiled
        return compiled

    def _adopt(
        self, trained: messages.TrainedPart, loaded: list[programs.Program], find: FindPart
    ) -> _Trained:
        part = find(trained.part)
        slots = tuple(find(number) for number in trained.slots)
        if not 0 <= trained.program < len(loaded):
            found = f"program {trained.program} of {len(loaded)} was given"
            raise self._invalid(f"a program for {part.label}", found)
        program = loaded[trained.program]
        arguments = [part, part, *slots, *self._shared]
        if len(program.arguments) != len(arguments) or len(program.results) != len(arguments) - 1:
            raise self._invalid(
                f"a program for {part.label} that takes {len(arguments)} arrays and returns "
                f"{len(arguments) - 1}",
                f"it takes {len(program.arguments)} and returns {len(program.results)}",
            )
        # The gradient may have another type.
        taken = zip(program.arguments[1:], program.results, arguments[1:], strict=True)
        for argument, result, other in taken:
            for found in (argument, result):
                if not programs.accepts(found, other.shape, other.dtype):
                    expected = f"{other.dtype}{list(other.shape)} for {other.label}"
                    raise self._invalid(f"a program that takes and returns {expected}", str(found))
        if trained.is_row_wise and any(slot.num_rows != part.num_rows for slot in slots):
            required = f"as many rows in the slots as in {part.label}, to update rows separately"
            raise self._invalid(required, f"they have {[slot.num_rows for slot in slots]}")
        is_row_wise = trained.is_row_wise and bool(part.shape)
        return _Trained(part, (part, *slots), trained.program, program, is_row_wise)

    def _require_distinct(self, numbers: list[int]) -> None:
        if len(set(numbers)) < len(numbers):
            twice = sorted({number for number in numbers if numbers.count(number) > 1})
            raise self._invalid("distinct parts", f"parts {twice} are named twice")

    def _unexpected(self, number: int, *, is_known: bool) -> errors.DistributeError:
        if is_known:
            return self._invalid("one gradient for each part", f"part {number} has two")
        return errors.NotFoundError(
            f"{self.label} needs gradients of parts that it was registered for",
            f"part {number} is not one of them",
            "Build the optimizer with all variables that it trains.",
        )

    def _invalid(self, required: str, found: str) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            f"{self.label} needs {required}", found, "Register it again."
        )


class PartGradient(NamedTuple):
    """A validated gradient.

    Attributes:
      part: The number of the part.
      values: The gradient of all rows, or of some.
      numbers: The unique numbers of those rows; None for all.
    """

    part: int
    values: np.ndarray
    numbers: np.ndarray | None = None


@dataclass(frozen=True)
class _Gradient:
    """A gradient as an argument of its program.

    Attributes:
      trained: The part that it trains.
      gradient: The gradient, padded.
      numbers: The rows that it updates; None for all.
      taken: The rows to read: the same, padded.
      is_kept: Whether the results for the part are stored.
    """

    trained: _Trained
    gradient: np.ndarray
    numbers: np.ndarray | None = None
    taken: np.ndarray | None = None
    is_kept: bool = True

    def arguments(self) -> list[np.ndarray]:
        """Returns the arguments of its program, without the shared state."""
        if self.taken is None:
            return [self.gradient, *(part.value for part in self.trained.state)]
        return [self.gradient, *(part.take_rows(self.taken) for part in self.trained.state)]

    def store(self, results: Sequence[np.ndarray]) -> None:
        """Stores the results of its program."""
        if not self.is_kept:
            return
        for part, value in zip(self.trained.state, results, strict=True):
            if self.numbers is None:
                part.adopt(value)
            else:
                part.put_rows(self.numbers, value[: self.numbers.size])


@dataclass(frozen=True)
class _Run:
    """Gradients of one compiled program."""

    gradients: list[_Gradient]
    compiled: programs.Compiled


def _checked(
    trained: _Trained, gradient: messages.Gradient, buffers: Sequence[Buffer]
) -> PartGradient:
    part = trained.part
    dtype = trained.program.arguments[0].dtype
    if not gradient.is_rows:
        values = updates.as_array(buffers[0], dtype, part.shape, part.label)
        return PartGradient(gradient.part, values)
    if not part.shape:
        raise errors.InvalidArgumentError(
            "A gradient of rows needs rows", f"{part.label} has none", "Send a dense gradient."
        )
    numbers = updates.as_row_numbers(buffers[0], part)
    shape = (numbers.size, *part.shape[1:])
    rows = updates.as_array(buffers[1], dtype, shape, part.label)
    return PartGradient(gradient.part, rows, numbers)


def _fitted(trained: _Trained, gradient: PartGradient) -> _Gradient:
    if gradient.numbers is None:
        return _Gradient(trained, gradient.values)
    if trained.is_row_wise:
        return _padded(trained, gradient.numbers, gradient.values)
    dense = np.zeros(trained.part.shape, gradient.values.dtype)
    dense[gradient.numbers] = gradient.values
    return _Gradient(trained, dense)


def _padded(trained: _Trained, numbers: np.ndarray, rows: np.ndarray) -> _Gradient:
    """Pads a gradient of rows to a power of two, so that few programs are compiled.

    The padding reads an existing row, with a gradient of zero; its result is not used.
    """
    count = numbers.size
    size = max(_FEWEST_ROWS, 1 << (count - 1).bit_length()) if count else _FEWEST_ROWS
    if size == count:
        return _Gradient(trained, rows, numbers, numbers)
    taken = np.full(size, numbers[0] if count else 0, np.intp)
    taken[:count] = numbers
    filled = np.zeros((size, *rows.shape[1:]), rows.dtype)
    filled[:count] = rows
    return _Gradient(trained, filled, numbers, taken)


class Step:
    """One step of an optimizer on one server; see Note [State of an optimizer]."""

    def __init__(self, runs: list[_Run], shared: tuple[Part, ...]) -> None:
        self._runs = runs
        self._shared = shared
        gradients = [gradient for run in runs for gradient in run.gradients]
        self.parts: Sequence[Part] = (*(p for g in gradients for p in g.trained.state), *shared)
        self.num_rows = sum(g.numbers.size for g in gradients if g.numbers is not None)

    def apply(self) -> None:
        """Makes the step; nothing is written before every program has run."""
        shared = [part.value for part in self._shared]
        results: list[list[np.ndarray]] = []
        for run in self._runs:
            arguments = [a for gradient in run.gradients for a in gradient.arguments()]
            results.append(run.compiled.call([*arguments, *shared]))
        for run, result in zip(self._runs, results, strict=True):
            start = 0
            for gradient in run.gradients:
                count = len(gradient.trained.state)
                gradient.store(result[start : start + count])
                start += count
        if results:
            last = results[-1][len(results[-1]) - len(self._shared) :]
            for part, value in zip(self._shared, last, strict=True):
                part.adopt(value)
