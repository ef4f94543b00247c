"""`rx.ray` and `replicax run --ray` on a real Ray cluster; `make test-ray` runs these alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launched_training as training
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVICE = training.ROOT / "tests" / "services" / "ray.sh"
DRIVER = training.ROOT / "tests" / "support" / "programs" / "ray_driver.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray cluster; the variables of processes that use it."""
    directory = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [SERVICE, "up", directory], env=training.ENV, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == 0
    yield {
        **training.ENV,
        "RAY_ADDRESS": done.stdout.strip(),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(directory / "token"),
    }
    subprocess.run([SERVICE, "down", directory], check=True, timeout=120)


def drive(name: str, directory: Path, cluster: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, DRIVER, name, directory],
        env=cluster,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_group_that_loses_a_worker_restarts_and_ends_with_the_exact_count(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    found = drive("sync", tmp_path, cluster)
    # Three passes over 0..63, in 24 batches of 8 rows.
    expected = {"first": 0, "steps": 24, "rows": 3 * sum(range(64))}
    assert found["plain"] == [expected, expected]
    # From the checkpoint of step 12.
    assert found["lost"] == [{**expected, "first": 12}] * 2
    assert found["error"] == "not this one"


def test_datasets_of_ray_are_read_whole_or_split_by_ray(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    found = drive("data", tmp_path, cluster)
    ids = list(range(30))
    sums = [float(sum(ids[i : i + 8])) for i in range(0, 30, 8)]
    assert found["whole"] == [sums, sums]
    first, second = found["split"]
    assert first == second and len(first) == 4
    assert sum(first) == sum(range(32))
    assert "rx.ray.batches" in found["error"]


def test_ray_restarts_lost_workers_of_a_ps_cluster_and_the_count_is_exact(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    found = drive("servers", tmp_path, cluster)
    assert found["count"] == found["scheduled"] >= 200
    first, first_again, second, second_again = found["pids"]
    assert first != first_again and second != second_again


def command(directory: Path, *options: str) -> list[str | Path]:
    run = [*training.REPLICAX, "run", "--ray", *options, f"--logs={directory / 'logs'}"]
    return [*run, training.TRAIN, *training.arguments(directory / "checkpoints")]


@pytest.mark.parametrize("servers", [[], ["--ps=1"]], ids=["sync", "ps"])
def test_the_same_program_has_the_same_result_on_ray(
    cluster: dict[str, str], tmp_path: Path, servers: list[str]
) -> None:
    output = training.run(command(tmp_path, "--workers=2", *servers), cluster)
    right, norm = training.plain_result()
    assert training.result_in(output)[0] == pytest.approx(right, abs=0.4)
    assert training.result_in(output)[1] == pytest.approx(norm, rel=1e-4)
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == ({"chief-0.log"} if servers else {"worker-0.log", "worker-1.log"})


def test_a_killed_worker_restarts_the_group_on_ray_and_the_result_is_the_same(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    output = training.run(
        command(tmp_path, "--workers=2"),
        cluster,
        kill=("worker", 1),
        directory=tmp_path / "checkpoints",
    )
    training.require_one_restart(output)
    assert training.result_in(output)[1] == pytest.approx(training.plain_result()[1], rel=1e-4)


def test_a_program_that_fails_on_ray_is_not_restarted(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys\nprint('once', flush=True)\nsys.exit(3)\n")
    done = subprocess.run(
        [*training.REPLICAX, "run", "--ray", "--workers=1", program],
        env=cluster,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 3, done.stdout
    assert done.stdout.count("once") == 1
