"""`tf.compat.v1.app`: runs the main function of a program after reading its flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app as absl_app

from replicax.tf.v1 import flags as flags

__all__ = ["flags", "run"]


def run(main: Callable[[list[str]], Any] | None = None, argv: Sequence[str] | None = None) -> None:
    """Reads flags, calls a function with the other arguments, and ends the process.

    Args:
      main: The function; by default `main` of the program.
      argv: The command line, if not that of the process.
    """
    found = main if main is not None else vars(sys.modules["__main__"])["main"]
    absl_app.run(found, argv=None if argv is None else list(argv))
