"""The endpoint of a task: its socket, its answers, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicax.foundation import errors, settings
from replicax.observe import client, endpoint, job_directory, progress, requests


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.XDG_RUNTIME_DIR, str(tmp_path))
    monkeypatch.delenv(settings.REPLICAX_JOB_DIR, raising=False)
    monkeypatch.delenv(settings.REPLICAX_OBSERVE, raising=False)
    return tmp_path


def make(task: str = "/job:worker/task:0", job: str = "a", **handlers: Any) -> endpoint.Endpoint:
    directory = job_directory.root() / job
    return endpoint.Endpoint(task, directory, lambda: {"state": "busy"}, handlers)


@pytest.fixture
def worker() -> Iterator[endpoint.Endpoint]:
    made = make()
    yield made
    made.close()


def test_status_has_the_task_its_process_and_what_the_task_knows(
    worker: endpoint.Endpoint,
) -> None:
    answer = client.ask(worker.path, "status")
    assert (answer.error, answer.pid) == ("", os.getpid())
    reply = answer.reply
    assert (reply["task"], reply["pid"], reply["state"]) == (worker.task, os.getpid(), "busy")
    assert reply["process"]["rss_bytes"] > 1 << 20 and reply["process"]["threads"] >= 2


def test_stack_names_the_functions_of_all_threads(worker: endpoint.Endpoint) -> None:
    def waits_in_this_function() -> None:
        done.wait(10.0)

    done = threading.Event()
    thread = threading.Thread(target=waits_in_this_function, name="stuck")
    thread.start()
    try:
        text = client.ask(worker.path, "stack").reply["text"]
    finally:
        done.set()
        thread.join()
    assert "Thread stuck:" in text and "waits_in_this_function" in text


def test_registered_and_own_requests_are_answered_and_unknown_ones_refused() -> None:
    requests.register("sum", lambda task, arguments: sum(arguments["numbers"]))
    made = make(own=lambda task, arguments: [task, arguments])
    try:
        assert client.ask(made.path, "sum", {"numbers": [1, 2]}).reply == 3
        assert client.ask(made.path, "own", {"x": 1}).reply == [made.task, {"x": 1}]
        assert client.ask(made.path, "requests").reply == [
            "metrics", "own", "ping", "requests", "stack", "status", "sum", "trace_start",
            "trace_stop",
        ]  # fmt: skip
        assert "does not know the request 'other'" in client.ask(made.path, "other").error
        assert "KeyError" in client.ask(made.path, "sum").error
    finally:
        made.close()
        requests.unregister("sum")


def test_socket_and_directory_are_private_and_removed_with_the_last_task() -> None:
    one, two = make("/job:ps/task:0"), make("/job:ps/task:1")
    assert stat.S_IMODE(one.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
    assert job_directory.running() == [one.directory]
    assert [a.reply["task"] for a in client.ask_all(one.directory, "ping")] == [one.task, two.task]
    one.close()
    assert job_directory.sockets(two.directory) == [two.path]
    two.close()
    assert not one.directory.exists() and job_directory.running() == []


def test_directory_that_others_can_enter_is_refused(runtime: Path) -> None:
    shared = runtime / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(errors.PermissionDeniedError, match="private"):
        endpoint.Endpoint("x", shared, dict)
    # A job trains all the same.
    assert endpoint.open_for("x", lambda: shared, dict) is None


def test_paths_may_be_longer_than_addresses_of_the_kernel(runtime: Path) -> None:
    directory = runtime / ("d" * 90) / ("e" * 90)
    made = endpoint.Endpoint("/job:worker/task:0", directory, dict)
    try:
        assert client.ask(made.path, "ping").reply["pid"] == os.getpid()
    finally:
        made.close()


def test_new_process_of_a_task_takes_its_name_and_the_old_one_leaves_it() -> None:
    old, new = make(own=lambda *_: "old"), make(own=lambda *_: "new")
    assert client.ask(new.path, "own").reply == "new"
    old.close()
    assert client.ask(new.path, "own").reply == "new"
    new.close()
    assert not new.path.exists()


def _send_without_end(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b"x" * 65536)
        time.sleep(0.01)


def test_clients_that_send_nothing_or_too_much_do_not_stop_it(
    worker: endpoint.Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_RECEIVE_S", 0.1)
    with job_directory.connect(worker.path, 1.0), job_directory.connect(worker.path, 1.0) as long:
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            _send_without_end(long)
        assert client.ask(worker.path, "ping").error == ""
    with job_directory.connect(worker.path, 1.0) as odd:
        odd.sendall(b"[1, 2]\n")
        assert b"a request is" in odd.makefile("rb").readline()


def test_requests_whose_clients_have_left_are_not_handled() -> None:
    handled: list[object] = []
    is_free = threading.Event()

    def handle(task: str, arguments: object) -> None:
        handled.append(arguments)
        is_free.wait(10.0)

    made = make(own=handle)
    try:
        # The first one is being handled while the others give up.
        for number in range(5):
            assert client.ask(made.path, "own", {"number": number}, timeout=0.1).error
        is_free.set()
        assert client.ask(made.path, "own", {"number": 9}).error == ""
    finally:
        made.close()
    assert handled == [{"number": 0}, {"number": 9}]


def test_reply_larger_than_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_MOST_REPLY_BYTES", 1000)
    made = make(own=lambda *_: "x" * 2000)
    try:
        assert "of at most 1,000" in client.ask(made.path, "own").error
    finally:
        made.close()


def test_off_and_misspelled_settings(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> None:
    monkeypatch.setenv(settings.REPLICAX_OBSERVE, "off")
    assert endpoint.open_for("x", lambda: job_directory.root() / "a", dict) is None
    monkeypatch.setenv(settings.REPLICAX_OBSERVE, "of")
    with pytest.raises(errors.InvalidArgumentError, match="'on' or 'off'"):
        endpoint.open_for("x", lambda: job_directory.root() / "a", dict)


def test_tasks_of_a_cluster_find_one_directory_and_a_launcher_may_choose_it(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    one = job_directory.of_cluster(["a:1", "b:2"])
    assert one == job_directory.of_cluster(["grpc://b:2", "a:1"])
    assert one != job_directory.of_cluster(["a:1", "b:3"])
    job_directory.assign(["tcp://b:3"], runtime / "own")
    assert job_directory.of_cluster(["a:1", "b:3"]) == runtime / "own"
    job_directory.forget(runtime / "own")
    monkeypatch.setenv(settings.REPLICAX_JOB_DIR, "/x/y")
    assert job_directory.of_cluster(["a:1"]) == job_directory.of_process("z") == Path("/x/y")


_TASK = """
import sys, time
from pathlib import Path
from replicax.observe import endpoint
endpoint.Endpoint("/job:worker/task:3", Path(sys.argv[1]), dict)
print("ready", flush=True)
time.sleep(60)
"""


def test_kill_ends_the_process_that_listens_and_leftovers_are_swept() -> None:
    directory = job_directory.root() / "b"
    command = [sys.executable, "-c", _TASK, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        (path,) = job_directory.sockets(directory)
        assert client.kill(path, signal.SIGKILL) == process.pid
        assert process.wait(10.0) == -signal.SIGKILL
    assert path.exists()
    with pytest.raises(errors.UnavailableError, match="does not run on this host"):
        client.kill(path)
    assert client.ask(path, "ping").error and job_directory.running() == []
    job_directory.sweep()
    assert not directory.exists()


def test_a_directory_that_others_sweep_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "job"
    create = job_directory.private_directories.require_private
    removed: list[Path] = []

    def swept(path: Path) -> None:
        if path == directory and not removed:
            removed.append(path)
            path.rmdir()
        create(path)

    monkeypatch.setattr(job_directory.private_directories, "require_private", swept)
    with job_directory.locked(directory) as descriptor:
        assert os.listdir(descriptor) == []
    assert removed == [directory] and directory.exists()


def test_sweep_leaves_running_tasks_and_files_of_users(worker: endpoint.Endpoint) -> None:
    other = job_directory.root() / "c"
    other.mkdir(mode=0o700)
    (other / "trace.json").write_text("{}")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(other / "x.sock"))
    job_directory.sweep()
    assert client.ask(worker.path, "ping").error == ""
    assert [path.name for path in other.iterdir()] == ["trace.json"]


def test_job_is_found_by_name_beginning_path_or_alone(worker: endpoint.Endpoint) -> None:
    assert client.find_job() == worker.directory
    other = make(job="bcd")
    try:
        assert client.find_job("bc") == client.find_job(str(other.directory)) == other.directory
        with pytest.raises(errors.InvalidArgumentError, match="these run"):
            client.find_job()
        with pytest.raises(errors.NotFoundError, match="must run"):
            client.find_job("x")
    finally:
        other.close()


_FORK = """
import os, sys
from pathlib import Path
from replicax.observe import client, endpoint
made = endpoint.Endpoint("/job:worker/task:3", Path(sys.argv[1]), dict)
num_open = len(os.listdir("/proc/self/fd"))
pid = os.fork()
if pid == 0:
    os._exit(0 if len(os.listdir("/proc/self/fd")) == num_open - 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert client.ask(made.path, "ping").reply["pid"] == os.getpid()
made.close()
"""


def test_forked_child_leaves_the_socket_to_its_parent() -> None:
    # A process without threads of JAX, which must not be forked.
    directory = str(job_directory.root() / "f")
    command = [sys.executable, "-W", "ignore", "-c", _FORK, directory]
    subprocess.run(command, check=True, timeout=60)


def test_logged_values_show_the_last_that_was_ready() -> None:
    class Pending:
        ready = False

        def is_ready(self) -> bool:
            return self.ready

        def __float__(self) -> float:
            return 2.0

    pending = Pending()
    progress.log("test_loss", 1.0, step=1)
    assert progress.snapshot()["values"]["test_loss"]["value"] == 1.0  # type: ignore[index]
    progress.log("test_loss", pending, step=2)
    assert progress.snapshot()["values"]["test_loss"]["value"] == 1.0  # type: ignore[index]
    pending.ready = True
    assert progress.snapshot()["values"]["test_loss"]["value"] == 2.0  # type: ignore[index]
    progress.log("test_loss", float("nan"))
    json.dumps(progress.snapshot())
    progress.forget("test_loss")
