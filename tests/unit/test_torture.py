"""The torture bench itself: its checks, its checker of histories, its table, its marks."""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path

import pytest

from torture import catalogue, hostile, safeguard_checks, tables
from torture import safeguards as library
from torture.checks import REGISTRY, Outcome, Plan
from torture.histories import Operation, is_linearizable
from torture.marks import Marks
from torture.supervision import run_alone

BARS = {1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14, 15, 16, 18, 21, 22, 23, 26, 27, 28, 29, 30, 31}
BARS |= {33, 36, 42, 50, 51, 52, 53, 54}


def test_every_check_is_registered_once_with_its_claim() -> None:
    numbers = [number for check in REGISTRY for number in check.numbers]
    assert sorted(numbers) == sorted(BARS)
    for check in REGISTRY:
        assert check.claim and check.limit and check.seconds >= 60, check.label
    assert [check.label for check in catalogue.chosen([5, 51])] == ["4+5", "51"]
    assert len(catalogue.chosen(None)) == len(REGISTRY)


def test_bar54_there_is_a_bar_for_every_saboteur() -> None:
    resting = safeguard_checks.RESTS_ON
    assert set(resting) == set(library.NAMES)
    assert {number for number, _ in resting.values() if number is not None} <= BARS


# The order of a save, in check 36.


def test_bar36_calls_that_other_threads_interrupt_are_seen(tmp_path: Path) -> None:
    target, trace = tmp_path / "run", tmp_path / "trace"
    trace.write_text(
        f"7 fsync(4<{target}/tmp/manifest.json> <unfinished ...>\n"
        "8 +++ exited with 0 +++\n"
        "7 <... fsync resumed>) = 0\n"
        f'7 rename("{target}/tmp", "{target}/ckpt-1" <unfinished ...>\n'
        f"9 fsync(5<{target}/late>) = 0\n"
        "7 <... rename resumed>) = 0\n"
        f"7 fsync(4<{target}> <unfinished ...>\n"
        "7 <... fsync resumed>) = -1 EIO (Input/output error)\n"
    )
    assert hostile._events(trace, target) == [
        ("sync", f"{target}/tmp/manifest.json"),
        ("rename", f"{target}/ckpt-1"),
        ("sync", f"{target}/late"),
    ]


# The checker of check 28.


def op(kind: str, value: float, begin: float, end: float = math.inf) -> Operation:
    return Operation(kind, value, begin, end)


FITTING = {
    "nothing": [],
    "a read of the first value": [op("read", 0, 0, 1)],
    "one after the other": [op("assign", 5, 0, 1), op("add", 2, 2, 3), op("read", 7, 4, 5)],
    "a read beside a write may see the old value": [op("assign", 5, 0, 3), op("read", 0, 1, 2)],
    "a read beside a write may see the new value": [op("assign", 5, 0, 3), op("read", 5, 1, 2)],
    "writes side by side in either order": [
        op("assign", 1, 0, 10),
        op("assign", 2, 0, 10),
        op("read", 1, 11, 12),
    ],
    "a write without an answer that took place": [op("add", 4, 0), op("read", 4, 10, 11)],
    "a write without an answer that did not": [op("add", 4, 0), op("read", 0, 10, 11)],
    "a write without an answer that took place late": [
        op("add", 4, 0),
        op("read", 0, 10, 11),
        op("read", 4, 12, 13),
    ],
    "a read without an answer": [op("read", 99, 0)],
}
BROKEN = {
    "a value that was never written": [op("read", 3, 0, 1)],
    "a stale read": [op("assign", 5, 0, 1), op("read", 0, 2, 3)],
    "a write that came back": [
        op("assign", 1, 0, 1),
        op("assign", 2, 2, 3),
        op("read", 1, 4, 5),
    ],
    "two readers that disagree about the order": [
        op("assign", 1, 0, 10),
        op("assign", 2, 0, 10),
        op("read", 1, 11, 12),
        op("read", 2, 13, 14),
    ],
    "an update that was lost": [op("add", 1, 0, 1), op("add", 1, 0, 1), op("read", 1, 2, 3)],
    "an update that counted twice": [op("add", 1, 0, 1), op("read", 2, 2, 3)],
    "a new value and then the old one": [
        op("assign", 5, 0, 10),
        op("read", 5, 1, 2),
        op("read", 0, 3, 4),
    ],
}


@pytest.mark.parametrize("name", FITTING)
def test_bar28_a_history_that_fits_some_order(name: str) -> None:
    assert is_linearizable(FITTING[name])


@pytest.mark.parametrize("name", BROKEN)
def test_bar28_a_history_that_fits_none(name: str) -> None:
    assert not is_linearizable(BROKEN[name])


def real_history(chance: random.Random, num_clients: int = 4) -> list[Operation]:
    """What clients of a real register would see: each operation takes place at one instant."""
    pending: list[tuple[float, float, float, str, float]] = []
    for client in range(num_clients):
        now = chance.random()
        for number in range(12):
            begin = now
            instant = begin + chance.random()
            now = instant + chance.random()
            kind = chance.choice(["read", "assign", "add"])
            pending.append((instant, begin, now, kind, float(client * 12 + number + 1)))
    value, history = 0.0, []
    for _, begin, end, kind, argument in sorted(pending):
        if kind != "read":
            value = argument if kind == "assign" else value + argument
        history.append(Operation(kind, value if kind == "read" else argument, begin, end))
    return history


@pytest.mark.parametrize("seed", range(20))
def test_bar28_histories_of_a_real_register_fit_and_changed_ones_do_not(seed: int) -> None:
    chance = random.Random(seed)
    history = real_history(chance)
    assert is_linearizable(history)
    reads = [i for i, operation in enumerate(history) if operation.kind == "read"]
    index = chance.choice(reads)
    found = history[index]
    # No sum of the numbers that were written has a half in it.
    history[index] = Operation("read", found.value + 0.5, found.begin, found.end)
    assert not is_linearizable(history)


# The table.


def row(result: str, *reasons: str) -> tables.Row:
    return tables.Row("1", "a|promise", "5 of 5", "≥ 5", result, 1.4, reasons, {"n": 5.0}, "abc")


def test_the_table_is_written_for_people_and_machines(tmp_path: Path) -> None:
    rows = [row("pass"), row("void", "no kill landed")]
    tables.save(tmp_path / "deep", rows, {"cores": 2, "size": "full"})
    content = json.loads((tmp_path / "deep" / "table.json").read_text())
    assert content["machine"] == {"cores": 2, "size": "full"}
    assert [line["result"] for line in content["table"]] == ["pass", "void"]
    assert content["table"][0]["numbers"] == {"n": 5.0}
    text = (tmp_path / "deep" / "table.md").read_text()
    assert "| 1 | a\\|promise | 5 of 5 | ≥ 5 | pass | 1 | abc |" in text
    assert "- check 1: no kill landed" in text
    assert [r.has_passed for r in rows] == [True, False]
    assert tables.for_screen(rows).row_count == 2
    # A later run goes on with it, unless it wants other sizes.
    again = tables.load(tmp_path / "deep", "full")
    assert [(r.check, r.result, r.code, list(r.reasons)) for r in again] == [
        ("1", "pass", "abc", []),
        ("1", "void", "abc", ["no kill landed"]),
    ]
    assert tables.load(tmp_path / "deep", "quick") == tables.load(tmp_path, "full") == []


def test_a_bar_whose_faults_missed_proves_nothing() -> None:
    outcome = Outcome("measured")
    assert outcome.result == "pass"
    outcome.require_landed(False, "they missed")
    assert outcome.result == "void"
    outcome.require(True, "fine")
    assert outcome.result == "void"
    outcome.require(False, "broken")
    assert outcome.result == "fail"
    assert outcome.failures == ["broken"]


# Marks.


def test_marks_say_which_closure_a_process_is_in(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "marks")
    mine = os.getpid()
    assert marks.running(mine) is None
    with marks.around(7):
        assert marks.running(mine) == 7
    assert marks.running(mine) is None
    with pytest.raises(KeyError), marks.around(8):
        raise KeyError
    # It did not come to its end.
    assert marks.running(mine) == 8
    first, last = marks.all()[0], marks.all()[-1]
    assert (first.kind, first.number, last.kind, last.number) == ("begin", 7, "begin", 8)
    assert marks.next_begin(8, first.when) == last.when
    assert marks.next_begin(9, 0.0) is None
    assert 0 <= marks.longest_gap(first.when) < 60


def test_bar5_only_halves_that_began_late_count_as_late(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "marks")
    mine = os.getpid()
    with marks.around(1):
        marks.middle(1)
        assert marks.running(mine) == 1
        woken_s = time.monotonic()
        time.sleep(0.001)
    # It had its answers before.
    assert marks.whole_halves(mine, woken_s) == 0

    def refused() -> None:
        with marks.around(2):
            marks.middle(2)
            raise KeyError

    with pytest.raises(KeyError):
        refused()
    assert marks.whole_halves(mine, woken_s) == 0
    with marks.around(3):
        marks.middle(3)
    assert marks.whole_halves(mine, woken_s) == 1
    assert marks.whole_halves(mine + 1, woken_s) == 0


def test_a_plan_has_sizes_and_repeats_its_choices(tmp_path: Path) -> None:
    plan = Plan(True, 3, 1.0, lambda _: None, tmp_path)
    assert plan.size(100, 2) == 2
    assert plan.rng().random() == plan.rng().random()


@pytest.mark.slow
def test_a_bar_that_cannot_run_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torture.supervision.OUT", tmp_path)
    found = run_alone(10**6, seconds=60, options=[], report=lambda _: None)
    assert found["result"] == "fail"
    assert "check-1000000.log" in found["failures"][0]
    assert (tmp_path / "logs" / "check-1000000.log").read_text()
