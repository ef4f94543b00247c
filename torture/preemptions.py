"""The check of preemptions: SIGTERM at random workers of a group, and an exact final count."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from pathlib import Path

import replicax as rx
from replicax.group import exit_codes
from replicax.testing import LaunchedProgram, LocalCluster
from torture.checks import Outcome, Plan, check

WORKERS, EPOCHS, STEPS_PER_EPOCH = 4, 8, 15
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
_STEP_S = 0.05
_PATIENCE_S = 240.0


def train(directory: str) -> float:
    """The program of every worker: it adds 1 in each step, as TensorFlow's test does."""
    strategy = rx.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
    handler = rx.experimental.PreemptionCheckpointHandler(
        resolver, rx.train.Checkpoint(total=total), f"{directory}/checkpoints"
    )
    progress = Path(directory) / f"worker-{resolver.task_id}"

    @rx.function
    def step() -> None:
        strategy.run(lambda: total.assign_add(1.0))

    for _ in range(handler.total_run_calls // STEPS_PER_EPOCH, EPOCHS):
        for _ in range(handler.total_run_calls % STEPS_PER_EPOCH, STEPS_PER_EPOCH):
            handler.run(step)
            progress.write_text(str(handler.total_run_calls))
            time.sleep(_STEP_S)
    return float(total)


@dataclasses.dataclass
class Preemptions:
    """What a training with preemptions has shown.

    Attributes:
      values: What each worker returned at last.
      count: The preemptions that ended a run.
      longest_s: The longest time from a notice to the end of all processes.
      problems: What should not have happened.
    """

    values: list[float] = dataclasses.field(default_factory=list)
    count: int = 0
    longest_s: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)


class PreemptedTraining:
    """A training whose workers are preempted one after the other.

    Args:
      cluster: The cluster.
      directory: An empty directory.
      rng: Decides who and when.
    """

    def __init__(self, cluster: LocalCluster, directory: Path, rng: random.Random) -> None:
        self._cluster = cluster
        self._directory = directory
        self._rng = rng
        self.found = Preemptions()

    def run(self, count: int, report: Callable[[str], None]) -> Preemptions:
        """Trains to the end, with so many preemptions."""
        # Preemptions are not counted.
        program = self._cluster.launch(train, args=(str(self._directory),), max_restarts=1)
        try:
            for number in range(count):
                self._preempt_one(program, number, count)
                report(f"{number + 1} of {count} preemptions")
            self.found.values = program.values(timeout=_PATIENCE_S)
        finally:
            program.end()
        if program.num_restarts != count:
            self.found.problems.append(f"{program.num_restarts} restarts, {count} preemptions")
        return self.found

    def _preempt_one(self, program: LaunchedProgram, number: int, count: int) -> None:
        # A step of this run, and some are left for the other preemptions and the end.
        first = self._step()
        gap = (NUM_STEPS - first) // (count - number + 1)
        step = first + 1 + self._rng.randrange(max(gap - 20, 1))
        _until(lambda: self._step() >= step, program, number)
        victim = self._rng.randrange(WORKERS)
        self._cluster.preempt("worker", victim)
        told_s = time.monotonic()
        _until(lambda: len(program.attempts) > number, program, number)
        attempt = program.attempts[number]
        self.found.count += 1
        self.found.longest_s = max(self.found.longest_s, attempt.ended_s - told_s)
        codes = [outcome.exit_code for outcome in attempt.outcomes]
        if codes != [exit_codes.PREEMPTED] * WORKERS:
            logs = "\n".join(outcome.log[-800:] for outcome in attempt.outcomes)
            self.found.problems.append(f"notice {number}, to worker {victim}: {codes}\n{logs}")
        steps = {self._step_of(index) for index in range(WORKERS)}
        if len(steps) > 1:
            self.found.problems.append(f"notice {number}: the workers ended at steps {steps}")
        saved = list((self._directory / "checkpoints").glob("ckpt-*"))
        if [float(rx.train.load_variable(path, "total")) for path in saved] != [
            float(WORKERS * max(steps))
        ]:
            self.found.problems.append(f"notice {number}: {saved} is not of step {steps}")

    def _step_of(self, index: int) -> int:
        try:
            return int((self._directory / f"worker-{index}").read_text() or 0)
        except FileNotFoundError:
            return 0

    def _step(self) -> int:
        return min(self._step_of(index) for index in range(WORKERS))


def _until(condition: Callable[[], bool], program: LaunchedProgram, number: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if program.is_done or time.monotonic() > deadline:
            raise AssertionError(f"preemption {number} came too late: {program!r}")
        time.sleep(0.01)


@check(
    33,
    claim="SIGTERM at random workers of 4: all save at one step, leave, and restart",
    limit="the final count is exact (480), 1 checkpoint at a common step, all end within 10 s",
    minutes=15,
)
def preempted_workers(plan: Plan) -> Outcome:
    """Preempts a random worker at a random step, again and again."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    with LocalCluster(workers=WORKERS, ps=0) as cluster:
        training = PreemptedTraining(cluster, plan.directory, plan.rng())
        found = training.run(plan.size(3, 1), plan.report)
    expected = float(NUM_STEPS * WORKERS)
    outcome = Outcome(
        f"{found.count} preemptions, count {found.values[0]:g}, ended in {found.longest_s:.1f} s",
        {"preemptions": found.count, "longest_s": found.longest_s},
    )
    is_exact = found.values == [expected] * WORKERS
    outcome.require(is_exact, f"the workers counted {found.values}, not {expected:g}")
    outcome.require(found.longest_s <= 10.0, f"a group ended after {found.longest_s:.1f} s")
    for problem in found.problems:
        outcome.require(False, problem)
    return outcome
