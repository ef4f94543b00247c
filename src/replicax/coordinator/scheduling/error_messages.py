"""The texts of errors and reasons that the policy decides on."""

from __future__ import annotations

from collections.abc import Sequence

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.pool import Worker
from replicax.coordinator.scheduling.servers import Server
from replicax.foundation import errors

REPLACED = "its process was replaced by one that has none of them"


def silent(what: str, seconds: float) -> str:
    """Returns the reason for a task that does not reply."""
    return f"it has not answered {what} for {seconds:g} s"


def recovered_repeatedly(reason: str, num_returns: int, seconds: float) -> str:
    """Returns the reason for a server that recovers without effect."""
    return f"{reason}; it came back {num_returns} times in {seconds:.0f} s, and no closure ended"


def unmirrored(mirror: Server, seconds: float) -> str:
    """Returns the reason for a server whose mirror is available and confirms nothing."""
    return (
        f"its mirror {mirror} has confirmed none of its changes for {seconds:.0f} s, though both "
        "reply to the coordinator: the connection between the two may be broken"
    )


def too_slow(closure: Closure) -> str:
    """Returns the reason for a worker whose closure exceeds its deadline."""
    return f"closure {closure.id} still ran on it after its deadline of {closure.deadline_s:g} s"


def aborted(reason: str) -> errors.ClosureAbortedError:
    """Returns the error of closures that are abandoned while they run."""
    return errors.ClosureAbortedError(
        f"The closure was aborted: {reason}. Its updates may have been applied or not."
    )


def replaced() -> errors.ClosureAbortedError:
    """Returns the error of closures whose coordinator was replaced."""
    return aborted("another coordinator has the job")


def closed() -> errors.CancelledError:
    """Returns the error of closures that have not ended when their coordinator is closed."""
    return errors.CancelledError(
        "The closure was cancelled: its coordinator was closed. Call `join` before `close`."
    )


def poison(closure: Closure) -> errors.PoisonClosureError:
    """Returns the error of a closure that has killed too many workers."""
    limit = closure.deadline_s
    deadline = "" if limit is None else f", its deadline being {limit:g} s"
    return errors.PoisonClosureError(
        f"Closure {closure.id} was running when each of {closure.num_deaths} workers was lost, "
        f"the last of them /job:worker/task:{closure.worker}{deadline}. Read the logs of the "
        "workers: the closure may need more memory than they have, end its process, or need more "
        "time than its deadline."
    )


def no_workers(num_waiting: int, workers: Sequence[Worker], seconds: float) -> Exception:
    """Returns the error of closures that wait while no worker is ready."""
    reasons = "; ".join(f"{worker}: {worker.reason}" for worker in workers)
    return errors.NoWorkersError(
        f"{num_waiting} closures waited, and no worker was ready for {seconds:g} s ({reasons}). "
        "Start the workers again, then schedule the closures again."
    )


def worker_gone(worker: Worker, seconds: float) -> Exception:
    """Returns the error of a value that only a lost worker keeps."""
    return errors.UnavailableError(
        f"{worker}, which keeps the value, was not ready for {seconds:g} s ({worker.reason}). "
        "Start it again, then fetch the value again."
    )
