"""Errors as answers: how one task tells another which error to raise."""

from __future__ import annotations

from replicax.foundation import errors
from replicax.protocol import messages

# What a service says to a connection that it does not know; the caller then introduces itself.
HELLO_FIRST = "hello first"

_TEXT_LENGTH = 10_000


def from_error(error: BaseException) -> messages.ErrorReply:
    """Turns an error into an answer.

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


def to_error(refused: messages.ErrorReply) -> errors.DistributeError:
    """Turns an answer into the error to raise. Unknown names become `DistributeError`.

    Example:
      >>> to_error(messages.ErrorReply("NotFoundError", "There is no part 3."))
      NotFoundError('There is no part 3.')
      >>> to_error(messages.ErrorReply("os.system", "x"))
      DistributeError('x')
    """
    parts = refused.parts if len(refused.parts) == 3 else (refused.text,)
    kind = vars(errors).get(refused.code)
    if isinstance(kind, type) and issubclass(kind, errors.DistributeError):
        return kind(*parts)
    return errors.DistributeError(*parts)


def is_hello_first(body: messages.Body) -> bool:
    """Says whether a service does not know the connection."""
    return type(body) is messages.ErrorReply and body.text.startswith(HELLO_FIRST)


def hello_first() -> messages.ErrorReply:
    """Returns the answer to a connection that has not introduced itself."""
    text = f"{HELLO_FIRST}: this connection has not said who is calling."
    return messages.ErrorReply(errors.ProtocolError.__name__, text)
