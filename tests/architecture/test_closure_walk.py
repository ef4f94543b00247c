"""The files that one closure crosses: from `schedule` to the worker, the server and the result."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import replicax as rx

_SOURCE = f"{Path(rx.__file__).parent}/"
# It was 58 at 0.1.0.
_MAX_FILES = 41
_NUM_ROUNDS = 12


class Recorder:
    """Collects the source files of all calls in all threads, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_code.co_filename
        if self.is_on and event == "call" and name.startswith(_SOURCE):
            self.files.add(name.removeprefix(_SOURCE))


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Records threads that are started from now on, and this one."""
    made = Recorder()
    threading.setprofile(made)
    sys.setprofile(made)
    try:
        yield made
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_closure_crosses_few_files(recorder: Recorder) -> None:
    # All three tasks are in this process, with real sockets between them.
    spec = {"ps": ["inproc://walk-ps"], "worker": ["inproc://walk-worker"]}
    resolver = rx.cluster_resolver.SimpleClusterResolver(rx.train.ClusterSpec(spec))
    with rx.Server(spec, "ps", 0), rx.Server(spec, "worker", 0):
        strategy = rx.ParameterServerStrategy(resolver)
        with strategy.scope():
            variable = rx.Variable(1.0)

        @rx.function
        def step() -> Any:
            variable.assign_add(1.0)
            return variable * 2.0

        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            coordinator.schedule(step).fetch()
            walks = []
            for i in range(_NUM_ROUNDS):
                recorder.files = set()
                recorder.is_on = True
                value = coordinator.schedule(step).fetch(60)
                recorder.is_on = False
                assert value == 2.0 * (i + 3)
                walks.append(recorder.files)
        strategy.close()
    # Without the heartbeats that happen meanwhile.
    walk = sorted(min(walks, key=len))
    for room in ("coordinator", "transport", "worker", "ps/client", "ps/process", "ps/store"):
        assert any(name.startswith(f"{room}/") for name in walk), f"{room} is not on the way"
    assert len(walk) <= _MAX_FILES, "\n".join(walk)
