"""`Example` and `SequenceExample`: the messages that most TFRecord files hold.

Their surface is that of the classes which protobuf generates, as far as programs use it:
constructor keywords, `SerializeToString`, `FromString`, attributes that create what is absent,
and `value` lists with `append` and `extend`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from replicax.foundation import errors
from replicax.tensorflow_files import wire
from replicax.tensorflow_files.example_values import (
    BytesList,
    FloatList,
    Int64List,
    ListMessage,
    Message,
)

_M = TypeVar("_M", bound=Message)


class Feature(Message):
    """One list of values: bytes, floats or integers.

    The list that is set or changed last replaces the others.

    >>> feature = Feature(int64_list=Int64List(value=[3]))
    >>> feature.WhichOneof("kind"), feature.int64_list.value
    ('int64_list', [3])
    """

    __slots__ = ("_kind", "_lists")

    _KINDS: ClassVar[dict[str, type[ListMessage]]] = {
        "bytes_list": BytesList,
        "float_list": FloatList,
        "int64_list": Int64List,
    }
    _NUMBERS: ClassVar[dict[int, str]] = {1: "bytes_list", 2: "float_list", 3: "int64_list"}

    def __init__(
        self,
        bytes_list: BytesList | None = None,
        float_list: FloatList | None = None,
        int64_list: Int64List | None = None,
    ) -> None:
        # The list that is set although it may be empty.
        self._kind: str | None = None
        self._lists: dict[str, ListMessage] = {}
        given = {"bytes_list": bytes_list, "float_list": float_list, "int64_list": int64_list}
        for name, one in given.items():
            if one is None:
                continue
            if type(one) is not self._KINDS[name]:
                raise errors.ArgumentTypeError(
                    f"`{name}` of a Feature must be a {self._KINDS[name].__name__}",
                    f"it is a {type(one).__name__}",
                    f"Write Feature({name}={self._KINDS[name].__name__}(value=[...])).",
                )
            self._list(name).CopyFrom(one)
            self._kind = name

    @property
    def bytes_list(self) -> BytesList:
        """The list of bytes, which may be empty."""
        return self._list("bytes_list")  # type: ignore[return-value]

    @property
    def float_list(self) -> FloatList:
        """The list of floats, which may be empty."""
        return self._list("float_list")  # type: ignore[return-value]

    @property
    def int64_list(self) -> Int64List:
        """The list of integers, which may be empty."""
        return self._list("int64_list")  # type: ignore[return-value]

    def _list(self, name: str) -> ListMessage:
        if name not in self._lists:
            self._lists[name] = self._KINDS[name]()
        return self._lists[name]

    def WhichOneof(self, oneof_group: str = "kind") -> str | None:
        """Returns the name of the list that is set, or None."""
        if oneof_group != "kind":
            raise errors.InvalidArgumentError(
                'A Feature has the group "kind"', f"it is {oneof_group!r}", 'Pass "kind".'
            )
        filled = [name for name, one in self._lists.items() if one.value]
        return filled[-1] if filled else self._kind

    def HasField(self, field_name: str) -> bool:
        """Returns whether a list is the one that is set."""
        return self.WhichOneof() == field_name

    @override
    def Clear(self) -> None:
        self._kind = None
        self._lists = {}

    @override
    def _encode(self) -> bytes:
        kind = self.WhichOneof()
        if kind is None:
            return b""
        number = next(number for number, name in self._NUMBERS.items() if name == kind)
        return wire.octets(number, self._list(kind)._encode())

    @override
    def _merge(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            name = self._NUMBERS.get(number)
            if name is not None:
                if self._kind != name:
                    self.Clear()
                self._kind = name
                self._list(name)._merge(wire.as_bytes(value))

    def __repr__(self) -> str:
        kind = self.WhichOneof()
        return "Feature()" if kind is None else f"Feature({kind}={self._list(kind)!r})"


class MessageMap(dict[str, _M]):
    """Messages by name; reading a name that is absent creates an empty message."""

    __slots__ = ("_type",)

    def __init__(self, type_: type[_M], given: Mapping[str, _M] | None = None) -> None:
        super().__init__()
        self._type = type_
        for name, message in (given or {}).items():
            self[name].CopyFrom(_checked_message(message, type_))

    def __reduce__(self) -> tuple[type[dict], tuple[dict[str, _M]]]:
        return dict, (dict(self),)

    def __missing__(self, name: str) -> _M:
        if not isinstance(name, str):
            raise errors.ArgumentTypeError(
                "The name of a feature must be text", f"it is {name!r}", "Pass a str."
            )
        made = self._type()
        dict.__setitem__(self, name, made)
        return made

    @override
    def __setitem__(self, name: str, value: _M) -> None:
        raise errors.UnsupportedError(
            "Messages are changed in place, not assigned",
            f"{name!r} was assigned",
            f"Write `[{name!r}].CopyFrom(message)`, or `[{name!r}].int64_list.value.append(1)`.",
        )


def _checked_message(message: object, type_: type[_M]) -> _M:
    if type(message) is type_:
        return message
    raise errors.ArgumentTypeError(
        f"This must be a {type_.__name__}",
        f"it is a {type(message).__name__}",
        f"Wrap it: {type_.__name__}(...).",
    )


class _MapMessage(Message, Generic[_M]):
    """A message that is a mapping from names to messages."""

    __slots__ = ("_entries",)

    _TYPE: type[_M]

    def __init__(self, entries: Mapping[str, _M] | None = None) -> None:
        self._entries: MessageMap[_M] = MessageMap(self._TYPE, entries)

    @override
    def Clear(self) -> None:
        self._entries.clear()

    @override
    def _encode(self) -> bytes:
        return b"".join(
            wire.octets(1, wire.text(1, name) + wire.octets(2, self._entries[name]._encode()))
            for name in sorted(self._entries)
        )

    @override
    def _merge(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            if number != 1:
                continue
            name, message = "", self._TYPE()
            for part, _, inner in wire.fields(wire.as_bytes(value)):
                if part == 1:
                    name = wire.as_text(inner)
                elif part == 2:
                    message._merge(wire.as_bytes(inner))
            dict.__setitem__(self._entries, name, message)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self._entries)!r})"


class Features(_MapMessage[Feature]):
    """Features by name.

    >>> features = Features(feature={"x": Feature(int64_list=Int64List(value=[3]))})
    >>> features.feature["x"].int64_list.value
    [3]
    """

    __slots__ = ()
    _TYPE = Feature

    def __init__(self, feature: Mapping[str, Feature] | None = None) -> None:
        super().__init__(feature)

    @property
    def feature(self) -> MessageMap[Feature]:
        """The features by name."""
        return self._entries


class FeatureList(Message):
    """Features in order, such as one for each time step."""

    __slots__ = ("_feature",)

    def __init__(self, feature: Iterable[Feature] = ()) -> None:
        self._feature = FeatureSequence()
        self._feature.extend(feature)

    @property
    def feature(self) -> FeatureSequence:
        """The features in order."""
        return self._feature

    @override
    def Clear(self) -> None:
        self._feature.clear()

    @override
    def _encode(self) -> bytes:
        return b"".join(wire.octets(1, one._encode()) for one in self._feature)

    @override
    def _merge(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            if number == 1:
                self._feature.add()._merge(wire.as_bytes(value))

    def __repr__(self) -> str:
        return f"FeatureList(feature={list(self._feature)!r})"


class FeatureSequence:
    """The features of a FeatureList; those that are added are copied."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Feature] = []

    def add(
        self,
        bytes_list: BytesList | None = None,
        float_list: FloatList | None = None,
        int64_list: Int64List | None = None,
    ) -> Feature:
        """Appends a new feature and returns it."""
        self._items.append(Feature(bytes_list, float_list, int64_list))
        return self._items[-1]

    def append(self, feature: Feature) -> None:
        """Appends a copy of a feature."""
        self.add().CopyFrom(_checked_message(feature, Feature))

    def extend(self, features: Iterable[Feature]) -> None:
        """Appends copies of features."""
        for feature in features:
            self.append(feature)

    def clear(self) -> None:
        """Removes all features."""
        self._items.clear()

    def __getitem__(self, index: int) -> Feature:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


class FeatureLists(_MapMessage[FeatureList]):
    """Lists of features by name."""

    __slots__ = ()
    _TYPE = FeatureList

    def __init__(self, feature_list: Mapping[str, FeatureList] | None = None) -> None:
        super().__init__(feature_list)

    @property
    def feature_list(self) -> MessageMap[FeatureList]:
        """The lists by name."""
        return self._entries


class Example(Message):
    """One example: features by name.

    >>> feature = Feature(int64_list=Int64List(value=[3]))
    >>> example = Example(features=Features(feature={"x": feature}))
    >>> data = example.SerializeToString()
    >>> Example.FromString(data).features.feature["x"].int64_list.value
    [3]
    """

    __slots__ = ("_features",)

    def __init__(self, features: Features | None = None) -> None:
        self._features = Features()
        if features is not None:
            self._features.CopyFrom(_checked_message(features, Features))

    @property
    def features(self) -> Features:
        """The features."""
        return self._features

    @override
    def Clear(self) -> None:
        self._features.Clear()

    @override
    def _encode(self) -> bytes:
        inner = self._features._encode()
        return wire.octets(1, inner) if inner else b""

    @override
    def _merge(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            if number == 1:
                self._features._merge(wire.as_bytes(value))

    def __repr__(self) -> str:
        return f"Example(features={self._features!r})"


class SequenceExample(Message):
    """One example with lists: features of the whole, and lists of features by name.

    >>> steps = FeatureList(feature=[Feature(float_list=FloatList(value=[0.5]))])
    >>> example = SequenceExample(feature_lists=FeatureLists(feature_list={"x": steps}))
    >>> example.feature_lists.feature_list["x"].feature[0].float_list.value
    [0.5]
    """

    __slots__ = ("_context", "_feature_lists")

    def __init__(
        self, context: Features | None = None, feature_lists: FeatureLists | None = None
    ) -> None:
        self._context, self._feature_lists = Features(), FeatureLists()
        if context is not None:
            self._context.CopyFrom(_checked_message(context, Features))
        if feature_lists is not None:
            self._feature_lists.CopyFrom(_checked_message(feature_lists, FeatureLists))

    @property
    def context(self) -> Features:
        """The features of the whole example."""
        return self._context

    @property
    def feature_lists(self) -> FeatureLists:
        """The lists of features."""
        return self._feature_lists

    @override
    def Clear(self) -> None:
        self._context.Clear()
        self._feature_lists.Clear()

    @override
    def _encode(self) -> bytes:
        parts = ((1, self._context._encode()), (2, self._feature_lists._encode()))
        return b"".join(wire.octets(number, inner) for number, inner in parts if inner)

    @override
    def _merge(self, data: bytes) -> None:
        for number, _, value in wire.fields(data):
            if number == 1:
                self._context._merge(wire.as_bytes(value))
            elif number == 2:
                self._feature_lists._merge(wire.as_bytes(value))

    def __repr__(self) -> str:
        return f"SequenceExample(context={self._context!r}, feature_lists={self._feature_lists!r})"
