"""Saboteurs: each takes one safeguard away, so that a check can be seen to rest on it.

A check that passes with its safeguard gone proves nothing. These are for tests alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from replicax.coordinator.scheduling.closures import ClosureQueue
from replicax.coordinator.scheduling.policy import Policy
from replicax.foundation import errors
from replicax.ps.store.applied_updates import AppliedUpdates
from replicax.ps.store.jobs import Job
from replicax.transport.zmq.authenticator import KnownKeys

# What is put where: an owner, the name of its attribute, and the value.
_Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def at_work(name: str) -> Iterator[None]:
    """Takes a safeguard away for a while, in this process.

    Args:
      name: One of `NAMES`: "dedup" makes changes again, and notes none; "fencing" lets
        servers ignore fences; "heartbeats" takes every silent task for alive; "watermark"
        forgets settled closures without refusing them; "fsync" writes files without waiting
        for the disk; "key check" lets every key in, as that of a coordinator.

    Raises:
      InvalidArgumentError: There is no such saboteur.

    Example:
      >>> table = AppliedUpdates()
      >>> table.record(7, (0, 3))
      >>> with at_work("dedup"):
      ...     table.is_new(7, (0, 3))
      True
      >>> table.is_new(7, (0, 3))
      False
    """
    patches = _patches_of(name)
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in patches]
    try:
        for owner, attribute, value in patches:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def apply(name: str) -> None:
    """Takes a safeguard away for good, in a process that was started for that."""
    for owner, attribute, value in _patches_of(name):
        setattr(owner, attribute, value)


def _patches_of(name: str) -> list[_Patch]:
    if name not in _SABOTEURS:
        raise errors.InvalidArgumentError(
            f"A saboteur is one of {', '.join(NAMES)}", f"it is {name!r}", "Correct the name."
        )
    return _SABOTEURS[name]()


def _dedup() -> list[_Patch]:
    return [
        (AppliedUpdates, "is_new", lambda self, closure, key: True),
        (AppliedUpdates, "record", lambda self, closure, key: None),
    ]


def _fencing() -> list[_Patch]:
    return [(Job, "fence", lambda self, incarnations: None)]


def _heartbeats() -> list[_Patch]:
    tick = Policy.tick

    def trusting_tick(self: Policy, queue: ClosureQueue, now: float) -> Any:
        for task in (*self.pool.workers, *self.servers):
            task.last_seen_s = now
        return tick(self, queue, now)

    return [(Policy, "tick", trusting_tick)]


def _watermark() -> list[_Patch]:
    return [(AppliedUpdates, "is_settled", lambda self, closure: False)]


def _fsync() -> list[_Patch]:
    return [(os, "fsync", lambda descriptor: None), (os, "fdatasync", lambda descriptor: None)]


def _key_check() -> list[_Patch]:
    role_of = KnownKeys.role_of

    def careless(self: KnownKeys, key: bytes) -> Any:
        return role_of(self, key) or "coordinator"

    return [(KnownKeys, "role_of", careless)]


_SABOTEURS: dict[str, Callable[[], list[_Patch]]] = {
    "dedup": _dedup,
    "fencing": _fencing,
    "heartbeats": _heartbeats,
    "watermark": _watermark,
    "fsync": _fsync,
    "key check": _key_check,
}
NAMES = tuple(_SABOTEURS)
