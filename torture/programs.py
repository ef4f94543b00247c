"""Runs other programs with a time limit, and captures their output."""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Mapping, Sequence

from torture.checks import ROOT, Plan

_LINES = 200


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of a program.

    Attributes:
      status: Its exit status.
      seconds: How long it took.
      output: The last lines that it printed.
    """

    status: int
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def run_program(
    command: Sequence[str], plan: Plan, *, seconds: float, env: Mapping[str, str] | None = None
) -> Done:
    """Runs a program; raises TimeoutExpired if it takes too long."""
    path = plan.directory / "program.log"
    start = time.monotonic()
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        while process.poll() is None:
            spent = time.monotonic() - start
            if spent > seconds:
                raise subprocess.TimeoutExpired(list(command), seconds)
            if tail := _tail(path.read_bytes()):
                plan.report(tail[-1])
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    spent = time.monotonic() - start
    return Done(process.returncode, spent, "\n".join(_tail(path.read_bytes())))


def _tail(text: bytes) -> list[str]:
    return text.decode(errors="replace").replace("\r", "\n").splitlines()[-_LINES:]
