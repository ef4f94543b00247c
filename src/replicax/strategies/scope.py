"""`strategy.scope()`: making a strategy the current one, for this thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import devices, errors, gate
from replicax.foundation.jax_compat import Device
from replicax.variables import creators

if TYPE_CHECKING:
    from replicax.strategies.base import Strategy

_S = TypeVar("_S", bound="Strategy")


class _Opened(NamedTuple):
    """The state to restore when a scope is left."""

    frame: Frame
    before: tuple[creators.Creator, ...]
    inside: tuple[creators.Creator, ...]
    device: Device | None


class Scope(Generic[_S]):
    """The context manager that `strategy.scope()` returns; may be entered again."""

    def __init__(self, strategy: _S) -> None:
        self._strategy = strategy
        self._location = frames.caller_location()
        # Per thread: what to restore on leaving, one entry for each time it was entered.
        self._threads = threading.local()

    def __enter__(self) -> _S:
        require_scope_allowed(self._strategy, "scope")
        before = creators.creator_stack()
        frame = self._strategy.extended.scope_frame(self._location)
        is_nested = frames.current().hooks is self._strategy.extended and not frame.is_default
        inside = before if is_nested else (*before, self._strategy.extended.creator)
        creators.set_creator_stack(inside)
        self._opened().append(_Opened(frame, before, inside, devices.explicit()))
        frames.push(frame)
        return self._strategy

    def __exit__(self, *exception: object) -> None:
        if not self._opened():
            raise errors.ContextError(
                "A scope must be entered before it is left",
                "this one is not open in this thread",
                "Use `with strategy.scope():`.",
            )
        opened = self._opened()[-1]
        if devices.explicit() is not opened.device:
            raise _nesting("device")
        if creators.creator_stack() is not opened.inside:
            raise _nesting("variable creator")
        frames.pop(opened.frame)
        self._opened().pop()
        creators.set_creator_stack(opened.before)
        if exception[0] is None and not frames.current().is_scope:
            # Variables of several workers get their common values here, all at once.
            gate.settle()

    def __repr__(self) -> str:
        return f"<scope of {self._strategy!r}>"

    def _opened(self) -> list[_Opened]:
        if not hasattr(self._threads, "opened"):
            self._threads.opened = []
        return self._threads.opened


@contextlib.contextmanager
def entered(strategy: Strategy, api: str) -> Iterator[None]:
    """Enters the scope of a strategy if it is not open yet."""
    require_scope_allowed(strategy, api)
    frame = frames.current()
    if frame.strategy is strategy and (frame.mode is not Mode.REPLICA or frame.is_default):
        yield
        return
    before = creators.creator_stack()
    creators.set_creator_stack((*before, strategy.extended.creator))
    try:
        with frames.pushed(strategy.extended.scope_frame(frames.caller_location())):
            yield
    finally:
        creators.set_creator_stack(before)


def require_scope_allowed(strategy: Strategy, api: str) -> None:
    """Raises inside replica code, and inside the scope of another strategy."""
    guards.require_cross_replica(f"Strategy.{api}", "", strategy)
    guards.require_same_strategy(f"{type(strategy).__name__}.{api}", strategy)


def _nesting(kind: str) -> errors.ContextError:
    return errors.ContextError(
        f"A {kind} scope opened inside `strategy.scope()` must be left before it",
        f"a {kind} scope is still open",
        f"Leave the inner scope first (a {kind} scope nesting error).",
    )
