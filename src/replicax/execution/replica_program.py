"""Emitting the program of one replica for all replicas, with rows of remote variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeVar

import jax

from replicax.contexts.overlay import Overlay
from replicax.foundation import jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import capture as capturing
from replicax.tracing.capture import filled
from replicax.tracing.segments import Segment, segments_of
from replicax.values.layout import ReplicaLayout
from replicax.variables import read_cache
from replicax.variables.variable import Variable

_T = TypeVar("_T")


class ReplicaInputs(Protocol):
    """The arguments of a replica program: arrays of each replica, and arrays for all."""

    mapped: list[jax.Array]
    mapped_scalars: list[bool]
    whole: list[jax.Array]

    def in_order(self, mapped: Sequence[_T], whole: Sequence[_T]) -> list[_T]: ...


def run_captured(
    captured: capturing.Capture, layout: ReplicaLayout, outer: Overlay, inputs: ReplicaInputs
) -> list[jax.Array]:
    """Emits the captured replica program; outputs come in the order of its last segment.

    Values of variables with equal copies are equal on all replicas, so they leave the
    program as one, as do changes of remote variables; values of ON_READ variables, row
    numbers and results leave as stored arrays. Changes that have to be made before the program
    continues are recorded in the trace around it.
    """
    if layout.is_mesh and layout.devices[0].platform == "cpu":
        jaxpr = jax_compat.transposes_after_sums(captured.jaxpr)
        captured = dataclasses.replace(captured, jaxpr=jaxpr)
    emitter = _Emitter(captured, layout, outer, inputs)
    *before, last = segments_of(captured)
    for number, segment in enumerate(before):
        emitter.look_up(number, segment)
        num_changed = segment.program.num_changed
        outs = emitter.emit(segment.program, [True] * num_changed)
        for change in filled(segment.program.changes, outs[:num_changed]):
            outer.record(change)
        emitter.pass_on(segment.program, outs[num_changed:])
    emitter.look_up(len(before), last)
    is_equal = [not v.is_per_replica for v in captured.written]
    is_equal += [True] * (len(captured.created) + last.program.num_changed)
    return emitter.emit(last.program, is_equal)


@dataclasses.dataclass(frozen=True)
class _Input:
    """An input of a replica program: an array for all replicas, or the stored one of all."""

    array: jax.Array
    is_mapped: bool = False
    is_scalar: bool = False


def _read(overlay: Overlay, variable: Variable) -> jax.Array:
    return overlay.read(variable)


class _Emitter:
    """Emits the parts of a replica program, and keeps what they need."""

    def __init__(
        self,
        captured: capturing.Capture,
        layout: ReplicaLayout,
        outer: Overlay,
        inputs: ReplicaInputs,
    ) -> None:
        self._captured = captured
        self._layout = layout
        self._outer = outer
        # What is not read or looked up yet is not needed yet.
        self._variables: list[_Input | None] = [None] * len(captured.variables)
        self._rows: list[_Input | None] = [None] * len(captured.row_reads)
        self._constants = [_Input(c) for c in captured.constants]
        mapped = zip(inputs.mapped, inputs.mapped_scalars, strict=True)
        self._arguments: list[_Input] = inputs.in_order(
            [_Input(array, True, is_scalar) for array, is_scalar in mapped],
            [_Input(array) for array in inputs.whole],
        )
        self._passed: list[_Input] = []

    def look_up(self, number: int, segment: Segment) -> None:
        """Reads the variables and rows of a segment; row numbers may depend on rows before."""
        for place, variable in enumerate(self._captured.variables):
            if self._captured.segments[place] == number:
                is_own = variable.is_per_replica
                read = read_cache.read_in_trace if variable.is_remote else _read
                array = read(self._outer, variable)
                self._variables[place] = _Input(array, is_own, is_own and not variable.shape)
        for place, read in enumerate(self._captured.row_reads):
            if read.segment != number:
                continue
            if read.ids is not None and not read.is_traced:
                self._rows[place] = _Input(self._outer.read_rows(read.variable, read.ids))
                continue
            atom = segment.ids[place]
            ids = self.emit(segment.program.sliced_to([atom]), [])[0]
            rows = self._outer.read_rows(read.variable, ids)
            local = (*jax_compat.shape_of(atom.aval).shape, *read.variable.shape[1:])
            array = rows.reshape(self._layout.global_shape(local))
            self._rows[place] = _Input(array, True, not local)

    def pass_on(self, program: capturing.Capture, arrays: list[jax.Array]) -> None:
        """Keeps the values that a segment computed for the next one."""
        values = program.jaxpr.outvars[program.num_changed :]
        self._passed = [
            _Input(array, True, not jax_compat.shape_of(value.aval).shape)
            for array, value in zip(arrays, values, strict=True)
        ]

    def emit(self, program: capturing.Capture, is_equal: list[bool]) -> list[jax.Array]:
        """Emits a program, the first outputs of which may be equal on all replicas."""
        groups = [self._variables, self._constants, self._rows, self._arguments, self._passed]
        given = [one for group in groups for one in group if one is not None]
        mapped = [one for one in given if one.is_mapped]
        whole = [one for one in given if not one.is_mapped]

        def on_replica(*local: jax.Array) -> list[jax.Array]:
            own, shared = iter(local[: len(mapped)]), iter(local[len(mapped) :])
            found: list[list[Tree]] = [
                [None if one is None else next(own if one.is_mapped else shared) for one in group]
                for group in groups
            ]
            variables, constants, rows, arguments, passed = found
            outs = program.run(variables, constants, [*arguments, *passed], rows=rows)
            equal = [out for out, e in zip(outs, is_equal, strict=False) if e]
            others = [out for out, e in zip(outs, is_equal, strict=False) if not e]
            return equal + others + list(outs[len(is_equal) :])

        num_equal = sum(is_equal)
        outs = self._layout.map_replicas(
            on_replica,
            [one.array for one in mapped],
            [one.array for one in whole],
            [one.is_scalar for one in mapped],
            num_equal,
        )
        equal, rest = iter(outs[:num_equal]), iter(outs[num_equal:])
        states = [next(equal) if e else next(rest) for e in is_equal]
        return states + list(rest)
