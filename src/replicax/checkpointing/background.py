"""Runs one task at a time in the background, and keeps its error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# A disk that hangs cannot be told from a slow one: a wait has no timeout, but is logged this often.
_REPORT_S = 60.0

# Threads that must end before Python shuts down its thread pools, which writing needs.
_unfinished: set[threading.Thread] = set()


class BackgroundWork:
    """Runs one function after the other in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Waits for the function before, raises its error, and starts `work`."""
        self.wait()
        thread = threading.Thread(target=self._run, args=(work,), name="replicax-checkpoint")
        self._thread = thread
        _unfinished.add(thread)
        thread.start()

    def wait(self) -> None:
        """Waits until the function has returned, and raises its error."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _wait_for(thread)
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error of the last function, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            _unfinished.discard(threading.current_thread())


def _wait_for(thread: threading.Thread) -> None:
    begun_s = time.monotonic()
    thread.join(_REPORT_S)
    while thread.is_alive():
        waited_s = time.monotonic() - begun_s
        _log.warning("Waiting for %.0f s for a checkpoint to be written", waited_s)
        thread.join(_REPORT_S)


def _finish() -> None:
    for thread in list(_unfinished):
        _wait_for(thread)


# Python ends its thread pools before it joins threads: a save in progress would fail. This is what
# `concurrent.futures` itself uses; callbacks run last in, first out.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
