"""Segments of programs that read remote state after changing it.

A program that reads a variable after an optimizer has changed it, or rows after any change, needs
the new values from the servers. Such a program is cut where it reads again. The equations of a
jaxpr are in the order of the trace, so all arrays of a change are computed before the first use of
a value that is read after it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from replicax.foundation import jax_compat
from replicax.tracing.capture import Atom, Capture, Kind


@dataclasses.dataclass(frozen=True)
class Segment:
    """A program between two stops.

    Attributes:
      program: Takes the inputs of the whole program, and then the values that the segment before
        hands on. The last segment returns the outputs of the whole program, without earlier
        changes. The others return the arrays of their changes, then the values they hand on.
      ids: The computed row numbers of lookups of this segment, by the index of the lookup.
      num_handed_on: The number of values for the next segment.
    """

    program: Capture
    ids: dict[int, Atom]
    num_handed_on: int


def segments_of(captured: Capture) -> list[Segment]:
    """Cuts a program at its stops."""
    jaxpr = captured.jaxpr
    cuts = [0, *_cuts(captured), len(jaxpr.eqns)]
    stretches = [jaxpr.eqns[a:b] for a, b in itertools.pairwise(cuts)]
    limits = [0, *captured.stops, len(captured.changes)]
    # The arrays of changes come after the written and created variables.
    start = len(captured.written) + len(captured.created)
    outputs: list[list[Atom]] = []
    templates = []
    for first, last in itertools.pairwise(limits):
        own = captured.changes[first:last]
        count = sum(template.treedef.num_leaves for template in own)
        outputs.append(list(jaxpr.outvars[start : start + count]))
        templates.append(own)
        start += count
    states = jaxpr.outvars[: len(captured.written) + len(captured.created)]
    outputs[-1] = [*states, *outputs[-1], *jaxpr.outvars[start:]]
    handed = _handed_on(stretches, outputs)
    ids = _ids(captured)
    segments = []
    for i, equations in enumerate(stretches):
        is_last = i == len(stretches) - 1
        own_outputs = outputs[i] if is_last else [*outputs[i], *handed[i]]
        inputs = handed[i - 1] if i else []
        part = jax_compat.part_of_jaxpr(jaxpr, equations, own_outputs, inputs)
        kept: dict[str, Any] = {} if is_last else {"written": [], "created": [], "row_reads": []}
        program = dataclasses.replace(captured, jaxpr=part, changes=templates[i], stops=[], **kept)
        segments.append(Segment(program, ids[i], 0 if is_last else len(handed[i])))
    return segments


def _cuts(captured: Capture) -> list[int]:
    """Returns the indices of the first equations that use what is read after each stop."""
    segment_of: dict[Var, int] = {}
    for var, (kind, index) in zip(captured.jaxpr.constvars, captured.order, strict=True):
        if kind is Kind.VARIABLE:
            segment_of[var] = captured.segments[index]
        elif kind is Kind.ROWS:
            segment_of[var] = captured.row_reads[index].segment
    cuts = [len(captured.jaxpr.eqns)] * len(captured.stops)
    for number, equation in enumerate(captured.jaxpr.eqns):
        used = [v for v in equation.invars if not isinstance(v, Literal)]
        for i in range(max((segment_of.get(v, 0) for v in used), default=0)):
            cuts[i] = min(cuts[i], number)
    return cuts


def _handed_on(stretches: list[list[JaxprEqn]], outputs: list[list[Atom]]) -> list[list[Var]]:
    """Returns the values that each stretch but the last hands on to later ones."""
    needed: list[set[Var]] = []
    later: set[Var] = set()
    for equations, returned in zip(reversed(stretches), reversed(outputs), strict=True):
        needed.insert(0, set(later))
        used = [v for equation in equations for v in equation.invars]
        later.update(v for v in (*used, *returned) if not isinstance(v, Literal))
    known: list[Var] = []
    handed: list[list[Var]] = []
    for equations, wanted in zip(stretches[:-1], needed, strict=False):
        known += [v for equation in equations for v in equation.outvars]
        handed.append([v for v in known if v in wanted])
    return handed


def _ids(captured: Capture) -> list[dict[int, Atom]]:
    """Returns the computed row numbers of lookups, by segment and index of the lookup."""
    found: list[dict[int, Atom]] = [{} for _ in range(len(captured.stops) + 1)]
    traced = [i for i, read in enumerate(captured.row_reads) if read.is_traced]
    for output, index in enumerate(traced, captured.start_of_ids):
        read = captured.row_reads[index]
        found[read.segment][index] = captured.jaxpr.outvars[output]
    return found
