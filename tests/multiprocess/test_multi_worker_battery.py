"""The tests of tests/conformance, run by the workers of a MultiWorkerMirroredStrategy.

Each case starts a group of processes (tests/support/battery.py), which run many test files in
lock-step: their expectations are those of replicas in one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from battery import run_battery

SCENES = "tests/support/programs/battery_scenes.py"

# Test files of tests/conformance that one group runs.
STATE = (
    *("variables", "mirrored_variables", "sync_on_read_variables"),
    *("contexts", "update", "checkpoint"),
)
VALUES = (
    *("run", "reduce", "all_reduce", "gather", "merge_call"),
    *("uneven_parts", "metrics", "input"),
)
PROGRAMS = (
    *("function", "gradients", "saved_model"),
    *("optimizers", "optimizers_sparse", "optimizers_skipping", "optimizers_optax"),
)
# What the default run takes of these.
CORE = ("run", "reduce", "contexts")
BUNDLES = {
    "core": CORE,
    "state": STATE,
    "values": VALUES,
    "programs": PROGRAMS,
    "digits": ("digits",),
}


def require_passed(
    workers: int, devices: int, bundle: str, directory: Path, *options: str, seconds: float
) -> None:
    files = [f"tests/conformance/test_{name}.py" for name in BUNDLES[bundle]]
    outcomes = run_battery(workers, devices, files, directory, options=options, seconds=seconds)
    if problems := outcomes.problems(workers):
        pytest.fail(problems, pytrace=False)
    missing = set(files) - {name.partition("::")[0] for name in outcomes.collected}
    # Tests of four replicas are not in all files.
    assert not missing or workers * devices == 4, f"no tests of {missing} were run"


@pytest.mark.parametrize(
    ("workers", "devices", "bundle"),
    [
        pytest.param(2, 1, "core", id="2x1-core"),
        pytest.param(2, 2, "core", id="2x2-core"),
        # One device per worker compiles what two run eagerly, and the other way round.
        pytest.param(2, 1, "state", id="2x1-state", marks=pytest.mark.slow),
        pytest.param(2, 1, "values", id="2x1-values", marks=pytest.mark.slow),
        pytest.param(2, 2, "state", id="2x2-state", marks=pytest.mark.slow),
        pytest.param(2, 2, "values", id="2x2-values", marks=pytest.mark.slow),
    ],
)
def test_the_core_battery_passes_in_every_worker(
    workers: int, devices: int, bundle: str, tmp_path: Path
) -> None:
    """One case of each test of variables, contexts, values, input and state.

    It runs compiled code for every other test: for some with one device per worker, for the
    others with two.
    """
    options = ("-m", "not slow", "--core")
    require_passed(workers, devices, bundle, tmp_path, *options, seconds=280)


@pytest.mark.slow
def test_the_digits_program_of_two_workers_ends_as_that_of_one_device(tmp_path: Path) -> None:
    """Two devices each, uneven last batches included; the slow suite runs it in eager code too."""
    require_passed(2, 2, "digits", tmp_path, "-m", "not slow", "-k", "compiled", seconds=280)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("workers", "devices", "bundle"),
    [
        (workers, devices, bundle)
        for workers, devices in ((2, 1), (2, 2), (4, 1))
        for bundle in BUNDLES
        if bundle != "core"
    ],
)
def test_the_whole_battery_passes_in_every_worker(
    workers: int, devices: int, bundle: str, tmp_path: Path
) -> None:
    require_passed(workers, devices, bundle, tmp_path, "--timeout=600", seconds=1400)


# The battery itself, with a MirroredStrategy of its own in each process.


def test_the_battery_reports_each_failure_of_each_worker(tmp_path: Path) -> None:
    scenes = "passes or fails_everywhere or without_a_strategy or fails_on_worker_1 or not_reached"
    outcomes = run_battery(2, 1, [SCENES], tmp_path, options=["-k", scenes], alone=True)
    names = [name.partition("::")[2].partition("[")[0] for name in outcomes.collected]
    assert names == [
        "test_passes",
        "test_fails_everywhere",
        "test_passes_after_a_common_failure",
        "test_fails_on_worker_1",
        "test_is_not_reached",
    ]
    problems = outcomes.problems(2)
    # Both workers fail in the same way, and go on.
    assert "test_fails_everywhere[group]\n  on worker 0, 1:" in problems
    assert "ValueError: the same on all workers with 1 replica" in problems
    assert outcomes.passed[f"{SCENES}::test_passes_after_a_common_failure[group]"] == 2
    # One alone fails: nothing that follows is run.
    assert "test_fails_on_worker_1[group]\n  on worker 1:" in problems
    assert "KeyError: 'only here'" in problems
    assert "failed on some workers only: [1]" in problems
    assert f"NOT RUN {SCENES}::test_is_not_reached[group]" in problems
    assert "the workers disagreed before" not in problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "found"),
    [("hangs_on_worker_1", "Timeout"), ("dies_on_worker_1", "worker 1 ended with code 7")],
)
def test_a_worker_that_is_stuck_or_dead_ends_the_battery(
    tmp_path: Path, scene: str, found: str
) -> None:
    options = ["-k", f"{scene} or not_reached", "--timeout=5"]
    outcomes = run_battery(2, 1, [SCENES], tmp_path, options=options, alone=True)
    problems = outcomes.problems(2)
    assert "worker 1 ended with code" in problems and found in problems
    assert "another worker has ended" in problems
    assert f"NOT RUN {SCENES}::test_is_not_reached[group]" in problems
