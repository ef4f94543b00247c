"""The process around a task in a pod: it ends with the job, and its exit code says what follows."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicax.foundation import errors
from replicax.launch import kubernetes_pod
from replicax.launch.kubernetes_pod import PodProcess, PodTask, SharedState

PS_CLUSTER = "chief=1,worker=1,ps=1"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def pod_of(shared: Path, job: str, code: str, tasks: str = PS_CLUSTER) -> PodTask:
    options = f"--service=t --job={job} --tasks={tasks} --port=1 --run=r --shared={shared}"
    words = [*options.split(), "--stop-seconds=5", "--", sys.executable, "-S", "-c", code]
    return kubernetes_pod.parse(words, index=0)


def run(pod: PodTask) -> int:
    return PodProcess(pod, SharedState(pod.state)).run(lambda stopping: dict(os.environ))


@pytest.mark.parametrize(
    ("code", "exit_code", "over"),
    [
        ("", 0, 0),
        ("raise SystemExit(3)", 3, 3),
        ("raise SystemExit(75)", 75, None),
        ("raise SystemExit(42)", 42, None),
        ("import os; os.kill(os.getpid(), 9)", 137, None),
    ],
)
def test_the_end_of_the_chief_is_that_of_the_job_unless_it_restarts(
    tmp_path: Path, code: str, exit_code: int, over: int | None
) -> None:
    pod = pod_of(tmp_path, "chief", code)
    assert run(pod) == exit_code
    assert SharedState(pod.state).exit_code() == over


def test_a_worker_that_serves_ends_with_0_when_the_job_is_over(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    pod = pod_of(tmp_path, "worker", code)
    state = SharedState(pod.state)

    class OverOnceStarted(SharedState):
        def exit_code(self) -> int | None:
            if started.exists():
                state.tell_over(0)
            return super().exit_code()

    process = PodProcess(pod, OverOnceStarted(pod.state))
    assert process.run(lambda stopping: dict(os.environ)) == 0
    # A pod of the same run that starts later has nothing to do.
    assert run(pod_of(tmp_path, "worker", "raise SystemExit(9)")) == 0


def test_a_chief_that_gives_no_sign_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_pod, "_GONE_S", 0.0)
    assert run(pod_of(tmp_path, "worker", "import time; time.sleep(60)")) == 1


def test_a_server_keeps_snapshots_on_the_shared_volume(tmp_path: Path) -> None:
    pod = pod_of(tmp_path, "ps", "")
    assert pod.full_command[-2:] == ["--snapshots", str(tmp_path / ".replicax/r/snapshots")]


def test_names_that_cannot_be_looked_up_are_named(tmp_path: Path) -> None:
    pod = pod_of(tmp_path, "worker", "", tasks="worker=2")
    with pytest.raises(errors.DeadlineExceededError, match=r"2 of 2 pods .* t-worker-0\.t"):
        kubernetes_pod.wait_for_names(pod, limit_s=0.0)
