"""How far ahead programs of several processes are dispatched, with stand-ins for their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from replicax.foundation import gate


class Token:
    """The result of a program that ends some seconds after the one before it."""

    end_of_last = 0.0

    def __init__(self, seconds: float) -> None:
        start = max(time.monotonic(), Token.end_of_last)
        self.end = Token.end_of_last = start + seconds

    def is_ready(self) -> bool:
        return time.monotonic() >= self.end

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self.end - time.monotonic()))


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with gate.state():
        monkeypatch.setattr(gate._Dispatch, "pace", None)
        monkeypatch.setattr(gate._Dispatch, "running", type(gate._Dispatch.running)())
        monkeypatch.setattr(Token, "end_of_last", 0.0)
        gate.set_one_device_per_process()
        yield


class Program:
    """What is dispatched; known by its identity."""


PROGRAM = Program()


def most_running(seconds: float, count: int, program: Program = PROGRAM) -> int:
    """Dispatches programs that take some time each; returns how many ran or waited at once."""
    most = 0
    for _ in range(count):
        gate.wait_for_previous(program)
        gate.set_running(Token(seconds))  # type: ignore[arg-type]
        most = max(most, len(gate._Dispatch.running))
    return most


def test_short_programs_are_dispatched_far_ahead() -> None:
    assert 8 <= most_running(0.0005, 300) <= 32


def test_long_programs_are_dispatched_one_ahead() -> None:
    assert most_running(0.06, 6) == 2


def test_another_program_is_dispatched_one_ahead_until_its_time_is_known() -> None:
    long = Program()
    most_running(0.0005, 300)
    gate.wait_for_previous(long)
    gate.set_running(Token(0.06))  # type: ignore[arg-type]
    assert len(gate._Dispatch.running) <= 2
    assert most_running(0.06, 6, long) == 2


def test_what_was_learned_of_a_program_outlives_a_pause_and_another_program() -> None:
    most_running(0.0005, 300)
    time.sleep(0.05)
    # Long enough that none ends meanwhile.
    assert most_running(0.05, 8) == 8
    most_running(0.05, 1, Program())
    # With the last one of the other program.
    assert most_running(0.05, 7) == 8


def test_finished_programs_do_not_count_as_short_ones() -> None:
    for _ in range(4):
        most_running(0.06, 2)
        time.sleep(0.15)
    assert most_running(0.06, 6) == 2


def test_another_thread_waits_for_all_programs_of_the_first() -> None:
    most_running(0.001, 50)
    found: list[int] = []

    def other() -> None:
        gate.wait_for_previous(PROGRAM)
        found.append(len(gate._Dispatch.running))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert found == [0]


def test_the_error_of_any_program_is_raised() -> None:
    class Failed(Token):
        def block_until_ready(self) -> None:
            super().block_until_ready()
            raise RuntimeError("a peer is lost")

    gate.wait_for_previous(PROGRAM)
    gate.set_running(Failed(0.0))  # type: ignore[arg-type]
    gate.set_running(Token(0.0))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a peer is lost"):
        gate.wait_for_previous(PROGRAM)
