"""Reads what the functions of other processes have returned or raised."""

from __future__ import annotations

from pathlib import Path

import msgspec

from replicax.coordinator.shipping import remote_errors
from replicax.foundation.types import Tree
from replicax.launch.function_files import FunctionResult
from replicax.protocol import trees
from replicax.protocol.tasks import Task


def read_result(path: Path, task: Task) -> tuple[Tree, Exception | None]:
    """Returns what a function returned, and what it raised.

    Args:
      path: The file that its process has written, if it came so far.
      task: Its task, for messages.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None, None
    result = msgspec.msgpack.decode(raw, type=FunctionResult)
    if result.error is not None:
        return None, remote_errors.rebuild_error(result.error, task)
    assert result.tree is not None, "a result has a value or an error"
    return trees.decode(result.tree, result.buffers), None
