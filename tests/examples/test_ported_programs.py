"""Programs of TensorFlow 2.21 go through `replicax port --write`, and train to the same loss.

`tests/fixtures/tf_programs` has the programs as their users write them, and what TensorFlow
printed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from replicax.cli.main import app

FOLDER = Path(__file__).parent.parent / "fixtures" / "tf_programs"
RECORDED: dict[str, list[str]] = json.loads((FOLDER / "recorded.json").read_text())["programs"]

# The relative difference that is allowed. Float16 rounds at 1e-3, in another order.
TOLERANCES = {"accumulation_mixed_precision": 2e-2, "parameter_server": 1e-3}
DEFAULT_TOLERANCE = 2e-3

_NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def load_recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tf_programs_record", FOLDER / "record.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_results(found: list[str], recorded: list[str], tolerance: float) -> None:
    """Compares lines word by word, and numbers within a tolerance."""
    assert [_NUMBER.sub("#", line) for line in found] == [
        _NUMBER.sub("#", line) for line in recorded
    ]
    for line, expected in zip(found, recorded, strict=True):
        ours = [float(number) for number in _NUMBER.findall(line)]
        theirs = [float(number) for number in _NUMBER.findall(expected)]
        assert ours == pytest.approx(theirs, rel=tolerance, abs=2e-4), (line, expected)


def port(name: str, directory: Path, *options: str) -> Path:
    """Ports a copy of a program by the command, and checks that nothing is refused."""
    program = directory / f"{name}.py"
    shutil.copy(FOLDER / program.name, program)
    for _ in range(2):
        result = CliRunner().invoke(app, ["port", "--write", *options, str(program)])
        assert result.exit_code == 0, result.stdout
    assert "tensorflow" not in "".join(
        line for line in program.read_text().splitlines() if "import" in line
    )
    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_a_ported_program_trains_to_the_loss_of_tensorflow(name: str, tmp_path: Path) -> None:
    program = port(name, tmp_path)
    written = tmp_path / "written"
    written.mkdir()
    found = load_recorder().run_program(program, sys.executable, written)
    tolerance = TOLERANCES.get(name, DEFAULT_TOLERANCE)
    assert_same_results(found, RECORDED[name], tolerance)


@pytest.mark.slow
def test_a_program_without_its_tape_trains_to_the_same_loss(tmp_path: Path) -> None:
    program = port("custom_loop_tape", tmp_path, "--tape")
    assert "GradientTape()" not in program.read_text()
    found = load_recorder().run_program(program, sys.executable, tmp_path)
    assert_same_results(found, RECORDED["custom_loop_tape"], DEFAULT_TOLERANCE)


def test_every_program_is_recorded() -> None:
    assert tuple(RECORDED) == load_recorder().PROGRAMS
    assert all(
        lines[-2:] and any("final loss" in line for line in lines) for lines in RECORDED.values()
    )


def test_a_difference_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_same_results(["final loss 1.01"], ["final loss 1.0"], 2e-3)
    with pytest.raises(AssertionError):
        assert_same_results(["final loss 1.0"], ["final accuracy 1.0"], 2e-3)
