"""`Peers`: the processes that run one program in lock step, as the layers below the group see them.

`group/` implements it. A `ReplicaLayout` whose devices belong to several processes holds one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

_of_process: Peers | None = None


def of_process() -> Peers | None:
    """Returns the group that this process has joined; None if it works alone."""
    return _of_process


def set_of_process(peers: Peers | None) -> None:
    """Records the group that this process has joined; a process joins one in its life."""
    global _of_process
    _of_process = peers


class Peers(Protocol):
    """All processes of a group, and the index of this one.

    Every process makes the same calls in the same order; a call with another name than that of a
    peer, or a peer that does not arrive in time, is an error that names the tasks. Calls are made
    over the control channel of the group, not by collectives of devices, so any thread may make
    them while a program runs.

    Attributes:
      index: The index of this process; 0 is the chief.
      count: The number of processes.
    """

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def name_of(self, index: int) -> str:
        """Returns the name of a task for messages: `/job:worker/task:1`."""
        ...

    def exchange(self, name: str, value: bytes, detail: str = "") -> list[bytes]:
        """Sends a value to all processes and returns those of all, by index.

        Calls with different names are independent of each other: each name counts its own calls.
        Messages about a call that cannot end have the detail, which may differ between processes.
        """
        ...

    def barrier(self, name: str) -> None:
        """Waits until all processes have made this call."""
        ...

    def confirm(self, name: str, fingerprint: str) -> int:
        """Raises unless all processes have the same fingerprint; called before a first run.

        Args:
          name: The program, for messages.
          fingerprint: A digest of everything in which the program must not differ.

        Returns:
          The number of the program, the same on all processes, for `record`.
        """
        ...

    def record(self, program: int, /) -> None:
        """Records that a confirmed program is dispatched; the orders of all peers are compared."""
        ...

    def guarded(self) -> AbstractContextManager[None]:
        """Replaces an error of JAX that a lost peer caused by an error that names the task."""
        ...
