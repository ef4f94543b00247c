"""`TensorProto` and `TensorShapeProto`: tensors inside messages."""

from __future__ import annotations

import math

import numpy as np

from replicax.foundation import errors
from replicax.tensorflow_files import dtypes, wire

# The most dimensions of a tensor.
_MAX_RANK = 254
# Lists of values of rare types, which summaries do not have.
_OTHER_VALUES = (9, 12, 13, 14, 15, 16, 17, 18)
# The largest tensor that is filled up with its last value.
_MAX_FILLED = 1 << 24


def encode_shape(shape: tuple[int, ...]) -> bytes:
    """Returns a TensorShapeProto."""
    return b"".join(wire.octets(2, wire.number(1, size) if size else b"") for size in shape)


def decode_shape(data: bytes) -> tuple[int, ...]:
    """Returns the shape of a TensorShapeProto.

    >>> decode_shape(encode_shape((2, 0, 3)))
    (2, 0, 3)
    """
    shape: list[int] = []
    for number, _, value in wire.fields(data):
        if number == 2:
            size = 0
            for part, _, inner in wire.fields(wire.as_bytes(value)):
                size = wire.as_signed(inner) if part == 1 else size
            shape.append(size)
        elif number == 3 and value:
            raise wire.WireError("the shape of a tensor is not known")
    if len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        raise wire.WireError(f"a tensor has the shape {shape[:5]}")
    return tuple(shape)


def encode_tensor(array: np.ndarray) -> bytes:
    """Returns a TensorProto; arrays of objects hold bytes.

    >>> decode_tensor(encode_tensor(np.array([1.5, 2.5])))
    array([1.5, 2.5])
    """
    number = dtypes.number_of(array.dtype)
    if number is None:
        raise errors.ArgumentTypeError(
            "A tensor of TensorFlow needs a type that it has",
            f"the type is {array.dtype}",
            "Convert the array.",
        )
    head = wire.number(1, number) + wire.octets(2, encode_shape(array.shape))
    if number == dtypes.STRING:
        texts = [one.encode() if isinstance(one, str) else bytes(one) for one in array.ravel()]
        return head + b"".join(wire.octets(8, one) for one in texts)
    return head + wire.octets(4, np.ascontiguousarray(array).tobytes())


def decode_tensor(data: bytes) -> np.ndarray:
    """Returns the array of a TensorProto, whether its values are packed bytes or numbers."""
    number, shape, content = 0, (), b""
    values: list[object] = []
    for field, kind, value in wire.fields(data):
        if field == 1:
            number = wire.as_unsigned(value)
        elif field == 2:
            shape = decode_shape(wire.as_bytes(value))
        elif field == 4:
            content = wire.as_bytes(value)
        elif field == 8:
            values.append(wire.as_bytes(value))
        elif field in (5, 6):
            values += _floats(field, kind, value)
        elif field in (7, 10, 11):
            is_list = kind == wire.LENGTH
            values += (
                wire.signed_varints(wire.as_bytes(value)).tolist()
                if is_list
                else [wire.as_signed(value)]
            )
        elif field in _OTHER_VALUES:
            raise wire.WireError(f"a tensor has its values in field {field}")
    dtype = dtypes.dtype_numbered(number)
    if dtype is None:
        raise wire.WireError(f"a tensor is of {dtypes.name_numbered(number)}")
    return _array_of(dtype, shape, content, values)


def _floats(field: int, kind: int, value: wire.Value) -> list[float]:
    stored = "<f4" if field == 5 else "<f8"
    if kind != wire.LENGTH:
        size = 4 if field == 5 else 8
        value = wire.as_unsigned(value).to_bytes(8, "little")[:size]
    octets = wire.as_bytes(value)
    if len(octets) % np.dtype(stored).itemsize:
        raise wire.WireError(f"a list of numbers has {len(octets)} bytes")
    return np.frombuffer(octets, stored).tolist()


def _array_of(
    dtype: np.dtype, shape: tuple[int, ...], content: bytes, values: list[object]
) -> np.ndarray:
    count = math.prod(shape)
    is_text = dtype.kind == "O"
    if content and not is_text:
        if len(content) != count * dtype.itemsize:
            raise wire.WireError(f"a tensor of shape {shape} has {len(content)} bytes")
        return np.frombuffer(content, dtype).reshape(shape)
    has_too_few = (not values and count and is_text) or count > max(_MAX_FILLED, len(values))
    if len(values) > count or has_too_few:
        raise wire.WireError(f"a tensor of shape {shape} has {len(values)} values")
    flat = np.zeros(count, dtype)
    flat[: len(values)] = values
    if values:
        # The last value stands for all that follow.
        flat[len(values) :] = values[-1]
    return flat.reshape(shape)
