"""The faults of a simulation, and their rates."""

from __future__ import annotations

import dataclasses
import random

# Faults of single messages, and of tasks and connections.
MESSAGE_FAULTS = ("loss", "drop", "duplicate", "delay")
INCIDENTS = (
    "cut",
    "partition",
    "pause",
    "stop",
    "crash",
    "coordinator_pause",
    "coordinator_crash",
    "coordinator_rival",
    "server_pause",
    "server_crash",
)
# How the servers keep variables, and how far workers run apart.
MODES = ("saved_share", "mirror_share", "staleness_share", "lease_share", "sync_share")
# These end a job unless servers keep variables: most histories go without them.
FATAL = ("server_crash",)
# After these another coordinator resumes the job, for which all servers must be available.
REPLACEMENTS = ("coordinator_crash", "coordinator_rival")


@dataclasses.dataclass(frozen=True)
class Faults:
    """The rates of faults. Each history draws at random which kinds it contains.

    Attributes:
      loss: The share of messages that are lost together with their connection.
      drop: The share of requests about variables, and of replies, that are lost silently.
      duplicate: The share that arrives twice, the second time perhaps much later.
      delay: The share that is delayed, with all that follows on the same connection.
      interval_s: The mean time between two incidents.
      kinds: The incidents that may happen. "cut" breaks a connection; "partition" keeps two
        tasks apart for a while; "pause" stops a worker for a while, "stop" for good; "crash"
        kills a worker's process, which may be restarted; "coordinator_pause" and "server_pause"
        stop those for a while; "coordinator_crash" kills the process of the coordinator, and
        another one resumes its job; "coordinator_rival" stops it for a while, and another one has
        the job when it continues; "server_crash" kills the process of a parameter server.
      fatal_share: The share of histories in which servers without snapshots may crash, or stop
        for too long.
      saved_share: The share of histories in which servers keep snapshots.
      mirror_share: The share of histories in which each server is the mirror of another.
      staleness_share: The share of histories with bounded staleness.
      staleness: The bound.
      sync_share: The share of histories with synchronous training, unless staleness is bounded.
      backup_workers: The number of workers that a step of it does not wait for.
      lease_share: The share of histories in which the servers drop the job soon after its
        coordinator was lost.
      error_share: The share of histories in which some closures raise errors.

    >>> Faults.none().kinds
    ()
    """

    loss: float = 0.02
    drop: float = 0.03
    duplicate: float = 0.05
    delay: float = 0.03
    interval_s: float = 0.6
    kinds: tuple[str, ...] = INCIDENTS
    fatal_share: float = 0.15
    saved_share: float = 0.4
    mirror_share: float = 0.3
    staleness_share: float = 0.2
    staleness: int = 0
    sync_share: float = 0.25
    backup_workers: int = 0
    lease_share: float = 0.05
    error_share: float = 0.2

    @classmethod
    def none(cls) -> Faults:
        """Returns rates of zero."""
        rates = dict.fromkeys(MESSAGE_FAULTS, 0.0)
        modes = dict.fromkeys(MODES, 0.0)
        return cls(**rates, **modes, kinds=(), fatal_share=0.0, error_share=0.0)

    def quiet(self) -> Faults:
        """Returns the same modes of the job without any fault."""
        return dataclasses.replace(self, **dict.fromkeys(MESSAGE_FAULTS, 0.0), kinds=())

    def drawn(self, chance: random.Random, later_chance: random.Random) -> Faults:
        """Returns the faults of one history: a few kinds can reveal what a mixture hides.

        Args:
          chance: The random numbers of the history.
          later_chance: Others, for modes that were added later: seeds stay useful.
        """
        rates = {name: getattr(self, name) * (chance.random() < 0.7) for name in MESSAGE_FAULTS}
        modes = {name: float(chance.random() < getattr(self, name)) for name in MODES[:-1]}
        is_sync = later_chance.random() < self.sync_share and not modes["staleness_share"]
        modes["sync_share"] = float(is_sync)
        is_saved = bool(modes["saved_share"] or modes["mirror_share"])
        drawn = [kind for kind in self.kinds if chance.random() < 0.5]
        is_fatal = not is_saved and chance.random() < self.fatal_share
        is_fatal &= not set(drawn).intersection(REPLACEMENTS)
        kinds = tuple(kind for kind in drawn if is_fatal or is_saved or kind not in FATAL)
        return dataclasses.replace(
            self,
            **rates,
            kinds=kinds,
            interval_s=self.interval_s * chance.choice((0.5, 1.0, 2.0)),
            fatal_share=float(is_fatal),
            **modes,
            staleness=chance.randint(0, 4),
            backup_workers=later_chance.randint(0, 1) if is_sync else 0,
            error_share=0.1 * (chance.random() < self.error_share),
        )

    @property
    def has_replacements(self) -> bool:
        """Whether coordinators may be replaced."""
        return bool(set(self.kinds).intersection(REPLACEMENTS))

    @property
    def can_lose_servers(self) -> bool:
        """Whether servers may be away for longer than a job without snapshots tolerates."""
        return bool(self.fatal_share or self.keeps_variables)

    @property
    def is_sync(self) -> bool:
        """Whether training is synchronous."""
        return bool(self.sync_share)

    @property
    def is_mirrored(self) -> bool:
        """Whether servers have mirrors."""
        return bool(self.mirror_share)

    @property
    def keeps_variables(self) -> bool:
        """Whether the variables of a server outlive its process."""
        return bool(self.saved_share or self.mirror_share)
