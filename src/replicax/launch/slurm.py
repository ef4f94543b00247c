"""Launches a job under Slurm: in the allocation of this process, or as a script for `sbatch`."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from replicax.cluster import slurm_lists
from replicax.foundation import errors, settings
from replicax.group import exit_codes
from replicax.launch.agent_host import Destination, run_through_agents
from replicax.launch.job import JobSpec

_log = logging.getLogger(__name__)

_COMMAND_S = 60.0
# The step of an agent may use everything that the job has on its node, at the same time as others.
_SRUN = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--overlap",
    "--whole",
    "--unbuffered",
    "--kill-on-bad-exit=0",
    "--job-name=replicax-agent",
)
_NODE = re.compile(r"NodeName=(\S+).*?NodeAddr=(\S+)")
# The seconds before the end of an allocation at which the program is told to save.
_NOTICE_S = 120


class SlurmLauncher:
    """Runs a job on the nodes of an allocation, through an agent on each that `srun` starts.

    Outside of an allocation, it writes a script for `sbatch` that does so, and submits it if asked
    to. Restarts are as on one machine; a job that was preempted, or whose time is over, and that
    has saved (exit code 42), is queued again.

    Args:
      sbatch: Options for `sbatch`, such as `--partition=gpu`.
      output: The file of the script; `<name>.sbatch` by default.
      apply: Whether to submit the script.
      show: Prints a line for the user.
    """

    name = "slurm"

    def __init__(
        self,
        *,
        sbatch: Sequence[str] = (),
        output: Path | None = None,
        apply: bool = False,
        show: Callable[[str], None] = _log.info,
    ) -> None:
        self._sbatch = tuple(sbatch)
        self._output = output
        self._apply = apply
        self._show = show

    def detect(self) -> bool:
        """Returns whether this is an allocation, or jobs can be submitted."""
        return settings.SLURM_JOB_ID.is_set or shutil.which("sbatch") is not None

    def explain(self) -> str:
        """Returns what was found of Slurm."""
        if settings.SLURM_JOB_ID.is_set:
            nodes = settings.SLURM_JOB_NODELIST.read("unknown nodes")
            return f"slurm: in the allocation of job {settings.SLURM_JOB_ID.read()}, on {nodes}"
        found = shutil.which("sbatch")
        if found is None:
            return "slurm: there is no allocation, and no sbatch in PATH; scripts can be written"
        return f"slurm: there is no allocation; {found} submits scripts"

    def launch(self, job: JobSpec) -> int:
        """Runs a job in the allocation, or writes its script.

        Returns:
          The exit code of the job; 0 for a script.
        """
        if job.hosts:
            raise errors.UnsupportedError(
                "Slurm selects the hosts of a job",
                f"{len(job.hosts)} were given",
                "Leave --hosts and --hostfile out, or pass --sbatch=--nodelist=...",
            )
        if settings.SLURM_JOB_ID.is_set:
            return run_through_agents(job, _destinations(), "srun", sys.executable)
        path = self._output or Path(f"{job.program.name}.sbatch")
        path.write_text(script(job, self._sbatch, sys.executable, os.getcwd()))
        path.chmod(0o755)
        self._show(f"wrote {path}")
        if self._apply:
            self._show(_run(["sbatch", str(path)]).strip())
        else:
            self._show(f"sbatch {path}")
        return 0


def _destinations() -> list[Destination]:
    """Returns the nodes of the allocation, each as often as it has tasks, one after the other."""
    names = slurm_lists.expand_hosts(settings.SLURM_JOB_NODELIST.read(""))
    counts = slurm_lists.expand_counts(
        settings.SLURM_TASKS_PER_NODE.read("") or f"1(x{len(names)})"
    )
    addresses = dict(_NODE.findall(_run(["scontrol", "--oneliner", "show", "nodes"])))
    agent = (sys.executable, "-m", "replicax.launch.agent")
    found = {
        # Slurm knows a node by a name that need not be that of its host.
        name: Destination(name, addresses.get(name, name), (*_SRUN, f"--nodelist={name}", *agent))
        for name in names
    }
    return [found[name] for name in in_turns(names, counts)]


def in_turns(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Returns each name as often as its count, all of them in turns.

    >>> in_turns(["a", "b"], [3, 1])
    ['a', 'b', 'a', 'a']
    """
    turns = range(max(counts, default=0))
    slots = list(zip(names, counts, strict=True))
    return [name for turn in turns for name, count in slots if turn < count]


def script(job: JobSpec, sbatch: Sequence[str], python: str, directory: str) -> str:
    """Returns a script for `sbatch` that runs a job in its allocation.

    Args:
      job: The job.
      sbatch: Further options of `sbatch`.
      python: The interpreter on the nodes.
      directory: The directory to run in.
    """
    options = [
        f"--job-name={job.program.name}",
        f"--ntasks={len(job.tasks)}",
        *([] if job.cpus_per_worker is None else [f"--cpus-per-task={job.cpus_per_worker}"]),
        f"--output={job.program.name}-%j.log",
        "--open-mode=append",
        "--requeue",
        # To the launcher, which ends the tasks in order.
        f"--signal=B:TERM@{_NOTICE_S}",
        *sbatch,
    ]
    for option in options:
        if "\n" in option or not option.startswith("-"):
            raise errors.InvalidArgumentError(
                "--sbatch takes one option of sbatch", f"it is {option!r}", "Write --sbatch=--x=y."
            )
    command = shlex.join([python, "-m", "replicax", "run", "--slurm", *words_of(job)])
    lines = [f"#SBATCH {option}" for option in options]
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            f"cd {shlex.quote(directory)} || exit 1",
            f"{command} &",
            "launcher=$!",
            "trap 'kill -TERM \"$launcher\"' TERM",
            'wait "$launcher"',
            "code=$?",
            "# A signal ends the first wait before the launcher has ended.",
            'while kill -0 "$launcher" 2>/dev/null; do',
            '    wait "$launcher"',
            "    code=$?",
            "done",
            f'if [ "$code" -eq {exit_codes.PREEMPTED} ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
            "",
        ]
    )


def words_of(job: JobSpec) -> list[str]:
    """Returns the words of `replicax run` that describe a job.

    >>> from replicax.launch.job import PythonProgram
    >>> words_of(JobSpec(PythonProgram("train.py", ("--epochs", "3")), workers=2, ps=1))[:4]
    ['--workers=2', '--ps=1', '--max-restarts=5', '--show=all']
    """
    if job.min_workers is None:
        found = [f"--workers={job.workers}"]
    else:
        found = [f"--elastic={job.min_workers}:{job.workers}"]
    found += [f"--ps={job.ps}", f"--max-restarts={job.max_restarts}", f"--show={job.show}"]
    found.append(f"--log-megabytes={job.log_bytes >> 20}")
    found += ["--evaluator"] if job.evaluator else []
    for name, value in (
        ("cpus-per-worker", job.cpus_per_worker),
        ("devices-per-worker", job.devices_per_worker),
        ("logs", job.logs),
        ("keys", job.keys),
        ("checkpoints", job.checkpoints),
    ):
        if value is not None:
            found.append(f"--{name}={value}")
    found += [f"--env={name}={value}" for name, value in job.env.items()]
    found += ["-m"] if job.program.is_module else []
    return [*found, job.program.target, *job.program.args]


def _run(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except FileNotFoundError:
        raise errors.NotFoundError(
            "Slurm's commands must be in PATH", f"there is no {words[0]!r}", "Correct PATH."
        ) from None
    except subprocess.TimeoutExpired:
        raise errors.DeadlineExceededError(
            f"`{words[0]}` did not end within {_COMMAND_S:g} s. Check that Slurm answers (sinfo)."
        ) from None
    if done.returncode:
        raise errors.UnavailableError(
            f"`{shlex.join(words)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip()[:500]}"
        )
    return done.stdout
