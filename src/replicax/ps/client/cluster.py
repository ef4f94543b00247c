"""The coordinator's view of a cluster: locations, job, creation of parts, and unique numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from replicax.contexts.frames import StrategyHooks
from replicax.foundation import errors, runtime
from replicax.protocol import limits, messages
from replicax.protocol.codec import Buffer
from replicax.protocol.tasks import Task, new_incarnation
from replicax.ps.client.initial_values import Initial
from replicax.transport.addresses import Location
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.variables.creators import VariableAttributes
from replicax.variables.remote import RemoteVariable, VariableClient
from replicax.variables.variable import Variable

# The size of the pieces in which a long first value is sent.
CHUNK_BYTES = 64 << 20
# The timeout of a request to create a part: a fixed time, and more per byte.
_CREATION_S = 60.0
_CREATION_S_PER_BYTE = 1 / (10 << 20)


# As many fenced incarnations fit into a header; more are sent separately.
_MOST_FENCED = 4_000


@dataclasses.dataclass(frozen=True)
class ResumedJob:
    """The state from which the next coordinator of a job continues.

    Attributes:
      epoch: Its epoch, above all earlier ones.
      first_closure: The number of its first closure, above all that have changed something.
      is_resumed: Whether the servers hold the variables of the job.
      parts: By server, the parts that it holds.
    """

    epoch: int
    first_closure: int
    is_resumed: bool
    parts: tuple[frozenset[int], ...]

    @classmethod
    def find(cls, job: str, found: Sequence[messages.Body]) -> ResumedJob | None:
        """Returns how to resume a job; None if no server holds it.

        Args:
          job: The name of the job.
          found: The reply of each server to `QueryJob`.

        Raises:
          PSIncarnationError: Some servers hold variables of the job, and others have lost theirs.
        """
        held = [f for f in found if isinstance(f, messages.JobInfo) and f.job == job]
        if not held:
            return None
        is_resumed = len(held) == len(found)
        if not is_resumed and any(f.parts for f in held):
            empty = next(i for i, f in enumerate(found) if f not in held)
            raise errors.PSIncarnationError(
                f"{Task('ps', empty)} has lost its variables of job {job!r}, which {len(held)} of "
                f"{len(found)} servers still hold. Start a job of another name, and restore the "
                "variables from a checkpoint."
            )
        return cls(
            epoch=max(f.epoch for f in held) + 1,
            first_closure=max(max(f.newest + 1, f.settled, 1) for f in held),
            is_resumed=is_resumed,
            parts=tuple(frozenset(f.parts) for f in held) if is_resumed else (),
        )


class Cluster:
    """Parameter servers and workers of one job.

    Attributes:
      job: The job.
      epoch: The epoch of this coordinator in the job.
      me: The task of the coordinator.
      incarnation: The incarnation of this process in the job.
      keys: The certificates of this task, for TCP.
      servers: The locations of the parameter servers.
      workers: The locations of the workers.
      settings: The settings that tasks receive when they are attached.
      fenced: Incarnations that were declared dead; the coordinator adds to it.
      is_resumed: Whether the servers held the job already, with the variables of an earlier
        coordinator. Known once the servers are attached.

    Note [Job resume]
        A job with a name outlives its coordinator for as long as the servers keep it. The next
        coordinator of that name resumes it in a higher epoch, and the servers fence the former one.
        Its program creates the same variables in the same order, so that they get the same numbers;
        a server that already has a part leaves it unchanged. Closures get numbers above all that
        were used.
    """

    def __init__(
        self,
        servers: Sequence[Location],
        workers: Sequence[Location],
        settings: dict[str, Any],
        keys: Keys | None = None,
        connect_timeout: float = 60.0,
        job: str | None = None,
        return_timeout: float = 300.0,
    ) -> None:
        self.job = job or secrets.token_hex(8)
        self.epoch = 1
        self.is_resumed = False
        self.me = Task("coordinator", 0)
        self.incarnation = new_incarnation()
        self.keys = keys
        self.servers = list(servers)
        self.workers = list(workers)
        self.settings = {
            **settings,
            "owner": f"process {os.getpid()} on {socket.gethostname()}",
            "is_kept": job is not None,
        }
        self._has_name = job is not None
        self._connect_timeout = connect_timeout
        self._return_timeout = return_timeout
        # By server: the parts that it must hold, and whether they outlive its process.
        self._held: list[set[int]] = [set() for _ in servers]
        self._saved = [False for _ in servers]
        self.fenced: set[int] = set()
        self._found: Sequence[frozenset[int]] = ()
        self._closures = itertools.count(1)
        # Returns the number of a new closure; bound directly, because it is called per closure.
        self.next_closure: Callable[[], int] = self._closures.__next__
        self._numbers = itertools.count(1)
        self._placements = itertools.count()
        # Numbers of changes by this process itself that are not acknowledged.
        self._writes: set[int] = set()
        self._writing = runtime.Lock()
        # Returns the handle of a variable by its shipping key; set by the strategy.
        self.variable: Callable[[tuple[Any, ...]], Variable]
        self._process = os.getpid()
        self._lock = runtime.Lock()
        self._is_attached = False
        self._is_closed = False
        # Servers and numbers of parts without a handle.
        self._released: list[tuple[int, int]] = []
        self.channels = [
            Channel(location, self.me, keys, self.incarnation, peer=Task("ps", i))
            for i, location in enumerate(servers)
        ]
        for channel in self.channels:
            channel.job, channel.epoch = self.job, self.epoch

    # Numbers. `next` of a counter is atomic.

    def begin_write(self) -> int:
        """Returns the number for a change by this process itself."""
        with self._writing:
            number = next(self._closures)
            self._writes.add(number)
        return number

    def end_write(self, number: int) -> None:
        """Records that a change by this process was acknowledged, or failed."""
        with self._writing:
            self._writes.discard(number)

    def oldest_write(self) -> int | None:
        """Returns the smallest number of an unacknowledged change by this process."""
        with self._writing:
            return min(self._writes, default=None)

    def next_number(self) -> int:
        """Returns the number of a new part or optimizer."""
        return next(self._numbers)

    def next_server(self) -> int:
        """Returns the server for the next part, in round-robin order."""
        return next(self._placements) % len(self.servers)

    # Servers.

    def follow(self, loss_of: Callable[[int], Exception | None] | None) -> None:
        """Fails requests to servers that are reported lost.

        Args:
          loss_of: Returns the error of a lost server, or None while it is not lost. Called by any
            thread, with locks held; must not block. None removes it.
        """
        for server, channel in enumerate(self.channels):
            channel.check_failure = None if loss_of is None else functools.partial(loss_of, server)

    def attach(self) -> None:
        """Attaches the parameter servers; waits until they can be reached."""
        with self._lock:
            if self._is_closed:
                raise strategy_closed()
            if self._is_attached:
                return
            deadline = runtime.now() + self._connect_timeout
            if self._has_name:
                self._resume_job(deadline)
            attach = messages.Attach(self._urls, self.settings, [] if self.is_resumed else None)
            try:
                for server, channel in enumerate(self.channels):
                    self._saved[server] = _attach(channel, attach, deadline).is_saved
            except errors.PermissionDeniedError:
                # Another job holds one of them: release the others.
                if not self.is_resumed:
                    for channel in self.channels:
                        _detach(channel)
                raise
            self._is_attached = True

    @property
    def _urls(self) -> list[str]:
        return [location.url for location in self.servers]

    def _resume_job(self, deadline: float) -> None:
        """Resumes the job if the servers hold it. See Note [Job resume]."""
        query = messages.QueryJob()
        found = [_request_starting(channel, query, deadline) for channel in self.channels]
        if self.settings.get("mirror"):
            self._recover_from_mirrors(found, deadline)
        resumed = ResumedJob.find(self.job, found)
        if resumed is None:
            return
        self.epoch, self.is_resumed = resumed.epoch, resumed.is_resumed
        self._found = resumed.parts
        for channel in self.channels:
            channel.epoch = self.epoch
        self._closures = itertools.count(resumed.first_closure)
        self.next_closure = self._closures.__next__

    def _recover_from_mirrors(self, found: list[messages.Body], deadline: float) -> None:
        """Lets servers that were restarted without a coordinator recover from their mirrors.

        A server fetches its copy when it is attached; until then it holds no job.

        Args:
          found: The reply of each server to `QueryJob`; those of recovered servers are replaced.
          deadline: When to raise if a server cannot be reached.
        """
        held = [f.epoch for f in found if isinstance(f, messages.JobInfo) and f.job == self.job]
        if not held:
            return
        for server, (channel, reply) in enumerate(zip(self.channels, found, strict=True)):
            if isinstance(reply, messages.JobInfo) and not reply.job:
                channel.epoch = max(held) + 1
                # Without a copy it is still empty, and the job cannot be resumed.
                with contextlib.suppress(errors.PSIncarnationError):
                    _attach(channel, messages.Attach(self._urls, self.settings, []), deadline)
                found[server] = _request_starting(channel, messages.QueryJob(), deadline)

    def is_saved(self, server: int) -> bool:
        """Returns whether the state of a server outlives its process."""
        return self._saved[server]

    def attach_again(self, server: int) -> messages.Attach:
        """Returns the request that attaches a server again, with the parts that it must hold."""
        with self._writing:
            parts = sorted(self._held[server])
        fenced = sorted(self.fenced.copy())[-_MOST_FENCED:]
        return messages.Attach(self._urls, self.settings, parts, fenced)

    def recover(self, error: errors.UnavailableError) -> bool:
        """Waits until the server of an error has restarted; False if its state is lost."""
        server = getattr(error, "task_index", -1)
        if not 0 <= server < len(self.channels) or not self._saved[server] or self._is_closed:
            return False
        channel = self.channels[server]
        channel.reset()
        _attach(channel, self.attach_again(server), runtime.now() + self._return_timeout)
        return True

    def request(
        self, server: int, body: messages.Body, buffers: Sequence[Buffer] = (), num_bytes: int = 0
    ) -> messages.Body:
        """Sends a request to a server, with a timeout that depends on its size."""
        self.attach()
        timeout = _CREATION_S + num_bytes * _CREATION_S_PER_BYTE
        while True:
            try:
                return self.channels[server].request(body, buffers, timeout=timeout)[0]
            except errors.PSUnavailableError as error:
                error.task_index = server  # type: ignore[attr-defined]
                if not self.recover(error):
                    raise

    # Parts.

    def create_part(
        self,
        client: VariableClient,
        owner: StrategyHooks,
        attributes: VariableAttributes,
        initial: Initial,
        server: int,
    ) -> RemoteVariable:
        """Creates a part on a server, and returns a handle; the part is dropped with the handle."""
        self._drop_released()
        number = self.next_number()
        dtype = jnp.dtype(attributes.dtype)
        size = math.prod(attributes.shape) * dtype.itemsize
        how = initial.how
        body = messages.CreatePart(number, attributes.name, attributes.shape, dtype.name, how)
        buffers, rest = initial.buffers, None
        if isinstance(how, messages.FromBuffer) and size > CHUNK_BYTES and attributes.shape:
            value = cast(np.ndarray, initial.buffers[0])
            rows = max(1, CHUNK_BYTES * attributes.shape[0] // size)
            buffers, rest = [value[:rows]], value[rows:]
        self.request(server, body, buffers, size)
        with self._writing:
            self._held[server].add(number)
        variable = RemoteVariable(
            attributes, number=number, server=server, client=client, owner=owner
        )
        released = self._released.append
        weakref.finalize(variable, released, (server, number)).atexit = False
        was_found = self.is_resumed and number in self._found[server]
        if rest is not None and not was_found:
            self._write_rest(server, number, cast(np.ndarray, buffers[0]).shape[0], rest)
        return variable

    def _write_rest(self, server: int, number: int, start: int, rest: np.ndarray) -> None:
        """Sends the rest of a long first value in pieces of `start` rows."""
        for first in range(0, rest.shape[0], start):
            chunk = rest[first : first + start]
            update = messages.Update(0, "write_rows", number, start + first)
            write = self.begin_write()
            try:
                push = messages.Push(write, [update])
                self.request(server, messages.Exchange([push], []), [chunk], chunk.nbytes)
            finally:
                self.end_write(write)

    def _drop_released(self) -> None:
        """Drops the parts whose handles were garbage collected."""
        found = [self._released.pop() for _ in range(len(self._released))]
        for server in {server for server, _ in found}:
            numbers = [number for index, number in found if index == server]
            with self._writing:
                self._held[server].difference_update(numbers)
            self.request(server, messages.DropParts(numbers))

    def close(self, *, keeps: bool = False) -> None:
        """Disconnects from the servers; they drop the job unless it `keeps` its variables."""
        if os.getpid() != self._process:
            # A forked child exits; the job continues.
            return
        with self._lock:
            was_attached, self._is_attached = self._is_attached, False
            self._is_closed = True
        with contextlib.ExitStack() as closing:
            for channel in self.channels:
                closing.callback(channel.close)
            for channel in self.channels:
                if was_attached and not keeps and channel.peer_incarnation is not None:
                    _detach(channel)


def strategy_closed() -> errors.ContextError:
    """Returns the error for using a cluster after its strategy was closed."""
    return errors.ContextError(
        "Variables on parameter servers exist until their strategy is closed",
        "it was closed",
        "Create a new strategy, and restore the variables from a checkpoint.",
    )


def _detach(channel: Channel) -> None:
    """Ends the job on a server.

    A server that is gone or has another master holds no state of the job; one that does not accept
    the key of this process any more drops it when the lease expires.
    """
    for _ in range(2):
        try:
            channel.request(messages.Detach(), timeout=limits.LINGER)
            return
        except errors.PSIncarnationError:
            # It restarted since the last request.
            channel.reset()
        except (errors.UnavailableError, errors.DeadlineExceededError):
            return
        except (errors.FencedError, errors.PermissionDeniedError):
            return


def _attach(channel: Channel, attach: messages.Attach, deadline: float) -> messages.Attached:
    """Attaches one server, which may still be starting."""
    reply = _request_starting(channel, attach, deadline)
    assert isinstance(reply, messages.Attached), reply
    return reply


def _request_starting(channel: Channel, body: messages.Body, deadline: float) -> messages.Body:
    """Sends a request to a server that may still be starting."""
    started_s = runtime.now()
    while True:
        remaining = deadline - runtime.now()
        try:
            return channel.request(body, timeout=max(remaining, 0.1))[0]
        except errors.PSIncarnationError:
            if not channel.peer_restarted:
                # The error is the server's own: it restarted without its state.
                raise
            channel.reset()
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            given_up = channel.check_failure
            if given_up is not None and (lost := given_up()) is not None:
                # The coordinator no longer waits for the server, nor does this request.
                raise lost from error
            if remaining <= 0:
                waited_s = runtime.now() - started_s
                raise errors.PSUnavailableError(
                    f"{channel.peer} could not be reached at {channel.location} for "
                    f"{waited_s:.0f} s: {error} Start it (`python -m replicax serve`), or correct "
                    "the cluster spec."
                ) from error
            runtime.sleep(min(0.05, remaining))
