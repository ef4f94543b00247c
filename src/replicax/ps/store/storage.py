"""The state of one job on a parameter server: parts, optimizers, and the updates applied to them.

Locks, in the order in which they are acquired:

1. The creation lock serializes the creation of parts and optimizers, which may compute and compile
   for long. A repeated request waits for the first and finds its result.
2. The write lock is held while parts or tables change, or while it is decided who may change them:
   the changes of a closure are one step. It protects the table of applied updates, and makes a
   fence final when it is acknowledged.
3. The lock of each part, in the order of their numbers; a reader needs only the locks of the parts
   it reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import msgspec
import numpy as np

from replicax.foundation import errors, runtime, spans
from replicax.protocol import error_replies, messages
from replicax.protocol.codec import Buffer
from replicax.ps.store import memory, optimizers, programs, updates
from replicax.ps.store.accumulation import Accumulation, Completion, Contribution, StepClock
from replicax.ps.store.applied_updates import AppliedUpdates, Key
from replicax.ps.store.parts import Part
from replicax.ps.store.updates import CheckedUpdate

# Smaller parts are allocated without a check of the available memory.
_CHECKED_FROM_BYTES = 1 << 20
# How many compiled programs for initial values are cached.
_MOST_INITIALIZERS = 16
# Changes that carry gradients, and those of them that change values.
_GRADIENTS = (optimizers.Step, Contribution, Completion)
_STEPS = (optimizers.Step, Completion)

# Called under the write lock when a part or optimizer was created, with whether the same request
# would give the same result now.
OnCreated = Callable[[bool], None]


def _ignore(_: bool) -> None: ...


@dataclasses.dataclass
class Counters:
    """Counters since the process started, for monitoring: a race may lose a count.

    Attributes:
      requests: Requests handled, whatever the reply.
      updates: Changes requested by closures.
      applied: Changes applied.
      duplicates: Changes that had been applied before.
      failures: Closures whose changes were rejected.
      reads: Parts requested.
      known_reads: Those of them whose version the client had.
      rows_read: Rows read by number.
      rows_written: Rows written by number.
    """

    requests: int = 0
    updates: int = 0
    applied: int = 0
    duplicates: int = 0
    failures: int = 0
    reads: int = 0
    known_reads: int = 0
    rows_read: int = 0
    rows_written: int = 0


class Storage:
    """The variables of a job on one server.

    Attributes:
      applied: Which updates were applied; used under the write lock.
      clock: How many steps the values have seen.
      accumulation: Gradients that wait for others; used under the write lock.
    """

    def __init__(self, task: str, write_lock: runtime.Lock, first_version: int = 1) -> None:
        self._task = task
        # Of every part created here. A restarted server must not assign a version that it may have
        # assigned to another value before.
        self._first_version = first_version
        self._creation_lock = runtime.Lock()
        self._write_lock = write_lock
        self._parts: dict[int, Part] = {}
        self._optimizers: dict[int, optimizers.Optimizer] = {}
        # Many parts start alike. In order of use; protected by the creation lock.
        self._initializers: dict[tuple[bytes, tuple[programs.Shape, ...]], programs.Compiled] = {}
        self.applied = AppliedUpdates()
        self.clock = StepClock()
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

    # Creation.

    def create(
        self, spec: messages.CreatePart, buffers: Sequence[Buffer], on_created: OnCreated = _ignore
    ) -> None:
        """Creates a part; a part that the same request created before is left unchanged."""
        self._require_number(spec.part)
        dtype = self._checked_dtype(spec)
        with self._creation_lock:
            known = self._parts.get(spec.part)
            if known is not None:
                self._require_same(known, spec)
                return
            part = self._allocated(spec, dtype)
            part.version = self._first_version
            used = self._initialize(part, buffers)
            with self._write_lock:
                self._parts[spec.part] = part
                on_created(all(source.version == version for source, version in used))

    def drop(self, numbers: Sequence[int], on_dropped: OnCreated = _ignore) -> None:
        """Drops parts, and removes them from the optimizers."""
        with self._write_lock:
            on_dropped(True)
            self._remove(numbers)

    def _remove(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._parts.pop(number, None)
        for number, optimizer in list(self._optimizers.items()):
            if not optimizer.keep(self._parts):
                del self._optimizers[number]

    def register(
        self,
        spec: messages.RegisterOptimizer,
        buffers: Sequence[Buffer],
        on_created: OnCreated = _ignore,
    ) -> None:
        """Creates an optimizer, or replaces it if the request differs from the one before."""
        if len(buffers) != spec.num_programs:
            raise self._miscounted(spec.num_programs, len(buffers))
        self._require_number(spec.optimizer)
        with self._creation_lock:
            known = self._optimizers.get(spec.optimizer)
            if known is not None and known.is_created_by(spec, buffers):
                return
            optimizer = optimizers.Optimizer(spec, buffers, self.part, self._task)
            optimizer.warm_up()
            with self._write_lock:
                # Parts may have been dropped during compilation.
                optimizer.keep(self._parts)
                self._optimizers[spec.optimizer] = optimizer
                on_created(True)

    # Training: closures change parts, then parts are read.

    def require_buffers(self, body: messages.Exchange, buffers: Sequence[Buffer]) -> None:
        """Raises ProtocolError unless the number of buffers matches the request."""
        expected = sum(read.is_rows for read in body.reads)
        for push in body.pushes:
            expected += sum(map(_num_buffers, push.changes))
        if expected != len(buffers):
            raise self._miscounted(expected, len(buffers))

    def push(
        self,
        pushes: Sequence[messages.Push],
        buffers: Sequence[Buffer],
        counters: Counters,
        *,
        is_alone: bool = False,
    ) -> list[messages.PushFailure]:
        """Applies the changes of closures, each closure atomically; returns those that failed.

        The write lock is held. If memory runs out between two changes of a closure, the first one
        stays applied and recorded: a retry applies the rest. Gradients that are `is_alone`, such as
        those of the coordinator, are never accumulated.
        """
        failures: list[messages.PushFailure] = []
        position = 0
        with np.errstate(all="ignore"):
            for push in pushes:
                used = sum(map(_num_buffers, push.changes))
                own = buffers[position : position + used]
                position += used
                counters.updates += len(push.changes)
                began = spans.now()
                try:
                    checked = self._check(push, own, is_alone=is_alone)
                    counters.duplicates += len(push.changes) - len(checked)
                    self._apply(push, checked, counters)
                except (errors.DistributeError, MemoryError) as error:
                    if isinstance(error, MemoryError):
                        error = _out_of_memory(f"The changes of closure {push.closure}", error)
                    reply = error_replies.from_error(error)
                    failures.append(messages.PushFailure(push.closure, reply))
                if began:
                    spans.record("apply", began, push.closure, len(push.changes))
        counters.failures += len(failures)
        return failures

    def _check(
        self, push: messages.Push, buffers: Sequence[Buffer], *, is_alone: bool
    ) -> list[tuple[Key, CheckedUpdate]]:
        """Returns the changes of a push that are new, or raises; changes nothing."""
        closure = push.closure
        if self.applied.is_settled(closure):
            # Only this closure is rejected, not its worker: another worker was faster.
            raise errors.CancelledError(
                f"Closure {closure} is settled on {self._task}, like all below "
                f"{self.applied.settled}; its changes are ignored. Drop its result: another "
                "attempt has finished, or it was cancelled."
            )
        checked: list[tuple[Key, CheckedUpdate]] = []
        seen: set[Key] = set()
        position = 0
        for change in push.changes:
            used = _num_buffers(change)
            own = buffers[position : position + used]
            position += used
            if isinstance(change, messages.Update):
                key = change.call, change.part
            else:
                key = change.call, ~change.optimizer
            if key in seen or not self.applied.is_new(closure, key):
                continue
            seen.add(key)
            if isinstance(change, messages.Update):
                checked.append((key, updates.check(change, self.part(change.part), own)))
            elif is_alone or self.accumulation.num_needed is None:
                checked.append((key, self._optimizer(change.optimizer).check(change, own)))
            else:
                optimizer = self._optimizer(change.optimizer)
                kept = self.accumulation.check(optimizer, change, own, push, self.applied)
                checked.append((key, kept))
        return checked

    def _apply(
        self,
        push: messages.Push,
        checked: Sequence[tuple[Key, CheckedUpdate]],
        counters: Counters,
    ) -> None:
        # A closure is one tick of the clock, however many optimizers and requests it needs.
        is_counted = False
        if any(isinstance(change, _GRADIENTS) for _, change in checked):
            is_repeated = self.applied.has_step(push.closure)
            is_counted = is_repeated and self.accumulation.num_needed is None
            if push.clock >= 0:
                self.clock.measure(push.clock + is_repeated)
        with _locked([change for _, change in checked]):
            for key, change in checked:
                if not is_counted and isinstance(change, _STEPS):
                    self.clock.tick()
                    is_counted = True
                change.apply()
                self.applied.record(push.closure, key)
                counters.applied += 1
                counters.rows_written += change.num_rows

    def apply_rest(self) -> None:
        """Applies accumulated gradients without waiting for more; the write lock is held."""
        try:
            steps = self.accumulation.rest(self._optimizers)
            with np.errstate(all="ignore"), _locked(steps):
                if steps:
                    self.clock.tick()
                for step in steps:
                    step.apply()
        except MemoryError as error:
            raise _out_of_memory("A step of an optimizer", error) from error

    def read(
        self, reads: Sequence[messages.Read], buffers: Sequence[Buffer], counters: Counters
    ) -> tuple[list[messages.ReadResult], list[Buffer]]:
        """Reads parts or rows of them; each read is atomic."""
        results: list[messages.ReadResult] = []
        values: list[Buffer] = []
        given = iter(buffers)
        for read in reads:
            part = self.part(read.part)
            numbers = updates.as_rows_to_read(next(given), part) if read.is_rows else None
            with part.lock:
                version = part.version
                is_known = version == read.known
                if not is_known:
                    values.append(part.read() if numbers is None else part.read_rows(numbers))
            results.append(messages.ReadResult(version, is_known))
            counters.reads += 1
            counters.known_reads += is_known
            if numbers is not None and not is_known:
                counters.rows_read += numbers.size
        return results, values

    # Epochs and snapshots.

    def begin_epoch(self) -> None:
        """Clears the applied updates, and drops incomplete parts; the write lock is held."""
        self.applied = AppliedUpdates(newest=self.applied.newest)
        self._remove(self._parts.keys() - self.complete_parts)

    @property
    def parts(self) -> Mapping[int, Part]:
        """The parts by number; read under the write lock."""
        return self._parts

    @property
    def complete_parts(self) -> set[int]:
        """The numbers of the parts that have received all of their first value."""
        return {number for number, part in self._parts.items() if not part.num_missing}

    @property
    def optimizers(self) -> Mapping[int, optimizers.Optimizer]:
        """The optimizers by number; read under the write lock."""
        return self._optimizers

    def put_part(
        self,
        spec: messages.CreatePart,
        version: int,
        num_missing: int,
        num_bytes: int,
        pieces: Iterable[tuple[int, np.ndarray]],
    ) -> None:
        """Restores a saved part, before the storage is shared between threads."""
        self._require_number(spec.part)
        dtype = self._checked_dtype(spec)
        if _size(spec, dtype) != num_bytes:
            raise self._miscounted(_size(spec, dtype), num_bytes)
        part = self._allocated(spec, dtype)
        for start, octets in pieces:
            # A page that is never written takes no memory.
            if octets.any():
                part.fill(start, octets)
        part.version, part.num_missing = version, num_missing
        self._parts[spec.part] = part

    def put_optimizer(
        self, spec: messages.RegisterOptimizer, trained: Iterable[int], buffers: Sequence[Buffer]
    ) -> None:
        """Restores a saved optimizer with the parts that it still trained."""
        kept = set(trained)
        rest = msgspec.structs.replace(spec, trained=[t for t in spec.trained if t.part in kept])
        optimizer = optimizers.Optimizer(rest, buffers, self.part, self._task)
        # A repetition of the request that created it must be recognized.
        optimizer.spec = spec
        optimizer.warm_up()
        self._optimizers[spec.optimizer] = optimizer

    def sizes(self) -> dict[str, int]:
        """Returns sizes and counts by name."""
        with self._write_lock:
            state = set().union(*(o.state for o in self._optimizers.values()))
            parts = list(self._parts.items())
            return {
                "bytes": sum(part.num_bytes for _, part in parts),
                "slot_bytes": sum(part.num_bytes for number, part in parts if number in state),
                "parts": len(parts),
                "optimizers": len(self._optimizers),
                "applied_entries": len(self.applied),
                "settled": self.applied.settled,
                "newest_closure": self.applied.newest,
                "waiting_gradients": len(self.accumulation),
                **self.clock.counters(),
            }

    def _optimizer(self, number: int) -> optimizers.Optimizer:
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            raise errors.NotFoundError(
                f"Optimizer {number} must be registered on {self._task}",
                "it was not, or its variables were dropped",
                "Register it again.",
            )
        return optimizer

    def _allocated(self, spec: messages.CreatePart, dtype: np.dtype) -> Part:
        size = _size(spec, dtype)
        # The result of a program exists beside the part until it is copied.
        needed = size * 2 if isinstance(spec.initial, messages.FromProgram) else size
        if needed >= _CHECKED_FROM_BYTES:
            available = memory.available_bytes()
            if available is not None and needed > available:
                raise self._exhausted(spec, dtype, f"{available} bytes are available")
        try:
            return Part(spec, dtype, self._task)
        except (MemoryError, ValueError) as error:
            raise self._exhausted(spec, dtype, f"the allocation failed: {error}") from error

    def _initialize(self, part: Part, buffers: Sequence[Buffer]) -> list[tuple[Part, int]]:
        """Sets the first value of a part; returns the parts it was computed from, with versions."""
        used: list[tuple[Part, int]] = []
        initial = part.spec.initial
        expected = 0 if isinstance(initial, messages.Fill) else 1
        if len(buffers) != expected:
            raise self._miscounted(expected, len(buffers))
        if isinstance(initial, messages.Fill):
            element = updates.as_array(initial.element, part.dtype, (), part.label)
            if any(initial.element):
                part.replace(element)
        elif isinstance(initial, messages.FromBuffer):
            if part.shape:
                rows = updates.as_rows(buffers[0], part.dtype, part)
                if rows.shape[0] > part.num_rows:
                    rows = updates.as_array(buffers[0], part.dtype, part.shape, part.label)
                part.num_missing = part.num_rows if part.row_bytes else 0
                part.write_rows(0, rows)
            else:
                part.replace(updates.as_array(buffers[0], part.dtype, (), part.label))
        else:
            part.replace(self._computed(part, initial, buffers[0], used))
        return used

    def _computed(
        self,
        part: Part,
        initial: messages.FromProgram,
        buffer: Buffer,
        used: list[tuple[Part, int]],
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
        self, buffer: Buffer, shapes: tuple[programs.Shape, ...], label: str
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
        # The keys of applied updates distinguish parts and optimizers by the sign.
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
            f"A request to {self._task} must have {expected} buffers",
            f"it has {found}",
            "Check that all tasks run the same version.",
        )


def _num_buffers(change: messages.Update | messages.Apply) -> int:
    if isinstance(change, messages.Update):
        return updates.num_buffers(change.kind)
    return sum(2 if gradient.is_rows else 1 for gradient in change.gradients)


def _locked(changes: Sequence[CheckedUpdate]) -> contextlib.AbstractContextManager[object]:
    """Locks the parts that some changes need, in the order of their numbers."""
    if len(changes) == 1 and len(changes[0].parts) == 1:
        return changes[0].parts[0].lock
    parts: dict[int, Part] = {p.spec.part: p for change in changes for p in change.parts}
    stack = contextlib.ExitStack()
    for number in sorted(parts):
        stack.enter_context(parts[number].lock)
    return stack


def _size(spec: messages.CreatePart, dtype: np.dtype) -> int:
    return math.prod(spec.shape) * dtype.itemsize


def _out_of_memory(what: str, error: MemoryError) -> errors.ResourceExhaustedError:
    return errors.ResourceExhaustedError(
        f"{what} ran out of memory: {error}. Use smaller parts, or more servers."
    )
