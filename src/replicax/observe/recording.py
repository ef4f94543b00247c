"""Lets another process of this user make a task record what it does.

    trace_start {"trace": ID, "directory": PATH, "seconds": LIMIT}   ->   {"path": FILE}
    trace_stop  {"trace": ID}                                        ->   {"path": FILE}

The spans are written to a file in the directory from the start: those of a task that is killed
meanwhile are there too. Recording ends by itself when the limit has passed, should the process
that has asked for it be gone. `replicax trace` asks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replicax.foundation import spans
from replicax.observe import requests

_MOST_SECONDS = 3600.0


class _Current:
    path = ""
    timer: threading.Timer | None = None


def _start(task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    del task
    trace, directory = str(arguments["trace"]), Path(arguments["directory"])
    path = spans.path_in(directory)
    # Tasks that share a process share a file.
    if spans.start(trace, path):
        seconds = min(float(arguments.get("seconds", _MOST_SECONDS)), _MOST_SECONDS)
        timer = threading.Timer(seconds, spans.stop, (trace,))
        timer.daemon = True
        timer.start()
        _Current.path, _Current.timer = str(path), timer
    return {"path": _Current.path}


def _stop(task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    del task
    timer, _Current.timer = _Current.timer, None
    if timer is not None:
        timer.cancel()
    spans.stop(str(arguments["trace"]))
    return {"path": _Current.path}


HANDLERS: Mapping[str, requests.Handler] = {"trace_start": _start, "trace_stop": _stop}
