"""Steps per second with 2 parameter servers and 2 workers, each a process of its own.

Cases: `assign_add` of a scalar; an MLP `HxLxB` of L layers of HxH weights on batches of B, with
plain SGD by `assign_sub`; `embedding` looks 4,096 rows of 64 numbers up in a table of 1,000,000
rows and changes them. Contestants: this project over ipc, as it is for a cluster on one machine;
with workers that pull ahead; over TCP with TLS 1.3; and tf.distribute with gRPC on loopback.
Closures come in bursts as long as the peer's own benchmark has them; the best burst counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.harness import Measured, Row, Settings, at_least, at_most, compete, main

CASES = ("assign_add", "mlp 64x4x64", "mlp 512x4x64", "embedding")
# How many closures a burst has, and how many times faster than the peer it has to be.
BURSTS = {"assign_add": 1000, "mlp 64x4x64": 400, "mlp 512x4x64": 100, "embedding": 200}
TARGETS = {
    "ours": {"assign_add": 20.0, "mlp 64x4x64": 6.0, "mlp 512x4x64": 3.0, "embedding": 4.5},
    "ahead": {"assign_add": 20.0, "mlp 64x4x64": 7.0, "mlp 512x4x64": 3.3, "embedding": 5.0},
    "tls": {"mlp 64x4x64": 4.5, "mlp 512x4x64": 1.8, "embedding": 2.5},
}
ROWS, WIDTH, NUM_IDS = 1_000_000, 64, 4096
NUM_SERVERS, NUM_WORKERS = 2, 2


def best_burst(case: str, schedule: Callable[[], Any], join: Callable[[], Any]) -> float:
    """Returns microseconds per closure, in the best of several bursts."""
    for _ in range(20):
        schedule()
    join()
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(BURSTS[case]):
            schedule()
        join()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / BURSTS[case]


def ours(case: str, seconds: float, protocol: str = "ipc", **options: Any) -> dict[str, float]:
    import replicax as rx

    del seconds
    with rx.testing.LocalCluster(
        workers=NUM_WORKERS,
        ps=NUM_SERVERS,
        protocol=protocol,  # type: ignore[arg-type]
    ) as cluster:
        strategy = rx.ParameterServerStrategy(
            cluster.resolver,
            rx.experimental.partitioners.MinSizePartitioner(1 << 20, NUM_SERVERS),
            keys=cluster.keys_directory,
            **options,
        )
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            step, args = our_step(case, strategy, coordinator)
            found = best_burst(
                case, lambda: coordinator.schedule(step, args=args), coordinator.join
            )
            bytes_per_row = our_traffic(case, coordinator, step, args)
        strategy.close()
    return {"us": found, **bytes_per_row}


def our_step(case: str, strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...]]:
    if case == "assign_add":
        return our_count(strategy), ()
    if case == "embedding":
        return our_lookup(strategy), ()
    width, depth, batch = map(int, case.split()[1].split("x"))
    return our_mlp(strategy, coordinator, width, depth, batch)


def our_count(strategy: Any) -> Any:
    import replicax as rx

    with strategy.scope():
        counter = rx.Variable(0.0)

    @rx.function
    def count() -> None:
        counter.assign_add(1.0)

    return count


def our_lookup(strategy: Any) -> Any:
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    with strategy.scope():
        table = rx.Variable(lambda: jnp.zeros((ROWS, WIDTH)))
    ids = np.random.default_rng(0).integers(0, ROWS, NUM_IDS)

    @rx.function
    def lookup_step() -> None:
        def loss() -> Any:
            return jnp.mean((rx.nn.embedding_lookup(table, ids) - 1.0) ** 2)

        rows = rx.grad(loss, table)()
        table.scatter_sub(rows.map_values(lambda values: 0.1 * values))

    return lookup_step


def our_mlp(
    strategy: Any, coordinator: Any, width: int, depth: int, batch: int
) -> tuple[Any, tuple[Any, ...]]:
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    with strategy.scope():
        weights = [rx.Variable(jnp.full((width, width), 0.01)) for _ in range(depth)]

    def dataset_fn() -> Any:
        return rx.data.Dataset.from_tensors(np.ones((batch, width), np.float32)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))

    @rx.function
    def step(iterator: Any) -> None:
        def replica_step(inputs: Any) -> None:
            def loss() -> Any:
                hidden = inputs
                for weight in weights:
                    hidden = jnp.maximum(hidden @ weight, 0.0)
                return jnp.mean(hidden * hidden)

            for weight, gradient in zip(weights, rx.grad(loss, weights)(), strict=True):
                weight.assign_sub(0.01 * gradient)

        strategy.run(replica_step, args=(next(iterator),))

    return step, (iterator,)


def our_traffic(case: str, coordinator: Any, step: Any, args: Any) -> dict[str, float]:
    """Returns bytes on the wire per byte of the rows touched, in each direction."""
    if case != "embedding":
        return {}

    def totals() -> tuple[float, float]:
        coordinator.join()
        # Counters arrive with heartbeats, one per second.
        time.sleep(2.5)
        servers = coordinator.status().servers
        received = sum(server.counters["bytes_received"] for server in servers)
        return received, sum(server.counters["bytes_sent"] for server in servers)

    num_steps = 50
    before = totals()
    for _ in range(num_steps):
        coordinator.schedule(step, args=args)
    after = totals()
    touched = num_steps * NUM_IDS * WIDTH * 4
    return {
        "in_ratio": (after[0] - before[0]) / touched,
        "out_ratio": (after[1] - before[1]) / touched,
    }


def ahead(case: str, seconds: float) -> dict[str, float]:
    return ours(case, seconds, pull_ahead=True)


def tls(case: str, seconds: float) -> dict[str, float]:
    return ours(case, seconds, "tcp")


# The peer.


@contextlib.contextmanager
def tf_cluster() -> Iterator[Any]:
    """Starts the servers of tf.distribute; yields its resolver."""
    import socket

    import tensorflow as tf

    def free() -> str:
        with socket.socket() as sock:
            sock.bind(("localhost", 0))
            return f"localhost:{sock.getsockname()[1]}"

    spec = {
        "chief": [free()],
        "ps": [free() for _ in range(NUM_SERVERS)],
        "worker": [free() for _ in range(NUM_WORKERS)],
    }
    serve = (
        "import json, os, sys, tensorflow as tf\n"
        "spec, job, index = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])\n"
        "tf.distribute.Server(tf.train.ClusterSpec(spec), job_name=job, task_index=index,"
        " protocol='grpc').join()"
    )
    with tempfile.TemporaryFile() as log:
        tasks = [
            subprocess.Popen(
                [sys.executable, "-c", serve, json.dumps(spec), job, str(i)], stderr=log
            )
            for job in ("ps", "worker")
            for i in range(len(spec[job]))
        ]
        try:
            time.sleep(6)
            yield tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(spec), rpc_layer="grpc"
            )
        finally:
            for task in tasks:
                task.kill()
                task.wait()


def tensorflow(case: str, seconds: float) -> dict[str, float]:
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    import tensorflow as tf

    del seconds
    with tf_cluster() as resolver:
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        step, args = tf_step(case, strategy, coordinator)
        found = best_burst(case, lambda: coordinator.schedule(step, args=args), coordinator.join)
        print(json.dumps({"contestant": "tensorflow", "case": case, "us": found}), flush=True)
    # Its threads would wait for the servers for ever.
    os._exit(0)


def tf_step(case: str, strategy: Any, coordinator: Any) -> tuple[Any, tuple[Any, ...]]:
    if case == "assign_add":
        return tf_count(strategy), ()
    if case == "embedding":
        return tf_lookup(strategy), ()
    width, depth, batch = map(int, case.split()[1].split("x"))
    return tf_mlp(strategy, coordinator, width, depth, batch)


def tf_count(strategy: Any) -> Any:
    import tensorflow as tf

    with strategy.scope():
        counter = tf.Variable(0.0)

    @tf.function
    def count() -> None:
        counter.assign_add(1.0)

    return count


def tf_lookup(strategy: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    per_server = ROWS // NUM_SERVERS
    with strategy.scope():
        tables = [tf.Variable(tf.zeros([per_server, WIDTH])) for _ in range(NUM_SERVERS)]
    shape = (NUM_SERVERS, NUM_IDS // NUM_SERVERS)
    ids = np.random.default_rng(0).integers(0, per_server, shape)

    @tf.function
    def lookup_step() -> None:
        with tf.GradientTape() as tape:
            pieces = [tf.gather(t, tf.constant(i)) for t, i in zip(tables, ids, strict=True)]
            loss = tf.reduce_mean((tf.concat(pieces, 0) - 1.0) ** 2)
        for table, rows in zip(tables, tape.gradient(loss, tables), strict=True):
            table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))

    return lookup_step


def tf_mlp(
    strategy: Any, coordinator: Any, width: int, depth: int, batch: int
) -> tuple[Any, tuple[Any, ...]]:
    import tensorflow as tf

    with strategy.scope():
        weights = [tf.Variable(tf.fill([width, width], 0.01)) for _ in range(depth)]
    data = coordinator.create_per_worker_dataset(
        lambda: tf.data.Dataset.from_tensors(tf.ones([batch, width])).repeat()
    )

    @tf.function
    def step(iterator: Any) -> None:
        def replica_step(inputs: Any) -> None:
            with tf.GradientTape() as tape:
                hidden = inputs
                for weight in weights:
                    hidden = tf.nn.relu(hidden @ weight)
                loss = tf.reduce_mean(hidden * hidden)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(0.01 * gradient)

        strategy.run(replica_step, args=(next(iterator),))

    return step, (iter(data),)


PEERS = ("tensorflow",)
CONTESTANTS = {"ours": ours, "ahead": ahead, "tls": tls, "tensorflow": tensorflow}


def run(settings: Settings, report: Callable[[str], None]) -> tuple[Measured, list[Row]]:
    """Measures everything; returns the numbers and the lines of the table."""
    names = ["ours", "ahead", "tls", *(["tensorflow"] if "tensorflow" in settings.peers else [])]
    found = compete(__name__, names, CASES, settings, report)
    rows = []
    for name, what in (
        ("ours", "closures/s, ours / tf.distribute"),
        ("ahead", "… pulling ahead"),
        ("tls", "… over TCP with TLS 1.3"),
    ):
        for case in CASES:
            per_second = 1e6 / found[name, case]["us"]
            texts, ratio, outcome = (f"{per_second:,.0f}/s", ""), None, ("", None)
            if "tensorflow" in settings.peers:
                theirs = 1e6 / found["tensorflow", case]["us"]
                texts, ratio = (texts[0], f"{theirs:,.0f}/s"), per_second / theirs
                target = TARGETS[name].get(case)
                outcome = outcome if target is None else at_least(target, ratio)
            rows.append(Row(what, case, *texts, ratio, *outcome))
    for way in ("in", "out"):
        ratio = found["ours", "embedding"][f"{way}_ratio"]
        outcome = at_most(1.2, ratio)
        rows.append(
            Row("bytes on the wire / of rows", f"embedding, {way}", "", "", ratio, *outcome)
        )
    return found, rows


if __name__ == "__main__":
    main(CONTESTANTS)
