"""The base of every message."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """Base of everything that can be said."""
