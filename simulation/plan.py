"""The work of a simulated job: what its closures and its user change, and for how long they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from replicax.contexts.overlay import Change
from replicax.protocol import messages
from replicax.variables.remote import RemoteVariable
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
    every closure has updated it.

    Attributes:
      servers: The server of each part. Programs create the parts in this order.
      num_elements: The number of elements of each part.
      writes: The elements of updates that coordinators make themselves.
    """

    def __init__(self, world: World, num_servers: int, num_elements: int) -> None:
        self._world = world
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
            work = self._works[element] = Work(parts, seconds, chance.random() < 0.5, fails)
        return work

    def touched(self, element: int) -> dict[int, int]:
        """Returns the number of updates of each part by a closure."""
        parts = self.work_of(element).parts
        return {part: parts.count(part) for part in parts}

    def changes(self, element: int, variables: Sequence[RemoteVariable]) -> list[Change]:
        """Returns the updates of a closure, one per call."""
        payload = np.zeros(self.num_elements, np.float32)
        payload[element] = 1.0
        found = {variable.number: variable for variable in variables}
        return [Change(found[p], "assign_add", payload) for p in self.work_of(element).parts]

    def num_parts(self, server: int) -> int:
        """Returns how many parts a server has."""
        return sum(owner == server for owner in self.servers.values())

    def reads(self, server: int, held: frozenset[int]) -> list[messages.Read]:
        """Returns the reads of all parts that a server holds."""
        own = [part for part, owner in self.servers.items() if owner == server]
        return [messages.Read(part) for part in own if part in held]
