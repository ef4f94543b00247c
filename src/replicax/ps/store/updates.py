"""Updates of a part: validated before anything changes, then applied in place.

The semantics are those of `replicax.variables.updates`, implemented with NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.codec import Buffer
from replicax.ps.store.parts import Part

# None replaces the value by the payload.
_WHOLE: dict[str, np.ufunc | None] = {
    "assign": None,
    "assign_add": np.add,
    "assign_sub": np.subtract,
}
_ROWS: dict[str, np.ufunc | None] = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": None,
}
_NUM_BUFFERS = dict.fromkeys([*_WHOLE, "write_rows"], 1) | dict.fromkeys(_ROWS, 2)
_NOT_FOR_BOOL = frozenset(
    {"assign_sub", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div"}
)


class CheckedUpdate(Protocol):
    """A validated update: applying it cannot fail because of its arguments.

    Attributes:
      parts: The parts whose locks `apply` needs.
      num_rows: How many rows it writes by number.
    """

    @property
    def parts(self) -> Sequence[Part]: ...

    @property
    def num_rows(self) -> int: ...

    def apply(self) -> None:
        """Applies the update; its parts are locked."""
        ...


def num_buffers(kind: str) -> int:
    """Returns how many buffers an update has.

    Raises:
      ProtocolError: The kind of update is unknown.
    """
    count = _NUM_BUFFERS.get(kind)
    if count is None:
        known = ", ".join(_NUM_BUFFERS)
        raise errors.ProtocolError(
            f"An update must be one of {known}", f"it is {kind!r}", "Update both sides."
        )
    return count


def check(update: messages.Update, part: Part, buffers: Sequence[Buffer]) -> CheckedUpdate:
    """Validates an update.

    Raises:
      ProtocolError: The payload has the wrong size.
      InvalidArgumentError: The rows or the type do not fit the update.
    """
    kind = update.kind
    if kind in _NOT_FOR_BOOL and part.dtype == np.bool_:
        raise errors.InvalidArgumentError(
            f"`{kind}` needs numbers", f"{part.label} is of type bool", "Assign it."
        )
    if kind in _WHOLE:
        return _Whole(part, _WHOLE[kind], as_array(buffers[0], part.dtype, part.shape, part.label))
    if not part.shape:
        raise errors.InvalidArgumentError(
            f"`{kind}` needs rows", f"{part.label} has none", "Assign it as a whole."
        )
    if kind == "write_rows":
        rows = as_rows(buffers[0], part.dtype, part)
        if update.start < 0 or update.start + rows.shape[0] > part.num_rows:
            raise errors.InvalidArgumentError(
                f"Rows written to {part.label} must lie in [0, {part.num_rows})",
                f"they range from {update.start} to {update.start + rows.shape[0]}",
                "Correct the first row.",
            )
        return _Block(part, update.start, rows)
    numbers = as_row_numbers(buffers[0], part)
    shape = (numbers.size, *part.shape[1:])
    return _Rows(part, _ROWS[kind], numbers, as_array(buffers[1], part.dtype, shape, part.label))


def as_array(buffer: Buffer, dtype: np.dtype, shape: tuple[int, ...], label: str) -> np.ndarray:
    """Returns a payload as an array, or raises if its size is wrong."""
    expected = math.prod(shape) * dtype.itemsize
    num_bytes = memoryview(buffer).nbytes
    if num_bytes != expected:
        raise errors.ProtocolError(
            f"A payload for {label} of shape {shape} and type {dtype} must have {expected} bytes",
            f"it has {num_bytes}",
            "Send an array of that shape and type.",
        )
    if num_bytes == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype).reshape(shape)


def as_rows(buffer: Buffer, dtype: np.dtype, part: Part) -> np.ndarray:
    """Returns a payload as any number of rows of a part."""
    width = math.prod(part.shape[1:]) * dtype.itemsize
    num_bytes = memoryview(buffer).nbytes
    count = num_bytes // width if width else 0
    return as_array(buffer, dtype, (count, *part.shape[1:]), part.label)


def as_row_numbers(buffer: Buffer, part: Part) -> np.ndarray:
    """Returns the numbers of rows to change: in range, sorted, without duplicates."""
    dtype = np.dtype(np.int64 if part.num_rows >= 1 << 31 else np.int32)
    numbers = _numbers(buffer, dtype, part)
    if numbers.size and (
        numbers[0] < 0 or numbers[-1] >= part.num_rows or not (numbers[1:] > numbers[:-1]).all()
    ):
        raise errors.InvalidArgumentError(
            f"Row numbers for {part.label} must be sorted, unique, and in [0, {part.num_rows})",
            f"they are {numbers.size} from {numbers.min()} to {numbers.max()}, "
            f"{np.unique(numbers).size} of them unique",
            "Correct them, and sum the values of duplicates.",
        )
    return numbers.astype(np.intp)


def as_rows_to_read(buffer: Buffer, part: Part) -> np.ndarray:
    """Returns the numbers of rows to read: in range, in any order."""
    if not part.shape:
        raise errors.InvalidArgumentError(
            "Reading rows needs rows", f"{part.label} has none", "Read all of it."
        )
    numbers = _numbers(buffer, np.dtype(np.int64), part)
    # As unsigned, a negative number is a huge one.
    if numbers.size and numbers.view(np.uint64).max() >= part.num_rows:
        raise errors.InvalidArgumentError(
            f"Row numbers for {part.label} must lie in [0, {part.num_rows})",
            f"they range from {numbers.min()} to {numbers.max()}",
            "Correct them.",
        )
    return numbers


def _numbers(buffer: Buffer, dtype: np.dtype, part: Part) -> np.ndarray:
    num_bytes = memoryview(buffer).nbytes
    return as_array(
        buffer, dtype, (num_bytes // dtype.itemsize,), f"the row numbers of {part.label}"
    )


class _Whole:
    """Updates every element of a part."""

    __slots__ = ("_function", "_payload", "parts")
    num_rows = 0

    def __init__(self, part: Part, function: np.ufunc | None, payload: np.ndarray) -> None:
        self.parts = (part,)
        self._function = function
        self._payload = payload

    def apply(self) -> None:
        if self._function is None:
            self.parts[0].replace(self._payload)
        else:
            self.parts[0].combine(self._function, self._payload)


class _Block:
    """Replaces consecutive rows."""

    __slots__ = ("_rows", "_start", "num_rows", "parts")

    def __init__(self, part: Part, start: int, rows: np.ndarray) -> None:
        self.parts = (part,)
        self._start = start
        self._rows = rows
        self.num_rows = rows.shape[0]

    def apply(self) -> None:
        self.parts[0].write_rows(self._start, self._rows)


class _Rows:
    """Updates some rows of a part."""

    __slots__ = ("_function", "_numbers", "_rows", "num_rows", "parts")

    def __init__(
        self, part: Part, function: np.ufunc | None, numbers: np.ndarray, rows: np.ndarray
    ) -> None:
        self.parts = (part,)
        self._function = function
        self._numbers = numbers
        self._rows = rows
        self.num_rows = numbers.size

    def apply(self) -> None:
        part = self.parts[0]
        if self._function is None:
            part.put_rows(self._numbers, self._rows)
            return
        rows = part.take_rows(self._numbers)
        if self._function is np.true_divide and jnp.issubdtype(part.dtype, jnp.integer):
            rows = _divided(rows, self._rows)
        else:
            self._function(rows, self._rows, out=rows)
        part.put_rows(self._numbers, rows)


def _divided(rows: np.ndarray, divisors: np.ndarray) -> np.ndarray:
    """Returns integer quotients, rounded towards zero; -1 by zero, as XLA gives."""
    # NumPy does not divide extension types such as int4; they are narrower than int64.
    dtype = rows.dtype if rows.dtype.kind in "iu" else np.dtype(np.int64)
    rows_, divisors_ = rows.astype(dtype), divisors.astype(dtype)
    with np.errstate(divide="ignore", over="ignore"):
        quotients, rest = np.divmod(rows_, divisors_)
    # NumPy rounds down: one too low where the exact quotient is a negative fraction.
    quotients += ((rest != 0) & ((rows_ < 0) != (divisors_ < 0))).astype(dtype)
    by_zero = np.asarray(-1).astype(dtype)
    return np.where(divisors_ == 0, by_zero, quotients).astype(rows.dtype)
