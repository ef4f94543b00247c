"""`ReplicaContext`: the API of replica code, its id and the calls across replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self, TypeVar, overload

import jax
import numpy as np

from replicax.contexts import frames, guards
from replicax.contexts.frames import Strategy
from replicax.foundation import devices, errors, jax_compat, options, tracebacks
from replicax.foundation.types import Tree
from replicax.values.distributed_values import Mirrored, PerReplica, TracedPerReplica
from replicax.values.regroup import map_structure

_Nest = TypeVar("_Nest")


class ReplicaContext:
    """The API of the code that `Strategy.run` calls once per replica.

    Raises:
      InvalidArgumentError: The number of the replica is not a number.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0"], virtual_replicas=2)
    >>> def replica_fn():
    ...     context = rx.get_replica_context()
    ...     return context.all_reduce("SUM", context.replica_id_in_sync_group + 1)
    >>> int(strategy.reduce("MEAN", strategy.run(replica_fn), axis=None))
    3
    """

    def __init__(
        self, strategy: Strategy, replica_id_in_sync_group: int | np.integer | jax.Array | None
    ) -> None:
        is_id = replica_id_in_sync_group is None or isinstance(
            replica_id_in_sync_group, int | np.integer | jax.Array
        )
        if not is_id or isinstance(replica_id_in_sync_group, bool):
            raise errors.InvalidArgumentError(
                "`replica_id_in_sync_group` must be an int, a scalar array or None",
                f"it is {replica_id_in_sync_group!r}",
                "Pass the number of the replica.",
            )
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._entered: list[AbstractContextManager[None]] = []

    @property
    def strategy(self) -> Any:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run together."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica, a scalar array; traced in compiled code."""
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica."""
        frame = guards.require_replica("ReplicaContext.devices", self)
        if frame.layout is None:
            return (devices.name_of(devices.current()),)
        if frame.replica_id is None:
            return tuple(devices.name_of(d) for d in frame.layout.devices)
        is_local = jax_compat.is_eager()
        own = frame.layout.local_devices if is_local else frame.layout.devices
        return (devices.name_of(own[frame.replica_id]),)

    def merge_call(
        self,
        merge_fn: Callable[..., Tree],
        args: list[Tree] | tuple[Tree, ...] = (),
        kwargs: Mapping[str, Tree] | None = None,
    ) -> Tree:
        """Waits for all replicas, then calls `merge_fn(strategy, *args)` once for all.

        Args:
          merge_fn: Called in cross-replica context with the arguments of all replicas merged.
          args: Positional arguments of this replica.
          kwargs: Keyword arguments of this replica.

        Returns:
          This replica's part of what `merge_fn` returned.

        Raises:
          ArgumentTypeError: `merge_fn` is not callable.
        """
        frame = guards.require_replica("merge_call", self)
        if not callable(merge_fn):
            raise errors.ArgumentTypeError(
                "`merge_fn` must be callable",
                f"it is {merge_fn!r}",
                "Pass a function whose first argument is the strategy.",
            )
        assert frame.executor is not None
        try:
            return frame.executor.merge_call(merge_fn, tuple(args), dict(kwargs or {}))
        except Exception as error:
            tracebacks.hide_own_frames(error)
            raise

    @overload
    def all_reduce(
        self,
        reduce_op: options.ReduceOp | str,
        value: float,
        options: options.CommunicationOptions | None = None,
    ) -> jax.Array: ...
    @overload
    def all_reduce(
        self,
        reduce_op: options.ReduceOp | str,
        value: _Nest,
        options: options.CommunicationOptions | None = None,
    ) -> _Nest: ...
    def all_reduce(
        self,
        reduce_op: options.ReduceOp | str,
        value: Tree,
        options: options.CommunicationOptions | None = None,
    ) -> Tree:
        """Combines a nest of values over all replicas and gives every replica the result.

        Differentiable: the gradient of an all-reduce is an all-reduce.
        """
        op = _resolve_op(reduce_op)
        frame = guards.require_replica("all_reduce", self)
        assert frame.executor is not None
        return frame.executor.all_reduce(op, value, options)

    def all_gather(
        self, value: _Nest, axis: int, options: options.CommunicationOptions | None = None
    ) -> _Nest:
        """Concatenates a nest of values over all replicas along `axis`. Differentiable."""
        del options
        frame = guards.require_replica("all_gather", self)
        assert frame.executor is not None
        executor = frame.executor
        return map_structure(lambda leaf: executor.all_gather(leaf, axis), value)

    def update(
        self,
        var: object,
        fn: Callable[..., Tree],
        args: list[Tree] | tuple[Tree, ...] = (),
        kwargs: Mapping[str, Tree] | None = None,
        group: bool = True,
    ) -> Tree:
        """Calls `fn(component, *args)` on every copy of `var`, from replica code.

        The arguments must be equal on all replicas, as the results of `all_reduce` are.
        """

        def merged(strategy: Strategy, args: Tree, kwargs: Tree) -> Tree:
            args, kwargs = map_structure(_as_mirrored, (args, kwargs))
            return frames.current().hooks.update(var, fn, args, kwargs, group)

        return self.merge_call(merged, (tuple(args), dict(kwargs or {})))

    def __enter__(self) -> Self:
        scope = self._strategy._enter_replica_context(self)
        self._entered.append(scope)
        scope.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)

    def __repr__(self) -> str:
        shown = "traced" if jax_compat.is_traced(self._replica_id) else self._replica_id
        return f"ReplicaContext(strategy={type(self._strategy).__name__}, replica_id={shown})"


class ValueContext:
    """The argument of `value_fn` of `experimental_distribute_values_from_function`.

    >>> ValueContext(1, 2).replica_id_in_sync_group
    1
    """

    __slots__ = ("num_replicas_in_sync", "replica_id_in_sync_group")

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


def _resolve_op(reduce_op: options.ReduceOp | str) -> options.ReduceOp:
    return options.resolve_reduce_op(reduce_op)


def _as_mirrored(leaf: Tree) -> Tree:
    if isinstance(leaf, TracedPerReplica):
        assert leaf.layout is not None
        return Mirrored((leaf.local,) * leaf.layout.num_replicas)
    return Mirrored(leaf.values) if isinstance(leaf, PerReplica) else leaf
