"""`Finding`: the result of a check. Checks run one after the other, each in bounded time."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Iterable, Iterator

from replicax.foundation import errors


class Level(enum.StrEnum):
    """How serious a finding is; the command fails if there is a problem."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
      check: The name of the check.
      level: How serious it is.
      text: What was found.
      advice: What to do about it; empty if nothing has to be done.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
      name: Its name.
      run: Returns what it finds. It may block: it runs in a thread that is left behind then.
      timeout_s: The seconds that it may take.
    """

    name: str
    run: Callable[[], Iterable[Finding]]
    timeout_s: float = 10.0


def run_all(checks: Iterable[Check]) -> Iterator[Finding]:
    """Runs checks one after the other, and yields what they find.

    A check that raises, or that does not end in time, has found a problem.

    >>> def fails():
    ...     raise errors.UnavailableError("It is gone.")
    >>> [finding.text for finding in run_all([Check("x", fails)])]
    ['It is gone.']
    """
    for check in checks:
        found: list[Finding] = []
        thread = threading.Thread(
            target=_collect, args=(check, found), name=f"replicax-doctor-{check.name}", daemon=True
        )
        thread.start()
        thread.join(check.timeout_s)
        if thread.is_alive():
            yield Finding(
                check.name,
                Level.PROBLEM,
                f"the check did not end within {check.timeout_s:g} s",
                "Something that it uses hangs: a device, a network file system, a name service.",
            )
        else:
            yield from found


def _collect(check: Check, found: list[Finding]) -> None:
    try:
        found += check.run()
    except errors.DistributeError as error:
        found.append(problem(check.name, error))
    except OSError as error:
        found.append(Finding(check.name, Level.PROBLEM, str(error), "Correct what it names."))


def problem(check: str, error: errors.DistributeError) -> Finding:
    """Returns the finding for an error of the library, whose advice it keeps."""
    if error.required:
        return Finding(check, Level.PROBLEM, f"{error.required}, but {error.found}", error.advice)
    return Finding(check, Level.PROBLEM, error.found)
