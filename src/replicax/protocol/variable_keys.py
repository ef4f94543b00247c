"""The keys of variables as texts, for results that name a variable instead of a value."""

from __future__ import annotations

from typing import Any

import msgspec

from replicax.foundation import errors


def encode(key: tuple[Any, ...]) -> str:
    """Writes a key, a tuple of plain values, as a text.

    >>> decode(encode((3, "rows", (0, 5))))
    (3, 'rows', (0, 5))
    """
    return msgspec.json.encode(key).decode()


def decode(text: str) -> Any:
    """Returns the key that a text stands for."""
    try:
        return _as_tuples(msgspec.json.decode(text))
    except (msgspec.MsgspecError, RecursionError):
        raise errors.ProtocolError(
            "A result names a variable by its key",
            f"{text[:40]!r} is none",
            "Run the same version of replicax on all tasks.",
        ) from None


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
