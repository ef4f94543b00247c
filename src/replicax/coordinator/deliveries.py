"""What workers are given: objects to keep, closures to run, and both again after a broken line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from replicax.coordinator.courier import Courier
from replicax.coordinator.resources import Resource, ResourceTable
from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.scheduling.workers import Worker
from replicax.foundation import errors

_log = logging.getLogger(__name__)


class Deliveries:
    """Sends what can be sent, and says what cannot.

    Attributes:
      resources: The objects that every worker keeps.
    """

    def __init__(self, courier: Courier) -> None:
        self._courier = courier
        self.resources = ResourceTable()

    def make(self, worker: Worker, resource: Resource) -> None:
        """Lets a worker make an object."""
        try:
            self._courier.make(worker, resource)
        except errors.DistributeError as error:
            # Harmless, as if the worker had failed to make it.
            _log.warning("A per-worker %s cannot be sent to %s: %s", resource.kind, worker, error)

    def make_all(self, worker: Worker) -> None:
        """Lets a worker make all objects."""
        for resource in self.resources:
            self.make(worker, resource)

    def run(
        self, worker: Worker, closures: Sequence[Closure]
    ) -> list[tuple[Closure, errors.DistributeError]]:
        """Sends closures to a worker; returns those that cannot be sent, and why."""
        try:
            self._courier.run(worker, closures)
            return []
        except errors.DistributeError:
            return self._run_singly(worker, closures)

    def _run_singly(
        self, worker: Worker, closures: Sequence[Closure]
    ) -> list[tuple[Closure, errors.DistributeError]]:
        """Finds out which of some closures cannot be sent; what comes twice does no harm."""
        failed = []
        for closure in closures:
            try:
                self._courier.run(worker, [closure])
            except errors.DistributeError as error:
                del worker.window[closure.id]
                failed.append((closure, error))
        return failed

    def resend(self, worker: Worker) -> None:
        """Says everything again to a worker whose connection broke."""
        worker.functions.clear()
        self.make_all(worker)
        # What another worker has settled meanwhile is not reported again.
        for closure in [c for c in worker.window.values() if c.is_settled]:
            del worker.window[closure.id]
        closures = list(worker.window.values())
        if closures:
            self._courier.run(worker, closures)
        recalled = [c.id for c in closures if c.is_recalled]
        if recalled:
            self._courier.cancel(worker.index, recalled)
