"""Parses serialized examples into arrays, by a description of their features.

Results are arrays of NumPy: a dataset parses on the host. Text and images are `bytes`: one as it
is, several as an array of objects (arrays of NumPy's own bytes type drop trailing zeros). The
values of a `VarLenFeature` come with their indices, as `SparseParts`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from replicax.foundation import errors
from replicax.tensorflow_files import wire

# Float32, int64, or object for bytes.
_FLOAT, _INT, _BYTES = np.dtype(np.float32), np.dtype(np.int64), np.dtype(object)
_NAMES = {_FLOAT: "float32", _INT: "int64", _BYTES: "string"}
_KINDS = {1: _BYTES, 2: _FLOAT, 3: _INT}

# Anything that names a type: of NumPy, of Python, text such as "string", or a type of a face.
DTypeLike: TypeAlias = Any
Features: TypeAlias = Mapping[str, "FixedLenFeature | VarLenFeature | FixedLenSequenceFeature"]
# An array; `bytes` for a single text; what was made of indices, values and shape.
Parsed: TypeAlias = Any


class FixedLenFeature(NamedTuple):
    """A feature with the same number of values in each example.

    Attributes:
      shape: The shape of its values.
      dtype: float32, int64, or bytes ("string").
      default_value: The values of examples without this feature; None if they are errors.
    """

    shape: Sequence[int] | int
    dtype: DTypeLike
    default_value: Any = None


class VarLenFeature(NamedTuple):
    """A feature with any number of values, which come with their indices.

    Attributes:
      dtype: float32, int64, or bytes ("string").
    """

    dtype: DTypeLike


class FixedLenSequenceFeature(NamedTuple):
    """A feature with any number of values of one shape, padded to an array.

    Attributes:
      shape: The shape of each item.
      dtype: float32, int64, or bytes ("string").
      allow_missing: Whether examples without it have an empty one.
      default_value: What shorter ones are padded with; zero or an empty text by default.
    """

    shape: Sequence[int] | int
    dtype: DTypeLike
    allow_missing: bool = False
    default_value: Any = None


class SparseParts(NamedTuple):
    """The entries of an array with rows of different lengths: the parts of a `rx.SparseTensor`.

    Attributes:
      indices: Shape (entries, dimensions).
      values: Shape (entries,).
      dense_shape: The smallest shape that holds all entries.
    """

    indices: np.ndarray
    values: np.ndarray
    dense_shape: tuple[int, ...]


# Makes the result of a VarLenFeature from indices, values and shape.
MakeSparse: TypeAlias = Callable[[np.ndarray, np.ndarray, tuple[int, ...]], Any]


def parse_single_example(
    serialized: bytes, features: Features, make_sparse: MakeSparse = SparseParts
) -> dict[str, Parsed]:
    """Returns the features of one serialized Example.

    Raises:
      InvalidArgumentError: It is not an Example, or does not fit the description.

    >>> from replicax.tensorflow_files.examples import Example
    >>> example = Example()
    >>> example.features.feature["x"].int64_list.value.extend([3, 4])
    >>> features = {"x": FixedLenFeature([2], "int64")}
    >>> parse_single_example(example.SerializeToString(), features)
    {'x': array([3, 4])}
    """
    return _parse_one(_stored_features(serialized), _checked(features), make_sparse)


def parse_example(
    serialized: Sequence[bytes] | np.ndarray,
    features: Features,
    make_sparse: MakeSparse = SparseParts,
) -> dict[str, Parsed]:
    """Returns the features of several serialized Examples, each with a first dimension for them.

    A `FixedLenSequenceFeature` is padded to the longest, and needs `allow_missing=True`.

    Raises:
      InvalidArgumentError: One is not an Example, or does not fit the description.

    >>> from replicax.tensorflow_files.examples import Example
    >>> parse_example([Example().SerializeToString()], {"x": FixedLenFeature([], "float32", 0.5)})
    {'x': array([0.5], dtype=float32)}
    """
    if isinstance(serialized, bytes):
        raise errors.ArgumentTypeError(
            "`parse_example` takes several serialized examples",
            "it got one, as bytes",
            "Use `parse_single_example`, or batch the dataset before.",
        )
    described = _checked(features)
    rows = [_stored_features(one) for one in serialized]
    found: dict[str, Parsed] = {}
    for name, feature in described.items():
        values = [_values_of(row.get(name), name, _dtype_of(feature.dtype)) for row in rows]
        if isinstance(feature, FixedLenFeature):
            parsed = [_fixed(name, feature, one) for one in values]
            found[name] = _stacked(parsed, _shape_of(feature), _dtype_of(feature.dtype))
        elif isinstance(feature, VarLenFeature):
            found[name] = _sparse_rows(values, _dtype_of(feature.dtype), make_sparse)
        else:
            _require_allow_missing(name, feature)
            found[name] = _padded([_items(name, feature, one) for one in values], feature)
    return found


def parse_single_sequence_example(
    serialized: bytes,
    context_features: Features | None = None,
    sequence_features: Features | None = None,
    make_sparse: MakeSparse = SparseParts,
) -> tuple[dict[str, Parsed], dict[str, Parsed]]:
    """Returns the context and the lists of one serialized SequenceExample.

    Lists are described by `FixedLenSequenceFeature`, where each item must have the same shape, or
    by `VarLenFeature`.

    Raises:
      InvalidArgumentError: It is not a SequenceExample, or does not fit the description.
    """
    context: dict[str, bytes] = {}
    lists: dict[str, bytes] = {}
    try:
        for number, _, value in wire.fields(_plain_bytes(serialized)):
            if number in (1, 2):
                (context if number == 1 else lists).update(_entries(wire.as_bytes(value)))
    except wire.WireError as error:
        raise _not_an_example("SequenceExample", serialized, error) from error
    found: dict[str, Parsed] = {}
    for name, feature in _checked(sequence_features or {}).items():
        items = _list_items(lists.get(name), name, _dtype_of(feature.dtype))
        found[name] = _parse_list(name, feature, items, make_sparse)
    return _parse_one(context, _checked(context_features or {}), make_sparse), found


def decode_raw(
    input_bytes: bytes | Sequence[bytes] | np.ndarray,
    out_type: DTypeLike,
    little_endian: bool = True,
    fixed_length: int | None = None,
) -> np.ndarray:
    """Returns the numbers whose bytes are given; several byte strings must have one length.

    Args:
      input_bytes: Bytes, or an array of them.
      out_type: The type of the numbers.
      little_endian: The order of the bytes of a number.
      fixed_length: If given, byte strings are cut to this length, or filled up with zeros.

    >>> decode_raw(bytes([1, 0, 2, 0]), "int16")
    array([1, 2], dtype=int16)
    """
    dtype = np.dtype(getattr(out_type, "as_numpy_dtype", out_type))
    given = np.asarray(input_bytes, object)
    rows = [_plain_bytes(one) for one in given.ravel()]
    if fixed_length is not None:
        rows = [row[:fixed_length].ljust(fixed_length, b"\0") for row in rows]
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise errors.InvalidArgumentError(
            "`decode_raw` needs byte strings of one length",
            f"the lengths are {sorted(lengths)}",
            "Pass `fixed_length`, or decode them one by one.",
        )
    length = lengths.pop() if lengths else fixed_length or 0
    if length % dtype.itemsize:
        raise errors.InvalidArgumentError(
            f"`decode_raw` needs whole numbers of {dtype.itemsize} bytes ({dtype.name})",
            f"there are {length} bytes",
            "Correct `out_type`, or pass `fixed_length`.",
        )
    stored = dtype if little_endian or dtype.itemsize == 1 else dtype.newbyteorder(">")
    flat = np.frombuffer(b"".join(rows), stored).astype(dtype)
    return flat.reshape(*given.shape, length // dtype.itemsize)


# Reading messages.


def _stored_features(serialized: object) -> dict[str, bytes]:
    """Returns the features of an Example, not decoded, by name."""
    found: dict[str, bytes] = {}
    try:
        for number, _, value in wire.fields(_plain_bytes(serialized)):
            if number == 1:
                found.update(_entries(wire.as_bytes(value)))
    except wire.WireError as error:
        raise _not_an_example("Example", serialized, error) from error
    return found


def _entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields the entries of a map from text to messages."""
    for number, _, value in wire.fields(data):
        if number != 1:
            continue
        name, message = "", b""
        for part, _, inner in wire.fields(wire.as_bytes(value)):
            if part == 1:
                name = wire.as_text(inner)
            elif part == 2:
                message = wire.as_bytes(inner)
        yield name, message


def _list_items(data: bytes | None, name: str, dtype: np.dtype) -> list[np.ndarray] | None:
    """Returns the values of each feature of a FeatureList; None if there is no such list."""
    if data is None:
        return None
    found: list[np.ndarray] = []
    try:
        for number, _, value in wire.fields(data):
            if number == 1:
                one = _values_of(wire.as_bytes(value), name, dtype)
                found.append(np.empty(0, dtype) if one is None else one)
    except wire.WireError as error:
        raise _not_an_example("SequenceExample", data, error) from error
    return found


def _values_of(data: bytes | None, name: str, dtype: np.dtype) -> np.ndarray | None:
    """Returns the values of a feature; None if it is absent or has no kind."""
    if not data:
        return None
    kind, parts = 0, []
    try:
        for number, _, value in wire.fields(data):
            if number in _KINDS:
                parts = [*parts, wire.as_bytes(value)] if number == kind else [wire.as_bytes(value)]
                kind = number
        if not kind:
            return None
        if _KINDS[kind] != dtype:
            raise errors.InvalidArgumentError(
                f"The feature {name!r} must be of type {_NAMES[dtype]}",
                f"the example holds {_NAMES[_KINDS[kind]]}",
                "Correct the `dtype` of its description.",
            )
        return _decoded(b"".join(parts), dtype)
    except wire.WireError as error:
        raise _not_an_example("Example", data, error) from error


def _decoded(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Returns the values of a BytesList, FloatList or Int64List."""
    found: list[Any] = []
    for number, kind, value in wire.fields(data):
        if number != 1:
            continue
        if dtype == _BYTES:
            found.append(wire.as_bytes(value))
        elif isinstance(value, int):
            found.append(_unpacked(value, dtype))
        elif dtype == _INT:
            found.append(wire.signed_varints(value))
        elif kind == wire.LENGTH and len(value) % 4 == 0:
            found.append(np.frombuffer(value, "<f4"))
        else:
            raise wire.WireError(f"a list of floats has {len(value)} bytes")
    if dtype == _BYTES:
        return _objects(found)
    return np.concatenate([np.empty(0, dtype), *found]) if len(found) != 1 else found[0]


def _unpacked(value: int, dtype: np.dtype) -> np.ndarray:
    """Returns a number of a list that is not packed, as an array of one."""
    if dtype == _INT:
        return np.array([wire.as_signed(value)], _INT)
    return np.frombuffer(value.to_bytes(8, "little")[:4], "<f4")


def _plain_bytes(data: object) -> bytes:
    if isinstance(data, np.ndarray) and data.ndim == 0:
        data = data.item()
    if isinstance(data, bytes):
        return data
    raise errors.ArgumentTypeError(
        "Serialized examples must be bytes",
        f"one is a {type(data).__name__}",
        "Pass records of a TFRecord file, such as the elements of a TFRecordDataset.",
    )


def _not_an_example(what: str, data: object, error: wire.WireError) -> errors.InvalidArgumentError:
    size = len(data) if isinstance(data, bytes) else 0
    return errors.InvalidArgumentError(
        f"The bytes must be a serialized {what}",
        f"{error}, in {size} bytes",
        "Check that the file holds such records.",
    )


# Making arrays.


def _parse_one(
    stored: Mapping[str, bytes], features: Features, make_sparse: MakeSparse
) -> dict[str, Parsed]:
    found: dict[str, Parsed] = {}
    for name, feature in features.items():
        dtype = _dtype_of(feature.dtype)
        values = _values_of(stored.get(name), name, dtype)
        if isinstance(feature, FixedLenFeature):
            array = _fixed(name, feature, values)
            found[name] = array.item() if dtype == _BYTES and not array.ndim else array
        elif isinstance(feature, VarLenFeature):
            values = np.empty(0, dtype) if values is None else values
            indices = np.arange(len(values), dtype=np.int64)[:, None]
            found[name] = make_sparse(indices, values, (len(values),))
        else:
            if values is None:
                _require_allow_missing(name, feature)
            found[name] = _items(name, feature, values)
    return found


def _fixed(name: str, feature: FixedLenFeature, values: np.ndarray | None) -> np.ndarray:
    shape, dtype = _shape_of(feature), _dtype_of(feature.dtype)
    if values is None:
        if feature.default_value is None:
            raise errors.InvalidArgumentError(
                f"The feature {name!r} ({_NAMES[dtype]}, shape {shape}) is required",
                "the example does not have it",
                "Give `default_value`, or use VarLenFeature.",
            )
        return _default(name, feature.default_value, shape, dtype)
    if len(values) != math.prod(shape):
        raise errors.InvalidArgumentError(
            f"The feature {name!r} needs {math.prod(shape)} values for its shape {shape}",
            f"the example has {len(values)}",
            "Correct the shape; use VarLenFeature if their number varies.",
        )
    return values.reshape(shape)


def _default(name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype == _BYTES:
        given = _objects(np.asarray(value, object).ravel().tolist())
        flat = _objects([one.encode() if isinstance(one, str) else one for one in given])
    else:
        flat = np.asarray(value).ravel().astype(dtype)
    if flat.size != math.prod(shape):
        raise errors.InvalidArgumentError(
            f"`default_value` of {name!r} needs {math.prod(shape)} values for its shape {shape}",
            f"it has {flat.size}",
            "Give one value for each place.",
        )
    return flat.reshape(shape)


def _items(name: str, feature: FixedLenSequenceFeature, values: np.ndarray | None) -> np.ndarray:
    """Returns values as items of one shape, along a first dimension."""
    shape, dtype = _shape_of(feature), _dtype_of(feature.dtype)
    values = np.empty(0, dtype) if values is None else values
    size = math.prod(shape)
    if not size or len(values) % size:
        raise errors.InvalidArgumentError(
            f"The feature {name!r} needs a multiple of {size} values for items of shape {shape}",
            f"the example has {len(values)}",
            "Correct the shape.",
        )
    return values.reshape(len(values) // size, *shape)


def _require_allow_missing(name: str, feature: FixedLenSequenceFeature) -> None:
    if not feature.allow_missing:
        raise errors.InvalidArgumentError(
            f"The FixedLenSequenceFeature {name!r} of a batch, or of an example without it, needs "
            "`allow_missing=True`",
            "it is False",
            "Write FixedLenSequenceFeature(shape, dtype, allow_missing=True).",
        )


def _parse_list(
    name: str,
    feature: FixedLenFeature | VarLenFeature | FixedLenSequenceFeature,
    items: list[np.ndarray] | None,
    make_sparse: MakeSparse,
) -> Parsed:
    dtype = _dtype_of(feature.dtype)
    if isinstance(feature, VarLenFeature):
        return _sparse_rows(items or [], dtype, make_sparse)
    if isinstance(feature, FixedLenFeature):
        raise errors.InvalidArgumentError(
            f"The list {name!r} must be described by FixedLenSequenceFeature or VarLenFeature",
            "it is a FixedLenFeature",
            "Write FixedLenSequenceFeature(shape, dtype).",
        )
    if items is None and not feature.allow_missing:
        raise errors.InvalidArgumentError(
            f"The list {name!r} ({_NAMES[dtype]}) is required",
            "the example does not have it",
            "Give `allow_missing=True`.",
        )
    shape = _shape_of(feature)
    for index, item in enumerate(items or ()):
        if len(item) != math.prod(shape):
            raise errors.InvalidArgumentError(
                f"Each item of the list {name!r} needs {math.prod(shape)} values for its shape "
                f"{shape}",
                f"item {index} has {len(item)}",
                "Correct the shape; use VarLenFeature if their number varies.",
            )
    return _stacked([item.reshape(shape) for item in items or ()], shape, dtype)


def _sparse_rows(
    rows: Sequence[np.ndarray | None], dtype: np.dtype, make_sparse: MakeSparse
) -> Any:
    filled = [np.empty(0, dtype) if row is None else row for row in rows]
    lengths = np.array([len(row) for row in filled], np.int64)
    first = np.repeat(np.arange(len(filled), dtype=np.int64), lengths)
    second = np.concatenate([np.empty(0, np.int64), *map(np.arange, lengths)])
    values = np.concatenate([np.empty(0, dtype), *filled])
    shape = (len(filled), int(lengths.max(initial=0)))
    return make_sparse(np.stack([first, second.astype(np.int64)], 1), values, shape)


def _padded(rows: Sequence[np.ndarray], feature: FixedLenSequenceFeature) -> np.ndarray:
    shape, dtype = _shape_of(feature), _dtype_of(feature.dtype)
    longest = max((len(row) for row in rows), default=0)
    filling = feature.default_value
    if dtype == _BYTES:
        filling = b"" if filling is None else filling
        filling = filling.encode() if isinstance(filling, str) else filling
    padded = np.full((len(rows), longest, *shape), 0 if filling is None else filling, dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def _stacked(rows: Sequence[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    stacked = np.empty((len(rows), *shape), dtype)
    for index, row in enumerate(rows):
        stacked[index] = row[()]
    return stacked


def _objects(values: Sequence[Any]) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


# Descriptions.


def _checked(features: Features) -> Features:
    for name, feature in features.items():
        if not isinstance(feature, FixedLenFeature | VarLenFeature | FixedLenSequenceFeature):
            raise errors.UnsupportedError(
                f"The feature {name!r} must be described by FixedLenFeature, VarLenFeature or "
                "FixedLenSequenceFeature",
                f"it is a {type(feature).__name__}",
                "Parse its values with VarLenFeature, and combine them afterwards.",
            )
        _dtype_of(feature.dtype)
    return features


def _shape_of(feature: FixedLenFeature | FixedLenSequenceFeature) -> tuple[int, ...]:
    given = feature.shape
    shape = (given,) if isinstance(given, int | np.integer) else tuple(given)
    if any(not isinstance(size, int | np.integer) or size < 0 for size in shape):
        raise errors.InvalidArgumentError(
            "The shape of a feature must be known",
            f"it is {list(shape)}",
            "Use FixedLenSequenceFeature or VarLenFeature for a length that varies.",
        )
    return tuple(int(size) for size in shape)


def _dtype_of(dtype: DTypeLike) -> np.dtype:
    """Returns float32, int64, or object for bytes."""
    if dtype in (str, bytes, object) or getattr(dtype, "name", dtype) == "string":
        return _BYTES
    with contextlib.suppress(TypeError):
        found = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
        if found.kind in "OSU":
            return _BYTES
        if found in (_FLOAT, _INT):
            return found
    raise errors.InvalidArgumentError(
        "Features are of type float32, int64 or string",
        f"the type is {dtype!r}",
        "Parse one of these, and cast or decode afterwards.",
    )
