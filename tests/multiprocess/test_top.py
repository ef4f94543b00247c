"""`replicax top` on running jobs: as a table, on a terminal (tmux), and in a browser."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from typer.testing import CliRunner

from replicax.cli.main import app
from replicax.foundation import settings
from replicax.observe import endpoint, job_directory
from replicax.top import terminal, web
from replicax.top.view import Row, Sampler

_REPLICAX = [sys.executable, "-m", "replicax"]
_PROGRAM = Path(__file__).parent.parent / "support" / "programs" / "observed_job.py"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hides the jobs of other tests."""
    monkeypatch.setenv(settings.XDG_RUNTIME_DIR, str(tmp_path))
    return tmp_path


_COORDINATOR: dict[str, object] = {
    "role": "coordinator",
    "state": "running",
    "queued": 3,
    "in_flight": 2,
    "counters": {"closures": 10},
    "waits_for": ["closure 7 (step) has run on /job:worker/task:1 for 9.0 s"],
    "tasks": [
        {"task": "/job:worker/task:0", "role": "worker", "state": "busy", "num_closures": 2,
         "num_done": 6, "rate": 1.5, "num_restarts": 0, "reason": ""},
        {"task": "/job:worker/task:1", "role": "worker", "state": "connecting", "num_closures": 0,
         "num_done": 4, "rate": 0.5, "num_restarts": 3, "reason": "nothing listens there"},
    ],
}  # fmt: skip


@pytest.fixture
def small_job() -> Iterator[Path]:
    """The endpoints of a coordinator and a worker in this process; worker 1 is on another host."""
    directory = job_directory.root() / "small"
    worker = {"role": "worker", "state": "busy", "counters": {"closures": 6}, "in_flight": 1}
    made = [
        endpoint.Endpoint(
            "/job:coordinator/task:0",
            directory,
            lambda: _COORDINATOR,
            {"stack": lambda _, arguments: {"text": f"stacks of {arguments['task']}"}},
        ),
        endpoint.Endpoint("/job:worker/task:0", directory, lambda: worker),
    ]
    yield directory
    for each in made:
        each.close()


def test_view_joins_what_tasks_say_and_what_the_coordinator_knows(small_job: Path) -> None:
    sampler = Sampler(small_job)
    sampler.sample()
    view = sampler.sample()
    assert [row.task for row in view.rows] == [
        "/job:coordinator/task:0", "/job:worker/task:0", "/job:worker/task:1",
    ]  # fmt: skip
    coordinator, near, far = view.rows
    assert (coordinator.in_flight, coordinator.count, coordinator.rate) == (5, 10, 0.0)
    assert (near.pid, near.in_flight, near.restarts) == (os.getpid(), 2, 0)
    assert near.memory is not None and near.cpu is not None
    assert (far.pid, far.state, far.restarts, far.rate) == (None, "connecting", 3, 0.5)
    # No closure has ended between the two looks.
    assert view.waits == ("closure 7 (step) has run on /job:worker/task:1 for 9.0 s",)
    # Through the coordinator.
    assert sampler.stack(far) == "stacks of /job:worker/task:1"
    assert "test_view_joins" in sampler.stack(near)


def test_once_prints_a_table_or_json_and_says_when_no_job_runs(small_job: Path) -> None:
    done = CliRunner().invoke(app, ["top", "--once"])
    assert done.exit_code == 0, done.stderr
    assert re.search(r"/job:worker/task:1 +connecting .* 4 closures .* 3\n", done.stdout)
    done = CliRunner().invoke(app, ["top", "--json"])
    assert [row["restarts"] for row in json.loads(done.stdout)["rows"]] == [None, 0, 3]
    done = CliRunner().invoke(app, ["top", "--once", "no-such"])
    assert done.exit_code == 1
    assert done.stderr == (
        "replicax: Job 'no-such' must run, but these run: small. Start it, or pass the directory "
        "that its REPLICAX_JOB_DIR names.\n"
    )


def test_screen_selects_asks_before_it_kills_and_shows_stacks(small_job: Path) -> None:
    class Careful(Sampler):
        killed: list[str] = []

        def kill(self, row: Row) -> int:
            self.killed.append(row.task)
            return 7

    sampler = Careful(small_job)
    view, screen = sampler.sample(), terminal.Screen(sampler)

    def shown(*keys: str) -> str:
        from rich.console import Console

        for key in keys:
            screen.press(key, view)
        console = Console(width=120, height=30, record=True, file=io.StringIO())
        console.print(screen.render(view, 120, 30))
        return console.export_text()

    assert "s stack   k kill   q quit" in shown()
    assert f"Kill /job:worker/task:0 (process {os.getpid()})? y / n" in shown("down", "k")
    assert "Kill" not in shown("n") and not sampler.killed
    assert "Killed /job:worker/task:0 (process 7)." in shown("k", "y")
    assert sampler.killed == ["/job:worker/task:0"]
    assert "does not run on this host" in shown("down", "down", "k")
    assert "Thread MainThread:" in shown("up", "s") and "in flight" in shown("\x1b")
    screen.press("q", view)
    assert screen.is_done


def _ask(server: web.Server, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_page_needs_its_token_and_its_host(small_job: Path) -> None:
    with web.Server(Sampler(small_job)) as server:
        thread = server.start()
        allowed = {"Authorization": f"Bearer {server.token}"}
        status, page = _ask(server, "/")
        assert status == 200 and server.token not in page and "worker" not in page
        for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer é"}):
            assert _ask(server, "/api/view", **headers)[0] == 401
            for path in ("/api/stack", "/api/kill"):
                assert _ask(server, path, {"task": "/job:worker/task:0"}, **headers)[0] == 401
        # A page of another host whose name was pointed at this one.
        assert _ask(server, "/api/view", Host="evil.example:80", **allowed)[0] == 421
        deadline = time.monotonic() + 10.0
        while not server.view.rows and time.monotonic() < deadline:
            time.sleep(0.05)
        status, text = _ask(server, "/api/view", **allowed)
        assert status == 200
        assert [row["task"] for row in json.loads(text)["rows"]] == [
            "/job:coordinator/task:0", "/job:worker/task:0", "/job:worker/task:1",
        ]  # fmt: skip
        status, text = _ask(server, "/api/stack", {"task": "/job:worker/task:0"}, **allowed)
        assert status == 200 and "MainThread" in json.loads(text)["text"]
        for wrong in ({"task": "../x"}, {"task": 3}, [], {"x": "y" * 5000}):
            assert _ask(server, "/api/kill", wrong, **allowed)[0] == 400
        # It is on another host.
        assert _ask(server, "/api/kill", {"task": "/job:worker/task:1"}, **allowed)[0] == 409
        assert _ask(server, "/api/other", {"task": "/job:worker/task:0"}, **allowed)[0] == 404
    thread.join(10.0)


# The real thing.


@contextlib.contextmanager
def _running(num_closures: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(_PROGRAM), str(num_closures)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def _counters(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


def _tmux(directory: Path, *args: str) -> str:
    command = ["tmux", "-S", str(directory / "tmux"), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def _wait_for(directory: Path, pattern: str, seconds: float = 30.0) -> str:
    deadline = time.monotonic() + seconds
    while True:
        shown = _tmux(directory, "capture-pane", "-p")
        if re.search(pattern, shown):
            return shown
        assert time.monotonic() < deadline, f"no {pattern!r} in:\n{shown}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux")
def test_k_kills_a_worker_of_a_running_job_and_its_counters_stay_exact(runtime: Path) -> None:
    num_closures = 4000
    with _running(num_closures) as process:
        command = " ".join([*_REPLICAX, "top"])
        _tmux(runtime, "new-session", "-d", "-x", "140", "-y", "30", command)
        try:
            _wait_for(runtime, r"/job:worker/task:0 +(busy|idle)[^\n]*/s")
            _tmux(runtime, "send-keys", "Down")
            _tmux(runtime, "send-keys", "s")
            _wait_for(runtime, r"/job:worker/task:0, process \d+\nThread MainThread:")
            _tmux(runtime, "send-keys", "s")
            _wait_for(runtime, "k kill")
            _tmux(runtime, "send-keys", "k")
            _wait_for(runtime, r"Kill /job:worker/task:0 \(process \d+\)\? y / n")
            _tmux(runtime, "send-keys", "y")
            _wait_for(runtime, r"Killed /job:worker/task:0")
            # The last column counts its losses.
            _wait_for(runtime, r"/job:worker/task:0 [^\n]* 1\n")
            _tmux(runtime, "send-keys", "q")
        finally:
            with contextlib.suppress(subprocess.CalledProcessError):
                _tmux(runtime, "kill-server")
        assert _counters(process) == {"counter": num_closures, "restarts": [1, 0]}
    assert job_directory.running() == []


@pytest.mark.slow
@pytest.mark.skipif(not browser.is_installed(), reason="needs chromium and chromedriver")
def test_page_in_a_browser_shows_the_job_its_stacks_and_kills_a_worker(runtime: Path) -> None:
    num_closures = 6000
    with _running(num_closures) as process, contextlib.ExitStack() as stack:
        command = [*_REPLICAX, "top", "--web"]
        top = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(top.kill)
        assert top.stdout is not None
        url = top.stdout.readline().split()[-1]
        page = stack.enter_context(browser.opened(runtime))
        page.open(url.partition("#")[0])
        page.wait_for_text("#message", "the token of the link is missing or wrong")
        page.open("about:blank")
        page.open(url)
        page.wait_for_text("tbody", r"/job:worker/task:0\s+(busy|idle)\s[^\n]*/s")
        assert page.text("header").startswith("observed_job.py-")
        page.click("[aria-label='stack of /job:worker/task:1']")
        page.wait_for_text("#stack-text", "Thread MainThread:")
        page.click("dialog button")
        page.click("[aria-label='kill /job:worker/task:1']")
        assert page.accept_question() == "Kill /job:worker/task:1?"
        page.wait_for_text("#message", r"Killed /job:worker/task:1 \(process \d+\)")
        page.wait_for_text("tr[data-task='/job:worker/task:1']", r"\t1\t")
        # Refused once, without its token; nothing else failed, such as the policy of the page.
        assert [line for line in page.log() if "401" not in line] == []
        assert _counters(process) == {"counter": num_closures, "restarts": [0, 1]}
