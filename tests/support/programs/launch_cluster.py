"""Starts a local cluster, prints the processes it consists of, and waits to be ended."""

from __future__ import annotations

import json
import signal

import replicax.testing

if __name__ == "__main__":
    with replicax.testing.LocalCluster(workers=1, ps=1) as cluster:
        pids = [cluster.pid("ps", 0), cluster.pid("worker", 0)]
        print(json.dumps({"pids": pids, "directory": str(cluster.directory)}), flush=True)
        while True:
            signal.pause()
