"""A plain program, outside of any cluster, as something that can be observed.

It asks for it: REPLICAX_JOB_DIR names a directory, as a launcher does, or REPLICAX_OBSERVE is "on".
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from replicax.foundation import lazy, settings

if TYPE_CHECKING:
    from replicax.observe import endpoint, job_directory, process_facts
else:
    endpoint = lazy.module("replicax.observe.endpoint")
    job_directory = lazy.module("replicax.observe.job_directory")
    process_facts = lazy.module("replicax.observe.process_facts")

_lock = threading.Lock()
_is_decided = False
_endpoint: endpoint.Endpoint | None = None


def open_once(find_task: Callable[[], str | None]) -> None:
    """Opens the endpoint of a program that asks for it, unless this process has one.

    Args:
      find_task: Returns the name of the task that this program is, or None.
    """
    global _endpoint, _is_decided
    if _is_decided:
        return
    with _lock:
        if _is_decided:
            return
        _is_decided = True
        is_asked = settings.REPLICAX_JOB_DIR.is_set or settings.REPLICAX_OBSERVE.read() == "on"
        if not is_asked or endpoint.is_any_open():
            return
        _endpoint = endpoint.open_for(
            find_task() or "program",
            lambda: job_directory.of_process(process_facts.program()),
            lambda: {"role": "program", "state": "running"},
        )
        atexit.register(close)


def close() -> None:
    """Closes the endpoint: a task of this process with a name of its own takes its place."""
    global _endpoint
    with _lock:
        found, _endpoint = _endpoint, None
    if found is not None:
        found.close()
