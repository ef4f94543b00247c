"""A process in a simulation: it runs, is stopped for a while, or ends and begins anew."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from replicax.protocol.tasks import Task
from simulation.world import Action, World

ThreadName = Literal["socket", "compute"]
# What a thread waits for: some seconds.
Steps = Generator[float, None, None]


class Process:
    """One task.

    Attributes:
      world: Where it runs.
      task: Which task it is.
      is_up: Whether there is a process.
      is_paused: Whether it is stopped: it does nothing, and then everything.
      num_pauses: How often it was.
    """

    def __init__(self, world: World, task: Task) -> None:
        self.world = world
        self.task = task
        self.is_up = True
        self.is_paused = False
        self.num_pauses = 0
        # Which of its processes this is: what an earlier one had planned does not happen.
        self._generation = 0
        self._held: dict[ThreadName, list[Action]] = {"socket": [], "compute": []}

    def __str__(self) -> str:
        return f"{self.task.role} {self.task.index}"

    def run(self, action: Action, thread: ThreadName = "socket") -> None:
        """Does something now, or as soon as the process runs again; never if it has ended."""
        if not self.is_up:
            return
        if self.is_paused:
            self._held[thread].append(action)
        else:
            action()

    def later(self, delay: float, action: Action, thread: ThreadName = "socket") -> None:
        """Does something after a while, if it is still the same process."""
        generation = self._generation

        def due() -> None:
            if self._generation == generation:
                self.run(action, thread)

        self.world.at(self.world.now + delay, due)

    def pause(self) -> None:
        """Stops it, as SIGSTOP does."""
        self.is_paused = True
        self.num_pauses += 1

    def resume(self) -> None:
        """Lets it go on: its threads catch up, in any order between them."""
        self.is_paused = False
        while self.is_up and any(self._held.values()):
            ready: list[ThreadName] = [name for name, held in self._held.items() if held]
            action = self._held[self.world.random.choice(ready)].pop(0)
            action()

    def crash(self) -> None:
        """Ends it, as SIGKILL does."""
        self.is_up = self.is_paused = False
        self._generation += 1
        for held in self._held.values():
            held.clear()

    def start(self) -> None:
        """Begins a new process in its place."""
        self.is_up = True
