"""`replicax doctor`: checks this host, and says what to do."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from replicax.cli.failures import errors_in_one_line
from replicax.doctor import checkpoint_directory, cluster, host, installation
from replicax.doctor import hosts as remote
from replicax.doctor.findings import Check, Finding, Level, run_all
from replicax.launch.ssh import chosen_hosts

_STYLES = {
    Level.OK: ("✓", "green"),
    Level.NOTE: ("·", "cyan"),
    Level.WARNING: ("!", "yellow"),
    Level.PROBLEM: ("✗", "bold red"),
}
_WIDTH = 18
# The exit code for a command line that cannot be run, as of `replicax run`.
_BAD_CONFIGURATION = 2

_Checkpoints = Annotated[
    Path, typer.Option(metavar="DIR", help="Where the job saves checkpoints; it is measured.")
]
_Hosts = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Check these hosts of a job, too, over ssh.")
]
_Hostfile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file of hosts: `HOST [slots=N]` per line.")
]
_SshConfig = Annotated[Path | None, typer.Option(metavar="FILE", help="As of `ssh -F`.")]
_Python = Annotated[str | None, typer.Option(metavar="PATH", help="Python on the hosts.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]


def doctor(
    checkpoints: _Checkpoints = Path(),
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    python: _Python = None,
    as_json: _Json = False,
) -> None:
    """Check versions, devices, the cluster, ports, peers, clocks, limits and the disk.

    Run it with the environment of a task, such as its TF_CONFIG. Exits with 1 if there is a
    problem that would keep a job from running; warnings do not count.
    """
    with errors_in_one_line(_BAD_CONFIGURATION):
        names = chosen_hosts(hosts, hostfile)
    checks: list[Check] = [
        *installation.checks(),
        *cluster.checks(),
        *remote.checks(names, ssh_config, python),
        *host.checks(),
        *checkpoint_directory.checks(checkpoints.absolute()),
    ]
    if as_json:
        found = list(run_all(checks))
        is_well = not _has_problem(found)
        report = {"ok": is_well, "findings": [dataclasses.asdict(finding) for finding in found]}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        found = []
        for finding in run_all(checks):
            found.append(finding)
            _print(console, finding)
        _print_summary(console, found)
    if _has_problem(found):
        raise typer.Exit(1)


def _has_problem(found: Iterable[Finding]) -> bool:
    return any(finding.level is Level.PROBLEM for finding in found)


def _print(console: Console, finding: Finding) -> None:
    mark, style = _STYLES[finding.level]
    text = Text(f"{mark} ", style)
    text.append(f"{finding.check:<{_WIDTH}}", "bold")
    text.append(finding.text, style if finding.level in (Level.WARNING, Level.PROBLEM) else "")
    console.print(text)
    if finding.advice:
        console.print(Text(f"{'':{_WIDTH + 2}}{finding.advice}", "dim"))


def _print_summary(console: Console, found: Iterable[Finding]) -> None:
    counts = collections.Counter(finding.level for finding in found)
    problems, warnings = counts[Level.PROBLEM], counts[Level.WARNING]
    parts = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((problems, "problem"), (warnings, "warning"))
        if count
    ]
    style = "bold red" if problems else "yellow" if warnings else "green"
    console.print(Text(", ".join(parts) or "no problems", style))
