"""`replicax run`: starts a program on a cluster, and supervises it."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand
from typing_extensions import override

from replicax.cli.failures import errors_in_one_line
from replicax.foundation import errors
from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.kubernetes import KubernetesLauncher
from replicax.launch.launcher import Launcher
from replicax.launch.local import LocalLauncher
from replicax.launch.ray import RayLauncher
from replicax.launch.slurm import SlurmLauncher
from replicax.launch.ssh import SshLauncher, chosen_hosts

# The exit code for a command line that cannot be run: a restart will not help.
_BAD_CONFIGURATION = 2
_SCHEDULERS = "Slurm, Kubernetes and Ray"

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
_LogMegabytes = Annotated[int, typer.Option(help="The most that the log of one task takes.")]
_Show = Annotated[
    Literal["all", "chief", "none"], typer.Option(help="Whose output is printed; logs have all.")
]
_Restarts = Annotated[int, typer.Option(help="The most restarts within ten minutes.")]
_Keys = Annotated[Path | None, typer.Option(metavar="DIR", help="The keys of the cluster.")]
_Checkpoints = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the program keeps checkpoints.")
]


_Hosts = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Run on these hosts, over ssh.")
]
_Hostfile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A file of hosts: `HOST [slots=N]` per line.")
]
_SshConfig = Annotated[Path | None, typer.Option(metavar="FILE", help="As of `ssh -F`.")]
_Python = Annotated[str | None, typer.Option(metavar="PATH", help="Python on the hosts.")]

_Slurm = Annotated[
    bool,
    typer.Option(
        "--slurm",
        help="Run in the allocation of Slurm, or write a script for sbatch.",
        rich_help_panel=_SCHEDULERS,
    ),
]
_Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="For sbatch: --sbatch=--partition=x", rich_help_panel=_SCHEDULERS
    ),
]
_Kubernetes = Annotated[
    bool,
    typer.Option("--kubernetes", help="Write manifests.", rich_help_panel=_SCHEDULERS),
]
_Image = Annotated[
    str | None,
    typer.Option(help="The image for Kubernetes, with replicax.", rich_help_panel=_SCHEDULERS),
]
_Name = Annotated[
    str | None,
    typer.Option(help="The name of the job on Kubernetes.", rich_help_panel=_SCHEDULERS),
]
_Namespace = Annotated[str | None, typer.Option(help="The namespace.", rich_help_panel=_SCHEDULERS)]
_Claim = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The volume claim for checkpoints; a new one by default.",
        rich_help_panel=_SCHEDULERS,
    ),
]
_VolumeSize = Annotated[
    str, typer.Option(help="The size of a new claim.", rich_help_panel=_SCHEDULERS)
]
_Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Where the script or manifests go.", rich_help_panel=_SCHEDULERS
    ),
]
_Apply = Annotated[
    bool,
    typer.Option(
        "--apply",
        help="Submit the script with sbatch, or the manifests with kubectl.",
        rich_help_panel=_SCHEDULERS,
    ),
]
_Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Run on the Ray cluster at auto, local, HOST:PORT or ray://HOST:PORT; without an "
        "address, on that of RAY_ADDRESS, or on a new one.",
        rich_help_panel=_SCHEDULERS,
    ),
]
# What `ray.init` takes as an address. Any other word after --ray is the program.
_RAY_ADDRESS = re.compile(r"auto|local|ray://\S+|[^/\s]+:\d+")


class _RunCommand(TyperCommand):
    """A command whose `--ray` has an optional value, which parsers of options do not offer."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_address(args))

    def _with_address(self, args: Sequence[str]) -> list[str]:
        """Returns a command line in which `--ray` always has a value, which may be empty."""
        words, found = collections.deque(args), list[str]()
        while words and words[0].startswith("-") and words[0] != "--":
            word = words.popleft()
            if word == "--ray":
                has_address = words and _RAY_ADDRESS.fullmatch(words[0])
                word = f"--ray={words.popleft() if has_address else ''}"
            found.append(word)
            if words and self._takes_next(word):
                found.append(words.popleft())
        return [*found, *words]

    def _takes_next(self, word: str) -> bool:
        """Returns whether the next word is the value of an option."""
        with_value = {
            name: not getattr(option, "is_flag", True)
            for option in self.params
            for name in option.opts
        }
        if word.startswith("--"):
            return with_value.get(word, False)
        # Letters of several options, such as -mn; the rest behind one with a value is its value.
        letters = [i for i, letter in enumerate(word) if with_value.get(f"-{letter}", False)]
        return letters[:1] == [len(word) - 1]


app = typer.Typer(add_completion=False)


# Everything behind the program belongs to the program.
@app.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
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
    log_megabytes: _LogMegabytes = 64,
    show: _Show = "all",
    max_restarts: _Restarts = 5,
    keys: _Keys = None,
    checkpoints: _Checkpoints = None,
    hosts: _Hosts = None,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    python: _Python = None,
    slurm: _Slurm = False,
    sbatch: _Sbatch = None,
    kubernetes: _Kubernetes = False,
    image: _Image = None,
    name: _Name = None,
    namespace: _Namespace = None,
    claim: _Claim = None,
    volume_size: _VolumeSize = "10Gi",
    output: _Output = None,
    apply: _Apply = False,
    ray: _Ray = None,
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
            hosts=chosen_hosts(hosts, hostfile),
            devices_per_worker=devices_per_worker,
            env=dict(map(_pair, env or [])),
            logs=logs,
            log_bytes=log_megabytes << 20,
            show=show,
            max_restarts=max_restarts,
            keys=keys,
            checkpoints=checkpoints,
        )
        ways = {"--slurm": slurm, "--kubernetes": kubernetes, "--ray": ray is not None}
        chosen = _one_of(ways)
        own = {
            **{"--ssh-config": ssh_config, "--python": python, "--sbatch": sbatch},
            **{"--image": image, "--name": name, "--namespace": namespace, "--claim": claim},
            **{"--output": output, "--apply": apply},
        }
        _require_use(own, chosen or ("--hosts" if job.hosts else None))
        launcher: Launcher = SshLauncher(ssh_config, python) if job.hosts else LocalLauncher()
        if chosen == "--slurm":
            launcher = SlurmLauncher(sbatch=sbatch or (), output=output, apply=apply, show=_show)
        elif chosen == "--kubernetes":
            launcher = KubernetesLauncher(
                image,
                name=name,
                namespace=namespace,
                claim=claim,
                volume_size=volume_size,
                output=output,
                apply=apply,
                show=_show,
            )
        elif chosen == "--ray":
            launcher = RayLauncher(ray or None, show=_show)
    with errors_in_one_line():
        raise typer.Exit(launcher.launch(job))


def _show(line: str) -> None:
    typer.echo(line)


def _one_of(ways: dict[str, bool]) -> str | None:
    """Returns the only option that was given; None without."""
    given = [name for name, is_given in ways.items() if is_given]
    if len(given) > 1:
        raise errors.InvalidArgumentError(
            "A job runs in one environment", f"there are {' and '.join(given)}", "Choose one."
        )
    return given[0] if given else None


# The environments that options are for; without one, the job runs on this machine.
_USED_WITH = {
    **dict.fromkeys(("--ssh-config", "--python"), ("--hosts",)),
    **dict.fromkeys(("--image", "--name", "--namespace", "--claim"), ("--kubernetes",)),
    **dict.fromkeys(("--output", "--apply"), ("--slurm", "--kubernetes")),
    "--sbatch": ("--slurm",),
}


def _require_use(options: Mapping[str, object], environment: str | None) -> None:
    """Raises for an option that this job would ignore."""
    for name, value in options.items():
        used_with = _USED_WITH[name]
        if value and environment not in used_with:
            where = "on this machine" if environment is None else f"with {environment}"
            what = "jobs over ssh" if used_with == ("--hosts",) else " or ".join(used_with)
            raise errors.InvalidArgumentError(
                f"{name} is for {what}",
                f"this job runs {where}",
                f"Leave {name} out.",
            )


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
