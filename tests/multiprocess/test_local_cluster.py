"""A cluster of real processes: it starts, can be harmed, and leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vocabulary import refused

import replicax as rx
from replicax.cluster import parameter_servers
from replicax.foundation import errors
from replicax.protocol import messages
from replicax.protocol.tasks import Role, Task
from replicax.testing import LocalCluster
from replicax.transport import addresses, keys
from replicax.transport.channel import Channel


def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits for something that another process does."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def ask(cluster: LocalCluster, role: Role, index: int) -> None:
    """Talks to a task as a coordinator would."""
    found = None
    if cluster.keys_directory is not None:
        found = keys.load(cluster.keys_directory, "coordinator")
    where = cluster.cluster_spec.task_address(role, index)
    location = addresses.resolve(where, cluster.resolver.rpc_layer, found)
    with Channel(location, Task("coordinator", 0), found, peer=Task(role, index)) as channel:
        channel.job, channel.epoch = "test", 1
        if role == "ps":
            channel.request(messages.Attach([], {}), timeout=20.0)
        assert isinstance(channel.request(messages.Ping(0), timeout=20.0)[0], messages.Pong)
        channel.request(messages.Detach(), timeout=20.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(workers=1, ps=1, timing="fast") as cluster:
        yield cluster


def test_the_cluster_is_one_for_parameter_servers(cluster: LocalCluster) -> None:
    resolver = cluster.resolver
    parameter_servers.check(resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    assert resolver.task_type == "chief" and resolver.task_id == 0
    assert cluster.cluster_spec.num_tasks("ps") == 1
    assert cluster.cluster_spec.num_tasks("worker") == 1
    assert repr(cluster) == "LocalCluster(1 worker, 1 ps, ipc, running)"


def test_every_task_answers(cluster: LocalCluster) -> None:
    ask(cluster, "ps", 0)
    ask(cluster, "worker", 0)
    assert "ps 0 serves at ipc:///" in cluster.logs("ps", 0)
    assert "worker 0 serves at ipc:///" in cluster.logs("worker", 0)


def test_bar_40_nothing_listens_on_the_network(cluster: LocalCluster) -> None:
    for job, index in (("ps", 0), ("worker", 0)):
        process = psutil.Process(cluster.pid(job, index))
        assert process.net_connections("inet") == []


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")
def test_no_message_takes_the_core_from_the_task_that_sends_it(cluster: LocalCluster) -> None:
    for job in ("ps", "worker"):
        process = psutil.Process(cluster.pid(job, 0))
        policies = {os.sched_getscheduler(thread.id) for thread in process.threads()}
        assert policies == {os.SCHED_BATCH}


def test_a_task_is_frozen_and_goes_on(cluster: LocalCluster) -> None:
    process = psutil.Process(cluster.pid("ps", 0))
    cluster.stop("ps", 0)
    assert becomes(lambda: process.status() == psutil.STATUS_STOPPED)
    assert cluster.alive("ps", 0)
    cluster.cont("ps", 0)
    assert becomes(lambda: process.status() != psutil.STATUS_STOPPED)
    ask(cluster, "ps", 0)


def test_a_task_ends_in_order_when_asked(cluster: LocalCluster) -> None:
    assert cluster.terminate("worker", 0, timeout=60) == 0
    assert not cluster.alive("worker", 0)


def test_several_threads_may_restart_tasks() -> None:
    with LocalCluster(workers=1, ps=1, timing="fast") as cluster:
        before = {cluster.pid("worker", 0), cluster.pid("ps", 0)}
        tasks = ["worker", "worker", "ps"]
        with concurrent.futures.ThreadPoolExecutor(len(tasks)) as pool:
            restarts = [pool.submit(cluster.restart, job, 0, timeout=100) for job in tasks]
            for restart in restarts:
                restart.result(timeout=120)
        assert before.isdisjoint({cluster.pid("worker", 0), cluster.pid("ps", 0)})
        ask(cluster, "worker", 0)
        ask(cluster, "ps", 0)


def test_leaving_a_cluster_that_is_in_use_raises_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with LocalCluster(workers=2, ps=1) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        coordinator = rx.coordinator.ClusterCoordinator(strategy)
        coordinator.schedule(lambda: 1)
        coordinator.join(timeout=60)
        cluster.terminate("worker", 1)
        coordinator.schedule(time.sleep, args=(60,))

    def is_missed() -> bool:
        return coordinator.status().servers[0].state == "lost"

    assert becomes(is_missed)
    # Further use raises an error.
    with pytest.raises(errors.PSUnavailableError):
        coordinator.join(timeout=60)
    coordinator.close()
    strategy.close()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_unknown_tasks_are_refused(cluster: LocalCluster) -> None:
    for job, index in (("ps", 1), ("chief", 0)):
        with refused(errors.InvalidArgumentError, "1 workers and 1 ps"):
            cluster.kill(job, index)
    with refused(errors.ContextError, "is running"):
        cluster.start()


def test_bar_52_no_orphan_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = """
import sys, threading, replicax.testing as testing
def start():
    cluster = testing.LocalCluster(workers=0, ps=1)
    cluster.start()
    cluster.stop("ps", 0)
    print(cluster.pid("ps", 0), flush=True)
    keep.append(cluster)
keep = []
thread = threading.Thread(target=start)
thread.start()
thread.join()
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        # It outlives the thread that started the cluster, and not the process.
        assert is_running(pid)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(60)
    # Without a word from the kernel it would stay until its lease is over, for minutes.
    assert becomes(lambda: not is_running(pid), 30.0)


def is_running(pid: int) -> bool:
    # An orphan may stay a zombie, which has exited.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("protocol", ["ipc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_killed_task_starts_again_at_the_same_address(protocol: Any) -> None:
    with LocalCluster(workers=0, ps=1, protocol=protocol) as cluster:
        before, spec = cluster.pid("ps", 0), cluster.cluster_spec
        ask(cluster, "ps", 0)
        cluster.stop("ps", 0)
        cluster.kill("ps", 0)
        assert not cluster.alive("ps", 0) and not psutil.pid_exists(before)
        cluster.restart("ps", 0)
        assert cluster.alive("ps", 0) and cluster.pid("ps", 0) != before
        assert cluster.cluster_spec == spec
        ask(cluster, "ps", 0)
        assert cluster.logs("ps", 0).count("ps 0 serves at") == 2
        check_listeners(cluster, protocol)
        directory = cluster.directory
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not directory.exists()


def check_listeners(cluster: LocalCluster, protocol: str) -> None:
    """Bar 40: nothing listens where other machines could reach it."""
    found = psutil.Process(cluster.pid("ps", 0)).net_connections("inet")
    assert {c.laddr.ip for c in found} == ({"127.0.0.1"} if protocol == "tcp" else set())
    assert (cluster.keys_directory is not None) == (protocol == "tcp")


def test_a_task_that_dies_at_the_start_is_told(tmp_path: Path) -> None:
    cluster = LocalCluster(
        workers=0, ps=1, env={"PYTHONHOME": str(tmp_path)}, log_directory=tmp_path / "logs"
    )
    with refused(errors.UnavailableError, "(?s)ps 0 ended with exit code 1.*No module named"):
        cluster.start()
    assert "PYTHONHOME" in (tmp_path / "logs" / "ps-0.log").read_text()
    with refused(errors.ContextError, "while it runs"):
        cluster.pid("ps", 0)
    cluster.close()


def test_a_task_that_does_not_listen_in_time_is_told() -> None:
    cluster = LocalCluster(workers=0, ps=1)
    with refused(errors.DeadlineExceededError, "listen within 0.01 s, but ps 0 did not"):
        cluster.start(timeout=0.01)


@pytest.mark.slow
def test_a_forgotten_cluster_ends() -> None:
    cluster = LocalCluster(workers=0, ps=1)
    cluster.start()
    pid = cluster.pid("ps", 0)
    assert psutil.pid_exists(pid)
    del cluster
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": -1}, "workers must be a whole number of at least 0, but it is -1"),
        ({"workers": 0, "ps": 0}, "at least one task"),
        ({"protocol": "grpc"}, '"ipc" or "tcp", but it is \'grpc\''),
        ({"devices_per_worker": 0}, "devices_per_worker must be .* at least 1"),
        ({"ps": True}, "ps must be a whole number"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], words: str) -> None:
    with refused(errors.InvalidArgumentError, words):
        LocalCluster(**arguments)  # type: ignore[arg-type]
