"""Groups of real processes: the roll call, calls, programs that differ, and how processes end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from replicax.group import exit_codes
from replicax.launch.ports import ReservedPorts
from replicax.transport import keys

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "group_member.py"
# The bound of issue 18 for every fault, with shortened timings.
PROMISED_S = 15.0
_MOST_S = 90.0
# What JAX prints when it ends a process itself.
ABORTS = ("Check failure", "Terminating process", "terminate called", "Fatal Python error")


@dataclasses.dataclass
class Member:
    """One process of a scene, and what it has printed."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines() if line[:1] == "{"]

    def event(self, name: str) -> dict[str, Any]:
        found = [e for e in self.events() if e["event"] == name]
        assert found, f"no {name!r} in {self.events()}\n{self.err.read_text()[-3000:]}"
        return found[0]

    def error(self) -> dict[str, Any]:
        """Returns the error that the program got, or else that of the process's last words.

        A wait in native code cannot always be ended: then the process prints the error and ends.
        """
        if self.has("error"):
            return self.event("error")
        found = re.search(
            r"ends with exit code \d+: its main thread .*\n(\w+): (.*)\n$", self.errors_text
        )
        assert found, f"{self.events()}\n{self.errors_text[-3000:]}"
        return {"kind": found[1], "text": found[2], "at": self.err.stat().st_mtime}

    def has(self, name: str) -> bool:
        return any(e["event"] == name for e in self.events())

    @property
    def errors_text(self) -> str:
        return self.err.read_text()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def wait(self, seconds: float = _MOST_S) -> int:
        return self.process.wait(seconds)

    def wait_for(self, name: str, seconds: float = _MOST_S) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not self.has(name) and time.monotonic() < end and self.code is None:
            time.sleep(0.02)
        return self.event(name)


class Scene:
    """Starts the members of a group; ends those that are left."""

    def __init__(self, directory: Path, num: int = 2) -> None:
        self._directory = directory
        self._reserved = ReservedPorts(num)
        self.cluster: dict[str, list[str]] = {
            "worker": [f"127.0.0.1:{port}" for port in self._reserved.ports]
        }
        self.members: list[Member] = []

    def start(
        self,
        scene: str,
        indices: Sequence[int] = (0, 1),
        odd: int = -1,
        cluster: dict[str, list[str]] | None = None,
        **env: str,
    ) -> list[Member]:
        new = [self._start(scene, index, odd, cluster or self.cluster, env) for index in indices]
        self.members += new
        return new

    def _start(
        self,
        scene: str,
        index: int,
        odd: int,
        cluster: dict[str, list[str]],
        env: dict[str, str],
    ) -> Member:
        return self.run(PROGRAM, [str(index), json.dumps(cluster), scene, str(odd)], **env)

    def run(self, program: Path, arguments: Sequence[str], **env: str) -> Member:
        """Starts a process."""
        number = len(list(self._directory.iterdir()))
        out, err = (self._directory / f"{number}.{end}" for end in ("out", "err"))
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **env}
        environment.pop("XLA_FLAGS", None)
        environment.pop("NPROC", None)
        with out.open("wb") as stdout, err.open("wb") as stderr:
            command = [sys.executable, str(program), *arguments]
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        return Member(process, out, err)

    def close(self) -> None:
        for member in self.members:
            if member.code is None:
                member.process.kill()
            member.wait()
        self._reserved.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with contextlib.closing(Scene(tmp_path)) as made:
        yield made


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Scene]:
    with contextlib.closing(Scene(tmp_path, 3)) as made:
        yield made


def test_bar34_all_report_and_make_calls(scene: Scene) -> None:
    members = scene.start("calls")
    codes = [member.wait() for member in members]
    assert codes == [0, 0], [m.errors_text[-2000:] for m in members]
    for index, member in enumerate(members):
        assert member.event("joined")["index"] == index
        assert member.event("joined")["devices"] == 2
        expected = [[f"{i} of {n}" for i in range(2)] for n in range(3)]
        assert member.event("values")["values"] == expected
        assert member.event("again")["is_same"]
        assert any(e["event"] == "error" and "one group" in e["text"] for e in member.events())
        assert member.event("training")["total"] == 2.0
        # Nothing listens beyond the address of the task: only Gloo listens on the network.
        assert set(member.event("listening")["at"]) == {"127.0.0.1"}
        assert member.event("latency")["ms"] < 20
        lines = member.errors_text.splitlines()
        assert all(line.startswith("The group is not complete: ") for line in lines), lines
    # No process is held up at the end, and none aborts.
    ended = [member.event("end")["at"] for member in members]
    assert abs(ended[0] - ended[1]) < PROMISED_S


@pytest.mark.slow
def test_bar34_a_missing_task_is_named_on_all_others(three: Scene) -> None:
    members = three.start("missing", indices=(0, 2))
    assert [member.wait() for member in members] == [3, 3]
    waited = members[0].error()["at"] - members[0].event("joining")["at"]
    assert 10.0 <= waited < 10.0 + 2.0 + 3.0  # The deadline, two seconds, and a busy machine.
    for member in members:
        error = member.error()
        assert error["kind"] == "DeadlineExceededError"
        assert f"/job:worker/task:1 at {three.cluster['worker'][1]}" in error["text"]
        assert "/job:worker/task:2" not in error["text"]
        assert member.has("alive")
        assert "waiting for /job:worker/task:1" in member.errors_text


@pytest.mark.slow
def test_bar34_a_missing_chief_is_named_and_the_exit_code_says_restart(scene: Scene) -> None:
    (member,) = scene.start("uncaught", indices=(1,))
    assert member.wait() == exit_codes.RESTART_GROUP
    error = member.error()
    assert error["kind"] == "DeadlineExceededError"
    assert "/job:worker/task:0" in error["text"]
    assert "Traceback" in member.errors_text


def test_a_duplicate_task_is_named_on_all_tasks(three: Scene) -> None:
    members = three.start("duplicate", indices=(0, 1, 1))
    assert [member.wait() for member in members] == [3, 3, 3]
    for member in members:
        error = member.error()
        assert error["kind"] == "InvalidArgumentError"
        assert "/job:worker/task:1" in error["text"]
        for twin in members[1:]:
            assert f"process {twin.process.pid}" in error["text"]
        assert member.has("alive")


@pytest.mark.slow
def test_a_second_chief_finds_the_address_in_use(scene: Scene) -> None:
    (first,) = scene.start("calls", indices=(0,))
    end = time.monotonic() + _MOST_S
    while "waiting for /job:worker/task:1" not in first.errors_text and time.monotonic() < end:
        time.sleep(0.05)
    second, worker = scene.start("calls", indices=(0, 1))
    assert second.wait() == 3
    error = second.event("error")
    assert error["kind"] == "AddressInUseError"
    assert "/job:worker/task:0" in error["text"]
    assert str(first.process.pid) in error["text"]
    assert [first.wait(), worker.wait()] == [0, 0]


@pytest.mark.parametrize("kind", ["version", pytest.param("library", marks=pytest.mark.slow)])
def test_a_task_of_another_version_is_named_on_all_tasks(three: Scene, kind: str) -> None:
    members = three.start(kind, indices=(0, 1, 2), odd=2)
    assert [member.wait() for member in members] == [3, 3, 3]
    for member in members:
        error = member.error()
        assert error["kind"] == "ProtocolError"
        assert "/job:worker/task:2" in error["text"]
        assert ("jaxlib 0.0.1" if kind == "version" else "replicax 99.0.0") in error["text"]


@pytest.mark.slow
def test_a_task_with_another_cluster_is_named_on_all_tasks(three: Scene) -> None:
    other = {"worker": [*three.cluster["worker"], "127.0.0.1:9"]}
    members = three.start("cluster", indices=(0, 1))
    members += three.start("cluster", indices=(2,), cluster=other)
    assert [member.wait() for member in members] == [3, 3, 3]
    for member in members:
        error = member.error()
        assert error["kind"] == "InvalidArgumentError"
        assert "the same cluster" in error["text"]
        assert "/job:worker/task:2" in error["text"]


def test_jax_must_not_have_started(scene: Scene) -> None:
    (member,) = scene.start("early", indices=(0,))
    assert member.wait() == 3
    assert member.error()["kind"] == "ContextError"
    assert "Create the strategy first" in member.error()["text"]


@pytest.mark.parametrize("kind", ["fingerprint", "name", "order, same size", "calls differ"])
def test_bar34_programs_that_differ_are_named_on_all_tasks(scene: Scene, kind: str) -> None:
    members = scene.start(kind, odd=1)
    joined = max(member.wait_for("joined")["at"] for member in members)
    assert [member.wait() for member in members] == [1, 1]
    for member in members:
        error = member.error()
        assert error["kind"] == "InvalidArgumentError", error
        assert "/job:worker/task:0" in error["text"]
        assert "/job:worker/task:1" in error["text"]
        expected = {
            "fingerprint": "'sum of 4', and /job:worker/task:1 runs 'sum of 8'",
            "name": "'train', and /job:worker/task:1 runs 'evaluate'",
            "order, same size": "'sum of 4' and /job:worker/task:1 ran 'sum of 4 times 2'",
            "calls differ": "'checkpoint', and /job:worker/task:1 at 'evaluation'",
        }[kind]
        assert expected in error["text"]
        assert error["at"] - joined < PROMISED_S
        assert "InvalidArgumentError" in last_words(member)


def last_words(member: Member) -> str:
    """Returns the end of what a process has printed as errors; no abort of JAX may be in it."""
    text = member.errors_text
    assert not any(abort in text for abort in ABORTS), text[-4000:]
    return text[-1500:]


@pytest.mark.slow
def test_bar34_an_abort_in_native_code_is_explained(scene: Scene) -> None:
    """Gloo aborts a process that gets data of another size: the group says why, in the end."""
    members = scene.start("order", odd=1)
    assert [member.wait() for member in members] == [exit_codes.FAILED, exit_codes.FAILED]
    for member in members:
        last = member.errors_text.strip().splitlines()[-1]
        assert "InvalidArgumentError: " in last
        assert "/job:worker/task:0 ran 'sum of 4'" in last
        assert "/job:worker/task:1 ran 'sum of 8'" in last
    assert any("EnforceNotMet" in member.errors_text for member in members)  # It did abort.


@pytest.mark.slow
def test_all_tasks_start_on_the_same_ports_again_after_a_loss(scene: Scene) -> None:
    members = scene.start("kill", odd=1)
    assert [member.wait() for member in members] == [exit_codes.RESTART_GROUP, -signal.SIGKILL]
    again = scene.start("calls")
    assert [member.wait() for member in again] == [0, 0], again[0].errors_text


@pytest.mark.slow
def test_files_of_sockets_do_not_stay(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runtime = tmp_path_factory.mktemp("run")
    members = scene.start("kill", odd=1, XDG_RUNTIME_DIR=str(runtime))
    for member in members:
        member.wait_for("joined")
    for member in members:
        member.wait()
    left = [p.name for p in runtime.rglob("*.sock") if re.match(r"jax-", p.name)]
    assert not left


@pytest.mark.slow
def test_over_tcp_with_keys(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = keys.make(tmp_path_factory.mktemp("keys") / "keys")
    members = scene.start("calls", REPLICAX_KEYS=str(directory))
    assert [member.wait() for member in members] == [0, 0], members[1].errors_text
    assert all(member.event("training")["total"] == 2.0 for member in members)


@pytest.mark.slow
def test_a_task_with_other_keys_is_not_accepted(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = [keys.make(tmp_path_factory.mktemp("keys") / name) for name in ("ours", "theirs")]
    (chief,) = scene.start("missing", indices=(0,), REPLICAX_KEYS=str(made[0]))
    (other,) = scene.start("missing", indices=(1,), REPLICAX_KEYS=str(made[1]))
    assert [chief.wait(), other.wait()] == [3, 3]
    assert "/job:worker/task:1" in chief.error()["text"]
    assert other.error()["kind"] in ("PermissionDeniedError", "DeadlineExceededError")
    assert "keys" in other.error()["text"]
