"""Bodies of loops and branches, traced once: pure programs that carry the variables they write.

A body runs on tracers of its own, with an overlay of its own, and so becomes a `Capture`. The
loop around it then has the values of all variables that the body writes in its carry, next to
what the user carries; variables that are only read stay outside of the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.overlay import Change, Overlay
from replicax.foundation import errors, jax_compat
from replicax.tracing import capture as capturing
from replicax.tracing import signature
from replicax.tracing.feeds import RoundElements
from replicax.tracing.signature import Slot
from replicax.values.array_surface import ArraySurface
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.indexed_slices import IndexedSlices
from replicax.values.regroup import leaves_of, map_structure
from replicax.variables.variable import Variable


class _NoElements:
    """Refuses elements of data iterators where it is not known how many are taken."""

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def supply(self) -> Any:
        raise self._refusal()

    def next_of(self, feed: Any) -> Any:
        del feed
        raise self._refusal()

    def _refusal(self) -> errors.TracingError:
        return errors.TracingError(
            "`next(iterator)` in compiled code must be called once per element",
            f"it is called inside the body of {self._what}",
            "Take the element before, and pass it in; or call it in the body of rx.scan or "
            "rx.fori_loop with a known number of rounds, outside of other loops.",
        )


class BodyOverlay(capturing.CapturingOverlay):
    """The values of variables in the body of a loop or in a branch.

    Args:
      parent: The values around it.
      what: The name of the loop or branch, for messages.
      elements: What gives elements of data iterators to a loop with a known number of rounds.
    """

    def __init__(self, parent: Overlay, what: str, elements: RoundElements | None) -> None:
        super().__init__(parent, parent.view)
        self.meets_other_replicas = parent.meets_other_replicas
        self.feed_inputs = _NoElements(what) if elements is None else elements
        self.fed_places = {} if elements is None else elements.places
        self._what = what

    @override
    def read_rows(self, variable: Any, ids: Any) -> Any:
        assert self.parent is not None
        is_known = not any(map(jax_compat.is_traced, jax.tree.leaves(ids)))
        if is_known and self.is_current_trace() and not self.knows(variable):
            # The same rows in each round: they come in from outside.
            with jax_compat.in_trace(self.parent.trace):
                return self.parent.read_rows(variable, ids)
        return jnp.take(variable.read(frames.current()), jnp.asarray(ids), axis=0)

    @override
    def record(self, change: Change) -> None:
        raise errors.UnsupportedError(
            f"The body of {self._what} can write variables of this process",
            f"{change.target.name!r} is kept by parameter servers, which are told of each "
            "update after the program has run",
            "Return what is to be written and write it after the loop, or loop outside of "
            "`rx.function`.",
        )

    @override
    def note_creation(self, variable: Any) -> None:
        raise self._creation(variable)

    @override
    def adopt(self, variable: Any, initial_value: Any) -> None:
        raise self._creation(variable)

    def _creation(self, variable: Any) -> errors.TracingError:
        return errors.TracingError(
            f"The body of {self._what} must use variables that exist",
            f"it creates {variable.name!r}, which would be a new one in each round",
            "Create the variable before the loop or branch.",
        )


class Structure:
    """A structure of values as arrays and a skeleton, into which other arrays can be put."""

    def __init__(self, value: Any) -> None:
        self._arrays: list[Any] = []
        self.skeleton = map_structure(self._record, value)
        self.count = len(self._arrays)

    def take_arrays(self) -> list[Any]:
        """Hands the arrays over; keeping them would leak the trace."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def filled(self, arrays: Sequence[Any]) -> Any:
        """Returns the structure with other arrays in it."""
        return signature.fill(self.skeleton, arrays)

    def filled_with_stacks(self, arrays: Sequence[Any]) -> Any:
        """Returns the structure with arrays in it that have one more dimension in front."""

        def visit(leaf: Any) -> Any:
            if isinstance(leaf, IndexedSlices):
                return leaf.map_arrays(visit)
            if isinstance(leaf, Slot) and leaf.kind == "per_replica":
                own = arrays[leaf.index : leaf.index + leaf.count]
                pairs = zip(own, leaf.scalars, strict=True)
                stored = [_steps_of_replicas(leaf.layout, a, is_scalar) for a, is_scalar in pairs]
                no_scalars = (False,) * leaf.count
                return PerReplica.from_stored(stored, no_scalars, leaf.treedef, leaf.layout)
            return signature.fill(leaf, arrays) if isinstance(leaf, Slot) else leaf

        return map_structure(visit, self.skeleton)

    def is_like(self, other: Structure) -> bool:
        """Tells whether two structures differ in their arrays only."""
        mine, others = leaves_of(self.skeleton), leaves_of(other.skeleton)
        if _tree(self.skeleton) != _tree(other.skeleton) or len(mine) != len(others):
            return False
        return all(map(_is_same_leaf, mine, others))

    def _record(self, leaf: Any) -> Any:
        start = len(self._arrays)
        if isinstance(leaf, TracedPerReplica):
            own, treedef = jax.tree.flatten(leaf.local)
            self._arrays += [jnp.asarray(a) for a in own]
            return Slot(start, "traced", len(own), leaf.layout, treedef)
        if isinstance(leaf, PerReplica):
            return self._record_per_replica(leaf)
        if isinstance(leaf, Mirrored):
            self._arrays.append(leaf.values[0])
            return Slot(start, "mirrored", len(leaf.values))
        if isinstance(leaf, IndexedSlices):
            return leaf.map_arrays(self._record)
        leaf = as_array(leaf)
        if not isinstance(leaf, jax.Array):
            return leaf
        self._arrays.append(leaf)
        return Slot(start, "array")

    def _record_per_replica(self, leaf: PerReplica) -> Slot:
        start = len(self._arrays)
        layout = leaf.layout or frames.current().layout
        stored = None if layout is None else leaf.stored(layout)
        if stored is None:
            raise errors.InvalidArgumentError(
                "A compiled loop or branch needs per-replica values of one shape and type",
                f"it got {leaf}",
                "Pad them, or run the code outside of `rx.function`.",
            )
        self._arrays += stored
        return Slot(start, "per_replica", len(stored), layout, leaf.treedef, leaf.scalars)


def as_array(leaf: Any) -> Any:
    """Returns numbers and variables as arrays, and anything else as it is."""
    if isinstance(leaf, Variable):
        return leaf.read_value()
    is_number = isinstance(leaf, bool | int | float | complex | np.ndarray)
    return jnp.asarray(leaf) if is_number or signature.is_numpy_number(leaf) else leaf


def _tree(skeleton: Any) -> Any:
    leaves = (Slot, PerReplica, ArraySurface, IndexedSlices)
    return jax.tree.structure(skeleton, is_leaf=lambda leaf: isinstance(leaf, leaves))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(one, IndexedSlices) and isinstance(other, IndexedSlices):
        return (one.values, one.indices) == (other.values, other.indices)
    return one is other or (type(one) is type(other) and bool(one == other))


def _steps_of_replicas(layout: Any, array: Any, is_scalar: bool) -> Any:
    """Makes [step, all replicas] the stored array of [replica, steps]."""
    local = layout.local_shape(array.shape[1:], is_scalar)
    rows = array.reshape((array.shape[0], layout.num_replicas, *local))
    return rows.swapaxes(0, 1).reshape((layout.num_replicas * array.shape[0], *local))


@dataclasses.dataclass
class Body:
    """A traced body: its program, and the structures of what it returns."""

    captured: capturing.Capture
    results: list[Structure]

    @property
    def result_shapes(self) -> list[Any]:
        """The shape, type and weakness of each array that it returns."""
        outputs = self.captured.jaxpr.outvars[self.captured.num_states :]
        return [jax_compat.shape_of(out.aval) for out in outputs]


def trace(
    what: str,
    fn: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Structure],
    shapes: list[Any],
    elements: RoundElements | None = None,
) -> Body:
    """Traces a body once, where an overlay is in force.

    Args:
      what: The name of the loop or branch, for messages.
      fn: Takes one value per input and returns a tuple of structures.
      inputs: The structures of what it takes.
      shapes: The shapes of all arrays in them.
      elements: What gives elements of data iterators to it.
    """
    frame = frames.current()
    assert frame.overlay is not None
    if elements is not None:
        elements.restart()
    overlay = BodyOverlay(frame.overlay, what, elements)
    found: list[Structure] = []

    def body(*arrays: Any) -> list[Any]:
        given, start = [], 0
        for structure in inputs:
            given.append(structure.filled(arrays[start : start + structure.count]))
            start += structure.count
        with frames.pushed(frame.with_overlay(overlay)):
            found.extend(Structure(part) for part in fn(*given))
        return [array for structure in found for array in structure.take_arrays()]

    return Body(capturing.capture(body, shapes, overlay), found)


class Carried:
    """The variables that bodies write, as values that a loop carries.

    Attributes:
      values: Their values before the loop.
    """

    def __init__(self, outer: Overlay, bodies: Sequence[Body]) -> None:
        self._outer = outer
        self._written = list(dict.fromkeys(v for b in bodies for v in b.captured.written))
        needed = [v for b in bodies for v in b.captured.variables] + self._written
        # Those that are only read are the same in each round.
        self._known = {variable: outer.read(variable) for variable in dict.fromkeys(needed)}
        self.values = [strong(self._known[v]) for v in self._written]

    def run(
        self, body: Body, values: Sequence[Any], args: Sequence[Any], fed: Sequence[Any] = ()
    ) -> tuple[Any, Any]:
        """Runs a body; returns the values of the variables after it, and its results."""
        captured = body.captured
        known = self._known | dict(zip(self._written, values, strict=True))
        read = [known[v] for v in captured.variables]
        outs = captured.run(read, captured.constants, args, fed)
        known |= dict(zip(captured.written, outs, strict=False))
        new = [strong(known[v]) for v in self._written]
        return new, list(outs[captured.num_states :])

    def store(self, values: Sequence[Any]) -> None:
        """Writes the values after the loop."""
        for variable, value in zip(self._written, values, strict=True):
            self._outer.write(variable, value)


def strong(array: Any) -> Any:
    """Returns an array whose type does not give way to others."""
    return jax.lax.convert_element_type(array, array.dtype) if jax_compat.is_weak(array) else array
