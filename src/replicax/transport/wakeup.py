"""A file descriptor with which any thread wakes the thread that polls it."""

from __future__ import annotations

import os
import select
import threading
import weakref

_wakeups: weakref.WeakSet[Wakeup] = weakref.WeakSet()


class Wakeup:
    """Wakes a polling thread; several calls before it wakes cost one system call.

    Example:
      >>> wakeup = Wakeup()
      >>> wakeup.set()
      >>> wakeup.clear()
      >>> wakeup.close()
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False
        _wakeups.add(self)

    def set(self) -> None:
        """Wakes the thread, which then sees everything that was stored before."""
        if self._is_set:
            return
        with self._lock:
            # After `close`, the descriptor may belong to another file.
            if not self._is_closed:
                self._is_set = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Resets the descriptor; called by the polling thread before it reads what was stored."""
        with self._lock:
            if self._is_set and not self._is_closed:
                os.eventfd_read(self.fd)
            self._is_set = False

    def wait(self, seconds: float) -> bool:
        """Waits until it is set; returns whether it is."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(int(seconds * 1e3)))

    @property
    def is_closed(self) -> bool:
        """Whether the file is closed."""
        return self._is_closed

    def close(self) -> None:
        """Closes the file. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)

    def close_in_child(self) -> None:
        """Closes the file in a forked child, which does not have the polling thread."""
        self._lock = threading.Lock()
        self._is_closed = True
        os.close(self.fd)


def _after_fork_in_child() -> None:
    for wakeup in list(_wakeups):
        if not wakeup.is_closed:
            wakeup.close_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
