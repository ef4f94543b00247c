"""Plain Python values as JSON and back, exactly: numbers, text, bytes, iterator states."""

from __future__ import annotations

import base64
import json
from typing import Any

from replicax.foundation import errors

# What a checkpoint stores as text in its manifest.
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


def encode(value: Any) -> dict[str, Any]:
    """Returns the JSON form of a plain value.

    >>> encode(0.1)
    {'type': 'float', 'value': '0.1'}
    """
    if isinstance(value, bytes):
        return {"type": "bytes", "value": base64.b64encode(value).decode("ascii")}
    if isinstance(value, str):
        return {"type": "str", "value": str(value)}
    if value is None or isinstance(value, bool):
        return {"type": type(value).__name__, "value": value}
    # Text: JSON has no inf or nan, and readers in other languages cut long numbers.
    kind: Any = next(t for t in (int, float, complex) if isinstance(value, t))
    return {"type": kind.__name__, "value": repr(kind(value))}


def decode(encoded: dict[str, Any]) -> Any:
    """Returns the value whose JSON form is given; ValueError or TypeError if it is none."""
    kind, value = encoded["type"], encoded["value"]
    if kind in ("NoneType", "bool", "json"):
        if (kind == "NoneType" and value is not None) or (kind == "bool" and value not in (0, 1)):
            raise ValueError(f"{value!r} is not a {kind}")
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    if kind == "bytes":
        return base64.b64decode(value, validate=True)
    if kind == "str":
        return value
    parsers: dict[str, Any] = {"int": int, "float": float, "complex": complex}
    if kind not in parsers:
        raise ValueError(f"unknown type {kind!r}")
    return parsers[kind](value)


def encode_state(name: str, state: Any) -> dict[str, Any]:
    """Returns the JSON form of what `get_state()` gave."""
    if isinstance(state, bytes):
        return encode(state)
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise errors.ArgumentTypeError(
            f"`get_state()` of {name!r} must return bytes, or what JSON can hold",
            f"it returned a {type(state).__name__} ({error})",
            "Return dicts with text keys, lists, numbers and text.",
        ) from error
    return {"type": "json", "value": json.loads(text)}
