"""Brings the clocks of several machines together.

Processes of one machine share its monotonic clock, so their spans need no change. The clock of
another machine is first set by the time of day of both, which is a few milliseconds wrong at best.
The order of events then bounds the error: a worker starts a closure after the coordinator has sent
it, and the coordinator receives a result after the worker has ended the closure; no process leaves
a call of the whole group before each has entered it. The smallest change that contradicts none of
these is made; within the bounds that are known on both sides, it is the middle.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from replicax.timeline.parts import Part, Span

# Kinds of spans: on the coordinator, on workers and servers, and calls of a whole group.
_SENT, _RECEIVED = "assign", "finish"
_ON_TASKS = ("closure", "apply")
_CALL = "agree"


def aligned(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with the clock of the first one's machine.

    >>> sent = Span("assign", "main", 1_000, 10, closure=1)
    >>> received = Span("finish", "main", 9_000, 10, closure=1)
    >>> ran = Span("closure", "main", 502_000, 6_000, closure=1)
    >>> def part(boot, *spans):
    ...     return Part("t", boot, boot, 1, boot, 0, {}, spans)
    >>> [p.spans[0].start for p in aligned([part("a", sent, received), part("b", ran)])]
    [1000, 2005]
    """
    if not parts:
        return []
    first = parts[0].boot
    machines: dict[str, list[Part]] = collections.defaultdict(list)
    for part in parts:
        machines[part.boot].append(part)
    done = machines.pop(first)
    reference = done[0].offset_ns
    for own in machines.values():
        own = [part.shifted(part.offset_ns - reference) for part in own]
        low, high = _bounds(done, own)
        change = _change(low, high)
        done = [*done, *(part.shifted(change) for part in own)]
    order = {(part.boot, part.pid, part.task): i for i, part in enumerate(parts)}
    return sorted(done, key=lambda part: order[part.boot, part.pid, part.task])


def _change(low: int | None, high: int | None) -> int:
    if low is not None and high is not None:
        return (low + high) // 2
    if low is not None:
        return max(0, low)
    return 0 if high is None else min(0, high)


def _bounds(known: Sequence[Part], others: Sequence[Part]) -> tuple[int | None, int | None]:
    """Returns the least and the greatest change of the others' clock that keeps the order."""
    low: list[int] = []
    high: list[int] = []
    # Coordinators on known machines, tasks on the others; then the other way round.
    earlier, later = _closure_bounds(known, others)
    low += earlier
    high += later
    earlier, later = _closure_bounds(others, known)
    low += [-bound for bound in later]
    high += [-bound for bound in earlier]
    here = {(s.label, s.amount): s for s in _of_kind(known, _CALL)}
    for span in _of_kind(others, _CALL):
        same = here.get((span.label, span.amount))
        if same is not None:
            low.append(same.start - span.end)
            high.append(same.end - span.start)
    return max(low, default=None), min(high, default=None)


def _closure_bounds(
    coordinators: Sequence[Part], tasks: Sequence[Part]
) -> tuple[list[int], list[int]]:
    """Returns bounds of the change of the tasks' clock: least ones, and greatest ones.

    A closure may be sent and run several times: the first run follows the first message, and some
    run has ended before the result was accepted.
    """
    starts, ends = dict[int, int](), dict[int, int]()
    for span in _of_kind(tasks, *_ON_TASKS):
        starts[span.closure] = min(span.start, starts.get(span.closure, span.start))
        ends[span.closure] = min(span.end, ends.get(span.closure, span.end))
    sent = dict[int, int]()
    for span in _of_kind(coordinators, _SENT):
        sent[span.closure] = min(span.start, sent.get(span.closure, span.start))
    received = _of_kind(coordinators, _RECEIVED)
    return (
        [at - starts[closure] for closure, at in sent.items() if closure in starts],
        [span.end - ends[span.closure] for span in received if span.closure in ends],
    )


def _of_kind(parts: Sequence[Part], *kinds: str) -> list[Span]:
    return [span for part in parts for span in part.spans if span.kind in kinds]
