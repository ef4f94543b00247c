"""Launches a job on this machine."""

from __future__ import annotations

from replicax.launch.host import LocalHost, usable_cores
from replicax.launch.job import JobSpec
from replicax.launch.session import run_on_hosts


class LocalLauncher:
    """Runs every task as a process of this machine.

    Tasks communicate over sockets in a directory that only this user can access; JAX's own
    collectives use the loopback interface.
    """

    name = "local"

    def detect(self) -> bool:
        """Returns True: there is always this machine."""
        return True

    def explain(self) -> str:
        """Returns what this machine has."""
        return f"local: this machine, {len(usable_cores())} cores"

    def launch(self, job: JobSpec) -> int:
        """Runs a job to its end, and returns its exit code."""
        return run_on_hosts(
            job, lambda on_event, on_output: [LocalHost(on_event, on_output)], has_snapshots=True
        )
