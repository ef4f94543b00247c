"""`tf.random.Generator`: random numbers whose position is an object of the program.

The distributions are those of TensorFlow, the numbers are not. On devices the position is a
variable: a compiled function draws other numbers in each call, each replica draws its own, and
checkpoints include it. In `dataset.map` the numbers come from a NumPy generator of the same seed.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax.foundation import errors
from replicax.tf import dtypes
from replicax.tf.dispatch import on_host, op
from replicax.tf.ops import random, random_sources
from replicax.tf.ops.operands import (
    Array,
    DTypeLike,
    Value,
    integer,
    integers,
    kind_of,
    numpy_dtype,
    static,
)
from replicax.tf.ops.random_sources import Source
from replicax.tf.tensor import Tensor, raw
from replicax.training import random_keys
from replicax.variables.module import Module

__all__ = [
    "Algorithm",
    "Generator",
    "create_rng_state",
    "get_global_generator",
    "set_global_generator",
]


class Algorithm(enum.Enum):
    """The names of generators; each draws with the generator that JAX is set to use.

    >>> Algorithm.PHILOX.value
    1
    """

    PHILOX = 1
    THREEFRY = 2
    AUTO_SELECT = 3


# An algorithm, its name or number; None for the default.
AlgorithmLike: TypeAlias = Algorithm | str | int | None

_STATE_SIZES = {Algorithm.PHILOX: 3, Algorithm.THREEFRY: 2, Algorithm.AUTO_SELECT: 3}


def _algorithm(alg: AlgorithmLike) -> Algorithm:
    found = raw(alg)
    try:
        if found is None:
            return Algorithm.PHILOX
        if isinstance(found, str):
            return Algorithm[found.upper()]
        return found if isinstance(found, Algorithm) else Algorithm(int(found))
    except (KeyError, ValueError):
        raise errors.InvalidArgumentError(
            "`alg` must be 'philox', 'threefry' or 'auto_select'", f"it is {alg!r}", "Leave it out."
        ) from None


def create_rng_state(seed: Value, alg: AlgorithmLike) -> Any:
    """Returns the state that a seed stands for: a vector that `Generator.from_state` takes.

    >>> create_rng_state(5, "philox").numpy().tolist()
    [5, 0, 0]
    """
    size = _STATE_SIZES[_algorithm(alg)]
    given = static(raw(seed), "seed").reshape(-1)
    if not given.size or given.size > size:
        raise errors.InvalidArgumentError(
            f"`seed` must have up to {size} integers", f"it has {given.size}", "Pass one integer."
        )
    numbers = [_signed(int(v)) for v in given]
    return Tensor(np.asarray([*numbers, *[0] * (size - len(numbers))], np.int64))


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _number_of(state: np.ndarray) -> int:
    """Returns a number of 32 bits for the integers of a state."""
    entropy = [int(v) % 2**64 for v in state]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


@op(differentiable=False)
def _sample(source: Source, shape: Value, dtype: DTypeLike, how: str) -> Array:
    target = numpy_dtype(dtype)
    if kind_of(target) != "f":
        raise errors.ArgumentTypeError(
            "`dtype` must be a float type", f"it is {target.name}", "Pass tf.float32."
        )
    draw = {
        "normal": random.normal_of,
        "truncated": random.truncated_of,
        "uniform": random.uniform_of,
    }[how]
    return draw(source, integers(shape, "shape"), target)


@op(differentiable=False)
def _integers(source: Source, shape: Value, low: Value, high: Value, dtype: DTypeLike) -> Array:
    return random.integers_of(source, integers(shape, "shape"), low, high, numpy_dtype(dtype))


@op(differentiable=False)
def _full_integers(source: Source, shape: Value, dtype: DTypeLike) -> Array:
    return random.full_integers_of(source, integers(shape, "shape"), numpy_dtype(dtype))


@op(differentiable=False)
def _binomial(source: Source, shape: Value, counts: Value, probs: Value, dtype: DTypeLike) -> Array:
    sizes = integers(shape, "shape")
    return random.binomial_of(source, sizes, counts, probs, numpy_dtype(dtype))


@op(differentiable=False)
def _seeds(source: Source, count: int) -> Array:
    return random_sources.pairs_of(source, count).T.astype(numpy_dtype(dtypes.int64))


class Generator(Module):
    """A stream of random numbers; make it with `from_seed`, and in the scope of a strategy.

    Args:
      copy_from: Another generator, whose position to start at.
      state: A vector of `create_rng_state` or of `Generator.state`.
      alg: Accepted for portability.

    >>> rng = Generator.from_seed(7)
    >>> first = rng.normal([2]).numpy()
    >>> rng.reset_from_seed(7)
    >>> bool((rng.normal([2]).numpy() == first).all())
    True
    """

    def __init__(
        self, copy_from: Generator | None = None, state: Value = None, alg: AlgorithmLike = None
    ) -> None:
        super().__init__()
        if (copy_from is None) == (state is None):
            raise errors.InvalidArgumentError(
                "A generator needs `copy_from` or `state`",
                "both or none were given",
                "Use tf.random.Generator.from_seed(1).",
            )
        if copy_from is not None:
            alg, state = copy_from._algorithm, copy_from.state
        self._algorithm = _algorithm(alg)
        self._seed = np.zeros(1, np.int64)
        self._stream = random_keys.Generator(0, name="tf_generator")
        # Protects the generator of the host, which threads of a dataset share.
        self._lock = threading.Lock()
        self._host = np.random.default_rng(0)
        self.reset(state)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the lock: closures of a `ClusterCoordinator` may use the generator."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()

    @classmethod
    def from_seed(cls, seed: Value, alg: AlgorithmLike = None) -> Generator:
        """Returns the generator of a seed.

        >>> Generator.from_seed(1).uniform([2]).shape
        TensorShape([2])
        """
        return cls(state=create_rng_state(seed, _algorithm(alg)), alg=alg)

    @classmethod
    def from_non_deterministic_state(cls, alg: AlgorithmLike = None) -> Generator:
        """Returns a generator of a random seed."""
        entropy = np.random.SeedSequence().generate_state(1, np.uint64)[0]
        return cls.from_seed(_signed(int(entropy)), alg)

    @classmethod
    def from_state(cls, state: Value, alg: AlgorithmLike) -> Generator:
        """Returns a generator at the position that `state` of another one had."""
        return cls(state=state, alg=alg)

    @classmethod
    def from_key_counter(cls, key: Value, counter: Value, alg: AlgorithmLike) -> Generator:
        """Returns the generator of a key, at a position."""
        made = cls(state=create_rng_state(0, _algorithm(alg)), alg=alg)
        made.reset_from_key_counter(key, counter)
        return made

    @property
    def algorithm(self) -> int:
        """The number of the algorithm."""
        return self._algorithm.value

    @property
    def state(self) -> Any:
        """The position and the seed: what `from_state` and `reset` take."""
        position = int(np.asarray(raw(self._stream.count.read_value())).reshape(-1)[0])
        return Tensor(np.asarray([self._seed[0], position, *self._seed[1:]], np.int64))

    @property
    def key(self) -> Any:
        """The last number of the state."""
        return Tensor(np.asarray(self.state.numpy()[-1], np.int64))

    def reset(self, state: Value) -> None:
        """Goes to the position that `state` of a generator had."""
        given = static(raw(state), "state").reshape(-1).astype(np.int64)
        if len(given) != _STATE_SIZES[self._algorithm]:
            raise errors.InvalidArgumentError(
                f"`state` must have {_STATE_SIZES[self._algorithm]} integers",
                f"it has {len(given)}",
                "Use tf.random.create_rng_state(seed, alg).",
            )
        # The second number is the position in the stream that the others stand for.
        self._seed, position = np.delete(given, 1), int(given[1])
        self._stream.seed.assign(np.uint32(_number_of(self._seed)))
        self._stream.count.assign(np.uint32(position % 2**32))
        with self._lock:
            self._host = np.random.default_rng([int(v) % 2**64 for v in given])

    def reset_from_seed(self, seed: Value) -> None:
        """Goes to the start of the stream of a seed."""
        self.reset(create_rng_state(seed, self._algorithm))

    def reset_from_key_counter(self, key: Value, counter: Value) -> None:
        """Goes to a position of the stream of a key."""
        place = static(raw(counter), "counter").reshape(-1).tolist()
        size = _STATE_SIZES[self._algorithm] - 1
        number = integer(raw(key), "key")
        self.reset([*[*place, *[0] * size][:size], _signed(number)])

    def skip(self, delta: Value) -> Any:
        """Moves on by a number of draws, and returns the state."""
        count = self._stream.count
        count.assign(count.read_value() + np.uint32(integer(raw(delta), "delta")))
        return self.state

    def _source(self) -> Source:
        if not on_host():
            key: jax.Array = self._stream.key()
            return key
        with self._lock:
            return np.random.default_rng(self._host.integers(0, 2**63, 4))

    def normal(
        self,
        shape: Value,
        mean: Value = 0.0,
        stddev: Value = 1.0,
        dtype: DTypeLike = dtypes.float32,
        name: str | None = None,
    ) -> Any:
        """Returns numbers of a normal distribution."""
        return random.scaled(_sample(self._source(), shape, dtype, "normal"), mean, stddev)

    def truncated_normal(
        self,
        shape: Value,
        mean: Value = 0.0,
        stddev: Value = 1.0,
        dtype: DTypeLike = dtypes.float32,
        name: str | None = None,
    ) -> Any:
        """Returns numbers of a normal distribution within two standard deviations."""
        return random.scaled(_sample(self._source(), shape, dtype, "truncated"), mean, stddev)

    def uniform(
        self,
        shape: Value,
        minval: Value = 0,
        maxval: Value = None,
        dtype: DTypeLike = dtypes.float32,
        name: str | None = None,
    ) -> Any:
        """Returns numbers from `minval` to below `maxval`; integers need both, or None twice."""
        if kind_of(numpy_dtype(dtype)) not in "iu":
            sample = _sample(self._source(), shape, dtype, "uniform")
            return random.spanned(sample, minval, maxval)
        if minval is None and maxval is None:
            return self.uniform_full_int(shape, dtype)
        if minval is None or maxval is None:
            raise errors.InvalidArgumentError(
                "Random integers need `minval` and `maxval`, or None for both",
                f"they are {minval} and {maxval}",
                "Pass the number above the largest as `maxval`.",
            )
        return _integers(self._source(), shape, minval, maxval, dtype)

    def uniform_full_int(
        self, shape: Value, dtype: DTypeLike = dtypes.uint64, name: str | None = None
    ) -> Any:
        """Returns integers of all values that a dtype has."""
        return _full_integers(self._source(), shape, dtype)

    def binomial(
        self,
        shape: Value,
        counts: Value,
        probs: Value,
        dtype: DTypeLike = dtypes.int32,
        name: str | None = None,
    ) -> Any:
        """Returns numbers of successes in `counts` trials of probability `probs`."""
        return _binomial(self._source(), shape, counts, probs, dtype)

    def make_seeds(self, count: Value = 1) -> Any:
        """Returns seeds for stateless functions, one in each of `count` columns.

        >>> Generator.from_seed(1).make_seeds(3).shape
        TensorShape([2, 3])
        """
        return _seeds(self._source(), integer(raw(count), "count"))

    def split(self, count: Value = 1) -> list[Generator]:
        """Returns generators with streams of their own."""
        seeds = np.asarray(raw(self.make_seeds(count))).astype(np.int64)
        numbers = (seeds[0] << 32) + (seeds[1] & 0xFFFFFFFF)
        return [Generator.from_key_counter(int(n), [0, 0], self._algorithm) for n in numbers]


_global: list[Generator] = []
_global_lock = threading.Lock()


def get_global_generator() -> Generator:
    """Returns the generator of the program, of a random seed unless one was set.

    >>> get_global_generator() is get_global_generator()
    True
    """
    with _global_lock:
        if not _global:
            _global.append(Generator.from_non_deterministic_state())
        return _global[0]


def set_global_generator(generator: Generator) -> None:
    """Replaces the generator of the program.

    >>> set_global_generator(Generator.from_seed(1))
    """
    with _global_lock:
        _global[:] = [generator]
