"""What a coordinator tells those who observe it: the whole cluster, as far as it knows it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from replicax.coordinator.engine import Engine
from replicax.coordinator.outbox import Cluster
from replicax.coordinator.scheduling.status import Status
from replicax.coordinator.wait_report import WaitReport
from replicax.foundation import thread_stacks
from replicax.observe import endpoint, job_directory, program
from replicax.protocol.tasks import Task

# The seconds that a request waits for the lock of the engine, and for the stacks of another task.
_LOCK_S = 0.3
_STACKS_S = 1.5


def open_endpoint(engine: Engine, cluster: Cluster) -> None:
    """Makes a coordinator observable until its engine is closed."""
    program.close()
    addresses = [location.address for location in (*cluster.workers, *cluster.servers)]
    found = endpoint.open_for(
        str(cluster.me),
        functools.partial(job_directory.of_cluster, addresses),
        functools.partial(_status, engine, cluster),
        {"stack": functools.partial(_stack, engine, str(cluster.me))},
    )
    if found is not None:
        engine.add_close_callback(functools.partial(found.close, 0.0))


def _status(engine: Engine, cluster: Cluster) -> dict[str, object]:
    found = engine.observe(_LOCK_S)
    if found is None:
        state = f"its lock was held for {_LOCK_S:g} s"
        return {"role": "coordinator", "state": state, "job": cluster.job, "tasks": []}
    return {"role": "coordinator", "job": cluster.job, "epoch": cluster.epoch, **describe(*found)}


def describe(status: Status, report: WaitReport) -> dict[str, object]:
    """Returns the status of a cluster as plain data."""
    is_open = bool(status.num_queued or status.num_running)
    return {
        "state": "running" if is_open else "idle",
        "queued": status.num_queued,
        "in_flight": status.num_running,
        "counters": {"closures": status.num_finished},
        "mean_staleness": status.mean_staleness,
        "max_staleness": status.max_staleness,
        "waits_for": list(report.lines),
        "tasks": [{**dataclasses.asdict(worker), "role": "worker"} for worker in status.workers]
        + [
            {**dataclasses.asdict(server), "role": "ps", "counters": dict(server.counters)}
            for server in status.servers
        ],
    }


def _stack(engine: Engine, me: str, task: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Returns the stacks of this process, or of a task that may be on another host."""
    wanted = arguments.get("task") or me
    if wanted == me:
        return {"text": thread_stacks.text()}
    return {"text": engine.request_stacks(Task.parse(str(wanted)), _STACKS_S)}
