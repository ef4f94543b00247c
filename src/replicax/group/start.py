"""Starts JAX on all members of a group, after the roll call."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import msgspec

from replicax.foundation import errors, jax_compat, settings
from replicax.group.collective_sockets import Endpoint
from replicax.group.members import Members
from replicax.group.timing import GroupTiming
from replicax.group.tunnel import Tunnel

_TIMEOUT_FLAG = "--xla_cpu_collective_timeout_seconds"


class Started(msgspec.Struct, frozen=True):
    """What a member tells the others after the start of JAX.

    Attributes:
      platform: The kind of its devices.
      endpoints: Where its collectives listen.
    """

    platform: str
    endpoints: list[Endpoint]


def require_same_platform(members: Members, platforms: Sequence[str]) -> None:
    """Raises unless all members compute on devices of the same kind.

    >>> from replicax.cluster.spec import ClusterSpec
    >>> require_same_platform(Members.of(ClusterSpec({"worker": ["a:1", "b:1"]})), ["cpu", "gpu"])
    Traceback (most recent call last):
      ...
    replicax.errors.InvalidArgumentError: All tasks of a group must have devices of one kind, ...
    """
    for index, platform in enumerate(platforms):
        if platform != platforms[0]:
            raise errors.InvalidArgumentError(
                "All tasks of a group must have devices of one kind",
                f"{members.name(0)} has {platforms[0]!r}, and {members.name(index)} {platform!r}",
                "Set JAX_PLATFORMS to the same for all tasks.",
            )


def require_not_started() -> None:
    """Raises if JAX runs already: it cannot join other processes any more."""
    if jax_compat.is_distributed_started():
        raise errors.ContextError(
            "A strategy over several processes starts `jax.distributed` itself",
            "the program has started it",
            "Remove the call of `jax.distributed.initialize`.",
        )
    if jax_compat.is_backend_started():
        raise errors.ContextError(
            "A strategy over several processes must be created before JAX starts its devices",
            "the program has used them already, in a computation, an array or `jax.devices()`",
            "Create the strategy first in the program, right after the imports.",
        )


def start_jax(
    members: Members, index: int, tunnel: Tunnel, timing: GroupTiming, arrive_s: float
) -> None:
    """Starts `jax.distributed`, with collectives at this member's own address."""
    # A little longer than the group waits, whose error names the task.
    _limit_collectives(arrive_s + timing.explain_s)
    jax_compat.start_distributed(
        tunnel.address,
        tunnel.address,
        members.count,
        index,
        members.host(index),
        round(timing.start_s),
    )


def _limit_collectives(seconds: float) -> None:
    """Makes collectives on CPUs fail, rather than wait without end, if a member does not arrive."""
    flags = settings.XLA_FLAGS.read("")
    if not re.search(rf"{_TIMEOUT_FLAG}\b", flags):
        settings.XLA_FLAGS.write(f"{flags} {_TIMEOUT_FLAG}={max(round(seconds), 1)}".strip())


def devices_of(count: int) -> tuple[jax_compat.Device, ...]:
    """Returns the devices of all processes, in the order of the processes."""
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if {device.process_index for device in found} != set(range(count)):
        raise errors.ContextError(
            f"JAX must know the devices of all {count} tasks",
            f"it knows those of {len({d.process_index for d in found})}",
            "Check that all tasks have devices of the same kind.",
        )
    return tuple(found)
