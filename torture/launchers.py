"""Checks of cluster launchers: leaked processes after kills, and many clusters at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import replicax as rx
from torture.checks import ROOT, Outcome, Plan, check
from torture.jobs import is_there

# Starts a cluster, prints its processes, and waits for its end. The process that runs this in
# the background of a shell has its children ignore interrupts.
_LAUNCHER = """
import signal, sys, time
import replicax as rx
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with rx.testing.LocalCluster(workers=1, ps=1, timing="fast") as cluster:
        tasks = [cluster.pid("worker", 0), cluster.pid("ps", 0)]
        sys.stdout.write(" ".join(map(str, tasks)) + "\\n")
        sys.stdout.flush()
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
_START_SECONDS = 120.0
_AT_ONCE = 2


@check(
    52,
    claim="a launcher that is killed or interrupted leaves no process",
    limit="0 orphans after 3 s; ends ≤ 15 s after Ctrl-C",
    minutes=30,
)
def ended_launchers(plan: Plan) -> Outcome:
    """Kills launchers of clusters, and interrupts others."""
    times = plan.size(50, 2)
    orphans = landed = 0
    slowest = 0.0
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = [signal.SIGKILL, signal.SIGINT] * times
        for turn, found in enumerate(pool.map(_end_launcher, jobs)):
            number, left, seconds, had_tasks = found
            orphans += left
            landed += had_tasks
            slowest = max(slowest, seconds if number == signal.SIGINT else 0.0)
            plan.report(f"{turn + 1} of {len(jobs)} launchers, {orphans} orphans")
    outcome = Outcome(
        f"{orphans} orphans, Ctrl-C takes {slowest:.1f} s", {"orphans": orphans, "end_s": slowest}
    )
    outcome.require(orphans == 0, f"{orphans} processes outlived their launcher")
    outcome.require(slowest <= 15, f"an end took {slowest:.1f} s")
    outcome.require_landed(landed == 2 * times, f"{landed} of {2 * times} clusters were running")
    return outcome


def _end_launcher(number: signal.Signals) -> tuple[signal.Signals, int, float, bool]:
    """Ends one launcher; returns its orphans, how long it took, whether its tasks ran before."""
    with _launcher() as (process, tasks):
        had_tasks = all(is_there(pid) for pid in tasks)
        start = time.monotonic()
        process.send_signal(number)
        process.wait(30)
        if number == signal.SIGINT:
            return number, sum(map(is_there, tasks)), time.monotonic() - start, had_tasks
        while any(map(is_there, tasks)) and time.monotonic() - start < 3.0:
            time.sleep(0.01)
        return number, sum(map(is_there, tasks)), time.monotonic() - start, had_tasks


@contextlib.contextmanager
def _launcher() -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, cwd=ROOT, process_group=0
    )
    try:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], _START_SECONDS)[0]:
            raise TimeoutError(f"a launcher said nothing for {_START_SECONDS:g} s")
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@check(
    53,
    claim="clusters started at the same time do not collide, and leak nothing",
    limit="200 clusters, 0 collisions, 0 leaks",
    minutes=40,
)
def many_clusters(plan: Plan) -> Outcome:
    """Starts and stops clusters, as many at once as the machine can run."""
    count = plan.size(200, 4)
    at_once = max(2, min(8, 2 * (os.cpu_count() or 1)))
    collisions, most = 0, 0
    problems: list[str] = []
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        with contextlib.ExitStack() as stack:
            made = [
                stack.enter_context(_closing(rx.testing.LocalCluster(1, 1, protocol="tcp")))
                for _ in range(number)
            ]
            with concurrent.futures.ThreadPoolExecutor(number) as pool:
                for error in pool.map(_start, made):
                    problems += [error] if error else []
            addresses = [a for c in made for a in _addresses(c)]
            collisions += len(addresses) - len(set(addresses))
            most = max(most, len(addresses))
        plan.report(f"{first + number} of {count} clusters")
    outcome = Outcome(
        f"{count} clusters, {collisions} collisions, {len(problems)} failed to start",
        {"collisions": collisions, "failed": len(problems), "most_tasks": most},
    )
    outcome.require(collisions == 0, f"{collisions} tasks had the address of another")
    outcome.failures += problems
    outcome.require_landed(most > 2, "no two clusters ran at once")
    return outcome


@contextlib.contextmanager
def _closing(cluster: rx.testing.LocalCluster) -> Iterator[rx.testing.LocalCluster]:
    try:
        yield cluster
    finally:
        cluster.close()


def _start(cluster: rx.testing.LocalCluster) -> str:
    try:
        cluster.start(timeout=180)
    except rx.errors.DistributeError as error:
        return str(error).splitlines()[0]
    return ""


def _addresses(cluster: rx.testing.LocalCluster) -> list[str]:
    spec = cluster.cluster_spec
    return [spec.task_address(job, 0) for job in ("worker", "ps")]
