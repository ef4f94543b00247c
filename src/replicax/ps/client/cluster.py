"""The coordinator's hold on a cluster: who is where, in which job, and the numbers it gives out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.protocol import limits, messages
from replicax.protocol.tasks import Task, new_incarnation
from replicax.ps.client import job_resume
from replicax.transport.addresses import Location
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys

# One question may carry this much of a first value; the rest follows in further ones.
CHUNK_BYTES = 64 << 20
# What a server may take for a part: so long, and this much more per byte.
_CREATION_S = 60.0
_CREATION_S_PER_BYTE = 1 / (10 << 20)


# As many lives that were given up fit into a header; more are told one by one.
_MOST_FENCED = 4_000


class Cluster:
    """Parameter servers and workers of one job.

    Attributes:
      job: The job.
      epoch: Which coordinator of the job this is.
      me: The coordinator.
      incarnation: The life of this process in the job.
      keys: What it proves with who it is, where tasks talk over TCP.
      servers: Where the parameter servers listen.
      workers: Where the workers listen.
      settings: What tasks are told when they join the job.
      is_resumed: Whether the servers held the job already: its variables are as another
        coordinator has left them. Known once the servers are attached.

    Note [A coordinator that comes back]
        A job with a name of its own outlives its coordinator, for as long as the servers keep
        it. The next coordinator of that name finds it there, and takes it over in a higher
        epoch; servers refuse the former one from then on. Its program makes the same variables
        in the same order, so they get the same numbers, and a server that is asked to make a
        part that it has leaves it as it is. Closures get numbers above all that were used.
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
        # Lives that were given up; the coordinator adds to it while it works.
        self.fenced: set[int] = set()
        self._found: Sequence[frozenset[int]] = ()
        self._closures = itertools.count(1)
        # See `coordinator.outbox.Cluster`; without a frame of Python, as it is called per closure.
        self.next_closure: Callable[[], int] = self._closures.__next__
        self._numbers = itertools.count(1)
        self._places = itertools.count()
        # Changes that this process makes itself and that are not acknowledged.
        self._writes: set[int] = set()
        self._writing = threading.Lock()
        # Finds the handle of a variable by its key; set by the strategy.
        self.variable: Callable[[tuple[Any, ...]], Any]
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_attached = False
        self._is_closed = False
        # Parts that nobody can name any more, by server.
        self._forgotten: list[tuple[int, int]] = []
        self.channels = [
            Channel(place, self.me, keys, self.incarnation, peer=Task("ps", i))
            for i, place in enumerate(servers)
        ]
        for channel in self.channels:
            channel.job, channel.epoch = self.job, self.epoch

    # Numbers. Counting is one step in Python.

    def begin_write(self) -> int:
        """Returns the number of a change that this process makes itself."""
        with self._writing:
            number = next(self._closures)
            self._writes.add(number)
        return number

    def end_write(self, number: int) -> None:
        """Notes that a change of this process is made, or given up."""
        with self._writing:
            self._writes.discard(number)

    def oldest_write(self) -> int | None:
        """Returns the smallest number under which this process is changing something."""
        with self._writing:
            return min(self._writes, default=None)

    def next_number(self) -> int:
        """Returns the number of a new part or optimizer."""
        return next(self._numbers)

    def next_server(self) -> int:
        """Returns the server whose turn it is to get a part."""
        return next(self._places) % len(self.servers)

    # Servers.

    def follow(self, loss_of: Callable[[int], Exception | None] | None) -> None:
        """Ends waits for servers that somebody else finds lost, and with what that one says.

        Args:
          loss_of: Returns why a server is lost, or None while it is not. It is asked by any
            thread, with locks held, and must not wait. None ends it.
        """
        for server, channel in enumerate(self.channels):
            channel.check_failure = None if loss_of is None else functools.partial(loss_of, server)

    def attach(self) -> None:
        """Takes the parameter servers into the job; waits until they can be reached."""
        with self._lock:
            if self._is_closed:
                raise left()
            if self._is_attached:
                return
            deadline = time.monotonic() + self._connect_timeout
            if self._has_name:
                self._look_for_job(deadline)
            attach = messages.Attach(self._urls, self.settings, [] if self.is_resumed else None)
            try:
                for server, channel in enumerate(self.channels):
                    self._saved[server] = _attach(channel, attach, deadline).is_saved
            except errors.PermissionDeniedError:
                # Another job has one of them: it, or the next one, may have the others.
                if not self.is_resumed:
                    for channel in self.channels:
                        _detach(channel)
                raise
            self._is_attached = True

    @property
    def _urls(self) -> list[str]:
        return [place.url for place in self.servers]

    def _look_for_job(self, deadline: float) -> None:
        """Takes the job over if the servers hold it. See Note [A coordinator that comes back]."""
        found = [_ask_early(channel, messages.QueryJob(), deadline) for channel in self.channels]
        plan = job_resume.of_job(self.job, found)
        if plan is None:
            return
        self.epoch, self.is_resumed, self._found = plan.epoch, plan.is_resumed, plan.parts
        for channel in self.channels:
            channel.epoch = self.epoch
        self._closures = itertools.count(plan.first_closure)
        self.next_closure = self._closures.__next__

    def is_saved(self, server: int) -> bool:
        """Tells whether what a server holds outlives its process."""
        return self._saved[server]

    def was_found(self, server: int, number: int) -> bool:
        """Tells whether another coordinator of the job has made a part."""
        return self.is_resumed and number in self._found[server]

    def hold(self, server: int, number: int) -> None:
        """Notes that a server holds a part."""
        with self._writing:
            self._held[server].add(number)

    def attach_again(self, server: int) -> messages.Attach:
        """Returns what to say to a server that was attached before: it must hold its parts."""
        with self._writing:
            parts = sorted(self._held[server])
        fenced = sorted(self.fenced.copy())[-_MOST_FENCED:]
        return messages.Attach(self._urls, self.settings, parts, fenced)

    def recover(self, error: errors.UnavailableError) -> bool:
        """Waits until the server that an error names is back; False if that cannot be."""
        server = getattr(error, "task_index", -1)
        if not 0 <= server < len(self.channels) or not self._saved[server] or self._is_closed:
            return False
        channel = self.channels[server]
        channel.reset()
        _attach(channel, self.attach_again(server), time.monotonic() + self._return_timeout)
        return True

    def ask(
        self, server: int, body: messages.Body, buffers: Sequence[Any] = (), num_bytes: int = 0
    ) -> messages.Body:
        """Asks a server for something that may take as long as its size suggests."""
        self.attach()
        timeout = _CREATION_S + num_bytes * _CREATION_S_PER_BYTE
        while True:
            try:
                return self.channels[server].request(body, buffers, timeout=timeout)[0]
            except errors.PSUnavailableError as error:
                error.task_index = server  # type: ignore[attr-defined]
                if not self.recover(error):
                    raise

    def forget(self, server: int, number: int) -> None:
        """Notes that a part is not needed; may be called by the garbage collector."""
        self._forgotten.append((server, number))

    def drop_forgotten(self) -> None:
        """Lets the servers drop parts that nobody can name any more."""
        found = [self._forgotten.pop() for _ in range(len(self._forgotten))]
        for server in {server for server, _ in found}:
            numbers = [number for place, number in found if place == server]
            with self._writing:
                self._held[server].difference_update(numbers)
            self.ask(server, messages.DropParts(numbers))

    def close(self, *, keeps: bool = False) -> None:
        """Leaves the servers, which drop the variables of the job unless it `keeps` them."""
        if os.getpid() != self._process:
            # A forked child of the coordinator ends: the job goes on.
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


def left() -> errors.ContextError:
    """Returns the error for what needs a cluster that this process has left."""
    return errors.ContextError(
        "Variables on parameter servers live as long as their strategy",
        "it was closed",
        "Make a new strategy, and restore the variables from a checkpoint.",
    )


def _detach(channel: Channel) -> None:
    """Lets a server go.

    One that is gone or has another master has nothing left to drop, and one that does not know
    the key of this process any more drops it when its lease is over.
    """
    for _ in range(2):
        try:
            channel.request(messages.Detach(), timeout=limits.LINGER)
            return
        except errors.PSIncarnationError:
            # It came back since it was asked last.
            channel.reset()
        except (errors.UnavailableError, errors.DeadlineExceededError):
            return
        except (errors.FencedError, errors.PermissionDeniedError):
            return


def _attach(channel: Channel, attach: messages.Attach, deadline: float) -> messages.Attached:
    """Takes one server into the job; it may still be starting."""
    answer = _ask_early(channel, attach, deadline)
    assert isinstance(answer, messages.Attached), answer
    return answer


def _ask_early(channel: Channel, body: messages.Body, deadline: float) -> messages.Body:
    """Asks a server that may still be starting."""
    started_s = time.monotonic()
    while True:
        remaining = deadline - time.monotonic()
        try:
            return channel.request(body, timeout=max(remaining, 0.1))[0]
        except errors.PSIncarnationError:
            if not channel.peer_restarted:
                # The server itself says so: it came back without what it held.
                raise
            channel.reset()
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            if remaining <= 0:
                waited_s = time.monotonic() - started_s
                raise errors.PSUnavailableError(
                    f"{channel.peer} could not be reached at {channel.location} for "
                    f"{waited_s:.0f} s: {error} Start it (`python -m replicax serve`), or correct "
                    "the cluster spec."
                ) from error
            time.sleep(min(0.05, remaining))
