"""Nested results as trees of `Node`, with arrays in buffers; reading them runs no code.

Both directions are checked: what cannot travel is named with its place, and what arrives
must fit to the last byte. Objects of higher layers pass through two hooks. A "str" or
"bytes" longer than `LONGEST_INLINE` takes a buffer, and its `shape` is the number of bytes.
Subclasses of the builtin containers and numbers arrive as the builtin type.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from replicax.foundation import errors
from replicax.protocol.array_types import DTYPES
from replicax.protocol.messages import Node

DEEPEST = 100
MOST_NODES = 100_000
# What the nodes of one result may take in the header of a message.
MOST_HEADER_BYTES = 512 * 1024
MOST_BUFFER_BYTES = 2 * 1024**3
LONGEST_INLINE = 4096

# What a node takes in a header without its text, data and shape; measured 36.
_NODE_BYTES = 48
_INTEGER = re.compile(r"-?[0-9]+")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
# More decimal digits than Python converts by default.
_MANY_BITS = 14_000
_MOST_DIGITS = 4300
_KEY_KINDS = {"none", "bool", "int", "float", "str", "tuple"}


class Other(NamedTuple):
    """How an object of a higher layer travels: as a node of this kind, around these values."""

    kind: str
    text: str = ""
    items: Sequence[Any] = ()


EncodeOther = Callable[[Any], Other | None]
DecodeOther = Callable[[Node, list[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is ready to travel.

    Attributes:
      node: The tree.
      buffers: Its arrays as bytes, in order; nobody else changes them.
      header_bytes: What the tree takes in the header of a message, at most.
    """

    node: Node
    buffers: list[Any]
    header_bytes: int


def encode(
    value: Any, encode_other: EncodeOther | None = None, name: str = "the result"
) -> Encoded:
    """Takes a snapshot of a nested value.

    Args:
      value: None, numbers, str, bytes, arrays, and lists, tuples, named tuples and dicts.
      encode_other: Returns how any other object travels, or None if it does not.
      name: What messages call the value.

    Raises:
      ArgumentTypeError: Something inside cannot travel.
      ResourceExhaustedError: It is too deep, has too many parts or too many bytes.

    >>> encoded = encode({"loss": np.float32(0.5), "names": ("a", None)})
    >>> decode(encoded.node, encoded.buffers)
    {'loss': array(0.5, dtype=float32), 'names': ('a', None)}
    """
    encoder = _Encoder(encode_other, name)
    node = encoder.encode(value)
    return Encoded(node, encoder.buffers, encoder.header_bytes)


def decode(node: Node, buffers: Sequence[Any], decode_other: DecodeOther | None = None) -> Any:
    """Returns the value of a tree; its arrays are new and may be changed.

    Args:
      node: The tree.
      buffers: The bytes of its arrays; all of them must be used.
      decode_other: Makes the value of a node of another kind from what is inside it.

    Raises:
      ProtocolError: The tree or its buffers break a rule.
    """
    decoder = _Decoder(buffers, decode_other)
    value = decoder.decode(node, 0)
    if decoder.num_used != len(buffers):
        raise _malformed(f"{len(buffers)} buffers came with {decoder.num_used} arrays")
    return value


class _Encoder:
    def __init__(self, encode_other: EncodeOther | None, name: str) -> None:
        self.buffers: list[Any] = []
        self.header_bytes = 0
        self._encode_other = encode_other
        self._name = name
        # Where in the structure the encoder is, for messages.
        self._path: list[str] = []
        self._num_nodes = 0
        self._num_bytes = 0

    def encode(self, value: Any) -> Node:
        self._num_nodes += 1
        self.header_bytes += _NODE_BYTES
        if self._num_nodes > MOST_NODES or self.header_bytes > MOST_HEADER_BYTES:
            raise self._too_large(
                f"at most {MOST_NODES:,} values, and {MOST_HEADER_BYTES >> 10} KiB beside its "
                "arrays",
                f"more: its first {self._num_nodes - 1:,} values take all of that",
                "Stack values into a few arrays.",
            )
        if len(self._path) > DEEPEST:
            raise self._too_large(
                f"at most {DEEPEST} levels",
                "more, or contains itself",
                "Return flat lists or arrays.",
            )
        if value is None:
            return Node("none")
        if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
            return self._array(value)
        plain = self._plain(value)
        if plain is not None:
            return plain
        other = None if self._encode_other is None else self._encode_other(value)
        if other is not None:
            return Node(other.kind, self._counted(other.text), items=self._items(other.items))
        if hasattr(value, "__array__"):
            return self._array(value)
        return self._container(value)

    def _plain(self, value: Any) -> Node | None:
        """Encodes a value that needs neither array nor container."""
        if isinstance(value, bool):
            return Node("bool", number=float(value))
        if isinstance(value, int):
            value = int(value)
            digits = hex(value) if value.bit_length() > _MANY_BITS else str(value)
            return Node("int", self._counted(digits))
        if isinstance(value, float):
            return Node("float", number=float(value))
        if isinstance(value, complex):
            return Node("complex", number=value.real, imaginary=value.imag)
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, bytes):
            if len(value) > LONGEST_INLINE:
                self._add(bytes(value), len(value))
                return Node("bytes", shape=(len(value),))
            self.header_bytes += len(value)
            return Node("bytes", data=bytes(value))
        return None

    def _string(self, value: str) -> Node:
        try:
            data = value.encode()
        except UnicodeEncodeError:
            raise self._refusal("a str that is no valid Unicode") from None
        if len(data) > LONGEST_INLINE:
            self._add(data, len(data))
            return Node("str", shape=(len(data),))
        self.header_bytes += len(data)
        return Node("str", str(value))

    def _array(self, value: Any) -> Node:
        try:
            array = np.asarray(value)
        except Exception as error:  # Whatever `__array__` of a foreign class raises.
            found = f"a {type(value)} that does not become an array ({error})"
            raise self._refusal(found) from error
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        name = array.dtype.name
        if DTYPES.get(name) != array.dtype:
            raise self._refusal(f"a {type(value)} of type {array.dtype}")
        self.header_bytes += len(name) + 9 * array.ndim
        self._require_room(array.nbytes)
        # A copy: the caller, or the next compiled step, may write where the array lies.
        self._add(np.array(array, order="C", copy=True).reshape(-1).view(np.uint8), array.nbytes)
        return Node("array", name, shape=array.shape)

    def _container(self, value: Any) -> Node:
        if isinstance(value, dict):
            keys = [self._key(key) for key in value]
            labels = [f"[{key!r}]" for key in value]
            return Node("dict", keys=keys, items=self._items(list(value.values()), labels))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = [str(field) for field in value._fields]  # type: ignore[attr-defined]
            keys = [Node("str", self._counted(field)) for field in fields]
            self.header_bytes += _NODE_BYTES * len(keys)
            items = self._items(value, [f".{field}" for field in fields])
            return Node("named_tuple", self._counted(type(value).__name__), keys=keys, items=items)
        if isinstance(value, list | tuple):
            return Node("list" if isinstance(value, list) else "tuple", items=self._items(value))
        raise self._refusal(f"a {type(value)}")

    def _items(self, values: Sequence[Any], labels: Sequence[str] | None = None) -> list[Node]:
        nodes = []
        for index, value in enumerate(values):
            self._path.append(f"[{index}]" if labels is None else labels[index])
            nodes.append(self.encode(value))
            self._path.pop()
        return nodes

    def _key(self, key: Any) -> Node:
        def is_fit(part: Any) -> bool:
            if isinstance(part, tuple):
                return not hasattr(part, "_fields") and all(is_fit(p) for p in part)
            return part is None or isinstance(part, str | int | float)

        if not is_fit(key) or isinstance(key, np.generic):
            raise self._refusal(f"a dict with a key of {type(key)}")
        before = len(self.buffers)
        node = self.encode(key)
        if len(self.buffers) > before:
            raise self._refusal(f"a dict with a key longer than {LONGEST_INLINE} bytes")
        return node

    def _counted(self, text: str) -> str:
        self.header_bytes += len(text.encode(errors="surrogatepass"))
        return text

    def _add(self, buffer: Any, size: int) -> None:
        self._require_room(size)
        self._num_bytes += size
        self.header_bytes += 9
        self.buffers.append(buffer)

    def _require_room(self, size: int) -> None:
        total = self._num_bytes + size
        if total > MOST_BUFFER_BYTES:
            place = f", {size:,} of them at {''.join(self._path)}" if self._path else ""
            raise self._too_large(
                f"at most {MOST_BUFFER_BYTES:,} bytes ({MOST_BUFFER_BYTES >> 30} GiB)",
                f"{total:,} ({total / 2**30:.1f} GiB{place})",
                "Return it in parts, by several closures, keep it in a variable, or write it to a "
                "file.",
            )

    def _refusal(self, found: str) -> errors.ArgumentTypeError:
        place = f" at {''.join(self._path)}" if self._path else ""
        return errors.ArgumentTypeError(
            "What travels between tasks is None, numbers, str, bytes, arrays, and lists, "
            "tuples and dicts of them",
            f"{self._name}{place} is {found}",
            "Convert it to arrays, or leave it out.",
        )

    def _too_large(self, required: str, found: str, todo: str) -> errors.ResourceExhaustedError:
        return errors.ResourceExhaustedError(
            f"{self._name[0].upper()}{self._name[1:]} may have {required}",
            f"it has {found}",
            todo,
        )


class _Decoder:
    def __init__(self, buffers: Sequence[Any], decode_other: DecodeOther | None) -> None:
        self._buffers: Iterator[Any] = iter(buffers)
        self._decode_other = decode_other
        self._num_nodes = 0
        self.num_used = 0

    def decode(self, node: Node, depth: int) -> Any:
        self._num_nodes += 1
        if depth > DEEPEST or self._num_nodes > MOST_NODES:
            raise _malformed(f"there are more than {DEEPEST} levels or {MOST_NODES} nodes")
        read = _LEAVES.get(node.kind)
        if read is not None:
            if node.items or node.keys:
                raise _malformed(f"a {node.kind!r} has something inside")
            return read(self, node)
        items = [self.decode(item, depth + 1) for item in node.items]
        if node.kind == "list":
            return items
        if node.kind == "tuple":
            return tuple(items)
        if node.kind == "dict":
            return self._dict(node, items, depth)
        if node.kind == "named_tuple":
            return self._named_tuple(node, items)
        if self._decode_other is None:
            raise _malformed(f"there is a node of kind {node.kind!r}")
        return self._decode_other(node, items)

    def _dict(self, node: Node, items: list[Any], depth: int) -> dict[Any, Any]:
        if len(node.keys) != len(items):
            raise _malformed(f"a dict has {len(node.keys)} keys and {len(items)} values")
        if not all(_is_key(key) for key in node.keys):
            raise _malformed("a dict has a key that is no str, number, None or tuple of them")
        keys = [self.decode(key, depth + 1) for key in node.keys]
        made = dict(zip(keys, items, strict=True))
        if len(made) != len(items):
            raise _malformed("a dict has a key twice")
        return made

    def _named_tuple(self, node: Node, items: list[Any]) -> Any:
        fields = tuple(key.text for key in node.keys)
        if len(fields) != len(items) or any(key.kind != "str" for key in node.keys):
            raise _malformed("a named tuple has other fields than values")
        return _named_tuple_type(node.text, fields)(*items)

    def read_int(self, node: Node) -> int:
        if _INTEGER.fullmatch(node.text) and len(node.text) <= _MOST_DIGITS:
            return int(node.text)
        if _HEXADECIMAL.fullmatch(node.text):
            return int(node.text, 16)
        raise _malformed(f"{node.text[:20]!r} is no int")

    def read_bool(self, node: Node) -> bool:
        if node.number not in (0.0, 1.0):
            raise _malformed(f"{node.number} is no bool")
        return node.number == 1.0

    def read_str(self, node: Node) -> str:
        if not node.shape:
            return node.text
        try:
            return self._long(node).decode()
        except UnicodeDecodeError:
            raise _malformed("a str is no UTF-8") from None

    def read_bytes(self, node: Node) -> bytes:
        return self._long(node) if node.shape else node.data

    def read_array(self, node: Node) -> np.ndarray[Any, Any]:
        dtype = DTYPES.get(node.text)
        if dtype is None:
            raise _malformed(f"{node.text[:40]!r} is no type of arrays")
        size = dtype.itemsize
        for length in node.shape:
            size *= length
        if any(length < 0 for length in node.shape):
            raise _malformed("an array has a negative length")
        view = self._take(size)
        try:
            array = np.empty(node.shape, dtype)
        except ValueError as error:
            raise _malformed(f"no array has the shape of one ({error})") from None
        if size:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(view, np.uint8)
        return array

    def _long(self, node: Node) -> bytes:
        if len(node.shape) != 1:
            raise _malformed(f"the size of a {node.kind!r} has {len(node.shape)} parts")
        return bytes(self._take(node.shape[0]))

    def _take(self, size: int) -> memoryview:
        buffer = next(self._buffers, None)
        if buffer is None:
            raise _malformed("there are more arrays than buffers")
        self.num_used += 1
        view = memoryview(buffer)
        if view.nbytes != size:
            raise _malformed(f"an array of {size} bytes has a buffer of {view.nbytes}")
        return view


_LEAVES: dict[str, Callable[[_Decoder, Node], Any]] = {
    "none": lambda _, node: None,
    "bool": _Decoder.read_bool,
    "int": _Decoder.read_int,
    "float": lambda _, node: node.number,
    "complex": lambda _, node: complex(node.number, node.imaginary),
    "str": _Decoder.read_str,
    "bytes": _Decoder.read_bytes,
    "array": _Decoder.read_array,
}


def _is_key(node: Node) -> bool:
    return node.kind in _KEY_KINDS and all(_is_key(item) for item in node.items)


@functools.lru_cache(maxsize=256)
def _named_tuple_type(name: str, fields: tuple[str, ...]) -> Any:
    """Makes a class for a named tuple; the names are checked, as they become code."""
    for word in (name, *fields):
        if not word.isidentifier() or keyword.iskeyword(word):
            raise _malformed(f"{word[:40]!r} is no name")
    try:
        return collections.namedtuple(name, fields)
    except ValueError as error:
        raise _malformed(f"a named tuple cannot be made ({error})") from None


def _malformed(found: str) -> errors.ProtocolError:
    return errors.ProtocolError(
        "A result must be a well-formed tree",
        found,
        "Run the same version of replicax on all tasks.",
    )
