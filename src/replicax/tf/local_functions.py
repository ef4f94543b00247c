"""Functions that are defined again in each call of the function around them."""

from __future__ import annotations

import types
from typing import Any

from replicax.tf.arguments import Value


class LocalFunctions:
    """Functions that the code around a loop defines again in each call.

    A compiled body has them as arguments. A function with the same code and the same closure as
    one before is that one, so the body is not compiled again.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def known(self, value: Value) -> Any:
        """Returns the first function that was equal to one; other values stay."""
        if not isinstance(value, types.FunctionType):
            return value
        key = self._key(value)
        if key not in self._known and len(self._known) >= self._MOST:
            self._known.clear()
        return self._known.setdefault(key, value) if key is not None else value

    def _key(self, function: types.FunctionType) -> Any:
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            return None
        # The function keeps these alive, so their ids stay unique.
        return (
            function.__code__,
            id(function.__globals__),
            tuple(id(self.known(content)) for content in cells),
            tuple(map(id, function.__defaults__ or ())),
        )
