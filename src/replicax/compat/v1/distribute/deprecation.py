"""Warnings of deprecated names: each name warns once per process."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_once(old: str, new: str) -> None:
    """Warns the caller of the calling function that `old` is deprecated, the first time.

    If the filters turn warnings into errors, each use raises.

    Args:
      old: The deprecated name, as users write it.
      new: The name to write instead.
    """
    if old in _warned:
        return
    warnings.warn(f"`{old}` is deprecated; use `{new}`.", DeprecationWarning, stacklevel=3)
    _warned.add(old)


def forget() -> None:
    """Lets all names warn again."""
    _warned.clear()
