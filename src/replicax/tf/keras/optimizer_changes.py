"""Arguments and methods of optimizers that earlier versions of Keras had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import keras

from replicax.contexts import frames
from replicax.contexts.frames import Mode
from replicax.foundation import errors
from replicax.foundation.replacements import Replace
from replicax.keras.internals import in_stateless_scope
from replicax.tf.dispatch import wrap_tree
from replicax.tf.keras import internals
from replicax.tf.keras.argument_types import ElementType, KerasObject, Value
from replicax.tf.tape import GradientTape
from replicax.tf.tensor import Tensor, raw

# Arguments without a meaning here.
_UNUSED = ("jit_compile", "is_legacy_optimizer")
# Set in an optimizer whose user divides gradients by the scale of the loss.
_UNSCALES = "_rx_user_unscales"


def install(replace: Replace) -> None:
    """Lets optimizers take what earlier versions took."""
    optimizer, scaling = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    replace(optimizer, "__init__", _init)
    replace(optimizer, "lr", lambda _: property(_learning_rate, _set_learning_rate))
    replace(optimizer, "learning_rate", lambda _: property(_learning_rate, _set_rate(_)))
    replace(optimizer, "iterations", _iterations)
    replace(optimizer, internals.CURRENT_LEARNING_RATE, _current_rate)
    replace(optimizer, "_decayed_lr", lambda _: _decayed_rate)
    replace(optimizer, "weights", lambda _: property(lambda self: self.variables))
    replace(optimizer, "get_weights", lambda _: _get_weights)
    replace(optimizer, "minimize", lambda _: _minimize)
    replace(optimizer, "get_gradients", lambda _: _get_gradients)
    replace(optimizer, "apply_gradients", _apply_gradients)
    replace(scaling, "apply", _apply_unscaled)
    replace(scaling, "__init__", _scaling_init)
    replace(scaling, "get_scaled_loss", lambda _: _get_scaled_loss)
    replace(scaling, "get_unscaled_gradients", lambda _: _get_unscaled_gradients)
    replace(scaling, "loss_scale", lambda _: property(_loss_scale))


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in _UNUSED:
            kwargs.pop(name, None)
        rate = kwargs.pop("lr", None)
        if rate is not None:
            args, kwargs = args[1:], {**kwargs, "learning_rate": rate}
        decay = kwargs.pop("decay", None)
        if decay:
            first = args[0] if args else kwargs["learning_rate"]
            made = keras.optimizers.schedules.InverseTimeDecay(float(raw(first)), 1, decay)
            args, kwargs = args[1:], {**kwargs, "learning_rate": made}
        if isinstance(kwargs.get("learning_rate"), Tensor):
            kwargs["learning_rate"] = raw(kwargs["learning_rate"])
        original(self, *args, **kwargs)

    return __init__


# The learning rate.


def _learning_rate(self: Any) -> Any:
    """Returns the variable of the learning rate, or the present value of a schedule."""
    found = getattr(self, internals.CURRENT_LEARNING_RATE)()
    is_value = isinstance(found, jax.Array) and not in_stateless_scope()
    return wrap_tree(found) if is_value else found


def _iterations(original: property) -> property:
    """Returns the variable, or a tensor: gradients that are accumulated make it a quotient."""
    assert original.fget is not None
    get = original.fget

    def iterations(self: Any) -> Any:
        found = get(self)
        is_value = isinstance(found, jax.Array) and not in_stateless_scope()
        return wrap_tree(found) if is_value else found

    return property(iterations, original.fset)


def _set_learning_rate(self: Any, value: Value) -> None:
    self.learning_rate = value


def _set_rate(original: property) -> Callable[[Any, Any], None]:
    assert original.fset is not None
    put = original.fset

    def set_rate(self: Any, value: Value) -> None:
        put(self, raw(value) if isinstance(value, Tensor) else value)

    return set_rate


def _current_rate(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def current_learning_rate(self: Any) -> Any:
        found = original(self)
        return raw(found) if isinstance(found, Tensor) else found

    return current_learning_rate


def _decayed_rate(self: Any, var_dtype: ElementType = None) -> Any:
    """Returns the present learning rate as a tensor."""
    found = wrap_tree(raw(getattr(self, internals.CURRENT_LEARNING_RATE)()))
    name = getattr(var_dtype, "name", var_dtype)
    return found if name is None else wrap_tree(raw(found).astype(name))


# Gradients.


def _get_weights(self: Any) -> list[Any]:
    """Returns the values of all variables of the optimizer, as NumPy arrays."""
    return [variable.numpy() for variable in self.variables]


def _minimize(
    self: Any,
    loss: Value,
    var_list: Value,
    grad_loss: Value = None,
    name: str | None = None,
    tape: KerasObject = None,
) -> Any:
    """Applies the gradients of a loss: a function, or a tensor that a tape recorded."""
    del name
    gradients, variables = _gradients(loss, var_list, grad_loss, tape)
    self.apply_gradients(zip(gradients, variables, strict=True))
    return self.iterations


def _get_gradients(self: Any, loss: Value, params: Value) -> list[Any]:
    """Returns the gradients of a loss, which must be a function here."""
    return _gradients(loss, params, None, None)[0]


def _gradients(
    loss: Value, var_list: Value, grad_loss: Value, tape: KerasObject
) -> tuple[list[Any], list[Any]]:
    if not callable(loss) and tape is None:
        raise errors.InvalidArgumentError(
            "`minimize` needs a loss that is a function, or the tape that recorded it",
            "a tensor was given without `tape`",
            "Pass `lambda: compute_loss()`, or `tape=tape`.",
        )
    if callable(loss):
        tape = tape or GradientTape()
        with tape:
            value = loss()
    else:
        value = loss
    variables: list[Any] = list(cast(Any, var_list() if callable(var_list) else var_list))
    return tape.gradient(value, variables, output_gradients=grad_loss), variables


def _apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_gradients(
        self: Any,
        grads_and_vars: Value,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
        **unused: Any,
    ) -> Any:
        del name, unused
        pairs = list(grads_and_vars)
        if skip_gradients_aggregation or not experimental_aggregate_gradients:
            pairs = _divided(pairs)
        original(self, pairs)
        return self.iterations

    return apply_gradients


def _divided(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Divides gradients that are equal on all replicas: applying them sums them."""
    frame = frames.current()
    if frame.mode is not Mode.REPLICA or frame.is_default:
        return list(pairs)
    count = frame.strategy.num_replicas_in_sync
    return [(None if grad is None else grad / count, variable) for grad, variable in pairs]


# Loss scaling.


def _scaling_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, inner_optimizer: KerasObject, *args: Any, **kwargs: Any) -> None:
        # Keras 2 has `dynamic` second, and a scale that stays needs `initial_scale`.
        if args and isinstance(args[0], bool):
            kwargs["dynamic"] = args[0]
            kwargs.update(zip(("initial_scale", "dynamic_growth_steps"), args[1:], strict=False))
            args = ()
        scale = kwargs.pop("loss_scale", "dynamic")
        is_dynamic = kwargs.pop("dynamic", True) and scale == "dynamic"
        if scale != "dynamic":
            kwargs["initial_scale"] = float(getattr(scale, "initial_loss_scale", scale))
        if not is_dynamic:
            kwargs["dynamic_growth_steps"] = 2**31 - 1
        given = {name: value for name, value in kwargs.items() if value is not None}
        original(self, inner_optimizer, *args, **given)

    return __init__


def _loss_scale(self: Any) -> Any:
    """The present scale of the loss."""
    return wrap_tree(raw(self.dynamic_scale)) if self.built else self.initial_scale


def _get_scaled_loss(self: Any, loss: Value) -> Any:
    """Multiplies a loss by the scale."""
    if callable(loss):
        return lambda: self.scale_loss(loss())
    return self.scale_loss(loss)


def _get_unscaled_gradients(self: Any, grads: Sequence[Any]) -> list[Any]:
    """Divides gradients by the scale; `apply_gradients` then takes them as they are."""
    self.__dict__[_UNSCALES] = True
    scale = raw(self.dynamic_scale) if self.built else self.initial_scale
    return [None if gradient is None else gradient / scale for gradient in grads]


def _apply_unscaled(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Value = None) -> Any:
        if self.__dict__.get(_UNSCALES):
            # Keras divides by the scale itself. It is a power of two, so nothing is lost.
            scale = raw(self.dynamic_scale) if self.built else self.initial_scale
            grads = [None if gradient is None else gradient * scale for gradient in grads]
        return original(self, grads, trainable_variables)

    return apply
