"""`rx.strategy_from_environment`: which strategy a task of a cluster gets."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

import replicax as rx

CODE = "import replicax as rx; print(type(rx.strategy_from_environment()).__name__, flush=True)"


def config(job: str | None, **cluster: list[str]) -> str:
    task = {} if job is None else {"task": {"type": job, "index": 0}}
    return json.dumps({"cluster": cluster, **task})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, rx.MirroredStrategy),
        (config("worker", worker=["localhost:1"]), rx.MultiWorkerMirroredStrategy),
        (
            config("evaluator", worker=["localhost:1", "localhost:2"], evaluator=["localhost:3"]),
            rx.MultiWorkerMirroredStrategy,
        ),
        (
            config("evaluator", chief=["localhost:0"], ps=["localhost:1"], worker=["localhost:2"]),
            rx.MultiWorkerMirroredStrategy,
        ),
        (config("chief", ps=["localhost:1"], worker=["localhost:2"]), rx.ParameterServerStrategy),
        (config(None, ps=["localhost:1"], worker=["localhost:2"]), rx.ParameterServerStrategy),
    ],
)
def test_the_cluster_decides_which_strategy_it_is(
    monkeypatch: pytest.MonkeyPatch, value: str | None, kind: type[Any]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if value is not None:
        monkeypatch.setenv("TF_CONFIG", value)
    strategy = rx.strategy_from_environment(parameter_servers={"consistency": "sync"})
    assert type(strategy) is kind
    if isinstance(strategy, rx.ParameterServerStrategy):
        strategy.close()


def test_arguments_reach_the_parameter_server_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    value = config("chief", chief=["localhost:0"], ps=["localhost:1"], worker=["localhost:2"])
    monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(rx.errors.InvalidArgumentError, match="consistency"):
        rx.strategy_from_environment(parameter_servers={"consistency": "never"})


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ps", "worker"])
def test_servers_and_workers_serve_until_they_are_stopped(
    monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    value = config(job, ps=["localhost:0"], worker=["localhost:0"])
    monkeypatch.setenv("TF_CONFIG", value)
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, b"")
