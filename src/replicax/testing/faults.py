"""Random faults of the messages between two tasks: pure decisions from one seed."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Literal

from replicax.foundation import errors

Direction = Literal["request", "reply"]


@dataclasses.dataclass(frozen=True)
class Faults:
    """The probabilities of faults; at most one fault happens to a message.

    Attributes:
      drop_requests: A request is lost; its connection stays open.
      drop_replies: A reply is lost; its connection stays open.
      duplicate_requests: A request arrives twice.
      duplicate_replies: A reply arrives twice.
      break_before_reply: A request arrives, and its connection is closed before the reply.
      reorder_requests: A request arrives after the next one.
      reorder_replies: A reply arrives after the next one.
      delay: A message takes `delay_s` longer, in both directions, and so do those behind it.
      flips: One bit of a piece of the stream is flipped; over TCP, where keys protect it.
      delay_s: How much longer, in seconds.
      bytes_per_s: How fast the stream may be, in both directions; None for no limit.
      only: The names of the requests that are affected, with their replies, such as "Exchange",
        and of notices, such as "Run" and "Finished"; all by default.

    Example:
      >>> Faults(drop_requests=0.1, drop_replies=0.1).drop_requests
      0.1
    """

    drop_requests: float = 0.0
    drop_replies: float = 0.0
    duplicate_requests: float = 0.0
    duplicate_replies: float = 0.0
    break_before_reply: float = 0.0
    reorder_requests: float = 0.0
    reorder_replies: float = 0.0
    delay: float = 0.0
    flips: float = 0.0
    delay_s: float = 0.01
    bytes_per_s: float | None = None
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*REQUESTS, *REPLIES, "flips"):
            if not 0.0 <= (value := getattr(self, name)) <= 1.0:
                raise errors.InvalidArgumentError(
                    f"`{name}` must be a part of all messages, between 0 and 1",
                    f"it is {value!r}",
                    "Pass 0.1 for one of ten.",
                )
        for name in ("delay_s", "bytes_per_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise errors.InvalidArgumentError(
                    f"`{name}` must be positive", f"it is {value!r}", "Leave it out."
                )

    @property
    def needs_messages(self) -> bool:
        """Whether there are faults of messages, which encryption hides."""
        return any(getattr(self, name) for name in (*REQUESTS, *REPLIES))


REQUESTS = (
    "drop_requests",
    "duplicate_requests",
    "break_before_reply",
    "reorder_requests",
    "delay",
)
REPLIES = ("drop_replies", "duplicate_replies", "reorder_replies", "delay")


class Dice:
    """Decides the fault of each message, in order.

    Attributes:
      faults: How often what happens; may be replaced at any time.
      landed: How often it has happened, by the names of `Faults`, beside "requests" and
        "replies": the messages that it could happen to.

    Example:
      >>> dice = Dice(Faults(drop_requests=0.5), seed=1)
      >>> [dice.throw("request", "Exchange") for _ in range(4)]
      ['drop_requests', '', '', 'drop_requests']
      >>> dice.landed["requests"]
      4
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self.faults = faults
        self.landed: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)

    def throw(self, direction: Direction, name: str) -> str:
        """Returns the fault of a message: a name of `Faults`, or an empty string."""
        faults = self.faults
        if faults.only and name not in faults.only:
            return ""
        self.landed["requests" if direction == "request" else "replies"] += 1
        number = self._random.random()
        for kind in REQUESTS if direction == "request" else REPLIES:
            number -= getattr(faults, kind)
            if number < 0:
                return kind
        return ""

    def flip(self, data: bytes) -> bytes:
        """Returns a piece of the stream, possibly with one flipped bit."""
        if self._random.random() >= self.faults.flips:
            return data
        self.landed["flips"] += 1
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)
