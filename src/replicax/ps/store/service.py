"""What a parameter server answers: one method, from a request to its answer, without sockets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from replicax.protocol import messages
from replicax.protocol.tasks import Role
from replicax.ps.store import accumulation, exchange, jobs, memory, snapshot
from replicax.ps.store.counters import Figures
from replicax.ps.store.journal import AnyChange, Change, Journal, Unwatched
from replicax.ps.store.master_record import Promise, Promises
from replicax.ps.store.storage import Storage

Answer = tuple[messages.Body, Sequence[Any]]

_log = logging.getLogger(__name__)


class ParameterStore:
    """All that a parameter server keeps and does.

    `handle` may be called by several threads. Requests that may take long, `CreatePart` and
    `RegisterOptimizer`, then do not hold up the exchanges of training; see `SLOW`.

    Example:
      >>> import numpy as np
      >>> store = ParameterStore(task=0)
      >>> def ask(body, *buffers):
      ...     return store.handle(
      ...         "coordinator", 1, body, buffers, job="demo", epoch=0, now=0.0
      ...     )
      >>> _ = ask(messages.Attach([], {}))
      >>> _ = ask(messages.CreatePart(0, "v", (2,), "float32", messages.Fill(bytes(4))))
      >>> update = messages.Update(call=0, kind="assign_add", part=0)
      >>> push = messages.Push(closure=0, changes=[update])
      >>> exchange = messages.Exchange([push], [messages.Read(0)])
      >>> answer, values = ask(exchange, np.ones(2, np.float32))
      >>> np.frombuffer(values[0], np.float32).tolist()
      [1.0, 1.0]

    Args:
      task: The index of the server.
      is_saved: Whether somebody takes snapshots of it.
      journal: Is told what is changed; see `journal.Journal`.
      promises: What remembers whom it obeys; see Note [A promise outlives its process].
      is_connected: Tells whether a coordinator process, by its incarnation, has a connection to
        this server; by default it is taken to have one.

    Attributes:
      expired: The job whose lease ran out last; None if there is none.
      cutting: To be held by whoever takes a cut, until it is closed.
    """

    # Bodies that a transport may hand to a thread of their own.
    SLOW: tuple[type[messages.Body], ...] = (messages.CreatePart, messages.RegisterOptimizer)

    def __init__(
        self,
        task: int,
        *,
        is_saved: bool = False,
        journal: Journal | None = None,
        promises: Promises | None = None,
        is_connected: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._task = f"/job:ps/task:{task}"
        self._is_connected = is_connected
        self._is_saved = is_saved
        self._promises = promises
        self._journal = journal or Unwatched()
        self.expired: str | None = None
        self.cutting = threading.Lock()
        # See storage.py for the order of locks. It also protects the two that follow.
        self._changing = threading.Lock()
        self._job: jobs.Job | None = None
        self._storage = Storage(self._task, self._changing)
        self._figures = Figures()
        # See `snapshot.Marks`. Each grows after what it counts has been done.
        self._num_changes = 0
        self._num_makes = 0
        self._num_endings = 0
        self._answers: dict[type[messages.Body], Callable[..., Answer]] = {
            messages.Detach: self._detach,
            messages.Ping: self._ping,
            messages.CreatePart: self._create,
            messages.DropParts: self._drop,
            messages.RegisterOptimizer: self._register,
            messages.Fence: self._fence,
            messages.FlushGradients: self._apply_rest,
        }

    @property
    def job(self) -> str | None:
        """The job that holds the server."""
        held = self._job
        return None if held is None else held.name

    def handle(
        self,
        role: Role,
        incarnation: int,
        body: messages.Body,
        buffers: Sequence[Any] = (),
        *,
        job: str,
        epoch: int,
        now: float,
    ) -> Answer:
        """Answers a request; every request may be repeated.

        Buffers of the answer must not be written to. Those that are lent stay as they are for as
        long as somebody refers to them.

        Args:
          role: Who asks; the transport has seen to it that it is true.
          incarnation: The life of the process that asks.
          body: What it asks.
          buffers: What comes with it: bytes, or flat views of them.
          job: The job of the envelope.
          epoch: The epoch of the envelope.
          now: The time, of a clock that never jumps.

        Raises:
          DistributeError: It is refused; the kind of error says why.
        """
        self.expire(now)
        try:
            if isinstance(body, messages.Exchange):
                return self._exchange(role, incarnation, body, buffers, job, epoch, now)
            if role != "coordinator":
                raise jobs.not_for(role, body, self._task)
            if isinstance(body, messages.QueryJob):
                return self._look()
            if isinstance(body, messages.Attach):
                return self._attach(incarnation, body, job, epoch, now)
            answer = self._answers.get(type(body))
            if answer is None:
                raise jobs.unknown(body, self._task)
            if isinstance(body, messages.Detach) and not self._is_held_by(job, epoch, incarnation):
                return messages.Done(), ()
            self._member(job, epoch, incarnation).renew(now)
            answered = answer(body, buffers)
            self._num_changes += not isinstance(body, messages.Ping)
            return answered
        finally:
            self._figures.requests += 1

    def expire(self, now: float) -> bool:
        """Drops a job whose lease has run out, and tells whether there was one.

        Its snapshots stay: a coordinator may come back, and a server that is started again
        restores them.
        """
        held = self._job
        if held is None or not held.is_expired(now):
            return False
        with self._changing:
            if self._job is not held or not held.is_expired(now):
                return False
            self._clear()
            self.expired = held.name
        return True

    def figures(self) -> dict[str, int | float]:
        """Returns counters and sizes by name."""
        rss = memory.resident_bytes()
        return {**self._figures.as_dict(), **self._storage.sizes(), "rss": rss}

    def marks(self) -> snapshot.Marks:
        """Returns what tells whether there is something to save; cheap."""
        held = self._job
        name = None if held is None or held.is_waiting else held.name
        return snapshot.Marks(name, self._num_changes, self._num_makes, self._num_endings)

    def snapshot(self, on_cut: Callable[[], None] | None = None) -> snapshot.Cut | None:
        """Takes a cut of the job; None if there is none, or nobody has come for it.

        One at a time: the one before must have been closed.

        Args:
          on_cut: Called at that moment: all changes so far are in the cut, and no others.
        """
        with self._changing:
            held = self._job
            if held is None or held.is_waiting:
                return None
            cut = snapshot.take(held, self._storage, self.marks())
            if on_cut is not None:
                on_cut()
            return cut

    def restore(self, loaded: snapshot.Loaded) -> None:
        """Starts from what another process has saved, before anything is asked.

        Until a coordinator attaches the job again, whatever it asks is refused.

        Raises:
          DistributeError: It cannot be used, or a coordinator has taken the server meanwhile;
            then nothing was changed.
        """
        job, storage = snapshot.restored(loaded, self._task, self._changing)
        with self._changing:
            if self._job is not None and not self._job.is_waiting:
                raise jobs.taken(self._job, job.name, self._task, self._job.heard_s)
            kept = None if self._promises is None else self._promises.kept
            if kept is not None and kept.job == job.name:
                job.promise = kept
            self._job, self._storage = job, storage

    def _look(self) -> Answer:
        with self._changing:
            held, storage = self._job, self._storage
            name, epoch = ("", -1) if held is None else (held.name, held.master[0])
            once = storage.once
            whole = sorted(storage.whole_parts)
            return messages.JobInfo(name, epoch, once.newest, once.settled, whole), ()

    def _attach(
        self, incarnation: int, body: messages.Attach, job: str, epoch: int, now: float
    ) -> Answer:
        lease_s = jobs.lease_of(body)
        is_mirrored = jobs.is_mirrored(body)
        jobs.mirror_answer_of(body)
        accumulation.needed_of(body)
        with self._changing:
            held = self._job
            jobs.require_free(held, job, now, self._task, self._is_connected)
            if body.parts is not None:
                # Nothing more will come to one that was restored.
                is_back = held is not None and held.is_waiting
                kept = self._storage.whole_parts if is_back else self._storage.parts
                jobs.require_kept(held, job, body.parts, kept, self._task)
            if held is None or held.name != job:
                if held is not None and held.is_waiting:
                    text = "%s drops job %r, which it had restored: job %r takes the server"
                    _log.warning(text, self._task, held.name, job)
                elif held is not None:
                    text = "%s drops job %r of %s, which is gone: job %r takes the server"
                    _log.warning(text, self._task, held.name, held.owner, job)
                self._clear()
                held = self._job = jobs.Job(job)
            else:
                jobs.require_newer(held, epoch, incarnation, self._task)
                if held.is_waiting and body.parts is None and epoch == held.epoch:
                    # It thinks that it begins: what it knows of this server is wrong.
                    jobs.require_member(held, job, epoch, incarnation, self._task)
                if epoch > held.epoch:
                    self._storage.begin_epoch()
                    # Rounds begin anew, too; what waits came from closures that were finished.
                    exchange.apply_rest(self._storage)
            if self._promises is not None and epoch > held.epoch:
                self._promises.keep(Promise(job, epoch, incarnation))
            self._num_makes += epoch > held.epoch
            self._num_changes += epoch > held.epoch
            # Before it answers anybody: a life that was given up may be the first to ask.
            held.fence(body.fenced)
            held.owner, held.is_kept = jobs.owner_of(body), jobs.is_kept(body)
            held.take(epoch, incarnation, lease_s, now)
            self._storage.accumulation.configure(body)
            self._journal.attached(job, body, Change("coordinator", incarnation, epoch, body))
            return messages.Attached(self._is_saved or is_mirrored, held.is_restored), ()

    def _detach(self, _: messages.Detach, __: Sequence[Any]) -> Answer:
        with self._changing:
            self._let_go()
        return messages.Done(), ()

    def _ping(self, body: messages.Ping, _: Sequence[Any]) -> Answer:
        with self._changing:
            once = self._storage.once
            if body.settled > once.settled:
                once.settle(body.settled)
                self._note(body)
        return messages.Pong(self._figures.requests, self.figures()), ()

    def _create(self, body: messages.CreatePart, buffers: Sequence[Any]) -> Answer:
        storage = self._storage
        storage.create(body, buffers, self._noter(storage, body, buffers))
        self._require_current(storage)
        self._num_makes += 1
        return messages.Done(), ()

    def _drop(self, body: messages.DropParts, _: Sequence[Any]) -> Answer:
        storage = self._storage
        storage.drop(body.parts, self._noter(storage, body))
        self._num_makes += 1
        return messages.Done(), ()

    def _register(self, body: messages.RegisterOptimizer, buffers: Sequence[Any]) -> Answer:
        storage = self._storage
        storage.register(body, buffers, self._noter(storage, body, buffers))
        self._require_current(storage)
        self._num_makes += 1
        return messages.Done(), ()

    def _fence(self, body: messages.Fence, _: Sequence[Any]) -> Answer:
        with self._changing:
            if self._job is not None:
                self._job.fence(body.incarnations)
                self._note(body)
        return messages.Done(), ()

    def _apply_rest(self, body: messages.FlushGradients, _: Sequence[Any]) -> Answer:
        with self._changing:
            try:
                exchange.apply_rest(self._storage)
            except BaseException:
                self._journal.doubt()
                raise
            self._note(body)
        return messages.Done(), ()

    def _exchange(
        self,
        role: Role,
        incarnation: int,
        body: messages.Exchange,
        buffers: Sequence[Any],
        job: str,
        epoch: int,
        now: float,
    ) -> Answer:
        exchange.require_buffers(body, buffers, self._task)
        failures: list[messages.PushFailure] = []
        # The first buffer of the reads.
        first = len(buffers) - sum(read.is_rows for read in body.reads)
        if body.pushes:
            with self._changing:
                # Asked under the lock: once a fence is answered, no change follows it.
                held = self._member(job, epoch, incarnation)
                storage = self._storage
                is_alone = role == "coordinator"
                failures = exchange.push_all(
                    storage, body.pushes, buffers, self._figures, is_alone=is_alone
                )
                self._num_changes += 1
                only = messages.Exchange(body.pushes, [])
                change = Change(role, incarnation, epoch, only, first, len(failures))
                self._journal.note(change, buffers[:first])
        else:
            held = self._member(job, epoch, incarnation)
            storage = self._storage
        if role == "coordinator":
            held.renew(now)
        # Before reading: values may be newer than the clock says, never older.
        clock = storage.clock.steps
        results, values = exchange.read_all(storage, body.reads, buffers[first:], self._figures)
        return messages.Exchanged(results, failures, clock), values

    def _member(self, job: str, epoch: int, incarnation: int) -> jobs.Job:
        return jobs.require_member(self._job, job, epoch, incarnation, self._task)

    def _is_held_by(self, job: str, epoch: int, incarnation: int) -> bool:
        """Tells whether a job is here to be let go; one that was restored is let go at once."""
        with self._changing:
            held = self._job
            if held is None or held.name != job:
                return False
            if held.is_waiting:
                jobs.require_newer(held, epoch, incarnation, self._task)
                self._let_go()
                return False
            return True

    def _let_go(self) -> None:
        """Ends the job; `changing` is held. One that ran out may still come back."""
        self._clear()
        self._num_endings += 1
        if self._promises is not None:
            self._promises.forget()

    def _clear(self) -> None:
        # A request that still makes a part for the old job puts it where nobody looks.
        self._job = None
        self._storage = Storage(self._task, self._changing)
        self._journal.ended()

    def _note(self, body: AnyChange, buffers: Sequence[Any] = ()) -> None:
        """Tells the journal what the coordinator has changed; `changing` is held."""
        held = self._job
        if held is not None:
            change = Change("coordinator", held.coordinator, held.epoch, body, len(buffers))
            self._journal.note(change, buffers)

    def _noter(
        self, storage: Storage, body: AnyChange, buffers: Sequence[Any] = ()
    ) -> Callable[[bool], None]:
        """Returns what tells the journal when something is made, unless its job is over then."""

        def on_made(is_exact: bool) -> None:
            if storage is self._storage:
                self._note(body, buffers)
                if not is_exact:
                    self._journal.doubt()

        return on_made

    def _require_current(self, storage: Storage) -> None:
        if storage is not self._storage:
            raise jobs.ended_meanwhile(self._task)
