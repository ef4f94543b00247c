"""The closures of a simulated job: the parts that they update, and their durations."""

from __future__ import annotations

import dataclasses

import numpy as np

from replicax.protocol import messages
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
    every closure has updated it. A later coordinator may use a closure id again; an element
    belongs to a closure of one coordinator.

    Attributes:
      servers: The server of each part.
    """

    def __init__(self, world: World, num_servers: int, num_elements: int) -> None:
        self._world = world
        self._num_elements = num_elements
        self._elements: dict[tuple[int, int], int] = {}
        self.servers = {p: p % num_servers for p in range(num_servers * PARTS_PER_SERVER)}
        self._works: dict[int, Work] = {}

    def element_of(self, epoch: int, closure: int) -> int:
        """Returns the element of a closure, or of an update that a coordinator makes itself."""
        element = self._elements.setdefault((epoch, closure), len(self._elements))
        assert element < self._num_elements, "there are too many closures"
        return element

    def name_of(self, element: int) -> str:
        """Returns the name of the closure of an element, for messages."""
        epoch, closure = list(self._elements)[element]
        return f"closure {closure} of epoch {epoch}"

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

    def changes(self, element: int) -> list[tuple[int, messages.Update, np.ndarray]]:
        """Returns the updates of a closure: for each the server, the update and its payload."""
        found = []
        for call, part in enumerate(self.work_of(element).parts):
            payload = np.zeros(self._num_elements, np.float32)
            payload[element] = 1.0
            found.append((self.servers[part], messages.Update(call, "assign_add", part), payload))
        return found

    def reads(self, server: int) -> list[messages.Read]:
        """Returns the reads of all parts of a server."""
        return [messages.Read(part) for part, owner in self.servers.items() if owner == server]

    def creations(self, server: int) -> list[messages.CreatePart]:
        """Returns the requests that create the parts of a server."""
        shape = (self._num_elements,)
        return [
            messages.CreatePart(part, f"part {part}", shape, "float32", messages.Fill(bytes(4)))
            for part, owner in self.servers.items()
            if owner == server
        ]
