"""Keras variables whose value belongs to a variable of a strategy, the twin.

Layers, optimizers and metrics keep their `keras.Variable` objects. When one is made in a scope,
its class becomes `DistributedVariable`, and reads and writes go to the twin: so they mean in
replica code, in compiled functions and outside of both what they mean for `rx.Variable`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike
from typing_extensions import override

from replicax.contexts import frames
from replicax.contexts.frames import Frame, Mode
from replicax.foundation import gate, jax_compat, placement
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.keras import internals
from replicax.strategies import default
from replicax.strategies.base import Strategy
from replicax.tracing.gradients import GradientOverlay
from replicax.values.layout import ReplicaLayout
from replicax.variables import creators
from replicax.variables.variable import Variable

_AGGREGATIONS = {
    "mean": VariableAggregation.MEAN,
    "sum": VariableAggregation.SUM,
    "only_first_replica": VariableAggregation.ONLY_FIRST_REPLICA,
}
# The name that every keras.random.SeedGenerator gives its state: a seed and a counter.
_SEED_STATE = "seed_generator_state"
# The distance of the seeds of neighbouring replicas: far apart, and odd, so that all differ.
_SEED_STRIDE = 0x9E3779B1

# What makes the variables of this thread: a "layer", "fit" (or `compile`), or something else.
_maker: contextvars.ContextVar[str] = contextvars.ContextVar("replicax_keras_maker", default="")


# The variables that code of this thread has assigned, if that is noted.
_notes: contextvars.ContextVar[list[DistributedVariable] | None] = contextvars.ContextVar(
    "replicax_keras_writes", default=None
)
# Whether scopes are ignored by the variables of this thread.
_is_outside: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "replicax_keras_outside_scopes", default=False
)


class DistributedVariable(keras.Variable):
    """A `keras.Variable` whose value is that of a variable of a strategy.

    Attributes:
      strategy: The strategy in whose scope it was made.
      twin: The variable that holds the value; None until Keras has initialized it.
    """

    strategy: Strategy
    twin: Variable | None

    # The array of the twin that `fit` stored last, and the value on all replicas that it was made
    # from; they may share their buffers.
    _global: tuple[jax.Array, jax.Array] | None
    # The array of the twin, and the common value of its copies, if it is known without the other
    # processes.
    _combined: tuple[jax.Array, jax.Array] | None
    _policy: tuple[VariableSynchronization, VariableAggregation]

    @property
    def replicax_variable(self) -> Variable | None:
        """The variable of the strategy, for functions of replicax that are given this one."""
        if self.twin is None and not internals.in_stateless_scope():
            self._deferred_initialize()
        return self.twin

    @override
    def _deferred_initialize(self) -> None:
        # Idempotent: Keras comes to it at the end of its scope, replica code may need it before.
        if self.twin is None:
            with creation(self.strategy):
                super()._deferred_initialize()

    @property
    def _value(self) -> jax.Array | None:
        return None if self.twin is None else self._read(self.twin)

    @_value.setter
    def _value(self, value: jax.Array | None) -> None:
        # Keras drops values here while `fit` holds them. The twin keeps its array: a program that
        # takes the buffer over deletes it, and a program that fails before leaves it usable.
        if value is not None:
            self._direct_assign(value)

    @property
    @override
    def value(self) -> Any:
        found = internals.stateless_value(self)
        if self.twin is None and not internals.in_stateless_scope():
            # A layer that was built while shapes were inferred, in replica code.
            self._deferred_initialize()
        if found is None and self.twin is None:
            found = internals.placeholder(self)
        elif found is None and internals.in_symbolic_scope() and _is_remote(self.twin):
            # Keras infers shapes, for which no value is fetched.
            found = jnp.zeros(self._shape, self._dtype)
        elif found is None and internals.in_stateless_scope():
            # Keras infers shapes: the value may be a constant of that trace.
            with jax_compat.eagerly():
                found = self._value
        elif found is None:
            found = self._value
        return internals.autocast(self, found)

    @override
    def _direct_assign(self, value: ArrayLike) -> None:
        frame, layout = frames.current(), self.strategy.extended.layout
        if self.twin is None:
            self.twin = _new_twin(self, value)
        elif _is_taken_over(self.twin):
            with cross_replica(self.strategy):
                self.twin.store_all_copies(frames.current(), value)
        elif _is_of_one_replica(frame, self.strategy):
            self.twin.assign(self._without_offset(value))
        elif (
            layout is not None
            and frame.overlay is None
            and not jax_compat.is_traced(value)
            and _is_everywhere(self.twin, layout)
        ):
            # What `fit` does with every metric at the beginning of an epoch.
            with gate.state():
                self.twin.stored, self.twin.is_lent = layout.replicate(value), False
        else:
            with cross_replica(self.strategy):
                self.twin.assign(value)
            self._note_combined(self.twin, value)
        notes = _notes.get()
        if notes is not None:
            notes.append(self)

    def _note_combined(self, twin: Variable, value: ArrayLike) -> None:
        """Notes the common value of all copies, so that one process can read it by itself."""
        is_shared = twin.is_per_replica and twin.replicas.spans_processes
        if is_shared and frames.current().overlay is None:
            self._combined = twin.stored, jnp.asarray(value, self._dtype)

    def _read(self, twin: Variable) -> jax.Array:
        frame = frames.current()
        if _is_of_one_replica(frame, self.strategy):
            return self._with_offset(twin.read_value())
        if frame.overlay is None and self._global is not None:
            stored, value = self._global
            if stored is twin.stored:
                return self._lent(twin, value)
        if frame.overlay is None and self._combined is not None:
            stored, value = self._combined
            if stored is twin.stored:
                return value
        with cross_replica(self.strategy):
            value = twin.read_value()
        self._note_combined(twin, value)
        return value

    def _lent(self, twin: Variable, value: jax.Array) -> jax.Array:
        layout = self.strategy.extended.layout
        assert layout is not None
        with gate.state():
            twin.is_lent = True
            return placement.uncommitted(layout.copy_for(value, 0))

    # Seeds: each replica has its own, at a fixed distance from the one that is stored.

    def _with_offset(self, value: jax.Array) -> jax.Array:
        return value if not self._is_seed else value + _seed_offset(value)

    def _without_offset(self, value: ArrayLike) -> Any:
        return value if not self._is_seed else value - _seed_offset(jnp.asarray(value))

    @property
    def _is_seed(self) -> bool:
        return self.name == _SEED_STATE

    # The state of `fit`: one array, equal on all replicas.

    def take_global(self) -> jax.Array:
        """Returns the value on all replicas, for a program that takes its buffer over.

        The buffer may be that of the variable: it is valid until such a program has run.
        """
        assert self.twin is not None
        twin, layout = self.twin, self.strategy.extended.layout
        assert layout is not None
        with gate.state():
            known = self._global
            if not twin.is_lent:
                self._global = None
                if _is_everywhere(twin, layout):
                    return twin.stored
                if known is not None and known[0] is twin.stored:
                    return known[1]
        return layout.replicate(self._read(twin))

    def combine(self) -> None:
        """Computes the common value of all copies, if needed; all processes call it.

        From then on, until the next step, one process reads it without the others.
        """
        if self.twin is not None and self.twin.is_per_replica:
            self._read(self.twin)

    def give_global(self, value: jax.Array) -> None:
        """Takes the value of all replicas back from a program."""
        assert self.twin is not None
        twin, layout = self.twin, self.strategy.extended.layout
        assert layout is not None
        with gate.state():
            if _is_everywhere(twin, layout):
                twin.stored = value
            elif not twin.is_per_replica:
                twin.stored = jax.device_put(layout.copy_for(value, 0), twin.sharding_of_stored)
            else:
                twin.stored = layout.assemble(_copies(twin, value, layout))
            twin.is_lent = False
            self._global = twin.stored, value


@contextlib.contextmanager
def noting_writes() -> Iterator[list[DistributedVariable]]:
    """Collects the variables that code of this thread assigns."""
    notes: list[DistributedVariable] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _is_everywhere(twin: Variable, layout: ReplicaLayout) -> bool:
    """Tells whether a variable is stored as programs over all replicas want it."""
    return not twin.is_per_replica and twin.sharding_of_stored == layout.replicated


def _is_taken_over(twin: Variable) -> bool:
    """Tells whether a step of Keras itself has taken the buffer of a variable over."""
    stored = twin.stored
    return (
        isinstance(stored, jax.Array) and not jax_compat.is_traced(stored) and stored.is_deleted()
    )


def _copies(twin: Variable, value: jax.Array, layout: ReplicaLayout) -> list[jax.Array]:
    """Returns copies for the local replicas whose combined value is exactly the given one."""
    copies = list(layout.copies(value))
    if twin.aggregation is VariableAggregation.SUM:
        for i in range(len(copies)):
            if layout.first_local + i > 0:
                copies[i] = jnp.zeros_like(copies[i])
    return copies


def _is_remote(twin: Variable | None) -> bool:
    return twin is not None and twin.is_remote


def _seed_offset(state: jax.Array) -> jax.Array:
    context = frames.current().replica_context
    assert context is not None
    replica = jnp.asarray(context.replica_id_in_sync_group, state.dtype)
    distance = jnp.asarray(_SEED_STRIDE, jnp.uint32).astype(state.dtype)
    return jnp.stack([replica * distance, jnp.zeros((), state.dtype)])


def _is_of_one_replica(frame: Frame, strategy: Strategy) -> bool:
    """Tells whether replica or update code is running, in which twins have rules of their own.

    In such code of another strategy, the twin says that the variable does not belong there.
    """
    is_known = frame.strategy is strategy or not frame.is_default
    return is_known and frame.mode is not Mode.CROSS_REPLICA


@contextlib.contextmanager
def cross_replica(strategy: Strategy) -> Iterator[None]:
    """Lets code that is in no replica read and write variables of a strategy."""
    frame = frames.current()
    if frame.strategy is strategy:
        yield
        return
    with frames.pushed(strategy.extended.scope_frame(frame.opened_at)):
        yield


def is_in_scope() -> bool:
    """Tells whether variables that are made now belong to a strategy."""
    frame = frames.current()
    return not _is_outside.get() and (frame.is_scope or not frame.is_default)


def default_strategy() -> Strategy:
    """Returns the strategy of variables that are made outside of every scope."""
    with frames.outside():
        return default.get_strategy()


def is_compiled() -> bool:
    """Tells whether a function is being compiled, not only differentiated."""
    overlay = frames.current().overlay
    while overlay is not None and overlay.parent is not None:
        overlay = overlay.parent
    return overlay is not None and not isinstance(overlay, GradientOverlay)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Lets variables be made that belong to no strategy, whatever scope is open."""
    token = _is_outside.set(True)
    try:
        yield
    finally:
        _is_outside.reset(token)


def is_metric(variable: keras.Variable) -> bool:
    """Tells whether a variable is the state of a metric."""
    return variable.synchronization == "on_read"


def is_seed(variable: keras.Variable) -> bool:
    """Tells whether a variable is the state of a seed generator."""
    return variable.name == _SEED_STATE


@contextlib.contextmanager
def creation(strategy: Strategy) -> Iterator[None]:
    """Lets variables be made from any code of a strategy, also inside replicas and traces.

    A layer that is first called in replica code is built by the first replica alone, once for
    all. So its variables are made as they are in the scope, outside of the trace.
    """
    around = frames.current()
    overlay = around.overlay
    frame = dataclasses.replace(strategy.extended.scope_frame(around.opened_at), overlay=None)
    before = creators.creator_stack()
    with (
        jax_compat.eagerly(),
        overlay.outside_program() if overlay is not None else contextlib.nullcontext(),
        frames.pushed(frame),
    ):
        if around.mode is not Mode.CROSS_REPLICA:
            creators.set_creator_stack((*before, strategy.extended.creator))
        try:
            yield
        finally:
            creators.set_creator_stack(before)


def adopt(variable: keras.Variable, strategy: Strategy) -> None:
    """Makes a Keras variable one of a strategy; idempotent."""
    if isinstance(variable, DistributedVariable):
        return
    value = variable.__dict__.pop("_value", None)
    variable.__class__ = DistributedVariable
    assert isinstance(variable, DistributedVariable)
    variable.strategy, variable.twin = strategy, None
    variable._global = variable._combined = None
    # Now: a variable that gets its value later is no longer known to be one of a layer.
    variable._policy = _policy(variable)
    if value is not None:
        variable._direct_assign(value)


def _new_twin(variable: DistributedVariable, value: ArrayLike) -> Variable:
    synchronization, aggregation = variable._policy
    with creation(variable.strategy):
        return Variable(
            value,
            trainable=variable.trainable,
            name=variable.path,
            dtype=variable._dtype,
            synchronization=synchronization,
            aggregation=aggregation,
        )


def _policy(variable: keras.Variable) -> tuple[VariableSynchronization, VariableAggregation]:
    """Returns how the copies of a variable agree, by what Keras says about it.

    Metrics are summed when they are read; those that `fit` makes for itself are never in replica
    code, and need no copies. Each replica has its own seeds, and its own moving
    averages of a layer, whose mean is read. Everything else has equal copies.
    """
    on_read, on_write = VariableSynchronization.ON_READ, VariableSynchronization.ON_WRITE
    is_float = jnp.issubdtype(jnp.dtype(variable._dtype), jnp.inexact)
    aggregation = _AGGREGATIONS.get(variable.aggregation)
    if variable.name == _SEED_STATE:
        return on_read, VariableAggregation.ONLY_FIRST_REPLICA
    if variable.synchronization == "on_read" and _maker.get() != "fit":
        return on_read, aggregation or VariableAggregation.SUM
    default = VariableAggregation.MEAN if is_float else VariableAggregation.ONLY_FIRST_REPLICA
    if is_float and not variable.trainable and _maker.get() == "layer":
        return on_read, aggregation or default
    return on_write, aggregation or default


@contextlib.contextmanager
def made_by(maker: str) -> Iterator[None]:
    """Notes what makes the variables created inside: a "layer", or "fit"."""
    token = _maker.set(maker)
    try:
        yield
    finally:
        _maker.reset(token)
