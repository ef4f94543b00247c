"""`tf.io.parse_*` and the messages in strings, as tensors of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.foundation import errors
from replicax.tensorflow_files import example_parsing, tensor_messages, wire
from replicax.tensorflow_files.example_parsing import FixedLenFeature as FixedLenFeature
from replicax.tensorflow_files.example_parsing import (
    FixedLenSequenceFeature as FixedLenSequenceFeature,
)
from replicax.tensorflow_files.example_parsing import VarLenFeature as VarLenFeature
from replicax.tf import dtypes
from replicax.tf.arguments import DTypeLike, Ignored, Value
from replicax.tf.io.images import content_bytes
from replicax.tf.tensor import Tensor, wrap
from replicax.values.sparse_tensor import SparseTensor

__all__ = [
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "VarLenFeature",
    "decode_raw",
    "parse_example",
    "parse_sequence_example",
    "parse_single_example",
    "parse_single_sequence_example",
    "parse_tensor",
    "serialize_tensor",
]


def parse_single_example(
    serialized: Value,
    features: example_parsing.Features,
    example_names: Ignored = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Returns the features of one serialized `Example`.

    Args:
      serialized: A scalar string.
      features: `FixedLenFeature`, `VarLenFeature` (a `tf.SparseTensor`) or
        `FixedLenSequenceFeature` by name.
      example_names: Accepted for portability.
      name: Accepted for portability.

    >>> from replicax.tensorflow_files.examples import Example, Feature, Features, Int64List
    >>> feature = Feature(int64_list=Int64List(value=[3, 4]))
    >>> data = Example(features=Features(feature={"x": feature})).SerializeToString()
    >>> parse_single_example(data, {"x": FixedLenFeature([2], "int64")})["x"].numpy().tolist()
    [3, 4]
    """
    del example_names, name
    found = example_parsing.parse_single_example(content_bytes(serialized), features, _sparse)
    return _wrapped(found)


def parse_example(
    serialized: Value,
    features: example_parsing.Features,
    example_names: Ignored = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Returns the features of several serialized `Example`s, with a first dimension for them.

    A `FixedLenSequenceFeature` is padded to the longest.
    """
    given = serialized.numpy() if isinstance(serialized, Tensor) else serialized
    array = np.asarray(given, dtype=object)
    if array.ndim == 0:
        return parse_single_example(given, features, example_names, name)
    rows = [content_bytes(one) for one in array.reshape(-1).tolist()]
    return _wrapped(example_parsing.parse_example(rows, features, _sparse))


def parse_single_sequence_example(
    serialized: Value,
    context_features: example_parsing.Features | None = None,
    sequence_features: example_parsing.Features | None = None,
    example_name: Ignored = None,
    name: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the context and the lists of features of one serialized `SequenceExample`."""
    del example_name, name
    context, lists = example_parsing.parse_single_sequence_example(
        content_bytes(serialized), context_features, sequence_features, _sparse
    )
    return _wrapped(context), _wrapped(lists)


def parse_sequence_example(*args: object, **kwargs: object) -> Any:
    """Not offered for batches: parse each example in `dataset.map`, then use `padded_batch`."""
    raise errors.UnsupportedError(
        "Sequence examples are parsed one by one",
        "parse_sequence_example was called for a batch",
        "Use `dataset.map(lambda x: tf.io.parse_single_sequence_example(x, ...))` and then "
        "`padded_batch`.",
    )


def _sparse(indices: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> SparseTensor:
    return SparseTensor(wrap(indices), wrap(values), shape)


def _wrapped(found: dict[str, Any]) -> dict[str, Any]:
    # In the order of TensorFlow: programs put `values()` into a row.
    names = sorted(found, key=lambda name: (not isinstance(found[name], SparseTensor), name))
    return {name: _as_tensor(found[name]) for name in names}


def _as_tensor(value: Value) -> Any:
    # One string comes as `bytes`.
    return wrap(np.array(value, dtype=object)) if isinstance(value, bytes) else wrap(value)


def decode_raw(
    input_bytes: Value,
    out_type: DTypeLike,
    little_endian: bool = True,
    fixed_length: int | None = None,
    name: str | None = None,
) -> Any:
    """Returns the bytes of strings as numbers, along a new last dimension.

    Args:
      input_bytes: Strings of one length.
      out_type: The type of the numbers.
      little_endian: Whether the lowest byte is the first.
      fixed_length: The length to which strings are padded with zeros or cut.
      name: Accepted for portability.

    >>> decode_raw(np.array(b"ab", dtype=object), "uint8").numpy().tolist()
    [97, 98]
    """
    del name
    given = input_bytes.numpy() if isinstance(input_bytes, Tensor) else input_bytes
    kind = dtypes.as_dtype(out_type)
    return wrap(example_parsing.decode_raw(given, kind, little_endian, fixed_length))


def serialize_tensor(tensor: Value, name: str | None = None) -> Any:
    """Returns a tensor as a scalar string, a serialized `TensorProto`.

    >>> parse_tensor(serialize_tensor(np.array([1, 2], np.int32)), "int32").numpy().tolist()
    [1, 2]
    """
    del name
    array = np.asarray(tensor.numpy() if isinstance(tensor, Tensor) else tensor)
    if array.dtype.kind in "SU":
        array = array.astype(object)
    return wrap(np.array(tensor_messages.encode_tensor(array), dtype=object))


def parse_tensor(serialized: Value, out_type: DTypeLike, name: str | None = None) -> Any:
    """Returns the tensor of a serialized `TensorProto`.

    Args:
      serialized: A scalar string.
      out_type: Its type.
      name: Accepted for portability.
    """
    del name
    try:
        array = tensor_messages.decode_tensor(content_bytes(serialized))
    except wire.WireError as error:
        raise errors.InvalidArgumentError(
            "The bytes must be a serialized tensor", str(error), "Write it by serialize_tensor."
        ) from None
    found = dtypes.string if array.dtype.kind in "OSU" else dtypes.as_dtype(array.dtype)
    if found != dtypes.as_dtype(out_type):
        raise errors.InvalidArgumentError(
            f"The tensor must have the type {dtypes.as_dtype(out_type).name}",
            f"it has the type {found.name}",
            "Correct `out_type`.",
        )
    return wrap(array)
