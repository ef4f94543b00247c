"""Runs the closures of one job on a worker, and reports their results in batches."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from replicax.contexts import worker_index
from replicax.foundation import errors, runtime, spans
from replicax.foundation.types import Tree
from replicax.protocol import trees
from replicax.protocol.codec import Buffer
from replicax.protocol.messages import (
    Body,
    ClosureCall,
    CreateResource,
    Finished,
    RemoteError,
    ResourceCreated,
    Result,
)
from replicax.strategies.base import Strategy
from replicax.strategies.parameter_server import ParameterServerExtended
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.worker import error_reports, resources
from replicax.worker.functions import unpickle
from replicax.worker.job import Call, Create, Drop, Job, Work

Ended = list[tuple[int, Exception | None]]

# Results are reported before a closure that may take longer.
_LONG_S = 0.05
_MAX_DURATIONS = 1_000
# The coordinator assigns eight closures, and refills when half of them have ended.
_BATCH = 4
# The maximum time that a result waits for others.
_MAX_DELAY_S = 0.002
_MAX_BUFFER_BYTES = 64 * 1024**2
_MAX_RESULTS = 256
# Limits of the warnings in one message.
_MAX_WARNINGS = 8
_MAX_CHARACTERS = 1_000
# The logger whose warnings concern the author of a closure.
_LOGGER = logging.getLogger("replicax.tracing")


class WorkerSession(Protocol):
    """A worker's side of one job: its strategy and its connections to the servers.

    `begin` and `end` surround each closure. Its updates may still be in flight when `end`
    returns; `poll` and `drain` return each closure once, when the servers have acknowledged its
    updates, with the error of an update.
    """

    @property
    def strategy(self) -> Strategy:
        """The strategy of the worker, a `ParameterServerStrategy`."""
        ...

    def begin(self, closure: int) -> None:
        """Assigns further reads and updates to a closure."""
        ...

    def end(self, closure: int) -> bool | None:
        """Ends a closure; returns whether an optimizer made a step."""
        ...

    def poll(self) -> Ended:
        """Returns acknowledged closures, without waiting."""
        ...

    def drain(self) -> Ended:
        """Waits until all ended closures are acknowledged, and returns them."""
        ...

    def pending(self) -> int:
        """Returns the number of ended closures that are not acknowledged."""
        ...

    def waiting_for(self) -> tuple[int, float] | None:
        """Returns the server that it waits for, and since when. Thread-safe."""
        ...

    def close(self) -> None:
        """Closes all connections; unsent updates are lost."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The value or the error of a closure, and whether an optimizer made a step."""

    closure: int
    value: trees.Encoded | None = None
    error: RemoteError | None = None
    has_stepped: bool = False

    @property
    def header_bytes(self) -> int:
        """The maximum size of its entry in the header of a message."""
        size = 32
        size += self.value.header_bytes if self.value is not None else 0
        return size + (error_reports.size_of(self.error) if self.error is not None else 0)

    @property
    def buffers(self) -> Sequence[Buffer]:
        """The arrays of the value."""
        return () if self.value is None else self.value.buffers

    def message(self) -> Result:
        """Returns the message that reports it."""
        tree = None if self.value is None else self.value.tree
        return Result(self.closure, tree, self.error, len(self.buffers), self.has_stepped)


def encode_result(value: Tree) -> trees.Encoded:
    """Encodes a snapshot of the value that a closure returned."""
    return trees.encode(value, _encode_other)


def _encode_other(value: object) -> tuple[str, Sequence[object]] | None:
    if isinstance(value, PerReplica):
        return "per_replica", value.values
    if isinstance(value, IndexedSlices):
        return "slices", (value.values, value.indices, value.dense_shape)
    shipping_key = getattr(type(value), "shipping_key", None)
    if shipping_key is not None:
        return "variable", shipping_key(value)
    return None


class Reports:
    """Collects outcomes and reports several in one message.

    Args:
      send: Sends a message with its buffers.
      record_sent: Called with the results before they are sent.
      take_warnings: Returns warnings that were not sent yet.
    """

    def __init__(
        self,
        send: Callable[[Finished, list[Buffer]], None],
        record_sent: Callable[[Sequence[tuple[Result, Sequence[Buffer]]]], None],
        take_warnings: Callable[[], list[str]],
    ) -> None:
        self._send, self._record_sent, self._take_warnings = send, record_sent, take_warnings
        self._outcomes: list[Outcome] = []
        self._since_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether outcomes wait to be sent."""
        return bool(self._outcomes)

    def add(self, outcome: Outcome, now: float) -> None:
        """Adds an outcome."""
        if not self._outcomes:
            self._since_s = now
        self._outcomes.append(outcome)

    def send_if_due(self, now: float) -> None:
        """Sends all outcomes if a batch is complete, or if one has waited long enough."""
        if len(self._outcomes) >= _BATCH or now - self._since_s >= _MAX_DELAY_S:
            self.send_all()

    def send_all(self) -> None:
        """Sends all outcomes, in messages of moderate size."""
        batch: list[Outcome] = []
        header_bytes = buffer_bytes = 0
        for outcome in self._outcomes:
            size = sum(memoryview(buffer).nbytes for buffer in outcome.buffers)
            is_full = (
                len(batch) == _MAX_RESULTS
                or header_bytes + outcome.header_bytes > trees.MOST_HEADER_BYTES
                or buffer_bytes + size > _MAX_BUFFER_BYTES
            )
            if batch and is_full:
                self._send_batch(batch)
                batch, header_bytes, buffer_bytes = [], 0, 0
            batch.append(outcome)
            header_bytes += outcome.header_bytes
            buffer_bytes += size
        if batch:
            self._send_batch(batch)
        self._outcomes = []

    def _send_batch(self, batch: list[Outcome]) -> None:
        sent = [(outcome.message(), outcome.buffers) for outcome in batch]
        buffers = [buffer for outcome in batch for buffer in outcome.buffers]
        # Before the message: the coordinator may assign the same closure again at once.
        self._record_sent(sent)
        try:
            self._send(Finished([result for result, _ in sent], self._take_warnings()), buffers)
        except errors.DistributeError as error:
            # One of them cannot be encoded; the others are sent separately.
            if len(batch) > 1:
                for outcome in batch:
                    self._send_batch([outcome])
                return
            if batch[0].error is not None:
                raise
            self._send_batch([Outcome(batch[0].closure, error=error_reports.describe(error))])


class WarningRelay(logging.Handler):
    """Collects warnings of the thread that creates it, for the coordinator.

    These are warnings about closures that compile repeatedly. The worker's own log has them too.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = runtime.get_ident()
        self._texts: list[str] = []
        _LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text of a warning."""
        if record.thread == self._thread and len(self._texts) < _MAX_WARNINGS:
            self._texts.append(record.getMessage()[:_MAX_CHARACTERS])

    def take(self) -> list[str]:
        """Returns the warnings since the last call."""
        texts, self._texts = self._texts, []
        return texts

    def close(self) -> None:
        """Stops collecting."""
        _LOGGER.removeHandler(self)
        super().close()


class Runner:
    """Runs closures and creates resources.

    Args:
      job: The job.
      session: The worker's side of the job.
      index: The index of the worker.
      task: Its name, for messages.
      send: Sends a message to the coordinator.

    Attributes:
      is_fenced: Whether the servers reject this incarnation of the worker.
      num_run: The number of closures that have run.
      started_s: When the running closure was started; None between closures.
    """

    def __init__(
        self,
        job: Job,
        session: WorkerSession,
        index: int,
        task: str,
        send: Callable[[Body, Sequence[Buffer]], None],
    ) -> None:
        self._job, self._session, self._send = job, session, send
        self.resources = resources.Resources(task)
        # Ended closures whose updates are not acknowledged.
        self._unacknowledged: dict[int, Outcome] = {}
        # The last duration of each function.
        self._durations: dict[str, float] = {}
        self.is_fenced = False
        self.num_run = 0
        self.started_s: float | None = None
        # Each closure runs in a copy of this context, so that a scope that it leaves open does not
        # affect the next one.
        self._context = contextvars.Context()
        self._stack = contextlib.ExitStack()
        self._context.run(self._stack.enter_context, worker_index.on_worker(index))
        self._context.run(self._stack.enter_context, session.strategy.scope())
        self._warnings = WarningRelay()
        self._reports = Reports(send, job.record_sent, self._warnings.take)

    def close(self) -> None:
        """Closes all resources, and the session."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._warnings.close)
            stack.callback(self._session.close)
            stack.callback(self._context.run, self._stack.close)
            self._context.copy().run(self.resources.close)

    @property
    def waiting_for(self) -> tuple[int, float] | None:
        """The server that the worker waits for, and since when."""
        return self._session.waiting_for()

    @property
    def has_unreported(self) -> bool:
        """Whether outcomes wait to be reported."""
        return bool(self._unacknowledged) or self._reports.is_waiting

    def run(self, work: Work) -> None:
        """Executes one task of the job, and reports results that are due."""
        if isinstance(work, Call):
            self._run_closure(work.call, work.buffers)
        elif isinstance(work, Create):
            self._create(work.order, work.buffers)
        elif isinstance(work, Drop):
            self._context.copy().run(self.resources.drop, work.resources)

    def report_all(self) -> None:
        """Waits for the acknowledgement of all ended closures, and reports them."""
        if self._unacknowledged:
            began = spans.now()
            self._settle(self._session.drain)
            if began:
                spans.record("wait", began, label="acknowledgements")
        now = runtime.now()
        for closure in list(self._unacknowledged):
            error = errors.DistributeError(
                f"The servers did not acknowledge the updates of closure {closure}. Report this "
                "as a bug."
            )
            self._report(self._unacknowledged.pop(closure), error, now)
        self._reports.send_all()

    # Closures.

    def _run_closure(self, call: ClosureCall, buffers: Sequence[Buffer]) -> None:
        if self.has_unreported and self._durations.get(call.function, _LONG_S) >= _LONG_S:
            self.report_all()
            if self.is_fenced:
                return
        started_s = self.started_s = runtime.now()
        began = spans.now()
        outcome, is_unacknowledged = self._outcome_of(call, buffers)
        if began:
            spans.record("closure", began, call.closure)
        self.started_s = None
        self.num_run += 1
        self._record_duration(call.function, runtime.now() - started_s)
        if is_unacknowledged:
            self._unacknowledged[call.closure] = outcome
        else:
            self._report(outcome, None, runtime.now())
        self._settle(self._session.poll)
        self._reports.send_if_due(runtime.now())

    def _outcome_of(self, call: ClosureCall, buffers: Sequence[Buffer]) -> tuple[Outcome, bool]:
        """Runs a closure; returns also whether its updates are still unacknowledged."""
        closure = call.closure
        context = self._context.copy()
        try:
            function, args, kwargs = context.run(self._load, call, buffers)
            self._session.begin(closure)
        except BaseException as error:  # The user's code may raise anything.
            return Outcome(closure, error=error_reports.describe(error)), False
        try:
            outcome = Outcome(closure, context.run(_call, function, args, kwargs))
        except BaseException as error:
            outcome = Outcome(closure, error=error_reports.describe(error))
        try:
            has_stepped = self._session.end(closure)
        except Exception as error:
            return _worse(outcome, error), False
        if has_stepped:
            outcome = Outcome(closure, outcome.value, outcome.error, has_stepped)
        return outcome, True

    def _record_duration(self, function: str, seconds: float) -> None:
        if len(self._durations) >= _MAX_DURATIONS:
            self._durations.clear()
        self._durations[function] = seconds

    def _load(
        self, call: ClosureCall, buffers: Sequence[Buffer]
    ) -> tuple[Callable[..., Tree], tuple[object, ...], dict[str, object]]:
        function = self._job.functions.load(call.function, self._resolve)
        if call.resources:
            return function, tuple(self.resources.get(r) for r in call.resources), {}
        args, kwargs = self._arguments(buffers)
        return function, args, kwargs

    def _arguments(self, buffers: Sequence[Buffer]) -> tuple[tuple[object, ...], dict[str, object]]:
        return unpickle(buffers, self._resolve) if buffers else ((), {})

    def _resolve(self, persistent_id: object) -> object:
        """Returns the object of this worker that a persistent id in a pickle refers to."""
        strategy = self._session.strategy
        extended = cast(ParameterServerExtended, strategy.extended)
        match persistent_id:
            case ("variable", tuple(key)):
                return extended.adopt(key)
            case ("resource", int(number)):
                return self.resources.get(number)
            case ("strategy",):
                return strategy
            case ("extended",):
                return extended
            case ("layout",):
                return extended.layout
            case ("as", str(face), tuple(inner)) if face.startswith("replicax."):
                module, _, name = face.partition(":")
                return getattr(importlib.import_module(module), name)(self._resolve(inner))
        raise errors.ProtocolError(
            "A persistent id refers to a variable, a resource or the strategy",
            f"it is {persistent_id!r}",
            "Run the same version of replicax on all tasks.",
        )

    def _settle(self, acknowledged: Callable[[], Ended]) -> None:
        """Reports the closures whose updates are acknowledged."""
        try:
            ended = acknowledged()
        except Exception as error:
            # Not of one closure: all unacknowledged ones fail.
            ended = [(closure, error) for closure in self._unacknowledged]
        now = runtime.now()
        for closure, error in ended:
            outcome = self._unacknowledged.pop(closure, None)
            if outcome is not None:
                self._report(outcome, error, now)

    def _report(self, outcome: Outcome, error: Exception | None, now: float) -> None:
        if error is not None:
            outcome = _worse(outcome, error)
        if outcome.error is not None and outcome.error.cause == "fenced":
            self.is_fenced = True
        self._reports.add(outcome, now)

    # Resources.

    def _create(self, order: CreateResource, buffers: Sequence[Buffer]) -> None:
        @_exits_in_forked_children()
        def create() -> object:
            if order.kind == "iterator":
                return iter(self.resources.get(order.source))
            function = self._job.functions.load(order.function, self._resolve)
            if order.kind == "dataset":
                return resources.create_dataset(function, self._session.strategy)
            args, kwargs = self._arguments(buffers)
            return function(*args, **kwargs)

        error = self._context.copy().run(self.resources.create, order.resource, create)
        if error is not None and error.cause == "fenced":
            self.is_fenced = True
        self._send(ResourceCreated(order.resource, error), ())


@contextlib.contextmanager
def _exits_in_forked_children() -> Iterator[None]:
    """Makes a child that is forked in the block exit at the end of the block.

    Otherwise a closure that forks would duplicate the worker. The exit code of the child is 0, 1
    after an error, or that of `sys.exit`. `process/shutdown.py` restores its signal handlers.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != owner:
            _exit_child(error)
        raise
    if os.getpid() != owner:
        _exit_child(None)


def _exit_child(error: BaseException | None) -> None:
    code: object = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _call(
    function: Callable[..., Tree], args: tuple[object, ...], kwargs: dict[str, object]
) -> trees.Encoded:
    with _exits_in_forked_children():
        value = function(*args, **kwargs)
    return encode_result(value)


def _worse(outcome: Outcome, error: Exception) -> Outcome:
    """Adds an error of the servers, unless the closure has failed before.

    The error of a fenced worker always counts: the closure runs again on another worker.
    """
    described = error_reports.describe(error)
    if outcome.error is None or described.cause == "fenced":
        return Outcome(outcome.closure, error=described)
    return outcome
