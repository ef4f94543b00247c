"""The bar about the bars: without a safeguard, the bar that rests on it fails."""

from __future__ import annotations

import dataclasses
import re
import sys

from torture.bars import Outcome, Plan, bar
from torture.programs import run_program
from torture.supervision import run_alone

# What must go red when a safeguard is off, a bar, or the simulation if there is none; and what
# it must say: on a machine that has too much to do, a bar may fail for another reason.
RESTS_ON: dict[str, tuple[int | None, str]] = {
    "dedup": (1, "the counters are"),
    "fencing": (5, "late updates"),
    "heartbeats": (4, "DeadlineExceededError|TimeoutError"),
    "fsync": (36, "not synced"),
    "key check": (42, "let in"),
    "watermark": (None, "rules broken"),
}
_SIMULATED_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class _Found:
    """What a bar said with a safeguard off."""

    verdict: str
    reason: str


@bar(
    54,
    promise="without a safeguard, the bar that rests on it fails",
    limit="6 of 6 saboteurs are noticed",
    minutes=40,
)
def noticed_saboteurs(plan: Plan) -> Outcome:
    """Takes each safeguard away, and looks whether its bar fails."""
    noticed: list[str] = []
    outcome = Outcome()
    for name, (number, told) in RESTS_ON.items():
        plan.say(f"{name} off; noticed so far: {', '.join(noticed) or 'none'}")
        found = _simulate(plan, name) if number is None else _run(plan, name, number)
        where = "the simulation" if number is None else f"bar {number}"
        if found.verdict == "fail" and re.search(told, found.reason):
            noticed.append(name)
        else:
            said = f"{found.verdict} {found.reason}"
            outcome.failures.append(f"{name} is off, but {where} says: {said}")
        plan.say(f"{name} off: {found.verdict}")
    outcome.figure = f"{len(noticed)} of {len(RESTS_ON)}: {', '.join(noticed)}"
    outcome.numbers = {"noticed": len(noticed)}
    return outcome


def _run(plan: Plan, saboteur: str, number: int) -> _Found:
    """Runs the quick form of a bar without a safeguard."""
    options = ["--quick", "--seed", str(plan.seed), "--saboteur", saboteur]
    suffix = f"-without-{saboteur.replace(' ', '-')}"
    found = run_alone(number, seconds=300, options=options, say=plan.say, suffix=suffix)
    return _Found(found["verdict"], "; ".join(found["failures"]))


def _simulate(plan: Plan, saboteur: str) -> _Found:
    command = [sys.executable, "-m", "simulation", "--saboteur", saboteur]
    command += ["--seeds", f"0:{_SIMULATED_SEEDS}", "--processes", "2"]
    done = run_program(command, plan, seconds=600)
    verdicts = {0: "pass", 1: "fail"}
    return _Found(verdicts.get(done.status, "void"), done.output)
