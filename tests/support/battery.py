"""Runs tests of tests/conformance in several processes at once, as workers of one group.

Every worker runs the same tests in the same order. The parent process connects them: tests collect
the values of all replicas over it, and after each test the workers compare its outcome. If the
outcomes differ, the workers do not do the same any more, and the rest of the tests is not run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from worker_groups import VARIABLE, Worker

ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).parent / "programs" / "run_battery.py"
# How long a worker waits for the others, after which they are asked no more.
_EXCHANGE_SECONDS = 100.0
# How long one test may take.
TEST_SECONDS = 100.0


@dataclasses.dataclass
class Outcomes:
    """What became of the tests.

    Attributes:
      collected: The tests that all workers were to run, in order.
      failures: The messages of each test that failed, by worker.
      seconds: How long each test took, on the slowest worker.
      endings: Why a worker ended before all tests were run; empty if all is well.
    """

    collected: list[str] = dataclasses.field(default_factory=list)
    passed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: dict[str, dict[int, str]] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    endings: list[str] = dataclasses.field(default_factory=list)

    def problems(self, workers: int) -> str:
        """Returns everything that is wrong, as text; empty if all tests passed on all workers."""
        lines: list[str] = []
        for test, by_worker in self.failures.items():
            lines.append(f"FAILED {test}")
            texts: dict[str, list[int]] = {}
            for worker, text in sorted(by_worker.items()):
                texts.setdefault(text, []).append(worker)
            for text, who in texts.items():
                lines += [f"  on worker {', '.join(map(str, who))}:", _indented(text)]
        lines += self.endings
        unfinished = [
            test
            for test in self.collected
            if test not in self.failures and self.passed[test] < workers
        ]
        if unfinished:
            lines.append(f"{len(unfinished)} tests were not run by all workers to their end:")
            lines += [f"  NOT RUN {test}" for test in unfinished[:20]]
        if not self.collected and not lines:
            lines.append("no tests were collected")
        return "\n".join(lines)


def run_battery(
    workers: int,
    devices: int,
    files: Sequence[str],
    directory: Path,
    *,
    options: Sequence[str] = (),
    alone: bool = False,
    seconds: float = 280.0,
) -> Outcomes:
    """Runs tests in a group of workers.

    Args:
      workers: The number of processes.
      devices: The number of devices of each.
      files: The test files, as paths below the root of the project.
      directory: An empty directory for sockets and logs.
      options: Further options of pytest.
      alone: See `Worker`.
      seconds: How long it may take in all.
    """
    outcomes = Outcomes()
    hub = _Hub(workers, directory / "hub", outcomes)
    cluster = _cluster(workers)
    with contextlib.ExitStack() as stack:
        stack.callback(hub.close)
        started = [
            stack.enter_context(_worker(i, cluster, devices, hub, alone, directory, files, options))
            for i in range(workers)
        ]
        hub.start()
        deadline = time.monotonic() + seconds
        for i, process in enumerate(started):
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                where = hub.running.get(i, "its start")
                outcomes.endings.append(f"worker {i} was still in {where} after {seconds} s")
                continue
            # 0 and 1: all tests were run.
            if code not in (0, 1) or not hub.finished[i]:
                where = hub.running.get(i, "its start")
                log = (directory / f"worker_{i}.log").read_text()[-6000:]
                outcomes.endings.append(
                    f"worker {i} ended with code {code} in {where}; its output:\n{_indented(log)}"
                )
    return outcomes


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cluster(workers: int) -> list[str]:
    """Returns free local addresses."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in found]


@contextlib.contextmanager
def _worker(
    index: int,
    cluster: list[str],
    devices: int,
    hub: _Hub,
    alone: bool,
    directory: Path,
    files: Sequence[str],
    options: Sequence[str],
) -> Iterator[subprocess.Popen[bytes]]:
    worker = Worker(index, len(cluster), devices, hub.address, alone)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env[VARIABLE] = json.dumps(dataclasses.asdict(worker))
    # Silence is no fault here: machines of tests are busy. `TEST_SECONDS` bounds each test.
    env["REPLICAX_TIMING"] = "default"
    env["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": cluster}, "task": {"type": "worker", "index": index}}
    )
    command = [sys.executable, str(_PROGRAM), str(os.getpid()), *files, "--", *options]
    with (directory / f"worker_{index}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


class _Hub:
    """Connects the workers with each other, and hears what they report."""

    def __init__(self, workers: int, path: Path, outcomes: Outcomes) -> None:
        self.address = str(path)
        self._listener = Listener(self.address, family="AF_UNIX", backlog=workers)
        self._outcomes = outcomes
        self._workers = workers
        self._connections: dict[Connection, int] = {}
        self._waiting: dict[int, tuple[str, Any, float]] = {}
        self._gone: set[int] = set()
        self._closing = False
        self.running: dict[int, str] = {}
        self.finished = [False] * workers
        self._thread = threading.Thread(target=self._serve, name="battery-hub")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        if self._thread.ident is not None:
            self._thread.join(60)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _serve(self) -> None:
        sock = self._listener._listener._socket  # type: ignore[attr-defined]
        while not self._closing:
            for ready in wait([sock, *self._open()], timeout=0.2):
                if ready is sock:
                    connection = self._listener.accept()
                    self._connections[connection] = connection.recv()
                else:
                    self._receive(ready)  # type: ignore[arg-type]
            self._match()

    def _open(self) -> list[Connection]:
        return [c for c, i in self._connections.items() if i not in self._gone]

    def _receive(self, connection: Connection) -> None:
        worker = self._connections[connection]
        try:
            kind, *rest = connection.recv()
        except (EOFError, OSError):
            self._gone.add(worker)
            return
        outcomes = self._outcomes
        if kind == "exchange":
            self._waiting[worker] = (rest[0], rest[1], time.monotonic())
        elif kind == "collected":
            outcomes.collected = rest[0]
        elif kind == "running":
            self.running[worker] = rest[0]
        elif kind == "finished":
            self.finished[worker] = True
        elif kind == "ended early":
            outcomes.endings.append(f"worker {worker} stopped: {rest[0]}")
        else:
            test, failure, seconds = rest[0]
            outcomes.seconds[test] = max(seconds, outcomes.seconds.get(test, 0.0))
            if failure is None:
                outcomes.passed[test] += 1
            else:
                outcomes.failures.setdefault(test, {})[worker] = failure

    def _match(self) -> None:
        """Answers exchanges that are complete, and those that never will be."""
        if not self._waiting:
            return
        if len(self._waiting) == self._workers:
            labels = {i: label for i, (label, _, _) in sorted(self._waiting.items())}
            if len(set(labels.values())) > 1:
                self._reply(None, f"the workers are at different points: {labels}")
            else:
                self._reply([self._waiting[i][1] for i in range(self._workers)], None)
            return
        missing = [i for i in range(self._workers) if i not in self._waiting]
        where = {i: self.running.get(i, "its start") for i in missing}
        if self._gone & set(missing):
            self._reply(None, f"another worker has ended: {where}")
        elif time.monotonic() - min(t for _, _, t in self._waiting.values()) > _EXCHANGE_SECONDS:
            self._reply(None, f"another worker did not come to this point: {where}")

    def _reply(self, values: list[Any] | None, error: str | None) -> None:
        for connection in self._open():
            if self._waiting.pop(self._connections[connection], None) is not None:
                with contextlib.suppress(OSError):
                    connection.send((values, error))
