"""`Launcher`: starts a job in one environment; one module of this package for each."""

from __future__ import annotations

from typing import Protocol

from replicax.launch.job import JobSpec


class Launcher(Protocol):
    """Starts the tasks of a job, waits for them, and restarts those that are lost.

    What is special about an environment, such as the partition of a Slurm cluster, are arguments
    of its constructor.

    Attributes:
      name: Its name on the command line: "local", "ssh", "slurm".
    """

    @property
    def name(self) -> str: ...

    def detect(self) -> bool:
        """Returns whether this process runs inside the environment, or could use it. Quick."""
        ...

    def explain(self) -> str:
        """Returns in one line why `detect` returns what it does, with what was found."""
        ...

    def launch(self, job: JobSpec) -> int:
        """Runs a job to its end.

        Returns:
          The exit code for the command line: 0 if the program has ended on all tasks, otherwise
          that of the first task that failed; 128 + N for a signal N.

        Raises:
          DistributeError: The job could not be started at all.
        """
        ...
