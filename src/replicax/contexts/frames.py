"""The stack of frames that says, per thread, where the running code stands."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from replicax.foundation import errors

if TYPE_CHECKING:
    from replicax.contexts.overlay import EagerReads, Overlay
    from replicax.values.layout import ReplicaLayout


class Mode(enum.Enum):
    """What kind of code is running."""

    REPLICA = "replica"  # entered by `run`, and outside of every scope
    CROSS_REPLICA = "cross-replica"  # entered by `scope` and by `merge_call`
    UPDATE = "update"  # entered by `extended.update`


class ReplicaExecutor(Protocol):
    """What the replica code of one `run` may ask of the machinery that runs it."""

    def merge_call(self, merge_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def all_reduce(self, op: Any, value: Any, options: Any) -> Any: ...

    def all_gather(self, value: Any, axis: int) -> Any: ...

    def shared_variable(self, name: str, create: Any) -> Any: ...


class Frame:
    """One entry of the stack. Frames are made, pushed, popped and never changed.

    Attributes:
      mode: What kind of code is running.
      strategy: The strategy in force.
      layout: Its replicas, or None for the default strategy outside `run`.
      replica_id: Which replica this is; None outside replica and update code, and in
        compiled code, where one trace stands for all replicas.
      replica_context: What `get_replica_context` returns.
      executor: What runs the replicas, in replica mode.
      overlay: Values of variables inside the innermost trace or gradient, if any.
      eager_reads: Makes reads inside traces safe, in eager replica code.
      is_scope: Whether `scope` pushed this frame.
      is_default: Whether the strategy is the default one.
      opened_at: Where in the user's code the frame was opened, for messages.
    """

    __slots__ = (
        "eager_reads",
        "executor",
        "is_default",
        "is_scope",
        "layout",
        "mode",
        "opened_at",
        "overlay",
        "replica_context",
        "replica_id",
        "strategy",
    )

    def __init__(
        self,
        mode: Mode,
        strategy: Any,
        layout: ReplicaLayout | None = None,
        *,
        replica_id: int | None = None,
        replica_context: Any = None,
        executor: ReplicaExecutor | None = None,
        overlay: Overlay | None = None,
        eager_reads: EagerReads | None = None,
        is_scope: bool = False,
        is_default: bool = False,
        opened_at: str = "",
    ) -> None:
        self.mode = mode
        self.strategy = strategy
        self.layout = layout
        self.replica_id = replica_id
        self.replica_context = replica_context
        self.executor = executor
        self.overlay = overlay
        self.eager_reads = eager_reads
        self.is_scope = is_scope
        self.is_default = is_default
        self.opened_at = opened_at

    def describe(self) -> str:
        """Says in words where this frame stands."""
        name = type(self.strategy).__name__
        where = f" opened at {self.opened_at}" if self.opened_at else ""
        return f"the {self.mode.value} context of {name}{where}"

    def with_overlay(self, overlay: Overlay | None) -> Frame:
        """Returns the same frame with other variable values on top."""
        return Frame(
            self.mode,
            self.strategy,
            self.layout,
            replica_id=self.replica_id,
            replica_context=self.replica_context,
            executor=self.executor,
            overlay=overlay,
            eager_reads=self.eager_reads,
            is_scope=self.is_scope,
            is_default=self.is_default,
            opened_at=self.opened_at,
        )


_stack: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar(
    "replicax_frames", default=()
)


class _Base:
    """The frames at the bottom of every thread's stack."""

    # Set once by strategies/default.py; the stack itself knows no strategy.
    default: Frame
    # Set by `experimental_set_strategy`, for all threads.
    installed: Frame | None = None


def set_default(frame: Frame) -> None:
    """Sets the frame of code outside of every scope."""
    _Base.default = frame


def install(frame: Frame | None) -> None:
    """Sets or clears the frame that replaces the default one in all threads."""
    _Base.installed = frame


def current() -> Frame:
    """Returns the innermost frame of this thread."""
    stack = _stack.get()
    if stack:
        return stack[-1]
    return _Base.installed or _Base.default


def stack() -> tuple[Frame, ...]:
    """Returns all frames that were pushed in this thread."""
    return _stack.get()


@contextlib.contextmanager
def pushed(frame: Frame) -> Iterator[Frame]:
    """Makes a frame the current one."""
    token = _stack.set((*_stack.get(), frame))
    try:
        yield frame
    finally:
        _stack.reset(token)


def push(frame: Frame) -> None:
    """Makes a frame the current one until `pop`."""
    _stack.set((*_stack.get(), frame))


def pop(frame: Frame) -> None:
    """Removes the innermost frame, which must be `frame`."""
    frames = _stack.get()
    if not frames or frames[-1] is not frame:
        raise errors.ContextError(
            "Scopes must be left in the reverse order of entering them",
            f"{current().describe()} is still open",
            "Leave the inner scope first (a scope nesting error).",
        )
    _stack.set(frames[:-1])


def replace_stack(frames: tuple[Frame, ...]) -> None:
    """Gives this thread a stack of its own, when it starts to work for another thread."""
    _stack.set(frames)


def caller_location() -> str:
    """Returns file:line of the nearest caller outside this package and the library."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("replicax", "contextlib")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
