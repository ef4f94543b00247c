"""Calls that all members make: their values are collected and sent to all."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from replicax.protocol import messages

# Sends a reply to the member that made a call.
Respond = Callable[[messages.Body, Sequence[bytes]], None]

# The number and the bytes of completed calls that are kept for members that repeat a request.
_KEPT = 256
_KEPT_BYTES = 16 << 20


@dataclasses.dataclass
class Call:
    """One call that some members have made.

    Attributes:
      name: The name of the call.
      since: When the first member made it.
      values: The values, by index.
      responds: Where the replies go, by index.
      in_main: The members whose main thread waits for it, each with the number of programs that
        it has dispatched before, and what its call is about.
      reported: When the wait was last logged.
    """

    name: str
    since: float
    values: dict[int, bytes] = dataclasses.field(default_factory=dict[int, bytes])
    responds: dict[int, Respond] = dataclasses.field(default_factory=dict[int, Respond])
    in_main: dict[int, tuple[int, str]] = dataclasses.field(
        default_factory=dict[int, tuple[int, str]]
    )
    reported: float = 0.0

    def about(self, index: int) -> str:
        """Returns the call of a member, for messages."""
        detail = self.in_main.get(index, (0, ""))[1]
        return f"{self.name!r} ({detail})" if detail else repr(self.name)


class Calls:
    """The calls that are not complete, and those that were completed last.

    Example:
      >>> calls, replies = Calls(2), []
      >>> respond = lambda body, values: replies.append((body.number, values))
      >>> calls.add(0, messages.Contribute("a", 0), b"x", respond, 1.0)
      >>> calls.add(1, messages.Contribute("a", 0), b"y", respond, 2.0)
      >>> replies
      [(1, [b'x', b'y']), (1, [b'x', b'y'])]
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._number = 0
        self._pending: dict[tuple[str, int], Call] = {}
        self._done: collections.OrderedDict[tuple[str, int], tuple[int, list[bytes]]]
        self._done = collections.OrderedDict()
        self._done_bytes = 0

    def add(
        self, index: int, body: messages.Contribute, value: bytes, respond: Respond, now: float
    ) -> None:
        """Adds the value of a member; replies to all if it is the last."""
        key = (body.name, body.number)
        if key in self._done:
            number, values = self._done[key]
            respond(messages.Contributions(number), values)
            return
        call = self._pending.setdefault(key, Call(body.name, now, reported=now))
        call.values[index] = value
        call.responds[index] = respond
        if body.is_main:
            call.in_main[index] = body.position, body.detail
        if len(call.values) < self._count:
            return
        del self._pending[key]
        self._number += 1
        values = [call.values[i] for i in range(self._count)]
        self._keep(key, self._number, values)
        for each in call.responds.values():
            each(messages.Contributions(self._number), values)

    def _keep(self, key: tuple[str, int], number: int, values: list[bytes]) -> None:
        self._done[key] = number, values
        self._done_bytes += sum(map(len, values))
        while len(self._done) > _KEPT or (self._done_bytes > _KEPT_BYTES and len(self._done) > 8):
            _, (_, old) = self._done.popitem(last=False)
            self._done_bytes -= sum(map(len, old))

    def fail(self, call: Call, error: messages.ErrorReply) -> None:
        """Ends a call with an error for all members that have made it."""
        for key, each in list(self._pending.items()):
            if each is call:
                del self._pending[key]
        for respond in call.responds.values():
            respond(messages.Contributions(0, error), ())

    def fail_all(self, error: messages.ErrorReply) -> None:
        """Ends all calls with an error."""
        for call in list(self._pending.values()):
            self.fail(call, error)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._pending.values()))

    def missing(self, call: Call) -> list[int]:
        """Returns the members that have not made a call."""
        return [i for i in range(self._count) if i not in call.values]

    def in_main_threads(self) -> dict[int, Call]:
        """Returns the call in which the main thread of each member waits."""
        return {index: call for call in self._pending.values() for index in call.in_main}
