"""A simulated process: it runs, is stopped for a while, or is killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax.protocol.tasks import Task

if TYPE_CHECKING:
    from simulation.world import World


class Process:
    """One run of the program of a task.

    Attributes:
      task: Its task.
      is_up: Whether the process exists.
      is_paused: Whether it is stopped, as by SIGSTOP.
      held: The waits of its threads that have ended while it was stopped.
      on_exit: Closes what the kernel closes when it ends, however it ends; by descriptor.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.is_up = True
        self.is_paused = False
        self.held: list[Any] = []
        self.on_exit: dict[int, Callable[[], None]] = {}

    def __str__(self) -> str:
        return f"{self.task.role} {self.task.index}"

    def kill(self) -> None:
        """Ends it, as SIGKILL does: no thread of it goes on."""
        if self.is_up:
            self.is_up = self.is_paused = False
            self.held.clear()
            for close in list(self.on_exit.values()):
                close()

    def pause(self) -> None:
        """Stops it, as SIGSTOP does."""
        self.is_paused = True


class Machine:
    """Where a task runs: when its process has ended, another one can be started.

    Attributes:
      task: The task.
      process: Its last process.
    """

    def __init__(self, world: World, task: Task) -> None:
        self.world = world
        self.task = task
        self.process = Process(task)
        self.process.kill()

    def __str__(self) -> str:
        return str(self.process)

    @property
    def is_up(self) -> bool:
        """Whether a process runs."""
        return self.process.is_up

    @property
    def is_paused(self) -> bool:
        """Whether it is stopped."""
        return self.process.is_paused

    @property
    def url(self) -> str:
        """The address of its task."""
        return f"inproc://{self.task.role}-{self.task.index}"

    def main(self) -> None:
        """Runs the program of the task, in the first thread of its process."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts a process."""
        process = self.process = Process(self.task)

        def run() -> None:
            self.main()
            if process.is_up:
                self.world.note(f"{self} has exited")
                process.kill()

        self.world.spawn(process, run)

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()

    def resume(self) -> None:
        """Lets a stopped process go on."""
        self.process.is_paused = False
        self.world.resume(self.process)

    def restart_after(self, seconds: float) -> None:
        """Starts another process later, unless one runs then."""

        def restart() -> None:
            if not self.is_up:
                self.world.note(f"{self} is restarted")
                self.start()

        self.world.at(self.world.now + seconds, restart)
