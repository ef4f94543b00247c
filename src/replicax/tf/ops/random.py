"""Random tensors: `tf.random`.

The distributions are those of TensorFlow, the numbers are not: a seed stands for other ones.
"""

from __future__ import annotations

import builtins

import jax
import jax.numpy as jnp
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops import maths, random_sources
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
    xp,
)
from replicax.tf.ops.random_sources import Source, set_seed

__all__ = [
    "categorical",
    "dropout",
    "experimental_stateless_fold_in",
    "experimental_stateless_shuffle",
    "experimental_stateless_split",
    "fold_in",
    "gamma",
    "normal",
    "poisson",
    "set_seed",
    "shuffle",
    "split",
    "stateless_binomial",
    "stateless_categorical",
    "stateless_dropout",
    "stateless_gamma",
    "stateless_normal",
    "stateless_poisson",
    "stateless_shuffle",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
]

_LARGEST_SPREAD = 2.0


def _float_dtype(dtype: DTypeLike) -> np.dtype:
    found = numpy_dtype(dtype)
    if kind_of(found) != "f":
        raise errors.ArgumentTypeError(
            "`dtype` must be a float type", f"it is {found.name}", "Pass tf.float32."
        )
    return found


def normal_of(source: Source, sizes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Returns numbers of the standard normal distribution."""
    if isinstance(source, np.random.Generator):
        wide = np.float64 if dtype == np.float64 else np.float32
        return np.asarray(source.standard_normal(sizes, wide)).astype(dtype)
    return jax.random.normal(source, sizes, dtype)


def truncated_of(source: Source, sizes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Returns numbers of the normal distribution within two standard deviations."""
    if not isinstance(source, np.random.Generator):
        return jax.random.truncated_normal(source, -_LARGEST_SPREAD, _LARGEST_SPREAD, sizes, dtype)
    found = source.standard_normal(sizes)
    while (is_far := np.abs(found) > _LARGEST_SPREAD).any():
        found = np.where(is_far, source.standard_normal(sizes), found)
    return np.asarray(found).astype(dtype)


def uniform_of(source: Source, sizes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Returns numbers from 0 to below 1."""
    if isinstance(source, np.random.Generator):
        wide = np.float64 if dtype == np.float64 else np.float32
        return np.asarray(source.random(sizes, wide)).astype(dtype)
    return jax.random.uniform(source, sizes, dtype)


def integers_of(
    source: Source, sizes: tuple[int, ...], low: Value, high: Value, dtype: np.dtype
) -> Array:
    """Returns whole numbers from `low` to below `high`."""
    if isinstance(source, np.random.Generator):
        return np.asarray(source.integers(low, high, sizes)).astype(dtype)
    return jax.random.randint(source, sizes, array(low, dtype), array(high, dtype), dtype)


def full_integers_of(source: Source, sizes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Returns integers of all values that the dtype has."""
    low, high = dtypes.as_dtype(dtype).limits
    if isinstance(source, np.random.Generator):
        return source.integers(int(low), int(high), sizes, dtype, endpoint=True)
    unsigned = np.dtype(f"uint{dtype.itemsize * 8}")
    return jax.lax.bitcast_convert_type(jax.random.bits(source, sizes, unsigned), dtype)


def binomial_of(
    source: Source, sizes: tuple[int, ...], counts: Value, probs: Value, dtype: np.dtype
) -> Array:
    """Returns numbers of successes."""
    n, p = array(counts, np.float32), array(probs, np.float32)
    if isinstance(source, np.random.Generator):
        return np.asarray(source.binomial(n.astype(int), p, sizes)).astype(dtype)
    return jax.random.binomial(source, n, p, sizes).astype(dtype)


def _categorical_of(source: Source, logits: Value, count: Value, dtype: DTypeLike) -> Array:
    x, size = numbers(logits, "random.categorical", "f"), integer(count, "num_samples")
    if x.ndim != 2:
        raise errors.InvalidArgumentError(
            "`logits` must be [batch, classes]", f"the shape is {tuple(x.shape)}", "Reshape it."
        )
    target = numpy_dtype(dtypes.int64 if dtype is None else dtype)
    if isinstance(source, np.random.Generator):
        noise = source.gumbel(size=(x.shape[0], size, x.shape[1]))
        return np.argmax(x[:, None, :] + noise, axis=-1).astype(target)
    found = jax.random.categorical(source, jnp.asarray(x)[:, None, :], shape=(x.shape[0], size))
    return found.astype(target)


def _shuffled(source: Source, value: Value) -> Array:
    x = array(value)
    if not x.ndim:
        return x
    if isinstance(source, np.random.Generator) or (xp(x) is np and x.dtype == object):
        host = source if isinstance(source, np.random.Generator) else np.random.default_rng()
        return x[host.permutation(x.shape[0])]
    return jax.random.permutation(source, jnp.asarray(x))


# Stateful functions. A sample is drawn without gradient, and scaled with one.


@op(differentiable=False)
def _standard_normal(shape: Value, dtype: DTypeLike, seed: Value) -> Array:
    source = random_sources.stateful(seed)
    return normal_of(source, integers(shape, "shape"), _float_dtype(dtype))


@op(differentiable=False)
def _standard_truncated(shape: Value, dtype: DTypeLike, seed: Value) -> Array:
    source = random_sources.stateful(seed)
    return truncated_of(source, integers(shape, "shape"), _float_dtype(dtype))


@op(differentiable=False)
def _standard_uniform(shape: Value, dtype: DTypeLike, seed: Value) -> Array:
    source = random_sources.stateful(seed)
    return uniform_of(source, integers(shape, "shape"), _float_dtype(dtype))


@op(differentiable=False)
def _integers(shape: Value, low: Value, high: Value, dtype: DTypeLike, seed: Value) -> Array:
    source = random_sources.stateful(seed)
    return integers_of(source, integers(shape, "shape"), low, high, numpy_dtype(dtype))


def scaled(sample: Value, mean: Value, stddev: Value) -> Value:
    """Returns a sample with another mean and standard deviation, with their gradients."""
    if not _is_number(stddev, 1):
        sample = maths.multiply(sample, stddev)
    return sample if _is_number(mean, 0) else maths.add(sample, mean)


def _is_number(value: Value, number: int) -> bool:
    return isinstance(value, int | float) and value == number


def spanned(sample: Value, minval: Value, maxval: Value) -> Value:
    """Returns a sample from 0 to 1 in another range."""
    high = 1 if maxval is None else maxval
    if _is_number(minval, 0) and _is_number(high, 1):
        return sample
    width = high - minval if isinstance(high, int | float) else maths.subtract(high, minval)
    return scaled(sample, minval, width)


def normal(
    shape: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = dtypes.float32,
    seed: Value = None,
    name: str | None = None,
) -> Value:
    """Returns numbers of a normal distribution; different ones in each call and replica.

    >>> normal([2, 3]).shape
    TensorShape([2, 3])
    """
    return scaled(_standard_normal(shape, dtype, seed), mean, stddev)


def truncated_normal(
    shape: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = dtypes.float32,
    seed: Value = None,
    name: str | None = None,
) -> Value:
    """Returns numbers of a normal distribution within two standard deviations."""
    return scaled(_standard_truncated(shape, dtype, seed), mean, stddev)


def _require_maxval(maxval: Value) -> None:
    if maxval is None:
        raise errors.InvalidArgumentError(
            "Random integers need `maxval`", "it is None", "Pass the number above the largest."
        )


def uniform(
    shape: Value,
    minval: Value = 0,
    maxval: Value = None,
    dtype: DTypeLike = dtypes.float32,
    seed: Value = None,
    name: str | None = None,
) -> Value:
    """Returns numbers from `minval` to below `maxval`, all equally likely."""
    if kind_of(numpy_dtype(dtype)) in "iu":
        _require_maxval(maxval)
        return _integers(shape, minval, maxval, dtype, seed)
    return spanned(_standard_uniform(shape, dtype, seed), minval, maxval)


@op(differentiable=False)
def categorical(
    logits: Value,
    num_samples: Value,
    dtype: DTypeLike = None,
    seed: Value = None,
    name: str | None = None,
) -> Array:
    """Returns classes drawn with the probabilities softmax(logits)."""
    return _categorical_of(random_sources.stateful(seed), logits, num_samples, dtype)


@op(differentiable=False)
def shuffle(value: Value, seed: Value = None, name: str | None = None) -> Array:
    """Returns the rows of a tensor in random order."""
    return _shuffled(random_sources.stateful(seed), value)


@op(differentiable=False)
def gamma(
    shape: Value,
    alpha: Value,
    beta: Value = None,
    dtype: DTypeLike = dtypes.float32,
    seed: Value = None,
    name: str | None = None,
) -> Array:
    """Returns numbers of gamma distributions; `shape` for each element of the parameters."""
    target = _float_dtype(dtype)
    a, b = array(alpha, target), array(1.0 if beta is None else beta, target)
    sizes = (*integers(shape, "shape"), *np.broadcast_shapes(a.shape, b.shape))
    return _gamma_of(random_sources.stateful(seed), sizes, a, b, target)


def _gamma_of(source: Source, sizes: tuple[int, ...], a: Array, b: Array, dtype: np.dtype) -> Array:
    if isinstance(source, np.random.Generator):
        return (source.gamma(a, size=sizes) / b).astype(dtype)
    return jax.random.gamma(source, a, sizes, dtype) / b


@op(differentiable=False)
def poisson(
    shape: Value,
    lam: Value,
    dtype: DTypeLike = dtypes.float32,
    seed: Value = None,
    name: str | None = None,
) -> Array:
    """Returns numbers of Poisson distributions; `shape` for each element of `lam`."""
    rate = array(lam, np.float32)
    sizes = (*integers(shape, "shape"), *rate.shape)
    return _poisson_of(random_sources.stateful(seed), sizes, rate, numpy_dtype(dtype))


def _poisson_of(source: Source, sizes: tuple[int, ...], rate: Array, dtype: np.dtype) -> Array:
    if isinstance(source, np.random.Generator):
        return np.asarray(source.poisson(rate, sizes)).astype(dtype)
    # JAX draws Poisson numbers with keys of its default generator alone.
    key = jax.random.key(jax.random.bits(source), impl="threefry2x32")
    return jax.random.poisson(key, rate, sizes).astype(dtype)


# Stateless functions: the numbers depend on the two integers of `seed` alone.


@op(differentiable=False)
def _stateless_sample(shape: Value, seed: Value, dtype: DTypeLike, how: str) -> Array:
    draw = {"normal": normal_of, "uniform": uniform_of, "truncated": truncated_of}[how]
    return draw(random_sources.stateless(seed), integers(shape, "shape"), _float_dtype(dtype))


@op(differentiable=False)
def _stateless_integers(
    shape: Value, seed: Value, low: Value, high: Value, dtype: DTypeLike
) -> Array:
    source = random_sources.stateless(seed)
    return integers_of(source, integers(shape, "shape"), low, high, numpy_dtype(dtype))


@op(differentiable=False)
def _stateless_full_integers(shape: Value, seed: Value, dtype: DTypeLike) -> Array:
    source = random_sources.stateless(seed)
    return full_integers_of(source, integers(shape, "shape"), numpy_dtype(dtype))


def stateless_normal(
    shape: Value,
    seed: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Value:
    """Returns the numbers of a normal distribution that belong to a seed.

    >>> bool((stateless_normal([2], [1, 2]) == stateless_normal([2], [1, 2])).numpy().all())
    True
    """
    return scaled(_stateless_sample(shape, seed, dtype, "normal"), mean, stddev)


def stateless_truncated_normal(
    shape: Value,
    seed: Value,
    mean: Value = 0.0,
    stddev: Value = 1.0,
    dtype: DTypeLike = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Value:
    """Returns numbers within two standard deviations that belong to a seed."""
    return scaled(_stateless_sample(shape, seed, dtype, "truncated"), mean, stddev)


def stateless_uniform(
    shape: Value,
    seed: Value,
    minval: Value = 0,
    maxval: Value = None,
    dtype: DTypeLike = dtypes.float32,
    name: str | None = None,
    alg: str = "auto_select",
) -> Value:
    """Returns equally likely numbers that belong to a seed; all integers without limits."""
    target = numpy_dtype(dtype)
    if kind_of(target) in "iu":
        if minval is None and maxval is None:
            return _stateless_full_integers(shape, seed, dtype)
        _require_maxval(maxval)
        return _stateless_integers(shape, seed, minval, maxval, dtype)
    return spanned(_stateless_sample(shape, seed, dtype, "uniform"), minval, maxval)


@op(differentiable=False)
def stateless_categorical(
    logits: Value,
    num_samples: Value,
    seed: Value,
    dtype: DTypeLike = dtypes.int64,
    name: str | None = None,
) -> Array:
    """Returns the classes, drawn with the probabilities softmax(logits), of a seed."""
    return _categorical_of(random_sources.stateless(seed), logits, num_samples, dtype)


@op(differentiable=False)
def stateless_shuffle(
    value: Value, seed: Value, alg: str = "auto_select", name: str | None = None
) -> Array:
    """Returns the rows of a tensor in the random order of a seed."""
    return _shuffled(random_sources.stateless(seed), value)


@op(differentiable=False)
def stateless_gamma(
    shape: Value,
    seed: Value,
    alpha: Value,
    beta: Value = None,
    dtype: DTypeLike = dtypes.float32,
    name: str | None = None,
) -> Array:
    """Returns the numbers of gamma distributions that belong to a seed."""
    target = _float_dtype(dtype)
    a, b = array(alpha, target), array(1.0 if beta is None else beta, target)
    return _gamma_of(random_sources.stateless(seed), integers(shape, "shape"), a, b, target)


@op(differentiable=False)
def stateless_poisson(
    shape: Value,
    seed: Value,
    lam: Value,
    dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns the numbers of Poisson distributions that belong to a seed."""
    rate, target = array(lam, np.float32), numpy_dtype(dtype)
    return _poisson_of(random_sources.stateless(seed), integers(shape, "shape"), rate, target)


@op(differentiable=False)
def stateless_binomial(
    shape: Value,
    seed: Value,
    counts: Value,
    probs: Value,
    output_dtype: DTypeLike = dtypes.int32,
    name: str | None = None,
) -> Array:
    """Returns the numbers of binomial distributions that belong to a seed."""
    source, sizes = random_sources.stateless(seed), integers(shape, "shape")
    return binomial_of(source, sizes, counts, probs, numpy_dtype(output_dtype))


@op(differentiable=False)
def split(seed: Value, num: Value = 2, alg: str = "auto_select") -> Array:
    """Returns several seeds that follow from one, one row for each."""
    return random_sources.pairs_of(random_sources.stateless(seed), integer(num, "num"))


@op(differentiable=False)
def fold_in(seed: Value, data: Value, alg: str = "auto_select") -> Array:
    """Returns the seed that follows from another one and a number."""
    number = array(data)
    if on_host():
        pair = [int(v) % 2**64 for v in array(seed)]
        source: Source = np.random.default_rng([*pair, int(number) % 2**64])
    else:
        key = random_sources.key_of_pair(array(seed))
        source = jax.random.fold_in(key, jnp.asarray(number).astype(jnp.uint32))
    return random_sources.pairs_of(source, 1)[0]


experimental_stateless_split = split
experimental_stateless_fold_in = fold_in
experimental_stateless_shuffle = stateless_shuffle


# Dropout.


def _kept(uniform: Array, rate: Value) -> Array:
    return uniform >= array(rate, uniform.dtype)


def _mask_shape(x: Value, noise_shape: Value) -> tuple[int, ...]:
    shape = tuple(array(x).shape)
    if noise_shape is None:
        return shape
    given = noise_shape if isinstance(noise_shape, list | tuple) else list(noise_shape)
    pairs = zip(given, shape, strict=True)
    return tuple(size if n is None else integer(n, "noise_shape") for n, size in pairs)


@op(differentiable=False)
def _mask(x: Value, rate: Value, noise_shape: Value, seed: Value) -> Array:
    source = random_sources.stateful(seed)
    return _kept(uniform_of(source, _mask_shape(x, noise_shape), np.dtype(np.float32)), rate)


@op(differentiable=False)
def _stateless_mask(x: Value, rate: Value, noise_shape: Value, seed: Value) -> Array:
    source = random_sources.stateless(seed)
    return _kept(uniform_of(source, _mask_shape(x, noise_shape), np.dtype(np.float32)), rate)


@op
def _dropped(x: Value, rate: Value, mask: Value) -> Array:
    x = numbers(x, "nn.dropout", "f")
    ns, share = xp(x, mask), array(rate, x.dtype)
    return ns.where(mask, x / (1 - share), ns.zeros_like(x))


def _check_rate(rate: Value) -> None:
    if isinstance(rate, int | float) and not 0 <= rate < 1:
        raise errors.InvalidArgumentError(
            "`rate` must be from 0 to below 1", f"it is {rate}", "It is the share to drop."
        )


def dropout(
    x: Value, rate: Value, noise_shape: Value = None, seed: Value = None, name: str | None = None
) -> Value:
    """Returns x with a share of the elements set to 0, and the others scaled up.

    >>> sorted({float(v) for v in dropout(np.ones(50, np.float32), 0.5)})
    [0.0, 2.0]
    """
    _check_rate(rate)
    if isinstance(rate, builtins.int | builtins.float) and rate == 0:
        return maths.add(x, 0)
    return _dropped(x, rate, _mask(x, rate, noise_shape, seed))


def stateless_dropout(
    x: Value,
    rate: Value,
    seed: Value,
    rng_alg: str = "auto_select",
    noise_shape: Value = None,
    name: str | None = None,
) -> Value:
    """Returns x with the elements that belong to a seed set to 0."""
    _check_rate(rate)
    return _dropped(x, rate, _stateless_mask(x, rate, noise_shape, seed))
