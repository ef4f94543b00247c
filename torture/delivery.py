"""Checks of the delivery of updates: lost and repeated messages, broken connections, and cost."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.testing.proxy import Proxy
from torture.checks import Outcome, Plan, check
from torture.jobs import PATIENT, Job, cluster, job, until
from torture.programs import run_program
from torture.safeguards import disabled_in_tasks

# The maximum size of an entry of the table of applied updates in Python.
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


@check(
    16,
    claim="messages are lost and repeated, connections break: each update takes effect once",
    limit="exact; ≥ 1,000 of each fault; table < 1 MiB",
    minutes=30,
)
def lossy_network(plan: Plan) -> Outcome:
    """Updates variables through proxies that inject each of four faults into 10 % of messages."""
    updates, least = plan.size(20_000, 600), plan.size(1000, 5)
    done, landed = 0, collections.Counter[str]()
    with behind_proxies(plan, workers=2, ps=2) as (work, proxies):
        counters = work.counters

        def update() -> None:
            counters[0].assign_add(1.0)
            counters[1].assign_add(1.0)
            # Reads from both servers, so that both changes are sent.
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
            plan.report(f"{3 * done:,} updates, {worst:,} or more of each fault")
            if done > 50 * updates:
                break
        for proxy in proxies:
            proxy.heal()
        values = work.values()
        time.sleep(1.0)
        entries = max(work.server_counters("applied_entries"))
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


@check(
    18,
    claim="deduplication and heartbeats cost little",
    limit="≤ 5 % of closures/s, or ≤ 20 µs per update",
    minutes=10,
)
def cost_of_once(plan: Plan) -> Outcome:
    """Times closures alternately with and without deduplication and heartbeats."""
    pairs, turns, count = plan.size(4, 1), plan.size(30, 2), plan.size(1500, 300)
    ratios, seconds = list[float](), {name: list[float]() for name in ("", "dedup")}
    for pair in range(pairs):
        with contextlib.ExitStack() as stack:
            bursts = {name: stack.enter_context(_bursts(plan, name, count)) for name in seconds}
            for turn in range(turns):
                # The second run finds another state of the machine: alternate the order.
                for name in sorted(bursts, reverse=bool(turn % 2)):
                    seconds[name].append(bursts[name]())
                ratios.append(seconds[""][-1] / seconds["dedup"][-1])
        plan.report(f"{pair + 1} of {pairs} pairs: {100 * statistics.median(ratios) - 100:+.1f} %")
    cost = statistics.median(ratios) - 1
    with_it, without = (statistics.median(taken) / count for taken in seconds.values())
    micros = 1e6 * cost * without
    outcome = Outcome(
        f"{100 * cost:+.1f} %, {micros:+.1f} µs per update ({1 / with_it:,.0f}/s, "
        f"{1 / without:,.0f}/s; median of {len(ratios)} turns)",
        {"cost": cost, "micros": micros, "turns": len(ratios)},
    )
    # A smoke run is too short for a comparison.
    outcome.require(plan.quick or cost <= 0.05 or micros <= 20, "it costs too much")
    return outcome


@contextlib.contextmanager
def _bursts(plan: Plan, saboteur: str, count: int) -> Iterator[Callable[[], float]]:
    """A separate cluster; yields a function that runs closures and returns their duration."""
    silent = dataclasses.replace(PATIENT, beat_s=600.0, dead_s=6000.0, worker_orphan_s=6000.0)
    timing = silent if saboteur else PATIENT
    with disabled_in_tasks(saboteur), job(plan, workers=1, ps=1, timing=timing) as work:
        counter = work.counters[0]

        @rx.function
        def update() -> None:
            counter.assign_add(1.0)

        def burst() -> float:
            start = time.perf_counter()
            for _ in range(count):
                work.coordinator.schedule(update)
            work.coordinator.join(timeout=120)
            return time.perf_counter() - start

        burst()
        yield burst


@check(
    27,
    claim="no read is torn: 8 MiB written by two, read by two more",
    limit="0 mixed in 100,000",
    minutes=60,
)
def torn_reads(plan: Plan) -> Outcome:
    """Writers fill a variable with one number after the other; readers read all of it."""
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
                # The reply arrives when the server has both.
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
    """Returns how many reads were mixed, and how many differed from the previous one."""
    mixed = changes = 0
    last = None
    for turn in range(reads):
        found = tensor.numpy()
        first = found[0]
        mixed += not bool((found == first).all())
        changes += bool(first != last)
        last = first
        if plan is not None and turn % 50 == 0:
            plan.report(f"{turn:,} of {reads:,} reads here, {mixed} mixed")
    return mixed, changes


@check(
    29,
    claim="simulated histories: no update is lost or repeated, nothing hangs",
    limit="0 violations in 10,000 seeds, ≤ 10 min",
    minutes=30,
)
def simulated(plan: Plan) -> Outcome:
    """Runs the simulation with many seeds, in processes of its own."""
    seeds = plan.size(10_000, 40)
    begin = plan.seed * seeds
    command = [sys.executable, "-m", "simulation"]
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
