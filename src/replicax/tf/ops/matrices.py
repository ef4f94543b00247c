"""Products of tensors, and the diagonals and triangles of matrices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    integer,
    integers,
    kind_of,
    numbers,
    numpy_dtype,
    operands,
    quiet_op,
    require_kind,
    static,
    xp,
)

__all__ = [
    "adjoint",
    "band_part",
    "cross",
    "diag",
    "diag_part",
    "einsum",
    "matmul",
    "matrix_transpose",
    "matvec",
    "set_diag",
    "tensor_diag",
    "tensor_diag_part",
    "tensordot",
    "trace",
]


def _turned(x: Array, transpose: bool, adjoint: bool) -> Array:
    if not (transpose or adjoint):
        return x
    moved = xp(x).swapaxes(x, -1, -2)
    return xp(x).conj(moved) if adjoint and kind_of(x.dtype) == "c" else moved


@quiet_op
def matmul(
    a: Value,
    b: Value,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    output_type: DTypeLike = None,
    grad_a: bool = False,
    grad_b: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the products of matrices; leading dimensions broadcast.

    >>> matmul([[1.0, 2.0]], [[3.0, 4.0]], transpose_b=True).numpy()
    array([[11.]], dtype=float32)
    """
    a, b = operands(a, b, op="matmul")
    require_kind(a, "matmul", "fciu")
    if a.ndim < 2 or b.ndim < 2:
        raise errors.InvalidArgumentError(
            "`tf.matmul` multiplies matrices, of two dimensions or more",
            f"the shapes are {tuple(a.shape)} and {tuple(b.shape)}",
            "Use tf.linalg.matvec or tf.tensordot for vectors.",
        )
    left, right = _turned(a, transpose_a, adjoint_a), _turned(b, transpose_b, adjoint_b)
    if left.shape[-1] != right.shape[-2]:
        raise errors.InvalidArgumentError(
            "The columns of `a` must be as many as the rows of `b`",
            f"the shapes are {tuple(left.shape)} and {tuple(right.shape)}",
            "Check `transpose_a` and `transpose_b`.",
        )
    found = xp(left, right).matmul(left, right)
    return found.astype(left.dtype if output_type is None else numpy_dtype(output_type))


@quiet_op
def matvec(
    a: Value,
    b: Value,
    transpose_a: bool = False,
    adjoint_a: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    name: str | None = None,
) -> Array:
    """Returns the products of matrices and vectors."""
    a, b = operands(a, b, op="linalg.matvec")
    product = matmul.raw(a, b[..., None], transpose_a, adjoint_a=adjoint_a)
    return product[..., 0]


@quiet_op
def einsum(equation: str, *inputs: Value, **kwargs: Value) -> Array:
    """Returns the sum of products that an equation in Einstein's notation describes.

    >>> einsum("ij,j->i", [[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0]).numpy()
    array([3., 7.], dtype=float32)
    """
    unknown = set(kwargs) - {"name", "optimize"}
    if unknown:
        raise errors.ArgumentTypeError(
            "`tf.einsum` takes `name` and `optimize`", f"{sorted(unknown)} was given", "Leave it."
        )
    arrays = operands(*inputs, op="einsum")
    ns, equation = xp(*arrays), equation.replace(" ", "")
    _require_equal_sizes(equation, arrays)
    return ns.einsum(equation, *arrays, optimize=len(arrays) > 2).astype(arrays[0].dtype)


def _require_equal_sizes(equation: str, arrays: tuple[Array, ...]) -> None:
    """Raises for a letter of two sizes, one of which is 1, which NumPy broadcasts."""
    sizes: dict[str, int] = {}
    for letters, x in zip(equation.partition("->")[0].split(","), arrays, strict=False):
        if len(letters) != x.ndim:
            continue
        for letter, size in zip(letters, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise errors.InvalidArgumentError(
                    f"`{letter}` of {equation!r} must stand for one size",
                    f"it is {sizes[letter]} and {size}",
                    "Check the shapes.",
                )


@quiet_op
def tensordot(a: Value, b: Value, axes: Value, name: str | None = None) -> Array:
    """Returns the sum of products over dimensions of two tensors.

    Args:
      a: The first tensor.
      b: The second tensor.
      axes: How many: the last of `a` and the first of `b`; or two lists of dimensions.
      name: Ignored.
    """
    a, b = operands(a, b, op="tensordot")
    require_kind(a, "tensordot", "fciu")
    if isinstance(axes, list | tuple):
        pairs: Value = tuple(integers(part, "axes") for part in axes)
    else:
        known = static(axes, "axes")
        pairs = int(known) if known.ndim == 0 else tuple(map(tuple, np.atleast_2d(known).tolist()))
    return xp(a, b).tensordot(a, b, axes=pairs).astype(a.dtype)


@quiet_op
def matrix_transpose(
    a: Value, name: str | None = "matrix_transpose", conjugate: bool = False
) -> Array:
    """Returns matrices with rows and columns exchanged."""
    x = array(a)
    return _turned(x, True, conjugate)


@quiet_op
def adjoint(matrix: Value, name: str | None = None) -> Array:
    """Returns the conjugate transposes of matrices."""
    return _turned(array(matrix), True, True)


@quiet_op
def trace(x: Value, name: str | None = None) -> Array:
    """Returns the sums of the diagonals of matrices."""
    x = numbers(x, "linalg.trace", "fciu")
    return xp(x).trace(x, axis1=-2, axis2=-1, dtype=x.dtype)


@quiet_op
def cross(a: Value, b: Value, name: str | None = None) -> Array:
    """Returns the cross products of vectors with three elements."""
    a, b = operands(a, b, op="linalg.cross")
    if a.shape != b.shape or not a.ndim or a.shape[-1] != 3:
        raise errors.InvalidArgumentError(
            "`tf.linalg.cross` needs vectors of three elements, and equal shapes",
            f"the shapes are {tuple(a.shape)} and {tuple(b.shape)}",
            "Broadcast them first.",
        )
    return xp(a, b).cross(a, b)


@quiet_op
def band_part(input: Value, num_lower: Value, num_upper: Value, name: str | None = None) -> Array:
    """Returns matrices with zeros outside a band around the diagonal; -1 keeps a triangle.

    >>> band_part([[1, 2], [3, 4]], -1, 0).numpy().tolist()
    [[1, 0], [3, 4]]
    """
    x = array(input)
    rows, columns = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])
    low, high = array(num_lower), array(num_upper)
    ns = xp(x, low, high)
    is_kept = ((low < 0) | (rows - columns <= low)) & ((high < 0) | (columns - rows <= high))
    return ns.where(is_kept, x, ns.zeros_like(x))


def _offsets(k: Value) -> tuple[int, int]:
    found = integers(k, "k")
    return (found[0], found[0]) if len(found) == 1 else (found[0], found[1])


def _band_places(
    band: tuple[int, int], rows: int, columns: int, align: str
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns rows, columns and places in the stored row of each diagonal, from the highest."""
    lengths = {
        d: max(0, min(rows + min(d, 0), columns - max(d, 0))) for d in range(band[0], band[1] + 1)
    }
    widest = max(lengths.values())
    found = []
    for d in range(band[1], band[0] - 1, -1):
        steps = np.arange(lengths[d])
        side = align.split("_")[0] if d > 0 else align.split("_")[1]
        if d == 0:
            side = "LEFT" if lengths[d] == widest else side
        start = widest - lengths[d] if side == "RIGHT" else 0
        found.append((steps + max(0, -d), steps + max(0, d), steps + start))
    return found


def _require_band(band: tuple[int, int], x: Array) -> None:
    if x.ndim < 2 or not -x.shape[-2] < band[0] <= band[1] < x.shape[-1]:
        raise errors.InvalidArgumentError(
            "`k` must be diagonals of the matrices",
            f"it is {band}, and the shape {tuple(x.shape)}",
            "Check `k`.",
        )


def _check_align(align: str) -> None:
    known = ("LEFT_RIGHT", "RIGHT_LEFT", "LEFT_LEFT", "RIGHT_RIGHT")
    if align not in known:
        raise errors.InvalidArgumentError(
            f"`align` must be one of {known}", f"it is {align!r}", "Pass one of them."
        )


@quiet_op
def diag_part(
    input: Value,
    name: str | None = "diag_part",
    k: Value = 0,
    padding_value: Value = 0,
    align: str = "RIGHT_LEFT",
) -> Array:
    """Returns diagonals of matrices: the main one, or those from k[0] to k[1].

    >>> diag_part([[1, 2], [3, 4]]).numpy()
    array([1, 4], dtype=int32)
    """
    x, band = array(input), _offsets(k)
    _check_align(align)
    _require_band(band, x)
    places = _band_places(band, x.shape[-2], x.shape[-1], align)
    ns = xp(x)
    if band[0] == band[1]:
        return x[..., places[0][0], places[0][1]]
    widest = max(len(p[0]) for p in places)
    rows = []
    for r, c, stored in places:
        start = int(stored[0]) if len(stored) else 0
        edges = [(0, 0)] * (x.ndim - 2) + [(start, widest - start - len(r))]
        rows.append(ns.pad(x[..., r, c], edges, constant_values=array(padding_value, x.dtype)))
    return ns.stack(rows, axis=-2)


@quiet_op
def set_diag(
    input: Value,
    diagonal: Value,
    name: str | None = "set_diag",
    k: Value = 0,
    align: str = "RIGHT_LEFT",
) -> Array:
    """Returns matrices with other diagonals."""
    x, values = operands(input, diagonal, op="linalg.set_diag")
    band = _offsets(k)
    _check_align(align)
    _require_band(band, x)
    widest = max(len(p[0]) for p in _band_places(band, x.shape[-2], x.shape[-1], align))
    if values.shape[-1] != widest:
        raise errors.InvalidArgumentError(
            f"`diagonal` must have {widest} elements",
            f"its shape is {tuple(values.shape)}",
            "Pass one for each place.",
        )
    return _with_diagonals(x, values, band, align)


def _with_diagonals(x: Array, values: Array, band: tuple[int, int], align: str) -> Array:
    places = _band_places(band, x.shape[-2], x.shape[-1], align)
    is_host = xp(x, values) is np
    found: Array = np.array(x) if is_host else jnp.asarray(x)
    for i, (r, c, stored) in enumerate(places):
        row = values if band[0] == band[1] else values[..., i, :]
        if is_host:
            found[..., r, c] = row[..., stored]
        else:
            found = found.at[..., r, c].set(row[..., stored])
    return found


@quiet_op
def diag(
    diagonal: Value,
    name: str | None = "diag",
    k: Value = 0,
    num_rows: Value = -1,
    num_cols: Value = -1,
    padding_value: Value = 0,
    align: str = "RIGHT_LEFT",
) -> Array:
    """Returns matrices with given diagonals, and `padding_value` in other places.

    >>> diag([1, 2]).numpy().tolist()
    [[1, 0], [0, 2]]
    """
    values, band = array(diagonal), _offsets(k)
    _check_align(align)
    longest = values.shape[-1]
    rows, columns = integer(num_rows, "num_rows"), integer(num_cols, "num_cols")
    least_rows, least_columns = longest - min(band[1], 0), longest + max(band[0], 0)
    if rows == -1 and columns == -1:
        rows = columns = max(least_rows, least_columns)
    rows = least_rows if rows == -1 else rows
    columns = least_columns if columns == -1 else columns
    lead = values.shape[: -1 if band[0] == band[1] else -2]
    ns = xp(values)
    padding = array(padding_value, values.dtype)
    blank = ns.full((*lead, rows, columns), padding, dtype=values.dtype)
    return _with_diagonals(blank, values, band, align)


@quiet_op
def tensor_diag(diagonal: Value, name: str | None = None) -> Array:
    """Returns a tensor of twice the dimensions with given elements on its diagonal."""
    x = array(diagonal)
    ns = xp(x)
    flat = ns.diag(x.reshape(-1))
    return flat.reshape(*x.shape, *x.shape)


@quiet_op
def tensor_diag_part(input: Value, name: str | None = None) -> Array:
    """Returns the diagonal of a tensor whose second half of dimensions repeats the first."""
    x = array(input)
    half = tuple(x.shape[: x.ndim // 2])
    if x.ndim % 2 or not x.ndim or half != tuple(x.shape[x.ndim // 2 :]):
        raise errors.InvalidArgumentError(
            "The second half of the dimensions must repeat the first",
            f"the shape is {tuple(x.shape)}",
            "Use tf.linalg.diag_part for matrices.",
        )
    size = int(np.prod(half, dtype=np.int64))
    return xp(x).diagonal(x.reshape(size, size)).reshape(half)
