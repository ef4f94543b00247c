"""Start and end times of closures, recorded by the closures themselves.

Every process appends to a file of its own, so a kill between two lines shows exactly which
closure it hit. The clock is that of the machine, the same for all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

_TAIL_BYTES = 128


@dataclasses.dataclass(frozen=True)
class Mark:
    """One line of a process."""

    pid: int
    # "begin", "middle" or "end".
    kind: str
    number: int
    when: float


class Marks:
    """A directory in which closures leave marks; it is shipped with them."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Marks the start and the end of a closure."""
        self._write("begin", number)
        yield
        self._write("end", number)

    def middle(self, number: int) -> None:
        """Marks the start of the second half of a closure."""
        self._write("middle", number)

    def running(self, pid: int) -> int | None:
        """Returns the closure that a process runs, or ran when it died."""
        try:
            with open(f"{self._directory}/{pid}", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                words = file.read().splitlines()[-1].split()
        except (FileNotFoundError, IndexError):
            return None
        return int(words[1]) if words[0] != b"end" else None

    def all(self) -> list[Mark]:
        """Returns all marks in the order of time."""
        found = [
            Mark(int(path.name), kind, int(number), float(when))
            for path in Path(self._directory).iterdir()
            for kind, number, when in (line.split() for line in path.read_text().splitlines())
        ]
        return sorted(found, key=lambda mark: mark.when)

    def longest_gap(self, begin: float) -> float:
        """Returns the longest time without any closure ending, in seconds, from `begin` on."""
        ends = [mark.when for mark in self.all() if mark.kind == "end" and mark.when > begin]
        pairs = zip([begin, *ends], ends, strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)

    def whole_halves(self, pid: int, after: float) -> int:
        """Returns how many second halves a process began and ended after some instant.

        One that began before may have had its answers by then: its end says nothing.
        """
        late = [m for m in self.all() if m.pid == pid and m.when > after]
        begun = {m.number for m in late if m.kind == "middle"}
        return sum(m.kind == "end" and m.number in begun for m in late)

    def next_begin(self, number: int, after: float) -> float | None:
        """Returns when a closure was first started after a given time."""
        begins = (m.when for m in self.all() if m.kind == "begin" and m.number == number)
        return min((when for when in begins if when > after), default=None)

    def _write(self, kind: str, number: int) -> None:
        line = f"{kind} {number} {time.monotonic():.6f}\n".encode()
        file = os.open(f"{self._directory}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line)
        finally:
            os.close(file)
