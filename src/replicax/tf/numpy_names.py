"""`tf.experimental.numpy`: functions of NumPy on tensors, by the functions of `jax.numpy`."""

from __future__ import annotations

import builtins
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from replicax.tf import dispatch
from replicax.tf.arguments import Value
from replicax.tf.dispatch import xp
from replicax.tf.tensor import Tensor

_FUNCTIONS = (
    "abs absolute add all allclose amax amin angle any append arange arccos arccosh arcsin "
    "arcsinh arctan arctan2 arctanh argmax argmin argsort around array array_equal array_split "
    "asarray ascontiguousarray atleast_1d atleast_2d atleast_3d average bitwise_and bitwise_not "
    "bitwise_or bitwise_xor broadcast_arrays broadcast_to cbrt ceil clip compress concatenate "
    "conj conjugate copy cos cosh count_nonzero cross cumprod cumsum deg2rad diag diag_indices "
    "diagflat diagonal diff divide divmod dot dsplit dstack einsum empty empty_like equal exp "
    "exp2 expand_dims expm1 eye fabs fix flatten flip fliplr flipud float_power floor "
    "floor_divide full full_like gcd geomspace greater greater_equal heaviside hsplit hstack "
    "hypot identity imag inner isclose iscomplex iscomplexobj isfinite isinf isnan isneginf "
    "isposinf isreal isrealobj isscalar ix_ kron lcm less less_equal linspace log log10 log1p "
    "log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logspace matmul "
    "max maximum mean median meshgrid min minimum mod moveaxis multiply nanmean nanprod nansum "
    "ndim negative nextafter nonzero not_equal ones ones_like outer pad polyval positive power "
    "prod ptp quantile rad2deg ravel real reciprocal remainder repeat reshape result_type roll "
    "rot90 round searchsorted select shape sign signbit sin sinc sinh size sort split sqrt "
    "square squeeze stack std subtract sum swapaxes take take_along_axis tan tanh tensordot "
    "tile trace transpose tri tril tril_indices triu triu_indices true_divide trunc unique "
    "vander var vdot vsplit vstack where zeros zeros_like"
).split()

__all__ = [
    "bool_",
    "complex64",
    "complex128",
    "complex_",
    "e",
    "experimental_enable_numpy_behavior",
    "finfo",
    "float16",
    "float32",
    "float64",
    "float_",
    "iinfo",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "int_",
    "issubdtype",
    "nan",
    "ndarray",
    "newaxis",
    "pi",
    "promote_types",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

ndarray = Tensor
newaxis = None
e, pi, inf, nan = np.e, np.pi, np.inf, np.nan
bool_, iinfo, finfo = np.bool_, jnp.iinfo, jnp.finfo
int_, float_, complex_ = np.int64, np.float64, np.complex128
issubdtype, promote_types = jnp.issubdtype, jnp.promote_types
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
float16, float32, float64 = np.float16, np.float32, np.float64
complex64, complex128 = np.complex64, np.complex128


def experimental_enable_numpy_behavior(
    prefer_float32: bool = False, dtype_conversion_mode: str = "legacy"
) -> None:
    """Accepts the call; tensors keep TensorFlow's rules of types.

    >>> experimental_enable_numpy_behavior()
    """
    del prefer_float32, dtype_conversion_mode


def _run(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(xp(), name)(*map(_array, args), **kwargs)


def _array(value: Value) -> Any:
    # `jax.numpy` takes no lists.
    is_list = isinstance(value, list) and bool(value) and _is_numeric(value)
    return xp().asarray(value) if is_list else value


def _is_numeric(values: Value) -> bool:
    if isinstance(values, list):
        # The name of Python; that of this module is an op.
        return builtins.all(map(_is_numeric, values))
    return isinstance(values, int | float | complex)


def _make(name: str) -> dispatch.Op:
    @functools.wraps(getattr(jnp, name), updated=())
    def body(*args: Any, **kwargs: Any) -> Any:
        return _run(name, *args, **kwargs)

    body.__module__, body.__qualname__ = __name__, name
    body.__doc__ = f"Computes `jax.numpy.{name}` of tensors."
    return dispatch.Op(body, name, True)


for _name in _FUNCTIONS:
    if hasattr(jnp, _name):
        globals()[_name] = _make(_name)
        __all__ += [_name]
