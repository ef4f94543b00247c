"""Faults in a group of real processes: each ends in an error that names the task, and a code."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
from test_group import PROMISED_S, Scene, last_words
from test_group import scene as scene
from test_group import three as three

from replicax.group import exit_codes

RESTART = exit_codes.RESTART_GROUP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("kill", 0),
        ("kill in exchange", 1),
        pytest.param("kill", 1, marks=pytest.mark.slow),
        pytest.param("kill in exchange", 0, marks=pytest.mark.slow),
    ],
)
def test_bar31_a_killed_task_is_named_by_all_others(three: Scene, kind: str, odd: int) -> None:
    members = three.start(kind, indices=(0, 1, 2), odd=odd)
    lost = members.pop(odd)
    assert lost.wait() == -signal.SIGKILL
    at = lost.event("fault")["at"]
    for member in members:
        assert member.wait() == RESTART
        error = member.error()
        assert error["kind"] == "UnavailableError"
        assert f"/job:worker/task:{odd} at" in error["text"]
        assert error["at"] - at < 2.0 + 4.0  # Two seconds, on a busy machine.
        assert "UnavailableError" in last_words(member)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_bar32_a_stopped_task_is_named_by_all_others(three: Scene, odd: int) -> None:
    members = three.start("stop", indices=(0, 1, 2), odd=odd)
    stopped = members.pop(odd)
    at = stopped.wait_for("fault")["at"]
    for member in members:
        assert member.wait() == RESTART
        assert time.time() - at < PROMISED_S
        error = member.error()
        assert error["kind"] == "UnavailableError"
        assert f"/job:worker/task:{odd} at" in error["text"]
        assert "not answered for 2 s" in error["text"]
        assert "UnavailableError" in last_words(member)
    # The stopped one ends, too, when it continues: it is no orphan.
    assert psutil.Process(stopped.process.pid).status() == psutil.STATUS_STOPPED
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped.wait(PROMISED_S + 10) == RESTART
    assert stopped.error()["kind"] == "UnavailableError"


@pytest.mark.slow
@pytest.mark.parametrize("odd", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_of_the_program_of_one_task(three: Scene, odd: int) -> None:
    members = three.start("raise", indices=(0, 1, 2), odd=odd)
    failed = members.pop(odd)
    assert failed.wait() == exit_codes.FAILED
    assert "ValueError: the data is bad" in last_words(failed)
    at = failed.event("fault")["at"]
    for member in members:
        assert member.wait() == RESTART
        error = member.error()
        assert error["kind"] == "UnavailableError"
        assert f"/job:worker/task:{odd} at" in error["text"]
        assert "ValueError: the data is bad" in error["text"]
        assert error["at"] - at < PROMISED_S


def test_a_task_whose_program_ends_early(scene: Scene) -> None:
    other, early = scene.start("exit early", odd=1)
    assert early.wait() == 0
    assert other.wait() == RESTART
    assert "/job:worker/task:1" in other.error()["text"]
    assert "has ended" in other.error()["text"]
    assert other.error()["at"] - early.event("fault")["at"] < PROMISED_S


@pytest.mark.parametrize(
    "kind", ["asleep", pytest.param("late at barrier", marks=pytest.mark.slow)]
)
def test_a_task_that_stands_still_is_named_with_its_stack(scene: Scene, kind: str) -> None:
    other, asleep = scene.start(kind, odd=1)
    at = asleep.wait_for("fault")["at"]
    assert other.wait() == RESTART
    error = other.error()
    assert error["kind"] == "DeadlineExceededError"
    assert "/job:worker/task:1" in error["text"]
    assert "within 4 s" in error["text"]
    assert error["at"] - at < PROMISED_S
    # The watchdog has logged where it is.
    assert "The stacks of /job:worker/task:1" in other.errors_text
    assert "in lie_down" in other.errors_text
    last_words(other)


def test_a_thread_of_the_program_does_not_keep_a_process_whose_group_has_failed(
    scene: Scene,
) -> None:
    other, lost = scene.start("kill beside a thread", odd=1)
    assert lost.wait() == -signal.SIGKILL
    at = time.time()
    assert other.wait() == RESTART
    assert time.time() - at < PROMISED_S
    assert other.error()["kind"] == "UnavailableError"


def test_an_error_of_jax_outside_the_guard_is_explained(scene: Scene) -> None:
    other, lost = scene.start("unguarded", odd=1)
    assert lost.wait() == -signal.SIGKILL
    assert other.wait() == RESTART
    assert "The cause: UnavailableError: " in last_words(other)
    assert "/job:worker/task:1" in last_words(other)


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
def test_a_task_that_ends_while_jax_starts(scene: Scene, odd: int) -> None:
    """JAX cannot be interrupted then: the process says why it ends, and does."""
    members = scene.start("kill at start", odd=odd)
    lost = members.pop(odd)
    assert lost.wait() == -signal.SIGKILL
    (other,) = members
    # The end of the chief may come before its reply to the roll call: then that fails.
    assert other.wait() == RESTART or (odd == 0 and other.has("alive"))
    assert other.error()["kind"] in ("UnavailableError", "DeadlineExceededError")
    assert f"/job:worker/task:{odd} at" in other.error()["text"]
    last_words(other)
