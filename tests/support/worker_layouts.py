"""Layouts of several workers in one process, to test input without processes or collectives.

Workers are threads (`peers_in_threads.py`). The layout of each has all replicas, and behaves like
one that spans processes, except that an array of all replicas holds the parts of this worker only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from peers_in_threads import PeersInThreads
from typing_extensions import override

import replicax as rx
from replicax.values.layout import ReplicaLayout


class WorkerLayout(ReplicaLayout):
    """The replicas of all workers, as one of them sees them."""

    def __init__(self, peers: PeersInThreads, num_local: int) -> None:
        total = num_local * peers.count
        super().__init__(jax.devices("cpu")[:total])
        self.peers = peers
        self.first_local = num_local * peers.index
        self.local_devices = self.devices[self.first_local : self.first_local + num_local]
        self._local = ReplicaLayout(self.local_devices)

    @override
    def assemble(self, components: Sequence[Any]) -> Any:
        assert len(components) == self.num_local
        assert [next(iter(c.devices())) for c in components] == list(self.local_devices)
        return self._local.assemble(components)

    @override
    def split(self, array: jax.Array, is_scalar: bool) -> tuple[jax.Array, ...]:
        return self._local.split(array, is_scalar)


def parts_of(element: Any) -> list[Any]:
    """The local parts of an element that is one array per replica."""
    assert isinstance(element, rx.PerReplica)
    return [np.asarray(value).tolist() for value in element.values]


def joined_steps(found: list[list[list[Any]]]) -> list[list[Any]]:
    """Per step, the parts of all replicas, of what each worker found; all took as many steps."""
    for own in found:
        if isinstance(own, Exception):
            raise own
    return [[part for own in step for part in own] for step in zip(*found, strict=True)]
