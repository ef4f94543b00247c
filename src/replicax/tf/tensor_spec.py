"""`tf.TensorSpec`: the shape and type of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.tf import dtypes
from replicax.tf.arguments import DTypeLike, ShapeLike, Value
from replicax.tf.tensor import TensorShape, raw
from replicax.tracing import signature


class TensorSpec(signature.TensorSpec):
    """The shape and type of an argument or element; None in a shape fits every size.

    >>> spec = TensorSpec([None, 2], dtypes.int32)
    >>> spec.shape.as_list(), spec.dtype
    ([None, 2], tf.int32)
    """

    def __init__(
        self, shape: ShapeLike = None, dtype: DTypeLike = dtypes.float32, name: str | None = None
    ) -> None:
        found = None if shape is None else TensorShape(shape)
        is_known = found is not None and found.rank is not None
        # The base is frozen.
        object.__setattr__(self, "shape", found if is_known else None)
        object.__setattr__(self, "dtype", dtypes.as_dtype(dtype))
        object.__setattr__(self, "name", name)

    @classmethod
    def of(cls, spec: Value) -> Any:
        """Returns the spec of another kind with the same facts; others stay as they are."""
        if not isinstance(spec, signature.TensorSpec) or isinstance(spec, TensorSpec):
            return spec
        return cls(spec.shape, _type(spec.dtype), spec.name)

    @classmethod
    def from_spec(cls, spec: Value, name: str | None = None) -> TensorSpec:
        """Returns a copy of a spec, with another name if one is given."""
        return cls(spec.shape, _type(spec.dtype), name or getattr(spec, "name", None))

    @classmethod
    def from_tensor(cls, tensor: Value, name: str | None = None) -> TensorSpec:
        """Returns the spec of a tensor.

        >>> TensorSpec.from_tensor(np.zeros((2, 3), np.float32)).shape
        TensorShape([2, 3])
        """
        array = raw(tensor)
        return cls(np.shape(array), _type(np.asarray(array).dtype), name)

    def is_compatible_with(self, spec_or_value: Value) -> bool:
        """Tells whether a tensor, or a tensor of another spec, fits."""
        other = spec_or_value
        if not isinstance(other, signature.TensorSpec):
            other = TensorSpec.from_tensor(other)
        fits = TensorShape(self.shape).is_compatible_with(TensorShape(other.shape))
        return fits and dtypes.as_dtype(self.dtype) == dtypes.as_dtype(_type(other.dtype))

    def __repr__(self) -> str:
        shape = TensorShape(self.shape)
        return f"TensorSpec(shape={shape}, dtype={self.dtype!r}, name={self.name!r})"


def _type(dtype: DTypeLike) -> Any:
    if isinstance(dtype, dtypes.DType):
        return dtype
    return dtypes.string if np.dtype(dtype).kind in "OSU" else dtype
