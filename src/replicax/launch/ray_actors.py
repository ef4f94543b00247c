"""What runs in actors of Ray: the state of a job, its servers, and programs in child processes.

Plain classes, which `ray.remote` turns into actors.

Note [Keys on Ray]
    Ray keeps the arguments of an actor's constructor in its control store, for restarts. So keys
    are no argument: the process that starts the job passes them in a call to one actor, which has
    them in memory, and the actors of tasks ask that one. Every process of a Ray cluster can do the
    same, as Ray has no users: its security boundary is the cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from replicax.cluster import address as addresses
from replicax.foundation import errors, lazy, settings
from replicax.launch import certificates
from replicax.launch.task_process import with_parent
from replicax.protocol.tasks import Role, Task

if TYPE_CHECKING:
    import ray
    import ray.util
else:
    ray = lazy.module("ray", "replicax[ray]")

# The limit of a call to another actor.
_CALL_S = 60.0
_LOOK_S = 1.0
_OUTPUT_S = 5.0
_START_AGAIN = 75


def fetch(reference: Any, timeout: float = _CALL_S) -> Any:
    """Returns what a call to an actor has returned."""
    return ray.get(reference, timeout=timeout)


class JobState:
    """What the actors of a job share: keys, addresses and results. An actor of its own."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}
        self._addresses: dict[Task, str] = {}
        self._results: dict[int, bytes] = {}
        self._failure: tuple[int, int] | None = None

    def set_keys(self, files: Mapping[str, bytes]) -> None:
        """Keeps the files of a directory of keys."""
        self._keys = dict(files)

    def keys_of(self, role: Role) -> dict[str, bytes]:
        """Returns the files that a task of some role needs."""
        own = f"{role}/"
        return {name: data for name, data in self._keys.items() if name.startswith(own)}

    def set_address(self, task: Task, address: str) -> None:
        """Keeps the address of a task, for its restarts."""
        self._addresses[task] = address

    def address_of(self, task: Task) -> str | None:
        """Returns the address of a task that was started before."""
        return self._addresses.get(task)

    def begin_run(self) -> None:
        """Forgets the results of the last run of a group."""
        self._results, self._failure = {}, None

    def set_result(self, rank: int, result: bytes) -> None:
        """Keeps what the program of one task has returned or raised."""
        self._results[rank] = result

    def results(self) -> dict[int, bytes]:
        """Returns what the programs have returned or raised."""
        return dict(self._results)

    def set_failure(self, rank: int, exit_code: int) -> None:
        """Keeps the first failure that a restart would not help against."""
        if self._failure is None:
            self._failure = rank, exit_code

    def failure(self) -> tuple[int, int] | None:
        """Returns the rank and the exit code of the first such failure."""
        return self._failure


def private_keys(files: Mapping[str, bytes]) -> Path:
    """Writes keys to a new directory that only this user can read, and returns it."""
    return certificates.write(Path(tempfile.mkdtemp(prefix="rx-keys-")), files)


class ServingTask:
    """A worker or a parameter server, as an actor that Ray restarts at the same address.

    Args:
      state: The actor of the `JobState`.
      task: The task.
      snapshots: The directory of the snapshots of a server; None for none.
    """

    def __init__(self, state: Any, task: Task, snapshots: str | None) -> None:
        # Only in the actor: they import JAX. Code outside of scopes has the default strategy.
        import replicax.strategies.default  # noqa: F401, PLC0415
        from replicax.process import system_limits  # noqa: PLC0415
        from replicax.process.server import Server  # noqa: PLC0415

        role: Role = "ps" if task.job == "ps" else "worker"
        files = fetch(state.keys_of.remote(role))
        before = fetch(state.address_of.remote(task))
        host = ray.util.get_node_ip_address()
        if before is not None and before.rpartition(":")[0].strip("[]") != host:
            raise errors.UnavailableError(
                f"{task} must restart at {before}, where the others expect it, and Ray has placed "
                f"it on {host}. The node of the task is lost: start the job again."
            )
        system_limits.tune_for_serving()
        self._server = Server(
            {task.job: {task.index: before or addresses.join(host, 0)}},
            task.job,
            task.index,
            protocol="tcp",
            keys=private_keys(files),
            snapshots=snapshots,
            # Ray restarts the actor.
            on_ending=lambda _: os._exit(_START_AGAIN),
        )
        fetch(state.set_address.remote(task, self._server.address))

    def address(self) -> str:
        """Returns where the task listens."""
        return self._server.address

    def pid(self) -> int:
        """Returns the process of the task."""
        return os.getpid()

    def stop(self) -> None:
        """Stops the task."""
        self._server.stop()


class ProgramTask:
    """A program in a child process of an actor, for the chief of a ps cluster."""

    def pid(self) -> int:
        """Returns the process of the actor."""
        return os.getpid()

    def run(
        self,
        state: Any,
        task: Task,
        command: Sequence[str],
        directory: str,
        cluster: Mapping[str, Sequence[str]],
        variables: Mapping[str, str],
        logs: str | None,
    ) -> int:
        """Runs the program, and returns its exit code: -N for a signal N."""
        keys = private_keys(fetch(state.keys_of.remote("coordinator")))
        changes = {**variables, **task_variables(task, cluster, keys)}
        return run_command(task, command, directory, changes, logs)


def task_variables(task: Task, cluster: Mapping[str, Sequence[str]], keys: Path) -> dict[str, str]:
    """Returns the variables that tell a process which task it is."""
    config = {
        "cluster": {job: list(each) for job, each in cluster.items()},
        "task": {"type": task.job, "index": task.index},
    }
    return {settings.TF_CONFIG: json.dumps(config), settings.REPLICAX_KEYS: str(keys)}


def run_command(
    task: Task,
    command: Sequence[str],
    directory: str,
    variables: Mapping[str, str],
    logs: str | None,
) -> int:
    """Runs a command that ends with this process, and shows its output.

    Args:
      task: The task, which is in front of every line.
      command: The program and its arguments.
      directory: The directory to run it in.
      variables: Environment variables, in addition to those of this process.
      logs: A directory for a file with the output; None for none.

    Returns:
      The exit code; -N for a signal N.
    """
    if not Path(directory).is_dir():
        raise errors.NotFoundError(
            "The program of a job on Ray must be in a directory that all nodes can reach",
            f"{directory!r} is not on this node, {os.uname().nodename!r}",
            "Start the job in a shared directory.",
        )
    child = subprocess.Popen(
        with_parent(command),
        cwd=directory,
        env=settings.of_this_process({}, variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert child.stdout is not None
    with contextlib.ExitStack() as stack:
        log: IO[bytes] | None = None
        if logs is not None:
            Path(logs).mkdir(parents=True, exist_ok=True)
            log = stack.enter_context((Path(logs) / f"{task.job}-{task.index}.log").open("ab"))
        reader = threading.Thread(
            target=_show, args=(task, child.stdout, log), name="replicax-output", daemon=True
        )
        reader.start()
        while True:
            try:
                code = child.wait(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                pass
        # What the program has started may keep its output open.
        reader.join(timeout=_OUTPUT_S)
    return code


def _show(task: Task, output: IO[bytes], log: IO[bytes] | None) -> None:
    for line in output:
        with contextlib.suppress(ValueError, OSError):
            # Closed, or the disk is full: the program goes on.
            if log is not None:
                log.write(line)
                log.flush()
        sys.stdout.write(f"[{task.job} {task.index}] {line.decode(errors='replace')}")
        sys.stdout.flush()
