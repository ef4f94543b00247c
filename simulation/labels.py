"""Short texts for messages in a trace."""

from __future__ import annotations

from replicax.protocol import messages


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
