"""Regions: nodes whose body is code of a user or of Keras. See Note [Regions]."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.overlay import Change, TracedState
from replicax.foundation import errors, lazy
from replicax.tf import tape_recording
from replicax.tf.arguments import Value, VariableLike
from replicax.tf.tape_recording import Inputs, Region, Tape, map_leaves
from replicax.tracing.gradients import GradientOverlay
from replicax.variables import row_numbers
from replicax.variables.variable import Variable

# Imports Keras.
_keras_scopes = lazy.module("replicax.tf.tape_keras_scopes")


class Snapshot:
    """The values that a body has read from outside, for calls of it that are made later.

    A second derivative calls the body again. Variables may have been assigned meanwhile, by the
    body itself first of all: statistics of a layer, or the state of its random numbers.
    """

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self._kept: list[Any] = []

    def value(self, variable: VariableLike, read: Callable[[], Any]) -> Any:
        """Returns the value of a variable at its first read."""
        key = id(tape_recording.identity_of(variable))
        if key not in self.values:
            self.values[key] = read()
            self._kept.append(tape_recording.identity_of(variable))
        return self.values[key]


class RegionOverlay(GradientOverlay):
    """Values of variables of replicax while the body of a region runs."""

    def __init__(self, frame: frames.Frame, region: Region, snapshot: Snapshot) -> None:
        super().__init__(frame)
        self._region = region
        self._snapshot = snapshot

    @override
    def first_read(self, variable: TracedState) -> jax.Array:
        found = self._region.variable_value(variable)
        if found is not None:
            return found
        self._region.note_variable(variable)
        return self._snapshot.value(variable, lambda: GradientOverlay.first_read(self, variable))

    @override
    def read_rows(self, variable: TracedState, ids: ArrayLike) -> jax.Array:
        return row_numbers.take(self.read(variable), ids)

    @override
    def lookup(self, variable: Variable, ids: ArrayLike) -> jax.Array:
        return row_numbers.take(variable.read(frames.current()), ids)


class _Body:
    """A body, and what it did beside its result when it ran last."""

    def __init__(self, body: Callable[[], Any], tapes: Sequence[Tape], inputs: Inputs) -> None:
        self._body = body
        self._tapes = tapes
        self._sources = inputs.sources
        self._snapshot = Snapshot()
        self.region = Region(None, ())
        self.written: list[Variable] = []
        self.changes: list[Change] = []
        self.assigned: list[Any] = []

    def is_complete(self) -> bool:
        """Tells whether all that the body has used is an input of the node."""
        return not self.region.unknown

    def __call__(self, *arrays: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
        frame = frames.current()
        region = Region(tape_recording.current_region(), self._tapes)
        region.table.update(zip(self._sources, arrays, strict=True))
        overlay = RegionOverlay(frame, region, self._snapshot)
        with (
            tape_recording.entered(region),
            overlay.opened(),
            frames.pushed(frame.with_overlay(overlay)),
            _keras_scope(region, self._snapshot) as scope,
        ):
            result = map_leaves(tape_recording.array_of, self._body())
        self.region = region
        self.written = [v for v in overlay.written if isinstance(v, Variable)]
        self.changes = overlay.changes
        self.assigned = [] if scope is None else scope.assigned
        return (
            result,
            [_effect(overlay.values[v]) for v in self.written],
            [(jax.tree.map(_effect, c.payload), _effect(c.condition)) for c in self.changes],
            [] if scope is None else list(map(_effect, scope.new_values())),
        )


def _effect(value: Value) -> Any:
    if not isinstance(value, jax.Array):
        return value
    return tape_recording.Effect(jax.lax.stop_gradient(value))


@contextlib.contextmanager
def _keras_scope(region: Region, snapshot: Snapshot) -> Iterator[Any]:
    if not tape_recording.is_keras_loaded():
        yield None
        return
    with _keras_scopes.RegionScope(region, snapshot) as scope:
        yield scope


def run(body: Callable[[], Any], known: Iterable[Any] = ()) -> Any:
    """Runs a function without arguments as one node of the tapes that record.

    Args:
      body: Returns a structure of tensors and arrays. It may be called more than once.
      known: Tensors and variables that it uses, as far as they are known; others are found.

    Returns:
      The structure, with arrays.
    """
    tapes = tape_recording.recording_tapes()
    inputs = Inputs(tapes)
    for leaf in known:
        inputs.slot_for(leaf)
    call = _Body(body, tapes, inputs)
    found = tape_recording.add_node(call, inputs, tapes, call.is_complete)
    while not call.is_complete():
        for leaf in call.region.unknown.values():
            inputs.add_unknown(leaf)
        call = _Body(body, tapes, inputs)
        found = tape_recording.add_node(call, inputs, tapes, call.is_complete)
    result, kept, changed, assigned = found
    frame = frames.current()
    with tape_recording.suspended():
        for variable, value in zip(call.written, kept, strict=True):
            variable.store(frame, value)
        for change, (payload, condition) in zip(call.changes, changed, strict=True):
            _make_change(frame, Change(change.target, change.kind, payload, condition))
        for variable, value in zip(call.assigned, assigned, strict=True):
            variable.assign(value)
    return result


@contextlib.contextmanager
def explaining_loops() -> Iterator[None]:
    """Says what a compiled loop needs so that a tape can differentiate it."""
    try:
        yield
    except ValueError as error:
        if "Reverse-mode differentiation" not in str(error):
            raise
        raise errors.UnsupportedError(
            "The gradient of a compiled loop needs the number of its rounds",
            "a GradientTape records tf.while_loop, or a loop whose end is a tensor",
            "Pass `maximum_iterations=` to tf.while_loop, or make the bound a Python int.",
        ) from error


def _make_change(frame: frames.Frame, change: Change) -> None:
    """Makes a change of remote state that the body recorded."""
    if change.condition is not None and frame.overlay is not None:
        frame.overlay.record(change)
    elif change.condition is None or change.condition:
        change.target.apply_directly(frame, change.kind, change.payload)
