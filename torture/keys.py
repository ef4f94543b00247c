"""The check of keys: the cost of encryption, and key rotation under load."""

from __future__ import annotations

import shutil
from pathlib import Path

import replicax as rx
from benchmarks import secure_transport as speed
from benchmarks.harness import Settings
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Role, Task
from replicax.transport import addresses, keys
from replicax.transport.channel import Channel
from torture.checks import Outcome, Plan, check
from torture.endurance import Feeder
from torture.jobs import PATIENT, Job, cluster, until

_TASKS: tuple[tuple[Role, int], ...] = (("worker", 2), ("ps", 2))
_JOB = "renewed"


@check(
    50,
    claim="encryption is fast, and certificates are rotated while a job runs",
    limit="≥ 0.45 GiB/s, round trip ≤ 1.5 of a bare socket, handshake ≤ 15 ms; 0 closures lost",
    minutes=15,
)
def encrypted(plan: Plan) -> Outcome:
    """Measures the transport over TCP, then rotates all certificates under load."""
    settings = Settings(plan.size(4, 1), plan.size(2.0, 0.2), timeout=120.0, peers={})
    speeds_by_name, rows = speed.run(settings, plan.report)
    outcome = Outcome(numbers={" ".join(key): found["ms"] for key, found in speeds_by_name.items()})
    for row in rows:
        # A smoke run may share the machine with others.
        missed = f"{row.case}: {row.ours} (bare {row.peer}), not {row.target}"
        outcome.require(plan.quick or bool(row.passed), missed)
    values, count = _renewed(plan, outcome)
    speeds = ", ".join(f"{row.case} {row.ours} (bare {row.peer})" for row in rows)
    lost = sum(abs(value - count) for value in values)
    outcome.measured = f"{speeds}; off by {lost:g} of {3 * count:,}"
    outcome.require(values == [count] * 3, f"the counters are {values}, not {count}")
    return outcome


def _renewed(plan: Plan, outcome: Outcome) -> tuple[list[float], int]:
    """Renews the keys of all roles; returns the counters, and what they must be."""
    with cluster(plan, workers=2, ps=2, protocol="tcp", snapshots=True) as made:
        directory = made.keys_directory
        assert directory is not None
        former = [(path, path.read_bytes()) for path in (directory / "coordinator").iterdir()]
        first = Job(plan, made, timing=PATIENT, of_strategy={"job": _JOB})
        try:
            first.until_idle()
            feeder = Feeder(first)
            feeder.start()
            try:
                # Servers and workers that run use the new files for new connections.
                keys.renew(directory)
                for role, number in _TASKS:
                    for index in range(number):
                        _restart_at_work(first, role, index, outcome)
                        plan.report(f"/job:{role}/task:{index} has a new certificate")
            finally:
                feeder.end()
            first.coordinator.join(timeout=120)
            # The next coordinator resumes the job with a newer one.
            keys.renew(directory)
            second = Job(plan, made, timing=PATIENT, of_strategy={"job": _JOB})
            try:
                second.until_idle()
                second.schedule(100, 0.001, first=feeder.num_scheduled)
                second.coordinator.join(timeout=120)
                values = second.values()
                keys.retire(directory)
                outcome.require(_is_let_in(made, directory), "the new keys are not good")
                older = Path(shutil.copytree(directory, plan.directory / "older"))
                for path, content in former:
                    (older / "coordinator" / path.name).write_bytes(content)
                outcome.require(not _is_let_in(made, older), "the former keys are still good")
            finally:
                second.close()
        finally:
            first.close()
    return values, feeder.num_scheduled + 100


def _restart_at_work(work: Job, role: str, index: int, outcome: Outcome) -> None:
    status = work.coordinator.status
    until(lambda: status().num_running > 0, "work under way")
    before = work.cluster.pid(role, index)
    outcome.require_landed(status().num_running > 0, f"nothing ran when {role} {index} ended")
    # In order: a server saves what it has acknowledged.
    work.cluster.terminate(role, index, timeout=60)
    work.cluster.restart(role, index)
    outcome.require_landed(work.cluster.pid(role, index) != before, f"{role} {index} went on")
    finished = status().num_finished
    until(lambda: status().num_finished > finished, "a closure that ends")


def _is_let_in(made: rx.testing.LocalCluster, directory: Path) -> bool:
    """Returns whether a server replies to a coordinator with these keys."""
    own = keys.load(directory, "coordinator")
    where = addresses.resolve(made.cluster_spec.task_address("ps", 0), "tcp", own)
    with Channel(where, Task("coordinator", 0), own, peer=Task("ps", 0)) as channel:
        try:
            channel.request(messages.QueryJob(), timeout=30)
        except errors.PermissionDeniedError:
            return False
    return True
