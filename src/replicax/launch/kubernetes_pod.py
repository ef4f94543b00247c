"""One task in a pod: `python -m replicax.launch.kubernetes_pod OPTIONS -- COMMAND`.

It tells the command which task it is, copies the keys from the Secret, which others in the pod
could read, to a private directory, and waits until all names of the cluster can be looked up.

Note [The end of a job on Kubernetes]
    Workers and servers of a ps cluster serve without end, and no Job of Kubernetes ends another
    one. So the leader (the chief, or worker 0 of a sync group) writes on the shared volume that it
    is alive, and at last how its program has ended; the others look for it, and end. A run is over
    once: pods of the same manifest that start later end at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from replicax.foundation import errors, settings
from replicax.group import exit_codes
from replicax.launch.kubernetes_manifests import SIGNAL_CODES
from replicax.protocol.tasks import Task

_log = logging.getLogger("replicax.launch.kubernetes_pod")

# The seconds in which all pods of the job must be scheduled.
_NAMES_S = 1800.0
# The seconds without a sign of the leader after which the others end.
_GONE_S = 3600.0
_ALIVE_EVERY_S = 10.0
_LOOK_S = 0.5
_RETRIES_S = (1.0, 2.0, 5.0)


@dataclasses.dataclass(frozen=True)
class PodTask:
    """The options of this process.

    Attributes:
      task: The task of this pod.
      service: The name of the headless service.
      counts: The number of tasks of each job.
      port: The port of every task.
      run: The text that names this run.
      shared: The directory that all pods share.
      keys: Where the Secret is mounted; None without keys.
      cores: The cores of this task; None for those of the machine.
      devices: The CPU devices of a worker; None for JAX's default.
      stop_s: The seconds that the command gets to end after a signal.
      command: The command.
    """

    task: Task
    service: str
    counts: dict[str, int]
    port: int
    run: str
    shared: Path
    keys: Path | None
    cores: int | None
    devices: int | None
    stop_s: float
    command: tuple[str, ...]

    @property
    def cluster(self) -> dict[str, list[str]]:
        """The addresses of all tasks."""
        return {
            job: [f"{self.host(Task(job, index))}:{self.port}" for index in range(count)]
            for job, count in self.counts.items()
        }

    def host(self, task: Task) -> str:
        """Returns the name of a pod, in the service."""
        return f"{self.service}-{task.job}-{task.index}.{self.service}"

    @property
    def is_leader(self) -> bool:
        """Whether the end of this task is the end of the job."""
        leader = Task("chief" if "chief" in self.counts else "worker", 0)
        return self.task == leader

    @property
    def is_serving(self) -> bool:
        """Whether this task serves until the job is over."""
        return "ps" in self.counts and self.task.job in ("worker", "ps")

    @property
    def state(self) -> Path:
        """The directory of this run on the shared volume."""
        return self.shared / ".replicax" / self.run

    @property
    def full_command(self) -> list[str]:
        """The command; a server finds its variables again after a restart."""
        if self.task.job != "ps":
            return list(self.command)
        return [*self.command, "--snapshots", str(self.state / "snapshots")]


def parse(arguments: Sequence[str], index: int) -> PodTask:
    """Returns the options of this process.

    >>> line = "--service=t --job=worker --tasks=worker=2 --port=1 --run=r --shared=/s -- python x"
    >>> pod = parse(line.split(), 1)
    >>> pod.cluster, pod.is_leader, pod.command
    ({'worker': ['t-worker-0.t:1', 't-worker-1.t:1']}, False, ('python', 'x'))
    """
    options, command = list(arguments), []
    if "--" in options:
        cut = options.index("--")
        options, command = options[:cut], options[cut + 1 :]
    parser = argparse.ArgumentParser("replicax.launch.kubernetes_pod")
    for name in ("service", "job", "tasks", "run"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--stop-seconds", type=float, default=10.0)
    found = parser.parse_args(options)
    counts = {name: int(count) for name, _, count in map(_cut, found.tasks.split(","))}
    return PodTask(
        Task(found.job, index),
        found.service,
        counts,
        found.port,
        found.run,
        found.shared,
        found.keys,
        found.cores,
        found.devices,
        found.stop_seconds,
        tuple(command),
    )


def _cut(text: str) -> tuple[str, str, str]:
    return text.partition("=")


class SharedState:
    """What the leader tells the other pods through the shared volume.

    Args:
      directory: The directory of this run.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen = ""
        self._seen_s = time.monotonic()

    def tell_alive(self) -> None:
        """Writes that the leader runs."""
        self._write("alive", str(time.time_ns()))

    def tell_over(self, exit_code: int) -> None:
        """Writes how the program has ended."""
        self._write("over", json.dumps({"exit_code": exit_code}))

    def exit_code(self) -> int | None:
        """Returns the exit code of the program; None while the job runs."""
        text = self._read("over")
        return None if text is None else int(json.loads(text)["exit_code"])

    def is_leader_gone(self, limit_s: float) -> bool:
        """Returns whether the leader has written nothing for so long.

        Measured here: the clocks of two machines may differ.
        """
        now, found = time.monotonic(), self._read("alive") or ""
        if found != self._seen:
            self._seen, self._seen_s = found, now
        return now - self._seen_s > limit_s

    def _write(self, name: str, text: str) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        new = self._directory / f".{name}.{os.getpid()}"
        new.write_text(text)
        new.rename(self._directory / name)

    def _read(self, name: str) -> str | None:
        try:
            return (self._directory / name).read_text()
        except FileNotFoundError:
            return None


def copy_keys(mounted: Path, directory: Path) -> Path:
    """Copies the keys of a Secret to a directory that only this user can read.

    Args:
      mounted: Where the Secret is mounted.
      directory: A private directory.
    """
    private = directory / "keys"
    private.mkdir(mode=0o700)
    for path in sorted(mounted.iterdir()):
        # Kubernetes keeps the files of a Secret in directories that begin with two dots.
        if path.is_file() and not path.name.startswith("."):
            with open(
                os.open(private / path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(path.read_bytes())
    return private


def wait_for_names(
    pod: PodTask, limit_s: float = _NAMES_S, stopping: threading.Event | None = None
) -> None:
    """Waits until all names can be looked up, and that of this pod leads to itself.

    For a while after the replacement of a pod, its name leads to the old one.

    Raises:
      DeadlineExceededError: Some cannot; it names them.
    """
    stopping = stopping or threading.Event()
    deadline = time.monotonic() + limit_s
    tasks = [Task(job, index) for job, count in pod.counts.items() for index in range(count)]
    num_tries = 0
    while missing := [task for task in tasks if not _is_found(pod, task)]:
        names = ", ".join(pod.host(task) for task in missing[:5])
        if time.monotonic() > deadline:
            raise errors.DeadlineExceededError(
                f"{len(missing)} of {len(tasks)} pods could not be looked up within {limit_s:g} s: "
                f"{names}. Check that they are scheduled (kubectl get pods), and the service "
                f"{pod.service!r}."
            )
        if num_tries % 20 == 0:
            _log.info("waiting for the names of %d pods: %s", len(missing), names)
        if stopping.wait(_RETRIES_S[min(num_tries, len(_RETRIES_S) - 1)]):
            return
        num_tries += 1


def _is_found(pod: PodTask, task: Task) -> bool:
    found = _addresses(pod.host(task))
    if task != pod.task:
        return bool(found)
    return bool(found & _addresses(socket.gethostname()))


def _addresses(host: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except socket.gaierror:
        return set()


class PodProcess:
    """The command of a pod: started, told about signals, and ended when the job is over.

    Args:
      pod: The task.
      state: What the pods share.
    """

    def __init__(self, pod: PodTask, state: SharedState) -> None:
        self._pod = pod
        self._state = state
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def run(self, prepare: Callable[[threading.Event], dict[str, str]]) -> int:
        """Runs the command to its end, and returns the exit code of the pod.

        Args:
          prepare: Returns the environment of the command; gets what a signal sets.
        """
        if self._state.exit_code() is not None:
            _log.info("run %s is over; write new manifests to start another one", self._pod.run)
            return 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        env = prepare(self._stopping)
        if self._stopping.is_set():
            return 128 + signal.SIGTERM
        self._child = subprocess.Popen(self._pod.full_command, env=env)
        if self._stopping.is_set():
            # The signal came between both lines.
            self._child.terminate()
        code = self._supervise(self._child)
        if self._pod.is_leader and is_final(code):
            self._state.tell_over(code)
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _supervise(self, child: subprocess.Popen[bytes]) -> int:
        alive_s = 0.0
        while True:
            try:
                return _shell_code(child.wait(timeout=_LOOK_S))
            except subprocess.TimeoutExpired:
                pass
            if self._pod.is_leader:
                if time.monotonic() - alive_s > _ALIVE_EVERY_S:
                    alive_s = time.monotonic()
                    self._state.tell_alive()
            elif (code := self._ended_by_leader()) is not None:
                self._end(child)
                return code

    def _ended_by_leader(self) -> int | None:
        """Returns the exit code of a task whose job is over; None while it is not."""
        over = self._state.exit_code()
        if over is not None and (self._pod.is_serving or over != 0):
            _log.info("the job is over: its program ended with exit code %d", over)
            return 0
        if self._state.is_leader_gone(_GONE_S):
            _log.error("the leader of the job has given no sign for %g s", _GONE_S)
            return exit_codes.FAILED
        return None

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.terminate()
        try:
            child.wait(timeout=self._pod.stop_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(timeout=self._pod.stop_s)


def is_final(code: int) -> bool:
    """Returns whether a job is not restarted after this exit code.

    >>> [is_final(code) for code in (0, 1, 42, 75, 137)]
    [True, True, False, False, False]
    """
    return code not in (exit_codes.PREEMPTED, exit_codes.RESTART_GROUP, *SIGNAL_CODES)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def main(arguments: Sequence[str]) -> int:
    """Runs the task of this pod; returns its exit code."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    index = settings.as_index(settings.JOB_COMPLETION_INDEX.read("0"))
    pod = parse(arguments, 0 if index is None else index)
    directory = Path(tempfile.mkdtemp(prefix="rx-pod-"))
    state = SharedState(pod.state)

    def prepare(stopping: threading.Event) -> dict[str, str]:
        wait_for_names(pod, stopping=stopping)
        config = {
            "cluster": pod.cluster,
            "task": {"type": pod.task.job, "index": pod.task.index},
        }
        cores = pod.cores or len(os.sched_getaffinity(0))
        defaults = settings.for_launched_task(cores, pod.devices, pod.task.job)
        changes: dict[str, str] = {settings.TF_CONFIG: json.dumps(config)}
        if pod.keys is not None:
            changes[settings.REPLICAX_KEYS] = str(copy_keys(pod.keys, directory))
        return settings.of_this_process(defaults, changes)

    try:
        return PodProcess(pod, state).run(prepare)
    except errors.DistributeError as error:
        _log.error("%s: %s", type(error).__name__, error)
        return exit_codes.of(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
