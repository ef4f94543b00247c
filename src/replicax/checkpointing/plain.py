"""Plain Python values as JSON and back, exactly: numbers, text, bytes, iterator states."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence

import msgspec

from replicax.foundation import errors

# What a checkpoint stores as text in its manifest.
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)


class Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plain value as JSON: the name of its type, and its text."""

    type: str
    value: object


def encode(value: object) -> Encoded:
    """Returns the JSON form of a plain value.

    >>> encode(0.1)
    Encoded(type='float', value='0.1')
    """
    if isinstance(value, bytes):
        return Encoded("bytes", base64.b64encode(value).decode("ascii"))
    if isinstance(value, str):
        return Encoded("str", str(value))
    if value is None or isinstance(value, bool):
        return Encoded(type(value).__name__, value)
    # Text: JSON has no inf or nan, and readers in other languages round long numbers.
    if isinstance(value, int):
        return Encoded("int", repr(int(value)))
    if isinstance(value, float):
        return Encoded("float", repr(float(value)))
    assert isinstance(value, complex), type(value)
    return Encoded("complex", repr(complex(value)))


def decode(encoded: Encoded) -> object:
    """Returns the value of a JSON form; ValueError or TypeError if it is not one."""
    kind, value = encoded.type, encoded.value
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
    parsers: dict[str, Callable[[str], object]] = {"int": int, "float": float, "complex": complex}
    if kind not in parsers:
        raise ValueError(f"unknown type {kind!r}")
    return parsers[kind](value)


def encode_each(values: Sequence[Encoded]) -> Encoded:
    """Returns one JSON form for several values."""
    return Encoded("json", [msgspec.to_builtins(value) for value in values])


def decode_each(encoded: Encoded) -> list[object]:
    """Undoes `encode_each`; ValueError or TypeError if it is not such a form.

    >>> decode_each(encode_each([encode(1), encode("a")]))
    [1, 'a']
    """
    try:
        values = msgspec.convert(encoded.value, list[Encoded])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return [decode(value) for value in values]


def encode_state(name: str, state: object) -> Encoded:
    """Returns the JSON form of what `get_state()` returned."""
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
    return Encoded("json", json.loads(text))
