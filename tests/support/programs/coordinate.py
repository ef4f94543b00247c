"""Coordinates a cluster until it is killed: makes a variable, runs a closure, says so, and waits.

The arguments: the cluster as JSON, the directory of its keys or "", the name of the job or "".
"""

from __future__ import annotations

import json
import sys
import time

import replicax as rx

cluster, keys, job = json.loads(sys.argv[1]), sys.argv[2] or None, sys.argv[3] or None
resolver = rx.cluster_resolver.SimpleClusterResolver(
    rx.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="tcp" if keys else None
)
strategy = rx.ParameterServerStrategy(resolver, keys=keys, job=job)
coordinator = rx.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    variable = rx.Variable(1.0, name="variable")
coordinator.schedule(lambda: variable.assign_add(1.0))
coordinator.join(timeout=60)
print("coordinates", flush=True)
for _ in sys.stdin:
    try:
        print(float(variable), flush=True)
    except rx.errors.FencedError:
        print("fenced", flush=True)
    time.sleep(0.01)
