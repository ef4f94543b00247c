"""What a parameter server answers: one method, from a request to its answer, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.parameter_server import exchange, jobs, memory
from replicax.parameter_server.figures import Figures
from replicax.parameter_server.storage import Storage
from replicax.transport import messages

Answer = tuple[messages.Body, Sequence[Any]]


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
    """

    # Bodies that a transport may hand to a thread of their own.
    SLOW: tuple[type[messages.Body], ...] = (messages.CreatePart, messages.RegisterOptimizer)

    def __init__(self, task: int) -> None:
        self._task = f"/job:ps/task:{task}"
        # See storage.py for the order of locks. It also protects the two that follow.
        self._changing = threading.Lock()
        self._job: jobs.Job | None = None
        self._storage = Storage(self._task, self._changing)
        self._figures = Figures()
        self._answers: dict[type[messages.Body], Callable[..., Answer]] = {
            messages.Detach: self._detach,
            messages.Ping: self._ping,
            messages.CreatePart: self._create,
            messages.DropParts: self._drop,
            messages.RegisterOptimizer: self._register,
            messages.Fence: self._fence,
        }

    @property
    def job(self) -> str | None:
        """The job that holds the server."""
        held = self._job
        return None if held is None else held.name

    def handle(
        self,
        role: messages.Role,
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
                raise self._not_for(role, body)
            if isinstance(body, messages.Attach):
                return self._attach(incarnation, body, job, epoch, now)
            answer = self._answers.get(type(body))
            if answer is None:
                raise self._unknown(body)
            if isinstance(body, messages.Detach) and self.job != job:
                return messages.Done(), ()
            self._member(job, epoch, incarnation).renew(now)
            return answer(body, buffers)
        finally:
            self._figures.requests += 1

    def expire(self, now: float) -> bool:
        """Drops a job whose lease has run out, and tells whether there was one."""
        held = self._job
        if held is None or not held.is_expired(now):
            return False
        with self._changing:
            if self._job is not held or not held.is_expired(now):
                return False
            self._clear()
        return True

    def figures(self) -> dict[str, int | float]:
        """Returns counters and sizes by name."""
        rss = memory.resident_bytes()
        return {**self._figures.as_dict(), **self._storage.sizes(), "rss": rss}

    def _attach(
        self, incarnation: int, body: messages.Attach, job: str, epoch: int, now: float
    ) -> Answer:
        lease_s = jobs.lease_of(body)
        with self._changing:
            held = self._job
            jobs.require_free(held, job, now, self._task)
            if held is None or held.name != job:
                self._clear()
                held = self._job = jobs.Job(job)
            else:
                jobs.require_newer(held, epoch, incarnation, self._task)
                if epoch > held.epoch:
                    self._storage.forget_closures()
            held.take(epoch, incarnation, lease_s, now)
        return messages.Attached(), ()

    def _detach(self, _: messages.Detach, __: Sequence[Any]) -> Answer:
        with self._changing:
            self._clear()
        return messages.Done(), ()

    def _ping(self, body: messages.Ping, _: Sequence[Any]) -> Answer:
        with self._changing:
            self._storage.once.settle(body.settled)
        return messages.Pong(self._figures.requests, self.figures()), ()

    def _create(self, body: messages.CreatePart, buffers: Sequence[Any]) -> Answer:
        storage = self._storage
        storage.create(body, buffers)
        self._require_current(storage)
        return messages.Done(), ()

    def _drop(self, body: messages.DropParts, _: Sequence[Any]) -> Answer:
        self._storage.drop(body.parts)
        return messages.Done(), ()

    def _register(self, body: messages.RegisterOptimizer, buffers: Sequence[Any]) -> Answer:
        storage = self._storage
        storage.register(body, buffers)
        self._require_current(storage)
        return messages.Done(), ()

    def _fence(self, body: messages.Fence, _: Sequence[Any]) -> Answer:
        with self._changing:
            if self._job is not None:
                self._job.fence(body.incarnations)
        return messages.Done(), ()

    def _exchange(
        self,
        role: messages.Role,
        incarnation: int,
        body: messages.Exchange,
        buffers: Sequence[Any],
        job: str,
        epoch: int,
        now: float,
    ) -> Answer:
        exchange.require_buffers(body, buffers, self._task)
        failures: list[messages.PushFailure] = []
        if body.pushes:
            with self._changing:
                # Asked under the lock: once a fence is answered, no change follows it.
                held = self._member(job, epoch, incarnation)
                storage = self._storage
                failures = exchange.push_all(storage, body.pushes, buffers, self._figures)
        else:
            held = self._member(job, epoch, incarnation)
            storage = self._storage
        if role == "coordinator":
            held.renew(now)
        first = len(buffers) - sum(read.is_rows for read in body.reads)
        results, values = exchange.read_all(storage, body.reads, buffers[first:], self._figures)
        return messages.Exchanged(results, failures), values

    def _member(self, job: str, epoch: int, incarnation: int) -> jobs.Job:
        return jobs.require_member(self._job, job, epoch, incarnation, self._task)

    def _clear(self) -> None:
        # A request that still makes a part for the old job puts it where nobody looks.
        self._job = None
        self._storage = Storage(self._task, self._changing)

    def _require_current(self, storage: Storage) -> None:
        if storage is not self._storage:
            raise errors.FencedError(
                errors.message(
                    f"{self._task} must keep its job while it makes something for it",
                    "the job ended meanwhile",
                    "Attach the server again, and create its variables again.",
                )
            )

    def _not_for(self, role: str, body: messages.Body) -> errors.PermissionDeniedError:
        return errors.PermissionDeniedError(
            errors.message(
                f"{type(body).__name__} is for coordinators to ask of {self._task}",
                f"a {role} asked",
                "Send it from the coordinator.",
            )
        )

    def _unknown(self, body: messages.Body) -> errors.ProtocolError:
        return errors.ProtocolError(
            errors.message(
                f"{self._task} must know what it is asked",
                f"{type(body).__name__} is nothing for parameter servers",
                "Ask another task.",
            )
        )
