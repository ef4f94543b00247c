"""RELIABILITY bar 29: simulated histories keep all invariants, and saboteurs are found (bar 54)."""

from __future__ import annotations

import dataclasses
import os
import posix
import random
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import pytest

from replicax.coordinator import engine
from replicax.coordinator.core import Core
from replicax.coordinator.engine import Engine
from replicax.coordinator.outbox import Outbox
from replicax.coordinator.scheduling import actions as act
from replicax.coordinator.scheduling.closures import Closure, ClosureQueue, State
from replicax.coordinator.scheduling.pacing import BoundedStaleness
from replicax.coordinator.scheduling.policy import Policy
from replicax.coordinator.scheduling.pool import Worker
from replicax.coordinator.scheduling.timing import Timing
from replicax.coordinator.shipping import serialization
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.store.accumulation import Accumulation
from replicax.ps.store.accumulation import _Mean as Mean
from replicax.ps.store.applied_updates import AppliedUpdates
from replicax.ps.store.jobs import Job
from replicax.ps.store.optimizers import Optimizer, PartGradient
from replicax.worker import error_reports, job
from simulation import Faults, SimulationError, __main__, batches, scale, simulate
from simulation.world import World
from torture import sabotaged, safeguards

# Nothing here waits for real time; a busy machine may still need long.
pytestmark = pytest.mark.timeout(300)
# As many as hit running work with every kind of fault; the slow test plays the 10,000 of bar 29.
_QUICK = range(60)
_LEAST_EVENTS = 200
# Every kind must have hit work that was under way; and what recovers from some of them.
_KINDS = {
    "coordinator_crash",
    "coordinator_pause",
    "coordinator_rival",
    "crash",
    "cut",
    "delay",
    "duplicate",
    "gradient_dropped",
    "job_resumed",
    "lease_expired",
    "loss",
    "mirror_recovery",
    "partition",
    "pause",
    "power_cut",
    "reordered",
    "reply_dropped",
    "reply_lost",
    "request_dropped",
    "request_lost",
    "server_crash",
    "server_pause",
    "snapshot_recovery",
    "stop",
    "unknown_key",
}


def test_programs_that_were_killed_leave_nothing_in_this_process() -> None:
    before = set(engine.open_engines)
    assert any(simulate(seed).landed.get("coordinator_crash") for seed in range(20))
    assert set(engine.open_engines) == before


def test_bar_29_no_rule_is_broken_and_every_kind_of_fault_hits_running_work() -> None:
    tally = batches.run_batch(_QUICK)
    assert not tally.broken, next(iter(tally.broken.values()))
    assert tally.num_histories == len(_QUICK)
    assert set(tally.landed) == _KINDS
    # Histories are long, and mostly end well.
    assert tally.fewest_events is not None
    assert tally.fewest_events >= _LEAST_EVENTS
    assert tally.outcomes["done"] > len(_QUICK) / 2
    assert set(tally.outcomes) <= {
        "done",
        "NoWorkersError",
        "PSIncarnationError",
        "PSUnavailableError",
    }


def test_bar_29_the_same_seed_gives_the_same_history() -> None:
    first, second = simulate(3), simulate(3)
    assert first.trace == second.trace
    assert first == second
    assert first.trace != simulate(4).trace


def test_nothing_goes_wrong_without_faults() -> None:
    history = simulate(0, faults=Faults.none(), num_workers=2, num_servers=1, num_closures=20)
    assert history.outcome == "done"
    assert not history.landed
    assert not [line for line in history.trace if "FAULT" in line or "ErrorReply" in line]


def test_power_cuts_and_unauthenticated_peers_change_no_history() -> None:
    """They use separate random numbers: seeds that violated an invariant stay useful."""
    histories = [simulate(seed) for seed in range(12)]
    assert sum(history.landed.get("power_cut", 0) for history in histories) > 0
    assert os.fsync is posix.fsync, "files are not recorded any more"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "fault_random", property(lambda _: NoFaults(), lambda *_: None), False)
        quiet = [simulate(seed) for seed in range(12)]
    for history, other in zip(histories, quiet, strict=True):
        lines = [line for line in history.trace if "power cut at" not in line]
        assert [line for line in lines if "an unauthenticated peer" not in line] == other.trace


class NoFaults(random.Random):
    """Random numbers by which no fault happens."""

    def random(self) -> float:
        return 1.0

    def expovariate(self, lambd: float = 1.0) -> float:
        return 1e9


@pytest.mark.parametrize("name", safeguards.NAMES)
def test_bar_54_saboteurs_are_found_within_1000_seeds(name: str) -> None:
    def found() -> Iterator[SimulationError]:
        for seed in range(1_000):
            try:
                simulate(seed)
            except SimulationError as error:
                yield error

    with safeguards.disabled(name):
        error = next(found())
    rules = {
        "dedup": "times instead of",
        "fencing": "which is fenced there",
        "heartbeats": "the user still waits",
        "watermark": "times instead of|not the mean of",
        "fsync": "a server was lost without a reason",
        "key check": "accepts a certificate of another job",
    }
    assert re.search(rules[name], error.rule)
    # The safeguard is back.
    simulate(error.seed)


def test_a_broken_rule_says_how_to_see_it_again() -> None:
    with safeguards.disabled("dedup"):
        tally = batches.run_batch(range(10), None)
    seed, story = next(iter(tally.broken.items()))
    assert f"python -m simulation --seed {seed} --trace" in story
    assert story.count("\n") >= 40
    assert "Exchange" in story


@pytest.fixture(scope="module")
def resource_tracker_runs() -> None:
    """Starts the process that `multiprocessing` keeps until this one ends: it is no leak."""
    resource_tracker.ensure_running()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("resource_tracker_runs")
def test_bar_29_ten_thousand_histories_replay_in_other_processes() -> None:
    tally = batches.Tally()
    for batch in batches.run_batches(range(10_000), num_processes=2):
        tally.merge(batch)
    assert not tally.broken, next(iter(tally.broken.values()))
    assert tally.num_histories == 10_000
    assert tally.fewest_events is not None
    assert tally.fewest_events >= _LEAST_EVENTS
    # Whatever Python's hashes are there.
    command = [sys.executable, "-m", "simulation", "--seed", "3", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    assert found.startswith("\n".join(simulate(3).trace))


# The command.


def test_the_command_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--seeds", "0:3"]) == 0
    out = capsys.readouterr().out
    assert "3 histories in" in out
    assert "violations: 0" in out


def test_the_command_shows_one_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--seed", "3", "--trace"]) == 0
    assert capsys.readouterr().out.startswith("\n".join(simulate(3).trace))
    assert __main__.main(["--seeds", "0:1000", "--saboteur", "dedup"]) == 1
    out = capsys.readouterr().out
    assert "violations: 1" in out
    assert "Replay: " in out


# Saboteurs.


def test_saboteurs_leave_no_trace() -> None:
    methods = [AppliedUpdates.is_new, AppliedUpdates.is_settled, Job.fence, os.fsync]
    for name in safeguards.NAMES:
        with safeguards.disabled(name):
            pass
    assert [AppliedUpdates.is_new, AppliedUpdates.is_settled, Job.fence, os.fsync] == methods
    with pytest.raises(errors.InvalidArgumentError, match="dedup, fencing"):
        safeguards.disable("unknown")


def test_the_sabotaged_command_runs_the_ordinary_one() -> None:
    code = (
        "from torture import sabotaged\n"
        "from replicax.ps.store.applied_updates import AppliedUpdates\n"
        "try:\n"
        "    sabotaged.main(['dedup', 'serve', '--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "table = AppliedUpdates()\n"
        "table.record(1, (0, 0))\n"
        "assert table.is_new(1, (0, 0))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250
    )
    assert "serve" in found.stdout
    with pytest.raises(errors.InvalidArgumentError):
        sabotaged.main([])


# What histories have brought to light.


def _call(closure: int, attempt: int) -> job.Call:
    return job.Call(messages.ClosureCall(closure, attempt, "", [], 0), ())


def test_S152_a_closure_that_was_taken_back_does_not_run_when_the_order_comes_again() -> None:
    held = job.Job("job", 1, 7, messages.Attach([], {}), None, 1)
    assert held.add_calls([_call(1, 0), _call(2, 0)]) == []
    ended = error_reports.recalled(held.cancel([2]), "/job:worker/task:0")
    held.record_cancelled(ended)
    assert [(r.closure, r.attempt) for r in ended] == [(2, 0)]
    # After a break the coordinator says everything again, and is answered again.
    assert held.add_calls([_call(1, 0), _call(2, 0)]) == [(ended[0], ())]
    assert held.num_open == 1
    # The next attempt is another matter.
    assert held.add_calls([_call(2, 1)]) == []
    assert held.num_open == 2
    held.forget_settled(3)
    assert held.add_calls([_call(2, 0)]) == []


def test_S152_an_old_report_of_a_recall_does_not_concern_the_next_attempt() -> None:
    policy = Policy(1, 1, Timing.fast(), 0.0)
    policy.worker_policy.connected(0, 7, 0.0)
    policy.worker_policy.attached(0, 0.0)
    queue = ClosureQueue()
    closure = Closure(1, serialization.ship(len))
    queue.put(closure)
    policy.pool.dispatch(queue, 0.0)
    assert policy.worker_policy.take_ended(0, 7, 1, attempt=0) is closure
    queue.requeue([closure])
    policy.pool.dispatch(queue, 0.1)
    assert closure.attempt == 1
    assert policy.worker_policy.take_ended(0, 7, 1, attempt=0) is None
    assert policy.worker_policy.take_ended(0, 7, 1) is closure


class Recorder:
    """A sender that records the messages."""

    def __init__(self) -> None:
        self.sent: list[tuple[messages.Body, int]] = []

    def send(self, task: Task, body: messages.Body, buffers: Any = (), request: int = 0) -> None:
        self.sent.append((body, request))


@pytest.mark.parametrize("is_recalled", [True, False])
def test_S152_a_recall_is_never_an_error_of_the_closure(is_recalled: bool) -> None:
    sender, worker = Recorder(), Task("worker", 0)
    cluster: Any = types.SimpleNamespace(workers=[None], servers=[], settings={}, fenced=set())
    core = Core(cluster, sender, Timing.fast(), 10, 0.0)

    def receive(body: messages.Body, request: int = 0) -> None:
        core.received(worker, messages.Envelope("", 0, 7, request, [], body), [], 0.0)

    core.connected(worker, messages.Welcome("", "worker", 0, 7), 0.0)
    receive(messages.Done(), request=sender.sent[-1][1])
    closure = Closure(1, serialization.ship(len))
    core.add(closure, 0.0)
    assert closure.state is State.IN_FLIGHT
    error = error_reports.describe(errors.CancelledError("mine"))
    if is_recalled:
        error = error_reports.cancelled(1, "/job:worker/task:0")
    receive(messages.Finished([messages.Result(1, None, error, 0)]))
    assert isinstance(closure.error, errors.CancelledError) is not is_recalled


def test_bar_21_a_restored_server_learns_of_all_fenced_incarnations() -> None:
    policy = Policy(1, 1, Timing.fast(), 0.0)
    policy.servers[0].is_saved = True
    policy.server_policy.connected(0, 50, 0.0)
    policy.worker_policy.connected(0, 7, 0.0)
    policy.worker_policy.attached(0, 0.0)
    policy.worker_policy.lost(0, "it ended", 1.0)
    # Confirmed, but perhaps not in the snapshot that the next process starts from.
    policy.server_policy.fence_confirmed(0, 7, 1.1)
    policy.server_policy.lost(0, "it ended", 2.0)
    assert policy.server_policy.connected(0, 51, 3.0) == [act.Rejoin(0)]
    assert policy.server_policy.rejoined(0, 51, 3.1) == [act.FenceAt([0], 7)]
    assert policy.servers[0].is_away
    policy.server_policy.fence_confirmed(0, 7, 3.2)
    assert policy.servers[0].is_available


def test_bar_10_a_worker_is_free_when_another_has_settled_what_it_had() -> None:
    worker = Worker(0, 0.0)
    closure = Closure(1, serialization.ship(len))
    worker.assign([closure], 0.0)
    closure.settle(State.FINISHED, None, None)
    cluster: Any = None
    sender = Recorder()
    Outbox(cluster, sender, Timing.fast()).resend(worker)
    assert not worker.assigned
    assert not sender.sent


@pytest.mark.parametrize("seed", [49, 113, 3399, 5014, 6993])
def test_bar_29_histories_that_once_violated_an_invariant(seed: int) -> None:
    """Some are of the tasks, as a closure that failed while another attempt was not fenced yet."""
    simulate(seed)


def test_gradients_that_miss_too_much_are_found() -> None:
    def found() -> Iterator[SimulationError]:
        faults = dataclasses.replace(Faults.none(), staleness_share=1.0)
        for seed in range(20):
            try:
                simulate(seed, faults=faults)
            except SimulationError as error:
                yield error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedStaleness, "admits", lambda self, worker: True)
        assert "has missed" in next(found()).rule
    assert not list(found())


_SYNC = dataclasses.replace(Faults(), sync_share=1.0, staleness_share=0.0)


def _without_last_round(engine: Engine, deadline: float | None) -> None:
    """Leaves gradients that wait for others where they are."""


def _without_gradients(accumulation: Accumulation, means: object) -> None:
    """Restores a server without the gradients that waited for others."""


def _one_too_many(mean: Any, optimizer: Optimizer) -> list[PartGradient]:
    total = [(part, *kept.divided(mean.count + 1, np.float32)) for part, kept in mean.sums.items()]
    return [PartGradient(*gradient) for gradient in total]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "rule"),
    [
        (Mean, "divided", _one_too_many, "it is not the mean of their gradients"),
        (Accumulation, "restore", _without_gradients, "0 times instead of 1"),
        (Engine, "_complete_round", _without_last_round, "still keeps the gradient of"),
    ],
    ids=["wrong mean", "lost in a snapshot", "left behind"],
)
def test_bar_29_gradients_of_synchronous_training_that_go_astray_are_found(
    owner: Any, name: str, broken: Any, rule: str
) -> None:
    def found() -> Iterator[SimulationError]:
        for seed in range(100):
            try:
                simulate(seed, faults=_SYNC)
            except SimulationError as error:
                yield error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        error = next(found())
    assert rule in error.rule
    simulate(error.seed, faults=_SYNC)


# The cost of a closure, as workers are added.


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_workers_on_a_hundred_servers_cost_what_the_model_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    with capsys.disabled():
        print(f"\n{scale.HEADER}")
        for num_workers in scale.WORKERS:
            begun_s = time.monotonic()
            found[num_workers] = scale.simulate(num_workers, scale.NUM_SERVERS)
            print(scale.row(found[num_workers], time.monotonic() - begun_s))
    for num_workers, cost in found.items():
        predicted = scale.predicted(num_workers, cost.orders)
        assert cost.seconds == pytest.approx(predicted, rel=0.25), num_workers


def test_the_cost_of_a_closure_is_measured() -> None:
    few, more = (scale.simulate(n, 3, num_closures=60 * n) for n in (2, 8))
    assert (few.num_workers, more.num_workers) == (2, 8)
    for cost in (few, more):
        predicted = scale.predicted(cost.num_workers, cost.orders, 3)
        assert cost.seconds == pytest.approx(predicted, rel=0.25)
