"""All that a parameter server keeps for one job: parts, optimizers, and what was done once.

Locks, in the order in which they are taken:

1. `slow` lets one request at a time make parts or optimizers, which may compute and compile
   for long. A repeated request waits for the first and finds its work done.
2. `changing` is held by whoever changes parts or tables, or decides who may: what a closure
   changes is one step. It makes the table of `once` safe, and a fence final when it is answered.
3. The lock of each part, in the order of their numbers; readers need only that of what they read.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.ps.store import memory, optimizers, programs, rules
from replicax.ps.store.accumulation import Accumulation
from replicax.ps.store.applied_updates import Key, OnceTable
from replicax.ps.store.clock import Clock
from replicax.ps.store.parts import Part

# Smaller parts are made without asking the system what is left.
_ASKED_FROM_BYTES = 1 << 20
# How many compiled programs for initial values are kept.
_MOST_INITIALIZERS = 16

# A change that is new and was found to be good, and what it is known by.
Checked = tuple[Key, rules.Change]
# Called when something was made, while `changing` is held: whether it would be made alike now.
OnMade = Callable[[bool], None]


def _ignore(_: bool) -> None:
    """Does nothing."""


class Storage:
    """The variables of a job on one server.

    Attributes:
      once: Which changes were made; used under `changing`.
      clock: How many steps the values have seen.
      accumulation: Gradients that wait for others; used under `changing`.
    """

    def __init__(self, task: str, changing: threading.Lock, first_version: int = 1) -> None:
        self._task = task
        # Of every part that is made here. A server that came back must not give a version that
        # it may have given before to another value.
        self._first_version = first_version
        self._slow = threading.Lock()
        self._changing = changing
        self._parts: dict[int, Part] = {}
        self._optimizers: dict[int, optimizers.Optimizer] = {}
        # Many parts start alike; the one that was used last comes last. Used under `slow`.
        self._initializers: dict[Any, programs.Compiled] = {}
        self.once = OnceTable()
        self.clock = Clock()
        self.accumulation = Accumulation(self.clock)

    def part(self, number: int) -> Part:
        """Returns a part, or raises NotFoundError."""
        part = self._parts.get(number)
        if part is None:
            raise errors.NotFoundError(
                f"{self._task} must hold part {number}",
                f"it does not, among {len(self._parts)} parts",
                "Create the variable first; one that was dropped cannot be used.",
            )
        return part

    def create(
        self, spec: messages.CreatePart, buffers: Sequence[Any], on_made: OnMade = _ignore
    ) -> None:
        """Makes a part; if it is there already from the same request, it stays as it is."""
        self._require_number(spec.part)
        dtype = self._checked_dtype(spec)
        with self._slow:
            known = self._parts.get(spec.part)
            if known is not None:
                self._require_same(known, spec)
                return
            part = self._allocated(spec, dtype)
            part.version = self._first_version
            used = self._initialize(part, buffers)
            with self._changing:
                self._parts[spec.part] = part
                on_made(all(source.version == version for source, version in used))

    def drop(self, numbers: Sequence[int], on_made: OnMade = _ignore) -> None:
        """Forgets parts, and what optimizers do with them."""
        with self._changing:
            on_made(True)
            self._forget(numbers)

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._parts.pop(number, None)
        for number, optimizer in list(self._optimizers.items()):
            if not optimizer.keep(self._parts):
                del self._optimizers[number]

    def register(
        self, spec: messages.RegisterOptimizer, buffers: Sequence[Any], on_made: OnMade = _ignore
    ) -> None:
        """Makes an optimizer, or makes it anew if the request differs from the one before."""
        if len(buffers) != spec.num_programs:
            raise self._miscounted(spec.num_programs, len(buffers))
        self._require_number(spec.optimizer)
        with self._slow:
            known = self._optimizers.get(spec.optimizer)
            if known is not None and known.is_made_by(spec, buffers):
                return
            optimizer = optimizers.Optimizer(spec, buffers, self.part, self._task)
            optimizer.warm_up()
            with self._changing:
                # Parts may have been dropped while it was compiled.
                optimizer.keep(self._parts)
                self._optimizers[spec.optimizer] = optimizer
                on_made(True)

    def check(
        self, push: messages.Push, buffers: Sequence[Any], *, is_alone: bool = False
    ) -> list[Checked]:
        """Returns what of a push is still to be done, or raises; changes nothing.

        Whoever calls this holds `changing`. Gradients that are `is_alone` wait for no others.
        """
        closure = push.closure
        if self.once.is_stale(closure):
            # Not the worker is refused, only this closure: another worker was quicker.
            raise errors.CancelledError(
                f"Closures below {self.once.settled} are settled on {self._task}",
                f"closure {closure} tried to change something",
                "Drop its result; it was counted, or given up.",
            )
        checked: list[Checked] = []
        seen: set[Key] = set()
        position = 0
        for change in push.changes:
            used = num_buffers(change)
            own = buffers[position : position + used]
            position += used
            if isinstance(change, messages.Update):
                key = change.call, change.part
            else:
                key = change.call, ~change.optimizer
            if key in seen or not self.once.is_new(closure, key):
                continue
            seen.add(key)
            if isinstance(change, messages.Update):
                checked.append((key, rules.check(change, self.part(change.part), own)))
            elif is_alone or self.accumulation.num_needed is None:
                checked.append((key, self._optimizer(change.optimizer).check(change, own)))
            else:
                optimizer = self._optimizer(change.optimizer)
                kept = self.accumulation.check(optimizer, change, own, push, self.once)
                checked.append((key, kept))
        return checked

    def begin_epoch(self) -> None:
        """Forgets changes, and parts whose first value nobody completes; `changing` is held."""
        self.once = OnceTable(newest=self.once.newest)
        self._forget(self._parts.keys() - self.whole_parts)

    @property
    def parts(self) -> Mapping[int, Part]:
        """The parts by number; looked at under `changing`."""
        return self._parts

    @property
    def whole_parts(self) -> set[int]:
        """The numbers of the parts that have had all of their first value."""
        return {number for number, part in self._parts.items() if not part.num_missing}

    @property
    def optimizers(self) -> Mapping[int, optimizers.Optimizer]:
        """The optimizers by number; looked at under `changing`."""
        return self._optimizers

    def put_part(
        self,
        spec: messages.CreatePart,
        version: int,
        num_missing: int,
        num_bytes: int,
        pieces: Iterable[tuple[int, np.ndarray]],
    ) -> None:
        """Puts a part here that was saved, before anybody else knows this storage."""
        self._require_number(spec.part)
        dtype = self._checked_dtype(spec)
        if _size(spec, dtype) != num_bytes:
            raise self._miscounted(_size(spec, dtype), num_bytes)
        part = self._allocated(spec, dtype)
        for start, octets in pieces:
            # A page that is not written takes no memory.
            if octets.any():
                part.fill(start, octets)
        part.version, part.num_missing = version, num_missing
        self._parts[spec.part] = part

    def put_optimizer(
        self, spec: messages.RegisterOptimizer, trained: Iterable[int], buffers: Sequence[Any]
    ) -> None:
        """Puts an optimizer here that was saved, with the parts that it still changed."""
        kept = set(trained)
        rest = msgspec.structs.replace(spec, trained=[t for t in spec.trained if t.part in kept])
        optimizer = optimizers.Optimizer(rest, buffers, self.part, self._task)
        # A repetition of the request that made it must be known as such.
        optimizer.spec = spec
        optimizer.warm_up()
        self._optimizers[spec.optimizer] = optimizer

    def sizes(self) -> dict[str, int]:
        """Returns how much is kept, by name."""
        with self._changing:
            state = set().union(*(o.state for o in self._optimizers.values()))
            parts = list(self._parts.items())
            return {
                "bytes": sum(part.num_bytes for _, part in parts),
                "slot_bytes": sum(part.num_bytes for number, part in parts if number in state),
                "parts": len(parts),
                "optimizers": len(self._optimizers),
                "once_entries": len(self.once),
                "settled": self.once.settled,
                "newest_closure": self.once.newest,
                "waiting_gradients": len(self.accumulation),
                **self.clock.figures(),
            }

    def _optimizer(self, number: int) -> optimizers.Optimizer:
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            raise errors.NotFoundError(
                f"{self._task} must know optimizer {number}",
                "it was not registered, or its variables were dropped",
                "Register it again.",
            )
        return optimizer

    def _allocated(self, spec: messages.CreatePart, dtype: np.dtype) -> Part:
        size = _size(spec, dtype)
        # The result of a program lies beside the part until it is copied.
        needed = size * 2 if isinstance(spec.initial, messages.FromProgram) else size
        if needed >= _ASKED_FROM_BYTES:
            available = memory.available_bytes()
            if available is not None and needed > available:
                raise self._exhausted(spec, dtype, f"{available} bytes are available")
        try:
            return Part(spec, dtype, self._task)
        except (MemoryError, ValueError) as error:
            raise self._exhausted(spec, dtype, f"the system refused them: {error}") from error

    def _initialize(self, part: Part, buffers: Sequence[Any]) -> list[tuple[Part, int]]:
        """Gives a part its first value; returns the parts that it came from, in their versions."""
        used: list[tuple[Part, int]] = []
        initial = part.spec.initial
        expected = 0 if isinstance(initial, messages.Fill) else 1
        if len(buffers) != expected:
            raise self._miscounted(expected, len(buffers))
        if isinstance(initial, messages.Fill):
            element = rules.as_array(initial.element, part.dtype, (), part.label)
            if any(initial.element):
                part.replace(element)
        elif isinstance(initial, messages.FromBuffer):
            if part.shape:
                rows = rules.as_rows(buffers[0], part.dtype, part)
                if rows.shape[0] > part.num_rows:
                    rows = rules.as_array(buffers[0], part.dtype, part.shape, part.label)
                part.num_missing = part.num_rows if part.row_bytes else 0
                part.write_rows(0, rows)
            else:
                part.replace(rules.as_array(buffers[0], part.dtype, (), part.label))
        else:
            part.replace(self._computed(part, initial, buffers[0], used))
        return used

    def _computed(
        self, part: Part, initial: messages.FromProgram, buffer: Any, used: list[tuple[Part, int]]
    ) -> np.ndarray:
        arguments: list[np.ndarray] = []
        for number in initial.arguments:
            source = self.part(number)
            with source.lock:
                arguments.append(source.value.copy())
                used.append((source, source.version))
        shapes = tuple(argument.shape for argument in arguments)
        results = self._initializer(buffer, shapes, part.label).call(arguments, part.label)
        index = initial.result
        if not 0 <= index < len(results) or not programs.accepts(
            jax.ShapeDtypeStruct(part.shape, part.dtype), results[index].shape, results[index].dtype
        ):
            found = [f"{result.dtype}{list(result.shape)}" for result in results]
            raise errors.InvalidArgumentError(
                f"{part.label} needs {part.dtype}{list(part.shape)} as result {index} of its "
                "program",
                f"the results are {', '.join(found) or 'none'}",
                "Correct the initial value.",
            )
        return results[index]

    def _initializer(
        self, buffer: Any, shapes: tuple[programs.Shape, ...], label: str
    ) -> programs.Compiled:
        key = programs.key_of(buffer), shapes
        if (compiled := self._initializers.pop(key, None)) is None:
            program = programs.Program(buffer, label)
            compiled = programs.Compiled([(program, shapes)], (), label)
        self._initializers[key] = compiled
        if len(self._initializers) > _MOST_INITIALIZERS:
            del self._initializers[next(iter(self._initializers))]
        return compiled

    def _checked_dtype(self, spec: messages.CreatePart) -> np.dtype:
        with contextlib.suppress(TypeError):
            dtype = jax.numpy.dtype(spec.dtype)
            is_number = dtype == np.bool_ or jax.numpy.issubdtype(dtype, np.number)
            if is_number and all(size >= 0 for size in spec.shape):
                return dtype
        raise errors.InvalidArgumentError(
            f"Part {spec.part} ({spec.name!r}) on {self._task} needs a numeric type and "
            "sizes that are not negative",
            f"type {spec.dtype!r} and shape {spec.shape} were given",
            "Correct the variable.",
        )

    def _require_number(self, number: int) -> None:
        # The table of changes tells parts and optimizers apart by the sign.
        if number < 0:
            raise errors.InvalidArgumentError(
                f"Parts and optimizers on {self._task} need numbers from 0 on",
                f"{number} was given",
                "Use another number.",
            )

    def _require_same(self, known: Part, spec: messages.CreatePart) -> None:
        if known.spec != spec:
            raise errors.InvalidArgumentError(
                f"The number of part {spec.part} ({spec.name!r}) must be new on {self._task}",
                f"it names {known.label} of shape {known.shape} and type {known.dtype}",
                "Drop that part first, or use another number.",
            )

    def _exhausted(
        self, spec: messages.CreatePart, dtype: np.dtype, found: str
    ) -> errors.ResourceExhaustedError:
        return errors.ResourceExhaustedError(
            f"Part {spec.part} ({spec.name!r}) of shape {spec.shape} and type {dtype} needs "
            f"{_size(spec, dtype)} bytes on {self._task}",
            found,
            "Partition the variable over more servers, or give the server more memory.",
        )

    def _miscounted(self, expected: int, found: int) -> errors.ProtocolError:
        return errors.ProtocolError(
            f"A request to {self._task} must bring {expected} buffers",
            f"it brings {found}",
            "Update both sides.",
        )


def num_buffers(change: messages.Update | messages.Apply) -> int:
    """Returns how many buffers a change brings."""
    if isinstance(change, messages.Update):
        return rules.num_buffers(change.kind)
    return sum(2 if gradient.is_rows else 1 for gradient in change.gradients)


def _size(spec: messages.CreatePart, dtype: np.dtype) -> int:
    return math.prod(spec.shape) * dtype.itemsize
