"""The errors of a task that does not answer, worded once."""

from __future__ import annotations

import os

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport.addresses import Location


def unavailable(peer: Task, location: Location, reason: str) -> errors.UnavailableError:
    """Makes the error for a task that cannot be reached."""
    kind = errors.PSUnavailableError if peer.role == "ps" else errors.UnavailableError
    return kind(
        f"{peer} must be reachable at {location}",
        reason,
        "Look at its log; start it again if it has ended.",
    )


def restarted(peer: Task, location: Location) -> errors.UnavailableError:
    """Makes the error for a task that came back as another process."""
    kind = errors.PSIncarnationError if peer.role == "ps" else errors.UnavailableError
    lost = "its variables" if peer.role == "ps" else "what it held"
    return kind(
        f"{peer} at {location} must be the process that this job began with",
        f"it was restarted, and {lost} are gone"
        if peer.role == "ps"
        else f"it was restarted, and {lost} is gone",
        "Restore from a checkpoint." if peer.role == "ps" else "Set it up again.",
    )


def deadline_exceeded(
    peer: Task, body: messages.Body, timeout: float, reason: str | None = None
) -> errors.DeadlineExceededError:
    """Makes the error for an answer that did not come in time.

    Args:
      peer: Who was asked.
      body: What it was asked.
      timeout: The time that it had.
      reason: Why there is no connection to it; None if there is one.
    """
    if reason is not None:
        return errors.DeadlineExceededError(
            f"{peer} must answer {type(body).__name__} within {timeout:g} s",
            f"there is no connection to it: {reason}",
            "Look at its log; start it again if it has ended.",
        )
    return errors.DeadlineExceededError(
        f"{peer} must answer {type(body).__name__} within {timeout:g} s",
        "there is no answer",
        "It may be stopped or overloaded; look at its log.",
    )


def forked(peer: Task, parent: int) -> errors.ContextError:
    """Makes the error for a connection that is used by a forked child of its process."""
    return errors.ContextError(
        f"{peer} is called by the process that has connected to it, process {parent}",
        f"process {os.getpid()}, which was forked from it, called",
        "Read variables before the fork and pass their values; change them after it.",
    )
