"""What a bar is: a promise, a pass figure, and the function that puts it to the test."""

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
    """How thorough a run is, and where it tells how far it has come.

    Attributes:
      quick: Whether small sizes do, for a smoke run.
      seed: Decides every random choice.
      minutes: How long the soak lasts.
      say: Takes a line for people.
      directory: An empty directory that belongs to the bar.
      saboteur: The safeguard that is switched off; empty if none is.
    """

    quick: bool
    seed: int
    minutes: float
    say: Callable[[str], None]
    directory: Path
    saboteur: str = ""

    def size(self, full: _Size, quick: _Size) -> _Size:
        """Returns the full size, or the one of a smoke run."""
        return quick if self.quick else full

    def chance(self) -> random.Random:
        """Returns a source of random choices; each has the same ones."""
        return random.Random(self.seed)


@dataclasses.dataclass
class Outcome:
    """What a bar measured.

    Attributes:
      figure: The measured figures, for the table.
      numbers: The same for machines.
      failures: Why the promise was not kept.
      voids: Why the test proves nothing: faults that did not land in the midst of work.
    """

    figure: str = ""
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    voids: list[str] = dataclasses.field(default_factory=list)

    def require(self, kept: bool, broken: str) -> None:
        """Notes a part of the promise that was broken, if it was."""
        if not kept:
            self.failures.append(broken)

    def require_landed(self, landed: bool, missed: str) -> None:
        """Notes that the faults of this bar missed the work, if they did."""
        if not landed:
            self.voids.append(missed)

    @property
    def verdict(self) -> str:
        """One of "pass", "fail" and "void"."""
        if self.failures:
            return "fail"
        return "void" if self.voids else "pass"


@dataclasses.dataclass(frozen=True)
class Bar:
    """One promise, and the function that puts it to the test.

    Attributes:
      numbers: The numbers of the acceptance bars that it covers.
      promise: What is promised, in one line.
      limit: The pass figure.
      run: Puts it to the test.
      seconds: The longest that it may take; for the soak, beside its minutes.
      needs_root: Whether it works on network namespaces or mounts.
    """

    numbers: tuple[int, ...]
    promise: str
    limit: str
    run: Callable[[Plan], Outcome]
    seconds: float
    needs_root: bool = False

    @property
    def label(self) -> str:
        """Its numbers, as the table shows them."""
        return "+".join(map(str, self.numbers))


# All bars, in the order in which they run.
REGISTRY: list[Bar] = []


def bar(
    *numbers: int, promise: str, limit: str, minutes: float = 5.0, needs_root: bool = False
) -> Callable[[Callable[[Plan], Outcome]], Callable[[Plan], Outcome]]:
    """Registers the function below as the test of one or several bars."""

    def register(run: Callable[[Plan], Outcome]) -> Callable[[Plan], Outcome]:
        REGISTRY.append(Bar(numbers, promise, limit, run, 60.0 * minutes, needs_root))
        return run

    return register


def chosen(only: list[int] | None) -> list[Bar]:
    """Returns the bars with any of these numbers, in order; without numbers, all."""
    ordered = sorted(REGISTRY, key=lambda b: b.numbers)
    return [b for b in ordered if only is None or set(only) & set(b.numbers)]
