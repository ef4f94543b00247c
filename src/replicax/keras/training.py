"""`fit`, `evaluate` and `predict` of models that were made in the scope of a strategy.

Keras keeps its loops, callbacks and data adapters. What it calls to make and to hold the state
of a step is replaced: the state is that of the twins, and a step is a `GlobalStep`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from replicax.foundation import errors, gate
from replicax.foundation.types import Tree
from replicax.keras import alone, internals
from replicax.keras.global_step import GlobalStep, StepFunction, placed
from replicax.keras.variables import DistributedVariable, adopt
from replicax.strategies.base import Strategy
from replicax.strategies.default import DefaultStrategy
from replicax.values.layout import ReplicaLayout

_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()

# The kinds of state, in the order of Keras' steps.
KINDS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


def remember(layer: keras.layers.Layer, strategy: Strategy) -> None:
    """Notes the strategy in whose scope a layer or model was made."""
    _strategies[layer] = strategy


def maker_of(layer: keras.layers.Layer) -> Strategy | None:
    """Returns the strategy in whose scope a layer was made; None if there was no scope."""
    return _strategies.get(layer)


def strategy_of(model: keras.Model) -> Strategy | None:
    """Returns the strategy that trains a model; None if Keras does without one."""
    strategy = maker_of(model)
    return None if isinstance(strategy, DefaultStrategy) else strategy


def models_of(strategy: Strategy) -> list[keras.Model]:
    """Returns the models that were made in the scope of a strategy and are still used."""
    return [m for m, own in list(_strategies.items()) if own is strategy and _is_model(m)]


def _is_model(layer: keras.layers.Layer) -> bool:
    return isinstance(layer, keras.Model)


def forget_steps() -> None:
    """Lets all models make the functions of their steps again."""
    for model in list(_strategies):
        if isinstance(model, keras.Model):
            for name in ("train_function", "test_function", "predict_function"):
                setattr(model, name, None)


def layout_of(model: keras.Model) -> ReplicaLayout | None:
    """Returns the replicas that train a model; None if Keras trains it by itself."""
    strategy = strategy_of(model)
    return None if strategy is None else strategy.extended.layout


def is_compiled(model: keras.Model) -> bool:
    """Tells whether the steps of a model are compiled; if not, one device runs them."""
    return bool(not model.run_eagerly and model.jit_compile)


def variables_of(model: keras.Model, kind: str) -> list[Any]:
    """Returns the variables of one kind of state."""
    if kind == "optimizer_variables":
        return model.optimizer.variables
    return getattr(model, kind)


def all_variables(model: keras.Model) -> list[DistributedVariable]:
    """Returns the variables of a model, its optimizer and its metrics, in a fixed order."""
    strategy = strategy_of(model)
    assert strategy is not None
    found: list[Any] = []
    for kind in KINDS:
        if kind != "optimizer_variables" or getattr(model, "optimizer", None) is not None:
            found += variables_of(model, kind)
    for variable in found:
        adopt(variable, strategy)
    return found


def combine_variables(model: keras.Model) -> None:
    """Lets the chief read and write the variables of a model by itself; all processes call it."""
    variables = all_variables(model)
    # New ones get their common values.
    gate.settle()
    for variable in variables:
        variable.combine()


def take_state(model: keras.Model, kinds: Sequence[str]) -> tuple[list[jax.Array], ...]:
    """Returns the values of the variables of a model, for a step."""
    strategy = strategy_of(model)
    assert strategy is not None
    found: list[list[jax.Array]] = []
    for kind in kinds:
        variables = variables_of(model, kind)
        for variable in variables:
            adopt(variable, strategy)
        if alone.is_alone():
            found.append(alone.copied(variables))
            continue
        # Uncompiled steps combine values by JAX functions one by one: on one device.
        read = DistributedVariable.take_global if is_compiled(model) else _read
        found.append([read(variable) for variable in variables])
    return tuple(found)


def _read(variable: DistributedVariable) -> jax.Array:
    return variable.value


def give_state(model: keras.Model, state: dict[str, Tree]) -> None:
    """Stores the values that the steps of a model have computed in its variables."""
    layout = layout_of(model)
    assert layout is not None
    for kind in filter(state.get, KINDS):
        for variable, value in zip(variables_of(model, kind), state[kind], strict=False):
            if not is_compiled(model) or _is_of_one_process(value, layout):
                variable.assign(value)
            elif not value.is_deleted():
                variable.give_global(value)


def _is_of_one_process(value: jax.Array, layout: ReplicaLayout) -> bool:
    """Tells whether the chief has computed a value by itself."""
    return layout.spans_processes and len(value.sharding.device_set) == 1


def make_function(
    model: keras.Model, name: str, step: StepFunction, kinds: Sequence[str], *, has_rows: bool
) -> Callable[[Tree, Iterator[Tree]], tuple[Tree, Tree]]:
    """Returns what Keras calls with the state and an iterator, once per execution."""
    layout = layout_of(model)
    assert layout is not None
    run = GlobalStep(f"{name} of {model.name}", step, layout, has_rows=has_rows)

    def one_step(state: Tree, iterator: Iterator[Tree]) -> tuple[Tree, Tree]:
        batch = next(iterator)
        if not is_compiled(model):
            return step(state, batch)
        outputs, state = run(state, placed(batch, layout))
        # Before anything can interrupt: the old state is gone, and this is the only one.
        internals.set_state(model, dict(zip(kinds, state, strict=True)))
        return outputs, state

    def execution(state: Tree, iterator: Iterator[Tree]) -> tuple[Tree, Tree]:
        outputs, state = one_step(state, iterator)
        parts = [outputs]
        try:
            for _ in range(model.steps_per_execution - 1):
                outputs, state = one_step(state, iterator)
                parts.append(outputs)
        except StopIteration:
            pass
        return (_joined(parts) if has_rows else outputs), state

    return execution


def _joined(parts: list[Tree]) -> Tree:
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *rows: np.concatenate([np.asarray(r) for r in rows]), *parts)


def make_train_function(model: keras.Model, force: bool = False) -> None:
    """Replaces `keras.Model.make_train_function`."""
    if model.train_function is None or force:
        made = make_function(model, "train_step", model.train_step, KINDS, has_rows=False)
        setattr(model, "train_function", made)


def make_test_function(model: keras.Model, force: bool = False) -> None:
    """Replaces `keras.Model.make_test_function`."""
    if model.test_function is None or force:
        kinds = (*KINDS[:2], KINDS[3])
        made = make_function(model, "test_step", model.test_step, kinds, has_rows=False)
        setattr(model, "test_function", made)


def make_predict_function(model: keras.Model, force: bool = False) -> object:
    """Replaces `keras.Model.make_predict_function`."""
    if model.predict_function is None or force:

        def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            outputs, non_trainable = model.predict_step(state, batch)
            return outputs, (state[0], non_trainable)

        made = make_function(model, "predict_step", step, KINDS[:2], has_rows=True)
        setattr(model, "predict_function", made)
    return model.predict_function


def require_own_scope(model: keras.Model, api: str, current: Strategy) -> None:
    """Raises if a model that no strategy knows is trained in the scope of one."""
    raise errors.InvalidArgumentError(
        f"`{api}` in the scope of a strategy needs a model that was made in a scope of it",
        f"{model.name!r} was made outside, or in the scope of another strategy, "
        f"and {type(current).__name__} is current",
        "Make the model inside `with strategy.scope():`, or call it outside of the scope.",
    )
