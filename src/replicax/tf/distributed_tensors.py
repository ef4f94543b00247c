"""Values of all replicas, and the context of one, as programs with tensors use them.

The library's own code computes with arrays. So objects that both use give tensors to code of
users only.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from typing_extensions import override

import replicax as rx
from replicax.input.distributed import DistributedDataset, DistributedIterator
from replicax.strategies.extended import StrategyExtended
from replicax.tf import tape_recording
from replicax.tf.arguments import Ignored, Value, VariableLike
from replicax.tf.dispatch import op, wrap_tree
from replicax.tf.tensor import Tensor, raw
from replicax.tf.variable import as_tensor_variable
from replicax.values import printing
from replicax.values.distributed_values import PerReplica
from replicax.values.indexed_slices import IndexedSlices


def is_own_caller() -> bool:
    """Tells whether code of the library called the function that asks."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("replicax.")


def with_tensors(fn: Value) -> Any:
    """Returns a function that gives another one tensors for its arrays."""
    if not isinstance(fn, types.FunctionType | types.MethodType | functools.partial):
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tuple(map(as_tensors, args))
        return fn(*given, **{name: as_tensors(value) for name, value in kwargs.items()})

    return call


class TensorPerReplica(PerReplica):
    """A value of all replicas whose components are tensors."""

    __slots__ = ()

    @property
    @override
    def values(self) -> tuple[Any, ...]:
        """The tensor of each replica, in replica order."""
        found = PerReplica.values.__get__(self)
        return found if is_own_caller() else tuple(map(wrap_tree, found))

    def __repr__(self) -> str:
        values = PerReplica.values.__get__(self)
        return printing.braces("PerReplica", len(values), lambda i: repr(wrap_tree(values[i])))


def as_tensors(tree: Value) -> Any:
    """Returns tensors for the arrays of a structure, also for those of all replicas."""
    if type(tree) is PerReplica:
        tree.__class__ = TensorPerReplica
        return tree
    if isinstance(tree, rx.Variable):
        # A copy, which `extended.update` gives to its function.
        return as_tensor_variable(tree)
    if isinstance(tree, dict):
        return tape_recording.mapping(tree, as_tensors) if tree else tree
    if isinstance(tree, list | tuple):
        return tape_recording.sequence(tree, as_tensors)
    # NumPy's numbers stay numbers.
    return tree if isinstance(tree, np.generic) else wrap_tree(tree)


def as_arrays(tree: Value) -> Any:
    """Returns arrays for the tensors of a structure; variables stay."""
    return tape_recording.map_leaves(_array, tree)


def _array(leaf: Value) -> Any:
    if isinstance(leaf, IndexedSlices):
        return leaf.map_arrays(raw)
    return raw(leaf) if isinstance(leaf, Tensor) else leaf


# Data.


class TensorDistributedIterator(DistributedIterator):
    """An iterator over a dataset of all replicas, which gives tensors."""

    @override
    def __next__(self) -> Any:
        return as_tensors(super().__next__())


class TensorDistributedDataset(DistributedDataset):
    """A dataset of all replicas, which gives tensors."""

    @override
    def open_feed(self) -> DistributedIterator:
        return TensorDistributedIterator(self)

    @override
    def make_one_shot_iterator(self) -> DistributedIterator:
        return TensorDistributedIterator(self)

    @override
    def make_initializable_iterator(self) -> DistributedIterator:
        return TensorDistributedIterator(self, is_initialized=False)


def giving_tensors(dataset: Value) -> Any:
    """Lets a dataset that a strategy has distributed give tensors."""
    if type(dataset) is DistributedDataset:
        dataset.__class__ = TensorDistributedDataset
    return dataset


# Contexts.


@op(name="all_reduce")
def _collective(value: Value, call: Callable[[Any], Any]) -> Any:
    return call(value)


class TensorReplicaContext(rx.ReplicaContext):
    """The API of replica code, with tensors; collectives have gradients.

    Args:
      context: The context of replicax, which does the work.
    """

    def __init__(self, context: rx.ReplicaContext) -> None:
        super().__init__(context._strategy, context._replica_id)
        self._context = context

    @property
    @override
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica: a number, or a tensor in compiled code."""
        found = self._context.replica_id_in_sync_group
        return wrap_tree(found) if isinstance(found, jax.Array) else found

    @property
    @override
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica."""
        return self._context.devices

    @override
    def merge_call(self, merge_fn: Value, args: Value = (), kwargs: Value = None) -> Any:
        """Waits for all replicas, then calls `merge_fn(strategy, *args)` once for all."""
        found = self._context.merge_call(
            with_tensors(merge_fn), as_arrays(tuple(args)), as_arrays(dict(kwargs or {}))
        )
        return as_tensors(found)

    @override
    def all_reduce(self, reduce_op: Value, value: Value, options: Ignored = None) -> Any:  # type: ignore[override]
        """Combines a structure of tensors over all replicas."""
        return _collective(
            _plain_rows(value), lambda own: self._context.all_reduce(reduce_op, own, options)
        )

    @override
    def all_gather(self, value: Value, axis: int, options: Ignored = None) -> Any:  # type: ignore[override]
        """Concatenates a structure of tensors over all replicas along `axis`."""
        axis = int(axis)
        return _collective(value, lambda own: self._context.all_gather(own, axis, options))

    @override
    def update(
        self,
        var: VariableLike,
        fn: Value,
        args: Value = (),
        kwargs: Value = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(component, *args)` on every copy of a variable."""
        given, named = as_arrays(tuple(args)), as_arrays(dict(kwargs or {}))
        return as_tensors(self._context.update(var, with_tensors(fn), given, named, group))

    def __enter__(self) -> Any:
        self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


def _plain_rows(value: Value) -> Any:
    return tape_recording.map_leaves(
        lambda leaf: leaf.map_arrays(raw) if isinstance(leaf, IndexedSlices) else leaf, value
    )


def get_replica_context() -> Any:
    """Returns the context of replica code, and None in cross-replica code.

    >>> get_replica_context().num_replicas_in_sync
    1
    """
    found = rx.get_replica_context()
    return found if found is None else TensorReplicaContext(found)


class TensorExtended:
    """`strategy.extended` as users see it: functions get tensors, and results are tensors."""

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._extended, name)
        if not callable(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            given, named = tape_recording.map_leaves(_given, (args, kwargs))
            return as_tensors(found(*given, **named))

        return call

    def __dir__(self) -> list[str]:
        return dir(self._extended)

    def __repr__(self) -> str:
        return repr(self._extended)


def _given(leaf: Value) -> Any:
    return with_tensors(_array(leaf))
