"""Initializers at the top of `tf`: functions of a shape and a dtype; Keras takes them, too."""

from __future__ import annotations

from typing import Any

from replicax.tf.dtypes import as_dtype
from replicax.tf.ops import creation, random
from replicax.tf.ops.operands import DTypeLike, Value

__all__ = [
    "constant_initializer",
    "ones_initializer",
    "random_normal_initializer",
    "random_uniform_initializer",
    "zeros_initializer",
]


class _Initializer:
    """Makes the first value of a variable; Keras calls it, and so can you."""

    def __call__(self, shape: Value, dtype: DTypeLike = "float32", **kwargs: Any) -> Any:
        del kwargs
        return self._values(tuple(shape), as_dtype("float32" if dtype is None else dtype))

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, from which an equal initializer can be made."""
        return dict(vars(self))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes an initializer from its arguments."""
        return cls(**{name: value for name, value in config.items() if name != "dtype"})


class zeros_initializer(_Initializer):
    """Zeros.

    >>> zeros_initializer()((2,)).numpy()
    array([0., 0.], dtype=float32)
    """

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return creation.zeros(shape, dtype)


class ones_initializer(_Initializer):
    """Ones.

    >>> ones_initializer()((2,), "int32").numpy()
    array([1, 1], dtype=int32)
    """

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return creation.ones(shape, dtype)


class constant_initializer(_Initializer):
    """A number, or the elements of a list in the order of the variable's.

    >>> constant_initializer([1, 2])((2, 1)).numpy()
    array([[1.],
           [2.]], dtype=float32)
    """

    def __init__(self, value: Value = 0, support_partition: bool = False) -> None:
        del support_partition
        self.value = value

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return creation.constant(self.value, dtype=dtype, shape=shape)


class random_normal_initializer(_Initializer):
    """Numbers of a normal distribution.

    >>> random_normal_initializer(stddev=0.1)((2, 3)).shape
    TensorShape([2, 3])
    """

    def __init__(self, mean: float = 0.0, stddev: float = 0.05, seed: int | None = None) -> None:
        self.mean, self.stddev, self.seed = mean, stddev, seed

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return random.normal(shape, self.mean, self.stddev, dtype, self.seed)


class random_uniform_initializer(_Initializer):
    """Numbers that are spread evenly over an interval.

    >>> random_uniform_initializer(0.0, 1.0)((2, 3)).shape
    TensorShape([2, 3])
    """

    def __init__(
        self, minval: float = -0.05, maxval: float | None = 0.05, seed: int | None = None
    ) -> None:
        self.minval, self.maxval, self.seed = minval, maxval, seed

    def _values(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return random.uniform(shape, self.minval, self.maxval, dtype, self.seed)
