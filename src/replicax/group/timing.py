"""`GroupTiming`: the timeouts of a group."""

from __future__ import annotations

import dataclasses

from replicax.foundation import settings


@dataclasses.dataclass(frozen=True)
class GroupTiming:
    """Timeouts in seconds.

    Attributes:
      join_s: The time within which all tasks must report for the roll call.
      remind_s: The interval between two log lines about tasks that are missing.
      linger_s: The time for which the chief tells late tasks that the roll call has failed.
      beat_s: The interval between two heartbeats.
      dead_s: The time without a heartbeat after which a task is lost. Longer than for parameter
        servers, where others take over: a false alarm costs a restart of the whole group.
      arrive_s: The time within which all tasks must arrive at a call or a collective, if the user
        sets none. A task may compile, evaluate or save meanwhile.
      report_s: The time after which a wait for another task is logged, with the stack of that task.
      differ_s: The time for which the main threads may wait in different calls.
      start_s: The time within which JAX must start on all tasks.
      leave_s: The time for which a task that ends waits until the others do.
      grace_s: The time that the main thread has to react to the loss of a task.

    >>> GroupTiming().dead_s, GroupTiming.fast().dead_s
    (20.0, 2.0)
    """

    join_s: float = 300.0
    remind_s: float = 5.0
    linger_s: float = 3.0
    beat_s: float = 1.0
    dead_s: float = 20.0
    arrive_s: float = 1800.0
    report_s: float = 30.0
    differ_s: float = 4.0
    start_s: float = 120.0
    leave_s: float = 30.0
    grace_s: float = 8.0

    @property
    def explain_s(self) -> float:
        """The time after which it is known whether a task is lost."""
        return self.dead_s + 2 * self.beat_s

    @classmethod
    def fast(cls) -> GroupTiming:
        """Returns the profile for tests: faults are detected within two seconds."""
        return cls(
            # On a busy machine, one process may start much later than the others.
            join_s=30.0,
            remind_s=1.0,
            linger_s=1.0,
            beat_s=0.25,
            dead_s=2.0,
            arrive_s=10.0,
            report_s=2.0,
            differ_s=1.0,
            start_s=30.0,
            leave_s=3.0,
            grace_s=2.0,
        )

    @classmethod
    def from_environment(cls) -> GroupTiming:
        """Returns the profile that the environment variable REPLICAX_TIMING selects."""
        return cls.fast() if settings.wants_fast_timing() else cls()
