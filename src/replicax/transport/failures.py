"""The errors of unreachable, restarted and unresponsive tasks."""

from __future__ import annotations

import os

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport.addresses import Location


def unavailable(peer: Task, location: Location, reason: str) -> errors.UnavailableError:
    """Returns the error for an unreachable task."""
    kind = errors.PSUnavailableError if peer.role == "ps" else errors.UnavailableError
    return kind(
        f"{peer} must be reachable at {location}",
        reason,
        "Look at its log; start it again if it has ended.",
    )


def restarted(peer: Task, location: Location) -> errors.UnavailableError:
    """Returns the error for a task that was restarted as another process."""
    kind = errors.PSIncarnationError if peer.role == "ps" else errors.UnavailableError
    lost = "its variables are" if peer.role == "ps" else "its state is"
    return kind(
        f"{peer} at {location} must be the process that this job started with",
        f"it was restarted, and {lost} lost",
        "Restore from a checkpoint." if peer.role == "ps" else "Set it up again.",
    )


def deadline_exceeded(
    peer: Task, body: messages.Body, timeout: float, reason: str | None = None
) -> errors.DeadlineExceededError:
    """Returns the error for a request that timed out.

    Args:
      peer: The task that did not reply.
      body: The request.
      timeout: The deadline, in seconds.
      reason: Why there is no connection to it; None if there is one.
    """
    if reason is not None:
        return errors.DeadlineExceededError(
            f"{peer} must reply to {type(body).__name__} within {timeout:g} s",
            f"there is no connection to it: {reason}",
            "Look at its log; start it again if it has ended.",
        )
    return errors.DeadlineExceededError(
        f"{peer} must reply to {type(body).__name__} within {timeout:g} s",
        "no reply arrived",
        "It may be stopped or overloaded; look at its log.",
    )


def forked(peer: Task, parent: int) -> errors.ContextError:
    """Returns the error for a connection that is used by a forked child of its process."""
    return errors.ContextError(
        f"The connection to {peer} must be used by the process that opened it, process {parent}",
        f"process {os.getpid()}, which was forked from it, used it",
        "Read variables before the fork and pass their values; change them after it.",
    )
