"""The user of a simulated cluster: schedules closures, updates variables itself, and joins."""

from __future__ import annotations

from collections.abc import Sequence

from replicax.coordinator.scheduling.closures import Closure
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors
from replicax.protocol import limits
from simulation.channel import Channel
from simulation.client import Client
from simulation.coordinator import SimulatedCoordinator
from simulation.plan import Plan
from simulation.process import Steps
from simulation.service import ListeningProcess

_POLL_S = 0.05
# The number of closures per update of its own.
CLOSURES_PER_WRITE = 6
FINAL = (errors.PSUnavailableError, errors.NoWorkersError, errors.FencedError)


class User:
    """A program that schedules closures and joins them.

    Attributes:
      outcome: "done", or the name of the error that ended the job; None before.
      num_errors: The number of errors of closures that were raised.
      num_left: The number of closures that are not scheduled yet.
    """

    def __init__(
        self,
        coordinator: SimulatedCoordinator,
        servers: Sequence[ListeningProcess],
        plan: Plan,
        num_closures: int,
    ) -> None:
        self._coordinator, self._plan = coordinator, plan
        self.num_left, self._num_writes = num_closures, num_closures // CLOSURES_PER_WRITE
        self._function = serialization.ship(len)
        self._late_share = 0.2 * (coordinator.world.random.random() < 0.2)
        self.outcome: str | None = None
        self.num_errors = 0
        self._servers = servers
        self._client = self._new_client()
        self._steps = self._program()
        self._coordinator.later(0.0, self._step, "compute")

    def _new_client(self) -> Client:
        coordinator, cluster = self._coordinator, self._coordinator.cluster
        job, incarnation = (cluster.job, cluster.epoch), cluster.incarnation
        return Client(
            [
                Channel(coordinator.network, coordinator, server, incarnation, job, limits.DEADLINE)
                for server in self._servers
            ]
        )

    def _step(self) -> None:
        for seconds in self._steps:
            self._coordinator.later(seconds, self._step, "compute")
            return
        self._coordinator.world.note(f"the user is done: {self.outcome}")

    def _program(self) -> Steps:
        chance, queue = self._coordinator.world.random, self._coordinator.core.queue
        while self.num_left:
            yield from self._settle_errors()
            if self.outcome is not None:
                return
            if self._num_writes and chance.random() < 0.15:
                self._num_writes -= 1
                yield from self._write()
                continue
            for _ in range(min(self.num_left, chance.randint(1, 8))):
                self.num_left -= 1
                number = self._coordinator.cluster.next_closure()
                # Sometimes too short, so that workers are lost for it.
                deadline_s = 1.0 if chance.random() < self._late_share else None
                self._coordinator.add(Closure(number, self._function, deadline_s=deadline_s))
            yield chance.uniform(0.0, 0.6)
        while True:
            yield from self._settle_errors()
            if self.outcome is not None:
                return
            if queue.is_idle:
                self.outcome = "done"
                return
            yield _POLL_S

    def _settle_errors(self) -> Steps:
        """Handles all errors that `schedule` and `join` would raise."""
        core, world = self._coordinator.core, self._coordinator.world
        while True:
            error = core.pending_error()
            if error is not None:
                world.note(f"the user gets {type(error).__name__}")
                self._coordinator.checks.require_reason(error, is_final=True)
                self.num_errors += 1
                if isinstance(error, FINAL):
                    self.outcome = type(error).__name__
                    self._coordinator.checks.lost_servers()
                    return
            elif core.queue.error is None:
                return
            yield _POLL_S

    def _write(self) -> Steps:
        """Updates variables outside of closures, and waits for the acknowledgement."""
        coordinator, client = self._coordinator, self._client
        number = coordinator.cluster.begin_write()
        element = self._plan.element_of(coordinator.cluster.epoch, number)
        coordinator.world.note(f"the user writes {number}")
        coordinator.checks.writes(element)
        client.begin(number)
        for server, update, payload in self._plan.changes(element):
            client.collect(number, server, (update, payload))
        client.end(number)
        client.flush()
        while client.is_waiting:
            yield 0.01
        error = dict(client.settled())[number]
        coordinator.cluster.end_write(number)
        coordinator.checks.wrote(element, is_acknowledged=error is None)
        if error is not None:
            coordinator.checks.require_reason(error, is_final=False)
            client.close()
            self._client = self._new_client()
