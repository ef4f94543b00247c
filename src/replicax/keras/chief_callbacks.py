"""Callbacks of several workers: the chief runs them, and all workers get what they changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import msgspec
import numpy as np
from typing_extensions import override

from replicax.collectives import across_processes
from replicax.foundation import gate
from replicax.input.dataset.plan import Seed
from replicax.keras import alone, internals, random_states, training
from replicax.keras.random_states import RandomStates
from replicax.keras.variables import DistributedVariable
from replicax.keras.worker_calls import WorkerCall
from replicax.values.layout import ReplicaLayout

# The hooks that Keras calls, each with the older names that lead to it.
_HOOKS: dict[str, tuple[str, ...]] = {
    **{f"on_{mode}_{end}": () for mode in ("train", "test", "predict") for end in ("begin", "end")},
    **{f"on_epoch_{end}": () for end in ("begin", "end")},
    **{f"on_{mode}_batch_{end}": () for mode in ("test", "predict") for end in ("begin", "end")},
    **{f"on_train_batch_{end}": (f"on_batch_{end}",) for end in ("begin", "end")},
}
# The hooks in which workers meet, even if no callback uses them: the first of a call, and the end
# of an epoch, where workers whose data has ended too early are noticed.
_ALWAYS = {
    "fit": ("on_train_begin", "on_epoch_end"),
    "evaluate": ("on_test_begin",),
    "predict": ("on_predict_begin",),
}
_FLAGS = ("stop_training", "stop_evaluating", "stop_predicting")
# More than this is sent by the devices.
_MOST_BYTES = 64 << 10


class _Start(msgspec.Struct):
    """What the chief decides when a call starts."""

    hooks: list[str]
    states: RandomStates
    seeds: list[int]


class _Effects(msgspec.Struct):
    """What the callbacks of the chief have changed.

    Attributes:
      flags: Which of the flags of the model are set.
      initial_epoch: The epoch to start with.
      is_synced: Whether the variables have the values of the last step.
      logs: The values that History records, if callbacks have changed them.
      states: Random states, if callbacks have drawn numbers.
      written: The indices of variables that have new values.
      values: Their bytes; None if they are sent by the devices.
    """

    flags: list[str]
    initial_epoch: int | None
    is_synced: bool
    logs: dict[str, Any] | None
    states: RandomStates | None
    written: list[int]
    values: list[bytes] | None


def shared(
    call: WorkerCall,
    api: str,
    callbacks: object,
    layout: ReplicaLayout,
    seeds: Sequence[Seed] = (),
) -> list[keras.callbacks.Callback]:
    """Starts a call: all workers get the random numbers of the chief, which runs the callbacks.

    Args:
      call: The call.
      api: Its name.
      callbacks: The callbacks of the user.
      layout: The replicas.
      seeds: The seeds of the data that the user did not choose.

    Returns:
      The callbacks that this worker passes to Keras.
    """
    given = _flat(callbacks)
    own = [one for one in given if not isinstance(one, keras.callbacks.History)]
    values = [seed.value for seed in seeds]
    start = _Start(_used_hooks(own, api), random_states.current(), values)
    found = msgspec.msgpack.decode(
        call.meet("its start", msgspec.msgpack.encode(start)), type=_Start
    )
    if not call.is_chief:
        found.states.set()
        for seed, value in zip(seeds, found.seeds, strict=True):
            seed.value = value
        own = []
    histories = [one for one in given if isinstance(one, keras.callbacks.History)]
    return [SharedCallbacks(call, own, found.hooks, layout), *histories]


def are_shared(callbacks: object) -> bool:
    """Tells whether a call around this one has made these callbacks."""
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        return False
    return any(isinstance(callback, SharedCallbacks) for callback in callbacks.callbacks)


def _flat(callbacks: object) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return [] if callbacks is None else keras.tree.flatten(callbacks)


def _used_hooks(callbacks: Iterable[keras.callbacks.Callback], api: str) -> list[str]:
    used = {
        hook
        for hook, aliases in _HOOKS.items()
        for callback in callbacks
        if any(internals.is_overridden(callback, name) for name in (hook, *aliases))
    }
    return sorted(used.union(_ALWAYS[api]))


class SharedCallbacks(keras.callbacks.Callback):
    """All callbacks of the user, in one that each worker has.

    Args:
      call: The call that the workers make.
      callbacks: The callbacks that this worker runs: the chief all, the others none.
      hooks: The hooks in which the workers meet.
      layout: The replicas.
    """

    def __init__(
        self,
        call: WorkerCall,
        callbacks: Sequence[keras.callbacks.Callback],
        hooks: Iterable[str],
        layout: ReplicaLayout,
    ) -> None:
        super().__init__()
        self._call, self._callbacks, self._layout = call, callbacks, layout
        self._trained: keras.Model | None = None
        self._has_begun = False
        # Keras runs hooks that no callback has in another thread.
        for hook in hooks:
            setattr(self, hook, functools.partial(self._run, hook))

    @override
    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._trained = model
        with alone.entered():
            for callback in self._callbacks:
                callback.set_model(model)

    @override
    def set_params(self, params: dict[str, object]) -> None:
        super().set_params(params)
        for callback in self._callbacks:
            callback.set_params(params)

    def _run(self, hook: str, *args: object, **kwargs: object) -> None:
        """Runs the callbacks of the chief; all workers leave it in the same state."""
        model = self._trained
        assert model is not None
        if not self._has_begun:
            self._has_begun = True
            training.combine_variables(model)
        # Variables that were made since then get their common values before the chief uses them.
        gate.settle()
        logs = kwargs.get("logs", args[-1] if args else None)
        logs = logs if isinstance(logs, dict) else {}
        effects, error, values = b"", None, list[np.ndarray]()
        if self._call.is_chief:
            try:
                made, values = self._changed(model, hook, logs, args, kwargs)
                effects = msgspec.msgpack.encode(made)
            except BaseException as raised:
                error = raised
        found = self._call.meet(f"`{hook}`", effects, error)
        decoded = msgspec.msgpack.decode(found, type=_Effects)
        if not self._call.is_chief:
            _apply(decoded, model, logs)
        if decoded.written and (decoded.values is None or not self._call.is_chief):
            self._receive(decoded, model, values)

    def _changed(
        self,
        model: keras.Model,
        hook: str,
        logs: dict[str, Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[_Effects, list[np.ndarray]]:
        """Runs the callbacks, and returns what they changed."""
        logs_before, states_before = dict(logs), random_states.current()
        with alone.entered() as written:
            for callback in self._callbacks:
                getattr(callback, hook)(*args, **kwargs)
            indices = _indices(training.all_variables(model), written)
            variables = training.all_variables(model)
            values = [np.asarray(variables[i].value) for i in indices]
        states = random_states.current()
        is_small = sum(value.nbytes for value in values) <= _MOST_BYTES
        effects = _Effects(
            [flag for flag in _FLAGS if getattr(model, flag, False)],
            internals.initial_epoch_of(model),
            internals.is_state_synced(model),
            _sendable(logs) if logs != logs_before else None,
            states if states != states_before else None,
            indices,
            [value.tobytes() for value in values] if is_small else None,
        )
        return effects, values

    def _receive(self, effects: _Effects, model: keras.Model, own: Sequence[np.ndarray]) -> None:
        """Stores the values that the chief has assigned to variables."""
        everything = training.all_variables(model)
        variables = [everything[i] for i in effects.written]
        if effects.values is not None:
            for variable, data in zip(variables, effects.values, strict=True):
                dtype = jnp.dtype(variable.dtype)
                variable.assign(np.frombuffer(data, dtype).reshape(tuple(variable.shape)))
            return
        if not self._call.is_chief:
            own = [np.zeros(tuple(v.shape), jnp.dtype(v.dtype)) for v in variables]
        columns = [[jnp.asarray(value)] * self._layout.num_local for value in own]
        for variable, value in zip(
            variables, across_processes.first_replica(columns, self._layout), strict=True
        ):
            if not self._call.is_chief:
                variable.assign(across_processes.local_copy(value))


def _apply(effects: _Effects, model: keras.Model, logs: dict[str, Any]) -> None:
    """Makes another worker continue as the chief does."""
    for flag in _FLAGS:
        setattr(model, flag, flag in effects.flags)
    internals.set_initial_epoch(model, effects.initial_epoch)
    if effects.states is not None:
        effects.states.set()
    if effects.logs is not None:
        logs.clear()
        logs.update(effects.logs)
    if effects.is_synced:
        # The next step reads the variables again, which the chief may have assigned.
        model.jax_state_sync()


def _indices(
    variables: Sequence[DistributedVariable], written: Sequence[DistributedVariable]
) -> list[int]:
    """Returns which variables of a model were written."""
    ids = {id(variable) for variable in written}
    return [i for i, variable in enumerate(variables) if id(variable) in ids]


def _sendable(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns the logs as numbers and texts; other workers do not get anything else."""
    made: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            value = np.asarray(value).tolist()
        if value is None or isinstance(value, bool | int | float | str | list):
            made[name] = value
    return made
