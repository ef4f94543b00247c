"""Moves the state of a Keras optimizer to the servers, next to the variables that it updates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import errors
from replicax.keras.parameter_servers import row_trial
from replicax.keras.parameter_servers.optimizer_programs import OptimizerPrograms
from replicax.keras.parameter_servers.row_trial import RowTrial
from replicax.keras.variables import DistributedVariable, cross_replica
from replicax.strategies.base import Strategy
from replicax.training.optimizer.remote import OptimizerHost, RemoteOptimizer, Update
from replicax.variables.sharded import ShardedVariable
from replicax.variables.variable import Variable

# They update each element by itself; others are tried out.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adagrad,
    keras.optimizers.RMSprop,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
# Smaller tables get dense gradients: the trial costs more.
_TABLE_ROWS = 1024

_registered: weakref.WeakKeyDictionary[Any, RemoteOptimizer] = weakref.WeakKeyDictionary()


def on_servers(optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> RemoteOptimizer:
    """Returns the optimizer on the servers; registers it there the first time.

    Raises:
      UnsupportedError: Its updates cannot be computed per variable, or per part of one.
    """
    found = _registered.get(optimizer)
    if found is None:
        _require_supported(optimizer)
        with cross_replica(strategy):
            found = _registered[optimizer] = _Registration(optimizer, strategy).register()
    return found


def _require_supported(optimizer: keras.optimizers.Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise errors.UnsupportedError(
            "An optimizer on parameter servers must update each variable independently",
            f"{name} decides by the gradients of all variables whether to make a step",
            'Use the dtype policy "mixed_bfloat16", which needs no loss scaling.',
        )
    if optimizer.gradient_accumulation_steps and (optimizer.clipnorm or optimizer.global_clipnorm):
        raise errors.UnsupportedError(
            "Gradients are clipped by their norm on the workers, before servers accumulate them",
            f"{name} accumulates gradients over {optimizer.gradient_accumulation_steps} steps",
            "Use `clipvalue`, or no accumulation.",
        )


class _Registration:
    """The way of one optimizer to the servers."""

    def __init__(self, optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> None:
        self._optimizer = optimizer
        self._host = cast("OptimizerHost", strategy.extended)
        self._programs = OptimizerPrograms(optimizer)

    def register(self) -> RemoteOptimizer:
        """Creates the state on the servers, and sends the programs there."""
        programs = self._programs
        updates = [self._update(number) for number in range(len(programs.trained))]
        twins = [_twin_of(v) for v in programs.trained]
        for index in programs.shared:
            variable = programs.state[index]
            variable.twin = self._host.make_shared(twins, variable.path, np.asarray(variable.value))
        state = [_twin_of(v) for v in programs.state]
        shared = [state[i] for i in programs.shared]
        number = self._host.register(shared, updates)
        return RemoteOptimizer(number, twins, state)

    def _update(self, number: int) -> Update:
        programs, variable = self._programs, self._programs.trained[number]
        twin = _twin_of(variable)
        is_sharded = isinstance(twin, ShardedVariable)
        is_table = len(variable.shape) > 1 and variable.shape[0] >= _TABLE_ROWS
        trial = RowTrial(False, False)
        if (is_sharded or is_table) and programs.has_rows(number):
            trial = self._trial(number, is_table=is_table)
        if is_sharded and not trial.is_by_rows:
            raise self._not_by_rows(variable, len(twin.components))
        is_row_wise = is_table and trial.keeps_others and not self._changes_all_rows()
        program = programs.exported(number, is_open=is_sharded or is_row_wise)
        slots = [self._move_slot(twin, programs.state[i]) for i in programs.slots(number)]
        return Update(twin, slots, program, is_row_wise)

    def _trial(self, number: int, *, is_table: bool) -> RowTrial:
        is_known = type(self._optimizer) in _ELEMENTWISE
        if is_known and not is_table and self._programs.trained[number].constraint is None:
            return RowTrial(is_by_rows=True, keeps_others=False)
        return row_trial.run(self._programs, number)

    def _not_by_rows(
        self, variable: DistributedVariable, num_parts: int
    ) -> errors.UnsupportedError:
        return errors.UnsupportedError(
            "An optimizer of a partitioned variable must update its rows independently",
            f"{type(self._optimizer).__name__} does not, and {variable.path!r} of shape "
            f"{variable.shape} is in {num_parts} parts",
            "Use another optimizer, such as Adam, or a partitioner that leaves this variable "
            "in one part.",
        )

    def _changes_all_rows(self) -> bool:
        """Tells whether rows change at steps at which they have no gradient."""
        optimizer = self._optimizer
        return bool(
            optimizer.gradient_accumulation_steps or optimizer.use_ema or optimizer.weight_decay
        )

    def _move_slot(self, twin: Variable, slot: DistributedVariable) -> Variable:
        """Replaces the variable of a slot by one next to the trained variable."""
        value = np.asarray(slot.value)
        element = _uniform(value)
        spec = jax.ShapeDtypeStruct(value.shape, value.dtype)
        is_sharded = isinstance(twin, ShardedVariable)
        first = _filled(value, 0 if element is None else element, is_sharded=is_sharded)
        found = self._host.make_slot(twin, slot.path, spec, first)
        if element is None:
            found.assign(value)
        slot.twin = found
        return found


def _filled(
    value: np.ndarray, element: ArrayLike, *, is_sharded: bool
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function from a variable, or a part of it, to its first slot."""

    def first(part: jax.Array) -> jax.Array:
        shape = (part.shape[0], *value.shape[1:]) if is_sharded else value.shape
        return jnp.full(shape, element, value.dtype)

    return first


def _uniform(value: np.ndarray) -> Any:
    """Returns the element that an array consists of; None if elements differ."""
    if not math.prod(value.shape):
        return 0
    element = value.reshape(-1)[0]
    return element if np.all(value == element) else None


def _twin_of(variable: DistributedVariable) -> Variable:
    assert variable.twin is not None
    return variable.twin
