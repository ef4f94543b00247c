"""One piece of work in the background at a time, whose error is not lost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

# A disk that hangs cannot be told from a slow one: work that takes long is not given up, since
# then nothing would be saved, but each time so much has passed it is said what is waited for.
_PATIENCE_S = 60.0

# Work that must be done before Python shuts down its thread pools, which Orbax needs.
_unfinished: set[threading.Thread] = set()


class BackgroundWork:
    """Runs one function after the other in a thread, while the caller goes on."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Waits for earlier work, then starts `work`; raises the error of earlier work."""
        self.wait()
        thread = threading.Thread(target=self._run, args=(work,), name="replicax-checkpoint")
        self._thread = thread
        _unfinished.add(thread)
        thread.start()

    def wait(self) -> None:
        """Waits until all work is done, and raises its error if it failed."""
        thread, self._thread = self._thread, None
        if thread is not None:
            _wait_for(thread)
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error of work that has failed, once."""
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
    thread.join(_PATIENCE_S)
    while thread.is_alive():
        waited_s = time.monotonic() - begun_s
        _log.warning("Waiting since %.0f s for a checkpoint to be on the disk", waited_s)
        thread.join(_PATIENCE_S)


def _finish() -> None:
    for thread in list(_unfinished):
        _wait_for(thread)


# Python ends its thread pools before it joins threads: a save in flight would fail. This is
# what `concurrent.futures` itself uses; callbacks run last in, first out.
threading._register_atexit(_finish)  # type: ignore[attr-defined]
