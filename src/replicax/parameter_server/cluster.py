"""The coordinator's hold on a cluster: who is where, in which job, and the numbers it gives out."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.transport import limits, messages
from replicax.transport.addresses import Location
from replicax.transport.channel import Channel
from replicax.transport.keys import Keys
from replicax.transport.tasks import Task, new_incarnation

# One question may carry this much of a first value; the rest follows in further ones.
CHUNK_BYTES = 64 << 20
# What a server may take for a part: so long, and this much more per byte.
_CREATION_S = 60.0
_CREATION_S_PER_BYTE = 1 / (10 << 20)


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
    """

    def __init__(
        self,
        servers: Sequence[Location],
        workers: Sequence[Location],
        settings: dict[str, Any],
        keys: Keys | None = None,
        connect_timeout: float = 60.0,
    ) -> None:
        self.job = secrets.token_hex(8)
        self.epoch = 1
        self.me = Task("coordinator", 0)
        self.incarnation = new_incarnation()
        self.keys = keys
        self.servers = list(servers)
        self.workers = list(workers)
        self.settings = settings
        self._connect_timeout = connect_timeout
        self._closures = itertools.count(1)
        self._numbers = itertools.count(1)
        self._places = itertools.count()
        # Changes that this process makes itself and that are not acknowledged.
        self._writes: set[int] = set()
        self._writing = threading.Lock()
        # Finds the handle of a variable by its key; set by the strategy.
        self.variable: Callable[[tuple[Any, ...]], Any]
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

    def next_closure(self) -> int:
        """Returns the number of a new closure."""
        return next(self._closures)

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

    def attach(self) -> None:
        """Takes the parameter servers into the job; waits until they can be reached."""
        with self._lock:
            if self._is_closed:
                raise left()
            if self._is_attached:
                return
            deadline = time.monotonic() + self._connect_timeout
            places = [place.url for place in self.servers]
            for channel in self.channels:
                _attach(channel, messages.Attach(places, self.settings), deadline)
            self._is_attached = True

    def ask(
        self, server: int, body: messages.Body, buffers: Sequence[Any] = (), num_bytes: int = 0
    ) -> messages.Body:
        """Asks a server for something that may take as long as its size suggests."""
        self.attach()
        timeout = _CREATION_S + num_bytes * _CREATION_S_PER_BYTE
        return self.channels[server].request(body, buffers, timeout=timeout)[0]

    def forget(self, server: int, number: int) -> None:
        """Notes that a part is not needed; may be called by the garbage collector."""
        self._forgotten.append((server, number))

    def drop_forgotten(self) -> None:
        """Lets the servers drop parts that nobody can name any more."""
        found = [self._forgotten.pop() for _ in range(len(self._forgotten))]
        for server in {server for server, _ in found}:
            numbers = [number for place, number in found if place == server]
            self.ask(server, messages.DropParts(numbers))

    def close(self) -> None:
        """Leaves the servers, which drop the variables of the job."""
        with self._lock:
            was_attached, self._is_attached = self._is_attached, False
            self._is_closed = True
        for channel in self.channels:
            if was_attached and channel.peer_incarnation is not None:
                # One that is gone, or has another master, has nothing left to drop.
                with contextlib.suppress(
                    errors.UnavailableError, errors.DeadlineExceededError, errors.FencedError
                ):
                    channel.request(messages.Detach(), timeout=limits.LINGER)
            channel.close()


def left() -> errors.ContextError:
    """Returns the error for what needs a cluster that this process has left."""
    return errors.ContextError(
        errors.message(
            "Variables on parameter servers live as long as their strategy",
            "it was closed",
            "Make a new strategy, and restore the variables from a checkpoint.",
        )
    )


def _attach(channel: Channel, attach: messages.Attach, deadline: float) -> None:
    """Takes one server into the job; it may still be starting."""
    while True:
        remaining = deadline - time.monotonic()
        try:
            channel.request(attach, timeout=max(remaining, 0.1))
            return
        except (errors.UnavailableError, errors.DeadlineExceededError) as error:
            if remaining <= 0:
                raise errors.PSUnavailableError(
                    errors.message(
                        f"{channel.peer} must be reachable at {channel.location}",
                        f"it is not: {error}",
                        "Start it (`python -m replicax serve`), or correct the cluster spec.",
                    )
                ) from error
            time.sleep(min(0.05, remaining))
