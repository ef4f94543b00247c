"""Launches a job on this machine."""

from __future__ import annotations

import os

from replicax.launch.job import JobSpec


class LocalLauncher:
    """Runs every task as a process of this machine."""

    name = "local"

    def detect(self) -> bool:
        """Returns True: there is always this machine."""
        return True

    def explain(self) -> str:
        """Returns what this machine has."""
        return f"local: this machine, {os.cpu_count() or 1} cores"

    def launch(self, job: JobSpec) -> int:
        """Runs a job to its end."""
        raise NotImplementedError
