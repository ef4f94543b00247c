"""What a worker process runs: it takes closures from a coordinator and computes them.

Two threads. That of the socket stores and queues what comes, and answers beats also while a
closure computes. The one that calls `run_forever` does everything else: it makes sessions,
unpickles, computes and waits for servers.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.transport.addresses import Location
from replicax.transport.keys import Keys
from replicax.transport.service import Service
from replicax.transport.sessions import Session
from replicax.worker import error_reports
from replicax.worker.job import Call, Drop, Job, Make
from replicax.worker.runner import Runner, WorkerSession

_log = logging.getLogger(__name__)

# Makes a worker's side of a job from (attach, job, epoch, incarnation of this worker).
MakeSession = Callable[[messages.Attach, str, int, int], WorkerSession]
_Answer = tuple[messages.Body, Sequence[Any]]

_LOOK_S = 0.5
# The service looks around every tenth of a second. If it did not for so long, this process
# was stopped, and that its coordinator was not heard is nobody's fault.
_PAUSE_S = 1.0


class WorkerTask:
    """One worker: belongs to one coordinator at a time, and runs its closures in order.

    When it is let go, or refused by the servers, it drops everything of the job and begins a
    new life, with a new incarnation, in which it can be attached again. When it was declared
    dead, or has not heard of its coordinator for the seconds of the setting "orphan", it ends:
    nobody knows what state it is in, and a new process is as good as new.

    Args:
      index: Its index in the job "worker".
      location: Where to listen.
      make_session: Makes its side of a job, when it is attached to one.
      keys: What to prove with who listens; TCP needs them.
      on_ending: Called when the task ends by itself, with the reason. A closure may still be
        running then, for ever: whoever owns the process can end it.

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
        # Protects the job and its successor; also says that there is one, or that it is over.
        # Taken before the lock of a job.
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._is_interrupted = False
        # The newest coordinator that this worker has seen: older ones of the job are refused.
        self._newest = ("", 0)
        self._looked_s: float | None = None
        self._runner: Runner | None = None
        # Closures of jobs that are over; see `_progress`.
        self._num_run_before = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._service.address

    @property
    def incarnation(self) -> int:
        """Which of its lives this is."""
        return self._service.incarnation

    def start(self) -> None:
        """Begins to listen."""
        self._service.start()

    def interrupt(self) -> None:
        """Makes `run_forever` return after the closure that runs now."""
        with self._changed:
            self._is_interrupted = True
            job = self._job
            self._changed.notify_all()
        if job is not None:
            job.end()

    def close(self) -> None:
        """Listens no more; again is harmless."""
        self.interrupt()
        self._service.close()

    def run_forever(self) -> None:
        """Computes in this thread, until interrupted or closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job or self._is_interrupted, _LOOK_S)
                if self._is_interrupted:
                    return
                job = self._job
            if job is not None:
                self._serve(job)

    # The thread that computes.

    def _serve(self, job: Job) -> None:
        """Does the work of a job until it ends."""
        runner = self._open(job)
        if runner is None:
            return
        _log.info("%s works for %s", self._task, job)
        self._runner = runner
        try:
            self._work(job, runner)
        except Exception as error:
            # Not of a closure. The coordinator gives what this incarnation had to another worker.
            _log.exception("%s cannot go on with %s", self._task, job)
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                self._end("a closure has closed its descriptors")
                return
            self._end_life(job)
        self._num_run_before += runner.num_run
        self._runner = None
        if runner.is_fenced:
            self._end_life(job)
        try:
            runner.close()
        except Exception:
            # The user's iterators are closed here too; the worker is free for the next job anyway.
            _log.exception("%s could not close what it had for %s", self._task, job)
        _log.info("%s has dropped %s", self._task, job)

    def _open(self, job: Job) -> Runner | None:
        """Makes what a job needs, and answers the coordinator."""
        session: WorkerSession | None = None
        try:
            session = self._make_session(job.attach, job.name, job.epoch, job.incarnation)
            runner = Runner(job, session, self._index, str(self._task), self._sender(job))
        except Exception as error:
            if not isinstance(error, errors.DistributeError):
                _log.exception("%s cannot work for %s", self._task, job)
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
                job.wait(_LOOK_S)
        if runner.is_fenced:
            runner.report_all()

    def _sender(self, job: Job) -> Callable[[messages.Body, Sequence[Any]], None]:
        def send(body: messages.Body, buffers: Sequence[Any]) -> None:
            if not job.is_ended:
                self._service.send(job.session, body, buffers)

        return send

    # Lives.

    def _forget(self, job: Job) -> bool:
        """Lets a job go, unless another one has replaced it."""
        job.end()
        with self._changed:
            if self._job is not job:
                return False
            self._job = None
            return True

    def _end_life(self, job: Job) -> None:
        """Lets a job go; what the servers may refuse ends with this life of the worker."""
        if self._forget(job):
            self._service.incarnation = new_incarnation()
            self._service.wake()

    def _end(self, why: str) -> None:
        """Ends the task, because nobody counts on it any more."""
        if self.ending is not None:
            return
        _log.warning("%s ends: %s", self._task, why)
        self.ending = why
        self.interrupt()
        if self._on_ending is not None:
            self._on_ending(why)

    def _on_idle(self, now: float) -> None:
        """Gives up a job whose coordinator was not heard of for too long."""
        job = self._job
        pause_s = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        if job is None:
            return
        if pause_s > _PAUSE_S:
            job.last_seen_s += pause_s
        if job.is_orphaned(now):
            self._end(f"it has not heard of its coordinator for {now - job.last_seen_s:.1f} s")

    # The thread of the socket.

    def _handle(
        self, session: Session, envelope: messages.Envelope, buffers: list[memoryview]
    ) -> _Answer | None:
        body = envelope.body
        if isinstance(body, messages.Attach):
            return self._attach(session, envelope, body)
        if isinstance(body, messages.Ping):
            return self._answer_ping(session, envelope, body), ()
        if isinstance(body, messages.Detach):
            job = self._job_of(session, envelope)
            if body.is_dead and self._newest == (envelope.job, envelope.epoch):
                self._end("its coordinator has given it up")
            elif job is not None:
                self._end_life(job)
            # Said also when nobody asked: the coordinator learns of the new life by it.
            return messages.Done(), ()
        job = self._require_job(session, envelope)
        job.session = session
        answer = self._store(job, body, buffers)
        if answer is None and envelope.request:
            return messages.Done(), ()
        return answer

    def _store(self, job: Job, body: messages.Body, buffers: list[memoryview]) -> _Answer | None:
        """Takes what closures need, and the closures."""
        if isinstance(body, messages.ShipFunction):
            job.functions.store(body.function, buffers)
        elif isinstance(body, messages.Run):
            again = job.add_calls(_calls(body, buffers))
            if again:
                return _finished(again)
        elif isinstance(body, messages.CreateResource):
            _require_count(body.num_buffers, buffers)
            job.add(Make(body, buffers))
        elif isinstance(body, messages.DropResources):
            job.add(Drop(body.resources))
        elif isinstance(body, messages.Cancel):
            ended = error_reports.taken_back(job.cancel(body.closures), str(self._task))
            job.note_cancelled(ended)
            if ended:
                return messages.Finished(ended), ()
        return None

    def _attach(
        self, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> _Answer | None:
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
            job.last_seen_s = time.monotonic()
            self._job = job
            self._changed.notify_all()
        if old is not None:
            _log.info("%s leaves %s for %s", self._task, old, job)
            old.end()
        return None

    def _is_same(
        self, job: Job, session: Session, envelope: messages.Envelope, body: messages.Attach
    ) -> bool:
        """Tells whether a question to attach is the one that was asked before."""
        return (
            (job.name, job.epoch, job.attach) == (envelope.job, envelope.epoch, body)
            and job.session.incarnation == session.incarnation
            and not job.is_ended
        )

    def _answer_ping(
        self, session: Session, envelope: messages.Envelope, body: messages.Ping
    ) -> messages.Pong:
        job, runner = self._job_of(session, envelope), self._runner
        figures: dict[str, int | float] = {"attached": 0, "open": 0, "waiting": 0, "running_s": 0.0}
        if job is not None:
            job.session = session
            job.last_seen_s = time.monotonic()
            job.forget_settled(body.settled)
            figures |= {"attached": 1, "open": job.num_open, "waiting": job.num_waiting}
            figures["functions"] = len(job.functions)
        if runner is not None:
            figures["resources"] = len(runner.resources)
            started_s = runner.started_s
            figures["running_s"] = 0.0 if started_s is None else time.monotonic() - started_s
            waiting = runner.waiting_for
            if waiting is not None:
                since_s = time.monotonic() - waiting[1]
                figures |= {"waiting_ps": waiting[0], "waiting_s": since_s}
        progress = self._num_run_before + (runner.num_run if runner is not None else 0)
        return messages.Pong(progress, figures)

    def _job_of(self, session: Session, envelope: messages.Envelope) -> Job | None:
        """Returns the job, if it is the coordinator of the job that speaks."""
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
            f"{self._task} takes closures of the job that it is attached to",
            f"it works for {self._job or 'no job'} now, and {session} is not its coordinator",
            "Attach it first.",
        )

    def _replaced(self, job: str, epoch: int) -> errors.FencedError:
        return errors.FencedError(
            f"{self._task} works for the newest coordinator of a job",
            f"that of job {job!r} has epoch {self._newest[1]}, and epoch {epoch} is over",
            "Let one coordinator at a time run a job.",
        )


def _calls(body: messages.Run, buffers: list[memoryview]) -> list[Call]:
    """Deals out the buffers of closures."""
    _require_count(sum(call.num_buffers for call in body.closures), buffers)
    calls, start = [], 0
    for call in body.closures:
        if call.num_buffers < 0:
            _require_count(call.num_buffers, buffers)
        calls.append(Call(call, buffers[start : start + call.num_buffers]))
        start += call.num_buffers
    return calls


def _require_count(count: int, buffers: Sequence[Any]) -> None:
    if count != len(buffers):
        raise errors.ProtocolError(
            f"The message needs {count} buffers",
            f"{len(buffers)} came",
            "Run the same version of replicax on all tasks.",
        )


def _finished(sent: Sequence[tuple[messages.Result, Sequence[Any]]]) -> _Answer:
    return messages.Finished([r for r, _ in sent]), [b for _, own in sent for b in own]
