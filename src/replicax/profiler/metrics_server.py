"""Metrics of this process for Prometheus."""

from __future__ import annotations

from replicax.observe import endpoint, metrics
from replicax.observe.metrics import MetricsServer


def serve_metrics(port: int = metrics.PORT, host: str = metrics.HOST) -> MetricsServer:
    """Serves the metrics of the tasks of this process at `http://host:port/metrics`.

    Tasks of other processes serve theirs if REPLICAX_METRICS is set for them. The metrics can be
    read by all who reach the address: keep the default, and let a proxy with a password serve them
    to other hosts.

    Args:
      port: The first port to try, up to 100 are; 0 for any free one.
      host: The address of this machine to listen at; by default not reachable from others.

    Returns:
      The server, which has the address that was taken, to be closed.

    Raises:
      MissingDependencyError: The package prometheus-client is not installed.
      OSError: No port is free.

    Example:
      >>> import urllib.request
      >>> import replicax as rx
      >>> server = rx.profiler.serve_metrics(port=0)
      >>> with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as reply:
      ...     b"replicax_process_cpu_seconds_total" in reply.read()
      True
      >>> server.close()
    """
    return MetricsServer(endpoint.statuses, host, port)
