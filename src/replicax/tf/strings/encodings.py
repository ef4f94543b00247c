"""Characters of encoded strings, and what replaces those that are not valid."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import NamedTuple

from replicax.foundation import errors as error_types

_LARGEST = 0x10FFFF


class Rules(NamedTuple):
    """What happens to characters that are not valid.

    Attributes:
      errors: "replace", "ignore" or "strict".
      replacement: The code point that takes their place.
      is_control_replaced: Whether control characters are replaced, too.
    """

    errors: str = "replace"
    replacement: int = 0xFFFD
    is_control_replaced: bool = False


def _codec(encoding: str) -> str:
    try:
        return codecs.lookup(encoding).name
    except LookupError:
        raise error_types.InvalidArgumentError(
            "The encoding must be known", f"{encoding!r} is not", "Pass 'UTF-8'."
        ) from None


def _invalid(rules: Rules) -> int | None:
    """Returns what takes the place of a character; None if it is left out."""
    if rules.errors == "replace":
        return rules.replacement
    if rules.errors == "ignore":
        return None
    if rules.errors == "strict":
        raise error_types.InvalidArgumentError(
            "The characters must be valid",
            "one is not, and `errors` is 'strict'",
            "Pass errors='replace' or 'ignore'.",
        )
    raise error_types.InvalidArgumentError(
        "`errors` must be 'replace', 'ignore' or 'strict'", f"it is {rules.errors!r}", "Correct it."
    )


def decoded(data: bytes, encoding: str, rules: Rules) -> list[tuple[int, int]]:
    r"""Returns the code point of each character, and the byte at which it begins.

    >>> decoded(b"a\xff", "UTF-8", Rules())
    [(97, 0), (65533, 1)]
    """
    codec, found, at = _codec(encoding), [], 0
    while at < len(data):
        try:
            text, bad, end = data[at:].decode(codec), None, len(data)
        except UnicodeDecodeError as error:
            text = data[at : at + error.start].decode(codec)
            bad, end = at + error.start, at + error.end
        start = at
        for char in text:
            found.append((ord(char), start))
            start += len(char.encode(codec))
        if bad is not None and (point := _invalid(rules)) is not None:
            found.append((point, bad))
        at = end
    if rules.is_control_replaced:
        return [(rules.replacement if p < 0x20 else p, start) for p, start in found]
    return found


def encoded(points: Iterable[int], encoding: str, rules: Rules) -> bytes:
    r"""Returns code points as a string.

    >>> encoded([97, 233], "UTF-8", Rules())
    b'a\xc3\xa9'
    """
    if encoding.upper() not in ("UTF-8", "UTF-16-BE", "UTF-32-BE"):
        raise error_types.InvalidArgumentError(
            "The encoding of a result must be UTF-8, UTF-16-BE or UTF-32-BE",
            f"it is {encoding!r}",
            "Pass 'UTF-8'.",
        )
    kept = []
    for point in points:
        is_valid = 0 <= point <= _LARGEST and not 0xD800 <= point < 0xE000
        used = point if is_valid else _invalid(rules)
        if used is not None:
            kept.append(chr(used))
    return "".join(kept).encode(_codec(encoding))


def changed(data: bytes, change: Callable[[str], str]) -> bytes:
    """Applies a function of text to a string of UTF-8; other bytes stay as they are."""
    return change(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


def characters(data: bytes) -> list[bytes]:
    r"""Returns the characters of a string of UTF-8.

    >>> characters("aé".encode())
    [b'a', b'\xc3\xa9']
    """
    starts = [i for i, byte in enumerate(data) if byte & 0xC0 != 0x80]
    return [data[i:j] for i, j in zip(starts, [*starts[1:], len(data)], strict=True)]
