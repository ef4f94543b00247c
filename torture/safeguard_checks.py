"""The check of the checks: without a safeguard, the check that depends on it fails."""

from __future__ import annotations

import dataclasses
import re
import sys

from torture.checks import Outcome, Plan, check
from torture.programs import run_program
from torture.supervision import run_alone

# The check that must fail without a safeguard (None for the simulation), and a pattern of its
# reason: on a busy machine, a check may fail for another reason.
RESTS_ON: dict[str, tuple[int | None, str]] = {
    "dedup": (1, "the counters are"),
    "fencing": (5, "late updates"),
    "heartbeats": (4, "DeadlineExceededError|TimeoutError"),
    "fsync": (36, "not synced"),
    "key check": (42, "let in"),
    "watermark": (None, "violations: [1-9]"),
}
_SIMULATED_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class _Found:
    """The result of a check without a safeguard."""

    result: str
    reason: str


@check(
    54,
    claim="without a safeguard, the check that depends on it fails",
    limit="6 of 6 saboteurs are detected",
    minutes=40,
)
def detected_saboteurs(plan: Plan) -> Outcome:
    """Disables each safeguard in turn, and requires that its check fails."""
    detected: list[str] = []
    outcome = Outcome()
    for name, (number, expected) in RESTS_ON.items():
        plan.report(f"{name} off; detected so far: {', '.join(detected) or 'none'}")
        found = _simulate(plan, name) if number is None else _run(plan, name, number)
        where = "the simulation" if number is None else f"check {number}"
        if found.result == "fail" and re.search(expected, found.reason):
            detected.append(name)
        else:
            actual = f"{found.result} {found.reason}"
            outcome.failures.append(f"{name} is off, but {where} reports: {actual}")
        plan.report(f"{name} off: {found.result}")
    outcome.measured = f"{len(detected)} of {len(RESTS_ON)}: {', '.join(detected)}"
    outcome.numbers = {"detected": len(detected)}
    return outcome


def _run(plan: Plan, saboteur: str, number: int) -> _Found:
    """Runs the quick form of a check without a safeguard."""
    options = ["--quick", "--seed", str(plan.seed), "--saboteur", saboteur]
    suffix = f"-without-{saboteur.replace(' ', '-')}"
    found = run_alone(number, seconds=300, options=options, report=plan.report, suffix=suffix)
    return _Found(found["result"], "; ".join(found["failures"]))


def _simulate(plan: Plan, saboteur: str) -> _Found:
    command = [sys.executable, "-m", "simulation", "--saboteur", saboteur]
    command += ["--seeds", f"0:{_SIMULATED_SEEDS}", "--processes", "2"]
    done = run_program(command, plan, seconds=600)
    results = {0: "pass", 1: "fail"}
    return _Found(results.get(done.status, "void"), done.output)
