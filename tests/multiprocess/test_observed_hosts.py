"""`replicax top` and `replicax trace` of a job that `replicax run` has started on several hosts.

A stand-in for ssh gives each host a runtime directory of its own: tasks of one host have no socket
on the other one, nor on that of the launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import becomes, run, running, script
from typer.testing import CliRunner

from replicax.cli.main import app
from replicax.foundation import errors, settings
from replicax.observe import client, job_directory
from replicax.timeline import perfetto
from replicax.top.view import Sampler, View

HOSTS = "127.0.0.1,127.0.0.2"
SSH = """#!/bin/sh
# ssh OPTIONS -- HOST COMMAND
while [ "$1" != -- ]; do shift; done
export XDG_RUNTIME_DIR="{directory}/$2"
mkdir -p -m 700 "$XDG_RUNTIME_DIR"
exec sh -c "$3"
"""
# Takes steps until it is told to end; "leave" says that another worker was lost.
STEPS = """
    import replicax as rx
    with rx.MirroredStrategy(["cpu:0"]).scope():
        count = rx.Variable(0)
        step = rx.function(lambda: count.assign_add(1))
        while not (here / "end").exists():
            step()
            time.sleep(0.01)
            if number == 0 and (here / "leave").exists():
                sys.exit(75)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the jobs of other tests, and puts the stand-in first."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH.format(directory=tmp_path))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv(settings.XDG_RUNTIME_DIR, str(tmp_path))
    return tmp_path


def sees(condition: Callable[[View], object]) -> Sampler:
    """Waits until `replicax top` shows something; returns what looks at the job."""
    assert becomes(lambda: bool(job_directory.running()))
    sampler = Sampler(client.find_job())
    assert becomes(lambda: bool(condition(sampler.sample()))), sampler.sample()
    return sampler


def answer(view: View, *tasks: str) -> bool:
    rows = [view.find(task) for task in tasks]
    return all(row is not None and row.pid is not None for row in rows)


WORKERS = "/job:worker/task:0", "/job:worker/task:1"


def test_top_shows_stacks_and_kills_of_tasks_on_other_hosts(tmp_path: Path) -> None:
    program = script(tmp_path, STEPS)
    with running(tmp_path, "--workers", 2, "--hosts", HOSTS, program) as launcher:
        sampler = sees(lambda view: answer(view, "launcher", *WORKERS))
        view = sampler.sample()
        for index, task in enumerate(WORKERS):
            row = view.find(task)
            assert row is not None and row.restarts == 0
            found = tmp_path / f"127.0.0.{index + 1}" / "replicax" / "jobs" / sampler.directory.name
            assert len(job_directory.sockets(found)) == 1
            assert "program.py" in sampler.stack(row)
        first = view.find(WORKERS[0])
        assert first is not None and first.pid is not None
        assert sampler.kill(first) == first.pid
        (tmp_path / "leave").touch()
        sampler = sees(
            lambda view: answer(view, *WORKERS) and view.find("launcher").restarts == 1  # type: ignore[union-attr]
        )
        again = sampler.sample().find(WORKERS[0])
        assert again is not None and again.pid != first.pid and again.restarts == 1
        with pytest.raises(errors.UnavailableError, match=f"Process {first.pid} of"):
            sampler.kill(first)
        (tmp_path / "end").touch()
        out, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, out
    assert not job_directory.running()
    assert not list(tmp_path.glob("*/replicax/jobs/*")), "each host has removed its directory"


def test_a_task_that_does_not_answer_does_not_hide_the_others(tmp_path: Path) -> None:
    program = script(tmp_path, STEPS)
    with running(tmp_path, "--workers", 2, "--hosts", HOSTS, program) as launcher:
        sampler = sees(lambda view: answer(view, *WORKERS))
        row = sampler.sample().find(WORKERS[1])
        assert row is not None and row.pid is not None
        os.kill(row.pid, signal.SIGSTOP)
        sees(lambda view: view.find(WORKERS[1]).state == "no answer")  # type: ignore[union-attr]
        assert answer(sampler.sample(), "launcher", WORKERS[0])
        os.kill(row.pid, signal.SIGCONT)
        (tmp_path / "end").touch()
        launcher.communicate(timeout=60)
        assert launcher.returncode == 0


def test_a_trace_has_the_tasks_of_all_hosts(tmp_path: Path) -> None:
    program = script(tmp_path, STEPS)
    with running(tmp_path, "--workers", 2, "--hosts", HOSTS, program) as launcher:
        sees(lambda view: answer(view, *WORKERS))
        path = tmp_path / "job.pftrace"
        done = CliRunner().invoke(app, ["trace", "--steps", "5", "--out", str(path)])
        assert done.exit_code == 0, done.output
        parts = {part.task: part for part in perfetto.read(path)}
        assert set(parts) == set(WORKERS)
        assert all(part.spans for part in parts.values())
        assert not list(tmp_path.glob("127*/**/*.spans"))
        (tmp_path / "end").touch()
        launcher.communicate(timeout=60)
        assert launcher.returncode == 0


def test_top_shows_the_restarts_of_a_job_on_this_host(tmp_path: Path) -> None:
    text = """
        if number < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (here / "end").exists():
            time.sleep(0.01)
    """
    with running(tmp_path, "--workers", 2, script(tmp_path, text)) as launcher:
        sampler = sees(lambda view: view.find("launcher").restarts == 2)  # type: ignore[union-attr]
        done = CliRunner().invoke(app, ["top", "--json"])
        rows = {row["task"]: row for row in json.loads(done.stdout)["rows"]}
        assert set(rows) == {"launcher", *WORKERS}
        assert [row["restarts"] for row in rows.values()] == [2, 2, 2]
        # They do not use replicax, and so answer nothing.
        assert {rows[task]["state"] for task in WORKERS} == {"running"}
        assert sampler.sample().program == "replicax"
        (tmp_path / "end").touch()
        launcher.communicate(timeout=60)
    assert not job_directory.running()


def test_tasks_know_the_directory_of_their_job_unless_they_are_not_observed(tmp_path: Path) -> None:
    program = script(tmp_path, f"print('<', os.environ.get('{settings.REPLICAX_JOB_DIR}'), '>')")
    found = re.findall("< (.*) >", run(tmp_path, program).stdout)
    assert len(found) == 1 and Path(found[0]).parent == tmp_path / "replicax" / "jobs"
    assert Path(found[0]).name.startswith("program-")
    assert re.findall("< (.*) >", run(tmp_path, program, REPLICAX_OBSERVE="off").stdout) == ["None"]


def test_a_launcher_leaves_traces_and_metrics_to_its_tasks(tmp_path: Path) -> None:
    env = {"REPLICAX_TRACE": str(tmp_path / "trace"), "REPLICAX_METRICS": "127.0.0.1:0"}
    done = run(tmp_path, script(tmp_path, ""), **env)
    assert done.returncode == 0
    assert not (tmp_path / "trace").exists() and "etrics" not in done.stdout
