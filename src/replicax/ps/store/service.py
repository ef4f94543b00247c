"""The request handler of a parameter server, without sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from replicax.foundation import errors, runtime, spans
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Role
from replicax.ps.store import accumulation, jobs, memory, snapshot
from replicax.ps.store.journal import Entry, Journal, Mutation, NullJournal
from replicax.ps.store.parts import Part
from replicax.ps.store.storage import Counters, OnCreated, Storage

Reply = tuple[messages.Body, Sequence[Buffer]]
PartRows = Sequence[tuple[messages.StoredRows, Part]]

_log = logging.getLogger(__name__)


class CheckpointAccess(Protocol):
    """Writes and reads parts in checkpoints that this server shares with the coordinator."""

    def save(self, directory: str, rows: PartRows) -> bytes:
        """Writes parts into a new file; returns their part of the manifest, as JSON."""
        ...

    def load(self, path: str, rows: PartRows, *, is_check: bool) -> None:
        """Reads parts, or only compares their checksums."""
        ...


class ParameterStore:
    """The state of a parameter server, and the requests on it.

    `handle` is thread-safe. Slow requests, see `SLOW`, do not block the exchanges of training when
    they are handled in a thread of their own.

    Example:
      >>> import numpy as np
      >>> store = ParameterStore(task=0)
      >>> def request(body, *buffers):
      ...     return store.handle(
      ...         "coordinator", 1, body, buffers, job="demo", epoch=0, now=0.0
      ...     )
      >>> _ = request(messages.Attach([], {}))
      >>> _ = request(messages.CreatePart(0, "v", (2,), "float32", messages.Fill(bytes(4))))
      >>> update = messages.Update(call=0, kind="assign_add", part=0)
      >>> push = messages.Push(closure=0, changes=[update])
      >>> exchange = messages.Exchange([push], [messages.Read(0)])
      >>> reply, values = request(exchange, np.ones(2, np.float32))
      >>> np.frombuffer(values[0], np.float32).tolist()
      [1.0, 1.0]

    Args:
      task: The index of the server.
      is_saved: Whether snapshots of it are taken.
      journal: Receives the mutations of the store.
      master_record: Stores the newest coordinator; see Note [The master record] in jobs.py.
      checkpoints: Writes and reads parts in checkpoints; without it, such requests are rejected.
      is_connected: Returns whether a coordinator incarnation has a connection to this server. By
        default, every one has.

    Attributes:
      expired: The last job whose lease expired; None if there is none.
      snapshot_lock: To be held from taking a cut until it is closed.
    """

    # Requests that a transport may handle in a thread of their own.
    SLOW: tuple[type[messages.Body], ...] = (
        messages.CreatePart,
        messages.RegisterOptimizer,
        messages.SaveParts,
        messages.LoadParts,
    )

    def __init__(
        self,
        task: int,
        *,
        is_saved: bool = False,
        journal: Journal | None = None,
        master_record: jobs.MasterRecord | None = None,
        checkpoints: CheckpointAccess | None = None,
        is_connected: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._task = f"/job:ps/task:{task}"
        self._is_connected = is_connected
        self._is_saved = is_saved
        self._master_record = master_record
        self._checkpoints = checkpoints
        self._journal = journal or NullJournal()
        self.expired: str | None = None
        self.snapshot_lock = runtime.Lock()
        # See storage.py for the order of locks. It also protects `_job` and `_storage`.
        self._write_lock = runtime.Lock()
        self._job: jobs.Job | None = None
        self._storage = Storage(self._task, self._write_lock)
        self._counters = Counters()
        # See `snapshot.ChangeCounts`. Each grows after the change that it counts.
        self._num_changes = 0
        self._num_creations = 0
        self._num_ended_jobs = 0
        self._handlers: dict[type[messages.Body], Callable[..., Reply]] = {
            messages.Detach: self._detach,
            messages.Ping: self._ping,
            messages.CreatePart: self._create,
            messages.DropParts: self._drop,
            messages.SaveParts: self._save_parts,
            messages.LoadParts: self._load_parts,
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
        buffers: Sequence[Buffer] = (),
        *,
        job: str,
        epoch: int,
        now: float,
    ) -> Reply:
        """Handles a request; every request may be repeated.

        The buffers of the reply are read-only. Borrowed ones stay unchanged while they are
        referenced.

        Args:
          role: The authenticated role of the sender.
          incarnation: The incarnation of the sender.
          body: The request.
          buffers: Its buffers: bytes, or flat views of them.
          job: The job of the envelope.
          epoch: The epoch of the envelope.
          now: The time of a monotonic clock.

        Raises:
          DistributeError: The request is rejected.
        """
        self.expire(now)
        try:
            if isinstance(body, messages.Exchange):
                return self._exchange(role, incarnation, body, buffers, job, epoch, now)
            if role != "coordinator":
                raise jobs.coordinator_only(role, body, self._task)
            if isinstance(body, messages.QueryJob):
                return self._look()
            if isinstance(body, messages.Attach):
                return self._attach(incarnation, body, job, epoch, now)
            handler = self._handlers.get(type(body))
            if handler is None:
                raise jobs.unknown_request(body, self._task)
            if isinstance(body, messages.Detach) and not self._is_held_by(job, epoch, incarnation):
                return messages.Done(), ()
            self._member(job, epoch, incarnation).renew(now)
            reply = handler(body, buffers)
            self._num_changes += not isinstance(body, messages.Ping)
            return reply
        finally:
            self._counters.requests += 1

    def expire(self, now: float) -> bool:
        """Drops the job if its lease has expired; returns whether it had.

        Its snapshots remain, so that a restarted server can restore them.
        """
        held = self._job
        if held is None or not held.is_expired(now):
            return False
        with self._write_lock:
            if self._job is not held or not held.is_expired(now):
                return False
            self._clear()
            self.expired = held.name
        return True

    def counters(self) -> dict[str, int | float]:
        """Returns counters and sizes by name."""
        counted: dict[str, int] = vars(self._counters)
        return {**counted, **self._storage.sizes(), "rss": memory.resident_bytes()}

    def change_counts(self) -> snapshot.ChangeCounts:
        """Returns counts that tell whether there is something to save; cheap."""
        held = self._job
        name = None if held is None or held.awaits_coordinator else held.name
        return snapshot.ChangeCounts(
            name, self._num_changes, self._num_creations, self._num_ended_jobs
        )

    def snapshot(self, on_cut: Callable[[], None] | None = None) -> snapshot.Cut | None:
        """Takes a consistent cut of the job; None if no coordinator has attached one.

        Only one cut may be open at a time.

        Args:
          on_cut: Called while changes are blocked: the cut contains exactly the changes so far.
        """
        with self._write_lock:
            held = self._job
            if held is None or held.awaits_coordinator:
                return None
            cut = snapshot.take(held, self._storage, self.change_counts())
            if on_cut is not None:
                on_cut()
            return cut

    def restore(self, loaded: snapshot.Loaded) -> None:
        """Restores the state saved by another process.

        Until a coordinator attaches the job again, its requests are rejected.

        Raises:
          DistributeError: The snapshot cannot be used, or a coordinator has attached the server
            meanwhile; the store is unchanged.
        """
        job, storage = snapshot.restored(loaded, self._task, self._write_lock)
        with self._write_lock:
            if self._job is not None and not self._job.awaits_coordinator:
                raise jobs.held_by_other(self._job, job.name, self._task, self._job.last_request_s)
            recorded = None if self._master_record is None else self._master_record.master
            if recorded is not None and recorded.job == job.name:
                job.recorded_master = recorded
            self._job, self._storage = job, storage

    def _look(self) -> Reply:
        with self._write_lock:
            held, storage = self._job, self._storage
            name, epoch = ("", -1) if held is None else (held.name, held.master[0])
            applied = storage.applied
            complete = sorted(storage.complete_parts)
            return messages.JobInfo(name, epoch, applied.newest, applied.settled, complete), ()

    def _attach(
        self, incarnation: int, body: messages.Attach, job: str, epoch: int, now: float
    ) -> Reply:
        lease_s = jobs.lease_of(body)
        is_mirrored = jobs.is_mirrored(body)
        jobs.mirror_reply_timeout_of(body)
        accumulation.needed_of(body)
        with self._write_lock:
            held = self._attachable(incarnation, body, job, epoch, now)
            if epoch > held.epoch:
                if self._master_record is not None:
                    self._master_record.write(jobs.Master(job, epoch, incarnation))
                self._num_creations += 1
                self._num_changes += 1
            # Before the first reply: a fenced incarnation may send the first request.
            held.fence(body.fenced)
            held.owner, held.is_kept = jobs.owner_of(body), jobs.is_kept(body)
            held.attach(epoch, incarnation, lease_s, now)
            self._storage.accumulation.configure(body)
            self._journal.attached(job, body, Entry("coordinator", incarnation, epoch, body))
            return messages.Attached(self._is_saved or is_mirrored, held.is_restored), ()

    def _attachable(
        self, incarnation: int, body: messages.Attach, job: str, epoch: int, now: float
    ) -> jobs.Job:
        """Returns the job that a coordinator attaches, or raises; the write lock is held."""
        held = self._job
        jobs.require_free(held, job, now, self._task, self._is_connected)
        if body.parts is not None:
            # Incomplete parts of a restored job will never be completed.
            is_restored = held is not None and held.awaits_coordinator
            kept = self._storage.complete_parts if is_restored else self._storage.parts
            jobs.require_parts(held, job, body.parts, kept, self._task)
        if held is None or held.name != job:
            if held is not None:
                state = "restored" if held.awaits_coordinator else f"abandoned by {held.owner}"
                text = "%s drops job %r (%s) and attaches job %r"
                _log.warning(text, self._task, held.name, state, job)
            self._clear()
            self._job = jobs.Job(job)
            return self._job
        jobs.require_newer(held, epoch, incarnation, self._task)
        if held.awaits_coordinator and body.parts is None and epoch == held.epoch:
            # The coordinator starts a new job: it expects an empty server.
            jobs.require_member(held, job, epoch, incarnation, self._task)
        if epoch > held.epoch:
            self._storage.begin_epoch()
            # A new epoch starts a new round; the gradients that wait are of finished closures.
            self._storage.apply_rest()
        return held

    def _detach(self, _: messages.Detach, __: Sequence[Buffer]) -> Reply:
        with self._write_lock:
            self._end_job()
        return messages.Done(), ()

    def _ping(self, body: messages.Ping, _: Sequence[Buffer]) -> Reply:
        with self._write_lock:
            applied = self._storage.applied
            if body.settled > applied.settled:
                applied.settle(body.settled)
                self._record(body)
        return messages.Pong(self._counters.requests, self.counters()), ()

    def _create(self, body: messages.CreatePart, buffers: Sequence[Buffer]) -> Reply:
        storage = self._storage
        storage.create(body, buffers, self._recorder(storage, body, buffers))
        self._require_current(storage)
        self._num_creations += 1
        return messages.Done(), ()

    def _drop(self, body: messages.DropParts, _: Sequence[Buffer]) -> Reply:
        storage = self._storage
        storage.drop(body.parts, self._recorder(storage, body))
        self._num_creations += 1
        return messages.Done(), ()

    def _save_parts(self, body: messages.SaveParts, _: Sequence[Buffer]) -> Reply:
        rows = [(row, self._storage.part(row.part)) for row in body.rows]
        with spans.block("checkpoint", "tables"):
            return messages.PartsSaved(self._require_checkpoints().save(body.directory, rows)), ()

    def _load_parts(self, body: messages.LoadParts, _: Sequence[Buffer]) -> Reply:
        storage = self._storage
        rows = [(row, storage.part(row.part)) for row in body.rows]
        self._require_checkpoints().load(body.path, rows, is_check=body.is_check)
        if not body.is_check:
            self._require_current(storage)
            with self._write_lock:
                # A mirror may not have the files: it gets all parts again.
                self._journal.mark_unrepeatable()
        return messages.Done(), ()

    def _require_checkpoints(self) -> CheckpointAccess:
        if self._checkpoints is None:
            raise errors.UnsupportedError(
                f"{self._task} needs a disk to write and read its tables in checkpoints",
                "it has no access to checkpoints",
                "Transfer the values instead.",
            )
        return self._checkpoints

    def _register(self, body: messages.RegisterOptimizer, buffers: Sequence[Buffer]) -> Reply:
        storage = self._storage
        storage.register(body, buffers, self._recorder(storage, body, buffers))
        self._require_current(storage)
        self._num_creations += 1
        return messages.Done(), ()

    def _fence(self, body: messages.Fence, _: Sequence[Buffer]) -> Reply:
        with self._write_lock:
            if self._job is not None:
                self._job.fence(body.incarnations)
                self._record(body)
        return messages.Done(), ()

    def _apply_rest(self, body: messages.FlushGradients, _: Sequence[Buffer]) -> Reply:
        with self._write_lock:
            try:
                self._storage.apply_rest()
            except BaseException:
                self._journal.mark_unrepeatable()
                raise
            self._record(body)
        return messages.Done(), ()

    def _exchange(
        self,
        role: Role,
        incarnation: int,
        body: messages.Exchange,
        buffers: Sequence[Buffer],
        job: str,
        epoch: int,
        now: float,
    ) -> Reply:
        self._storage.require_buffers(body, buffers)
        failures: list[messages.PushFailure] = []
        # The first buffer of the reads.
        first = len(buffers) - sum(read.is_rows for read in body.reads)
        if body.pushes:
            with self._write_lock:
                # Checked under the lock: no change follows an acknowledged fence.
                held = self._member(job, epoch, incarnation)
                storage = self._storage
                failures = storage.push(
                    body.pushes, buffers, self._counters, is_alone=role == "coordinator"
                )
                self._num_changes += 1
                if self._journal.target is not None:
                    only = messages.Exchange(body.pushes, [])
                    entry = Entry(role, incarnation, epoch, only, first, len(failures))
                    self._journal.record(entry, buffers[:first])
        else:
            held = self._member(job, epoch, incarnation)
            storage = self._storage
        if role == "coordinator":
            held.renew(now)
        # Before reading: values may be newer than the clock, never older.
        clock = storage.clock.steps
        began = spans.now()
        results, values = storage.read(body.reads, buffers[first:], self._counters)
        if began and body.reads:
            spans.record("read", began, amount=len(body.reads))
        return messages.Exchanged(results, failures, clock), values

    def _member(self, job: str, epoch: int, incarnation: int) -> jobs.Job:
        return jobs.require_member(self._job, job, epoch, incarnation, self._task)

    def _is_held_by(self, job: str, epoch: int, incarnation: int) -> bool:
        """Returns whether there is a job to detach; a restored one is ended at once."""
        with self._write_lock:
            held = self._job
            if held is None or held.name != job:
                return False
            if held.awaits_coordinator:
                jobs.require_newer(held, epoch, incarnation, self._task)
                self._end_job()
                return False
            return True

    def _end_job(self) -> None:
        """Ends the job for good, unlike an expired lease; the write lock is held."""
        self._clear()
        self._num_ended_jobs += 1
        if self._master_record is not None:
            self._master_record.clear()

    def _clear(self) -> None:
        # A request that is creating a part for the old job puts it into the old storage.
        self._job = None
        self._storage = Storage(self._task, self._write_lock)
        self._journal.job_ended()

    def _record(self, body: Mutation, buffers: Sequence[Buffer] = ()) -> None:
        """Records a mutation by the coordinator; the write lock is held."""
        held = self._job
        if held is not None:
            entry = Entry("coordinator", held.coordinator, held.epoch, body, len(buffers))
            self._journal.record(entry, buffers)

    def _recorder(
        self, storage: Storage, body: Mutation, buffers: Sequence[Buffer] = ()
    ) -> OnCreated:
        """Returns a callback that records a creation, unless its job has ended by then."""

        def on_created(is_exact: bool) -> None:
            if storage is self._storage:
                self._record(body, buffers)
                if not is_exact:
                    self._journal.mark_unrepeatable()

        return on_created

    def _require_current(self, storage: Storage) -> None:
        if storage is not self._storage:
            raise jobs.job_ended(self._task)
