"""Saves and restores a table on parameter servers; prints the peak memory of the coordinator.

Run as `python checkpoint_table.py DIR MEGABYTES`; 4096 is the form of the reliability report.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import replicax as rx

directory, megabytes = Path(sys.argv[1]), int(sys.argv[2])
WIDTH = 256
rows = (megabytes << 20) // (4 * WIDTH)


def peak() -> int:
    """Returns the peak of this program, in MB; `ru_maxrss` includes the process that forked it."""
    status = Path("/proc/self/status").read_text()
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kilobytes) >> 10


def main() -> None:
    with rx.testing.LocalCluster(workers=1, ps=2) as cluster:
        shards = rx.experimental.partitioners.FixedShardsPartitioner(2)
        strategy = rx.ParameterServerStrategy(cluster.resolver, variable_partitioner=shards)
        with strategy.scope():
            table = rx.Variable(lambda: jnp.ones((rows, WIDTH)), name="table")
        # Rows of both servers that tell the saved value from a later one.
        some = np.array([0, 1, rows // 2, rows - 1])
        marks = jnp.arange(some.size * WIDTH, dtype=jnp.float32).reshape(some.size, WIDTH)
        table.scatter_update(rx.IndexedSlices(marks, some))
        before = peak()
        checkpoint = rx.train.Checkpoint(table=table)
        start = time.perf_counter()
        path = Path(checkpoint.write(directory / "one"))
        saved_s = time.perf_counter() - start
        table.scatter_update(rx.IndexedSlices(marks * 0 - 1, some))
        start = time.perf_counter()
        checkpoint.restore(path).assert_consumed()
        restored_s = time.perf_counter() - start
        found = np.asarray(rx.nn.embedding_lookup(table, some))
        strategy.close()
    size = sum(file.stat().st_size for file in path.iterdir())
    report = {
        "megabytes": megabytes,
        "is_restored": bool(np.array_equal(found, marks)),
        "bytes_on_disk": size,
        "peak_before_mb": before,
        "peak_mb": peak(),
        "save_s": saved_s,
        "restore_s": restored_s,
    }
    print(json.dumps(report))


main()
