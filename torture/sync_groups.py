"""The check of sync groups: workers are killed at random, and the result is that of no kill."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax

import replicax as rx
from replicax.group import exit_codes
from replicax.testing import LaunchedProgram, LocalCluster
from torture.checks import Outcome, Plan, check

SAVE_EVERY = 4
# The most steps of a run before a worker is killed.
_GAP = 8
_NUM_EXAMPLES, _BATCH, _WIDTH = 100, 16, 8
# The part of the kills that hits a group while it starts: imports, roll call, restore, compilation.
_SHARE_AT_START = 0.2
_LONGEST_START_S = 2.5
_PATIENCE_S = 240.0


class RunFiles:
    """What the workers of one run of the group tell the process that kills them.

    Args:
      directory: The directory of the training.
      run: The address of worker 0, which is new in each run.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._directory = directory / "runs" / run.rpartition(":")[2]
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, index: int, event: dict[str, Any]) -> None:
        """Writes something down; the monotonic clock is that of the machine."""
        path = self._directory / f"{kind}-{index}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({**event, "at_s": time.monotonic()}))
        new.rename(path)

    def read(self, kind: str, index: int) -> dict[str, Any] | None:
        """Returns what a worker has written; None if nothing."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self._directory / f"{kind}-{index}").read_text())
        return None

    def num_steps(self, workers: int) -> int:
        """Returns how many steps of this run all workers have finished."""
        found = [self.read("step", index) for index in range(workers)]
        return min(0 if one is None else one["step"] - one["first"] for one in found)


def train(directory: str, num_steps: int) -> dict[str, Any]:
    """The program of every worker; it continues from the last checkpoint."""
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    index = resolver.task_id
    assert index is not None
    files = RunFiles(Path(directory), resolver.cluster_spec().task_address("worker", 0))
    files.write("imported", index, {})
    strategy = rx.MultiWorkerMirroredStrategy()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(_NUM_EXAMPLES, _WIDTH)).astype(np.float32)
    with strategy.scope():
        model: Any = rx.Module()
        model.w1 = rx.Variable(generator.normal(0, 0.3, (_WIDTH, 16)).astype(np.float32))
        model.w2 = rx.Variable(generator.normal(0, 0.3, (16,)).astype(np.float32))
        weights = list(model.trainable_variables)
        optimizer = rx.optimizers.Optimizer(optax.adam(1e-2), weights)
    # 100 examples in batches of 16: the last batch of an epoch is smaller.
    dataset = rx.data.Dataset.from_tensor_slices((x, np.sin(x.sum(axis=1))))
    dataset = dataset.shuffle(_NUM_EXAMPLES, seed=1).batch(_BATCH).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def replica_step(x: Any, y: Any) -> None:
        def loss_fn() -> Any:
            found = (x @ model.w1.value()).clip(0) @ model.w2.value()
            return rx.nn.compute_average_loss((found - y) ** 2, global_batch_size=_BATCH)

        _, gradients = rx.value_and_grad(loss_fn, weights)()
        optimizer.apply_gradients(gradients)

    @rx.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    checkpoint = rx.train.Checkpoint(model=model, optimizer=optimizer, iterator=iterator)
    where = Path(directory) / "checkpoints"
    with _failure_noted(files, index), rx.train.CheckpointManager(checkpoint, where) as manager:
        manager.restore_or_initialize()
        first = int(optimizer.iterations)
        for step in range(first + 1, num_steps + 1):
            train_step(next(iterator))
            if step % SAVE_EVERY:
                # Waits for the step; so does a save.
                model.w2.numpy()
            if step == first + 1:
                files.write("first", index, {"step": first})
            files.write("step", index, {"step": step, "first": first})
            if step % SAVE_EVERY == 0:
                manager.save(checkpoint_number=step)
    iterator.close()
    state = [variable.numpy() for variable in (*weights, *optimizer.variables)]
    return {"steps": int(optimizer.iterations), "state": state}


@contextlib.contextmanager
def _failure_noted(files: RunFiles, index: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        where = "".join(traceback.format_exception(error))[-3000:]
        files.write("failed", index, {"text": str(error), "traceback": where})
        raise


@dataclasses.dataclass
class Kills:
    """What a training with kills has shown.

    Attributes:
      values: What each worker returned at last.
      num_kills: The kills that hit a running process.
      num_at_start: Those of them that hit a group before its first step.
      notice_s: The longest time from a kill to the error in a survivor.
      end_s: The longest time from a kill to the end of all processes.
      back_s: The longest time from there to the first step of the next run.
      ready_s: The part of it after all workers had imported their modules.
      lost_steps: The most steps that a restart has repeated.
      problems: What should not have happened.
    """

    values: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    num_kills: int = 0
    num_at_start: int = 0
    notice_s: float = 0.0
    end_s: float = 0.0
    back_s: float = 0.0
    ready_s: float = 0.0
    lost_steps: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def num_steps(kills: int) -> int:
    """Returns the length of a training in which so many workers are killed.

    A run makes up to `_GAP` steps before the kill, some until it is hit, and repeats some.
    """
    return (_GAP + 3) * (kills + 2)


class KilledTraining:
    """A training whose workers are killed one after the other.

    Args:
      cluster: The cluster.
      directory: An empty directory.
      workers: The number of workers.
      kills: How many are killed.
      rng: Decides who and when.
    """

    def __init__(
        self, cluster: LocalCluster, directory: Path, workers: int, kills: int, rng: random.Random
    ) -> None:
        self._cluster = cluster
        self._directory = directory
        self._workers = workers
        self._kills = kills
        self._rng = rng
        # The last step before the last kill that hit a step, and when the group had ended.
        self._last_step = 0
        self._ended_s: float | None = None
        self.found = Kills()

    def run(self, report: Callable[[str], None]) -> Kills:
        """Trains to the end."""
        args = (str(self._directory), num_steps(self._kills))
        program = self._cluster.launch(train, args=args, max_restarts=self._kills + 1)
        try:
            for number in range(self._kills):
                self._kill_one(program, number)
                report(f"{number + 1} of {self._kills} kills")
            self.found.values = program.values(timeout=_PATIENCE_S)
            self._measure_return(self._files())
        finally:
            program.end()
        if program.num_restarts != self._kills:
            self.found.problems.append(f"{program.num_restarts} restarts for {self._kills} kills")
        return self.found

    def _files(self) -> RunFiles:
        """Returns the files of the current run."""
        return RunFiles(self._directory, self._cluster.cluster_spec.task_address("worker", 0))

    def _kill_one(self, program: LaunchedProgram, number: int) -> None:
        victim = self._rng.randrange(self._workers)
        # After its pause, the supervisor starts the processes one after the other.
        _until(lambda: self._is_running(program, number), "the next run")
        files = self._files()
        self._wait_for_moment(files)
        steps = files.num_steps(self._workers)
        if not self._cluster.alive("worker", victim):
            self.found.problems.append(f"worker {victim} had ended before kill {number}")
        self._cluster.kill("worker", victim)
        killed_s = time.monotonic()
        _until(lambda: len(program.attempts) > number, "the end of the group")
        self.found.num_kills += 1
        self.found.end_s = max(self.found.end_s, program.attempts[number].ended_s - killed_s)
        self._check_outcomes(program, number, victim, is_at_start=steps == 0)
        if steps == 0:
            self.found.num_at_start += 1
            return
        self._measure_return(files)
        self._ended_s = program.attempts[number].ended_s
        self._last_step = self._step(files)
        self._check_notices(files, victim, killed_s)

    def _is_running(self, program: LaunchedProgram, number: int) -> bool:
        if program.is_done:
            # Raises the error that ended it, if there is one.
            program.values(timeout=_PATIENCE_S)
            raise AssertionError(f"the training had ended before kill {number}")
        if program.num_restarts != number:
            return False
        return all(self._cluster.alive("worker", index) for index in range(self._workers))

    def _wait_for_moment(self, files: RunFiles) -> None:
        """Waits until a random number of steps, or while the group starts."""
        steps = self._rng.randrange(1, _GAP + 1)
        if self._rng.random() >= _SHARE_AT_START:
            _until(lambda: files.num_steps(self._workers) >= steps, f"{steps} steps")
            # Somewhere in a step, in a save, or between.
            time.sleep(self._rng.uniform(0.0, 0.03))
            return
        until_s = time.monotonic() + self._rng.uniform(0.0, _LONGEST_START_S)
        while time.monotonic() < until_s and files.num_steps(self._workers) < steps:
            time.sleep(0.002)

    def _check_outcomes(
        self, program: LaunchedProgram, number: int, victim: int, *, is_at_start: bool
    ) -> None:
        for outcome in program.attempts[number].outcomes:
            is_victim = outcome.task.index == victim
            expected = -signal.SIGKILL if is_victim else exit_codes.RESTART_GROUP
            if is_at_start and outcome.was_killed:
                # It waited for the victim in the roll call, which has minutes; the supervisor
                # does not wait so long.
                continue
            if outcome.exit_code != expected or outcome.was_killed:
                self.found.problems.append(
                    f"kill {number}, of worker {victim}: {outcome.text}; {outcome.log[-1500:]}"
                )

    def _check_notices(self, files: RunFiles, victim: int, killed_s: float) -> None:
        for index in range(self._workers):
            failed = files.read("failed", index)
            if index == victim:
                continue
            if failed is None or f"/job:worker/task:{victim}" not in failed["text"]:
                text = "nothing" if failed is None else failed["traceback"]
                self.found.problems.append(f"a survivor of worker {victim} raised {text}")
            else:
                self.found.notice_s = max(self.found.notice_s, failed["at_s"] - killed_s)

    def _measure_return(self, files: RunFiles) -> None:
        """Measures what the last kill that hit a step has cost, from the run after it."""
        first = files.read("first", 0)
        imported = [files.read("imported", index) for index in range(self._workers)]
        if self._ended_s is None or first is None:
            return
        imported_s = max(one["at_s"] for one in imported if one is not None)
        self.found.ready_s = max(self.found.ready_s, first["at_s"] - imported_s)
        self.found.lost_steps = max(self.found.lost_steps, self._last_step - first["step"])
        self.found.back_s = max(self.found.back_s, first["at_s"] - self._ended_s)

    def _step(self, files: RunFiles) -> int:
        found = [files.read("step", index) for index in range(self._workers)]
        return max(0 if one is None else one["step"] for one in found)


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {_PATIENCE_S:g} s")
        time.sleep(0.002)


def train_with_kills(
    directory: Path, workers: int, kills: int, seed: int, report: Callable[[str], None]
) -> tuple[list[dict[str, Any]], Kills]:
    """Trains once without and once with kills.

    Returns:
      What the workers returned without kills, and what the other training has shown.
    """
    # Programs are compiled once, not after each restart.
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *_python_path()]),
    }
    # The default timeouts: a kill is noticed at once, and a busy machine is not a fault.
    with LocalCluster(workers=workers, ps=0, env=env) as cluster:
        whole = cluster.run(
            train, args=(str(directory / "whole"), num_steps(kills)), timeout=_PATIENCE_S
        )
        report("trained without kills")
        rng = random.Random(seed)
        training = KilledTraining(cluster, directory / "killed", workers, kills, rng)
        return whole, training.run(report)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def are_equal(whole: list[dict[str, Any]], killed: list[dict[str, Any]]) -> bool:
    """Returns whether all workers of both trainings have the same bits."""
    expected = whole[0]
    return all(
        one["steps"] == expected["steps"]
        and len(one["state"]) == len(expected["state"])
        and all(
            a.dtype == b.dtype and a.tobytes() == b.tobytes()
            for a, b in zip(one["state"], expected["state"], strict=True)
        )
        for one in (*whole, *killed)
    )


@check(
    31,
    claim="workers of a sync group are killed at random, 10 of 4 and 200 of 2, and all restart",
    limit="bit-equal to no kill; survivors raise ≤ 2 s, step again ≤ 10 s + import; ≤ 4 steps lost",
    minutes=60,
)
def killed_workers(plan: Plan) -> Outcome:
    """Kills a random worker at a random moment, again and again."""
    parts = []
    for workers, kills in ((4, plan.size(10, 1)), (2, plan.size(200, 4))):
        directory = plan.directory / f"{workers}-workers"
        parts.append(train_with_kills(directory, workers, kills, plan.seed, plan.report))
    found = [kills for _, kills in parts]
    num_kills = sum(one.num_kills for one in found)
    notice_s, end_s, back_s, ready_s, lost = (
        max(getattr(one, name) for one in found)
        for name in ("notice_s", "end_s", "back_s", "ready_s", "lost_steps")
    )
    num_equal = sum(are_equal(whole, one.values) for whole, one in parts)
    outcome = Outcome(
        f"{num_kills} kills, bit-equal, error after {notice_s:.1f} s, back after {back_s:.1f} s"
        if num_equal == len(parts)
        else f"{num_kills} kills, not equal",
        {
            "kills": num_kills,
            "notice_s": notice_s,
            "end_s": end_s,
            "back_s": back_s,
            "ready_s": ready_s,
            "lost_steps": lost,
        },
    )
    outcome.require(num_equal == len(parts), "the parameters differ from those without kills")
    outcome.require(notice_s <= 2.0, f"a survivor noticed after {notice_s:.1f} s")
    outcome.require(ready_s <= 10.0, f"a run needed {ready_s:.1f} s for its first step")
    outcome.require(lost <= SAVE_EVERY, f"{lost} steps were repeated")
    for one in found:
        for problem in one.problems:
            outcome.require(False, problem)
    at_start = sum(one.num_at_start for one in found)
    outcome.require_landed(at_start < num_kills, "all kills hit groups that started")
    return outcome
