"""A model of `worker/worker.py` and `worker/runner.py`, with the real state of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from replicax.foundation import errors
from replicax.protocol import limits, messages, trees
from replicax.protocol.tasks import Task
from replicax.transport.service import Session
from replicax.worker import error_reports
from replicax.worker.functions import UnknownFunctionError
from replicax.worker.job import Call, Job
from simulation.channel import Channel
from simulation.client import Client, Request
from simulation.network import Network
from simulation.plan import Plan
from simulation.process import Steps
from simulation.service import ListeningProcess, Reply
from simulation.world import World

_POLL_S = 0.2
# A longer pause between two polls means that the process was stopped.
_PAUSE_S = 1.0
_VALUE = trees.encode(None).tree


class SimulatedWorker(ListeningProcess):
    """One worker, with a socket thread and a compute thread."""

    def __init__(
        self,
        world: World,
        network: Network,
        index: int,
        servers: Sequence[ListeningProcess],
        plan: Plan,
    ) -> None:
        super().__init__(world, network, Task("worker", index))
        self._servers, self._plan = servers, plan
        self._begin()

    def _begin(self) -> None:
        """Initializes the state of a new process."""
        self._job: Job | None = None
        self._newest = ("", 0)
        self._polled_s = self.world.now
        self._num_run = 0
        self._steps: Steps = self._compute()
        self._is_parked = False
        self.later(0.0, self._step, "compute")
        self.later(_POLL_S, self._poll)

    @override
    def start(self) -> None:
        super().start()
        self._begin()

    @override
    def crash(self) -> None:
        super().crash()
        self._steps.close()

    # The compute thread. It yields the seconds that it is busy, or 0 to wait for `wake`.

    def _step(self) -> None:
        self._is_parked = False
        seconds = next(self._steps)
        if seconds:
            self.later(seconds, self._step, "compute")
        else:
            self._is_parked = True

    def wake(self) -> None:
        """Wakes the compute thread."""
        if self._is_parked:
            self._is_parked = False
            self.later(0.0, self._step, "compute")

    def _compute(self) -> Steps:
        while True:
            job = self._job
            if job is None or job.is_ended:
                yield 0.0
            else:
                yield from Run(self, job, self._plan, self._channels(job)).steps()

    def _channels(self, job: Job) -> list[Channel]:
        name = job.name, job.epoch
        deadline_s = deadline_of(job)
        return [
            Channel(self._network, self, server, job.incarnation, name, deadline_s)
            for server in self._servers
        ]

    def set_ready(self, job: Job) -> None:
        """Replies to the attach request: the job can run closures."""
        job.is_ready = True
        self.send(job.session, messages.Done(), (), job.request)

    def report(self, job: Job, results: Sequence[messages.Result]) -> None:
        """Reports results to the coordinator."""
        job.record_sent([(result, ()) for result in results])
        if not job.is_ended:
            self.send(job.session, messages.Finished(list(results)))

    # Incarnations.

    def end_incarnation(self, job: Job) -> None:
        """Drops a job, and begins a new incarnation."""
        job.end()
        if self._job is job:
            self._job = None
            self.incarnation = self.world.new_incarnation()
        self.wake()

    def _poll(self) -> None:
        job, now = self._job, self.world.now
        pause_s, self._polled_s = now - self._polled_s, now
        self.later(_POLL_S, self._poll)
        if job is None:
            return
        if pause_s > _PAUSE_S:
            job.last_seen_s += pause_s
        if job.is_orphaned(now):
            self._end("its coordinator has been silent for too long")

    def _end(self, why: str) -> None:
        """Ends the process; it is restarted later."""
        self.world.note(f"{self} ends itself: {why}")
        self.later(0.005, self.crash)
        restart_s = self.world.now + self.world.random.uniform(0.1, 1.0)
        self.world.at(restart_s, self._restart)

    def _restart(self) -> None:
        if not self.is_up:
            self.world.note(f"{self} is restarted")
            self.start()

    # The socket thread.

    @override
    def handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Reply | None:
        body = envelope.body
        if isinstance(body, messages.Attach):
            return self._attach(session, envelope, body)
        job = self._job
        if job is not None and not self._is_of(job, session, envelope):
            job = None
        if isinstance(body, messages.Ping):
            return self._pong(job, session, body), ()
        if isinstance(body, messages.Detach):
            if body.is_dead and self._newest == (envelope.job, envelope.epoch):
                self._end("its coordinator has declared it dead")
            elif job is not None:
                self.end_incarnation(job)
            return messages.Done(), ()
        if job is None:
            raise errors.UnavailableError(f"{self} is attached to no job, or to another one.")
        job.session = session
        reply = self._store(job, body, buffers)
        self.wake()
        return reply

    def _is_of(self, job: Job, session: Session, envelope: messages.Envelope) -> bool:
        return (job.name, job.epoch, job.session.incarnation) == (
            envelope.job,
            envelope.epoch,
            session.incarnation,
        )

    def _attach(
        self, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> Reply | None:
        old = self._job
        if envelope.job == self._newest[0] and envelope.epoch < self._newest[1]:
            raise errors.FencedError(f"{self} is attached to a newer coordinator.")
        self._newest = envelope.job, envelope.epoch
        if old is not None and self._is_of(old, session, envelope) and not old.is_ended:
            old.session, old.request = session, envelope.request
            return (messages.Done(), ()) if old.is_ready else None
        job = Job(envelope.job, envelope.epoch, self.incarnation, body, session, envelope.request)
        job.last_seen_s = self.world.now
        self._job = job
        if old is not None:
            old.end()
        self.wake()
        return None

    def _pong(self, job: Job | None, session: Session, body: messages.Ping) -> messages.Pong:
        counters: dict[str, int | float] = {"attached": 0, "open": 0}
        if job is not None:
            job.session = session
            job.last_seen_s = self.world.now
            job.forget_settled(body.settled)
            counters = {"attached": 1, "open": job.num_open}
        return messages.Pong(self._num_run, counters)

    def _store(self, job: Job, body: messages.Body, buffers: list[memoryview]) -> Reply | None:
        if isinstance(body, messages.ShipFunction):
            job.functions.store(body.function, buffers)
        elif isinstance(body, messages.Run):
            known = job.add_calls(Call(call, ()) for call in body.closures)
            if known:
                return messages.Finished([result for result, _ in known]), ()
        elif isinstance(body, messages.Cancel):
            ended = error_reports.recalled(job.cancel(body.closures), str(self.task))
            job.record_cancelled(ended)
            if ended:
                return messages.Finished(ended), ()
        return None


class Run:
    """Runs the closures of one job, like `Runner`."""

    def __init__(
        self, worker: SimulatedWorker, job: Job, plan: Plan, channels: list[Channel]
    ) -> None:
        self._worker, self._job, self._plan = worker, job, plan
        self._world = worker.world
        self._client = Client(channels)
        for channel in channels:
            self._wake_with(channel)
        self._unacknowledged: dict[int, messages.RemoteError | None] = {}
        self._results: list[messages.Result] = []
        self._is_fenced = False

    def _wake_with(self, channel: Channel) -> None:
        replied, lost = channel.on_reply, channel.on_lost

        def on_reply(number: int, body: messages.Body, buffers: list[memoryview]) -> None:
            replied(number, body, buffers)
            self._worker.wake()

        def on_lost(error: Exception) -> None:
            lost(error)
            self._worker.wake()

        channel.on_reply, channel.on_lost = on_reply, on_lost

    def steps(self) -> Steps:
        """Runs closures until the job ends."""
        job = self._job
        try:
            self._worker.set_ready(job)
            while not job.is_ended and not self._is_fenced:
                work = job.take()
                if isinstance(work, Call):
                    yield from self._run(work.call)
                elif self._unacknowledged or self._results:
                    yield from self._report_all()
                else:
                    yield 0.0
            if self._is_fenced:
                yield from self._report_all()
                self._worker.end_incarnation(job)
        finally:
            self._client.close()

    def _run(self, call: messages.ClosureCall) -> Steps:
        chance, closure = self._world.random, call.closure
        if (self._unacknowledged or self._results) and chance.random() < 0.5:
            yield from self._report_all()
            if self._is_fenced:
                return
        element = self._plan.element_of(self._job.epoch, closure)
        work = self._plan.work_of(element)
        self._world.note(f"{self._worker} starts {closure}, attempt {call.attempt}")
        try:
            self._job.functions.load(call.function, lambda name: name)
        except UnknownFunctionError as error:
            self._report(closure, error_reports.describe(error))
            self._send()
            return
        client = self._client
        client.begin(closure)
        error = None
        if work.reads:
            requests = [
                client.send(server, self._plan.reads(server))
                for server in sorted({self._plan.servers[p] for p in work.parts})
            ]
            yield from self._wait(lambda: all(request.is_over for request in requests))
            error = _first_error(requests)
        if error is None:
            yield work.seconds
            for server, update, payload in self._plan.changes(element):
                client.collect(closure, server, (update, payload))
            error = ValueError(f"closure {closure} fails as planned") if work.fails else None
        client.end(closure)
        self._world.note(f"{self._worker} has computed {closure}")
        self._unacknowledged[closure] = None if error is None else error_reports.describe(error)
        if chance.random() < 0.5:
            client.flush()
        self._settle()
        if chance.random() < 0.7:
            self._send()

    def _report_all(self) -> Steps:
        self._client.flush()
        yield from self._wait(lambda: not self._client.is_waiting)
        self._settle()
        assert not self._unacknowledged, "all updates are acknowledged or rejected"
        self._send()

    def _wait(self, is_over: Callable[[], bool]) -> Steps:
        """Waits for servers until the deadline."""
        seconds = deadline_of(self._job)
        deadline = self._world.now + seconds
        if not is_over():
            self._worker.later(seconds, self._worker.wake, "compute")
        while not is_over():
            if self._world.now >= deadline:
                self._client.give_up(errors.DeadlineExceededError("there was no reply"))
                return
            yield 0.0

    def _settle(self) -> None:
        for closure, error in self._client.settled():
            found = self._unacknowledged.pop(closure)
            if error is not None:
                described = error_reports.describe(error)
                if found is None or described.cause == "fenced":
                    found = described
            self._report(closure, found)

    def _report(self, closure: int, error: messages.RemoteError | None) -> None:
        if error is not None and error.cause == "fenced":
            self._is_fenced = True
        value = _VALUE if error is None else None
        self._results.append(messages.Result(closure, value, error, 0))

    def _send(self) -> None:
        results, self._results = self._results, []
        if results:
            self._worker.report(self._job, results)


def deadline_of(job: Job) -> float:
    """Returns the timeout of a request to a server."""
    seconds = job.attach.settings.get("deadline")
    return float(seconds) if isinstance(seconds, int | float) else limits.DEADLINE


def _first_error(requests: Sequence[Request]) -> Exception | None:
    return next((r.error for r in requests if r.error is not None), None)
