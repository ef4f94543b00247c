"""`tf.nest`: structures of Python containers, with TensorFlow's order of dicts (sorted keys)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from replicax.foundation import errors
from replicax.tf import namespaces
from replicax.tf.arguments import Structure, Value
from replicax.tf.tensor import TensorShape

__all__ = ["assert_same_structure", "flatten", "is_nested", "map_structure", "pack_sequence_as"]


def is_nested(structure: Structure) -> bool:
    """Tells whether a value is a container: a list, tuple, dict or attrs class.

    >>> is_nested([1]), is_nested("text"), is_nested(3)
    (True, False, False)
    """
    if isinstance(structure, TensorShape):
        return False
    return isinstance(structure, list | tuple | Mapping) or _has_fields(structure)


def flatten(structure: Structure, expand_composites: bool = False) -> list[Any]:
    """Returns the leaves of a structure; dicts in the order of their keys, None is a leaf.

    >>> flatten({"b": [1, (2,)], "a": None})
    [None, 1, 2]
    """
    del expand_composites
    return list(_leaves(structure))


def map_structure(func: Callable[..., Any], *structure: Any, **kwargs: Any) -> Any:
    """Applies a function to the leaves of structures of one shape.

    >>> map_structure(lambda x, y: x + y, {"a": (1, 2)}, {"a": (10, 20)})
    {'a': (11, 22)}
    """
    if not callable(func):
        raise errors.ArgumentTypeError(
            "`map_structure` needs a function", f"{func!r} was given", "Pass the function first."
        )
    if not structure:
        raise errors.InvalidArgumentError(
            "`map_structure` needs a structure", "none was given", "Pass at least one."
        )
    kwargs.pop("expand_composites", None)
    check_types = kwargs.pop("check_types", True)
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check_types)
    columns = zip(*map(flatten, structure), strict=True)
    return pack_sequence_as(structure[0], [func(*leaves, **kwargs) for leaves in columns])


def pack_sequence_as(
    structure: Structure, flat_sequence: Value, expand_composites: bool = False
) -> Any:
    """Returns a structure of the same shape with other leaves.

    >>> pack_sequence_as({"a": 0, "b": [0, 0]}, [1, 2, 3])
    {'a': 1, 'b': [2, 3]}
    """
    del expand_composites
    leaves = list(flat_sequence)
    count = len(flatten(structure))
    if len(leaves) != count:
        raise errors.InvalidArgumentError(
            f"`flat_sequence` needs one value for each of the {count} leaves of the structure",
            f"it has {len(leaves)}",
            "Flatten a structure of the same shape.",
        )
    return _packed(structure, iter(leaves))


def assert_same_structure(
    nest1: Structure, nest2: Structure, check_types: bool = True, expand_composites: bool = False
) -> None:
    """Raises unless two structures have the same containers, lengths and keys.

    Args:
      nest1: A structure.
      nest2: Another one.
      check_types: Whether the types of containers must be equal, too.
      expand_composites: Accepted for portability.

    >>> assert_same_structure([1, (2,)], [3, (4,)])
    """
    del expand_composites
    if is_nested(nest1) != is_nested(nest2):
        raise _different(ValueError, nest1, nest2)
    if not is_nested(nest1):
        return
    if check_types and not _same_type(nest1, nest2):
        raise _different(TypeError, nest1, nest2)
    first, second = _items(nest1), _items(nest2)
    if len(first) != len(second) or (
        isinstance(nest1, Mapping) and isinstance(nest2, Mapping) and set(nest1) != set(nest2)
    ):
        raise _different(ValueError, nest1, nest2)
    for one, other in zip(first, second, strict=True):
        assert_same_structure(one, other, check_types)


def _different(kind: type[Exception], one: Value, other: Value) -> Exception:
    parts = (
        f"Two structures must be the same, {_shown(one)}",
        f"the other is {_shown(other)}",
        "Return the same containers, or pass check_types=False if only their types differ.",
    )
    if kind is TypeError:
        return errors.ArgumentTypeError(*parts)
    return errors.StructureError(*parts)


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _same_type(one: Value, other: Value) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return True
    return type(one) is type(other)


def _has_fields(value: Value) -> bool:
    return hasattr(type(value), "__attrs_attrs__")


def _sorted_keys(mapping: Mapping[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:
        raise errors.ArgumentTypeError(
            "The keys of a dict in a structure must be sortable",
            f"they are {list(mapping)}",
            "Use keys of one type.",
        ) from None


def _items(value: Value) -> list[Any]:
    if isinstance(value, Mapping):
        return [value[key] for key in _sorted_keys(value)]
    if isinstance(value, list | tuple):
        return list(value)
    return [getattr(value, field.name) for field in type(value).__attrs_attrs__]


def _leaves(structure: Structure) -> Iterator[Any]:
    if not is_nested(structure):
        yield structure
        return
    for item in _items(structure):
        yield from _leaves(item)


def _packed(structure: Structure, leaves: Iterator[Any]) -> Any:
    if not is_nested(structure):
        return next(leaves)
    values = [_packed(item, leaves) for item in _items(structure)]
    if isinstance(structure, Mapping):
        found = dict(zip(_sorted_keys(structure), values, strict=True))
        # The order of keys of the original.
        pairs = [(key, found[key]) for key in structure]
        if type(structure) is dict or not isinstance(structure, dict):
            return dict(pairs)
        copy = structure.copy()
        copy.update(pairs)
        return copy
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*values)
    if isinstance(structure, list | tuple):
        return type(structure)(values)
    return type(structure)(*values)


__getattr__ = namespaces.refusing(__name__)
