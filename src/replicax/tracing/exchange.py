"""Reads of remote variables before a compiled program runs, and pushes of its changes.

A call pulls all values and rows in one request, runs the program on them, and pushes the changes
that the program computes. Row numbers that the program computes from its arguments are computed
first, by the part of the program that they depend on. A program that reads state that it has
changed runs segment by segment: pull, run, push, pull, run, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors, spans
from replicax.tracing.capture import Capture, Kind, filled
from replicax.tracing.segments import Segment, segments_of
from replicax.variables import read_cache
from replicax.variables.remote import Read, RemoteVariable, RemoteVariableBase, VariableClient
from replicax.variables.sharded import ShardedVariable

# Compiles a part of a program to a function of local values, remote values, rows, arrays, and
# the values that the part before it hands on.
Compiler: TypeAlias = Callable[[Capture], Callable[..., list[jax.Array]]]
# The values of remote variables, the rows of all lookups, and values handed on by segments.
# None for what is not fetched yet.
Pulled: TypeAlias = tuple[
    Sequence[ArrayLike | None], Sequence[ArrayLike | None], Sequence[ArrayLike]
]
# The inputs of a part, in the order of `Compiler`.
_Inputs: TypeAlias = tuple[
    list[jax.Array],
    list[ArrayLike | None],
    list[ArrayLike | None],
    list[ArrayLike],
    list[jax.Array],
]


class RemoteExchange:
    """The remote side of one compiled program.

    Attributes:
      variables: The variables that the program fetches as a whole, once for each fetch.
      program: The last segment: the whole program, unless it has stops.
    """

    def __init__(self, captured: Capture, compiled: Compiler) -> None:
        self.variables = [v for v in captured.variables if isinstance(v, RemoteVariableBase)]
        self._client = _common_client(captured, self.variables)
        self._row_reads = captured.row_reads
        self._segments = [
            _Segment(i, segment, captured, compiled)
            for i, segment in enumerate(segments_of(captured))
        ]
        self.program = self._segments[-1].program

    def pull(self, local: list[jax.Array], arrays: list[ArrayLike]) -> Pulled:
        """Fetches the inputs of the program, and runs it up to its last stop.

        Args:
          local: The values of all other variables of the program.
          arrays: Its arguments, and the arrays of data iterators.
        """
        values: list[ArrayLike | None] = [None] * len(self.variables)
        rows: list[ArrayLike | None] = [None] * len(self._row_reads)
        handed: list[jax.Array] = []
        for segment in self._segments:
            inputs = (local, values, rows, arrays, handed)
            segment.pull(self._client, inputs)
            if segment is not self._segments[-1]:
                changed, handed = segment.run(*inputs)
                self._client.push(filled(segment.program.changes, changed))
        return values, rows, handed

    def rehearsed(self, local: list[jax.Array], arrays: list[ArrayLike]) -> Pulled:
        """Runs `pull` on zeros instead of fetched values, and pushes nothing."""
        values = [np.zeros(v.shape, np.dtype(v.dtype)) for v in self.variables]
        rows = [np.zeros(r.shape, np.dtype(r.variable.dtype)) for r in self._row_reads]
        handed: list[jax.Array] = []
        for segment in self._segments[:-1]:
            _, handed = segment.run(local, values, rows, arrays, handed)
        return values, rows, handed

    def push(self, arrays: Sequence[jax.Array]) -> None:
        """Pushes the changes of the last segment."""
        if self.program.changes:
            began = spans.now()
            self._client.push(filled(self.program.changes, arrays))
            if began:
                spans.record("push", began, amount=len(self.program.changes))


class _Segment:
    """A segment of the program with its reads."""

    def __init__(
        self, number: int, segment: Segment, captured: Capture, compiled: Compiler
    ) -> None:
        self.program = segment.program
        self._num_handed_on = segment.num_handed_on
        remote = [i for i, v in enumerate(captured.variables) if v.is_remote]
        own = [i for i in remote if captured.segments[i] == number]
        # Their indices among the fetches of the whole program.
        self._indices = [remote.index(i) for i in own]
        self._reads = [
            Read(v) for i in own if isinstance(v := captured.variables[i], RemoteVariableBase)
        ]
        self._stages = _stages(number, segment, captured, compiled)
        is_last = number == len(captured.stops)
        self._run = None if is_last else compiled(segment.program)

    def pull(self, client: VariableClient, inputs: _Inputs) -> None:
        """Puts the inputs of the segment into the lists of values and of rows."""
        _, values, rows, *_ = inputs
        for stage in self._stages:
            ids = stage.ids(*inputs)
            dense = self._reads if stage.includes_values else []
            reads = [*dense, *(Read(v, ids[i]) for i, v in stage.lookups)]
            is_cached = read_cache.open_scope.get() is not None
            began = spans.now()
            found = read_cache.pull(client, reads) if is_cached else client.pull(reads)
            if began:
                spans.record("pull", began, amount=len(reads))
            if stage.includes_values:
                for index, value in zip(self._indices, found, strict=False):
                    values[index] = value
            for (i, _), value in zip(stage.lookups, found[len(dense) :], strict=True):
                rows[i] = value

    def run(self, *inputs: Sequence[ArrayLike | None]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the arrays of the changes, and the values that are handed on."""
        assert self._run is not None
        outs = self._run(*inputs)
        start = len(outs) - self._num_handed_on
        return outs[:start], outs[start:]


class _Stage:
    """Lookups whose row numbers are available at the same time."""

    def __init__(
        self, indices: list[int], segment: Segment, captured: Capture, compiled: Compiler
    ) -> None:
        self.lookups = [(i, captured.row_reads[i].variable) for i in indices]
        self.includes_values = False
        self._known = {
            # A copy: the caller may change its array.
            i: np.array(captured.row_reads[i].ids)
            for i in indices
            if not captured.row_reads[i].is_traced
        }
        self._traced = [i for i in indices if i not in self._known]
        if self._traced:
            self._run = compiled(segment.program.sliced_to([segment.ids[i] for i in self._traced]))

    def ids(self, *inputs: Sequence[ArrayLike | None]) -> dict[int, np.ndarray]:
        """Returns the row numbers of each lookup."""
        if not self._traced:
            return self._known
        found = self._run(*inputs)
        return self._known | dict(zip(self._traced, map(np.asarray, found), strict=True))


def _stages(number: int, segment: Segment, captured: Capture, compiled: Compiler) -> list[_Stage]:
    """Orders the lookups: some row numbers depend on rows, or on variables, fetched before."""
    waiting = {
        i: segment.program.inputs_of([segment.ids[i]]) if read.is_traced else set()
        for i, read in enumerate(captured.row_reads)
        if read.segment == number
    }
    stages: list[_Stage] = []
    own = {
        i
        for i, v in enumerate(captured.variables)
        if v.is_remote and captured.segments[i] == number
    }
    needs_values = any(
        kind is Kind.VARIABLE and index in own
        for inputs in waiting.values()
        for kind, index in inputs
    )
    if needs_values or (own and not waiting):
        stages.append(_Stage([], segment, captured, compiled))
    while waiting:
        ready = [
            i
            for i, inputs in waiting.items()
            if not any(kind is Kind.ROWS and index in waiting for kind, index in inputs)
        ]
        stages.append(_Stage(ready, segment, captured, compiled))
        for i in ready:
            del waiting[i]
    if stages:
        stages[0].includes_values = True
    return stages


def _common_client(captured: Capture, variables: Sequence[RemoteVariableBase]) -> VariableClient:
    looked_up = [read.variable for read in captured.row_reads]
    targets = [template.target for template in captured.changes]
    found: dict[int, tuple[VariableClient, str]] = {}
    for target in [*variables, *looked_up, *targets]:
        part: Any = target.variables[0] if isinstance(target, ShardedVariable) else target
        client = part.client
        found.setdefault(id(client), (client, target.name))
    if len(found) > 1:
        names = " and ".join(repr(name) for _, name in found.values())
        raise errors.InvalidArgumentError(
            "A compiled function can use the variables of one cluster",
            f"{names} belong to different clusters",
            "Split the function.",
        )
    return next(iter(found.values()))[0]


def is_needed(captured: Capture) -> bool:
    """Returns whether a program reads or changes remote state."""
    is_reading = any(isinstance(v, RemoteVariable) for v in captured.variables)
    return is_reading or bool(captured.row_reads) or bool(captured.changes)
