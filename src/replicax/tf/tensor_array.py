"""`tf.TensorArray`: a list of tensors of one shape, which loops write row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors, jax_compat
from replicax.tf.arguments import DTypeLike, Ignored, ShapeLike, Value
from replicax.tf.dispatch import array_dtype, op, xp
from replicax.tf.dtypes import as_dtype
from replicax.tf.tensor import Tensor, TensorShape, raw


@op(name="stack")
def _stack(rows: Value) -> Any:
    return xp().stack(rows)


@op(name="concat")
def _concat(rows: Value) -> Any:
    return xp().concatenate(rows)


@op(name="tensor_array_write")
def _write(rows: Value, index: Value, value: Value) -> Any:
    return rows.at[index].set(value)


@op(name="tensor_array_read")
def _row(rows: Value, index: Value) -> Any:
    return rows[index]


class TensorArray:
    """A list of tensors of one shape and dtype.

    Rows that are known by their numbers are kept one by one. A row whose number is computed by the
    program makes it one array of all rows.

    Args:
      dtype: The type of the elements.
      size: The number of rows.
      dynamic_size: Whether a write beyond the end adds rows.
      clear_after_read: Accepted for portability, without effect.
      tensor_array_name: Accepted for portability, without effect.
      handle: Accepted for portability, without effect.
      flow: Accepted for portability, without effect.
      infer_shape: Accepted for portability, without effect.
      element_shape: The shape of a row, if it is known.
      colocate_with_first_write_call: Accepted for portability, without effect.
      name: Accepted for portability, without effect.

    >>> from replicax.tf import dtypes
    >>> rows = TensorArray(dtypes.float32, size=2)
    >>> rows = rows.write(0, 1.0).write(1, 2.0)
    >>> rows.stack().numpy().tolist()
    [1.0, 2.0]
    """

    def __init__(
        self,
        dtype: DTypeLike,
        size: Value = None,
        dynamic_size: bool | None = None,
        clear_after_read: bool | None = None,
        tensor_array_name: str | None = None,
        handle: Ignored = None,
        flow: Ignored = None,
        infer_shape: bool = True,
        element_shape: ShapeLike = None,
        colocate_with_first_write_call: bool = True,
        name: str | None = None,
    ) -> None:
        del clear_after_read, tensor_array_name, handle, flow, infer_shape
        del colocate_with_first_write_call, name
        self.dtype = as_dtype(dtype)
        self.dynamic_size = bool(dynamic_size)
        self.element_shape = TensorShape(element_shape)
        self._rows: list[Any] = [None] * _number_of_rows(size)
        # All rows in one tensor; then `_rows` is empty.
        self._joined: Any = None
        if self.element_shape.is_fully_defined() and element_shape is not None and self._rows:
            self._start = tuple(self.element_shape)
        else:
            self._start = None

    @classmethod
    def _of(cls, other: TensorArray, rows: list[Any], joined: Value) -> TensorArray:
        self = cls.__new__(cls)
        self.dtype, self.dynamic_size = other.dtype, other.dynamic_size
        self.element_shape, self._start = other.element_shape, other._start
        self._rows, self._joined = rows, joined
        return self

    @property
    def flow(self) -> Any:
        """The array itself: there is no graph."""
        return self

    @property
    def handle(self) -> Any:
        """The array itself: there is no graph."""
        return self

    def _value(self, value: Value) -> Any:
        if isinstance(value, Tensor):
            if value.dtype != as_dtype(array_dtype(self.dtype)) and value.dtype != self.dtype:
                raise errors.InvalidArgumentError(
                    f"A TensorArray of dtype {self.dtype!r} takes rows of that dtype",
                    f"the row has dtype {value.dtype!r}",
                    f"Convert it: `tf.cast(x, {self.dtype!r})`.",
                )
            return value
        return Tensor(xp().asarray(raw(value), dtype=array_dtype(self.dtype)))

    def write(self, index: Value, value: Value, name: str | None = None) -> TensorArray:
        """Returns the array with another row; use the result, not the array before."""
        del name
        row, number = self._value(value), raw(index)
        if self._joined is None and not jax_compat.is_traced(number):
            number, rows = int(number), list(self._rows)
            if number >= len(rows) and self.dynamic_size:
                rows += [None] * (number + 1 - len(rows))
            self._require_row(number, len(rows))
            rows[number] = row
            return TensorArray._of(self, rows, None)
        joined = self.joined(row.shape)
        return TensorArray._of(self, [], _write(joined, index, row))

    def joined(self, shape: ShapeLike) -> Any:
        """Returns all rows as one tensor, with zeros for those that were not written."""
        if self._joined is not None:
            return self._joined
        if not self._rows:
            raise errors.InvalidArgumentError(
                "A TensorArray in a compiled loop needs its size",
                "it was made without one",
                "Pass `size=`, the number of rounds of the loop.",
            )
        zeros = Tensor(jnp.zeros(tuple(shape), array_dtype(self.dtype)))
        return _stack([zeros if row is None else row for row in self._rows])

    def with_rows(self, shape: ShapeLike) -> TensorArray:
        """Returns the array as one tensor, for the carry of a compiled loop."""
        return TensorArray._of(self, [], self.joined(shape))

    @property
    def is_joined(self) -> bool:
        """Whether all rows are one tensor."""
        return self._joined is not None

    def _require_row(self, number: int, count: int) -> None:
        if not 0 <= number < count:
            raise errors.OutOfRangeError(
                f"A row of this TensorArray must be in [0, {count})",
                f"it is {number}",
                "Pass a larger `size=`, or `dynamic_size=True`.",
            )

    def read(self, index: Value, name: str | None = None) -> Any:
        """Returns a row."""
        del name
        number = raw(index)
        if self._joined is not None or jax_compat.is_traced(number):
            return _row(self.stack(), index)
        self._require_row(int(number), len(self._rows))
        row = self._rows[int(number)]
        if row is None:
            raise errors.InvalidArgumentError(
                "A row of a TensorArray must be written before it is read",
                f"row {int(number)} was not",
                "Write it; `array = array.write(i, value)` keeps the result.",
            )
        return row

    def stack(self, name: str | None = None) -> Any:
        """Returns all rows as one tensor."""
        del name
        if self._joined is not None:
            return self._joined
        written = [row for row in self._rows if row is not None]
        if not written:
            shape = [0, *(self._start or ())]
            return Tensor(xp().zeros(shape, array_dtype(self.dtype)))
        return self.joined(written[0].shape)

    def unstack(self, value: Value, name: str | None = None) -> TensorArray:
        """Returns an array with the rows of a tensor."""
        del name
        return TensorArray._of(self, list(self._value(value)), None)

    def concat(self, name: str | None = None) -> Any:
        """Returns all rows concatenated along their first dimension."""
        del name
        return _concat([*self.stack()])

    def gather(self, indices: Value, name: str | None = None) -> Any:
        """Returns some rows as one tensor."""
        del name
        return _row(self.stack(), xp().asarray(raw(indices)))

    def scatter(self, indices: Value, value: Value, name: str | None = None) -> TensorArray:
        """Returns the array with the rows of a tensor at some indices."""
        del name
        found, rows = self, self._value(value)
        for position, index in enumerate(np.asarray(raw(indices)).tolist()):
            found = found.write(index, rows[position])
        return found

    def split(self, value: Value, lengths: Value, name: str | None = None) -> TensorArray:
        """Returns an array whose rows are parts of a tensor of the given lengths."""
        del name
        start, rows, whole = 0, [], self._value(value)
        for length in np.asarray(raw(lengths)).tolist():
            rows.append(whole[start : start + length])
            start += length
        return TensorArray._of(self, rows, None)

    def size(self, name: str | None = None) -> Any:
        """Returns the number of rows."""
        del name
        count = len(self._rows) if self._joined is None else len(self._joined)
        return Tensor(xp().asarray(count, dtype=array_dtype("int32")))

    def identity(self) -> TensorArray:
        """Returns the array."""
        return self

    def close(self, name: str | None = None) -> None:
        """Does nothing: memory is freed with the last reference."""
        del name

    def __len__(self) -> int:
        return int(self.size())

    def facts(self) -> Facts:
        """Returns what is not a row."""
        return Facts(self)


class Facts:
    """What is not a row of a TensorArray; equal for arrays of one kind."""

    def __init__(self, array: TensorArray) -> None:
        self.array = TensorArray._of(array, [], None)
        joined = array._joined
        self.mask = None if joined is not None else tuple(r is not None for r in array._rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Facts):
            return NotImplemented
        return (self.mask, self.array.dtype) == (other.mask, other.array.dtype)

    def __hash__(self) -> int:
        return hash((self.mask, self.array.dtype))

    def array_of(self, joined: Value) -> TensorArray:
        """Returns an array of this kind with the rows of a tensor."""
        return TensorArray._of(self.array, [], joined)


def _flatten_array(array: TensorArray) -> tuple[tuple[Any, ...], Facts]:
    joined = array._joined
    rows = [r for r in array._rows if r is not None] if joined is None else [joined]
    return tuple(rows), Facts(array)


def _unflatten_array(facts: Facts, children: tuple[Any, ...]) -> TensorArray:
    if facts.mask is None:
        return TensorArray._of(facts.array, [], children[0])
    found = iter(children)
    return TensorArray._of(facts.array, [next(found) if m else None for m in facts.mask], None)


jax.tree_util.register_pytree_node(TensorArray, _flatten_array, _unflatten_array)


def _number_of_rows(size: Value) -> int:
    count = raw(0 if size is None else size)
    if jax_compat.is_traced(count):
        raise errors.TracedValueError(
            "The size of a TensorArray must be known while the function is compiled",
            "the program computes it",
            "Take it from the shape of a tensor (`x.shape[0]`), pass a Python int, or allocate as "
            "many rows as there can be and use `tf.sequence_mask`.",
        )
    return int(count)
