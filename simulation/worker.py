"""A simulated machine with a worker."""

from __future__ import annotations

from typing_extensions import override

from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.transport.addresses import Location
from replicax.worker.session import ParameterServerSession
from replicax.worker.worker import WorkerTask
from simulation.process import Machine
from simulation.world import World

# How long a task that ends itself may finish its closure, and then is away.
_ENDING_S = (0.005, 0.5)
_AWAY_S = (0.1, 1.0)


class WorkerMachine(Machine):
    """Runs a worker; one that ends itself is started again."""

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, Task("worker", index))
        self.start()

    @override
    def main(self) -> None:
        process, world, index = self.process, self.world, self.task.index

        def end() -> None:
            if process.is_up:
                process.kill()
                self.restart_after(world.random.uniform(*_AWAY_S))

        def on_ending(why: str) -> None:
            world.note(f"{self} ends itself: {why}")
            world.at(world.now + world.random.uniform(*_ENDING_S), end)

        def make_session(
            attach: messages.Attach, job: str, epoch: int, incarnation: int
        ) -> ParameterServerSession:
            return ParameterServerSession(attach, job, epoch, incarnation, index)

        location = Location("inproc", self.url, self.url)
        task = WorkerTask(index, location, make_session, on_ending=on_ending)
        task.start()
        try:
            task.run_forever()
        finally:
            _forget(task)
        task.close()
        end()


def _forget(task: WorkerTask) -> None:
    """Takes back what a killed process has changed in this one: its scope, and its log handler."""
    runner = task._runner
    if runner is not None:
        runner._context.run(runner._stack.close)
        runner._warnings.close()
