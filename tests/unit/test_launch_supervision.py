"""The rules of `replicax run`: what restarts, what ends the job, and in which order it stops."""

from __future__ import annotations

import json
import queue
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from vocabulary import refused

from replicax.foundation import errors
from replicax.launch.backoff import Backoff
from replicax.launch.host import Event, Exited, HostLost, Signalled, Start
from replicax.launch.job import JobSpec, PythonProgram
from replicax.launch.supervision import Supervisor
from replicax.launch.task_output import TaskOutput
from replicax.protocol.tasks import Task

CHIEF, PS = Task("chief", 0), Task("ps", 0)
WORKERS = [Task("worker", i) for i in range(4)]
PROGRAM = PythonProgram("train.py")


class RecordingHost:
    """Starts no process: a function decides what becomes of each start and each signal."""

    name = "recorded"
    address = "127.0.0.1"
    python = "python3"
    cores: Sequence[int] = range(8)
    gpus: Sequence[str] = ()
    is_connected = True

    def __init__(self, events: queue.SimpleQueue[Event]) -> None:
        self.events = events
        self.starts: list[Start] = []
        self.signals: list[tuple[Task, int]] = []
        self.running: dict[Task, Start] = {}
        self.ports = 1000
        self.reserved: list[list[int]] = []
        self.on_start: Callable[[Start], None] = lambda start: None
        self.ignored: tuple[int, ...] = (signal.SIGCONT,)
        self.num_reconnects = 0

    def reconnect(self) -> None:
        self.num_reconnects += 1
        self.is_connected = True

    def reserve(self, ports: Sequence[int]) -> list[int]:
        self.reserved.append(list(ports))
        found = []
        for port in ports:
            self.ports += 1
            found.append(port or self.ports)
        return found

    def start(self, start: Start) -> None:
        self.starts.append(start)
        self.running[start.task] = start
        self.on_start(start)

    def exit(self, task: Task, code: int) -> None:
        start = self.running.pop(task)
        self.events.put(Exited(task, start.incarnation, code))

    def send(self, task: Task, number: int) -> None:
        self.signals.append((task, number))
        if number not in self.ignored and task in self.running:
            self.exit(task, -number)

    def close(self) -> None:
        pass

    def addresses(self) -> list[dict[str, list[str]]]:
        """The cluster of each start."""
        return [json.loads(start.variables["TF_CONFIG"])["cluster"] for start in self.starts]

    def started(self) -> list[tuple[str, int, int]]:
        return [(s.job, s.index, s.incarnation) for s in self.starts]


class Desk:
    """A supervisor whose hosts are recorded."""

    def __init__(self, directory: Path, job: JobSpec, num_hosts: int = 1) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.hosts = [RecordingHost(self.events) for _ in range(num_hosts)]
        for number, host in enumerate(self.hosts):
            host.name = f"host {number}"
        self.host = self.hosts[0]
        self.said: list[str] = []
        output = TaskOutput(directory, 1 << 20, lambda task, line: None, self.said.append)
        self.output = output
        self.on_say: Callable[[str], None] = lambda text: None
        self.supervisor = Supervisor(job, self.hosts, self.events, output, self.say, str(directory))

    def say(self, text: str) -> None:
        self.said.append(text)
        self.on_say(text)

    def run(self) -> int:
        try:
            return self.supervisor.run()
        finally:
            self.output.close()


def test_a_group_that_lost_a_worker_restarts_as_a_whole_with_new_ports(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2))

    def on_start(start: Start) -> None:
        if start.index == 1:
            first = start.incarnation == 0
            desk.host.exit(WORKERS[1], -9 if first else 0)
            desk.host.exit(WORKERS[0], 75 if first else 0)

    desk.host.on_start = on_start
    assert desk.run() == 0
    assert desk.host.started() == [
        ("worker", 0, 0), ("worker", 1, 0), ("worker", 0, 1), ("worker", 1, 1)
    ]  # fmt: skip
    first, _, second, _ = desk.host.addresses()
    assert not set(first["worker"]) & set(second["worker"])
    assert desk.supervisor.num_restarts == 1
    assert "/job:worker/task:1 was killed by SIGKILL. Restarting all workers" in desk.said[0]


def test_an_error_of_the_program_is_final_and_gives_its_code_and_last_lines(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2))

    def on_start(start: Start) -> None:
        if start.index == 1:
            text = "".join(f"line {i}\n" for i in range(40))
            desk.output.take(WORKERS[1], text.encode())
            desk.host.exit(WORKERS[1], 3)
            desk.host.exit(WORKERS[0], 75)

    desk.host.on_start = on_start
    assert desk.run() == 3
    assert len(desk.host.starts) == 2
    said = "\n".join(desk.said)
    assert "/job:worker/task:1 ended with exit code 3" in said
    assert "line 20" in said and "line 39" in said and "line 19" not in said


def test_a_group_that_is_lost_again_and_again_is_given_up(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, max_restarts=2))
    desk.host.on_start = lambda start: desk.host.exit(start.task, -signal.SIGSEGV)
    begun_s = time.monotonic()
    assert desk.run() == 128 + signal.SIGSEGV
    # Pauses of 0.2 s and 0.4 s between them.
    assert len(desk.host.starts) == 3 and time.monotonic() - begun_s >= 0.6
    assert "Restarted the group 2 times within 600 s: giving up." in desk.said


def test_a_job_that_crashes_again_and_again_after_a_slow_start_is_given_up() -> None:
    """Each run takes as long as starting JAX, compiling and running out of memory."""
    backoff = Backoff(JobSpec.max_restarts, JobSpec.restart_window_s)
    restarts = [backoff.next(60.0 * run) for run in range(JobSpec.max_restarts + 1)]
    assert restarts[-1] is None
    assert None not in restarts[:-1]


def test_an_announced_preemption_restarts_at_once_and_is_not_counted(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, max_restarts=0))
    desk.host.on_start = lambda start: desk.host.exit(
        start.task, 42 if len(desk.host.starts) < 4 else 0
    )
    assert desk.run() == 0
    assert len(desk.host.starts) == 4


def test_an_elastic_group_goes_on_with_the_workers_that_are_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=3, min_workers=2))

    def on_start(start: Start) -> None:
        cluster = json.loads(start.variables["TF_CONFIG"])["cluster"]["worker"]
        if start.index == len(cluster) - 1:
            for index in range(len(cluster)):
                code = 0 if start.incarnation else (-9 if index == 1 else 75)
                if Task("worker", index) in desk.host.running:
                    desk.host.exit(Task("worker", index), code)

    desk.host.on_start = on_start
    assert desk.run() == 0
    assert [len(cluster["worker"]) for cluster in desk.host.addresses()] == [3, 3, 3, 2, 2]


def test_workers_and_servers_of_a_cluster_restart_alone_at_their_address(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, ps=1))

    def on_start(start: Start) -> None:
        if (start.job, start.incarnation) == ("ps", 0):
            desk.host.exit(WORKERS[1], 75)
            desk.host.exit(PS, -9)
        elif len(desk.host.starts) == 6:
            desk.host.exit(CHIEF, 0)

    desk.host.on_start = on_start
    assert desk.run() == 0
    assert sorted(desk.host.started()[4:]) == [("ps", 0, 1), ("worker", 1, 1)]
    assert all(cluster == desk.host.addresses()[0] for cluster in desk.host.addresses())
    assert desk.host.starts[1].command[1:4] == ["-m", "replicax", "serve"]
    assert desk.host.starts[0].command == ["python3", "train.py"]
    # When the coordinator has finished, workers end before servers.
    ended = [task for task, number in desk.host.signals if number == signal.SIGTERM]
    assert ended == [WORKERS[0], WORKERS[1], PS]


def test_a_coordinator_that_is_killed_restarts_and_one_that_fails_ends_the_job(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, ps=1))

    def on_start(start: Start) -> None:
        if start.job == "ps":
            desk.host.exit(CHIEF, -9)
        elif start.job == "chief" and start.incarnation == 1:
            desk.host.exit(CHIEF, 5)

    desk.host.on_start = on_start
    assert desk.run() == 5
    assert desk.host.started()[-1] == ("chief", 0, 1)


def test_a_server_with_a_bad_configuration_ends_the_job(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, ps=1))
    desk.host.on_start = lambda start: desk.host.exit(PS, 2) if start.job == "ps" else None
    assert desk.run() == 2


@pytest.mark.parametrize("task", [WORKERS[0], PS], ids=str)
def test_a_worker_or_server_that_crashes_restarts_alone_until_it_crashes_too_often(
    tmp_path: Path, task: Task
) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, ps=1, max_restarts=2))

    def on_start(start: Start) -> None:
        if start.task == task:
            desk.output.take(task, f"crash {start.incarnation}\n".encode())
            desk.host.exit(task, 1)

    desk.host.on_start = on_start
    assert desk.run() == 1
    again = [started for started in desk.host.started()[3:] if started[0] == task.job]
    assert again == [(task.job, 0, 1), (task.job, 0, 2)]
    said = "\n".join(desk.said)
    assert "2 times within 600 s: giving up" in said and "  crash 2" in said


def test_an_elastic_cluster_gives_a_worker_up_and_goes_on(tmp_path: Path) -> None:
    job = JobSpec(PROGRAM, workers=2, ps=1, min_workers=1, max_restarts=1)
    desk = Desk(tmp_path, job)

    def on_start(start: Start) -> None:
        if start.task == WORKERS[1]:
            desk.host.exit(WORKERS[1], -9)

    def on_say(text: str) -> None:
        if "The job goes on without it." in text:
            desk.host.exit(CHIEF, 0)

    desk.host.on_start = on_start
    desk.on_say = on_say
    assert desk.run() == 0
    assert desk.host.started()[4:] == [("worker", 1, 1)]


def test_signals_reach_the_coordinator_first_then_workers_then_servers(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, ps=1))
    desk.host.on_start = lambda start: (
        desk.events.put(Signalled(signal.SIGINT)) if start.job == "ps" else None
    )
    assert desk.run() == 130
    sent = [(task, number) for task, number in desk.host.signals if number != signal.SIGCONT]
    assert sent == [
        (CHIEF, signal.SIGINT),
        (WORKERS[0], signal.SIGTERM),
        (WORKERS[1], signal.SIGTERM),
        (PS, signal.SIGTERM),
    ]


def test_tasks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, stop_s=0.3))
    desk.host.ignored = (signal.SIGCONT, signal.SIGINT)
    desk.host.on_start = lambda start: (
        desk.events.put(Signalled(signal.SIGINT)) if start.index == 1 else None
    )
    begun_s = time.monotonic()
    assert desk.run() == 130
    assert 0.3 <= time.monotonic() - begun_s < 2
    assert [n for _, n in desk.host.signals].count(signal.SIGKILL) == 2


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, stop_s=60))
    desk.host.ignored = (signal.SIGCONT, signal.SIGINT)

    def on_start(start: Start) -> None:
        desk.events.put(Signalled(signal.SIGINT))
        desk.events.put(Signalled(signal.SIGINT))

    desk.host.on_start = on_start
    begun_s = time.monotonic()
    assert desk.run() == 130
    assert time.monotonic() - begun_s < 2


def test_an_interrupt_while_tasks_stop_after_a_failure_kills_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1, ps=1, stop_s=60))
    desk.host.ignored = (signal.SIGCONT, signal.SIGTERM)
    desk.host.on_start = lambda start: desk.host.exit(CHIEF, 3) if start.job == "ps" else None

    def on_say(text: str) -> None:
        if "It printed last" in text:
            desk.events.put(Signalled(signal.SIGINT))

    desk.on_say = on_say
    begun_s = time.monotonic()
    assert desk.run() == 3
    assert time.monotonic() - begun_s < 10


def test_a_program_that_saves_when_it_is_stopped_gives_the_code_for_that(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=1))
    desk.host.ignored = (signal.SIGCONT, signal.SIGTERM)

    def on_start(start: Start) -> None:
        desk.events.put(Signalled(signal.SIGTERM))
        desk.host.exit(start.task, 42)

    desk.host.on_start = on_start
    assert desk.run() == 42


def test_a_lost_host_loses_its_tasks_and_is_connected_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2), num_hosts=2)
    near, far = desk.hosts

    def on_start(start: Start) -> None:
        if start.incarnation == 0:
            far.is_connected = False
            desk.events.put(HostLost(far.name, "the connection has ended"))
            near.exit(WORKERS[0], 75)
        else:
            near.exit(WORKERS[0], 0)
            far.exit(WORKERS[1], 0)

    far.on_start = on_start
    assert desk.run() == 0
    assert far.num_reconnects == 1
    assert [s.task for s in far.starts] == [WORKERS[1], WORKERS[1]]


def test_a_lost_host_of_a_cluster_gets_the_ports_that_its_tasks_had(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, ps=1), num_hosts=2)
    near, far = desk.hosts

    def on_start(start: Start) -> None:
        if start.incarnation == 0:
            far.is_connected = False
            far.running.clear()
            desk.events.put(HostLost(far.name, "the connection has ended"))
        else:
            near.exit(CHIEF, 0)

    far.on_start = on_start
    assert desk.run() == 0
    port = int(far.addresses()[0]["worker"][1].rpartition(":")[2])
    assert far.reserved == [[0], [port]]


def test_cores_are_shared_and_reserved_ones_are_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, ps=1))
    desk.host.on_start = lambda start: desk.host.exit(CHIEF, 0) if start.job == "ps" else None
    desk.run()
    threads = {s.task: s.variables["OMP_NUM_THREADS"] for s in desk.host.starts}
    assert threads == {CHIEF: "1", WORKERS[0]: "4", WORKERS[1]: "4", PS: "1"}
    assert not any(start.cores for start in desk.host.starts)
    desk = Desk(tmp_path, JobSpec(PROGRAM, workers=2, cpus_per_worker=3))
    desk.host.on_start = lambda start: desk.host.exit(start.task, 0)
    desk.run()
    assert [start.cores for start in desk.host.starts] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, ["4,5", "6,7"]), ({"devices_per_worker": 1}, ["4", "5"]), ({"workers": 1}, ["4,5,6,7"])],
)
def test_the_gpus_of_a_host_are_divided(
    tmp_path: Path, changes: dict[str, int], expected: list[str]
) -> None:
    desk = Desk(tmp_path, JobSpec(PROGRAM, **{"workers": 2, **changes}))
    desk.host.gpus = ["4", "5", "6", "7"]
    desk.host.on_start = lambda start: desk.host.exit(start.task, 0)
    assert desk.run() == 0
    assert [s.variables["CUDA_VISIBLE_DEVICES"] for s in desk.host.starts] == expected


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"workers": 0}, "workers"),
        ({"ps": -1}, "ps"),
        ({"workers": 2, "min_workers": 3}, "3:2"),
        ({"devices_per_worker": 0}, "devices_per_worker"),
    ],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, int], text: str) -> None:
    with refused(errors.InvalidArgumentError, match=text):
        JobSpec(PROGRAM, **changes)
