"""The acts of the demo, in the order in which they are played."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

from rich.console import Console

from replicax.foundation import devices, errors

# Each module is imported when its act begins: `replicax demo --help` waits for none of them.
ACTS = {
    "digits": "replicax.demo.digits",
    "recommender": "replicax.demo.recommender",
    "launcher": "replicax.demo.launcher",
}
_VIRTUAL_DEVICES = 8


class Act(Protocol):
    """A module that shows something."""

    def play(self, console: Console, pictures: Path) -> None:
        """Shows it on a console, and draws its pictures in a directory."""
        ...


def play(names: Sequence[str], console: Console, pictures: Path) -> None:
    """Plays acts, or all of them if none is named.

    Raises:
      InvalidArgumentError: There is no act of that name.
      MissingDependencyError: A package of the extra `demo` is not installed.
    """
    for name in names:
        if name not in ACTS:
            raise errors.InvalidArgumentError(
                f"An act must be one of {', '.join(ACTS)}",
                f"it is {name!r}",
                "Leave it out to see all of them.",
            )
    devices.set_virtual_cpu_devices(_VIRTUAL_DEVICES)
    for name in names or ACTS:
        _load(name).play(console, pictures)


def _load(name: str) -> Act:
    try:
        return cast("Act", importlib.import_module(ACTS[name]))
    except ModuleNotFoundError as error:
        raise errors.MissingDependencyError(
            "The demo needs the packages of the extra `demo`",
            f"{error.name} is not installed",
            "Run `pip install 'replicax[demo]'`.",
        ) from error
