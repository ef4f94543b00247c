"""Saboteurs: each disables one safeguard, to show that a check depends on it.

A check that passes without its safeguard proves nothing. For tests only, and not in the wheel.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replicax.coordinator.scheduling.closures import ClosureQueue
from replicax.coordinator.scheduling.policy import Policy
from replicax.foundation import errors
from replicax.ps.store.applied_updates import AppliedUpdates
from replicax.ps.store.jobs import Job
from replicax.transport.keys import Keys

# An object, the name of its attribute, and the value to set.
_Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def disabled(name: str) -> Iterator[None]:
    """Disables a safeguard in this process for the duration of the context.

    Args:
      name: One of `NAMES`: "dedup" applies repeated updates again; "fencing" makes servers ignore
        fences; "heartbeats" counts every silent task as alive; "watermark" drops settled closures
        without rejecting them; "fsync" does not wait for the disk; "key check" accepts every key,
        as that of a coordinator.

    Raises:
      InvalidArgumentError: `name` is unknown.

    Example:
      >>> table = AppliedUpdates()
      >>> table.record(7, (0, 3))
      >>> with disabled("dedup"):
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


# Replaces the interpreter: `python -m replicax ...` runs with the safeguard disabled.
_SCRIPT = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = replicax ]; then
  shift 2
  export PYTHONPATH='{root}':"$PYTHONPATH"
  exec '{python}' -m torture.sabotaged '{name}' "$@"
fi
exec '{python}' "$@"
"""


@contextlib.contextmanager
def disabled_in_tasks(name: str) -> Iterator[None]:
    """Makes local clusters start their tasks with a safeguard disabled; none if `name` is empty."""
    if not name:
        yield
        return
    python = sys.executable
    with tempfile.TemporaryDirectory(prefix="sabotaged-") as directory:
        script = Path(directory) / "python"
        root = Path(__file__).resolve().parent.parent
        script.write_text(_SCRIPT.format(root=root, python=python, name=name))
        script.chmod(0o700)
        sys.executable = str(script)
        try:
            yield
        finally:
            sys.executable = python


def disable(name: str) -> None:
    """Disables a safeguard until the process ends."""
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
    # Peers are then what they claim to be.
    return [(Keys, "identify", lambda self, connection: None)]


_SABOTEURS: dict[str, Callable[[], list[_Patch]]] = {
    "dedup": _dedup,
    "fencing": _fencing,
    "heartbeats": _heartbeats,
    "watermark": _watermark,
    "fsync": _fsync,
    "key check": _key_check,
}
NAMES = tuple(_SABOTEURS)
