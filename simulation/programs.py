"""Programs of the user: the first one starts a job, later ones resume it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, cast

import jax.numpy as jnp
from typing_extensions import override

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver.simple import SimpleClusterResolver
from replicax.coordinator import outbox
from replicax.coordinator.engine import Engine
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors, runtime
from replicax.foundation.options import VariableAggregation, VariableSynchronization
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.client.cluster import Cluster
from replicax.ps.client.initial_values import Initial
from replicax.strategies.consistency import Staleness
from replicax.strategies.parameter_server import ParameterServerExtended, ParameterServerStrategy
from replicax.variables.creators import VariableAttributes
from replicax.variables.remote import RemoteVariable
from simulation import closures
from simulation.checks import Bystander, Checks
from simulation.faults import Faults
from simulation.network import Network
from simulation.optimizer import SumOptimizer
from simulation.plan import Plan
from simulation.process import Machine, Process
from simulation.server import ServerMachine
from simulation.worker import WorkerMachine
from simulation.world import BrokenRuleError, World

# The maximum number of resumes in one history.
MAX_RESUMES = 2
# The number of closures per update of the user's own.
CLOSURES_PER_WRITE = 6
_QUEUE_LIMIT = 1_000
# The time to wait for servers that cannot be reached.
_CONNECT_S = 25.0
# The lease of the job at the servers; and a short one, which some coordinators let expire.
_LEASE_S, _SHORT_LEASE_S = 60.0, 3.0
_POLL_S = 0.05
# The errors that end a job.
FINAL = (errors.PSUnavailableError, errors.NoWorkersError, errors.FencedError)
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
    servers: Sequence[ServerMachine]
    workers: Sequence[WorkerMachine]


def most_elements(num_closures: int) -> int:
    """Returns the maximum number of closures and own updates of all programs."""
    return (1 + MAX_RESUMES) * (num_closures + num_closures // CLOSURES_PER_WRITE)


class Program(Machine):
    """One process of the user: a coordinator, and the code that schedules closures.

    Attributes:
      checks: Checks its results.
      is_killed: Whether a fault has killed it.
      has_job: Whether it has created its variables, and schedules closures.
      outcome: "done", or the name of the error that ended the job; None before.
      num_left: The number of closures that are not scheduled yet.
    """

    def __init__(self, stage: Stage, num_closures: int, *, is_first: bool) -> None:
        super().__init__(stage.world, Task("coordinator", 0))
        self.checks = stage.checks
        self.has_job = False
        self.outcome: str | None = None
        self.num_left = num_closures
        self._num_writes = num_closures // CLOSURES_PER_WRITE
        self._stage = stage
        self._is_first, self.is_killed = is_first, False
        self._late_share = 0.0
        self._strategy: ParameterServerStrategy
        self._engine: Engine | None = None
        self._variables: list[RemoteVariable] = []
        self._optimizer: SumOptimizer | None = None

    @property
    def is_working(self) -> bool:
        """Whether closures are in flight, or it resumes the job."""
        if self._engine is None:
            return not self._is_first
        return bool(self._engine._core.queue.in_flight)

    @override
    def start(self) -> None:
        if not self.is_killed:
            super().start()

    @override
    def kill(self) -> None:
        """Kills the process, also one that is not started yet."""
        self.is_killed = True
        super().kill()

    @override
    def main(self) -> None:
        world = self.world
        try:
            self._resume()
            self.has_job = True
            self._schedule_all()
            self._join()
            self.outcome = "done"
        except (*FINAL, errors.PermissionDeniedError) as error:
            if not self.has_job:
                world.note(f"the user gets {type(error).__name__}")
                world.checked(functools.partial(self._check_error, error, is_final=True))
                self.checks.lost_servers()
            self.outcome = type(error).__name__
        world.note(f"the user is done: {self.outcome}")
        # The coordinator stays, to announce the watermark, unless another one has the job.
        while self.checks is self._stage.checks:
            runtime.sleep(60.0)

    def _check_error(self, error: BaseException, *, is_final: bool) -> None:
        self.checks.require_reason(error, is_final=is_final)

    # The job.

    def _resume(self) -> None:
        """Attaches the servers, and creates all variables."""
        stage, world = self._stage, self.world
        chance, faults = world.random, world.faults
        strategy = self._strategy = make_strategy(
            stage.servers,
            stage.workers,
            consistency=_consistency_of(faults),
            backup_workers=faults.backup_workers,
            lease=_SHORT_LEASE_S if faults.lease_share else _LEASE_S,
            mirror=faults.is_mirrored,
        )
        extended = cast(ParameterServerExtended, strategy.extended)
        cluster = extended.require_cluster("The simulation")
        cluster.attach()
        if not self._is_first and not cluster.is_resumed:
            raise errors.PSIncarnationError("No server holds the job.")
        world.note(f"a program attaches the job in epoch {cluster.epoch}")
        if cluster.is_resumed:
            world.landed["job_resumed"] += 1
        initial = Initial(messages.Fill(bytes(4)), [])
        for number, server in stage.plan.servers.items():
            found = attributes(f"part {number}", stage.plan.num_elements)
            self._variables.append(extended.create_part(found, initial, server))
        if faults.is_sync:
            self._optimizer = SumOptimizer(extended, self._variables)
        self._start_engine(cluster)
        if chance.random() < 0.2:
            self._late_share = 0.2

    def _start_engine(self, cluster: Cluster) -> None:
        speculates = self.world.random.random() < 0.5
        engine = Engine(
            cast("outbox.Cluster", cluster), self._stage.timing, _QUEUE_LIMIT, speculates=speculates
        )
        cluster.follow(engine.loss_of)
        wake = engine._wake

        def observed() -> None:
            self._observe(engine)
            wake()

        engine._wake = observed
        self._engine = engine

    def _observe(self, engine: Engine) -> None:
        """Checks the state of the core after each event."""
        if engine._core.policy.server_policy.lost_server is not None:
            self.checks.lost_servers()
        unnoticed = functools.partial(self._unnoticed_losses, engine)
        self.world.checked(lambda: self.checks.check_results(unnoticed))

    def _unnoticed_losses(self, engine: Engine) -> set[int]:
        """Returns the servers that went away, before the coordinator uses them again."""
        known = engine._core.policy.servers
        return {
            server.task.index
            for server in self._stage.servers
            if not server.is_up
            or known[server.task.index].is_away
            or known[server.task.index].incarnation not in (0, server.incarnation)
        }

    # The user.

    def _schedule_all(self) -> None:
        chance, engine = self.world.random, self._engine
        assert engine is not None
        function = serialization.ship(
            functools.partial(closures.step, self._variables, self._optimizer), self._strategy
        )
        while self.num_left:
            if self._num_writes and chance.random() < 0.15:
                self._num_writes -= 1
                self._write()
                continue
            for _ in range(min(self.num_left, chance.randint(1, 8))):
                self.num_left -= 1
                self._schedule(engine, function)
            runtime.sleep(chance.uniform(0.0, 0.6))

    def _schedule(self, engine: Engine, function: serialization.Shipped) -> None:
        element = self._stage.plan.new_element(engine._cluster.epoch)
        _, buffers = serialization.pack_arguments([element], {}, self._strategy)
        # Sometimes too short, so that workers are lost for it.
        deadline_s = 1.0 if self.world.random.random() < self._late_share else None
        while True:
            try:
                closure = engine.schedule(function, [], buffers, None, deadline_s)
                break
            except Exception as error:
                self._handle(error)
        self.world.note(f"the user schedules {closure.id} for {element}")
        self.checks.scheduled(element, closure)

    def _join(self) -> None:
        assert self._engine is not None
        while True:
            try:
                return self._engine.join(None)
            except Exception as error:
                self._handle(error)

    def _handle(self, error: Exception) -> None:
        """Handles an error that `schedule` or `join` has raised: most are of one closure."""
        self.world.note(f"the user gets {type(error).__name__}")
        self.world.checked(functools.partial(self._check_error, error, is_final=True))
        if isinstance(error, FINAL):
            self.checks.lost_servers()
            raise error

    def _write(self) -> None:
        """Updates variables outside of closures."""
        plan, engine = self._stage.plan, self._engine
        assert engine is not None
        element = plan.new_element(engine._cluster.epoch, is_write=True)
        self.world.note(f"the user writes {element}")
        self.checks.writes(element)
        failure: errors.DistributeError | None = None
        try:
            self._variables[0].client.push(plan.changes(element, self._variables))
        except errors.DistributeError as error:
            failure = error
        is_acknowledged = failure is None
        self.world.checked(lambda: self.checks.wrote(element, is_acknowledged=is_acknowledged))
        if failure is not None:
            self.world.checked(functools.partial(self._check_error, failure, is_final=False))


def attributes(name: str, size: int) -> VariableAttributes:
    """Returns the attributes of a variable."""
    return VariableAttributes(
        name=name,
        shape=(size,),
        dtype=jnp.dtype("float32"),
        trainable=False,
        synchronization=VariableSynchronization.AUTO,
        aggregation=VariableAggregation.SUM,
    )


def _consistency_of(faults: Faults) -> Literal["async", "sync"] | Staleness:
    if faults.staleness_share:
        return Staleness(faults.staleness)
    return "sync" if faults.is_sync else "async"


def make_strategy(
    servers: Sequence[Machine],
    workers: Sequence[Machine],
    *,
    consistency: Literal["async", "sync"] | Staleness = "async",
    backup_workers: int = 0,
    lease: float = _LEASE_S,
    mirror: bool = False,
) -> ParameterServerStrategy:
    """Returns a strategy on simulated machines."""
    urls = {"ps": [m.url for m in servers], "worker": [m.url for m in workers]}
    return ParameterServerStrategy(
        SimpleClusterResolver(ClusterSpec(urls)),
        consistency=consistency,
        backup_workers=backup_workers,
        connect_timeout=_CONNECT_S,
        job="simulated",
        lease=lease,
        mirror=mirror,
    )


class Programs:
    """All programs of a history, of which several may run at a time.

    Attributes:
      current: The newest.
      replaced: The earlier ones.
    """

    def __init__(self, stage: Stage, num_closures: int) -> None:
        self._stage = stage
        self.current = Program(stage, num_closures, is_first=True)
        self.replaced: list[Program] = []
        stage.network.on_message = self._observe
        self.current.start()

    def _observe(self, sender: Process, receiver: Process, envelope: messages.Envelope) -> None:
        body = envelope.body
        if sender is self.current.process and isinstance(body, messages.Ping):
            self._stage.world.checked(lambda: self._stage.checks.pinged(body.settled))

    @property
    def can_be_replaced(self) -> bool:
        """Whether another program may be started."""
        return len(self.replaced) < MAX_RESUMES

    def replace(self, delay_s: float) -> None:
        """Starts another program, which resumes the job after a delay."""
        former = self.current
        former.checks = Bystander()
        self._stage.checks.replaced()
        self.replaced.append(former)
        # At least one closure, as a check.
        program = self.current = Program(self._stage, max(1, former.num_left), is_first=False)
        self._stage.world.at(self._stage.world.now + delay_s, program.start)

    def require_end(self) -> None:
        """Checks that the replaced programs were fenced, and no other."""
        if self.current.outcome in ("FencedError", "PermissionDeniedError"):
            raise BrokenRuleError("the newest program was fenced")
        may_lose = self._stage.checks.may_lose_servers
        for program in self.replaced:
            is_lost = may_lose and program.outcome in _LOST
            if not program.is_killed and program.outcome not in _GOOD_ENDS and not is_lost:
                raise BrokenRuleError(
                    f"the outcome of a replaced program is {program.outcome}, not one of "
                    f"{', '.join(_GOOD_ENDS)}"
                )
