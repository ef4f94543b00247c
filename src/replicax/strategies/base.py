"""`Strategy`: the public API of a strategy, over its `StrategyExtended`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, Self, overload

import jax
from jax.typing import ArrayLike

from replicax.contexts import frames, guards
from replicax.contexts.replica_context import ReplicaContext, ValueContext
from replicax.foundation import devices, errors, lazy, tracebacks
from replicax.foundation.notebook import html_table
from replicax.foundation.options import ReduceOp, RunOptions, resolve_reduce_op
from replicax.foundation.types import Tree
from replicax.input.input_context import InputContext, InputOptions
from replicax.observe import program
from replicax.strategies.extended import StrategyExtended
from replicax.strategies.scope import Scope, entered
from replicax.tracing.signature import require_arguments
from replicax.values import printing
from replicax.values.distributed_values import DistributedValues
from replicax.values.regroup import map_structure, require_finite

if TYPE_CHECKING:
    from replicax import cluster_resolver
    from replicax.protocol import tasks
else:
    cluster_resolver = lazy.module("replicax.cluster_resolver")
    tasks = lazy.module("replicax.protocol.tasks")

# The default of `axis`, which is required; None is one of its values.
_REQUIRED: Any = object()


def _task_of_program() -> str | None:
    """Returns the task of TF_CONFIG, for those who observe this process."""
    resolver = cluster_resolver.TFConfigClusterResolver()
    try:
        job, index = resolver.task_type, resolver.task_id
    except errors.DistributeError:
        return None
    return None if job is None or index is None else str(tasks.Task(job, index))


class Strategy:
    """A set of devices, and a policy for the placement of variables and the execution of replicas.

    Args:
      extended: The `StrategyExtended` that holds all logic.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    @property
    def extended(self) -> StrategyExtended:
        """The lower half, for code that must know about distribution."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are combined."""
        return self._extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of a strategy of several machines; None on one machine."""
        return None

    def scope(self) -> AbstractContextManager[Self]:
        """Returns a context manager that makes this strategy the current one.

        Variables created inside are distributed; plain calls inside are not.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> with strategy.scope():
        ...     rx.get_strategy() is strategy
        True
        """
        program.open_once(_task_of_program)
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Tree],
        args: list[Tree] | tuple[Tree, ...] = (),
        kwargs: Mapping[str, Tree] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
        """Calls `fn` once per replica and merges the results.

        Distributed values in the arguments are replaced by each replica's component. An
        `rx.function`, or any function inside one, is compiled into one program.

        Args:
          fn: The replica code.
          args: Positional arguments, a list or tuple.
          kwargs: Keyword arguments.
          options: Accepted for portability.

        Raises:
          InvalidArgumentError: `args` is not a tuple or list.
          StructureError: An argument contains itself, or is nested too deeply.
          ArgumentTypeError: `fn` is not callable, or `kwargs` is not a mapping.

        >>> import replicax as rx
        >>> rx.OneDeviceStrategy("CPU:0").run(lambda x: x * 2, args=(3,))
        6
        """
        del options
        require_arguments(args, kwargs)
        if not callable(fn):
            raise errors.ArgumentTypeError(
                "`fn` must be callable", f"it is {fn!r}", "Pass a function."
            )
        try:
            with entered(self, "run"):
                return self._extended.call_for_each_replica(fn, args, kwargs)
        except Exception as error:
            tracebacks.hide_own_frames(error)
            if isinstance(error, RecursionError):
                require_finite("The arguments of `run`", (args, kwargs))
            raise

    @overload
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: DistributedValues | ArrayLike,
        axis: int | Sequence[int] | None,
    ) -> jax.Array: ...
    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: Tree, axis: int | Sequence[int] | None
    ) -> Tree: ...
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: int | Sequence[int] | None = _REQUIRED,
    ) -> Tree:
        """Combines a per-replica value into one array on the current device.

        Args:
          reduce_op: `ReduceOp.SUM` or `MEAN`, or the name.
          value: A result of `run`, or a structure of such.
          axis: None to combine across replicas only; or the dimension(s), usually 0, along
            which to combine inside each replica as well. MEAN then divides by the true
            number of elements, also for a partial batch.

        Raises:
          ArgumentTypeError: There is no `axis`.
        """
        op = resolve_reduce_op(reduce_op)
        if axis is _REQUIRED:
            raise errors.ArgumentTypeError(
                "`Strategy.reduce` needs an `axis`",
                "none was given",
                "Pass axis=None to combine across replicas only, or axis=0 to combine the "
                "rows of each replica as well.",
            )
        guards.require_cross_replica(
            "Strategy.reduce", "Use `rx.get_replica_context().all_reduce(...)` there.", self
        )
        device = devices.current()
        with entered(self, "reduce"):
            return map_structure(
                lambda leaf: self._extended.reductions.reduce_along(op, leaf, axis, device), value
            )

    @overload
    def gather(self, value: DistributedValues | ArrayLike, axis: int) -> jax.Array: ...
    @overload
    def gather(self, value: Tree, axis: int) -> Tree: ...
    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenates a per-replica value along `axis`, on the current device."""
        guards.require_cross_replica(
            "Strategy.gather", "Use `rx.get_replica_context().all_gather(...)` there.", self
        )
        with entered(self, "gather"):
            gather, device = self._extended.reductions.gather, devices.current()
            return map_structure(lambda leaf: gather(leaf, axis, device), value)

    def experimental_local_results(self, value: Tree) -> tuple[Tree, ...]:
        """Returns the components of a distributed value, or a tuple of the value itself."""
        return self._extended.local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Tree]
    ) -> Tree:
        """Makes a distributed value from one call of `value_fn` per replica."""
        guards.require_cross_replica("experimental_distribute_values_from_function", "", self)
        return self._extended.values_from_function(value_fn)

    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> Any:
        """Cuts the global batches of a dataset into one part per replica.

        Parts differ by at most one row; a replica without rows gets an empty part. Batches
        are read, cut and copied to the devices ahead of the consumer.

        Args:
          dataset: An `rx.data.Dataset`, a Grain dataset, an iterable of batches, arrays whose
            first dimension counts batches, a torch DataLoader, a tf.data.Dataset or a keras
            PyDataset.
          options: How elements reach the devices.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> data = strategy.experimental_distribute_dataset(rx.data.Dataset.range(3).batch(2))
        >>> [batch.tolist() for batch in data]
        [[0, 1], [2]]
        """
        self._require_outside_replicas("experimental_distribute_dataset")
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Feeds the replicas from a dataset that `dataset_fn` makes: one batch per replica.

        Nothing is batched, cut or sharded: `dataset_fn` does that, according to its
        `InputContext`.

        Args:
          dataset_fn: Takes an `InputContext` and returns a dataset of per-replica batches.
          options: How elements reach the devices, and how often `dataset_fn` is called.

        >>> import replicax as rx
        >>> strategy = rx.OneDeviceStrategy("CPU:0")
        >>> def dataset_fn(context):
        ...     size = context.get_per_replica_batch_size(2)
        ...     return rx.data.Dataset.range(4).batch(size)
        >>> [batch.tolist() for batch in strategy.distribute_datasets_from_function(dataset_fn)]
        [[0, 1], [2, 3]]
        """
        self._require_outside_replicas("distribute_datasets_from_function")
        return self._extended.distribute_datasets_from_function(dataset_fn, options)

    def _require_outside_replicas(self, api: str) -> None:
        frame = frames.current()
        if not frame.is_default:
            guards.require_cross_replica(api)

    def unwrap(self, value: Tree) -> list[Tree]:
        """Returns the components of a distributed value as a list."""
        return list(self.experimental_local_results(value))

    def group(self, value: Tree, name: str | None = None) -> None:
        """Waits until all components of a value are computed."""
        del name
        jax.block_until_ready(self.unwrap(value))

    def colocate_vars_with(self, colocate_with_variable: object) -> AbstractContextManager[None]:
        """Returns `extended.colocate_vars_with(colocate_with_variable)`."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    def __copy__(self) -> NoReturn:
        raise errors.ContextError(
            "Only copy.deepcopy can copy a strategy",
            "copy.copy was called",
            "Use copy.deepcopy, or make a new strategy.",
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(self.__dict__)
        clone._extended = copy.copy(self._extended)
        clone._extended.relink(clone)
        return clone

    def _enter_replica_context(self, context: ReplicaContext) -> AbstractContextManager[None]:
        return self._extended.enter_replica_context(context)

    def _facts(self) -> dict[str, str]:
        """Returns what `repr` shows, the most important fact first."""
        extended = self._extended
        try:
            facts = {"replicas": f"{self.num_replicas_in_sync:,}"}
        except errors.UnsupportedError:  # of a strategy that is not finished
            return {}
        if extended.layout is None:
            return facts
        facts["devices"] = printing.listing(_short_names(extended.worker_devices))
        if extended.parameter_devices != extended.worker_devices:
            facts["variables on"] = printing.listing(_short_names(extended.parameter_devices))
        return facts

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={fact}" for name, fact in self._facts().items())
        return f"<{printing.public_name(type(self))} {facts}".rstrip() + ">"

    def _repr_html_(self) -> str:
        return html_table(printing.public_name(type(self)), list(self._facts().items()))


def _short_names(names: Sequence[str]) -> list[str]:
    """Returns each device once, as "CPU:0"."""
    return [name.rpartition("device:")[2] for name in dict.fromkeys(names)]
