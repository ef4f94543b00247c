"""How long the coordinator waits for what: the constants behind every bound it promises."""

from __future__ import annotations

import dataclasses
import os

from replicax.foundation import errors

_VARIABLE = "REPLICAX_TIMING"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds, and limits that count in seconds. All can be changed.

    Attributes:
      beat_s: Every task is asked for a sign of life so often.
      dead_s: A task that gave no sign for so long is lost.
      cancel_s: After an error, closures that run are waited for so long.
      no_workers_s: Closures wait so long for a worker, when none is left.
      handshake_s: A connection must say who it is within this time.
      worker_orphan_s: A worker waits so long for its coordinator before it drops the job.
      data_s: A parameter server must answer a worker within this time, and more for many bytes.
      return_s: A parameter server that can come back may be away for so long, may be without
        its mirror, or may come back again and again while no closure ends.
      blame_s: Reports about one parameter server count together for so long. A worker makes one
        after `data_s`, and three are believed.
      poison_limit: A closure that ended so many workers is not tried again.

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
                "A task must be able to miss a beat: `dead_s` is at least twice `beat_s`",
                f"they are {self.dead_s} and {self.beat_s}",
                "Beat more often, or wait longer.",
            )
        if self.blame_s < 2 * self.data_s:
            raise errors.InvalidArgumentError(
                "Three reports of a worker that waits each time must be able to count "
                "together: `blame_s` is at least twice `data_s`",
                f"they are {self.blame_s} and {self.data_s}",
                "Keep reports for longer, or wait less for an answer.",
            )

    @classmethod
    def fast(cls) -> Timing:
        """Returns the profile for tests: faults are noticed within two seconds."""
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
        """Returns the profile that the variable REPLICAX_TIMING names; without it, the default."""
        name = os.environ.get(_VARIABLE, "")
        if name in ("", "default"):
            return cls()
        if name == "fast":
            return cls.fast()
        raise errors.InvalidArgumentError(
            f"The environment variable {_VARIABLE} must be 'default' or 'fast'",
            f"it is {name!r}",
            "Correct it, or remove it.",
        )
