"""Programs of the user: the first begins a job, those after it take the job over."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

from replicax.coordinator.scheduling.timing import Timing
from replicax.foundation import errors
from replicax.protocol import error_replies, limits, messages
from replicax.ps.client.cluster import ResumedJob
from simulation.channel import Channel
from simulation.checks import BrokenRuleError, Bystander, Checks
from simulation.coordinator import SimulatedCoordinator
from simulation.network import Network
from simulation.plan import Plan
from simulation.process import Steps
from simulation.server import SimulatedServer
from simulation.user import CLOSURES_PER_WRITE, User
from simulation.worker import SimulatedWorker
from simulation.world import World

# So many take a job over in one history.
MOST_TAKEOVERS = 2
# The next one waits so long for servers that it cannot reach.
_CONNECT_S = 25.0
_LOOK_S = 0.01
_RETRY_S = 0.05
# How a program may end that was replaced: it learns of it, or had all results before.
_GOOD_ENDS = ("FencedError", "done")
_LOST = ("PSUnavailableError", "PSIncarnationError")


@dataclasses.dataclass(frozen=True)
class Stage:
    """What all programs of a history share."""

    world: World
    network: Network
    plan: Plan
    checks: Checks
    timing: Timing
    servers: Sequence[SimulatedServer]
    workers: Sequence[SimulatedWorker]


def most_elements(num_closures: int) -> int:
    """Returns how many closures and changes of their own all programs can have together."""
    return (1 + MOST_TAKEOVERS) * (num_closures + num_closures // CLOSURES_PER_WRITE)


class Program:
    """One process of the user: a coordinator, and who schedules closures with it.

    Attributes:
      coordinator: The process.
      user: Who uses it; None until it has the job.
    """

    def __init__(self, stage: Stage, num_closures: int) -> None:
        self._stage = stage
        self.coordinator = SimulatedCoordinator(
            stage.world,
            stage.network,
            stage.servers,
            stage.workers,
            stage.timing,
            stage.plan,
            stage.checks,
        )
        self.user: User | None = None
        self._num_closures = num_closures
        self._failure: str | None = None
        self._steps = self._resume()

    @property
    def outcome(self) -> str | None:
        """How it ended; None while it has not."""
        return self._failure if self.user is None else self.user.outcome

    @property
    def is_working(self) -> bool:
        """Whether closures are on their way or run, or it takes the job over."""
        return self.user is None or self.coordinator.is_working

    @property
    def num_left(self) -> int:
        """How many closures it has not scheduled."""
        return self._num_closures if self.user is None else self.user.num_left

    def begin(self) -> None:
        """Begins the job, on servers that are prepared for it."""
        cluster = self.coordinator.cluster
        for server in self._stage.servers:
            attach = messages.Attach([], dict(cluster.settings))
            server.prepare(attach, cluster.incarnation, cluster.job, cluster.epoch)
        self._go_on()

    def resume(self, delay_s: float) -> None:
        """Goes on with a job that another program has left, after a while."""
        self.coordinator.later(delay_s, self._step, "compute")

    def _step(self) -> None:
        for seconds in self._steps:
            self.coordinator.later(seconds, self._step, "compute")
            return

    def _go_on(self) -> None:
        stage = self._stage
        self.coordinator.begin()
        self.user = User(self.coordinator, stage.servers, stage.plan, self._num_closures)

    def _resume(self) -> Steps:
        """What `ps/client/cluster.py` does: looks, attaches, and makes all parts."""
        world, cluster = self._stage.world, self.coordinator.cluster
        world.note("a program looks for the job")
        try:
            found: list[messages.Body] = []
            for server in self._stage.servers:
                found.append((yield from self._ask(server, messages.QueryJob())))
            plan = ResumedJob.find(cluster.job, found)
            if plan is None:
                raise errors.PSIncarnationError("No server holds the job.")
            cluster.resume(plan)
            world.note(f"a program resumes the job in epoch {cluster.epoch}")
            for server in self._stage.servers:
                attach = messages.Attach([], dict(cluster.settings), [])
                yield from self._ask(server, attach)
            for server in self._stage.servers:
                yield from self._make_parts(server)
        except errors.DistributeError as error:
            self._failure = type(error).__name__
            world.note(f"the user gets {self._failure}")
            self.coordinator.checks.require_reason(error, is_final=True)
            self.coordinator.checks.lost_servers()
            return
        self._go_on()

    def _make_parts(self, server: SimulatedServer) -> Steps:
        cluster, made = self.coordinator.cluster, list[int]()
        for creation in self._stage.plan.creations(server.task.index):
            while True:
                try:
                    yield from self._ask(server, creation)
                    break
                except errors.PSUnavailableError:
                    if not cluster.is_saved(server.task.index):
                        raise
                    # It came back since it was attached.
                    yield from self._ask(server, messages.Attach([], dict(cluster.settings), made))
            made.append(creation.part)

    def _ask(
        self, server: SimulatedServer, body: messages.Body
    ) -> Generator[float, None, messages.Body]:
        """Asks a server that may be away, or come back meanwhile."""
        coordinator, cluster = self.coordinator, self.coordinator.cluster
        world, deadline_s = self._stage.world, self._stage.world.now + _CONNECT_S
        while True:
            answers: list[messages.Body | Exception] = []
            job = cluster.job, cluster.epoch
            channel = Channel(
                self._stage.network,
                coordinator,
                server,
                cluster.incarnation,
                job,
                limits.DEADLINE,
            )
            channel.on_answer = lambda _, answer, __, found=answers: found.append(answer)
            channel.on_lost = answers.append
            channel.send(body)
            while not answers:
                if world.now > deadline_s:
                    channel.close()
                    raise errors.PSUnavailableError(f"{server.task} could not be reached.")
                yield _LOOK_S
            channel.close()
            answer = answers[0]
            if isinstance(answer, messages.ErrorReply):
                raise error_replies.to_error(answer)
            if not isinstance(answer, Exception):
                return answer
            yield _RETRY_S


class Programs:
    """All programs of a history, one after the other, or one beside the other.

    Attributes:
      current: The newest.
      replaced: Those before it, of which some may still run.
    """

    def __init__(self, stage: Stage, num_closures: int) -> None:
        self._stage = stage
        self.current = Program(stage, num_closures)
        self.replaced: list[Program] = []
        self.current.begin()

    @property
    def can_be_replaced(self) -> bool:
        """Whether there may be one more."""
        return len(self.replaced) < MOST_TAKEOVERS

    def replace(self, delay_s: float) -> None:
        """Starts another program, which has the job from a while on."""
        former = self.current
        former.coordinator.checks = Bystander()
        self._stage.checks.replaced()
        self.replaced.append(former)
        # At least one closure, to see that it can.
        self.current = Program(self._stage, max(1, former.num_left))
        self.current.resume(delay_s)

    def require_end(self) -> None:
        """Requires that those that were replaced have learnt it, and nobody else."""
        if self.current.outcome in ("FencedError", "PermissionDeniedError"):
            raise BrokenRuleError("the newest program was taken for one that was replaced")
        may_lose = self._stage.checks.may_lose_servers
        for program in self.replaced:
            is_lost = may_lose and program.outcome in _LOST
            if program.coordinator.is_up and program.outcome not in _GOOD_ENDS and not is_lost:
                raise BrokenRuleError(
                    f"the end of a program that was replaced is {program.outcome}, not one of "
                    f"{', '.join(_GOOD_ENDS)}"
                )
