"""Launches a job on other machines over ssh."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from replicax.foundation import errors
from replicax.launch.agent_host import Destination, run_through_agents
from replicax.launch.job import JobSpec

# Host keys are always checked, and nothing is asked: a launcher has no user in front of it.
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ForwardX11=no",
    "ForwardAgent=no",
)


class SshLauncher:
    """Runs the tasks of a job on hosts that ssh reaches, through an agent on each.

    The hosts need the same versions of Python and replicax, and the program and its directory at
    the same path. Keys are made for the job, and reach the hosts through the connection.

    Args:
      config: A configuration file for ssh; the user's own by default.
      python: The interpreter on the hosts; the path of this one by default.
      ssh: The command.
    """

    name = "ssh"

    def __init__(
        self, config: Path | None = None, python: str | None = None, ssh: str = "ssh"
    ) -> None:
        self._command = [ssh, *([] if config is None else ["-F", str(config)])]
        self._python = sys.executable if python is None else python
        self._ssh = ssh

    def detect(self) -> bool:
        """Returns whether there is an ssh client."""
        return shutil.which(self._ssh) is not None

    def explain(self) -> str:
        """Returns which client there is."""
        found = shutil.which(self._ssh)
        return f"ssh: {found}" if found else f"ssh: there is no {self._ssh!r} in PATH"

    def launch(self, job: JobSpec) -> int:
        """Runs a job to its end, and returns its exit code."""
        if not self.detect():
            raise errors.NotFoundError(
                "Hosts are reached by ssh",
                f"there is no {self._ssh!r} in PATH",
                "Install an ssh client.",
            )
        return run_through_agents(job, self.destinations(job.hosts), "ssh", self._python)

    def destinations(self, hosts: Sequence[str]) -> list[Destination]:
        """Returns how the agents of hosts are reached."""
        return [
            Destination(name, name.rpartition("@")[2], self._agent_command(name)) for name in hosts
        ]

    def _agent_command(self, host: str) -> tuple[str, ...]:
        options = [word for option in _OPTIONS for word in ("-o", option)]
        remote = f"exec {shlex.quote(self._python)} -m replicax.launch.agent"
        return (*self._command, "-T", *options, "--", host, remote)


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Returns the hosts of a file: one per line, as often as it has `slots=N`.

    Raises:
      NotFoundError: There is no such file.
      InvalidArgumentError: A line is something else.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise errors.NotFoundError(
            "--hostfile must be a file of hosts", f"{path} cannot be read: {error}", "Correct it."
        ) from error
    hosts: list[str] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, _, slots = (words[1] if len(words) == 2 else "slots=1").partition("=")
        if len(words) > 2 or name != "slots" or not slots.isdigit() or int(slots) < 1:
            raise errors.InvalidArgumentError(
                "A line of a hostfile is `HOST` or `HOST slots=N`",
                f"line {number} of {path} is {line.strip()!r}",
                "Correct it.",
            )
        hosts += [words[0]] * int(slots)
    if not hosts:
        raise errors.InvalidArgumentError(
            "A hostfile has at least one host", f"{path} has none", "Add one per line."
        )
    return tuple(hosts)


def chosen_hosts(names: str | None, hostfile: Path | None) -> tuple[str, ...]:
    """Returns the hosts of a command line: of `--hosts` or `--hostfile`; empty without both.

    Raises:
      InvalidArgumentError: Both are there, or no host is named.
      NotFoundError: There is no such file.
    """
    if names is not None and hostfile is not None:
        raise errors.InvalidArgumentError(
            "Hosts are named once", "there are --hosts and --hostfile", "Leave one of them out."
        )
    if hostfile is not None:
        return read_hostfile(hostfile)
    found = tuple(name.strip() for name in (names or "").split(",") if name.strip())
    if names is not None and not found:
        raise errors.InvalidArgumentError(
            "--hosts must name at least one host", f"it is {names!r}", "Write node1,node2."
        )
    return found
