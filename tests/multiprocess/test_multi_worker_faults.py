"""Faults of real workers of MultiWorkerMirroredStrategy: who is named, when, and the exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from test_group import PROMISED_S, Member, Scene, last_words

from replicax.group import exit_codes

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "sync_training.py"
RESTART = exit_codes.RESTART_GROUP


class Training(Scene):
    """The workers of a strategy; `start` takes the scene, and who does something else."""

    def train(self, scene: str, odd: int = -1, num_steps: int = 1_000_000) -> list[Member]:
        members = [
            self.run(
                PROGRAM,
                [scene, str(odd), str(num_steps)],
                TF_CONFIG=json.dumps(
                    {"cluster": self.cluster, "task": {"type": "worker", "index": index}}
                ),
                REPLICAX_TIMING="fast",
            )
            for index in range(len(self.cluster["worker"]))
        ]
        self.members += members
        return members


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Training]:
    with contextlib.closing(Training(tmp_path, request.param)) as made:
        yield made


def assert_others_name(members: Sequence[Member], odd: int, since: float, *parts: str) -> None:
    for member in members:
        assert member.wait() == RESTART, member.errors_text[-3000:]
        error = member.error()
        assert error["kind"] == "UnavailableError", error
        assert f"/job:worker/task:{odd} at" in error["text"]
        assert all(part in error["text"] for part in parts)
        assert error["at"] - since < PROMISED_S
        assert "UnavailableError" in last_words(member)


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("kill", 0),
        ("kill eager", 1),
        ("kill", 1),
        pytest.param("kill eager", 0, marks=pytest.mark.slow),
    ],
)
def test_bar31_sigkill_of_a_worker_in_a_step(workers: Training, kind: str, odd: int) -> None:
    members = workers.train(kind, odd)
    lost = members.pop(odd)
    assert lost.wait() == -signal.SIGKILL
    assert_others_name(members, odd, lost.event("fault")["at"])


@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bar32_sigstop_of_a_worker_in_a_step(workers: Training, odd: int) -> None:
    members = workers.train("stop", odd)
    stopped = members.pop(odd)
    at = stopped.wait_for("fault")["at"]
    assert_others_name(members, odd, at, "not answered for 2 s")
    assert time.time() - at < PROMISED_S
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.wait(PROMISED_S + 10) == RESTART


def test_an_error_of_the_program_of_one_worker(workers: Training) -> None:
    members = workers.train("raise", 1)
    failed = members.pop(1)
    assert failed.wait() == exit_codes.FAILED
    assert "ValueError: the data is bad" in last_words(failed)
    at = failed.event("fault")["at"]
    assert_others_name(members, 1, at, "it has ended with ValueError: the data is bad")


def test_bar34_another_shape_on_one_worker(workers: Training) -> None:
    members = workers.train("shape", 1)
    at = members[1].wait_for("fault")["at"]
    for member in members:
        assert member.wait() == exit_codes.FAILED, member.errors_text[-3000:]
        error = member.error()
        assert error["kind"] == "InvalidArgumentError", error
        assert "/job:worker/task:0" in error["text"]
        assert "/job:worker/task:1" in error["text"]
        assert "compiled_step" in error["text"]
        assert error["at"] - at < 5.0 + 3.0  # Five seconds, on a busy machine.


def test_workers_that_end_together_end_without_noise(workers: Training) -> None:
    members = workers.train("none", num_steps=30)
    count = len(members)
    for member in members:
        assert member.wait() == 0, member.errors_text[-3000:]
        assert member.event("end")["steps"] == 30
        assert member.event("end")["sum"] == 30 * 2 * count * 8 * 4
        lines = member.errors_text.splitlines()
        assert all(line.startswith("The group is not complete: ") for line in lines), lines
