"""Every program of README and docs runs, and prints what the page says that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parents[2]
# Pages whose programs another test runs, and checks more of.
CHECKED_BY = {
    "docs/guides/faults.md": "tests/examples/test_examples_parameter_server.py",
    "docs/guides/keras.md": "tests/examples/test_examples.py",
    "docs/guides/multi_worker.md": "tests/examples/test_examples_multi_worker.py",
    "docs/guides/parameter-servers.md": "tests/examples/test_examples_parameter_server.py",
    "docs/guides/porting.md": "tests/unit/test_cli_port.py",
    "docs/guides/tf-keras.md": "tests/examples/test_examples.py",
    "docs/guides/tf-programs.md": "tests/examples/test_tf_guide.py",
}
# All together take minutes. The first program of the README runs by default, in test_examples.py.
CASES = [
    pytest.param(page, number, id=f"{page}-{number}", marks=pytest.mark.slow)
    for page in pages.pages()
    if page not in CHECKED_BY
    for number, _ in enumerate(pages.programs(page))
]


@pytest.mark.parametrize(("page", "number"), CASES)
def test_program_of_a_page_runs_and_prints_what_stands_there(
    page: str, number: int, tmp_path: Path
) -> None:
    program = pages.programs(page)[number]
    pages.check(program, pages.run(program, tmp_path))


def test_pages_that_other_tests_run_are_named_there() -> None:
    for page, test in CHECKED_BY.items():
        assert Path(page).name in (ROOT / test).read_text(), (page, test)
        assert pages.programs(page), page


def run_claim(*arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, f"docs/claims/{arguments[0]}.py", *arguments[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env=env, timeout=250, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_the_claim_about_updates_that_count_once_holds(tmp_path: Path) -> None:
    picture = tmp_path / "killed.png"
    output = run_claim("exactly_once", "--seconds", "8", "--picture", str(picture))
    numbers = re.match(r"(\d+) closures scheduled, (\d+) counted; (\d+) attempts", output)
    assert numbers is not None, output
    scheduled, counted, attempts = map(int, numbers.groups())
    assert scheduled == counted < attempts
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
def test_the_claim_about_programs_that_overlap_holds() -> None:
    assert run_claim("overlapping_programs", "replicax") == "8000 steps of 4 threads on 8 devices\n"
