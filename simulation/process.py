"""A simulated process: it runs, is stopped for a while, or crashes and is restarted."""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

from replicax.protocol.tasks import Task
from simulation.world import Action, World

ThreadName = Literal["socket", "compute"]
# A simulated thread; it yields the seconds to wait.
Steps = Generator[float, None, None]


class Process:
    """One task.

    Attributes:
      world: The simulated world.
      task: Its task.
      is_up: Whether the process exists.
      is_paused: Whether it is stopped, as by SIGSTOP.
      num_pauses: The number of times it was stopped.
    """

    def __init__(self, world: World, task: Task) -> None:
        self.world = world
        self.task = task
        self.is_up = True
        self.is_paused = False
        self.num_pauses = 0
        # Counts crashes: planned actions of earlier processes are dropped.
        self._generation = 0
        self._held: dict[ThreadName, list[Action]] = {"socket": [], "compute": []}

    def __str__(self) -> str:
        return f"{self.task.role} {self.task.index}"

    def run(self, action: Action, thread: ThreadName = "socket") -> None:
        """Runs an action now, or when the process is resumed; never after a crash."""
        if not self.is_up:
            return
        if self.is_paused:
            self._held[thread].append(action)
        else:
            action()

    def later(self, delay: float, action: Action, thread: ThreadName = "socket") -> None:
        """Runs an action after a delay, if it is still the same process."""
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
        """Resumes it: its threads run their delayed actions, in a random order between them."""
        self.is_paused = False
        while self.is_up and any(self._held.values()):
            ready: list[ThreadName] = [name for name, held in self._held.items() if held]
            action = self._held[self.world.random.choice(ready)].pop(0)
            action()

    def crash(self) -> None:
        """Kills it, as SIGKILL does."""
        self.is_up = self.is_paused = False
        self._generation += 1
        for held in self._held.values():
            held.clear()

    def start(self) -> None:
        """Starts a new process in its place."""
        self.is_up = True
