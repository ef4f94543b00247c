"""Ends what a launcher has started when the launcher is killed."""

from __future__ import annotations

import contextlib
import subprocess
import sys

_END_SECONDS = 5.0

# Gets the process groups through its standard input, and kills them when that ends. The kernel
# kills the tasks themselves (see `task_process.with_parent`); this is for what they have started.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin.buffer:
    number = int(line)
    if number > 0:
        groups.add(number)
    else:
        groups.discard(-number)
for number in groups:
    try:
        os.killpg(number, signal.SIGKILL)
    except OSError:
        pass
"""


class Guardian:
    """A small process that outlives this one, however this one ends, and then kills its tasks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The terminal must not end it together with the launcher.
            start_new_session=True,
        )

    def watch(self, group: int) -> None:
        """Adds a process group."""
        self._tell(group)

    def forget(self, group: int) -> None:
        """Removes a process group, whose number may belong to others soon."""
        self._tell(-group)

    def close(self) -> None:
        """Ends the process; it kills the groups that are left."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_SECONDS)

    def _tell(self, number: int) -> None:
        assert self._process.stdin is not None
        # Without it, the kernel still kills the tasks themselves.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(b"%d\n" % number)
            self._process.stdin.flush()
