"""`replicax run --slurm` without a Slurm: the script, and how an environment is chosen."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replicax.cli import run as cli_run
from replicax.cli.main import app
from replicax.foundation import errors
from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.kubernetes import KubernetesLauncher
from replicax.launch.local import LocalLauncher
from replicax.launch.ray import RayLauncher
from replicax.launch.slurm import SlurmLauncher, script, words_of
from replicax.launch.ssh import SshLauncher

JOBS: dict[str, dict[str, Any]] = {
    "sync": {"workers": 4},
    "ps": {"workers": 3, "ps": 2, "evaluator": True, "cpus_per_worker": 2, "show": "chief"},
    "elastic": {
        "workers": 4,
        "min_workers": 2,
        "devices_per_worker": 2,
        "env": {"A": "b c", "D": "e=f"},
        "logs": Path("a log"),
        "keys": Path("keys"),
        "checkpoints": Path("/shared/x"),
        "max_restarts": 0,
    },
}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("is_module", [False, True])
def test_the_command_of_the_script_describes_the_same_job(
    kind: str, is_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = PythonProgram("a/train it.py", ("--x", "1 2", "--workers=9"), is_module)
    job = JobSpec(program, **JOBS[kind])
    launched: list[JobSpec] = []
    monkeypatch.setattr(
        cli_run.SlurmLauncher, "launch", lambda self, job: launched.append(job) or 7
    )
    done = CliRunner().invoke(app, ["run", "--slurm", *words_of(job)])
    assert done.exit_code == 7, done.output
    assert launched == [job]


def test_the_script_is_one_that_bash_reads_and_has_the_options(tmp_path: Path) -> None:
    job = JobSpec(PythonProgram("train.py", ("it's",)), workers=3, ps=1, cpus_per_worker=2)
    text = script(job, ["--partition=gpu"], "/opt/a python", "/work dir")
    path = tmp_path / "job.sbatch"
    path.write_text(text)
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    # A chief, three workers and a server.
    assert {"--ntasks=5", "--cpus-per-task=2", "--requeue", "--partition=gpu"} <= set(options)
    assert "cd '/work dir'" in text


@pytest.mark.parametrize("option", ["partition=x", "--x\nrm -r y"])
def test_an_option_that_sbatch_would_not_read_is_an_error(option: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="--sbatch"):
        script(JobSpec(PythonProgram("train.py")), [option], "python", "/")


@pytest.mark.usefixtures("outside")
def test_launchers_say_what_they_found(monkeypatch: pytest.MonkeyPatch) -> None:
    launchers = [
        LocalLauncher(),
        SshLauncher(),
        SlurmLauncher(),
        KubernetesLauncher(),
        RayLauncher(),
    ]
    for launcher in launchers:
        assert isinstance(launcher.detect(), bool)
        assert launcher.explain().startswith(f"{launcher.name}: ")
        assert "\n" not in launcher.explain()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert SlurmLauncher().detect()
    assert SlurmLauncher().explain() == "slurm: in the allocation of job 12, on n[1-2]"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "'head:6379'" in RayLauncher().explain()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert KubernetesLauncher().detect() and "this is a pod" in KubernetesLauncher().explain()


@pytest.mark.usefixtures("outside")
def test_without_slurm_a_script_is_written_and_cannot_be_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shown: list[str] = []
    job = JobSpec(PythonProgram("train.py"), workers=2)
    path = tmp_path / "x.sbatch"
    assert SlurmLauncher(output=path, show=shown.append).launch(job) == 0
    assert shown == [f"wrote {path}", f"sbatch {path}"]
    with pytest.raises(errors.NotFoundError, match="'sbatch'"):
        SlurmLauncher(output=path, apply=True).launch(job)


@pytest.mark.parametrize(
    ("words", "address", "program"),
    [
        ("--ray train.py --ray 3", None, ("train.py", "--ray", "3")),
        ("--ray auto train.py auto", "auto", ("train.py", "auto")),
        ("--ray=head:6379 train.py", "head:6379", ("train.py",)),
        ("--workers 2 --ray ray://head:10001 --ps 1 train.py", "ray://head:10001", ("train.py",)),
        ("-n 2 --ray -m auto", None, ("auto",)),
        ("-mn 2 --ray local auto", "local", ("auto",)),
        ("--ray -- auto", None, ("auto",)),
    ],
)
def test_the_address_of_ray_may_be_left_out(
    words: str, address: str | None, program: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[str | None, tuple[str, ...]]] = []

    def launch(launcher: RayLauncher, job: JobSpec) -> int:
        found.append((launcher.address, (job.program.target, *job.program.args)))
        return 0

    monkeypatch.setattr(RayLauncher, "launch", launch)
    done = CliRunner().invoke(app, ["run", *words.split()])
    assert done.exit_code == 0, done.output
    assert found == [(address, program)]


def test_a_value_that_looks_like_ray_stays_one() -> None:
    done = CliRunner().invoke(app, ["run", "--env", "--ray", "x.py"])
    assert "NAME=VALUE" in done.output and "'--ray'" in done.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--slurm", "--ray", "x.py"], "--slurm and --ray"),
        (["--slurm", "--hosts=a", "x.py"], "Slurm selects the hosts"),
        (["--ray", "--evaluator", __file__], "no evaluator"),
        (["--ray", "no-such.py"], "no-such.py"),
        (["--kubernetes", __file__], "--image"),
    ],
)
def test_what_an_environment_cannot_do_is_one_line(words: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code != 0
    assert text in done.output and len(done.output.strip().splitlines()) == 1, done.output
