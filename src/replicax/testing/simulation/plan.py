"""What the closures of a simulated job do: which parts they change, and how long they take."""

from __future__ import annotations

import dataclasses

import numpy as np

from replicax.testing.simulation.world import World
from replicax.transport import messages

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
    so each part shows which closures have changed it how often.

    Attributes:
      servers: The server of each part.
    """

    def __init__(self, world: World, num_servers: int, num_numbers: int) -> None:
        self._world = world
        self._num_numbers = num_numbers
        self.servers = {p: p % num_servers for p in range(num_servers * PARTS_PER_SERVER)}
        self._works: dict[int, Work] = {}

    def work_of(self, closure: int) -> Work:
        """Returns what a closure does; decided when it is asked for first."""
        work = self._works.get(closure)
        if work is None:
            chance = self._world.random
            parts = tuple(chance.choices(list(self.servers), k=chance.randint(1, 3)))
            seconds = chance.uniform(0.01, 0.4)
            if chance.random() < 0.05:
                seconds += chance.uniform(0.5, 2.0)
            fails = chance.random() < self._world.faults.error_share
            work = self._works[closure] = Work(parts, seconds, chance.random() < 0.5, fails)
        return work

    def touched(self, closure: int) -> dict[int, int]:
        """Returns how often a closure changes which part."""
        parts = self.work_of(closure).parts
        return {part: parts.count(part) for part in parts}

    def changes(self, closure: int) -> list[tuple[int, messages.Update, np.ndarray]]:
        """Returns the changes of a closure: for each the server, the change and its payload."""
        found = []
        for call, part in enumerate(self.work_of(closure).parts):
            payload = np.zeros(self._num_numbers, np.float32)
            payload[closure] = 1.0
            found.append((self.servers[part], messages.Update(call, "assign_add", part), payload))
        return found

    def reads(self, server: int) -> list[messages.Read]:
        """Returns the question for all parts of a server."""
        return [messages.Read(part) for part, place in self.servers.items() if place == server]

    def creations(self, server: int) -> list[messages.CreatePart]:
        """Returns the orders that make the parts of a server."""
        shape = (self._num_numbers,)
        return [
            messages.CreatePart(part, f"part {part}", shape, "float32", messages.Fill(bytes(4)))
            for part, place in self.servers.items()
            if place == server
        ]
