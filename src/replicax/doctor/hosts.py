"""The hosts that `replicax run --hosts` would use: reached, of equal versions and clocks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicax.doctor.findings import Check, Finding, Level, problem
from replicax.foundation import errors
from replicax.launch.agent_host import AgentHost
from replicax.launch.ssh import SshLauncher

# Clocks that differ by more are named: logs and traces of hosts are compared.
_NOTICEABLE_S = 0.1
# Certificates are valid from an hour before they were made.
_TOO_MUCH_S = 3600.0
_CLOCK_ADVICE = "Run chrony or systemd-timesyncd on each host."


def checks(hosts: Sequence[str], config: Path | None, python: str | None) -> list[Check]:
    """Returns the checks of other hosts; none without any.

    Args:
      hosts: The hosts, as for ssh.
      config: A configuration file for ssh.
      python: The interpreter on the hosts.
    """
    launcher = SshLauncher(config, python)
    names = list(dict.fromkeys(hosts))
    return [Check("hosts", lambda: _check(launcher, names, python), 90.0)] if names else []


def _check(launcher: SshLauncher, names: Sequence[str], python: str | None) -> Iterator[Finding]:
    """Connects to all hosts as a launcher does, and compares their clocks with this one."""
    with contextlib.ExitStack() as stack:
        hosts: list[AgentHost] = []
        for to in launcher.destinations(names):
            host = AgentHost(
                to.name,
                to.address,
                to.command,
                "ssh",
                python or sys.executable,
                {},
                "",
                lambda _: None,
                lambda _, __: None,
            )
            stack.callback(host.close)
            host.begin()
            hosts.append(host)
        for host in hosts:
            try:
                host.finish()
                yield _compare(host)
            except errors.DistributeError as error:
                found = problem("hosts", error)
                advice = found.advice or "Correct its name, its ssh key, or --python."
                yield Finding("hosts", Level.PROBLEM, found.text, advice)


def _compare(host: AgentHost) -> Finding:
    ahead_s, error_s = host.clock_difference()
    cores = f"{len(host.cores)} processors, the same versions"
    least_s = abs(ahead_s) - error_s
    how = "ahead" if ahead_s > 0 else "behind"
    text = f"{host.name}: {cores}, but its clock is {abs(ahead_s):.3f} s {how}"
    if least_s > _TOO_MUCH_S:
        text = f"{text}: certificates made on one host are not valid on the other"
        return Finding("hosts", Level.PROBLEM, text, _CLOCK_ADVICE)
    if least_s > _NOTICEABLE_S:
        return Finding("hosts", Level.WARNING, text, _CLOCK_ADVICE)
    most_ms = (abs(ahead_s) + error_s) * 1000
    text = f"{host.name}: {cores}, clocks differ by {most_ms:.1f} ms at most"
    return Finding("hosts", Level.OK, text)
