"""`tf.debugging`: assertions about tensors, and checks of numbers.

Shapes, ranks and dtypes are checked everywhere. Values are checked where they are known: in eager
code, in `dataset.map`, and for constants of compiled code. In compiled code, an assertion about
values that the program computes does nothing, so that a step has no callbacks to the host; call
`tf.config.run_functions_eagerly(True)` to check these, too, and `enable_check_numerics` to find
where the first NaN comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf import dtypes, namespaces
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    integer,
    kind_of,
    operands,
    require_kind,
)
from replicax.tf.tensor import Tensor, raw

__all__ = [
    "Assert",
    "assert_all_finite",
    "assert_equal",
    "assert_greater",
    "assert_greater_equal",
    "assert_integer",
    "assert_less",
    "assert_less_equal",
    "assert_near",
    "assert_negative",
    "assert_non_negative",
    "assert_non_positive",
    "assert_none_equal",
    "assert_positive",
    "assert_proper_iterable",
    "assert_rank",
    "assert_rank_at_least",
    "assert_rank_in",
    "assert_same_float_dtype",
    "assert_scalar",
    "assert_shapes",
    "assert_type",
    "check_numerics",
    "disable_check_numerics",
    "disable_traceback_filtering",
    "enable_check_numerics",
    "enable_traceback_filtering",
    "get_log_device_placement",
    "is_numeric_tensor",
    "is_traceback_filtering_enabled",
    "set_log_device_placement",
]

_MOST_SHOWN = 3


def _prefix(message: str | None) -> str:
    return f"{message.rstrip('.')}: " if message else ""


def _arrays(*values: Value, name: str) -> tuple[Array, ...]:
    return operands(*(raw(value) for value in values), op=f"debugging.{name}")


def _known(*values: Value) -> tuple[np.ndarray, ...] | None:
    """Returns values, or None in compiled code that computes one of them."""
    if any(jax_compat.is_traced(value) for value in values):
        return None
    return tuple(np.asarray(value) for value in values)


def _shown(values: np.ndarray, summarize: int | None) -> str:
    most = _MOST_SHOWN if summarize is None else summarize
    flat = values.reshape(-1).tolist()
    is_cut = 0 <= most < len(flat)
    text = ", ".join(map(str, flat[:most] if is_cut else flat))
    return f"[{text}, …]" if is_cut else f"[{text}]"


def Assert(
    condition: Value, data: Value, summarize: int | None = None, name: str | None = None
) -> None:
    """Raises unless a condition is true.

    Args:
      condition: A truth value.
      data: Values to show in the error.
      summarize: How many elements of each to show; 3 by default, all with -1.
      name: Ignored.

    >>> Assert(True, [1])
    """
    found = _known(array(raw(condition)))
    if found is None or found[0].any():
        return
    parts = [raw(part) for part in data]
    shown = "; ".join(
        "traced" if jax_compat.is_traced(part) else _shown(np.asarray(part), summarize)
        for part in parts
    )
    raise errors.InvalidArgumentError(
        "The condition of `tf.debugging.Assert` must be true", f"it is false, with {shown}", ""
    )


def _compared(
    sign: str,
    holds: Callable[[Any, Any], Any],
    x: Value,
    y: Value,
    message: str | None,
    summarize: int | None,
) -> None:
    left, right = _arrays(x, y, name="assert")
    shape = np.broadcast_shapes(tuple(left.shape), tuple(right.shape))
    known = _known(left, right)
    if known is None:
        return
    is_wrong = np.broadcast_to(np.logical_not(holds(*known)), shape)
    if not is_wrong.any():
        return
    first = np.argwhere(is_wrong)[0].tolist()
    raise errors.InvalidArgumentError(
        f"{_prefix(message)}x {sign} y must hold for all elements",
        f"it does not at {int(is_wrong.sum())} of {is_wrong.size} places, the first at {first}; "
        f"x is {_shown(known[0], summarize)}, y is {_shown(known[1], summarize)}",
        "Check both values.",
    )


def assert_equal(
    x: Value,
    y: Value,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """Raises unless x == y everywhere.

    >>> assert_equal([1, 2], [1, 2])
    """
    _compared("==", np.equal, x, y, message, summarize)


def assert_none_equal(
    x: Value,
    y: Value,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """Raises unless x != y everywhere.

    >>> assert_none_equal([1, 2], [2, 1])
    """
    _compared("!=", np.not_equal, x, y, message, summarize)


def _comparison(name: str, sign: str, holds: Callable[[Any, Any], Any], example: str) -> Any:
    def check(
        x: Value,
        y: Value,
        message: str | None = None,
        summarize: int | None = None,
        name: str | None = None,
    ) -> None:
        _compared(sign, holds, x, y, message, summarize)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Raises unless x {sign} y everywhere.\n\n    >>> {name}({example})\n"
    return check


assert_less = _comparison("assert_less", "<", np.less, "[1, 2], 3")
assert_less_equal = _comparison("assert_less_equal", "<=", np.less_equal, "[1, 2], 2")
assert_greater = _comparison("assert_greater", ">", np.greater, "[1, 2], 0")
assert_greater_equal = _comparison("assert_greater_equal", ">=", np.greater_equal, "[1, 2], 1")


def assert_near(
    x: Value,
    y: Value,
    rtol: Value = None,
    atol: Value = None,
    message: str | None = None,
    summarize: int | None = None,
    name: str | None = None,
) -> None:
    """Raises unless |x - y| < atol + rtol * |y| everywhere; both are 10 eps of the dtype.

    >>> assert_near(1.0, 1.0 + 1e-7)
    """
    left, right = _arrays(x, y, name="assert_near")
    require_kind(left, "debugging.assert_near", "fc")
    real = dtypes.as_dtype(left.dtype).real_dtype
    least = 10 * float(jax.numpy.finfo(real.dtype).eps)
    relative, absolute = (least if t is None else float(np.asarray(raw(t))) for t in (rtol, atol))

    def is_near(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.abs(x - y) <= absolute + relative * np.abs(y)

    _compared("≈", is_near, left, right, message, summarize)


def _sign(name: str, sign: str, holds: Callable[[Any, Any], Any], example: str) -> Any:
    def check(
        x: Value, message: str | None = None, summarize: int | None = None, name: str | None = None
    ) -> None:
        _compared(sign, holds, x, 0, message, summarize)

    check.__name__ = check.__qualname__ = name
    check.__doc__ = f"Raises unless x {sign} 0 everywhere.\n\n    >>> {name}({example})\n"
    return check


assert_positive = _sign("assert_positive", ">", np.greater, "[1, 2]")
assert_negative = _sign("assert_negative", "<", np.less, "[-1, -2]")
assert_non_negative = _sign("assert_non_negative", ">=", np.greater_equal, "[0, 2]")
assert_non_positive = _sign("assert_non_positive", "<=", np.less_equal, "[0, -2]")


# Numbers.


@op
def _checked(x: Value, name: str, message: str) -> Array:
    found = array(x)
    require_kind(found, f"debugging.{name}", "fc")
    known = _known(found)
    if known is not None and not np.isfinite(known[0]).all():
        kinds = [
            kind for kind, test in (("NaN", np.isnan), ("Inf", np.isinf)) if test(known[0]).any()
        ]
        raise errors.InvalidArgumentError(
            f"{_prefix(message)}All elements must be finite",
            f"the tensor has {' and '.join(kinds)}",
            "Look for a division by zero, a logarithm of zero, or an overflow.",
        )
    return found


def check_numerics(tensor: Value, message: str, name: str | None = None) -> Any:
    """Returns the tensor, or raises if an element is not finite.

    >>> check_numerics([1.0, 2.0], "weights").numpy().tolist()
    [1.0, 2.0]
    """
    return _checked(tensor, "check_numerics", message)


def assert_all_finite(x: Value, message: str, name: str | None = None) -> Any:
    """Returns the tensor, or raises if an element is not finite.

    >>> assert_all_finite([1.0, 2.0], "weights").numpy().tolist()
    [1.0, 2.0]
    """
    return _checked(x, "assert_all_finite", message)


def enable_check_numerics(stack_height_limit: int = 30, path_length_limit: int = 50) -> None:
    """Raises for the first operation that makes a NaN or an infinite number, also in steps.

    It sets `jax_debug_nans` and `jax_debug_infs`: a compiled function whose result has such a
    number runs again, operation by operation. Both arguments are ignored.

    >>> enable_check_numerics()
    >>> disable_check_numerics()
    """
    del stack_height_limit, path_length_limit
    _check_results(True)


def disable_check_numerics() -> None:
    """Ends what `enable_check_numerics` started.

    >>> disable_check_numerics()
    """
    _check_results(False)


def _check_results(is_checked: bool) -> None:
    jax.config.update("jax_debug_nans", is_checked)
    jax.config.update("jax_debug_infs", is_checked)


def is_numeric_tensor(tensor: Value) -> bool:
    """Tells whether a value is a tensor of numbers.

    >>> is_numeric_tensor(Tensor(np.asarray([1.0]))), is_numeric_tensor(1.0)
    (True, False)
    """
    is_tensor = isinstance(tensor, Tensor | jax.Array) or hasattr(tensor, "assign")
    return is_tensor and kind_of(raw(tensor).dtype) in "fciu"


# Shapes and dtypes.


def _shape_of(x: Value) -> tuple[int, ...]:
    found = raw(x)
    return tuple(found.shape if hasattr(found, "shape") else array(found).shape)


def _require_rank(x: Value, is_right: bool, wanted: str, message: str | None) -> None:
    if not is_right:
        shape = _shape_of(x)
        raise errors.InvalidArgumentError(
            f"{_prefix(message)}The tensor must have {wanted}",
            f"it has rank {len(shape)}, its shape is {shape}",
            "Use tf.reshape, tf.expand_dims or tf.squeeze.",
        )


def assert_rank(x: Value, rank: Value, message: str | None = None, name: str | None = None) -> None:
    """Raises unless a tensor has a number of dimensions.

    >>> assert_rank([1, 2], 1)
    """
    wanted = integer(raw(rank), "rank")
    _require_rank(x, len(_shape_of(x)) == wanted, f"rank {wanted}", message)


def assert_rank_at_least(
    x: Value, rank: Value, message: str | None = None, name: str | None = None
) -> None:
    """Raises unless a tensor has at least a number of dimensions.

    >>> assert_rank_at_least([[1, 2]], 1)
    """
    wanted = integer(raw(rank), "rank")
    _require_rank(x, len(_shape_of(x)) >= wanted, f"at least rank {wanted}", message)


def assert_rank_in(
    x: Value, ranks: Value, message: str | None = None, name: str | None = None
) -> None:
    """Raises unless a tensor has one of some numbers of dimensions.

    >>> assert_rank_in([1, 2], (1, 2))
    """
    wanted = [integer(raw(rank), "ranks") for rank in ranks]
    _require_rank(x, len(_shape_of(x)) in wanted, f"one of the ranks {wanted}", message)


def assert_scalar(tensor: Value, message: str | None = None, name: str | None = None) -> None:
    """Raises unless a tensor has no dimensions.

    >>> assert_scalar(3)
    """
    _require_rank(tensor, not _shape_of(tensor), "no dimensions", message)


def assert_shapes(
    shapes: Value,
    data: Value = None,
    summarize: int | None = None,
    message: str | None = None,
    name: str | None = None,
) -> None:
    """Raises unless tensors have shapes with equal sizes for equal letters.

    Args:
      shapes: Pairs of a tensor and its shape, or a dict. A size is a number, a name that stands
        for one size in all shapes, or None for any. A first or last `...` (or "*") stands for any
        dimensions. A string such as "NHW" has a letter for each dimension.
      data: Ignored.
      summarize: Ignored.
      message: The start of the error.
      name: Ignored.

    >>> assert_shapes([(np.ones((2, 3)), ("batch", 3)), (np.ones(2), ("batch",))])
    """
    del data, summarize, name
    pairs = shapes.items() if isinstance(shapes, Mapping) else shapes
    sizes: dict[str, int] = {}
    for number, (tensor, wanted) in enumerate(pairs):
        _match(_shape_of(tensor), _listed(wanted), sizes, f"tensor {number}", message)


def _listed(wanted: Value) -> list[Any]:
    if isinstance(wanted, str):
        return list(wanted)
    return list(wanted) if isinstance(wanted, Iterable) else [wanted]


def _match(
    shape: tuple[int, ...],
    wanted: list[Any],
    sizes: dict[str, int],
    label: str,
    message: str | None,
) -> None:
    found, given = list(shape), wanted
    is_open = ["" if part not in (..., "*") else "*" for part in wanted]
    if wanted and is_open[0]:
        given = wanted[1:]
        found = found[len(found) - len(given) :] if len(found) >= len(given) else found
    elif wanted and is_open[-1]:
        given = wanted[:-1]
        found = found[: len(given)]
    is_right = len(found) == len(given)
    for size, part in zip(found, given, strict=False):
        if part is None or part == ".":
            continue
        if isinstance(part, str) and not part.isdigit():
            is_right = is_right and sizes.setdefault(part, size) == size
        else:
            is_right = is_right and size == int(part)
    if not is_right:
        raise errors.InvalidArgumentError(
            f"{_prefix(message)}The shape of {label} must be {tuple(wanted)}",
            f"it is {shape}" + (f", with {sizes}" if sizes else ""),
            "Check the dimensions.",
        )


def assert_type(
    tensor: Value, tf_type: DTypeLike, message: str | None = None, name: str | None = None
) -> None:
    """Raises unless a tensor has a dtype.

    >>> assert_type(np.ones(2, np.float32), dtypes.float32)
    """
    found, wanted = dtypes.as_dtype(array(raw(tensor)).dtype), dtypes.as_dtype(tf_type)
    if found.dtype not in (wanted.dtype, _device_dtype(wanted)):
        raise errors.ArgumentTypeError(
            f"{_prefix(message)}The tensor must be of {wanted!r}",
            f"it is of {found!r}",
            f"Use tf.cast(x, {wanted!r}).",
        )


def _device_dtype(dtype: dtypes.DType) -> np.dtype:
    return dtype.dtype if dtype.name == "string" else dtypes.device_dtype(dtype)


def assert_integer(x: Value, message: str | None = None, name: str | None = None) -> None:
    """Raises unless a tensor has integers.

    >>> assert_integer([1, 2])
    """
    found = array(raw(x))
    if kind_of(found.dtype) not in "iu":
        raise errors.ArgumentTypeError(
            f"{_prefix(message)}The tensor must have integers",
            f"it has {np.dtype(found.dtype).name}",
            "Use tf.cast(x, tf.int32).",
        )


def assert_same_float_dtype(
    tensors: Sequence[Value] | None = None, dtype: DTypeLike = None
) -> dtypes.DType:
    """Returns the float dtype of tensors, or raises unless they have one; float32 for none.

    >>> assert_same_float_dtype([np.ones(2, np.float16)])
    tf.float16
    """
    found = [dtypes.as_dtype(array(raw(tensor)).dtype) for tensor in tensors or ()]
    if dtype is not None:
        found.insert(0, dtypes.as_dtype(dtype))
    if not all(one == found[0] for one in found) or (found and not found[0].is_floating):
        raise errors.InvalidArgumentError(
            "The tensors must have one float dtype", f"they have {found}", "Use tf.cast."
        )
    return found[0] if found else dtypes.float32


def assert_proper_iterable(values: Value) -> None:
    """Raises for what is not a list, a tuple or the like: tensors, arrays and strings.

    >>> assert_proper_iterable([1, 2])
    """
    is_one = isinstance(values, Tensor | jax.Array | np.ndarray | str | bytes)
    if is_one or not hasattr(values, "__iter__"):
        raise errors.ArgumentTypeError(
            "`values` must be a list or another iterable of values",
            f"it is {type(values).__name__}",
            "Use [value].",
        )


# Settings.

_settings = {"log_device_placement": False, "traceback_filtering": True}


def set_log_device_placement(enabled: bool) -> None:
    """Keeps the setting; JAX does not place single operations. See `tensor.device`.

    >>> set_log_device_placement(False)
    """
    _settings["log_device_placement"] = bool(enabled)


def get_log_device_placement() -> bool:
    """Returns what `set_log_device_placement` was given.

    >>> get_log_device_placement()
    False
    """
    return _settings["log_device_placement"]


def _set_filtering(is_enabled: bool) -> None:
    _settings["traceback_filtering"] = is_enabled
    jax.config.update("jax_traceback_filtering", "auto" if is_enabled else "off")


def enable_traceback_filtering() -> None:
    """Leaves frames of JAX out of tracebacks, which is the default.

    >>> enable_traceback_filtering()
    """
    _set_filtering(True)


def disable_traceback_filtering() -> None:
    """Shows frames of JAX in tracebacks.

    >>> disable_traceback_filtering()
    >>> enable_traceback_filtering()
    """
    _set_filtering(False)


def is_traceback_filtering_enabled() -> bool:
    """Tells whether tracebacks leave out frames of JAX.

    >>> is_traceback_filtering_enabled()
    True
    """
    return _settings["traceback_filtering"]


__getattr__ = namespaces.refusing(__name__)
