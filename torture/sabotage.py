"""Clusters in which one safeguard is switched off, to prove that its bar would notice."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Whoever starts `python -m replicax …` through this starts the sabotaged program instead.
_SCRIPT = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = replicax ]; then
  shift 2
  exec '{python}' -m torture.sabotaged '{saboteur}' "$@"
fi
exec '{python}' "$@"
"""


@contextlib.contextmanager
def sabotaged(saboteur: str) -> Iterator[None]:
    """Lets local clusters start tasks with one safeguard off; nothing changes without a name."""
    if not saboteur:
        yield
        return
    python = sys.executable
    with tempfile.TemporaryDirectory(prefix="sabotaged-") as directory:
        script = Path(directory) / "python"
        script.write_text(_SCRIPT.format(python=python, saboteur=saboteur))
        script.chmod(0o700)
        sys.executable = str(script)
        try:
            yield
        finally:
            sys.executable = python
