"""`rx.ray` and `replicax run --ray` on a real Ray cluster; `make test-ray` runs these alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SERVICE = ROOT / "tests" / "services" / "ray.sh"
DRIVER = ROOT / "tests" / "support" / "programs" / "ray_driver.py"
# What the suite sets for its own process.
NOT_INHERITED = ("NPROC", "TF_CONFIG", "PYTHONPATH", "PYTHONWARNINGS", "XLA_FLAGS")
ENV = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
ENV |= {"JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Ray cluster; the variables of processes that use it."""
    directory = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [SERVICE, "up", directory], env=ENV, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == 0
    yield {
        **ENV,
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
