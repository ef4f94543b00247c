"""Checks of the context that a call is made in."""

from __future__ import annotations

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode, Strategy
from replicax.foundation import errors


def require_cross_replica(api: str, instead: str = "", strategy: Strategy | None = None) -> Frame:
    """Raises unless the current code acts for all replicas; returns the frame.

    Outside of every scope it acts for the replica of the default strategy and for all of any other.
    Only in replica code that the default strategy runs, calls of that `strategy` are refused.
    """
    frame = frames.current()
    is_free = frame.is_default and not (frame.is_replica_code and frame.strategy is strategy)
    if frame.mode is Mode.REPLICA and not is_free:
        todo = instead or "Call it outside `strategy.run`, or inside `merge_call`."
        raise errors.ContextError(
            f"`{api}` needs a cross-replica context", f"this is {frame.describe()}", todo
        )
    return frame


def require_replica(api: str, context: object) -> Frame:
    """Raises unless `context` is the replica context of the current code."""
    frame = frames.current()
    if frame.mode is not Mode.REPLICA:
        raise errors.ContextError(
            f"`{api}` needs a replica context",
            f"this is {frame.describe()}",
            "Call it inside `strategy.run(...)`; need to be inside `call_for_each_replica()`.",
        )
    if frame.replica_context is not context:
        raise errors.ContextError(
            f"`{api}` needs the ReplicaContext of the running replica",
            "this object belongs to another run or another thread (mismatching "
            "ReplicaContext or Strategy objects)",
            "Call `rx.get_replica_context()` inside the function that `run` calls.",
        )
    return frame


def require_same_strategy(api: str, strategy: Strategy) -> None:
    """Raises if another strategy than `strategy` is current."""
    frame = frames.current()
    if frame.strategy is not strategy and not frame.is_default:
        raise errors.ContextError(
            f"`{api}` needs {type(strategy).__name__}, or no strategy, to be current",
            f"this is {frame.describe()}",
            "Mixing different strategies is not possible: leave the other scope first.",
        )
