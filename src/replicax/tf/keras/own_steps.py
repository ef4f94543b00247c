"""`train_step(self, data)` as TensorFlow programs write it, with a tape, in Keras' compiled loops.

Keras' JAX backend calls `train_step(state, data)`, which returns a new state. A step with one
argument assigns variables instead. It runs in a scope that holds their values: what it assigned
is the new state.

Note [Variables beside the model]
    A step may assign variables that are not those of the model, its optimizer or its metrics, such
    as those of a second optimizer. They are found when the step is traced for the first time, to
    build the model, and then belong to the state of the model's loops.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from typing_extensions import override

from replicax.foundation.replacements import Replace
from replicax.tf.dispatch import wrap_tree
from replicax.tf.function import TensorFunction
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import KerasModel, KerasObject, Value
from replicax.tf.keras.user_functions import with_tensors
from replicax.tf.tape import GradientTape
from replicax.tf.tape_recording import is_variable, map_leaves
from replicax.tf.tensor import Tensor, raw

_MODEL = ("trainable_variables", "non_trainable_variables")
# The kinds of variables in the state of each step.
_KINDS = {
    "train_step": (*_MODEL, "optimizer_variables", "metrics_variables"),
    "test_step": (*_MODEL, "metrics_variables"),
    "predict_step": _MODEL,
}
# See Note [Variables beside the model].
_beside: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def install(replace: Replace) -> None:
    """Lets models have steps of one argument."""
    replace(keras.Model, "__init_subclass__", _noting_steps)
    for name, default in _DEFAULTS.items():
        replace(keras.Model, name, functools.partial(_with_default, default))
    replace(keras.Model, internals.SYMBOLIC_BUILD, _building)
    replace(keras.Model, "non_trainable_variables", _with_variables_beside)


def _noting_steps(original: KerasObject) -> Any:
    del original

    def __init_subclass__(cls: type[keras.Model], **kwargs: Any) -> None:
        super(keras.Model, cls).__init_subclass__(**kwargs)
        for name in _KINDS:
            own = vars(cls).get(name)
            if isinstance(own, types.FunctionType | TensorFunction) and _takes_data(own):
                setattr(cls, name, _Step(own, name))
        for name in ("compute_loss", "compute_metrics"):
            own = vars(cls).get(name)
            if isinstance(own, types.FunctionType):
                setattr(cls, name, with_tensors(own))

    return classmethod(__init_subclass__)


def _takes_data(step: KerasObject) -> bool:
    """Tells whether a step takes a batch alone, beside the model."""
    function = inspect.unwrap(step)
    return len(inspect.signature(function).parameters) == 2


class _Step:
    """A step that a user has written for batches, which Keras calls with a state."""

    def __init__(self, function: KerasObject, name: str) -> None:
        functools.update_wrapper(self, function)
        self._function, self._name = function, name

    def __get__(self, model: KerasModel, owner: type | None = None) -> Any:
        return self if model is None else functools.partial(self, model)

    def __call__(self, model: KerasModel, *args: Any) -> Any:
        if len(args) != 2:
            return self._function.__get__(model, type(model))(*args)
        state, data = args
        variables = [_variables(model, kind) for kind in _KINDS[self._name]]
        mapping = [
            pair
            for own, values in zip(variables, state, strict=True)
            for pair in zip(own, values, strict=True)
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            found = self.run(model, data)
        new = tuple([scope.get_current_value(v) for v in own] for own in variables)
        return found, (new[1] if self._name == "predict_step" else new)

    def run(self, model: KerasModel, data: Value) -> Any:
        """Runs the step on arrays."""
        function = inspect.unwrap(self._function)
        try:
            found = function.__get__(model)(wrap_tree(data))
        finally:
            internals.clear_losses(model)
        return map_leaves(_array, found)


def _array(leaf: Value) -> Any:
    return raw(leaf) if isinstance(leaf, Tensor) or is_variable(leaf) else leaf


def _variables(model: KerasModel, kind: str) -> Sequence[Any]:
    return model.optimizer.variables if kind == "optimizer_variables" else getattr(model, kind)


# The steps of Keras, for users who call them with a batch.


def _with_default(default: Callable[..., Any], original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def step(self: Any, *args: Any) -> Any:
        return original(self, *args) if len(args) == 2 else default(self, *args)

    return step


def _train_step(model: KerasModel, data: Value) -> Any:
    """Trains on a batch."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with GradientTape() as tape:
        y_pred = model(x, training=True)
        loss = internals.compute_loss(model, x, y, y_pred, weights)
        scaled = model.optimizer.scale_loss(loss)
    internals.loss_tracker(model).update_state(loss, sample_weight=_rows(x))
    variables = model.trainable_variables
    gradients = tape.gradient(scaled, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return model.compute_metrics(x, y, y_pred, weights)


def _test_step(model: KerasModel, data: Value) -> Any:
    """Evaluates a batch."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=False)
    loss = internals.compute_loss(model, x, y, y_pred, weights)
    internals.loss_tracker(model).update_state(loss, sample_weight=_rows(x))
    return model.compute_metrics(x, y, y_pred, weights)


def _predict_step(model: KerasModel, data: Value) -> Any:
    """Returns the outputs for a batch."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return model(x, training=False)


def _rows(x: Value) -> int:
    return keras.tree.flatten(x)[0].shape[0]


_DEFAULTS = {"train_step": _train_step, "test_step": _test_step, "predict_step": _predict_step}


# Building.


class _NotingScope(keras.StatelessScope):
    """Holds values of variables, and notes which ones are assigned."""

    def __init__(self, values: Sequence[tuple[Any, Any]], assigned: dict[int, Any]) -> None:
        super().__init__(state_mapping=values)
        self._assigned = assigned

    @override
    def add_update(self, update: tuple[Any, Any]) -> None:
        self._assigned[id(update[0])] = update[0]
        super().add_update(update)


def _building(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _symbolic_build(self: Any, iterator: KerasObject = None, data_batch: Value = None) -> None:
        steps = [step for step in map(functools.partial(_own_step, self), _KINDS) if step]
        # `compile` removes the functions of a model: nothing is new where there is one.
        is_known = self.train_function is not None or self.test_function is not None
        if not steps or is_known:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        if data_batch is None:
            data_batch = internals.first_batch(iterator)
        # The model may have no `call`, and its step builds its parts.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            original(self, data_batch=data_batch)
        for step in steps[:1]:
            _find_variables(self, step, data_batch)
        if not getattr(self, "built", True):
            self.built = True
        internals.post_build(self)

    return _symbolic_build


def _own_step(model: KerasModel, name: str) -> _Step | None:
    found = inspect.getattr_static(type(model), name)
    return found if isinstance(found, _Step) else None


def _find_variables(model: KerasModel, step: _Step, batch: Value) -> None:
    """Traces a step once, so that all of its variables are made and known."""
    known = [v for kind in _KINDS["train_step"] for v in _variables_if_any(model, kind)]
    assigned: dict[int, Any] = {}

    def trace(values: Sequence[Any], data: Value) -> Any:
        with _NotingScope(list(zip(known, values, strict=True)), assigned):
            return step.run(model, data)

    # New variables get their values at the end of the outer scope, outside of the trace.
    with keras.StatelessScope():
        jax.eval_shape(trace, *jax.tree.map(_spec, ([_Shaped(v) for v in known], batch)))
    known = [v for kind in _KINDS["train_step"] for v in _variables_if_any(model, kind)]
    beside = [v for v in assigned.values() if all(v is not other for other in known)]
    if beside:
        _beside[model] = [*_beside.get(model, ()), *beside]


class _Shaped:
    """The shape and dtype of a variable."""

    def __init__(self, variable: Value) -> None:
        self.shape, self.dtype = tuple(variable.shape), variable.dtype


def _spec(array: KerasObject) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _variables_if_any(model: KerasModel, kind: str) -> Sequence[Any]:
    has_none = kind == "optimizer_variables" and getattr(model, "optimizer", None) is None
    return () if has_none else _variables(model, kind)


def _with_variables_beside(original: property) -> property:
    def non_trainable_variables(self: Any) -> list[Any]:
        assert original.fget is not None
        return [*original.fget(self), *_beside.get(self, ())]

    return property(non_trainable_variables)
