"""Reads and updates variables on parameter servers, from a worker or the coordinator.

Changes are collected and sent with the next request, so that a training step costs one request per
server. A server applies the changes of a request before it reads, and handles requests in order, so
that reads include all earlier changes of the same process.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from replicax.bundle.manifest import Part
from replicax.contexts.overlay import Change
from replicax.foundation import errors, runtime
from replicax.protocol import error_replies, messages
from replicax.protocol.codec import Buffer
from replicax.ps.client import outgoing
from replicax.ps.client.cluster import strategy_closed
from replicax.ps.client.outgoing import Outgoing
from replicax.ps.client.rows import RowPlan
from replicax.transport.channel import Channel
from replicax.variables.remote import Read, RemoteVariable, RemoteVariableBase, TableRows
from replicax.variables.sharded import ShardedVariable

# Changes of closures that read nothing are sent when there are this many, or this long.
_MOST_CLOSURES = 16
_MOST_BYTES = 1 << 20
# Larger values are not cached.
_MOST_CACHED_BYTES = 64 << 20
# The timeout of a reply: a fixed time, and more per byte.
_DEADLINE = 60.0
_SECONDS_PER_BYTE = 1 / (10 << 20)


class Writes(Protocol):
    """Numbers for changes that a process makes outside of closures."""

    def begin_write(self) -> int: ...

    def end_write(self, number: int) -> None: ...

    def request(
        self, server: int, body: messages.Body, buffers: Sequence[Buffer] = (), num_bytes: int = 0
    ) -> messages.Body: ...

    def recover(self, error: errors.PSUnavailableError) -> bool:
        """Waits until a lost server has restarted; False if its state is lost."""
        ...


class _Request:
    """A request to one server, and the closures whose changes it contains."""

    def __init__(self, closures: list[int]) -> None:
        self.number = 0
        self.closures = closures
        self.reply: tuple[messages.Exchanged, list[memoryview]] | None = None


class _Reads:
    """Reads from several servers at once."""

    def __init__(self, planned: list[tuple[Read, RowPlan | None]], closure: int | None) -> None:
        self.planned = planned
        self.closure = closure
        whole = [p for read, plan in planned if plan is None for p in _parts_of(read.variable)]
        self.num_bytes = sum(part.num_bytes for part in whole)
        self.requests: dict[int, _Request] = {}
        self.results: dict[int, _Results] = {}

    def is_for(self, reads: Sequence[Read]) -> bool:
        """Returns whether these are the same reads."""
        return len(reads) == len(self.planned) and all(
            old.variable is new.variable and old.ids is new.ids
            for (old, _), new in zip(self.planned, reads, strict=True)
        )


class _Results:
    """The results of one server, in the order of the reads."""

    def __init__(self, results: list[messages.ReadResult], buffers: list[memoryview]) -> None:
        self._results = iter(results)
        self._buffers = iter(buffers)

    def next(self) -> tuple[messages.ReadResult, Buffer]:
        """Returns the next result, and its buffer if it has one."""
        result = next(self._results)
        return result, (b"" if result.is_known else next(self._buffers))


def _parts_of(variable: RemoteVariableBase) -> list[RemoteVariable]:
    """Returns the parts of a remote or sharded variable."""
    if isinstance(variable, RemoteVariable):
        return [variable]
    return list(variable.components)  # type: ignore[arg-type]


class ParameterClient:
    """Reads and changes variables on parameter servers.

    Args:
      channels: One per server, in order.
      writes: Numbers for changes outside of closures, each of which is sent and acknowledged at
        once. None on a worker.
      deadline: The timeout of a reply in seconds.
      pulls_ahead: Whether to request the values of the next closure, assumed to be those of the
        last one, before this closure has changed them. They arrive while it computes, and do not
        include its changes.
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
        self._ahead: _Reads | None = None
        # Serializes requests; user code may have threads.
        self._lock = runtime.RLock()
        self._is_closed = False
        self._closure: int | None = None
        self._call = 0
        # Of the running closure: the clock of each server at its first read, and whether an
        # optimizer made a step.
        self._clocks: dict[int, int] = {}
        self._has_stepped = False
        self._outgoing = [Outgoing() for _ in channels]
        # By server: the requests without a reply, in order.
        self._in_flight: list[collections.deque[_Request]] = [collections.deque() for _ in channels]
        # By closure: how many requests with its changes have no reply yet.
        self._unacknowledged: collections.Counter[int] = collections.Counter()
        self._ended: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        # The last values with their versions, by part.
        self._cached: dict[int, tuple[int, np.ndarray]] = {}
        self._last_plan: dict[int, RowPlan] = {}
        # The server whose reply is awaited, and since when.
        self._waiting_for: tuple[int, float] | None = None

    # Reading.

    def pull(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """Returns values that include all changes pushed before."""
        self._require_open()
        with self._lock:
            while True:
                try:
                    return self._pull(reads)
                except errors.PSUnavailableError as error:
                    if not self._recovers(error):
                        raise

    def _recovers(self, error: errors.PSUnavailableError) -> bool:
        """Waits for a server that can restart; workers leave that to the coordinator."""
        return self._writes is not None and self._writes.recover(error)

    def _pull(self, reads: Sequence[Read]) -> list[np.ndarray]:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            found = ahead
            # A closure must see its own changes.
            is_usable = ahead is not None and ahead.closure != self._closure and not self._call
            if not is_usable or ahead is None or not ahead.is_for(reads):
                found = self._request_reads(reads)
            assert found is not None
            self._wait_for(found)
            if self._pulls_ahead:
                self._ahead = self._request_reads(reads)
            return [self._value(read, plan, found.results) for read, plan in found.planned]

    def _request_reads(self, reads: Sequence[Read]) -> _Reads:
        bodies: list[list[messages.Read]] = [[] for _ in self._channels]
        buffers: list[list[np.ndarray]] = [[] for _ in self._channels]
        planned = [(read, self._add_read(read, bodies, buffers)) for read in reads]
        found = _Reads(planned, self._closure)
        for server, wanted in enumerate(bodies):
            if wanted:
                found.requests[server] = self._send(server, wanted, buffers[server])
        return found

    def _wait_for(self, reads: _Reads) -> None:
        for server, request in reads.requests.items():
            while request.reply is None:
                self._receive(server, self._deadline + reads.num_bytes * _SECONDS_PER_BYTE)
            body, buffers = request.reply
            if self._closure is not None:
                self._clocks.setdefault(server, body.clock)
            reads.results[server] = _Results(body.reads, buffers)

    def _add_read(
        self, read: Read, bodies: list[list[messages.Read]], buffers: list[list[np.ndarray]]
    ) -> RowPlan | None:
        """Adds a read to the requests by server."""
        parts = _parts_of(read.variable)
        if read.ids is None:
            for part in parts:
                cached = self._cached.get(part.number)
                version = -1 if cached is None else cached[0]
                bodies[part.server].append(messages.Read(part.number, version))
            return None
        plan = self._plan(read.variable, np.asarray(read.ids))
        if plan.is_out_of_range:
            raise errors.InvalidArgumentError(
                f"A lookup in {read.variable.name!r} needs indices in "
                f"[0, {read.variable.shape[0]})",
                f"they range from {plan.ids.min()} to {plan.ids.max()}",
                "Correct the row numbers.",
            )
        for part, ids in zip(parts, plan.pieces, strict=True):
            if ids.size:
                bodies[part.server].append(messages.Read(part.number, is_rows=True))
                buffers[part.server].append(ids.astype(np.int64, copy=False))
        return plan

    def _value(self, read: Read, plan: RowPlan | None, results: dict[int, _Results]) -> np.ndarray:
        variable = read.variable
        parts = _parts_of(variable)
        dtype = np.dtype(variable.dtype)
        if plan is None or read.ids is None:
            values = [self._whole(part, dtype, results[part.server]) for part in parts]
            return values[0] if len(values) == 1 else np.concatenate(values)
        pieces = []
        for part, ids in zip(parts, plan.pieces, strict=True):
            shape = (ids.size, *variable.shape[1:])
            buffer = results[part.server].next()[1] if ids.size else b""
            pieces.append(np.frombuffer(buffer, dtype).reshape(shape))
        return plan.spread(pieces).reshape((*np.shape(read.ids), *variable.shape[1:]))

    def _whole(self, part: RemoteVariable, dtype: np.dtype, results: _Results) -> np.ndarray:
        result, buffer = results.next()
        if result.is_known:
            return self._cached[part.number][1]
        value = np.frombuffer(buffer, dtype).reshape(part.shape)
        if part.num_bytes <= _MOST_CACHED_BYTES:
            if part.number not in self._cached:
                # Cached for as long as the handle exists.
                weakref.finalize(part, self._cached.pop, part.number, None).atexit = False
            self._cached[part.number] = (result.version, value)
        return value

    def _plan(self, variable: RemoteVariableBase, ids: np.ndarray) -> RowPlan:
        """Sorts row numbers; a step reads and changes its rows with the same plan."""
        flat = ids.reshape(-1)
        key = _parts_of(variable)[0].number
        plan = self._last_plan.get(key)
        if plan is None or not plan.is_for(flat):
            starts = variable.starts if isinstance(variable, ShardedVariable) else (0,)
            plan = self._last_plan[key] = RowPlan(flat, starts, variable.shape[0])
        return plan

    # Checkpoints.

    def save_rows(self, directory: Path, rows: Sequence[TableRows]) -> list[Part]:
        """Writes rows into the directory of a bundle, by all servers in parallel."""
        requests = {
            server: messages.SaveParts(str(directory), own)
            for server, own in _by_server(rows).items()
        }
        found = self._request_all(requests, rows)
        assert all(isinstance(body, messages.PartsSaved) for body in found), found
        return [
            msgspec.json.decode(body.manifest, type=Part)
            for body in found
            if isinstance(body, messages.PartsSaved)
        ]

    def load_rows(self, path: Path, rows: Sequence[TableRows], *, is_check: bool) -> None:
        """Reads rows from a checkpoint, by all servers in parallel, or only checks them."""
        requests = {
            server: messages.LoadParts(str(path), own, is_check)
            for server, own in _by_server(rows).items()
        }
        self._request_all(requests, rows)

    def _request_all(
        self, requests: Mapping[int, messages.Body], rows: Sequence[TableRows]
    ) -> list[messages.Body]:
        self._require_open()
        writes = self._writes
        if writes is None:
            raise errors.UnsupportedError(
                "The coordinator saves and restores the tables of parameter servers",
                "this process is a worker",
                "Save and restore in the program that schedules closures.",
            )
        num_bytes = sum(row.variable.num_bytes for row in rows)
        with self._lock, ThreadPoolExecutor(len(requests), "replicax-tables") as pool:
            jobs = [
                pool.submit(writes.request, server, body, (), num_bytes)
                for server, body in requests.items()
            ]
        return [job.result() for job in jobs]

    # Changing.

    def push(self, changes: Sequence[Change]) -> None:
        """Collects changes of the running closure; without one, applies them at once."""
        self._require_open()
        with self._lock:
            if self._closure is not None:
                self._collect(self._closure, changes)
                return
            if self._writes is None:
                raise errors.ContextError(
                    "A worker changes variables inside of closures",
                    "no closure is running",
                    "Change variables in the function that was scheduled.",
                )
            write = self._writes.begin_write()
            try:
                # Retries keep their number: servers that applied the change ignore repetitions.
                while (error := self._write(write, changes)) is not None:
                    is_lost = isinstance(error, errors.PSUnavailableError)
                    if not is_lost or not self._recovers(error):
                        raise error
            finally:
                self._writes.end_write(write)

    def _write(self, write: int, changes: Sequence[Change]) -> Exception | None:
        """Applies changes, and waits until they are acknowledged; returns their error."""
        self.begin(write)
        try:
            self._collect(write, changes)
        finally:
            self.end(write)
        return dict(self.drain())[write]

    def _collect(self, closure: int, changes: Sequence[Change]) -> None:
        # All changes are validated before any is sent.
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
                self._unacknowledged[closure] += 1

    def begin(self, closure: int) -> None:
        """Attributes all following changes to a closure."""
        with self._lock:
            self._closure, self._call, self._has_stepped = closure, 0, False
            self._clocks.clear()
            self._failed.pop(closure, None)

    def end(self, closure: int) -> bool:
        """Ends a closure; its changes may not be sent or acknowledged yet.

        Returns:
          Whether an optimizer made a step in it.
        """
        with self._lock:
            self._closure = None
            self._ended[closure] = None
            is_large = any(o.num_bytes > _MOST_BYTES for o in self._outgoing)
            if is_large or any(len(o.closures) >= _MOST_CLOSURES for o in self._outgoing):
                with contextlib.suppress(errors.DistributeError):
                    # Errors are recorded by closure; `poll` and `drain` return them.
                    for server in range(len(self._channels)):
                        self._send_changes(server)
            return self._has_stepped

    # Acknowledgements.

    def poll(self) -> list[tuple[int, Exception | None]]:
        """Returns the closures whose changes were all acknowledged or rejected by now."""
        with self._lock:
            for server, in_flight in enumerate(self._in_flight):
                with contextlib.suppress(errors.DistributeError):
                    while in_flight and self._receive(server, 0.0) is not None:
                        pass
            return self._settled()

    def drain(self) -> list[tuple[int, Exception | None]]:
        """Waits until the changes of all ended closures are acknowledged or rejected."""
        with self._lock:
            # The next closure may start much later: its values would be stale.
            self._ahead = None
            for server, in_flight in enumerate(self._in_flight):
                with contextlib.suppress(errors.DistributeError):
                    self._send_changes(server)
                while in_flight:
                    with contextlib.suppress(errors.DistributeError):
                        self._receive(server, self._deadline)
            return self._settled()

    def pending(self) -> int:
        """Returns how many ended closures are not settled."""
        return len(self._ended)

    def waiting_for(self) -> tuple[int, float] | None:
        """Returns the server whose reply is awaited, and since when. Thread-safe."""
        return self._waiting_for

    def _settled(self) -> list[tuple[int, Exception | None]]:
        done = [c for c in self._ended if not self._unacknowledged[c]]
        for closure in done:
            del self._ended[closure], self._unacknowledged[closure]
        return [(closure, self._failed.pop(closure, None)) for closure in done]

    # Requests and replies.

    def _send_changes(self, server: int) -> None:
        if self._outgoing[server].closures:
            self._send(server, [], [])

    def _send(
        self, server: int, reads: list[messages.Read], buffers: Sequence[np.ndarray]
    ) -> _Request:
        pushes, payloads, closures = self._outgoing[server].take()
        request = _Request(closures)
        self._in_flight[server].append(request)
        with self._failing(server):
            request.number = self._channels[server].send(
                messages.Exchange(pushes, reads), [*payloads, *buffers]
            )
        return request

    def _receive(self, server: int, timeout: float) -> _Request | None:
        """Receives the next reply of a server; None if there is none yet."""
        request = self._in_flight[server][0]
        with self._failing(server):
            if timeout:
                self._waiting_for = (server, runtime.now())
            try:
                reply = self._channels[server].receive(timeout)
            finally:
                self._waiting_for = None
            if reply is None and timeout:
                # A late reply must not be taken for that of a later request.
                self._channels[server].cancel()
                raise errors.DeadlineExceededError(
                    f"{self._channels[server].peer} did not reply within {timeout:g} s. Check that "
                    "it runs and is not overloaded."
                )
        if reply is None:
            return None
        number, body, buffers = reply
        assert number == request.number, "replies arrive in order"
        self._in_flight[server].popleft()
        self._acknowledge(request)
        if isinstance(body, messages.Exchanged):
            for failure in body.failures:
                self._failed.setdefault(failure.closure, error_replies.to_error(failure.error))
            request.reply = body, buffers
            return request
        error = _error_of(body)
        # A restored server rejects requests until it is attached again.
        error.task_index = server  # type: ignore[attr-defined]
        for closure in request.closures:
            self._failed.setdefault(closure, error)
        raise error

    def _acknowledge(self, request: _Request) -> None:
        for closure in request.closures:
            self._unacknowledged[closure] -= 1

    @contextlib.contextmanager
    def _failing(self, server: int) -> Iterator[None]:
        """Fails all closures with changes in flight to a server that is lost."""
        try:
            yield
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            error.task_index = server  # type: ignore[attr-defined]
            for request in self._in_flight[server]:
                self._acknowledge(request)
                for closure in request.closures:
                    self._failed[closure] = error
            self._in_flight[server].clear()
            self._cached.clear()
            self._ahead = None
            raise

    def _require_open(self) -> None:
        # A channel would reconnect.
        if self._is_closed:
            raise strategy_closed()

    def close(self) -> None:
        """Closes the connections."""
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
        "The reply to an exchange must be Exchanged",
        f"it is {type(body).__name__}",
        "Check that all tasks run the same version.",
    )
