"""Linear equations, factors and functions of matrices: `tf.linalg`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jax_linalg
import numpy as np

from replicax.foundation import errors, lazy
from replicax.tf import dtypes
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    array,
    kind_of,
    numbers,
    numpy_dtype,
    operands,
    quiet_op,
    require_kind,
    xp,
)

if TYPE_CHECKING:
    import scipy.linalg as scipy_linalg
else:
    scipy_linalg = lazy.module("scipy.linalg")

__all__ = [
    "cholesky",
    "cholesky_solve",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "expm",
    "inv",
    "logdet",
    "lstsq",
    "lu",
    "matrix_rank",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "sqrtm",
    "svd",
    "triangular_solve",
]


class Qr(NamedTuple):
    """Orthonormal and upper triangular factors."""

    q: Array
    r: Array


class LogMatrixDeterminant(NamedTuple):
    """The sign of determinants, and the logarithm of their size."""

    sign: Array
    log_abs_determinant: Array


class Lu(NamedTuple):
    """Both triangular factors in one matrix, and the order of the rows."""

    lu: Array
    p: Array


def _matrix(value: Value, name: str, *, is_square: bool = True) -> Array:
    x = numbers(value, f"linalg.{name}", "fc")
    if x.ndim < 2 or (is_square and x.shape[-1] != x.shape[-2]):
        raise errors.InvalidArgumentError(
            f"`tf.linalg.{name}` needs {'square ' if is_square else ''}matrices",
            f"the shape is {tuple(x.shape)}",
            "Check the dimensions.",
        )
    return x


def _adjoint(x: Array) -> Array:
    moved = xp(x).swapaxes(x, -1, -2)
    return xp(x).conj(moved) if kind_of(x.dtype) == "c" else moved


def _on_host(compute: Value, *values: Array) -> Array:
    """Computes with NumPy, or raises its error about a matrix as one of an argument."""
    try:
        return compute(*values)
    except np.linalg.LinAlgError as error:
        raise errors.InvalidArgumentError(
            "The matrix must have a result", str(error), "Check its elements."
        ) from error


@quiet_op
def cholesky(input: Value, name: str | None = None) -> Array:
    """Returns the lower triangular factors of positive definite matrices."""
    x = _matrix(input, "cholesky")
    if xp(x) is np:
        return _on_host(np.linalg.cholesky, x)
    # The lower triangle is read, and both triangles share the gradient.
    lower = jnp.tril(x)
    mirrored = lower + _adjoint(jnp.tril(x, -1))
    shared = (x + _adjoint(x)) / 2
    x = shared + jax.lax.stop_gradient(mirrored - shared)
    return jnp.linalg.cholesky(x, symmetrize_input=False)


@quiet_op
def cholesky_solve(chol: Value, rhs: Value, name: str | None = None) -> Array:
    """Solves A X = B with the Cholesky factors of A."""
    factor, right = operands(chol, rhs, op="linalg.cholesky_solve")
    half = _solved_triangle(factor, right, is_lower=True)
    return _solved_triangle(_adjoint(factor), half, is_lower=False)


def _solved_triangle(matrix: Array, rhs: Array, *, is_lower: bool) -> Array:
    ns = xp(matrix, rhs)
    if ns is np:
        triangle = np.tril(matrix) if is_lower else np.triu(matrix)
        return _on_host(np.linalg.solve, triangle, rhs)
    lead = jnp.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-2])
    matrix = jnp.broadcast_to(matrix, (*lead, *matrix.shape[-2:]))
    rhs = jnp.broadcast_to(rhs, (*lead, *rhs.shape[-2:]))
    return jax.lax.linalg.triangular_solve(matrix, rhs, left_side=True, lower=is_lower)


@quiet_op
def triangular_solve(
    matrix: Value,
    rhs: Value,
    lower: bool = True,
    adjoint: bool = False,
    name: str | None = None,
) -> Array:
    """Solves A X = B for triangular A; the other triangle is not read.

    >>> triangular_solve([[2.0, 0.0], [1.0, 1.0]], [[2.0], [3.0]]).numpy().tolist()
    [[1.0], [2.0]]
    """
    left, right = operands(matrix, rhs, op="linalg.triangular_solve")
    require_kind(left, "linalg.triangular_solve", "fc")
    if adjoint:
        left, lower = _adjoint(left), not lower
    return _solved_triangle(left, right, is_lower=lower)


@quiet_op
def solve(matrix: Value, rhs: Value, adjoint: bool = False, name: str | None = None) -> Array:
    """Solves A X = B."""
    left, right = operands(matrix, rhs, op="linalg.solve")
    require_kind(left, "linalg.solve", "fc")
    if left.ndim != right.ndim or left.ndim < 2:
        raise errors.InvalidArgumentError(
            "`matrix` and `rhs` must both be matrices, with equal leading dimensions",
            f"the shapes are {tuple(left.shape)} and {tuple(right.shape)}",
            "Use rhs[:, tf.newaxis] for a vector.",
        )
    left = _adjoint(left) if adjoint else left
    if xp(left, right) is np:
        return _on_host(np.linalg.solve, left, right)
    return jnp.linalg.solve(left, right)


@quiet_op
def inv(input: Value, adjoint: bool = False, name: str | None = None) -> Array:
    """Returns the inverses of matrices."""
    x = _matrix(input, "inv")
    x = _adjoint(x) if adjoint else x
    return _on_host(np.linalg.inv, x) if xp(x) is np else jnp.linalg.inv(x)


@quiet_op
def pinv(
    a: Value, rcond: Value = None, validate_args: bool = False, name: str | None = None
) -> Array:
    """Returns the pseudo-inverses of matrices."""
    x = _matrix(a, "pinv", is_square=False)
    if rcond is None:
        rcond = 10 * max(x.shape[-2:]) * float(np.finfo(x.dtype).eps)
    limit = array(rcond, x.dtype)
    if xp(x, limit) is np:
        return _on_host(lambda x: np.linalg.pinv(x, rcond=limit), x)
    return jnp.linalg.pinv(x, rtol=limit)


@quiet_op
def det(input: Value, name: str | None = None) -> Array:
    """Returns the determinants of matrices."""
    x = _matrix(input, "det")
    return xp(x).linalg.det(x)


@quiet_op
def slogdet(input: Value, name: str | None = None) -> LogMatrixDeterminant:
    """Returns the signs of determinants, and the logarithms of their sizes."""
    x = _matrix(input, "slogdet")
    sign, log_size = xp(x).linalg.slogdet(x)
    return LogMatrixDeterminant(sign, log_size)


@quiet_op
def logdet(matrix: Value, name: str | None = None) -> Array:
    """Returns the logarithms of the determinants of positive definite matrices."""
    x = _matrix(matrix, "logdet")
    ns = xp(x)
    diagonal = ns.diagonal(cholesky.raw(x), axis1=-2, axis2=-1)
    return 2 * ns.sum(ns.log(ns.real(diagonal)), axis=-1)


@quiet_op
def qr(input: Value, full_matrices: bool = False, name: str | None = None) -> Qr:
    """Returns orthonormal and upper triangular factors."""
    x = _matrix(input, "qr", is_square=False)
    q, r = xp(x).linalg.qr(x, mode="complete" if full_matrices else "reduced")
    return Qr(q, r)


@quiet_op
def svd(
    tensor: Value, full_matrices: bool = False, compute_uv: bool = True, name: str | None = None
) -> Value:
    """Returns the singular values s, and with `compute_uv` also u and v, as (s, u, v)."""
    x = _matrix(tensor, "svd", is_square=False)
    ns = xp(x)
    if not compute_uv:
        return ns.linalg.svd(x, compute_uv=False)
    u, s, vh = ns.linalg.svd(x, full_matrices=full_matrices)
    return s, u, _adjoint(vh)


@quiet_op
def eigh(tensor: Value, name: str | None = None) -> tuple[Array, Array]:
    """Returns eigenvalues and eigenvectors of self-adjoint matrices, from the lower triangle."""
    x = _matrix(tensor, "eigh")
    if xp(x) is np:
        values, vectors = np.linalg.eigh(x)
        return values, vectors
    values, vectors = jnp.linalg.eigh(x, symmetrize_input=False)
    return values, vectors


@quiet_op
def eigvalsh(tensor: Value, name: str | None = None) -> Array:
    """Returns the eigenvalues of self-adjoint matrices."""
    return eigh.raw(tensor)[0]


@quiet_op
def eig(tensor: Value, name: str | None = None) -> tuple[Array, Array]:
    """Returns eigenvalues and eigenvectors of matrices, as complex numbers; on a CPU only."""
    x = _matrix(tensor, "eig")
    values, vectors = xp(x).linalg.eig(x)
    target = np.complex128 if x.dtype in (np.float64, np.complex128) else np.complex64
    return values.astype(target), vectors.astype(target)


@quiet_op
def eigvals(tensor: Value, name: str | None = None) -> Array:
    """Returns the eigenvalues of matrices, as complex numbers; on a CPU only."""
    return eig.raw(tensor)[0]


@quiet_op
def expm(input: Value, name: str | None = None) -> Array:
    """Returns the exponentials of matrices."""
    x = _matrix(input, "expm")
    return scipy_linalg.expm(x) if xp(x) is np else jax_linalg.expm(jnp.asarray(x))


@quiet_op
def sqrtm(input: Value, name: str | None = None) -> Array:
    """Returns the square roots of one matrix or several; on the host or a CPU."""
    x = _matrix(input, "sqrtm")
    if xp(x) is np:
        roots = [scipy_linalg.sqrtm(part) for part in x.reshape(-1, *x.shape[-2:])]
        return np.asarray(roots).reshape(x.shape).astype(x.dtype)
    root = jax_linalg.sqrtm
    for _ in range(x.ndim - 2):
        root = jax.vmap(root)
    found = root(jnp.asarray(x))
    return (found if kind_of(x.dtype) == "c" else jnp.real(found)).astype(x.dtype)


@quiet_op
def lu(input: Value, output_idx_type: DTypeLike = dtypes.int32, name: str | None = None) -> Lu:
    """Returns both triangular factors in one matrix, and the order of the rows."""
    x = _matrix(input, "lu")
    if xp(x) is not np:
        factors, _, order = jax.lax.linalg.lu(jnp.asarray(x))
        return Lu(factors, order.astype(numpy_dtype(output_idx_type)))
    parts = [scipy_linalg.lu_factor(part) for part in x.reshape(-1, *x.shape[-2:])]
    orders = [_order_of_swaps(swaps) for _, swaps in parts]
    factors = np.asarray([factor for factor, _ in parts], x.dtype).reshape(x.shape)
    return Lu(factors, np.asarray(orders, numpy_dtype(output_idx_type)).reshape(x.shape[:-1]))


def _order_of_swaps(swaps: np.ndarray) -> list[int]:
    order = list(range(len(swaps)))
    for i, j in enumerate(swaps.tolist()):
        order[i], order[j] = order[j], order[i]
    return order


@quiet_op
def lstsq(
    matrix: Value,
    rhs: Value,
    l2_regularizer: Value = 0.0,
    fast: bool = True,
    name: str | None = None,
) -> Array:
    """Returns the solutions X of A X = B with the least squared error."""
    left, right = operands(matrix, rhs, op="linalg.lstsq")
    require_kind(left, "linalg.lstsq", "fc")
    ns = xp(left, right)
    if not fast:
        return ns.matmul(pinv.raw(left), right)
    own, penalty = _adjoint(left), array(l2_regularizer, left.dtype)
    if left.shape[-2] >= left.shape[-1]:
        square = ns.matmul(own, left) + penalty * np.eye(left.shape[-1], dtype=left.dtype)
        return solve.raw(square, ns.matmul(own, right))
    square = ns.matmul(left, own) + penalty * np.eye(left.shape[-2], dtype=left.dtype)
    return ns.matmul(own, solve.raw(square, right))


@quiet_op
def matrix_rank(
    a: Value, tol: Value = None, validate_args: bool = False, name: str | None = None
) -> Array:
    """Returns the numbers of singular values above a tolerance."""
    x = _matrix(a, "matrix_rank", is_square=False)
    ns = xp(x)
    sizes = ns.linalg.svd(x, compute_uv=False)
    if tol is None:
        least = np.asarray(max(x.shape[-2:]) * np.finfo(x.dtype).eps, sizes.dtype)
        limit = least * ns.max(sizes, axis=-1, keepdims=True)
    else:
        limit = array(tol, sizes.dtype)
    return ns.sum(sizes > limit, axis=-1, dtype=np.int32)
