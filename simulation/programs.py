"""Programs of the user: the first one starts a job, later ones resume it."""

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

# The maximum number of resumes in one history.
MAX_RESUMES = 2
# The time to wait for servers that cannot be reached.
_CONNECT_S = 25.0
_POLL_S = 0.01
_RETRY_S = 0.05
# The outcomes of a replaced program: it is fenced, or had all results before.
_GOOD_ENDS = ("FencedError", "done")
_LOST = ("PSUnavailableError", "PSIncarnationError")


@dataclasses.dataclass(frozen=True)
class Stage:
    """The objects that all programs of a history share."""

    world: World
    network: Network
    plan: Plan
    checks: Checks
    timing: Timing
    servers: Sequence[SimulatedServer]
    workers: Sequence[SimulatedWorker]


def most_elements(num_closures: int) -> int:
    """Returns the maximum number of closures and own updates of all programs."""
    return (1 + MAX_RESUMES) * (num_closures + num_closures // CLOSURES_PER_WRITE)


class Program:
    """One process of the user: a coordinator, and the code that schedules closures.

    Attributes:
      coordinator: The process.
      user: Schedules closures; None until the program has the job.
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
        """The outcome; None while it runs."""
        return self._failure if self.user is None else self.user.outcome

    @property
    def is_working(self) -> bool:
        """Whether closures are in flight, or it resumes the job."""
        return self.user is None or self.coordinator.is_working

    @property
    def num_left(self) -> int:
        """The number of closures that are not scheduled yet."""
        return self._num_closures if self.user is None else self.user.num_left

    def begin(self) -> None:
        """Starts the job, on prepared servers."""
        cluster = self.coordinator.cluster
        for server in self._stage.servers:
            attach = messages.Attach([], dict(cluster.settings))
            server.prepare(attach, cluster.incarnation, cluster.job, cluster.epoch)
        self._start_user()

    def resume(self, delay_s: float) -> None:
        """Goes on with a job that another program has left, after a while."""
        self.coordinator.later(delay_s, self._step, "compute")

    def _step(self) -> None:
        for seconds in self._steps:
            self.coordinator.later(seconds, self._step, "compute")
            return

    def _start_user(self) -> None:
        stage = self._stage
        self.coordinator.begin()
        self.user = User(self.coordinator, stage.servers, stage.plan, self._num_closures)

    def _resume(self) -> Steps:
        """Inspects and attaches the servers, and creates all parts, like `ps/client/cluster.py`."""
        world, cluster = self._stage.world, self.coordinator.cluster
        world.note("a program inspects the job")
        try:
            found: list[messages.Body] = []
            for server in self._stage.servers:
                found.append((yield from self._request(server, messages.QueryJob())))
            plan = ResumedJob.find(cluster.job, found)
            if plan is None:
                raise errors.PSIncarnationError("No server holds the job.")
            cluster.resume(plan)
            world.note(f"a program resumes the job in epoch {cluster.epoch}")
            for server in self._stage.servers:
                attach = messages.Attach([], dict(cluster.settings), [])
                yield from self._request(server, attach)
            for server in self._stage.servers:
                yield from self._create_parts(server)
        except errors.DistributeError as error:
            self._failure = type(error).__name__
            world.note(f"the user gets {self._failure}")
            self.coordinator.checks.require_reason(error, is_final=True)
            self.coordinator.checks.lost_servers()
            return
        self._start_user()

    def _create_parts(self, server: SimulatedServer) -> Steps:
        cluster, made = self.coordinator.cluster, list[int]()
        for creation in self._stage.plan.creations(server.task.index):
            while True:
                try:
                    yield from self._request(server, creation)
                    break
                except errors.PSUnavailableError:
                    if not cluster.is_saved(server.task.index):
                        raise
                    # It was restarted since it was attached.
                    yield from self._request(
                        server, messages.Attach([], dict(cluster.settings), made)
                    )
            made.append(creation.part)

    def _request(
        self, server: SimulatedServer, body: messages.Body
    ) -> Generator[float, None, messages.Body]:
        """Sends a request to a server that may be away for a while."""
        coordinator, cluster = self.coordinator, self.coordinator.cluster
        world, deadline_s = self._stage.world, self._stage.world.now + _CONNECT_S
        while True:
            replies: list[messages.Body | Exception] = []
            job = cluster.job, cluster.epoch
            channel = Channel(
                self._stage.network,
                coordinator,
                server,
                cluster.incarnation,
                job,
                limits.DEADLINE,
            )
            channel.on_reply = lambda _, reply, __, found=replies: found.append(reply)
            channel.on_lost = replies.append
            channel.send(body)
            while not replies:
                if world.now > deadline_s:
                    channel.close()
                    raise errors.PSUnavailableError(f"{server.task} could not be reached.")
                yield _POLL_S
            channel.close()
            reply = replies[0]
            if isinstance(reply, messages.ErrorReply):
                raise error_replies.to_error(reply)
            if not isinstance(reply, Exception):
                return reply
            yield _RETRY_S


class Programs:
    """All programs of a history, of which several may run at a time.

    Attributes:
      current: The newest.
      replaced: The earlier ones.
    """

    def __init__(self, stage: Stage, num_closures: int) -> None:
        self._stage = stage
        self.current = Program(stage, num_closures)
        self.replaced: list[Program] = []
        self.current.begin()

    @property
    def can_be_replaced(self) -> bool:
        """Whether another program may be started."""
        return len(self.replaced) < MAX_RESUMES

    def replace(self, delay_s: float) -> None:
        """Starts another program, which resumes the job after a delay."""
        former = self.current
        former.coordinator.checks = Bystander()
        self._stage.checks.replaced()
        self.replaced.append(former)
        # At least one closure, as a check.
        self.current = Program(self._stage, max(1, former.num_left))
        self.current.resume(delay_s)

    def require_end(self) -> None:
        """Checks that the replaced programs were fenced, and no other."""
        if self.current.outcome in ("FencedError", "PermissionDeniedError"):
            raise BrokenRuleError("the newest program was fenced")
        may_lose = self._stage.checks.may_lose_servers
        for program in self.replaced:
            is_lost = may_lose and program.outcome in _LOST
            if program.coordinator.is_up and program.outcome not in _GOOD_ENDS and not is_lost:
                raise BrokenRuleError(
                    f"the outcome of a replaced program is {program.outcome}, not one of "
                    f"{', '.join(_GOOD_ENDS)}"
                )
