"""The parts of examples: the base of messages, and lists of bytes, floats and integers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Generic, Self, SupportsIndex, TypeVar, overload

import numpy as np
from typing_extensions import override

from replicax.foundation import errors
from replicax.tensorflow_files import wire

_T = TypeVar("_T")


class Message:
    """A protocol buffer: its fields are attributes."""

    __slots__ = ()

    def SerializeToString(self, deterministic: bool = True) -> bytes:
        """Returns the message as bytes; always the same ones for equal messages."""
        del deterministic
        return self._encode()

    @classmethod
    def FromString(cls, serialized: bytes) -> Self:
        """Returns the message that bytes contain.

        Raises:
          InvalidArgumentError: They are not a message of this kind.
        """
        made = cls()
        made.ParseFromString(serialized)
        return made

    def ParseFromString(self, serialized: bytes) -> int:
        """Replaces the fields by those of a serialized message; returns its size."""
        self.Clear()
        return self.MergeFromString(serialized)

    def MergeFromString(self, serialized: bytes) -> int:
        """Adds the fields of a serialized message; returns its size."""
        data = _plain_bytes(serialized)
        try:
            self._merge(data)
        except wire.WireError as error:
            raise errors.InvalidArgumentError(
                f"The bytes must be a serialized {type(self).__name__}",
                f"{error}, in {len(data)} bytes",
                "Check that the file holds such records, and that nothing has changed them.",
            ) from error
        return len(data)

    def CopyFrom(self, other: Self) -> None:
        """Replaces the fields by those of another message."""
        if other is not self:
            self.ParseFromString(other.SerializeToString())

    def MergeFrom(self, other: Self) -> None:
        """Adds the fields of another message."""
        self.MergeFromString(other.SerializeToString())

    def ByteSize(self) -> int:
        """Returns the number of bytes of the serialized message."""
        return len(self._encode())

    def Clear(self) -> None:
        """Removes all fields."""
        raise NotImplementedError

    def _encode(self) -> bytes:
        raise NotImplementedError

    def _merge(self, data: bytes) -> None:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._encode() == other._encode()

    def __reduce__(self) -> tuple[Callable[[bytes], Message], tuple[bytes]]:
        return type(self).FromString, (self._encode(),)

    __hash__ = None  # type: ignore[assignment]


def _plain_bytes(data: object) -> bytes:
    if isinstance(data, np.ndarray) and data.ndim == 0:
        data = data.item()
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise errors.ArgumentTypeError(
        "A serialized message must be bytes",
        f"it is a {type(data).__name__}",
        "Pass a record of a TFRecord file, such as an element of a TFRecordDataset.",
    )


class Values(list[_T]):
    """The numbers or bytes of a list message; each is checked and converted when it is added."""

    __slots__ = ("_owner",)

    def __init__(self, owner: type[ListMessage[_T]], given: Iterable[_T] = ()) -> None:
        super().__init__()
        self._owner = owner
        self.extend(given)

    @override
    def append(self, value: _T) -> None:
        super().append(self._owner._checked(value))

    @override
    def extend(self, values: Iterable[_T]) -> None:
        super().extend(self._owner._checked_all(values))

    @override
    def insert(self, index: SupportsIndex, value: _T) -> None:
        super().insert(index, self._owner._checked(value))

    def __reduce__(self) -> tuple[type[list], tuple[list[_T]]]:
        return list, (list(self),)

    @overload
    def __setitem__(self, index: SupportsIndex, value: _T) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[_T]) -> None: ...
    @override
    def __setitem__(self, index: SupportsIndex | slice, value: _T | Iterable[_T]) -> None:
        if isinstance(index, slice):
            super().__setitem__(index, self._owner._checked_all(value))  # type: ignore[arg-type]
        else:
            super().__setitem__(index, self._owner._checked(value))  # type: ignore[arg-type]


class ListMessage(Message, Generic[_T]):
    """A message that is a list of values."""

    __slots__ = ("_value",)

    def __init__(self, value: Iterable[_T] = ()) -> None:
        self._value: Values[_T] = Values(type(self), value)

    @property
    def value(self) -> Values[_T]:
        """The values; change them in place, as in `message.value.append(1)`."""
        return self._value

    @override
    def Clear(self) -> None:
        self._value.clear()

    @classmethod
    def _checked(cls, value: object) -> _T:
        raise NotImplementedError

    @classmethod
    def _checked_all(cls, values: object) -> list[_T]:
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise errors.ArgumentTypeError(
                f"The `value` of a {cls.__name__} must be a list",
                f"it is {values!r}"[:100],
                f"Write {cls.__name__}(value=[...]).",
            )
        return [cls._checked(value) for value in values]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={list(self._value)!r})"


class BytesList(ListMessage[bytes]):
    """A list of bytes.

    >>> BytesList(value=[b"ab"]).value
    [b'ab']
    """

    __slots__ = ()

    @classmethod
    @override
    def _checked(cls, value: object) -> bytes:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, bytes):
            return bytes(value)
        raise errors.ArgumentTypeError(
            "A BytesList holds bytes",
            f"one value is a {type(value).__name__}",
            "Encode text: value=[text.encode()].",
        )

    @override
    def _encode(self) -> bytes:
        return b"".join(wire.octets(1, value) for value in self._value)

    @override
    def _merge(self, data: bytes) -> None:
        for number, kind, value in wire.fields(data):
            if number == 1 and kind == wire.LENGTH:
                list.append(self._value, wire.as_bytes(value))


class FloatList(ListMessage[float]):
    """A list of numbers with 32 bits.

    >>> FloatList(value=[0.1]).value
    [0.10000000149011612]
    """

    __slots__ = ()

    @classmethod
    @override
    def _checked(cls, value: object) -> float:
        try:
            return float(np.float32(value))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise errors.ArgumentTypeError(
                "A FloatList holds numbers",
                f"one value is {value!r}"[:100],
                "Pass numbers; flatten arrays: value=array.ravel().",
            ) from error

    @override
    def _encode(self) -> bytes:
        return wire.packed_singles(1, self._value)

    @override
    def _merge(self, data: bytes) -> None:
        for number, kind, value in wire.fields(data):
            if number == 1 and kind == wire.LENGTH:
                octets = wire.as_bytes(value)
                if len(octets) % 4:
                    raise wire.WireError(f"a list of floats has {len(octets)} bytes")
                list.extend(self._value, np.frombuffer(octets, "<f4").tolist())
            elif number == 1 and kind == wire.FIXED32:
                octets = wire.as_unsigned(value).to_bytes(4, "little")
                list.append(self._value, struct.unpack("<f", octets)[0])


class Int64List(ListMessage[int]):
    """A list of whole numbers.

    >>> Int64List(value=[3, -1]).value
    [3, -1]
    """

    __slots__ = ()

    @classmethod
    @override
    def _checked(cls, value: object) -> int:
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, int | np.integer | np.bool_) and -(2**63) <= int(value) < 2**63:
            return int(value)
        raise errors.ArgumentTypeError(
            "An Int64List holds whole numbers of 64 bits",
            f"one value is {value!r}, a {type(value).__name__}"[:100],
            "Convert it: value=[int(x)].",
        )

    @override
    def _encode(self) -> bytes:
        return wire.packed_varints(1, self._value)

    @override
    def _merge(self, data: bytes) -> None:
        for number, kind, value in wire.fields(data):
            if number == 1 and kind == wire.LENGTH:
                list.extend(self._value, wire.signed_varints(wire.as_bytes(value)).tolist())
            elif number == 1 and kind == wire.VARINT:
                list.append(self._value, wire.as_signed(value))
