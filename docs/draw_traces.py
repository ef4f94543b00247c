"""Records and draws the traces of docs/guides/profiling.md: `python docs/draw_traces.py`."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import replicax as rx

DOCS = Path(__file__).parent


def draw_parameter_servers(folder: Path) -> None:
    """Draws some closures on two parameter servers and two workers."""
    with rx.testing.LocalCluster(workers=2, ps=2) as cluster:
        strategy = rx.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            weights = [rx.Variable(jnp.full((64, 64), 0.01)) for _ in range(4)]

        @rx.function
        def step() -> None:
            def loss() -> Any:
                hidden = jnp.ones((64, 64))
                for weight in weights:
                    hidden = jnp.maximum(hidden @ weight, 0.0)
                return jnp.mean(hidden * hidden)

            for weight, gradient in zip(weights, rx.grad(loss, weights)(), strict=True):
                weight.assign_sub(0.01 * gradient)

        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join()
            with rx.profiler.trace(folder) as trace:
                for _ in range(100):
                    coordinator.schedule(step)
                coordinator.join()
        strategy.close()
    assert trace.path is not None
    title = "Two parameter servers and two workers"
    picture = DOCS / "trace_parameter_servers.png"
    rx.profiler.draw(trace.path, picture, title=title, start_s=0.038, seconds=0.012)


def train(marker: str, num_steps: int) -> None:
    """Trains on all workers; worker 1 is killed once, in the middle."""
    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.ones((64, 64)), aggregation=rx.VariableAggregation.MEAN)
    data = rx.data.Dataset.from_tensors(np.ones(64, np.float32)).repeat().batch(32)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    @rx.function
    def step(iterator: Any) -> None:
        def replica_step(x: Any) -> None:
            weights.assign_sub(0.01 * rx.grad(lambda: jnp.mean((x @ weights) ** 2), weights)())

        strategy.run(replica_step, args=(next(iterator),))

    for number in range(num_steps):
        step(iterator)
        is_victim = number == num_steps // 2 and strategy.cluster_resolver.task_id == 1
        if is_victim and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    weights.numpy()


def draw_sync_group(folder: Path) -> None:
    """Draws a sync group that loses a worker, and is restarted."""
    os.environ["REPLICAX_TRACE"] = str(folder)
    try:
        with rx.testing.LocalCluster(workers=2, ps=0) as cluster:
            cluster.run(train, args=(str(folder / "killed"), 2_000), max_restarts=1)
    finally:
        del os.environ["REPLICAX_TRACE"]
    title = "A sync group of two workers: worker 1 is killed, and the group restarts"
    rx.profiler.draw(rx.profiler.merge(folder), DOCS / "trace_sync_group.png", title=title)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        draw_parameter_servers(Path(temporary))
        draw_sync_group(Path(temporary) / "group")
