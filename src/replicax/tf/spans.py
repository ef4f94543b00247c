"""The numbers that a loop over `tf.range` goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from replicax.foundation import jax_compat
from replicax.tf.arguments import DTypeLike, Value
from replicax.tf.dispatch import array_dtype
from replicax.tf.ops import creation
from replicax.tf.tensor import Tensor, raw, traced_value_error


class Span:
    """The numbers of `tf.range`, whose bounds may be known to the compiled program only.

    >>> [int(number) for number in Span(1, 7, delta=2)]
    [1, 3, 5]
    """

    def __init__(
        self,
        start: Value,
        limit: Value = None,
        delta: Value = 1,
        dtype: DTypeLike = None,
        name: str | None = None,
    ) -> None:
        del name
        bounds = (0, start) if limit is None else (start, limit)
        self._bounds = (*map(raw, bounds), raw(delta))
        self._dtype = dtype

    @property
    def is_known(self) -> bool:
        """Whether the numbers are known while a function is compiled."""
        return not any(map(jax_compat.is_traced, self._bounds))

    def numbers(self) -> Any:
        """Returns all numbers as a tensor; they must be known."""
        return creation.range(*self._bounds, dtype=self._dtype)

    def count(self) -> Any:
        """Returns how many numbers there are."""
        if self.is_known:
            return len(self.numbers())
        start, limit, delta = self._bounds
        steps = jnp.ceil((limit - start) / delta)
        return jnp.maximum(steps, 0).astype(jnp.int32)

    def number(self, index: Value) -> Any:
        """Returns one of the numbers, by its index, as a tensor."""
        if self.is_known:
            return Tensor(jnp.asarray(raw(self.numbers()))[index])
        start, _, delta = self._bounds
        dtype = jnp.result_type(*self._bounds) if self._dtype is None else array_dtype(self._dtype)
        return Tensor((start + index * delta).astype(dtype))

    def __iter__(self) -> Iterator[Any]:
        if not self.is_known:
            raise traced_value_error("A loop over tf.range that can end early")
        return iter(self.numbers())
