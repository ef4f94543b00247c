"""What workers keep for the coordinator: datasets, iterators and values, one of each per worker.

A worker that comes back gets all of them anew, in the order in which they were made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from replicax.coordinator.scheduling.closures import ShippedFunction

Kind = Literal["value", "dataset", "iterator"]


@dataclasses.dataclass(frozen=True)
class Resource:
    """One object per worker.

    Attributes:
      id: Its number, unique in the job.
      kind: What it is.
      function: What makes it; None for an iterator.
      source: The dataset of an iterator; 0 for the others.
      buffers: The pickled arguments of the function.
      kept: What must stay alive as long as it may have to be made again.
    """

    id: int
    kind: Kind
    function: ShippedFunction | None = None
    source: int = 0
    buffers: Sequence[Any] = ()
    kept: Any = None


class ResourceTable:
    """All resources that are in use. The caller holds a lock."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._resources: dict[int, Resource] = {}

    def __iter__(self) -> Iterator[Resource]:
        """Goes through them in the order in which they must be made."""
        return iter(self._resources.values())

    def add(
        self,
        kind: Kind,
        function: ShippedFunction | None = None,
        source: int = 0,
        buffers: Sequence[Any] = (),
        kept: Any = None,
    ) -> Resource:
        """Adds one, with a new number."""
        resource = Resource(next(self._ids), kind, function, source, buffers, kept)
        self._resources[resource.id] = resource
        return resource

    def get(self, resource: int) -> Resource | None:
        """Returns one that is in use."""
        return self._resources.get(resource)

    def remove(self, resources: Iterable[int]) -> list[int]:
        """Removes some; returns those that were there."""
        return [r for r in resources if self._resources.pop(r, None) is not None]
