"""Emitting the program of one replica for all replicas, with rows of remote variables."""

from __future__ import annotations

from typing import Any, Protocol

from replicax.tracing import capture as capturing
from replicax.values.layout import ReplicaLayout


class ReplicaInputs(Protocol):
    """The arguments of a replica program: arrays of each replica, and arrays for all."""

    mapped: list[Any]
    mapped_scalars: list[bool]
    whole: list[Any]

    def in_order(self, mapped: Any, whole: Any) -> list[Any]: ...


def run_captured(
    captured: capturing.Capture, layout: ReplicaLayout, outer: Any, inputs: ReplicaInputs
) -> list[Any]:
    """Emits the captured replica program; outputs come in the order of `captured`.

    Values of variables with equal copies are equal on all replicas, so they leave the
    program as one, as do changes of remote variables; values of ON_READ variables, row
    numbers and results leave as stored arrays.
    """
    rows = _Rows()
    while len(rows.arrays) < len(captured.row_reads):
        rows.add(captured, layout, outer, inputs)
    is_equal = [not v.is_per_replica for v in captured.written]
    is_equal += [True] * (len(captured.created) + captured.num_changed)
    return _emit(captured, layout, outer, inputs, rows, is_equal)


class _Rows:
    """Rows of remote variables for a replica program, looked up one after another."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        # Whether each replica has its own, and if so, whether that is a scalar.
        self.is_mapped: list[bool] = []
        self.is_scalar: list[bool] = []

    def add(
        self, captured: capturing.Capture, layout: ReplicaLayout, outer: Any, inputs: ReplicaInputs
    ) -> None:
        """Looks up the next rows; their numbers may depend on the rows before them."""
        read = captured.row_reads[len(self.arrays)]
        row_shape = read.variable.shape[1:]
        if not read.is_traced:
            self.arrays.append(outer.read_rows(read.variable, read.ids))
            self.is_mapped.append(False)
            self.is_scalar.append(False)
            return
        place = sum(r.is_traced for r in captured.row_reads[: len(self.arrays)])
        output = captured.start_of_ids + place
        ids = _emit(captured.sliced([output]), layout, outer, inputs, self, [])[0]
        rows = outer.read_rows(read.variable, ids)
        local = (*captured.jaxpr.outvars[output].aval.shape, *row_shape)
        self.arrays.append(rows.reshape(layout.global_shape(local)))
        self.is_mapped.append(True)
        self.is_scalar.append(not local)


def _emit(
    captured: capturing.Capture,
    layout: ReplicaLayout,
    outer: Any,
    inputs: ReplicaInputs,
    rows: _Rows,
    is_equal: list[bool],
) -> list[Any]:
    """Emits a program, the first outputs of which may be equal on all replicas."""
    own = [v for v in captured.variables if v.is_per_replica]
    shared = [v for v in captured.variables if not v.is_per_replica]
    own_rows = [a for a, m in zip(rows.arrays, rows.is_mapped, strict=True) if m]
    place = {v: i for i, v in enumerate([*own, *shared])}
    num_mapped = len(own) + len(own_rows) + len(inputs.mapped)
    counts = (len(shared), len(captured.constants), len(rows.arrays) - len(own_rows))
    num_rows = 1 + max((i for k, i in captured.order if k is capturing.Kind.ROWS), default=-1)

    def on_replica(*local: Any) -> list[Any]:
        mapped, rest = list(local[:num_mapped]), list(local[num_mapped:])
        variables = mapped[: len(own)] + rest[: counts[0]]
        constants, rest = rest[counts[0] :][: counts[1]], rest[counts[0] + counts[1] :]
        mine, whole = iter(mapped[len(own) :][: len(own_rows)]), iter(rest[: counts[2]])
        found = [next(mine) if is_mapped else next(whole) for is_mapped in rows.is_mapped]
        # What is not looked up yet is not needed yet.
        found += [None] * (num_rows - len(found))
        args = inputs.in_order(mapped[len(own) + len(own_rows) :], rest[counts[2] :])
        values = [variables[place[v]] for v in captured.variables]
        outs = captured.run(values, constants, args, rows=found)
        equal = [out for out, e in zip(outs, is_equal, strict=False) if e]
        others = [out for out, e in zip(outs, is_equal, strict=False) if not e]
        return equal + others + list(outs[len(is_equal) :])

    mapped = [outer.read(v) for v in own] + own_rows + inputs.mapped
    scalars = [not v.shape for v in own]
    scalars += [s for s, m in zip(rows.is_scalar, rows.is_mapped, strict=True) if m]
    scalars += inputs.mapped_scalars
    whole = [outer.read(v) for v in shared] + captured.constants
    whole += [a for a, m in zip(rows.arrays, rows.is_mapped, strict=True) if not m] + inputs.whole
    num_equal = sum(is_equal)
    outs = layout.map_replicas(on_replica, mapped, whole, scalars, num_equal)
    equal, rest = iter(outs[:num_equal]), iter(outs[num_equal:])
    states = [next(equal) if e else next(rest) for e in is_equal]
    return states + list(rest)
