"""The base of every message, and the error that may stand in the place of any reply."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of everything that can be said."""


class ErrorReply(Body, frozen=True):
    """The answer to a question that cannot be answered.

    Attributes:
      code: The name of the class in `replicax.foundation.errors` that the caller raises.
      text: The message of that error.
      parts: What was required, found and advised; empty for an error of one text, or a cut one.
    """

    code: str
    text: str
    parts: tuple[str, ...] = ()
