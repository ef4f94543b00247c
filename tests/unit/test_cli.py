"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_manager import flip_in_arrays
from typer.testing import CliRunner

import replicax as rx
from replicax.cli.main import app


def run(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    class Model(rx.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = rx.Variable(np.zeros((2, 3), np.float32))

    model = Model()
    checkpoint = rx.train.Checkpoint(model=model, same=model, epoch=3)
    with rx.train.CheckpointManager(checkpoint, tmp_path / "run") as manager:
        manager.save(checkpoint_number=7)
        manager.save(checkpoint_number=12)
    return tmp_path / "run"


def test_the_version_is_printed() -> None:
    assert run("--version") == (0, f"replicax {rx.__version__}\n", "")


def test_show_prints_what_is_inside(directory: Path) -> None:
    code, out, _ = run("checkpoint", "show", directory)
    lines = out.splitlines()
    assert code == 0
    assert lines[1] == "step 12" and lines[2].startswith("saved 20") and lines[3] == "valid"
    assert "steps 7 12" in lines
    assert "model/w\tvariable\t2x3\tfloat32\t24" in lines
    assert "epoch\tvalue\t\tint\t" in lines
    assert "same\tsame as model\t\t\t" in lines
    code, out, _ = run("checkpoint", "show", directory, "--step", 7)
    assert code == 0 and "step 7" in out
    assert run("checkpoint", "show", directory / "ckpt-7")[1].splitlines()[1] == "step 7"


def test_a_missing_directory_or_step_is_one_clear_line(directory: Path) -> None:
    for args, words in (
        ((directory / "nowhere",), "does not exist"),
        ((directory.parent,), "holds none"),
        ((directory, "--step", 8), "7, 12"),
    ):
        code, out, err = run("checkpoint", "show", *args)
        assert code == 1 and out == ""
        assert len(err.splitlines()) == 1 and words in err and ", but " in err


def test_damage_is_told(directory: Path) -> None:
    assert run("checkpoint", "verify", directory) == (
        0,
        f"{directory}/ckpt-7: valid\n{directory}/ckpt-12: valid\n",
        "",
    )
    flip_in_arrays(str(directory / "ckpt-12"))
    code, out, err = run("checkpoint", "show", directory)
    assert code == 1 and out.splitlines()[3] == "damaged"
    assert len(err.splitlines()) == 1 and "'model/w'" in err
    code, out, err = run("checkpoint", "verify", directory)
    assert code == 1 and "ckpt-7: valid" in out and "'model/w'" in out
    (directory / "ckpt-12" / "manifest.json").write_text("")
    code, out, err = run("checkpoint", "show", directory)
    assert code == 1 and out == "" and len(err.splitlines()) == 1


def test_the_command_is_installed(directory: Path) -> None:
    command = Path(sys.executable).with_name("replicax")
    done = subprocess.run(
        [str(command), "checkpoint", "verify", str(directory)], capture_output=True, timeout=250
    )
    assert done.returncode == 0 and done.stdout.count(b"valid") == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--python", "python3"], "--python is for jobs over ssh"),
        (["--image", "x"], "--image is for --kubernetes"),
        (["--apply"], "--apply is for --slurm or --kubernetes"),
        (
            ["--slurm", "--python", "python3"],
            "this job runs with --slurm",
        ),
        (["--kubernetes", "--sbatch=--time=1"], "--sbatch is for --slurm"),
    ],
)
def test_run_refuses_options_that_the_job_would_ignore(
    tmp_path: Path, options: list[str], text: str
) -> None:
    (tmp_path / "train.py").touch()
    code, _, said = run("run", *options, tmp_path / "train.py")
    assert code == 2 and text in said and len(said.splitlines()) == 1


def test_run_refuses_logs_that_cannot_be_written_in_one_line(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    code, _, said = run("run", "--logs", program / "logs", program)
    assert code == 1 and "The logs need a directory" in said and len(said.splitlines()) == 1
