"""Programs that stop on their way: what they changed is made on servers, and read again.

A program that reads a variable after an optimizer has changed it, or rows after any change, needs
what the servers made of the change. Such a program is cut at the places where it reads again. The
equations of a jaxpr are in the order of the trace, so everything that a change consists of comes
before the first use of what is read after it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from replicax.foundation import jax_compat
from replicax.tracing.capture import Capture, Kind


@dataclasses.dataclass(frozen=True)
class Segment:
    """A program between two stops.

    Attributes:
      program: Takes what the whole program takes, and then what the segment before hands on. The
        last segment returns what the whole program returns, without changes that were made
        before. The others return the arrays of their changes, then what they hand on.
      ids: Per lookup of this segment with computed row numbers: the value that holds them.
      num_handed_on: How many values the next segment gets.
    """

    program: Capture
    ids: dict[int, Any]
    num_handed_on: int


def segments_of(captured: Capture) -> list[Segment]:
    """Cuts a program at its stops."""
    jaxpr = captured.jaxpr
    cuts = [0, *_cuts(captured), len(jaxpr.eqns)]
    stretches = [jaxpr.eqns[a:b] for a, b in itertools.pairwise(cuts)]
    limits = [0, *captured.stops, len(captured.changes)]
    # The arrays of changes come after the written and created variables.
    start = len(captured.written) + len(captured.created)
    outputs: list[list[Any]] = []
    forms = []
    for first, last in itertools.pairwise(limits):
        own = captured.changes[first:last]
        count = sum(form.treedef.num_leaves for form in own)
        outputs.append(list(jaxpr.outvars[start : start + count]))
        forms.append(own)
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
        program = dataclasses.replace(captured, jaxpr=part, changes=forms[i], stops=[], **kept)
        segments.append(Segment(program, ids[i], 0 if is_last else len(handed[i])))
    return segments


def _cuts(captured: Capture) -> list[int]:
    """Returns the places of the first equations that use what is read after each stop."""
    segment_of: dict[Any, int] = {}
    for var, (kind, place) in zip(captured.jaxpr.constvars, captured.order, strict=True):
        if kind is Kind.VARIABLE:
            segment_of[var] = captured.segments[place]
        elif kind is Kind.ROWS:
            segment_of[var] = captured.row_reads[place].segment
    cuts = [len(captured.jaxpr.eqns)] * len(captured.stops)
    for place, equation in enumerate(captured.jaxpr.eqns):
        newest = max(
            (segment_of.get(v, 0) for v in equation.invars if not hasattr(v, "val")), default=0
        )
        for i in range(newest):
            cuts[i] = min(cuts[i], place)
    return cuts


def _handed_on(stretches: list[list[Any]], outputs: list[list[Any]]) -> list[list[Any]]:
    """Returns, for each stretch but the last, what it or those before it compute for later ones."""
    needed: list[set[Any]] = []
    later: set[Any] = set()
    for equations, returned in zip(reversed(stretches), reversed(outputs), strict=True):
        needed.insert(0, set(later))
        used = [v for equation in equations for v in equation.invars]
        later.update(v for v in (*used, *returned) if not hasattr(v, "val"))
    known: list[Any] = []
    handed: list[list[Any]] = []
    for equations, wanted in zip(stretches[:-1], needed, strict=False):
        known += [v for equation in equations for v in equation.outvars]
        handed.append([v for v in known if v in wanted])
    return handed


def _ids(captured: Capture) -> list[dict[int, Any]]:
    """Returns the values that hold the row numbers of lookups, by segment."""
    found: list[dict[int, Any]] = [{} for _ in range(len(captured.stops) + 1)]
    traced = [i for i, read in enumerate(captured.row_reads) if read.is_traced]
    for output, place in enumerate(traced, captured.start_of_ids):
        read = captured.row_reads[place]
        found[read.segment][place] = captured.jaxpr.outvars[output]
    return found
