"""The parameter-server example plays every role; the snippets of the guide are a program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "parameter_server.py"
GUIDES = ROOT / "docs" / "guides"
STEPS_PER_EPOCH = 60


def environment(**more: str) -> dict[str, str]:
    # Without what the suite set for its own devices.
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "TF_CONFIG")}
    return {**kept, "JAX_PLATFORMS": "cpu", **more}


def run(*arguments: str, program: Path = EXAMPLE, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, program, *arguments],
        env=environment(**env),
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def accuracies(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"epoch \d+: loss [\d.]+, accuracy ([\d.]+)", output)]


@contextmanager
def task(log: Path, config: str) -> Iterator[subprocess.Popen[bytes]]:
    """The example as a task that serves; killed at the end, as nothing else ends it."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, EXAMPLE],
            env=environment(TF_CONFIG=config),
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_one_command_trains_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    output = run("--directory", str(tmp_path / "run"), "--epochs", "3")
    assert output.splitlines()[0] == "starts with epoch 1"
    found = accuracies(output)
    assert len(found) == 3
    assert found[-1] > 0.93
    assert output.splitlines()[-1] == f"{3 * STEPS_PER_EPOCH} steps are in the model"
    saved = sorted(p.name for p in (tmp_path / "run").glob("ckpt-*"))
    assert saved == ["ckpt-2", "ckpt-3"]


@pytest.mark.slow
def test_S196_S201_S202_one_file_plays_every_role_and_a_second_chief_goes_on(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory(prefix="rx-") as sockets, ExitStack() as stack:
        cluster = {
            "chief": [f"ipc://{sockets}/c0"],
            "ps": [f"ipc://{sockets}/p0", f"ipc://{sockets}/p1"],
            "worker": [f"ipc://{sockets}/w0", f"ipc://{sockets}/w1"],
        }

        def config(job: str, index: int) -> str:
            return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})

        servers = [
            stack.enter_context(task(tmp_path / f"{job}-{index}.log", config(job, index)))
            for job in ("ps", "worker")
            for index in range(2)
        ]
        directory = str(tmp_path / "run")
        chief = config("chief", 0)
        first = run("--directory", directory, "--epochs", "2", TF_CONFIG=chief)
        second = run("--directory", directory, "--epochs", "3", TF_CONFIG=chief)
        # Servers stay when a chief ends.
        assert [s.poll() for s in servers] == [None] * 4
        logs = {log.name: log.read_text() for log in tmp_path.glob("*.log")}

    assert first.splitlines()[0] == "starts with epoch 1"
    assert len(accuracies(first)) == 2
    assert second.splitlines()[0] == "starts with epoch 3"
    (accuracy,) = accuracies(second)
    assert accuracy > 0.93
    assert second.splitlines()[-1] == f"{3 * STEPS_PER_EPOCH} steps are in the model"
    assert not [name for name, text in logs.items() if "Traceback" in text], logs


def run_snippets(guide: str, tmp_path: Path) -> str:
    text = (GUIDES / guide).read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    program = tmp_path / "guide.py"
    # In a directory of this test, not in one that all runs share.
    program.write_text("\n".join(snippets).replace("/tmp/", f"{tmp_path}/"))
    return run(program=program)


@pytest.mark.slow
def test_the_snippets_of_the_guide_are_one_program(tmp_path: Path) -> None:
    output = run_snippets("parameter-servers.md", tmp_path)
    assert "no such luck This happened on /job:worker/task:" in output
    assert (tmp_path / "parameter-servers" / "weight").exists()


@pytest.mark.slow
def test_the_snippets_about_faults_are_one_program(tmp_path: Path) -> None:
    output = run_snippets("faults.md", tmp_path)
    assert "its deadline being 0.5 s" in output
    assert "a new job" in output
