"""The worker process: runs the closures of a coordinator.

The socket thread stores and queues messages, and answers heartbeats also while a closure
computes. The compute thread, which calls `run_forever`, does everything else: it creates sessions,
unpickles, computes and waits for servers.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

from replicax.foundation import errors, runtime, spans
from replicax.protocol import error_replies, messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.service import Service, Session
from replicax.worker import error_reports
from replicax.worker.job import Call, Create, Drop, Job
from replicax.worker.runner import Runner, WorkerSession

_log = logging.getLogger(__name__)

# Creates a worker's side of a job from (attach, job, epoch, incarnation of this worker).
MakeSession = Callable[[messages.Attach, str, int, int], WorkerSession]
_Reply = tuple[messages.Body, Sequence[Buffer]]

_POLL_S = 0.5
# The service polls every tenth of a second. After a longer pause than this the process was stopped,
# and the silence of its coordinator does not count.
_PAUSE_S = 1.0
# How long a fenced worker waits for its coordinator to say whether the process must exit. The
# message is on its way, unless the connection was lost.
_RELEASE_S = 1.0
# Shorter waits for a server are part of every closure, and not shown to observers.
_SHOWN_WAIT_S = 0.5


class WorkerTask:
    """One worker: attached to one coordinator at a time, runs its closures in order.

    When the coordinator releases it, or the servers reject it, it drops the job and begins a new
    incarnation, which can be attached again. When the coordinator declares it dead, or has been
    silent for the seconds of the setting "orphan", it exits: its state is unknown, and a new
    process replaces it.

    Args:
      index: Its index in the job "worker".
      location: The address to listen at.
      make_session: Creates its side of a job.
      keys: The keys that authenticate this task; TCP needs them.
      on_ending: Called with the reason when the task ends by itself. A closure may still be
        running, and never end: the owner of the process can end it.

    Attributes:
      ending: Why it has ended by itself; None while it has not.
    """

    def __init__(
        self,
        index: int,
        location: Location,
        make_session: MakeSession,
        *,
        keys: Keys | None = None,
        on_ending: Callable[[str], None] | None = None,
    ) -> None:
        self.ending: str | None = None
        self._on_ending = on_ending
        self._index = index
        self._task = Task("worker", index)
        self._make_session = make_session
        self._service = Service(
            location,
            self._task,
            self._handle,
            keys,
            on_idle=self._on_idle,
            on_failed=self._end,
        )
        # Protects the job and its successor; notified when either changes. Taken before the lock of
        # a job.
        self._changed = runtime.Condition()
        self._job: Job | None = None
        self._is_interrupted = False
        # The newest coordinator of this worker: older ones of the job are rejected.
        self._newest = ("", 0)
        self._polled_s: float | None = None
        self._runner: Runner | None = None
        # The number of closures of earlier jobs.
        self._num_run_before = 0

    @property
    def address(self) -> str:
        """The address at which it listens."""
        return self._service.address

    @property
    def incarnation(self) -> int:
        """Its current incarnation."""
        return self._service.incarnation

    def start(self) -> None:
        """Starts to listen."""
        self._service.start()

    def interrupt(self) -> None:
        """Makes `run_forever` return after the running closure."""
        with self._changed:
            self._is_interrupted = True
            job = self._job
            self._changed.notify_all()
        if job is not None:
            job.end()

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self.interrupt()
        self._service.close()

    def status(self) -> dict[str, object]:
        """Returns what it does, for those who observe it. Takes no lock."""
        job, counters = self._job, self._counters(self._job)
        waits = []
        if counters.get("waiting_s", 0.0) > _SHOWN_WAIT_S:
            server = Task("ps", int(counters["waiting_ps"]))
            waits.append(f"a reply of {server} for {counters['waiting_s']:.1f} s")
        state = "idle" if job is None or not job.num_open else "busy"
        return {
            "role": "worker",
            "state": "detached" if job is None else state,
            "address": self.address,
            "job": None if job is None else job.name,
            "counters": {**counters, "closures": self._num_run},
            "in_flight": 0 if job is None else job.num_open,
            "waits_for": waits,
        }

    def run_forever(self) -> None:
        """Runs closures in this thread, until interrupted or closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job or self._is_interrupted, _POLL_S)
                if self._is_interrupted:
                    return
                job = self._job
            if job is not None:
                self._serve(job)

    # The compute thread.

    def _serve(self, job: Job) -> None:
        """Runs the closures of a job until it ends."""
        runner = self._open(job)
        if runner is None:
            return
        _log.info("%s attached to %s", self._task, job)
        self._runner = runner
        try:
            self._work(job, runner)
        except Exception as error:
            # Not an error of a closure. The coordinator assigns the closures of this incarnation to
            # another worker.
            _log.exception("%s cannot continue %s", self._task, job)
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                self._end("a closure has closed its descriptors")
                return
            self._end_incarnation(job)
        if runner.is_fenced:
            job.wait_until_ended(_RELEASE_S)
            self._end_incarnation(job)
        self._num_run_before += runner.num_run
        self._runner = None
        try:
            runner.close()
        except Exception:
            # An error of a resource; the worker is free for the next job.
            _log.exception("%s could not close the resources of %s", self._task, job)
        _log.info("%s has dropped %s", self._task, job)

    def _open(self, job: Job) -> Runner | None:
        """Creates the session of a job, and replies to the attach request."""
        session: WorkerSession | None = None
        try:
            session = self._make_session(job.attach, job.name, job.epoch, job.incarnation)
            runner = Runner(job, session, self._index, str(self._task), self._sender(job))
        except Exception as error:
            if not isinstance(error, errors.DistributeError):
                _log.exception("%s cannot attach to %s", self._task, job)
            if session is not None:
                session.close()
            self._forget(job)
            self._service.send(job.session, error_replies.from_error(error), (), job.request)
            return None
        with self._changed:
            job.is_ready = True
            coordinator, request = job.session, job.request
        self._service.send(coordinator, messages.Done(), (), request)
        return runner

    def _work(self, job: Job, runner: Runner) -> None:
        while not job.is_ended and not runner.is_fenced:
            work = job.take()
            if work is not None:
                runner.run(work)
            elif runner.has_unreported:
                runner.report_all()
            else:
                began = spans.now()
                job.wait(_POLL_S)
                if began:
                    spans.record("wait", began, label="closures")
        if runner.is_fenced:
            runner.report_all()

    def _sender(self, job: Job) -> Callable[[messages.Body, Sequence[Buffer]], None]:
        def send(body: messages.Body, buffers: Sequence[Buffer]) -> None:
            if not job.is_ended:
                self._service.send(job.session, body, buffers)

        return send

    # Incarnations.

    def _forget(self, job: Job) -> bool:
        """Drops a job, unless another one has replaced it."""
        job.end()
        with self._changed:
            if self._job is not job:
                return False
            self._job = None
            return True

    def _end_incarnation(self, job: Job) -> None:
        """Drops a job, and begins a new incarnation that the servers have not fenced."""
        if self._forget(job):
            self._service.incarnation = new_incarnation()
            self._service.wake()

    def _end(self, why: str) -> None:
        """Ends the task by itself."""
        if self.ending is not None:
            return
        _log.warning("%s ends: %s", self._task, why)
        self.ending = why
        self.interrupt()
        if self._on_ending is not None:
            self._on_ending(why)

    def _on_idle(self, now: float) -> None:
        """Ends the task if its coordinator was silent for too long."""
        job = self._job
        pause_s = 0.0 if self._polled_s is None else now - self._polled_s
        self._polled_s = now
        if job is None:
            return
        if pause_s > _PAUSE_S:
            job.last_seen_s += pause_s
        if job.is_orphaned(now):
            self._end(f"its coordinator has been silent for {now - job.last_seen_s:.1f} s")

    # The socket thread.

    def _handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> _Reply | None:
        body = envelope.body
        if isinstance(body, messages.Attach):
            return self._attach(session, envelope, body)
        if isinstance(body, messages.Ping):
            return self._pong(session, envelope, body), ()
        if isinstance(body, messages.Detach):
            job = self._job_of(session, envelope)
            if body.is_dead and self._newest == (envelope.job, envelope.epoch):
                self._end("its coordinator has declared it dead")
            elif job is not None:
                self._end_incarnation(job)
            # Also without a request id: it announces the new incarnation.
            return messages.Done(), ()
        job = self._require_job(session, envelope)
        job.session = session
        reply = self._store(job, body, buffers)
        if reply is None and envelope.request:
            return messages.Done(), ()
        return reply

    def _store(self, job: Job, body: messages.Body, buffers: list[memoryview]) -> _Reply | None:
        """Stores functions, and queues closures and resource operations."""
        if isinstance(body, messages.ShipFunction):
            job.functions.store(body.function, buffers)
        elif isinstance(body, messages.Run):
            known = job.add_calls(_calls(body, buffers))
            if known:
                return _finished(known)
        elif isinstance(body, messages.CreateResource):
            _require_count(body.num_buffers, buffers)
            job.add(Create(body, buffers))
        elif isinstance(body, messages.DropResources):
            job.add(Drop(body.resources))
        elif isinstance(body, messages.Cancel):
            ended = error_reports.recalled(job.cancel(body.closures), str(self._task))
            job.record_cancelled(ended)
            if ended:
                return messages.Finished(ended), ()
        return None

    def _attach(
        self, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> _Reply | None:
        name, epoch = envelope.job, envelope.epoch
        with self._changed:
            old = self._job
            if name == self._newest[0] and epoch < self._newest[1]:
                raise self._replaced(name, epoch)
            self._newest = (name, epoch)
            if old is not None and self._is_same(old, session, envelope, body):
                old.session, old.request = session, envelope.request
                return (messages.Done(), ()) if old.is_ready else None
            job = Job(name, epoch, self._service.incarnation, body, session, envelope.request)
            job.last_seen_s = runtime.now()
            self._job = job
            self._changed.notify_all()
        if old is not None:
            _log.info("%s replaces %s with %s", self._task, old, job)
            old.end()
        return None

    def _is_same(
        self, job: Job, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> bool:
        """Returns whether an attach request repeats the one of the job."""
        return (
            (job.name, job.epoch, job.attach) == (envelope.job, envelope.epoch, body)
            and job.session.incarnation == session.incarnation
            and not job.is_ended
        )

    def _pong(
        self, session: Session, envelope: messages.Envelope, body: messages.Ping
    ) -> messages.Pong:
        job = self._job_of(session, envelope)
        if job is not None:
            job.session = session
            job.last_seen_s = runtime.now()
            job.forget_settled(body.settled)
        return messages.Pong(self._num_run, self._counters(job))

    @property
    def _num_run(self) -> int:
        """The number of closures that have run."""
        runner = self._runner
        return self._num_run_before + (runner.num_run if runner is not None else 0)

    def _counters(self, job: Job | None) -> dict[str, int | float]:
        runner = self._runner
        counters: dict[str, int | float] = {
            "attached": 0,
            "open": 0,
            "waiting": 0,
            "running_s": 0.0,
        }
        if job is not None:
            counters |= {"attached": 1, "open": job.num_open, "waiting": job.num_waiting}
            counters["functions"] = len(job.functions)
        if runner is not None:
            counters["resources"] = len(runner.resources)
            started_s = runner.started_s
            counters["running_s"] = 0.0 if started_s is None else runtime.now() - started_s
            waiting = runner.waiting_for
            if waiting is not None:
                since_s = runtime.now() - waiting[1]
                counters |= {"waiting_ps": waiting[0], "waiting_s": since_s}
        return counters

    def _job_of(self, session: Session, envelope: messages.Envelope) -> Job | None:
        """Returns the job, if the message is from its coordinator."""
        job = self._job
        if job is None or (job.name, job.epoch) != (envelope.job, envelope.epoch):
            return None
        return job if job.session.incarnation == session.incarnation else None

    def _require_job(self, session: Session, envelope: messages.Envelope) -> Job:
        job = self._job_of(session, envelope)
        if job is not None:
            return job
        if envelope.job == self._newest[0] and envelope.epoch < self._newest[1]:
            raise self._replaced(envelope.job, envelope.epoch)
        raise errors.UnavailableError(
            f"{self._task} is attached to {self._job or 'no job'}, and {session} is not its "
            "coordinator. Attach it first."
        )

    def _replaced(self, job: str, epoch: int) -> errors.FencedError:
        return errors.FencedError(
            f"{self._task} rejects the coordinator of job {job!r} with epoch {epoch}: a newer one "
            f"has epoch {self._newest[1]}. Run one coordinator per job."
        )


def _calls(body: messages.Run, buffers: list[memoryview]) -> list[Call]:
    """Splits the buffers of a message by closure."""
    _require_count(sum(call.num_buffers for call in body.closures), buffers)
    calls, start = [], 0
    for call in body.closures:
        if call.num_buffers < 0:
            _require_count(call.num_buffers, buffers)
        calls.append(Call(call, buffers[start : start + call.num_buffers]))
        start += call.num_buffers
    return calls


def _require_count(count: int, buffers: Sequence[Buffer]) -> None:
    if count != len(buffers):
        raise errors.ProtocolError(
            f"The message needs {count} buffers",
            f"it has {len(buffers)}",
            "Run the same version of replicax on all tasks.",
        )


def _finished(sent: Sequence[tuple[messages.Result, Sequence[Buffer]]]) -> _Reply:
    return messages.Finished([r for r, _ in sent]), [b for _, own in sent for b in own]
