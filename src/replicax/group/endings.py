"""How a process of a group ends: in bounded time, with its error as the last words, and a code.

Note [The end of a process]
    JAX waits for all processes at the end of each, and aborts the process if one of them is lost.
    So the group ends first, in an exit handler that runs before JAX's, and drops JAX's client.

    After an uncaught error, the handler ends the process itself, with the code that tells a
    supervisor what to do. Exit handlers that were registered before the group was joined, JAX's
    among them, do not run then: programs that wait for a lost process cannot be ended.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from replicax.foundation import errors, gate, jax_compat
from replicax.group import exit_codes

_log = logging.getLogger(__name__)

_INTERRUPTED = 130


class Ending:
    """Ends a process.

    Args:
      explain: Returns the failure of the group that may have caused an uncaught error; None if
        there is none.
      leave: Leaves the group: with the text of the error, or None if the program has ended. It may
        be called again.
      grace_s: The time for which other threads may keep a process whose group has failed.
    """

    def __init__(
        self,
        explain: Callable[[BaseException], errors.DistributeError | None],
        leave: Callable[[str | None], None],
        grace_s: float,
    ) -> None:
        self._explain = explain
        self._leave = leave
        self._grace_s = grace_s
        self._process = os.getpid()
        self._hook = sys.excepthook
        self._exit_code: int | None = None
        self._last_words: str | None = None

    def install(self) -> None:
        """Registers the exit handler and the handler of uncaught errors."""
        self._hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._at_exit)

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._hook(kind, error, traceback)
        if os.getpid() != self._process or sys.flags.interactive or hasattr(sys, "ps1"):
            return  # An interactive session goes on.
        explained = self._explain(error)
        if explained is not None:
            if str(explained) != str(error):
                sys.stderr.write(f"The cause: {type(explained).__name__}: {explained}\n")
            self._exit_code = exit_codes.of(explained)
            if self._exit_code == exit_codes.RESTART_GROUP:
                # Python waits for all threads first, and they may wait for the lost task.
                timer = threading.Timer(self._grace_s, self._exit, [self._exit_code])
                timer.daemon = True
                timer.start()
        elif isinstance(error, KeyboardInterrupt):
            self._exit_code = _INTERRUPTED
        else:
            self._exit_code = exit_codes.FAILED
        self._last_words = f"{kind.__name__}: {error}"[:500]
        # At once: exit handlers and threads of the program may take their time.
        self._leave(self._last_words)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        if self._exit_code is None:
            try:
                # The last steps of a program that reads no result of them.
                gate.wait_for_all()
            except Exception as error:
                self._on_uncaught(type(error), error, error.__traceback__)
        self._leave(self._last_words)
        if self._exit_code is None:
            jax_compat.drop_distributed()
            return
        self._exit(self._exit_code)

    @staticmethod
    def _exit(code: int) -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
