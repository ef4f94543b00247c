"""The check of network partitions: tasks in network namespaces, links that go down.

Servers and workers have a namespace each, and there is a link between any two:

    coordinator --a-- servers
    coordinator --b-- workers
    workers     --c-- servers

The servers' address is on none of the links, so that each link can be cut alone. The far end of
a link is taken down: the near end notices nothing, as with a cable that is cut farther away.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicax.cluster.spec import ClusterSpec
from replicax.cluster_resolver import SimpleClusterResolver
from replicax.transport import keys
from torture.checks import ROOT, Outcome, Plan, check
from torture.endurance import Feeder
from torture.jobs import PATIENT, Job

_SERVERS, _WORKERS = "10.231.9.2", "10.231.2.2"
_CUT_SECONDS = 5.0
# T_dead of the fast profile, and 5 s.
_LONGEST_HANG = 7.0


class Network:
    """Namespaces for servers and workers, and the links between all.

    Attributes:
      cluster_spec: Where the tasks listen.
      keys_directory: The keys of the cluster.
    """

    def __init__(self, plan: Plan, workers: int, ps: int) -> None:
        self._name = f"rxt{os.getpid() % 100_000}"
        self._counts = {"ps": ps, "worker": workers}
        self._logs = plan.directory / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._tasks: list[subprocess.Popen[bytes]] = []
        self.keys_directory: Path = keys.make(plan.directory / "keys")
        self.cluster_spec = ClusterSpec(
            {
                "ps": [f"{_SERVERS}:{7000 + i}" for i in range(ps)],
                "worker": [f"{_WORKERS}:{7100 + i}" for i in range(workers)],
            }
        )

    @property
    def resolver(self) -> SimpleClusterResolver:
        """Configures this process as the coordinator."""
        return SimpleClusterResolver(
            self.cluster_spec, task_type="chief", task_id=0, rpc_layer="tcp"
        )

    def make(self) -> None:
        """Creates namespaces and links."""
        servers, workers = f"{self._name}p", f"{self._name}w"
        for space in (servers, workers):
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", servers, "addr", "add", f"{_SERVERS}/32", "dev", "lo")
        self._link("a", None, servers, "10.231.1")
        self._link("b", None, workers, "10.231.2")
        self._link("c", workers, servers, "10.231.3")
        _ip("route", "add", f"{_SERVERS}/32", "via", "10.231.1.2")
        _ip("-n", workers, "route", "add", f"{_SERVERS}/32", "via", "10.231.3.2")

    def _link(self, letter: str, near: str | None, far: str, network: str) -> None:
        """Creates a link whose ends have the addresses 1 and 2 of a network."""
        ends = [f"{self._name}{letter}{i}" for i in (1, 2)]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for end, space, number in ((ends[0], near, 1), (ends[1], far, 2)):
            where = ["-n", space] if space is not None else []
            if space is not None:
                _ip("link", "set", end, "netns", space)
            _ip(*where, "addr", "add", f"{network}.{number}/24", "dev", end)
            _ip(*where, "link", "set", end, "up")

    def start(self) -> None:
        """Starts the tasks in their namespaces."""
        spec = json.dumps(self.cluster_spec.as_dict())
        for job, count in self._counts.items():
            for index in range(count):
                space = f"{self._name}{job[0]}"
                command = ["ip", "netns", "exec", space, sys.executable, "-m", "replicax", "serve"]
                command += ["--cluster", spec, "--job", job, "--index", str(index)]
                command += ["--protocol", "tcp", "--keys", str(self.keys_directory)]
                if job == "ps":
                    command += ["--snapshots", str(self._logs.parent / "snapshots")]
                with (self._logs / f"{job}-{index}.log").open("wb") as log:
                    env = {**os.environ, "REPLICAX_TIMING": "fast", "JAX_PLATFORMS": "cpu"}
                    self._tasks.append(
                        subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
                    )

    def set_link(self, letter: str, state: str) -> None:
        """Takes the far end of a link down, or up again."""
        space = f"{self._name}{'w' if letter == 'b' else 'p'}"
        _ip("-n", space, "link", "set", f"{self._name}{letter}2", state)

    def num_alive(self) -> int:
        """Returns how many tasks run."""
        return sum(task.poll() is None for task in self._tasks)

    def end(self) -> None:
        """Stops the tasks, and removes namespaces and links."""
        for task in self._tasks:
            task.terminate()
        for task in self._tasks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                task.wait(10)
            task.kill()
            task.wait()
        for letter in "ab":
            _ip("link", "del", f"{self._name}{letter}1", is_needed=False)
        for letter in "pw":
            _ip("netns", "del", f"{self._name}{letter}", is_needed=False)


def _ip(*words: str, is_needed: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode and is_needed:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _job(plan: Plan) -> Iterator[tuple[Job, Network]]:
    network = Network(plan, workers=2, ps=2)
    try:
        network.make()
        network.start()
        cluster: Any = network
        work = Job(plan, cluster, timing=PATIENT)
        try:
            work.until_idle(120)
            yield work, network
        finally:
            work.close()
    finally:
        network.end()


@check(
    26,
    claim="links between workers or coordinator and servers are down for 5 s, and heal",
    limit="exact, nothing hangs for > T_dead + 5 s = 7 s",
    minutes=8,
    needs_root=True,
)
def partitions(plan: Plan) -> Outcome:
    """Cuts the link of the workers, then that of the coordinator, every 15 s for a minute."""
    cuts = plan.size(4, 1)
    landed, longest = 0, 0.0
    with _job(plan) as (work, network):
        feeder = Feeder(work)
        feeder.start()
        begin = time.monotonic()
        for letter, name in (("c", "workers"), ("a", "coordinator")):
            for turn in range(cuts):
                time.sleep(plan.size(10.0, 3.0))
                landed += work.coordinator.status().num_running > 0
                network.set_link(letter, "down")
                time.sleep(_CUT_SECONDS)
                network.set_link(letter, "up")
                plan.report(f"{turn + 1} of {cuts} cuts of {name}")
                if feeder.error is not None:
                    raise feeder.error
        time.sleep(plan.size(10.0, 5.0))
        feeder.end()
        work.coordinator.join(timeout=60)
        values, count, longest = work.values(), feeder.num_scheduled, work.marks.longest_gap(begin)
        alive = network.num_alive()
    outcome = Outcome(
        f"off by {sum(abs(v - count) for v in values):g} of {3 * count:,}, gap {longest:.1f} s",
        {"gap_s": longest, "landed": landed, "closures": count},
    )
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    outcome.require(longest <= _LONGEST_HANG, f"nothing ended for {longest:.1f} s")
    outcome.require(alive == 4, f"{4 - alive} tasks have ended")
    outcome.require_landed(landed == 2 * cuts, f"{landed} of {2 * cuts} cuts met work")
    outcome.require_landed(longest > 1.0, "the cuts delayed nothing")
    return outcome
