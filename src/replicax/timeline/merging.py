"""Makes one trace of the spans of several tasks."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from replicax.foundation import errors, spans
from replicax.timeline import clocks, parts, perfetto

_log = logging.getLogger(__name__)


def merge(directory: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Path:
    """Makes one trace of the files that the tasks of a job have left in a directory.

    Tasks that find the environment variable REPLICAX_TRACE write such files from their start to
    their end, whatever ends them.

    Args:
      directory: The directory. The files of the tasks are replaced by that of the trace.
      path: The file of the trace; by default a new one in the directory.

    Returns:
      The file of the trace.

    Raises:
      NotFoundError: The directory has no files of tasks.

    >>> import os, subprocess, sys, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> program = "import replicax as rx; rx.Server({'ps': ['localhost:0']})"
    >>> traced = {**os.environ, "REPLICAX_TRACE": folder.name}
    >>> _ = subprocess.run([sys.executable, "-c", program], env=traced, check=True)
    >>> merge(folder.name).suffix
    '.pftrace'
    >>> folder.cleanup()
    """
    folder = Path(directory)
    files = sorted(folder.glob(f"*{spans.SUFFIX}"))
    if not files:
        raise errors.NotFoundError(
            f"{str(folder)!r} must have the files of a trace, *{spans.SUFFIX}",
            "it has none",
            "Set REPLICAX_TRACE to this directory for all tasks of the job.",
        )
    found = [parts.decode(file.read_bytes()) for file in files]
    written = write(new_path(folder) if path is None else Path(path), found)
    for file in files:
        file.unlink(missing_ok=True)
    return written


def new_path(folder: Path) -> Path:
    """Returns a path for a new trace."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return folder / f"replicax-{now}-{secrets.token_hex(2)}{perfetto.SUFFIX}"


def write(path: Path, found: Sequence[parts.Part]) -> Path:
    """Writes the trace of several tasks, with their clocks brought together."""
    lost = sum(part.num_lost for part in found)
    if lost:
        _log.warning(
            "The trace has the last %d spans of each task; %d earlier ones did not fit. Record "
            "fewer steps, or pass a larger capacity.",
            max(len(part.spans) for part in found),
            lost,
        )
    perfetto.write(path, clocks.aligned(sorted(found, key=_rank)))
    return path


def _rank(part: parts.Part) -> tuple[bool, str, int]:
    """Orders the tasks: the coordinator or the chief first, and incarnations by their start."""
    start = part.spans[0].start if part.spans else 0
    return "coordinator" not in part.task, part.task, start
