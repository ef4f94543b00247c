"""Pooling of `tf.nn`: the largest element, or the mean, of each window."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.dispatch import op
from replicax.tf.ops.convolutions import is_channels_first, on_device, padding_of, per_dimension
from replicax.tf.ops.operands import Array, DTypeLike, Value, kind_of, numbers, numpy_dtype

__all__ = [
    "avg_pool",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "max_pool",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool_with_argmax",
    "pool",
]


def _pooled(
    input: Value,
    window: Value,
    strides: Value,
    padding: Value,
    data_format: str | None,
    how: str,
    given_rank: int | None = None,
    dilations: Value = None,
) -> Array:
    x = numbers(input, f"nn.{how}_pool", "fi" if how == "max" else "f")
    rank: int = x.ndim - 2 if given_rank is None else given_rank
    if x.ndim != rank + 2 or rank not in (1, 2, 3):
        raise errors.InvalidArgumentError(
            "Pooling needs a batch, one to three dimensions of space, and channels",
            f"the shape is {tuple(x.shape)}",
            "Add the missing dimensions with tf.expand_dims.",
        )
    is_first = is_channels_first(data_format, rank)
    around = ((1, 1), ()) if is_first else ((1,), (1,))

    def full(value: Value, argument: str) -> tuple[int, ...]:
        return (*around[0], *per_dimension(value, rank, argument, is_first), *around[1])

    chosen = padding_of(padding, rank, is_first)
    if not isinstance(chosen, str):
        front = [(0, 0)] * len(around[0])
        chosen = [*front, *chosen, *([(0, 0)] * len(around[1]))]
    sizes, steps, gaps = (
        full(window, "ksize"),
        full(strides, "strides"),
        full(dilations, "dilations"),
    )

    space = slice(2, None) if is_first else slice(1, -1)
    reach = [(n - 1) * gap + 1 for n, gap in zip(sizes[space], gaps[space], strict=True)]
    if chosen == "VALID" and any(n < r for n, r in zip(x.shape[space], reach, strict=True)):
        raise errors.InvalidArgumentError(
            "A window must fit into the input",
            f"windows are {tuple(reach)} and the input {tuple(x.shape[space])}",
            'Use padding="SAME".',
        )

    def compute(x: jax.Array) -> jax.Array:
        def reduce(x: jax.Array, start: Value, by: Value) -> jax.Array:
            return jax.lax.reduce_window(x, start, by, sizes, steps, chosen, window_dilation=gaps)

        if how == "max":
            is_float = kind_of(x.dtype) == "f"
            lowest = -np.inf if is_float else dtypes.as_dtype(x.dtype).min
            return reduce(x, np.asarray(lowest, x.dtype)[()], jax.lax.max)
        zero = np.zeros((), x.dtype)[()]
        # Elements of the padding do not count.
        return reduce(x, zero, jax.lax.add) / reduce(jnp.ones_like(x), zero, jax.lax.add)

    return on_device(compute, x)


def _make(how: str, rank: int | None, default: str | None) -> Value:
    dimensions = f" over {rank} dimensions of space" if rank else ""
    what = "largest elements" if how == "max" else "means"

    def body(
        input: Value,
        ksize: Value,
        strides: Value,
        padding: Value,
        data_format: str | None = default,
        name: str | None = None,
    ) -> Array:
        return _pooled(input, ksize, strides, padding, data_format, how, rank)

    body.__name__ = body.__qualname__ = f"{how}_pool{f'{rank}d' if rank else ''}"
    body.__doc__ = f"Returns the {what} of windows{dimensions}."
    return op(body)


max_pool = _make("max", None, None)
max_pool1d = _make("max", 1, "NWC")
max_pool2d = _make("max", 2, "NHWC")
max_pool3d = _make("max", 3, "NDHWC")
avg_pool = _make("avg", None, None)
avg_pool1d = _make("avg", 1, "NWC")
avg_pool2d = _make("avg", 2, "NHWC")
avg_pool3d = _make("avg", 3, "NDHWC")


@op
def max_pool_with_argmax(
    input: Value,
    ksize: Value,
    strides: Value,
    padding: str,
    data_format: str = "NHWC",
    output_dtype: DTypeLike = dtypes.int64,
    include_batch_in_index: bool = False,
    name: str | None = None,
) -> tuple[Array, Array]:
    """Returns the largest elements of windows, and their places in the flat image or batch."""
    x = numbers(input, "nn.max_pool_with_argmax", "f")
    if data_format != "NHWC" or x.ndim != 4:
        raise errors.InvalidArgumentError(
            "`input` must be [batch, height, width, channels]",
            f"the shape is {tuple(x.shape)} and the format {data_format!r}",
            "Use tf.transpose.",
        )
    window, steps = (per_dimension(v, 2, "ksize", False) for v in (ksize, strides))
    batch, height, width, channels = x.shape
    numbered = np.arange(height * width * channels).reshape(1, height, width, channels)
    places = np.broadcast_to(numbered, x.shape)
    if include_batch_in_index:
        places = places + np.arange(batch).reshape(-1, 1, 1, 1) * numbered.size
    target = numpy_dtype(output_dtype)

    def compute(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        pairs = jax.lax.padtype_to_pads(x.shape[1:3], window, steps, padding_of(padding, 2, False))
        edges = [(0, 0), *pairs, (0, 0)]
        padded = jnp.pad(x, edges, constant_values=-jnp.inf)
        values = jnp.stack(_windows(padded, window, steps))
        indices = jnp.stack(_windows(jnp.pad(jnp.asarray(places), edges), window, steps))
        best = jnp.argmax(values, axis=0, keepdims=True)
        taken = (jnp.take_along_axis(part, best, axis=0)[0] for part in (values, indices))
        largest, where = taken
        return largest, where.astype(target)

    return on_device(compute, x)


def _windows(x: jax.Array, window: Sequence[int], steps: Sequence[int]) -> list[jax.Array]:
    """Returns, for each place of a window, the elements that are there."""
    sizes = [(n - w) // step + 1 for n, w, step in zip(x.shape[1:3], window, steps, strict=True)]
    ends = [(size - 1) * step + 1 for size, step in zip(sizes, steps, strict=True)]
    return [
        x[:, i : i + ends[0] : steps[0], j : j + ends[1] : steps[1], :]
        for i in range(window[0])
        for j in range(window[1])
    ]


@op
def pool(
    input: Value,
    window_shape: Value,
    pooling_type: str,
    strides: Value = None,
    padding: Value = "VALID",
    data_format: str | None = None,
    dilations: Value = None,
    name: str | None = None,
) -> Array:
    """Returns the largest elements ("MAX") or the means ("AVG") of windows."""
    if pooling_type not in ("MAX", "AVG"):
        raise errors.InvalidArgumentError(
            "`pooling_type` must be 'MAX' or 'AVG'", f"it is {pooling_type!r}", "Pass one."
        )
    how = pooling_type.lower()
    return _pooled(input, window_shape, strides, padding, data_format, how, dilations=dilations)
