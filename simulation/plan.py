"""The work of a simulated job: what its closures and its user change, and for how long they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from replicax.contexts.overlay import Change
from replicax.protocol import messages
from replicax.variables.remote import RemoteVariable
from simulation.optimizer import SumOptimizer
from simulation.world import World

PARTS_PER_SERVER = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one closure, independent of the worker.

    Attributes:
      parts: The parts that it updates, one per call.
      seconds: The seconds that it computes.
      reads: Whether it reads before it computes.
      fails: Whether it raises an error after its updates.
    """

    parts: tuple[int, ...]
    seconds: float
    reads: bool
    fails: bool


class Plan:
    """The work of all closures. Each has its own element in every part.

    A closure adds one to its element of a part with each update: so each part shows how often
    every closure has updated it. In synchronous training its gradient is one there, and the
    optimizer adds the mean of k gradients: each of k closures gets 1/k.

    Attributes:
      servers: The server of each part. Programs create the parts in this order.
      num_elements: The number of elements of each part.
      num_needed: The number of gradients of a step; None unless training is synchronous.
      writes: The elements of updates that coordinators make themselves.
    """

    def __init__(self, world: World, num_servers: int, num_workers: int, num_elements: int) -> None:
        self._world = world
        faults = world.faults
        self.num_needed = num_workers - faults.backup_workers if faults.is_sync else None
        self.num_elements = num_elements
        numbers = range(1, num_servers * PARTS_PER_SERVER + 1)
        self.servers = {number: (number - 1) % num_servers for number in numbers}
        self.writes: set[int] = set()
        self._names: list[str] = []
        self._works: dict[int, Work] = {}

    def new_element(self, epoch: int, *, is_write: bool = False) -> int:
        """Returns the element of a new closure, or of an update that a coordinator makes itself."""
        element = len(self._names)
        if is_write:
            self.writes.add(element)
        assert element < self.num_elements, "there are too many closures"
        self._names.append(f"closure with element {element} of epoch {epoch}")
        return element

    def name_of(self, element: int) -> str:
        """Returns the name of the closure of an element, for messages."""
        return self._names[element]

    def work_of(self, element: int) -> Work:
        """Returns the work of a closure; drawn on the first call."""
        work = self._works.get(element)
        if work is None:
            chance = self._world.random
            parts = tuple(chance.choices(list(self.servers), k=chance.randint(1, 3)))
            seconds = chance.uniform(0.01, 0.4)
            if chance.random() < 0.05:
                seconds += chance.uniform(0.5, 2.0)
            fails = chance.random() < self._world.faults.error_share
            if self.num_needed is not None:
                parts = self._with_all_servers(parts)
            work = self._works[element] = Work(parts, seconds, chance.random() < 0.5, fails)
        return work

    def _with_all_servers(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Returns parts of every server: so a step shows of how many gradients it is the mean."""
        held = {self.servers[part] for part in parts}
        first = {server: part for part, server in reversed(self.servers.items())}
        return tuple({*parts, *(part for server, part in first.items() if server not in held)})

    def touched(self, element: int) -> dict[int, int]:
        """Returns the number of updates of each part by a closure."""
        parts = self.work_of(element).parts
        return {part: parts.count(part) for part in parts}

    def changes(
        self,
        element: int,
        variables: Sequence[RemoteVariable],
        optimizer: SumOptimizer | None = None,
    ) -> list[Change]:
        """Returns the updates of a closure, one per call; or one step of an optimizer."""
        payload = np.zeros(self.num_elements, np.float32)
        payload[element] = 1.0
        parts = self.work_of(element).parts
        if optimizer is not None:
            return [optimizer.step({part: payload for part in parts})]
        found = {variable.number: variable for variable in variables}
        return [Change(found[part], "assign_add", payload) for part in parts]

    def counts(self, value: np.ndarray) -> np.ndarray:
        """Returns how often each element of a part was updated, from its value."""
        if self.num_needed is None:
            return value
        found = np.asarray(value != 0, np.float32)
        # Without a closure there is no mean.
        writes = list(self.writes)
        found[writes] = value[writes]
        return found

    def num_parts(self, server: int) -> int:
        """Returns how many parts a server has."""
        return sum(owner == server for owner in self.servers.values())

    def reads(self, server: int, held: frozenset[int]) -> list[messages.Read]:
        """Returns the reads of all parts that a server holds."""
        own = [part for part, owner in self.servers.items() if owner == server]
        return [messages.Read(part) for part in own if part in held]
