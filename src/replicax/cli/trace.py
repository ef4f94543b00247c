"""`replicax trace`: records what the tasks of a running job do, and draws traces."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from replicax.cli.failures import errors_in_one_line
from replicax.foundation import errors, spans
from replicax.observe import client, job_directory
from replicax.timeline import merging, perfetto, picture

_POLL_S = 0.02
_SWITCH_S = 5.0
# The spans of other hosts arrive within so many seconds: some MB of each task, compressed.
_COPY_S = 30.0
# Tasks stop by themselves so many seconds after the longest time that was asked for.
_MORE_S = 30.0

_Job = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A running job, by default the only one; or a .pftrace file to draw; or a directory "
        "in which tasks have left their spans (REPLICAX_TRACE).",
    ),
]
_Steps = Annotated[int, typer.Option(min=1, help="The number of steps, or closures, to record.")]
_Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, help="The longest time to record.")
]
_Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="The trace file to write.")
]
_Picture = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="Also draw the trace, as PNG or SVG."),
]


def trace(
    job: _Job = None,
    steps: _Steps = 20,
    timeout: _Timeout = 60.0,
    out: _Out = None,
    picture_file: _Picture = None,
) -> None:
    """Record the tasks of a job in one file, which ui.perfetto.dev shows.

    They are those of this host, and of the hosts of `replicax run`, if that runs on this one.
    """
    with errors_in_one_line():
        given = None if job is None else Path(job)
        if given is not None and given.suffix == perfetto.SUFFIX and given.is_file():
            path = given
        elif given is not None and any(given.glob(f"*{spans.SUFFIX}")):
            path = merging.merge(given, out)
        else:
            path = _record(client.find_job(job), steps, timeout, out)
        if path is not given:
            found = perfetto.read(path)
            total = sum(len(part.spans) for part in found)
            typer.echo(f"{path}: {len(found)} tasks, {total:,} spans; open it at ui.perfetto.dev")
        if picture_file is not None:
            picture.draw(path, picture_file, title=path.stem)
            typer.echo(str(picture_file))


def _record(job: Path, steps: int, timeout: float, out: Path | None) -> Path:
    with tempfile.TemporaryDirectory(prefix="replicax-trace-") as folder:
        deadline = time.monotonic() + timeout
        with _recording(job, Path(folder), timeout):
            begun = _progress(job)
            while _progress(job) < begun + steps and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            taken = _progress(job) - begun
        if taken < steps:
            typer.echo(f"Only {taken} of {steps} steps were taken in {timeout:g} s.", err=True)
        return merging.merge(Path(folder), out or Path(f"{job.name}{perfetto.SUFFIX}"))


@contextlib.contextmanager
def _recording(job: Path, folder: Path, timeout: float) -> Iterator[None]:
    name = f"cli-{secrets.token_hex(8)}"
    arguments = {"trace": name, "directory": str(folder), "seconds": timeout + _MORE_S}
    # The launcher itself has nothing to record.
    own = [path for path in job_directory.sockets(job) if path != client.launcher_of(job)]
    answers = client.ask_each(own, "trace_start", arguments, _SWITCH_S)
    answers += client.ask_hosts(job, "trace_start", arguments, _SWITCH_S)
    try:
        if not any(answer.reply for answer in answers):
            found = "; ".join(f"{answer.name}: {answer.error}" for answer in answers)
            raise errors.UnavailableError(f"No task of {job.name} records: {found or 'none runs'}.")
        yield
    finally:
        client.ask_all(job, "trace_stop", {"trace": name}, _SWITCH_S)
        client.ask_hosts(job, "trace_stop", {"trace": name}, _COPY_S, files=folder)


def _progress(job: Path) -> int:
    """Returns the closures of the coordinator, or the steps of the farthest task."""
    answers = [*client.ask_all(job, "status"), *client.ask_hosts(job, "status")]
    replies = [answer.reply for answer in answers if answer.reply]
    counts = [_closures(reply) for reply in replies if reply.get("role") == "coordinator"]
    return max(counts or [int(reply.get("steps", 0)) for reply in replies], default=0)


def _closures(reply: dict[str, Any]) -> int:
    return int(reply.get("counters", {}).get("closures", 0))
