"""Nested results as tagged msgspec structures, with arrays in buffers; decoding runs no code.

None, bool, int, float and short str are plain msgpack values; everything else is one of the
structures below. Objects of higher layers pass through two hooks. Subclasses of the builtin
containers and numbers arrive as the builtin type.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import keyword
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from replicax.foundation import errors

DEEPEST = 100
MOST_NODES = 100_000
# The limit on the encoded tree of one result, which is part of a message header.
MOST_HEADER_BYTES = 512 * 1024
MOST_BUFFER_BYTES = 2 * 1024**3
LONGEST_INLINE = 4096

_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
# The names of `Array.dtype` that stand for a str in UTF-8 and for bytes.
_TEXT, _BYTES = "str", "bytes"
_NATIVE = ["bool", "float16", "float32", "float64", "complex64", "complex128"]
_NATIVE += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]

# The dtypes of arrays that can be sent, by name: NumPy's numbers and those of ml_dtypes.
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in _NATIVE}
DTYPES |= {
    name: np.dtype(kind)
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}


class _Tagged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    pass


class Integer(_Tagged, frozen=True):
    """An integer that msgpack cannot represent, in hexadecimal."""

    digits: str


class Complex(_Tagged, frozen=True):
    """A complex number."""

    real: float
    imaginary: float


class Array(_Tagged, frozen=True):
    """The next buffer: an array, bytes, or a long text."""

    dtype: str
    shape: tuple[int, ...]


class Items(_Tagged, frozen=True):
    """A "list", a "tuple", or an object of a higher layer, whose kind the hooks define."""

    kind: str
    items: list[Node]


class NamedTuple(_Tagged, frozen=True):
    """A named tuple."""

    name: str
    fields: tuple[str, ...]
    items: list[Node]


class Dict(_Tagged, frozen=True):
    """A dict, in order."""

    keys: list[Node]
    values: list[Node]


Node: TypeAlias = (
    bool | int | float | str | Integer | Complex | Array | Items | NamedTuple | Dict | None
)
# Returns the kind and the items of an object of a higher layer; None if it cannot travel.
EncodeOther = Callable[[Any], tuple[str, Sequence[object]] | None]
# Returns the object of a kind and its decoded items.
DecodeOther = Callable[[str, list[Any]], object]

_decoder = msgspec.msgpack.Decoder(Node)


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is ready to travel: the encoded tree, and the bytes of its arrays in order."""

    tree: bytes
    buffers: list[bytes | memoryview]

    @property
    def header_bytes(self) -> int:
        """The size in the header of a message, with those of the sizes of the buffers."""
        return len(self.tree) + 9 * len(self.buffers)


def encode(
    value: object, encode_other: EncodeOther | None = None, name: str = "the result"
) -> Encoded:
    """Takes a snapshot of a nested value.

    Args:
      value: None, numbers, str, bytes, arrays, and lists, tuples, named tuples and dicts.
      encode_other: Takes any other object apart.
      name: The name of the value in error messages.

    Raises:
      ArgumentTypeError: A part of the value cannot travel.
      ResourceExhaustedError: It is too deep, has too many parts or too many bytes.

    >>> encoded = encode({"loss": np.float32(0.5), "names": ("a", None)})
    >>> decode(encoded.tree, encoded.buffers)
    {'loss': array(0.5, dtype=float32), 'names': ('a', None)}
    """
    encoder = _Encoder(encode_other, name)
    encoded = Encoded(msgspec.msgpack.encode(encoder.encode(value)), encoder.buffers)
    encoder.require_short(encoded.header_bytes)
    return encoded


def decode(
    tree: bytes, buffers: Sequence[bytes | memoryview], decode_other: DecodeOther | None = None
) -> Any:
    """Returns the value of an encoded tree; its arrays are new and may be changed.

    Raises:
      ProtocolError: The tree is malformed, or does not use exactly these buffers.
    """
    decoder = _Decoder(buffers, decode_other)
    try:
        value = decoder.decode(_decoder.decode(tree), 0)
    except errors.DistributeError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _malformed(str(error)) from None
    if decoder.num_used != len(buffers):
        raise _malformed(f"{len(buffers)} buffers came with {decoder.num_used} arrays")
    return value


class _Encoder:
    def __init__(self, encode_other: EncodeOther | None, name: str) -> None:
        self.buffers: list[bytes | memoryview] = []
        self._encode_other = encode_other
        self._name = name
        # The position in the structure, for error messages.
        self._path: list[str] = []
        self._num_nodes = 0
        self._num_bytes = 0

    def encode(self, value: object) -> Node:
        self._num_nodes += 1
        if self._num_nodes > MOST_NODES:
            self.require_short(MOST_HEADER_BYTES + 1)
        if len(self._path) > DEEPEST:
            raise self._too_large(
                f"at most {DEEPEST} levels",
                "more, or contains itself",
                "Return flat lists or arrays.",
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str | bytes):
            return self._text(value)
        if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
            return _number(value)
        other = None if self._encode_other is None else self._encode_other(value)
        if other is not None:
            return Items(other[0], self._items(other[1]))
        if hasattr(value, "__array__"):
            return self._array(value)
        return self._container(value)

    def _text(self, value: str | bytes) -> Node:
        try:
            data = value.encode() if isinstance(value, str) else bytes(value)
        except UnicodeEncodeError:
            raise self._unsupported("a str that is no valid Unicode") from None
        if isinstance(value, str) and len(data) <= LONGEST_INLINE:
            return data.decode()
        self._require_room(len(data))
        self.buffers.append(data)
        return Array(_TEXT if isinstance(value, str) else _BYTES, (len(data),))

    def _array(self, value: object) -> Array:
        try:
            array = np.asarray(value)
        except Exception as error:  # Whatever `__array__` of a foreign class raises.
            found = f"a {type(value)} that does not become an array ({error})"
            raise self._unsupported(found) from error
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        name = array.dtype.name
        if DTYPES.get(name) != array.dtype:
            raise self._unsupported(f"a {type(value)} of type {array.dtype}")
        self._require_room(array.nbytes)
        # A copy: the user's code, or the next compiled step, may write to this memory.
        copy = np.array(array, order="C", copy=True)
        self.buffers.append(copy.reshape(-1).view(np.uint8).data)
        return Array(name, array.shape)

    def _container(self, value: object) -> Node:
        if isinstance(value, dict):
            keys = [self._key(key) for key in value]
            labels = [f"[{key!r}]" for key in value]
            return Dict(keys, self._items(list(value.values()), labels))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = tuple(map(str, value._fields))  # type: ignore[attr-defined]
            items = self._items(value, [f".{field}" for field in fields])
            return NamedTuple(type(value).__name__, fields, items)
        if isinstance(value, list | tuple):
            return Items("list" if isinstance(value, list) else "tuple", self._items(value))
        raise self._unsupported(f"a {type(value)}")

    def _items(self, values: Sequence[object], labels: Sequence[str] | None = None) -> list[Node]:
        nodes: list[Node] = []
        for index, value in enumerate(values):
            self._path.append(f"[{index}]" if labels is None else labels[index])
            nodes.append(self.encode(value))
            self._path.pop()
        return nodes

    def _key(self, key: object) -> Node:
        is_plain = key is None or isinstance(key, str | int | float)
        if type(key) is tuple:
            return Items("tuple", [self._key(part) for part in key])
        if not is_plain or isinstance(key, np.generic):
            raise self._unsupported(f"a dict with a key of {type(key)}")
        node = self.encode(key)
        if isinstance(node, Array):
            raise self._unsupported(f"a dict with a key longer than {LONGEST_INLINE} bytes")
        return node

    def require_short(self, num_bytes: int) -> None:
        if num_bytes > MOST_HEADER_BYTES:
            raise self._too_large(
                f"at most {MOST_NODES:,} values, and {MOST_HEADER_BYTES >> 10} KiB beside its "
                "arrays",
                "more",
                "Stack values into a few arrays.",
            )

    def _require_room(self, size: int) -> None:
        self._num_bytes = total = self._num_bytes + size
        if total > MOST_BUFFER_BYTES:
            place = f", {size:,} of them at {''.join(self._path)}" if self._path else ""
            raise self._too_large(
                f"at most {MOST_BUFFER_BYTES:,} bytes ({MOST_BUFFER_BYTES >> 30} GiB)",
                f"{total:,} ({total / 2**30:.1f} GiB{place})",
                "Return it in parts, by several closures, keep it in a variable, or write it to a "
                "file.",
            )

    def _unsupported(self, found: str) -> errors.ArgumentTypeError:
        place = f" at {''.join(self._path)}" if self._path else ""
        return errors.ArgumentTypeError(
            "Tasks exchange None, numbers, str, bytes, arrays, and lists, tuples and dicts of them",
            f"{self._name}{place} is {found}",
            "Convert it to arrays, or leave it out.",
        )

    def _too_large(self, required: str, found: str, advice: str) -> errors.ResourceExhaustedError:
        name = f"{self._name[0].upper()}{self._name[1:]}"
        return errors.ResourceExhaustedError(
            f"{name} may have {required}", f"it has {found}", advice
        )


def _number(value: complex) -> Node:
    if isinstance(value, int):
        return int(value) if -(2**63) <= value < 2**64 else Integer(hex(value))
    if isinstance(value, float):
        return float(value)
    return Complex(value.real, value.imag)


class _Decoder:
    def __init__(
        self, buffers: Sequence[bytes | memoryview], decode_other: DecodeOther | None
    ) -> None:
        self._buffers = iter(buffers)
        self._decode_other = decode_other
        self._num_nodes = 0
        self.num_used = 0

    def decode(self, node: Node, depth: int) -> Any:
        self._num_nodes += 1
        if depth > DEEPEST or self._num_nodes > MOST_NODES:
            raise _malformed(f"there are more than {DEEPEST} levels or {MOST_NODES} nodes")
        match node:
            case Integer():
                if not _HEXADECIMAL.fullmatch(node.digits):
                    raise _malformed(f"{node.digits[:20]!r} is not an int")
                return int(node.digits, 16)
            case Complex():
                return complex(node.real, node.imaginary)
            case Array():
                return self._array(node)
            case Dict():
                return self._dict(node, depth)
            case NamedTuple():
                if len(node.fields) != len(node.items):
                    raise _malformed("a named tuple has other fields than values")
                return _named_tuple_type(node.name, node.fields)(*self._all(node.items, depth))
            case Items():
                return self._container(node.kind, self._all(node.items, depth))
        return node

    def _all(self, nodes: Sequence[Node], depth: int) -> list[Any]:
        return [self.decode(node, depth + 1) for node in nodes]

    def _container(self, kind: str, items: list[Any]) -> object:
        if kind == "list":
            return items
        if kind == "tuple":
            return tuple(items)
        if self._decode_other is None:
            raise _malformed(f"there is a node of kind {kind!r}")
        return self._decode_other(kind, items)

    def _dict(self, node: Dict, depth: int) -> dict[object, object]:
        values = self._all(node.values, depth)
        try:
            made = dict(zip(self._all(node.keys, depth), values, strict=True))
        except TypeError:
            raise _malformed("a dict has a key that is not hashable") from None
        if len(made) != len(values):
            raise _malformed("a dict has a key twice")
        return made

    def _array(self, node: Array) -> np.ndarray | str | bytes:
        dtype = DTYPES.get("uint8" if node.dtype in (_TEXT, _BYTES) else node.dtype)
        if dtype is None or min(node.shape, default=0) < 0:
            raise _malformed(f"{node.dtype[:40]!r} of shape {node.shape[:40]} is not an array")
        size = dtype.itemsize * math.prod(node.shape)
        self.num_used += 1
        view = memoryview(next(self._buffers, b""))
        if view.nbytes != size:
            raise _malformed(f"an array of {size} bytes has a buffer of {view.nbytes}")
        if node.dtype in (_TEXT, _BYTES):
            return bytes(view).decode() if node.dtype == _TEXT else bytes(view)
        array = np.empty(node.shape, dtype)
        if size:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8)
        return array


@functools.lru_cache(maxsize=256)
def _named_tuple_type(name: str, fields: tuple[str, ...]) -> Callable[..., tuple[Any, ...]]:
    """Makes a named tuple type; `namedtuple` compiles the names, so they are checked first."""
    for word in (name, *fields):
        if not word.isidentifier() or keyword.iskeyword(word):
            raise _malformed(f"{word[:40]!r} is not a name")
    return collections.namedtuple(name, fields)


def _malformed(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        "A result must be a well-formed tree",
        found,
        "Run the same version of replicax on all tasks.",
    )
