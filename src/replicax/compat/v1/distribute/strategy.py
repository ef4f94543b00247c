"""The v1 `Strategy`: the API of a strategy as TensorFlow 1 had it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from typing_extensions import override

from replicax.compat.v1.distribute.deprecation import warn_once
from replicax.compat.v1.distribute.extended import StrategyExtended, with_v1_members
from replicax.foundation import errors
from replicax.foundation.options import ReduceOp, RunOptions
from replicax.foundation.types import Tree
from replicax.input.dataset.dataset import Dataset
from replicax.input.distributed import DistributedIterator
from replicax.input.input_context import InputContext, InputOptions, InputReplicationMode
from replicax.strategies import base, extended
from replicax.strategies.scope import entered

_T = TypeVar("_T")


class _HasNext(Protocol):
    def get_next(self) -> Tree: ...


class _NotInV1:
    """A name of v2 that v1 does not have."""

    def __init__(self, instead: str) -> None:
        self._instead = instead
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> object:
        raise AttributeError(
            f"compat.v1 strategies have no attribute {self._name!r}. Use {self._instead}."
        )


class Strategy(base.Strategy):
    """A strategy with the methods and signatures of v1.

    It is made of the same parts as `rx.Strategy`. It has no `gather` and no
    `experimental_distribute_values_from_function`.

    Args:
      extended: The `StrategyExtended` that holds all logic.

    >>> import replicax.compat.v1.distribute as distribute
    >>> strategy = distribute.OneDeviceStrategy("CPU:0")
    >>> iterator = strategy.make_dataset_iterator([[1.0, 2.0], [3.0, 4.0]])
    >>> iterator.initialize()
    >>> result = strategy.experimental_run(lambda x: x.sum(), iterator)
    >>> float(strategy.reduce("SUM", result))
    3.0
    """

    def __init__(self, extended: extended.StrategyExtended) -> None:
        own = with_v1_members(extended)
        own.relink(self)
        super().__init__(own)
        self._cluster_resolver: object = None

    if not TYPE_CHECKING:
        gather = _NotInV1("rx.MirroredStrategy and the other strategies of v2, or `reduce`")
        experimental_distribute_values_from_function = _NotInV1(
            "rx.MirroredStrategy and the other strategies of v2, or `run` with a function that "
            "uses its replica id"
        )

    def __dir__(self) -> list[str]:
        absent = {name for name, kind in vars(Strategy).items() if isinstance(kind, _NotInV1)}
        return sorted(set(super().__dir__()) - absent)

    @property
    @override
    def extended(self) -> StrategyExtended:
        """The lower half, for code that must know about distribution."""
        assert isinstance(self._extended, StrategyExtended)
        return self._extended

    @property
    @override
    def cluster_resolver(self) -> Any:
        """The resolver of a strategy of several machines; None on one machine."""
        return self._cluster_resolver

    @override
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: int | Sequence[int] | None = None,
    ) -> Tree:
        """Combines a per-replica value into one array; `axis` is None by default."""
        return super().reduce(reduce_op, value, axis)

    # Iterators.

    def experimental_run(
        self, fn: Callable[..., Tree], input_iterator: _HasNext | None = None
    ) -> Tree:
        """Calls `fn` once per replica, with the next element of an iterator if there is one."""
        with entered(self, "experimental_run"):
            args = () if input_iterator is None else (input_iterator.get_next(),)
            return self.run(fn, args=args)

    def make_dataset_iterator(self, dataset: object) -> DistributedIterator:
        """Returns an iterator over the parts of global batches; call `initialize` first."""
        distributed = self.experimental_distribute_dataset(dataset)
        return distributed.make_initializable_iterator()

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Tree],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Returns an iterator over per-replica batches; call `initialize` first.

        Args:
          input_fn: Takes an `InputContext`. Returns a dataset of per-replica batches, or a
            function without arguments that returns the next batch.
          replication_mode: PER_WORKER.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise errors.InvalidArgumentError(
                "`replication_mode` must be InputReplicationMode.PER_WORKER",
                f"it is {replication_mode!r}",
                "Use `distribute_datasets_from_function` with InputOptions for PER_REPLICA.",
            )

        def dataset_fn(context: InputContext) -> Tree:
            made = input_fn(context)
            return made if hasattr(made, "__iter__") or not callable(made) else _Called(made)

        return self.distribute_datasets_from_function(dataset_fn).make_initializable_iterator()

    def experimental_make_numpy_dataset(self, numpy_input: Tree, session: object = None) -> Dataset:
        """Returns a dataset of the rows of arrays.

        >>> import numpy as np
        >>> import replicax.compat.v1.distribute as distribute
        >>> strategy = distribute.OneDeviceStrategy("CPU:0")
        >>> rows = strategy.experimental_make_numpy_dataset(np.array([1.0, 2.0]))
        >>> [float(row) for row in rows]
        [1.0, 2.0]
        """
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    # Sessions and clusters of TensorFlow 1.

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Accepts a session configuration, which has no effect; a cluster is refused."""
        del session_config
        if cluster_spec is not None or task_type is not None or task_id is not None:
            raise errors.UnsupportedError(
                "A strategy gets its cluster when it is made",
                f"configure(cluster_spec={cluster_spec!r}, task_type={task_type!r}, "
                f"task_id={task_id!r}) was called",
                "Set TF_CONFIG, or pass `cluster_resolver` to MultiWorkerMirroredStrategy.",
            )

    def update_config_proto(self, config_proto: _T) -> _T:
        """Returns a copy of a session configuration, which needs no changes."""
        return copy.deepcopy(config_proto)

    # Deprecated names.

    def experimental_run_v2(
        self,
        fn: Callable[..., Tree],
        args: list[Tree] | tuple[Tree, ...] = (),
        kwargs: Mapping[str, Tree] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
        """Calls `run`; deprecated."""
        warn_once("Strategy.experimental_run_v2", "Strategy.run")
        return self.run(fn, args, kwargs, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Tree], options: InputOptions | None = None
    ) -> Any:
        """Calls `distribute_datasets_from_function`; deprecated."""
        warn_once(
            "Strategy.experimental_distribute_datasets_from_function",
            "Strategy.distribute_datasets_from_function",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)


class _Called:
    """The batches that a function returns, one for each call, until it raises StopIteration."""

    def __init__(self, next_batch: Callable[[], Tree]) -> None:
        self._next_batch = next_batch

    def __iter__(self) -> Iterator[Tree]:
        while True:
            try:
                batch = self._next_batch()
            except (StopIteration, errors.OutOfRangeError):
                return
            yield batch
