"""One history, from its seed to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

from replicax.coordinator.scheduling.timing import Timing
from simulation.checks import BrokenRuleError, Checks
from simulation.faults import Faults
from simulation.incidents import Incidents
from simulation.network import Network
from simulation.plan import Plan
from simulation.programs import Programs, Stage, most_elements
from simulation.server import SimulatedServer
from simulation.worker import SimulatedWorker
from simulation.world import World

# A history that takes longer, in virtual seconds, hangs. All bounds of `Timing.fast` and the
# longest faults together are far below.
_LONGEST_S = 120.0
# After that everything that was on the way has arrived, and beats have told what is settled.
_AFTERMATH_S = 6.0
_LAST_LINES = 40


class SimulationError(AssertionError):
    """A history in which a rule was broken. Its text says which, how, and how to see it again.

    Attributes:
      seed: The seed of the history.
      rule: What was broken.
    """

    def __init__(self, seed: int, rule: str, trace: list[str]) -> None:
        lines = "\n".join(trace[-_LAST_LINES:])
        super().__init__(
            f"Seed {seed}: {rule}.\nThe last of {len(trace)} lines:\n{lines}\n"
            f"Replay: python -m simulation --seed {seed} --trace"
        )
        self.seed, self.rule = seed, rule


@dataclasses.dataclass(frozen=True)
class History:
    """What happened.

    Attributes:
      seed: Where it comes from.
      outcome: "done", or the name of the error that ended the job.
      num_events: How many messages, steps of work, faults and calls of the user there were.
      landed: How many faults of each kind have hit work that was under way.
      trace: Everything, line by line.
      seconds: How long it took, in virtual time.
    """

    seed: int
    outcome: str
    num_events: int
    landed: dict[str, int]
    trace: list[str] = dataclasses.field(repr=False)
    seconds: float


def simulate(
    seed: int,
    *,
    num_workers: int = 3,
    num_servers: int = 2,
    num_closures: int = 30,
    faults: Faults | None = None,
) -> History:
    """Plays a job on a cluster in one thread, with everything that goes wrong in it.

    The coordinator's decisions, the parameter servers and their snapshots are the real ones; the
    network, the clock and the computing of workers are simulated, and so are power cuts and
    strangers. The same seed gives the same history.

    Args:
      seed: Which history.
      num_workers: How many workers there are.
      num_servers: How many parameter servers there are.
      num_closures: How many closures the user schedules.
      faults: What may go wrong; everything, if None.

    Raises:
      SimulationError: An update was lost or made twice, something waits for ever, or another
        rule was broken.

    Example:
      >>> history = simulate(7)
      >>> history.num_events > 200 and history.trace == simulate(7).trace
      True
      >>> simulate(7, faults=Faults.none()).outcome
      'done'
    """
    world = World(seed, Faults() if faults is None else faults)
    with _quiet():
        try:
            outcome = _play(world, num_workers, num_servers, num_closures)
        except (BrokenRuleError, AssertionError) as error:
            raise SimulationError(seed, str(error) or repr(error), world.trace) from error
        except Exception as error:
            raise SimulationError(seed, f"there was {error!r}", world.trace) from error
    return History(seed, outcome, world.num_events, dict(world.landed), world.trace, world.now)


def _play(world: World, num_workers: int, num_servers: int, num_closures: int) -> str:
    timing = Timing.fast()
    network = Network(world)
    plan = Plan(world, num_servers, most_elements(num_closures))
    checks = Checks(world, plan, timing.return_s)
    with contextlib.ExitStack() as stack:
        made = (SimulatedServer(world, network, i, plan, checks) for i in range(num_servers))
        servers = [stack.enter_context(contextlib.closing(server)) for server in made]
        workers = [SimulatedWorker(world, network, i, servers, plan) for i in range(num_workers)]
        stage = Stage(world, network, plan, checks, timing, servers, workers)
        return _play_on(stage, Programs(stage, num_closures))


def _play_on(stage: Stage, programs: Programs) -> str:
    world, servers = stage.world, stage.servers
    incidents = Incidents(world, stage.network, stage.checks, programs, servers, stage.workers)
    while programs.current.outcome is None:
        if world.now > _LONGEST_S:
            raise BrokenRuleError(f"after {_LONGEST_S:g} s the user still waits")
        world.step()
    outcome = programs.current.outcome
    world.faults = Faults.none()
    incidents.end()
    end_s = world.now + _AFTERMATH_S
    while world.now < end_s:
        world.step()
    stage.checks.ended({s.task.index: s.num_applied_entries for s in servers if s.is_up})
    programs.require_end()
    return outcome


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings about simulated faults out of the logs."""
    logger = logging.getLogger("replicax")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
