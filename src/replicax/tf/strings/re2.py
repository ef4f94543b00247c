"""Regular expressions in the language of RE2, run by Python's `re`."""

from __future__ import annotations

import functools
import re

from replicax.foundation import errors

# POSIX classes, as the inside of brackets.
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7F",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1F\x7F",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_CLASS = re.compile(r"\[:(\^?)(\w+):\]")
_REFERENCE = re.compile(r"\\(\d|\\)")


@functools.lru_cache(maxsize=512)
def compiled(pattern: bytes) -> re.Pattern[str]:
    r"""Returns a pattern of RE2 as one of Python.

    >>> compiled(b"[[:digit:]]+$").pattern
    '[0-9]+\\Z'
    """
    try:
        return re.compile(_translated(_text(pattern)), re.ASCII)
    except re.error as error:
        raise errors.InvalidArgumentError(
            "The pattern must be a regular expression",
            f"{pattern!r}: {error}",
            "Write it in the common part of RE2's and Python's languages.",
        ) from None


def _text(data: bytes) -> str:
    # As characters, which `.` and classes match; other bytes go through unchanged.
    return data.decode("utf-8", "surrogateescape")


def _translated(pattern: str) -> str:
    parts: list[str] = []
    at, is_class = 0, False
    is_lines = re.search(r"\(\?[a-zA-Z]*m", pattern) is not None
    while at < len(pattern):
        char = pattern[at]
        found = _CLASS.match(pattern, at) if is_class else None
        if char == "\\" and at + 1 < len(pattern):
            text, at = _escape(pattern, at)
            parts.append(text)
            continue
        if found is not None and found[2] in _CLASSES and not found[1]:
            parts.append(_CLASSES[found[2]])
            at = found.end()
            continue
        if is_class:
            is_class = char != "]"
            # Python would warn of a nested set.
            parts.append("\\[" if char == "[" else char)
        elif char == "[":
            is_class = True
            end = at + 2 if pattern[at + 1 : at + 2] == "^" else at + 1
            # A bracket that closes at once is a character of the class.
            end += pattern[end : end + 1] == "]"
            parts.append(pattern[at:end].replace("]", "\\]"))
            at = end
            continue
        else:
            # At the end of the text alone, not before a last line break.
            parts.append(r"\Z" if char == "$" and not is_lines else char)
        at += 1
    return "".join(parts)


def _escape(pattern: str, at: int) -> tuple[str, int]:
    kind = pattern[at + 1]
    if kind == "z":
        return r"\Z", at + 2
    if kind == "Q":
        end = pattern.find(r"\E", at)
        end = len(pattern) if end < 0 else end
        return re.escape(pattern[at + 2 : end]), end + 2
    if kind in "pP":
        raise errors.UnsupportedError(
            "Patterns have no classes of Unicode characters",
            f"{pattern!r} has one",
            r"Write the characters, such as [A-Za-z] for \pL and [[:punct:]] for \pP.",
        )
    return pattern[at : at + 2], at + 2


def matches(pattern: re.Pattern[str], data: bytes) -> bool:
    """Tells whether a pattern matches the whole of a string."""
    return pattern.fullmatch(_text(data)) is not None


def replaced(pattern: re.Pattern[str], rewrite: bytes, data: bytes, count: int) -> bytes:
    r"""Returns a string with matches replaced; 0 for all of them.

    >>> replaced(compiled(b"(a+)b"), rb"<\1>", b"aab", 0)
    b'<aa>'
    """
    text = _text(rewrite)
    end = -1

    def replacement(match: re.Match[str]) -> str:
        nonlocal end
        # RE2 finds no empty match at the end of another one.
        is_adjacent = match.end() == match.start() == end
        end = match.end()
        if is_adjacent or "\\" not in text:
            return "" if is_adjacent else text
        return _REFERENCE.sub(lambda m: "\\" if m[1] == "\\" else match[int(m[1])] or "", text)

    return pattern.sub(replacement, _text(data), count).encode("utf-8", "surrogateescape")
