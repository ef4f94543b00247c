"""Runs the work of one job on a worker, piece by piece, in one thread."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from replicax.contexts import worker_index
from replicax.foundation import errors
from replicax.protocol.messages import Body, ClosureCall, CreateResource, ResourceCreated
from replicax.worker import error_reports, forked_children, resources, results
from replicax.worker.functions import unpickle
from replicax.worker.job import Call, Drop, Job, Make, Work
from replicax.worker.results import Outcome
from replicax.worker.warning_relay import WarningRelay

Ended = list[tuple[int, Exception | None]]

# Before a closure that takes so long, or may, what has ended is reported.
_LONG_S = 0.05
_MOST_DURATIONS = 1_000


class WorkerSession(Protocol):
    """A worker's side of one job: its strategy, and the way of updates to the servers.

    `begin` and `end` surround each closure. Its updates may still be on the way when `end`
    returns; `poll` and `drain` tell which closures have arrived at the servers, each once,
    with the error that an update of it met.
    """

    @property
    def strategy(self) -> Any:
        """What closures run under; its `extended.adopt(key)` finds variables."""
        ...

    def begin(self, closure: int) -> None:
        """Says that reads and updates belong to a closure from now on."""
        ...

    def end(self, closure: int) -> bool | None:
        """Says that a closure makes no further updates; tells whether it made a step."""
        ...

    def poll(self) -> Ended:
        """Returns closures that have arrived, without waiting."""
        ...

    def drain(self) -> Ended:
        """Waits until all closures that ended have arrived, and returns them."""
        ...

    def pending(self) -> int:
        """Returns how many closures that ended have not arrived."""
        ...

    def waiting_for(self) -> tuple[int, float] | None:
        """Returns the server that is waited for now, and since when. Any thread may ask."""
        ...

    def close(self) -> None:
        """Drops everything; what was not sent is lost."""
        ...


class Runner:
    """Runs closures and makes resources.

    Args:
      job: Whose work it is.
      session: The worker's side of the job.
      index: The index of the worker.
      task: Its name, for messages.
      send: Sends a message to the coordinator.

    Attributes:
      is_fenced: Whether the servers refuse this life of the worker; nothing more can run.
      num_run: How many closures have run.
      started_s: When the closure that runs was started; None between closures.
    """

    def __init__(
        self,
        job: Job,
        session: WorkerSession,
        index: int,
        task: str,
        send: Callable[[Body, Sequence[Any]], None],
    ) -> None:
        self._job, self._session, self._send = job, session, send
        self.resources = resources.Resources(task)
        # Closures that have ended, and whose updates are on the way.
        self._arriving: dict[int, Outcome] = {}
        # How long functions took the last time.
        self._durations: dict[str, float] = {}
        self.is_fenced = False
        self.num_run = 0
        self.started_s: float | None = None
        # Each piece of work runs in a copy of this context, so that nothing that it leaves
        # open, such as a scope, meets the next one.
        self._context = contextvars.Context()
        self._stack = contextlib.ExitStack()
        self._context.run(self._stack.enter_context, worker_index.on_worker(index))
        self._context.run(self._stack.enter_context, session.strategy.scope())
        self._warnings = WarningRelay()
        self._reports = results.Reports(send, job.note_sent, self._warnings.take)

    def close(self) -> None:
        """Drops all resources, and the session."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._warnings.close)
            stack.callback(self._session.close)
            stack.callback(self._context.run, self._stack.close)
            self._context.copy().run(self.resources.close)

    @property
    def waiting_for(self) -> tuple[int, float] | None:
        """The server that is waited for now, and since when."""
        return self._session.waiting_for()

    @property
    def has_unreported(self) -> bool:
        """Whether outcomes wait to be reported."""
        return bool(self._arriving) or self._reports.is_waiting

    def run(self, work: Work) -> None:
        """Does one piece of work, and reports what can be reported."""
        if isinstance(work, Call):
            self._run_closure(work.call, work.buffers)
        elif isinstance(work, Make):
            self._make(work.order, work.buffers)
        elif isinstance(work, Drop):
            self._context.copy().run(self.resources.drop, work.resources)

    def report_all(self) -> None:
        """Waits for the updates of all closures that ended, and reports them."""
        if self._arriving:
            self._settle(self._session.drain)
        now = time.monotonic()
        for closure in list(self._arriving):
            error = errors.DistributeError(
                f"The servers acknowledge the updates of closure {closure}",
                "they have not",
                "Report this as a bug.",
            )
            self._report(self._arriving.pop(closure), error, now)
        self._reports.send_all()

    # Closures.

    def _run_closure(self, call: ClosureCall, buffers: Sequence[Any]) -> None:
        if self.has_unreported and self._durations.get(call.function, _LONG_S) >= _LONG_S:
            self.report_all()
            if self.is_fenced:
                return
        started_s = self.started_s = time.monotonic()
        outcome, is_arriving = self._outcome_of(call, buffers)
        self.started_s = None
        self.num_run += 1
        self._note_duration(call.function, time.monotonic() - started_s)
        if is_arriving:
            self._arriving[call.closure] = outcome
        else:
            self._report(outcome, None, time.monotonic())
        self._settle(self._session.poll)
        self._reports.send_if_due(time.monotonic())

    def _outcome_of(self, call: ClosureCall, buffers: Sequence[Any]) -> tuple[Outcome, bool]:
        """Runs a closure; tells also whether its updates have yet to arrive."""
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

    def _note_duration(self, function: str, seconds: float) -> None:
        if len(self._durations) >= _MOST_DURATIONS:
            self._durations.clear()
        self._durations[function] = seconds

    def _load(
        self, call: ClosureCall, buffers: Sequence[Any]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        function = self._job.functions.load(call.function, self._resolve)
        if call.resources:
            return function, tuple(self.resources.get(r) for r in call.resources), {}
        args, kwargs = self._arguments(buffers)
        return function, args, kwargs

    def _arguments(self, buffers: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return unpickle(buffers, self._resolve) if buffers else ((), {})

    def _resolve(self, name: Any) -> Any:
        """Returns what a name in a pickle stands for on this worker."""
        strategy = self._session.strategy
        match name:
            case ("variable", key):
                return strategy.extended.adopt(key)
            case ("resource", number):
                return self.resources.get(number)
            case ("strategy",):
                return strategy
            case ("extended",):
                return strategy.extended
            case ("layout",):
                return strategy.extended.layout
        raise errors.ProtocolError(
            "A pickle names variables, resources and the strategy",
            f"it names {name!r}",
            "Run the same version of replicax on all tasks.",
        )

    def _settle(self, ask: Callable[[], Ended]) -> None:
        """Reports the closures whose updates have arrived."""
        try:
            ended = ask()
        except Exception as error:
            # Of no closure in particular: it is that of all that have not arrived.
            ended = [(closure, error) for closure in self._arriving]
        now = time.monotonic()
        for closure, error in ended:
            outcome = self._arriving.pop(closure, None)
            if outcome is not None:
                self._report(outcome, error, now)

    def _report(self, outcome: Outcome, error: Exception | None, now: float) -> None:
        if error is not None:
            outcome = _worse(outcome, error)
        if outcome.error is not None and outcome.error.cause == "fenced":
            self.is_fenced = True
        self._reports.add(outcome, now)

    # Resources.

    def _make(self, order: CreateResource, buffers: Sequence[Any]) -> None:
        @forked_children.only_in_this_process()
        def make() -> Any:
            if order.kind == "iterator":
                return iter(self.resources.get(order.source))
            function = self._job.functions.load(order.function, self._resolve)
            if order.kind == "dataset":
                return resources.make_dataset(function, self._session.strategy)
            args, kwargs = self._arguments(buffers)
            return function(*args, **kwargs)

        error = self._context.copy().run(self.resources.make, order.resource, make)
        if error is not None and error.cause == "fenced":
            self.is_fenced = True
        self._send(ResourceCreated(order.resource, error), ())


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with forked_children.only_in_this_process():
        value = function(*args, **kwargs)
    return results.encode(value)


def _worse(outcome: Outcome, error: Exception) -> Outcome:
    """Adds an error of the servers; an error of the closure's own came first and stays.

    Unless the worker is refused: then nothing that it says about a closure counts.
    """
    described = error_reports.describe(error)
    if outcome.error is None or described.cause == "fenced":
        return Outcome(outcome.closure, error=described)
    return outcome
