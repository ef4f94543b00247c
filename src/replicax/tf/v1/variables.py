"""`tf.compat.v1.get_variable`, as eager code has it: each call makes a variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from replicax.foundation import errors
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.foundation.types import Tree
from replicax.tf import dispatch
from replicax.tf.dtypes import DType, as_dtype
from replicax.tf.ops import random
from replicax.tf.ops.creation import zeros
from replicax.tf.variable import Variable

__all__ = ["get_variable"]


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: DType | str | None = None,
    initializer: Tree = None,
    regularizer: object = None,
    trainable: bool | None = None,
    collections: object = None,
    caching_device: object = None,
    partitioner: object = None,
    validate_shape: bool = True,
    use_resource: bool | None = None,
    custom_getter: object = None,
    constraint: Callable[[Tree], Tree] | None = None,
    synchronization: VariableSynchronization | None = None,
    aggregation: VariableAggregation | None = None,
) -> Any:
    """Makes a variable; unlike in a graph, a name that was used before gets a variable of its own.

    Args:
      name: The name.
      shape: The shape; not needed if `initializer` is a value.
      dtype: The type; float32 by default.
      initializer: A value, or a function of shape and dtype. By default, Glorot's uniform
        distribution, and zeros for integers and booleans.
      regularizer: Must be None: add its loss to that of the step.
      trainable: Whether tapes watch it, and optimizers change it.
      collections: Accepted for portability, without effect.
      caching_device: Accepted for portability, without effect.
      partitioner: Accepted for portability: a strategy gets its own one.
      validate_shape: Accepted for portability, without effect.
      use_resource: Accepted for portability, without effect.
      custom_getter: Must be None: use `tf.variable_creator_scope`.
      constraint: What optimizers apply to each new value.
      synchronization: When copies are brought into agreement.
      aggregation: How the replicas' writes become one value.

    >>> get_variable("v", initializer=3.0)
    <tf.Variable 'v:0' shape=() dtype=float32, numpy=3.0>
    >>> get_variable("w", [2, 3]).shape
    TensorShape([2, 3])
    """
    del collections, caching_device, partitioner, use_resource
    for argument, value, instead in (
        ("regularizer", regularizer, "Add `tf.nn.l2_loss(v)` to the loss."),
        ("custom_getter", custom_getter, "Use `with tf.variable_creator_scope(creator):`."),
    ):
        if value is not None:
            raise errors.UnsupportedError(
                f"`{argument}` of `get_variable` must be None", f"it is {value!r}", instead
            )
    if initializer is not None and not callable(initializer):
        initial = initializer
    elif shape is None:
        raise errors.InvalidArgumentError(
            "`get_variable` needs a shape, or an initializer that is a value",
            f"the variable {name!r} has neither",
            "Pass `shape=[2, 3]`, or `initializer=0.0`.",
        )
    else:
        wanted = as_dtype(dispatch.array_dtype("float32" if dtype is None else dtype))
        fill = initializer() if isinstance(initializer, type) else initializer or _default

        def initial() -> Any:
            return fill(shape, dtype=wanted)

    return Variable(
        initial,
        trainable=trainable,
        validate_shape=validate_shape,
        name=name,
        dtype=dtype,
        constraint=constraint,
        synchronization=synchronization,
        aggregation=aggregation,
    )


def _default(shape: Sequence[int], dtype: DType) -> Any:
    if not dtype.is_floating:
        return zeros(shape, dtype)
    sizes = [int(size) for size in shape] or [1]
    field = 1
    for size in sizes[:-2]:
        field *= size
    fan_in = field * (sizes[-2] if len(sizes) > 1 else sizes[0])
    limit = (6.0 / (fan_in + field * sizes[-1])) ** 0.5
    return random.uniform(shape, -limit, limit, dtype)
