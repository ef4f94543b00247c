"""What the closures of a simulated job do: which parts they change, and how long they take."""

from __future__ import annotations

import dataclasses

import numpy as np

from replicax.protocol import messages
from simulation.world import World

PARTS_PER_SERVER = 2


@dataclasses.dataclass(frozen=True)
class Work:
    """What one closure does, whoever runs it.

    Attributes:
      parts: What it changes: its first call the first of them, and so on.
      seconds: How long it computes.
      reads: Whether it reads before it computes.
      fails: Whether it raises an error after its changes.
    """

    parts: tuple[int, ...]
    seconds: float
    reads: bool
    fails: bool


class Plan:
    """The work of all closures. Each has an element of its own in every part.

    A closure adds one to its element of each part that it changes, as often as it changes it:
    so each part shows which closures have changed it how often. Coordinators that follow each
    other may use a number again; an element belongs to a closure of one of them.

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
        """Returns the element of a closure, or of a change that a coordinator makes itself."""
        element = self._elements.setdefault((epoch, closure), len(self._elements))
        assert element < self._num_elements, "there are too many closures"
        return element

    def name_of(self, element: int) -> str:
        """Returns how people call the closure of an element."""
        epoch, closure = list(self._elements)[element]
        return f"closure {closure} of epoch {epoch}"

    def work_of(self, element: int) -> Work:
        """Returns what a closure does; decided when it is asked for first."""
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
        """Returns how often a closure changes which part."""
        parts = self.work_of(element).parts
        return {part: parts.count(part) for part in parts}

    def changes(self, element: int) -> list[tuple[int, messages.Update, np.ndarray]]:
        """Returns the changes of a closure: for each the server, the change and its payload."""
        found = []
        for call, part in enumerate(self.work_of(element).parts):
            payload = np.zeros(self._num_elements, np.float32)
            payload[element] = 1.0
            found.append((self.servers[part], messages.Update(call, "assign_add", part), payload))
        return found

    def reads(self, server: int) -> list[messages.Read]:
        """Returns the question for all parts of a server."""
        return [messages.Read(part) for part, place in self.servers.items() if place == server]

    def creations(self, server: int) -> list[messages.CreatePart]:
        """Returns the orders that make the parts of a server."""
        shape = (self._num_elements,)
        return [
            messages.CreatePart(part, f"part {part}", shape, "float32", messages.Fill(bytes(4)))
            for part, place in self.servers.items()
            if place == server
        ]
