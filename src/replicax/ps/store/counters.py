"""What a parameter server counts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Figures:
    """Counters since the process started. They are for people: a race may lose a count.

    Attributes:
      requests: Requests that were answered, whatever the answer.
      updates: Changes that closures asked for.
      applied: Changes that were made.
      duplicates: Changes that had been made before.
      failures: Closures whose changes were refused.
      reads: Parts that were asked for.
      known_reads: Those of them whose version the caller had.
      rows_read: Rows that were read one by one.
      rows_written: Rows that were changed one by one.
    """

    requests: int = 0
    updates: int = 0
    applied: int = 0
    duplicates: int = 0
    failures: int = 0
    reads: int = 0
    known_reads: int = 0
    rows_read: int = 0
    rows_written: int = 0

    def as_dict(self) -> dict[str, int]:
        """Returns the counters by name."""
        return dataclasses.asdict(self)
