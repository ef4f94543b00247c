"""A model of `ps/client/variable_client.py`: changes of closures on their way to servers."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from replicax.foundation import errors
from replicax.protocol import error_replies, messages
from simulation.channel import Channel

Change = tuple[messages.Update, np.ndarray]
Ended = list[tuple[int, Exception | None]]


class Post:
    """A question to one server, and the closures whose changes it carries."""

    def __init__(self, closures: list[int]) -> None:
        self.closures = closures
        self.number = 0
        self.is_over = False
        self.error: Exception | None = None


class Client:
    """What one life of a worker asks the servers."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)
        self._outgoing: list[dict[int, list[Change]]] = [{} for _ in channels]
        self._under_way: list[collections.deque[Post]] = [collections.deque() for _ in channels]
        # Per closure: how many questions with its changes have no answer yet.
        self._waits: collections.Counter[int] = collections.Counter()
        self._ended: dict[int, None] = {}
        self._failed: dict[int, Exception] = {}
        for server, channel in enumerate(self._channels):
            self._listen(server, channel)

    def begin(self, closure: int) -> None:
        """A closure starts, perhaps not for the first time."""
        self._failed.pop(closure, None)

    def collect(self, closure: int, server: int, change: Change) -> None:
        """Takes a change that travels with the next question to its server."""
        changes = self._outgoing[server].get(closure)
        if changes is None:
            changes = self._outgoing[server][closure] = []
            self._waits[closure] += 1
        changes.append(change)

    def end(self, closure: int) -> None:
        """A closure makes no more changes."""
        self._ended[closure] = None

    def post(self, server: int, reads: Sequence[messages.Read] = ()) -> Post:
        """Asks a server: it makes the changes that wait, then reads."""
        taken, self._outgoing[server] = self._outgoing[server], {}
        pushes = [messages.Push(c, [u for u, _ in changes]) for c, changes in taken.items()]
        buffers = [payload for changes in taken.values() for _, payload in changes]
        post = Post(list(taken))
        self._under_way[server].append(post)
        try:
            post.number = self._channels[server].send(
                messages.Exchange(pushes, list(reads)), buffers
            )
        except errors.UnavailableError as error:
            self._lose(server, error)
        return post

    def post_changes(self) -> None:
        """Sends all changes that wait."""
        for server, waiting in enumerate(self._outgoing):
            if waiting:
                self.post(server)

    @property
    def is_waiting(self) -> bool:
        """Whether a question has no answer yet."""
        return any(self._under_way)

    def give_up(self, error: Exception) -> None:
        """Loses all servers that have not answered."""
        for server, under_way in enumerate(self._under_way):
            if under_way:
                self._channels[server].close()
                self._lose(server, error)

    def settled(self) -> Ended:
        """Returns the closures whose changes were all acknowledged, or refused, by now."""
        done = [c for c in self._ended if not self._waits[c]]
        for closure in done:
            del self._ended[closure], self._waits[closure]
        return [(closure, self._failed.pop(closure, None)) for closure in done]

    def close(self) -> None:
        """Ends the connections; what was not sent is lost."""
        for channel in self._channels:
            channel.close()

    def _listen(self, server: int, channel: Channel) -> None:
        def answered(number: int, body: messages.Body, _: list[memoryview]) -> None:
            self._take(server, number, body)

        def lost(error: Exception) -> None:
            self._lose(server, error)

        channel.on_answer, channel.on_lost = answered, lost

    def _take(self, server: int, number: int, body: messages.Body) -> None:
        post = self._under_way[server].popleft()
        assert post.number == number, "answers come in order"
        self._waits.subtract(post.closures)
        post.is_over = True
        if isinstance(body, messages.Exchanged):
            for failure in body.failures:
                self._failed.setdefault(failure.closure, error_replies.to_error(failure.error))
            return
        assert isinstance(body, messages.ErrorReply), body
        post.error = error_replies.to_error(body)
        post.error.task_index = server  # type: ignore[attr-defined]
        for closure in post.closures:
            self._failed.setdefault(closure, post.error)

    def _lose(self, server: int, error: Exception) -> None:
        error.task_index = server  # type: ignore[attr-defined]
        for post in self._under_way[server]:
            self._waits.subtract(post.closures)
            post.is_over = True
            post.error = error
            for closure in post.closures:
                self._failed[closure] = error
        self._under_way[server].clear()
