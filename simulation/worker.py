"""A model of `worker/worker.py` and `worker/runner.py`, around the real memory of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from replicax.foundation import errors
from replicax.protocol import limits, messages, trees
from replicax.protocol.tasks import Task
from replicax.transport.sessions import Session
from replicax.worker import error_reports
from replicax.worker.functions import UnknownFunctionError
from replicax.worker.job import Call, Job
from simulation.channel import Channel
from simulation.client import Client, Post
from simulation.network import Network
from simulation.plan import Plan
from simulation.process import Steps
from simulation.service import Answer, ListeningProcess
from simulation.world import World

_LOOK_S = 0.2
# Longer than that without a look around, and the process was stopped.
_PAUSE_S = 1.0
_VALUE = trees.encode(None).tree


class SimulatedWorker(ListeningProcess):
    """One worker: a thread for its socket, and one that computes."""

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
        """Everything that a process starts with."""
        self._job: Job | None = None
        self._newest = ("", 0)
        self._looked_s = self.world.now
        self._num_run = 0
        self._steps: Steps = self._compute()
        self._is_parked = False
        self.later(0.0, self._step, "compute")
        self.later(_LOOK_S, self._look)

    @override
    def start(self) -> None:
        super().start()
        self._begin()

    @override
    def crash(self) -> None:
        super().crash()
        self._steps.close()

    # The thread that computes. It yields the seconds that it is busy, or 0 to wait for news.

    def _step(self) -> None:
        self._is_parked = False
        seconds = next(self._steps)
        if seconds:
            self.later(seconds, self._step, "compute")
        else:
            self._is_parked = True

    def wake(self) -> None:
        """Something has changed for the thread that computes."""
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

    def has_opened(self, job: Job) -> None:
        """A job can run closures now."""
        job.is_ready = True
        self.send(job.session, messages.Done(), (), job.request)

    def report(self, job: Job, results: Sequence[messages.Result]) -> None:
        """Tells the coordinator how closures ended."""
        job.record_sent([(result, ()) for result in results])
        if not job.is_ended:
            self.send(job.session, messages.Finished(list(results)))

    # Lives.

    def end_life(self, job: Job) -> None:
        """Lets a job go, and begins a new life."""
        job.end()
        if self._job is job:
            self._job = None
            self.incarnation = self.world.life()
        self.wake()

    def _look(self) -> None:
        job, now = self._job, self.world.now
        pause_s, self._looked_s = now - self._looked_s, now
        self.later(_LOOK_S, self._look)
        if job is None:
            return
        if pause_s > _PAUSE_S:
            job.last_seen_s += pause_s
        if job.is_orphaned(now):
            self._end("it has not heard of its coordinator for too long")

    def _end(self, why: str) -> None:
        """Ends the process; whoever looks after it starts another one."""
        self.world.note(f"{self} ends itself: {why}")
        self.later(0.005, self.crash)
        restart_s = self.world.now + self.world.random.uniform(0.1, 1.0)
        self.world.at(restart_s, self._start_again)

    def _start_again(self) -> None:
        if not self.is_up:
            self.world.note(f"{self} is started again")
            self.start()

    # The thread of the socket.

    @override
    def handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> Answer | None:
        body = envelope.body
        if isinstance(body, messages.Attach):
            return self._attach(session, envelope, body)
        job = self._job
        if job is not None and not self._is_of(job, session, envelope):
            job = None
        if isinstance(body, messages.Ping):
            return self._answer_ping(job, session, body), ()
        if isinstance(body, messages.Detach):
            if body.is_dead and self._newest == (envelope.job, envelope.epoch):
                self._end("its coordinator has given it up")
            elif job is not None:
                self.end_life(job)
            return messages.Done(), ()
        if job is None:
            raise errors.UnavailableError(f"{self} works for no job, or for another.")
        job.session = session
        answer = self._store(job, body, buffers)
        self.wake()
        return answer

    def _is_of(self, job: Job, session: Session, envelope: messages.Envelope) -> bool:
        return (job.name, job.epoch, job.session.incarnation) == (
            envelope.job,
            envelope.epoch,
            session.incarnation,
        )

    def _attach(
        self, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> Answer | None:
        old = self._job
        if envelope.job == self._newest[0] and envelope.epoch < self._newest[1]:
            raise errors.FencedError(f"{self} works for a newer coordinator.")
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

    def _answer_ping(self, job: Job | None, session: Session, body: messages.Ping) -> messages.Pong:
        figures: dict[str, int | float] = {"attached": 0, "open": 0}
        if job is not None:
            job.session = session
            job.last_seen_s = self.world.now
            job.forget_settled(body.settled)
            figures = {"attached": 1, "open": job.num_open}
        return messages.Pong(self._num_run, figures)

    def _store(self, job: Job, body: messages.Body, buffers: list[memoryview]) -> Answer | None:
        if isinstance(body, messages.ShipFunction):
            job.functions.store(body.function, buffers)
        elif isinstance(body, messages.Run):
            again = job.add_calls(Call(call, ()) for call in body.closures)
            if again:
                return messages.Finished([result for result, _ in again]), ()
        elif isinstance(body, messages.Cancel):
            ended = error_reports.recalled(job.cancel(body.closures), str(self.task))
            job.record_cancelled(ended)
            if ended:
                return messages.Finished(ended), ()
        return None


class Run:
    """The work of one job, as `Runner` does it."""

    def __init__(
        self, worker: SimulatedWorker, job: Job, plan: Plan, channels: list[Channel]
    ) -> None:
        self._worker, self._job, self._plan = worker, job, plan
        self._world = worker.world
        self._client = Client(channels)
        for channel in channels:
            self._wake_with(channel)
        self._arriving: dict[int, messages.RemoteError | None] = {}
        self._results: list[messages.Result] = []
        self._is_fenced = False

    def _wake_with(self, channel: Channel) -> None:
        answered, lost = channel.on_answer, channel.on_lost

        def on_answer(number: int, body: messages.Body, buffers: list[memoryview]) -> None:
            answered(number, body, buffers)
            self._worker.wake()

        def on_lost(error: Exception) -> None:
            lost(error)
            self._worker.wake()

        channel.on_answer, channel.on_lost = on_answer, on_lost

    def steps(self) -> Steps:
        """Works until the job ends."""
        job = self._job
        try:
            self._worker.has_opened(job)
            while not job.is_ended and not self._is_fenced:
                work = job.take()
                if isinstance(work, Call):
                    yield from self._run(work.call)
                elif self._arriving or self._results:
                    yield from self._report_all()
                else:
                    yield 0.0
            if self._is_fenced:
                yield from self._report_all()
                self._worker.end_life(job)
        finally:
            self._client.close()

    def _run(self, call: messages.ClosureCall) -> Steps:
        chance, closure = self._world.random, call.closure
        if (self._arriving or self._results) and chance.random() < 0.5:
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
            posts = [
                client.post(server, self._plan.reads(server))
                for server in sorted({self._plan.servers[p] for p in work.parts})
            ]
            yield from self._wait(lambda: all(post.is_over for post in posts))
            error = _first_error(posts)
        if error is None:
            yield work.seconds
            for server, update, payload in self._plan.changes(element):
                client.collect(closure, server, (update, payload))
            error = ValueError(f"closure {closure} fails on purpose") if work.fails else None
        client.end(closure)
        self._world.note(f"{self._worker} has computed {closure}")
        self._arriving[closure] = None if error is None else error_reports.describe(error)
        if chance.random() < 0.5:
            client.post_changes()
        self._settle()
        if chance.random() < 0.7:
            self._send()

    def _report_all(self) -> Steps:
        self._client.post_changes()
        yield from self._wait(lambda: not self._client.is_waiting)
        self._settle()
        assert not self._arriving, "all changes have arrived, or were refused"
        self._send()

    def _wait(self, is_over: Callable[[], bool]) -> Steps:
        """Waits for servers, within bounds."""
        seconds = deadline_of(self._job)
        deadline = self._world.now + seconds
        if not is_over():
            self._worker.later(seconds, self._worker.wake, "compute")
        while not is_over():
            if self._world.now >= deadline:
                self._client.give_up(errors.DeadlineExceededError("there was no answer"))
                return
            yield 0.0

    def _settle(self) -> None:
        for closure, error in self._client.settled():
            found = self._arriving.pop(closure)
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
    """Returns how long servers may take for an answer."""
    seconds = job.attach.settings.get("deadline")
    return float(seconds) if isinstance(seconds, int | float) else limits.DEADLINE


def _first_error(posts: Sequence[Post]) -> Exception | None:
    return next((post.error for post in posts if post.error is not None), None)
