"""Programs that are killed or interrupted: what they started ends with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_partners import PROGRAMS

NUM_LAUNCHERS = 5


def _has_ended(pid: int) -> bool:
    # There may be no process that reaps an orphan: a zombie has exited.
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "most_seconds"),
    [(signal.SIGKILL, 3.0), (signal.SIGINT, 15.0)],
    ids=["kill", "ctrl-c"],
)
def test_bar52_nothing_outlives_its_launcher(
    tmp_path: Path, number: signal.Signals, most_seconds: float
) -> None:
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(PROGRAMS / "launch_cluster.py")],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "TMPDIR": str(tmp_path)},
                    text=True,
                )
            )
            for _ in range(NUM_LAUNCHERS)
        ]
        started: list[dict[str, Any]] = []
        for launcher in launchers:
            assert launcher.stdout is not None
            started.append(json.loads(launcher.stdout.readline()))
        pids = [pid for one in started for pid in one["pids"]]
        assert not [pid for pid in pids if _has_ended(pid)]
        for launcher in launchers:
            launcher.send_signal(number)
        deadline = time.monotonic() + most_seconds
        for launcher in launchers:
            launcher.wait(max(0.1, deadline - time.monotonic()))
        if number == signal.SIGINT:
            assert not [one for one in started if Path(one["directory"]).exists()]
        while (left := [pid for pid in pids if not _has_ended(pid)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert left == []
