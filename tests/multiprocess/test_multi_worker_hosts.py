"""Workers on two hosts: network namespaces of their own, connected by address, with keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocabulary import refused

import replicax as rx
from replicax.foundation import errors
from replicax.group import exit_codes
from replicax.testing import LocalCluster

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"
)
# A task is lost after dead_s = 2 s of the fast profile. The rest is for a busy machine.
_LONGEST_S = 15.0


def becomes(condition: Callable[[], bool], seconds: float = 100.0) -> bool:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def train(directory: Path, num_steps: int) -> dict[str, Any]:
    """Steps that need both workers; each writes down how far it is, and when it failed."""
    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        weight = rx.Variable(np.zeros(4, np.float32), aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def step(scale: Any) -> None:
        def replica_fn() -> None:
            context = rx.get_replica_context()
            assert context is not None
            weight.assign_add(scale * (context.replica_id_in_sync_group + 1.0) * np.ones(4))

        strategy.run(replica_fn)

    try:
        for number in range(num_steps):
            step(np.float32(1.0))
            # Waits for the step: what was computed is known to be there.
            weight.numpy()
            (directory / f"progress-{index}").write_text(str(number + 1))
    except Exception:
        (directory / f"failed-{index}").write_text(repr(time.monotonic()))
        raise
    return {"weight": weight.numpy(), "addresses": rx_addresses(), "devices": listening()}


def rx_addresses() -> list[str]:
    return list(rx.cluster_resolver.TFConfigClusterResolver().cluster_spec().job_tasks("worker"))  # type: ignore[arg-type]


def listening() -> list[str]:
    """The local addresses at which this process listens over TCP."""
    import psutil

    found = psutil.Process().net_connections("tcp")
    return sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN})


def progress(directory: Path, index: int) -> int:
    path = directory / f"progress-{index}"
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


def namespaces() -> set[str]:
    """Returns those of this process; others on the machine may run such tests as well."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    return {name for name in names if name.startswith(f"rx{os.getpid()}n")}


@pytest.mark.slow
def test_two_hosts_train_by_address_and_a_cut_link_is_a_typed_error_in_time(
    tmp_path: Path,
) -> None:
    before = namespaces()
    with LocalCluster(workers=2, ps=0, namespaces=True, timing="fast") as cluster:
        assert cluster.keys_directory is not None
        first, second = cluster.run(train, args=(tmp_path, 5), timeout=150)
        # Each step adds the mean of 1 and 2.
        np.testing.assert_array_equal(first["weight"], np.full(4, 7.5, np.float32))
        np.testing.assert_array_equal(second["weight"], first["weight"])
        hosts = [where.rpartition(":")[0] for where in first["addresses"]]
        assert hosts == ["10.231.40.1", "10.231.40.2"]
        # Bar 40: only at the address that was asked for.
        assert set(first["devices"]) <= {hosts[0], "127.0.0.1"}
        assert set(second["devices"]) <= {hosts[1], "127.0.0.1"}

        for path in tmp_path.iterdir():
            path.unlink()
        program = cluster.launch(train, args=(tmp_path, 10**9))
        assert becomes(lambda: min(progress(tmp_path, 0), progress(tmp_path, 1)) >= 5), program
        cluster.cut("worker", 1)
        cut_s = time.monotonic()
        ended = program.wait(timeout=100)
        for one, other in zip(ended, ("/job:worker/task:1", "/job:worker/task:0"), strict=True):
            assert one.exit_code == exit_codes.RESTART_GROUP, one
            assert isinstance(one.error, errors.UnavailableError), one
            assert other in str(one.error)
        for index in range(2):
            failed_s = float((tmp_path / f"failed-{index}").read_text())
            assert 0 < failed_s - cut_s < _LONGEST_S
        # The switch is whole again for the next run.
        cluster.mend("worker", 1)
        with refused(errors.UnsupportedError, "`caller` is"):
            cluster.cut("worker", 1, ("worker", 0))
        with refused(errors.UnsupportedError, "directly"):
            cluster.blip("worker", 1)
    assert namespaces() == before


@pytest.mark.slow
def test_a_group_that_lost_its_link_continues_when_it_is_back(tmp_path: Path) -> None:
    with LocalCluster(workers=2, ps=0, namespaces=True, timing="fast") as cluster:
        program = cluster.launch(train, args=(tmp_path, 10**9), max_restarts=20)
        assert becomes(lambda: min(progress(tmp_path, 0), progress(tmp_path, 1)) >= 5), program
        cluster.cut("worker", 0)
        assert becomes(lambda: program.num_restarts >= 1)
        cluster.mend("worker", 0)
        for index in range(2):
            (tmp_path / f"progress-{index}").unlink()
        assert becomes(lambda: min(progress(tmp_path, 0), progress(tmp_path, 1)) >= 5), program
        program.end()
