"""Checks the linearizability of a history of reads and writes of one variable.

A history is linearizable if its operations can be put in an order in which every read finds what
the writes before it left, and in which no operation comes before one that had ended when it
began (Herlihy and Wing). The search is that of Wing and Gong, with a memo of the places where it
has been (Lowe): sets of operations done, and the value after them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a client.

    Attributes:
      kind: "read", "assign" or "add".
      value: What a read found, or what was assigned or added.
      begin: When it was asked for.
      end: When its result was known; infinite if it never was. Then it may have happened at
        any later time, or not at all.
    """

    kind: str
    value: float
    begin: float
    end: float = math.inf


def is_linearizable(history: Sequence[Operation], initial: float = 0.0) -> bool:
    """Returns whether the operations fit some order.

    >>> written = Operation("assign", 1.0, begin=0.0, end=1.0)
    >>> is_linearizable([written, Operation("read", 1.0, begin=2.0, end=3.0)])
    True
    >>> is_linearizable([written, Operation("read", 0.0, begin=2.0, end=3.0)])
    False
    """
    # A read without a result is no constraint.
    known = [op for op in history if op.kind != "read" or op.end < math.inf]
    operations = sorted(known, key=lambda op: op.begin)
    required = sum(1 << i for i, op in enumerate(operations) if op.end < math.inf)
    stack: list[tuple[int, float]] = [(0, initial)]
    seen = set(stack)
    while stack:
        done, value = stack.pop()
        if done & required == required:
            return True
        for index in _candidates(operations, done):
            after = _applied(operations[index], value)
            if after is not None and (place := (done | 1 << index, after)) not in seen:
                seen.add(place)
                stack.append(place)
    return False


def _candidates(operations: Sequence[Operation], done: int) -> list[int]:
    """Returns those that may come next: none that is left had ended when they began."""
    found: list[int] = []
    earliest_end = math.inf
    for index, operation in enumerate(operations):
        if done >> index & 1:
            continue
        if operation.begin > earliest_end:
            break
        found.append(index)
        earliest_end = min(earliest_end, operation.end)
    return found


def _applied(operation: Operation, value: float) -> float | None:
    """Returns the value after an operation; None if it cannot have happened here."""
    if operation.kind == "read":
        return value if operation.value == value else None
    return operation.value if operation.kind == "assign" else value + operation.value
