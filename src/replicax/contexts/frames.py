"""The per-thread stack of frames: the strategy, mode and replica of the running code."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from replicax.foundation import errors, lazy
from replicax.foundation.jax_compat import Device
from replicax.foundation.options import CommunicationOptions, ReduceOp
from replicax.foundation.types import Tree

if TYPE_CHECKING:
    from replicax.contexts.overlay import EagerReads, Overlay
    from replicax.contexts.rendezvous import Rendezvous
    from replicax.contexts.replica_context import ReplicaContext
    from replicax.values.layout import ReplicaLayout

_T = TypeVar("_T")


class Mode(enum.Enum):
    """The kind of code that is running."""

    REPLICA = "replica"  # entered by `run`, and outside of every scope
    CROSS_REPLICA = "cross-replica"  # entered by `scope` and by `merge_call`
    UPDATE = "update"  # entered by `extended.update`


class Strategy(Protocol):
    """The part of `rx.Strategy` that lower layers use."""

    @property
    def num_replicas_in_sync(self) -> int: ...

    def scope(self) -> AbstractContextManager[object]: ...

    def run(
        self,
        fn: Callable[..., Tree],
        args: tuple[Tree, ...] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree: ...

    def _enter_replica_context(self, context: ReplicaContext) -> AbstractContextManager[None]: ...


class StrategyHooks(Protocol):
    """The part of `rx.StrategyExtended` that lower layers use; owns variables."""

    layout: ReplicaLayout | None

    @property
    def container_strategy(self) -> Strategy: ...

    @property
    def parameter_devices(self) -> tuple[str, ...]: ...

    def non_slot_devices(self, var_list: Sequence[Any]) -> object: ...

    def colocate_vars_with(
        self, colocate_with_variable: object
    ) -> AbstractContextManager[None]: ...

    def update(
        self,
        var: object,
        fn: Callable[..., Tree],
        args: Sequence[Tree] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree: ...

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Tree]: ...


class Reducer(Protocol):
    """Combines the values of several devices; destinations are resolved devices.

    A value is a `PerReplica`, or anything else, which counts as equal on all `count` replicas.
    """

    def reduce_values(
        self,
        op: ReduceOp,
        values: Sequence[object],
        targets: Sequence[Sequence[Device]],
        count: int,
        options: CommunicationOptions | None = None,
    ) -> list[Tree]:
        """Combines several values together; returns one result per value."""
        ...

    def gather_values(self, value: object, axis: int, target: Device, count: int) -> Tree:
        """Concatenates the components of a value along an axis, on one device."""
        ...

    def broadcast_value(self, value: object, targets: Sequence[Device]) -> Tree:
        """Copies a value to devices."""
        ...


class ReplicaExecutor(Protocol):
    """Runs the replica code of one `run`, and serves its calls across replicas."""

    def merge_call(
        self, merge_fn: Callable[..., Tree], args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> Tree: ...

    def all_reduce(
        self, op: ReduceOp, value: Tree, options: CommunicationOptions | None
    ) -> Tree: ...

    def all_gather(self, value: object, axis: int) -> Tree: ...

    def shared_variable(self, name: str, create: Callable[[], _T]) -> _T: ...


@dataclasses.dataclass(slots=True, eq=False)
class Frame:
    """One entry of the stack; immutable.

    Attributes:
      mode: What kind of code is running.
      strategy: The current strategy.
      hooks: Its `StrategyExtended`, which owns the variables of the scope.
      layout: Its replicas, or None for the default strategy outside `run`.
      reducer: Combines values of its devices.
      replica_id: The index of the running replica; None outside replica and update code, and in
        compiled code, where one trace stands for all replicas.
      replica_context: What `get_replica_context` returns.
      executor: Serves calls across replicas, in replica mode.
      rendezvous: Where replicas of an eager run meet; None where one thread stands for all.
      overlay: Values of variables inside the innermost trace or gradient, if any.
      eager_reads: Makes reads inside traces safe, in eager replica code.
      is_scope: Whether `scope` pushed this frame.
      is_default: Whether the strategy is the default one.
      opened_at: Where in the user's code the frame was opened, for messages.
    """

    mode: Mode
    strategy: Strategy
    hooks: StrategyHooks
    layout: ReplicaLayout | None
    reducer: Reducer
    replica_id: int | None = None
    replica_context: ReplicaContext | None = None
    executor: ReplicaExecutor | None = None
    rendezvous: Rendezvous | None = None
    overlay: Overlay | None = None
    eager_reads: EagerReads | None = None
    is_scope: bool = False
    is_default: bool = False
    opened_at: str = ""

    @property
    def is_replica_code(self) -> bool:
        """Whether `run` has called the code, which the default strategy's frame does not tell."""
        return self.mode is Mode.REPLICA and self.eager_reads is not None

    def describe(self) -> str:
        """Describes the frame for messages."""
        if self.is_default and self.mode is Mode.REPLICA and not self.is_replica_code:
            return "code outside of every scope"
        name = type(self.strategy).__name__
        where = f" opened at {self.opened_at}" if self.opened_at else ""
        return f"the {self.mode.value} context of {name}{where}"

    def entered(
        self,
        mode: Mode,
        *,
        replica_id: int | None = None,
        replica_context: ReplicaContext | None = None,
        executor: ReplicaExecutor | None = None,
        rendezvous: Rendezvous | None = None,
        overlay: Overlay | None = None,
        eager_reads: EagerReads | None = None,
    ) -> Frame:
        """Returns a frame of the same strategy, for code that is called from this one."""
        return Frame(
            mode,
            self.strategy,
            self.hooks,
            self.layout,
            self.reducer,
            replica_id,
            replica_context,
            executor,
            rendezvous,
            overlay,
            eager_reads,
            is_default=self.is_default,
            opened_at=self.opened_at,
        )

    def with_overlay(self, overlay: Overlay | None) -> Frame:
        """Returns the same frame with other variable values on top."""
        return dataclasses.replace(self, overlay=overlay)


_stack: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar(
    "replicax_frames", default=()
)


class _Base(metaclass=lazy.SetByPublicApi):
    """The frames at the bottom of every thread's stack."""

    # Set once by strategies/default.py.
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


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Runs code as outside of every frame that was pushed in this thread."""
    token = _stack.set(())
    try:
        yield
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


def caller_location() -> str:
    """Returns file:line of the nearest caller outside this package and the library."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("replicax", "contextlib")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
