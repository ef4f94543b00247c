"""Questions to servers that are under way, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicax.protocol import messages
from replicax.ps.client.rows import RowPlan
from replicax.variables.remote import Read, RemoteVariable


class Post:
    """A question to one server, and the closures whose changes it carries."""

    def __init__(self, closures: list[int]) -> None:
        self.number = 0
        self.closures = closures
        self.answer: tuple[messages.Exchanged, list[memoryview]] | None = None


class Question:
    """What was asked of several servers at once."""

    def __init__(self, asked: list[tuple[Read, RowPlan | None]], closure: int | None) -> None:
        self.asked = asked
        # The closure that was running when it was asked.
        self.closure = closure
        whole = [part for read, plan in asked if plan is None for part in parts_of(read.variable)]
        self.num_bytes = sum(part.num_bytes for part in whole)
        self.posts: dict[int, Post] = {}
        self.answers: dict[int, Answers] = {}

    def is_for(self, reads: Sequence[Read]) -> bool:
        """Tells whether the same was asked."""
        return len(reads) == len(self.asked) and all(
            old.variable is new.variable and old.ids is new.ids
            for (old, _), new in zip(self.asked, reads, strict=True)
        )


class Answers:
    """What one server answered to the reads of a question, in order."""

    def __init__(self, results: list[messages.ReadResult], buffers: list[memoryview]) -> None:
        self._results = iter(results)
        self._buffers = iter(buffers)

    def next(self) -> tuple[messages.ReadResult, Any]:
        """Returns the next result, and its buffer if it has one."""
        result = next(self._results)
        return result, (b"" if result.is_known else next(self._buffers))


def parts_of(variable: Any) -> list[RemoteVariable]:
    """Returns the parts of a remote or sharded variable."""
    return list(variable.components)  # type: ignore[arg-type]
