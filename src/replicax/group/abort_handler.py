"""Explains an abort in native code that the failure of a group has caused.

JAX ends the process with SIGABRT where collectives of several processes do not match. `abort`
calls the handler in the thread that aborts, so the handler can wait until the group knows why.
Other aborts end the process as without the handler.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable

# Explains the abort and ends the process, or returns if it cannot explain it.
OnAbort = Callable[[bool], None]

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
# Never freed: native code holds the address.
_installed: list[object] = []


def install(on_abort: OnAbort) -> None:
    """Installs a handler for SIGABRT in front of the present one.

    Args:
      on_abort: Called in the thread that aborts, with whether it is the main thread. If it
        returns, the process aborts as it would have.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    process = os.getpid()
    previous: list[int | None] = [None]

    def handle(number: int) -> None:
        if os.getpid() == process:
            on_abort(threading.current_thread() is threading.main_thread())
        libc.signal(number, previous[0])
        # Blocked until this handler returns.
        getattr(libc, "raise")(number)

    handler = _Handler(handle)
    _installed.append(handler)
    address = ctypes.cast(handler, ctypes.c_void_p)
    previous[0] = libc.signal(signal.SIGABRT, address)
