"""Bars about updates on their way: lost, doubled and broken messages, and what that costs."""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.testing.proxy import Proxy
from torture.bars import Outcome, Plan, bar
from torture.jobs import PATIENT, Job, cluster, job, until
from torture.programs import run_program
from torture.sabotage import sabotaged

# What one entry of the table of updates takes at most, with all that Python adds.
_ENTRY_BYTES = 512
_FAULTS = ("drop_requests", "drop_replies", "break_before_reply", "duplicate_requests")


@contextlib.contextmanager
def behind_proxies(plan: Plan, *, workers: int, ps: int) -> Iterator[tuple[Job, list[Proxy]]]:
    """A job whose servers are reached through proxies only."""
    with cluster(plan, workers=workers, ps=ps) as made, contextlib.ExitStack() as stack:
        spec = {
            task: [made.cluster_spec.task_address(task, i) for i in range(count)]
            for task, count in (("worker", workers), ("ps", ps))
        }
        proxies = [
            stack.enter_context(Proxy(f"{address}-proxy", address, plan.seed + i))
            for i, address in enumerate(spec["ps"])
        ]
        spec["ps"] = [proxy.address for proxy in proxies]
        resolver = SimpleClusterResolver(ClusterSpec(spec), task_type="chief", task_id=0)
        work = Job(plan, made, timing=PATIENT, resolver=resolver)
        stack.callback(work.close)
        work.until_idle()
        yield work, proxies


@bar(
    16,
    promise="messages are lost, doubled and broken off: each update counts once",
    limit="exact; ≥ 1,000 of each fault; table < 1 MiB",
    minutes=30,
)
def lossy_network(plan: Plan) -> Outcome:
    """Updates variables through proxies that harm 10 % of the messages in each of four ways."""
    updates, least = plan.size(20_000, 600), plan.size(1000, 5)
    done, landed = 0, collections.Counter[str]()
    with behind_proxies(plan, workers=2, ps=2) as (work, proxies):
        counters = work.counters

        def update() -> None:
            counters[0].assign_add(1.0)
            counters[1].assign_add(1.0)
            # Asks both servers, so that both changes travel.
            counters[0].numpy()
            counters[2].assign_add(1.0)

        for proxy in proxies:
            proxy.harm(**dict.fromkeys(_FAULTS, 0.1), only=("Exchange",))
        while done < updates // 3 or min(landed[name] for name in _FAULTS) < least:
            for _ in range(100):
                work.coordinator.schedule(update)
            work.coordinator.join(timeout=300)
            done += 100
            landed = collections.Counter[str]()
            for proxy in proxies:
                landed.update(proxy.landed)
            worst = min(landed[name] for name in _FAULTS)
            plan.say(f"{3 * done:,} updates, {worst:,} or more of each fault")
            if done > 50 * updates:
                break
        for proxy in proxies:
            proxy.heal()
        values = work.values()
        time.sleep(1.0)
        entries = max(work.figure("once_entries"))
    faults = ", ".join(f"{landed[name]:,}" for name in _FAULTS)
    outcome = Outcome(
        f"counters off by {sum(abs(v - done) for v in values):g} of {3 * done:,}; faults {faults}; "
        f"{entries:g} entries",
        {"updates": 3 * done, "entries": entries, **{name: landed[name] for name in _FAULTS}},
    )
    outcome.require(values == [done] * 3, f"the counters are {values}, not {done}")
    outcome.require(entries * _ENTRY_BYTES < 1 << 20, f"{entries:g} entries are kept")
    worst = min(landed[name] for name in _FAULTS)
    outcome.require_landed(worst >= least, f"{worst} of {least} faults of some kind")
    return outcome


@bar(
    18,
    promise="counting every update once costs little",
    limit="≤ 5 % of closures/s, or ≤ 20 µs per update",
    minutes=10,
)
def cost_of_once(plan: Plan) -> Outcome:
    """Measures closures per second with and without the table of updates, in turns."""
    rounds, count = plan.size(5, 1), plan.size(3000, 500)
    best = {"": 0.0, "dedup": 0.0}
    for _ in range(rounds):
        for name in best:
            best[name] = max(best[name], _closures_per_second(plan, name, count))
            plan.say(", ".join(f"{who or 'as it is'} {rate:.0f}/s" for who, rate in best.items()))
    with_it, without = best[""], best["dedup"]
    cost, micros = 1 - with_it / without, 1e6 * (1 / with_it - 1 / without)
    outcome = Outcome(
        f"{100 * cost:+.1f} %, {micros:+.0f} µs per update ({with_it:,.0f}/s, {without:,.0f}/s)",
        {"cost": cost, "micros": micros},
    )
    # A smoke run is too short for a comparison.
    outcome.require(plan.quick or cost <= 0.05 or micros <= 20, "it costs too much")
    return outcome


def _closures_per_second(plan: Plan, saboteur: str, count: int) -> float:
    with sabotaged(saboteur), job(plan, workers=1, ps=1) as work:
        counter, best = work.counters[0], 0.0

        @rx.function
        def update() -> None:
            counter.assign_add(1.0)

        for turn in range(4):
            start = time.perf_counter()
            for _ in range(count if turn else 20):
                work.coordinator.schedule(update)
            work.coordinator.join(timeout=120)
            best = max(best, count / (time.perf_counter() - start)) if turn else 0.0
    return best


@bar(
    27,
    promise="no read is torn: 8 MiB written by two, read by two more",
    limit="0 mixed in 100,000",
    minutes=60,
)
def torn_reads(plan: Plan) -> Outcome:
    """Writers fill a variable with one number after the other; readers look at all of it."""
    reads = plan.size(100_000, 200)
    with job(plan, workers=3, ps=1) as work:
        with work.strategy.scope():
            tensor = rx.Variable(jnp.zeros(2 << 20), name="tensor")
        enough, counter = plan.directory / "enough", work.counters[0]

        def write(number: int) -> int:
            count = 0
            while not enough.exists():
                count += 1
                tensor.assign(np.full(2 << 20, 2.0 * count + number, np.float32))
                counter.assign_add(1.0)
                # The answer comes when the server has both.
                counter.numpy()
            return count

        writers = [work.coordinator.schedule(write, args=(i,)) for i in range(2)]
        until(lambda: tensor.numpy()[0] > 10, "writers at work")
        there = work.coordinator.schedule(lambda: look(tensor, reads // 2))
        mixed, distinct = look(tensor, reads - reads // 2, plan)
        other_mixed, other_distinct = there.fetch(3000)
        enough.touch()
        written = sum(int(writer.fetch(60)) for writer in writers)
        work.coordinator.join(timeout=60)
    mixed, distinct = mixed + int(other_mixed), distinct + int(other_distinct)
    outcome = Outcome(
        f"{mixed} mixed of {reads:,}, {written:,} writes, {distinct:,} values seen",
        {"mixed": mixed, "written": written, "distinct": distinct},
    )
    outcome.require(mixed == 0, f"{mixed} reads were mixed")
    least = plan.size(1000, 10)
    outcome.require_landed(distinct >= least, f"reads saw {distinct} different values")
    return outcome


def look(tensor: Any, reads: int, plan: Plan | None = None) -> tuple[int, int]:
    """Returns how many reads were mixed, and how many found another value than the one before."""
    mixed = changes = 0
    last = None
    for turn in range(reads):
        found = tensor.numpy()
        first = found[0]
        mixed += not bool((found == first).all())
        changes += bool(first != last)
        last = first
        if plan is not None and turn % 50 == 0:
            plan.say(f"{turn:,} of {reads:,} reads here, {mixed} mixed")
    return mixed, changes


@bar(
    29,
    promise="simulated histories: no update is lost or doubled, nothing hangs",
    limit="0 violations in 10,000 seeds, ≤ 10 min",
    minutes=30,
)
def simulated(plan: Plan) -> Outcome:
    """Runs the simulation with many seeds, in processes of its own."""
    seeds = plan.size(10_000, 40)
    begin = plan.seed * seeds
    command = [sys.executable, "-m", "replicax.testing.simulation"]
    command += ["--seeds", f"{begin}:{begin + seeds}", "--processes", "2"]
    done = run_program(command, plan, seconds=1500)
    outcome = Outcome(
        f"{seeds:,} seeds in {done.seconds:.0f} s, exit status {done.status}",
        {"seeds": seeds, "seconds": done.seconds},
    )
    outcome.require(done.status == 0, f"violations: {done.last_line}")
    outcome.require(done.seconds <= 600, f"it took {done.seconds:.0f} s")
    outcome.require_landed(str(seeds) in done.output.replace(",", ""), "the seeds were not run")
    return outcome
