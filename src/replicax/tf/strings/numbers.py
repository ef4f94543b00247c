"""Numbers as strings, and strings as numbers."""

from __future__ import annotations

import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes, tensor_text
from replicax.tf.dispatch import op
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    kind_of,
    require_values,
)
from replicax.tf.strings.arguments import array_of, placed, strings_of

__all__ = ["as_string", "format", "to_number"]


@op(differentiable=False)
def as_string(
    input: Value,
    precision: int = -1,
    scientific: bool = False,
    shortest: bool = False,
    width: int = -1,
    fill: str = "",
    name: str | None = None,
) -> Array:
    """Returns numbers as strings.

    Args:
      input: Numbers, booleans or strings.
      precision: The digits after the point.
      scientific: Whether floats have an exponent.
      shortest: Whether floats are written in the shorter way.
      width: The least number of characters.
      fill: What fills the width: " ", "0", "-" (on the left), "+".
      name: Accepted for portability.

    >>> as_string([3, 4]).numpy().tolist(), as_string(2.5, precision=2).numpy()
    ([b'3', b'4'], b'2.50')
    """
    given = array(input)
    values = require_values("strings.as_string", given, advice="Call it outside tf.function.")[0]
    kind = kind_of(values.dtype)
    if kind == "O":
        return values
    if kind == "b":
        return array_of((b"true" if v else b"false" for v in values.ravel()), values.shape)
    if scientific and shortest:
        raise errors.InvalidArgumentError(
            "Only one of `scientific` and `shortest` can be used", "both are True", "Leave one out."
        )
    form = f"%{fill}{width if width >= 0 else ''}"
    if kind in "iu":
        flat = values.ravel().tolist()
        return array_of(((f"{form}d" % v).encode() for v in flat), values.shape)
    form += f".{precision}" if precision >= 0 else ""
    form += "e" if scientific else "g" if shortest else "f"
    if kind == "c":
        pairs = ((v.real, v.imag) for v in values.ravel().tolist())
        return array_of(((f"({form},{form})" % p).encode() for p in pairs), values.shape)
    flat = values.astype(np.float64).ravel().tolist()
    return array_of(((form % v).encode() for v in flat), values.shape)


@op(differentiable=False)
def format(
    template: str,
    inputs: Value = (),
    placeholder: str = "{}",
    summarize: int = 3,
    name: str | None = None,
) -> Array:
    """Returns a text with the values of tensors in it.

    >>> format("{} of {}", (np.arange(3), 7)).numpy()
    b'[0 1 2] of 7'
    """
    values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    parts = template.split(placeholder)
    if len(parts) - 1 != len(values):
        raise errors.InvalidArgumentError(
            f"The template must have a placeholder for each of {len(values)} tensors",
            f"it has {len(parts) - 1}",
            "Correct the template.",
        )
    arrays = require_values(
        "strings.format", *map(array, values), advice="Use tf.print in compiled functions."
    )
    shown = [tensor_text.summary(value, summarize) for value in arrays]
    text = parts[0] + "".join(s + part for s, part in zip(shown, parts[1:], strict=True))
    return array_of([text.encode()], ())


@op(differentiable=False)
def to_number(input: Value, out_type: DTypeLike = dtypes.float32, name: str | None = None) -> Array:
    """Returns strings as numbers.

    >>> to_number(["1", "2.5"]).numpy().tolist(), int(to_number("7", dtypes.int32))
    ([1.0, 2.5], 7)
    """
    strings, kind = strings_of(input, "to_number"), dtypes.as_dtype(out_type)
    parse = int if kind.is_integer else float
    try:
        flat = [parse(_digits(data)) for data in strings.reshape(-1).tolist()]
        found = np.asarray(flat, kind.dtype).reshape(strings.shape)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidArgumentError(
            f"Strings must be numbers of {kind.name}",
            str(error),
            "Remove other characters with tf.strings.regex_replace.",
        ) from None
    return placed(found)


def _digits(data: bytes) -> str:
    text = data.decode("latin-1").strip()
    if "_" in text:
        # Python allows them between digits.
        raise ValueError(f"{text!r} is not a number")
    return text
