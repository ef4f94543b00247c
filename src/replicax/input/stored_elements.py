"""Elements of datasets as bytes and as JSON, exactly and without pickle.

The bytes of an element are the length of a header, the header, and what its leaves hold, one
after the other. The header is JSON: per leaf its type, shape and size. The structure around
the leaves is not part of it: a directory of elements describes it once.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tracing.signature import TensorSpec

_LENGTH = struct.Struct("<I")


def encode(leaves: Sequence[Any]) -> bytes:
    """Returns the leaves of an element as bytes.

    >>> decode(encode([np.arange(2), b"record", "text"]))
    [array([0, 1]), b'record', 'text']
    """
    described = [_encode_leaf(leaf) for leaf in leaves]
    header = json.dumps([facts for facts, _ in described]).encode("ascii")
    return b"".join([_LENGTH.pack(len(header)), header, *(data for _, data in described)])


def decode(record: bytes) -> list[Any]:
    """Returns the leaves that `encode` was given; ValueError if the bytes are damaged."""
    try:
        (length,) = _LENGTH.unpack_from(record)
        offset = _LENGTH.size + length
        leaves = []
        for facts in json.loads(record[_LENGTH.size : offset]):
            size = facts["size"]
            leaves.append(_decode_leaf(facts, record[offset : offset + size]))
            offset += size
    except (struct.error, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not an element: {error!r}") from None
    if offset != len(record):
        raise ValueError(f"not an element: {len(record)} bytes instead of {offset}")
    return leaves


def digest(element: Any) -> str:
    """Returns a text that elements of equal content share."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(element):
        facts, data = _encode_leaf(leaf)
        found.update(json.dumps(facts).encode("ascii"))
        found.update(data)
    return found.hexdigest()


def as_json(leaves: Sequence[Any]) -> str:
    """Returns the leaves of an element as text, for the position of an iterator."""
    return base64.b64encode(encode(leaves)).decode("ascii")


def from_json(text: str) -> list[Any]:
    """Returns the leaves that `as_json` was given."""
    return decode(base64.b64decode(text))


def _encode_leaf(leaf: Any) -> tuple[dict[str, Any], bytes]:
    if isinstance(leaf, bytes | str):
        data = leaf.encode("utf-8") if isinstance(leaf, str) else leaf
        return {"type": type(leaf).__name__, "size": len(data)}, data
    array = np.asarray(leaf)
    shape = list(array.shape)
    if array.dtype == object:
        # Text and records in a batch: each is a leaf of its own.
        data = encode(array.reshape(-1).tolist())
        return {"type": "objects", "shape": shape, "size": len(data)}, data
    data = np.ascontiguousarray(array).tobytes()
    return {"type": _name_of(array.dtype), "shape": shape, "size": len(data)}, data


def _decode_leaf(facts: dict[str, Any], data: bytes) -> Any:
    kind = facts["type"]
    if kind == "bytes":
        return data
    if kind == "str":
        return data.decode("utf-8")
    if kind == "objects":
        array = np.empty(int(np.prod(facts["shape"], dtype=np.int64)), object)
        array[:] = decode(data)
        return array.reshape(facts["shape"])
    # A copy, because elements may be changed and these bytes may not.
    return np.frombuffer(data, np.dtype(kind)).reshape(facts["shape"]).copy()


def _name_of(dtype: np.dtype) -> str:
    """Returns a name that NumPy understands, also of JAX's own types such as bfloat16."""
    return dtype.name if dtype.kind == "V" else dtype.str


def encode_spec(spec: Any) -> Any:
    """Returns the structure and the `TensorSpec`s of elements as JSON."""
    if spec is None:
        return {"none": True}
    if isinstance(spec, TensorSpec):
        shape = None if spec.shape is None else list(spec.shape)
        return {"shape": shape, "dtype": _name_of(spec.dtype)}
    if isinstance(spec, tuple) and hasattr(spec, "_fields"):
        parts = zip(spec._fields, spec, strict=True)  # type: ignore[attr-defined]
        fields = {key: encode_spec(part) for key, part in parts}
        return {"namedtuple": type(spec).__name__, "fields": fields}
    if type(spec) in (tuple, list):
        return {type(spec).__name__: [encode_spec(part) for part in spec]}
    if type(spec) is dict and all(isinstance(key, str) for key in spec):
        return {"dict": {key: encode_spec(part) for key, part in spec.items()}}
    raise errors.ArgumentTypeError(
        "Elements on the disk must be arrays, text and records in tuples, named tuples, "
        "lists, and dicts with text keys",
        f"there is a {type(spec).__name__}",
        "Change the structure with `map` first.",
    )


def decode_spec(encoded: Any) -> Any:
    """Returns the structure that `encode_spec` was given; a named tuple gets a new class."""
    if "none" in encoded:
        return None
    if "shape" in encoded:
        shape = None if encoded["shape"] is None else tuple(encoded["shape"])
        return TensorSpec(shape, np.dtype(encoded["dtype"]))
    if "namedtuple" in encoded:
        fields = {key: decode_spec(part) for key, part in encoded["fields"].items()}
        return collections.namedtuple(encoded["namedtuple"], fields)(**fields)  # type: ignore[misc]
    if "dict" in encoded:
        return {key: decode_spec(part) for key, part in encoded["dict"].items()}
    kind = tuple if "tuple" in encoded else list
    return kind(decode_spec(part) for part in encoded[kind.__name__])
