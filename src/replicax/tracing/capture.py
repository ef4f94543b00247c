"""Capture: running a stateful function once, on tracers, and getting a pure program."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from jax.typing import ArrayLike

from replicax.contexts import frames
from replicax.contexts.overlay import Change, ChangeTarget, Overlay, TracedState, View
from replicax.foundation import jax_compat
from replicax.foundation.types import Tree, TreeDef
from replicax.values.layout import AXIS
from replicax.variables import row_numbers
from replicax.variables.remote import RemoteVariableBase
from replicax.variables.variable import Variable

# A value of a jaxpr.
Atom: TypeAlias = Var | Literal


@dataclasses.dataclass
class RowRead:
    """A lookup in a remote variable: the rows are inputs of the program.

    Attributes:
      variable: The variable.
      ids: The row numbers; None after the trace if the program computes them.
      is_traced: Whether the program computes the row numbers.
      shape: The shape of the rows.
      segment: The number of the segment of the program that uses the rows.
    """

    variable: RemoteVariableBase
    ids: ArrayLike | None
    is_traced: bool
    shape: tuple[int, ...]
    segment: int = 0


@dataclasses.dataclass(frozen=True)
class ChangeTemplate:
    """A change of remote state without its arrays, which are outputs of the program."""

    target: ChangeTarget
    kind: str
    treedef: TreeDef

    def filled(self, arrays: Sequence[jax.Array]) -> Change:
        """Returns the change with the arrays that a program computed."""
        return Change(self.target, self.kind, *jax.tree.unflatten(self.treedef, arrays))


def filled(templates: Sequence[ChangeTemplate], arrays: Sequence[jax.Array]) -> list[Change]:
    """Returns changes with the arrays that a program computed."""
    changes = []
    start = 0
    for template in templates:
        end = start + template.treedef.num_leaves
        changes.append(template.filled(arrays[start:end]))
        start = end
    return changes


class CapturingOverlay(Overlay):
    """An overlay whose reads become inputs of the traced program.

    The first read of a variable emits a copy of a stand-in array. JAX lists the stand-in
    among the constants of the finished program, where its identity selects the variable
    whose value replaces it.
    """

    def __init__(self, parent: Overlay | None, view: View) -> None:
        super().__init__(parent, view)
        # Keeps stand-ins alive while their ids are in use.
        self.stand_ins: dict[int, tuple[Variable, jax.Array]] = {}
        # Variables created inside the trace, with their traced initial values.
        self.created: dict[Variable, jax.Array | None] = {}
        # Index of each array that a data iterator feeds, by the id of its stand-in.
        self.fed_indices: dict[int, int] = {}
        # Lookups in remote variables, and the index of each by the id of its stand-in.
        self.row_reads: list[RowRead] = []
        self._row_indices: dict[int, tuple[int, jax.Array]] = {}
        # The number of changes before each stop, at which the program pushes changes.
        self.stops: list[int] = []
        # The number of stops before each read of a variable, by the id of its stand-in.
        self.segments: dict[int, int] = {}

    def first_read(self, variable: TracedState) -> jax.Array:
        assert isinstance(variable, Variable)
        with jax_compat.eagerly():
            stand_in = self._stand_in(variable)
        self.stand_ins[id(stand_in)] = (variable, stand_in)
        self.segments[id(stand_in)] = len(self.stops)
        return jnp.copy(stand_in)

    def send_changes(self, variable: TracedState) -> None:
        del variable
        self.num_sent = len(self.changes)
        self.stops.append(self.num_sent)

    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        assert isinstance(variable, RemoteVariableBase)
        mine = (variable, *variable.components)
        if not self.is_current_trace() or any(v in self.values for v in mine):
            return row_numbers.take(variable.read(frames.current()), ids)
        if self.unsent(*mine):
            # The rows after the change: computing them here would need the whole table.
            self.send_changes(variable)
        is_traced = jax_compat.is_traced(ids)
        with jax_compat.eagerly():
            shape = (*jnp.shape(ids), *variable.shape[1:])
            stand_in = jnp.zeros(shape, variable.dtype)
        self._row_indices[id(stand_in)] = (len(self.row_reads), stand_in)
        self.row_reads.append(RowRead(variable, ids, is_traced, shape, len(self.stops)))
        return jnp.copy(stand_in)

    def row_index(self, constant: object) -> int | None:
        """Returns the index of the lookup whose stand-in is `constant`; None if none is."""
        found = self._row_indices.get(id(constant))
        return None if found is None else found[0]

    def _stand_in(self, variable: Variable) -> jax.Array:
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
        # Another object over the same buffers, with an identity of its own.
        return jax_compat.alias(stored)

    def adopt(self, variable: TracedState, initial_value: jax.Array) -> None:
        assert isinstance(variable, Variable)
        self.created[variable] = initial_value

    def close(self) -> None:
        """Drops the values of the trace, which must not outlive it."""
        self.values = {}
        self.kept_reads = {}
        self.created = dict.fromkeys(self.created)
        self.changes = []
        for read in self.row_reads:
            read.ids = None if read.is_traced else read.ids
        self.trace = None


class Kind(enum.Enum):
    """The source of an input of a captured program."""

    VARIABLE = "variable"
    CONSTANT = "constant"
    FED = "fed"
    ROWS = "rows"
    ARGUMENT = "argument"


@dataclasses.dataclass
class Capture:
    """A pure program, and the meaning of its inputs and outputs.

    The program takes the values of `variables`, then `constants`, then the arrays of data
    iterators, then the rows of `row_reads`, then the arguments. It returns the new values of
    `written`, the initial values of `created`, the arrays of `changes`, the row numbers of
    those `row_reads` whose row numbers it computes, then the results.
    """

    jaxpr: Jaxpr
    variables: list[Variable]
    constants: list[jax.Array]
    written: list[Variable]
    created: list[Variable]
    changes: list[ChangeTemplate]
    row_reads: list[RowRead]
    # For each constant of the jaxpr, its kind, and its index among the inputs of that kind.
    order: list[tuple[Kind, int]]
    # The number of changes that precede each stop, and the number of stops before each of
    # `variables` is fetched. A remote variable may be fetched repeatedly.
    stops: list[int] = dataclasses.field(default_factory=list)
    segments: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_changed(self) -> int:
        """The number of arrays of all changes."""
        return sum(template.treedef.num_leaves for template in self.changes)

    @property
    def last_changes(self) -> list[ChangeTemplate]:
        """The changes after the last stop."""
        return self.changes[self.stops[-1] :] if self.stops else self.changes

    @property
    def num_ids(self) -> int:
        """The number of outputs that are row numbers."""
        return sum(read.is_traced for read in self.row_reads)

    @property
    def num_states(self) -> int:
        """The number of outputs that are not results."""
        return len(self.written) + len(self.created) + self.num_changed + self.num_ids

    @property
    def start_of_ids(self) -> int:
        """The index of the first row numbers among the outputs."""
        return self.num_states - self.num_ids

    @property
    def is_fixed(self) -> bool:
        """Whether the program only pushes changes, the same ones in each call."""
        if self.stops:
            return False
        is_pure = not self.jaxpr.effects and self.num_changed == len(self.jaxpr.outvars)
        used = self.inputs_of(self.jaxpr.outvars)
        return is_pure and not self.row_reads and {kind for kind, _ in used} <= {Kind.CONSTANT}

    def needs(self, created: int) -> set[Variable]:
        """Returns the variables that the initial value of a created variable depends on."""
        used = self.inputs_of([self.jaxpr.outvars[len(self.written) + created]])
        return {self.variables[index] for kind, index in used if kind is Kind.VARIABLE}

    def inputs_of(self, atoms: Sequence[Atom]) -> set[tuple[Kind, int]]:
        """Returns the inputs that some values of the program depend on."""
        wanted = jax_compat.inputs_of(self.jaxpr, *atoms)
        constants = zip(self.jaxpr.constvars, self.order, strict=True)
        found = {source for var, source in constants if var in wanted}
        return found | {
            (Kind.ARGUMENT, i) for i, var in enumerate(self.jaxpr.invars) if var in wanted
        }

    def sliced_to(self, wanted: list[Atom]) -> Capture:
        """Returns the part of the program that computes some of its values, as results."""
        _, equations = jax_compat.needed_by(self.jaxpr, wanted)
        jaxpr = jax_compat.part_of_jaxpr(self.jaxpr, equations, wanted)
        return dataclasses.replace(
            self, jaxpr=jaxpr, written=[], created=[], changes=[], row_reads=[]
        )

    def run(
        self,
        variables: Sequence[ArrayLike | None],
        constants: Sequence[ArrayLike],
        args: Sequence[ArrayLike],
        fed: Sequence[ArrayLike] = (),
        rows: Sequence[ArrayLike | None] = (),
    ) -> list[jax.Array]:
        """Runs the program in the current trace."""
        given = {
            Kind.VARIABLE: variables,
            Kind.CONSTANT: constants,
            Kind.FED: fed,
            Kind.ROWS: rows,
        }
        return jax_compat.eval_jaxpr(self.jaxpr, [given[k][i] for k, i in self.order], *args)


def capture(
    body: Callable[..., list[jax.Array]],
    args: Sequence[ArrayLike | jax.ShapeDtypeStruct],
    overlay: CapturingOverlay,
    num_replicas: int | None = None,
) -> Capture:
    """Traces `body` once.

    Args:
      body: Takes arrays and returns a flat list of arrays; runs with `overlay` in force.
      args: Arrays or shapes of the arguments.
      overlay: Collects the variables that are read, written and created.
      num_replicas: If given, the code may use collectives over this many replicas.
    """
    templates: list[ChangeTemplate] = []

    def flat(*traced: jax.Array) -> Tree:
        with overlay.opened():
            results = body(*traced)
            written = [overlay.values[v] for v in overlay.written]
            initial = list(overlay.created.values())
            changed: list[jax.Array] = []
            for change in overlay.changes:
                arrays, treedef = jax.tree.flatten((change.payload, change.condition))
                changed += arrays
                templates.append(ChangeTemplate(change.target, change.kind, treedef))
            ids = [read.ids for read in overlay.row_reads if read.is_traced]
            overlay.close()
            return written, initial, changed, ids, results

    axis_env = None if num_replicas is None else [(AXIS, num_replicas)]
    closed = jax.make_jaxpr(flat, axis_env=axis_env)(*args)
    variables: list[Variable] = []
    constants: list[jax.Array] = []
    order: list[tuple[Kind, int]] = []
    segments: list[int] = []
    for const in closed.consts:
        found = overlay.stand_ins.get(id(const))
        row_index = overlay.row_index(const)
        if found is not None:
            order.append((Kind.VARIABLE, len(variables)))
            variables.append(found[0])
            segments.append(overlay.segments.get(id(const), 0))
        elif id(const) in overlay.fed_indices:
            order.append((Kind.FED, overlay.fed_indices[id(const)]))
        elif row_index is not None:
            order.append((Kind.ROWS, row_index))
        else:
            order.append((Kind.CONSTANT, len(constants)))
            constants.append(const)
    return Capture(
        closed.jaxpr,
        variables,
        constants,
        [variable for variable in overlay.written if isinstance(variable, Variable)],
        list(overlay.created),
        templates,
        overlay.row_reads,
        order,
        overlay.stops,
        segments,
    )
