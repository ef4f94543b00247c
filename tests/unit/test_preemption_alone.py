"""PreemptionCheckpointHandler in one process: SIGTERM, other notices, grace, errors."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vocabulary import refused

import replicax as rx
from replicax.checkpointing import preemption_notice

PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "preempted.py"
STEPS = 100000


def program(directory: Path, steps: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), str(directory), str(steps), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return line.strip()
    raise AssertionError(f"{text!r} was not printed; exit code {process.wait(20)}")


def rest(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=40)[0].split("\n")[:-1]


def steps_on_disk(directory: Path) -> list[str]:
    return [path.name for path in (directory / "run").glob("ckpt-*")]


@pytest.fixture(autouse=True)
def sigterm_is_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is before


def test_T121_SIGTERM_saves_exits_with_42_and_the_restart_continues(tmp_path: Path) -> None:
    process = program(tmp_path, STEPS)
    until(process, "step 5")
    process.send_signal(signal.SIGTERM)
    lines = rest(process)
    assert process.returncode == 42
    # The step that ran is the last one, and it is saved.
    last = int(lines[-1].split()[1]) if lines else 5
    assert steps_on_disk(tmp_path) == ["ckpt-1"]
    assert rx.train.load_variable(tmp_path / "run" / "ckpt-1", "v") == last
    again = program(tmp_path, last + 3)
    assert until(again, "start") == f"start {last} {last}"
    assert rest(again)[-1] == f"end {last + 3}"
    assert again.returncode == 0


def test_T121_options_replace_watching_saving_and_exiting(tmp_path: Path) -> None:
    process = program(tmp_path, STEPS, "watcher=1", "save_fn=1", "exit_fn=1")
    until(process, "step 5")
    (tmp_path / "notice").touch()
    lines = rest(process)
    assert process.returncode == 7
    assert steps_on_disk(tmp_path) == []
    assert (tmp_path / "saved_by_user").read_text() == lines[-1].split()[1]


@pytest.mark.slow
def test_T121_a_grace_period_delays_the_exit(tmp_path: Path) -> None:
    process = program(tmp_path, STEPS, "grace=2")
    before = int(until(process, "step 5").split()[1])
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    lines = rest(process)
    assert process.returncode == 42
    assert 1.0 < time.monotonic() - begun < 20
    # It trained on, and what it trained is saved.
    last = int(lines[-1].split()[1])
    assert last > before + 10
    (name,) = steps_on_disk(tmp_path)
    assert name == "ckpt-2"
    assert rx.train.load_variable(tmp_path / "run" / name, "v") == last


def make(tmp_path: Path, **options: Any) -> tuple[Any, Any]:
    v = rx.Variable(0)
    config = rx.experimental.TerminationConfig(**options)
    handler = rx.experimental.PreemptionCheckpointHandler(
        None, rx.train.Checkpoint(v=v), tmp_path / "run", config
    )
    return v, handler


def test_run_returns_and_raises_what_the_step_does(tmp_path: Path) -> None:
    _, handler = make(tmp_path)
    with handler.watch_preemption_scope():
        assert handler.run(lambda a, *, b: a + b, 1, b=2) == 3
        with pytest.raises(ZeroDivisionError):
            handler.run(lambda: 1 / 0)
    # A step that failed is not a step.
    assert handler.total_run_calls == 1
    assert "after 1 runs" in repr(handler)


def test_save_checkpoint_if_preempted_passes_arguments_on(tmp_path: Path) -> None:
    ended: list[str] = []
    v = rx.Variable(0)
    manager = rx.train.CheckpointManager(
        rx.train.Checkpoint(v=v),
        tmp_path / "run",
        step_counter=v,
        checkpoint_interval=1000,
        save_async=True,
    )
    manager.save()
    config = rx.experimental.TerminationConfig(exit_fn=lambda: ended.append("here"))
    handler = rx.experimental.PreemptionCheckpointHandler(None, manager, None, config)
    watcher = rx.experimental.PreemptionWatcher()
    for step in range(1, 5):
        v.assign_add(1)
        if step == 3:
            assert watcher.preemption_message is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert "SIGTERM" in (watcher.preemption_message or "")
        handler.save_checkpoint_if_preempted(checkpoint_number=v)
    # The interval does not hold it back, and it is on disk when `exit_fn` is called; once.
    assert ended == ["here"]
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1", "ckpt-3"]
    # The third call came after three steps and two counted calls.
    assert rx.train.Checkpoint(v=v).restore(manager.latest_checkpoint).expect_partial()
    assert int(v) == 3
    watcher.block_until_worker_exit()
    manager.close()


def test_checkpoints_of_the_program_itself_count_runs_too(tmp_path: Path) -> None:
    for begun in (0, 3):
        v = rx.Variable(0)
        checkpoint = rx.train.Checkpoint(v=v)
        with rx.train.CheckpointManager(checkpoint, tmp_path / "run") as manager:
            handler = rx.experimental.PreemptionCheckpointHandler(None, manager)
            assert (handler.total_run_calls, int(v)) == (begun, begun)
            for _ in range(3):
                handler.run(v.assign_add, 1)
            manager.save()
            # These are lost.
            handler.run(v.assign_add, 1)


def test_a_watcher_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preemption_notice, "_POLL_S", 0.01)
    answers = iter([OSError("no route"), False, True])
    done = threading.Event()

    def ask() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    v, handler = make(tmp_path, termination_watcher_fn=ask, exit_fn=done.set)
    for _ in range(500):
        handler.run(v.assign_add, 1)
        if done.is_set():
            break
        time.sleep(0.01)
    assert done.is_set()
    assert "no route" in caplog.text
    # The step after the save has run, and is not in the checkpoint.
    assert rx.train.load_variable(tmp_path / "run" / "ckpt-1", "v") == int(v) - 1


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    checkpoint = rx.train.Checkpoint(v=rx.Variable(0))
    handler = rx.experimental.PreemptionCheckpointHandler
    with refused(rx.errors.InvalidArgumentError, "checkpoint_dir"):
        handler(None, checkpoint)
    with refused(rx.errors.ArgumentTypeError, "Variable"):
        handler(None, rx.Variable(0), tmp_path)  # type: ignore[arg-type]
    servers = rx.train.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]})
    resolver = rx.cluster_resolver.SimpleClusterResolver(servers)
    with refused(NotImplementedError, "parameter servers"):
        handler(resolver, checkpoint, tmp_path)
    failed: list[Exception] = []

    def in_a_thread() -> None:
        try:
            handler(None, checkpoint, tmp_path / "run")
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(20)
    assert isinstance(failed[0], rx.errors.ContextError)
    assert "main thread" in str(failed[0])
