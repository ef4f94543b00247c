"""How an optimizer changes the parts of a server: one step as one change.

Note [State of an optimizer]: the slots of a part are parts, and so is the state that belongs to
no variable, such as a count of steps. All programs of one step get the shared state as it was
before the step; what the last one returns is kept. So a count grows by one in each step,
whatever the number of parts that have a gradient in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.parameter_server import programs, rules
from replicax.parameter_server.parts import Part
from replicax.transport import messages

# The smallest number of rows that a program is compiled for; then powers of two.
_FEWEST_ROWS = 8

FindPart = Callable[[int], Part]


@dataclass(frozen=True)
class _Trained:
    """A part, the state that changes with it (itself and its slots), and its program."""

    part: Part
    state: tuple[Part, ...]
    program: programs.Program
    is_row_wise: bool

    def shapes(self, num_rows: int | None) -> list[programs.Shape]:
        """Returns the shapes of gradient, value and slots, for all rows or for some."""
        shapes = [part.shape for part in (self.part, *self.state)]
        return shapes if num_rows is None else [(num_rows, *shape[1:]) for shape in shapes]


class Optimizer:
    """An optimizer as one server knows it.

    Attributes:
      spec: The request that made it.
      label: What errors call it.
      state: The numbers of the parts that hold its slots and its shared state.
    """

    def __init__(
        self, spec: messages.RegisterOptimizer, buffers: Sequence[Any], find: FindPart, task: str
    ) -> None:
        self.spec = spec
        self.label = f"optimizer {spec.optimizer} on {task}"
        loaded = [programs.Program(buffer, self.label) for buffer in buffers]
        self._keys = [program.key for program in loaded]
        self._shared = tuple(find(number) for number in spec.shared)
        self._trained: dict[int, _Trained] = {}
        slots = [number for trained in spec.trained for number in trained.slots]
        self.state = frozenset([*slots, *spec.shared])
        self._require_distinct([*(t.part for t in spec.trained), *slots, *spec.shared])
        for trained in spec.trained:
            self._trained[trained.part] = self._adopt(trained, loaded, find)

    def warm_up(self) -> None:
        """Compiles what a step with gradients of whole parts needs."""
        for trained in self._trained.values():
            if trained.part.num_bytes:
                self._compile(trained, None)

    def is_made_by(self, spec: messages.RegisterOptimizer, buffers: Sequence[Any]) -> bool:
        """Tells whether a request is a repetition of the one that made it."""
        return self.spec == spec and self._keys == [programs.key_of(buffer) for buffer in buffers]

    def keep(self, parts: Mapping[int, Part]) -> int:
        """Forgets what needs other parts than these; returns how many it still changes.

        Without its shared state it can change none.
        """
        has_shared = all(parts.get(part.spec.part) is part for part in self._shared)
        self._trained = {
            number: trained
            for number, trained in self._trained.items()
            if has_shared and all(parts.get(p.spec.part) is p for p in trained.state)
        }
        return len(self._trained)

    def check(self, apply: messages.Apply, buffers: Sequence[Any]) -> Step:
        """Returns the step that a closure asks for.

        Raises:
          NotFoundError: It does not change one of the parts.
          InvalidArgumentError: A part has two gradients, or rows are out of range.
          ProtocolError: A gradient has the wrong size.
        """
        gradients: list[_Gradient] = []
        position = 0
        seen: set[int] = set()
        for gradient in apply.gradients:
            trained = self._trained.get(gradient.part)
            if trained is None or gradient.part in seen:
                raise self._unexpected(gradient.part, is_known=trained is not None)
            seen.add(gradient.part)
            used = 2 if gradient.is_rows else 1
            checked = _checked(trained, gradient, buffers[position : position + used])
            position += used
            # A program knows no arrays without rows; there is nothing to do for them.
            if trained.part.num_bytes:
                self._compile(trained, None if checked.taken is None else checked.taken.size)
                gradients.append(checked)
        return Step(gradients, self._shared)

    def _adopt(
        self, trained: messages.TrainedPart, loaded: list[programs.Program], find: FindPart
    ) -> _Trained:
        part = find(trained.part)
        slots = tuple(find(number) for number in trained.slots)
        if not 0 <= trained.program < len(loaded):
            found = f"program {trained.program} of {len(loaded)} is named"
            raise self._invalid(f"a program for {part.label}", found)
        program = loaded[trained.program]
        arguments = [part, part, *slots, *self._shared]
        if len(program.arguments) != len(arguments) or len(program.results) != len(arguments) - 1:
            raise self._invalid(
                f"a program for {part.label} that takes {len(arguments)} arrays and returns "
                f"{len(arguments) - 1}",
                f"it takes {len(program.arguments)} and returns {len(program.results)}",
            )
        # The gradient may have a type of its own.
        taken = zip(program.arguments[1:], program.results, arguments[1:], strict=True)
        for argument, result, other in taken:
            for found in (argument, result):
                if not programs.accepts(found, other.shape, other.dtype):
                    expected = f"{other.dtype}{list(other.shape)} for {other.label}"
                    raise self._invalid(f"a program that takes and returns {expected}", str(found))
        if trained.is_row_wise and any(slot.num_rows != part.num_rows for slot in slots):
            required = f"as many rows in the slots as in {part.label}, to change some rows alone"
            raise self._invalid(required, f"they have {[slot.num_rows for slot in slots]}")
        return _Trained(part, (part, *slots), program, trained.is_row_wise and bool(part.shape))

    def _require_distinct(self, numbers: list[int]) -> None:
        if len(set(numbers)) < len(numbers):
            twice = sorted({number for number in numbers if numbers.count(number) > 1})
            raise self._invalid("each part in one place", f"parts {twice} are named twice")

    def _compile(self, trained: _Trained, num_rows: int | None) -> None:
        shared = [part.shape for part in self._shared]
        trained.program.compile([*trained.shapes(num_rows), *shared])

    def _unexpected(self, number: int, *, is_known: bool) -> errors.DistributeError:
        if is_known:
            return self._invalid("one gradient for each part", f"part {number} has two")
        return errors.NotFoundError(
            errors.message(
                f"{self.label} needs gradients of parts that it was registered for",
                f"part {number} is none of them",
                "Build the optimizer with all variables that it trains.",
            )
        )

    def _invalid(self, required: str, found: str) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            errors.message(f"{self.label} needs {required}", found, "Register it again.")
        )


@dataclass(frozen=True)
class _Gradient:
    """A gradient that fits its part.

    Attributes:
      trained: What it changes.
      rows: The gradient.
      numbers: The rows that it changes; None for all.
      taken: The rows to read for it: the same, filled up.
    """

    trained: _Trained
    rows: np.ndarray
    numbers: np.ndarray | None = None
    taken: np.ndarray | None = None


def _checked(trained: _Trained, gradient: messages.Gradient, buffers: Sequence[Any]) -> _Gradient:
    part = trained.part
    dtype = trained.program.arguments[0].dtype
    if not gradient.is_rows:
        return _Gradient(trained, rules.as_array(buffers[0], dtype, part.shape, part.label))
    if not part.shape:
        raise errors.InvalidArgumentError(
            errors.message("A gradient of rows needs rows", f"{part.label} has none", "Send all.")
        )
    numbers = rules.as_row_numbers(buffers[0], part)
    shape = (numbers.size, *part.shape[1:])
    rows = rules.as_array(buffers[1], dtype, shape, part.label)
    if trained.is_row_wise:
        return _padded(trained, numbers, rows)
    dense = np.zeros(part.shape, dtype)
    dense[numbers] = rows
    return _Gradient(trained, dense)


def _padded(trained: _Trained, numbers: np.ndarray, rows: np.ndarray) -> _Gradient:
    """Fills up to a power of two, so that few programs are compiled.

    What is added reads a row that exists, with a gradient of zero; its result is not used.
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

    def __init__(self, gradients: list[_Gradient], shared: tuple[Part, ...]) -> None:
        self._gradients = gradients
        self._shared = shared
        mine = [part for gradient in gradients for part in gradient.trained.state]
        self.parts: Sequence[Part] = (*mine, *shared)
        self.num_rows = sum(g.numbers.size for g in gradients if g.numbers is not None)

    def make(self) -> None:
        """Makes the step: nothing is written before every program has run."""
        shared = [part.value for part in self._shared]
        results = [_run(gradient, shared) for gradient in self._gradients]
        for gradient, result in zip(self._gradients, results, strict=True):
            state = gradient.trained.state
            for part, value in zip(state, result[: len(state)], strict=True):
                if gradient.numbers is None:
                    part.adopt(value)
                else:
                    part.put_rows(gradient.numbers, value[: gradient.numbers.size])
        if results:
            last = results[-1][len(self._gradients[-1].trained.state) :]
            for part, value in zip(self._shared, last, strict=True):
                part.adopt(value)


def _run(gradient: _Gradient, shared: list[np.ndarray]) -> list[np.ndarray]:
    """Returns what the program of a part makes of a gradient."""
    trained, taken = gradient.trained, gradient.taken
    if taken is None:
        state = [part.value for part in trained.state]
    else:
        state = [part.take_rows(taken) for part in trained.state]
    arguments = [gradient.rows, *state, *shared]
    results = trained.program.call(arguments)
    for argument, result in zip(arguments[1:], results, strict=True):
        if result.shape != argument.shape:
            raise errors.InvalidArgumentError(
                errors.message(
                    f"The program for {trained.part.label} must keep the shape {argument.shape}",
                    f"it returned {result.shape}",
                    "Register the optimizer again.",
                )
            )
    return results
