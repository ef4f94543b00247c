"""What to tell someone who wrote a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def advice(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Returns what to do about names that are not known.

    >>> advice(["nam"], ["name", "dtype"])
    'Did you mean `name`?'
    >>> advice(["color"], ["name", "dtype"])
    'Leave it out.'
    """
    known = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, known, 1)]
    if not close:
        return "Leave it out."
    return f"Did you mean {' and '.join(f'`{name}`' for name in close)}?"
