"""The wait report: threads that wait for closures, closures for workers, workers for servers.

Pure: the records of tasks and the time are arguments, and the lines of the report are returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from replicax.coordinator.scheduling.closures import Closure, ClosureQueue
from replicax.coordinator.scheduling.pool import Worker, WorkerState
from replicax.coordinator.scheduling.servers import Server
from replicax.protocol.tasks import Task

# The number of missed heartbeats after which a task is reported as silent.
_NUM_HEARTBEATS = 3
# The maximum number of closures that a line names.
_NUM_NAMED = 5
_READY = WorkerState.READY


@dataclasses.dataclass(frozen=True)
class WaitingThread:
    """A thread of this process that waits for the coordinator.

    Attributes:
      thread: Its name.
      call: The call of the user.
      since_s: When it began to wait.
    """

    thread: str
    call: str
    since_s: float


@dataclasses.dataclass(frozen=True)
class WaitReport:
    """What threads, closures and tasks wait for.

    Attributes:
      lines: One sentence each.
      tasks: The tasks whose stacks matter, the most relevant first.
    """

    lines: tuple[str, ...]
    tasks: tuple[Task, ...]


def describe(
    workers: Sequence[Worker],
    servers: Sequence[Server],
    queue: ClosureQueue,
    threads: Iterable[WaitingThread],
    heartbeat_s: float,
    now: float,
) -> WaitReport:
    """Returns the wait report.

    Args:
      workers: All workers.
      servers: All parameter servers.
      queue: The closures.
      threads: The threads of this process that wait.
      heartbeat_s: The interval between two heartbeats.
      now: The time.
    """
    lines = [_thread(thread, queue, now) for thread in threads]
    lines += _queue(queue, workers)
    awaited: set[int] = set()
    tasks: list[Task] = []
    for worker in workers:
        lines += _worker(worker, heartbeat_s, now)
        if worker.assigned:
            tasks.append(Task("worker", worker.index))
            awaited |= {s.index for s in servers if s.index == worker.counters.get("waiting_ps")}
    tasks += [Task("ps", index) for index in sorted(awaited)]
    lines += [_server(server, heartbeat_s, now) for server in servers]
    return WaitReport(tuple(lines), tuple(tasks))


def join_timeout(workers: Sequence[Worker], queue: ClosureQueue, timeout: float, now: float) -> str:
    """Returns the text of the error for a `join` that has timed out."""
    parts = []
    for worker in workers:
        if not worker.assigned:
            continue
        num, since_s = len(worker.assigned), now - worker.since_s
        parts.append(f"{num} assigned to {worker}, the first running for {since_s:.1f} s")
    num_held = sum(len(worker.assigned) for worker in workers)
    num_open = len(queue) + len(queue.in_flight)
    if len(queue):
        parts.append(f"{len(queue)} waiting for a worker")
    if num_open > num_held + len(queue):
        parts.append(f"{num_open - num_held - len(queue)} of lost workers")
    away = [f"{w} is {w.state.value}: {w.reason}" for w in workers if w.state is not _READY]
    if away:
        parts.append("; ".join(away))
    return (
        f"join() timed out after {timeout:g} s with {num_open} "
        f"closure{'' if num_open == 1 else 's'} unfinished ({'; '.join(parts)}). They keep "
        "running: call join() again with more time, or read coordinator.status()."
    )


def fetch_timeout(
    closure: Closure, workers: Sequence[Worker], queue: ClosureQueue, timeout: float, now: float
) -> str:
    """Returns the text of the error for a `fetch` that has timed out."""
    holder = next((w for w in workers if closure.id in w.assigned), None)
    if holder is None:
        where = f"waits for a worker, as do {len(queue)} in all"
        if closure.pin is not None:
            pinned = workers[closure.pin]
            where = f"waits for {pinned}, which is {pinned.state.value}"
    else:
        ahead = list(holder.assigned).index(closure.id)
        since_s = now - holder.since_s
        where = f"has run on {holder} for {since_s:.1f} s"
        if ahead:
            where = f"waits on {holder} behind {ahead}, the first of which has run {since_s:.1f} s"
    return (
        f"fetch() timed out after {timeout:g} s: {_called(closure)} {where}. It keeps running: "
        "call fetch() again with more time, or read coordinator.status()."
    )


def _thread(thread: WaitingThread, queue: ClosureQueue, now: float) -> str:
    if thread.call == "schedule":
        found = f"the queue holds {len(queue)} of at most {queue.limit} closures"
    else:
        found = f"{len(queue)} closures are queued and {len(queue.in_flight)} assigned to workers"
    seconds = now - thread.since_s
    return f"thread {thread.thread} has waited in `{thread.call}` for {seconds:.1f} s: {found}"


def _queue(queue: ClosureQueue, workers: Sequence[Worker]) -> list[str]:
    lines = []
    if queue.is_cancelling:
        kind = type(queue.error).__name__
        lines.append(f"{kind} has cancelled queued closures, and waits for running ones")
    if len(queue):
        lines.append(f"{len(queue)} closures wait for a worker with capacity")
    held = {closure for worker in workers for closure in worker.assigned}
    free = [c for c in queue.in_flight.values() if c.id not in held]
    if free:
        lost = ", ".join(sorted({f"/job:worker/task:{c.worker}" for c in free}))
        lines.append(
            f"{_named(free)} had been assigned to {lost}: each server must confirm that it "
            "rejects further updates from there"
        )
    return lines


def _worker(worker: Worker, heartbeat_s: float, now: float) -> list[str]:
    lines = []
    closures = list(worker.assigned.values())
    if closures:
        first, behind = closures[0], closures[1:]
        again = f", attempt {first.attempt + 1}" if first.attempt > 0 else ""
        after = f"; behind it {_named(behind)}" if behind else ""
        lines.append(
            f"{_called(first)} has run on {worker} for {now - worker.since_s:.1f} s{again}{after}"
        )
    if worker.pinned_closures:
        lines.append(f"{_named(worker.pinned_closures)} can run on {worker} alone")
    return [*lines, f"{worker} {_doing(worker, heartbeat_s, now)}"]


def _doing(worker: Worker, heartbeat_s: float, now: float) -> str:
    if worker.state is not WorkerState.READY:
        return f"is {worker.state.value}: {worker.reason}"
    silent_s = now - worker.last_seen_s
    if silent_s > _NUM_HEARTBEATS * heartbeat_s:
        return f"has not answered heartbeats for {silent_s:.1f} s"
    counters: Mapping[str, int | float] = worker.counters
    if "waiting_ps" in counters:
        server = f"/job:ps/task:{counters['waiting_ps']:.0f}"
        since_s = counters.get("waiting_s", 0) + silent_s
        return f"has waited for a reply of {server} for {since_s:.1f} s"
    if counters.get("running_s"):
        return f"has computed for {counters['running_s'] + silent_s:.1f} s"
    if worker.assigned:
        return "has not started it" if counters.get("open") else "reports that it has no closures"
    if worker.excluded_until_s > now:
        seconds = worker.excluded_until_s - now
        return f"gets no closures for {seconds:.1f} s: it could not reach a server"
    return "is idle"


def _server(server: Server, heartbeat_s: float, now: float) -> str:
    silent_s = now - server.last_seen_s
    requests = f"{server.counters.get('requests', 0):.0f} requests answered"
    if server.loss is not None:
        return f"{server} is lost: {server.loss}"
    if server.away_since_s is not None:
        return f"{server} has been away for {now - server.away_since_s:.1f} s: {server.reason}"
    if silent_s > _NUM_HEARTBEATS * heartbeat_s:
        return f"{server} has not answered heartbeats for {silent_s:.1f} s"
    return f"{server} replied {silent_s:.1f} s ago, {requests}"


def _named(closures: Iterable[Closure]) -> str:
    found = list(closures)
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    word = "closure" if len(found) == 1 else "closures"
    return f"{word} {', '.join(str(c.id) for c in found[:_NUM_NAMED])}{more}"


def _called(closure: Closure) -> str:
    """Returns the id of a closure and the name of its function; never its arguments."""
    if closure.pin is not None:
        return f"closure {closure.id} (fetches a value of this worker)"
    kept = closure.keep_alive
    if not isinstance(kept, tuple) or not kept:
        return f"closure {closure.id}"
    function: object = getattr(kept[0], "func", kept[0])
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"closure {closure.id} ({name})"
