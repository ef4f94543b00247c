"""Metrics of tasks for Prometheus."""

from __future__ import annotations

import logging
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import replicax as rx
import replicax.profiler
from replicax.foundation import settings
from replicax.observe import client, endpoint, metrics
from replicax.ps.store.service import ParameterStore


@pytest.fixture
def task(tmp_path: Path) -> Iterator[endpoint.Endpoint]:
    folder = tmp_path / "demo"
    folder.mkdir(mode=0o700)
    store = ParameterStore(task=0)
    status = {
        "role": "ps",
        "counters": store.counters() | {"bytes_sent": 7},
        "in_flight": 3,
        "tasks": [{"role": "worker", "task": "/job:worker/task:1", "num_restarts": 2}],
    }
    made = endpoint.Endpoint("/job:ps/task:0", folder, lambda: status)
    yield made
    made.close()


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return reply.read().decode()


def samples(text: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics_have_job_and_task_and_names_in_base_units(task: endpoint.Endpoint) -> None:
    server = rx.profiler.serve_metrics(port=0)
    try:
        assert server.address.startswith("127.0.0.1:")
        text = fetch(server.address)
    finally:
        server.close()
    found = samples(text)
    labels = {"job": "demo", "task": "/job:ps/task:0"}
    assert found["replicax_ps_sent_bytes_total"] == [(labels, 7.0)]
    assert found["replicax_closures_in_flight"] == [(labels, 3.0)]
    assert found["replicax_process_resident_memory_bytes"][0][1] > 1e6
    worker = {**labels, "worker": "/job:worker/task:1"}
    assert found["replicax_worker_restarts_total"] == [(worker, 2.0)]
    assert all(name.startswith("replicax_") for name in found)
    units = re.compile(r"_(ms|us|ns|kb|mb|kib|mib|minutes|percent)(_|$)")
    assert not [name for name in found if units.search(name)]
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert types["replicax_ps_sent_bytes_total"] == "counter"
    assert types["replicax_closures_in_flight"] == "gauge"


def test_every_counter_of_a_server_that_users_watch_is_a_metric() -> None:
    left_out = set(ParameterStore(task=0).counters()) - set(metrics._COUNTERS)
    # Of the protocol; the memory is among the facts about the process.
    assert left_out == {"applied_entries", "settled", "newest_closure", "rss"}


def test_the_endpoint_of_a_task_returns_its_metrics(task: endpoint.Endpoint) -> None:
    answer = client.ask(task.path, "metrics")
    assert not answer.error
    assert "replicax_ps_requests_total" in samples(answer.reply["text"])


def test_logged_values_and_programs_are_metrics() -> None:
    @rx.function
    def tripled(x: Any) -> Any:
        return 3.0 * x

    tripled(1.0)
    rx.summary.scalar("loss", 0.25, step=3)
    found = samples(metrics.text(endpoint.statuses))
    runs = {labels["program"]: value for labels, value in found["replicax_program_runs_total"]}
    assert runs["tripled"] == 1
    values = {labels["name"]: value for labels, value in found["replicax_logged_value"]}
    assert values["loss"] == 0.25


def test_nothing_listens_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(settings.REPLICAX_METRICS, raising=False)
    metrics.serve_if_asked(endpoint.statuses)
    assert metrics.current_address() == ""
    monkeypatch.setenv(settings.REPLICAX_METRICS, "nowhere")
    with caplog.at_level(logging.WARNING):
        metrics.serve_if_asked(endpoint.statuses)
    assert metrics.current_address() == ""
    assert "must be 'host:port'" in caplog.text


def test_tasks_of_one_host_take_the_next_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with_any = rx.profiler.serve_metrics(port=0)
    port = int(with_any.address.rpartition(":")[2])
    try:
        second = rx.profiler.serve_metrics(port=port)
        try:
            assert port < int(second.address.rpartition(":")[2]) < port + 100
        finally:
            second.close()
    finally:
        with_any.close()
