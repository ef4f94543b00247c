"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Returns a suggestion of names that resemble the unknown ones; empty without.

    >>> suggestion(["MiroredStrategy"], ["MirroredStrategy", "Variable"])
    'Did you mean `MirroredStrategy`?'
    """
    known = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
    return f"Did you mean {' and '.join(f'`{name}`' for name in close)}?" if close else ""


def advice(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Returns the advice for unknown arguments.

    >>> advice(["nam"], ["name", "dtype"])
    'Did you mean `name`?'
    >>> advice(["color"], ["name", "dtype"])
    'Leave it out.'
    """
    return suggestion(unknown, known) or "Leave it out."
