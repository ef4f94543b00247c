"""`replicax doctor`: each check on a host where something is wrong, and the command."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replicax.cli.main import app
from replicax.doctor import checkpoint_directory, cluster, host, hosts, installation
from replicax.doctor.findings import Check, Finding, Level, run_all
from replicax.foundation import settings
from replicax.transport import keys


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (settings.TF_CONFIG, settings.REPLICAX_KEYS, settings.SLURM_PROCID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(settings.XDG_RUNTIME_DIR, str(tmp_path))


def _set_cluster(monkeypatch: pytest.MonkeyPatch, job: str, index: int, **jobs: Any) -> None:
    config = {"cluster": jobs, "task": {"type": job, "index": index}}
    monkeypatch.setenv(settings.TF_CONFIG, json.dumps(config))


def _levels(found: Iterable[Finding]) -> list[str]:
    return [finding.level.value for finding in found]


def _of(checks: Iterable[Check], name: str) -> list[Finding]:
    return list(run_all(check for check in checks if check.name == name))


def test_checks_of_a_healthy_host_find_no_problem(tmp_path: Path) -> None:
    parts = [*cluster.checks(), *host.checks(), *checkpoint_directory.checks(tmp_path)]
    found = list(run_all([*parts, Check("versions", installation.check_versions)]))
    assert "problem" not in _levels(found), found
    names = {finding.check for finding in found}
    assert names == {check.name for check in parts} | {"versions"}


def test_check_that_hangs_or_fails_is_a_problem_and_the_others_go_on() -> None:
    done = threading.Event()

    def hang() -> list[Finding]:
        done.wait(30.0)
        return []

    def fail() -> list[Finding]:
        raise OSError(28, "No space left on device")

    checks = [Check("hang", hang, 0.1), Check("fail", fail), Check("well", lambda: [])]
    found = list(run_all(checks))
    done.set()
    assert [(f.check, f.level) for f in found] == [
        ("hang", Level.PROBLEM), ("fail", Level.PROBLEM),
    ]  # fmt: skip
    assert "did not end within 0.1 s" in found[0].text and "No space" in found[1].text


def test_versions_outside_their_bounds_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"jax": "0.11.0", "jaxlib": "0.10.2", "numpy": None}
    real = installation._version
    monkeypatch.setattr(installation, "_version", lambda name: versions.get(name, real(name)))
    found = [f for f in installation.check_versions() if f.level is Level.PROBLEM]
    assert [f.text for f in found] == [
        "jax must be <0.11,>=0.10, but it is 0.11.0",
        "numpy must be >=2.0, but it is not installed",
        "jax 0.11.0 and jaxlib 0.10.2 are not of one release",
    ]
    assert found[0].advice == "Run `pip install 'jax<0.11,>=0.10'`."


def test_devices_that_cannot_start_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_LIST_DEVICES", "raise RuntimeError('no such platform')")
    (found,) = installation.check_devices()
    assert (found.level, found.text) == (
        Level.PROBLEM, "JAX cannot start: RuntimeError: no such platform",
    )  # fmt: skip


def test_resolver_that_wins_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = _of(cluster.checks(), "cluster")
    assert "TF_CONFIG is not set" in found.text and found.level is Level.OK
    for name, value in {
        "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    (found,) = _of(cluster.checks(), "cluster")
    assert "Slurm" in found.text and "SlurmClusterResolver()" in found.advice
    _set_cluster(monkeypatch, "worker", 0, worker=["localhost:2222"])
    first, second = _of(cluster.checks(), "cluster")
    assert "task worker/0" in first.text and "not used, since TF_CONFIG is set" in second.text
    _set_cluster(monkeypatch, "worker", 1, worker=["localhost:2222"])
    assert _levels(_of(cluster.checks(), "cluster"))[:2] == ["ok", "problem"]
    monkeypatch.setenv(settings.TF_CONFIG, "{")
    (found,) = _of(cluster.checks(), "cluster")
    assert found.level is Level.PROBLEM and "TF_CONFIG" in found.text


@pytest.fixture
def key_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = keys.make(tmp_path / "keys")
    monkeypatch.setenv(settings.REPLICAX_KEYS, str(made))
    return made


def test_keys_that_others_can_read_are_a_problem(key_directory: Path) -> None:
    assert _levels(_of(cluster.checks(), "keys")) == ["ok"]
    (key_directory / "ps" / "tls.key").chmod(0o644)
    (found,) = _of(cluster.checks(), "keys")
    assert found.level is Level.PROBLEM and "chmod" in found.advice


def test_hosts_on_a_network_need_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch, "worker", 0, worker=["192.0.2.1:2222"], ps=["192.0.2.2:2222"])
    for name in ("port", "peers"):
        (found,) = _of(cluster.checks(), name)
        assert found.level is Level.PROBLEM and "replicax keys make" in found.advice


@pytest.mark.usefixtures("key_directory")
def test_port_in_use_or_of_another_host_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        _set_cluster(monkeypatch, "worker", 0, worker=[f"127.0.0.1:{port}"], ps=["127.0.0.1:99"])
        found = _of(cluster.checks(), "port")[0]
        assert found.level is Level.PROBLEM and "Address already in use" in found.text
        assert f"sport = :{port}" in found.advice
    assert _of(cluster.checks(), "port")[0].level is Level.OK
    _set_cluster(monkeypatch, "worker", 0, worker=["192.0.2.1:2222"], ps=["127.0.0.1:99"])
    (found,) = _of(cluster.checks(), "port")
    assert found.level is Level.PROBLEM and "cannot listen at 192.0.2.1:2222" in found.text


@pytest.mark.usefixtures("key_directory")
def test_peers_that_listen_are_silent_or_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as peer:
        up = f"127.0.0.1:{peer.getsockname()[1]}"
        jobs = {"worker": ["127.0.0.1:98", up], "ps": ["127.0.0.1:99", "no.such.invalid:1"]}
        _set_cluster(monkeypatch, "worker", 0, **jobs)
        reached, silent, unknown = _of(cluster.checks(), "peers")
    assert reached.text == "2 of 3 other tasks can be reached"
    assert silent.text == "nothing listens at 127.0.0.1:99 (/job:ps/task:0)"
    assert silent.level is Level.WARNING
    assert unknown.level is Level.PROBLEM and "/job:ps/task:1" in unknown.text


def test_limits_that_are_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    assert _levels(host.check_descriptors()) == ["problem"]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1024))
    assert _levels(host.check_descriptors()) == ["warning"]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert _levels(host.check_descriptors()) == ["ok"]
    sizes = {"memory.max": 1 << 30, "memory.current": 900 << 20, "pids.max": 64, "pids.current": 9}
    monkeypatch.setattr(host, "_group_file", sizes.get)
    (found,) = host.check_memory()
    assert found.level is Level.PROBLEM and "0.1 GiB left to this control group" in found.text
    assert _levels(host.check_processes()) == ["warning"]


@pytest.mark.parametrize(
    ("clock", "level"),
    [(None, "note"), ((False, 16.0), "warning"), ((True, 2.0), "warning"), ((True, 0.001), "ok")],
)
def test_clock_is_judged_by_what_the_kernel_tells(
    clock: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_kernel_clock", lambda: clock)
    assert _levels(host.check_clock()) == [level]


def test_kernel_clock_agrees_with_adjtimex_of_the_c_library() -> None:
    found = host._kernel_clock()
    assert found is not None and 0.0 <= found[1] <= 16.1


def test_checkpoint_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (found,) = checkpoint_directory.check(tmp_path / "not" / "yet")
    assert "MiB/s with fsync" in found.text and str(tmp_path) in found.text
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_directory_that_cannot_be_written_or_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = checkpoint_directory.check(Path("/proc/self"))
    assert found.level is Level.PROBLEM and "cannot be written" in found.text
    (tmp_path / "file").write_text("")
    (found,) = checkpoint_directory.check(tmp_path / "file" / "x")
    assert found.level is Level.PROBLEM and "is a file" in found.text
    for free, level in ((100 << 20, "problem"), (5 << 30, "warning")):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr(checkpoint_directory.shutil, "disk_usage", lambda _, u=usage: u)
        monkeypatch.setattr(checkpoint_directory, "_MOST_BYTES", 1 << 20)
        assert _levels(checkpoint_directory.check(tmp_path)) == [level]
    monkeypatch.setattr(checkpoint_directory, "_measure", lambda *_: (1 << 20, 1.0, 0.01, 7.5))
    slow, clock = checkpoint_directory.check(tmp_path)
    assert slow.level is Level.WARNING and "differs by +7.5 s" in clock.text


def test_command_prints_json_and_fails_if_there_is_a_problem() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json", "--checkpoints", "/proc/self"])
    report = json.loads(done.stdout)
    assert (done.exit_code, report["ok"]) == (1, False)
    (problem,) = [f for f in report["findings"] if f["level"] == "problem"]
    assert problem["check"] == "checkpoints" and problem["advice"]
    names = {finding["check"] for finding in report["findings"]}
    assert {"versions", "extras", "devices", "cluster", "port", "peers", "clock"} <= names


SSH = """#!/bin/sh
# ssh OPTIONS -- HOST COMMAND; the clock of "late" is two hours behind.
while [ "$1" != -- ]; do shift; done
[ "$2" = gone ] && echo "gone: no route" >&2 && exit 255
[ "$2" = late ] && export PYTHONPATH="{directory}:$PYTHONPATH"
exec sh -c "$3"
"""
LATE = """
import time
_time_ns = time.time_ns
time.time_ns = lambda: _time_ns() - 7_200_000_000_000
"""


def test_hosts_are_reached_over_ssh_and_their_clocks_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    (tmp_path / "ssh").write_text(SSH.format(directory=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (check,) = hosts.checks(["near", "late", "gone", "near"], None, None)
    near, late, gone = check.run()
    assert near.level is Level.OK and "near: " in near.text and " ms at most" in near.text
    assert late.level is Level.PROBLEM and "7200." in late.text and "s behind" in late.text
    assert gone.level is Level.PROBLEM and "gone: no route" in gone.text
    assert not hosts.checks([], None, None)


def test_hosts_of_doctor_are_those_of_run() -> None:
    done = CliRunner().invoke(app, ["doctor", "--hosts", "a", "--hostfile", "x"])
    assert done.exit_code == 2 and "Hosts are named once" in done.output
