"""The home of remote variables as a worker or the coordinator sees it: questions to servers.

Changes are collected, and travel with the next question, so that a step of training costs one
question per server. A server makes the changes of a question before it reads, and answers
questions in order, so that whoever reads sees what it has changed before.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from replicax.bundle.manifest import Part
from replicax.contexts.overlay import Change
from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from replicax.ps.client import outgoing
from replicax.ps.client.cluster import left
from replicax.ps.client.outgoing import Outgoing
from replicax.ps.client.requests import Answers, Post, Question, parts_of
from replicax.ps.client.rows import RowPlan
from replicax.transport.channel import Channel
from replicax.variables.remote import Read, RemoteVariable, TableRows
from replicax.variables.sharded import ShardedVariable

# Changes of closures that read nothing are sent off when there are so many, or so long.
_MOST_CLOSURES = 16
_MOST_BYTES = 1 << 20
# Larger values are not kept for the case that they stay the same.
_MOST_KNOWN_BYTES = 64 << 20
# How long an answer may take: so long, and this much more per byte.
_DEADLINE = 60.0
_SECONDS_PER_BYTE = 1 / (10 << 20)


class Writes(Protocol):
    """Numbers for changes that a process makes outside of closures."""

    def begin_write(self) -> int: ...

    def end_write(self, number: int) -> None: ...

    def ask(
        self, server: int, body: messages.Body, buffers: Sequence[Any] = (), num_bytes: int = 0
    ) -> messages.Body: ...

    def recover(self, error: errors.PSUnavailableError) -> bool:
        """Waits until a server that was lost is back; False if that cannot be."""
        ...


class ParameterClient:
    """Reads and changes variables on parameter servers.

    Args:
      channels: One per server, in order.
      writes: Gives numbers for changes that no closure makes: each of them is sent at once,
        and waited for. None on a worker.
      deadline: How long a server may take for an answer, in seconds.
      pulls_ahead: Whether to ask for the values of the next closure, which are taken to be
        those of the last one, before this closure has changed them. They come while it
        computes, and lack its changes.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        writes: Writes | None = None,
        deadline: float = _DEADLINE,
        pulls_ahead: bool = False,
    ) -> None:
        self._channels = list(channels)
        self._writes = writes
        self._deadline = deadline
        self._pulls_ahead = pulls_ahead
        self._ahead: Question | None = None
        # One question at a time; user code may have threads.
        self._lock = threading.RLock()
        self._is_closed = False
        self._closure: int | None = None
        self._call = 0
        # Of the closure that runs: the clock of each server when it was first read, and
        # whether an optimizer made a step.
        self._clocks: dict[int, int] = {}
        self._has_stepped = False
        self._outgoing = [Outgoing() for _ in channels]
        # Per server: what is under way, in order.
        self._under_way: list[collections.deque[Post]] = [collections.deque() for _ in channels]
        # Per closure: how many questions with its changes have no answer yet.
        self._waits: collections.Counter[int] = collections.Counter()
        self._ended: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        # Values as they were last read, with their versions, by part.
        self._known: dict[int, tuple[int, Any]] = {}
        self._last_plan: dict[int, RowPlan] = {}
        # The server whose answer is waited for, and since when.
        self._waiting_for: tuple[int, float] | None = None

    # Reading.

    def pull(self, reads: Sequence[Read]) -> list[Any]:
        """Returns values; they show all that was pushed before."""
        self._require_open()
        with self._lock:
            while True:
                try:
                    return self._pull(reads)
                except errors.PSUnavailableError as error:
                    if not self._recovers(error):
                        raise

    def _recovers(self, error: errors.PSUnavailableError) -> bool:
        """Waits for a server that can come back; workers leave that to the coordinator."""
        return self._writes is not None and self._writes.recover(error)

    def _pull(self, reads: Sequence[Read]) -> list[Any]:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            question = ahead
            # What this closure has changed itself, it must see.
            is_old = ahead is not None and ahead.closure != self._closure and not self._call
            if not is_old or ahead is None or not ahead.is_for(reads):
                question = self._post_question(reads)
            assert question is not None
            self._wait_for(question)
            if self._pulls_ahead:
                self._ahead = self._post_question(reads)
            return [self._value(read, plan, question) for read, plan in question.asked]

    def _post_question(self, reads: Sequence[Read]) -> Question:
        questions: list[list[messages.Read]] = [[] for _ in self._channels]
        buffers: list[list[Any]] = [[] for _ in self._channels]
        asked = [(read, self._ask(read, questions, buffers)) for read in reads]
        question = Question(asked, self._closure)
        for server, wanted in enumerate(questions):
            if wanted:
                question.posts[server] = self._post(server, wanted, buffers[server])
        return question

    def _wait_for(self, question: Question) -> None:
        for server, post in question.posts.items():
            while post.answer is None:
                self._take(server, self._deadline + question.num_bytes * _SECONDS_PER_BYTE)
            body, found = post.answer
            if self._closure is not None:
                self._clocks.setdefault(server, body.clock)
            question.answers[server] = Answers(body.reads, found)

    def _ask(
        self, read: Read, questions: list[list[messages.Read]], buffers: list[list[Any]]
    ) -> RowPlan | None:
        parts = parts_of(read.variable)
        if read.ids is None:
            for part in parts:
                known = self._known.get(part.number)
                version = -1 if known is None else known[0]
                questions[part.server].append(messages.Read(part.number, version))
            return None
        plan = self._plan(read.variable, np.asarray(read.ids))
        if plan.has_strangers:
            raise outgoing.strangers(read.variable, plan.ids)
        for part, ids in zip(parts, plan.pieces, strict=True):
            if ids.size:
                questions[part.server].append(messages.Read(part.number, is_rows=True))
                buffers[part.server].append(ids.astype(np.int64, copy=False))
        return plan

    def _value(self, read: Read, plan: RowPlan | None, question: Question) -> Any:
        variable, answers = read.variable, question.answers
        parts = parts_of(variable)
        dtype = np.dtype(variable.dtype)
        if plan is None:
            values = [self._whole(part, dtype, answers[part.server]) for part in parts]
            return values[0] if len(values) == 1 else np.concatenate(values)
        pieces = []
        for part, ids in zip(parts, plan.pieces, strict=True):
            shape = (ids.size, *variable.shape[1:])
            buffer = answers[part.server].next()[1] if ids.size else b""
            pieces.append(np.frombuffer(buffer, dtype).reshape(shape))
        return plan.spread(pieces).reshape((*np.shape(read.ids), *variable.shape[1:]))

    def _whole(self, part: RemoteVariable, dtype: np.dtype, answers: Answers) -> Any:
        result, buffer = answers.next()
        if result.is_known:
            return self._known[part.number][1]
        value = np.frombuffer(buffer, dtype).reshape(part.shape)
        if part.num_bytes <= _MOST_KNOWN_BYTES:
            if part.number not in self._known:
                # Kept for as long as somebody can ask for it.
                weakref.finalize(part, self._known.pop, part.number, None).atexit = False
            self._known[part.number] = (result.version, value)
        return value

    def _plan(self, variable: Any, ids: np.ndarray) -> RowPlan:
        """Puts row numbers in order; the rows of a step are read and changed by one plan."""
        flat = ids.reshape(-1)
        key = parts_of(variable)[0].number
        plan = self._last_plan.get(key)
        if plan is None or not plan.is_for(flat):
            starts = variable.starts if isinstance(variable, ShardedVariable) else (0,)
            plan = self._last_plan[key] = RowPlan(flat, starts, variable.shape[0])
        return plan

    # Checkpoints.

    def save_rows(self, directory: Path, rows: Sequence[TableRows]) -> list[Part]:
        """Lets all servers write rows into the directory of a bundle, in parallel."""
        requests = {
            server: messages.SaveParts(str(directory), own)
            for server, own in _by_server(rows).items()
        }
        found = self._ask_all(requests, rows)
        assert all(isinstance(body, messages.PartsSaved) for body in found), found
        return [
            msgspec.json.decode(body.manifest, type=Part)
            for body in found
            if isinstance(body, messages.PartsSaved)
        ]

    def load_rows(self, path: Path, rows: Sequence[TableRows], *, is_check: bool) -> None:
        """Lets all servers read rows from a checkpoint, in parallel, or check them only."""
        requests = {
            server: messages.LoadParts(str(path), own, is_check)
            for server, own in _by_server(rows).items()
        }
        self._ask_all(requests, rows)

    def _ask_all(
        self, requests: Mapping[int, messages.Body], rows: Sequence[TableRows]
    ) -> list[messages.Body]:
        self._require_open()
        writes = self._writes
        if writes is None:
            raise errors.UnsupportedError(
                "Only the coordinator lets servers access checkpoints. Save and restore there."
            )
        num_bytes = sum(row.variable.num_bytes for row in rows)
        with self._lock, ThreadPoolExecutor(len(requests), "replicax-tables") as pool:
            jobs = [
                pool.submit(writes.ask, server, body, (), num_bytes)
                for server, body in requests.items()
            ]
        return [job.result() for job in jobs]

    # Changing.

    def push(self, changes: Sequence[Change]) -> None:
        """Collects changes of the closure that runs; without one, makes them at once."""
        self._require_open()
        with self._lock:
            if self._closure is not None:
                self._collect(self._closure, changes)
                return
            if self._writes is None:
                raise outgoing.no_closure()
            write = self._writes.begin_write()
            try:
                # Under one number: what other servers have made already counts once.
                while (error := self._write(write, changes)) is not None:
                    is_lost = isinstance(error, errors.PSUnavailableError)
                    if not is_lost or not self._recovers(error):
                        raise error
            finally:
                self._writes.end_write(write)

    def _write(self, write: int, changes: Sequence[Change]) -> Exception | None:
        """Makes changes, and waits until they are made; returns the error that they met."""
        self.begin(write)
        try:
            self._collect(write, changes)
        finally:
            self.end(write)
        return dict(self.drain())[write]

    def _collect(self, closure: int, changes: Sequence[Change]) -> None:
        # Nothing of a change that is refused here may go out.
        pieces = [
            piece
            for call, change in enumerate(changes, self._call)
            for piece in outgoing.pieces_of(change, call, self._plan)
        ]
        self._call += len(changes)
        for piece in pieces:
            self._has_stepped |= isinstance(piece.change, messages.Apply)
            clock = self._clocks.get(piece.server, -1)
            if self._outgoing[piece.server].add(closure, piece, clock):
                self._waits[closure] += 1

    def begin(self, closure: int) -> None:
        """Attributes all changes from here on to a closure."""
        with self._lock:
            self._closure, self._call, self._has_stepped = closure, 0, False
            self._clocks.clear()
            self._failed.pop(closure, None)

    def end(self, closure: int) -> bool:
        """Notes that a closure makes no more changes; they may still be on their way.

        Returns:
          Whether an optimizer made a step in it.
        """
        with self._lock:
            self._closure = None
            self._ended[closure] = None
            is_much = any(o.num_bytes > _MOST_BYTES for o in self._outgoing)
            if is_much or any(len(o.closures) >= _MOST_CLOSURES for o in self._outgoing):
                with contextlib.suppress(errors.DistributeError):
                    # Noted for each closure that it concerns; `poll` and `drain` tell.
                    for server in range(len(self._channels)):
                        self._post_changes(server)
            return self._has_stepped

    # Settling.

    def poll(self) -> list[tuple[int, Exception | None]]:
        """Returns the closures whose changes were all acknowledged, or refused, by now."""
        with self._lock:
            for server, under_way in enumerate(self._under_way):
                with contextlib.suppress(errors.DistributeError):
                    while under_way and self._take(server, 0.0) is not None:
                        pass
            return self._settled()

    def drain(self) -> list[tuple[int, Exception | None]]:
        """Waits until the changes of all ended closures are acknowledged or refused."""
        with self._lock:
            # Whoever waits next may wait for long: values would be old by then.
            self._ahead = None
            for server, under_way in enumerate(self._under_way):
                with contextlib.suppress(errors.DistributeError):
                    self._post_changes(server)
                while under_way:
                    with contextlib.suppress(errors.DistributeError):
                        self._take(server, self._deadline)
            return self._settled()

    def pending(self) -> int:
        """Returns how many ended closures are not settled."""
        return len(self._ended)

    def waiting_for(self) -> tuple[int, float] | None:
        """Returns the server that is waited for now, and since when; any thread may ask."""
        return self._waiting_for

    def _settled(self) -> list[tuple[int, Exception | None]]:
        done = [c for c in self._ended if not self._waits[c]]
        for closure in done:
            del self._ended[closure], self._waits[closure]
        return [(closure, self._failed.pop(closure, None)) for closure in done]

    # Talking.

    def _post_changes(self, server: int) -> None:
        if self._outgoing[server].closures:
            self._post(server, [], [])

    def _post(self, server: int, reads: list[messages.Read], buffers: list[Any]) -> Post:
        pushes, payloads, closures = self._outgoing[server].take()
        post = Post(closures)
        self._under_way[server].append(post)
        with self._losing(server):
            post.number = self._channels[server].send(
                messages.Exchange(pushes, reads), [*payloads, *buffers]
            )
        return post

    def _take(self, server: int, timeout: float) -> Post | None:
        """Takes the next answer of a server; None if there is none yet."""
        post = self._under_way[server][0]
        with self._losing(server):
            if timeout:
                self._waiting_for = (server, time.monotonic())
            try:
                answer = self._channels[server].receive(timeout)
            finally:
                self._waiting_for = None
            if answer is None and timeout:
                # Later answers would be taken for those of the questions that follow.
                self._channels[server].cancel()
                raise outgoing.no_answer(self._channels[server].peer, timeout)
        if answer is None:
            return None
        assert answer[0] == post.number, "answers come in order"
        self._under_way[server].popleft()
        self._waits.subtract(post.closures)
        body = answer[1]
        if isinstance(body, messages.Exchanged):
            for failure in body.failures:
                self._failed.setdefault(failure.closure, error_replies.to_error(failure.error))
            post.answer = body, answer[2]
            return post
        error = _error_of(body)
        # A server that was restored says so itself, until it is attached again.
        error.task_index = server  # type: ignore[attr-defined]
        for closure in post.closures:
            self._failed.setdefault(closure, error)
        raise error

    @contextlib.contextmanager
    def _losing(self, server: int) -> Iterator[None]:
        """Fails all closures with changes under way to a server that is lost."""
        try:
            yield
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            error.task_index = server  # type: ignore[attr-defined]
            for post in self._under_way[server]:
                self._waits.subtract(post.closures)
                for closure in post.closures:
                    self._failed[closure] = error
            self._under_way[server].clear()
            self._known.clear()
            self._ahead = None
            raise

    def _require_open(self) -> None:
        # A channel would connect again.
        if self._is_closed:
            raise left()

    def close(self) -> None:
        """Ends the connections."""
        self._is_closed = True
        for channel in self._channels:
            channel.close()


def _by_server(rows: Sequence[TableRows]) -> dict[int, list[messages.StoredRows]]:
    found: dict[int, list[messages.StoredRows]] = {}
    for row in rows:
        stored = messages.StoredRows(row.variable.number, row.name, row.shape, row.start)
        found.setdefault(row.variable.server, []).append(stored)
    return found


def _error_of(body: messages.Body) -> Exception:
    if isinstance(body, messages.ErrorReply):
        return error_replies.to_error(body)
    return errors.ProtocolError(
        "A parameter server must answer an exchange",
        f"it said {type(body).__name__}",
        "Check that all tasks run the same version.",
    )
