"""Ends processes that a closure forks, where the closure ends in them: the task itself goes on."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def only_in_this_process() -> Iterator[None]:
    """Ends a child that was forked in the block when it reaches the end of the block.

    Its exit code is that of a program: 0, 1 after an error, or that of `sys.exit`.
    `process/shutdown.py` restores its signal handlers.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != owner:
            _end_child(error)
        raise
    if os.getpid() != owner:
        _end_child(None)


def _end_child(error: BaseException | None) -> None:
    code: Any = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
    elif error is not None:
        traceback.print_exception(error)
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)
