"""Per-worker datasets and iterators: each worker has its own, the coordinator holds their ids."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NoReturn, Protocol

import jax

from replicax.contexts import frames
from replicax.coordinator.outbox import Kind
from replicax.coordinator.remote_value import ClosureRunner, RemoteValue
from replicax.coordinator.scheduling.closures import ShippedFunction
from replicax.foundation import errors
from replicax.foundation.types import Tree
from replicax.tracing.signature import PerReplicaSpec, TensorSpec


class ResourceOwner(ClosureRunner, Protocol):
    """Creates and drops resources on workers; implemented by the engine."""

    @property
    def released(self) -> deque[int]:
        """Ids of resources without references. Finalizers append to it, without a lock."""
        ...

    def create_resource(
        self, kind: Kind, function: ShippedFunction | None, source: int, keep_alive: object
    ) -> int:
        """Creates an object on each worker; returns its id."""
        ...

    def any_worker(self) -> int:
        """Returns the index of a worker that is ready, or 0."""
        ...


class DatasetWithSpec(Protocol):
    """A dataset that describes its elements."""

    @property
    def element_spec(self) -> Tree: ...


class PerWorkerDataset:
    """A dataset on each worker; made by `ClusterCoordinator.create_per_worker_dataset`.

    `iter` starts one iterator on each worker, from the beginning. A scheduled function that
    gets the iterator as an argument calls `next` on that of its own worker.

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
    ...     strategy = rx.ParameterServerStrategy(cluster.resolver)
    ...     with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         dataset = coordinator.create_per_worker_dataset(lambda: rx.data.Dataset.range(3))
    ...         iterator = iter(dataset)
    ...         first = coordinator.schedule(lambda values: next(values), args=(iterator,))
    ...         first.fetch().item()
    0
    """

    is_per_worker = True

    def __init__(self, owner: ResourceOwner, resource: int) -> None:
        self.resource = resource
        # Weak: a dataset does not keep the coordinator's threads alive.
        self._owner = weakref.ref(owner)
        self._spec: tuple[Tree] | None = None
        weakref.finalize(self, owner.released.append, resource).atexit = False

    def __repr__(self) -> str:
        return f"<PerWorkerDataset {self.resource}>"

    def __iter__(self) -> PerWorkerIterator:
        if frames.current().overlay is not None:
            raise errors.ContextError(
                "Iterators over a per-worker dataset are made outside of compiled functions",
                "`iter` was called inside an rx.function",
                "Call `iter(dataset)` before, and pass the iterator as an argument.",
            )
        owner = self._require_owner()
        iterator = owner.create_resource("iterator", None, self.resource, None)
        return PerWorkerIterator(owner, iterator, self)

    def _require_owner(self) -> ResourceOwner:
        owner = self._owner()
        if owner is None:
            raise errors.ContextError(
                "A per-worker dataset needs the ClusterCoordinator that made it",
                "it is closed",
                "Make a new dataset with a new coordinator.",
            )
        return owner

    @property
    def element_spec(self) -> Tree:
        """The spec of the elements on a worker: that of the distributed dataset there.

        The first call waits for a worker.

        Raises:
          ContextError: The coordinator that made it is closed.
        """
        if self._spec is None:
            owner = self._require_owner()
            worker = owner.any_worker()
            closure = owner.run_pinned(worker, describe_elements, self.resource, self)
            self._spec = (rebuild_spec(RemoteValue(owner, closure).fetch()),)
        return self._spec[0]


class PerWorkerIterator:
    """An iterator on each worker; made by `iter` of a per-worker dataset.

    It is an argument of scheduled functions; the coordinator cannot read it.

    >>> import replicax as rx
    >>> with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
    ...     strategy = rx.ParameterServerStrategy(cluster.resolver)
    ...     with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...         iterator = iter(coordinator.create_per_worker_dataset(rx.data.Dataset.range(3)))
    ...         values = [coordinator.schedule(next, args=(iterator,)) for _ in range(2)]
    ...         sorted(value.fetch().item() for value in values)
    [0, 1]
    """

    is_per_worker = True

    def __init__(self, owner: ResourceOwner, resource: int, dataset: PerWorkerDataset) -> None:
        self.resource = resource
        # A worker that recovers creates its iterator from the dataset again.
        self._dataset = dataset
        weakref.finalize(self, owner.released.append, resource).atexit = False

    def __repr__(self) -> str:
        return f"<PerWorkerIterator {self.resource} over {self._dataset!r}>"

    def __iter__(self) -> PerWorkerIterator:
        return self

    @property
    def element_spec(self) -> Tree:
        """The spec of the elements on a worker; see `PerWorkerDataset.element_spec`."""
        return self._dataset.element_spec

    def __next__(self) -> NoReturn:
        raise errors.UnsupportedError(
            "The elements of a per-worker iterator are on the workers",
            "`next` was called at the coordinator",
            "Pass the iterator to a scheduled function, and call `next` there.",
        )

    def get_next(self) -> NoReturn:
        """Not supported: the elements are on the workers."""
        self.__next__()


def describe_elements(dataset: DatasetWithSpec) -> tuple[Tree, list[list[object]]]:
    """Describes the elements of a worker's dataset in plain values; runs on the worker.

    Returns:
      The structure of elements, with numbers as leaves, and for each leaf whether it is a
      PerReplica, and the shapes and dtypes of its components.
    """
    leaves: list[list[object]] = []

    def number(spec: PerReplicaSpec | TensorSpec) -> int:
        specs = spec.value_specs if isinstance(spec, PerReplicaSpec) else (spec,)
        shapes = [None if s.shape is None else list(s.shape) for s in specs]
        leaves.append([isinstance(spec, PerReplicaSpec), shapes, [s.dtype.name for s in specs]])
        return len(leaves) - 1

    return jax.tree.map(number, dataset.element_spec), leaves


def rebuild_spec(description: tuple[Tree, list[list[Tree]]]) -> Tree:
    """Returns the specs that `describe_elements` has described.

    >>> rebuild_spec(({"x": 0}, [[False, [[None, 2]], ["float32"]]]))
    {'x': TensorSpec(shape=(None, 2), dtype=dtype('float32'), name=None)}
    """
    structure, leaves = description

    def spec(number: int) -> PerReplicaSpec | TensorSpec:
        is_per_replica, shapes, dtypes = leaves[number]
        specs = [TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return PerReplicaSpec(tuple(specs)) if is_per_replica else specs[0]

    return jax.tree.map(spec, structure)
