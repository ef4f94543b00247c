"""What a compiled program reads from remote variables, and tells them afterwards.

A call pulls values and rows first, all in one question, runs the program on them, and then
sends off what the program wants to change. Row numbers that the program computes from its
arguments are computed first, by the part of the program that they depend on. A program that reads
what it has changed is run segment by segment: pull, run, push, pull, run, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.tracing.capture import Capture, Kind, filled
from replicax.tracing.segments import Segment, segments_of
from replicax.variables import read_cache
from replicax.variables.remote import Read, RemoteVariable, VariableClient
from replicax.variables.sharded import ShardedVariable

# Compiles a part of a program to a function of local values, remote values, rows, arrays, and
# what the part before it hands on.
Compiler = Callable[[Capture], Callable[..., list[Any]]]


class RemoteExchange:
    """The remote side of one compiled program.

    Attributes:
      variables: What the program fetches as a whole. A variable that it fetches again after a
        change is here again.
      program: What is left to run when everything was fetched: all of the program, unless it
        stops on its way.
    """

    def __init__(self, captured: Capture, compiled: Compiler) -> None:
        self.variables = [v for v in captured.variables if v.is_remote]
        self._client = _common_client(captured, self.variables)
        self._row_reads = captured.row_reads
        self._segments = [
            _Segment(i, segment, captured, compiled)
            for i, segment in enumerate(segments_of(captured))
        ]
        self.program = self._segments[-1].program

    def pull(self, local: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Fetches everything that the program needs, and runs it up to its last stop.

        Args:
          local: The values of all other variables of the program.
          arrays: Its arguments, and what was fed.

        Returns:
          The values of `variables`, the rows of all lookups, and what was computed on the way.
        """
        values: list[Any] = [None] * len(self.variables)
        rows: list[Any] = [None] * len(self._row_reads)
        handed: list[Any] = []
        for segment in self._segments:
            inputs = (local, values, rows, arrays, handed)
            segment.pull(self._client, inputs)
            if segment is not self._segments[-1]:
                changed, handed = segment.run(*inputs)
                self._client.push(filled(segment.program.changes, changed))
        return values, rows, handed

    def rehearsed(
        self, local: list[Any], arrays: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Does as `pull` with zeros in the place of what is fetched, and sends nothing."""
        values = [np.zeros(v.shape, np.dtype(v.dtype)) for v in self.variables]
        rows = [np.zeros(r.shape, np.dtype(r.variable.dtype)) for r in self._row_reads]
        handed: list[Any] = []
        for segment in self._segments[:-1]:
            _, handed = segment.run(local, values, rows, arrays, handed)
        return values, rows, handed

    def push(self, arrays: Sequence[Any]) -> None:
        """Sends off what the program wants to change at its end."""
        if self.program.changes:
            self._client.push(filled(self.program.changes, arrays))


class _Segment:
    """What is fetched for a segment of the program, and how it is run."""

    def __init__(
        self, number: int, segment: Segment, captured: Capture, compiled: Compiler
    ) -> None:
        self.program = segment.program
        self._num_handed_on = segment.num_handed_on
        remote = [i for i, v in enumerate(captured.variables) if v.is_remote]
        own = [i for i in remote if captured.segments[i] == number]
        # Their places among what the whole program fetches.
        self._places = [remote.index(i) for i in own]
        self._reads = [Read(captured.variables[i]) for i in own]
        self._stages = _stages(number, segment, captured, compiled)
        is_last = number == len(captured.stops)
        self._run = None if is_last else compiled(segment.program)

    def pull(self, client: VariableClient, inputs: tuple[list[Any], ...]) -> None:
        """Puts what the segment needs into the lists of values and of rows."""
        _, values, rows, *_ = inputs
        for stage in self._stages:
            ids = stage.ids(*inputs)
            dense = self._reads if stage.includes_values else []
            found = read_cache.pull(client, [*dense, *(Read(v, ids[i]) for i, v in stage.lookups)])
            if stage.includes_values:
                for place, value in zip(self._places, found, strict=False):
                    values[place] = value
            for (i, _), value in zip(stage.lookups, found[len(dense) :], strict=True):
                rows[i] = value

    def run(self, *inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of the changes, and what is handed on."""
        assert self._run is not None
        outs = self._run(*inputs)
        start = len(outs) - self._num_handed_on
        return outs[:start], outs[start:]


class _Stage:
    """Lookups whose row numbers can be known at the same time."""

    def __init__(
        self, places: list[int], segment: Segment, captured: Capture, compiled: Compiler
    ) -> None:
        self.lookups = [(i, captured.row_reads[i].variable) for i in places]
        self.includes_values = False
        self._known = {
            # A copy: the caller may change its array.
            i: np.array(captured.row_reads[i].ids)
            for i in places
            if not captured.row_reads[i].is_traced
        }
        self._traced = [i for i in places if i not in self._known]
        if self._traced:
            self._run = compiled(segment.program.sliced_to([segment.ids[i] for i in self._traced]))

    def ids(self, *inputs: list[Any]) -> dict[int, Any]:
        """Returns the row numbers of each lookup."""
        if not self._traced:
            return self._known
        found = self._run(*inputs)
        return self._known | dict(zip(self._traced, map(np.asarray, found), strict=True))


def _stages(number: int, segment: Segment, captured: Capture, compiled: Compiler) -> list[_Stage]:
    """Orders the lookups: some row numbers depend on rows, or on variables, fetched before."""
    waiting = {
        i: segment.program.inputs_for([segment.ids[i]]) if read.is_traced else set()
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
        kind is Kind.VARIABLE and place in own
        for inputs in waiting.values()
        for kind, place in inputs
    )
    if needs_values or (own and not waiting):
        stages.append(_Stage([], segment, captured, compiled))
    while waiting:
        ready = [
            i
            for i, inputs in waiting.items()
            if not any(kind is Kind.ROWS and place in waiting for kind, place in inputs)
        ]
        stages.append(_Stage(ready, segment, captured, compiled))
        for i in ready:
            del waiting[i]
    if stages:
        stages[0].includes_values = True
    return stages


def _common_client(captured: Capture, variables: list[Any]) -> VariableClient:
    looked_up = [read.variable for read in captured.row_reads]
    targets = [form.target for form in captured.changes]
    found: dict[int, tuple[VariableClient, str]] = {}
    for target in [*variables, *looked_up, *targets]:
        part: Any = target.variables[0] if isinstance(target, ShardedVariable) else target
        client = part.client
        found.setdefault(id(client), (client, target.name))
    if len(found) > 1:
        names = " and ".join(repr(name) for _, name in found.values())
        raise errors.InvalidArgumentError(
            "A compiled function can use the variables of one cluster",
            f"{names} live on different ones",
            "Split the function.",
        )
    return next(iter(found.values()))[0]


def is_needed(captured: Capture) -> bool:
    """Tells whether a program has a remote side."""
    is_reading = any(isinstance(v, RemoteVariable) for v in captured.variables)
    return is_reading or bool(captured.row_reads) or bool(captured.changes)
