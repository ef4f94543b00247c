"""`strategy.scope()`: making a strategy the current one, for this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from replicax.contexts import frames, guards
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import devices, errors
from replicax.variables import creators


class Scope:
    """The context manager that `strategy.scope()` returns; may be entered again."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._opened: list[tuple[Frame, Any, Any]] = []
        self._location = frames.caller_location()

    def __enter__(self) -> Any:
        require_scope_allowed(self._strategy, "scope")
        before = creators.creator_stack()
        frame = self._strategy.extended.scope_frame(self._location)
        if frames.current().strategy is not self._strategy:
            creators.set_creator_stack((*before, self._strategy.extended.creator))
        self._opened.append((frame, before, devices.explicit()))
        frames.push(frame)
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        frame, before, device = self._opened[-1]
        if devices.explicit() is not device:
            raise _nesting("device")
        if len(creators.creator_stack()) > len(before) + 1:
            raise _nesting("variable creator")
        frames.pop(frame)
        self._opened.pop()
        creators.set_creator_stack(before)


@contextlib.contextmanager
def entered(strategy: Any, api: str) -> Iterator[None]:
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


def require_scope_allowed(strategy: Any, api: str) -> None:
    """Raises inside replica code, and inside the scope of another strategy."""
    guards.require_cross_replica(f"Strategy.{api}")
    guards.require_same_strategy(f"{type(strategy).__name__}.{api}", strategy)


def _nesting(kind: str) -> errors.ContextError:
    return errors.ContextError(
        errors.message(
            f"A {kind} scope opened inside `strategy.scope()` must be left before it",
            f"a {kind} scope is still open",
            f"Leave the inner scope first (a {kind} scope nesting error).",
        )
    )
