"""Probes whether a transformation works row by row on a table.

optax has no such property. So the real transformation is tried on a small sample: once on whole
tables whose gradients are zero outside of some rows, and once on these rows alone. If it
works row by row, both results are equal, and the other rows and their slots do not change.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from replicax.foundation import jax_compat
from replicax.foundation.types import Tree
from replicax.training.optimizer.state import parts_by_number, sources_of, with_leaves
from replicax.values.distributed_values import is_array_like

if TYPE_CHECKING:
    import optax

_log = logging.getLogger(__name__)

_NUM_ROWS = 6
_ROWS = (np.array([1, 4]), np.array([0, 4]))
_LARGEST_SIDE = 5
# Offsets of counters: schedules may do nothing at first, and something later.
_LATER = (0, 1, 3, 100, 10_000, 1_000_000)
# The offset of hyperparameters: one that is zero now may be set to another value.
_HYPERPARAM_STEP = 0.03


_Leaf: TypeAlias = jax.Array | np.ndarray


@dataclasses.dataclass(frozen=True)
class Sample:
    """A small problem of the structure of the real one.

    Attributes:
      transformation: The real transformation.
      template: The structure of the parameters, with their numbers as leaves.
      shapes: The shapes and types of the real parameters.
      table: The number of the parameter that is looked up by rows.
      extra: Further arguments of `update`.
    """

    transformation: optax.GradientTransformationExtraArgs
    template: Tree
    shapes: Sequence[jax.ShapeDtypeStruct]
    table: int
    extra: dict[str, Any]


def is_row_wise(sample: Sample) -> bool:
    """Returns whether updating only the rows with a gradient is exact for one table."""
    extra = {name: _stand_in(value) for name, value in sample.extra.items()}
    if None in extra.values():
        return False
    trial = _Trial(dataclasses.replace(sample, extra=extra), jax_compat.thread_settings())
    try:
        # In another thread: the caller may be tracing, and the trial must not be traced.
        with futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(trial.passes).result()
    except Exception as error:
        # The transformation may still work on the real arrays.
        _log.info("Sparse gradients become dense: the sample failed with %r.", error)
        return False


def _stand_in(value: Tree) -> ArrayLike | None:
    """Returns a number that replaces a scalar argument; None for other arguments."""
    if is_array_like(value) and not jnp.shape(value):
        return value if isinstance(value, bool | int | float) else np.ones((), value.dtype)
    return None


class _Trial:
    """One run of a sample."""

    def __init__(self, sample: Sample, settings: tuple[Any, ...]) -> None:
        self._sample = sample
        self._settings = settings
        self._random = np.random.default_rng(0)
        self._shapes = [
            jax.ShapeDtypeStruct(_small(s.shape, i == sample.table), s.dtype)
            for i, s in enumerate(sample.shapes)
        ]
        self._update = jax.jit(self._updated)

    def passes(self) -> bool:
        """Returns whether rows alone and whole tables always agree."""
        with jax_compat.settings(self._settings):
            params = self._draw()
            state = self._sample.transformation.init(self._tree([jnp.asarray(p) for p in params]))
            sources = sources_of(state, self._sample.template)
            self._is_slot = [source.owner is not None for source in sources]
            self._is_row = [source.owner == self._sample.table for source in sources]
            leaves, self._treedef = jax.tree.flatten(state)
            for leaf, is_row in zip(leaves, self._is_row, strict=True):
                if is_row and jnp.shape(leaf)[:1] != (_NUM_ROWS,):
                    return False
            # The comparison needs slots that are not zero.
            for _ in range(2):
                _, leaves = self._update(self._draw(), leaves, params)
            return all(self._agrees(params, leaves, later) for later in _LATER)

    def _agrees(self, params: list[np.ndarray], leaves: list[_Leaf], later: int) -> bool:
        """Compares two consecutive updates, the second of which starts from the first."""
        leaves = [
            leaf if is_slot else _moved(leaf, later)
            for leaf, is_slot in zip(leaves, self._is_slot, strict=True)
        ]
        is_table = [i == self._sample.table for i in range(len(params))]
        for rows in _ROWS:
            others = np.setdiff1d(np.arange(_NUM_ROWS), rows)
            gradients = self._draw()
            gradients[self._sample.table][others] = 0
            whole, new = self._update(gradients, leaves, params)
            alone, new_rows = self._update(
                *(
                    [_taken(x, rows) if chosen else x for x, chosen in zip(xs, which, strict=True)]
                    for xs, which in (
                        (gradients, is_table),
                        (leaves, self._is_row),
                        (params, is_table),
                    )
                )
            )
            if np.any(np.asarray(whole[self._sample.table])[others] != 0):
                return False
            which = (*is_table, *self._is_row)
            for a, b, chosen in zip((*whole, *new), (*alone, *new_rows), which, strict=True):
                if not _is_close(_part(a, rows) if chosen else a, b[: len(rows)] if chosen else b):
                    return False
            for a, b, chosen in zip(new, leaves, self._is_row, strict=True):
                if chosen and np.any(_part(a, others) != _part(b, others)):
                    return False
            leaves = new
        return True

    def _updated(
        self, gradients: Sequence[_Leaf], leaves: Sequence[_Leaf], params: Sequence[_Leaf]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        state = jax.tree.unflatten(self._treedef, leaves)
        updates, state = self._sample.transformation.update(
            self._tree(gradients), state, self._tree(params), **self._sample.extra
        )
        found = parts_by_number(self._sample.template, updates, len(gradients))
        return found, jax.tree.leaves(state)

    def _tree(self, arrays: Sequence[_Leaf]) -> Tree:
        return with_leaves(self._sample.template, arrays)

    def _draw(self) -> list[np.ndarray]:
        return [self._random.normal(size=s.shape).astype(s.dtype) for s in self._shapes]


def _small(shape: tuple[int, ...], is_table: bool) -> tuple[int, ...]:
    sides = tuple(min(side, _LARGEST_SIDE) for side in shape)
    return (_NUM_ROWS, *sides[1:]) if is_table else sides


def _part(table: _Leaf, rows: np.ndarray) -> np.ndarray:
    return np.asarray(table)[rows]


def _taken(table: _Leaf, rows: np.ndarray) -> np.ndarray:
    # With another row of zeros, as when ids repeat.
    part = _part(table, rows)
    return np.concatenate([part, np.zeros_like(part[:1])])


def _moved(leaf: _Leaf, later: int) -> _Leaf:
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return leaf + np.asarray(later).astype(leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and later:
        return leaf + np.asarray(_HYPERPARAM_STEP).astype(leaf.dtype)
    return leaf


def _is_close(a: _Leaf, b: _Leaf) -> bool:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(jnp.asarray(a)), jax.random.key_data(jnp.asarray(b))
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.array_equal(a, b)
    # Sums over rows may be computed in another order.
    tolerance = 8 * float(jnp.finfo(a.dtype).eps)
    wide = complex if jnp.issubdtype(a.dtype, jnp.complexfloating) else float
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    return np.allclose(a, b, rtol=tolerance, atol=tolerance)
