"""Simulates one history from a seed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from replicax.coordinator.scheduling.timing import Timing
from simulation import threads
from simulation.checks import Checks
from simulation.closures import staged
from simulation.faults import Faults
from simulation.incidents import Incidents
from simulation.network import Network
from simulation.plan import Plan
from simulation.programs import Programs, Stage, most_elements
from simulation.server import ServerMachine
from simulation.worker import WorkerMachine
from simulation.world import BrokenRuleError, World, written

# A history that takes more virtual seconds hangs. All timeouts of `Timing.fast` and the longest
# faults together are far below.
_LONGEST_S = 120.0
# After that all messages have arrived, and heartbeats have announced the watermark.
_AFTERMATH_S = 4.0
_LEAST_EVENTS = 200
_LAST_LINES = 40


class SimulationError(AssertionError):
    """A history violates an invariant. The text has the invariant, the trace and the command.

    Attributes:
      seed: The seed of the history.
      rule: The violated invariant.
      trace: All events, line by line.
    """

    def __init__(self, seed: int, rule: str, trace: list[str]) -> None:
        lines = "\n".join(trace[-_LAST_LINES:])
        super().__init__(
            f"Seed {seed}: {rule}.\nThe last of {len(trace)} lines:\n{lines}\n"
            f"Replay: python -m simulation --seed {seed} --trace"
        )
        self.seed, self.rule, self.trace = seed, rule, trace


@dataclasses.dataclass(frozen=True)
class History:
    """The result of a simulation.

    Attributes:
      seed: Its seed.
      outcome: "done", or the name of the error that ended the job.
      num_events: The number of messages, steps of work, faults and calls of the user.
      landed: The number of faults of each kind that have hit running work, and of recoveries.
      events: All events, with their times.
      seconds: Its duration in virtual time.
    """

    seed: int
    outcome: str
    num_events: int
    landed: dict[str, int]
    events: Sequence[tuple[float, object]] = dataclasses.field(repr=False, compare=False)
    seconds: float

    @property
    def trace(self) -> list[str]:
        """All events, line by line."""
        return written(self.events)


def simulate(
    seed: int,
    *,
    num_workers: int = 3,
    num_servers: int = 2,
    num_closures: int = 30,
    faults: Faults | None = None,
) -> History:
    """Simulates a job with faults on a cluster, in one thread.

    The core of the coordinator, the stores of the parameter servers and their snapshots are real;
    the network, the clock, the workers, power cuts and unauthenticated peers are simulated. The
    same seed gives the same history.

    Args:
      seed: The seed.
      num_workers: The number of workers.
      num_servers: The number of parameter servers.
      num_closures: The number of closures that the user schedules.
      faults: The faults that may happen; all kinds, if None.

    Raises:
      SimulationError: An update was lost or applied twice, the job hangs, or another invariant
        was violated.

    Example:
      >>> history = simulate(7)
      >>> history.num_events > 200 and history.trace == simulate(7).trace
      True
      >>> simulate(7, faults=Faults.none()).outcome
      'done'
    """
    world = World(seed, Faults() if faults is None else faults)
    with quiet():
        try:
            outcome = _run(world, num_workers, num_servers, num_closures)
        except (BrokenRuleError, AssertionError) as error:
            raise SimulationError(seed, str(error) or repr(error), world.trace) from error
        except Exception as error:
            raise SimulationError(seed, f"there was {error!r}", world.trace) from error
    return History(seed, outcome, world.num_events, dict(world.landed), world.events, world.now)


def _run(world: World, num_workers: int, num_servers: int, num_closures: int) -> str:
    timing = Timing.fast()
    network = Network(world)
    plan = Plan(world, num_servers, num_workers, most_elements(num_closures))
    checks = Checks(world, plan, timing.return_s)
    with contextlib.ExitStack() as stack:
        stack.enter_context(threads.installed(world, network))
        stack.enter_context(staged(world, plan, checks))
        made = (ServerMachine(world, i, plan, checks) for i in range(num_servers))
        servers = [stack.enter_context(contextlib.closing(server)) for server in made]
        workers = [WorkerMachine(world, i) for i in range(num_workers)]
        stage = Stage(world, network, plan, checks, timing, servers, workers)
        stack.callback(world.end)
        return _run_events(stage, Programs(stage, num_closures))


def _run_events(stage: Stage, programs: Programs) -> str:
    world, servers = stage.world, stage.servers
    incidents = Incidents(world, stage.network, stage.checks, programs, servers, stage.workers)
    if not world.run_until(lambda: programs.current.outcome is not None, _LONGEST_S):
        raise BrokenRuleError(f"after {_LONGEST_S:g} s the user still waits")
    outcome = programs.current.outcome
    assert outcome is not None
    world.faults = world.faults.quiet()
    incidents.end()
    world.run_until(lambda: False, _AFTERMATH_S)
    # Also a job that ends at once goes on for a while.
    world.run_until(lambda: world.num_events >= _LEAST_EVENTS, _LONGEST_S)
    up = [server for server in servers if server.is_up]
    stage.checks.ended(
        {server.task.index: server.num_applied_entries for server in up},
        {server.task.index: server.waiting for server in up if outcome == "done"},
    )
    programs.require_end()
    return outcome


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses log messages about simulated faults."""
    logger = logging.getLogger("replicax")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
