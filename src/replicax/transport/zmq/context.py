"""The ZeroMQ context that the sockets of a process share.

A context has threads and file descriptors of its own, so it is reference-counted: the first user
creates it, the last one terminates it. A forked process starts with none. Services that
authenticate keys have a private context, because there can be one authenticator per context.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import TYPE_CHECKING

from replicax.foundation import lazy
from replicax.protocol import limits

if TYPE_CHECKING:
    import zmq
    from zmq.utils import garbage
else:
    zmq = lazy.module("zmq")
    garbage = lazy.module("zmq.utils.garbage")


class _Shared:
    """The context of a process, its users, and the names bound inside the process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.context: zmq.Context | None = None
        self.private: list[zmq.Context] = []
        self.users = 0
        # Whether another library had started the thread that frees sent memory.
        self.had_collector = False
        self.bound: dict[str, int] = {}
        self.generations = itertools.count(1)


_shared = _Shared()


def _reset_in_child() -> None:
    global _shared
    _shared = _Shared()


os.register_at_fork(after_in_child=_reset_in_child)


def acquire(is_private: bool = False) -> zmq.Context:
    """Returns a context; each call needs one call of `release`.

    Args:
      is_private: Whether to create a context of its own.
    """
    shared = _shared
    with shared.lock:
        if shared.users == 0:
            shared.had_collector = garbage.gc.is_alive()
        shared.users += 1
        if is_private:
            context = zmq.Context()
            shared.private.append(context)
            return context
        if shared.context is None:
            shared.context = zmq.Context()
        return shared.context


def release(context: zmq.Context) -> None:
    """Releases a context. All sockets of the user must be closed."""
    shared = _shared
    with shared.lock:
        if context in shared.private:
            shared.private.remove(context)
            context.term()
        elif context is not shared.context:
            return  # Created before a fork.
        shared.users -= 1
        if shared.users - len(shared.private) == 0 and shared.context is not None:
            shared.context.term()
            shared.context = None
        if shared.users == 0 and not shared.had_collector:
            _stop_collector()


def _stop_collector() -> None:
    """Ends the thread that pyzmq starts for memory that is sent without a copy.

    All contexts are closed, so no memory is being sent any more. If another library uses the thread
    by now, it holds references and is left alone.
    """
    deadline = time.monotonic() + limits.LINGER
    while garbage.gc.refs and time.monotonic() < deadline:
        time.sleep(0.001)
    if not garbage.gc.refs:
        garbage.gc.stop()


def bind_name(url: str) -> bool:
    """Records that a name inside the process is bound; returns whether it was free."""
    shared = _shared
    with shared.lock:
        if url in shared.bound:
            return False
        shared.bound[url] = next(shared.generations)
        return True


def free_name(url: str) -> None:
    """Records that a name inside the process is not bound any more."""
    shared = _shared
    with shared.lock:
        shared.bound.pop(url, None)


def generation(url: str) -> int | None:
    """Returns the number of the current listener at a name, or None without."""
    return _shared.bound.get(url)
