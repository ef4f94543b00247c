"""Ops of version 1 whose names or arguments differ from those of version 2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from replicax.tf import control_flow, host_functions
from replicax.tf.arguments import DTypeLike, Ignored, Value
from replicax.tf.dtypes import as_dtype, int32, int64
from replicax.tf.ops import (
    arrays,
    clipping,
    creation,
    indexing,
    maths,
    reductions,
)
from replicax.tf.tensor import raw

__all__ = [
    "Print",
    "arg_max",
    "arg_min",
    "argmax",
    "argmin",
    "batch_gather",
    "cond",
    "convert_to_tensor",
    "count_nonzero",
    "div",
    "expand_dims",
    "floor_div",
    "gather",
    "map_fn",
    "mod",
    "norm",
    "ones_like",
    "pad",
    "py_func",
    "reduce_all",
    "reduce_any",
    "reduce_logsumexp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reverse_v2",
    "shape",
    "size",
    "squeeze",
    "to_bfloat16",
    "to_complex64",
    "to_complex128",
    "to_double",
    "to_float",
    "to_int32",
    "to_int64",
    "transpose",
    "where",
    "while_loop",
    "zeros_like",
]


def either(new: Value, old: Value, default: Value = None) -> Any:
    """Returns the value of an argument that has two names.

    >>> either(None, 3), either(None, None, 0)
    (3, 0)
    """
    if new is not None:
        return new
    return default if old is None else old


def _reduction(name: str) -> Callable[..., Any]:
    op = getattr(reductions, name)

    def reduce(
        input_tensor: Value,
        axis: Value = None,
        keepdims: bool | None = None,
        name: str | None = None,
        reduction_indices: Value = None,
        keep_dims: bool | None = None,
    ) -> Any:
        del name
        return op(
            input_tensor,
            axis=either(axis, reduction_indices),
            keepdims=bool(either(keepdims, keep_dims, False)),
        )

    reduce.__name__ = reduce.__qualname__ = name
    reduce.__doc__ = (
        f"Computes `tf.{name}`; takes `reduction_indices` and `keep_dims` as names of arguments."
    )
    return reduce


reduce_all = _reduction("reduce_all")
reduce_any = _reduction("reduce_any")
reduce_logsumexp = _reduction("reduce_logsumexp")
reduce_max = _reduction("reduce_max")
reduce_mean = _reduction("reduce_mean")
reduce_min = _reduction("reduce_min")
reduce_prod = _reduction("reduce_prod")
reduce_sum = _reduction("reduce_sum")


def count_nonzero(
    input_tensor: Value = None,
    axis: Value = None,
    keepdims: bool | None = None,
    dtype: DTypeLike = int64,
    name: str | None = None,
    reduction_indices: Value = None,
    keep_dims: bool | None = None,
    input: Value = None,
) -> Any:
    """Counts the elements that are not zero.

    >>> count_nonzero([[1, 0], [2, 3]], reduction_indices=0).numpy().tolist()
    [2, 1]
    """
    del name
    return reductions.count_nonzero(
        either(input_tensor, input),
        axis=either(axis, reduction_indices),
        keepdims=bool(either(keepdims, keep_dims, False)),
        dtype=dtype,
    )


def argmax(
    input: Value,
    axis: int | None = None,
    name: str | None = None,
    dimension: int | None = None,
    output_type: DTypeLike = int64,
) -> Any:
    """Returns the index of the largest element along an axis.

    >>> int(argmax([1, 3, 2], dimension=0))
    1
    """
    del name
    return reductions.argmax(input, either(axis, dimension, 0), output_type)


def argmin(
    input: Value,
    axis: int | None = None,
    name: str | None = None,
    dimension: int | None = None,
    output_type: DTypeLike = int64,
) -> Any:
    """Returns the index of the smallest element along an axis.

    >>> int(argmin([1, 3, 2]))
    0
    """
    del name
    return reductions.argmin(input, either(axis, dimension, 0), output_type)


def arg_max(
    input: Value, dimension: int, output_type: DTypeLike = int64, name: Ignored = None
) -> Any:
    """Returns the index of the largest element along a dimension.

    >>> int(arg_max([1, 3, 2], 0))
    1
    """
    return argmax(input, dimension, name, output_type=output_type)


def arg_min(
    input: Value, dimension: int, output_type: DTypeLike = int64, name: Ignored = None
) -> Any:
    """Returns the index of the smallest element along a dimension.

    >>> int(arg_min([1, 3, 2], 0))
    0
    """
    return argmin(input, dimension, name, output_type=output_type)


def _cast_to(dtype: str, name: str) -> Callable[..., Any]:
    def cast(x: Value, name: str | None = None) -> Any:
        del name
        return creation.cast(x, dtype)

    cast.__name__ = cast.__qualname__ = name
    cast.__doc__ = f"Casts a tensor to {dtype}."
    return cast


to_bfloat16 = _cast_to("bfloat16", "to_bfloat16")
to_complex128 = _cast_to("complex128", "to_complex128")
to_complex64 = _cast_to("complex64", "to_complex64")
to_double = _cast_to("float64", "to_double")
to_float = _cast_to("float32", "to_float")
to_int32 = _cast_to("int32", "to_int32")
to_int64 = _cast_to("int64", "to_int64")


def div(x: Value, y: Value, name: str | None = None) -> Any:
    """Divides: integers as `//` does, other numbers as `/`.

    >>> div(7, 2).numpy(), div(7.0, 2.0).numpy()
    (np.int32(3), np.float32(3.5))
    """
    del name
    x = creation.convert_to_tensor(x)
    if as_dtype(x.dtype).is_integer:
        return maths.floordiv(x, y)
    return maths.divide(x, y)


def floor_div(x: Value, y: Value, name: str | None = None) -> Any:
    """Divides and rounds down.

    >>> floor_div(7.0, 2.0).numpy()
    np.float32(3.0)
    """
    del name
    return maths.floordiv(x, y)


def mod(x: Value, y: Value, name: str | None = None) -> Any:
    """Returns the remainder, with the sign of the divisor.

    >>> mod(-7, 3).numpy()
    np.int32(2)
    """
    del name
    return maths.floormod(x, y)


def expand_dims(
    input: Value, axis: int | None = None, name: str | None = None, dim: int | None = None
) -> Any:
    """Adds a dimension of size 1.

    >>> expand_dims([1, 2], dim=0).shape.as_list()
    [1, 2]
    """
    del name
    return arrays.expand_dims(input, either(axis, dim))


def squeeze(
    input: Value, axis: Value = None, name: str | None = None, squeeze_dims: Value = None
) -> Any:
    """Removes dimensions of size 1.

    >>> squeeze([[1, 2]], squeeze_dims=[0]).shape.as_list()
    [2]
    """
    del name
    return arrays.squeeze(input, either(axis, squeeze_dims))


def transpose(
    a: Value, perm: Value = None, name: str = "transpose", conjugate: bool = False
) -> Any:
    """Reorders dimensions.

    >>> transpose([[1, 2]]).shape.as_list()
    [2, 1]
    """
    del name
    return arrays.transpose(a, perm, conjugate)


def gather(
    params: Value,
    indices: Value,
    validate_indices: object = None,
    name: str | None = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
    """Returns slices of an axis.

    >>> gather([10, 20, 30], [2, 0]).numpy().tolist()
    [30, 10]
    """
    del validate_indices, name
    return indexing.gather(params, indices, axis=axis, batch_dims=batch_dims)


def batch_gather(params: Value, indices: Value, name: str | None = None) -> Any:
    """Returns slices of the last common axis, row by row.

    >>> batch_gather([[1, 2], [3, 4]], [[1], [0]]).numpy().tolist()
    [[2], [3]]
    """
    del name
    indices = creation.convert_to_tensor(indices)
    dims = len(indices.shape) - 1
    return indexing.gather(params, indices, axis=dims, batch_dims=dims)


def pad(
    tensor: Value,
    paddings: Value,
    mode: str = "CONSTANT",
    name: str | None = None,
    constant_values: Value = 0,
) -> Any:
    """Adds elements before and after each dimension.

    >>> pad([1], [[1, 1]]).numpy().tolist()
    [0, 1, 0]
    """
    del name
    return arrays.pad(tensor, paddings, mode, constant_values)


def zeros_like(
    tensor: Value, dtype: DTypeLike | None = None, name: str | None = None, optimize: bool = True
) -> Any:
    """Returns zeros of the shape of a tensor.

    >>> zeros_like([1, 2]).numpy().tolist()
    [0, 0]
    """
    del name, optimize
    return creation.zeros_like(tensor, dtype)


def ones_like(
    tensor: Value, dtype: DTypeLike | None = None, name: str | None = None, optimize: bool = True
) -> Any:
    """Returns ones of the shape of a tensor.

    >>> ones_like([1, 2]).numpy().tolist()
    [1, 1]
    """
    del name, optimize
    return creation.ones_like(tensor, dtype)


def shape(input: Value, name: str | None = None, out_type: DTypeLike | None = None) -> Any:
    """Returns the shape of a tensor, as a tensor.

    >>> shape([[1, 2]]).numpy().tolist()
    [1, 2]
    """
    del name
    return arrays.shape(input, either(out_type, None, int32))


def size(input: Value, name: str | None = None, out_type: DTypeLike | None = None) -> Any:
    """Returns the number of elements, as a tensor.

    >>> size([[1, 2]]).numpy()
    np.int32(2)
    """
    del name
    return arrays.size(input, either(out_type, None, int32))


def convert_to_tensor(
    value: Value,
    dtype: DTypeLike | None = None,
    name: str | None = None,
    preferred_dtype: DTypeLike | None = None,
    dtype_hint: DTypeLike | None = None,
) -> Any:
    """Returns a value as a tensor.

    >>> convert_to_tensor([1, 2], preferred_dtype="float32").dtype
    tf.float32
    """
    del name
    return creation.convert_to_tensor(value, dtype, either(dtype_hint, preferred_dtype))


def reverse_v2(tensor: Value, axis: Value, name: str | None = None) -> Any:
    """Reverses dimensions.

    >>> reverse_v2([1, 2], [0]).numpy().tolist()
    [2, 1]
    """
    del name
    return arrays.reverse(tensor, axis)


def where(condition: Value, x: Value = None, y: Value = None, name: str | None = None) -> Any:
    """Chooses elements; a vector chooses whole rows. Without `x` and `y`, finds the true elements.

    >>> where([True, False], [[1, 1], [2, 2]], [[3, 3], [4, 4]]).numpy().tolist()
    [[1, 1], [4, 4]]
    """
    del name
    if x is None or y is None:
        return indexing.where(condition, x, y)
    condition, x = creation.convert_to_tensor(condition), creation.convert_to_tensor(x)
    if len(condition.shape) == 1 and len(x.shape) > 1:
        condition = arrays.reshape(condition, [-1, *[1] * (len(x.shape) - 1)])
    return indexing.where(condition, x, y)


def norm(
    tensor: Value,
    ord: Value = "euclidean",
    axis: Value = None,
    keepdims: bool | None = None,
    name: str | None = None,
    keep_dims: bool | None = None,
) -> Any:
    """Returns a norm.

    >>> norm([3.0, 4.0]).numpy()
    np.float32(5.0)
    """
    del name
    return clipping.norm(tensor, ord, axis, bool(either(keepdims, keep_dims, False)))


def cond(
    pred: Value,
    true_fn: Callable[[], Any] | None = None,
    false_fn: Callable[[], Any] | None = None,
    strict: bool = False,
    name: str | None = None,
    fn1: Callable[[], Any] | None = None,
    fn2: Callable[[], Any] | None = None,
) -> Any:
    """Calls one of two functions.

    >>> cond(creation.constant(True), lambda: 1, lambda: 2)
    1
    """
    del strict, name
    return control_flow.cond(pred, either(true_fn, fn1), either(false_fn, fn2))


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Value,
    shape_invariants: Value = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    name: str | None = None,
    maximum_iterations: Value = None,
    return_same_structure: bool = False,
) -> Any:
    """Repeats a function while a condition holds; one loop variable comes back by itself.

    >>> while_loop(lambda i: i < 3, lambda i: i + 1, [creation.constant(0)]).numpy()
    np.int32(3)
    """
    del shape_invariants, parallel_iterations, back_prop, swap_memory, name
    found = control_flow.while_loop(cond, body, loop_vars, maximum_iterations=maximum_iterations)
    is_one = isinstance(found, list | tuple) and len(found) == 1
    return found[0] if is_one and not return_same_structure else found


def map_fn(
    fn: Callable[..., Any],
    elems: Value,
    dtype: Value = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: Value = None,
) -> Any:
    """Applies a function to each row.

    >>> map_fn(lambda x: x * 2, creation.constant([1, 2])).numpy().tolist()
    [2, 4]
    """
    del parallel_iterations, back_prop, swap_memory, infer_shape, name
    kinds = either(fn_output_signature, dtype)
    return control_flow.map_fn(fn, elems, fn_output_signature=kinds)


def py_func(
    func: Callable[..., Any],
    inp: Sequence[Value],
    Tout: Value,
    stateful: bool = True,
    name: str | None = None,
) -> Any:
    """Calls a Python function with NumPy arrays.

    >>> py_func(lambda x: x + 1, [creation.constant(1)], int32).numpy()
    np.int32(2)
    """
    return host_functions.numpy_function(func, inp, Tout, stateful, name)


def Print(
    input_: Value,
    data: Sequence[Value],
    message: str | None = None,
    first_n: int | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> Any:
    """Prints values to standard error, and returns the first argument.

    >>> Print(creation.constant(1), []).numpy()
    np.int32(1)
    """
    del first_n, name
    edge = 3 if summarize is None else summarize
    host_functions.print(message or "", *data, summarize=edge, output_stream=sys.stderr, sep="")
    return creation.convert_to_tensor(raw(input_)) if not hasattr(input_, "shape") else input_
