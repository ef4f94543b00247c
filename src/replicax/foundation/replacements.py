"""Replaced attributes of classes and modules of another library, which can be taken back."""

from __future__ import annotations

import bisect
import types
from collections.abc import Callable
from typing import Any, Protocol

_MISSING = object()


class Replace(Protocol):
    """Replaces an attribute of a class or module by a wrapper of it."""

    def __call__(
        self, owner: type | types.ModuleType, name: str, wrap: Callable[[Any], Any]
    ) -> None: ...


class Replacements:
    """A set of replaced attributes, made and taken back together.

    Sets of a higher rank wrap what lower ones have put there. So they are taken back before a
    lower set changes, and made again after it.

    Args:
      rank: The place of this set; each rank belongs to one.
      make: Makes the replacements.

    >>> class Owner:
    ...     def name(self):
    ...         return "owner"
    >>> lower = Replacements(8, lambda replace: replace(Owner, "name", lambda f: lambda s: "low"))
    >>> upper = Replacements(9, lambda r: r(Owner, "name", lambda f: lambda s: f"up, {f(s)}"))
    >>> lower.install(), upper.install(), Owner().name()
    (None, None, 'up, low')
    >>> lower.uninstall(), Owner().name(), upper.uninstall(), Owner().name()
    (None, 'up, owner', None, 'owner')
    """

    # The installed sets, by rank.
    _installed: list[Replacements] = []

    def __init__(self, rank: int, make: Callable[[Replace], None]) -> None:
        self._rank = rank
        self._make = make
        self._made: list[tuple[Any, str, Any]] = []

    @property
    def are_installed(self) -> bool:
        """Whether the replacements are in place."""
        return self in self._installed

    def install(self) -> None:
        """Makes the replacements; idempotent."""
        if not self.are_installed:
            self._change(lambda: bisect.insort(self._installed, self, key=lambda s: s._rank))

    def uninstall(self) -> None:
        """Takes the replacements back; idempotent."""
        if self.are_installed:
            self._change(lambda: self._installed.remove(self))

    def replace(
        self, owner: type | types.ModuleType, name: str, wrap: Callable[[Any], Any]
    ) -> None:
        """Replaces one more attribute while the set is installed."""
        own = vars(owner).get(name, _MISSING)
        before = own if isinstance(own, property) else getattr(owner, name, None)
        setattr(owner, name, wrap(before))
        self._made.append((owner, name, own))

    def _change(self, change: Callable[[], None]) -> None:
        for other in reversed(self._installed):
            if other._rank >= self._rank:
                other._take_back()
        change()
        for other in self._installed:
            if other._rank >= self._rank:
                other._make(other.replace)

    def _take_back(self) -> None:
        while self._made:
            owner, name, before = self._made.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
