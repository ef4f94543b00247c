"""Datasets and iterators of which each worker has its own; the coordinator holds their names."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from replicax.contexts import frames
from replicax.coordinator.resources import Resource
from replicax.coordinator.shipping import element_specs
from replicax.foundation import errors


class ResourceHome(Protocol):
    """Where resources are made and dropped."""

    # Numbers of resources that nobody uses any more. Appended to by finalisers, which may
    # run anywhere: they take no lock.
    released: deque[int]

    def make_iterator(self, dataset: PerWorkerDataset) -> Resource:
        """Starts an iterator over a dataset on each worker."""
        ...

    def ask_any_worker(self, fn: Callable[[Any], Any], resource: int, kept: Any) -> Any:
        """Returns what a function gives for what one of the workers keeps under a number."""
        ...


class PerWorkerDataset:
    """A dataset on each worker; made by `ClusterCoordinator.create_per_worker_dataset`.

    `iter` starts one iterator on each worker, from the beginning. A scheduled function that
    gets the iterator as an argument calls `next` on that of its own worker.
    """

    is_per_worker = True

    def __init__(self, home: ResourceHome, resource: Resource) -> None:
        self.resource = resource.id
        # Weak: a dataset does not keep the coordinator's threads alive.
        self._home = weakref.ref(home)
        self._spec: tuple[Any] | None = None
        weakref.finalize(self, home.released.append, resource.id).atexit = False

    def __repr__(self) -> str:
        return f"<PerWorkerDataset {self.resource}>"

    def __iter__(self) -> PerWorkerIterator:
        if frames.current().overlay is not None:
            raise errors.ContextError(
                "Iterators over a per-worker dataset are made outside of compiled functions",
                "`iter` was called inside an rx.function",
                "Call `iter(dataset)` before, and pass the iterator as an argument.",
            )
        home = self._require_home()
        return PerWorkerIterator(home, home.make_iterator(self), self)

    def _require_home(self) -> ResourceHome:
        home = self._home()
        if home is None:
            raise errors.ContextError(
                "A per-worker dataset needs the ClusterCoordinator that made it",
                "it is closed",
                "Make a new dataset with a new coordinator.",
            )
        return home

    @property
    def element_spec(self) -> Any:
        """What the elements on a worker look like: that of the dataset that it distributes there.

        The first time, a worker is asked, and waited for.
        """
        if self._spec is None:
            found = self._require_home().ask_any_worker(
                element_specs.described, self.resource, self
            )
            self._spec = (element_specs.rebuilt(found),)
        return self._spec[0]


class PerWorkerIterator:
    """An iterator on each worker; made by `iter` of a per-worker dataset.

    It is an argument of scheduled functions, and gives nothing at the coordinator.
    """

    is_per_worker = True

    def __init__(self, home: ResourceHome, resource: Resource, dataset: PerWorkerDataset) -> None:
        self.resource = resource.id
        # A worker that comes back makes its iterator from the dataset again.
        self._dataset = dataset
        weakref.finalize(self, home.released.append, resource.id).atexit = False

    def __repr__(self) -> str:
        return f"<PerWorkerIterator {self.resource} over {self._dataset!r}>"

    def __iter__(self) -> PerWorkerIterator:
        return self

    @property
    def element_spec(self) -> Any:
        """What the elements on a worker look like; see `PerWorkerDataset.element_spec`."""
        return self._dataset.element_spec

    def __next__(self) -> NoReturn:
        raise errors.UnsupportedError(
            "The elements of a per-worker iterator are on the workers",
            "`next` was called at the coordinator",
            "Pass the iterator to a scheduled function, and call `next` there.",
        )

    def get_next(self) -> NoReturn:
        """Is not offered: elements are on the workers."""
        self.__next__()


def return_argument(value: Any) -> Any:
    """Returns its argument; run by a worker whose value is asked for."""
    return value
