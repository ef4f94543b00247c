"""Coordinators that follow each other: the next gets in when the last is gone, and not before."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from parameter_servers import STEADY
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.ps.store import jobs

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "coordinate.py"


@contextlib.contextmanager
def coordinating(
    cluster: rx.testing.LocalCluster, job: str = ""
) -> Iterator[subprocess.Popen[str]]:
    """Another process that coordinates a cluster."""
    keys = str(cluster.keys_directory or "")
    spec = json.dumps(cluster.cluster_spec.as_dict())
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), spec, keys, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "coordinates\n"
            yield process
        finally:
            process.kill()


def strategy_of(cluster: rx.testing.LocalCluster, **options: Any) -> Any:
    keys = cluster.keys_directory
    return rx.ParameterServerStrategy(cluster.resolver, keys=keys, connect_timeout=60, **options)


def train(cluster: rx.testing.LocalCluster) -> None:
    """Coordinates a cluster for one closure, and leaves it."""
    strategy = strategy_of(cluster)
    try:
        with rx.coordinator.ClusterCoordinator(strategy, timing=STEADY) as coordinator:
            with strategy.scope():
                variable = rx.Variable(5.0, name="variable")
            coordinator.schedule(lambda: variable.assign_add(1.0))
            coordinator.join(timeout=60)
            assert float(variable) == 6.0
    finally:
        strategy.close()


@pytest.mark.parametrize("protocol", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_the_next_coordinator_gets_in_when_the_last_is_gone_and_not_before(protocol: Any) -> None:
    with (
        rx.testing.LocalCluster(workers=1, ps=2, protocol=protocol) as cluster,
        coordinating(cluster) as first,
    ):
        with refused(errors.PermissionDeniedError, f"process {first.pid} on"):
            train(cluster)
        # A process that is stopped is not gone.
        first.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * jobs.DISCONNECTED_S)
        with refused(errors.PermissionDeniedError, f"process {first.pid} on"):
            train(cluster)
        first.send_signal(signal.SIGCONT)
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.readline() == "2.0\n"
        first.kill()
        first.wait(60)
        # At once: the next one waits as long as it has to, far less than the lease.
        train(cluster)


@pytest.mark.slow
def test_a_job_with_a_name_is_kept_for_its_next_coordinator() -> None:
    with rx.testing.LocalCluster(workers=1, ps=1) as cluster:
        with coordinating(cluster, job="lasting") as first:
            first.kill()
            first.wait(60)
        with refused(errors.PermissionDeniedError, "'lasting' holds it"):
            train(cluster)
        strategy = strategy_of(cluster, job="lasting")
        assert strategy.is_resumed
        with strategy.scope():
            assert float(rx.Variable(1.0, name="variable")) == 2.0
        strategy.close()


def held(now: float, is_kept: bool = False) -> jobs.Job:
    job = jobs.Job("old")
    job.owner, job.is_kept = "process 1 on here", is_kept
    job.attach(1, 77, 300.0, now)
    return job


def test_a_coordinator_that_is_gone_is_given_the_time_to_connect_again() -> None:
    def free(job: jobs.Job, now: float, *connected: int) -> None:
        jobs.require_free(job, "new", now, "ps 0", lambda incarnation: incarnation in connected)

    job = held(now=100.0)
    with refused(errors.PermissionDeniedError, "process 1 on here"):
        free(job, 250.0, 77)
    with pytest.raises(errors.UnavailableError, match=r"last request 1\.0 s ago"):
        free(job, 101.0)
    job.renew(101.0)
    with pytest.raises(errors.UnavailableError, match=r"last request 0\.7 s ago"):
        free(job, 101.7)
    free(job, 101.0 + jobs.DISCONNECTED_S, 78)
    with refused(errors.PermissionDeniedError, "in 100 s"):
        free(held(now=0.0, is_kept=True), 200.0)
    free(held(now=0.0, is_kept=True), 300.0)
