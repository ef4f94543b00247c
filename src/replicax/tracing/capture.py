"""Capture: running a stateful function once, on tracers, and getting a pure program."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.contexts import frames
from replicax.contexts.overlay import Change, Overlay, View
from replicax.foundation import jax_compat
from replicax.values.layout import AXIS
from replicax.variables import row_numbers


@dataclasses.dataclass
class RowRead:
    """A lookup in a remote variable: rows that come in from outside, by ids that go out.

    Attributes:
      variable: The variable.
      ids: The row numbers: known, or traced (and None after the trace).
      is_traced: Whether the program computes the row numbers.
      shape: The shape of the rows.
      segment: How often changes are sent off before the rows are fetched.
    """

    variable: Any
    ids: Any
    is_traced: bool
    shape: tuple[int, ...]
    segment: int = 0


@dataclasses.dataclass(frozen=True)
class ChangeForm:
    """A change of something remote, without its arrays: those are outputs of the program."""

    target: Any
    kind: str
    treedef: Any

    def filled(self, arrays: list[Any]) -> Change:
        """Returns the change around its arrays."""
        return Change(self.target, self.kind, *jax.tree.unflatten(self.treedef, arrays))


def filled(forms: Sequence[ChangeForm], arrays: Sequence[Any]) -> list[Change]:
    """Returns changes around their arrays."""
    changes = []
    start = 0
    for form in forms:
        end = start + form.treedef.num_leaves
        changes.append(form.filled(list(arrays[start:end])))
        start = end
    return changes


class CapturingOverlay(Overlay):
    """An overlay that brings variables into its trace as constants that stand for them.

    The first read of a variable emits a copy of a stand-in array. JAX lists the stand-in
    among the constants of the finished program, and its identity says which variable's
    value has to take its place.
    """

    def __init__(self, parent: Overlay | None, view: View) -> None:
        super().__init__(parent, view)
        # Keeps stand-ins alive while their ids are in use.
        self.stand_ins: dict[int, tuple[Any, Any]] = {}
        # Variables created inside the trace, with their traced initial values.
        self.created: dict[Any, Any] = {}
        # Place of each array that a data iterator feeds, by the id of its stand-in.
        self.fed_places: dict[int, int] = {}
        # Lookups in remote variables, and the place of each by the id of its stand-in.
        self.row_reads: list[RowRead] = []
        self._row_places: dict[int, tuple[int, Any]] = {}
        # Where the program stops to have changes made: how many come before each stop.
        self.stops: list[int] = []
        # The number of stops before each read of a variable, by the id of its stand-in.
        self.segments: dict[int, int] = {}

    def first_read(self, variable: Any) -> Any:
        with jax_compat.eagerly():
            stand_in = self._stand_in(variable)
        self.stand_ins[id(stand_in)] = (variable, stand_in)
        self.segments[id(stand_in)] = len(self.stops)
        return jnp.copy(stand_in)

    def send_changes(self, variable: Any) -> None:
        del variable
        self.num_sent = len(self.changes)
        self.stops.append(self.num_sent)

    def read_rows(self, variable: Any, ids: Any) -> Any:
        mine = (variable, *variable.components)
        if not self.is_current_trace() or any(v in self.values for v in mine):
            return row_numbers.take(variable.read(frames.current()), ids)
        if self.unsent(*mine):
            # The rows as they are afterwards: to follow the change here would need all of them.
            self.send_changes(variable)
        is_traced = jax_compat.is_traced(ids)
        with jax_compat.eagerly():
            shape = (*jnp.shape(ids), *variable.shape[1:])
            stand_in = jnp.zeros(shape, variable.dtype)
        self._row_places[id(stand_in)] = (len(self.row_reads), stand_in)
        self.row_reads.append(RowRead(variable, ids, is_traced, shape, len(self.stops)))
        return jnp.copy(stand_in)

    def row_place(self, constant: Any) -> int | None:
        """Returns which lookup an array stands for, if it does."""
        found = self._row_places.get(id(constant))
        return None if found is None else found[0]

    def _stand_in(self, variable: Any) -> jax.Array:
        stored = variable.stored
        if self.view is View.LOCAL and variable.layout is not None:
            if variable.is_per_replica or stored is None:
                return jnp.zeros(variable.shape, variable.dtype)
            stored = variable.layout.copy_for(stored, 0)
        if stored is None:
            shape = variable.shape
            if variable.is_per_replica and variable.layout is not None:
                shape = variable.layout.global_shape(shape)
            return jnp.zeros(shape, variable.dtype)
        # A new array object over the same buffers: its identity is ours alone.
        parts = [shard.data for shard in stored.addressable_shards]
        return jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, parts)

    def adopt(self, variable: Any, initial_value: Any) -> None:
        self.created[variable] = initial_value

    def close(self) -> None:
        """Lets go of the trace's values, which must not outlive it."""
        self.values = {}
        self.kept_reads = {}
        self.created = dict.fromkeys(self.created)
        self.changes = []
        for read in self.row_reads:
            read.ids = None if read.is_traced else read.ids
        self.trace = None


class Kind(enum.Enum):
    """What an input of a captured program stands for."""

    VARIABLE = "variable"
    CONSTANT = "constant"
    FED = "fed"
    ROWS = "rows"
    ARGUMENT = "argument"


@dataclasses.dataclass
class Capture:
    """A pure program, and what its inputs and outputs stand for.

    The program takes the values of `variables`, then `constants`, then what data iterators
    feed, then the rows of `row_reads`, then the arguments. It returns the new values of
    `written`, the initial values of `created`, the arrays of `changes`, the row numbers of
    those `row_reads` whose row numbers it computes, then the results.
    """

    jaxpr: Any
    variables: list[Any]
    constants: list[Any]
    written: list[Any]
    created: list[Any]
    changes: list[ChangeForm]
    row_reads: list[RowRead]
    # For each constant of the jaxpr, what it stands for, and its place among those.
    order: list[tuple[Kind, int]]
    # How many changes have to be made before the program goes on, for each stop, and the number
    # of stops before each of `variables` is fetched. A remote variable may be fetched repeatedly.
    stops: list[int] = dataclasses.field(default_factory=list)
    segments: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_changed(self) -> int:
        """How many arrays the changes have together."""
        return sum(form.treedef.num_leaves for form in self.changes)

    @property
    def last_changes(self) -> list[ChangeForm]:
        """The changes that are left when the program has stopped for the last time."""
        return self.changes[self.stops[-1] :] if self.stops else self.changes

    @property
    def num_ids(self) -> int:
        """How many outputs are row numbers."""
        return sum(read.is_traced for read in self.row_reads)

    @property
    def num_states(self) -> int:
        """How many outputs are not results."""
        return len(self.written) + len(self.created) + self.num_changed + self.num_ids

    @property
    def start_of_ids(self) -> int:
        """The place of the first row numbers among the outputs."""
        return self.num_states - self.num_ids

    @property
    def is_fixed(self) -> bool:
        """Whether the program does nothing but tell others the same each time."""
        if self.stops:
            return False
        is_pure = not self.jaxpr.effects and self.num_changed == len(self.jaxpr.outvars)
        used = self.inputs_of(range(len(self.jaxpr.outvars)))
        return is_pure and not self.row_reads and {kind for kind, _ in used} <= {Kind.CONSTANT}

    def needs(self, created: int) -> set[Any]:
        """Returns the variables that the initial value of a created variable depends on."""
        used = self.inputs_of([len(self.written) + created])
        return {self.variables[place] for kind, place in used if kind is Kind.VARIABLE}

    def inputs_of(self, outputs: Sequence[int]) -> set[tuple[Kind, int]]:
        """Returns what some outputs depend on."""
        return self.inputs_for([self.jaxpr.outvars[i] for i in outputs])

    def inputs_for(self, atoms: Sequence[Any]) -> set[tuple[Kind, int]]:
        """Returns what some values of the program depend on."""
        wanted = jax_compat.inputs_of(self.jaxpr, *atoms)
        named = zip(self.jaxpr.constvars, self.order, strict=True)
        found = {place for var, place in named if var in wanted}
        return found | {
            (Kind.ARGUMENT, i) for i, var in enumerate(self.jaxpr.invars) if var in wanted
        }

    def sliced(self, outputs: Sequence[int]) -> Capture:
        """Returns the part of the program that computes some of its outputs, as results."""
        return self.sliced_to([self.jaxpr.outvars[i] for i in outputs])

    def sliced_to(self, wanted: list[Any]) -> Capture:
        """Returns the part of the program that computes some of its values, as results."""
        _, equations = jax_compat.needed_by(self.jaxpr, wanted)
        jaxpr = jax_compat.part_of_jaxpr(self.jaxpr, equations, wanted)
        return dataclasses.replace(
            self, jaxpr=jaxpr, written=[], created=[], changes=[], row_reads=[]
        )

    def run(
        self,
        variables: Sequence[Any],
        constants: Sequence[Any],
        args: Sequence[Any],
        fed: Sequence[Any] = (),
        rows: Sequence[Any] = (),
    ) -> Any:
        """Runs the program in the current trace."""
        given = {
            Kind.VARIABLE: variables,
            Kind.CONSTANT: constants,
            Kind.FED: fed,
            Kind.ROWS: rows,
        }
        return jax_compat.eval_jaxpr(self.jaxpr, [given[k][i] for k, i in self.order], *args)


def capture(
    body: Callable[..., list[Any]],
    args: Sequence[Any],
    overlay: CapturingOverlay,
    num_replicas: int | None = None,
) -> Capture:
    """Traces `body` once.

    Args:
      body: Takes arrays and returns a flat list of arrays; runs with `overlay` in force.
      args: Arrays or shapes of the arguments.
      overlay: Collects what is read, written and created.
      num_replicas: If given, the code may use collectives over this many replicas.
    """
    forms: list[ChangeForm] = []

    def flat(*traced: Any) -> Any:
        with overlay.opened():
            results = body(*traced)
            written = [overlay.values[v] for v in overlay.written]
            initial = list(overlay.created.values())
            changed: list[Any] = []
            for change in overlay.changes:
                arrays, treedef = jax.tree.flatten((change.payload, change.condition))
                changed += arrays
                forms.append(ChangeForm(change.target, change.kind, treedef))
            ids = [read.ids for read in overlay.row_reads if read.is_traced]
            overlay.close()
            return written, initial, changed, ids, results

    axis_env = None if num_replicas is None else [(AXIS, num_replicas)]
    closed = jax.make_jaxpr(flat, axis_env=axis_env)(*args)
    variables: list[Any] = []
    constants: list[Any] = []
    order: list[tuple[Kind, int]] = []
    segments: list[int] = []
    for const in closed.consts:
        found = overlay.stand_ins.get(id(const))
        row_place = overlay.row_place(const)
        if found is not None:
            order.append((Kind.VARIABLE, len(variables)))
            variables.append(found[0])
            segments.append(overlay.segments.get(id(const), 0))
        elif id(const) in overlay.fed_places:
            order.append((Kind.FED, overlay.fed_places[id(const)]))
        elif row_place is not None:
            order.append((Kind.ROWS, row_place))
        else:
            order.append((Kind.CONSTANT, len(constants)))
            constants.append(const)
    return Capture(
        closed.jaxpr,
        variables,
        constants,
        list(overlay.written),
        list(overlay.created),
        forms,
        overlay.row_reads,
        order,
        overlay.stops,
        segments,
    )
