"""Servers: which task they are, how they start, what they answer, how they end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner
from vocabulary import refused

from replicax.cli.main import app
from replicax.cluster.spec import ClusterSpec
from replicax.foundation import errors
from replicax.process import roles, shutdown
from replicax.process.server import Server
from replicax.protocol import messages
from replicax.protocol.tasks import Task
from replicax.ps.process.parameter_server import ParameterServerTask
from replicax.transport import addresses, keys
from replicax.transport.channel import Channel

CLUSTER = {"chief": ["localhost:0"], "ps": ["localhost:0"] * 2, "worker": ["localhost:0"] * 3}


@pytest.fixture(autouse=True)
def own_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of this test meet no others; the name is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="rx-") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield
    monkeypatch.delenv("REPLICAX_KEYS", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)


@contextlib.contextmanager
def channel_to(address: str, index: int = 0, directory: Path | None = None) -> Iterator[Channel]:
    """Calls a parameter server as its coordinator."""
    found = keys.load(directory, "coordinator") if directory is not None else None
    location = addresses.resolve(address, None, found)
    channel = Channel(location, Task("coordinator", 0), found, peer=Task("ps", index))
    channel.job, channel.epoch = "test", 1
    try:
        yield channel
    finally:
        channel.close()


def fill(part: int) -> messages.CreatePart:
    return messages.CreatePart(part, f"v{part}", (4,), "float32", messages.Fill(bytes(4)))


def test_S203_the_server_of_the_samples_answers() -> None:
    cluster = ClusterSpec({"ps": ["localhost:2222"], "worker": ["localhost:2223"]})
    server = Server(cluster, job_name="ps", task_index=0, protocol="grpc")
    with server, channel_to("localhost:2222") as channel:
        assert server.target == "grpc://localhost:2222"
        assert channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()
        channel.request(fill(0), timeout=60)
        ones = np.ones(4, np.float32)
        push = messages.Push(0, [messages.Update(0, "assign_add", 0)])
        answer, found = channel.request(
            messages.Exchange([push], [messages.Read(0)]), [ones], timeout=10
        )
        assert isinstance(answer, messages.Exchanged) and not answer.failures
        assert np.frombuffer(found[0], np.float32).tolist() == [1, 1, 1, 1]
        answer, _ = channel.request(messages.Ping(1), timeout=60)
        assert isinstance(answer, messages.Pong) and answer.counters["parts"] == 1


def test_S203_join_blocks_until_the_server_is_stopped() -> None:
    for job in ("ps", "chief"):
        server = Server(CLUSTER, job, 0)
        joined = threading.Thread(target=server.join, name="join")
        joined.start()
        joined.join(0.05)
        assert joined.is_alive()
        server.stop()
        joined.join(60)
        assert not joined.is_alive()
        server.join()
        server.stop()


def test_interrupt_ends_join_and_stop_ends_the_rest() -> None:
    with Server(CLUSTER, "ps", 1) as server:
        joined = threading.Thread(target=server.join, name="join")
        joined.start()
        server.interrupt()
        joined.join(60)
        assert not joined.is_alive()
    with refused(errors.ContextError, "task:1 was stopped"):
        server.start()


def test_S204_a_server_may_start_later() -> None:
    server = Server({"ps": ["localhost:4001"]}, start=False)
    assert server.target == "localhost:4001"
    with channel_to("localhost:4001") as channel:
        with refused(errors.PSUnavailableError, "/job:ps/task:0"):
            channel.request(messages.Attach([], {}), timeout=60)
        channel.reset()
        with server:
            server.start()
            server.start()
            assert channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()


def test_port_0_is_an_address_of_its_own() -> None:
    with Server(CLUSTER, "ps", 0) as first, Server(CLUSTER, "ps", 1) as second:
        assert first.target != second.target and first.target.startswith("ipc:///")
        with channel_to(second.address, 1) as channel:
            assert channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    directory = keys.make(tmp_path / "keys")
    with Server({"ps": ["127.0.0.1:0"]}, protocol="tcp", keys=directory) as server:
        host, _, port = server.target.removeprefix("tcp://").rpartition(":")
        assert host == "127.0.0.1" and int(port) > 0
        with channel_to(server.address, 0, directory) as channel:
            assert channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()


def test_keys_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = keys.make(tmp_path / "keys")
    monkeypatch.setenv("REPLICAX_KEYS", str(directory))
    with (
        Server({"ps": ["127.0.0.1:0"]}) as server,
        channel_to(server.address, 0, directory) as channel,
    ):
        assert channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()


def test_bar_41_no_routable_address_without_keys() -> None:
    before = psutil.Process().net_connections("inet")
    for where, protocol in (("10.1.2.3:2222", None), ("127.0.0.1:0", "tcp")):
        with refused(errors.PermissionDeniedError, "replicax keys make"):
            Server({"ps": [where]}, protocol=protocol)
    with refused(errors.InvalidArgumentError, "every interface"):
        Server({"ps": ["0.0.0.0:2222"]})
    assert psutil.Process().net_connections("inet") == before


def test_an_address_in_use_is_told(tmp_path: Path) -> None:
    with (
        Server({"ps": ["localhost:5005"]}),
        refused(errors.AddressInUseError, f"process {os.getpid()} listens"),
    ):
        Server({"worker": ["localhost:1"], "ps": ["localhost:5005"]}, "ps", 0)
    with Server({"ps": ["localhost:5005"]}) as server:
        assert server.target == "localhost:5005"
    directory = keys.make(tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with refused(errors.AddressInUseError, where):
            Server({"ps": [where]}, keys=directory)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, ValueError, "`job_name` .* jobs chief, ps, worker"),
        ({"job_name": "ps"}, ValueError, "`task_index` .* 'ps' has 2 tasks"),
        ({"job_name": "pss", "task_index": 0}, ValueError, "'chief', 'ps', 'worker'"),
        ({"job_name": "ps", "task_index": 2}, ValueError, "its tasks are 0, 1"),
        ({"job_name": "ps", "task_index": "0"}, TypeError, "it is '0' of type str"),
        ({"job_name": "ps", "task_index": 0, "protocol": "x"}, ValueError, "'x'"),
    ],
)
def test_a_task_that_is_not_there_is_told(
    arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with refused(kind, words):
        Server(CLUSTER, **arguments)


@pytest.mark.parametrize("cluster", ["localhost:2222", 3, None, {"ps": "localhost:1"}])
def test_a_definition_of_another_type_is_refused(cluster: Any) -> None:
    with refused(TypeError):
        Server(cluster)


def test_jobs_without_a_meaning_are_refused() -> None:
    with refused(ValueError, "it is /job:trainer/task:0"):
        Server({"trainer": ["localhost:0"]})
    with refused(ValueError, "the cluster has no job"):
        Server({})


def test_a_definition_makes_the_same_server_again() -> None:
    first = Server(CLUSTER, "ps", 1, start=False)
    assert json.loads(json.dumps(first.server_def)) == {
        "cluster": CLUSTER,
        "job_name": "ps",
        "task_index": 1,
        "protocol": "grpc",
    }
    again = Server(first.server_def, start=False)
    assert again.server_def == first.server_def
    assert Server(first.server_def, "worker", 2, start=False).server_def["task_index"] == 2
    # A job may have the name of a part of a definition.
    odd = Server({"cluster": ["localhost:0"]}, start=False)
    assert odd.server_def["job_name"] == "cluster"


class BlockedStore:
    """A store whose slow requests wait until they are let go."""

    def __init__(self, task: ParameterServerTask) -> None:
        self.store = task._store
        self.free = threading.Event()
        self.seen: list[str] = []
        self._handle = self.store.handle
        self.store.handle = self.handle  # type: ignore[method-assign]

    def handle(self, role: Any, incarnation: int, body: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(body, self.store.SLOW):
            assert self.free.wait(60)
        self.seen.append(type(body).__name__)
        return self._handle(role, incarnation, body, *args, **kwargs)


def test_slow_requests_delay_no_other() -> None:
    location = addresses.resolve("localhost:6001")
    task = ParameterServerTask(0, location)
    blocked = BlockedStore(task)
    task.start()
    try:
        with channel_to("localhost:6001") as channel, channel_to("localhost:6001") as other:
            channel.request(messages.Attach([], {}), timeout=60)
            create = channel.send(fill(0), [])
            push = messages.Push(0, [messages.Update(0, "assign", 0)])
            change = channel.send(messages.Exchange([push], []), [np.ones(4, np.float32)])
            # Another connection is answered, and its heartbeats too.
            answer, _ = other.request(messages.Ping(0), timeout=60)
            assert isinstance(answer, messages.Pong)
            assert other.request(messages.Exchange([], []), timeout=60)[0] == messages.Exchanged(
                [], []
            )
            assert blocked.seen == ["Attach", "Ping", "Exchange"]
            blocked.free.set()
            found = [channel.receive(timeout=60), channel.receive(timeout=60)]
            assert [(f[0], f[1]) for f in found if f] == [
                (create, messages.Done()),
                (change, messages.Exchanged([], [])),
            ]
            answer, values = channel.request(messages.Exchange([], [messages.Read(0)]), timeout=60)
            assert np.frombuffer(values[0], np.float32).tolist() == [1, 1, 1, 1]
    finally:
        blocked.free.set()
        task.close()
        task.close()


def test_a_slow_request_that_fails_is_answered() -> None:
    with Server({"ps": ["localhost:6002"]}), channel_to("localhost:6002") as channel:
        channel.request(messages.Attach([], {}), timeout=60)
        huge = messages.CreatePart(1, "huge", (1 << 60,), "float32", messages.Fill(bytes(4)))
        with refused(errors.ResourceExhaustedError, "'huge'"):
            channel.request(huge, timeout=60)
        assert channel.request(fill(0), timeout=60)[0] == messages.Done()


def test_a_bad_request_is_logged_and_answered(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server({"ps": ["localhost:6003"]}) as server, channel_to("localhost:6003") as channel:
        channel.request(messages.Attach([], {}), timeout=60)
        task = server._task
        assert isinstance(task, ParameterServerTask)
        monkeypatch.setattr(task._store, "handle", lambda *a, **k: 1 / 0)
        with pytest.raises(errors.DistributeError, match="ZeroDivisionError"):
            channel.request(fill(0), timeout=60)
        monkeypatch.undo()
        assert "could not handle a request of /job:coordinator/task:0" in caplog.text


class Session:
    """The worker's side of a job that has no variables."""

    strategy = types.SimpleNamespace(scope=contextlib.nullcontext)

    def __init__(self, made: queue.SimpleQueue[tuple[str, int, int]], index: int) -> None:
        made.put((threading.current_thread().name, threading.get_ident(), index))

    def pending(self) -> int:
        return 0

    def waiting_for(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[tuple[str, int, int]]:
    """Which threads make the sessions of workers: those that run closures."""
    made: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()

    def make(attach: Any, job: str, epoch: int, incarnation: int, index: int, keys: Any) -> Session:
        return Session(made, index)

    monkeypatch.setattr(roles.session, "ParameterServerSession", make)
    return made


@contextlib.contextmanager
def attached(server: Server) -> Iterator[None]:
    """Takes a worker into a job."""
    location = addresses.resolve(server.address)
    with Channel(location, Task("coordinator", 0), peer=Task("worker", 2)) as channel:
        channel.job, channel.epoch = "test", 1
        assert channel.request(messages.Attach([], {}), timeout=20)[0] == messages.Done()
        yield


def test_a_worker_computes_in_the_thread_that_joins(
    sessions: queue.SimpleQueue[tuple[str, int, int]],
) -> None:
    with Server(CLUSTER, "worker", 2) as server:
        joined = threading.Thread(target=server.join, name="joins")
        joined.start()
        with attached(server):
            assert sessions.get(timeout=60) == ("joins", joined.ident, 2)
        server.stop()
        joined.join(60)
        assert not joined.is_alive()


def test_a_worker_computes_also_without_a_join(
    sessions: queue.SimpleQueue[tuple[str, int, int]],
) -> None:
    with Server(CLUSTER, "worker", 2) as server, attached(server):
        assert sessions.get(timeout=60)[0] == "replicax-server"
        joined = threading.Thread(target=server.join, name="joins")
        joined.start()
        server.interrupt()
        joined.join(60)
        assert not joined.is_alive()


def test_a_local_server_is_a_worker_of_its_own() -> None:
    with Server.create_local_server() as server:
        assert server.target.startswith("ipc:///")
        assert server.server_def["job_name"] == "worker"
    assert not Server.create_local_server(start=False).target.startswith("ipc:///")


class Exits:
    """Stands for `os._exit`, which ends the process and so the thread that calls it."""

    def __init__(self) -> None:
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __call__(self, code: int) -> None:
        self.codes.put(code)
        raise SystemExit


THREAD_ENDS = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    found = Exits()
    monkeypatch.setattr(os, "_exit", found)
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_for_the_end(exits: Exits, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    asked = threading.Event()
    with shutdown.ended_by_signals(asked.set, seconds=20):
        signal.raise_signal(number)
        assert asked.wait(60)
    assert signal.getsignal(number) is before and exits.codes.empty()


@THREAD_ENDS
def test_the_second_signal_ends_the_process(exits: Exits) -> None:
    asked = threading.Event()
    with shutdown.ended_by_signals(asked.set, seconds=20):
        signal.raise_signal(signal.SIGTERM)
        assert asked.wait(60)
        signal.raise_signal(signal.SIGTERM)
        assert exits.codes.get(timeout=60) == 128 + signal.SIGTERM


@THREAD_ENDS
def test_a_task_that_stays_busy_is_ended(exits: Exits) -> None:
    with shutdown.ended_by_signals(lambda: None, seconds=0.05):
        signal.raise_signal(signal.SIGTERM)
        assert exits.codes.get(timeout=60) == 0


def test_a_parent_that_has_ended_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Library:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def prctl(self, *arguments: int) -> int:
            calls.append(arguments)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Library)
    shutdown.die_with_parent(os.getppid())
    assert calls[0][1] == signal.SIGKILL
    with refused(errors.UnavailableError, "has exited"):
        shutdown.die_with_parent(os.getpid())


# The command line.


def run(*args: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in args], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "TF_CONFIG must be JSON"),
        ('{"cluster": {"ps": ["localhost:1"]}, "task": {"type": "ps", "index": 3}}', "task 3"),
        ('{"cluster": {"ps": ["localhost"]}, "task": {"type": "ps", "index": 0}}', "no port"),
        ('{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}', "/job:chief"),
        ("{}", "needs a cluster"),
    ],
)
def test_serve_refuses_a_bad_configuration_in_one_line(config: str, words: str) -> None:
    code, out, err = run("serve", env={"TF_CONFIG": config})
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and err.startswith("replicax: ") and words in err


def test_serve_refuses_bad_options_in_one_line() -> None:
    code, _, err = run("serve", "--cluster", "nonsense", "--job", "ps")
    assert code == 2 and len(err.splitlines()) == 1 and "--cluster must be JSON" in err
    code, _, err = run("serve", "--cluster", '{"ps": ["10.1.2.3:4"]}')
    assert code == 1 and len(err.splitlines()) == 1 and "keys make" in err


def test_S202_serve_runs_until_sigterm() -> None:
    config = {"cluster": {"ps": ["localhost:7001"]}, "task": {"type": "ps", "index": 0}}
    with subprocess.Popen(
        [sys.executable, "-m", "replicax", "serve"],
        env={**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "ps 0 serves at localhost:7001\n"
            with channel_to("localhost:7001") as channel:
                assert (
                    channel.request(messages.Attach([], {}), timeout=60)[0] == messages.Attached()
                )
            process.terminate()
            assert process.wait(60) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_keys_are_made_and_shown_without_their_secrets(tmp_path: Path) -> None:
    directory = tmp_path / "new"
    code, out, _ = run("keys", "make", directory)
    assert code == 0 and f"REPLICAX_KEYS={directory}" in out
    code, out, _ = run("keys", "show", directory)
    secrets = [path.read_text().strip() for path in directory.glob("*/tls.key")]
    assert code == 0 and len(secrets) == 4
    names = [line.split("\t")[0] for line in out.splitlines()]
    assert [name.split("/")[3] for name in names] == ["coordinator", "ps", "worker"]
    assert not any(secret in out for secret in secrets)
    assert str(keys.load(directory, "ps").identity) in out
    code, _, err = run("keys", "make", directory)
    assert code == 1 and len(err.splitlines()) == 1 and "an empty directory" in err
    code, _, err = run("keys", "show", tmp_path / "nowhere")
    assert code == 1 and len(err.splitlines()) == 1 and "does not exist" in err
