"""Short texts for messages in a trace."""

from __future__ import annotations

import dataclasses

from replicax.protocol import messages
from simulation.process import Process


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """The line of a message in a trace, which is written when it is read.

    Attributes:
      caller: The process that has opened the connection.
      called: The other one.
      is_up: Whether the message is from the caller.
      body: The message.
      request: The number of the request, or 0.
      end: What has happened to it.
    """

    caller: Process
    called: Process
    is_up: bool
    body: messages.Body
    request: int
    end: str = ""

    @property
    def is_exchange(self) -> bool:
        """Whether it is about variables."""
        return type(self.body) in (messages.Exchange, messages.Exchanged)

    def ending(self, end: str) -> Label:
        """Returns the label of a message to which something has happened."""
        return dataclasses.replace(self, end=f"{self.end} {end}")

    def __str__(self) -> str:
        arrow = "→" if self.is_up else "←"
        return f"{self.caller} {arrow} {self.called}  {label_of(self.body, self.request)}{self.end}"


def label_of(body: messages.Body, request: int = 0) -> str:
    """Returns a short text for a message.

    >>> label_of(messages.Ping(settled=3), 7)
    'Ping settled 3 #7'
    """
    number = f" #{request}" if request else ""
    return f"{type(body).__name__}{_details(body)}{number}"


def _details(body: messages.Body) -> str:
    match body:
        case messages.Exchange():
            pushes = ", ".join(
                f"{push.closure}: {[(c.call, getattr(c, 'part', -1)) for c in push.changes]}"
                for push in body.pushes
            )
            return f" {{{pushes}}}" + (f" reads {len(body.reads)}" if body.reads else "")
        case messages.Exchanged():
            return f" failures {[f.closure for f in body.failures]}" if body.failures else ""
        case messages.Run():
            return f" {[call.closure for call in body.closures]}"
        case messages.Finished():
            ended = [(r.closure, "ok" if r.error is None else r.error.cause) for r in body.results]
            return f" {ended}"
        case messages.Cancel():
            return f" {body.closures}"
        case messages.Fence():
            return f" {[f'{i:x}' for i in body.incarnations]}"
        case messages.Ping():
            return f" settled {body.settled}"
        case messages.Welcome():
            return f" {body.incarnation:x}"
        case messages.ErrorReply():
            return f" {body.code}"
    return ""
