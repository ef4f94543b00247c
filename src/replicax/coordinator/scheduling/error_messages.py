"""The words of the errors that the policy decides on."""

from __future__ import annotations

from collections.abc import Sequence

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.workers import Worker
from replicax.foundation import errors

REPLACED = "its process was replaced by one that has none of them"


def silent(what: str, seconds: float) -> str:
    """Says that a task has not answered."""
    return f"it has not answered {what} for {seconds:g} s"


def in_vain(reason: str, num_returns: int, seconds: float) -> str:
    """Says that a server comes back, and is of no use."""
    return (
        f"{reason}; it came back {num_returns} times in {seconds:.0f} s, and no closure has ended "
        "in all that time"
    )


def alone(mirror: Server, seconds: float) -> str:
    """Says that a server waits in vain for its mirror, which is there."""
    return (
        f"its mirror {mirror} has confirmed none of its changes for {seconds:.0f} s, though both "
        "answer the coordinator: the line between the two may be cut"
    )


def too_slow(closure: Closure) -> str:
    """Says that a closure did not end in the time that it was given."""
    return f"closure {closure.id} still ran on it after its deadline of {closure.deadline_s:g} s"


def aborted(found: str) -> errors.ClosureAbortedError:
    """For closures that are given up while they run."""
    return errors.ClosureAbortedError(
        "A closure runs to its end", found, "Its updates may be there or not."
    )


def replaced() -> errors.ClosureAbortedError:
    """For closures of a coordinator that has no say any more."""
    return aborted("another coordinator has the job")


def closed() -> errors.CancelledError:
    """For closures that have not ended when their coordinator does."""
    return errors.CancelledError(
        "A closure runs as long as its coordinator",
        "it was closed",
        "Call `join` before `close`.",
    )


def poison(closure: Closure) -> errors.PoisonClosureError:
    """For a closure that has ended too many workers."""
    return errors.PoisonClosureError(
        "A worker survives the closures that it runs",
        f"closure {closure.id} was running when each of {closure.num_deaths} workers was "
        f"lost, the last of them /job:worker/task:{closure.worker}{_within(closure)}",
        "Look into the logs of the workers: the closure may need more memory than they "
        "have, end its process, or need more time than its deadline.",
    )


def no_workers(num_waiting: int, workers: Sequence[Worker], seconds: float) -> Exception:
    """For closures that wait while nobody is there to run them."""
    reasons = "; ".join(f"{worker}: {worker.reason}" for worker in workers)
    return errors.NoWorkersError(
        f"{num_waiting} closures need a worker",
        f"none was there for {seconds:g} s ({reasons})",
        "Start the workers again, then schedule the closures again.",
    )


def worker_gone(worker: Worker, seconds: float) -> Exception:
    """For a value that only one worker has."""
    return errors.UnavailableError(
        f"The value is kept by {worker}",
        f"it was not there for {seconds:g} s ({worker.reason})",
        "Start it again, then fetch the value again.",
    )


def _within(closure: Closure) -> str:
    return "" if closure.deadline_s is None else f", its deadline being {closure.deadline_s:g} s"
