"""The base class of all messages."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of the contents of a message."""
