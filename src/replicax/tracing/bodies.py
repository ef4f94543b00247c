"""Bodies of loops and branches, traced once: pure programs that carry the variables they write.

A body is traced with its own overlay and becomes a `Capture`. The loop around it carries the values
of all variables that the body writes next to the user's carry; variables that are only read stay
outside of the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.overlay import Change, Overlay, TracedState
from replicax.foundation import errors, jax_compat
from replicax.foundation.types import Tree
from replicax.tracing import capture as capturing
from replicax.tracing.feeds import RoundElements
from replicax.tracing.iterators import Feed
from replicax.tracing.structures import Structure
from replicax.variables.remote import RemoteVariableBase

_TAKES_DATA = "_takes_data_in_loop"


class _NoElements:
    """Rejects `next(iterator)` where the number of elements taken is unknown."""

    def __init__(self, what: str) -> None:
        self._what = what

    @property
    def supply(self) -> NoReturn:
        raise self._error()

    def next_of(self, feed: Feed) -> NoReturn:
        del feed
        raise self._error()

    def _error(self) -> errors.TracingError:
        error = errors.TracingError(
            "`next(iterator)` in compiled code must be called once per element",
            f"it is called inside the body of {self._what}",
            "Take the element before, and pass it in; or call it in the body of rx.scan or "
            "rx.fori_loop with a known number of rounds, outside of other loops.",
        )
        setattr(error, _TAKES_DATA, True)
        return error


def takes_data_in_loop(error: errors.TracingError) -> bool:
    """Tells whether an error is about `next(iterator)` where the number of rounds is unknown."""
    return getattr(error, _TAKES_DATA, False)


class BodyOverlay(capturing.CapturingOverlay):
    """The values of variables in the body of a loop or in a branch.

    Args:
      parent: The overlay around the loop.
      what: The name of the loop or branch, for error messages.
      elements: The data elements of a round, for loops with a known number of rounds.
    """

    def __init__(self, parent: Overlay, what: str, elements: RoundElements | None) -> None:
        super().__init__(parent, parent.view)
        self.meets_other_replicas = parent.meets_other_replicas
        self.feed_inputs = _NoElements(what) if elements is None else elements
        self.fed_indices = {} if elements is None else elements.indices
        self._what = what

    @override
    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        assert self.parent is not None
        assert isinstance(variable, RemoteVariableBase)
        is_known = not jax_compat.is_traced(ids)
        if is_known and self.is_current_trace() and not self.has_used(variable):
            # The same rows in each round: inputs of the loop.
            with jax_compat.in_trace(self.parent.trace):
                return self.parent.read_rows(variable, ids)
        return jnp.take(variable.read(frames.current()), jnp.asarray(ids), axis=0)

    @override
    def record(self, change: Change) -> None:
        raise errors.UnsupportedError(
            f"The body of {self._what} can write variables of this process",
            f"{change.target.name!r} is kept by parameter servers, which receive updates "
            "after the program has run",
            "Return what is to be written and write it after the loop, or loop outside of "
            "`rx.function`.",
        )

    @override
    def note_creation(self, variable: object) -> None:
        raise self._creation_error(variable)

    @override
    def adopt(self, variable: TracedState, initial_value: jax.Array) -> None:
        raise self._creation_error(variable)

    def _creation_error(self, variable: object) -> errors.TracingError:
        name = getattr(variable, "name", "a variable")
        return errors.TracingError(
            f"The body of {self._what} must use existing variables",
            f"it creates {name!r}, which would be a new one in each round",
            "Create the variable before the loop or branch.",
        )


@dataclasses.dataclass
class Body:
    """A traced body: its program, and the structures of its results."""

    captured: capturing.Capture
    results: list[Structure]

    @property
    def result_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shape, type and weakness of each returned array."""
        outputs = self.captured.jaxpr.outvars[self.captured.num_states :]
        return [jax_compat.shape_of(out.aval) for out in outputs]


def trace(
    what: str,
    fn: Callable[..., tuple[Tree, ...]],
    inputs: Sequence[Structure],
    shapes: Sequence[jax.ShapeDtypeStruct],
    elements: RoundElements | None = None,
) -> Body:
    """Traces a body once; an overlay must be in force.

    Args:
      what: The name of the loop or branch, for error messages.
      fn: Takes one value per input and returns a tuple of structures.
      inputs: The structures of its arguments.
      shapes: The shapes of all arrays in them.
      elements: The data elements of a round.
    """
    frame = frames.current()
    assert frame.overlay is not None
    if elements is not None:
        elements.restart()
    overlay = BodyOverlay(frame.overlay, what, elements)
    found: list[Structure] = []

    def body(*arrays: jax.Array) -> list[jax.Array]:
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
        # Variables that are only read have the same value in each round.
        self._known = {variable: outer.read(variable) for variable in dict.fromkeys(needed)}
        self.values = [strong(self._known[v]) for v in self._written]

    def run(
        self,
        body: Body,
        values: Sequence[jax.Array],
        args: Sequence[jax.Array],
        fed: Sequence[jax.Array] = (),
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs a body; returns the variables' new values, and its results."""
        captured = body.captured
        known = self._known | dict(zip(self._written, values, strict=True))
        read = [known[v] for v in captured.variables]
        outs = captured.run(read, captured.constants, args, fed)
        known |= dict(zip(captured.written, outs, strict=False))
        new = [strong(known[v]) for v in self._written]
        return new, list(outs[captured.num_states :])

    def store(self, values: Sequence[jax.Array]) -> None:
        """Writes the values after the loop."""
        for variable, value in zip(self._written, values, strict=True):
            self._outer.write(variable, value)


def strong(array: jax.Array) -> jax.Array:
    """Returns an array of the same type that is not weakly typed."""
    return jax.lax.convert_element_type(array, array.dtype) if jax_compat.is_weak(array) else array
