"""Runs `replicax` with an audit hook that writes down each class that pickle looks up.

The file is named by AUDIT_FILE; what was looked up while modules were imported counts, too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_file = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "pickle.find_class":
        os.write(_file, f"{args[0]}.{args[1]}\n".encode())


sys.addaudithook(_watch)

from replicax.cli.main import app  # noqa: E402

app()
