"""Brings the main thread out of a wait for a lost member, or ends the process.

Note [A wait that cannot be ended]
    When the group has failed, a thread closes the connections of JAX's collectives, so that
    programs which wait for the lost member end with an error, which `Group.guarded` or the handler
    of uncaught errors explains. On other devices than CPUs, and while JAX waits for its
    coordination service, this is not possible. If the main thread has not moved for some seconds,
    the thread prints the error and the stacks of this process, and ends it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from replicax.foundation import errors, thread_stacks
from replicax.group import exit_codes

_INTERVAL_S = 0.1


class Rescue:
    """Reacts to the failure of a group; `start` is called once.

    The main thread is the one that makes this object.

    Args:
      name: The name of this task, for the last message.
      grace_s: The time for which the main thread may stand still.
      interrupt: Ends the collectives of this process.
    """

    def __init__(self, name: str, grace_s: float, interrupt: Callable[[], object]) -> None:
        self._name = name
        self._grace_s = grace_s
        self._interrupt = interrupt
        self._process = os.getpid()
        self._main = threading.get_ident()
        # Set when the main thread has got the error.
        self.told = threading.Event()

    def start(self, error: errors.DistributeError) -> None:
        """Starts the thread."""
        thread = threading.Thread(
            target=self._run, args=(error,), name="replicax-rescue", daemon=True
        )
        thread.start()

    def _run(self, error: errors.DistributeError) -> None:
        self._interrupt()
        position, since = self._main_position(), time.monotonic()
        while not self.told.wait(_INTERVAL_S):
            self._interrupt()
            now = time.monotonic()
            found = self._main_position()
            if found != position:
                position, since = found, now
            elif now - since >= self._grace_s and os.getpid() == self._process:
                self.end_process(error, f"its main thread has not moved for {self._grace_s:g} s")

    def end_process(self, error: errors.DistributeError, reason: str) -> None:
        """Prints the error and the stacks of this process, and ends it."""
        code = exit_codes.of(error)
        stacks = thread_stacks.text()
        text = (
            f"\n{stacks}\n{self._name} ends with exit code {code}: {reason}.\n"
            f"{type(error).__name__}: {error}\n"
        )
        # Not the stream: another thread may hold its lock.
        os.write(2, text.encode(errors="replace"))
        os._exit(code)

    def _main_position(self) -> object:
        """Returns where the main thread is: it changes while it runs Python code."""
        frame = sys._current_frames().get(self._main)
        return None if frame is None else (id(frame), frame.f_lasti)
