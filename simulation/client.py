"""A model of `ps/client/variable_client.py`: sends the updates of closures to servers."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from simulation.channel import Channel

Change = tuple[messages.Update, np.ndarray]
Ended = list[tuple[int, Exception | None]]


class Request:
    """A request to one server, with the updates of closures."""

    def __init__(self, closures: list[int]) -> None:
        self.closures = closures
        self.number = 0
        self.is_over = False
        self.error: Exception | None = None


class Client:
    """The connections of one incarnation of a worker to the servers."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._outgoing: list[dict[int, list[Change]]] = [{} for _ in channels]
        self._in_flight: list[collections.deque[Request]] = [collections.deque() for _ in channels]
        # Per closure: the number of unanswered requests with its updates.
        self._waits: collections.Counter[int] = collections.Counter()
        self._ended: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        for server, channel in enumerate(self._channels):
            self._listen(server, channel)

    def begin(self, closure: int) -> None:
        """Begins a closure, perhaps not for the first time."""
        self._failed.pop(closure, None)

    def collect(self, closure: int, server: int, change: Change) -> None:
        """Adds an update to the next request to its server."""
        changes = self._outgoing[server].get(closure)
        if changes is None:
            changes = self._outgoing[server][closure] = []
            self._waits[closure] += 1
        changes.append(change)

    def end(self, closure: int) -> None:
        """Ends a closure: it makes no further updates."""
        self._ended[closure] = None

    def send(self, server: int, reads: Sequence[messages.Read] = ()) -> Request:
        """Sends a request: the server applies the collected updates, then reads."""
        taken, self._outgoing[server] = self._outgoing[server], {}
        pushes = [messages.Push(c, [u for u, _ in changes]) for c, changes in taken.items()]
        buffers = [payload for changes in taken.values() for _, payload in changes]
        request = Request(list(taken))
        self._in_flight[server].append(request)
        try:
            request.number = self._channels[server].send(
                messages.Exchange(pushes, list(reads)), buffers
            )
        except errors.UnavailableError as error:
            self._lose(server, error)
        return request

    def flush(self) -> None:
        """Sends all collected updates."""
        for server, waiting in enumerate(self._outgoing):
            if waiting:
                self.send(server)

    @property
    def is_waiting(self) -> bool:
        """Whether a request is unanswered."""
        return any(self._in_flight)

    def give_up(self, error: Exception) -> None:
        """Closes the connections to all servers with unanswered requests."""
        for server, in_flight in enumerate(self._in_flight):
            if in_flight:
                self._channels[server].close()
                self._lose(server, error)

    def settled(self) -> Ended:
        """Returns the closures whose updates are all acknowledged or rejected."""
        done = [c for c in self._ended if not self._waits[c]]
        for closure in done:
            del self._ended[closure], self._waits[closure]
        return [(closure, self._failed.pop(closure, None)) for closure in done]

    def close(self) -> None:
        """Closes the connections; unsent updates are lost."""
        for channel in self._channels:
            channel.close()

    def _listen(self, server: int, channel: Channel) -> None:
        def replied(number: int, body: messages.Body, _: list[memoryview]) -> None:
            self._take(server, number, body)

        def lost(error: Exception) -> None:
            self._lose(server, error)

        channel.on_reply, channel.on_lost = replied, lost

    def _take(self, server: int, number: int, body: messages.Body) -> None:
        request = self._in_flight[server].popleft()
        assert request.number == number, "replies are in order"
        self._waits.subtract(request.closures)
        request.is_over = True
        if isinstance(body, messages.Exchanged):
            for failure in body.failures:
                self._failed.setdefault(failure.closure, error_replies.to_error(failure.error))
            return
        assert isinstance(body, messages.ErrorReply), body
        request.error = error_replies.to_error(body)
        request.error.task_index = server  # type: ignore[attr-defined]
        for closure in request.closures:
            self._failed.setdefault(closure, request.error)

    def _lose(self, server: int, error: Exception) -> None:
        error.task_index = server  # type: ignore[attr-defined]
        for request in self._in_flight[server]:
            self._waits.subtract(request.closures)
            request.is_over = True
            request.error = error
            for closure in request.closures:
                self._failed[closure] = error
        self._in_flight[server].clear()
