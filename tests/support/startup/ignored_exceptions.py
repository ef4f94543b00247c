"""Records the exceptions that the interpreter prints as "Exception ignored in …" and drops.

Finalizers, exit handlers and threads that outlive the interpreter raise such exceptions. Nothing
but the standard library may be imported here: every Python process of a test run loads this.
"""

from __future__ import annotations

import os
import sys

# The environment variable that holds the path of the record.
VARIABLE = "REPLICAX_TEST_IGNORED_EXCEPTIONS"


def install(path: str, exit_code: int | None = None) -> None:
    """Appends each ignored exception of this process to a file, and prints it as before.

    Args:
      path: The file of the record, which is removed when it has been read for the last time.
      exit_code: The exit code of this process if an exception is ignored after that.
    """
    process = f"process {os.getpid()}: {' '.join(sys.orig_argv)[:200]!r}"
    # Module globals are None while the interpreter exits: the function refers to locals only.
    open_, write, close, exit_ = os.open, os.write, os.close, os._exit
    flags, print_ = os.O_WRONLY | os.O_APPEND, sys.__unraisablehook__

    def record(unraisable: sys.UnraisableHookArgs) -> None:
        print_(unraisable)
        text = f"{unraisable.err_msg or 'Exception ignored in'} {unraisable.object!r}: "
        try:
            descriptor = open_(path, flags)
        except FileNotFoundError:
            if exit_code is not None:
                exit_(exit_code)
            return
        write(descriptor, f"{text}{unraisable.exc_value!r} ({process})\n".encode())
        close(descriptor)

    sys.unraisablehook = record
