"""Descriptions of a variable: its shape, its reference and its table in notebooks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from replicax.values import printing

if TYPE_CHECKING:
    from replicax.variables.variable import Variable

_V = TypeVar("_V")


class Shape(tuple[int, ...]):
    """A shape: a tuple of ints with the methods of a TensorShape that programs use.

    >>> shape = Shape((2, 3))
    >>> shape.as_list(), shape.num_elements(), shape == (2, 3)
    ([2, 3], 6, True)
    """

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    ndims = rank

    @property
    def dims(self) -> list[int]:
        """The sizes, as a list."""
        return list(self)

    def as_list(self) -> list[int]:
        """Returns the sizes as a list."""
        return list(self)

    def num_elements(self) -> int:
        """Returns the number of elements of an array of this shape."""
        return math.prod(self)

    def is_fully_defined(self) -> bool:
        """Tells that all sizes are known; those of a variable always are."""
        return True

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Shape(found) if isinstance(key, slice) else found


class Reference(Generic[_V]):
    """A hashable handle of a variable: equal for the same variable, whatever its value.

    >>> import replicax as rx
    >>> v = rx.Variable([1.0, 2.0])
    >>> steps = {v.ref(): 3}
    >>> steps[v.ref()], v.ref().deref() is v
    (3, True)
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: _V) -> None:
        self._variable = variable

    def deref(self) -> _V:
        """Returns the variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int, int]:
        # A copy of a variable is a new object at each access.
        container = getattr(self._variable, "container", self._variable)
        return id(container), getattr(self._variable, "replica_id", id(self._variable))

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"


def table_rows(variable: Variable) -> list[tuple[str, object]]:
    """Returns the rows of the table that notebooks show for a variable."""
    locations = [str(device) for device in dict.fromkeys(variable.placement)]
    shown = variable.device if variable.is_remote else printing.listing(locations)
    rows: list[tuple[str, object]] = [
        ("name", variable.name),
        ("shape", variable.shape),
        ("dtype", variable.dtype),
        ("trainable", variable.trainable),
        ("aggregation", variable.aggregation.name),
        ("devices", shown),
    ]
    if not variable.is_remote:
        label = "value of replica 0" if variable.is_per_replica else "value"
        rows.append((label, printing.preview(variable.components[0].describe())))
    return rows
