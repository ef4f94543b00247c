"""Reliability checks: a claim, its limit, and the function that measures it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

_Size = TypeVar("_Size", int, float)

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "torture"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parameters of a run.

    Attributes:
      quick: Whether to use small sizes, for a smoke run.
      seed: The seed of all random choices.
      minutes: The duration of the soak test.
      report: Receives progress messages.
      directory: An empty directory for the check.
      saboteur: The safeguard that is disabled; empty if none is.
    """

    quick: bool
    seed: int
    minutes: float
    report: Callable[[str], None]
    directory: Path
    saboteur: str = ""

    def size(self, full: _Size, quick: _Size) -> _Size:
        """Returns the full size, or the one of a smoke run."""
        return quick if self.quick else full

    def rng(self) -> random.Random:
        """Returns a new random generator with the seed of the run."""
        return random.Random(self.seed)


@dataclasses.dataclass
class Outcome:
    """The outcome of a check.

    Attributes:
      measured: The measured values, for the table.
      numbers: The measured values by name.
      failures: Why the check failed.
      voids: Why the check proves nothing: faults that did not hit running work.
    """

    measured: str = ""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    voids: list[str] = dataclasses.field(default_factory=list)

    def require(self, kept: bool, broken: str) -> None:
        """Records a failure unless a condition holds."""
        if not kept:
            self.failures.append(broken)

    def require_landed(self, landed: bool, missed: str) -> None:
        """Records that the check is void unless its faults hit running work."""
        if not landed:
            self.voids.append(missed)

    @property
    def result(self) -> str:
        """One of "pass", "fail" and "void"."""
        if self.failures:
            return "fail"
        return "void" if self.voids else "pass"


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim, and the function that checks it.

    Attributes:
      numbers: The numbers of the checks in the reliability contract that it covers.
      claim: The claim in one line.
      limit: The pass criterion.
      run: Measures it.
      seconds: Its time limit; for the soak test, in addition to its minutes.
      needs_root: Whether it needs network namespaces or mounts.
    """

    numbers: tuple[int, ...]
    claim: str
    limit: str
    run: Callable[[Plan], Outcome]
    seconds: float
    needs_root: bool = False

    @property
    def label(self) -> str:
        """Its numbers, for the table."""
        return "+".join(map(str, self.numbers))


# All checks, in the order in which they run.
REGISTRY: list[Check] = []


def check(
    *numbers: int, claim: str, limit: str, minutes: float = 5.0, needs_root: bool = False
) -> Callable[[Callable[[Plan], Outcome]], Callable[[Plan], Outcome]]:
    """Registers a function as one or several checks."""

    def register(run: Callable[[Plan], Outcome]) -> Callable[[Plan], Outcome]:
        REGISTRY.append(Check(numbers, claim, limit, run, 60.0 * minutes, needs_root))
        return run

    return register


def chosen(only: list[int] | None) -> list[Check]:
    """Returns the checks with any of these numbers, in order; all if `only` is None."""
    ordered = sorted(REGISTRY, key=lambda b: b.numbers)
    return [b for b in ordered if only is None or set(only) & set(b.numbers)]
