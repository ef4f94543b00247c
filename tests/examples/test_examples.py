"""The examples run, as a newcomer would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pages
import peer_packages
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# A measurement with a picture, and a program for every cluster: not examples to start from.
LONG = {"staleness", "train"}


def run(name: str, *arguments: str) -> str:
    # Without what the suite set: an example sets up its own devices.
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py", *arguments],
        cwd=ROOT,
        env=env,
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_first_program_of_the_readme_prints_what_stands_next_to_it() -> None:
    first = pages.programs("README.md")[0]
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", first.source],
        env=env,
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert (done.stdout.splitlines(), done.stderr) == (list(first.output), "")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/guides/keras.md", "docs/guides/tf-keras.md"])
def test_programs_about_keras_run(page: str, tmp_path: Path) -> None:
    (program,) = pages.programs(page)
    pages.run(program, tmp_path)


def test_the_guide_about_profiling_runs(tmp_path: Path) -> None:
    (program,) = pages.programs("docs/guides/profiling.md")
    assert pages.run(program, tmp_path).endswith(".pftrace\n")


def numbers(pattern: str, output: str) -> list[float]:
    """All numbers that the output has in place of the group of the pattern."""
    return [float(found) for found in re.findall(pattern, output)]


def check_quickstart(output: str) -> None:
    assert "y = 3.00 x + 2.00" in output


def check_custom_loop(output: str) -> None:
    (accuracy,) = numbers(r"test accuracy ([\d.]+) on 360 digits", output)
    assert accuracy > 0.93


def check_gradient_accumulation(output: str) -> None:
    (difference,) = numbers(r"largest difference ([\d.e+-]+)", output)
    assert difference < 1e-5
    assert numbers(r"(\d+) updates from", output) == [8, 8]


def check_export_serve(output: str) -> None:
    assert "loaded: [1. 2. 3. 4.] after 4096 examples" in output
    assert "served 3 rows: [10. 10. 10.]" in output


def check_model_learns(output: str) -> None:
    accuracies = numbers(r"epoch \d: loss [\d.]+, accuracy ([\d.]+)", output)
    assert len(accuracies) >= 4
    assert accuracies[0] < accuracies[1] < accuracies[-1]
    assert accuracies[-1] > 0.9


def check_sparse_embedding(output: str) -> None:
    first, second, third = numbers(r"step \d00: loss ([\d.]+)", output)
    assert first > second > third
    assert third < 0.01


def check_transformer(output: str) -> None:
    losses = numbers(r"step \d+: loss ([\d.]+)", output)
    assert len(losses) == 6
    # 128 characters at random: 4.85.
    assert losses[0] < 4.0 and losses == sorted(losses, reverse=True) and losses[-1] < 2.2
    assert "240 batches, 120 updates, weights in float32" in output


def check_two_tower(output: str) -> None:
    recalls = numbers(r"epoch \d: loss [\d.]+, recall ([\d.]+)", output)
    assert len(recalls) == 4
    assert 0.5 < recalls[-1] > recalls[1] > recalls[0]
    assert "320 steps are in the model" in output


def check_keras_parameter_servers(output: str) -> None:
    ((counted, scheduled, accuracy),) = re.findall(
        r"(\d+) of (\d+) steps are in the model, accuracy ([\d.]+)", output
    )
    assert counted == scheduled
    assert float(accuracy) > 0.9


def check_keras(output: str) -> None:
    accuracies = numbers(r"epoch \d: loss [\d.]+, (?:validation )?accuracy ([\d.]+)", output)
    assert len(accuracies) == 6
    assert accuracies[0] < accuracies[1] < accuracies[-1]
    (accuracy,) = numbers(r"test accuracy ([\d.]+)", output)
    assert accuracy > 0.93


CHECKS: dict[str, Callable[[str], None]] = {
    "quickstart": check_quickstart,
    "custom_loop": check_custom_loop,
    "gradient_accumulation": check_gradient_accumulation,
    "export_serve": check_export_serve,
    "flax_model": check_model_learns,
    "nnx_cnn": check_model_learns,
    "transformer": check_transformer,
    "two_tower": check_two_tower,
    "equinox_model": check_model_learns,
    "sparse_embedding": check_sparse_embedding,
    "keras_fit": check_keras,
    "keras_custom_loop": check_keras,
    "keras_parameter_servers": check_keras_parameter_servers,
}
# The first program of the README is the quickstart.
SLOW = CHECKS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CHECKS]
)
def test_example_prints_its_documented_output(name: str) -> None:
    CHECKS[name](run(name))


@pytest.mark.slow
def test_a_keras_program_prints_the_same_numbers_under_every_strategy() -> None:
    names = ("none", "one_device", "mirrored", "virtual", "central_storage")
    outputs = {name: run("keras_fit", "--strategy", name) for name in names}
    assert len(set(outputs.values())) == 1, outputs


@pytest.mark.slow
def test_checkpoint_resume_ends_like_a_run_that_was_not_stopped(tmp_path: Path) -> None:
    stopped, whole = str(tmp_path / "stopped"), str(tmp_path / "whole")
    assert "started from the beginning" in run("checkpoint_resume", stopped, "--stop-after", "30")
    resumed = run("checkpoint_resume", stopped).splitlines()
    assert resumed[0] == "resumed at step 30"
    uninterrupted = run("checkpoint_resume", whole).splitlines()
    # All steps after the 30th, and the line that was learnt.
    assert resumed[1:] == uninterrupted[4:]
    assert resumed[-1].startswith("y = ")


@pytest.mark.slow
def test_batches_of_a_real_torch_loader_are_trained_on() -> None:
    # Our own packages come first: only torch is taken from the environment of the benchmarks.
    torch_home = peer_packages.site_packages("torch")
    program = (
        f"import runpy, sys; sys.path.append({torch_home!r}); "
        "runpy.run_path('examples/torch_dataloader.py', run_name='__main__')"
    )
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=env,
        check=False,
        timeout=250,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    check_model_learns(done.stdout)


@pytest.mark.slow
def test_staleness_is_measured_where_it_is_allowed(tmp_path: Path) -> None:
    picture = tmp_path / "staleness.png"
    output = run("staleness", "sync", "async", "--seconds", "2", "--picture", str(picture))
    sync, free = numbers(r"staleness [\d.]+ on average, (\d+) at most", output)
    assert sync == 0 < free
    assert picture.stat().st_size > 10_000


def test_every_example_is_checked_and_short() -> None:
    files = {file.stem: file for file in EXAMPLES.glob("*.py")}
    # These are checked above, and in files of their own.
    others = {"checkpoint_resume", "parameter_server", "multi_worker", "staleness", "train"}
    others.add("torch_dataloader")
    assert files.keys() == CHECKS.keys() | others
    lengths = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    assert {name: n for name, n in lengths.items() if n >= 120}.keys() <= LONG
