"""`Timing`: the timeouts of the coordinator."""

from __future__ import annotations

import dataclasses

from replicax.foundation import errors, settings


@dataclasses.dataclass(frozen=True)
class Timing:
    """Timeouts in seconds.

    Attributes:
      beat_s: The interval between two heartbeats of a task.
      dead_s: The time without a reply after which a task is lost.
      cancel_s: The time to wait for running closures after an error.
      no_workers_s: The time that closures wait while no worker is ready.
      handshake_s: The time within which a connection must complete its handshake.
      worker_orphan_s: The time after which a worker without its coordinator drops the job.
      data_s: The time within which a parameter server must reply to a worker; longer for large
        requests.
      return_s: The time within which a lost parameter server must recover. Also the maximum time
        without its mirror, and of repeated recovery while no closure ends.
      blame_s: The time for which reports about one parameter server count together. A worker
        reports after `data_s`, and three reports make the server lost.
      poison_limit: The number of workers that a closure may kill before it fails.

    >>> Timing().dead_s, Timing.fast().dead_s
    (10.0, 2.0)
    """

    beat_s: float = 1.0
    dead_s: float = 10.0
    cancel_s: float = 10.0
    no_workers_s: float = 300.0
    handshake_s: float = 5.0
    worker_orphan_s: float = 30.0
    data_s: float = 60.0
    return_s: float = 300.0
    blame_s: float = 200.0
    poison_limit: int = 3

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise errors.InvalidArgumentError(
                    f"`{field.name}` must be positive",
                    f"it is {value!r}",
                    "Choose a larger one.",
                )
        if self.dead_s < 2 * self.beat_s:
            raise errors.InvalidArgumentError(
                "A task must be able to miss a heartbeat: `dead_s` is at least twice `beat_s`",
                f"they are {self.dead_s} and {self.beat_s}",
                "Choose a shorter `beat_s`, or a longer `dead_s`.",
            )
        if self.blame_s < 2 * self.data_s:
            raise errors.InvalidArgumentError(
                "Three reports of one worker must count together: `blame_s` is at least twice "
                "`data_s`",
                f"they are {self.blame_s} and {self.data_s}",
                "Choose a longer `blame_s`, or a shorter `data_s`.",
            )

    @classmethod
    def fast(cls) -> Timing:
        """Returns the profile for tests: faults are detected within two seconds."""
        return cls(
            beat_s=0.25,
            dead_s=2.0,
            cancel_s=2.0,
            no_workers_s=5.0,
            handshake_s=1.0,
            worker_orphan_s=3.0,
            data_s=5.0,
            return_s=20.0,
            blame_s=20.0,
        )

    @classmethod
    def from_environment(cls) -> Timing:
        """Returns the profile that the environment variable REPLICAX_TIMING selects."""
        return cls.fast() if settings.wants_fast_timing() else cls()
