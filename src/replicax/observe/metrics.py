"""Metrics of the tasks of this process for Prometheus, at an HTTP address.

Nothing is served unless the program calls `serve`, or REPLICAX_METRICS names an address. Metrics
are computed from the status of the tasks when they are asked for, so they cost nothing otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicax.foundation import errors, lazy, settings
from replicax.observe import process_facts, progress

if TYPE_CHECKING:
    import prometheus_client as prometheus
    from prometheus_client import core as prometheus_core
    from prometheus_client.metrics_core import Metric
else:
    prometheus = lazy.module("prometheus_client", "replicax[metrics]")
    prometheus_core = lazy.module("prometheus_client.core", "replicax[metrics]")

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"
PORT = 9400
# Tasks of one host get the same address from their launcher; each takes the first free port.
_NUM_PORTS = 100
# The seconds that `close` waits for the thread that serves.
_CLOSE_S = 5.0

# Returns job, task and status of each task of this process.
Statuses = Callable[[], Iterable[tuple[str, str, Mapping[str, Any]]]]

# Of the counters of a status: name without prefix and unit suffix of counters, and help. A name
# that ends with `_total` only grows.
_COUNTERS = {
    "closures": ("closures_total", "Closures that have finished."),
    "open": ("worker_closures_open", "Closures that the worker has and has not reported."),
    "waiting": ("worker_closures_waiting", "Closures that the worker has not started."),
    "running_s": ("worker_closure_running_seconds", "How long the closure has been running."),
    "waiting_s": ("worker_server_wait_seconds", "How long the worker waits for a server."),
    "functions": ("worker_functions", "Functions that the worker holds."),
    "resources": ("worker_resources", "Per-worker objects that the worker holds."),
    "attached": ("worker_attached", "1 if the worker has a coordinator."),
    "requests": ("ps_requests_total", "Requests handled."),
    "updates": ("ps_updates_total", "Changes requested by closures."),
    "applied": ("ps_updates_applied_total", "Changes applied."),
    "duplicates": ("ps_updates_duplicate_total", "Changes that had been applied before."),
    "failures": ("ps_closures_rejected_total", "Closures whose changes were rejected."),
    "reads": ("ps_reads_total", "Values requested."),
    "known_reads": ("ps_reads_known_total", "Values requested that the worker had already."),
    "rows_read": ("ps_rows_read_total", "Rows of tables read."),
    "rows_written": ("ps_rows_written_total", "Rows of tables written."),
    "bytes": ("ps_variable_bytes", "Size of the variables."),
    "slot_bytes": ("ps_slot_bytes", "Size of the state of optimizers."),
    "parts": ("ps_parts", "Variables, or parts of them."),
    "optimizers": ("ps_optimizers", "Optimizers."),
    "clock": ("ps_steps_total", "Steps that the variables have seen."),
    "staleness_count": ("ps_gradients_total", "Gradients whose staleness was measured."),
    "staleness_sum": ("ps_staleness_steps_total", "Steps that they lacked, summed up."),
    "staleness_max": ("ps_staleness_steps_max", "Most steps that one of them lacked."),
    "stale_dropped": ("ps_gradients_dropped_total", "Gradients that were too old."),
    "waiting_gradients": ("ps_gradients_waiting", "Gradients that wait for others."),
    "bytes_received": ("ps_received_bytes_total", "Bytes received."),
    "bytes_sent": ("ps_sent_bytes_total", "Bytes sent."),
    "snapshot_age_s": ("ps_snapshot_age_seconds", "Age of the last snapshot; -1 without one."),
    "snapshot_seconds": ("ps_snapshot_duration_seconds", "How long the last snapshot took."),
    "snapshot_bytes": ("ps_snapshot_bytes", "Size of the last snapshot."),
    "snapshot_failures": ("ps_snapshot_failures_total", "Snapshots that failed."),
    "mirror_lag": ("ps_mirror_lag", "Changes that the mirror has not confirmed."),
    "mirror_unconfirmed_s": ("ps_mirror_unconfirmed_seconds", "Age of the oldest such change."),
    "replica_bytes": ("ps_replica_bytes", "Size of the copies of other servers."),
}
_PROCESS = {
    "rss_bytes": ("process_resident_memory_bytes", "Memory of the process."),
    "max_rss_bytes": ("process_resident_memory_max_bytes", "The most memory it has had."),
    "cpu_s": ("process_cpu_seconds_total", "Processor time."),
    "threads": ("process_threads", "Threads."),
    "open_files": ("process_open_files", "Open descriptors."),
}
_OF_TASK = {
    "steps": ("steps_total", "Runs of the training step."),
    "queued": ("closures_queued", "Closures that wait for a worker."),
    "in_flight": ("closures_in_flight", "Closures that are assigned to workers."),
    "mean_staleness": ("staleness_steps_mean", "Mean number of steps that gradients lacked."),
    "max_staleness": ("staleness_steps_max", "Most steps that a gradient lacked."),
    "started_s": ("task_start_time_seconds", "When the task started, in Unix time."),
}


class MetricsServer:
    """Serves the metrics of this process, until it is closed.

    Attributes:
      address: Where, as "host:port".

    >>> import replicax as rx
    >>> server = rx.profiler.serve_metrics(port=0)
    >>> server.address.startswith("127.0.0.1:")
    True
    >>> server.close()
    """

    def __init__(self, statuses: Statuses, host: str, port: int) -> None:
        registry = prometheus.CollectorRegistry()
        registry.register(_Collector(statuses))
        self._server, self._thread = _listen(registry, host, port)
        self.address = f"{host}:{self._server.server_port}"

    def __repr__(self) -> str:
        return f"<MetricsServer at http://{self.address}/metrics>"

    def close(self) -> None:
        """Stops serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)


class _Current:
    server: MetricsServer | None = None
    lock = threading.Lock()


def serve_if_asked(statuses: Statuses) -> None:
    """Serves metrics at the address of REPLICAX_METRICS, if it is set, once per process.

    A task runs without metrics too: an address that cannot be used is logged.
    """
    asked = settings.REPLICAX_METRICS.read("")
    if not asked:
        return
    with _Current.lock:
        if _Current.server is not None:
            return
        try:
            _Current.server = MetricsServer(statuses, *_parsed(asked))
        except (OSError, errors.DistributeError) as error:
            _log.warning("No metrics are served at %s: %s", asked, error)
        else:
            _log.info("Metrics are served at http://%s/metrics", _Current.server.address)


def current_address() -> str:
    """Returns the address of the metrics of this process; empty if it serves none."""
    server = _Current.server
    return "" if server is None else server.address


def text(statuses: Statuses) -> str:
    """Returns the metrics as Prometheus reads them."""
    registry = prometheus.CollectorRegistry()
    registry.register(_Collector(statuses))
    return prometheus.generate_latest(registry).decode()


def of_process() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields the status of this process as that of a task, for programs without a cluster."""
    yield "", "program", {"process": process_facts.measure(), **progress.snapshot()}


class _Collector:
    """Computes the metrics whenever they are asked for."""

    def __init__(self, statuses: Statuses) -> None:
        self._statuses = statuses

    def describe(self) -> Sequence[Metric]:
        """Returns nothing: metrics are not computed when the collector is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Returns all metrics."""
        found: dict[str, Metric] = {}
        for job, task, status in self._statuses():
            for name, about, labels, value in _samples(status):
                metric = found.get(name)
                if metric is None:
                    metric = found[name] = _family(name, about, ["job", "task", *labels])
                metric.add_metric([job, task, *labels.values()], value)  # type: ignore[attr-defined]
        return found.values()


def _family(name: str, about: str, labels: Sequence[str]) -> Metric:
    if name.endswith("_total"):
        return prometheus_core.CounterMetricFamily(name, about, labels=labels)
    return prometheus_core.GaugeMetricFamily(name, about, labels=labels)


def _samples(status: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, str], float]]:
    """Yields name, help, labels and value of each metric of a task."""
    tables = (
        (_OF_TASK, status),
        (_PROCESS, status.get("process", {})),
        (_COUNTERS, status.get("counters", {})),
    )
    for table, values in tables:
        for key, (name, about) in table.items():
            value = values.get(key)
            if isinstance(value, int | float):
                yield f"replicax_{name}", about, {}, value
    for program, count in status.get("runs", {}).items():
        about = "Runs of a compiled program."
        yield "replicax_program_runs_total", about, {"program": program}, count
    for name, logged in status.get("values", {}).items():
        about = "The newest value that the program has logged."
        yield "replicax_logged_value", about, {"name": name}, logged["value"]
    for other in status.get("tasks", ()):
        if other.get("role") == "worker" and "num_restarts" in other:
            about = "How often a worker was lost."
            labels = {"worker": str(other["task"])}
            yield "replicax_worker_restarts_total", about, labels, other["num_restarts"]


def _listen(registry: Any, host: str, port: int) -> tuple[Any, threading.Thread]:
    last = port + _NUM_PORTS - 1 if port else 0
    for tried in range(port, last):
        with contextlib.suppress(OSError):
            return prometheus.start_http_server(tried, host, registry)
    return prometheus.start_http_server(last, host, registry)


def _parsed(address: str) -> tuple[str, int]:
    """Returns host and port of "host:port", "port" or "on"."""
    host, _, port = address.rpartition(":")
    if address == "on":
        return HOST, PORT
    number = settings.as_index(port)
    if number is None or number > 65535:
        raise errors.InvalidArgumentError(
            f"The environment variable {settings.REPLICAX_METRICS} must be 'host:port', a port, or "
            "'on'",
            f"it is {address!r}",
            "Write 127.0.0.1:9400, for example.",
        )
    return host or HOST, number
