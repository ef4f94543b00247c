"""`replicax run --slurm` on a real Slurm with two nodes; `make test-slurm` runs these alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import launched_training as training
import pytest

SERVICE = training.ROOT / "tests" / "services" / "slurm.sh"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which("slurmctld") is None or os.getuid() != 0,
        reason="needs Slurm, from tests/services/slurm.sh install, and root",
    ),
]
IN_ALLOCATION = ["salloc", "--quiet", "--nodes=2", "--ntasks=4"]
RUN = [*training.REPLICAX, "run", "--slurm"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm; the environment of processes that use it."""
    directory = tmp_path_factory.mktemp("slurm")
    # Munge looks at all directories above its own.
    directory.parent.chmod(0o755)
    subprocess.run([SERVICE, "up", directory], check=True, env=training.ENV, timeout=120)
    yield {**training.ENV, "SLURM_CONF": str(directory / "slurm.conf")}
    subprocess.run([SERVICE, "down", directory], check=True, env=training.ENV, timeout=120)


@pytest.mark.parametrize("servers", [[], ["--ps=1"]], ids=["sync", "ps"])
def test_the_same_program_has_the_same_result_in_an_allocation(
    slurm: dict[str, str], tmp_path: Path, servers: list[str]
) -> None:
    run = [*RUN, "--workers=2", *servers, f"--logs={tmp_path / 'logs'}", training.TRAIN]
    arguments = training.arguments(tmp_path / "checkpoints")
    output = training.run([*IN_ALLOCATION, *run, *arguments], slurm)
    right, norm = training.plain_result()
    assert training.result_in(output) == pytest.approx((right, norm), abs=0.4)
    assert training.result_in(output)[1] == pytest.approx(norm, rel=1e-4)


def test_a_killed_worker_restarts_the_group_and_the_result_is_the_same(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    run = [*RUN, "--workers=2", f"--logs={tmp_path / 'logs'}", training.TRAIN]
    arguments = training.arguments(checkpoints)
    command = [*IN_ALLOCATION, *run, *arguments]
    output = training.run(command, slurm, kill=("worker", 1), directory=checkpoints)
    training.require_one_restart(output)
    assert "1 restart" in output
    assert training.result_in(output)[1] == pytest.approx(training.plain_result()[1], rel=1e-4)


PREEMPTED_ONCE = """
import pathlib, signal, sys, time
mark = pathlib.Path(sys.argv[1])
if mark.exists():
    print("goes on", flush=True)
    sys.exit(0)
def save(number, frame):
    mark.touch()
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("waits", flush=True)
for _ in range(600):
    time.sleep(0.1)
"""


def test_a_submitted_job_that_was_preempted_and_has_saved_is_queued_again(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "preempted.py").write_text(PREEMPTED_ONCE)
    program = [str(tmp_path / "preempted.py"), str(tmp_path / "mark")]
    log = f"--sbatch=--output={tmp_path / 'log'}"
    script = tmp_path / "job.sbatch"
    written = [f"--output={script}", log, f"--logs={tmp_path / 'logs'}"]
    done = subprocess.run(
        [*RUN, "--apply", "--workers=2", *written, *program],
        env=slurm,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    number = done.stdout.split()[-1]
    assert "Submitted batch job" in done.stdout

    def printed(text: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
            if found.count(text) == 2:
                return found
            time.sleep(0.2)
        raise AssertionError(f"{text!r} is missing in: {found}")

    printed("waits", 60)
    subprocess.run(["scancel", "--signal=TERM", "--batch", number], env=slurm, check=True)
    # Slurm waits before it starts a requeued job again.
    deadline = time.monotonic() + 60
    while not (tmp_path / "mark").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    deadline = time.monotonic() + 240
    state = ""
    while time.monotonic() < deadline and "COMPLETED" not in state:
        subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], env=slurm)
        found = subprocess.run(
            ["scontrol", "show", "job", number], env=slurm, stdout=subprocess.PIPE, text=True
        )
        state = found.stdout
        time.sleep(1)
    assert "JobState=COMPLETED" in state and "Restarts=1" in state, state
    assert (tmp_path / "log").read_text().count("goes on") == 2
