"""What a compiled program reads from remote variables, and tells them afterwards.

A call pulls values and rows first, all in one question, runs the program on them, and then
sends off what the program wants to change. Row numbers that the program computes from its
arguments are computed first, by the part of the program that they depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tracing.capture import Capture, Kind
from replicax.variables import read_cache
from replicax.variables.remote import Home, Read, RemoteVariable
from replicax.variables.sharded import ShardedVariable

# Runs a part of a program: (part, local values, remote values, rows, arrays) -> outputs.
Runner = Callable[[Capture, list[Any], list[Any], list[Any], list[Any]], list[Any]]


class RemoteExchange:
    """The remote side of one compiled program."""

    def __init__(self, captured: Capture, run: Runner) -> None:
        self.variables = [v for v in captured.variables if v.is_remote]
        self._forms = captured.changes
        self._home = _common_home(captured, self.variables)
        self._reads = [Read(v) for v in self.variables]
        self._row_reads = captured.row_reads
        self._stages = _stages(captured, run)

    def pull(self, local: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the values of `variables`, and the rows of all lookups.

        Args:
          local: The values of all other variables of the program.
          arrays: Its arguments, and what was fed.
        """
        if not self._stages:
            if not self._reads:
                return [], []
            return read_cache.pull(self._home, self._reads), []
        values: list[Any] = []
        rows: list[Any] = [None] * len(self._row_reads)
        for stage in self._stages:
            ids = stage.ids(local, values, rows, arrays)
            reads = [Read(self._row_reads[i].variable, ids[i]) for i in stage.places]
            dense = self._reads if stage.includes_values else []
            found = read_cache.pull(self._home, [*dense, *reads])
            if stage.includes_values:
                values = found[: len(dense)]
            for i, value in zip(stage.places, found[len(dense) :], strict=True):
                rows[i] = value
        return values, rows

    def placeholders(self) -> tuple[list[Any], list[Any]]:
        """Returns zeros in the place of what `pull` returns."""
        values = [np.zeros(v.shape, np.dtype(v.dtype)) for v in self.variables]
        rows = [np.zeros(r.shape, np.dtype(r.variable.dtype)) for r in self._row_reads]
        return values, rows

    def push(self, arrays: Sequence[Any]) -> None:
        """Sends off what the program wants to change."""
        if not self._forms:
            return
        changes = []
        start = 0
        for form in self._forms:
            end = start + form.treedef.num_leaves
            changes.append(form.filled(list(arrays[start:end])))
            start = end
        self._home.push(changes)


class _Stage:
    """Lookups whose row numbers can be known at the same time."""

    def __init__(self, places: list[int], captured: Capture, run: Runner | None) -> None:
        self.places = places
        self.includes_values = False
        self._known = {
            # A copy: the caller may change its array.
            i: np.array(captured.row_reads[i].ids)
            for i in places
            if not captured.row_reads[i].is_traced
        }
        traced = [i for i in places if i not in self._known]
        outputs = [_output_of(captured, i) for i in traced]
        self._traced = traced
        if traced and run is not None:
            part = captured.sliced(outputs)
            self._run = jax.jit(functools.partial(run, part))

    def ids(self, *inputs: list[Any]) -> dict[int, Any]:
        """Returns the row numbers of each lookup."""
        if not self._traced:
            return self._known
        found = self._run(*inputs)
        return self._known | dict(zip(self._traced, map(np.asarray, found), strict=True))


def _stages(captured: Capture, run: Runner) -> list[_Stage]:
    """Orders the lookups: some row numbers depend on rows, or on variables, fetched before."""
    waiting = {
        i: captured.inputs_of([_output_of(captured, i)]) if read.is_traced else set()
        for i, read in enumerate(captured.row_reads)
    }
    stages: list[_Stage] = []
    remote = {i for i, v in enumerate(captured.variables) if v.is_remote}
    needs_values = any(
        kind is Kind.VARIABLE and place in remote
        for inputs in waiting.values()
        for kind, place in inputs
    )
    if needs_values:
        stages.append(_Stage([], captured, None))
    while waiting:
        ready = [
            i
            for i, inputs in waiting.items()
            if not any(kind is Kind.ROWS and place in waiting for kind, place in inputs)
        ]
        stages.append(_Stage(ready, captured, run))
        for i in ready:
            del waiting[i]
    if stages:
        stages[0].includes_values = True
    return stages


def _output_of(captured: Capture, read: int) -> int:
    before = sum(r.is_traced for r in captured.row_reads[:read])
    return captured.start_of_ids + before


def _common_home(captured: Capture, variables: list[Any]) -> Home:
    looked_up = [read.variable for read in captured.row_reads]
    targets = [form.target for form in captured.changes]
    found: dict[int, tuple[Home, str]] = {}
    for target in [*variables, *looked_up, *targets]:
        part: Any = target.variables[0] if isinstance(target, ShardedVariable) else target
        home = part.home
        found.setdefault(id(home), (home, target.name))
    if len(found) > 1:
        names = " and ".join(repr(name) for _, name in found.values())
        raise errors.InvalidArgumentError(
            errors.message(
                "A compiled function can use the variables of one cluster",
                f"{names} live on different ones",
                "Split the function.",
            )
        )
    return next(iter(found.values()))[0]


def is_needed(captured: Capture) -> bool:
    """Tells whether a program has a remote side."""
    is_reading = any(isinstance(v, RemoteVariable) for v in captured.variables)
    return is_reading or bool(captured.row_reads) or bool(captured.changes)
