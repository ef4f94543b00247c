"""`replicax run`: starts a program on a cluster, and supervises it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replicax.cli.failures import errors_in_one_line
from replicax.foundation import errors
from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.launcher import Launcher
from replicax.launch.local import LocalLauncher

# The exit code for a command line that cannot be run: a restart will not help.
_BAD_CONFIGURATION = 2

_Program = Annotated[
    list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The program and its arguments.")
]
_Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as of `python -m`.")]
_Workers = Annotated[int | None, typer.Option("--workers", "-n", help="The number of workers.")]
_Ps = Annotated[int, typer.Option(help="The number of parameter servers.")]
_Evaluator = Annotated[bool, typer.Option("--evaluator", help="Start an evaluator, too.")]
_Elastic = Annotated[
    str | None,
    typer.Option(metavar="MIN:MAX", help="Go on with MIN workers after losses; start with MAX."),
]
_Cpus = Annotated[int | None, typer.Option(help="The cores of each worker; all by default.")]
_Devices = Annotated[
    int | None, typer.Option(help="The devices of each worker; virtual ones on a CPU.")
]
_Env = Annotated[
    list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="For the tasks.")
]
_Logs = Annotated[Path | None, typer.Option(metavar="DIR", help="Where the logs go.")]
_Restarts = Annotated[int, typer.Option(help="The most restarts within a minute.")]
_Keys = Annotated[Path | None, typer.Option(metavar="DIR", help="The keys of the cluster.")]
_Checkpoints = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the program keeps checkpoints.")
]


def run(
    program: _Program,
    is_module: _Module = False,
    workers: _Workers = None,
    ps: _Ps = 0,
    evaluator: _Evaluator = False,
    elastic: _Elastic = None,
    cpus_per_worker: _Cpus = None,
    devices_per_worker: _Devices = None,
    env: _Env = None,
    logs: _Logs = None,
    max_restarts: _Restarts = 5,
    keys: _Keys = None,
    checkpoints: _Checkpoints = None,
) -> None:
    """Run a program on a cluster, and restart what is lost.

    Options of `replicax run` come before the program; everything after it is for the program.
    """
    with errors_in_one_line(_BAD_CONFIGURATION):
        least, most = _elastic(elastic, workers)
        job = JobSpec(
            PythonProgram(program[0], tuple(program[1:]), is_module),
            workers=most,
            ps=ps,
            evaluator=evaluator,
            min_workers=least,
            cpus_per_worker=cpus_per_worker,
            devices_per_worker=devices_per_worker,
            env=dict(map(_pair, env or [])),
            logs=logs,
            max_restarts=max_restarts,
            keys=keys,
            checkpoints=checkpoints,
        )
        launcher = _choose()
    with errors_in_one_line():
        raise typer.Exit(launcher.launch(job))


def _choose() -> Launcher:
    """Returns the launcher that the options ask for; this machine without any."""
    return LocalLauncher()


def _elastic(text: str | None, workers: int | None) -> tuple[int | None, int]:
    """Returns the fewest and the most workers."""
    if text is None:
        return None, 1 if workers is None else workers
    least, _, most = text.partition(":")
    if not (least.isdigit() and most.isdigit()):
        raise errors.InvalidArgumentError(
            "--elastic must be MIN:MAX", f"it is {text!r}", "Write 2:4, for example."
        )
    if workers is not None and workers != int(most):
        raise errors.InvalidArgumentError(
            "An elastic job starts with MAX workers",
            f"--elastic is {text} and --workers {workers}",
            "Leave --workers out.",
        )
    return int(least), int(most)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise errors.InvalidArgumentError(
            "--env must be NAME=VALUE", f"it is {text!r}", "Correct it."
        )
    return name, value
