"""Errors as replies: how a task makes its peer raise an error."""

from __future__ import annotations

from replicax.foundation import errors
from replicax.protocol import messages

# The reply to a request without a handshake before it; the peer then repeats the handshake.
HELLO_FIRST = "hello first"

_TEXT_LENGTH = 10_000


def from_error(error: BaseException) -> messages.ErrorReply:
    """Returns the reply for an error.

    Example:
      >>> to_error(from_error(errors.NotFoundError("a", "b", "c"))).found
      'b'
    """
    if isinstance(error, errors.DistributeError):
        text = str(error)
        parts = error.parts if len(text) <= _TEXT_LENGTH else ()
        return messages.ErrorReply(type(error).__name__, text[:_TEXT_LENGTH], parts)
    text = f"{type(error).__name__}: {error}"
    return messages.ErrorReply(errors.DistributeError.__name__, text[:_TEXT_LENGTH])


def to_error(reply: messages.ErrorReply) -> errors.DistributeError:
    """Returns the error to raise for a reply; a `DistributeError` for an unknown code.

    Example:
      >>> to_error(messages.ErrorReply("NotFoundError", "There is no part 3."))
      NotFoundError('There is no part 3.')
      >>> to_error(messages.ErrorReply("os.system", "x"))
      DistributeError('x')
    """
    parts = reply.parts if len(reply.parts) == 3 else (reply.text,)
    kind = vars(errors).get(reply.code)
    if isinstance(kind, type) and issubclass(kind, errors.DistributeError):
        return kind(*parts)
    return errors.DistributeError(*parts)


def is_hello_first(body: messages.Body) -> bool:
    """Returns whether a service requires a handshake first."""
    return type(body) is messages.ErrorReply and body.text.startswith(HELLO_FIRST)


def hello_first() -> messages.ErrorReply:
    """Returns the reply to a request on a connection without a handshake."""
    text = f"{HELLO_FIRST}: there was no handshake on this connection."
    return messages.ErrorReply(errors.ProtocolError.__name__, text)
