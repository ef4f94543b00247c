"""Who waits for whom, in words: threads for closures, closures for workers, those for servers.

Pure: what is known of the tasks and the time come in, lines of text go out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.queue import ClosureQueue
from replicax.coordinator.scheduling.servers import Server
from replicax.coordinator.scheduling.workers import Worker, WorkerState
from replicax.coordinator.waiting_threads import Waiter
from replicax.protocol.tasks import Task

# A task that has missed so many beats is called silent.
_NUM_BEATS = 3
# So many closures are named; the others are counted.
_NUM_NAMED = 5
_READY = WorkerState.READY


@dataclasses.dataclass(frozen=True)
class Waits:
    """Who waits for whom.

    Attributes:
      lines: A sentence each.
      tasks: Those whose stacks tell more, the most telling first.
    """

    lines: tuple[str, ...]
    tasks: tuple[Task, ...]


def describe(
    workers: Sequence[Worker],
    servers: Sequence[Server],
    queue: ClosureQueue,
    waiters: Iterable[Waiter],
    beat_s: float,
    now: float,
) -> Waits:
    """Says who waits for whom.

    Args:
      workers: All workers.
      servers: All parameter servers.
      queue: The closures.
      waiters: The threads of this process that wait.
      beat_s: How often tasks give a sign of life.
      now: The time.
    """
    lines = [_waiter(w, queue, now) for w in waiters]
    lines += _queue(queue, workers)
    awaited: set[int] = set()
    tasks: list[Task] = []
    for worker in workers:
        lines += _worker(worker, beat_s, now)
        if worker.window:
            tasks.append(Task("worker", worker.index))
            awaited |= {s.index for s in servers if s.index == worker.figures.get("waiting_ps")}
    tasks += [Task("ps", index) for index in sorted(awaited)]
    lines += [_server(server, beat_s, now) for server in servers]
    return Waits(tuple(lines), tuple(tasks))


def join_timeout(workers: Sequence[Worker], queue: ClosureQueue, timeout: float, now: float) -> str:
    """Says what a `join` that has timed out waited for."""
    parts = []
    for worker in workers:
        if not worker.window:
            continue
        num, since_s = len(worker.window), now - worker.since_s
        parts.append(f"{num} on {worker}, the first of them for {since_s:.1f} s")
    num_held = sum(len(worker.window) for worker in workers)
    num_open = len(queue) + len(queue.in_flight)
    if len(queue):
        parts.append(f"{len(queue)} waiting for a worker")
    if num_open > num_held + len(queue):
        parts.append(f"{num_open - num_held - len(queue)} of workers that were lost")
    away = [f"{w} is {w.state.value}: {w.reason}" for w in workers if w.state is not _READY]
    if away:
        parts.append("; ".join(away))
    return (
        f"join() timed out after {timeout:g} s with {num_open} "
        f"closure{'' if num_open == 1 else 's'} unfinished ({'; '.join(parts)}). They go on: call "
        "join() again, with more time, or look at coordinator.status()."
    )


def fetch_timeout(
    closure: Closure, workers: Sequence[Worker], queue: ClosureQueue, timeout: float, now: float
) -> str:
    """Says what a `fetch` that has timed out waited for."""
    holder = next((w for w in workers if closure.id in w.window), None)
    if holder is None:
        where = f"waits for a worker, as do {len(queue)} in all"
        if closure.pin is not None:
            pinned = workers[closure.pin]
            where = f"waits for {pinned}, which is {pinned.state.value}"
    else:
        ahead = list(holder.window).index(closure.id)
        since_s = now - holder.since_s
        where = f"has run on {holder} for {since_s:.1f} s"
        if ahead:
            where = f"waits on {holder} behind {ahead}, the first of which has run {since_s:.1f} s"
    return (
        f"fetch() timed out after {timeout:g} s: {_called(closure)} {where}. It goes on: call "
        "fetch() again, with more time, or look at coordinator.status()."
    )


def _waiter(waiter: Waiter, queue: ClosureQueue, now: float) -> str:
    if waiter.call == "schedule":
        found = f"the queue holds {len(queue)} closures, and {queue.limit} are allowed"
    else:
        found = f"{len(queue)} closures are queued and {len(queue.in_flight)} given to workers"
    since = f"since {now - waiter.since_s:.1f} s"
    return f"thread {waiter.thread} waits in `{waiter.call}` {since}: {found}"


def _queue(queue: ClosureQueue, workers: Sequence[Worker]) -> list[str]:
    lines = []
    if queue.is_cancelling:
        kind = type(queue.error).__name__
        lines.append(f"{kind} has cancelled what was queued, and waits for what runs to end")
    if len(queue):
        lines.append(f"{len(queue)} closures wait for a worker that has room")
    held = {closure for worker in workers for closure in worker.window}
    free = [c for c in queue.in_flight.values() if c.id not in held]
    if free:
        lost = ", ".join(sorted({f"/job:worker/task:{c.worker}" for c in free}))
        lines.append(
            f"{_named(free)} had been given to {lost}: each server must confirm that it takes "
            "nothing more from there"
        )
    return lines


def _worker(worker: Worker, beat_s: float, now: float) -> list[str]:
    lines = []
    closures = list(worker.window.values())
    if closures:
        first, behind = closures[0], closures[1:]
        again = f", attempt {first.attempt + 1}" if first.attempt > 0 else ""
        after = f"; behind it {_named(behind)}" if behind else ""
        lines.append(
            f"{_called(first)} runs on {worker} since {now - worker.since_s:.1f} s{again}{after}"
        )
    if worker.errands:
        lines.append(f"{_named(worker.errands)} can run on {worker} alone")
    return [*lines, f"{worker} {_doing(worker, beat_s, now)}"]


def _doing(worker: Worker, beat_s: float, now: float) -> str:
    if worker.state is not WorkerState.READY:
        return f"is {worker.state.value}: {worker.reason}"
    silent_s = now - worker.heard_s
    if silent_s > _NUM_BEATS * beat_s:
        return f"does not answer beats since {silent_s:.1f} s"
    figures: Mapping[str, int | float] = worker.figures
    if "waiting_ps" in figures:
        server = f"/job:ps/task:{figures['waiting_ps']:.0f}"
        since_s = figures.get("waiting_s", 0) + silent_s
        return f"waits for an answer of {server} since {since_s:.1f} s"
    if figures.get("running_s"):
        return f"computes since {figures['running_s'] + silent_s:.1f} s"
    if worker.window:
        return "has not started it" if figures.get("open") else "says that it has no closures"
    if worker.benched_s > now:
        return f"gets nothing for {worker.benched_s - now:.1f} s: it could not reach a server"
    return "has nothing to do"


def _server(server: Server, beat_s: float, now: float) -> str:
    silent_s = now - server.heard_s
    requests = f"{server.figures.get('requests', 0):.0f} requests answered"
    if server.loss is not None:
        return f"{server} is lost: {server.loss}"
    if server.away_s is not None:
        return f"{server} is away since {now - server.away_s:.1f} s: {server.reason}"
    if silent_s > _NUM_BEATS * beat_s:
        return f"{server} does not answer beats since {silent_s:.1f} s"
    return f"{server} was heard {silent_s:.1f} s ago, {requests}"


def _named(closures: Iterable[Closure]) -> str:
    found = list(closures)
    more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    word = "closure" if len(found) == 1 else "closures"
    return f"{word} {', '.join(str(c.id) for c in found[:_NUM_NAMED])}{more}"


def _called(closure: Closure) -> str:
    """Returns the number of a closure and the name of its function; never its arguments."""
    if closure.pin is not None:
        return f"closure {closure.id} (a value that this worker keeps)"
    if not isinstance(closure.kept, tuple) or not closure.kept:
        return f"closure {closure.id}"
    function: Any = getattr(closure.kept[0], "func", closure.kept[0])
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"closure {closure.id} ({name})"
